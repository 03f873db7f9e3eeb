// Chapter 12: how far a perturbation grows on its way through the blocks, by normaliser and slope; from the recursion.
(given => {
  const {alphas, norms, depths} = given.data, most = depths.at(-1);
  const across = l => 50 + 530 * l / most, down = J => 235 - 62 * Math.log10(J);
  const names = {layernorm: "LayerNorm", dyt: "DyT", derf: "Derf"};
  const inks = {layernorm: "currentColor", dyt: given.first, derf: given.second};
  return {
    compute: v => Object.fromEntries(Object.entries(norms).map(
      ([name, found]) => [name, (name === "layernorm" ? found : found[v.alpha]).slice(0, depths.indexOf(v.depth) + 1)])),
    draw: found => [1, 10, 100, 1000].map(J => line(50, down(J), 580, down(J), "currentColor", 1, 'opacity=".2"')
        + text(44, down(J) + 5, J, "end")).join("")
      + Object.entries(found).map(([name, J], k) => path(J.map((t, i) => [across(depths[i]), down(t)]), inks[name])
        + text([60, 185, 240][k], 20, names[name], "start", inks[name])).join("")
      + text(580, 20, "growth of a perturbation", "end")
      + text(50, 249, "block 0") + text(580, 249, `block ${most}`, "end"),
    tell: (found, v) => `After ${v.depth} blocks at α = ${alphas[v.alpha]}: `
      + Object.entries(found).map(([name, J]) => `${names[name]} × ${round(J.at(-1), 1)}`).join(", ") + ".",
    label: {alpha: i => alphas[i], depth: l => l},
  };
})
