// SPDX-License-Identifier: Apache-2.0
// Loss curves: smoothed over their faint single steps, and how far each is from the first.
const dashes = ["none", "7 3", "2 3", "9 3 2 3"];
const curves = data.curves.map((curve, i) => ({
  label: curve.label, losses: curve.losses.map(num), color: "c" + (i % 8), dash: dashes[i % 4], shown: true,
}));

// The centred moving average over `reach` values on either side, up to the first that is not finite; at the start as
// many on one side as on the other.
function smoothed(values, reach) {
  const bad = values.findIndex((v) => !isNumber(v));
  const end = bad < 0 ? values.length : bad;
  const sums = [0];
  for (let i = 0; i < end; i++) sums.push(sums[i] + values[i]);
  return values.map((_, i) => {
    if (i >= end) return null;
    const side = Math.min(reach, i);
    const stop = Math.min(i + side + 1, end);
    return (sums[stop] - sums[i - side]) / (stop - i + side);
  });
}

// The mean of the last tenth of the steps, as `fmtsim train` has it; null where the curve ends in no number.
function finalLoss(losses) {
  const tail = losses.slice(-Math.max(1, Math.floor(losses.length / 10)));
  return tail.length && tail.every(isNumber) ? tail.reduce((a, b) => a + b, 0) / tail.length : null;
}

function lossCharts() {
  const reach = Number($("loss-reach").value);
  const log = $("loss-log").checked;
  const raw = $("loss-raw").checked;
  const unit = data.unit ? ` (${data.unit})` : "";
  $("loss-reach-text").textContent = reach ? `± ${reach} steps` : "none";
  const smooth = curves.map((c) => smoothed(c.losses, reach));
  const points = (values) => values.map((v, i) => [i + 1, v]);
  const series = curves
    .map((c, i) => ({ label: c.label, color: ink(c.color), dash: c.dash, points: points(smooth[i]), faint: raw && reach ? points(c.losses) : null, shown: c.shown }))
    .filter((s) => s.shown);
  const marks = curves.flatMap((c) => {
    const at = c.losses.findIndex((v) => !isNumber(v));
    return at < 0 || !c.shown ? [] : [{ x: at + 1, text: `${c.label.length < 30 ? c.label + ": " : ""}${short(c.losses[at])} at step ${at + 1}`, color: ink(c.color) }];
  });
  lineChart($("loss-chart"), { series, marks, log, height: 340, xLabel: "step", yLabel: "loss" + unit, name: "Loss by step: " + series.map((s) => s.label).join(", ") });
  if (curves.length < 2 || !curves[0].shown) {
    $("gap-chart").replaceChildren();
    return;
  }
  const longest = Math.max(...smooth.map((values) => values.length)); // both charts have the same steps
  const gaps = curves.slice(1).map((c, k) => ({
    label: c.label, color: ink(c.color), dash: c.dash, shown: c.shown,
    points: points(Array.from({ length: longest }, (_, i) => [smooth[k + 1][i] ?? null, smooth[0][i] ?? null]).map(([v, w]) => (isNumber(v) && isNumber(w) ? v - w : null))),
  })).filter((s) => s.shown);
  lineChart($("gap-chart"), { series: gaps, height: 190, zero: true, least: 0.1, xLabel: "step", yLabel: "gap to the first", name: `Loss minus that of ${curves[0].label}, by step` });
}

function startLoss() {
  const steps = Math.max(...curves.map((c) => c.losses.length));
  $("loss-reach").max = Math.max(1, Math.floor(steps / 8));
  $("loss-reach").value = Math.floor(steps / 40);
  for (const id of ["loss-reach", "loss-raw", "loss-log"]) $(id).addEventListener("input", lossCharts);
  view(() => {
    $("loss-legend").replaceChildren(...curves.map((c) => {
      const line = make("i");
      line.style.borderTopColor = ink(c.color);
      line.style.borderTopStyle = c.dash === "none" ? "solid" : "dashed";
      const button = make("button", { type: "button", "aria-pressed": c.shown }, line, c.label);
      button.addEventListener("click", () => {
        c.shown = !c.shown;
        button.setAttribute("aria-pressed", c.shown);
        lossCharts();
      });
      return button;
    }));
    lossCharts();
  });
}
