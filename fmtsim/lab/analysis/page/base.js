// SPDX-License-Identifier: Apache-2.0
"use strict";
// What all parts share: the data, elements, colours, tooltips, redrawing and saving.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

// Text only ever becomes a text node or an attribute, never markup.
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}
const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// --- colours ---------------------------------------------------------------------------------------------------------
const system = matchMedia("(prefers-color-scheme: dark)");
const themes = ["system", "light", "dark"];
let theme = "system";
let printing = false;

const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
let ramp = [];

function applyTheme() {
  const dark = !printing && (theme === "dark" || (theme === "system" && system.matches));
  document.documentElement.classList.toggle("dark", dark);
  $("theme").textContent = "Colours: " + theme;
  $("theme").setAttribute("aria-label", "Colours: " + (theme === "system" ? "as the system has them" : theme));
  ramp = ink("ramp").split(/\s+/).map((c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)));
}

// The colour of a share 0..1 of a sequential scale whose lightness goes one way, so that any colour vision reads it.
function colour(t) {
  const x = Math.min(1, Math.max(0, t)) * (ramp.length - 1);
  const i = Math.min(ramp.length - 2, Math.floor(x));
  return "rgb(" + ramp[i].map((a, k) => Math.round(a + (ramp[i + 1][k] - a) * (x - i))).join(",") + ")";
}

// --- drawing again ---------------------------------------------------------------------------------------------------
const views = [];
function view(redraw) {
  views.push(redraw);
  redraw();
}
const narrow = () => innerWidth <= 560;
let asked = 0;
function redrawAll() {
  cancelAnimationFrame(asked);
  asked = requestAnimationFrame(() => views.forEach((redraw) => redraw()));
}
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) redrawAll(); // a phone's bars change the height alone
  width = innerWidth;
});
const retheme = () => {
  applyTheme();
  redrawAll();
};
system.addEventListener("change", retheme);
$("theme").addEventListener("click", () => {
  theme = themes[(themes.indexOf(theme) + 1) % 3];
  retheme();
});
for (const [name, value] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(name, () => {
    printing = value;
    applyTheme();
    views.forEach((redraw) => redraw());
  });
}

// --- tooltips --------------------------------------------------------------------------------------------------------
const tip = $("tip");
function showTip(x, y, head, lines) {
  tip.replaceChildren(make("b", {}, head), ...lines.map((line) => make("div", {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? x - 14 - box.width : x + 14;
  const top = y + 14 + box.height > innerHeight ? y - 14 - box.height : y + 14;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, top) + "px";
}
const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, { passive: true });
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

// --- saving ----------------------------------------------------------------------------------------------------------
function save(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
const FONT = "system-ui, Helvetica, Arial, sans-serif";
// A chart is saved with the report's title and the names of its lines above it, which the page has beside it.
function titled(host) {
  const copy = host.querySelector("svg").cloneNode(true);
  const [, , wide, high] = copy.getAttribute("viewBox").split(" ").map(Number);
  const head = 20 * host.series.length + 42;
  copy.setAttribute("viewBox", `0 ${-head} ${wide} ${high + head}`);
  copy.setAttribute("height", high + head);
  copy.append(draw("text", { x: 14, y: 24 - head, fill: ink("ink"), "font-size": 16, "font-weight": 600 }, data.title));
  host.series.forEach((s, i) => copy.append(
    draw("line", { x1: 62, x2: 88, y1: 20 * i + 44 - head, y2: 20 * i + 44 - head, stroke: s.color, "stroke-width": 2.5, "stroke-dasharray": s.dash || "none" }),
    draw("text", { x: 96, y: 20 * i + 48 - head, fill: ink("ink"), "font-size": 13 }, s.label),
  ));
  copy.prepend(draw("rect", { y: -head, width: "100%", height: "100%", fill: ink("panel") }));
  return copy;
}
function svgBlob(svg) {
  svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  svg.setAttribute("font-family", FONT);
  return new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" });
}
// Hand a drawing to `then` as an image; pictures are saved at twice the size of the page.
const SHARP = 2;
function asImage(svg, then) {
  const image = new Image();
  image.onload = () => { then(image); URL.revokeObjectURL(image.src); };
  image.src = URL.createObjectURL(svgBlob(svg));
}
function sharpCanvas(w, h) {
  const canvas = make("canvas", { width: Math.round(SHARP * w), height: Math.round(SHARP * h) });
  canvas.getContext("2d").scale(SHARP, SHARP);
  return canvas;
}
function savePng(host) {
  const svg = titled(host);
  const [w, h] = ["width", "height"].map((name) => Number(svg.getAttribute(name)));
  asImage(svg, (image) => {
    const canvas = sharpCanvas(w, h);
    canvas.getContext("2d").drawImage(image, 0, 0, w, h);
    canvas.toBlob((blob) => save(blob, host.id + ".png"));
  });
}
const saveCsv = (rows, name) => {
  const field = (v) => (v === null || v === undefined ? "" : /[",\n\r]/.test(v) ? `"${String(v).replaceAll('"', '""')}"` : String(v));
  save(new Blob([rows.map((row) => row.map(field).join(",") + "\r\n").join("")], { type: "text/csv" }), name);
};
for (const [kind, saves] of [["save", (host) => save(svgBlob(titled(host)), host.id + ".svg")], ["save-png", savePng]]) {
  document.querySelectorAll(`button.${kind}`).forEach((button) => button.addEventListener("click", () => saves($(button.dataset.of))));
}
$("save-json").addEventListener("click", () => save(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }), "report.json"));

// Choices are pairs of a value and a text, or of the name of a group and its values.
function options(select, entries, chosen) {
  const choice = ([value, text]) => Array.isArray(text) ? make("optgroup", { label: value }, ...text.map((name) => choice([name, name]))) : make("option", { value }, text);
  select.replaceChildren(...entries.map(choice));
  if (chosen !== undefined) select.value = chosen;
}
