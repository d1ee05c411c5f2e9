"""The general path of matrix products: every unit and every number, on all tiles or on those that a fast path left."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.gemm.job import TILE, Job
from fmtsim.cuda.gemm.tile import TILE_BYTES, TILE_WIDTH, tile_defines, tile_variants
from fmtsim.cuda.gemm.unit import LIMBS, is_plain, outer_format, problem_of, sums_of
from fmtsim.cuda.runtime import program as runtime
from fmtsim.cuda.runtime.program import Defines
from fmtsim.formats.representable import is_representable
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.spec.datapath import Datapath, IntegerDatapath, PairwiseDatapath, TwoStageDatapath
from fmtsim.spec.gemm_spec import GemmSpec

_SIDE = 16  # rows and columns of a block of threads with an output each
_WALKING = 8  # blocks a multiprocessor where a fast path has left a few tiles, as a rule none
_UNITS = {TwoStageDatapath: 0, PairwiseDatapath: 1, IntegerDatapath: 2}  # the macro UNIT


def covers(spec: GemmSpec, a: torch.dtype, b: torch.dtype, k: int) -> bool:
    """Say whether the kernels take a unit, its plan and operands of these formats and dtypes, whatever the numbers."""
    unit, plan = spec.datapath, spec.plan
    if isinstance(unit, IntegerDatapath):
        integers = isinstance(spec.a, IntFormat) and isinstance(spec.b, IntFormat)
        return integers and a == b == torch.int8 and min(unit.block, k) <= 1 << 36
    if not isinstance(spec.a, FloatFormat) or not isinstance(spec.b, FloatFormat):
        return False
    if not is_plain(plan.partial):
        return False
    narrow = is_representable(spec.a, torch.float32) and is_representable(spec.b, torch.float32)
    if isinstance(unit, TwoStageDatapath):
        return narrow and max(unit.fraction_bits, unit.sum_bits) + 5 + unit.block.bit_length() <= 62
    if isinstance(unit, PairwiseDatapath):
        return narrow
    if not is_plain(unit.accumulator) or not is_plain(outer_format(spec)):
        return False
    if plan.scaled_promotion and not is_representable(unit.accumulator, torch.float32):
        return False
    return is_chain(spec) or sums_of(spec, k, True) is not None


def is_chain(spec: GemmSpec) -> bool:
    """Say whether a unit is a chain of fused multiply-adds in float32 or float64."""
    unit = spec.datapath
    if not isinstance(unit, Datapath) or unit.block != 1 or unit.fraction_bits is not None or unit.scale is not None:
        return False
    acc = unit.accumulator
    dtype = {(8, 23, 127): torch.float32, (11, 52, 1023): torch.float64}.get(
        (acc.exponent_bits, acc.mantissa_bits, acc.exponent_bias)
    )
    if dtype is None or unit.group > 1 or unit.rounding.mode != "nearest_even":
        return False
    return all(isinstance(fmt, FloatFormat) and is_representable(fmt, dtype) for fmt in (spec.a, spec.b))


def ignores_order(spec: GemmSpec) -> bool:
    """Say whether every order of sums gives the same bits: integers modulo 2^32, written without parts."""
    return isinstance(spec.datapath, IntegerDatapath) and not spec.datapath.saturate


def run(job: Job, sums: Tensor, marks: Tensor | None) -> None:
    """Write the sums [parts, M, N] of the tiles that are marked, of all tiles where ``marks`` is None."""
    unit = job.spec.datapath
    if ignores_order(job.spec):
        _integers(job, sums)
    elif not isinstance(unit, Datapath):
        _launch(job, (marks, sums), "general_stages.cu", "staged_product", (("UNIT", str(_UNITS[type(unit)])),), _SIDE)
    elif is_chain(job.spec):
        double = sums.dtype == torch.float64
        defines = _chain_defines(double, job.promotes, unit.signed_zero)
        _launch(job, (marks, sums), "general_chain.cu", "chain_product", defines, 64 if double else 128)
    else:
        _fused(job, sums, marks)


def _fused(job: Job, sums: Tensor, marks: Tensor | None) -> None:
    """Run a fused unit: by tiles in float64 where it can, what is left (NaN and Inf, or all) in integers."""
    m, n, k = job.shape
    defines, tile = tile_defines(job.spec, k, job.order.block), TILE
    if defines is not None:
        left = torch.zeros(-(-m // TILE_WIDTH), -(-n // TILE_WIDTH), dtype=torch.uint8, device=sums.device)
        _launch(job, (marks, left, sums), "general_tile.cu", "tiled_product", defines, TILE_WIDTH, shared=TILE_BYTES)
        marks, tile = left, TILE_WIDTH
    how = sums_of(job.spec, k, job.c is not None and not job.promotes)
    assert how is not None
    _launch(
        job, (marks, sums), "general.cu", "general_product", how.defines, _SIDE, tile=tile, grid=how.grid, walks=True
    )


def _launch(
    job: Job, results: tuple[Tensor | None, ...], file: str, name: str, defines: Defines, width: int,
    *, tile: int = TILE, grid: int = 0, shared: int = 0, walks: bool = False,
) -> None:  # fmt: skip
    """Launch a kernel whose blocks of 256 threads compute squares of ``width`` outputs; a mark stands for ``tile``.

    ``results`` begin with the marks; ``walks`` says that a block looks for more squares where these are given.
    """
    m, n, _ = job.shape
    order, index = job.order, runtime.device_index(job.a)
    kernel = runtime.kernel(file, name, index, defines)
    blocks = -(-m // width) * -(-n // width)
    if walks and results[0] is not None:
        blocks = min(blocks, _WALKING * runtime.multiprocessors(index))
    kernel(
        blocks, 256, job.a, job.b, job.c, job.scale_a, job.scale_b, order.source, order.ends,
        order.scale_places, order.part_blocks, *results, problem_of(job, tile, grid), shared=shared,
    )  # fmt: skip


def _integers(job: Job, sums: Tensor) -> None:
    m, n, k = job.shape
    kernel = runtime.kernel("general_integer.cu", "integer_product", runtime.device_index(job.a), ())
    kernel(-(-m // TILE) * -(-n // TILE), 256, job.a, job.b, job.c, sums, np.int64(k), problem_of(job, TILE))


def _chain_defines(double: bool, promotes: bool, signed: bool) -> Defines:
    names = {"DOUBLE": double, "PROMOTES": promotes, "SIGNED": signed}
    return tuple((name, str(int(value))) for name, value in names.items())


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield every specialisation of the kernels."""
    for wide in (0, 1):
        for limbs in (0, *LIMBS):
            yield "general.cu", "general_product", (("WIDE", str(wide)), ("LIMBS", str(limbs)))
    for defines in tile_variants():
        yield "general_tile.cu", "tiled_product", defines
    for unit in _UNITS.values():
        yield "general_stages.cu", "staged_product", (("UNIT", str(unit)),)
    for code in range(8):
        defines = _chain_defines(bool(code & 1), bool(code & 2), bool(code & 4))
        yield "general_chain.cu", "chain_product", defines
    yield "general_integer.cu", "integer_product", ()
