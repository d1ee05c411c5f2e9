"""The general kernel code: one value of any element format, in any rounding, in float64 arithmetic that is exact."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy import float64, int64

from fmtsim.cpu.cast.grid import shape_of, special_value
from fmtsim.cpu.runtime.jit import bits64, device, float64_of, subroutine
from fmtsim.formats.spec import CodebookFormat, ElementFormat, FloatFormat, IntFormat, LogFormat, Overflow
from fmtsim.rounding.modes import MODES, Rounding

GRID, HALF_OFFSET, TABLE, LOGARITHMIC = range(4)
NEAREST_EVEN, NEAREST_AWAY, NEAREST_TOWARD_ZERO, TOWARD_ZERO, UP, DOWN, TO_ODD, STOCHASTIC = range(8)
_SIGN = int64(-(2**63))
_FRACTION = int64((1 << 52) - 1)


class Element(NamedTuple):
    """An element format and a rounding as numbers (float64 holds every value and every step exactly).

    ``kind`` is GRID for floats and integers, HALF_OFFSET, TABLE for codebooks, LOGARITHMIC. ``code_base`` is the
    number of codes below the smallest normal binade's field 1 (0 where exponent field 0 is an ordinary binade).
    """

    kind: int
    mode: int
    random_bits: int
    variant: int
    mantissa_bits: int
    min_exponent: int
    flushed: bool
    has_zero: bool
    unsigned: bool
    negative_zero: bool
    saturate: bool
    max: float
    max_negative: float
    over_value: float
    nan_value: float
    negative_value: float
    sign_code: int
    inf_code: int
    nan_code: int
    code_mask: int


class Tables(NamedTuple):
    """Sorted values, the points between them where nearest rounding turns, and their codes."""

    values: np.ndarray
    middles: np.ndarray
    codes: np.ndarray


@lru_cache(maxsize=1024)
def element_of(fmt: ElementFormat, rounding: Rounding, overflow: Overflow) -> Element:
    """Return the numbers that describe a format under a rounding and an overflow rule."""
    kind, mantissa_bits, min_exponent, flushed = GRID, 0, 0, False
    over_value = fmt.max
    negative_value, sign_code, inf_code, nan_code = 0.0, 0, 0, 0
    if isinstance(fmt, FloatFormat | IntFormat):
        mantissa_bits, min_exponent, flushed = shape_of(fmt)
    if isinstance(fmt, FloatFormat):
        over_value = special_value(fmt, overflow)
        negative_value = math.nan if overflow == "ieee" and fmt.has_nan else fmt.min
        sign_code = fmt.sign_mask - (1 << 64 if fmt.bits == 64 else 0)  # the sign bit of an int64 is its own
        inf_code, nan_code = fmt.inf_code or 0, fmt.nan_code or 0
    elif isinstance(fmt, IntFormat) and fmt.half_offset:
        kind = HALF_OFFSET
    elif isinstance(fmt, CodebookFormat):
        kind = TABLE
    elif isinstance(fmt, LogFormat):
        kind, sign_code = LOGARITHMIC, fmt.max_code + 1
    is_float = isinstance(fmt, FloatFormat)
    return Element(
        kind=kind,
        mode=MODES.index(rounding.mode),
        random_bits=rounding.bits,
        variant="abc".index(rounding.variant),
        mantissa_bits=mantissa_bits,
        min_exponent=min_exponent,
        flushed=flushed,
        has_zero=not is_float or fmt.has_zero,  # type: ignore[union-attr]
        unsigned=isinstance(fmt, FloatFormat) and not fmt.signed,
        negative_zero=isinstance(fmt, FloatFormat) and fmt.has_negative_zero,
        saturate=overflow == "saturate" or not is_float,
        max=max(fmt.values) if isinstance(fmt, CodebookFormat) else fmt.max,
        max_negative=abs(fmt.min),
        over_value=over_value,
        nan_value=math.nan if fmt.has_nan else max(fmt.values) if isinstance(fmt, CodebookFormat) else fmt.max,
        negative_value=negative_value,
        sign_code=sign_code,
        inf_code=inf_code,
        nan_code=nan_code,
        code_mask=(1 << fmt.bits) - 1 if isinstance(fmt, IntFormat) else 0,
    )


@lru_cache(maxsize=256)
def tables_of(fmt: ElementFormat) -> Tables:
    """Return the sorted tables of a codebook or logarithmic format, and tables of one element for the others."""
    if isinstance(fmt, CodebookFormat):
        first = {value: code for code, value in reversed(list(enumerate(fmt.values)))}
        values = np.array(sorted(first), np.float64)
        return Tables(values, (values[1:] + values[:-1]) / 2, np.array([first[v] for v in values], np.int64))
    if isinstance(fmt, LogFormat):
        values = np.array(fmt.magnitudes, np.float64)
        return Tables(values, np.array(fmt.thresholds, np.float64), np.arange(len(values), dtype=np.int64))
    return Tables(np.zeros(1), np.zeros(1), np.zeros(1, np.int64))


@device
def floor_log2(magnitude):
    """Return floor(log2) of a positive finite float64, subnormals included."""
    bits = bits64(magnitude)
    if bits >> 52 == 0:
        return int64((bits64(magnitude * 18014398509481984.0) >> 52) - 1077)  # 2**54
    return int64((bits >> 52) - 1023)


@device
def power_of_two(exponent):
    """Return 2**exponent as float64 for exponents from -1074 to 1023."""
    if exponent < -1022:
        return float64_of(int64(1) << (exponent + 1074))
    return float64_of((exponent + 1023) << 52)


@device
def scale_by(value, exponent):
    """Return value * 2**exponent in two exact steps; what underflows to zero stays just above it."""
    half = exponent >> 1
    result = (value * power_of_two(half)) * power_of_two(exponent - half)
    if result == 0.0 and value != 0.0:
        return float64_of((bits64(value) & _SIGN) | int64(1) << 52)
    return result


@device
def moves_up(e, fraction, odd, negative, word):
    """Decide whether a magnitude with a discarded fraction of the last place moves away from zero."""
    if fraction == 0.0:
        return False
    if e.mode == NEAREST_EVEN:
        return fraction > 0.5 or (fraction == 0.5 and odd)
    if e.mode == NEAREST_AWAY:
        return fraction >= 0.5
    if e.mode == NEAREST_TOWARD_ZERO:
        return fraction > 0.5
    if e.mode == TOWARD_ZERO:
        return False
    if e.mode == UP:
        return not negative
    if e.mode == DOWN:
        return negative
    if e.mode == TO_ODD:
        return not odd
    return _stochastic(e, fraction, word)


@device
def _stochastic(e, fraction, word):
    if e.variant == 1:
        full = power_of_two(int64(e.random_bits + 1))
        return math.floor(fraction * full) + 2.0 * word + 1.0 >= full
    full = power_of_two(int64(e.random_bits))
    scaled = fraction * full
    steps = math.floor(scaled)
    if e.variant == 2:
        rest = scaled - steps
        if rest > 0.5 or (rest == 0.5 and steps * 0.5 != math.floor(steps * 0.5)):
            steps += 1.0
    return steps + word >= full


@device
def _round_grid(magnitude, negative, word, e):
    """Round a positive finite magnitude to the grid, exponents unbounded above."""
    exponent = floor_log2(magnitude)
    place = max(exponent, e.min_exponent) - e.mantissa_bits
    flushing = e.flushed and exponent < e.min_exponent
    if flushing:
        place = e.min_exponent
    steps = scale_by(magnitude, -place)
    whole = math.floor(steps)
    if e.mantissa_bits == 0:
        odd = whole == 1.0 and (exponent - e.min_exponent + e.has_zero) & 1 == 1
    else:
        odd = whole * 0.5 != math.floor(whole * 0.5)
    if flushing and e.mode == TO_ODD:
        odd = False
    if moves_up(e, steps - whole, odd, negative, word):
        whole += 1.0
    half = place >> 1
    rounded = (whole * power_of_two(half)) * power_of_two(place - half)
    return rounded if e.has_zero else max(rounded, power_of_two(e.min_exponent))


@device
def _overflow(rounded, limit, negative, e):
    if e.saturate or e.mode == TOWARD_ZERO or e.mode == TO_ODD:
        return limit
    if (e.mode == UP and negative) or (e.mode == DOWN and not negative):
        return limit
    return e.over_value


@device
def _cast_grid(value, word, e):
    negative = bits64(value) < 0
    magnitude = abs(value)
    if e.unsigned and negative and magnitude > 0.0:
        return e.negative_value
    limit = e.max_negative if negative else e.max
    if magnitude == 0.0:
        rounded = 0.0 if e.has_zero else power_of_two(e.min_exponent)
    elif math.isinf(magnitude):
        rounded = limit if e.saturate else e.over_value
    else:
        rounded = _round_grid(magnitude, negative, word, e)
        if rounded > limit:
            rounded = _overflow(rounded, limit, negative, e)
    if negative and rounded == rounded and not e.unsigned and (rounded != 0.0 or e.negative_zero):
        return -rounded
    return rounded


@device
def _cast_half_offset(value, word, e):
    """Round to odd multiples of half a step; step counts n stand for the magnitude n - 1/2."""
    negative = bits64(value) < 0
    scale = power_of_two(e.mantissa_bits - e.min_exponent)  # steps a unit
    steps = abs(value) * scale
    limit = (e.max_negative if negative else e.max) * scale
    if steps >= limit:
        return -e.max_negative if negative else e.max
    whole = math.floor(steps)
    fraction = steps - whole
    if fraction >= 0.5:
        whole += 1.0
        fraction -= 0.5
    else:
        shifted = fraction + 0.5  # exact but at its ends, where what matters is that it is neither 1/2 nor 1
        if shifted == 0.5 and fraction > 0.0:
            shifted = 0.5000000000000001
        fraction = min(shifted, 0.9999999999999999)
    count = int64(whole)
    odd = (count if negative else count - 1) & 1 == 1
    up = moves_up(e, fraction, odd, negative, word)
    if count == 0 and (e.mode == TOWARD_ZERO or (e.mode == NEAREST_TOWARD_ZERO and fraction == 0.5)):
        up = True
    rounded = min(float64(count + up) - 0.5, limit) / scale
    return -rounded if negative else rounded


@device
def _rank(value, e, tables):
    """Return the place of the nearest table entry by the rounding's rule, for a value within the table's ends."""
    low, high = 0, tables.values.size - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if tables.values[middle] <= value:
            low = middle
        else:
            high = middle
    return low


@device
def _prefers_upper(low_value, high_value, value, larger):
    """Choose between equally good neighbours by magnitude: the larger or the smaller, else the one of value's sign."""
    if abs(low_value) == abs(high_value):
        return bits64(value) >= 0
    return (abs(high_value) > abs(low_value)) == larger


