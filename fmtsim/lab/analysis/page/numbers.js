// SPDX-License-Identifier: Apache-2.0
// Numbers: from the data's words, into text, onto axes; and a chart of lines.
const words = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const num = (v) => (v === null || v === undefined ? null : typeof v === "string" ? words[v] : v);
const isNumber = (v) => v !== null && Number.isFinite(v);

function short(v, digits = 3) {
  if (v === null) return "–";
  if (Number.isNaN(v)) return "NaN";
  if (!Number.isFinite(v)) return v > 0 ? "∞" : "−∞";
  const size = Math.abs(v);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    const [mantissa, exponent] = v.toExponential(digits - 1).split("e");
    return (mantissa.replace(/\.?0+$/, "") + "e" + Number(exponent)).replaceAll("-", "−");
  }
  return String(Number(v.toPrecision(digits))).replace("-", "−");
}
const percent = (v) =>
  v === null ? "–" : Number.isNaN(v) ? "all zero" : v === 0 ? "0 %" : v < 0.001 ? "< 0.001 %" : v > 99.95 && v < 100 ? "> 99.9 %" : short(v) + " %";
const decibels = (v) =>
  v === null ? "–" : Number.isNaN(v) ? "all zero" : v === Infinity ? "lossless" : v === -Infinity ? "Inf or NaN made" : v.toFixed(1).replace("-", "−") + " dB";
const count = (v) => (v === null ? "–" : Math.round(v).toLocaleString("en-US"));
const compact = (v) => {
  const i = Math.abs(v) >= 1 ? Math.min(4, Math.floor(Math.log10(Math.abs(v)) / 3)) : 0;
  return short(v / 1000 ** i) + ["", " k", " M", " G", " T"][i];
};

function ticks(low, high, most) {
  const raw = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}
function logTicks(low, high, most) {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  if (last - first < 1) return ticks(low, high, most).filter((t) => t > 0);
  const every = Math.ceil((last - first + 1) / most);
  return Array.from({ length: Math.floor((last - first) / every) + 1 }, (_, i) => Number((10 ** (first + i * every)).toPrecision(12)));
}

const axisText = (x, y, text, more = {}) => draw("text", { x, y, fill: ink("quiet"), "font-size": 11.5, ...more }, text);
const cleared = (host) => { host.replaceChildren(); return Math.max(260, host.clientWidth); };

// Gather what a chart of lines spans; on a logarithmic axis what is not above zero is left out.
function extent(series, log) {
  const ys = series.flatMap((s) => [...s.points, ...(s.faint || [])]).map((p) => p[1]).filter((y) => isNumber(y) && (!log || y > 0));
  const lowest = ys.reduce((a, b) => Math.min(a, b), Infinity);
  const highest = ys.reduce((a, b) => Math.max(a, b), -Infinity);
  return lowest > highest ? [log ? 0.1 : 0, 1] : [lowest, highest];
}
function path(points, x, y, log) {
  let text = "";
  let open = false;
  for (const [px, py] of points) {
    const shown = isNumber(py) && (!log || py > 0);
    if (shown) text += (open ? "L" : "M") + x(px).toFixed(1) + " " + y(py).toFixed(1);
    open = shown;
  }
  return text;
}

