# SPDX-License-Identifier: Apache-2.0
"""Products of integers: exact, by float32 multiply-adds, with a sum of up to 32 bits that wraps or saturates.

A product of 8-bit integers is at most 2^14, so that 128 of them added to M = 1.5 * 2^23 stay in the binade of M, where
float32 counts in ones: the running sum is exact, and its bits minus those of M are the sum as an int32.
"""

import numpy as np
import torch
from torch import Tensor

from fmtsim.cpu.gemm.accumulate import PART_END
from fmtsim.cpu.gemm.ieee_chains import Scales, Tile, each_tile
from fmtsim.cpu.gemm.panels import slabs_of
from fmtsim.cpu.runtime.jit import device, kernel
from fmtsim.cpu.runtime.pool import scratch
from fmtsim.cpu.runtime.simd import (
    COLUMNS,
    LANES,
    PARTS,
    and_,
    as_i32,
    ashr,
    broadcast,
    fma,
    iadd,
    isub,
    load,
    splat,
    store,
    where_below,
    xor,
)
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import IntegerDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan

_RUN = 128
_MAGIC = 1.5 * 2.0**23
_MAGIC_BITS = 0x4B400000
_HIGH = (1 << 31) - 1


def covers(spec: GemmSpec, k: int) -> bool:
    """Return True if an int32 holds the sums, and that of every block, which a unit that saturates adds at once."""
    unit = spec.datapath
    if not isinstance(unit, IntegerDatapath) or unit.accumulator_bits > 32:
        return False
    return not unit.saturate or min(unit.block, k) <= 1 << 16


def gemm(a: Tensor, b: Tensor, c: Tensor | None, _: Scales, spec: GemmSpec, __: RandomKey, out: Tensor) -> None:
    """Write int32 sums of int8 products to out; the arguments are those of the engine's ``gemm``."""
    unit, plan, result = spec.datapath, spec.plan, out.numpy()
    assert isinstance(unit, IntegerDatapath)
    addend = None if c is None else c.detach().to(torch.int32).numpy()
    blocks, parts = _blocks(a.shape[1], unit, plan)
    promote = unit.saturate and plan.promote_every is not None
    limits, unused = np.array(unit.limits, np.int32), 32 - unit.accumulator_bits

    def compute(tile: Tile) -> None:
        size = tile.height * COLUMNS
        acc, total = scratch("chains", size, np.int32), scratch("totals", size, np.int32)
        sums = scratch("parts", parts * size, np.int32)
        acc[:], total[:] = 0, 0
        if addend is not None:
            tile.part_of(total if promote else acc)[:] = addend[tile.row, tile.column]
        add_integers(tile.rows, tile.panel, blocks, unit.saturate, limits, promote, acc, total, sums)
        total_of_parts = _reduced(sums.reshape(parts, size), plan, unit)
        if not unit.saturate:  # modulo 2^32 until here: the lower bits, with the sign of the highest of them
            total_of_parts = total_of_parts << unused >> unused
        result[tile.row, tile.column] = tile.part_of(total_of_parts)

    each_tile(a, b, np.float32, compute)


def _blocks(k: int, unit: IntegerDatapath, plan: GemmPlan) -> tuple[np.ndarray, int]:
    """Return the blocks as int64 [blocks][4]: first product, behind the last, what ends, and the part; and all parts.

    Sums modulo 2^32 are the same in any order.
    """
    if not unit.saturate:
        first = np.arange(0, k, _RUN)
        stop = np.minimum(first + _RUN, k)
        return np.stack([first, stop, (stop == k) * PART_END, first * 0], 1), 1
    slabs = slabs_of(k, unit, plan)
    order = slabs.whole.order
    slots = slabs.whole.slots.reshape(order.ends.size, -1)
    first = slots[:, 0].astype(np.int64)
    return np.stack([first, first + (slots >= 0).sum(1), order.ends, order.parts], 1), slabs.parts


