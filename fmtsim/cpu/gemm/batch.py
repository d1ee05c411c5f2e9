# SPDX-License-Identifier: Apache-2.0
"""Batches of small products: kernels that compute one product after another; threads share the batch."""

from typing import NamedTuple

import numpy as np

from fmtsim.cpu.gemm.accumulate import Order, Promotion, Reduction, reduce_parts
from fmtsim.cpu.gemm.aligned_rounding import TRUNCATE, Unit
from fmtsim.cpu.gemm.aligned_truncate import Draw
from fmtsim.cpu.gemm.operands import EMPTY, Rows, Source
from fmtsim.cpu.gemm.packing import HAS_INF, pack_rows
from fmtsim.cpu.gemm.panels import Buffers, Constants, State, buffers_of, round_panels, rows_of, truncate_panels
from fmtsim.cpu.gemm.slabs import Slabs
from fmtsim.cpu.runtime import pool
from fmtsim.cpu.runtime.jit import bits32, device, kernel, subroutine
from fmtsim.cpu.runtime.pool import scratch
from fmtsim.cpu.runtime.simd import LANES

_STATE = 4 << 20  # bytes of the sums of a product that is small: as many as a second-level cache may hold
_SLOTS = 2048  # of a small product
_WORK = 1 << 22  # its multiply-adds: above, the call of a product by itself costs little, and threads share panels
_MANY = 4  # products for each thread, with which threads are busy whatever the products' size
DONE, LEFT, NONFINITE = 0, 1, 2  # what has become of a product; the last has NaN or Inf among its operands


class Work(NamedTuple):
    """Where a thread computes a product."""

    rows: Rows
    low: np.ndarray  # int32 [rows]: the smallest exponents
    marks: np.ndarray  # int32 [rows]: NaN and Inf
    raw: np.ndarray  # float32 [rows][slots]
    scales: np.ndarray  # empty
    state: State
    buffers: Buffers
    done: np.ndarray  # bool [panels]


class Sequence(NamedTuple):
    """The order of the products along K, all of it in one slab."""

    slots: np.ndarray
    order: Order
    block: int
    parts: int
    reduction: Reduction