// Draw lines: series of {label, color, dash, points, faint}, marks of {x, text, color}. Returns nothing; a chart is read
// with a pointer or, once it has the focus, with the arrow keys.
function lineChart(host, { series, marks = [], height = 300, xLabel, yLabel, log = false, zero = false, name, format = short, pick = null }) {
  const w = cleared(host);
  const box = { left: 62, right: w - 14, top: 12, bottom: height - 40 };
  let [low, high] = extent(series, log);
  if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 10, high + (Math.abs(high) || 1) / 10];
  const xs = [...new Set(series.flatMap((s) => [...s.points, ...(s.faint || [])].map((p) => p[0])).concat(marks.map((m) => m.x)))].sort((a, b) => a - b);
  const [first, last] = xs.length > 1 ? [xs[0], xs[xs.length - 1]] : [(xs[0] ?? 1) - 1, (xs[0] ?? 1) + 1];
  const pad = log ? 0 : (high - low) * 0.05;
  const scaled = log ? Math.log10 : (v) => v;
  const [a, b] = [scaled(low - pad), scaled(high + pad)];
  const x = (v) => box.left + ((v - first) / (last - first)) * (box.right - box.left);
  const y = (v) => box.bottom - ((scaled(v) - a) / (b - a)) * (box.bottom - box.top);
  const svg = draw("svg", { viewBox: `0 0 ${w} ${height}`, width: w, height, role: "img", tabindex: 0, "aria-label": name });
  for (const t of (log ? logTicks : ticks)(low - pad, high + pad, height / 50)) {
    svg.append(draw("line", { x1: box.left, x2: box.right, y1: y(t), y2: y(t), stroke: ink("grid") }), axisText(box.left - 8, y(t) + 4, format(t), { "text-anchor": "end" }));
  }
  for (const t of ticks(first, last, w / 110).filter(Number.isInteger)) {
    svg.append(draw("line", { x1: x(t), x2: x(t), y1: box.bottom, y2: box.bottom + 4, stroke: ink("rule") }), axisText(x(t), box.bottom + 18, t, { "text-anchor": "middle" }));
  }
  if (zero) svg.append(draw("line", { x1: box.left, x2: box.right, y1: y(0), y2: y(0), stroke: ink("quiet") }));
  svg.append(
    axisText((box.left + box.right) / 2, height - 5, xLabel, { "text-anchor": "middle" }),
    axisText(0, 0, yLabel, { "text-anchor": "middle", transform: `translate(13 ${(box.top + box.bottom) / 2}) rotate(-90)` }),
  );
  const line = (points, s, more) => draw("path", { d: path(points, x, y, log), fill: "none", stroke: s.color, "stroke-linejoin": "round", ...more });
  for (const s of series) if (s.faint) svg.append(line(s.faint, s, { "stroke-width": 1, opacity: 0.3 }));
  for (const s of series) {
    svg.append(line(s.points, s, { "stroke-width": 2.2, "stroke-dasharray": s.dash || "none" }));
    const seen = s.points.filter((p) => isNumber(p[1]) && (!log || p[1] > 0));
    if (seen.length === 1) svg.append(draw("circle", { cx: x(seen[0][0]), cy: y(seen[0][1]), r: 4, fill: s.color }));
  }
  for (const m of marks) {
    const end = x(m.x) > (box.left + box.right) / 2;
    svg.append(
      draw("line", { x1: x(m.x), x2: x(m.x), y1: box.top, y2: box.bottom, stroke: m.color, "stroke-dasharray": "3 3" }),
      draw("text", { x: x(m.x) + (end ? -6 : 6), y: box.top + 12, fill: m.color, "font-size": 12, "font-weight": 600, "text-anchor": end ? "end" : "start" }, m.text),
    );
  }
  host.append(svg);
  host.series = series;
  readable(svg, { xs, x, series, box, w, xLabel, format, marks, pick });
}

// Let a pointer or the arrow keys read a chart's values off.
function readable(svg, { xs, x, series, box, w, xLabel, format, marks, pick }) {
  const tables = series.map((s) => new Map((s.faint || s.points).map(([px, py]) => [px, py])));
  const smooth = series.map((s) => new Map(s.points));
  const cross = draw("line", { y1: box.top, y2: box.bottom, stroke: ink("quiet"), visibility: "hidden" });
  svg.append(cross);
  let at = -1;
  function show(i, clientX, clientY) {
    if (!xs.length) return;
    at = Math.min(xs.length - 1, Math.max(0, i));
    const v = xs[at];
    cross.setAttribute("x1", x(v));
    cross.setAttribute("x2", x(v));
    cross.setAttribute("visibility", "visible");
    const rows = series.map((s, k) => [s, tables[k].get(v), smooth[k].get(v)]).filter(([, value]) => value !== undefined && value !== null);
    const lines = rows.map(([s, value, mean]) => `${s.label}: ${format(value, 5)}` + (s.faint && isNumber(mean) && mean !== value ? `, smoothed ${format(mean, 5)}` : ""));
    const area = svg.getBoundingClientRect();
    const px = clientX ?? area.left + (x(v) / w) * area.width;
    showTip(px, clientY ?? area.top + area.height / 3, `${xLabel} ${v}`, [...lines, ...marks.filter((m) => m.x === v).map((m) => m.text)]);
  }
  const across = (event) => {
    const area = svg.getBoundingClientRect();
    return ((event.clientX - area.left) / area.width) * w;
  };
  function nearest(px) {
    let best = 0;
    xs.forEach((v, i) => { if (Math.abs(x(v) - px) < Math.abs(x(xs[best]) - px)) best = i; });
    return best;
  }
  let began = null;
  const band = draw("rect", { y: box.top, height: box.bottom - box.top, fill: ink("accent"), opacity: 0.15, visibility: "hidden" });
  svg.append(band);
  svg.addEventListener("pointermove", (event) => {
    const px = across(event);
    if (began !== null) for (const [name, value] of [["x", Math.min(began, px)], ["width", Math.abs(px - began)], ["visibility", "visible"]]) band.setAttribute(name, value);
    show(nearest(px), event.clientX, event.clientY);
  });
  if (pick && xs.length > 1) {
    svg.style.cursor = "crosshair";
    svg.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") began = across(event); });
    svg.addEventListener("pointerup", (event) => {
      const [from, to] = [began, across(event)];
      began = null;
      band.setAttribute("visibility", "hidden");
      if (from !== null && Math.abs(to - from) > 8) pick(xs[nearest(from)], xs[nearest(to)]);
    });
  }
  const leave = () => {
    began = null;
    for (const mark of [cross, band]) mark.setAttribute("visibility", "hidden");
    hideTip();
  };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 10, PageDown: at + 10, Home: 0, End: xs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(to);
  });
}
