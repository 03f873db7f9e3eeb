// Chapter 5: its wave on 25 rows and a boosted smoother: the fit after M rounds, and the risk against the number of rounds.
// The slider stops at 50 numbers of rounds up to 1000; the stop next to the best number of all is put on it.
(given => {
  const n = 25, x = Array.from({length: n}, (_, i) => i / (n - 1));
  const truth = x.map(t => Math.sin(6 * t)), most = 1000, stops = [...new Set(
    Array.from({length: 61}, (_, k) => Math.round(10 ** (k / 20))))];
  const stepOf = v => smoother(x, v.bandwidth, false).map(
    (row, i) => row.map((t, j) => (i === j) - v.shrinkage * t));
  const known = {};  // of each smoother and shrinkage, once: squared bias, and variance for noise 1, after each round
  const rounds = v => known[[v.bandwidth, v.shrinkage]] ??= (() => {
    const step = stepOf(v), all = [];
    for (let left = step; all.length < most; left = matrix(left, step)) {  // left = (I − νS)^m
      let kept = 0;
      left.forEach((row, i) => row.forEach((t, j) => { kept += ((i === j) - t) ** 2; }));
      all.push({bias: mean(times(left, truth).map(t => t * t)), spread: kept / n});
    }
    return all;
  })();
  const across = t => 15 + 265 * t, down = y => 120 - 65 * y;
  const right = m => 335 + 82 * Math.log10(m);
  return {
    data: {x, truth},
    compute: v => {
      const y = truth.map((t, i) => t + v.noise * given.draws[i]);
      const every = rounds(v).map(({bias, spread}, i) => [i + 1, bias + v.noise ** 2 * spread]);
      const best = every.reduce((a, b) => (b[1] < a[1] ? b : a));
      const apart = m => Math.abs(Math.log(m / best[0]));
      const next = stops.reduce((a, b) => (apart(b) < apart(a) ? b : a));
      const risks = stops.map(m => (m === next ? best : every[m - 1]));
      const [M, risk] = risks[v.rounds], left = power(stepOf(v), M);
      return {y, F: y.map((t, i) => t - dot(left[i], y)), M, risks, risk, best};
    },
    draw: ({y, F, M, risk, risks, best}) => {
      const top = Math.max(...risks.map(r => r[1])), height = r => 215 - 175 * r / top;
      return path(x.map((t, i) => [across(t), down(truth[i])]), "currentColor", 1.5, 'stroke-dasharray="3 4"')
        + x.map((t, i) => circle(across(t), down(y[i]), 3, "currentColor", 'opacity=".55"')).join("")
        + path(x.map((t, i) => [across(t), down(F[i])]), given.second, 3)
        + line(335, 215, 585, 215, "currentColor", 1) + line(335, 30, 335, 215, "currentColor", 1)
        + [1, 10, 100, 1000].map(m => text(right(m), 232, m, "middle")).join("")
        + text(335, 22, "risk against rounds") + path(risks.map(([m, r]) => [right(m), height(r)]), given.first)
        + line(right(best[0]), height(best[1]), right(best[0]), 215, given.first, 1, 'stroke-dasharray="2 3"')
        + circle(right(M), height(risk), 6, given.second);
    },
    tell: ({M, risk, best}, v) => `Shrinkage ${round(v.shrinkage, 2)}: after ${M} round${M > 1 ? "s" : ""} the risk is ${round(risk, 4)}; `
      + (best[0] < most ? `its least, ${round(best[1], 4)}, comes at ${best[0]} round${best[0] > 1 ? "s" : ""}.`
        : `it falls up to ${most} rounds.`),
    label: {rounds: (_, {M}) => M, bandwidth: t => t.toFixed(3)},
  };
})
