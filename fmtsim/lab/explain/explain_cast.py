# SPDX-License-Identifier: Apache-2.0
"""The verb ``explain``: run the oracle, tell its story, and check the engine against it."""

from __future__ import annotations  # help shows the names of types

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any, Never, overload

import numpy
import torch

from fmtsim.casts import numpy_arrays
from fmtsim.casts.arguments import cast_options, check_dense, drawn_key, refuse_others, spelled
from fmtsim.casts.profile import check_alone
from fmtsim.casts.quantize import encode, quantize
from fmtsim.formats.block import FP32, Block, BlockFormat, Format, LogTileFormat, PackedFormat, with_block
from fmtsim.formats.display import code_text, count_of
from fmtsim.formats.element import OVERFLOWS, CodebookFormat, ElementFormat, FloatFormat, IntFormat, LogFormat, Overflow
from fmtsim.formats.interop import dtype_name
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import FLOAT_DTYPES, result_dtype
from fmtsim.formats.scaling import ScaleRule
from fmtsim.lab.explain.explain_like import LikeExplanation, explain_like
from fmtsim.lab.explain.explanations import Decision, Element, Explanation, Number, Scale
from fmtsim.rounding.elementary import exp
from fmtsim.rounding.modes import Rounding, RoundingName, get_rounding
from fmtsim.rounding.oracle import FP64, encode_value, floor_log2, is_negative, round_value
from fmtsim.rounding.philox import random_integer
from fmtsim.scaling.oracle import quantize_matrix
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.dispatch import is_readable
from fmtsim.support.errors import ArgumentError, DtypeError, FormatError, shown

# Smaller than the distance between any two values of any format (float64's last place is 2**-1074).
_NUDGE = Fraction(1, 1 << 1200)


def decide(x: Number, fmt: ElementFormat, rounding: Rounding, overflow: Overflow, word: int | None) -> Decision:
    """Round a number by the oracle and find out why it got its code."""
    code = encode_value(x, fmt, rounding, overflow, word)
    value = fmt.value(code)
    below, above = neighbours(x, fmt)
    if not isinstance(x, Fraction) and math.isnan(x):
        rule = "nan"
        reason = "NaN stays NaN" if math.isnan(value) else f"{fmt.name} has no NaN, which becomes its largest value"
    elif not isinstance(x, Fraction) and math.isinf(x):
        if math.isnan(value):
            rule, reason = "nan", f"{fmt.name} has no infinity, which becomes NaN under overflow='ieee'"
        elif math.isinf(value):
            rule, reason = "infinity", "infinity stays infinity"
        else:
            rule, reason = "saturated", "infinity becomes the outermost value"
    elif math.isfinite(value) and Fraction(value) == Fraction(x):
        rule, reason = "exact", f"{fmt.name} holds the number exactly"
    else:
        rule, reason = _finite(Fraction(x), value, fmt, rounding, word)
    return Decision(x=x, code=code, value=value, below=below, above=above, rule=rule, reason=reason)


def neighbours(x: Number, fmt: ElementFormat) -> tuple[float | None, float | None]:
    """Return the values of the format just below and just above x; x itself is neither. None where there is none."""
    if not isinstance(x, Fraction) and math.isnan(x):
        return None, None
    if not isinstance(x, Fraction) and math.isinf(x):
        return (fmt.max, None) if x > 0 else (None, fmt.min)
    exact = Fraction(x)
    if isinstance(fmt, CodebookFormat | LogFormat):
        values = _values(fmt)
        low, high = bisect_left(values, exact), bisect_right(values, exact)
        return (values[low - 1] if low else None), (values[high] if high < len(values) else None)
    below = round_value(exact - _NUDGE, fmt, "down", "saturate")
    above = round_value(exact + _NUDGE, fmt, "up", "saturate")
    # + 0.0 drops the sign of zero, which says nothing about a place on the line.
    return (below + 0.0 if below < exact else None), (above + 0.0 if above > exact else None)


@cache
def _values(fmt: CodebookFormat | LogFormat) -> tuple[float, ...]:
    """Return the distinct values of a format that is a list, in order."""
    values = {fmt.value(code) for code in range(count_of(fmt))}
    return tuple(sorted(value for value in values if value == value))


