"""Matrix products of fused units on the CPU: which kernels can take a unit, and with which constants."""

import math

import numpy as np
import torch
from torch import Tensor

from fmtsim.cpu.cast.words import key_words
from fmtsim.cpu.gemm.groups import groups_of
from fmtsim.cpu.gemm.operands import EMPTY, Source, is_fixed, source_of
from fmtsim.cpu.gemm.packing import HAS_INF, HAS_NAN
from fmtsim.cpu.gemm.panels import Constants
from fmtsim.cpu.gemm.remaining import Remaining
from fmtsim.cpu.gemm.slabs import Slabs, chain_scales, slabs_of
from fmtsim.cpu.gemm.sums import MODES, grid_of, promotion_of, reduction_of
from fmtsim.cpu.gemm.tiles import Job, run_tiles
from fmtsim.cpu.gemm.wide import CUT, FLOOR, NEAREST, Draw, Unit
from fmtsim.cpu.runtime.simd import LANES
from fmtsim.errors import ArgumentError
from fmtsim.formats.spec import FloatFormat
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan

_NO_FLOATS = np.zeros(0, np.float32)
Scales = tuple[Tensor | None, Tensor | None]


def fast_path(unit: Datapath, a: Source, b: Source, limits: tuple[int, int]) -> Constants | None:
    """Return how the floor kernels run a unit on these operands; None where they cannot."""
    f, block, kept = unit.fraction_bits, unit.block, unit.accumulator.mantissa_bits
    if unit.term_rounding != "toward_zero" or unit.rounding.mode != "toward_zero" or f is None or block is None:
        return None
    eps = max(a.bits + b.bits, f + 2, kept + 1) + 1
    room = f + _head(unit) + math.ceil(math.log2(block + 1))
    span = a.top + b.top - a.emin - b.emin
    inside = is_fixed(a) and is_fixed(b) and a.emin + b.emin >= limits[0] and a.top + b.top <= limits[1]
    if room <= 22 and a.bits + eps <= 24 and kept <= 20 and inside and span < 80 - f:
        single = np.float32(1 + 2.0**-eps), f, np.int32(-1 << (23 - kept))
        return Constants(block, *single, np.int8(-2 - span), (a.top, b.top), *limits)
    if room <= 51 and a.bits + eps <= 53:
        double = np.float64(1 + 2.0**-eps), f, np.int64(-1 << (52 - kept))
        return Constants(block, *double, np.int8(0), (EMPTY, EMPTY), *limits)
    return None


def _head(unit: Datapath) -> int:
    """Return the bits of a term above its exponent: significands of two factors, or of four, each below 2."""
    return 2 if unit.scale is None else 4


def wide_unit(unit: Datapath, a: Source, b: Source) -> Unit | None:
    """Return a datapath as the wide kernel takes it; None where float64 lanes cannot hold it."""
    f, kept = unit.fraction_bits, unit.accumulator.mantissa_bits
    if f is None or unit.block is None or unit.group > 1 or unit.signed_zero:
        return None
    terms = {"toward_zero": CUT, "down": FLOOR}.get(unit.term_rounding, NEAREST)
    enlarged = unit.term_rounding in ("toward_zero", "nearest_away")
    eps = max(a.bits + b.bits, f + 3, kept + 2) + 1 if enlarged else 0
    if f + _head(unit) + math.ceil(math.log2(unit.block + 1)) > 51 or a.bits + eps > 53 or a.bits + b.bits > 53:
        return None
    return _numbers(unit, terms, np.float64(1 + 2.0**-eps if enlarged else 1))


def _numbers(unit: Datapath, terms: int, factor: np.floating) -> Unit:
    assert unit.fraction_bits is not None
    lowest = -360 if unit.min_exponent is None else max(unit.min_exponent, -360)
    mode, grid = MODES[unit.rounding.mode], grid_of(unit.accumulator)
    return Unit(terms, unit.fraction_bits, np.int32(lowest), mode, grid, np.float64(factor))


