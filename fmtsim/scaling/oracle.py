# SPDX-License-Identifier: Apache-2.0
"""Quantisation of a matrix with block scales in exact numbers: slow, obvious, and what engines are held to.

Every step follows docs/semantics.md, sections 4 to 8; two levels of scales (section 6) take the orders of libraries.
``RN32`` and ``RN64`` are roundings of exact fractions by the rounding oracle; only ``ln`` and ``exp`` of LogFMT tiles
are the fixed double sequences of elementary.py.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from operator import add, mul, sub, truediv
from typing import Any, Literal, NamedTuple

import torch

from fmtsim.formats.block import FP32, BlockFormat, LogTileFormat
from fmtsim.formats.element import ElementFormat, FloatFormat, IntFormat, Overflow
from fmtsim.rounding.elementary import exp, ln
from fmtsim.rounding.modes import Rounding, get_rounding
from fmtsim.rounding.oracle import (
    FP64,
    Real,
    check_word,
    decode_value,
    encode_value,
    floor_log2,
    is_negative,
    power_of_two,
    round_to_integer,
    round_value,
    takes_upper,
)
from fmtsim.support.mufu_tables import approximate_reciprocal

FLT_MAX = Fraction((1 << 24) - 1) * power_of_two(104)
FLT_MIN = power_of_two(-126)
INFINITE = power_of_two(1024)  # in a quotient with a float32 number: 0, or more than FLT_MAX, once that is rounded


def ceil_log2(x: Fraction) -> int:
    """Return the exponent of the power of two that is not below x."""
    e = floor_log2(x)
    return e if x == power_of_two(e) else e + 1


def rounded(x: Real, fmt: FloatFormat) -> float:
    """Round to nearest even, by IEEE 754's rule beyond the largest number."""
    return round_value(x, fmt, "nearest_even", "ieee")


def rn32(x: Fraction) -> Fraction:
    """Round to binary32 a number that stays within its range."""
    return Fraction(rounded(x, FP32))


def rn32_or_infinite(x: Fraction) -> Fraction:
    """Round a positive number to binary32; beyond its range it is ``INFINITE``."""
    value = rounded(x, FP32)
    return Fraction(value) if math.isfinite(value) else INFINITE


def clamped32(x: Fraction) -> Fraction:
    """Return ``min(RN32(x), FLT_MAX)`` of a number that is not negative."""
    return rn32(x) if x <= FLT_MAX else FLT_MAX


def times(x: float, factor: Fraction, fmt: FloatFormat) -> float:
    """Return ``x * factor`` rounded once; the factor is finite and not negative, Inf times 0 is NaN."""
    if math.isinf(x) and factor == 0:
        return math.nan
    if x == 0 or not math.isfinite(x):
        return x
    return rounded(Fraction(x) * factor, fmt) if factor else math.copysign(0.0, x)


def operated32(operation: Callable[[Any, Any], Any], a: float, b: float) -> float:
    """Return the result of an arithmetic operation of floats rounded to binary32; the sign of a zero is lost."""
    if math.isfinite(a) and math.isfinite(b):
        return rounded(operation(Fraction(a), Fraction(b)), FP32)
    return float(operation(a, b))


def scale_value(x: Fraction, fmt: BlockFormat) -> Fraction:
    """Round to the format that stores a format's scales."""
    return Fraction(round_value(x, fmt.scale, "nearest_even", "saturate"))


def reciprocal(scale: Fraction) -> Fraction:
    """Return ``min(RN32(1 / scale), FLT_MAX)``."""
    return clamped32(1 / scale) if scale else FLT_MAX


InputDtype = Literal["float64", "float32", "bfloat16", "float16"]
Matrix = Sequence[Sequence[float]]

LOG_RANGE = 22.18070977791825
"""The double nearest to ``32 ln 2``: a LogFMT tile spans at most 32 octaves."""


