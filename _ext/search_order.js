// Sphinx's weights. What is asked for first: a function or class of that name, then pages whose title begins with the
// words or has them. The library's other entries come last.
const words = (new URLSearchParams(location.search).get("q") ?? "").trim().toLowerCase();
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, title, , description, score]) => {
    const name = title.replace(/<[^>]*>/g, "").replace(/^\w+\. /, "").toLowerCase();
    if (/class|function/.test(description) && name.split(".").at(-1) === words) return score + 200;
    if (description || /(^|\/)api/.test(page)) return score - 100;
    return score + (name.startsWith(words) ? 150 : name.includes(words) ? 100 : 0);
  },
};
