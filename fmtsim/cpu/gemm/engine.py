"""Matrix products of emulated units: the verb ``gemm`` of the engine (docs/matmul.md)."""

from collections.abc import Callable

import torch
from torch import Tensor

from fmtsim.cpu.gemm import chains, integers, stages
from fmtsim.cpu.gemm.fused import fused
from fmtsim.cpu.gemm.remaining import covers
from fmtsim.cpu.gemm.sums import grid_of
from fmtsim.formats.representable import is_representable
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import FP32, Datapath, IntegerDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan

NAN32, NAN64 = 0x7FFFFFFF, 0x7FFFFFFFFFFFFFFF


def supports_gemm(spec: GemmSpec, a: Tensor, b: Tensor) -> bool:
    """Say whether the kernels cover a product; the torch engine takes the rest."""
    unit, k = spec.datapath, max(a.shape[1], 1)
    if isinstance(unit, IntegerDatapath):
        return integers.covers(spec, k)
    fused_sums = (unit.accumulator, unit.promotion) if isinstance(unit, Datapath) else ()
    sums = (*fused_sums, spec.plan.partial)
    if not all(fmt is None or (fmt.infinities and fmt.has_subnormals and fmt.nan == "ieee") for fmt in sums):
        return False
    if not isinstance(unit, Datapath):
        return stages.covers(spec)
    rounding = unit.rounding
    if rounding.mode == "stochastic" and (rounding.variant != "a" or rounding.layout != "word"):
        return False
    if not _sums_fit(unit, spec.plan):
        return False
    narrow = is_representable(spec.a, torch.float32) and is_representable(spec.b, torch.float32)
    return chains.covers(spec) or (narrow and covers(spec, unit.block or k))


def _sums_fit(unit: Datapath, plan: GemmPlan) -> bool:
    """Say whether the sums of chains and parts, taken in float64 and rounded to their format, are rounded as if once.

    Numbers of 24 bits each are, where a sum keeps as many bits as the chains that join it; so are those of float64.
    """
    chain = outer = unit.accumulator
    promotes = plan.promote_every is not None or unit.promote_every is not None
    if promotes:
        outer = FP32 if plan.promote_every is not None else unit.promotion or chain
    if plan.scaled_promotion and unit.scale is not None:
        return False  # the scales are the unit's
    if all(is_representable(fmt, torch.float32) for fmt in (chain, outer)):
        return outer.mantissa_bits >= chain.mantissa_bits
    one_sum = not promotes and plan.split == 1 and plan.part_k is None and plan.reduce != "in_place"
    return chain == outer and not plan.scaled_promotion and (one_sum or grid_of(chain).kind == 64)


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
    if a.shape[1] == 0:
        out.copy_(torch.zeros_like(out) if c is None else c)
    else:
        _engine(spec)(a, b, c, (scale_a, scale_b), spec, random or RandomKey(0), out)
    if out.is_floating_point() and out.sum().isnan():  # Inf of both signs looks the same, and is not touched
        bits = out.view(torch.int32 if out.dtype == torch.float32 else torch.int64)
        bits.masked_fill_(out.isnan(), NAN32 if out.dtype == torch.float32 else NAN64)


def _engine(spec: GemmSpec) -> Callable[..., None]:
    if isinstance(spec.datapath, IntegerDatapath):
        return integers.gemm
    if not isinstance(spec.datapath, Datapath):
        return stages.gemm
    return chains.gemm if chains.covers(spec) else fused