class Quantized(NamedTuple):
    """What quantisation of a matrix returns.

    codes: unsigned bit patterns, the matrix's shape.
    scales: ``[outer blocks][inner blocks]``: block scales, or the steps of LogFMT tiles.
    tensor_scale: the scale of the whole matrix in two-level formats, or those of rows or windows; else None.
    offsets: like scales: zero points, or the lowest logarithms of LogFMT tiles, else None.
    values: what the codes decode to, rounded once to the output format.
    factors: like scales: what elements were multiplied with before they were rounded (LogFMT tiles: 1).
    """

    codes: list[list[int]]
    scales: list[list[float]]
    tensor_scale: float | list[list[float]] | None
    offsets: list[list[float]] | None
    values: list[list[float]]
    factors: list[list[Fraction]]


class _Cast(NamedTuple):
    """What is the same for every block; ``word`` finds the random integer of an element by row and column."""

    how: Rounding
    overflow: Overflow
    working: FloatFormat
    out: FloatFormat
    word: Callable[[int, int], int | None]


class _Block(NamedTuple):
    """One block: its elements, and where they lie in the matrix."""

    places: list[tuple[int, int]]
    elements: list[float]

    @property
    def finite(self) -> list[float]:
        return [x for x in self.elements if math.isfinite(x)]

    @property
    def amax(self) -> Fraction:
        return max((abs(Fraction(x)) for x in self.finite), default=Fraction(0))

    @property
    def has_nan(self) -> bool:
        return any(math.isnan(x) for x in self.elements)


class _Result(NamedTuple):
    scale: float
    codes: list[int]
    values: list[float]
    factor: Fraction = Fraction(1)
    offset: float = math.nan
    level: Fraction = Fraction(1)