def _finite(x: Fraction, value: float, fmt: ElementFormat, rounding: Rounding, word: int | None) -> tuple[str, str]:
    """Explain a finite number that is not a value of the format."""
    if x < 0 <= fmt.min:
        what = "becomes NaN under overflow='ieee'" if math.isnan(value) else "becomes the smallest value"
        return "unsigned", f"{fmt.name} has no negative numbers: {what}"
    if isinstance(fmt, LogFormat) and abs(x) < 1:
        return "smallest", f"magnitudes below 1 become 1 in {fmt.name}"
    if isinstance(fmt, FloatFormat) and not fmt.has_zero and x < Fraction(fmt.min):
        return "smallest", f"below the smallest value of {fmt.name}, which has no zero"
    # The same grid with a larger range shows where the number would go; the format itself where it has none.
    wide = fmt
    if isinstance(fmt, FloatFormat) and (2 << fmt.exponent_bits) - 1 - fmt.exponent_bias <= 1023:  # within float64
        wider = fmt.exponent_bits + 1
        wide = dataclasses.replace(fmt, exponent_bits=wider, bias=fmt.exponent_bias, nan="none", infinities=False)
    elif isinstance(fmt, IntFormat) and fmt.bits < 24:
        wide = dataclasses.replace(fmt, bits=fmt.bits + 1)
    unbounded = round_value(x, wide, rounding, "saturate", word)
    if wide is fmt and not fmt.min <= x <= max(fmt.max, fmt.min):
        return _beyond(value, "the number lies", fmt)
    if not fmt.min <= unbounded <= fmt.max:
        return _beyond(value, f"the number rounds to {unbounded:g},", fmt)
    # Explain a number strictly between two values of the grid.
    low, high = neighbours(x, wide)
    if low is None or high is None:
        rule, reason = "saturated", f"the number lies beyond the outermost value, and stays at {value:g}"
    else:
        middle = turning_point(x, Fraction(low), Fraction(high), fmt)
        rule, reason = between(x, value, (low, high), middle, rounding, word)
        listed = isinstance(fmt, CodebookFormat) and bool(fmt.thresholds)
        measure = " in the logarithm" if isinstance(fmt, LogFormat) else " by the format's thresholds" if listed else ""
        reason += measure if rule == "nearest" else ""
    if value == 0:
        reason += "; the number is lost to zero (underflow)"
    return rule, reason


def _beyond(value: float, start: str, fmt: ElementFormat) -> tuple[str, str]:
    if math.isfinite(value):
        return "saturated", f"{start} beyond the outermost value, and stays at {value:g}"
    return (
        "overflow",
        f"{start} beyond the largest value {fmt.max:g}, and becomes {'NaN' if value != value else 'infinity'}",
    )


def between(
    x: Fraction, value: float, around: tuple[float, float], middle: Fraction, rounding: Rounding, word: int | None
) -> tuple[str, str]:
    """Name the rule that chose one of two neighbours, and say it in a sentence.

    Args:
        x: The number, strictly between the two.
        value: The one that was chosen.
        around: The neighbours below and above.
        middle: Where rounding to nearest turns over.
        rounding: The rounding.
        word: The random integer of stochastic rounding.
    """
    below, above = (Fraction(neighbour) for neighbour in around)
    side = "above" if value == above else "below"
    if rounding.mode == "stochastic":
        share = float((x - below) / (above - below))
        odds = f"the number lies {share:.6g} of the way up, the chance of the neighbour above"
        return "stochastic", f"{odds}; random word {word} of {rounding.bits} bits chose the one {side}"
    if not rounding.rule.is_nearest:
        return rounding.mode, f"rounding {rounding.mode} takes {rounding.rule.takes}"
    if x == middle:
        return f"tie_{rounding.mode.removeprefix('nearest_')}", f"half-way: the tie goes to {rounding.rule.takes}"
    return "nearest", f"the neighbour {side} is nearer"


def turning_point(x: Fraction, below: Fraction, above: Fraction, fmt: ElementFormat) -> Fraction:
    """Return where rounding to nearest turns over (docs/semantics.md, sections 1 and 3)."""
    if isinstance(fmt, LogFormat) and below != -above:
        rank = fmt.magnitudes.index(float(min(abs(below), abs(above))))
        return Fraction(math.copysign(fmt.thresholds[rank], x))
    if isinstance(fmt, CodebookFormat):
        return Fraction(fmt.turns[fmt.ordered.index(float(below))])
    return (below + above) / 2


