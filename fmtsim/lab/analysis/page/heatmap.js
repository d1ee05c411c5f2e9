// SPDX-License-Identifier: Apache-2.0
// Which layer loses bits in which step: a heatmap on a canvas, for a pointer and for the arrow keys.
const seen = data.observation;
const METRICS = {
  underflow_percent: { label: "underflow", axis: "non-zero elements that became zero, %", text: percent, worst: 1, floor: 1e-3 },
  saturation_percent: { label: "saturation", axis: "elements beyond the largest value, %", text: percent, worst: 1, floor: 1e-3 },
  sqnr_db: { label: "SQNR", axis: "signal to quantisation noise, dB", text: decibels, worst: -1 },
  amax: { label: "amax", axis: "largest magnitude", text: short, worst: 1 },
};
const ALL = -1; // the column of all observed steps together
const heat = { cells: [], row: 0, column: 0, layer: 0, step: ALL, area: null, painted: null };

const placeOf = (layer, operand) => layer * seen.operands.length + operand;
function figure(metric, layer, operand, step) {
  if (step === ALL) return num(seen.totals[metric][placeOf(layer, operand)]);
  const column = seen.history[metric];
  return num(column.length === 1 ? column[0] : column[placeOf(layer, operand) * seen.steps.length + step]);
}
// The worse of two figures; what is not there, or of a tensor of zeros, loses nothing.
function worse(metric, a, b) {
  if (b === null || Number.isNaN(b)) return a;
  if (a === null || Number.isNaN(a)) return b;
  return (b - a) * METRICS[metric].worst > 0 ? b : a;
}
function cell(metric, layer, operand, step) {
  if (operand !== "worst") return [figure(metric, layer, operand, step), operand];
  let [found, of] = [null, 0];
  seen.operands.forEach((_, o) => {
    const next = worse(metric, found, figure(metric, layer, o, step));
    if (next !== null && !Object.is(next, found)) [found, of] = [next, o];
  });
  return [found, of];
}

// The colour scale spans all operands and steps, so that colours of different choices mean the same.
const spans = {};
function span(metric) {
  if (!spans[metric]) {
    const all = [...seen.history[metric], ...seen.totals[metric]].map(num).filter((v) => isNumber(v) && (metric !== "amax" || v > 0));
    spans[metric] = all.length ? [all.reduce((a, b) => Math.min(a, b)), all.reduce((a, b) => Math.max(a, b))] : [0, 1];
  }
  return spans[metric];
}
const spanAboveZero = (metric) => [...seen.history[metric], ...seen.totals[metric]].map(num).filter((v) => v > 0 && isNumber(v)).reduce((a, b) => Math.min(a, b), Infinity);
// Return where a figure lies on the scale, 0 (nothing lost) to 1, and the ends of the scale.
function scale(metric, log) {
  const { floor, worst } = METRICS[metric];
  let [low, high] = span(metric);
  const least = spanAboveZero(metric); // Infinity where nothing was lost anywhere
  if (floor && log) low = Math.max(floor, isNumber(least) ? least : 0); // a share of nothing has no logarithm
  if (floor) high = Math.max(high, 10 * low, floor);
  if (metric === "sqnr_db" || !(low > 0)) log = false;
  if (low === high) high = low ? (low > 0 ? low * 2 : low / 2) : 1;
  const on = log ? Math.log2 : (v) => v;
  const share = (v) => {
    if (v === Infinity) return worst > 0 ? 1 : 0;
    if (v === -Infinity) return worst > 0 ? 0 : 1;
    if (log && v <= low) return floor ? (v > 0 ? 0.04 : 0) : 0;
    const t = (on(v) - on(low)) / (on(high) - on(low));
    return worst > 0 ? (floor && log ? 0.04 + 0.96 * t : t) : 1 - t;
  };
  return { share, low, high, log };
}

