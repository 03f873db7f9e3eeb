// Chapter 24: three queries and keys, scores ln 3 on the diagonal, an offset for key 3: softmax beside half-steps of Sinkhorn.
(given => {
  const sum = row => row.reduce((a, b) => a + b, 0), columns = P => [0, 1, 2].map(j => sum(P.map(row => row[j])));
  const balance = (offset, steps) => {
    let P = [0, 1, 2].map(i => [0, 1, 2].map(j => (i === j ? 3 : 1) * (j === 2 ? Math.exp(offset) : 1)));
    for (let t = 1; t <= steps; t++) {
      const below = columns(P);
      P = P.map(row => row.map((x, j) => x / (t % 2 ? sum(row) : below[j])));
    }
    return P;
  };
  const table = (P, x, title) => text(x, 22, title) + P.map((row, i) => row.map((one, j) =>
    `<rect x="${x + 58 * j}" y="${34 + 40 * i}" width="56" height="38" fill="${given.data.colour}" opacity="${0.1 + 0.7 * one}"/>`
    + text(x + 58 * j + 28, 58 + 40 * i, round(one, 2), "middle")).join("")
    + text(x + 184, 58 + 40 * i, round(sum(row), 2))).join("")
    + columns(P).map((one, j) => text(x + 58 * j + 28, 174, round(one, 2), "middle")).join("");
  return {
    compute: v => ({softmax: balance(v.offset, 1), P: balance(v.offset, v.steps)}),
    draw: ({softmax, P}, v) => table(softmax, 20, "softmax") + table(P, 330, `after ${v.steps} half-step${v.steps > 1 ? "s" : ""}`),
    tell: ({softmax, P}) => `Key 3 receives ${round(columns(softmax)[2], 2)} from softmax and ${round(columns(P)[2], 2)} after the `
      + "half-steps. Beside a row: what a query gives; below: what a key receives.",
    label: {offset: t => round(t, 1), steps: t => t},
  };
})
