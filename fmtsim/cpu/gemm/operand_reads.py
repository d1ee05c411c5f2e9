# SPDX-License-Identifier: Apache-2.0
"""How kernels of products read tensors: elements of every dtype as float32, in rows, and in panels of 64 columns.

Rows lie far apart in memory, which no processor foresees: their cache lines are asked for ahead. Lines of 16 rows are
transposed in registers.
"""

from functools import lru_cache

import numpy as np
import torch
from numba import types

from fmtsim.cpu.runtime.jit import borrowing, overload, prefetch
from fmtsim.cpu.runtime.kernel_numbers import number
from fmtsim.cpu.runtime.pool import array_of
from fmtsim.cpu.runtime.simd import (
    COLUMNS,
    LANES,
    and_,
    as_f32,
    as_i32,
    ashr,
    fmul,
    gather,
    int_to_f32,
    load,
    lshr,
    or_,
    sext32,
    shl,
    splat,
    store,
    where_below,
)
from fmtsim.cpu.runtime.strips import transpose_lines

_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
NO_TABLE = np.zeros(1, np.float32)
_TILE = 32
_LINE_WORDS = 16  # words of 32 bits of a cache line
_FETCHED = 4  # cache lines of a row at a time


def read_array(tensor: torch.Tensor, *, wide: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return a tensor as kernels read it (``Source.array``), and the table of its codes' values.

    With ``wide`` float64 and int8 stay as they are; else they become float32, which holds their values.
    """
    tensor = tensor.detach()
    if tensor.dtype in _CODES:
        return array_of(tensor.view(torch.uint8)), _table_of(tensor.dtype)
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    elif tensor.dtype == torch.float16:
        tensor = tensor.view(torch.uint16)
    elif tensor.dtype != torch.float32 and not wide:
        tensor = tensor.float()
    return array_of(tensor), NO_TABLE


@lru_cache(maxsize=16)
def _table_of(dtype: torch.dtype) -> np.ndarray:
    return torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()


@overload
def _numbers(codes, array, table):  # type: ignore[no-untyped-def]
    """Return the float32 of raw elements of an array, lane by lane: the lanes of ``codes`` begin with their bits."""
    if array.dtype == types.float32:
        return lambda codes, array, table: as_f32(codes)
    if array.dtype == types.int16:
        return lambda codes, array, table: as_f32(shl(codes, splat(np.int32(16))))
    if array.dtype == types.int8:
        return lambda codes, array, table: int_to_f32(ashr(shl(codes, splat(np.int32(24))), splat(np.int32(24))))
    if array.dtype == types.uint8:
        return lambda codes, array, table: gather(table, and_(codes, splat(np.int32(255))))

    def binary16(codes, array, table):  # type: ignore[no-untyped-def]
        magnitude = and_(codes, splat(np.int32(0x7FFF)))
        field = shl(magnitude, splat(np.int32(13)))
        finite = as_i32(fmul(as_f32(field), splat(np.float32(2.0**112))))
        bits = where_below(splat(np.int32(0x7BFF)), magnitude, or_(field, splat(np.int32(0x7F800000))), finite)
        return as_f32(or_(bits, shl(and_(codes, splat(np.int32(0x8000))), splat(np.int32(16)))))

    return binary16


@overload
def _run(array, table, index):  # type: ignore[no-untyped-def]
    """Return the float32 of neighbours in memory."""
    if array.dtype == types.float32:
        return lambda array, table, index: load(array, index)
    return lambda array, table, index: _numbers(sext32(load(array, index)), array, table)


@overload
def _per_word(array):  # type: ignore[no-untyped-def]
    """Return how many numbers of an array 32 bits hold: a constant, as ``itemsize`` is not."""
    count = 32 // array.dtype.bitwidth
    return lambda array: count


@borrowing
def _index(array, row, k):  # type: ignore[no-untyped-def]
    """Return how many numbers behind the first of an array with contiguous rows array[row, k] lies in memory."""
    return row * (array.strides[0] * _per_word(array) // 4) + k


@borrowing
def are_neighbours(array, order):  # type: ignore[no-untyped-def]
    """Return True if the slots of a row lie side by side in memory, in order."""
    plain = array.strides[1] * _per_word(array) == 4
    for slot in range(order.size):
        plain &= order[slot] == order[0] + slot and order[slot] >= 0
    return plain


@borrowing
def fetch(array, row, first, count):  # type: ignore[no-untyped-def]
    """Ask for the cache lines of neighbours in a row: no processor foresees it, for rows lie far apart."""
    begin = _index(array, row, first)
    for at in range(begin, begin + count, _LINE_WORDS * _per_word(array)):
        prefetch(array, at)


@borrowing
def gather_row(array, table, row, order, run, every, out, at):  # type: ignore[no-untyped-def]
    """Write a row in slot order to out[at:]; ``every`` slots share an element, ``run``: neighbours in memory."""
    if row >= array.shape[0]:
        for slot in range(order.size):
            out[at + slot] = np.float32(0)
        return
    # 1. neighbours, a vector at a time
    begin = 0
    if run and every == 1:
        first, begin = _index(array, row, order[0]), order.size // LANES * LANES
        for slot in range(0, begin, LANES):
            store(out, at + slot, _run(array, table, first + slot))
    # 2. the rest one by one
    line = np.uint64(row)  # unsigned: numba then does not look for negative indices
    for slot in range(begin, order.size):
        k = order[slot]
        out[at + slot] = number(array[line, np.uint64(k // every)], table) if k >= 0 else np.float32(0)


@borrowing
def _transpose(array, table, first, k, out, start, rows):  # type: ignore[no-untyped-def]
    """Write the slots of a cache line of rows, 16 or whole 16s of them, to out[start * 64:]; k is the first one's."""
    per_word, pitch = _per_word(array), _index(array, 1, 0)
    for row in range(0, rows, 16):
        at = _index(array, first + row, k)
        transpose_lines(array, at, pitch, out, start * COLUMNS + row, per_word * COLUMNS)
    if per_word == 1:
        return
    for word in range(start, start + _LINE_WORDS * per_word, per_word):
        for at in range(word * COLUMNS, (word + 1) * COLUMNS, LANES):
            codes = as_i32(load(out, at))
            for part in range(per_word):
                shifted = lshr(codes, splat(np.int32(part * 32 // per_word)))
                store(out, at + part * COLUMNS, _numbers(shifted, array, table))


@overload
def _gather_lines(array, table, first, rows, order, out):  # type: ignore[no-untyped-def]
    """Write what whole cache lines of whole 16s of rows hold to out; return how many rows and slots that are."""
    if array.dtype.bitwidth > 32 or out.dtype != types.float32:
        return lambda array, table, first, rows, order, out: (0, 0)

    def gather_lines(array, table, first, rows, order, out):  # type: ignore[no-untyped-def]
        if not are_neighbours(array, order):
            return 0, 0
        per_line = _LINE_WORDS * _per_word(array)
        many, slots = rows // 16 * 16, order.size // per_line * per_line
        for start in range(0, slots, per_line):
            if start % (_FETCHED * per_line) == 0:
                for row in range(rows):
                    fetch(array, first + row, order[0] + start, min(_FETCHED * per_line, order.size - start))
            _transpose(array, table, first, order[0] + start, out, start, many)
        return many, slots

    return gather_lines


@borrowing
def gather_panel(array, table, first, order, every, out):  # type: ignore[no-untyped-def]
    """Write 64 rows of an array [N, K] from first on to out, [slots][64]; ``every`` slots share an element.

    Numbers become float32, or float64 where ``out`` is. Rows behind the last are zeros.
    """
    rows = min(COLUMNS, array.shape[0] - first)
    across = array.strides[0] < array.strides[1]  # neighbours along N are nearer in memory
    if rows < COLUMNS:
        for at in range(order.size * COLUMNS):
            out[at] = 0
    if across:
        for slot in range(order.size):
            k = order[slot]
            for row in range(rows):
                out[slot * COLUMNS + row] = number(array[first + row, k // every], table) if k >= 0 else np.float32(0)
        return
    many, begin = _gather_lines(array, table, first, rows, order, out) if every == 1 else (0, 0)
    for start in range(0, order.size, _TILE):
        for row in range(rows):
            line = np.uint64(first + row)  # unsigned: numba then does not look for negative indices
            for slot in range(start if row >= many else max(start, begin), min(start + _TILE, order.size)):
                k = order[slot]
                element = number(array[line, np.uint64(k // every)], table) if k >= 0 else np.float32(0)
                out[slot * COLUMNS + row] = element
