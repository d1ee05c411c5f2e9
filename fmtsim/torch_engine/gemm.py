# SPDX-License-Identifier: Apache-2.0
"""Matrix products of emulated units: the verb ``gemm`` of the engine (docs/matmul.md).

The outputs are cut into tiles so small that the products of one of their blocks stay in a cache. A tile goes through
all its sums before the next one begins, which keeps memory independent of the size of the product.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch

from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import Datapath, IntegerDatapath, LogDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.schedule import combination, schedule
from fmtsim.support.float64 import check_float64, from_bits
from fmtsim.torch_engine.gemm_operands import Rows, all_finite, exact
from fmtsim.torch_engine.gemm_sums import Summation, combined, unit_of
from fmtsim.torch_engine.gemm_units import integer_sums, logarithmic_sums, wrapped
from fmtsim.torch_engine.random_words import GROUP, random_integers
from fmtsim.torch_engine.reals import narrow

NAN32 = 0x7FFFFFFF
NAN64 = 0x7FFFFFFFFFFFFFFF

_ROWS_AT_ONCE = 1 << 20  # elements of an int8 operand that are turned into float64 at once


@torch.no_grad()
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    spec: GemmSpec,
    random: RandomKey | None,
    out: torch.Tensor,
) -> None:
    """Write the reduced sums of ``a b^T`` into ``out``, before the epilogue.

    Args:
        a: [M, K], any strides: float8_e4m3fn, float8_e5m2, float16, bfloat16, float32 or float64, values of ``spec.a``;
            int8 for an IntegerDatapath.
        b: [N, K], likewise.
        c: [M, N] of out's dtype, values of the accumulator, or None.
        scale_a: [M, ceil(K / g)] float32, or None: scales inside the unit where it has some (g = ``scale_block``), else
            those of a scaled promotion (g = ``promote_every``).
        scale_b: [N, ceil(K / g)] float32, or None.
        spec: The unit, the accumulation order and the formats.
        random: The key of stochastic rounding, or None.
        out: [M, N] contiguous; float32, float64 where float32 does not hold the accumulator, int32 or int64 of
            integers. NaN has all bits set but the sign; without products it is c or +0.

    The result depends on neither device, threads nor tiles. Arguments are not checked, except those that this engine
    cannot compute.

    Raises:
        ArgumentError: A two-stage unit with operands or widths that float64 does not hold.
        DtypeError: The device computes no float64.
    """
    if isinstance(spec.datapath, IntegerDatapath):
        _integers(a, b, c, spec, out)
        return
    if isinstance(spec.datapath, LogDatapath):
        logarithmic_sums(a, b, spec, out)
        return
    rows, columns, k = a.shape[0], b.shape[0], a.shape[1]
    check_float64(out.device, "the sum inside the unit", "move the operands to the CPU")
    unit = unit_of(spec, k)
    summation = Summation(spec, unit, k)
    finite = all_finite(a, b, scale_a, scale_b)
    rounding = spec.datapath.rounding if isinstance(spec.datapath, Datapath) else Rounding()
    stochastic = rounding.mode == "stochastic"
    for m, n in _tiles(rows, columns, max(1, _budget(out.device) // unit.weight), whole_rows=stochastic):
        first = m.start * columns + n.start
        shape = m.stop - m.start, n.stop - n.start
        draw = partial(_draw, random if stochastic else None, rounding, rows * columns, first, shape, out.device)
        operands, scales = _operands(a[m], b[n], scale_a, scale_b, m, n, spec, finite)
        sums = summation(operands, None if c is None else exact(c[m, n]), draw, scales)
        # float64 sums as the output's dtype, with the one NaN
        if out.dtype == torch.float64:
            out[m, n] = from_bits(torch.where(torch.isnan(sums), NAN64, sums.view(torch.int64)))
        else:
            bits = narrow(sums, torch.float32).view(torch.int32)
            out[m, n] = torch.where(torch.isnan(sums), NAN32, bits).view(torch.float32)


def _operands(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    m: slice,
    n: slice,
    spec: GemmSpec,
    finite: bool,
) -> tuple[Rows, tuple[torch.Tensor, torch.Tensor] | None]:
    """Return a tile's operands with K leading, and the scales of a scaled promotion."""
    a_t, b_t = a.t()[:, :, None], b.t()[:, None, :]
    if scale_a is None or scale_b is None:
        return Rows(a_t, b_t, finite=finite), None
    scale_a_t, scale_b_t = scale_a[m].t()[:, :, None], scale_b[n].t()[:, None, :]
    if isinstance(spec.datapath, Datapath) and spec.datapath.scale is not None:
        return Rows(a_t, b_t, scale_a_t, scale_b_t, spec.datapath.scale_block, finite), None
    return Rows(a_t, b_t, finite=finite), (exact(scale_a_t), exact(scale_b_t))


