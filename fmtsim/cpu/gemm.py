"""Matrix products of emulated units: the verb ``gemm`` of the engine (docs/matmul.md)."""

import torch
from torch import Tensor

from fmtsim.cpu.fused import fused
from fmtsim.cpu.remaining import covers
from fmtsim.gemm.datapath import Datapath
from fmtsim.gemm.serialization import GemmSpec
from fmtsim.ops import RandomKey

NAN32, NAN64 = 0x7FFFFFFF, 0x7FFFFFFFFFFFFFFF


def supports_gemm(spec: GemmSpec, a: Tensor, b: Tensor) -> bool:
    """Say whether the kernels cover a product; the torch engine takes the rest."""
    unit = spec.datapath
    if not isinstance(unit, Datapath):
        return False
    rounding = unit.rounding
    sums = (unit.accumulator, unit.promotion, spec.plan.partial)
    plain = all(fmt is None or (fmt.infinities and fmt.has_subnormals and fmt.nan == "ieee") for fmt in sums)
    if not plain or (rounding.mode == "stochastic" and (rounding.variant != "a" or rounding.layout != "word")):
        return False
    return covers(spec, unit.block or max(a.shape[1], 1))


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
        fused(a, b, c, (scale_a, scale_b), spec, random or RandomKey(0), out)
    if out.is_floating_point():
        nan = out.isnan()
        if nan.any():
            bits = out.view(torch.int32 if out.dtype == torch.float32 else torch.int64)
            bits.masked_fill_(nan, NAN32 if out.dtype == torch.float32 else NAN64)
