"""Products of units that cut or round terms, and round a block's sum to nearest or to few exponents.

cut.cu has the method, one float64 multiply-add a product. Here is which units it takes; those that cut both
terms and sums toward zero, to many exponents, go faster in gemm_floor.py.
"""

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.parameters import draw_of
from fmtsim.cuda.gemm.chain import joins_float32
from fmtsim.cuda.gemm.job import TILE, Job
from fmtsim.cuda.gemm.unit import MODES, SINGLES, TYPES, is_plain, macros, problem_of, range_of
from fmtsim.cuda.runtime import program as runtime
from fmtsim.cuda.runtime.program import Defines
from fmtsim.formats.representable import is_representable
from fmtsim.formats.spec import FloatFormat
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.gemm_spec import GemmSpec

_THREADS: Final = 256
_STOCHASTIC: Final = MODES.index("stochastic")
_EVEN: Final = MODES.index("nearest_even")
_ZERO: Final = MODES.index("toward_zero")
_DOWN: Final = MODES.index("down")
_AHEAD = (_STOCHASTIC,)  # roundings of sums whose kernels have registers left for the macro AHEAD
_BLOCKS: Final = (4, 32)  # shortest and longest
_SUMS: Final = ("nearest_even", "toward_zero", "stochastic")
_FARTHEST: Final = 200  # exponents of accumulators and bounds of the alignment lie within
_NARROW: Final = -60  # lowest exponent above which sums are expected to become subnormal


class _Shape(NamedTuple):
    """How the kernels run a unit: macros, and the numbers of ``Limits``."""

    block: int
    fraction: int
    kept: int
    clamped: bool
    promotes: bool
    terms: int
    mode: int
    eps: int
    emins: tuple[int, int]
    emin: int
    emax: int
    bound: int | None
    bits: int
    odd: bool

    @property
    def swapped(self) -> bool:
        """Whether the kernel takes b first."""
        return self.mode == _STOCHASTIC

    def record(self, side: int) -> int:
        """Return the bytes of a block of a panel (cut.cuh)."""
        return self.block * TILE * (10 if side else 12) + TILE * 4

    @property
    def stage(self) -> int:
        """Bytes of a block of both operands."""
        return self.record(0) + self.record(1)

    def defines(self, stages: int, aligned: bool) -> Defines:
        """Return the macros of the product; ``aligned`` says that its columns are a multiple of 64."""
        aligned = aligned or not self.swapped
        return macros(
            BLOCK=self.block, FRACTION=self.fraction, KEPT=self.kept, CLAMPED=int(self.clamped),
            PROMOTES=int(self.promotes), TERMS=self.terms, ROUND=self.mode, BITS=self.bits, ODD=int(self.odd),
            ALIGNED=int(aligned), STAGES=stages, AHEAD=int(self.mode in _AHEAD and self.terms != _EVEN and stages > 2),
        )  # fmt: skip

    def operand(self, side: int, dtype: torch.dtype) -> Defines:
        """Return the macros that prepare an operand."""
        return macros(
            BLOCK=self.block, FRACTION=self.fraction, TYPE=TYPES.index(dtype), SECOND=side, EMIN=self.emins[side],
            ENLARGED=0 if side else self.eps, TERMS=self.terms,
        )  # fmt: skip

    def limits(self) -> bytes:
        """Return the structure ``Limits``."""
        least = 0 if self.bound is None else (self.bound - self.fraction + 52 + 1023) << 20 | 1 << 19
        enlarged = 1.0 + 2.0**-self.eps if self.eps else 1.0
        return struct.pack("<d4i8x", enlarged, self.emin, self.emax, least, (self.emin + 1023) << 20)


def supports(job: Job) -> bool:
    """Say whether the kernels take a product, from facts of the host alone."""
    if job.a.dtype not in SINGLES or job.b.dtype not in SINGLES or not job.out.numel():
        return False
    shape = shape_of(job.spec, job.order.block)
    return shape is not None and _stages(shape, runtime.device_index(job.a)) >= 2


