// SPDX-License-Identifier: Apache-2.0
// Histograms of exponents beside the window of a format, and what any eXmY would lose of them, counted in the page.
const TOGETHER = "all";
const COMMON = ["e4m3", "e5m2", "bf16", "fp16", "e2m1", "e2m3", "e3m2", "e3m4", "e4m3fnuz", "e5m2fnuz", "int8", "int4"];

// A format as `fmtsim.get_format` finds it: a registered one by its name, else eXmY spelled out, with IEEE 754 rules above
// 8 bits, one NaN and no Inf at 8 bits, finite below. Returns {name, least, most, limit}, or a text that says what is wrong.
function spelled(text) {
  if (seen.choices.some((c) => c[0] === text.trim().toLowerCase())) return fromChoices(text.trim().toLowerCase());
  const found = /^e(\d{1,9})m(\d{1,9})$/.exec(text.trim().toLowerCase());
  if (!found) return `“${text}” spells no format; write eXmY, such as e5m3`;
  const [e, m] = [Number(found[1]), Number(found[2])];
  if (e < 1 || e > 8) return `${e} exponent bits are not allowed; choose 1 to 8`;
  if (m > 23) return `${m} mantissa bits are not allowed; choose 0 to 23`;
  const bits = 1 + e + m;
  if (bits > 8 && m === 0) return "e8m0 is a format of scales, without sign and zero; choose m1 or more";
  const codes = 2 ** (e + m);
  const top = bits > 8 ? codes - 2 ** m - 1 : bits === 8 ? codes - 2 : codes - 1; // code of the largest value
  if (top < 1) return `e${e}m${m} has no finite value above zero; choose more bits`;
  const lowest = 1 - (2 ** (e - 1) - 1);
  const field = Math.floor(top / 2 ** m);
  const exponent = field ? field - (2 ** (e - 1) - 1) : lowest;
  const mantissa = (top % 2 ** m) + (field ? 2 ** m : 0);
  const most = mantissa * 2 ** (exponent - m);
  const ulp = 2 ** (Math.floor(Math.log2(most)) - m); // below the smallest normal values are closer than this
  return { name: `e${e}m${m}`, least: 2 ** (lowest - m), most, limit: most + ulp / 2 };
}

// The counts below (or at and above) a magnitude: bins wholly beyond it, and those plus the one it cuts. None is above
// the largest value, where that is known.
function beyond(bins, magnitude, above, shift, largest = Infinity) {
  let [sure, possible] = [0, 0];
  if (above && largest * 2 ** shift < magnitude) return [0, 0];
  bins.forEach(([exponent, n]) => {
    const [low, high] = [2 ** (exponent + shift), 2 ** (exponent + shift + 1)];
    if (above ? low >= magnitude : high <= magnitude) sure += n;
    else if (above ? high > magnitude : low < magnitude) possible += n;
  });
  return [sure, sure + possible];
}

// The histogram of an operand, of one layer or of all together: {bins, nonzero, finite, largest, kinds, window, places}.
function histogram(layer, operand, values) {
  const layers = layer === TOGETHER ? seen.layers.map((_, l) => l) : [layer];
  const places = layers.map((l) => placeOf(l, operand)).filter((p) => seen.histograms[p]);
  const sums = new Map();
  let [nonzero, finite, largest] = [0, 0, values === "scaled" ? Infinity : 0];
  for (const p of places) {
    const h = seen.histograms[p];
    const [first, ...counts] = h[values === "scaled" ? "scaled" : "plain"];
    const up = values === "amax" && counts.length ? -(first + counts.length - 1) : 0; // the largest exponent becomes 0
    counts.forEach((n, i) => { if (n) sums.set(first + i + up, (sums.get(first + i + up) || 0) + n); });
    nonzero += h.nonzero;
    largest = Math.max(largest, h.largest * 2 ** up);
    finite += h.finite;
  }
  const kinds = [...new Set(places.map((p) => seen.formats[p]))];
  const windows = [...new Set(places.map((p) => JSON.stringify(seen.histograms[p].window)))];
  const window = windows.length === 1 && windows[0] !== "null" ? JSON.parse(windows[0]) : null;
  return { bins: [...sums].sort((a, b) => a[0] - b[0]), nonzero, finite, largest, kinds, window, places };
}