Decider = Callable[[float, int, Rounding, Overflow, int | None], Decision]
"""Explains a number by its stored code, the rounding, the overflow rule and the random integer."""

_INTEGERS = IntFormat(name="the integers", bits=24)


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
        low, high = min([0.0, *_finite_numbers(block)]), max([0.0, *_finite_numbers(block)])
        return (
            f"the range with zero is {low:g} to {high:g}; over {fmt.element.max:g} steps the scale is {scale:g}",
            f"the zero point is {zero:g}: {-low:g} / scale, rounded" if low else f"the zero point is {zero:g}",
        )
    if amax == 0:
        return (f"the block holds no finite number but zero: the scale is {scale:g}",)
    if fmt.power_of_two:
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
            rule = (
                f"rceil: amax / {fmt.element.max:g} = {quotient:g}, rounded up to a power of two from 2^-127 to 2^127"
            )
        clamp = "" if power == s else f", limited to {s}"
        return first, f"{rule}{clamp}, so the scale is 2^{s} = {scale:g}"
    if tensor_scale is not None:
        assert fmt.scaling.tensor is not None
        c = fmt.scaling.tensor.top or fmt.scale.max
        times = " or ".join(f"{factor:g} times that" for factor in fmt.scaling.candidates if factor != 1)
        reach = c * fmt.element.max
        outer, inner = fmt.scaling.tensor.block
        of = "tensor" if outer is None else "row" if inner is None else "window"
        return (
            f"{of} scale = largest magnitude {float(tensor_amax):g} / ({c:g} * {fmt.element.max:g}) = "
            f"{float(tensor_amax):g} / {reach:g} = {tensor_scale:g}, kept in fp32",
            f"block scale = amax {float(amax):g} / {fmt.element.max:g} / {of} scale = {scale:g}, in {fmt.scale.name}"
            + (f", or {times} by least error" if times else "")
            + (f"; its sign: elements of {fmt.alternative.name}" if scale < 0 and fmt.alternative else ""),
        )
    name = "fp32" if fmt.scale.bits == 32 else fmt.scale.name
    return (f"{fmt.scale_rule}: {float(amax):g} / {fmt.element.max:g} = {scale:g}, kept in {name} ({fmt.arithmetic})",)


def _log_tile(block: list[float], step: float, low: float, fmt: LogTileFormat) -> tuple[Scale, Decider]:
    """Explain a LogFMT tile: its range of logarithms, and numbers between two of its values."""
    values = tile_values(low, step, fmt) if any(_finite_numbers(block)) and not math.isnan(low) else [0.0]
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

    return scale, decider


def _finite_numbers(block: list[float]) -> list[float]:
    return [x for x in block if math.isfinite(x)]


def _amax(block: list[float]) -> Fraction:
    return max((abs(Fraction(x)) for x in _finite_numbers(block)), default=Fraction(0))


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


LIMIT = 65536
"""Most numbers that one call explains: the oracle takes tens of microseconds for each."""


