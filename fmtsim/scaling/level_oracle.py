# SPDX-License-Identifier: Apache-2.0
"""The oracle of two levels of scales (docs/semantics.md, section 6): the orders of libraries, in exact numbers."""

from fractions import Fraction
from operator import add, mul, sub, truediv

import torch

from fmtsim.formats.block import BlockFormat
from fmtsim.scaling.exact import (
    FLT_MAX,
    FLT_MIN,
    clamped32,
    operated32,
    reciprocal,
    rn32,
    rn32_or_infinite,
    scale_value,
)
from fmtsim.support.mufu import approximate_reciprocal


def two_levels(
    a: Fraction, amax: Fraction, fmt: BlockFormat, candidate: Fraction
) -> tuple[Fraction, Fraction, Fraction]:
    """Return the scale of a block, what its elements are multiplied with, and the scale of the second level.

    a, amax: Largest magnitudes, of the block and of what shares the second level.
    """
    assert fmt.scaling.tensor is not None
    order = fmt.scaling.tensor.order
    m, c = _tops(fmt)
    both = rn32_or_infinite(c * m)
    over = rn32_or_infinite(a / m)
    tensor = rn32_or_infinite(amax / both) or Fraction(1)
    if order in ("te", "te_quotient", "fouroversix"):
        raised = max(amax, rn32(Fraction(1e-12))) if order == "te_quotient" else amax
        encode = (clamped32(both / raised) if raised else Fraction(1)) or Fraction(1)
        s = clamped32(over * encode) if order == "fouroversix" else clamped32(a * clamped32(encode * rn32(1 / m)))
        scale = scale_value(clamped32(s * candidate), fmt)
        if order == "te_quotient":
            return scale, clamped32(encode / scale) if scale else Fraction(0), tensor
        decode = clamped32(1 / encode)
        return scale, reciprocal(rn32(scale * decode)), decode
    if order == "trtllm":
        encode = (clamped32(both / amax) if amax else Fraction(1)) or Fraction(1)
        scale = scale_value(clamped32(clamped32(encode * rn32(a * _approximate(m))) * candidate), fmt)
        return scale, _approximate(rn32(scale * _approximate(encode))), clamped32(1 / encode)
    if order == "compressed_tensors":
        encode = rn32_or_infinite(rn32(1 / max(amax, FLT_MIN)) * both)
        encode = encode if encode <= FLT_MAX else Fraction(1)
        scale = scale_value(clamped32(clamped32(over * encode) * candidate), fmt) or Fraction(1, 8)
        return scale, 1 / (rn32(scale / encode) or FLT_MIN), clamped32(1 / encode)
    if order == "quartet2":
        tensor = rn32(rn32(amax / c) / m) or Fraction(1)
        scale = scale_value(clamped32(rn32(over * candidate) / tensor), fmt) or Fraction(1)
        return scale, 1 / rn32(scale * tensor), tensor
    least = Fraction(1, 512) if order == "modelopt" else Fraction(1, 64)
    s = (clamped32(a / rn32(m * tensor)) or Fraction(1)) if order == "modelopt" else clamped32(over / tensor)
    scale = scale_value(min(max(clamped32(s * candidate), least), c), fmt)
    if order == "modelopt":
        return scale, 1 / (rn32(scale * tensor) or FLT_MIN), tensor
    return scale, clamped32(reciprocal(tensor) / scale), tensor


def _approximate(x: Fraction) -> Fraction:
    """Return rcp.approx.ftz.f32, at most FLT_MAX."""
    return Fraction(min(float(approximate_reciprocal(torch.tensor(float(x)))), float(FLT_MAX)))


def _tops(fmt: BlockFormat) -> tuple[Fraction, Fraction]:
    assert fmt.scaling.tensor is not None
    return rn32_or_infinite(Fraction(fmt.element.max)), rn32(Fraction(fmt.scaling.tensor.top or fmt.scale.max))


def candidate_error(
    rows: list[list[tuple[float, float]]], scale: float, amax: Fraction, fmt: BlockFormat, step: float
) -> float:
    """Return the error of a block's values by fouroversix: float32, along rows, then rows by halves.

    rows: Elements and what was rounded from them, in steps.
    """
    m, c = _tops(fmt)
    both, sums = float(rn32(c * m)), []
    for row in rows:
        total = 0.0
        for x, q in row:
            y = operated32(mul, operated32(mul, q, scale), float(amax))
            off = operated32(sub, operated32(truediv, operated32(mul, y, step), both), x)
            total = operated32(add, total, abs(off) if fmt.scaling.metric == "mae" else operated32(mul, off, off))
        sums.append(total)
    sums += [0.0] * ((1 << (len(sums) - 1).bit_length()) - len(sums))
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [operated32(add, *pair) for pair in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]
