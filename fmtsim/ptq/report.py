"""What a quantisation did, layer by layer."""

import math
from dataclasses import dataclass

from torch import nn

from fmtsim.errors import ArgumentError
from fmtsim.ptq.ranges import limit, static_scale
from fmtsim.ptq.survey import Slot
from fmtsim.table import ruled

REPORT = "_fmtsim_ptq"  # on the root of a quantised model


@dataclass(frozen=True, slots=True, kw_only=True)
class PtqRow:
    """Describe one weight and the product it enters.

    Args:
        name: The layer, with its part or group where it has several.
        shape: Outputs and inputs.
        x, w: Formats, "" where the operand stays in high precision.
        x_scale: The static scale of the activations, None where it is made from the tensor at hand.
        x_limit: The largest magnitude that scale represents.
        clipped_percent: Share of the calibration data beyond it.
        weight_db: Signal to noise of the weight, in dB: how far it moved.
        output_db: Signal to noise of the layer's outputs on the calibration data, in dB, both operands quantised, for
            the inputs of the model in high precision; what a corrected bias removes is still in it.
        methods: What was done to it.
    """

    name: str
    shape: tuple[int, int]
    x: str
    w: str
    x_scale: float | None
    x_limit: float | None
    clipped_percent: float
    weight_db: float
    output_db: float
    methods: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PtqReport:
    """List the weights that a quantisation changed; ``print`` shows a table."""

    recipe: str
    rows: tuple[PtqRow, ...]
    seconds: float
    equalised: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> PtqRow:
        found = [row for row in self.rows if row.name == name]
        if not found:
            raise ArgumentError(f"the report has no layer {name!r}; it has {', '.join(row.name for row in self.rows)}")
        return found[0]

    def __str__(self) -> str:
        cells = [("layer", "shape", "x", "w", "x scale", "clipped %", "weight dB", "output dB", "with")]
        for row in self.rows:
            scale = "-" if not row.x else "dynamic" if row.x_scale is None else f"{row.x_scale:.4g}"
            clipped = "-" if row.x_scale is None else f"{row.clipped_percent:.3f}"
            shape = "x".join(map(str, row.shape))
            numbers = (scale, clipped, _decibels(row.weight_db), _decibels(row.output_db), row.methods)
            cells.append((row.name, shape, row.x or "-", row.w or "-", *numbers))
        total = f"{len(self.rows)} weights by {self.recipe} in {self.seconds:.1f} s"
        total += f"; equalised {', '.join(self.equalised)}" if self.equalised else ""
        return "\n".join((*ruled(cells), total))


def ptq_report(model: nn.Module) -> PtqReport:
    """Return what ``fmtsim.ptq`` did to a model; raise ArgumentError where it did nothing."""
    found = model.__dict__.get(REPORT) if isinstance(model, nn.Module) else None
    if found is None:
        raise ArgumentError(f"{type(model).__name__} has no report of ptq; call fmtsim.ptq(model, recipe, data) first")
    return found  # type: ignore[no-any-return]


def row_of(slot: Slot, methods: str) -> PtqRow:
    """Return the row of a weight that was measured."""
    part = slot.parts[0]
    assert slot.quantised is not None
    w, q = slot.w.double(), slot.quantised.double()
    scale = None if part.top is None else float(static_scale(part.x, part.top).scales().scale)
    return PtqRow(
        name=slot.name,
        shape=(slot.w.shape[0], slot.w.shape[1]),
        x="" if part.x.format is None else part.x.format.name,
        w="" if slot.quantizer.format is None else slot.quantizer.format.name,
        x_scale=scale,
        x_limit=limit(part),
        clipped_percent=100 * part.clipped,
        weight_db=ratio(float(w.square().sum()), float((w - q).square().sum())),
        output_db=ratio(slot.signal, slot.noise),
        methods=methods,
    )


def ratio(signal: float, noise: float) -> float:
    """Return a ratio of powers in dB: inf without noise, NaN without a signal."""
    if signal == 0:
        return math.nan
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def _decibels(value: float) -> str:
    return "lossless" if value == math.inf else "-" if math.isnan(value) else f"{value:.1f}"