def _draw(
    random: RandomKey | None, rounding: Rounding, outputs: int, first: int, shape: tuple[int, int],
    device: torch.device, block: int,
) -> torch.Tensor | None:  # fmt: skip
    """Draw the random integers of a tile, of which output ``first`` of a block is the first."""
    if random is None:
        return None
    start = block * outputs + first
    aligned = start - start % GROUP
    count = start - aligned + math.prod(shape)
    return random_integers(random, rounding, aligned, count, device)[start - aligned :].view(shape)


def _budget(device: torch.device) -> int:
    """Return how many float64 numbers a temporary may hold: 1 MB on a CPU, more where a launch costs time."""
    return 1 << 17 if device.type == "cpu" else 1 << 19


def _tiles(rows: int, columns: int, outputs: int, whole_rows: bool) -> Iterator[tuple[slice, slice]]:
    """Yield rectangles of about that many outputs; with ``whole_rows`` their outputs follow each other in memory."""
    if whole_rows:
        width = min(columns, outputs)
        height = max(1, outputs // max(columns, 1)) if width == columns else 1
    else:
        height = min(rows, max(1, math.isqrt(outputs)))
        width = min(columns, max(1, outputs // max(height, 1)))
        height = min(rows, max(1, outputs // max(width, 1)))
    for row in range(0, rows, max(height, 1)):
        for column in range(0, columns, max(width, 1)):
            yield slice(row, min(row + height, rows)), slice(column, min(column + width, columns))


def _integers(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, spec: GemmSpec, out: torch.Tensor) -> None:
    """Write sums of integers that wrap, or are clamped after every block."""
    path = spec.datapath
    assert isinstance(path, IntegerDatapath)
    k = a.shape[1]
    size = min(max(1, _ROWS_AT_ONCE // max(k, 1)), 1 << 10)
    for m, n in _tiles(a.shape[0], b.shape[0], size * size, whole_rows=False):
        total = torch.zeros(m.stop - m.start, n.stop - n.start, dtype=torch.int64, device=out.device)
        if c is not None:
            total += c[m, n]
        if not path.saturate or (c is None and k << 14 < path.limits[1]):  # products are 2^14 at most
            out[m, n] = wrapped(total + integer_sums(a[m], b[n]), path.accumulator_bits).to(out.dtype)
            continue
        parts = schedule(k, path, spec.plan)
        promote = spec.plan.promote_every is not None
        sums: list[torch.Tensor] = []
        for part in parts:  # clamped after every block and every promotion
            outer = torch.zeros_like(total) if sums else total
            for chain in part:
                inner = torch.zeros_like(total) if promote else outer
                for indices in chain.blocks:
                    block = slice(indices[0], indices[-1] + 1)  # blocks of integers are runs of K
                    inner = _clamped_sum(inner, integer_sums(a[m][:, block], b[n][:, block]), path)
                outer = _clamped_sum(outer, inner, path) if promote else inner
            sums.append(outer)
        add = partial(_clamped_sum, path=path)
        total = combined(combination(k, spec.plan), sums.__getitem__, add) if sums else total
        out[m, n] = total.to(out.dtype)


def _clamped_sum(x: torch.Tensor, y: torch.Tensor, path: IntegerDatapath) -> torch.Tensor:
    low, high = path.limits
    total = x + y
    if path.accumulator_bits == 64:  # a sum that left int64 has another sign than both addends
        total = torch.where((x ^ total) & (y ^ total) < 0, torch.where(x < 0, low, high), total)
    return total.clamp(low, high)
