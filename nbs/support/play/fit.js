// Chapter 1: the line through the origin and three points, and what a second round finds in its residual.
(given => {
  const x = [1, 2, 2], across = t => 60 + 215 * t, down = y => 190 - 30 * y;
  const H = x.map(a => x.map(b => a * b / 9));  // the hat matrix of the column x
  const names = x.map((_, i) => `y${i + 1}`);
  return {
    compute: v => {
      const y = names.map(n => v[n]), S = v.averages ? smoother(x, 1, false) : H;
      const F = times(S, y), r = y.map((t, i) => t - F[i]);
      return {y, F, r, second: times(S, r)};
    },
    at: (_, height) => Math.max(-2, Math.min(6, (190 - height) / 30)),
    draw: ({y, F, second}, v) => {
      const ends = v.averages ? [] : [0, 1, 2.4];  // the line goes on; averages are known at the points alone
      const curve = (values, ...more) => path(
        ends.length ? ends.map(t => [across(t), down(t * values[0])]) : [[across(1), down(values[0])], [across(2), down(values[1])]], ...more);
      let out = line(20, down(0), 580, down(0), "currentColor", 1, 'opacity=".3"');
      x.forEach((t, i) => { out += line(across(t), down(y[i]), across(t), down(F[i]), given.wrong, 2, 'stroke-dasharray="4 3"'); });
      out += curve(F, given.first) + curve(F.map((t, i) => t + second[i]), given.second, 2.5, 'stroke-dasharray="8 5"');
      x.forEach((t, i) => { out += circle(across(t), down(y[i]), 9, "currentColor", `data-drag="${names[i]}" style="cursor:ns-resize;touch-action:none"`); });
      return out;
    },
    tell: ({F, r, second}) => {
      const row = values => values.map(t => round(t, 2)).join(", ");
      return `The fit is ${row(F)}, and the residual ${row(r)}. Shown the residual, the same smoother adds ${row(second)}.`;
    },
  };
})
