# SPDX-License-Identifier: Apache-2.0
"""Which dtype holds every value of a format (docs/semantics.md, section 10); codes of values that lie in a format."""

import math
from functools import lru_cache

import torch

from fmtsim.formats.block import BlockFormat, Format, LogTileFormat, PackedFormat, ScaledFormat
from fmtsim.formats.element import CodebookFormat, ElementFormat, FloatFormat, IntFormat
from fmtsim.formats.registry import get_format
from fmtsim.support.dispatch import is_readable
from fmtsim.support.errors import CodeError, DtypeError

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8_DTYPES = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip


@lru_cache(maxsize=4096)
def result_dtype(fmt: Format, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of quantised values: the input's where it holds every value, else float32, else float64."""
    for candidate in (dtype, torch.float32):
        if is_representable(fmt, candidate):
            return candidate
    return torch.float64


@lru_cache(maxsize=4096)
def is_representable(fmt: Format, dtype: torch.dtype) -> bool:
    """Return True if a dtype holds every value of a format (of block formats: within the range of their scales)."""
    if dtype in FLOAT8_DTYPES:
        return isinstance(fmt, ElementFormat) and missing_value(fmt, dtype) is None
    if isinstance(fmt, LogTileFormat | PackedFormat):
        six_bits = isinstance(fmt, PackedFormat) and fmt.d_format == "e6m2"  # of significands
        return dtype in (torch.float32, torch.float64) or (six_bits and dtype == torch.bfloat16)
    if isinstance(fmt, BlockFormat):
        if not fmt.power_of_two:
            return dtype in (torch.float32, torch.float64)
        return dtype != torch.float16 and _significant_bits(fmt.element) <= _precision(dtype)
    info = torch.finfo(dtype)
    least = math.frexp(info.smallest_normal)[1] - _precision(dtype)  # exponent of the smallest subnormal number
    if isinstance(fmt, FloatFormat | IntFormat):
        smallest = fmt.min_subnormal if isinstance(fmt, FloatFormat) else fmt.eps / 2
        fits = fmt.max <= info.max and smallest >= math.ldexp(1.0, least)
        return fits and _significant_bits(fmt) <= _precision(dtype)
    for value in fmt.values if isinstance(fmt, CodebookFormat) else fmt.magnitudes:
        # a multiple of the last place that it would have in the dtype
        last_place = max(math.frexp(value)[1] - _precision(dtype), least)
        if abs(value) > info.max or not (value == 0 or math.ldexp(value, -last_place).is_integer()):
            return False
    return True


def missing_value(fmt: ElementFormat, dtype: torch.dtype) -> float | None:
    """Return the largest value of a format that a float8 dtype lacks, infinities and -0 being values; None for none."""
    if fmt.bits > 8:  # more values than the dtype has codes
        return fmt.max
    dtype_format = get_format(dtype)
    assert isinstance(dtype_format, FloatFormat)
    missing = _values(fmt) - _values(dtype_format)
    return max(map(float, missing), key=lambda value: (abs(value), value)) if missing else None


def check_holds(fmt: Format, dtype: torch.dtype) -> None:
    """Raise DtypeError where a float8 dtype lacks a value of a format."""
    if is_representable(fmt, dtype):
        return
    if isinstance(fmt, ScaledFormat):
        reason = "its scales reach beyond that; encode returns codes and scales apart"
    else:
        reason = f"it has no {missing_value(fmt, dtype)!r}"
    raise DtypeError(f"out_dtype={dtype} does not hold every value of {fmt.name} ({reason}); choose torch.float32")


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values that a float8 dtype holds in that dtype, NaN with the code that its record says."""
    result = values.to(dtype)
    if dtype == torch.float8_e5m2:  # torch's cast makes another of its NaNs, 0x7f
        result.detach().view(torch.uint8).masked_fill_(values.detach().isnan(), 0x7E)
    return result


def _values(fmt: ElementFormat) -> set[str]:
    """Return the numbers of a format of 8 bits or fewer, as text, which tells -0 from 0."""
    codes = range(len(fmt.values) if isinstance(fmt, CodebookFormat) else 1 << fmt.bits)
    return {repr(value) for value in map(fmt.value, codes) if not math.isnan(value)}


def _significant_bits(fmt: ElementFormat) -> int:
    if isinstance(fmt, FloatFormat):
        return fmt.mantissa_bits + 1
    if isinstance(fmt, IntFormat):
        return fmt.bits - fmt.signed + fmt.half_offset
    return 24


def _precision(dtype: torch.dtype) -> int:
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def codes_of_scales(scales: torch.Tensor, fmt: FloatFormat, *, validated: bool = False) -> torch.Tensor:
    """Return the uint8 codes of scales, none of them negative, that are values of a format of 8 bits or fewer.

    NaN takes the format's NaN code; no value is rounded. ``validated`` scales are known to be values of the format.

    Raises:
        CodeError: A scale is not a value of the format.
    """
    # finite values that are not negative rise with their codes: a search finds the code, a comparison what is no value
    scales = scales.to(torch.promote_types(scales.dtype, torch.float32)).contiguous()
    values = _ladder(fmt).to(scales.device, scales.dtype)
    codes = torch.searchsorted(values, scales).clamp_(max=fmt.max_code)
    wrong = values[codes] != scales
    if fmt.nan_code is not None:
        codes = torch.where(scales.isnan(), fmt.nan_code, codes)
        wrong &= ~scales.isnan()
    if not validated and is_readable(wrong) and bool(wrong.any()):
        raise CodeError(f"scale {scales[wrong][0].item():g} is not a value of {fmt.name}; pass scales of that format")
    return codes.to(torch.uint8)


def scales_of_codes(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Return the float32 scales of uint8 codes; the inverse of ``codes_of_scales``.

    Raises:
        CodeError: A code is not that of a scale: negative, infinite or beyond the format's bits.
    """
    wrong = codes > fmt.max_code
    if fmt.nan_code is not None:
        wrong &= codes != fmt.nan_code
    if is_readable(wrong) and bool(wrong.any()):
        raise CodeError(
            f"code {int(codes[wrong][0])} is not that of a scale in {fmt.name}; expected 0 to {fmt.max_code}"
        )
    values = _scale_values(fmt).to(codes.device)
    return values.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


@lru_cache(maxsize=64)
def _scale_values(fmt: FloatFormat) -> torch.Tensor:
    """Return the scale of every uint8 code in float32: ``_ladder``, and NaN above it."""
    return torch.nn.functional.pad(_ladder(fmt), (0, 255 - fmt.max_code), value=torch.nan)


@lru_cache(maxsize=64)
def _ladder(fmt: FloatFormat) -> torch.Tensor:
    """Return the finite values that are not negative, which rise with their codes, in float32."""
    return torch.tensor([fmt.value(code) for code in range(fmt.max_code + 1)], dtype=torch.float32)