def fused(a: Tensor, b: Tensor, c: Tensor | None, scales: Scales, spec: GemmSpec, key: RandomKey, out: Tensor) -> None:
    """Write the product of a fused unit to out, as docs/matmul.md says; the arguments are those of ``gemm``."""
    unit, plan = spec.datapath, spec.plan
    assert isinstance(unit, Datapath) and isinstance(spec.a, FloatFormat) and isinstance(spec.b, FloatFormat)
    x, y = source_of(a, spec.a, unit, scales[0]), source_of(b, spec.b, unit, scales[1])
    k = a.shape[1]
    slabs = slabs_of(k, unit, plan)
    groups = groups_of(unit, x, y)
    lanes = wide_unit(unit, x, y) if groups is None else _numbers(unit, CUT, groups.factor)
    chains = _promotion_scales(scales, slabs, plan)
    draw = Draw(key_words(key), unit.rounding.bits, 0, 0, *out.shape)
    promotion = promotion_of(spec)
    reduction = reduction_of(plan, out.dtype == torch.float64)
    remaining = Remaining(a, b, c, scales, chains, spec, slabs, promotion, reduction, draw, out)
    if lanes is None:
        remaining.run(np.arange(out.shape[0]), np.arange(out.shape[1]))
        return
    begins_at_c = c is not None and not reduction.in_place
    fast = fast_path(unit, x, y, _limits(unit, k)) if not begins_at_c and groups is None else None
    job = Job(
        a=x,
        b=y,
        k=k,
        slabs=slabs,
        fast=None if fast is None else fast._replace(block=slabs.block),
        unit=lanes,
        groups=groups,
        promotion=promotion,
        scales=chains,
        reduction=reduction,
        draw=draw,
        out=out.numpy(),
        c=None if c is None else c.numpy(),
        row_marks=np.zeros(out.shape[0], np.int32),
        column_marks=np.zeros(-(-out.shape[1] // LANES) * LANES, np.int32),
    )
    run_tiles(job)
    if job.c is not None:
        job.row_marks[~np.isfinite(job.c).all(1)] |= HAS_INF
    _mend(job, remaining)


def _mend(job: Job, remaining: Remaining) -> None:
    """Compute what has NaN or Inf among its operands: NaN is the whole row's or column's, the rest one by one."""
    rows, columns = job.row_marks, job.column_marks[: job.out.shape[1]]
    infinite = [np.flatnonzero(marks == HAS_INF) for marks in (rows, columns)]
    remaining.run(infinite[0], np.arange(columns.size))
    remaining.run(np.arange(rows.size), infinite[1])
    job.out[(rows & HAS_NAN) != 0] = np.nan
    job.out[:, (columns & HAS_NAN) != 0] = np.nan


def _limits(unit: Datapath, k: int) -> tuple[int, int]:
    """Return the smallest and largest product exponent for which no sum leaves the accumulator's normal range."""
    fmt = unit.accumulator
    lowest = fmt.min_exponent - fmt.mantissa_bits + (unit.fraction_bits or 0)
    lowest = max(lowest, fmt.min_exponent)  # a subnormal sum has no exponent of its own
    lowest = lowest if unit.min_exponent is None else max(lowest, unit.min_exponent)
    return lowest, fmt.max_exponent - 1 - _head(unit) - k.bit_length()


def _promotion_scales(scales: Scales, slabs: Slabs, plan: GemmPlan) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales of every chain, [chains, M] and [chains, N], where a plan multiplies chains by scales."""
    if not plan.scaled_promotion:
        return _NO_FLOATS, _NO_FLOATS
    if scales[0] is None or scales[1] is None:
        raise ArgumentError("a plan with scaled_promotion needs scales; call scaled_mm, or pass another plan")
    return chain_scales(scales, slabs, plan)
