// What ties the page together: filters, plotly's figures, DataTables' tables, the example browser.
// Everything a model wrote is set as text, never as HTML.
const by = (id) => document.getElementById(id);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const data = JSON.parse(by("data").textContent);
const element = (name, words = "", attributes = {}) => {
  const made = document.createElement(name);
  made.textContent = words;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};

// ---- filters: an empty choice lets everything pass, and so does a row that has no such value (the full cache) ----
const form = by("filters");
const wanted = form ? Object.fromEntries(new FormData(form)) : {};
const NONE = ["", "–"];
const passes = (name, value) => !wanted[name] || value === undefined || NONE.includes(value) || value === wanted[name];
const shown = (of) => ["model", "task", "budget", "schedule"].every((name) => passes(name, of[name]));

// ---- tables ----
const source = new Blob([by("datatables").textContent], { type: "text/javascript" });
const { default: DataTable } = await import(URL.createObjectURL(source));
DataTable.ext.search.push((settings, row, index) => shown(settings.aoData[index].nTr.dataset));
const tables = all("table.sortable, table.matrix").map((table) => {
  const long = table.tBodies[0].rows.length > 60;
  const layout = { topStart: null, topEnd: null, bottomStart: long ? "info" : null, bottomEnd: long ? "paging" : null };
  if (table.matches(".sortable") && long) layout.topEnd = "search";
  const options = { order: [], paging: long, pageLength: 50, info: long, autoWidth: false, layout };
  return new DataTable(table, { ...options, language: { emptyTable: "nothing", zeroRecords: "nothing is left by the filters" } });
});
tables.forEach((table) => table.on("order", () => remember()));

// ---- figures: drawn when they come into sight ----
const hidden = new Set();
const visible = (spec) => spec.data.map((t) => !t.meta || (!hidden.has(t.meta.line) && passes("schedule", t.meta.schedule)));
const spec = (figure) => data.figures[figure.dataset.figure];
const config = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]] };
const PAPER = { responsive: false, staticPlot: true };
const PAPER_WIDTH = 436; // pixels: two figures beside each other on A4 and on letter paper, laid on its side
function plotly() {
  if (window.Plotly) return window.Plotly;
  document.head.append(element("script", by("plotly").textContent)); // runs at once
  return window.Plotly;
}
function draw(figure, onPaper = false) {
  const { data: traces, layout } = spec(figure);
  const flags = visible(spec(figure));
  const shape = onPaper ? { ...layout, width: PAPER_WIDTH } : layout;
  figure.drawn = true;
  plotly().newPlot(figure.querySelector(".plot"), traces.map((t, i) => ({ ...t, visible: flags[i] })), shape, onPaper ? PAPER : config);
}
const sight = new IntersectionObserver((seen) => {
  for (const { isIntersecting, target } of seen) {
    if (isIntersecting && !target.drawn) draw(target);
  }
}, { rootMargin: "800px" });
const figures = all("figure.chart");
figures.forEach((figure) => sight.observe(figure));
const axis = () => document.querySelector("input[name=axis]:checked")?.value ?? "";
function redraw() {
  const chosen = axis();
  document.querySelector("#curves .cards")?.classList.toggle("large", chosen === "");
  for (const figure of figures) {
    const { axis: own } = figure.dataset;
    figure.hidden = !shown(figure.dataset) || (chosen !== "" && ["budget", "bytes"].includes(own) && own !== chosen);
    if (figure.drawn && !figure.hidden) plotly().restyle(figure.querySelector(".plot"), { visible: visible(spec(figure)) });
  }
  legend.forEach((button) => button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.line))));
  remember();
}
const legend = all(".legend button");
legend.forEach((button) => button.addEventListener("click", () => {
  const { line } = button.dataset;
  if (!hidden.delete(line)) hidden.add(line);
  redraw();
}));
all("input[name=axis]").forEach((input) => input.addEventListener("change", redraw));