def _stages(shape: _Shape, index: int) -> int:
    return min(4, (runtime.shared_limit(index) - 1024) // shape.stage)


@lru_cache(maxsize=1024)
def shape_of(spec: GemmSpec, block: int) -> _Shape | None:
    """Return how the kernels run blocks of a length, None where they do not."""
    unit = spec.datapath
    if not isinstance(unit, Datapath) or not _cuts(unit) or not _BLOCKS[0] <= block <= _BLOCKS[1]:
        return None
    formats = [fmt for fmt in (spec.a, spec.b) if isinstance(fmt, FloatFormat)]
    if len(formats) < 2 or not all(is_representable(fmt, torch.float32) for fmt in formats):
        return None
    promotes = spec.plan.promote_every is not None or unit.promote_every is not None
    acc, fraction = unit.accumulator, unit.fraction_bits
    if fraction is None or fraction > 40 or not is_plain(acc) or (promotes and not joins_float32(spec)):
        return None
    farthest = max(-acc.min_exponent, acc.max_exponent, abs(unit.min_exponent or 0))
    how = unit.rounding
    if how.mode == "stochastic":
        formats.reverse()
        odd = how.variant == "b"
        if how.variant == "c" or how.layout != "word" or how.bits + odd > min(32, 51 - acc.mantissa_bits):
            return None
    first, second = map(range_of, formats)
    terms = MODES.index(unit.term_rounding)
    eps = max(first.bits + second.bits, fraction + 2, acc.mantissa_bits + 1) + 1 if terms == _ZERO else 0
    if terms == _EVEN and not _fits(first.bits, second.bits, fraction, block):
        return None
    if farthest > _FARTHEST or acc.mantissa_bits > 25 or first.bits + eps > 53:
        return None
    return _Shape(
        block=block,
        fraction=fraction,
        kept=acc.mantissa_bits,
        clamped=acc.min_exponent > _NARROW,
        promotes=promotes,
        terms=terms,
        mode=MODES.index(how.mode),
        eps=eps,
        emins=((unit.operand or formats[0]).min_exponent, (unit.operand or formats[1]).min_exponent),
        emin=acc.min_exponent,
        emax=acc.max_exponent,
        bound=unit.min_exponent,
        bits=how.bits if how.mode == "stochastic" else 1,
        odd=how.mode == "stochastic" and how.variant == "b",
    )


def _cuts(unit: Datapath) -> bool:
    cut = unit.term_rounding in ("toward_zero", "down", "nearest_even") and unit.rounding.mode in _SUMS
    return cut and unit.group == 1 and unit.scale is None and not unit.signed_zero


def _fits(a_bits: int, b_bits: int, fraction: int, block: int) -> bool:
    """Say whether the terms of a block to nearest, and one, are less than 2^31 of the grid's places."""
    # Two significands of a and b bits multiply to at most (2^a - 1) (2^b - 1) / 2^(a + b - 2), below which the grid has
    # `fraction` places; half of one is what rounding adds.
    largest = ((1 << a_bits) - 1) * ((1 << b_bits) - 1) << fraction
    return block * ((largest >> (a_bits + b_bits - 2)) + 1) + 1 < 1 << 31


def run(job: Job, sums: Tensor, marks: Tensor) -> None:
    """Write the sums [parts, M, N] of all tiles but those that it marks."""
    index, order = runtime.device_index(job.a), job.order
    shape = shape_of(job.spec, order.block)
    assert shape is not None and isinstance(job.spec.datapath, Datapath)
    operands, stages = _operands(job, shape), _stages(shape, index)
    panels = [-(-x.shape[0] // TILE) for x in operands]
    flags = torch.zeros(sum(panels), dtype=torch.int32, device=job.a.device)
    left = _prepared(job, shape, operands[0], 0, flags[: panels[0]])
    right = _prepared(job, shape, operands[1], 1, flags[panels[0] :])
    runtime.kernel("cut.cu", "cut_product", index, shape.defines(stages, _aligned(job)))(
        (panels[0] * panels[1], 1, len(order.parts)), _THREADS, left, right, flags, job.c, order.ends,
        order.part_blocks, np.int32(order.blocks), marks, sums, shape.limits(),
        draw_of(job.spec.datapath.rounding, job.random), problem_of(job, TILE),
        shared=stages * shape.stage,
    )  # fmt: skip


def _operands(job: Job, shape: _Shape) -> tuple[Tensor, Tensor]:
    return (job.b, job.a) if shape.swapped else (job.a, job.b)


def _aligned(job: Job) -> bool:
    return job.shape[1] % 64 == 0


def _prepared(job: Job, shape: _Shape, x: Tensor, side: int, flags: Tensor) -> Tensor:
    """Return an operand's records (cut.cuh)."""
    order, panels = job.order, flags.numel()
    records = torch.empty(panels * order.blocks * shape.record(side), dtype=torch.uint8, device=x.device)
    kernel = runtime.kernel(
        "cut_prepare.cu", "cut_prepare", runtime.device_index(x), shape.operand(side, x.dtype)
    )  # fmt: skip
    kernel(
        (panels, order.blocks), _THREADS, x, *map(np.int64, x.stride()), np.int32(x.shape[0]), order.source,
        np.int32(order.blocks), records, flags,
    )  # fmt: skip
    return records


def programs(job: Job) -> tuple[tuple[str, Defines], ...]:
    """Return the files and macros of all kernels that ``run`` launches for a product that ``supports`` takes."""
    shape = shape_of(job.spec, job.order.block)
    assert shape is not None
    sides = (shape.operand(side, x.dtype) for side, x in enumerate(_operands(job, shape)))
    product = "cut.cu", shape.defines(_stages(shape, runtime.device_index(job.a)), _aligned(job))
    return (*(("cut_prepare.cu", defines) for defines in sides), product)


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield a representative of every specialisation of the kernels."""
    for block, clamped, promotes, terms, mode in (
        (16, 0, 0, _ZERO, _EVEN), (16, 1, 0, _ZERO, _EVEN), (16, 1, 0, _ZERO, _ZERO), (16, 0, 1, _ZERO, _EVEN),
        (16, 1, 1, _ZERO, _EVEN), (32, 0, 0, _ZERO, _EVEN), (16, 0, 0, _DOWN, _EVEN), (16, 0, 0, _DOWN, _ZERO),
        (4, 0, 0, _ZERO, _EVEN), (16, 0, 0, _ZERO, _STOCHASTIC), (16, 1, 0, _ZERO, _STOCHASTIC),
        (16, 0, 0, _EVEN, _EVEN), (16, 1, 1, _EVEN, _EVEN), (16, 1, 0, _EVEN, _ZERO), (16, 0, 0, _EVEN, _STOCHASTIC),
        (32, 0, 0, _EVEN, _EVEN), (4, 0, 0, _EVEN, _EVEN),
    ):  # fmt: skip
        shape = _Shape(
            block, 25 if terms != _EVEN else 24, 10 if clamped else 7, bool(clamped), bool(promotes), terms, mode,
            28 if terms == _ZERO else 0, (-126, -126), -126, 127, None, 16, False,
        )  # fmt: skip
        for stages in (2, 4) if mode in _AHEAD else (2,):
            yield "cut.cu", "cut_product", shape.defines(stages, True)
        for dtype in SINGLES if block == 32 else SINGLES[:1]:
            for side in (0, 1):
                yield "cut_prepare.cu", "cut_prepare", shape.operand(side, dtype)
