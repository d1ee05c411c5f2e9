# SPDX-License-Identifier: Apache-2.0
"""Tensors as bit patterns: the layouts of torch's own dtypes and the parts of a floating-point code."""

from typing import NamedTuple

import torch

from fmtsim.formats.block import FP32
from fmtsim.formats.spec import FloatFormat
from fmtsim.support import float64
from fmtsim.support.float64 import floor_log2

FP64 = FloatFormat(name="fp64", exponent_bits=11, mantissa_bits=52, source="IEEE 754-2019, 3.6")
BF16 = FloatFormat(name="bf16", exponent_bits=8, mantissa_bits=7, source="IEEE 754-2019 rules on the top half of fp32")
FP16 = FloatFormat(name="fp16", exponent_bits=5, mantissa_bits=10, source="IEEE 754-2019, 3.6")

LAYOUTS: dict[torch.dtype, FloatFormat] = {
    torch.float16: FP16,
    torch.bfloat16: BF16,
    torch.float32: FP32,
    torch.float64: FP64,
}
"""What the bits of a tensor of each supported dtype mean."""

BIT_DTYPES: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}

_ZERO_EXPONENT = -4096  # below every exponent in use, so that zero never looks like a normal number


class Parts(NamedTuple):
    """Hold the real numbers behind codes: ``|x| = significand * 2**(exponent - precision)``.

    ``negative``, ``infinite`` and ``nan`` are boolean, ``significand`` and ``exponent`` integer tensors of one dtype;
    where ``infinite`` or ``nan`` holds, the two numbers mean nothing.
    """

    negative: torch.Tensor
    significand: torch.Tensor
    exponent: torch.Tensor
    precision: int
    infinite: torch.Tensor
    nan: torch.Tensor


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """View a float tensor as signed integers of its own width."""
    return x.view(BIT_DTYPES[x.dtype])


def from_bits(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn codes of a dtype's layout, in any integer dtype, into a float tensor."""
    codes = codes.to(BIT_DTYPES[dtype])
    return float64.from_bits(codes) if dtype == torch.float64 else codes.view(dtype)


def unpack(codes: torch.Tensor, fmt: FloatFormat, dtype: torch.dtype, normalise: bool) -> Parts:
    """Split codes into sign, significand and exponent.

    Args:
        codes: Codes in any integer dtype of at least the format's width; bits above the format's are ignored.
        fmt: Their format.
        dtype: torch.int32 or torch.int64, of the results.
        normalise: Shift the significands of subnormals up to ``2**precision`` and more; without it subnormals keep the
            smallest normal's exponent. Zero has significand 0 and, when normalised, an exponent below all others.
    """
    codes = codes.to(dtype)
    negative = _sign(codes, fmt)
    magnitude = codes & fmt.magnitude_mask
    infinite, nan = _specials(codes, magnitude, fmt)
    field = magnitude >> fmt.mantissa_bits
    if not fmt.has_zero:  # no mantissa either: every code is a power of two
        exponent = field - fmt.exponent_bias
        return Parts(negative, torch.ones_like(field), exponent, 0, infinite, nan)
    lifted = field.clamp(min=1)
    significand = magnitude - ((lifted - 1) << fmt.mantissa_bits)
    if not fmt.has_subnormals:
        significand = torch.where(field == 0, 0, significand)
    exponent = lifted - fmt.exponent_bias
    if normalise:
        significand, exponent = _normalise(significand, exponent, fmt.mantissa_bits)
    return Parts(negative, significand, exponent, fmt.mantissa_bits, infinite, nan)


def _normalise(significand: torch.Tensor, exponent: torch.Tensor, precision: int) -> tuple[torch.Tensor, torch.Tensor]:
    gap = precision - floor_log2(significand.clamp(min=1))
    return significand << gap, torch.where(significand == 0, _ZERO_EXPONENT, exponent - gap)


def _sign(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    if not fmt.signed:
        return torch.zeros_like(codes, dtype=torch.bool)
    if fmt.bits == 8 * codes.element_size():
        return codes < 0
    return (codes & fmt.sign_mask) != 0


def _specials(codes: torch.Tensor, magnitude: torch.Tensor, fmt: FloatFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where codes are infinite and where they are NaN."""
    nothing = torch.zeros_like(magnitude, dtype=torch.bool)
    infinite = nothing if fmt.inf_code is None else magnitude == fmt.inf_code
    if fmt.nan == "none":
        return infinite, nothing
    if fmt.nan == "negative_zero":
        return infinite, (codes & (fmt.sign_mask | fmt.magnitude_mask)) == fmt.sign_mask
    return infinite, magnitude > (fmt.max_code if fmt.inf_code is None else fmt.inf_code)
