"""The last step of a product whose operands left the scales of their tensors outside."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.block_view import aligned
from fmtsim.cuda.runtime import Defines, device_index, kernel

_THREADS = 256
_OUTPUTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def scale_output(
    y: Tensor, scales: tuple[Tensor | None, Tensor | None], bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return ``y * (a * b) + bias`` in another dtype: float32 steps, one rounding each, then one to the dtype.

    Args:
        y: float32 [M, N].
        scales: The scales a and b, float32 0-d; at least one. Where one is None there is no product of the two.
        bias: [N], or None.
        dtype: float32, bfloat16 or float16.

    NaN becomes the canonical one. Nothing waits for the device.
    """
    out = torch.empty(y.shape, dtype=dtype, device=y.device)
    if not y.numel():
        return out
    bias = None if bias is None else bias.float().contiguous()
    if y.shape[-1] % 4 or not y.is_contiguous() or not aligned(y, out):
        a, b = scales
        factor = a * b if a is not None and b is not None else a if a is not None else b
        assert factor is not None
        scaled = y * factor if bias is None else y * factor + bias
        return out.copy_(scaled).masked_fill_(scaled.isnan(), torch.nan)
    fours = y.numel() // 4
    kernel("scale_output.cu", "scale_output", device_index(y), _defines(dtype))(
        -(-fours // (4 * _THREADS)), _THREADS, y, *scales, bias, out, np.uint64(fours), np.uint64(y.shape[-1])
    )
    return out


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield file, kernel and macros of every kind of kernel."""
    for dtype in _OUTPUTS:
        yield "scale_output.cu", "scale_output", _defines(dtype)


def _defines(dtype: torch.dtype) -> Defines:
    return (("OUTPUT", str(_OUTPUTS[dtype])),)
