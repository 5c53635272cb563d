"use strict";

// Text from the model goes into the page through textContent only.

const byId = (id) => document.getElementById(id);

function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function fill(select, entries) {
  select.replaceChildren(...entries.map(([value, text]) => make("option", text, { value })));
}

// --- tables

async function copy(button) {
  const text = button.dataset.markdown;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    const box = button.closest(".table");
    let area = box.querySelector("textarea.markdown");
    if (!area) {
      area = make("textarea", undefined, { class: "markdown", readonly: "", "aria-label": "Table as Markdown" });
      box.append(area);
    }
    area.value = text;
    area.focus();
    area.select();
    button.textContent = "Selected below";
  }
  setTimeout(() => { button.textContent = "Copy as Markdown"; }, 2000);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button.copy");
  if (button) copy(button);
});

// --- kept tokens

function bitsOf(text) {
  const raw = atob(text);
  const bits = new Uint8Array(raw.length * 8);
  for (let i = 0; i < bits.length; i++) bits[i] = (raw.charCodeAt(i >> 3) >> (i & 7)) & 1;
  return bits;
}

// the root, so that what few heads kept is seen
const shadeOf = (share) => Math.sqrt(share);

function keptMap() {
  const data = JSON.parse(byId("kept-data").textContent);
  if (!data.runs.length) return;
  const [runs, maps, layers, heads] = ["run", "map", "layer", "head"].map((name) => byId(`kept-${name}`));
  const canvas = byId("kept-overview");
  let spans = [];
  let sets = [];
  let lines = []; // of the overview: layer, head, set

  const run = () => data.runs[runs.value];
  const map = () => run().maps[maps.value];

  function showRun() {
    spans = run().tokens.map((piece) => make("span", piece.replaceAll("\n", "\u21b5\n")));
    byId("kept-text").replaceChildren(...spans);
    fill(maps, run().maps.map((each, i) => [i, `${each.method}, ${each.budget}`]));
    showMap();
  }

  function showMap() {
    sets = map().sets.map(bitsOf);
    lines = map().layers.flatMap(([layer, indices]) => indices.map((set, head) => ({ layer, head, set })));
    const before = [layers.value, heads.value];
    const nHeads = Math.max(...map().layers.map(([, indices]) => indices.length));
    fill(layers, [["", "all"], ...map().layers.map(([layer]) => [layer, layer])]);
    fill(heads, [["", "all"], ...Array.from({ length: nHeads }, (_, i) => [i, i])]);
    if (before[0] !== null) [layers.value, heads.value] = before;
    for (const select of [layers, heads]) if (select.selectedIndex < 0) select.value = "";
    showHeads();
  }

  const isChosen = (line) =>
    (layers.value === "" || line.layer === Number(layers.value)) && (heads.value === "" || line.head === Number(heads.value));

  function showHeads() {
    const chosen = lines.filter(isChosen);
    const n = spans.length;
    const counts = new Uint32Array(n);
    for (const line of chosen) for (let i = 0; i < n; i++) counts[i] += sets[line.set][i];
    let total = 0;
    let any = 0;
    spans.forEach((span, i) => {
      const share = chosen.length ? counts[i] / chosen.length : 0;
      span.style.setProperty("--shade", shadeOf(share).toFixed(3));
      span.title = `position ${i}, kept by ${(100 * share).toFixed(0)} % of ${chosen.length} heads`;
      total += counts[i];
      any += counts[i] > 0;
    });
    const mean = chosen.length ? total / chosen.length : 0;
    const where = (layers.value === "" ? "all layers" : `layer ${layers.value}`) + (heads.value === "" ? ", all heads" : `, head ${heads.value}`);
    byId("kept-summary").textContent = chosen.length
      ? `Sample ${run().sample}, ${where}: of ${n} prompt tokens a head kept ${mean.toFixed(0)} (${(100 * mean / n).toFixed(1)} %); ` +
        `${any} tokens were kept by at least one of ${chosen.length} heads.`
      : `There is no head ${heads.value} in layer ${layers.value}.`;
    draw();
  }

  function draw() {
    const height = Math.max(1, Math.min(6, Math.floor(420 / lines.length)));
    const n = spans.length;
    const width = Math.min(n, 1200);
    canvas.width = width;
    canvas.height = lines.length * height;
    canvas.style.height = `${canvas.height}px`;
    const context = canvas.getContext("2d");
    const colour = getComputedStyle(document.documentElement).getPropertyValue("--kept").trim().split(" ").map(Number);
    const image = context.createImageData(width, canvas.height);
    lines.forEach((line, row) => {
      const bits = sets[line.set];
      const dim = isChosen(line) ? 1 : 0.25;
      for (let x = 0; x < width; x++) {
        const from = Math.floor(x * n / width);
        const to = Math.floor((x + 1) * n / width);
        let kept = 0;
        for (let i = from; i < to; i++) kept += bits[i];
        for (let y = 0; y < height; y++) image.data.set([...colour, 255 * dim * shadeOf(kept / (to - from))], 4 * ((row * height + y) * width + x));
      }
    });
    context.putImageData(image, 0, 0);
  }

  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    const line = lines[Math.floor((event.clientY - box.top) / box.height * lines.length)];
    if (!line) return;
    layers.value = line.layer;
    heads.value = line.head;
    showHeads();
  });
  runs.addEventListener("change", showRun);
  maps.addEventListener("change", showMap);
  layers.addEventListener("change", showHeads);
  heads.addEventListener("change", showHeads);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  fill(runs, data.runs.map((each, i) => [i, each.run]));
  showRun();
}

// --- answers

function answers() {
  const data = JSON.parse(byId("answers-data").textContent);
  if (!data.samples.length) return;
  const step = 50;
  const [task, method, score] = ["task", "method", "score"].map((name) => byId(`answers-${name}`));
  let shown = step;

  const rows = data.samples.flatMap((sample) => sample.rows.map(([name, budget, value, said]) => ({ sample, name, budget, value, said })));
  const kindOf = (value) => (value === null ? "" : value >= 1 ? "right" : value <= 0 ? "wrong" : "partly");
  const any = (values) => [["", "any"], ...[...new Set(values)].map((value) => [value, value])];

  const list = (texts) => {
    const cell = make("td");
    if (texts.length < 2) cell.textContent = texts.join("");
    else cell.append(make("ol"));
    if (texts.length > 1) cell.firstChild.append(...texts.map((text) => make("li", text)));
    return cell;
  };

  function show() {
    const found = rows.filter((row) =>
      (!task.value || row.sample.task === task.value) && (!method.value || row.name === method.value) && (!score.value || kindOf(row.value) === score.value));
    byId("answers-rows").replaceChildren(...found.slice(0, shown).map((row) => {
      const line = make("tr");
      if (data.several) line.append(make("td", row.sample.run));
      line.append(
        make("td", row.sample.sample, { title: row.sample.fields }), make("td", row.name), make("td", row.budget),
        make("td", row.value === null ? "" : row.value.toFixed(2), { class: "number" }), list(row.said), list(row.sample.references));
      return line;
    }));
    byId("answers-count").textContent = `${Math.min(shown, found.length)} of ${found.length} answers`;
    byId("answers-more").hidden = shown >= found.length;
  }

  fill(task, any(data.samples.map((sample) => sample.task)));
  fill(method, any(rows.map((row) => row.name)));
  for (const select of [task, method, score]) select.addEventListener("change", () => { shown = step; show(); });
  byId("answers-more").addEventListener("click", () => { shown += step; show(); });
  byId("answers-box").addEventListener("toggle", show, { once: true });
}

keptMap();
answers();
