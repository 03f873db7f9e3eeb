// Chapter 29: attention over 32 noisy tokens in blocks of four, with scores of tokens and of blocks.
(given => {
  const random = uniforms(1234), noise = Array.from({length: 32}, () => normal(random));
  const isClue = (t, token) => token ? t === 21 : t >= 12 && t < 16;
  return {
    compute: v => {
      const x = noise.map((e, t) => e + (isClue(t, v.token) ? (v.token ? 2.5 : 1) : 0));
      const weights = softmax(x.map((own, t) => {
        const block = dot(x.slice(t - t % 4, t - t % 4 + 4), [0.5, 0.5, 0.5, 0.5]);
        return 2 * ((1 - v.share) * own + v.share * block);
      }));
      return {x, weights, mass: weights.reduce((sum, w, t) => sum + (isClue(t, v.token) ? w : 0), 0)};
    },
    draw: ({weights}, v) => line(20, 195, 580, 195, "currentColor", 1, 'opacity=".5"')
      + [1, 2, 3, 4, 5, 6, 7].map(k => line(20 + 70 * k, 195, 20 + 70 * k, 205, "currentColor", 1, 'opacity=".5"')).join("")
      + weights.map((w, t) => `<rect x="${23 + 17.5 * t}" y="${195 - 185 * w}" width="12" height="${185 * w}" `
        + `fill="${isClue(t, v.token) ? given.first : given.wrong}"/>`).join(""),
    tell: ({mass}, v) => `${round(100 * v.share, 0)} % of the score is that of the block: the clue, `
      + `${v.token ? "one token" : "a block of four"}, gets ${round(mass, 2)} of the weight.`,
    label: {share: s => round(s, 2)},
  };
})
