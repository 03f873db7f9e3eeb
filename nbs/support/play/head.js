// Chapter 5b: three tokens of two numbers, and what one of them receives through a head.
(given => {
  const words = ["dog", "sat", "it"], kinds = [1, 0, -1], others = [null, 1, 0], floor = 112;
  const across = j => 150 + 130 * j, list = (numbers, digits) => `${round(numbers[0], digits)}, ${round(numbers[1], digits)} and ${round(numbers[2], digits)}`;
  return {
    compute: v => {
      const knows = others.map(x => x ?? v.dog), t = v.place - 1, query = v.query * kinds[t];
      const scores = kinds.map((key, j) => (v.mask && j > t ? -Infinity : query * key));
      const weights = softmax(scores.map(s => s * Math.log(2)));
      return {weights, knows, query, output: dot(weights, knows)};
    },
    draw: ({weights, knows, output}, v) => {
      const row = (y, name, numbers) => text(8, y, name) + numbers.map((x, j) => text(across(j), y, x, "middle")).join("");
      return line(95, floor, 465, floor, "currentColor", 1, 'opacity=".5"')
        + weights.map((w, j) => `<rect x="${across(j) - 24}" y="${floor - 88 * w}" width="48" height="${88 * w}" fill="${given.first}"/>`
          + text(across(j), floor - 88 * w - 6, round(w, 2), "middle", given.first)
          + `<g opacity="${v.mask && j >= v.place ? 0.35 : 1}">${text(across(j), 139, words[j], "middle")}</g>`).join("")
        + text(8, floor, "weight")
        + `<rect x="${across(v.place - 1) - 30}" y="120" width="60" height="28" rx="6" fill="none" stroke="currentColor" stroke-width="2"/>`
        + row(172, "key", kinds.map(x => round(x, 0))) + row(200, "value", knows.map(x => round(x, 0)))
        + text(500, 200, `→ ${round(output, 2)}`, "start", given.first)
        + words.map((_, j) => `<rect x="${across(j) - 60}" y="0" width="120" height="210" fill="transparent" style="cursor:pointer" data-pick="place ${j + 1}"/>`).join("");
    },
    tell: ({weights, query, output}, v) =>
      `“${words[v.place - 1]}” has the query ${round(v.query, 1)} × ${round(kinds[v.place - 1], 0)} = ${round(query, 1)}. `
        + `Its weights are ${list(weights, 2)}, and it receives ${round(output, 2)}.`,
    label: {place: t => words[t - 1], query: x => round(x, 1), dog: x => round(x, 0)},
  };
})
