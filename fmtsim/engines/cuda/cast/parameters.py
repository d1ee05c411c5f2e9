# SPDX-License-Identifier: Apache-2.0
"""What kernels take by value: dtypes and macros, element formats, roundings and random keys as bytes (element.cuh)."""

import math
import struct
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from fmtsim.engines.cuda.runtime import Defines
from fmtsim.formats.spec import CodebookFormat, ElementFormat, FloatFormat, IntFormat, LogFormat, Overflow
from fmtsim.rounding.modes import MODES, Rounding
from fmtsim.spec.cast import Random, RandomKey
from fmtsim.support.replay.gpu import lasting
from fmtsim.support.replay.hooks import packed

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}  # as common.cuh numbers them
BYTES_AT_ONCE = 16  # of a vector
NARROW = tuple(DTYPES)[:3]  # those of the fast kernels
CODE_DTYPES = {torch.uint8: 4, torch.int16: 5, torch.int32: 6, torch.int64: 7}  # of any_format.cu
_GRID, _HALF_OFFSET, _TABLE, _LOGARITHMIC = range(4)
(
    _INTEGER, _FLUSHED, _HAS_ZERO, _NEGATIVE_ZERO, _UNSIGNED, _SATURATES, _OVER_IS_NAN, _HAS_NAN, _HAS_INFINITY,
    _NEGATIVE_NAN,
) = (1 << place for place in range(10))  # fmt: skip
_ELEMENT = struct.Struct("<5Qq7iI")
_ROUNDS = [i * step for i in range(10) for step in (0x9E3779B9, 0xBB67AE85)]
_DRAW = struct.Struct("<20I2I2i")  # the keys of Philox's rounds, the halves of the offset, bits, the source
_NOTHING, _WORDS, _SHARED, _GIVEN = range(4)
NO_DRAW = _DRAW.pack(*[0] * 22, 32, _NOTHING)


def macros(**values: object) -> Defines:
    """Return macros of a kernel: numbers in decimal, booleans as 0 and 1, text as it is."""
    return tuple((name, str(int(value) if isinstance(value, bool) else value)) for name, value in values.items())


def aligned(*tensors: torch.Tensor) -> bool:
    """Say whether all begin at an address that takes 16 bytes at once."""
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
    how = MODES.index(rounding.mode), rounding.bits, "abc".index(rounding.variant)
    numbers = (kind, *how, mantissa_bits, low, entries, flags)
    return _ELEMENT.pack(top, over, nan, sign, (1 << fmt.bits) - 1, lowest, *numbers)


def _fields(fmt: ElementFormat, overflow: Overflow) -> tuple[int, ...]:
    """Return kind, largest code, overflow's, NaN's and the sign's code, lowest number, places, entries and flags."""
    if isinstance(fmt, FloatFormat):
        return _float_fields(fmt, overflow)
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


def _float_fields(fmt: FloatFormat, overflow: Overflow) -> tuple[int, ...]:
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
        values, middles, codes = list(fmt.magnitudes), list(fmt.thresholds), _first_places(fmt.magnitudes)
        by_code = [*values, *(-value for value in values)]
    by_code += [0.0] * ((1 << fmt.bits) - len(by_code))
    tensors = tuple(
        lasting(numbers, dtype, device)
        for numbers, dtype in (
            (values, torch.float64), (middles, torch.float64), (codes, torch.int32), (by_code, torch.float64),
        )
    )  # fmt: skip
    return Tables(struct.pack("<4Q", *(tensor.data_ptr() for tensor in tensors)), tensors)


def _first_places(values: tuple[float, ...]) -> list[int]:
    """Return for each of the rising values the first place that holds it."""
    places: list[int] = []
    for place, value in enumerate(values):
        places.append(places[-1] if places and values[place - 1] == value else place)
    return places


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
    halves = _halves(key.seed) * 10
    rounds = [half + step & 0xFFFFFFFF for half, step in zip(halves, _ROUNDS, strict=True)]
    data = _DRAW.pack(*rounds, *_halves(key.offset), rounding.bits, source)
    return packed(random, data, partial(draw_of, rounding))


def _halves(number: int) -> tuple[int, int]:
    return number & 0xFFFFFFFF, (number >> 32) & 0xFFFFFFFF
