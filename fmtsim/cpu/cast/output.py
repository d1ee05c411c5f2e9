# SPDX-License-Identifier: Apache-2.0
"""How results reach their tensor: through float32 for half precision."""

import torch


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels compute for a tensor of that dtype."""
    return dtype if dtype == torch.float64 else torch.float32


def store(result: torch.Tensor, out: torch.Tensor) -> None:
    """Write values that fit exactly into a tensor of any of the four dtypes.

    torch's vectorised conversion to bfloat16 gives NaN all ones; every NaN here is the canonical one.
    """
    out.copy_(result)
    if out.dtype != result.dtype:
        out.masked_fill_(result.isnan(), torch.nan)