def _reduced(parts: np.ndarray, plan: GemmPlan, unit: IntegerDatapath) -> np.ndarray:
    """Add the parts [parts][.] as a plan says; only sums that saturate come in more than one."""

    def plus(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.clip(x.astype(np.int64) + y, *unit.limits)

    if plan.reduce == "serial" or len(parts) == 1:
        result, rest = parts[0], list(parts[1:])
    else:
        half, last = -(-len(parts) // 2), len(parts) - 1
        result = parts[last]
        rest = [plus(parts[i], parts[i + half]) if i + half < last else parts[i] for i in range(half)]
    for part in rest:
        result = plus(result, part)
    return result


@device
def _plus(a, b, saturate, limits):  # type: ignore[no-untyped-def]
    """Return a + b modulo 2^32, or clamped to the accumulator's limits, int32 [2]."""
    s = iadd(a, b)
    if not saturate:
        return s
    limit = xor(ashr(a, splat(np.int32(31))), splat(np.int32(_HIGH)))  # on the side of a
    s = where_below(and_(xor(a, s), xor(b, s)), splat(np.int32(0)), limit, s)
    low, high = splat(limits[0]), splat(limits[1])
    return where_below(s, low, low, where_below(high, s, high, s))


@device
def _join(acc, at, s, saturate, limits):  # type: ignore[no-untyped-def]
    """Add to a running sum."""
    store(acc, at, _plus(load(acc, at), s, saturate, limits))


@kernel
def add_integers(rows, panel, blocks, saturate, limits, promote, acc, total, parts):  # type: ignore[no-untyped-def]
    """Add the products of all blocks to the running chains acc, int32 [height][64], and keep the parts.

    rows [height][K] and panel [K][64] are float32. With ``promote`` chains join ``total``.
    """
    height, k = acc.size // COLUMNS, panel.size // COLUMNS
    magic, magic_bits = splat(np.float32(_MAGIC)), splat(np.int32(_MAGIC_BITS))
    for index in range(len(blocks)):
        for part in range(height // 4 * PARTS):
            m, n = part // PARTS * 4, part % PARTS * LANES
            p, at = m * k, m * COLUMNS + n
            sum0 = splat(np.int32(0))
            sum1 = sum2 = sum3 = sum0
            for start in range(blocks[index, 0], blocks[index, 1], _RUN):
                # 1. up to 128 products onto M, which stay in its binade: exact
                s0 = s1 = s2 = s3 = magic
                for i in range(start, min(start + _RUN, blocks[index, 1])):
                    v = load(panel, i * COLUMNS + n)
                    s0 = fma(broadcast(rows, p + i), v, s0)
                    s1 = fma(broadcast(rows, p + k + i), v, s1)
                    s2 = fma(broadcast(rows, p + 2 * k + i), v, s2)
                    s3 = fma(broadcast(rows, p + 3 * k + i), v, s3)
                # 2. the bits above M's are the sum as an int32
                sum0, sum1 = iadd(sum0, isub(as_i32(s0), magic_bits)), iadd(sum1, isub(as_i32(s1), magic_bits))
                sum2, sum3 = iadd(sum2, isub(as_i32(s2), magic_bits)), iadd(sum3, isub(as_i32(s3), magic_bits))
            # 3. joined to the running sum, wrapping or saturating
            _join(acc, at, sum0, saturate, limits)
            _join(acc, at + COLUMNS, sum1, saturate, limits)
            _join(acc, at + 2 * COLUMNS, sum2, saturate, limits)
            _join(acc, at + 3 * COLUMNS, sum3, saturate, limits)
        if blocks[index, 2]:
            place, keep = blocks[index, 3] * acc.size, blocks[index, 2] == PART_END
            _end(acc, total, parts, place, keep, saturate, limits, promote)


@device
def _end(acc, total, parts, place, keep, saturate, limits, promote):  # type: ignore[no-untyped-def]
    """Let a chain join the outer sum where something promotes, and keep the sum of a part that ends."""
    zero = splat(np.int32(0))
    for at in range(0, acc.size, LANES):
        result = load(acc, at)
        if promote:
            result = _plus(load(total, at), result, saturate, limits)
            store(total, at, result)
        store(acc, at, zero)
        if keep:
            store(parts, place + at, result)
            store(total, at, zero)