@device
def _table_rank(value, word, negative, e, tables):
    """Return the rank to which a value rounds; ``negative`` is the sign of the number whose magnitude this may be."""
    last = tables.values.size - 1
    if value <= tables.values[0]:
        return 0
    if value >= tables.values[last]:
        return last
    rank = _rank(value, e, tables)
    low, high = tables.values[rank], tables.values[rank + 1]
    if value == low:
        return rank
    if e.mode <= NEAREST_TOWARD_ZERO:
        middle = tables.middles[rank]
        upper = value > middle
        if value == middle:
            upper = (
                rank & 1 == 1 if e.mode == NEAREST_EVEN else _prefers_upper(low, high, value, e.mode == NEAREST_AWAY)
            )
    elif e.mode == TOWARD_ZERO:
        upper = bits64(value) >= 0 if low < 0.0 < high else abs(high) < abs(low)
    elif e.mode == UP or e.mode == DOWN:
        upper = (e.mode == UP) != negative
    elif e.mode == TO_ODD:
        upper = rank & 1 == 0
    else:
        upper = _stochastic(e, (value - low) / (high - low), word)
    return rank + 1 if upper else rank


@subroutine
def cast_value(value, word, e, tables):
    """Return the value of the format to which a float64 rounds, and the rank in the table where there is one."""
    if value != value:
        if e.kind >= TABLE:
            return e.nan_value, int64(tables.values.size - 1)
        return e.nan_value, int64(0)
    if e.kind == GRID:
        return _cast_grid(value, word, e), int64(0)
    if e.kind == HALF_OFFSET:
        return _cast_half_offset(value, word, e), int64(0)
    if e.kind == TABLE:
        rank = _table_rank(value, word, False, e, tables)
        return tables.values[rank], int64(rank)
    negative = bits64(value) < 0
    rank = _table_rank(abs(value), word, negative, e, tables)
    return (-tables.values[rank] if negative else tables.values[rank]), int64(rank)


@subroutine
def code_of(value, rank, e, tables):
    """Return the code of a value that ``cast_value`` gave."""
    negative = bits64(value) < 0
    if e.kind == TABLE:
        return tables.codes[rank]
    if e.kind == LOGARITHMIC:
        return tables.codes[rank] | (int64(e.sign_code) if negative else int64(0))
    if e.code_mask:
        scale = power_of_two(e.mantissa_bits - e.min_exponent)
        return int64(math.floor(value * scale)) & e.code_mask
    if value != value:
        return int64(e.nan_code)
    sign = int64(e.sign_code) if negative else int64(0)
    magnitude = abs(value)
    if magnitude == 0.0:
        return sign
    if math.isinf(magnitude):
        return sign | e.inf_code
    exponent = floor_log2(magnitude)
    if exponent < e.min_exponent:
        return sign | int64(scale_by(magnitude, e.mantissa_bits - e.min_exponent))
    significand = int64(scale_by(magnitude, e.mantissa_bits - exponent))
    field = exponent - e.min_exponent + (1 if e.has_zero else 0)
    return sign | ((field << e.mantissa_bits) + significand - (int64(1) << e.mantissa_bits))
