// Chapter 27: sixteen tokens on a sphere under layers of fresh random heads, layer after layer, with one round or two.
(given => {
  const n = 16, step = 0.3, kinds = ["one round", "twicing", "boosted, fresh heads"];
  const unit = x => x.map(a => a / Math.hypot(...x));
  const add = (X, Y, by = 1) => X.map((x, i) => x.map((a, k) => a + by * Y[i][k]));
  const heads = random => [0, 1, 2].map(() => [0, 1, 2].map(() => [0, 1, 2].map(() => normal(random))));
  const attend = (X, [Q, K, V], size, isTwice) => {
    const q = X.map(x => times(Q, x)), k = X.map(x => times(K, x));
    const A = q.map(a => softmax(k.map(b => size * dot(a, b) / Math.sqrt(3))));
    const once = matrix(A, X), F = isTwice ? add(once, matrix(A, add(X, once, -1))) : once;
    return F.map(x => times(V, x).map(a => a / Math.sqrt(3)));
  };
  return {
    compute: v => {
      const random = uniforms(5 + v.seed);
      let X = Array.from({length: n}, () => unit([normal(random), normal(random), normal(random)]));
      let before = X, drawn = [];
      for (let l = 0; l < v.layer; l++) {
        drawn = [heads(random), heads(random)];
        before = X;
        let u = attend(X, drawn[0], v.size, v.rounds === 1);
        if (v.rounds === 2) u = add(u, attend(add(X, u, -1), drawn[1], v.size, false));
        X = add(X, u, step).map(unit);
      }
      const all = [0, 1, 2].map(k => mean(X.map(x => x[k])));
      return {X, before, drawn, overlap: (n * dot(all, all) - 1) / (n - 1)};
    },
    draw: ({X}) => '<circle cx="300" cy="140" r="130" fill="none" stroke="currentColor" opacity=".4"/>'
      + X.map(([x, y, z]) => circle((300 + 130 * x).toFixed(1), (140 - 130 * y).toFixed(1), (6 + 2.7 * z).toFixed(1),
        given.first, `opacity="${(0.62 + 0.33 * z).toFixed(2)}"`)).join(""),
    tell: ({overlap}, v) => `After ${v.layer} layers, ${kinds[v.rounds]}: mean overlap of two tokens ${round(overlap, 2)}. `
      + "Small and pale tokens are behind.",
    label: {layer: l => l, size: s => s, seed: s => s},
  };
})
