// Chapter 9: the induction layer with weights set by hand, for words of up to eight letters behind a start.
(given => {
  const length = 8, beta = 6 + 3 * Math.log(length), turn = 2 * Math.PI / (length + 1), alphabet = 26;
  const across = t => 30 + 58 * t, top = 78, bottom = 152, size = 52;
  const clean = word => word.toLowerCase().replace(/[^a-z]/g, "").slice(0, length);
  const likely = output => [..."abcdefghijklmnopqrstuvwxyz"].filter((_, a) => output[a] > 0.1).join("");
  const causal = (t, T, score) => {
    const weights = softmax(Array.from({length: t + 1}, (_, j) => score(j)));
    return Array.from({length: T + 1}, (_, j) => weights[j] ?? 0);
  };
  return {
    most: {place: v => Math.max(1, clean(v.word).length)},
    compute: v => {
      const ids = [...clean(v.word)].map(letter => letter.charCodeAt() - 97), T = ids.length, t = Math.min(v.place, T);
      const at = [alphabet, ...ids];  // the start, and the letters
      const first = at.map((_, i) => causal(i, T, j => beta / (1 - Math.cos(turn)) * Math.cos(turn * (i - 1 - j))));
      const label = (j, token) => v.mutant ? 0 : dot(first[j], at.map(one => +(one === token)));
      const second = causal(t, T, j => t ? 4 * beta * label(j, at[t]) + 2 * beta * (j === 0) : 0);
      const output = Array.from({length: alphabet}, (_, a) => dot(second, at.map(one => +(one === a))));
      return {first: first[t], second, output};
    },
    draw: ({first, second, output}, v) => {
      const word = [..."⊢" + clean(v.word)], t = Math.min(v.place, word.length - 1);
      const bar = (w, i, y, colour) => `<rect x="${across(i) - 16}" y="${y}" width="32" height="${size * w}" fill="${colour}"/>`;
      const number = (w, i, y) => w > 0.05 && w < 0.95 ? text(across(i), y, round(w, 2), "middle") : "";
      return word.map((letter, i) => bar(first[i], i, top - size * first[i], given.first) + bar(second[i], i, bottom, given.second)
          + number(first[i], i, top - size * first[i] - 6) + number(second[i], i, bottom + size * second[i] + 18)
          + `<g opacity="${i > t ? 0.35 : 1}">${text(across(i), 102, letter, "middle")}</g>`
          + (i ? `<g opacity="${v.mutant || i > t ? 0.2 : 1}">${text(across(i), 138, word[i - 1], "middle", given.data.colour)}</g>` : "")
        ).join("")
        + `<rect x="${across(t) - 19}" y="83" width="38" height="27" rx="6" fill="none" stroke="currentColor" stroke-width="2"/>`
        + text(across(word.length) - 18, 102, "→ " + (likely(output) || "?"), "start", given.second);
    },
    tell: ({first, second, output}, v) => {
      const word = ["start", ...clean(v.word)], t = Math.min(v.place, word.length - 1);
      if (!t) return "Type a word of letters from a to z.";
      const name = i => i ? `place ${i}, “${word[i]}”` : "the start";
      const found = word.map((_, i) => i).filter(i => i && second[i] > 0.1), guess = [...likely(output)].map(a => `“${a}”`).join(" or ");
      return `Place ${t} holds “${word[t]}”. In round 0 it attends to ${name(first.indexOf(Math.max(...first)))}. In round 1 it attends to `
        + (found.length ? `${found.map(name).join(" and ")}, and the guess is ${guess}.` : "the start, and there is no guess.");
    },
    label: {place: (p, {first}) => `${Math.min(p, first.length - 1)}`},
  };
})
