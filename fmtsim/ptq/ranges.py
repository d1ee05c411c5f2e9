# SPDX-License-Identifier: Apache-2.0
"""What static scales cover: statistics of activations, and the clip that a calibration rule makes of them."""

import torch
from torch import Tensor

from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.gemm.layers.operand import quantize_operand
from fmtsim.ptq.calibrate import Part
from fmtsim.ptq.spec import Calibration, fixed, is_static
from fmtsim.scaling.cast import scales
from fmtsim.scaling.history import DelayedScale
from fmtsim.scaling.scales import reciprocal
from fmtsim.spec.operand import Keys
from fmtsim.spec.quantizer import Quantizer


def collect(part: Part, x: Tensor, calibration: Calibration | None) -> None:
    """Add an input [rows, K] to a part's statistics."""
    magnitudes = x.detach().abs().float()
    tops = magnitudes.amax(0)
    part.rows += x.shape[0]
    part.channels = tops if part.channels is None else torch.maximum(part.channels, tops)
    part.amax = max(part.amax, float(tops.max()))
    if calibration is not None and calibration.rule != "absmax":
        stride = max(1, magnitudes.numel() // calibration.samples)
        part.samples.append(magnitudes.flatten()[::stride].clone())


def choose_top(part: Part, calibration: Calibration | None) -> None:
    """Decide what the static scale of a part covers; a dynamic one is left alone."""
    if calibration is None or not is_static(part.x):
        return
    part.top = part.amax
    if calibration.rule == "percentile":
        part.top = percentile(torch.cat(part.samples), calibration.percentile)
    elif calibration.rule == "mse":
        part.top = least_error(torch.cat(part.samples), part.amax, part.x, calibration.steps)


def percentile(magnitudes: Tensor, percent: float) -> float:
    """Return the smallest of the numbers that ``percent`` % of them do not exceed; above zero where any is."""
    count = magnitudes.numel()
    place = max(1, min(count, -int(-percent * count // 100)))  # rounded up, counted from 1
    found = float(magnitudes.kthvalue(place).values)
    return found if found > 0 else float(magnitudes.max())


def least_error(magnitudes: Tensor, amax: float, quantizer: Quantizer, steps: int) -> float:
    """Return the clip ``amax * i / steps`` of least squared error of these magnitudes; the largest in a tie."""
    if amax == 0:
        return 0.0
    x = magnitudes.reshape(1, -1)
    best, least = amax, float("inf")
    for i in range(steps, 0, -1):
        top = amax * i / steps
        error = float((static_values(x, quantizer, top).double() - x.double()).square().sum())
        if error < least:
            best, least = top, error
    return best


def static_scale(quantizer: Quantizer, top: float) -> DelayedScale:
    """Return the scale that a quantiser's rule makes of a largest magnitude, as one that stays.

    The rule is that of ``fmtsim.scaling.scales``: its targets, powers of two and allowed sets included.
    """
    element, scaling = quantizer.format, quantizer.scaling
    assert scaling is not None and element is not None and not isinstance(element, BlockFormat | LogTileFormat)
    found = scales(torch.full((1, 1), top, dtype=torch.float32), scaling, float(element.max))
    kept = DelayedScale(fixed(quantizer))
    factor = reciprocal(found.scale) if found.divides else found.factor
    kept.factor.copy_(factor.reshape(()))
    kept.amaxes[0] = top
    return kept


def static_values(x: Tensor, quantizer: Quantizer, top: float) -> Tensor:
    """Return a matrix under the static scale that covers ``top``, as the quantised model has it; float32."""
    scale = static_scale(quantizer, top).to(x.device).frozen()
    return quantize_operand(x, fixed(quantizer), Keys(), scale).values(torch.float32)


def quantised_input(part: Part, x: Tensor) -> Tensor:
    """Return an input as the quantised model multiplies with it; float32, or float64 for a float64 model."""
    if part.x.format is None:
        return x
    if part.top is not None:
        return static_values(x, part.x, part.top)
    return quantize_operand(x, part.x, Keys()).values(torch.float64 if x.dtype == torch.float64 else torch.float32)


def limit(part: Part) -> float | None:
    """Return the largest magnitude that the static scale represents, None where the scale is dynamic."""
    if part.top is None:
        return None
    scale = static_scale(part.x, part.top).scales().scale
    assert part.x.format is not None
    return float(scale) * float(part.x.format.max)  # type: ignore[union-attr]  # element formats have one
