// A figure to play with: inputs, a picture that follows them, and a sentence that says its numbers.
// A figure is {compute(values) -> numbers, draw(numbers, values) -> SVG, tell(numbers, values) -> text}.
// It may have open(name, values) -> for each choice of a list whether it can be made; the first that can stands in for
// one that cannot.
// It may have most: by the name of a slider, values -> the largest value that it has now.
// What carries data-drag="name" moves the input of that name; draw.value turns a height into a value.
// What carries data-pick="name value" sets that input to the value when it is clicked or tapped.
const play = (root, figure) => {
  const inputs = [...root.querySelectorAll("input, select")];
  const svg = root.querySelector("svg"), told = root.querySelector("p");
  let lesson = "";  // what a button of the figure says, until a reader moves something
  const values = () => Object.fromEntries(
    inputs.map(e => [e.name, e.type === "checkbox" ? e.checked : e.type === "text" ? e.value : +e.value]));
  const show = () => {
    inputs.filter(e => e.options).forEach(e => {
      const open = figure.open?.(e.name, values());
      if (!open) return;
      [...e.options].forEach((option, i) => { option.disabled = !open[i]; });
      if (!open[e.value]) e.value = open.indexOf(true);
    });
    inputs.filter(e => figure.most?.[e.name]).forEach(e => {  // a slider at its end stays there when the end moves
      const most = figure.most[e.name](values()), last = e.value === e.max;
      if (most === +e.max) return;
      e.max = most;
      if (last) e.value = most;
    });
    const now = values(), numbers = figure.compute(now);
    svg.innerHTML = figure.draw(numbers, now);
    told.textContent = `${figure.tell(numbers, now)} ${lesson}`.trim();
    inputs.forEach(e => {
      const output = e.parentElement.querySelector("output");
      if (!output) return;
      output.textContent = figure.label?.[e.name]?.(now[e.name], numbers) ?? round(now[e.name], 2);
      e.setAttribute("aria-valuetext", output.textContent);  // a screen reader says what is shown, not a place in a list
    });
  };
  root.addEventListener("input", () => { lesson = ""; show(); });
  root.querySelectorAll("button").forEach(button => button.addEventListener("click", () => {
    const given = JSON.parse(button.dataset.values);
    inputs.forEach(e => {
      if (e.options) e.selectedIndex = given[e.name] ?? 0;
      else { e.value = given[e.name] ?? e.defaultValue; e.checked = given[e.name] ?? e.defaultChecked; }
    });
    lesson = button.dataset.lesson;
    show();
  }));
  let held = null;
  const place = event => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const moved = figure.at(point.x, point.y);
    for (const name of held.split(" ")) {
      const input = inputs.find(e => e.name === name);
      input.value = moved[name] ?? moved;
    }
    lesson = "";
    show();
  };
  // A finger reaches around a handle: where two of them are in reach, it means the nearer one.
  const nearest = event => [...svg.querySelectorAll("[data-drag]")].map(e => {
    const box = e.getBoundingClientRect();
    return [Math.hypot(box.x + box.width / 2 - event.clientX, box.y + box.height / 2 - event.clientY), e.dataset.drag];
  }).sort((a, b) => a[0] - b[0])[0][1];
  svg.addEventListener("pointerdown", event => {
    held = event.target.dataset.drag ? nearest(event) : null;
    if (held) { svg.setPointerCapture(event.pointerId); event.preventDefault(); }
  });
  svg.addEventListener("pointermove", event => held && place(event));
  svg.addEventListener("pointerup", () => { held = null; });
  svg.addEventListener("pointercancel", () => { held = null; });
  svg.addEventListener("click", event => {
    const [name, value] = event.target.dataset.pick?.split(" ") ?? [];
    if (!name) return;
    inputs.find(e => e.name === name).value = value;
    lesson = "";
    show();
  });
  root.compute = figure.compute;  // the book's tests hold it against the library
  show();
};

const round = (x, digits) => (Math.abs(x) < 0.5 * 10 ** -digits ? 0 : x).toFixed(digits).replace("-", "−");
const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
const times = (A, v) => A.map(row => dot(row, v));
const matrix = (A, B) => {
  const columns = B[0].map((_, j) => B.map(row => row[j]));
  return A.map(row => columns.map(column => dot(row, column)));
};
const power = (A, k) => k === 1 ? A : k % 2 ? matrix(A, power(A, k - 1)) : power(matrix(A, A), k / 2);
const mean = v => v.reduce((sum, x) => sum + x, 0) / v.length;
// Numbers that look random, the same ones on each page: uniform from a seed, and normal by Box and Muller.
const uniforms = seed => () => (seed = seed * 16807 % 2147483647) / 2147483647;
const normal = random => Math.sqrt(-2 * Math.log(random())) * Math.cos(2 * Math.PI * random());
const softmax = s => {
  const most = Math.max(...s), e = s.map(x => Math.exp(x - most)), sum = e.reduce((a, b) => a + b, 0);
  return e.map(x => x / sum);
};
// Gaussian averages at bandwidth h, or local lines, as a matrix on the values at places x.
const smoother = (x, h, lines) => x.map(at => {
  const w = softmax(x.map(other => -((at - other) ** 2) / (2 * h * h)));
  if (!lines) return w;
  const off = x.map(other => other - at), first = dot(w, off), second = dot(w, off.map(d => d * d));
  const all = second - first * first;
  return w.map((weight, j) => weight * (second - first * off[j]) / all);
});

const line = (x1, y1, x2, y2, colour, width = 2, more = "") =>
  `<line x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" stroke="${colour}" stroke-width="${width}" ${more}/>`;
const circle = (x, y, r, colour, more = "") => `<circle cx="${x}" cy="${y}" r="${r}" fill="${colour}" ${more}/>`;
const path = (points, colour, width = 2.5, more = "") =>
  `<polyline points="${points.map(p => p.map(x => x.toFixed(1)).join()).join(" ")}" fill="none"
    stroke="${colour}" stroke-width="${width}" ${more}/>`;
// Letters are darker than lines of their colour, but for dark mode, which makes both brighter: see _static/book.css.
const text = (x, y, words, anchor = "start", colour) =>
  `<text x="${x}" y="${y}" text-anchor="${anchor}" fill="${colour && colour !== "currentColor"
    ? `color-mix(in srgb, ${colour} var(--letters, 78%), black)` : "currentColor"}">${words}</text>`;
