# SPDX-License-Identifier: Apache-2.0
"""Quantisation of a matrix with block scales in exact numbers: slow, obvious, and what engines are held to.

Every step follows docs/semantics.md, sections 4 to 8. ``RN32`` and ``RN64`` are roundings of exact fractions by the
rounding oracle; only ``ln`` and ``exp`` of LogFMT tiles are the fixed double sequences of elementary.py.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from typing import Literal, NamedTuple

from fmtsim.formats.block import FP32, BlockFormat, LogTileFormat, ScaledFormat
from fmtsim.formats.spec import FloatFormat, IntFormat, Overflow
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

InputDtype = Literal["float64", "float32", "bfloat16", "float16"]
Matrix = Sequence[Sequence[float]]

FLT_MAX = Fraction((1 << 24) - 1) * power_of_two(104)
FLT_MIN = power_of_two(-126)
LOG_RANGE = 22.18070977791825
"""The double nearest to ``32 ln 2``: a LogFMT tile spans at most 32 octaves."""


class Quantized(NamedTuple):
    """What quantisation of a matrix returns.

    codes: unsigned bit patterns, the matrix's shape.
    scales: ``[outer blocks][inner blocks]``: block scales, or the steps of LogFMT tiles.
    tensor_scale: the scale of the whole matrix in two-level formats, else None.
    offsets: like scales: zero points, or the lowest logarithms of LogFMT tiles, else None.
    values: what the codes decode to, rounded once to the output format.
    factors: like scales: what elements were multiplied with before they were rounded (LogFMT tiles: 1).
    """

    codes: list[list[int]]
    scales: list[list[float]]
    tensor_scale: float | None
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


def quantize_matrix(
    rows: Matrix, fmt: ScaledFormat, rounding: str | Rounding = "nearest_even", overflow: Overflow | None = None,
    input_dtype: InputDtype = "float32", out_format: FloatFormat = FP32, words: Sequence[Sequence[int]] | None = None,
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
    tensor_scale = _tensor_scale(rows, fmt) if isinstance(fmt, BlockFormat) and fmt.tensor_scale else None
    # 2. block by block
    blocks = _blocks(rows, fmt.block)
    results = [[_quantize_block(block, fmt, cast, tensor_scale) for block in row] for row in blocks]
    # 3. back into a matrix
    codes: dict[tuple[int, int], int] = {}
    values: dict[tuple[int, int], float] = {}
    for block, result in zip(chain(*blocks), chain(*results), strict=True):
        codes.update(zip(block.places, result.codes, strict=True))
        values.update(zip(block.places, result.values, strict=True))
    has_offsets = isinstance(fmt, LogTileFormat) or fmt.zero_point
    return Quantized(
        codes=[[codes[i, j] for j in range(len(row))] for i, row in enumerate(rows)],
        scales=[[result.scale for result in row] for row in results],
        tensor_scale=None if tensor_scale is None else float(tensor_scale[1]),
        offsets=[[result.offset for result in row] for row in results] if has_offsets else None,
        values=[[values[i, j] for j in range(len(row))] for i, row in enumerate(rows)],
        factors=[[result.factor for result in row] for row in results],
    )


def _blocks(rows: Matrix, block: tuple[int | None, int | None]) -> list[list[_Block]]:
    """Cut a matrix into rows of blocks, short at the far edges."""
    height, width = len(rows), len(rows[0]) if rows else 0

    def spans(extent: int, size: int | None) -> Iterator[range]:
        step = size or extent
        return (range(start, min(start + step, extent)) for start in (range(0, extent, step) if extent else ()))

    def cut(rows_of: range, columns: range) -> _Block:
        places = [(i, j) for i in rows_of for j in columns]
        return _Block(places, [rows[i][j] for i, j in places])

    return [[cut(rows_of, columns) for columns in spans(width, block[1])] for rows_of in spans(height, block[0])]


def _quantize_block(
    block: _Block, fmt: ScaledFormat, cast: _Cast, tensor_scale: tuple[Fraction, Fraction] | None
) -> _Result:
    if isinstance(fmt, LogTileFormat):
        return _log_tile(block, fmt, cast)
    if fmt.zero_point:
        return _zero_point_block(block, fmt, cast)
    # 1. the scale, and the factor that elements are multiplied with
    if tensor_scale is not None:
        scale, factor = _two_level_scale(block, fmt, tensor_scale)
    elif fmt.power_of_two:
        scale = power_of_two(max(-127, min(127, _scale_exponent(block.amax, fmt))) if block.amax else -127)
        factor = 1 / scale
    else:
        scale, factor = _real_scale(block, fmt)

    def scaled(x: float) -> Real:
        exact = fmt.power_of_two and x != 0 and math.isfinite(x)
        return Fraction(x) * factor if exact else _times(x, factor, cast.working)

    # 2. each element rounded once
    codes = [
        encode_value(scaled(x), fmt.element, cast.how, cast.overflow, cast.word(*place))
        for place, x in zip(block.places, block.elements, strict=True)
    ]
    elements = [decode_value(code, fmt.element) for code in codes]
    # 3. values; a NaN that elements cannot express makes its block NaN
    if block.has_nan and not fmt.element.has_nan:
        return _Result(math.nan, codes, [math.nan] * len(codes), factor)
    if tensor_scale is not None:
        values = [_rounded(_times(q, scale * tensor_scale[1], FP64), cast.out) for q in elements]
    else:
        values = [_times(q, scale, cast.out) for q in elements]
    return _Result(float(scale), codes, values, factor)


# Section 5: one scale a block. What makes a scale also returns what elements are multiplied with.


def _scale_exponent(amax: Fraction, fmt: BlockFormat) -> int:
    top = fmt.element.max_exponent
    if fmt.scale_rule == "floor":
        return floor_log2(amax) - top
    if fmt.scale_rule == "ceil":
        return _ceil_log2(amax) - top
    if fmt.scale_rule == "even":
        half_place = power_of_two(floor_log2(amax) - fmt.element.mantissa_bits - 1)  # type: ignore[union-attr]
        return floor_log2(amax + half_place) - top
    product = _rn32(_clamped32(amax) * _rn32(1 / Fraction(fmt.element.max)))
    return _ceil_log2(product) if product else -127


def _real_scale(block: _Block, fmt: BlockFormat) -> tuple[Fraction, Fraction]:
    m, a = _rn32_or_infinite(Fraction(fmt.element.max)), _clamped32(block.amax)
    if a == 0:
        return _scale_value(Fraction(1), fmt), Fraction(1)
    if fmt.arithmetic == "encode":
        r0 = _clamped32(m / a)
        scale = _scale_value(_clamped32(1 / r0) if r0 else FLT_MAX, fmt)
        return scale, r0 if fmt.scale.bits == 32 else _reciprocal(scale)
    scale = _scale_value(max(_clamped32(a / m), FLT_MIN), fmt)
    return scale, 1 / (scale or FLT_MIN) if fmt.arithmetic == "divide" else _reciprocal(scale)


def _scale_value(x: Fraction, fmt: BlockFormat) -> Fraction:
    return Fraction(round_value(x, fmt.scale, "nearest_even", "saturate"))


def _reciprocal(scale: Fraction) -> Fraction:
    return _clamped32(1 / scale) if scale else FLT_MAX


# Section 6: tensor scale and block scale.


def _tensor_scale(rows: Matrix, fmt: BlockFormat) -> tuple[Fraction, Fraction]:
    """Return ``S_enc`` and ``S_dec``."""
    m, c = _rn32_or_infinite(Fraction(fmt.element.max)), _rn32(Fraction(fmt.scale.max))
    amax = _clamped32(_Block([], [x for row in rows for x in row]).amax)
    encode = _clamped32(_rn32_or_infinite(c * m) / amax) if amax else Fraction(1)
    encode = encode or Fraction(1)
    return encode, _rn32(1 / encode)


def _two_level_scale(
    block: _Block, fmt: BlockFormat, tensor_scale: tuple[Fraction, Fraction]
) -> tuple[Fraction, Fraction]:
    encode, decode = tensor_scale
    m, a = _rn32_or_infinite(Fraction(fmt.element.max)), _clamped32(block.amax)
    scale = _scale_value(_clamped32(a * _clamped32(encode * _rn32(1 / m))), fmt)
    return scale, _reciprocal(_rn32(scale * decode))


# Section 7: zero points.


def _zero_point_block(block: _Block, fmt: BlockFormat, cast: _Cast) -> _Result:
    assert isinstance(fmt.element, IntFormat)  # the record guarantees it
    top = fmt.element.max_code
    finite = [Fraction(x) for x in block.finite]
    low = -_clamped32(-min([Fraction(0), *finite]))
    high = _clamped32(max([Fraction(0), *finite]))
    extent = _clamped32(high - low)
    scale = max(_rn32(extent / top), FLT_MIN) if extent else Fraction(1)
    ratio = _rn32(-low / scale)
    zero = min(max(round_to_integer(ratio, Rounding(), None), 0), top)
    r = _reciprocal(scale)

    def code_of(x: float, word: int | None) -> int:
        product = _times(x, r, cast.working)
        if not math.isfinite(product):
            return 0 if product == -math.inf else top
        return min(max(round_to_integer(product, cast.how, word) + zero, 0), top)

    codes = [code_of(x, cast.word(*place)) for place, x in zip(block.places, block.elements, strict=True)]
    if block.has_nan:
        return _Result(math.nan, codes, [math.nan] * len(codes), r, zero)
    values = [_rounded((code - zero) * scale, cast.out) for code in codes]
    return _Result(float(scale), codes, values, r, zero)


# Section 8: LogFMT tiles.


def _log_tile(block: _Block, fmt: LogTileFormat, cast: _Cast) -> _Result:
    magnitudes = [m for m in (_clamped32(abs(Fraction(x))) for x in block.finite) if m]
    low, step = _log_range(magnitudes, fmt) if magnitudes else (0.0, 0.0)
    values = _log_values(low, step, fmt.max_code if magnitudes else 0)
    sign_bit = 1 << (fmt.bits - 1)
    codes = []
    for place, x in zip(block.places, block.elements, strict=True):
        negative = x == x and is_negative(x)
        codes.append(_log_code(x, negative, values, cast.how, cast.word(*place)) | negative * sign_bit)
    if block.has_nan:
        return _Result(step, codes, [math.nan] * len(codes))
    signed = [-values[code % sign_bit] if code & sign_bit else values[code] for code in codes]
    return _Result(step, codes, [_rounded(value, cast.out) for value in signed], offset=low)


def _log_range(magnitudes: list[Fraction], fmt: LogTileFormat) -> tuple[float, float]:
    """Return the lowest logarithm and the step, both float32."""
    high = ln(float(max(magnitudes)))
    floor = round_value(Fraction(high) - Fraction(LOG_RANGE), FP64, "nearest_even", "ieee")
    low = _rounded(max(ln(float(min(magnitudes))), floor), FP32)
    span = Fraction(round_value(max(Fraction(high) - Fraction(low), Fraction(0)), FP64, "nearest_even", "ieee"))
    step = round_value(span / (fmt.max_code - 1), FP64, "nearest_even", "ieee")
    return low, _rounded(step, FP32)


@lru_cache(maxsize=4096)
def _log_values(low: float, step: float, count: int) -> list[float]:
    """Return the value of every K from 0 to ``count``."""
    values = [0.0]
    for k in range(1, count + 1):
        place = round_value(Fraction(step) * (k - 1), FP64, "nearest_even", "ieee")
        logarithm = round_value(Fraction(low) + Fraction(place), FP64, "nearest_even", "ieee")
        values.append(_rounded(exp(logarithm), FP32))
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


# Exact arithmetic and its roundings.

_INFINITE = power_of_two(1024)  # in a quotient with a float32 number: 0, or more than FLT_MAX, once that is rounded


def _ceil_log2(x: Fraction) -> int:
    e = floor_log2(x)
    return e if x == power_of_two(e) else e + 1


def _rounded(x: Real, fmt: FloatFormat) -> float:
    return round_value(x, fmt, "nearest_even", "ieee")


def _rn32(x: Fraction) -> Fraction:
    """Round to binary32 a number that stays within its range."""
    return Fraction(_rounded(x, FP32))


def _rn32_or_infinite(x: Fraction) -> Fraction:
    """Round a positive number to binary32; beyond its range it is ``_INFINITE``."""
    rounded = _rounded(x, FP32)
    return Fraction(rounded) if math.isfinite(rounded) else _INFINITE


def _clamped32(x: Fraction) -> Fraction:
    """Return ``min(RN32(x), FLT_MAX)`` of a number that is not negative."""
    return _rn32(x) if x <= FLT_MAX else FLT_MAX


def _times(x: float, factor: Fraction, fmt: FloatFormat) -> float:
    """Return ``x * factor`` rounded once; the factor is finite and not negative, Inf times 0 is NaN."""
    if math.isinf(x) and factor == 0:
        return math.nan
    if x == 0 or not math.isfinite(x):
        return x
    return _rounded(Fraction(x) * factor, fmt) if factor else math.copysign(0.0, x)