function rowsShown() {
  const metric = $("heat-metric").value;
  const operand = chosenOperand();
  const wanted = $("heat-filter").value.trim().toLowerCase();
  const rows = seen.layers.map((_, i) => i).filter((i) => seen.layers[i].toLowerCase().includes(wanted));
  const sort = $("heat-sort").value;
  if (sort === "name") rows.sort((a, b) => seen.layers[a].localeCompare(seen.layers[b], "en", { numeric: true }));
  if (sort === "worst") {
    const key = new Map(rows.map((i) => [i, cell(metric, i, operand, ALL)[0]]));
    const rank = (v) => (v === null || Number.isNaN(v) ? -Infinity : v * METRICS[metric].worst);
    rows.sort((a, b) => { const [p, q] = [rank(key.get(a)), rank(key.get(b))]; return p === q ? a - b : q - p; });
  }
  return rows;
}
const chosenOperand = () => ($("heat-operand").value === "worst" ? "worst" : Number($("heat-operand").value));
const stepText = (step) => (step === ALL ? "all observed steps" : `step ${seen.steps[step]}`);

const MOST_ROWS = 250;
function drawHeat() {
  const metric = $("heat-metric").value;
  const rows = rowsShown();
  heat.cells = rows.slice(0, MOST_ROWS);
  const of = chosenOperand() === "worst" ? "the worst operand" : operandText(chosenOperand());
  $("heat-shown").textContent = !rows.length ? `No layer has “${$("heat-filter").value.trim()}” in its name; there are ${seen.layers.length}` : `${METRICS[metric].label} of ${of}; ${rows.length} of ${seen.layers.length} layers` +
    (rows.length > MOST_ROWS ? `, the first ${MOST_ROWS} drawn: filter them to see others` : "") +
    `; ${seen.steps.length} of ${seen.forwards} steps observed`;
  $("heat-log").disabled = metric === "sqnr_db";
  const canvas = $("heat");
  const w = Math.max(260, canvas.parentElement.clientWidth);
  const context = canvas.getContext("2d");
  const high = Math.max(13, Math.min(20, 900 / Math.max(1, heat.cells.length)));
  context.font = `${Math.min(12, high - 2)}px ui-monospace, Menlo, Consolas, monospace`;
  const longest = heat.cells.reduce((a, i) => Math.max(a, context.measureText(seen.layers[i]).width), 40);
  const left = Math.min(longest + 10, w * 0.38);
  const total = seen.steps.length ? 30 : w - left - 2;
  heat.area = { left, top: 4, high, wide: (w - left - total - (seen.steps.length ? 8 : 2)) / Math.max(1, seen.steps.length), total, w };
  const height = heat.area.top + heat.cells.length * high + 40;
  const sharp = devicePixelRatio || 1;
  canvas.width = Math.round(w * sharp);
  canvas.height = Math.round(height * sharp);
  canvas.style.width = w + "px";
  canvas.style.height = height + "px";
  context.setTransform(sharp, 0, 0, sharp, 0, 0);
  paint(context, metric);
  heat.painted = make("canvas", { width: canvas.width, height: canvas.height });
  heat.painted.getContext("2d").drawImage(canvas, 0, 0);
  heat.row = Math.min(heat.row, Math.max(0, heat.cells.length - 1));
  mark();
  drawScale(metric);
}