function chosenFormat(h) {
  const own = $("exp-own").value;
  if (own.trim()) return spelled(own);
  const name = $("exp-format").value;
  if (name) return fromChoices(name);
  if (!h.window) return null;
  const [least, most] = h.window;
  const known = seen.choices.find((c) => c[0] === h.kinds[0]) ?? seen.choices.find((c) => c[1] === least && c[2] === most);
  return known ? fromChoices(known[0]) : { name: "the run's element format", least, most, limit: null };
}
function fromChoices(name) {
  const [, least, most, limit] = seen.choices.find((c) => c[0] === name);
  return { name, least, most, limit };
}

const between = ([low, high], whole) => {
  if (!whole) return "–";
  const [a, b] = [low, high].map((n) => percent(Number(((100 * n) / whole).toPrecision(4)))); // as the run's are
  return a === b ? a : `${a.replace(" %", "")} to ${b}`;
};

function drawPanels() {
  const values = $("exp-values").value;
  const layer = $("exp-layer").value === TOGETHER ? TOGETHER : Number($("exp-layer").value);
  const own = $("exp-own").value.trim() ? spelled($("exp-own").value) : null;
  const wrong = typeof own === "string";
  $("exp-own").setAttribute("aria-invalid", wrong);
  $("exp-own-said").textContent = wrong ? own : own ? `${own.name}: ${short(own.least)} to ${short(own.most)}` : "";
  const shift = Math.max(-60, Math.min(60, Math.round(Number($("exp-shift").value) || 0)));
  const panels = seen.operands.map((_, o) => [o, histogram(layer, o, values)]).filter(([, h]) => h.places.length);
  $("exp-panels").replaceChildren(...panels.map(() => make("div")));
  panels.forEach(([o, h], i) => panel($("exp-panels").children[i], o, h, wrong ? undefined : chosenFormat(h), { values, layer, shift }));
  howCounted(values, layer);
}

function howCounted(values, layer) {
  const what = {
    scaled: "Values are x / scale, as the element format of the run saw them, under the scales of that format: another format is shown with the same scales (“times 2^” moves them).",
    plain: "Values are x as it is: no scale at all, whatever the run did.",
    amax: "Values are x times the power of two that brings the largest exponent of each layer's operand, over all observed steps, to that of the format's largest value: one scale a tensor, as MX chooses them for blocks.",
  }[values];
  const of = layer === TOGETHER ? "all layers together" : seen.layers[layer];
  $("exp-how").textContent = `Shown: ${of}, all observed steps. ${what} Underflow and saturation are counted here, for rounding to nearest even, from a histogram by whole powers of two. ` +
    "Underflow of a floating-point format is exact, but for values of exactly half its smallest one where these occur; a limit inside a power of two leaves two bounds. Shaded: from the smallest to the largest value of the format.";
}

function panel(host, o, h, format, { values, layer, shift }) {
  const scaled = format && values === "amax" ? Math.floor(Math.log2(format.most)) : 0;
  const move = shift + scaled;
  const kinds = h.kinds.length > 2 ? `${h.kinds.length} formats` : h.kinds.join(", ");
  let lost = format === undefined ? "" : "The run's operands have no single element format here; choose one.";
  if (format) {
    const under = beyond(h.bins, format.least / 2, false, move);
    const over = beyond(h.bins, format.limit ?? format.most, true, move, h.largest);
    const scales = { scaled: ` under scales of ${kinds}`, plain: " without a scale", amax: " under a scale of its own" }[values];
    lost = `${format.name}${scales}: underflow ${between(under, h.nonzero)}, saturation ${between(over, h.finite)}`;
  }
  // What the run's own format lost under its scales was measured; a count would only bound it.
  const own = !$("exp-own").value.trim() && !$("exp-format").value && values === "scaled" && !shift && layer !== TOGETHER;
  if (own) lost = measured(o, layer, kinds);
  host.append(make("h3", {}, operandText(o)), make("p", {}, lost, ...(own ? [] : [make("br"), measured(o, layer, kinds)])));
  const chart = make("div", { class: "chart" });
  host.append(chart);
  bars(chart, h, format, move, `${operandText(o)}: ${lost}`);
}
function measured(o, layer, kinds) {
  if (layer === TOGETHER) return `in the run: ${kinds}`;
  const [under, over] = ["underflow_percent", "saturation_percent"].map((m) => percent(figure(m, layer, o, ALL)));
  return `in the run: ${kinds}, underflow ${under}, saturation ${over}`;
}