def is_small(count: int, m: int, n: int, k: int, slabs: Slabs) -> bool:
    """Return True if the kernels here take so many products [M, N] of K terms."""
    state = 8 * LANES * -(-n // LANES) * (m + 3) * (slabs.parts + 2)
    light = m * n * k <= _WORK or count >= _MANY * pool.get_num_threads()
    return state <= _STATE and slabs.whole.slots.size <= _SLOTS and light


# Compiled into the kernels below: to call the kernels as they are would compile each of them by itself as well.
_pack_rows = subroutine(pack_rows.py_func)  # type: ignore[attr-defined]
_truncate_panels = subroutine(truncate_panels.py_func)  # type: ignore[attr-defined]
_round_panels = subroutine(round_panels.py_func)  # type: ignore[attr-defined]
_reduce_parts = subroutine(reduce_parts.py_func)  # type: ignore[attr-defined]


@subroutine
def _product_of(source, i):  # type: ignore[no-untyped-def]
    """Return the operand of product i."""
    return Source(
        source.array[i], source.table, source.emin, source.top, source.bits, source.scales, source.every,
        source.scale_emin,
    )  # fmt: skip


@subroutine
def _pack(source, sequence, given, factor, narrow, work):  # type: ignore[no-untyped-def]
    """Begin a product: clear its sums and pack the rows of a; return whether they fit and their smallest exponent."""
    work.state.acc[:], work.state.total[:], work.state.marks[:], work.marks[:] = 0, 0, 0, 0
    work.state.lowest[:], work.state.highest[:] = -EMPTY, EMPTY
    fits = _pack_rows(
        source, 0, work.low.size, sequence.slots, sequence.block, given, factor, narrow, work.raw, work.scales,
        work.rows, work.low, work.marks,
    )  # fmt: skip
    low = np.int64(work.low[0])
    for row in range(1, work.low.size):
        low = min(low, np.int64(work.low[row]))
    return fits, low


@subroutine
def _begin(c, work):  # type: ignore[no-untyped-def]
    """Write an addend [M, N] where sums begin, and its exponents where those of carried sums are noted."""
    for p in range(work.done.size):
        lowest, highest, first = np.int64(-EMPTY), np.int64(EMPTY), p * LANES
        for row in range(c.shape[0]):
            for column in range(min(LANES, c.shape[1] - first)):
                number = c[row, first + column] + np.float32(0)  # -0 would count as a negative term
                place = row * LANES + column
                if work.state.promotion.active:
                    work.state.total[p, place] = number
                else:
                    work.state.acc[p, place] = number
                magnitude = bits32(number) & np.int32(0x7FFFFFFF)
                if magnitude:
                    exponent = np.int64(magnitude >> np.int32(23)) - 127
                    lowest, highest = min(lowest, exponent), max(highest, exponent)
        work.state.lowest[p], work.state.highest[p] = lowest, highest
        if highest > 127:  # NaN or Inf, which no other operand may have
            work.state.marks[p, 0] |= HAS_INF


@subroutine
def _write(work, sequence, out):  # type: ignore[no-untyped-def]
    """Reduce the parts of a product and write it to out, unless it is NONFINITE; return what it is."""
    marks = np.int32(0)
    for row in range(work.marks.size):
        marks |= work.marks[row]
    done = True
    for p in range(work.done.size):
        done &= work.done[p]
        for column in range(LANES):
            marks |= work.state.marks[p, column]
    if marks or not done:
        return NONFINITE if marks else LEFT
    how = sequence.reduction
    for p in range(work.done.size):
        total = work.state.parts[p]
        if sequence.parts > 1 or how.in_place or how.partial:
            total = work.state.total[p]  # cleared where its last part ended: parts are added in place to zeros
            _reduce_parts(work.state.parts[p], sequence.parts, work.low.size, how, total)
        first = p * LANES
        for row in range(out.shape[0]):
            for column in range(min(LANES, out.shape[1] - first)):
                out[row, first + column] = total[row * LANES + column]
    return DONE


@device
def _draw_of(draw, keys, i):  # type: ignore[no-untyped-def]
    key = keys[i, 0], keys[i, 1], keys[i, 2], keys[i, 3]
    return Draw(key, draw.bits, draw.block, draw.row, draw.rows, draw.columns)


@kernel
def truncate_batch(a, b, c, sequence, how, draw, keys, work, out, outcome):  # type: ignore[no-untyped-def]
    """Write products of a batch by the truncating kernel; ``outcome`` (int8 [products]) says which are DONE.

    a: Source whose array is [products, M, K]; b: likewise [products, N, K]; c: float32 [products, M, N] or empty; out:
    [products, M, N]. ``how``: Constants.
    A product is LEFT where they exclude its exponents. ``keys`` (uint32 [products, 4]) are their own.
    """
    for i in range(outcome.size):
        fits, low = _pack(_product_of(a, i), sequence, how.tops[0], how.factor, True, work)
        if fits:
            if c.size:
                _begin(c[i], work)
            _truncate_panels(
                work.rows, low, _product_of(b, i), 0, 0, work.done.size, sequence.slots, sequence.order, how,
                _draw_of(draw, keys, i), work.state, work.buffers, work.done,
            )  # fmt: skip
            outcome[i] = _write(work, sequence, out[i])


@kernel
def round_batch(a, b, c, sequence, unit, draw, keys, work, out, outcome):  # type: ignore[no-untyped-def]
    """Write those that are LEFT by the rounding kernel; arguments are those of ``truncate_batch``."""
    for i in range(outcome.size):
        if outcome[i] != LEFT:
            continue
        _, low = _pack(_product_of(a, i), sequence, EMPTY, unit.factor, False, work)
        work.done[:] = False
        if c.size:
            _begin(c[i], work)
        _round_panels(
            work.rows, low, _product_of(b, i), 0, 0, work.done.size, sequence.slots, sequence.order,
            unit.terms == TRUNCATE, sequence.block, unit, _draw_of(draw, keys, i), work.state, work.buffers, work.done,
        )  # fmt: skip
        work.done[:] = True
        outcome[i] = _write(work, sequence, out[i])


def run_batch(
    a: Source, b: Source, c: np.ndarray, slabs: Slabs, fast: Constants | None, unit: Unit, promotion: Promotion,
    reduction: Reduction, draw: Draw, keys: np.ndarray, out: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Write the products of a batch to out [products, M, N]; return which are DONE, bool [products].

    Args:
        a: Its array is [products, M, K].
        b: [products, N, K].
        c: float32 [products, M, N], where sums begin, or empty.
        slabs: The order of a product that ``is_small``.
        fast, unit, promotion, reduction, draw: As in Job.
        keys: uint32 [products, 4], the words of each product's key.
        out: float32 or float64.
    """
    count, m, n = out.shape
    sequence = Sequence(slabs.whole.slots, slabs.whole.order, slabs.block, slabs.parts, reduction)
    outcome = np.full(count, LEFT, np.int8)

    def task(start: int, stop: int) -> None:
        part = slice(start, stop)
        rows, columns = a._replace(array=np.ascontiguousarray(a.array[part])), b._replace(array=b.array[part])
        for run, how in ((truncate_batch, fast), (round_batch, unit)):
            if how is not None and (outcome[part] == LEFT).any():
                work = _work(m, n, sequence, how, promotion)
                addend = c[part] if c.size else c
                run(rows, columns, addend, sequence, how, draw, keys[part], work, out[part], outcome[part])

    pool.run(task, count, 1, m * -(-n // LANES) * LANES * sequence.slots.size >> 4)
    return outcome == DONE


def _work(m: int, n: int, sequence: Sequence, how: Constants | Unit, promotion: Promotion) -> Work:
    """Return this thread's memory for a product [M, N]."""
    rows, panels, slots = -(-m // 4) * 4, -(-n // LANES), sequence.slots.size
    narrow = isinstance(how, Constants)
    dtype = np.float32 if isinstance(how, Constants) and how.mask.itemsize == 4 else np.float64
    words = sequence.order.ends.size * ((sequence.block + 31) // 32)
    size, sums, none = (slots + LANES) * rows, rows * LANES, np.zeros((panels, 0), np.float32)
    return Work(
        rows=rows_of("narrow", slots, words, rows, dtype),
        low=np.empty(rows, np.int32),
        marks=np.empty(rows, np.int32),
        raw=scratch("rows raw", size, np.float32),
        scales=np.zeros(0, np.float32),
        state=State(
            scratch("chains", panels * sums, dtype).reshape(panels, sums),
            scratch("totals", panels * sums, np.float64).reshape(panels, sums),
            scratch("parts", panels * sums * sequence.parts, np.float64).reshape(panels, -1),
            np.empty((panels, LANES), np.int32),
            np.empty(panels, np.int64),
            np.empty(panels, np.int64),
            none[0],
            none,
            promotion,
        ),
        buffers=buffers_of(slots, words, dtype, np.int8 if narrow else np.int16, drawing_rows=rows if narrow else 0),
        done=np.empty(panels, np.bool_),
    )
