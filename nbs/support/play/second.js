// Chapter 8: a token among others; one round of attention, its residual, and a gated second round.
(given => {
  const others = [[-1.6, -0.9], [-1.2, 1.1], [0.4, 1.5], [1.7, 0.3], [0.7, -1.4]];
  const across = t => 300 + 105 * t, down = y => 150 - 62 * y;
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
    at: (x, y) => ({x: Math.max(-2, Math.min(2, (x - 300) / 105)), y: Math.max(-2, Math.min(2, (150 - y) / 62))}),
    draw: ({X, A, B, F, c, output}, v) => {
      const P = p => [across(p[0]), down(p[1])], [x, ...rest] = X.map(P), f = P(F), out = P(output);
      let shown = rest.map((p, j) => line(...x, ...p, given.first, 9 * A[j + 1], 'opacity=".55" stroke-linecap="round"')).join("");
      shown += rest.map((p, j) => circle(...p, 6, "currentColor", 'opacity=".6"')
        + circle(...p, 6 + 14 * Math.sqrt(B[j + 1]), "none", `stroke="${given.second}" stroke-width="2"`)).join("");
      const kept = P(F.map(t => (v.sign ? -t : t)));  // what the output projection makes of F
      shown += line(...kept, ...x, given.wrong, 2, 'stroke-dasharray="4 3"') + line(...kept, ...out, given.second, 4);
      shown += circle(...f, 7, given.first) + text(f[0] + 10, f[1] + 18, "F", "start", given.first);
      shown += circle(...out, 5, given.second);
      return shown + circle(...x, 10, "currentColor", 'data-drag="x y" style="cursor:move;touch-action:none"')
        + text(x[0] + 14, x[1] - 8, "x");
    },
    tell: ({F, r, c, output}, v) => {
      const pair = p => `(${round(p[0], 2)}, ${round(p[1], 2)})`;
      return `F = ${pair(F)}; the second round reads ${v.sign ? "x + F" : "x − F"} = ${pair(r)}; `
        + `correction ${pair(c)}; result ${pair(output)}.`;
    },
  };
})