@overload
def explain(
    x: Any, format: str | Format | Quantizer | torch.dtype, *, rounding: RoundingName | Rounding = ...,
    overflow: Overflow | None = ..., generator: int | RandomKey = ..., random_bits: int | None = ...,
    block_size: int | Block | None = ..., scale_rule: ScaleRule | None = ..., like: None = ...,
) -> Explanation: ...  # fmt: skip
@overload
def explain(
    x: Any, format: str | Format | Quantizer | torch.dtype, *, block_size: int | Block | None = ..., like: str
) -> LikeExplanation: ...
@spelled
def explain(
    x: float | Sequence[float] | torch.Tensor | numpy.ndarray[Any, Any],
    format: str | Format | Quantizer | torch.dtype,
    *more: Never,
    rounding: RoundingName | Rounding = "nearest_even",
    overflow: Overflow | None = None,
    generator: int | RandomKey = 0,
    random_bits: int | None = None,
    block_size: int | Block | None = None,
    scale_rule: ScaleRule | None = None,
    like: str | None = None,
    **others: Never,
) -> Explanation | LikeExplanation:
    """Say how numbers get their bits: scale, neighbours, exact distances, and the rule that decided.

    Args:
        x: A number, a sequence, or a tensor or array of at most one dimension; consecutive numbers share the blocks
            of a block format, the last of which may be short. Python numbers are float64, tensors and arrays keep
            their dtype, float8 ones count as float32.
        format: Name, record or torch dtype of the format, or a ``Quantizer`` that only casts.
        rounding: Name of a mode or a ``Rounding``.
        overflow: ``"saturate"``, ``"ieee"``, or None for the format's default.
        generator: Seed of stochastic rounding, as in ``quantize``.
        random_bits: Random bits of stochastic rounding.
        block_size: Elements that share a scale, as in ``quantize``.
        scale_rule: How scales are made, as in ``quantize``.
        like: Another library whose cast is explained, step by step (``fmtsim.list_profiles()``).

    Returns:
        A record; ``print`` shows it as text, ``to_dict`` gives it as plain types. NaN and infinities are explained
        like other numbers. The bits are those of ``quantize`` for a tensor of these numbers.

    Raises:
        FormatError: Unknown format, rounding, overflow or scale rule.
        DtypeError: x is not made of floating-point numbers.
        ArgumentError: x has more than one dimension, or more than 65536 numbers.

    >>> e = explain(957.0, "mxfp8_e4m3").elements[0]
    >>> e.bits, e.value, e.decision.rule
    ('0 1111 110', 896.0, 'saturated')
    """
    refuse_others(explain, more, others)
    # The numbers as a tensor of one dimension.
    x = numpy_arrays.as_floats(x)
    if isinstance(x, torch.Tensor):
        check_dense("x", x)
        if not is_readable(x):
            what = "on the meta device" if x.is_meta else f"a {type(x).__name__}"
            raise ArgumentError(f"x is {what} and holds no numbers; pass a tensor of the CPU or a GPU")
        tensor = x.detach().cpu()
    else:
        try:
            tensor = torch.tensor(x, dtype=torch.float64)
        except OverflowError:
            raise ArgumentError(f"x={shown(x)} has an integer beyond float64; pass numbers up to 1.797e308") from None
        except (TypeError, ValueError, RuntimeError, RecursionError):
            argument = f"x={shown(x)}"
            raise DtypeError(f"{argument} is not a number or a sequence of numbers; pass floats or a tensor") from None
    if tensor.dtype not in FLOAT_DTYPES:
        raise DtypeError(f"x has dtype {tensor.dtype}; choose float16, bfloat16, float32 or float64 (x.float())")
    if tensor.dim() > 1:
        raise ArgumentError(f"x has shape {tuple(tensor.shape)}; pass a number or one row, such as x[0]")
    if tensor.numel() > LIMIT:
        raise ArgumentError(f"x has {tensor.numel()} numbers; pass at most {LIMIT}, the oracle is slow")
    tensor = tensor.reshape(-1)
    if isinstance(format, Quantizer):
        told = rounding, overflow, random_bits, block_size, scale_rule, like
        format, rounding, overflow, like = cast_options(format, *told)
    if like is not None:
        check_alone(like, rounding, overflow, None, random_bits, None, scale_rule, None)
        return explain_like(tensor, get_format(format), like, block_size)
    fmt = with_block(get_format(format), block_size, scale_rule)
    if isinstance(fmt, PackedFormat) or (isinstance(fmt, BlockFormat) and not fmt.scaling.has_usual_rule):
        raise FormatError(
            f"explain does not follow blocks of {fmt.name}; fmtsim.quantize with this format gives their values"
        )
    if overflow is not None and (not isinstance(overflow, str) or overflow not in OVERFLOWS):
        allowed = "choose 'saturate', 'ieee' or None for the format's default"
        raise FormatError(f"unknown overflow {shown(overflow)}; {allowed}")
    how, rule = get_rounding(rounding, random_bits), overflow or fmt.default_overflow
    if generator is None or isinstance(generator, torch.Generator):
        raise ArgumentError("explain draws from no generator; pass generator= an int, the seed that quantize was given")
    key = drawn_key(generator, torch.device("cpu"))
    assert isinstance(key, RandomKey)
    stochastic = how.mode == "stochastic"
    words = [random_integer(how, key, i) if stochastic else None for i in range(tensor.numel())]
    numbers = tensor.to(torch.float64).tolist()
    elements: list[Element] = []
    blocks: list[tuple[Scale, Decider]] = []
    if not isinstance(fmt, BlockFormat | LogTileFormat):
        for number, word in zip(numbers, words, strict=True):
            decision = decide(number, fmt, how, rule, word)
            code, value = decision.code, decision.value
            elements.append(Element(input=number, block=0, decision=decision, code=code, value=value, format=fmt))
    elif numbers:
        # Quantise one row by the oracle and tell how each scale and element came about.
        out_format = get_format(result_dtype(fmt, tensor.dtype))
        result = quantize_matrix(
            [numbers], fmt, how, rule, dtype_name(tensor.dtype),  # type: ignore[arg-type]
            out_format, [words] if stochastic else None,  # type: ignore[arg-type, list-item]
        )  # fmt: skip
        # 1. the scale of every block, and what explains a number of the block
        width, working = fmt.block[1] or len(numbers), FP64 if tensor.dtype == torch.float64 else FP32
        offsets = result.offsets[0] if result.offsets else [None] * len(result.scales[0])
        shared = len(result.scales[0])
        if isinstance(result.tensor_scale, list) and isinstance(fmt, BlockFormat):
            shared = fmt.scaling.blocks_per_level[1] or shared
        for index, (scale, offset) in enumerate(zip(result.scales[0], offsets, strict=True)):
            row = numbers[index * width : (index + 1) * width]
            if isinstance(fmt, LogTileFormat):
                blocks.append(_log_tile(row, scale, float(offset or 0.0), fmt))
                continue
            first, level = index // shared * shared, result.tensor_scale
            level_amax = _amax(numbers[first * width : (first + shared) * width])
            level = level[0][index // shared] if isinstance(level, list) else level
            steps = _steps(row, level_amax, scale, level, fmt, offset)
            code_of_scale = code_text(encode_value(scale, fmt.scale), fmt.scale) if fmt.scale.bits <= 8 else None
            record = Scale(
                amax=float(_amax(row)), value=scale, code=code_of_scale, tensor_scale=level, offset=offset, steps=steps
            )
            # a NaN in the block: its codes are those of the block without regard to NaN
            factor = None if math.isnan(scale) else result.factors[0][index]
            blocks.append((record, _decider(fmt, factor, working, offset, scale)))
        # 2. the elements
        stored = fmt.element if isinstance(fmt, BlockFormat) else fmt
        for index, (number, code, value) in enumerate(zip(numbers, result.codes[0], result.values[0], strict=True)):
            block = index // width
            decision = blocks[block][1](number, code, how, rule, words[index])
            if math.isnan(value) and not math.isnan(decision.value):
                reason = f"{stored.name} has no NaN, so one NaN makes its whole block NaN"
                decision = dataclasses.replace(decision, below=None, above=None, rule="nan", reason=reason)
            elements.append(
                Element(input=number, block=block, decision=decision, code=code, value=value, format=stored)
            )
    options = {"rounding": how, "overflow": rule, "generator": key if stochastic else None}
    return Explanation(
        format=fmt, rounding=how, overflow=rule, scales=tuple(scale for scale, _ in blocks), elements=tuple(elements),
        engine_agrees=_engine_agrees(tensor, fmt, tuple(elements), options),
    )  # fmt: skip


def _engine_agrees(tensor: torch.Tensor, fmt: Format, elements: tuple[Element, ...], options: dict[str, Any]) -> bool:
    """Compare the bits of the verbs with those of the oracle."""
    mask = (1 << fmt.bits) - 1
    codes = [code & mask for code in encode(tensor, fmt, pad=True, **options).unpacked().tolist()]
    values = quantize(tensor, fmt, pad=True, **options).to(torch.float64)
    expected = torch.tensor([element.value for element in elements], dtype=torch.float64)
    same_values = torch.equal(values.view(torch.int64), expected.view(torch.int64))
    return same_values and codes == [element.code for element in elements]
