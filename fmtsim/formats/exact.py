# SPDX-License-Identifier: Apache-2.0
"""Codes of values that already lie in a format: how block scales are stored."""

from functools import lru_cache

import torch

from fmtsim.formats.spec import FloatFormat
from fmtsim.support.dispatch import is_readable
from fmtsim.support.errors import CodeError


def codes_of_scales(scales: torch.Tensor, fmt: FloatFormat, *, validated: bool = False) -> torch.Tensor:
    """Return the uint8 codes of scales, none of them negative, that are values of a format of 8 bits or fewer.

    NaN takes the format's NaN code; no value is rounded. ``validated`` scales are known to be values of the format.

    Raises:
        CodeError: A scale is not a value of the format.
    """
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
    nan = fmt.nan_code
    wrong = codes > fmt.max_code
    if nan is not None:
        wrong &= codes != nan
    if is_readable(wrong) and bool(wrong.any()):
        raise CodeError(
            f"code {int(codes[wrong][0])} is not that of a scale in {fmt.name}; expected 0 to {fmt.max_code}"
        )
    values = _ladder(fmt).to(codes.device)
    scales = values[codes.to(torch.int64).clamp(max=fmt.max_code)]
    return scales if nan is None else torch.where(codes == nan, torch.nan, scales)


@lru_cache(maxsize=64)
def _ladder(fmt: FloatFormat) -> torch.Tensor:
    """Return the finite values that are not negative, which rise with their codes, in float32."""
    return torch.tensor([fmt.value(code) for code in range(fmt.max_code + 1)], dtype=torch.float32)
