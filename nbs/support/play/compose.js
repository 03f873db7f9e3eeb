// Chapter 8: round 0 has put into each token the letter before it; round 1 looks for the query's letter there.
(given => {
  const most = 11, height = {letter: 45, before: 98, arcs: 122};
  const clean = word => word.toLowerCase().replace(/[^a-z]/g, "").slice(0, most);
  const found = weights => [...weights.keys()].filter(j => weights[j] > Math.min(...weights) && weights[j] === Math.max(...weights));
  const likely = ({weights, output}, word) => [...new Set(found(weights).map(j => word[j]))].map(a => [a, output[a.charCodeAt() - 97]]);
  const list = (words, and) => [words.slice(0, -1).join(", "), words.at(-1)].filter(Boolean).join(and);
  return {
    most: {place: v => Math.max(1, clean(v.word).length)},
    compute: v => {
      const word = [...clean(v.word)], t = Math.min(v.place, word.length) - 1;
      const weights = softmax(word.slice(0, t + 1).map((_, j) => (!v.keys && word[j - 1] === word[t] ? v.sharp : 0)));
      const output = Array(26).fill(0);
      weights.forEach((w, j) => { output[word[j].charCodeAt() - 97] += w; });
      return {weights, output};
    },
    draw: (numbers, v) => {
      const word = [...clean(v.word)], {weights} = numbers, t = weights.length - 1, step = Math.min(80, 520 / (word.length + 1.5));
      const across = j => 66 + step * (j + 0.5), dim = j => `opacity="${j > t ? 0.3 : 1}"`;
      const arc = (w, j) => {
        const deep = height.arcs + 2 * (18 + 55 * (t - j) / Math.max(4, word.length)), [a, b] = [across(j) - (j === t) * 9, across(t) + (j === t) * 9];
        return `<path d="M${a},${height.arcs}Q${(a + b) / 2},${deep} ${b},${height.arcs}" fill="none" stroke="${given.second}" stroke-width="${0.5 + 6 * w}"/>`
          + `<path d="M${a},${height.arcs - 9}l-6,11h12z" fill="${given.second}" opacity="${Math.min(1, 0.2 + 2 * w)}"/>`;
      };
      return text(0, height.letter, "letter") + text(0, height.before, "before", "start", given.first)
        + word.map((letter, j) => `<g ${dim(j)}>` + text(across(j), height.letter, letter, "middle") + "</g>"
          + (j ? `<g opacity="${v.keys || j > t ? 0.25 : 1}">`
            + line(across(j - 1) + 8, height.letter + 9, across(j) - 8, height.before - 19, given.first, 2)
            + text(across(j), height.before, word[j - 1], "middle", given.first) + "</g>" : "")).join("")
        + weights.map((w, j) => w < 0.005 ? "" : arc(w, j) + text(across(j), 16, round(w, 2), "middle", given.second)).join("")
        + (word.length ? `<rect x="${across(t) - 15}" y="${height.letter - 20}" width="30" height="28" rx="6" fill="none" stroke="currentColor" stroke-width="2"/>`
          + text(across(word.length) - 12, height.letter, "→ " + (likely(numbers, word).map(([a]) => a).join("") || "?"), "start", given.second) : "")
        + word.map((_, j) => `<rect x="${across(j) - step / 2}" y="-10" width="${step}" height="200" fill="transparent" style="cursor:pointer" data-pick="place ${j + 1}"/>`).join("");
    },
    tell: (numbers, v) => {
      const word = clean(v.word), {weights} = numbers, t = weights.length, at = found(weights), asked = word[t - 1];
      if (!t) return "Type a word of letters from a to z.";
      const looks = `Token ${t}, “${asked}”, looks for a token that came after ${/[aefhilmnorsx]/.test(asked) ? "an" : "a"} “${asked}”`;
      if (t < 2) return `${looks}, but it may attend only to itself.`;
      if (!at.length) return `${looks}, and finds none: all ${t} tokens that it may attend to have the weight ${round(1 / t, 2)}.`;
      return `${looks}, and finds ${at[1] ? "tokens" : "token"} ${list(at.map(j => j + 1), " and ")} (weight ${round(weights[at[0]], 2)}${at[1] ? " each" : ""}). `
        + `So the guess for what comes next is ${list(likely(numbers, word).map(([a, p]) => `“${a}” (${round(p, 2)})`), " or ")}.`;
    },
    label: {place: (t, {weights}) => `${weights.length}`},
  };
})