function bars(host, h, format, move, name) {
  const w = cleared(host);
  const height = 168;
  const box = { left: 46, right: w - 4, top: 6, bottom: height - 36 };
  const edges = format ? [Math.floor(Math.log2(format.least)), Math.floor(Math.log2(format.most))] : [];
  const exponents = h.bins.map(([e]) => e + move);
  const low = Math.min(...edges, ...(exponents.length ? [exponents[0]] : edges.length ? [] : [-1])) - 1;
  const high = Math.max(...edges, ...(exponents.length ? [exponents[exponents.length - 1]] : edges.length ? [] : [1])) + 1;
  const most = Math.max(...h.bins.map(([, n]) => n), 1) / Math.max(1, h.finite);
  const x = (e) => box.left + ((e - low) / (high - low + 1)) * (box.right - box.left);
  const log = $("exp-log").checked;
  const least = 1 / Math.max(2, h.finite); // a logarithmic axis begins below one element
  const y = log
    ? (share) => box.bottom - (Math.log(Math.max(share, least / 2) / (least / 2)) / Math.log(most / (least / 2))) * (box.bottom - box.top)
    : (share) => box.bottom - (share / most) * (box.bottom - box.top);
  const svg = draw("svg", { viewBox: `0 0 ${w} ${height}`, width: w, height, role: "img", "aria-label": name });
  if (format) svg.append(draw("rect", { x: x(edges[0]), y: box.top, width: x(edges[1] + 1) - x(edges[0]), height: box.bottom - box.top, fill: ink("window") }));
  for (const t of log ? logTicks(50 * least, 100 * most, 4) : ticks(0, 100 * most, 3)) {
    svg.append(draw("line", { x1: box.left, x2: box.right, y1: y(t / 100), y2: y(t / 100), stroke: ink("grid") }), axisText(box.left - 6, y(t / 100) + 4, short(t), { "text-anchor": "end", "font-size": 10.5 }));
  }
  const wide = (box.right - box.left) / (high - low + 1);
  for (const [e, n] of h.bins) {
    const at = e + move;
    const outside = format && (2 ** (at + 1) <= format.least / 2 || 2 ** at >= (format.limit ?? format.most));
    const bar = draw("rect", { x: x(at), y: y(n / h.finite), width: Math.max(0.6, wide - (wide > 4 ? 1 : 0)), height: box.bottom - y(n / h.finite), fill: ink(outside ? "lost" : "c0") });
    bar.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, `2^${at} to 2^${at + 1}`, [`${count(n)} elements, ${percent((100 * n) / h.finite)}`, ...(outside ? ["lost in this format"] : [])]));
    bar.addEventListener("pointerleave", hideTip);
    svg.append(bar);
  }
  svg.append(draw("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, stroke: ink("rule") }));
  for (const t of ticks(low, high, w / 44).filter(Number.isInteger)) svg.append(axisText(x(t) + wide / 2, box.bottom + 14, short(t), { "text-anchor": "middle", "font-size": 10.5 }));
  svg.append(
    axisText((box.left + box.right) / 2, height - 5, "exponent, floor(log2 |value|)", { "text-anchor": "middle", "font-size": 10.5 }),
    axisText(0, 0, "% of elements", { "text-anchor": "middle", "font-size": 10.5, transform: `translate(9 ${(box.top + box.bottom) / 2}) rotate(-90)` }),
  );
  host.append(svg);
}

function showLayer(layer) {
  $("exp-layer").value = layer;
  drawPanels();
}
function startExponents() {
  options($("exp-layer"), [[TOGETHER, "all layers together"], ...seen.layers.map((name, l) => [l, name])], heat.layer);
  const names = seen.choices.map(([name]) => name).filter((name) => !COMMON.includes(name));
  const groups = Object.entries({ "floating point": /^(?!p3109|int)/, integers: /^int/, P3109: /^p3109/ });
  options($("exp-format"), [["", "of the run"], ["common", COMMON], ...groups.map(([kind, of]) => [kind, names.filter((name) => of.test(name))])]);
  $("exp-format").addEventListener("input", () => { $("exp-own").value = ""; });
  // Another format has scales of its own, unless somebody chose what values are divided by.
  let told = false;
  $("exp-values").addEventListener("input", () => { told = true; });
  for (const id of ["exp-format", "exp-own"]) $(id).addEventListener("input", () => { if (!told) $("exp-values").value = $(id).value.trim() ? "amax" : "scaled"; });
  for (const id of ["exp-layer", "exp-values", "exp-format", "exp-own", "exp-shift", "exp-log"]) $(id).addEventListener("input", drawPanels);
  view(drawPanels);
}
