"""Products that no machine is named for, on a GPU: where bfloat16 holds both operands, its bfloat16 units multiply.

Operands keep their exact values: those of plain formats, elements times block scales of block formats. The scale of a
whole tensor (NVFP4) stays outside and multiplies the sums. Nothing here waits for the device. torch.compile sees what
is no verb as operators, so that nothing is fused into steps whose roundings count.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.dispatch import is_bare
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.representable import is_representable
from fmtsim.gemm.layers.finish import finish_sums
from fmtsim.gemm.products.operator import draw_keys
from fmtsim.ops import load_engine, random_key
from fmtsim.quantize import quantize
from fmtsim.spec.cast import CastSpec, spec_from_json
from fmtsim.spec.operand import Keys, folds
from fmtsim.spec.quantizer import Quantizer

_library = torch.library.Library("fmtsim", "FRAGMENT")
_library.define("quantize_bare(Tensor x, str spec, Tensor? key=None) -> (Tensor, Tensor)")
_library.define(
    "quantize_both(Tensor x, str spec, bool bare, Tensor? across=None, Tensor? down=None) -> (Tensor, Tensor, Tensor)"
)


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
    if not on_card(t):
        return False
    if fmt is None:
        return t.dtype == torch.bfloat16
    if isinstance(fmt, BlockFormat) and fmt.tensor_scale:
        return served(t) and folds(quantizer)
    return _held_values(quantizer)


def hold(t: Tensor, quantizer: Quantizer, dim: int, generator: Any) -> Held:
    """Quantise a matrix along ``dim``; ``holds`` must have said yes."""
    fmt = quantizer.format
    if fmt is None:
        return Held(t)
    if isinstance(fmt, BlockFormat) and fmt.tensor_scale:
        axis, key = dim - t.dim() if dim >= 0 else dim, _key(quantizer, generator, t)
        if not is_bare(t):
            return Held(*torch.ops.fmtsim.quantize_bare(t.detach(), _text(quantizer, axis), key))
        return Held(*_bare(t.detach(), quantizer, axis, key))
    options: Any = {"rounding": quantizer.rounding, "overflow": quantizer.overflow, "generator": generator}
    return Held(quantize(t, fmt, dim=dim, pad=True, out_dtype=torch.bfloat16, **options))


def hold_both(t: Tensor, quantizer: Quantizer, generators: tuple[Any, Any]) -> tuple[Held, Held] | None:
    """Quantise a matrix along -1 and along 0 from one read; None where that has no kernel."""
    fmt = quantizer.format
    if not isinstance(fmt, BlockFormat) or not served(t):
        return None
    keys = tuple(_key(quantizer, generator, t) for generator in generators)
    bare = fmt.tensor_scale
    if not _held(fmt):
        return None
    if not is_bare(t):
        rows, columns, scale = torch.ops.fmtsim.quantize_both(t.detach(), _text(quantizer, -1), bare, *keys)
        return Held(rows, scale if bare else None), Held(columns, scale if bare else None)
    rows, columns = load_engine("cuda").quantize_both(t.detach(), quantizer, tuple(map(random_key, keys)))
    return Held(rows.elements, rows.tensor_scale), Held(columns.elements.mT, columns.tensor_scale)


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
        columns, rows = (None if x.scale is None else x.scale.reshape(1, 1) for x in (b, a))
        return finish_sums(y, columns, rows, None, bias, dtype)
    return (y if bias is None else y.add_(bias)).to(dtype)


def on_card(t: Tensor) -> bool:
    """Say whether a GPU's bfloat16 units may multiply what a tensor becomes."""
    return t.is_cuda and t.dtype != torch.float64


def served(t: Tensor) -> bool:
    """Say whether the CUDA engine runs on a tensor's GPU."""
    return bool(load_engine("cuda").serves(t.device.index))


def _held_values(quantizer: Quantizer) -> bool:
    assert quantizer.format is not None
    return is_representable(quantizer.format, torch.bfloat16)


def _held(fmt: BlockFormat) -> bool:
    return folds(Quantizer(format=fmt)) if fmt.tensor_scale else is_representable(fmt, torch.bfloat16)


def _bare(t: Tensor, quantizer: Quantizer, dim: int, key: Tensor | None) -> tuple[Tensor, Tensor]:
    x, keys = t if dim == -1 else t.mT, Keys(random_key(key))
    made = load_engine("cuda").quantize_operand(x, quantizer, keys, folded=True)
    return made.elements if dim == -1 else made.elements.mT, made.tensor_scale


def _text(quantizer: Quantizer, dim: int) -> str:
    return _spec(quantizer, dim).to_json()


@lru_cache(maxsize=256)
def _spec(quantizer: Quantizer, dim: int) -> CastSpec:
    fmt = quantizer.format
    assert fmt is not None
    overflow = quantizer.overflow or fmt.default_overflow
    return CastSpec(format=fmt, rounding=quantizer.rounding, overflow=overflow, dim=dim)


def _key(quantizer: Quantizer, generator: Any, t: Tensor) -> Tensor | None:
    """Return the key that ``quantize`` would draw, int64 [seed, offset]."""
    if quantizer.rounding.mode != "stochastic":
        return None
    return draw_keys(True, generator, None, t.device)


def _quantizer(spec: str) -> tuple[Quantizer, int]:
    cast = spec_from_json(spec)
    return Quantizer(format=cast.format, rounding=cast.rounding, overflow=cast.overflow), cast.dim


def _quantize_bare(x, spec, key=None):  # type: ignore[no-untyped-def]
    quantizer, dim = _quantizer(spec)
    values, scale = _bare(x, quantizer, dim, key)
    return values.contiguous(), scale


def _quantize_both(x, spec, bare, across=None, down=None):  # type: ignore[no-untyped-def]
    rows, columns = load_engine("cuda").quantize_both(x, _quantizer(spec)[0], (random_key(across), random_key(down)))
    scale = rows.tensor_scale if bare else x.new_empty((), dtype=torch.float32)
    return rows.elements, columns.elements.mT, scale


def _bare_shapes(x, spec, key=None):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format), _scalar(x)


def _both_shapes(x, spec, bare, across=None, down=None):  # type: ignore[no-untyped-def]
    return *(x.new_empty(x.shape, dtype=torch.bfloat16) for _ in range(2)), _scalar(x)


def _scalar(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


for _name, _function in {
    "quantize_bare": _quantize_bare,
    "quantize_both": _quantize_both,
}.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")

torch.library.register_fake("fmtsim::quantize_bare", _bare_shapes, lib=_library)
torch.library.register_fake("fmtsim::quantize_both", _both_shapes, lib=_library)
