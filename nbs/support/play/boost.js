// Chapter 5: its wave on 25 rows and a boosted smoother: the fit after M rounds, and the risk against the number of rounds.
(given => {
  const n = 25, x = Array.from({length: n}, (_, i) => i / (n - 1));
  const truth = x.map(t => Math.sin(6 * t)), counts = [...new Set(
    Array.from({length: 61}, (_, k) => Math.round(10 ** (k / 20))))];
  const across = t => 15 + 265 * t, down = y => 120 - 65 * y;
  const right = m => 335 + 82 * Math.log10(m);
  return {
    data: {x, truth},
    compute: v => {
      const S = smoother(x, v.bandwidth, false);
      const y = truth.map((t, i) => t + v.noise * given.draws[i]);
      const M = counts[v.rounds];
      const step = S.map((row, i) => row.map((t, j) => (i === j) - v.shrinkage * t));
      const risks = [];
      let left = x.map((_, i) => x.map((_, j) => +(i === j))), done = 0, F = null;  // left = (I − νS)^m
      for (const m of counts) {
        left = matrix(left, power(step, m - done));
        done = m;
        const bias = mean(times(left, truth).map(t => t * t));
        const kept = left.flatMap((row, i) => row.map((t, j) => ((i === j) - t) ** 2));
        risks.push([m, bias + v.noise ** 2 * kept.reduce((sum, t) => sum + t, 0) / n]);
        if (m === M) F = y.map((t, i) => t - dot(left[i], y));
      }
      const best = risks.reduce((a, b) => (b[1] < a[1] ? b : a));
      return {y, F, M, risks, risk: risks.find(r => r[0] === M)[1], best};
    },
    draw: ({y, F, M, risks, best}) => {
      const top = Math.max(...risks.map(r => r[1])), height = r => 215 - 175 * r / top;
      return path(x.map((t, i) => [across(t), down(truth[i])]), "currentColor", 1.5, 'stroke-dasharray="3 4"')
        + x.map((t, i) => circle(across(t), down(y[i]), 3, "currentColor", 'opacity=".55"')).join("")
        + path(x.map((t, i) => [across(t), down(F[i])]), given.second, 3)
        + line(335, 215, 585, 215, "currentColor", 1) + line(335, 30, 335, 215, "currentColor", 1)
        + [1, 10, 100, 1000].map(m => text(right(m), 232, m, "middle")).join("")
        + text(335, 22, "risk against rounds") + path(risks.map(([m, r]) => [right(m), height(r)]), given.first)
        + line(right(best[0]), height(best[1]), right(best[0]), 215, given.first, 1, 'stroke-dasharray="2 3"')
        + circle(right(M), height(risks.find(r => r[0] === M)[1]), 6, given.second);
    },
    tell: ({M, risk, best}, v) => `Shrinkage ${round(v.shrinkage, 2)}: after ${M} round${M > 1 ? "s" : ""} the risk is ${round(risk, 4)}; `
      + `its least, ${round(best[1], 4)}, comes at ${best[0]} round${best[0] > 1 ? "s" : ""}.`,
    label: {rounds: k => counts[k], bandwidth: t => t.toFixed(3)},
  };
})
