# SPDX-License-Identifier: Apache-2.0
"""How results reach their tensor: through float32 for half precision."""

import torch

from fmtsim.formats.block import Format
from fmtsim.formats.representable import is_representable


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels compute for a tensor of that dtype."""
    return dtype if dtype == torch.float64 else torch.float32


def narrows(fmt: Format, dtype: torch.dtype) -> bool:
    """Say whether a dtype of 16 bits does not hold every value of a format, so that values are rounded to it."""
    return dtype.itemsize == 2 and not is_representable(fmt, dtype)


def store(result: torch.Tensor, out: torch.Tensor) -> None:
    """Write values into a tensor of any of the four dtypes, rounded to nearest even where they do not fit exactly.

    torch's vectorised conversion to bfloat16 gives NaN all ones; every NaN here is the canonical one.
    """
    out.copy_(result)
    if out.dtype != result.dtype:
        out.masked_fill_(result.isnan(), torch.nan)
