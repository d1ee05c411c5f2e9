// SPDX-License-Identifier: Apache-2.0
// What is told in numbers and words: notes, tiles, costs, coverage, configuration.
function startNotes() {
  $("versions").textContent = Object.entries(data.versions).map(([name, version]) => `${name} ${version}`).join(" · ");
  $("notes").replaceChildren(...data.notes.map((text) => make("p", { class: "note", role: "note" }, text)));
}

function startVerdict() {
  const [head, ...rows] = data.verdict.filter((row) => row.length > 2); // of several runs a table
  if (head) table($("verdict-table"), head.map((name, i) => ({ name, left: true, long: i > 0, value: (row) => row[i], text: (row) => row[i] })), rows, { caption: "Runs" });
  $("verdict-list").replaceChildren(...data.verdict.filter((row) => row.length === 2).flatMap(([question, answer]) => {
    const parts = answer.split(/; (?=\d\. )/); // a list that is numbered has a line for each
    return [make("dt", {}, question), make("dd", {}, ...parts.map((part) => make("div", {}, part)))];
  }));
}

function startTiles() {
  const tiles = [];
  const tile = (value, ...said) => tiles.push(make("div", { class: "tile" }, make("b", {}, value), ...said.map((text) => make("span", {}, text))));
  const finals = curves.map((c) => finalLoss(c.losses));
  curves.slice(0, 8).forEach((c, i) => {
    const bad = c.losses.findIndex((v) => !isNumber(v));
    const value = finals[i] !== null ? finals[i].toFixed(4) : !c.losses.length ? "no step" : `${short(c.losses[bad])} at step ${bad + 1}`;
    const other = curves[c.against];
    const common = Math.min(c.losses.length, other.losses.length); // of an interrupted run the steps that both have
    const [first, own] = [other, c].map((of) => finalLoss(of.losses.slice(0, common)));
    const after = c.losses.length === other.losses.length ? "" : ` after ${common} steps`;
    const gap = c.against !== i && first !== null && own !== null ? [`${own < first ? "−" : "+"}${Math.abs(own - first).toFixed(4)} to ${c.against ? "its baseline" : "the first"}${after}`] : [];
    tile(value, c.label, `loss, last tenth of ${c.losses.length} steps`, ...gap);
  });
  if (data.coverage) tile(data.coverage.total ? percent((100 * data.coverage.simulated) / data.coverage.total) : "–", "of forward multiply-adds with weights simulated");
  if (seen && seen.layers.length) {
    for (const [metric, said] of [["underflow_percent", "highest underflow"], ["sqnr_db", "lowest SQNR"]]) {
      const [layer, operand] = worstOf(metric);
      tile(METRICS[metric].text(figure(metric, layer, operand, ALL)), `${said}: ${seen.layers[layer]}`, operandText(operand));
    }
  }
  $("tiles").replaceChildren(...tiles);
}

const COSTS = { loss: "change of the loss", kl: "KL, nats", rounded_kl: "KL with all rounded, nats", plain_loss: "loss without rounding", rounded_loss: "with all operands of the forward pass rounded" };
const worded = (name) => COSTS[name] ?? name.replaceAll("_", " ");
function startCost() {
  const { rows = [], ...rest } = data.attribution;
  const { exact, notes = [], ...numbers } = rest;
  const how = exact === undefined ? [] : [exact ? "operands switched one at a time" : "estimates"];
  const told = Object.entries(numbers).filter(([, v]) => v !== null && typeof v !== "object");
  $("cost-said").textContent = [...how, ...told.map(([name, v]) => `${worded(name)}: ${typeof v === "number" ? short(v, 6) : v}`), ...notes].join(" · ");
  const names = [...new Set(rows.flatMap(Object.keys))];
  const numeric = (name) => rows.some((row) => isNumber(num(row[name])) && typeof row[name] !== "boolean");
  const value = (name) => (row) => (numeric(name) ? num(row[name]) ?? null : String(row[name] ?? ""));
  const columns = arranged(names.filter((name) => name !== "module" && rows.some((row) => row[name] !== null && typeof row[name] !== "object")).map((name) => ({
    name: worded(name), left: !numeric(name), late: !numeric(name) && !["layer", "operand"].includes(name), mono: name === "layer", long: name === "layer",
    value: value(name), text: (row) => (numeric(name) ? short(value(name)(row), 4) : value(name)(row)),
  })));
  table($("cost-table"), columns, rows, { most: 12, sorted: columns.findIndex((c) => c.name === COSTS.loss), caption: "Cost of operands" });
  const worst = rows.filter((row) => isNumber(num(row.loss))).sort((a, b) => num(b.loss) - num(a.loss)).slice(0, 12);
  view(() => shareBars($("cost-chart"), worst.map((row) => ({ label: `${row.layer} ${row.operand}`, value: num(row.loss), text: short(num(row.loss)) })), COSTS.loss));
}