const leftOf = (column) => (column === seen.steps.length ? heat.area.w - heat.area.total - 1 : heat.area.left + column * heat.area.wide);
function paint(context, metric) {
  const { left, top, high, wide, total, w } = heat.area;
  const operand = chosenOperand();
  const { share } = scale(metric, $("heat-log").checked);
  context.fillStyle = ink("panel");
  context.fillRect(0, 0, w, top + heat.cells.length * high + 40);
  context.font = `${Math.min(12, high - 2)}px ui-monospace, Menlo, Consolas, monospace`;
  context.textBaseline = "middle";
  heat.cells.forEach((layer, row) => {
    const y = top + row * high;
    context.fillStyle = ink("ink");
    context.textAlign = "right";
    context.fillText(clipped(context, seen.layers[layer], left - 10), left - 8, y + high / 2);
    for (let column = 0; column <= seen.steps.length; column++) {
      const [value] = cell(metric, layer, operand, column === seen.steps.length ? ALL : column);
      context.fillStyle = value === null || Number.isNaN(value) ? ink("missing") : colour(share(value));
      const gap = (column === seen.steps.length ? total : wide) > 6 ? 1 : 0;
      context.fillRect(leftOf(column), y, (column === seen.steps.length ? total : wide) - gap + (gap ? 0 : 0.4), high - 1);
    }
  });
  axis(context);
}
// Draw the chosen cell and the keyboard's over the cells, which are painted once and kept.
function mark() {
  const canvas = $("heat");
  const context = canvas.getContext("2d");
  context.save();
  context.resetTransform();
  context.drawImage(heat.painted, 0, 0);
  context.restore();
  const at = heat.cells.indexOf(heat.layer);
  if (at >= 0) outline(context, at, heat.step === ALL ? seen.steps.length : heat.step, ink("accent"), 2);
  if (document.activeElement === canvas && heat.cells.length) outline(context, heat.row, heat.column, ink("ink"), 2);
}
function outline(context, row, column, stroke, line) {
  const { top, high, wide, total } = heat.area;
  context.strokeStyle = stroke;
  context.lineWidth = line;
  context.strokeRect(leftOf(column) - 0.5, top + row * high - 0.5, Math.max(4, column === seen.steps.length ? total : wide), high);
}
// Cut a name at its front, where names of layers are alike.
function clipped(context, text, most) {
  let from = 0;
  while (context.measureText((from ? "…" : "") + text.slice(from)).width > most && from < text.length) from++;
  return (from ? "…" : "") + text.slice(from);
}
function axis(context) {
  const { top, high, wide, total } = heat.area;
  const y = top + heat.cells.length * high;
  context.font = "11.5px system-ui, Helvetica, Arial, sans-serif";
  context.fillStyle = ink("quiet");
  context.textAlign = "center";
  const every = Math.max(1, Math.ceil(52 / wide));
  for (let i = 0; i < seen.steps.length - every / 2 || i === 0 && seen.steps.length; i += every) context.fillText(seen.steps[i], leftOf(i) + wide / 2, y + 11);
  context.fillText("all", leftOf(seen.steps.length) + total / 2, y + 11);
  if (seen.steps.length) context.fillText("step", heat.area.left + (wide * seen.steps.length) / 2, y + 29);
}

function drawScale(metric) {
  const host = $("heat-scale");
  const w = Math.min(460, cleared(host));
  const { share, low, high, log } = scale(metric, $("heat-log").checked);
  const svg = draw("svg", { viewBox: `0 0 ${w} 46`, width: w, height: 46, role: "img", "aria-label": `Colours: ${METRICS[metric].axis}, ${short(low)} to ${short(high)}` });
  const on = (v) => (log ? (Math.log2(v) - Math.log2(low)) / (Math.log2(high) - Math.log2(low)) : (v - low) / (high - low));
  for (let i = 0; i < 100; i++) {
    const v = log ? low * (high / low) ** ((i + 0.5) / 100) : low + ((high - low) * (i + 0.5)) / 100;
    svg.append(draw("rect", { x: 18 + (i * (w - 36)) / 100, y: 0, width: (w - 36) / 100 + 0.5, height: 12, fill: colour(share(v)) }));
  }
  for (const t of (log ? logTicks : ticks)(low, high, w / 70)) svg.append(axisText(18 + on(t) * (w - 36), 26, short(t), { "text-anchor": "middle" }));
  svg.append(axisText(18, 42, METRICS[metric].axis));
  host.append(svg);
}

function cellAt(event) {
  const box = $("heat").getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const { left, top, high, wide } = heat.area;
  const row = Math.floor((y - top) / high);
  if (row < 0 || row >= heat.cells.length) return null;
  const column = x < left ? seen.steps.length : Math.min(seen.steps.length, Math.floor((x - left) / wide));
  return [row, x >= leftOf(seen.steps.length) ? seen.steps.length : Math.min(column, x < left ? seen.steps.length : Math.max(0, seen.steps.length - 1))];
}
function describe(row, column) {
  const layer = heat.cells[row];
  const step = column === seen.steps.length ? ALL : column;
  const metric = $("heat-metric").value;
  const [, operand] = cell(metric, layer, chosenOperand(), step);
  const lines = Object.entries(METRICS).map(([key, m]) => `${m.label}: ${m.text(figure(key, layer, operand, step))}`);
  return [`${seen.layers[layer]} · ${stepText(step)}`, [`${operandText(operand)}${chosenOperand() === "worst" ? ", the worst" : ""} · ${formatOf(layer, operand)}`, ...lines]];
}
const operandText = (operand) => seen.words[operand];
const formatOf = (layer, operand) => seen.formats[placeOf(layer, operand)] ?? "not observed";

