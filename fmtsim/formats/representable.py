"""Which dtype holds every value of a format exactly (docs/semantics.md, section 10)."""

import math
from functools import lru_cache

import torch

from fmtsim.formats.block import BlockFormat, Format, LogTileFormat
from fmtsim.formats.spec import ElementFormat, FloatFormat, IntFormat

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@lru_cache(maxsize=4096)
def result_dtype(fmt: Format, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of quantised values: the input's where it holds every value, else float32, else float64."""
    for candidate in (dtype, torch.float32):
        if is_representable(fmt, candidate):
            return candidate
    return torch.float64


@lru_cache(maxsize=4096)
def is_representable(fmt: Format, dtype: torch.dtype) -> bool:
    """Say whether a dtype holds every value of a format (of block formats: within the range of their scales)."""
    if isinstance(fmt, LogTileFormat):
        return dtype in (torch.float32, torch.float64)
    if isinstance(fmt, BlockFormat):
        if not fmt.power_of_two:
            return dtype in (torch.float32, torch.float64)
        return dtype != torch.float16 and _significant_bits(fmt.element) <= _precision(dtype)
    return _element_fits(fmt, dtype)


def _element_fits(fmt: ElementFormat, dtype: torch.dtype) -> bool:
    info = torch.finfo(dtype)
    if isinstance(fmt, FloatFormat):
        fits = fmt.max <= info.max and fmt.min_subnormal >= _smallest(dtype)
        return fits and _significant_bits(fmt) <= _precision(dtype)
    if isinstance(fmt, IntFormat):
        return _significant_bits(fmt) <= _precision(dtype) and fmt.max <= info.max and fmt.eps / 2 >= _smallest(dtype)
    codes = range(fmt.max_code + 1) if not hasattr(fmt, "values") else range(len(fmt.values))
    return all(_value_fits(fmt.value(code), dtype) for code in codes)


def _value_fits(value: float, dtype: torch.dtype) -> bool:
    if value == 0:
        return True
    exponent = max(math.frexp(value)[1] - 1, _smallest_normal_exponent(dtype))
    steps = math.ldexp(abs(value), _precision(dtype) - 1 - exponent)
    return abs(value) <= torch.finfo(dtype).max and steps == math.floor(steps)


def _significant_bits(fmt: ElementFormat) -> int:
    if isinstance(fmt, FloatFormat):
        return fmt.mantissa_bits + 1
    if isinstance(fmt, IntFormat):
        return fmt.bits - fmt.signed + fmt.half_offset
    return 24


def _precision(dtype: torch.dtype) -> int:
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def _smallest_normal_exponent(dtype: torch.dtype) -> int:
    return math.frexp(torch.finfo(dtype).smallest_normal)[1] - 1


def _smallest(dtype: torch.dtype) -> float:
    return math.ldexp(1.0, _smallest_normal_exponent(dtype) - _precision(dtype) + 1)
