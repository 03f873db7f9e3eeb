// Chapter 3: its wave on 25 rows, smoothed in one or more rounds; and the risk against the bandwidth.
(given => {
  const n = 25, x = Array.from({length: n}, (_, i) => i / (n - 1));
  const truth = x.map(t => Math.sin(6 * t));
  const grid = Array.from({length: 37}, (_, k) => k < 27 ? (20 + 5 * k) / 1000 : (150 + 25 * (k - 26)) / 1000);
  const across = t => 40 + 235 * t, down = y => 120 - 62 * y;
  const right = h => 345 + 240 * Math.log(h / 0.02) / Math.log(20);
  // what the rounds leave of the residual, (I − S)^rounds, its squared bias, and its variance for noise 1
  const parts = (h, lines, rounds) => {
    const S = smoother(x, h, lines);
    const left = power(S.map((row, i) => row.map((t, j) => (i === j) - t)), rounds);
    const spread = left.flatMap((row, i) => row.map((t, j) => ((i === j) - t) ** 2));
    return {left, bias: mean(times(left, truth).map(t => t * t)), spread: n * mean(spread)};
  };
  const known = {};  // of each number of rounds, once
  const risks = (v, rounds) => {
    known[[v.lines, rounds]] ??= grid.map(h => parts(h, v.lines, rounds));
    return known[[v.lines, rounds]].map(({bias, spread}) => bias + v.noise ** 2 * spread);
  };
  const least = all => [grid[all.indexOf(Math.min(...all))], Math.min(...all)];
  return {
    data: {x, truth},
    compute: v => {
      const y = truth.map((t, i) => t + v.noise * given.draws[i]);
      const {left, bias, spread} = parts(v.bandwidth, v.lines, v.rounds);
      const F = y.map((t, i) => t - dot(left[i], y)), noise = v.noise ** 2 * spread;
      const one = risks(v, 1), all = risks(v, v.rounds);
      return {F, y, bias, noise, risk: bias + noise, grid, one, all, best: [least(one), least(all)]};
    },
    draw: ({F, y, risk, one, all, best}, v) => {
      const top = Math.max(4 * best[0][1], 0.01), height = r => 215 - 185 * r / top;
      const step = [1, 2, 4, 10, 20, 40, 100].map(s => s / 200).find(s => top <= 5 * s);
      const ticks = Array.from({length: 6}, (_, k) => Number((k * step).toFixed(3))).filter(r => r <= top);
      const curve = (risks, colour) => path(grid.map((h, k) => [right(h), height(risks[k])]), colour);
      const mark = ([h, r], colour) => line(right(h), height(r), right(h), 215, colour, 1.5, 'stroke-dasharray="2 3"');
      return line(40, 215, 275, 215, "currentColor", 1) + line(40, 30, 40, 215, "currentColor", 1)
        + [0, 0.5, 1].map(t => text(across(t), 232, t, "middle")).join("")
        + [-1, 0, 1].map(t => text(34, down(t) + 5, String(t).replace("-", "−"), "end")).join("")
        + path(x.map((t, i) => [across(t), down(truth[i])]), "currentColor", 1.5, 'stroke-dasharray="3 4"')
        + x.map((t, i) => circle(across(t), down(y[i]), 3, "currentColor", 'opacity=".55"')).join("")
        + path(x.map((t, i) => [across(t), down(F[i])]), given.second, 3)
        + line(345, 215, 585, 215, "currentColor", 1) + line(345, 30, 345, 215, "currentColor", 1)
        + [0.02, 0.05, 0.1, 0.2, 0.4].map(h => text(right(h), 232, h, "middle")).join("")
        + ticks.map(r => text(340, height(r) + (r ? 5 : 0), r, "end")).join("")
        + text(345, 20, "risk against bandwidth")
        + '<clipPath id="smooth-risks"><rect x="345" y="28" width="248" height="190"/></clipPath>'
        + '<g clip-path="url(#smooth-risks)">'
        + curve(one, given.first) + mark(best[0], given.first)
        + (v.rounds > 1 ? curve(all, given.second) + mark(best[1], given.second) : "")
        + line(right(v.bandwidth), 30, right(v.bandwidth), 215, "currentColor", 1)
        + circle(right(v.bandwidth), height(risk), 6, given.second) + "</g>";
    },
    tell: ({bias, noise, risk, best}, v) => {
      const rounds = m => `${m} round${m > 1 ? "s" : ""}`, place = ([h, r]) => `${round(r, 4)} at ${h.toFixed(3)}`;
      return `${rounds(v.rounds)} of ${v.lines ? "local lines" : "averages"} at bandwidth ${v.bandwidth.toFixed(3)}: `
        + `squared bias ${round(bias, 4)} + variance ${round(noise, 4)} = risk ${round(risk, 4)}. `
        + `Least risk: 1 round ${place(best[0])}${v.rounds > 1 ? `, ${rounds(v.rounds)} ${place(best[1])}` : ""}.`;
    },
    label: {bandwidth: t => t.toFixed(3), rounds: t => t},
  };
})
