# SPDX-License-Identifier: Apache-2.0
"""Effects of a cast on a tensor (fmtsim/lab/analysis/measure.py), counted in one launch without waiting for it."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.any_format import cast_bytes
from fmtsim.cuda.cast.block_casts import MOST, amax_of_blocks
from fmtsim.cuda.cast.parameters import DTYPES, NARROW, aligned, macros
from fmtsim.cuda.runtime import Defines, device_index, kernel, multiprocessors
from fmtsim.cuda.runtime.launch import Bound
from fmtsim.formats.block import BlockFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec

_FILE, _THREADS, _VECTOR, _ROWS = "count_cast.cu", 256, 8, 4
_HIGH: Final = _ROWS * _THREADS  # rows of a tile one vector wide
_MOST_BLOCKS: Final = 512  # of a tile
_NUMBERS: Final = 8 + 2 * 321  # figures and exponents
_COUNTERS: Final = 5 + 2 * 277
_WIDEST: Final = 128  # vectors of a tile whose blocks are one row high


def count_cast(
    x: Tensor, q: Tensor, fmt: BlockFormat | None, block: tuple[int, int], limits: tuple[float, float]
) -> Tensor | None:
    """Count elements of x, which were cast to q; those that are NaN or infinite enter their own count alone.

    Each block of threads adds up the squares of the tiles that it takes, and their sums are added in order: a device
    gives the same last bits each time, another one may not.

    Args:
        x, q: Contiguous matrices of one shape on one device.
        fmt: Whose scales the elements of x are seen under, None for none.
        block: Rows and columns of a block.
        limits: Lowest and highest x / scale that are not saturated.

    Returns:
        float64 [650], on the device, as ``measure`` has it; None where no kernel serves.
    """
    rows, columns = x.shape
    dtypes = x.dtype, q.dtype
    if columns % _VECTOR or not 0 < x.numel() < MOST or not aligned(x, q) or not set(dtypes) <= set(NARROW):
        return None
    prepared = _prepared(rows, columns, dtypes, fmt, block, limits, device_index(x))
    if prepared is None:
        return None
    grid, launch = prepared
    numbers = torch.zeros(_NUMBERS + _COUNTERS + 2 * grid, dtype=torch.float64, device=x.device)
    out = numbers.data_ptr()
    counters, sums = out + 8 * _NUMBERS, out + 8 * (_NUMBERS + _COUNTERS)
    tensor = amax_of_blocks(x, x.numel()) if fmt is not None and fmt.tensor_scale else None
    launch(grid, x.data_ptr(), q.data_ptr(), out, counters, sums, 0 if tensor is None else tensor.data_ptr())
    return numbers[:_NUMBERS]


@lru_cache(maxsize=4096)
def _prepared(
    rows: int, columns: int, dtypes: tuple[torch.dtype, torch.dtype], fmt: BlockFormat | None, block: tuple[int, int],
    limits: tuple[float, float], index: int,
) -> tuple[int, Bound] | None:  # fmt: skip
    """Return the grid, and a launch that takes it and six addresses; None where blocks do not fit tiles."""
    across = _WIDEST if fmt is None else across_of(block)
    if across is None:
        return None
    tiles = -(-rows // (_HIGH // across)) * -(-columns // (across * _VECTOR))
    with np.errstate(over="ignore"):  # of float32 itself nothing finite lies beyond the limit
        bounds = np.array(limits, np.float64).astype(np.float32)
    sizes = np.uint64(rows), np.uint64(columns), np.uint32(across), *map(np.uint32, block)
    cast = []
    if fmt is not None:  # whose rule of scales alone is looked at
        spec = CastSpec(format=fmt, rounding=Rounding(), overflow=fmt.default_overflow)
        cast.append(cast_bytes(spec, None, torch.device("cpu")))
    scaled = 0 if fmt is None else 1 if fmt.power_of_two else 2
    start = kernel(_FILE, "count_cast", index, _defines(*dtypes, scaled))
    return min(tiles, 4 * multiprocessors(index)), start.bound(_THREADS, 6, *sizes, *bounds, *cast)


def across_of(block: tuple[int, int]) -> int | None:
    """Return the width, in vectors, of a tile of whole blocks, None where there is none."""
    high, wide = block
    if high == 1:
        across = _WIDEST
    elif high % _ROWS == 0 and _HIGH % high == 0:
        across = min(_HIGH // high, _HIGH // 32)
    else:
        return None
    fits = wide % _VECTOR == 0 if wide > 1 else high > 1
    whole = (across * _VECTOR) % wide == 0 and across * _VECTOR * (_HIGH // across) <= _MOST_BLOCKS * high * wide
    return across if fits and whole else None


@lru_cache(maxsize=256)
def _defines(x: torch.dtype, q: torch.dtype, scaled: int) -> Defines:
    return macros(INPUT=DTYPES[x], QUANTISED=DTYPES[q], SCALED=scaled)


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield file, kernel and macros of the usual kinds of kernel: a layer's operands are bfloat16, or as it is."""
    for x, q in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.float32, torch.float32)):
        for scaled in range(3):
            yield _FILE, "count_cast", _defines(x, q, scaled)
