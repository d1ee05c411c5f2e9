# SPDX-License-Identifier: Apache-2.0
"""Element formats of every kind behind two verbs: round to codes, and codes to values."""

from functools import lru_cache

import torch

from fmtsim.engines.torch_engine import floats, integers, tables
from fmtsim.engines.torch_engine.carry import NEAREST
from fmtsim.engines.torch_engine.reals import narrow, tiny_kept, widen
from fmtsim.engines.torch_engine.storage import BIT_DTYPES, LAYOUTS, bits_of, from_bits
from fmtsim.formats.representable import is_representable
from fmtsim.formats.spec import CodebookFormat, ElementFormat, FloatFormat, IntFormat, Overflow
from fmtsim.rounding.modes import Rounding

_TABLE_BITS = 16  # formats up to here decode by a table of all their codes


def encode(
    x: torch.Tensor,
    fmt: ElementFormat,
    rounding: Rounding,
    overflow: Overflow,
    words: torch.Tensor | None,
    exponent: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round ``x``, or the exact ``x / 2**exponent``, to codes in int32 or int64.

    Args:
        x: float16, bfloat16, float32 or float64.
        fmt: The element format.
        rounding: How values are rounded.
        overflow: What happens beyond the largest value of a floating-point format.
        words: Random integers of x's shape, int64, for stochastic rounding.
        exponent: Integers between -127 and 127, broadcastable, or None.
    """
    if isinstance(fmt, FloatFormat):
        return floats.encode(x, fmt, rounding, overflow, words, exponent)
    if isinstance(fmt, IntFormat):
        return integers.encode(x, fmt, rounding, words, exponent)
    y = widen(x) if exponent is None else tiny_kept(x, exponent)
    if isinstance(fmt, CodebookFormat):
        return tables.encode_codebook(y, fmt, rounding, words)
    return tables.encode_log(y, fmt, rounding, words)


def decode(codes: torch.Tensor, fmt: ElementFormat, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of codes, rounded once to a floating-point dtype; every NaN is the canonical one."""
    if fmt.bits <= _TABLE_BITS:
        patterns = codes.to(torch.int64) & ((1 << fmt.bits) - 1)
        return from_bits(_value_table(fmt, dtype, codes.device)[patterns], dtype)
    return from_bits(value_bits(codes, fmt, dtype), dtype)


def significant_bits(fmt: ElementFormat) -> int:
    """Return an upper bound of the significant bits of a format's values."""
    if isinstance(fmt, FloatFormat):
        return fmt.mantissa_bits + 1
    return fmt.bits + 1 if isinstance(fmt, IntFormat) else 24


def value_bits(codes: torch.Tensor, fmt: ElementFormat, dtype: torch.dtype) -> torch.Tensor:
    """Return the bits of what ``decode`` returns, in int32 or int64, without a table."""
    if isinstance(fmt, FloatFormat):
        return floats.convert(codes, fmt, LAYOUTS[dtype], NEAREST, "ieee")
    if isinstance(fmt, IntFormat) and is_representable(fmt, torch.float32):
        exact = (integers.to_numbers(codes, fmt).to(torch.float32) + 0.5 * fmt.half_offset) * fmt.eps
        return bits_of(exact) if dtype == torch.float32 else floats.encode(exact, LAYOUTS[dtype], NEAREST, "ieee")
    if isinstance(fmt, IntFormat):
        return bits_of(narrow(integers.decode(codes, fmt), dtype))
    if isinstance(fmt, CodebookFormat):
        return bits_of(narrow(tables.decode_codebook(codes, fmt), dtype))
    return bits_of(narrow(tables.decode_log(codes, fmt), dtype))


@lru_cache(maxsize=256)
def _value_table(fmt: ElementFormat, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the bits of the values of all codes."""
    codes = torch.arange(1 << fmt.bits, dtype=torch.int32, device=device)
    return value_bits(codes, fmt, dtype).to(BIT_DTYPES[dtype])
