// First page and chapter 3: three tokens, what Gaussian averages make of their values, and what more rounds bring back.
(given => {
  const x = [0, 1, 2], names = ["a", "b", "c"], across = t => 120 + 180 * t, down = y => 185 - 70 * y;
  return {
    compute: v => {
      const y = names.map(name => v[name]), A = smoother(x, v.bandwidth, false), fits = [];
      let F = [0, 0, 0];
      for (let m = 0; m < v.rounds; m++) {
        const more = times(A, y.map((t, i) => t - F[i]));
        F = F.map((t, i) => t + more[i]);
        fits.push(F);
      }
      const missed = fits.map(fit => Math.max(...y.map((t, i) => Math.abs(t - fit[i]))));
      return {y, one: fits[0], F, missed};
    },
    at: (_, height) => Math.max(-0.5, Math.min(2.5, (185 - height) / 70)),
    draw: ({y, one, F}) => [0, 1, 2].map(t => text(54, down(t) + 5, t, "end")
        + line(60, down(t), 540, down(t), "currentColor", 1, `opacity="${t ? 0.12 : 0.3}"`)).join("")
      + text(66, 20, "value") + x.map(t => text(across(t), 247, `token ${t + 1}`, "middle")).join("")
      + path(y.map((t, i) => [across(i), down(t)]), given.wrong, 2, 'stroke-dasharray="3 4"')
      + path(one.map((t, i) => [across(i), down(t)]), given.first, 3)
      + path(F.map((t, i) => [across(i), down(t)]), given.data.colour, 3)
      + one.map((t, i) => circle(across(i), down(t), 6, given.first)).join("")
      + F.map((t, i) => circle(across(i), down(t), 6, given.data.colour)).join("")
      + y.map((t, i) => circle(across(i), down(t), 10, given.wrong,
        `data-drag="${names[i]}" style="cursor:ns-resize;touch-action:none"`)).join(""),
    tell: ({one, F, missed}, v) => {
      const list = fit => fit.map(t => round(t, 2)).join(", ");
      return `One round returns ${list(one)} and misses a value by up to ${round(missed[0], 2)}`
        + (v.rounds > 1 ? `; ${v.rounds} rounds return ${list(F)} and miss one by up to ${round(missed.at(-1), 2)}.` : ".");
    },
    label: {rounds: m => m},
  };
})
