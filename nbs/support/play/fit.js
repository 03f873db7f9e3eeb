// Chapter 1: a line through five points, and what a second round finds in its residual.
(given => {
  const x = [-2, -1, 0, 1, 2], across = t => 300 + 125 * t, down = y => 130 - 26 * y;
  const H = x.map(a => x.map(b => 1 / 5 + a * b / 10));  // the hat matrix of columns 1 and x
  const names = x.map((_, i) => `y${i + 1}`);
  return {
    compute: v => {
      const y = names.map(n => v[n]), S = v.averages ? smoother(x, 1, false) : H;
      const F = times(S, y), r = y.map((t, i) => t - F[i]);
      return {y, F, r, second: times(S, r)};
    },
    at: (_, height) => Math.max(-4, Math.min(4, (130 - height) / 26)),
    draw: ({y, F, second}) => {
      let out = line(20, down(0), 580, down(0), "currentColor", 1, 'opacity=".3"');
      x.forEach((t, i) => { out += line(across(t), down(y[i]), across(t), down(F[i]), given.wrong, 2, 'stroke-dasharray="4 3"'); });
      out += path(x.map((t, i) => [across(t), down(F[i])]), given.first);
      out += path(x.map((t, i) => [across(t), down(F[i] + second[i])]), given.second, 2.5, 'stroke-dasharray="8 5"');
      x.forEach((t, i) => { out += circle(across(t), down(y[i]), 9, "currentColor", `data-drag="${names[i]}" style="cursor:ns-resize;touch-action:none"`); });
      return out;
    },
    tell: ({r, second}) => `Largest residual ${round(Math.max(...r.map(Math.abs)), 2)}; `
      + `a second round adds at most ${round(Math.max(...second.map(Math.abs)), 2)}.`,
  };
})
