// Fields for the answers of a chapter: what is right, and the hints, are those of the table of exercises.
(exercises => {
  // "a, b", "a to b", "a and b" and "a – b" are two numbers; "54 %" is 0.54, or 54 if the exercise says "per cent".
  const numbers = (said, wants) => {
    const unit = said.includes("%") && !wants.includes("per cent") ? 100 : 1;
    const bare = said.replace(/[\[\](){}]/g, " ").replace(/\s*%/g, "");
    const plain = bare.replace(/(\d)(–|\s+–\s+)/g, "$1 ").replace(/[−–]/g, "-");
    return plain.trim().split(/(?:[\s,;]|\b(?:to|and)\b)+/).map(part => {
      const [over, under = "1", ...more] = part.split("/");
      return part && !more.length ? Number(over) / Number(under) / unit : NaN;
    });
  };
  const near = (got, want, tolerance) => {  // null stands for any number
    const most = Math.max(...want.map(w => Math.abs(w ?? 0))) || 1;
    return got.length === want.length
      && want.every((w, i) => w === null || Math.abs(got[i] - w) <= tolerance * (Math.abs(w) || most) + 1e-12);
  };
  const fault = ({right, wrong, tolerance, wants}, said) => {
    const word = typeof right === "string";
    const got = word ? said.trim().toLowerCase().replace(/^["']|["']$/g, "") : numbers(said, wants);
    const alike = other => word ? got === other : near(got, other, tolerance);
    if (alike(right)) return "";
    const [, hint] = wrong.find(([other]) => alike(other)) ?? [];
    if (hint) return hint;
    if (word || got.length !== right.length || !got.every(Number.isFinite)) return `Wanted is ${wants}.`;
    if (near(got.map(x => -x), right, tolerance)) return "Its size is right, its sign is not.";
    if (right.length === 1) return got[0] > right[0] ? "It is too large." : "It is too small.";
    return `Right so far: ${right.filter((w, i) => near([got[i]], [w], tolerance)).length} of ${right.length}.`;
  };
  // On a page of the book each field goes below the question that it answers; a notebook has them in one list.
  const place = () => document.querySelectorAll(".answers > .answer").forEach(row => {
    const name = `Exercise ${row.dataset.number.replace(/^0/, "")}`;
    const titles = [...document.querySelectorAll(".exercise .caption-number")];
    titles.find(title => title.textContent.trim() === name)?.closest(".exercise").append(row);
  });
  if (document.readyState === "loading") addEventListener("DOMContentLoaded", place);
  else place();
  for (const [number, exercise] of Object.entries(exercises)) {
    for (const form of document.querySelectorAll(`form[data-number="${number}"]`)) {
      form.onsubmit = event => {
        event.preventDefault();
        const hint = fault(exercise, form.querySelector("input").value);
        form.querySelector("output").textContent = hint ? `Not yet. ${hint}` : `Right. ${exercise.then}`;
      };
    }
  }
})
