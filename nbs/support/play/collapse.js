// Chapter 27: how fast equal overlaps of tokens grow under random heads, by length, size of scores and dimension.
(given => {
  const {tokens, sizes, dims, grid, squares, products} = given.data, dt = 0.02, end = 30;
  const across = t => 50 + 530 * t / end, down = g => 225 - 195 * g;
  const at = (row, g) => {
    let k = grid.findIndex(x => x > g);
    if (k < 1) k = grid.length - 1;
    const share = (g - grid[k - 1]) / (grid[k] - grid[k - 1]);
    return row[k - 1] + share * (row[k] - row[k - 1]);
  };
  // the drift of all overlaps at γ: rates of equal overlaps, in d dimensions
  const drift = (g, f, c, d) => {
    const own = g + (1 - g) * at(f, g), pairs = g + (1 - g) * at(c, g);
    return ((d - 2 + g * g) * pairs - (d - 1) * g * own) / d;
  };
  const follow = (f, c, d) => {
    const path = [0.02];
    while (path.length <= end / dt) {
      const g = path.at(-1);
      path.push(Math.min(1, Math.max(0, g + dt * drift(g, f, c, d))));
    }
    const k = path.findIndex(g => g > 0.9);
    return {path, when: k < 0 ? null : k * dt};
  };
  const points = one => one.filter((_, k) => k % 5 === 0).map((g, k) => [across(5 * k * dt), down(g)]);
  const time = when => when === null ? `not by t = ${end}` : `at t = ${round(when, 1)}`;
  return {
    compute: v => {
      const n = tokens[v.tokens], d = dims[v.dims];
      if (d <= n) return {n, d, path: [], hot: [], when: null, hotWhen: null};
      const own = follow(squares[v.tokens][v.size], products[v.tokens][v.size], d);
      const hot = follow(squares[v.tokens][0], products[v.tokens][0], d);
      return {n, d, path: own.path, hot: hot.path, when: own.when, hotWhen: hot.when};
    },
    draw: ({path: own, hot}) =>
      [0, 0.5, 0.9].map(g => line(50, down(g), 580, down(g), "currentColor", 1, 'opacity=".25"')
        + (g ? text(44, down(g) + 5, g, "end") : "")).join("")
      + [0, 10, 20, 30].map(t => text(across(t), 244, t, "middle")).join("")
      + text(60, 16, "overlap of tokens, against time")
      + path(points(hot), given.wrong, 2, 'stroke-dasharray="5 4"')
      + path(points(own), given.first, 3),
    tell: ({n, d, when, hotWhen}, v) => d <= n
      ? `${n} tokens of equal overlap need more than ${d} dimensions.`
      : `${n} tokens in ${d} dimensions, scores of size ${sizes[v.size]}: overlap 0.9 ${time(when)}; `
        + `uniform attention (dashed) ${time(hotWhen)}.`,
    label: {tokens: i => tokens[i], size: i => sizes[i], dims: i => dims[i]},
  };
})
