// Chapter 28: a circle, the same circle with its second direction squeezed, and what jitter of the input does to it.
(given => {
  const n = 24, random = uniforms(7), signed = size => size * (2 * random() - 1);
  const truth = Array.from({length: n}, (_, i) => [Math.cos(2 * Math.PI * i / n), Math.sin(2 * Math.PI * i / n)]);
  const moved = truth.map(([x, y]) => [x + signed(0.15), y + signed(0.6)]);
  const centre = points => {
    const middle = [0, 1].map(j => mean(points.map(p => p[j])));
    return points.map(p => p.map((x, j) => x - middle[j]));
  };
  const size = points => Math.sqrt(points.flat().reduce((sum, x) => sum + x * x, 0));
  const distortion = (X, Y) => {  // the nuclear norm of a 2 × 2 matrix A is √(‖A‖² + 2 |det A|)
    [X, Y] = [centre(X), centre(Y)];
    const A = [0, 1].flatMap(i => [0, 1].map(j => X.reduce((sum, x, k) => sum + x[i] * Y[k][j], 0)));
    const nuclear = Math.sqrt(dot(A, A) + 2 * Math.abs(A[0] * A[3] - A[1] * A[2]));
    return Math.sqrt(Math.max(0, 1 - nuclear / (size(X) * size(Y))));
  };
  const place = (p, x) => [x + 80 * p[0], 110 - 80 * p[1]];
  return {
    data: {truth, moved},
    compute: v => {
      const squeeze = points => points.map(([x, y]) => [x, v.squeeze * y]), clean = squeeze(truth), jittered = squeeze(moved);
      return {
        clean, jittered, best: v.squeeze > 0 ? 1 : 0.5, far: distortion(truth, clean), robust: distortion(clean, jittered),
      };
    },
    draw: ({clean, jittered}) => truth.map(p => circle(...place(p, 150), 4.5, given.wrong)).join("")
      + clean.map((p, i) => line(...place(p, 440), ...place(jittered[i], 440), "currentColor", 1.2, 'opacity=".5"')).join("")
      + clean.map(p => circle(...place(p, 440), 4.5, given.data.colour)).join("")
      + text(150, 225, "truth", "middle") + text(440, 225, "states, moved by jitter", "middle"),
    tell: ({best, far, robust}) => `Distance D from truth to states ${round(far, 2)}, from clean to jittered states `
      + `${round(robust, 2)}; the best R² of a linear probe is ${round(best, 2)}.`,
    label: {squeeze: s => round(s, 2)},
  };
})
