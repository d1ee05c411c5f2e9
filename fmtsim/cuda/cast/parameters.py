# SPDX-License-Identifier: Apache-2.0
"""Arguments of kernels by value: dtypes and macros, and element formats, roundings and random keys as bytes.

``element_of`` gives what the general kernels take (element.cuh), ``grid_of`` what the fast ones do (grid.cuh).
"""

import math
import struct
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from fmtsim.cuda.runtime import Defines
from fmtsim.formats.element import CodebookFormat, ElementFormat, FloatFormat, IntFormat, LogFormat, Overflow
from fmtsim.rounding.modes import CODES, Rounding
from fmtsim.spec.cast import Random, RandomKey
from fmtsim.support.replay.gpu import lasting
from fmtsim.support.replay.hooks import packed

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}  # as common.cuh numbers them
BYTES_AT_ONCE = 16  # of a vector
NARROW = tuple(DTYPES)[:3]  # those of the fast kernels
FROM_FLOAT: Defines = (("FROM_FLOAT", "1"),)  # a kernel reads float32, each of which becomes bfloat16
CODE_DTYPES = {torch.uint8: 4, torch.int16: 5, torch.int32: 6, torch.int64: 7}  # of any_format.cu
_GRID, _HALF_OFFSET, _TABLE, _LOGARITHMIC = range(4)
(
    _INTEGER, _FLUSHED, _HAS_ZERO, _NEGATIVE_ZERO, _UNSIGNED, _SATURATES, _OVER_IS_NAN, _HAS_NAN, _HAS_INFINITY,
    _NEGATIVE_NAN,
) = (1 << place for place in range(10))  # fmt: skip
_ELEMENT = struct.Struct("<5Qq7iI")
_DRAW = struct.Struct("<80s2I2i")  # the keys of Philox's rounds, the halves of the offset, bits, the source
# Twenty lanes of 64 bits, whose sums of 33 bits do not meet: first and second keys of the rounds, and their steps.
_LANES = [sum(1 << 64 * lane for lane in range(first, 20, 2)) for first in (0, 1)]
_STEPS = sum((lane // 2) * (0x9E3779B9, 0xBB67AE85)[lane % 2] % (1 << 32) << 64 * lane for lane in range(20))
_NOTHING, _WORDS, _SHARED, _GIVEN = range(4)
NO_DRAW = _DRAW.pack(b"", 0, 0, 32, _NOTHING)


def macros(**values: object) -> Defines:
    """Return macros of a kernel: numbers in decimal, negative ones in parentheses, booleans as 0 and 1, text as is."""
    texts = {name: str(int(value) if isinstance(value, bool) else value) for name, value in values.items()}
    return tuple((name, f"({text})" if text.startswith("-") else text) for name, text in texts.items())


def aligned(*tensors: torch.Tensor) -> bool:
    """Return True if all begin at an address that takes 16 bytes at once."""
    return all(t.data_ptr() % 16 == 0 for t in tensors)


class Tables(NamedTuple):
    """The bytes of ``struct Tables``, and the tensors to which they point."""

    pointers: bytes
    tensors: tuple[torch.Tensor, ...] = ()


NO_TABLES = Tables(struct.pack("<4Q", 0, 0, 0, 0))


@lru_cache(maxsize=1024)
def element_of(fmt: ElementFormat, rounding: Rounding, overflow: Overflow) -> bytes:
    """Return the bytes of ``struct Element``: a format under a rounding and an overflow rule."""
    kind, top, over, nan, sign, lowest, mantissa_bits, low, entries, flags = _fields(fmt, overflow)
    how = CODES[rounding.mode], rounding.bits, "abc".index(rounding.variant)
    numbers = (kind, *how, mantissa_bits, low, entries, flags)
    return _ELEMENT.pack(top, over, nan, sign, (1 << fmt.bits) - 1, lowest, *numbers)


def _fields(fmt: ElementFormat, overflow: Overflow) -> tuple[int, ...]:
    """Return kind, largest code, overflow's, NaN's and the sign's code, lowest number, places, entries and flags."""
    if isinstance(fmt, FloatFormat):
        top = fmt.max_code
        nan = top if fmt.nan_code is None else fmt.nan_code
        over = top + 1 if fmt.infinities else nan
        saturates = overflow == "saturate"
        flags = {
            _FLUSHED: not fmt.has_subnormals,
            _HAS_ZERO: fmt.has_zero,
            _NEGATIVE_ZERO: fmt.has_negative_zero,
            _UNSIGNED: not fmt.signed,
            _SATURATES: saturates,
            _OVER_IS_NAN: not fmt.infinities and fmt.has_nan,
            _HAS_NAN: fmt.has_nan,
            _HAS_INFINITY: fmt.infinities,
            _NEGATIVE_NAN: not fmt.signed and fmt.has_nan and not saturates,
        }
        chosen = sum(flag for flag, holds in flags.items() if holds)
        return _GRID, top, over, nan, fmt.sign_mask, 0, fmt.mantissa_bits, fmt.min_exponent, 0, chosen
    top = 0 if isinstance(fmt, CodebookFormat) else fmt.max_code
    if isinstance(fmt, IntFormat):
        kind = _HALF_OFFSET if fmt.half_offset else _GRID
        return kind, top, top, top, 0, fmt.min_code, 0, -fmt.fraction_bits, 0, _INTEGER
    if isinstance(fmt, LogFormat):
        return _LOGARITHMIC, top, top, top, top + 1, 0, 0, 0, top + 1, 0
    largest = fmt.values.index(max(fmt.values))
    return _TABLE, top, top, largest, 0, 0, 0, 0, len(set(fmt.values)), 0


def nan_code(fmt: ElementFormat, overflow: Overflow) -> int:
    """Return the code of NaN, or of what stands for it."""
    return _fields(fmt, overflow)[3]


@lru_cache(maxsize=256)
def tables_of(fmt: ElementFormat, device: torch.device) -> Tables:
    """Return the tables of a codebook or logarithmic format on a device; other formats need none.

    The first call for a format copies to the device, which a CUDA graph cannot capture.
    """
    if not isinstance(fmt, CodebookFormat | LogFormat):
        return NO_TABLES
    if isinstance(fmt, CodebookFormat):
        values = sorted({value + 0.0 for value in fmt.values})
        codes = [fmt.values.index(value) for value in values]
        by_code = [value + 0.0 for value in fmt.values]
        middles = [(a + b) / 2 for a, b in zip(values, values[1:], strict=False)]
    else:
        # For each of the rising values the first place that holds it.
        places: list[int] = []
        for place, value in enumerate(fmt.magnitudes):
            places.append(places[-1] if places and fmt.magnitudes[place - 1] == value else place)
        values, middles, codes = list(fmt.magnitudes), list(fmt.thresholds), places
        by_code = [*values, *(-value for value in values)]
    by_code += [0.0] * ((1 << fmt.bits) - len(by_code))
    tensors = tuple(
        lasting(numbers, dtype, device)
        for numbers, dtype in (
            (values, torch.float64), (middles, torch.float64), (codes, torch.int32), (by_code, torch.float64),
        )
    )  # fmt: skip
    return Tables(struct.pack("<4Q", *(tensor.data_ptr() for tensor in tensors)), tensors)


def code_values(fmt: ElementFormat) -> list[float]:
    """Return the values of all codes of a format; a listed -0 is +0."""
    if isinstance(fmt, CodebookFormat):
        return [fmt.value(code) + 0.0 for code in range(len(fmt.values))]
    return [fmt.value(code) for code in range(1 << fmt.bits)]


@lru_cache(maxsize=256)
def values_of(fmt: ElementFormat, device: torch.device) -> torch.Tensor:
    """Return the values of all byte codes of a format in float32 [256]; codes that do not exist are NaN."""
    values = code_values(fmt)
    return lasting([*values, *[math.nan] * (256 - len(values))], torch.float32, device)


def draw_of(rounding: Rounding, random: Random) -> bytes:
    """Return the bytes of ``struct Draw``: where random integers come from."""
    if rounding.mode != "stochastic":
        return NO_DRAW
    key = random if isinstance(random, RandomKey) else RandomKey(0)
    source = _GIVEN if isinstance(random, torch.Tensor) else _SHARED if rounding.layout == "cvt_rs" else _WORDS
    low, high = _halves(key.seed)
    rounds = (low * _LANES[0] + high * _LANES[1] + _STEPS).to_bytes(160, "little")
    keys = memoryview(rounds).cast("I")[::2].tobytes()  # modulo 2^32
    data = _DRAW.pack(keys, *_halves(key.offset), rounding.bits, source)
    return packed(random, data, partial(draw_of, rounding))


def _halves(number: int) -> tuple[int, int]:
    return number & 0xFFFFFFFF, (number >> 32) & 0xFFFFFFFF


# Grids: float formats and integers as the fast kernels take them.

MAGIC, BITS, FLUSHING, HALVES, FIXED, POWERS = range(6)
_STRUCTURE = struct.Struct("<8f 6I 3I f I 2I f 2I 4f")
_SIGN = 1 << 31
_WIDEST_INTEGER = 22  # bits of codes that the sum with 1.5 * 2**23 holds
_SHORT = 16  # bits of float codes that it holds with a number of places
_FINEST = 21  # mantissa bits that leave room for it beside a number of places


class Grid(NamedTuple):
    """A cast to an element format as the fast kernels take it (grid.cuh).

    Attributes:
        parameters: The bytes of ``struct Grid``.
        method: How magnitudes are rounded, a macro of grid.cuh.
        special: Whether overflow gives Inf or NaN.
        carries: Whether it gives Inf, whose code follows that of the largest number.
        asymmetric: Whether the range is not that of both signs.
        integer: Whether codes are two's complement numbers.
        encodes: Whether the kernels give codes too.
        keeps: Whether the format has -0.
        random: How random words are used, a macro of grid.cuh.
        mantissa: Mantissa bits of a float format that is rounded stochastically, else 0.
    """

    parameters: bytes
    method: int
    special: bool
    asymmetric: bool
    integer: bool
    encodes: bool
    keeps: bool
    random: int
    mantissa: int
    carries: bool = False

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """Macros of grid.cuh."""
        values = {"METHOD": self.method, "SPECIAL": self.special, "ASYMMETRIC": self.asymmetric, "KEEPS": self.keeps}
        return macros(**values, CARRIES=self.carries, RANDOM=self.random)

    def pairs(self, dtype: torch.dtype) -> int:
        """Return the macro PAIRS for inputs of a dtype: it has 16 bits and holds the largest magnitude."""
        highest, lowest = struct.unpack_from("<2f", self.parameters)
        fits = dtype.itemsize == 2 and float(torch.tensor(highest).to(dtype)) == highest
        return int(fits and (lowest == 0 or not self.asymmetric))


@lru_cache(maxsize=1024)
def grid_of(fmt: ElementFormat, rounding: Rounding, overflow: Overflow) -> Grid | None:
    """Return the parameters of a cast, or None where it needs the general kernels."""
    # nearest even; stochastic with bits and the half step of variant b within one word
    variant = rounding.variant == "a" or (rounding.variant == "b" and rounding.bits < 32)
    stochastic = rounding.mode == "stochastic" and rounding.layout == "word" and variant
    if not stochastic and rounding.mode != "nearest_even":
        return None
    if isinstance(fmt, IntFormat):
        if fmt.bits > _WIDEST_INTEGER or (fmt.half_offset and rounding.mode != "nearest_even"):
            return None
        asymmetric = fmt.half_offset or fmt.min != -fmt.max
        parameters = _STRUCTURE.pack(
            fmt.max, fmt.min, math.inf, fmt.max, fmt.max, 0.0, 0.0, 0.0,
            _SIGN if fmt.signed else 0, 0, 0, 0, 0, 0, 0, 0, 0,
            1 / fmt.eps, 1 << (32 - fmt.bits), fmt.max_code << (32 - fmt.bits), 0, fmt.eps, *_words(rounding),
            0.0, math.ldexp(fmt.eps, -32), math.ldexp(fmt.eps, 23) * 1.5, 0.0,
        )  # fmt: skip
        method = HALVES if fmt.half_offset else FIXED
        return Grid(parameters, method, False, asymmetric, True, True, False, _random(rounding), 0)
    return _float_grid(fmt, rounding, overflow) if isinstance(fmt, FloatFormat) else None


def _words(rounding: Rounding) -> tuple[int, int]:
    """Return masks of a random word: the bits in use, and those that are set below them."""
    bits = rounding.bits
    return (1 << 32) - (1 << (32 - bits)), 1 << (31 - bits) if rounding.variant == "b" and bits < 32 else 0


def _random(rounding: Rounding) -> int:
    """Return the macro RANDOM: whole words or not."""
    if rounding.mode != "stochastic":
        return 0
    return 1 if rounding.bits == 32 and rounding.variant == "a" else 2


def _stochastic(fmt: FloatFormat) -> tuple[float, float, float, float]:
    """Return the last fields of ``struct Grid``; zeros where none is asked for."""
    mantissa_bits, low = fmt.mantissa_bits, fmt.min_exponent
    if mantissa_bits > _FINEST or not -126 <= low <= 127:
        return 0.0, 0.0, 0.0, 0.0
    base = 3 << 22
    offset = -(low + 127 << mantissa_bits) % (1 << fmt.bits) if fmt.bits <= _SHORT else 0
    places = (math.ldexp(number, -mantissa_bits) for number in (2.0**-32, base, base + offset))
    return (math.ldexp(1.0, low), *places)  # type: ignore[return-value]


def _float_grid(fmt: FloatFormat, rounding: Rounding, overflow: Overflow) -> Grid | None:
    saturate = overflow == "saturate" or not (fmt.infinities or fmt.has_nan)
    mantissa_bits, low, high = fmt.mantissa_bits, fmt.min_exponent, fmt.max_exponent
    if low - mantissa_bits < -149 or high > 127 or mantissa_bits > 23 or not (fmt.signed or saturate):
        return None
    method = _method(fmt, rounding)
    if method is None:
        return None
    natural = method == BITS and high == 127 and fmt.infinities  # the carry into exponent 255 is Inf
    special = not saturate and not natural
    unbounded = math.ldexp(1.0, high + 1) if method == MAGIC else math.inf
    drop = 23 - mantissa_bits
    place = 1 << drop
    most = place - 1 if rounding.mode == "stochastic" else (place >> 1) - 1
    parity = (fmt.has_zero - 127 - low) & 1 if mantissa_bits == 0 else 0
    over = fmt.max if saturate else math.inf if fmt.infinities else math.nan
    shift = 32 - fmt.bits
    encodes = fmt.exponent_bits <= 8 and fmt.bits <= 32 and -149 <= fmt.has_zero - low - 127 <= 127
    codes = (
        (math.ldexp(1.0, fmt.has_zero - low - 127), 1 << (9 - fmt.signed - fmt.exponent_bits),
         (fmt.max_code if fmt.nan_code is None else fmt.nan_code) << shift, (fmt.inf_code or 0) << shift)
        if encodes else (0.0, 0, 0, 0)
    )  # fmt: skip
    parameters = _STRUCTURE.pack(
        fmt.max if saturate else unbounded, -fmt.max if fmt.signed else 0.0, math.inf if saturate else fmt.max, over,
        math.nan if fmt.has_nan else fmt.max, -0.0 if fmt.has_negative_zero else 0.0,
        math.ldexp(1.0, drop), math.ldexp(1.0, low + drop),
        _SIGN if fmt.signed else 0, drop, max(most, 0), (1 << 32) - place, parity, int(drop > 0),
        *_flush_points(fmt), *codes, 0.0, *_words(rounding), *_stochastic(fmt),
    )  # fmt: skip
    random = _random(rounding)
    mantissa = mantissa_bits if random else 0
    keeps = fmt.has_negative_zero
    carries = special and method == MAGIC and keeps and fmt.infinities and fmt.inf_code == fmt.max_code + 1
    return Grid(parameters, method, special, not fmt.signed, False, encodes, keeps, random, mantissa, carries)


def _method(fmt: FloatFormat, rounding: Rounding) -> int | None:
    """Return the method that rounds magnitudes to the grid, None where float32 arithmetic alone does not."""
    mantissa_bits, low = fmt.mantissa_bits, fmt.min_exponent
    finite = fmt.max_exponent + 24 - mantissa_bits <= 127  # the magic number of the binade above the largest value
    gradual = fmt.has_subnormals and fmt.has_zero
    if rounding.mode == "stochastic":
        within = low - mantissa_bits >= -117 and mantissa_bits <= _FINEST  # grid.cuh
        if low == -126 and gradual:
            return BITS
        return MAGIC if finite and gradual and within else None
    if mantissa_bits and gradual:
        if finite and mantissa_bits <= 22 and low >= -127:
            return MAGIC
        return BITS if low == -126 else None
    if low == -127 and fmt.has_zero and not mantissa_bits:
        return POWERS
    return FLUSHING if low >= (-126 if fmt.has_zero else -127) else None


def _flush_points(fmt: FloatFormat) -> tuple[int, int, int]:
    """Return the bits of the two values between which the lowest numbers are rounded: upper, midpoint, lower."""
    smallest = math.ldexp(1.0, fmt.min_exponent)
    if smallest == 2.0**-127 and fmt.has_zero:
        return 1 << 22, 1 << 21, (3 << 21) - 1  # a tie between the first two goes to the second, whose code is even
    points = (smallest, smallest / 2, 0.0) if fmt.has_zero else (2 * smallest, 1.5 * smallest, smallest)
    return struct.unpack("<3I", struct.pack("<3f", *points))  # type: ignore[return-value]
