// Chapter 3: its wave on 25 rows, smoothed in one or more rounds: bias and noise.
(given => {
  const n = 25, x = Array.from({length: n}, (_, i) => i / (n - 1));
  const truth = x.map(t => Math.sin(6 * t));
  const across = t => 30 + 540 * t, down = y => 120 - 62 * y;
  return {
    data: {x, truth},
    compute: v => {
      const S = smoother(x, v.bandwidth, v.lines), y = truth.map((t, i) => t + v.noise * given.draws[i]);
      const left = power(S.map((row, i) => row.map((t, j) => (i === j) - t)), v.rounds);  // (I − S)^rounds
      const F = y.map((t, i) => t - dot(left[i], y)), bias = mean(times(left, truth).map(t => t * t));
      const kept = left.flatMap((row, i) => row.map((t, j) => ((i === j) - t) ** 2));
      const noise = v.noise ** 2 * kept.reduce((sum, t) => sum + t, 0) / n;
      return {F, y, bias, noise, risk: bias + noise};
    },
    draw: ({F, y}) =>
      path(x.map((t, i) => [across(t), down(truth[i])]), "currentColor", 1.5, 'stroke-dasharray="3 4"')
      + x.map((t, i) => circle(across(t), down(y[i]), 3, "currentColor", 'opacity=".55"')).join("")
      + path(x.map((t, i) => [across(t), down(F[i])]), given.second, 3),
    tell: ({bias, noise, risk}, v) => `${v.rounds} round${v.rounds > 1 ? "s" : ""} of ${v.lines ? "local lines" : "averages"} at bandwidth ${v.bandwidth.toFixed(3)}: `
      + `squared bias ${round(bias, 4)} + variance ${round(noise, 4)} = risk ${round(risk, 4)}.`,
    label: {bandwidth: t => t.toFixed(3), rounds: t => t},
  };
})
