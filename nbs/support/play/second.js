// Chapter 8: a token among others; one round of attention, its residual, and a gated second round.
(given => {
  const others = [[-1.6, -0.9], [-1.2, 1.1], [0.4, 1.5], [1.7, 0.3], [0.7, -1.4]];
  const unit = 105, across = t => 300 + unit * t, down = y => 215 - unit * y;
  const within = t => Math.max(-2, Math.min(2, t));
  const attended = (from, to, sharp) => from.map(q => softmax(to.map(k => sharp * dot(q, k) / Math.SQRT2)));
  return {
    compute: v => {
      const sign = v.sign ? -1 : 1, scaled = (M, by) => M.map(p => p.map(t => by * t));  // of the values
      const X = [[v.x, v.y], ...others], A = attended(X, X, v.sharp), F = matrix(A, scaled(X, sign));
      const r = X.map((p, i) => p.map((t, j) => t - sign * F[i][j])), B = attended(r, r, v.sharper);
      const c = matrix(B, scaled(r, sign));
      const output = F.map((p, i) => p.map((t, j) => sign * (t + v.gate * c[i][j])));
      return {X, A: A[0], B: B[0], F: F[0], r: r[0], c: c[0], output: output[0]};
    },
    at: (x, y) => ({x: within((x - 300) / unit), y: within((215 - y) / unit)}),
    draw: ({X, A, B, F, output}, v) => {
      const P = p => [across(p[0]), down(p[1])], [x, ...rest] = X.map(P), f = P(F), out = P(output);
      let shown = rest.map((p, j) => line(...x, ...p, given.first, 12 * A[j + 1], 'opacity=".5" stroke-linecap="round"')).join("");
      shown += rest.map(p => circle(...p, 6, "currentColor", 'opacity=".6"')).join("");
      shown += [-1, 0, 1].map(t => line(across(t), 5, across(t), 408, "currentColor", 1, 'opacity=".12"')
        + line(46, down(t), 554, down(t), "currentColor", 1, 'opacity=".12"')
        + text(across(t), 426, round(t, 0), "middle") + text(40, down(t) + 5, round(t, 0), "end")).join("");
      shown += [x, ...rest].map((p, j) => circle(...p, 10 + 18 * Math.sqrt(B[j]), "none", `stroke="${given.second}" stroke-width="3" opacity="${B[j] > 0.02 ? 1 : 0}"`)).join("");
      const kept = P(F.map(t => (v.sign ? -t : t)));  // what the output projection makes of F
      shown += line(...kept, ...x, given.wrong, 2.5, 'stroke-dasharray="6 4"') + line(...kept, ...out, given.second, 5);
      shown += circle(...f, 9, given.first) + text(f[0] - 14, f[1] - 13, "F", "end", given.first);
      shown += circle(...out, 6, given.second) + text(out[0] - 14, out[1] + 13, "result", "end", given.second);
      return shown + circle(...x, 10, "currentColor", 'data-drag="x y" style="cursor:move;touch-action:none"')
        + text(x[0] + 24, x[1] - 14, "x");
    },
    tell: ({X, F, r, output}, v) => {
      const pair = p => `(${round(p[0], 2)}, ${round(p[1], 2)})`, size = p => round(Math.hypot(...p), 2);
      const [x] = X, missed = output.map((t, i) => x[i] - t);
      return `x = ${pair(x)} and F = ${pair(F)}. The second round reads ${v.sign ? "x + F" : "x − F"} = ${pair(r)}, of length ${size(r)}. `
        + `The result ${pair(output)} misses x by ${size(missed)}.`;
    },
  };
})