// ---- the example browser ----
const TOP = 35; // the level of a token that every head keeps
const tint = (level) => `rgb(0 114 178 / ${level === 0 ? 0 : 0.1 + 0.5 * level / TOP})`;
const levelOf = (letter) => parseInt(letter, 36);
const now = { group: 0, place: 0, colour: "" }; // colour: the column that was chosen
const groups = all("script.group");
const read = new Map(); // each is read when it is looked at: together they are megabytes
function group() {
  if (!read.has(now.group)) read.set(now.group, JSON.parse(groups[now.group].textContent));
  return read.get(now.group);
}
const columns = () => group().entries.map((number, column) => ({ column, number, ...data.entries[number] }))
  .filter((entry) => passes("budget", entry.budget) && passes("schedule", entry.moment));
const differs = (example) => columns().some(({ column }) => example.answers[column]?.text?.some((piece) => typeof piece !== "string"));
const places = () => group().examples.map((_, place) => place)
  .filter((place) => !by("differing").checked || differs(group().examples[place]));
const mean = (numbers) => (numbers.length ? numbers.reduce((a, b) => a + b) / numbers.length : null);
const meanScore = (example) => mean(columns().map(({ column }) => example.answers[column]?.score).filter((score) => score != null));

function browse() {
  const left = places();
  if (!left.includes(now.place)) now.place = left[0] ?? 0;
  const strip = left.map((place) => {
    const example = group().examples[place];
    const score = meanScore(example);
    const said = `example ${example.index}${score === null ? "" : `, mean score ${score.toFixed(2)}`}`;
    const button = element("button", "", { type: "button", title: said, "aria-label": said, style: `--v:${score ?? 0}` });
    button.classList.toggle("on", place === now.place);
    button.addEventListener("click", () => { now.place = place; browse(); });
    return button;
  });
  by("strip").replaceChildren(...strip);
  const example = group().examples[now.place];
  by("at").textContent = left.length ? `example ${example.index} (${left.indexOf(now.place) + 1} of ${left.length})` : "none";
  const coloured = columns().filter(({ column }) => example.answers[column]?.levels);
  by("kept-by").hidden = coloured.length === 0;
  by("colour").replaceChildren(...coloured.map((entry) => new Option(`${entry.line}, ${entry.budget}`, entry.column)));
  const kept = coloured.find((entry) => String(entry.column) === now.colour) ?? coloured.find(({ column }) => /[^z]/.test(example.answers[column].strip)) ?? coloured[0];
  if (kept) by("colour").value = kept.column;
  by("foldable").hidden = !example.prompt?.some(([, folded]) => folded);
  by("asked").replaceChildren(...(left.length ? asked(example, kept) : []));
  by("answers").replaceChildren(...(left.length ? columns().map((entry) => card(entry, example)).filter(Boolean) : [element("p", "No answer differs.")]));
  remember();
}
function asked(example, kept) {
  const levels = kept ? example.answers[kept.column].levels : null;
  const parts = [element("p", `${example.length.toLocaleString("en")} tokens of prompt${example.about ? `: ${example.about}` : ""}`, { class: "about" })];
  if (example.prompt) parts.push(promptOf(example, levels));
  else if (group().without) parts.push(element("p", group().without, { class: "remark" }));
  const references = element("p", "expected ", { class: "references" });
  references.append(...example.references.flatMap((reference) => [element("code", reference), " "]));
  if (example.references.length) parts.push(references);
  return parts;
}
function promptOf(example, levels) {
  const whole = by("whole").checked;
  const box = element("div", "", { class: whole ? "prompt whole" : "prompt" });
  let end = 0;
  example.prompt.forEach(([start, folded, ...tokens], part) => {
    const many = (count) => `… ${count.toLocaleString("en")} tokens`;
    if (start > end) box.append(element("span", `${many(start - end)}, left out to keep this file small …`, { class: "gap" }));
    end = start + tokens.length;
    if (!folded || whole) return box.append(...spans(tokens, unfolded(levels?.[part] ?? ""), markedTokens(tokens, example.references)));
    const opens = element("button", `${many(tokens.length)} …`, { type: "button", class: "gap", title: "show the whole prompt" });
    opens.addEventListener("click", () => { by("whole").checked = true; browse(); });
    return box.append(opens);
  });
  return box;
}
const unfolded = (runs) => runs.replace(/(.)\{(\d+)\}/g, (_, letter, count) => letter.repeat(count));
function spans(tokens, levels, marked) { // one for all tokens in a row that look alike
  const made = [];
  let before = null;
  tokens.forEach((token, place) => {
    const look = `${levels[place] ?? "0"}${marked.has(place)}`;
    if (look === before) { made[made.length - 1].textContent += token; return; }
    before = look;
    made.push(element("span", token, { style: `background: ${tint(levelOf(look[0]))}`, class: marked.has(place) ? "reference" : "" }));
  });
  return made;
}
function markedTokens(tokens, references) {
  const text = tokens.join("");
  const found = new Set();
  for (const reference of references.filter((words) => words.trim())) {
    const from = text.indexOf(reference);
    let place = 0;
    tokens.forEach((token, i) => {
      if (from >= 0 && place < from + reference.length && place + token.length > from) found.add(i);
      place += token.length;
    });
  }
  return found;
}
function card(entry, example) {
  const answer = example.answers[entry.column];
  if (!answer) return null;
  const box = element("article", "", { class: "answer", "data-line": entry.line, "data-budget": entry.budget });
  const head = element("header");
  const look = document.createRange().createContextualFragment(data.looks[entry.line]); // our own drawing
  head.append(look, element("b", entry.policy));
  if (!NONE.includes(entry.budget)) head.append(element("span", entry.budget));
  const score = answer.nll !== undefined ? `NLL ${answer.nll.toFixed(3)}` : answer.score === undefined ? "" : answer.score.toFixed(2);
  if (score) head.append(element("output", score, answer.score === undefined ? {} : { style: `--v:${answer.score}`, class: answer.score > 0.62 ? "dark" : "" }));
  box.append(head, words(answer));
  if (answer.strip) box.append(stripOf(answer.strip));
  const held = [];
  if (answer.kept !== undefined) held.push(`${answer.kept.toLocaleString("en")} tokens per KV head`);
  if (answer.bytes !== undefined) held.push(`${(answer.bytes / 2 ** 20).toPrecision(3)} MiB`);
  if (entry.schedule) held.push(entry.schedule);
  box.append(element("footer", held.join(" · ")));
  return box;
}
function words(answer) {
  const text = element("p", "", { class: "text" });
  if (answer.error !== undefined) text.append(element("strong", answer.error));
  for (const piece of answer.text ?? []) {
    text.append(typeof piece === "string" ? document.createTextNode(piece) : element(piece[1] === 1 ? "ins" : "del", piece[0]));
  }
  const own = (answer.text ?? []).map((piece) => (typeof piece === "string" ? piece : piece[1] === 1 ? piece[0] : "")).join("");
  if (answer.text && !own.trim()) text.append(element("em", own ? ` (white space alone: ${own.length})` : " (empty)"));
  return text;
}
function stripOf(letters) {
  const canvas = element("canvas", "", { class: "kept", width: letters.length, height: 1, role: "img", title: "the prompt from left to right: the stronger the colour, the more heads keep it" });
  const pen = canvas.getContext("2d");
  [...letters].forEach((letter, x) => { pen.fillStyle = tint(levelOf(letter)); pen.fillRect(x, 0, 1, 1); });
  return canvas;
}
function step(by_) {
  const left = places();
  now.place = left[(left.indexOf(now.place) + by_ + left.length) % left.length] ?? 0;
  browse();
}
function choose(place) {
  now.group = place;
  by("group").value = place;
  browse();
}
by("group").replaceChildren(...groups.map((one, place) => new Option(one.dataset.title, place)));
by("group").addEventListener("change", (event) => choose(Number(event.target.value)));
by("colour").addEventListener("change", (event) => { now.colour = event.target.value; browse(); });
["differing", "whole"].forEach((id) => by(id).addEventListener("change", browse));
by("previous").addEventListener("click", () => step(-1));
by("next").addEventListener("click", () => step(1));
document.addEventListener("keydown", (event) => {
  const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const { top, bottom } = by("browser").getBoundingClientRect();
  const taken = event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || event.target.closest("input, select");
  if (way && !taken && top < window.innerHeight && bottom > 0) step(way);
});