def quantize_matrix(
    rows: Matrix, fmt: BlockFormat | LogTileFormat, rounding: str | Rounding = "nearest_even",
    overflow: Overflow | None = None, input_dtype: InputDtype = "float32", out_format: FloatFormat = FP32,
    words: Sequence[Sequence[int]] | None = None,
) -> Quantized:  # fmt: skip
    """Quantise a matrix whose rows run along the inner axis.

    Args:
        rows: The matrix; NaN, infinities and -0 as floats.
        fmt: A block format or a LogFMT tile.
        rounding: How elements are rounded; scales are always rounded to nearest even.
        overflow: The elements' overflow rule, or None for the format's default.
        input_dtype: What the matrix was stored in: products are rounded to float64 for ``"float64"``, else to float32.
        out_format: The format of the output dtype.
        words: The random integers of stochastic rounding, the matrix's shape.

    Raises:
        ArgumentError: A random integer is missing or out of range.
    """
    how = get_rounding(rounding)

    def word(i: int, j: int) -> int | None:
        integer = None if words is None else words[i][j]
        check_word(how, integer)
        return integer

    # 1. what all blocks share
    working = FP64 if input_dtype == "float64" else FP32
    cast = _Cast(how, overflow or fmt.default_overflow, working, out_format, word)
    # 2. block by block: cut the matrix into rows of blocks, short at the far edges
    height, width = len(rows), len(rows[0]) if rows else 0

    def spans(extent: int, size: int | None) -> Iterator[range]:
        step = size or extent
        return (range(start, min(start + step, extent)) for start in (range(0, extent, step) if extent else ()))

    def cut(rows_of: range, columns: range) -> _Block:
        places = [(i, j) for i in rows_of for j in columns]
        return _Block(places, [rows[i][j] for i, j in places])

    blocks = [
        [cut(rows_of, columns) for columns in spans(width, fmt.block[1])] for rows_of in spans(height, fmt.block[0])
    ]
    levels = fmt if isinstance(fmt, BlockFormat) and fmt.tensor_scale else None
    shared: list[list[Any]] = [[None] * len(row) for row in blocks]
    if levels is not None:  # for each block the largest magnitude of what shares a scale of the second level with it
        outer, inner = (n or 1 << 63 for n in levels.scaling.blocks_per_level)
        largest: dict[tuple[int, int], Fraction] = {}
        for i, row in enumerate(blocks):
            for j, block in enumerate(row):
                place = i // outer, j // inner
                largest[place] = max(largest.get(place, Fraction(0)), clamped32(block.amax))
        shared = [[largest[i // outer, j // inner] for j in range(len(row))] for i, row in enumerate(blocks)]
    results = [
        [_quantize_block(block, fmt, cast, amax) for block, amax in zip(*pair, strict=True)]
        for pair in zip(blocks, shared, strict=True)
    ]
    # 3. back into a matrix
    codes: dict[tuple[int, int], int] = {}
    values: dict[tuple[int, int], float] = {}
    for block, result in zip(chain(*blocks), chain(*results), strict=True):
        codes.update(zip(block.places, result.codes, strict=True))
        values.update(zip(block.places, result.values, strict=True))
    has_offsets = not isinstance(fmt, BlockFormat) or fmt.zero_point
    return Quantized(
        codes=[[codes[i, j] for j in range(len(row))] for i, row in enumerate(rows)],
        scales=[[result.scale for result in row] for row in results],
        tensor_scale=None if levels is None else _shared_scales(results, levels),
        offsets=[[result.offset for result in row] for row in results] if has_offsets else None,
        values=[[values[i, j] for j in range(len(row))] for i, row in enumerate(rows)],
        factors=[[result.factor for result in row] for row in results],
    )


def _quantize_block(
    block: _Block, fmt: BlockFormat | LogTileFormat, cast: _Cast, shared_amax: Fraction | None
) -> _Result:
    if isinstance(fmt, LogTileFormat):
        magnitudes, low, step = [m for m in (clamped32(abs(Fraction(x))) for x in block.finite) if m], 0.0, 0.0
        if magnitudes:  # the lowest logarithm and the step, both float32
            high = ln(float(max(magnitudes)))
            floor = round_value(Fraction(high) - Fraction(LOG_RANGE), FP64, "nearest_even", "ieee")
            low = rounded(max(ln(float(min(magnitudes))), floor), FP32)
            span = Fraction(round_value(max(Fraction(high) - Fraction(low), Fraction(0)), FP64, "nearest_even", "ieee"))
            step = rounded(round_value(span / (fmt.max_code - 1), FP64, "nearest_even", "ieee"), FP32)
        values = _log_values(low, step, fmt.max_code if magnitudes else 0)
        sign_bit = 1 << (fmt.bits - 1)
        codes = []
        for place, x in zip(block.places, block.elements, strict=True):
            negative = x == x and is_negative(x)
            codes.append(_log_code(x, negative, values, cast.how, cast.word(*place)) | negative * sign_bit)
        if block.has_nan:
            return _Result(step, codes, [math.nan] * len(codes))
        signed = [-values[code % sign_bit] if code & sign_bit else values[code] for code in codes]
        return _Result(step, codes, [rounded(value, cast.out) for value in signed], offset=low)
    assert isinstance(fmt, BlockFormat)
    if fmt.zero_point:
        return _zero_point_block(block, fmt, cast)
    if shared_amax is not None:  # the candidate of least error, the first of equal ones
        tried = [two_levels(clamped32(block.amax), shared_amax, fmt, Fraction(c)) for c in fmt.scaling.candidates]
        results = [(_scaled_block(block, fmt, cast, *scales), fmt.element) for scales in tried]
        if fmt.alternative is not None:
            results.append((_scaled_block(block, fmt, cast, *tried[0], element=fmt.alternative), fmt.alternative))
        return (
            results[0][0]
            if len(results) == 1
            else min(results, key=lambda r: _error(block, r[0], r[1], fmt, shared_amax))[0]
        )
    if fmt.power_of_two:
        # section 5: the exponent of one scale a block
        amax, exponent, top = block.amax, -127, fmt.element.max_exponent
        if amax and fmt.scale_rule == "floor":
            exponent = floor_log2(amax) - top
        elif amax and fmt.scale_rule == "ceil":
            exponent = ceil_log2(amax) - top
        elif amax and fmt.scale_rule == "even":
            half_place = power_of_two(floor_log2(amax) - fmt.element.mantissa_bits - 1)  # type: ignore[union-attr]
            exponent = floor_log2(amax + half_place) - top
        elif amax and (product := rn32(clamped32(amax) * rn32(1 / Fraction(fmt.element.max)))):
            exponent = ceil_log2(product)
        powers = floor_log2(Fraction(fmt.scale.min_subnormal)), floor_log2(Fraction(fmt.scale.max))
        scale = power_of_two(max(-127, powers[0], min(127, powers[1], exponent)))
        factor = 1 / scale
    else:
        m, a = rn32_or_infinite(Fraction(fmt.element.max)), clamped32(block.amax)
        if a == 0:
            scale, factor = scale_value(Fraction(1), fmt), Fraction(1)
        elif fmt.arithmetic == "encode":
            r0 = clamped32(m / a)
            scale = scale_value(clamped32(1 / r0) if r0 else FLT_MAX, fmt)
            factor = r0 if fmt.scale.bits == 32 else reciprocal(scale)
        else:
            scale = scale_value(max(clamped32(a / m), FLT_MIN), fmt)
            factor = 1 / (scale or FLT_MIN) if fmt.arithmetic == "divide" else reciprocal(scale)
    return _scaled_block(block, fmt, cast, scale, factor)


def _scaled_block(
    block: _Block, fmt: BlockFormat, cast: _Cast, scale: Fraction, factor: Fraction, level: Fraction | None = None,
    element: ElementFormat | None = None,
) -> _Result:  # fmt: skip
    """Round the elements of a block under its scale.

    level: The scale of the tensor, or of a row or window. element: The format's alternative, or None.
    """
    step = Fraction(1) if element is None else Fraction(fmt.element.max / element.max)

    def scaled(x: float) -> Real:
        if fmt.power_of_two and x != 0 and math.isfinite(x):
            return Fraction(x) * factor
        y = times(x, factor, cast.working)
        return y if element is None else times(y, rn32(Fraction(element.max / fmt.element.max)), cast.working)

    # 1. each element rounded once
    codes = [
        encode_value(scaled(x), element or fmt.element, cast.how, cast.overflow, cast.word(*place))
        for place, x in zip(block.places, block.elements, strict=True)
    ]
    elements = [decode_value(code, element or fmt.element) for code in codes]
    # 2. values; a NaN that elements cannot express makes its block NaN
    if block.has_nan and not fmt.element.has_nan and fmt.scale.has_nan:
        return _Result(math.nan, codes, [math.nan] * len(codes), factor, level=level or Fraction(1))
    if level is not None:
        products = [times(times(q, step, FP64), scale, FP64) for q in elements]
        values = [rounded(times(product, level, FP64), cast.out) for product in products]
        return _Result(-float(scale) if element else float(scale), codes, values, factor, level=level)
    return _Result(float(scale), codes, [times(q, scale, cast.out) for q in elements], factor)


# Section 6: block scales, and one of the tensor, of a row or of a window.


def _shared_scales(results: list[list[_Result]], fmt: BlockFormat) -> float | list[list[float]]:
    outer, inner = fmt.scaling.blocks_per_level
    scales = [
        [float(result.level) for result in row[:: inner or len(row)]] for row in results[:: outer or len(results)]
    ]
    return (scales[0][0] if scales else 1.0) if (outer, inner) == (None, None) else scales


def _error(block: _Block, result: _Result, element: ElementFormat, fmt: BlockFormat, amax: Fraction) -> float:
    """Return the error of a block's values under a candidate of its scale."""
    # elements of each row, and what was rounded from them, in steps
    rows: dict[int, list[tuple[float, float]]] = {}
    for (i, _), x, code in zip(block.places, block.elements, result.codes, strict=True):
        rows.setdefault(i, []).append((x, decode_value(code, element)))
    step = float(rn32(Fraction(fmt.element.max / element.max)))
    # by fouroversix: float32, along rows, then rows by halves
    m, c = _tops(fmt)
    both, sums = float(rn32(c * m)), []
    for row in rows.values():
        total = 0.0
        for x, q in row:
            y = operated32(mul, operated32(mul, q, abs(result.scale)), float(amax))
            off = operated32(sub, operated32(truediv, operated32(mul, y, step), both), x)
            total = operated32(add, total, abs(off) if fmt.scaling.metric == "mae" else operated32(mul, off, off))
        sums.append(total)
    sums += [0.0] * ((1 << (len(sums) - 1).bit_length()) - len(sums))
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [operated32(add, *pair) for pair in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]


# Section 7: zero points.


def _zero_point_block(block: _Block, fmt: BlockFormat, cast: _Cast) -> _Result:
    assert isinstance(fmt.element, IntFormat)  # the record guarantees it
    top = fmt.element.max_code
    finite = [Fraction(x) for x in block.finite]
    low = -clamped32(-min([Fraction(0), *finite]))
    high = clamped32(max([Fraction(0), *finite]))
    extent = clamped32(high - low)
    scale = max(rn32(extent / top), FLT_MIN) if extent else Fraction(1)
    ratio = rn32(-low / scale)
    zero = min(max(round_to_integer(ratio, Rounding(), None), 0), top)
    r = reciprocal(scale)

    def code_of(x: float, word: int | None) -> int:
        product = times(x, r, cast.working)
        if not math.isfinite(product):
            return 0 if product == -math.inf else top
        return min(max(round_to_integer(product, cast.how, word) + zero, 0), top)

    codes = [code_of(x, cast.word(*place)) for place, x in zip(block.places, block.elements, strict=True)]
    if block.has_nan:
        return _Result(math.nan, codes, [math.nan] * len(codes), r, zero)
    values = [rounded((code - zero) * scale, cast.out) for code in codes]
    return _Result(float(scale), codes, values, r, zero)


# Section 8: LogFMT tiles.


@lru_cache(maxsize=4096)
def _log_values(low: float, step: float, count: int) -> list[float]:
    """Return the value of every K from 0 to ``count``."""
    values = [0.0]
    for k in range(1, count + 1):
        place = round_value(Fraction(step) * (k - 1), FP64, "nearest_even", "ieee")
        logarithm = round_value(Fraction(low) + Fraction(place), FP64, "nearest_even", "ieee")
        values.append(rounded(exp(logarithm), FP32))
    return values


def _log_code(x: float, negative: bool, values: list[float], how: Rounding, word: int | None) -> int:
    """Return K: the magnitude rounded in the list of the tile's values, the first of equal ones."""
    if not math.isfinite(x) or abs(x) >= values[-1]:
        return bisect_left(values, values[-1])
    magnitude = abs(Fraction(x))
    k = bisect_right(values, magnitude) - 1
    lower, upper = values[k], values[k + 1]
    odd = bisect_left(values, lower) % 2 == 1
    if upper == math.inf:  # the last step of a tile that ends at FLT_MAX may pass it: Inf is nearest to nothing
        goes_up = how.mode != "stochastic" and how.rule.condition(False, True, odd, negative)
    else:
        bounds = (Fraction(lower), Fraction(upper))
        middle = Fraction(round_value(sum(bounds) / 2, FP64, "nearest_even", "ieee"))
        goes_up = takes_upper(magnitude, *bounds, middle, odd, negative, how, word)
    return bisect_left(values, upper if goes_up else lower)


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
