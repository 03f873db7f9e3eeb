// Chapter 17a: one head whose queries look for a key of their own token, and keys mixed with the token before.
(given => {
  const tokens = ["D", "es", "ert", "ification", "is", "D", "es", "ert"], sharp = 5;
  const across = t => 50 + 71 * t, down = w => 125 - 110 * w;
  const same = (t, s) => +(t >= 0 && tokens[t] === tokens[s]);
  return {
    compute: v => {
      const scores = tokens.slice(0, v.token).map((_, t) => sharp * ((1 - v.share) * same(t, v.token - 1) + v.share * same(t - 1, v.token - 1)));
      return {weights: softmax(scores)};
    },
    draw: ({weights}, v) => line(10, 125, 590, 125, "currentColor", 1, 'opacity=".5"')
      + weights.map((w, t) => `<rect x="${across(t) - 18}" y="${down(w)}" width="36" height="${125 - down(w)}" fill="${given.first}"/>`).join("")
      + `<rect x="${across(v.token - 1) - 41}" y="130" width="82" height="28" rx="6" fill="none" stroke="currentColor" stroke-width="2"/>`
      + tokens.map((token, t) => `<g opacity="${t < v.token ? 1 : 0.35}">${text(across(t), 150, token, "middle")}</g>`).join("")
      + tokens.slice(1, v.token).map((_, t) => `<path d="M ${across(t)} 166 q 35 30 66 4" fill="none" stroke="${given.data.colour}" `
        + `stroke-width="3" opacity="${0.1 + 0.9 * v.share}"/>`).join(""),
    tell: ({weights}, v) => {
      const most = weights.indexOf(Math.max(...weights)), own = tokens[v.token - 1];
      const even = Math.max(...weights) < 1.01 * Math.min(...weights);
      return `Token ${v.token}, “${own}”, ` + (even ? "finds no key of its own and attends to all alike."
        : `gives most weight, ${round(weights[most], 2)}, to “${tokens[most]}”, token ${most + 1}.`);
    },
    label: {token: t => tokens[t - 1], share: s => round(s, 2)},
  };
})
