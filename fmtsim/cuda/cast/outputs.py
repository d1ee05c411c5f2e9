"""The last step of a product whose operands left the scales of their tensors outside."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.block_view import aligned
from fmtsim.cuda.runtime.program import Defines, device_index, kernel

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


def covers(y: Tensor, dtype: torch.dtype) -> bool:
    """Say whether ``finish_sums`` takes sums and a dtype."""
    m, n = y.shape
    whole = y.is_contiguous() and n % 4 == 0 and y.data_ptr() % 16 == 0
    return whole and m > 0 and 0 < n <= 4 * _THREADS * 65535 and y.dtype == torch.float32 and dtype in _OUTPUTS


def finish_sums(
    y: Tensor, columns: Tensor | None, rows: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return ``(y * columns^T) * rows + bias`` in another dtype: float32 steps, one rounding each, then one to that.

    Args:
        y: float32 [M, N] that ``covers`` takes.
        columns: float32 [N, 1] or [1, 1]: scales of y's columns, or None.
        rows: float32 [M, 1] or [1, 1]: scales of its rows, or None.
        bias: [N], or None.
        dtype: float32, bfloat16 or float16.

    NaN becomes the canonical one. Nothing waits for the device.
    """
    m, n = y.shape
    out = torch.empty(m, n, dtype=dtype, device=y.device)
    bias = None if bias is None else bias.float().contiguous()
    columns, rows = (None if s is None else s.contiguous() for s in (columns, rows))
    steps = [np.uint32(s is not None and s.shape[0] > 1) for s in (columns, rows)]
    threads = min(_THREADS, -(-n // 128) * 32)
    kernel("scale_output.cu", "finish_sums", device_index(y), _defines(dtype))(
        (-(-m // 4), -(-n // (4 * threads))), threads,
        y, columns, steps[0], rows, steps[1], bias, out, np.uint64(m), np.uint64(n // 4),
    )  # fmt: skip
    return out


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield file, kernel and macros of every kind of kernel."""
    for dtype in _OUTPUTS:
        yield "scale_output.cu", "scale_output", _defines(dtype)
        yield "scale_output.cu", "finish_sums", _defines(dtype)


def _defines(dtype: torch.dtype) -> Defines:
    return (("OUTPUT", str(_OUTPUTS[dtype])),)
