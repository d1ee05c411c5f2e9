# SPDX-License-Identifier: Apache-2.0
"""The last step of a product whose operands left the scales of their tensors outside."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fmtsim.engines.cuda.cast.parameters import DTYPES, NARROW, macros
from fmtsim.engines.cuda.runtime import Defines, device_index, kernel
from fmtsim.engines.cuda.runtime.launch import Bound

_THREADS = 256


def covers(y: Tensor, dtype: torch.dtype) -> bool:
    """Say whether ``finish_sums`` takes sums and a dtype."""
    m, n = y.shape
    whole = y.is_contiguous() and n % 4 == 0 and y.data_ptr() % 16 == 0
    return whole and m > 0 and 0 < n <= 4 * _THREADS * 65535 and y.dtype == torch.float32 and dtype in NARROW


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
    out = torch.empty_like(y, dtype=dtype)
    columns, rows = (None if s is None else s.contiguous() for s in (columns, rows))
    by_column, by_row = (s is not None and s.shape[0] > 1 for s in (columns, rows))
    bias = None if bias is None else bias.float().contiguous()
    grid, launch = _prepared(m, n, by_column, by_row, dtype, device_index(y))
    launch(grid, y, columns, rows, bias, out)
    return out


@lru_cache(maxsize=4096)
def _prepared(
    m: int, n: int, by_column: bool, by_row: bool, dtype: torch.dtype, index: int
) -> tuple[tuple[int, int, int], Bound]:
    """Return the grid for sums of a size, and a launch that takes it and the addresses."""
    threads = min(_THREADS, -(-n // 128) * 32)
    rest = np.uint32(by_column), np.uint32(by_row), np.uint64(m), np.uint64(n // 4)
    launch = kernel("finish.cu", "finish_sums", index, _defines(dtype)).bound(threads, 5, *rest)
    return (-(-m // 4), -(-n // (4 * threads)), 1), launch


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield file, kernel and macros of every kind of kernel."""
    for dtype in NARROW:
        yield "finish.cu", "finish_sums", _defines(dtype)


def _defines(dtype: torch.dtype) -> Defines:
    return macros(OUTPUT=DTYPES[dtype])
