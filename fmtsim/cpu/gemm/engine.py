# SPDX-License-Identifier: Apache-2.0
"""Matrix products of emulated units: the verb ``gemm`` of the engine (docs/matmul.md), and the kernels for a product.

What depends on the spec and on K alone is computed once (``prepared``).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.cpu.cast.grid import key_words
from fmtsim.cpu.gemm import cdna, exact_integer, ieee_chains, int8
from fmtsim.cpu.gemm.accumulate import Promotion, Reduction, grid_of, promotion_of, reduction_of
from fmtsim.cpu.gemm.aligned import FLOOR, NEAREST, TRUNCATE, Draw, Nearby, Unit
from fmtsim.cpu.gemm.operand_layouts import EMPTY, HAS_INF, HAS_NAN, Source, is_fixed, limits_of, source_of
from fmtsim.cpu.gemm.operand_reads import read_array
from fmtsim.cpu.gemm.panels import SLOTS, Constants, Slabs, chain_scales, slabs_of
from fmtsim.cpu.gemm.scaled_groups import Groups, groups_of
from fmtsim.cpu.gemm.tiles import Job, is_small, run_batch, run_tiles
from fmtsim.cpu.runtime.pool import get_num_threads
from fmtsim.cpu.runtime.simd import COLUMNS
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.representable import is_representable
from fmtsim.rounding.modes import CODES
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import Datapath, IntegerDatapath, LogDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.schedule import adds_in_order
from fmtsim.support.errors import ArgumentError

NAN32, NAN64 = 0x7FFFFFFF, 0x7FFFFFFFFFFFFFFF
_NO_KEY = RandomKey(0)
_NO_ADDEND = np.zeros((0, 0, 0), np.float32)
_NO_CHAINS = (np.zeros(0, np.float32), np.zeros(0, np.float32))
Scales = tuple[Tensor | None, Tensor | None]
Method = Callable[[Tensor, Tensor, Tensor | None, Scales, GemmSpec, RandomKey, Tensor], None]


def supports_gemm(spec: GemmSpec, a: Tensor, b: Tensor) -> bool:
    """Return True if the kernels cover a product; the torch engine takes the rest."""
    return _method(spec, max(a.shape[1], 1)) is not None


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    spec: GemmSpec,
    random: RandomKey | None,
    out: Tensor,
) -> None:
    """Write the reduced sums of ``a b^T`` to out [M, N], before the epilogue.

    Shapes and dtypes are those of the engine protocol (docs/architecture.md); results depend on neither threads nor
    tiles. NaN has all bits set but the sign.
    """
    if out.numel() == 0:
        return
    method = _method(spec, a.shape[1]) if a.shape[1] else None
    if method is None:
        assert a.shape[1] == 0  # supports_gemm was asked first
        out.copy_(torch.zeros_like(out) if c is None else c)
    else:
        method(a, b, c, (scale_a, scale_b), spec, random or _NO_KEY, out)
    _write_nan(out)


def gemm_batch(
    a: Tensor, b: Tensor, spec: GemmSpec, keys: Tensor | None, out: Tensor, c: Tensor | None = None
) -> list[int]:
    """Write the products of a batch that are small and that kernels take at once; return the numbers of the others.

    Each has the bits that ``gemm`` gives it.

    Args:
        a: [products, M, K], as ``gemm`` takes each of them.
        b: [products, N, K].
        spec: Of every product.
        keys: int64 [products, 2], seed and offset of each, or None.
        out: [products, M, N], contiguous, in the dtype of the sums.
        c: [products, M, N] in the dtype of the sums, the addends, or None.
    """
    count, m, n, k = *out.shape, a.shape[2]
    unit, others = spec.datapath, list(range(count))
    plain = isinstance(unit, Datapath) and unit.scale is None and not spec.plan.scaled_promotion
    if not plain or not k or not out.numel() or count < get_num_threads():
        return others
    if _method(spec, k) is not _fused:
        return others
    product = prepared(spec, k, (False, False), out.dtype == torch.float64)
    if product.groups is not None or product.unit is None or not is_small(count, m, n, k, product.slabs):
        return others
    if c is not None and (out.dtype != torch.float32 or product.reduction.in_place):
        return others
    addend = _NO_ADDEND if c is None else c.contiguous().numpy()
    fast = product.fast if c is None or not _is_single(product.fast) else None
    draw = product.draw._replace(rows=m, columns=n)
    words = np.zeros((count, 4), np.uint32) if keys is None else keys.numpy()[:, ::-1].astype("<i8").view("<u4")
    (x, x_table), (y, y_table) = read_array(a), read_array(b)
    done = run_batch(
        product.a._replace(array=x, table=x_table), product.b._replace(array=y, table=y_table), addend, product.slabs,
        fast, product.unit, product.promotion, product.reduction, draw, words, out.numpy(),
    )  # fmt: skip
    _write_nan(out)
    return np.flatnonzero(~done).tolist()


def _is_single(fast: Constants | None) -> bool:
    """Return True if the truncating kernel sums in float32, on whose grid an addend need not be."""
    return fast is not None and fast.mask.itemsize == 4


def _write_nan(out: Tensor) -> None:
    """Give every NaN the bits that sums have for it."""
    if out.is_floating_point() and out.sum().isnan():  # Inf of both signs looks the same, and is not touched
        bits = out.view(torch.int32 if out.dtype == torch.float32 else torch.int64)
        bits.masked_fill_(out.isnan(), NAN32 if out.dtype == torch.float32 else NAN64)


@lru_cache(maxsize=1024)
def _method(spec: GemmSpec, k: int) -> Method | None:
    """Return the method for products of k terms of a spec; None where no kernel takes them."""
    unit = spec.datapath
    if isinstance(unit, IntegerDatapath):
        return int8.gemm if int8.covers(spec, k) else None
    if isinstance(unit, LogDatapath):
        return None
    fused_sums = (unit.accumulator, unit.promotion) if isinstance(unit, Datapath) else ()
    if isinstance(unit, Datapath) and unit.fraction_bits is None and unit.block != 1 and unit.promote_every is None:
        fused_sums = (replace(unit.accumulator, overflow=None), None)  # exact_integer saturates, too
    sums = (*fused_sums, spec.plan.partial)
    if not all(fmt is None or _rounds(fmt) for fmt in sums):
        return None
    if not adds_in_order(spec.plan) and not ieee_chains.covers(spec):
        return None
    if not isinstance(unit, Datapath):
        return cdna.gemm if cdna.covers(spec) else None
    rounding = unit.rounding
    if rounding.mode == "stochastic" and (rounding.variant != "a" or rounding.layout != "word"):
        return None
    # Sums of chains and parts, added in float64 and rounded to their format, have to be as if rounded once. Numbers of
    # 24 bits each are, where a sum keeps as many bits as the chains that join it; so are those of float64.
    plan, chain, outer = spec.plan, unit.accumulator, spec.outer if spec.promotes else unit.accumulator
    if plan.scaled_promotion and unit.scale is not None:
        return None  # the scales are the unit's
    if all(is_representable(fmt, torch.float32) for fmt in (chain, outer)):
        fits = outer.mantissa_bits >= chain.mantissa_bits
    else:
        one_sum = not spec.promotes and plan.split == 1 and plan.part_k is None and plan.reduce != "in_place"
        fits = chain == outer and not plan.scaled_promotion and (one_sum or grid_of(chain).kind == 64)
    if not fits:
        return None
    if ieee_chains.covers(spec):
        return ieee_chains.gemm
    narrow = is_representable(spec.a, torch.float32) and is_representable(spec.b, torch.float32)
    return _fused if narrow and exact_integer.covers(spec, unit.block or k) else None


def _rounds(fmt: FloatFormat) -> bool:
    """Return True if lanes round to a format: by Inf above its largest value, with 2^52 last places below 2^1024."""
    to_inf = fmt.infinities and fmt.overflow != "saturate"
    return to_inf and fmt.has_subnormals and fmt.nan == "ieee" and fmt.max_exponent - fmt.mantissa_bits <= 971


# Fused units: constants of their kernels.


class Prepared(NamedTuple):
    """A product of a fused unit without its data."""

    a: Source  # without arrays
    b: Source
    slabs: Slabs
    groups: Groups | None
    unit: Unit | None  # None leaves all outputs to be computed one by one
    fast: Constants | None
    promotion: Promotion
    reduction: Reduction
    draw: Draw


@lru_cache(maxsize=1024)
def prepared(spec: GemmSpec, k: int, scaled: tuple[bool, bool], double: bool) -> Prepared:
    """Return the parts of a product of k terms that do not depend on its data.

    Args:
        spec: Of the product.
        k: Its products.
        scaled: Whether each operand has scales inside the unit.
        double: Sums are float64.
    """
    unit, plan = spec.datapath, spec.plan
    assert isinstance(unit, Datapath) and isinstance(spec.a, FloatFormat) and isinstance(spec.b, FloatFormat)
    x, y = source_of(spec.a, unit, scaled[0]), source_of(spec.b, unit, scaled[1])
    groups = groups_of(unit, x, y, k)
    lanes = rounding_unit(unit, x, y) if groups is None else _numbers(unit, TRUNCATE, groups.factor)
    fast = None if groups is not None or lanes is None else fast_path(unit, x, y, limits_of(unit, _head(unit), k))
    # 512 rows of float64 then stay in a second-level cache of 1 MB
    slabs = slabs_of(k, unit, plan, SLOTS if fast is None or _is_single(fast) else SLOTS // 4)
    fast = None if fast is None else fast._replace(block=slabs.block)
    draw = Draw(key_words(_NO_KEY), unit.rounding.bits, 0, 0, 0, 0)
    return Prepared(x, y, slabs, groups, lanes, fast, promotion_of(spec), reduction_of(plan, double), draw)


def fast_path(unit: Datapath, a: Source, b: Source, limits: tuple[int, int]) -> Constants | None:
    """Return the constants of the truncating kernels for a unit and operands; None where they do not take these."""
    f, block, acc_mantissa = unit.fraction_bits, unit.block, unit.accumulator.mantissa_bits
    mode, truncates = unit.rounding.mode, unit.rounding.mode == "toward_zero"
    if unit.term_rounding != "toward_zero" or f is None or block is None:
        return None
    if not truncates and (mode not in ("nearest_even", "stochastic") or acc_mantissa > 23):
        return None
    eps = max(a.bits + b.bits, f + 2, acc_mantissa + 1) + 1
    room = f + _head(unit) + math.ceil(math.log2(block + 1))
    span = a.top + b.top - a.emin - b.emin
    inside = is_fixed(a) and is_fixed(b) and a.emin + b.emin >= limits[0] and a.top + b.top <= limits[1]
    if truncates and room <= 22 and a.bits + eps <= 24 and acc_mantissa <= 20 and inside and span < 80 - f:
        single = np.float32(1 + 2.0**-eps), f, np.int32(-1 << (23 - acc_mantissa))
        return Constants(block, *single, np.int8(-2 - span), (a.top, b.top), *limits)
    if room > 51 or a.bits + eps > 53:
        return None
    rounding = None
    if not truncates:
        dropped, drawn = 52 - acc_mantissa, unit.rounding.bits
        shifts = np.int32(32 - min(drawn, dropped, 32)), np.int64(max(dropped - drawn, 0))
        rounding = Nearby(mode == "stochastic", np.int64(dropped), *shifts)
    double = np.float64(1 + 2.0**-eps), f, np.int64(-1 << (52 - acc_mantissa))
    return Constants(block, *double, np.int8(0), (EMPTY, EMPTY), *limits, rounding)


def _head(unit: Datapath) -> int:
    """Return the bits of a term above its exponent: significands of two factors, or of four, each below 2."""
    return 2 if unit.scale is None else 4


def rounding_unit(unit: Datapath, a: Source, b: Source) -> Unit | None:
    """Return a datapath as the rounding kernel takes it; None where float64 lanes cannot hold it."""
    f, acc_mantissa = unit.fraction_bits, unit.accumulator.mantissa_bits
    if f is None or unit.block is None or unit.group > 1 or unit.signed_zero:
        return None
    terms = {"toward_zero": TRUNCATE, "down": FLOOR}.get(unit.term_rounding, NEAREST)
    enlarged = unit.term_rounding in ("toward_zero", "nearest_away")
    eps = max(a.bits + b.bits, f + 3, acc_mantissa + 2) + 1 if enlarged else 0
    if f + _head(unit) + math.ceil(math.log2(unit.block + 1)) > 51 or a.bits + eps > 53 or a.bits + b.bits > 53:
        return None
    return _numbers(unit, terms, np.float64(1 + 2.0**-eps if enlarged else 1))


def _numbers(unit: Datapath, terms: int, factor: np.floating) -> Unit:
    assert unit.fraction_bits is not None
    lowest = -360 if unit.min_exponent is None else max(unit.min_exponent, -360)
    mode, grid = CODES[unit.rounding.mode], grid_of(unit.accumulator)
    return Unit(terms, unit.fraction_bits, np.int32(lowest), mode, grid, np.float64(factor))


# Fused units: one product.


def _fused(a: Tensor, b: Tensor, c: Tensor | None, scales: Scales, spec: GemmSpec, key: RandomKey, out: Tensor) -> None:
    """Write the product of a fused unit to out, as docs/matmul.md says; the arguments are those of ``gemm``."""
    product = prepared(spec, a.shape[1], (scales[0] is not None, scales[1] is not None), out.dtype == torch.float64)
    draw = product.draw._replace(rows=out.shape[0], columns=out.shape[1])
    if spec.stochastic:
        draw = draw._replace(key=key_words(key))
    chains = _NO_CHAINS
    if spec.plan.scaled_promotion:
        if scales[0] is None or scales[1] is None:
            raise ArgumentError("a plan with scaled_promotion needs scales; call scaled_mm, or pass another plan")
        chains = chain_scales(scales, product.slabs, spec.plan)
    exact = partial(exact_integer.gemm, a, b, c, scales, spec, key, out)
    if product.unit is None:
        exact()
        return
    (x, x_table), (y, y_table) = read_array(a), read_array(b)
    inside: list[dict[str, Any]] = [
        {} if s is None or template.scales.size == 0 else {"scales": np.abs(s.numpy())}
        for s, template in zip(scales, (product.a, product.b), strict=True)
    ]
    a_source = product.a._replace(array=x, table=x_table, **inside[0])
    b_source = product.b._replace(array=y, table=y_table, **inside[1])
    plain = c is None or product.reduction.in_place
    job = Job(
        a=a_source,
        b=b_source,
        k=a.shape[1],
        slabs=product.slabs,
        fast=product.fast if plain else None,
        unit=product.unit,
        groups=product.groups,
        tops=product.groups.tops(a_source, b_source) if plain and product.groups is not None else None,
        promotion=product.promotion,
        scales=chains,
        reduction=product.reduction,
        draw=draw,
        out=out.numpy(),
        c=None if c is None else c.numpy(),
        row_marks=np.zeros(out.shape[0], np.int32),
        column_marks=np.zeros(-(-out.shape[1] // COLUMNS) * COLUMNS, np.int32),
    )
    run_tiles(job)
    if job.c is not None:
        job.row_marks[~np.isfinite(job.c).all(1)] |= HAS_INF
    if job.row_marks.any() or job.column_marks.any():
        # Compute what has NaN or Inf among its operands: NaN is the whole row's or column's, the rest one by one.
        rows, columns = job.row_marks, job.column_marks[: job.out.shape[1]]
        infinite = [np.flatnonzero(marks == HAS_INF) for marks in (rows, columns)]
        exact(rows=infinite[0])
        exact(columns=infinite[1])
        job.out[(rows & HAS_NAN) != 0] = np.nan
        job.out[:, (columns & HAS_NAN) != 0] = np.nan
