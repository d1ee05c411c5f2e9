// SPDX-License-Identifier: Apache-2.0
// Tables that sort by any column, and what a chosen cell of the heatmap is made of.

// Columns are {name, text, left, mono, long, value}: `value` sorts, `text` is shown. Long tables begin with `most` rows.
function table(host, columns, rows, { most = Infinity, sorted = null, down = true, caption } = {}) {
  let [by, falling, shown] = [sorted, down, most];
  function render() {
    const order = by === null ? rows : [...rows].sort((a, b) => ranked(columns[by].value(a), columns[by].value(b), falling));
    const head = make("tr", {}, ...columns.map((c, i) => {
      const button = make("button", { type: "button" }, c.name + (by === i ? (falling ? " ↓" : " ↑") : ""));
      button.addEventListener("click", () => {
        [falling, by] = [by === i ? !falling : !c.left, i];
        render();
        host.querySelectorAll("th button")[i].focus();
      });
      return make("th", { scope: "col", class: c.left ? "text" : null, "aria-sort": by === i ? (falling ? "descending" : "ascending") : null }, button);
    }));
    const kind = (c) => [c.left && "text", c.mono && "name", c.long && "long"].filter(Boolean).join(" ") || null;
    const body = order.slice(0, shown).map((row) => make("tr", {}, ...columns.map((c) => make("td", { class: kind(c) }, c.text(row)))));
    const parts = [make("table", { "aria-label": caption }, make("thead", {}, head), make("tbody", {}, ...body))];
    if (rows.length > shown) {
      const more = make("button", { type: "button", class: "more" }, `Show all ${rows.length}`);
      more.addEventListener("click", () => {
        shown = Infinity;
        render();
        host.querySelector("th button").focus();
      });
      parts.push(more);
    }
    host.replaceChildren(...parts);
  }
  render();
}
// On a narrow screen what a row is named by is followed by its numbers; other texts come last.
const arranged = (columns) => (narrow() ? [...columns.filter((c) => !c.late), ...columns.filter((c) => c.late)] : columns);
const operandCell = (o) => (narrow() ? seen.operands[o] : operandText(o));
// What is not there comes last, whichever way a column is sorted.
function ranked(a, b, falling) {
  const none = (v) => v === null || v === undefined || Number.isNaN(v);
  if (none(a) || none(b)) return none(a) - none(b);
  const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a === b ? 0 : a < b ? -1 : 1;
  return falling ? -order : order;
}

const figureColumns = (at) => Object.entries(METRICS).map(([key, m]) => ({ name: m.label, value: (row) => figure(key, ...at(row)), text: (row) => m.text(figure(key, ...at(row))) }));
const countColumn = (key, name, at) => ({ name, value: (row) => figure(key, ...at(row)), text: (row) => count(figure(key, ...at(row))) });

function drawDetails() {
  const { layer, step } = heat;
  const metric = $("heat-metric").value;
  const present = seen.operands.map((_, o) => o).filter((o) => seen.formats[placeOf(layer, o)] !== null);
  $("details-title").textContent = `${seen.layers[layer]}, ${stepText(step)}`;
  const at = (o) => [layer, o, step];
  table($("details-table"), arranged([
    { name: "operand", left: true, mono: false, value: (o) => o, text: operandCell },
    { name: "format", left: true, late: true, mono: true, value: (o) => formatOf(layer, o), text: (o) => formatOf(layer, o) },
    ...figureColumns(at),
    countColumn("nonfinite", "NaN or Inf", at),
    countColumn("elements", "elements", at),
  ]), present, { caption: `Operands of ${seen.layers[layer]}` });
  const host = $("details-chart");
  if (seen.steps.length < 2) {
    host.replaceChildren();
    return;
  }
  const lines = new Map(); // operands by the points of their line: equal lines are drawn once
  for (const o of present) {
    const points = seen.steps.map((s, k) => [s, figure(metric, layer, o, k)]);
    lines.set(String(points), [points, ...(lines.get(String(points)) ?? []).slice(1), seen.operands[o]]);
  }
  const series = [...lines.values()].map(([points, ...names], i) => ({
    label: names.join(" = "), color: ink("c" + (i % 8)), dash: ["none", "7 3", "2 3"][Math.floor(i / 8) % 3], points,
  }));
  const m = METRICS[metric];
  const log = metric === "amax";
  lineChart(host, { series, height: 210, log, xLabel: "step", yLabel: m.label + { underflow_percent: ", %", saturation_percent: ", %", sqnr_db: ", dB", amax: "" }[metric], name: `${m.label} of ${seen.layers[layer]} by step` });
  host.append(make("div", { class: "legend quiet" }, ...series.map((s) => {
    const line = make("i");
    line.style.cssText = `display:inline-block;width:18px;border-top:3px solid ${s.color};margin-right:5px;vertical-align:middle`;
    return make("span", {}, line, s.label);
  })));
}

// Every operand of every layer over all observed steps, with its cost where that was measured.
function worstTable() {
  const rows = placesSeen();
  const costs = new Map((data.attribution?.rows ?? []).map((row) => [row.layer + " " + row.operand, num(row.loss)]));
  const cost = ([l, o]) => costs.get(seen.layers[l] + " " + seen.operands[o]) ?? null;
  const at = ([l, o]) => [l, o, ALL];
  const columns = [
    { name: "layer", left: true, mono: true, long: true, value: ([l]) => l, text: ([l]) => make("button", { type: "button", onclick: () => select(l, ALL, true) }, seen.layers[l]) },
    { name: "operand", left: true, value: ([, o]) => seen.operands[o], text: ([, o]) => operandCell(o) },
    { name: "format", left: true, late: true, mono: true, value: ([l, o]) => formatOf(l, o), text: ([l, o]) => formatOf(l, o) },
    ...figureColumns(at),
    countColumn("nonfinite", "NaN or Inf", at),
  ];
  if (costs.size) columns.push({ name: "cost in loss", value: cost, text: (row) => short(cost(row)) });
  const ordered = arranged(columns);
  const sorted = ordered.findIndex((c) => c.name === (costs.size ? "cost in loss" : "SQNR"));
  table($("worst-table"), ordered, rows, { most: 12, sorted, down: costs.size > 0, caption: "Operands by loss of bits" });
}

// The layer and operand that lost most in all observed steps, null where nothing is told; and what tells more of a run.
function worstOf(metric) {
  const known = (place) => !Number.isNaN(figure(metric, ...place, ALL) ?? NaN);
  const places = seen.layers.flatMap((_, l) => seen.operands.map((_, o) => [l, o])).filter(known);
  const rank = (place) => figure(metric, ...place, ALL) * METRICS[metric].worst;
  return places.length ? places.reduce((a, b) => (rank(b) > rank(a) ? b : a)) : [0, 0];
}
const mostTelling = seen && seen.layers.length && (figure("underflow_percent", ...worstOf("underflow_percent"), ALL) ?? 0) > 0.01 ? "underflow_percent" : "sqnr_db";

function startDetails() {
  const [layer] = worstOf(mostTelling);
  heat.layer = layer;
  view(drawHeat);
  view(drawDetails);
  worstTable();
}
