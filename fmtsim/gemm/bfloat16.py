"""Products that no machine is named for, on a GPU: where bfloat16 holds both operands, its bfloat16 units multiply.

Operands keep their exact values: those of plain formats, elements times block scales of block formats. The scale of a
whole tensor (NVFP4) stays outside and multiplies the sums. Nothing here waits for the device.
"""

import importlib
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.dispatch import is_plain
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.representable import is_representable
from fmtsim.gemm.choice import draw_keys
from fmtsim.gemm.config import Quantizer
from fmtsim.ops import CastSpec, RandomKey
from fmtsim.quantize import quantize


class Held(NamedTuple):
    """An operand as bfloat16 values, and the float32 scale of the tensor (0-d) that they lack, if any."""

    values: Tensor
    scale: Tensor | None = None

    @property
    def quantised(self) -> Tensor:
        """The operand's values in float32, the scale of the tensor included: rounded once."""
        values = self.values.float()
        return values if self.scale is None else values * self.scale

    def across(self, dim: int) -> Tensor:
        """Return the values with the axis ``dim``, 0 or -1, last."""
        return self.values if dim == -1 else self.values.t()


def holds(t: Tensor, quantizer: Quantizer) -> bool:
    """Say whether bfloat16 on t's device holds what a quantiser makes of t."""
    fmt = quantizer.format
    if not t.is_cuda or t.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    if fmt is None:
        return t.dtype == torch.bfloat16
    if isinstance(fmt, BlockFormat) and fmt.tensor_scale:
        return _has_kernels(t) and bool(_engine("orientations").holds_bare(_spec(quantizer, -1)))
    return is_representable(fmt, torch.bfloat16)


def hold(t: Tensor, quantizer: Quantizer, dim: int, generator: Any) -> Held:
    """Quantise a matrix along ``dim``; ``holds`` must have said yes."""
    fmt = quantizer.format
    if fmt is None:
        return Held(t)
    if isinstance(fmt, BlockFormat) and fmt.tensor_scale:
        spec = _spec(quantizer, dim - t.dim() if dim >= 0 else dim)
        return Held(*_engine("orientations").quantize_bare(t.detach(), spec, _key(quantizer, generator, t)))
    options: Any = {"rounding": quantizer.rounding, "overflow": quantizer.overflow, "generator": generator}
    return Held(quantize(t, fmt, dim=dim, pad=True, out_dtype=torch.bfloat16, **options))


def hold_both(t: Tensor, quantizer: Quantizer, generators: tuple[Any, Any]) -> tuple[Held, Held] | None:
    """Quantise a matrix along -1 and along 0 from one read; None where that has no kernel."""
    fmt = quantizer.format
    if not isinstance(fmt, BlockFormat) or not _has_kernels(t):
        return None
    first, second = (_key(quantizer, generator, t) for generator in generators)
    quantize_both = _engine("orientations").quantize_both
    both = quantize_both(t.detach(), _spec(quantizer, -1), torch.bfloat16, (first, second), bare=fmt.tensor_scale)
    return Held(both.rows, both.tensor_scale), Held(both.columns, both.tensor_scale)


def multiply(a: Held, b: Held, dims: tuple[int, int], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``a b^T + bias`` of matrices whose products run over ``dims``, rounded once to ``dtype``.

    The unit's products are exact and its sums float32; with scales the sum is multiplied by the product of the two
    scales in float32, one rounding each.
    """
    first, second = a.across(dims[0]), b.across(dims[1]).t()
    scales = a.scale is not None or b.scale is not None
    if not scales and dtype == torch.bfloat16:
        return torch.mm(first, second) if bias is None else torch.addmm(bias.to(dtype), first, second)
    y = torch.mm(first, second, out_dtype=torch.float32)
    if scales:
        return _engine("outputs").scale_output(y, (a.scale, b.scale), bias, dtype)  # type: ignore[no-any-return]
    return (y if bias is None else y.add_(bias)).to(dtype)


def _has_kernels(t: Tensor) -> bool:
    """Say whether the CUDA engine may be called on a tensor without the dispatcher."""
    return is_plain(t) and bool(_engine("runtime").serves(t.device.index))


@lru_cache(maxsize=256)
def _spec(quantizer: Quantizer, dim: int) -> CastSpec:
    fmt = quantizer.format
    assert fmt is not None
    overflow = quantizer.overflow or fmt.default_overflow
    return CastSpec(format=fmt, rounding=quantizer.rounding, overflow=overflow, dim=dim)


def _key(quantizer: Quantizer, generator: Any, t: Tensor) -> RandomKey | None:
    """Return the key that ``quantize`` would draw."""
    if quantizer.rounding.mode != "stochastic":
        return None
    key = draw_keys(True, generator, None, t.device)
    return None if key is None else RandomKey(*key.tolist())


@lru_cache(maxsize=8)
def _engine(module: str) -> Any:
    return importlib.import_module(f"fmtsim.cuda.{module}")
