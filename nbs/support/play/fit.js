// Chapter 1: the line through the origin and three points; below it, a pair of bars for each point: what is left goes
// in, and what a second round makes of it comes out. A ridge is added to xᵀx = 9.
(given => {
  const x = [1, 2, 2], across = t => 60 + 215 * t, down = y => 190 - 30 * y;
  const hat = ridge => x.map(a => x.map(b => a * b / (9 + ridge)));  // the hat matrix of the column x
  const names = x.map((_, i) => `y${i + 1}`);
  const tick = (value, y, opacity = 0.12) => text(40, y + 5, round(value, 0), "end")
    + line(46, y, 580, y, "currentColor", 1, `opacity="${opacity}"`);
  return {
    compute: v => {
      const y = names.map(n => v[n]), S = v.averages ? smoother(x, 1, false) : hat(v.ridge);
      const F = times(S, y), r = y.map((t, i) => t - F[i]);
      return {y, F, r, second: times(S, r)};
    },
    at: (_, height) => Math.max(-2, Math.min(6, (190 - height) / 30)),
    draw: ({y, F, r, second}, v) => {
      const colour = v.averages ? given.first : given.data.colour, zero = 375, foot = down(-2) + 20;
      const ends = v.averages ? [] : [0, 1, 2.4];  // the line goes on; averages are known at the points alone
      const curve = (values, ...more) => path(
        ends.length ? ends.map(t => [across(t), down(t * values[0])]) : [[across(1), down(values[0])], [across(2), down(values[1])]], ...more);
      let out = tick(-2, down(-2)) + [2, 4, 6].map(t => tick(t, down(t))).join("") + tick(0, down(0), 0.3)
        + [1, 2].map(t => text(across(t), foot, t, "middle")).join("") + text(580, foot, "x", "end") + text(60, 30, "y: points and fit")
        + text(50, zero - 65, "second look: residual in, result out") + [-4, 4].map(t => tick(t, zero - 12 * t)).join("") + tick(0, zero, 0.3);
      x.forEach((t, i) => { out += line(across(t), down(y[i]), across(t), down(F[i]), given.wrong, 2, 'stroke-dasharray="4 3"'); });
      out += curve(F, colour);
      const bar = (at, value, fill) => {
        const long = 12 * Math.abs(value);
        return `<path d="M${at} ${zero}v${value < 0 ? long : -long}h34v${value < 0 ? -long : long}z" fill="${fill}"/>`;
      };
      x.forEach((_, i) => {
        const left = 50 + 190 * i;
        out += bar(left, r[i], given.wrong) + bar(left + 38, second[i], colour);
        out += text(left + 80, zero - 6, round(second[i], 2), "start", colour) + text(left, zero + 72, `point ${i + 1}`);
      });
      x.forEach((t, i) => { out += circle(across(t), down(y[i]), 9, "currentColor", `data-drag="${names[i]}" style="cursor:ns-resize;touch-action:none"`); });
      return out;
    },
    tell: ({F, r, second}) => {
      const row = values => values.map(t => round(t, 2)).join(", ");
      return `The fit is ${row(F)}, and the residual ${row(r)}. Shown the residual, the same smoother adds ${row(second)}.`;
    },
  };
})
