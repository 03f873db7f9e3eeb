// Chapter 18: choose a model, a setting and a baseline, and see each pair of runs.
(given => {
  const {models, settings, baselines, quantiles, verdicts} = given.data, percent = x => 100 * (Math.exp(x) - 1);
  const signed = x => (x < 0 ? "−" : "+") + Math.abs(x).toFixed(1);
  const across = p => 300 + 12 * Math.max(-24, Math.min(24, p));
  const ran = v => models[v.model].settings[v.setting];
  return {
    // what has run: settings with a baseline, and the baselines of the one that is chosen
    open: (name, v) => name === "setting" ? models[v.model].settings.map(s => s.some(Boolean))
      : name === "baseline" && ran(v).map(Boolean),
    compute: v => {
      const {pairs} = ran(v)[v.baseline], n = pairs.length, m = mean(pairs);
      const sd = Math.sqrt(pairs.reduce((sum, x) => sum + (x - m) ** 2, 0) / (n - 1));
      const half = quantiles[n - 2] * sd / Math.sqrt(n);
      return {pairs, n, mean: percent(m), low: percent(m - half), high: percent(m + half)};
    },
    draw: ({pairs, mean, low, high}, v) =>
      [-20, -10, 0, 10, 20].map(p => line(across(p), 20, across(p), 110, "currentColor", 1, 'opacity=".3"')
        + text(across(p), 130, `${round(p, 0)} %`, "middle")).join("")
      + text(20, 14, `← ${models[v.model].better.split(" attention")[0]} better`)
      + text(580, 14, "baseline better →", "end")
      + line(across(low), 80, across(high), 80, given.second, 4) + circle(across(mean), 80, 7, given.second)
      + pairs.map(x => circle(across(percent(x)), 48, 5, given.first, 'opacity=".6"')).join(""),
    tell: ({n, mean, low, high}, v) => {
      const {says, better} = models[v.model], verdict = verdicts[ran(v)[v.baseline].verdict];
      return `${says.replace("{baseline}", baselines[v.baseline])}, ${settings[v.setting]}: ${signed(mean)} % `
        + `(95 % interval ${signed(low)} to ${signed(high)} %; ${n} pairs). `
        + verdict.replace("{better}", mean < 0 ? better : "the baseline").replace(/^./, c => c.toUpperCase());
    },
  };
})