// ---- a choice in the bar holds for all of it ----
function filter() {
  if (form) Object.assign(wanted, Object.fromEntries(new FormData(form)));
  tables.forEach((table) => {
    table.columns().every(function () {
      const { task } = this.header().dataset;
      if (task) this.visible(passes("task", task) || task.startsWith(`${wanted.task}: `), false);
    });
    table.draw();
  });
  redraw();
  const fits = groups.map(({ dataset }) => passes("model", dataset.model) && passes("task", dataset.task));
  if (fits.includes(true) && !fits[now.group]) choose(fits.indexOf(true));
  else browse();
}
form?.addEventListener("change", filter);
form?.addEventListener("reset", () => setTimeout(filter));

// ---- the address says what is shown, as #section?choices: a link opens the page as it was left ----
const state = () => ({
  ...wanted,
  sort: tables.map((table) => table.order().map(([column, way]) => `${column}${way}`).join()).join("|"),
  axis: axis(),
  hide: [...hidden].join("|"),
  group: String(now.group),
  example: String(now.place),
  kept: now.colour,
  differing: String(by("differing").checked),
  whole: String(by("whole").checked),
});
const usual = state();
const address = () => location.hash.slice(1).split("?");
function remember() {
  const chosen = new URLSearchParams(Object.entries(state()).filter(([name, value]) => value !== usual[name])).toString();
  history.replaceState(null, "", `${location.href.split("#")[0]}#${address()[0]}${chosen && `?${chosen}`}`);
}
function recall() {
  const [section, chosen] = address();
  const asked = { ...usual, ...Object.fromEntries(new URLSearchParams(chosen ?? "")) };
  all("#filters select").forEach((select) => { select.value = asked[select.name]; });
  asked.sort.split("|").forEach((order, place) => tables[place]?.order(order.split(",").flatMap((one) => {
    const found = /^(\d+)(asc|desc)$/.exec(one);
    return found ? [[Number(found[1]), found[2]]] : [];
  })));
  all("input[name=axis]").forEach((input) => { input.checked = input.value === asked.axis; });
  hidden.clear();
  asked.hide.split("|").filter(Boolean).forEach((line) => hidden.add(line));
  Object.assign(now, { group: asked.group in groups ? Number(asked.group) : 0, place: Number(asked.example), colour: asked.kept });
  ["differing", "whole"].forEach((id) => { by(id).checked = asked[id] === "true"; });
  by("group").value = now.group;
  filter();
  by(section)?.scrollIntoView();
}
window.addEventListener("hashchange", () => (location.hash.includes("?") ? recall() : remember()));
recall();

// ---- on paper everything is there ----
window.addEventListener("beforeprint", () => {
  figures.filter((figure) => !figure.hidden).forEach((figure) => draw(figure, true));
  all("details").forEach((details) => { details.dataset.was = details.open; details.open = true; });
  tables.forEach((table) => table.page.len(-1).draw());
});
window.addEventListener("afterprint", () => {
  all("details").forEach((details) => { details.open = details.dataset.was === "true"; });
  tables.forEach((table) => table.page.len(50).draw());
  figures.filter((figure) => !figure.hidden).forEach((figure) => draw(figure));
});
document.documentElement.dataset.ready = Math.round(performance.now()); // milliseconds