function select(layer, step, scroll = false) {
  heat.layer = layer;
  heat.step = step;
  mark();
  drawDetails();
  if (typeof showLayer === "function") showLayer(layer);
  if (scroll) $("details").scrollIntoView({ block: "nearest" });
}

function startHeat() {
  heat.column = seen.steps.length;
  options($("heat-metric"), Object.entries(METRICS).map(([key, m]) => [key, m.label]), mostTelling);
  options($("heat-operand"), [["worst", "the worst operand"], ...seen.operands.map((_, o) => [o, operandText(o)])]);
  for (const id of ["heat-metric", "heat-operand", "heat-sort", "heat-filter", "heat-log"]) {
    $(id).addEventListener("input", () => {
      drawHeat();
      drawDetails();
    });
  }
  const canvas = $("heat");
  canvas.setAttribute("aria-label", `Heatmap of ${seen.layers.length} layers by ${seen.steps.length} observed steps`);
  canvas.addEventListener("pointermove", (event) => {
    const at = cellAt(event);
    if (at) showTip(event.clientX, event.clientY, ...describe(...at));
    else hideTip();
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("click", (event) => {
    const at = cellAt(event);
    if (!at) return;
    [heat.row, heat.column] = at;
    choose();
  });
  canvas.addEventListener("keydown", moveBy);
  for (const name of ["focus", "blur"]) canvas.addEventListener(name, () => { hideTip(); mark(); });
  $("heat-save").addEventListener("click", savePicture);
  const names = Object.keys(METRICS);
  const steps = [...seen.steps.keys(), ALL];
  const row = (l, o, step) => [seen.layers[l], seen.operands[o], formatOf(l, o), step === ALL ? "all" : seen.steps[step], ...names.map((name) => figure(name, l, o, step))];
  $("heat-csv").addEventListener("click", () => saveCsv([["layer", "operand", "format", "step", ...names], ...placesSeen().flatMap(([l, o]) => steps.map((step) => row(l, o, step)))], "bits.csv"));
}
const placesSeen = () => seen.layers.flatMap((_, l) => seen.operands.map((_, o) => [l, o])).filter(([l, o]) => seen.formats[placeOf(l, o)] !== null);
// Save the heatmap at twice its size, under the report's title, what it shows and the scale of its colours.
function savePicture() {
  const scaleSvg = $("heat-scale").querySelector("svg").cloneNode(true);
  const height = heat.area.top + heat.cells.length * heat.area.high + 40;
  const head = 104;
  asImage(scaleSvg, (image) => {
    const canvas = sharpCanvas(heat.area.w + 24, height + head);
    const context = canvas.getContext("2d");
    context.fillStyle = ink("panel");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = ink("ink");
    context.font = `600 16px ${FONT}`;
    context.fillText(data.title, 12, 24, heat.area.w);
    context.font = `13px ${FONT}`;
    context.fillText($("heat-shown").textContent, 12, 44, heat.area.w);
    context.drawImage(image, 0, 54, Number(scaleSvg.getAttribute("width")), Number(scaleSvg.getAttribute("height")));
    context.translate(12, head);
    paint(context, $("heat-metric").value);
    canvas.toBlob((blob) => save(blob, "heatmap.png"));
  });
}
const choose = () => select(heat.cells[heat.row], heat.column === seen.steps.length ? ALL : heat.column);
function moveBy(event) {
  const last = seen.steps.length;
  const to = {
    ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -last], End: [0, last], Enter: [0, 0], " ": [0, 0],
  }[event.key];
  if (!to || !heat.cells.length) return;
  event.preventDefault();
  heat.row = Math.min(heat.cells.length - 1, Math.max(0, heat.row + to[0]));
  heat.column = Math.min(last, Math.max(0, heat.column + to[1]));
  if (event.key === "Enter" || event.key === " ") choose();
  mark();
  const [head, lines] = describe(heat.row, heat.column);
  const box = $("heat").getBoundingClientRect();
  showTip(box.left + leftOf(heat.column) + 12, box.top + heat.area.top + (heat.row + 1) * heat.area.high, head, lines);
  $("heat-said").textContent = [head, ...lines].join(", ");
}
