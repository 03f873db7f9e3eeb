// Chapter 22: what a token reads from the fast weights, which are written chunk by chunk.
(given => {
  const letters = [..."abcabdacbabdabca"], kinds = "abcd", green = given.data.colour, side = 33;
  const across = t => 18 + 35.5 * t;
  const box = (t, style) => `<rect x="${across(t)}" y="30" width="${side}" height="42" rx="5" ${style}/>`;
  return {
    data: {letters},
    compute: v => {
      const at = v.token - 1, own = Math.floor(at / v.chunk), reads = [0, 0, 0, 0];
      const pairs = letters.map((letter, t) => {
        if (t >= at || letter !== letters[at]) return "";
        if (Math.floor(t / v.chunk) === own) return "open";
        if ((t + 1) % v.chunk === 0) return "cut";
        reads[kinds.indexOf(letters[t + 1])] += 1;
        return "stored";
      });
      return {at, own, pairs, reads};
    },
    draw: ({at, own, pairs}, v) => letters.map((letter, t) => {
      const last = Math.min(t - t % v.chunk + v.chunk, 16) - 1;
      const rule = t % v.chunk ? "" : line(across(t), 92, across(last) + side, 92, "currentColor", 3,
        `opacity="${Math.floor(t / v.chunk) < own ? 0.9 : 0.3}"`);
      const marks = {
        stored: box(t, `fill="none" stroke="${green}" stroke-width="3"`) + box(t + 1, `fill="${green}" opacity=".4"`),
        cut: box(t, `fill="none" stroke="${green}" stroke-width="2.5" stroke-dasharray="4 4"`),
        open: box(t, 'fill="none" stroke="currentColor" stroke-width="2.5" opacity=".35"'),
      };
      const reader = t === at ? box(t, `fill="none" stroke="${given.first}" stroke-width="4"`) : "";
      return rule + (marks[pairs[t]] ?? "") + reader + text(across(t) + side / 2, 57, letter, "middle");
    }).join(""),
    tell: ({pairs, reads}, v) => {
      const found = reads.map((n, k) => n && `${n} × ${kinds[k]}`).filter(Boolean);
      const lost = kind => pairs.filter(pair => pair === kind).length;
      return `Token ${v.token} reads ${found.join(" + ") || "nothing"} from chunks of ${v.chunk}; `
        + `${lost("cut")} cut by an edge, ${lost("open")} in its own chunk.`;
    },
    label: {chunk: C => C, token: t => t},
  };
})