// Horizontal bars with their names above them, negative ones to the left.
function shareBars(host, rows, unit) {
  const w = cleared(host);
  if (!rows.length) return;
  const low = Math.min(0, ...rows.map((r) => r.value));
  const high = Math.max(0, ...rows.map((r) => r.value)) || (low ? 0 : 1);
  const x = (v) => 2 + ((v - low) / (high - low)) * (w - 110);
  const height = rows.length * 34 + 20;
  const svg = draw("svg", { viewBox: `0 0 ${w} ${height}`, width: w, height, role: "img", "aria-label": rows.map((r) => `${r.label}: ${r.text}`).join(", ") });
  rows.forEach((r, i) => {
    svg.append(
      draw("text", { x: 2, y: i * 34 + 12, fill: ink("ink"), "font-size": 12, "font-family": "ui-monospace, Menlo, Consolas, monospace" }, r.label),
      draw("rect", { x: x(Math.min(0, r.value)), y: i * 34 + 17, width: Math.max(1, Math.abs(x(r.value) - x(0))), height: 11, rx: 2, fill: ink(r.quiet ? "bar" : "c0") }),
      axisText(x(Math.max(0, r.value)) + 7, i * 34 + 27, r.text),
    );
  });
  svg.append(axisText(2, height - 4, unit));
  host.append(svg);
}

function startCoverage() {
  const c = data.coverage;
  $("coverage-said").textContent = c.text;
  const share = (n, whole) => (whole ? (100 * n) / whole : 0);
  const bar = (label, n, whole, quiet = false) => ({ label, value: share(n, whole), text: `${percent(share(n, whole))} (${compact(n)})`, quiet });
  view(() => shareBars($("coverage-chart"), [
    bar("forward, simulated", c.simulated, c.total), bar("backward, simulated", c.backward, 2 * c.total),
    bar("forward, not simulated", c.total - c.simulated, c.total, true),
  ], "% of multiply-adds with weights (and their number" + (c.estimated ? ", estimated from shapes)" : ")")));
  if (!c.raw.length) return;
  table($("coverage-table"), [
    { name: "not simulated", left: true, mono: true, long: true, value: (r) => r.layer, text: (r) => [r.layer, r.parameter].filter(Boolean).join(".") },
    { name: "multiply-adds", value: (r) => r.multiply_adds, text: (r) => count(r.multiply_adds) },
    { name: "share", value: (r) => r.multiply_adds, text: (r) => percent(share(r.multiply_adds, c.total)) },
    { name: "reason", left: true, long: true, value: (r) => r.reason, text: (r) => r.reason },
  ], c.raw, { most: 12, sorted: 1, caption: "Weights whose products are not simulated" });
}

function startConfiguration() {
  function render() {
    const wanted = $("configuration-filter").value.trim().toLowerCase();
    const rows = data.configuration.filter((row) => row.join(" ").toLowerCase().includes(wanted));
    table($("configuration-table"), [
      { name: "setting", left: true, mono: true, long: true, value: (r) => r[0], text: (r) => r[0] },
      { name: "value", left: true, long: true, value: (r) => r[1], text: (r) => r[1] },
    ], rows, { most: 40, caption: "Configuration" });
    if (!rows.length) $("configuration-table").replaceChildren(make("p", { class: "quiet" }, `No setting has “${wanted}” in its name or value; there are ${data.configuration.length}.`));
  }
  $("configuration-filter").addEventListener("input", render);
  render();
}
