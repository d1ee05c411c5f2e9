# SPDX-License-Identifier: Apache-2.0
"""Native products of operands with scales: of groups in the product, of rows, columns and tensors behind it.

Groups along the sum have kernels for the bfloat16 units of compute capability 9.0: the unit multiplies elements and
adds a group's products in float32; each sum is multiplied by the scales of its two groups and added to those before.
scaled_product.cu says in which order. ``finish_sums`` (finish.cu) is the last step of any other product whose operands
left scales outside.
"""

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.parameters import DTYPES, NARROW, aligned, macros
from fmtsim.cuda.runtime import Defines, capability, device_index, kernel, multiprocessors
from fmtsim.cuda.runtime.launch import Bound
from fmtsim.spec.operand import Operand
from fmtsim.support.replay.hooks import Structure

_FILE: Final = "scaled_product.cu"
_CAPABILITY: Final = (9, 0)
_TILE, _DEPTH, _STAGES, _THREADS = 128, 64, 6, 384
# Bytes of ``Memory`` of the kernel: stages at multiples of 1024 bytes, and barriers.
_SHARED: Final = _STAGES * (-(-2 * _TILE * (_DEPTH * 2 + 4) // 1024) * 1024 + 16) + 1024
_OUTPUTS: Final = {torch.float32: 0, torch.bfloat16: 1}
_PARTS: Final = 16  # at most
_GROUP: Final = 128  # of the kernels that are compiled ahead
_TURN = 1024  # outputs of a block of threads that adds parts
_GROUPS: Final = (64, 128)
_MOST: Final = 1 << 30
_SIDE: Final = struct.Struct("=QqQqqii")  # an operand, to the kernel
_FINISHING: Final = 256  # threads of a block of finish_sums, at most


def covers_groups(a: Operand, b: Operand) -> bool:
    """Return True if ``multiply_groups`` takes two operands; looks at no data, so that a compiler may ask."""
    if any(x.scale is None or x.tensor_scale is not None for x in (a, b)):
        return False
    group, (m, k), n = a.block[1], a.elements.shape, b.elements.shape[0]
    if capability(device_index(a.elements)) != _CAPABILITY or group != b.block[1] or group not in _GROUPS:
        return False
    if any(x.block[0] & (x.block[0] - 1) and x.block[0] < x.elements.shape[0] for x in (a, b)):
        return False
    small = 0 < m < _MOST and 0 < n < _MOST and 0 < k < _MOST
    return small and n % 4 == 0 and all(_lies_well(x) for x in (a, b))


def _transposed(x: Operand) -> bool:
    """Return True if rows, and not places of the sum, follow each other in memory."""
    return not x.elements.is_contiguous()


def _lies_well(x: Operand) -> bool:
    whole = x.elements.is_contiguous() or x.elements.mT.is_contiguous()
    return whole and x.elements.dtype == torch.bfloat16 and x.elements.shape[0 if _transposed(x) else 1] % 8 == 0


def multiply_groups(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return ``a b^T + bias`` of operands whose groups along the sum have scales; None where no kernel covers that.

    The result is [M, N] in float32 or bfloat16; the bias has [N].

    With P the float32 sum of the products of a group, and s and t the scales of the two: the groups are added in
    order by ``c = fma(P s, t, c)``, ``P s`` rounded first, or, where all rows of b in a tile share t and s t is within
    2**-100 and 2**100, by ``c = fma(P, s t, c)``. Where tiles are too few for the device the sum is split into parts
    that are added last; the bias behind all of them. The same operands give the same bits on devices with as many
    multiprocessors; nothing waits for the device.
    """
    if not covers_groups(a, b):
        return None
    (m, k), n, group, index = a.elements.shape, b.elements.shape[0], a.block[1], device_index(a.elements)
    parts, length = parts_of(m, n, -(-k // group), multiprocessors(index))
    out = torch.empty(m, n, dtype=dtype, device=a.elements.device)
    sums = out if parts == 1 else torch.empty(parts, m, n, dtype=torch.float32, device=out.device)
    units = _tiles(m, n) * parts
    held = [x if aligned(x.elements) else x._replace(elements=x.elements.clone()) for x in (a, b)]
    if bias is not None:
        bias = bias.float().contiguous()
        bias = bias if aligned(bias) else bias.clone()
    task = struct.pack("=iii4x", k, parts, length)
    shared = b.block[0] % _TILE == 0 or b.block[0] >= n
    kernel(_FILE, "multiply_groups", index, _defines(_transposed(a), _transposed(b), group, sums.dtype, shared))(
        min(units, multiprocessors(index)),
        _THREADS,
        *map(_packed, held),
        task,
        bias if parts == 1 else None,
        sums,
        shared=_SHARED,
    )
    if parts > 1:
        add_parts = kernel(_FILE, "add_parts", index, _defines(False, False, _GROUP, dtype, True))
        sizes = np.int32(parts), np.int32(n), np.int64(m * n // 4)
        add_parts(-(-m * n // _TURN), _TURN // 4, sums, bias, out, *sizes)
    return out


def _packed(x: Operand) -> Structure:
    assert x.scale is not None
    stride = max(x.elements.stride())
    steps = [0 if size == 1 else step for size, step in zip(x.scale.shape, x.scale.stride(), strict=True)]
    numbers = *steps, x.block[0].bit_length() - 1, x.elements.shape[0]
    return Structure(_SIDE, (x.elements, stride, x.scale, *numbers))


def _tiles(m: int, n: int) -> int:
    return -(-m // _TILE) * -(-n // _TILE)


@lru_cache(maxsize=1024)
def parts_of(m: int, n: int, groups: int, processors: int) -> tuple[int, int]:
    """Return the number of parts of a split sum, and the groups of a part.

    The time of a part is taken for that of its groups and one more, that of a further part for what it takes to write
    and read its sums: a group's time for 132 processors is that of 2.2 million numbers.
    """
    tiles = _tiles(m, n)

    def cost(parts: int) -> float:
        moved = 0 if parts == 1 else (parts + 1) * m * n / (16500 * processors)
        return -(-tiles * parts // processors) * (-(-groups // parts) + 1) + moved

    length = -(-groups // min(range(1, min(_PARTS, groups) + 1), key=cost))
    return -(-groups // length), length


def _defines(turned_a: bool, turned_b: bool, group: int, dtype: torch.dtype, shared_b: bool) -> Defines:
    return macros(
        TRANSPOSED_A=turned_a, TRANSPOSED_B=turned_b, GROUP=group, OUTPUT=_OUTPUTS[dtype], SHARED_B=shared_b,
        STAGES=_STAGES,
    )  # fmt: skip


def finish_sums(
    y: Tensor, columns: Tensor | None, rows: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Return ``(y * columns^T) * rows + bias`` in another dtype: float32 steps, one rounding each, then one to that.

    None where no kernel does it.

    Args:
        y: float32 [M, N], rows of whole vectors of four.
        columns: float32 [N, 1] or [1, 1]: scales of y's columns, or None.
        rows: float32 [M, 1] or [1, 1]: scales of its rows, or None.
        bias: [N], or None.
        dtype: float32, bfloat16 or float16.

    NaN becomes the canonical one. Nothing waits for the device.
    """
    m, n = y.shape
    whole = y.is_contiguous() and n % 4 == 0 and y.data_ptr() % 16 == 0 and 0 < n <= 4 * _FINISHING * 65535 and m > 0
    if not whole or y.dtype != torch.float32 or dtype not in NARROW:
        return None
    out = torch.empty_like(y, dtype=dtype)
    columns, rows = (None if s is None else s.contiguous() for s in (columns, rows))
    by_column, by_row = (s is not None and s.shape[0] > 1 for s in (columns, rows))
    bias = None if bias is None else bias.float().contiguous()
    grid, launch = _finish_launch(m, n, by_column, by_row, dtype, device_index(y))
    launch(grid, y, columns, rows, bias, out)
    return out


@lru_cache(maxsize=4096)
def _finish_launch(
    m: int, n: int, by_column: bool, by_row: bool, dtype: torch.dtype, index: int
) -> tuple[tuple[int, int, int], Bound]:
    """Return the grid for sums of a size, and a launch that takes it and the addresses."""
    threads = min(_FINISHING, -(-n // 128) * 32)
    rest = np.uint32(by_column), np.uint32(by_row), np.uint64(m), np.uint64(n // 4)
    launch = kernel("finish.cu", "finish_sums", index, macros(OUTPUT=DTYPES[dtype])).bound(threads, 5, *rest)
    return (-(-m // 4), -(-n // (4 * threads)), 1), launch


def variants(capability: tuple[int, int]) -> Iterator[tuple[str, str, Defines]]:
    """Yield file, kernel and macros of every kind of kernel: of products those of groups of 128."""
    for dtype in NARROW:
        yield "finish.cu", "finish_sums", macros(OUTPUT=DTYPES[dtype])
    for dtype in _OUTPUTS if capability == _CAPABILITY else ():
        yield _FILE, "add_parts", _defines(False, False, _GROUP, dtype, True)
        for transposed in ((False, False), (False, True), (True, True)):
            yield _FILE, "multiply_groups", _defines(*transposed, _GROUP, dtype, not transposed[0])
