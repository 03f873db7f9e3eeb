// Chapter 25: softmax attention over a stream whose mean jumps, with scores that rise by a slope from token to token.
(given => {
  const n = 400, random = uniforms(7), mean = t => t > 132 && t < 267 ? -1 : 1;
  const values = Array.from({length: n}, (_, t) => mean(t) + 0.8 * normal(random));
  const across = t => 10 + 1.45 * t, down = y => 115 - 42 * y;
  const slope = k => k ? 0.004 * 100 ** ((k - 1) / 39) : 0;
  return {
    data: {values},
    compute: v => {
      let F = 0, Z = 0;
      const estimate = values.map(y => {
        Z = Z * Math.exp(-slope(v.slope)) + 1;
        return F += (y - F) / Z;
      });
      const error = estimate.reduce((sum, y, t) => sum + (y - mean(t)) ** 2 / n, 0);
      return {slope: slope(v.slope), estimate, error};
    },
    draw: ({estimate}) => values.map((y, t) => circle(across(t), down(y).toFixed(1), 1.6, given.wrong)).join("")
      + path([0, 132, 133, 266, 267, n - 1].map(t => [across(t), down(mean(t))]), "currentColor", 1.5, 'opacity=".6"')
      + path(estimate.map((y, t) => [across(t), down(y)]), given.first, 3),
    tell: ({slope, error}) => `Scores that rise by ${round(slope, 3)} a token: mean squared error ${round(error, 2)}.`,
    label: {slope: k => round(slope(k), 3)},
  };
})
