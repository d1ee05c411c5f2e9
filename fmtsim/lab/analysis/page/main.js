// SPDX-License-Identifier: Apache-2.0
// Show what there is, and say what there is not.
applyTheme();
startNotes();
const parts = {
  verdict: [data.verdict.length > 0, null, startVerdict],
  loss: [data.curves.length > 0, "loss curves", startLoss],
  bits: [seen && seen.layers.length > 0, "observed operands", () => { startHeat(); startDetails(); }],
  exponents: [seen && seen.layers.length > 0, null, startExponents],
  cost: [data.attribution !== null, "what operands cost in loss (fmtsim.attribute measures it)", startCost],
  coverage: [data.coverage !== null, "coverage by multiply-adds", startCoverage],
  configuration: [data.configuration.length > 0, "a configuration", startConfiguration],
};
for (const [id, [present, , start]] of Object.entries(parts)) {
  if (!present) continue;
  $(id).hidden = false;
  $("contents").append(make("a", { href: "#" + id }, $(id).dataset.name));
  start();
}
startTiles();
const missing = Object.values(parts).filter(([present, name]) => !present && name).map(([, name]) => name);
$("absent").textContent = missing.length ? `Not in this report: ${missing.join("; ")}.` : "";
