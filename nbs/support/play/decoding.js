// Chapter 23: what Cactus writes, between the draft's law and the model's, for a budget of δ nats.
(given => {
  const p = [0.42, 0.22, 0.12, 0.1, 0.06, 0.04, 0.03, 0.01], q = [0.22, 0.08, 0.3, 0.05, 0.16, 0.1, 0.04, 0.05];
  const budget = k => k ? 0.002 * 500 ** ((k - 1) / 39) : 0;
  const divergence = h => h.reduce((sum, x, i) => x > 0 ? sum + x * Math.log(x / q[i]) : sum, 0);
  const binary = (g, x) => g * Math.log(g / x) + (g < 1 ? (1 - g) * Math.log((1 - g) / (1 - x)) : 0);
  const lift = (x, delta) => {  // the largest γ with d(γ‖x) ≤ δ
    if (-Math.log(x) <= delta) return 1;
    let low = x, high = 1;
    for (let i = 0; i < 60; i++) {
      const middle = (low + high) / 2;
      if (binary(middle, x) <= delta) low = middle; else high = middle;
    }
    return low;
  };
  const across = i => 22 + 72 * i, down = y => 215 - 440 * y;
  const mark = (i, y, colour) => line(across(i) - 4, down(y), across(i) + 52, down(y), colour, 3);
  return {
    data: {p, q},
    compute: v => {
      const delta = budget(v.delta), law = p.map(() => 0);
      let accepted = 0;
      p.forEach((x, n) => {
        const g = lift(q[n], delta), a = Math.min(1, g / x);
        const lacking = q.map((y, i) => Math.max(0, (i === n ? g : y * (1 - g) / (1 - q[n])) - p[i]));
        const sum = lacking.reduce((s, y) => s + y, 0);
        law[n] += x * a;
        accepted += x * a;
        if (a < 1) lacking.forEach((y, i) => { law[i] += x * (1 - a) * y / sum; });
      });
      return {delta, law, accepted, written: Math.abs(divergence(law)), draft: divergence(p)};
    },
    draw: ({law}) => line(10, 215, 590, 215, "currentColor", 1, 'opacity=".5"')
      + law.map((y, i) => `<rect x="${across(i)}" y="${down(y)}" width="48" height="${440 * y}" fill="${given.second}"/>`
        + mark(i, p[i], given.wrong) + mark(i, q[i], "currentColor")).join(""),
    tell: ({delta, accepted, written, draft}) => `With a budget of ${round(delta, 3)} nats, ${round(100 * accepted, 0)} % of the `
      + `guesses are accepted; what is written is ${round(written, 3)} nats from the model, the draft ${round(draft, 3)}.`,
    label: {delta: k => round(budget(k), 3)},
  };
})
