# SPDX-License-Identifier: Apache-2.0
"""How a block got its scale, step by step, and the numbers of its elements before rounding; LogFMT tiles, too."""

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from fmtsim.formats.block import FP32, BlockFormat, LogTileFormat
from fmtsim.formats.display import code_text
from fmtsim.formats.spec import FloatFormat, IntFormat, Overflow
from fmtsim.lab.explain.element import Decision, between, decide
from fmtsim.lab.explain.records import Scale
from fmtsim.rounding.elementary import exp
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.oracle import FP64, encode_value, floor_log2, is_negative, round_value
from fmtsim.scaling.oracle import Quantized

Decider = Callable[[float, int, Rounding, Overflow, int | None], Decision]
"""Explains a number by its stored code, the rounding, the overflow rule and the random integer."""

_INTEGERS = IntFormat(name="the integers", bits=24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Join the scale of a block with the function that explains one of its numbers."""

    scale: Scale
    decide: Decider


def tell_scales(numbers: list[float], result: Quantized, fmt: BlockFormat | LogTileFormat, *, wide: bool) -> list[Tile]:
    """Explain the scale of every block of one row.

    Args:
        numbers: The row.
        result: What the oracle made of it.
        fmt: The format.
        wide: Whether products with a real scale are rounded to float64 and not to float32.
    """
    width = fmt.block[1] or len(numbers)
    offsets = result.offsets[0] if result.offsets else [None] * len(result.scales[0])
    tiles, shared = [], len(result.scales[0])
    if isinstance(result.tensor_scale, list) and isinstance(fmt, BlockFormat):
        shared = fmt.scaling.blocks_per_level[1] or shared
    for index, (scale, offset) in enumerate(zip(result.scales[0], offsets, strict=True)):
        block = numbers[index * width : (index + 1) * width]
        if isinstance(fmt, LogTileFormat):
            tiles.append(_log_tile(block, scale, float(offset or 0.0), fmt))
            continue
        first, level = index // shared * shared, result.tensor_scale
        level_amax = _amax(numbers[first * width : (first + shared) * width])
        level = level[0][index // shared] if isinstance(level, list) else level
        steps = _steps(block, level_amax, scale, level, fmt, offset)
        code = code_text(encode_value(scale, fmt.scale), fmt.scale) if fmt.scale.bits <= 8 else None
        record = Scale(
            amax=float(_amax(block)),
            value=scale,
            code=code,
            tensor_scale=level,
            offset=offset,
            steps=steps,
        )
        # a NaN in the block: its codes are those of the block without regard to NaN
        factor = None if math.isnan(scale) else result.factors[0][index]
        tiles.append(Tile(scale=record, decide=_decider(fmt, factor, FP64 if wide else FP32, offset, scale)))
    return tiles


def _decider(
    fmt: BlockFormat, factor: Fraction | None, working: FloatFormat, zero: float | None, scale: float
) -> Decider:
    """Return the function that scales a number, rounds it to the block's elements, and says why."""
    other = fmt.alternative if math.copysign(1.0, scale) < 0 else None

    def scaled(x: float) -> float | Fraction:
        if not math.isfinite(x) or x == 0 or factor is None:
            return x
        product = Fraction(x) * factor
        y = product if fmt.power_of_two else round_value(product, working, "nearest_even", "ieee")
        ratio = 1.0 if other is None else round_value(other.max / fmt.element.max, FP32, "nearest_even", "ieee")
        return y if other is None else round_value(Fraction(y) * Fraction(ratio), working, "nearest_even", "ieee")

    def plain(x: float, _: int, how: Rounding, overflow: Overflow, word: int | None) -> Decision:
        return decide(scaled(x), other or fmt.element, how, overflow, word)

    def shifted(x: float, _: int, how: Rounding, overflow: Overflow, word: int | None) -> Decision:
        decision = decide(scaled(x), _INTEGERS, how, overflow, word)
        z, top = int(zero or 0), int(fmt.element.max)
        code = min(max(int(decision.value) + z, 0), top)
        below = None if decision.below is None or decision.below < -z else min(decision.below, float(top - z))
        above = None if decision.above is None or decision.above > top - z else max(decision.above, float(-z))
        if code != decision.value + z:
            reason = f"the number rounds to {decision.value:g}, beyond the block's range, and stays at {code - z}"
            decision = dataclasses.replace(decision, value=float(code - z), rule="saturated", reason=reason)
        return dataclasses.replace(decision, code=code, below=below, above=above)

    return plain if zero is None else shifted


def _steps(
    block: list[float], tensor_amax: Fraction, scale: float, tensor_scale: float | None, fmt: BlockFormat,
    zero: float | None,
) -> tuple[str, ...]:  # fmt: skip
    """Say how the rule made the scale."""
    amax = _amax(block)
    if math.isnan(scale):
        return (f"a NaN in the block and no NaN in {fmt.element.name}: the scale becomes NaN",)
    if zero is not None:
        low, high = min([0.0, *_finite(block)]), max([0.0, *_finite(block)])
        return (
            f"the range with zero is {low:g} to {high:g}; over {fmt.element.max:g} steps the scale is {scale:g}",
            f"the zero point is {zero:g}: {-low:g} / scale, rounded" if low else f"the zero point is {zero:g}",
        )
    if amax == 0:
        return (f"the block holds no finite number but zero: the scale is {scale:g}",)
    if fmt.power_of_two:
        return _power_of_two_steps(amax, scale, fmt)
    if tensor_scale is not None:
        assert fmt.scaling.tensor is not None
        c = fmt.scaling.tensor.top or fmt.scale.max
        times = " or ".join(f"{factor:g} times that" for factor in fmt.scaling.candidates if factor != 1)
        top = c * fmt.element.max
        outer, inner = fmt.scaling.tensor.block
        of = "tensor" if outer is None else "row" if inner is None else "window"
        return (
            f"{of} scale = largest magnitude {float(tensor_amax):g} / ({c:g} * {fmt.element.max:g}) = "
            f"{float(tensor_amax):g} / {top:g} = {tensor_scale:g}, kept in fp32",
            f"block scale = amax {float(amax):g} / {fmt.element.max:g} / {of} scale = {scale:g}, in {fmt.scale.name}"
            + (f", or {times} by least error" if times else "")
            + (f"; its sign: elements of {fmt.alternative.name}" if scale < 0 and fmt.alternative else ""),
        )
    name = "fp32" if fmt.scale.bits == 32 else fmt.scale.name
    return (f"{fmt.scale_rule}: {float(amax):g} / {fmt.element.max:g} = {scale:g}, kept in {name} ({fmt.arithmetic})",)


def _power_of_two_steps(amax: Fraction, scale: float, fmt: BlockFormat) -> tuple[str, ...]:
    top, exponent = fmt.element.max_exponent, floor_log2(amax)
    first = f"amax = {float(amax):g} lies in [2^{exponent}, 2^{exponent + 1}); {fmt.element.name} reaches 2^{top}"
    s = math.frexp(scale)[1] - 1
    ceiling = exponent if amax == Fraction(2) ** exponent else exponent + 1
    if fmt.scale_rule == "floor":
        power, rule = exponent - top, f"floor: {exponent} - {top} = {exponent - top}"
    elif fmt.scale_rule == "ceil":
        power, rule = ceiling - top, f"ceil: {ceiling} - {top} = {ceiling - top}"
    elif fmt.scale_rule == "even":
        bits = fmt.element.mantissa_bits  # type: ignore[union-attr]  # the record forbids formats without
        rounded = floor_log2(amax + Fraction(2) ** (exponent - bits - 1))
        power = rounded - top
        rule = f"even: amax rounded to {bits} mantissa bits has exponent {rounded}; {rounded} - {top} = {power}"
    else:
        power, quotient = s, float(amax) / fmt.element.max
        rule = f"rceil: amax / {fmt.element.max:g} = {quotient:g}, rounded up to a power of two from 2^-127 to 2^127"
    clamp = "" if power == s else f", limited to {s}"
    return first, f"{rule}{clamp}, so the scale is 2^{s} = {scale:g}"


def _log_tile(block: list[float], step: float, low: float, fmt: LogTileFormat) -> Tile:
    """Explain a LogFMT tile: its range of logarithms, and numbers between two of its values."""
    values = tile_values(low, step, fmt) if any(_finite(block)) and not math.isnan(low) else [0.0]
    what = f"{len(values) - 1} magnitudes from exp({low:g}) in steps of {step:g} of the natural logarithm"
    if math.isnan(low):
        what = "a NaN in the tile, and no NaN in the format: the whole tile becomes NaN"
    elif len(values) == 1:
        what = "the tile holds no finite number but zero"
    scale = Scale(amax=float(_amax(block)), value=step, code=None, tensor_scale=None, offset=low, steps=(what,))

    def decider(x: float, code: int, how: Rounding, overflow: Overflow, word: int | None) -> Decision:
        if math.isnan(low):  # the codes are those of the tile without regard to NaN
            return Decision(x=x, code=code, value=math.nan, below=None, above=None, rule="nan", reason=what)
        return decide_in_tile(x, code, values, fmt, how, word)

    return Tile(scale=scale, decide=decider)


def _finite(block: list[float]) -> list[float]:
    return [x for x in block if math.isfinite(x)]


def _amax(block: list[float]) -> Fraction:
    return max((abs(Fraction(x)) for x in _finite(block)), default=Fraction(0))


def tile_values(low: float, step: float, fmt: LogTileFormat) -> list[float]:
    """Return the magnitudes of a tile: 0, then ``RN32(exp(low + step * k))`` (docs/semantics.md, section 8)."""
    logarithms = (low + step * k for k in range(fmt.max_code))
    return [0.0, *(round_value(exp(logarithm), FP32, "nearest_even", "ieee") for logarithm in logarithms)]


def decide_in_tile(
    x: float, code: int, values: list[float], fmt: LogTileFormat, rounding: Rounding, word: int | None
) -> Decision:
    """Explain a number by the code that the oracle gave it and the magnitudes of its tile."""
    sign = -1.0 if code > fmt.max_code else 1.0
    value = sign * values[code & fmt.max_code]
    decision = Decision(x=x, code=code, value=value, below=None, above=None, rule="nan", reason="NaN in the tile")
    if math.isnan(x):
        return decision
    magnitude = abs(x)
    ranks = sorted(set(values))
    upper = bisect_right(ranks, magnitude)
    lower = upper - 1 - (ranks[upper - 1] == magnitude)  # -1 where zero itself is given
    around = [sign * ranks[lower] if lower >= 0 else None, sign * ranks[upper] if upper < len(ranks) else None]
    below, above = around if not is_negative(x) else around[::-1]
    decision = dataclasses.replace(decision, below=below, above=above)
    if magnitude == abs(value):
        return dataclasses.replace(decision, rule="exact", reason="the tile holds the number exactly")
    if upper == len(ranks):
        reason = "the number lies beyond the largest value of the tile and becomes that value"
        return dataclasses.replace(decision, rule="saturated", reason=reason)
    neighbours = ranks[upper - 1], ranks[upper]
    if math.isinf(neighbours[1]):
        reason = "the next larger value of the tile is infinite: its logarithm lies beyond float32"
        return dataclasses.replace(decision, rule="overflow", reason=reason)
    middle = Fraction(float((Fraction(neighbours[0]) + Fraction(neighbours[1])) / 2))
    swapped = {"up": "down", "down": "up"}.get(rounding.mode) if is_negative(x) else None  # of the magnitudes
    how = rounding if swapped is None else Rounding(mode=swapped)  # type: ignore[arg-type]
    rule, reason = between(Fraction(magnitude), abs(value), neighbours, middle, how, word)
    rule = rounding.mode if rule == how.mode else rule
    return dataclasses.replace(decision, rule=rule, reason=f"{reason} (of the magnitudes)")
