// SPDX-License-Identifier: Apache-2.0
// Loss curves: smoothed over their faint single steps, and how far each is from the first.
const dashes = ["none", "7 3", "2 3", "9 3 2 3"];
const curves = data.curves.map((curve, i) => ({
  label: curve.label, losses: curve.losses.map(num), against: curve.against, color: "c" + (i % 8), dash: dashes[i % 4], shown: true,
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

// The gap of one curve to another, smoothed as a whole: windows that end with one of the curves would add a gap of their own.
function gapTo(c, other, length, reach) {
  const gap = Array.from({ length }, (_, i) => [c.losses[i] ?? null, other.losses[i] ?? null]);
  return smoothed(gap.map(([v, w]) => (isNumber(v) && isNumber(w) ? v - w : null)), reach);
}

// The mean of the last tenth of the steps, as `fmtsim train` has it; null where the curve ends in no number.
function finalLoss(losses) {
  const tail = losses.slice(-Math.max(1, Math.floor(losses.length / 10)));
  return tail.length && tail.every(isNumber) ? tail.reduce((a, b) => a + b, 0) / tail.length : null;
}

// The steps that are drawn: all, or those between two numbers that a pointer or the fields choose.
const zoom = { from: 1, to: 1, last: 1 };
function zoomTo(from, to) {
  [zoom.from, zoom.to] = [Math.min(from, to), Math.max(from, to)].map((v) => Math.min(zoom.last, Math.max(1, Math.round(v) || 1)));
  $("loss-from").value = zoom.from;
  $("loss-to").value = zoom.to;
  $("loss-all").disabled = zoom.from === 1 && zoom.to === zoom.last;
  lossCharts();
}

function lossCharts() {
  const reach = Number($("loss-reach").value);
  const log = $("loss-log").checked;
  const raw = $("loss-raw").checked;
  const unit = data.unit ? ` (${data.unit})` : "";
  $("loss-reach-text").textContent = reach ? `± ${reach} steps` : "none";
  const smooth = curves.map((c) => smoothed(c.losses, reach));
  const points = (values) => values.map((v, i) => [i + 1, v]).filter(([step]) => step >= zoom.from && step <= zoom.to);
  const series = curves
    .map((c, i) => ({ label: c.label, color: ink(c.color), dash: c.dash, points: points(smooth[i]), faint: raw && reach ? points(c.losses) : null, shown: c.shown }))
    .filter((s) => s.shown);
  const marks = curves.flatMap((c) => {
    const at = c.losses.findIndex((v) => !isNumber(v));
    return at < 0 || !c.shown || at + 1 < zoom.from || at + 1 > zoom.to ? [] : [{ x: at + 1, text: `${c.label.length < 30 ? c.label + ": " : ""}${short(c.losses[at])} at step ${at + 1}`, color: ink(c.color) }];
  });
  lineChart($("loss-chart"), { series, marks, log, height: 340, xLabel: "step", yLabel: "loss" + unit, name: "Loss by step: " + series.map((s) => s.label).join(", "), pick: zoomTo });
  const longest = Math.max(...smooth.map((values) => values.length)); // both charts have the same steps
  const gaps = curves.map((c, k) => ({
    label: c.label, color: ink(c.color), dash: c.dash, shown: c.shown && c.against !== k && curves[c.against].shown,
    points: points(gapTo(c, curves[c.against], longest, reach)),
  })).filter((s) => s.shown);
  $("gap-chart").hidden = !gaps.length;
  if (!gaps.length) return;
  const one = curves.every((c) => c.against === 0); // else each has a baseline of its own
  lineChart($("gap-chart"), { series: gaps, height: 190, zero: true, xLabel: "step", yLabel: one ? "gap to the first" : "gap to its baseline", name: `Loss minus that of ${one ? curves[0].label : "its baseline"}, by step`, pick: zoomTo });
}

function startLoss() {
  const steps = Math.max(1, ...curves.map((c) => c.losses.length));
  [zoom.to, zoom.last] = [steps, steps];
  for (const id of ["loss-from", "loss-to"]) $(id).max = steps;
  [$("loss-from").value, $("loss-to").value] = [1, steps];
  for (const id of ["loss-from", "loss-to"]) $(id).addEventListener("change", () => zoomTo(Number($("loss-from").value), Number($("loss-to").value)));
  $("loss-all").addEventListener("click", () => zoomTo(1, steps));
  $("loss-csv").addEventListener("click", () => saveCsv([["step", ...curves.map((c) => c.label)], ...Array.from({ length: steps }, (_, i) => [i + 1, ...data.curves.map((c) => c.losses[i])])], "loss.csv"));
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
