"""One pass, forward or backward, of a layer whose operands are more than casts: its operands and its products."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fmtsim.dispatch import is_bare
from fmtsim.gemm.layers.layer import Layer
from fmtsim.gemm.layers.machine import multiply_coded, round_output
from fmtsim.gemm.layers.operand import coded
from fmtsim.gemm.layers.prepare import draws_of, prepare, transformed, unrotated
from fmtsim.gemm.layers.streams import SIGNS, stream_of
from fmtsim.gemm.layers.sums import multiply_operands, rest_of
from fmtsim.gemm.layers.traced import traced_count, traced_key, traced_operand, traced_unrotate
from fmtsim.gemm.products.operator import drawn_key
from fmtsim.scaling.statistics import block_sizes
from fmtsim.spec.call import Operation
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Operand, block_of
from fmtsim.spec.quantizer import Quantizer
from fmtsim.spec.transform import Hadamard, Transform

Observer = Callable[[str, Tensor, Tensor, Quantizer, int], None]

PRODUCTS = ("fprop", "dgrad", "wgrad")


class Kept(NamedTuple):
    """What the backward pass keeps of an operand of the forward one.

    Attributes:
        elements, scale, tensor_scale: As in Operand; None where the backward pass takes the original.
        slope: As in Operand.
    """

    elements: Tensor | None = None
    scale: Tensor | None = None
    tensor_scale: Tensor | None = None
    slope: Tensor | None = None


def kept_of(operand: Operand, later: Quantizer) -> Kept:
    """Return what a backward product that quantises as ``later`` needs of an operand."""
    if later.source == "original":
        return Kept(slope=operand.slope)
    return Kept(operand.elements, operand.scale, operand.tensor_scale, operand.slope)


class Pass:
    """Quantise and multiply in one pass of a layer.

    Args:
        layer: Its definition, and what it draws from and remembers in.
        observer: Sees every operand, or None.
        backward: Which pass.
        traced: The tensors have no numbers: a compiler wants to see operators.
        counted: Keys are made on the GPU, from the number of passes over the layer, and not drawn on the host: of a
            compiled layer that ``fmtsim.gemm.layers.card.counts``.
    """

    def __init__(
        self, layer: Layer, observer: Observer | None, *, backward: bool, traced: bool = False, counted: bool = False
    ) -> None:
        self._layer, self._config, self._observer = layer, layer.config, observer
        self._backward, self._traced, self._counted = backward, traced, counted
        gemms = (getattr(self._config, name) for name in PRODUCTS)
        self._folded = not any(gemm.emulated for gemm in gemms)  # machines take elements and scales apart
        self._signs: RandomKey | Tensor | None = None
        self._count: Tensor | None = None

    def operand(self, name: str, t: Tensor, dim: int) -> Operand:
        """Quantise a tensor whose products sum over ``dim``, 0 or -1; the result has that axis last."""
        return self._made(name, t, self._config.operands[name], dim)

    def second(self, name: str, original: Tensor | None, kept: Kept, before: Quantizer) -> Operand:
        """Return the second operand of a backward product, which sums over the rows of the tensor.

        Args:
            name: Of the operand.
            original: [rows, columns], where the quantiser takes that.
            kept: What there is of the forward pass.
            before: The quantiser of the forward pass.
        """
        quantizer = self._config.operands[name]
        if quantizer.source == "original":
            assert original is not None
            return self._made(name, original, quantizer, 0)
        assert kept.elements is not None
        sizes = block_sizes(block_of(before), kept.elements.shape)
        forward = Operand(kept.elements, before, kept.scale, kept.tensor_scale, sizes)
        if quantizer.source == "forward":
            return forward.transposed()
        if kept.scale is None and kept.elements.dtype == torch.bfloat16:
            return self._made(name, kept.elements, quantizer, 0, kept.tensor_scale)
        return self._made(name, forward.values(torch.float32), quantizer, 0)

    def product(self, name: str, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return ``a b^T + bias`` of a product of the layer, rounded as it says."""
        index = PRODUCTS.index(name)
        gemm, generator = getattr(self._config, name), self._layer.generator
        words = stream_of(generator, 9 + index)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if not gemm.emulated:
            y = multiply_operands(a, b, bias, dtype if gemm.out.format is None else wide, wide)
            return y if gemm.out.format is None else round_output(y, gemm.out, dtype, words)
        operation: Operation = "mm" if index else "linear"
        rest = rest_of(a, b)
        first = None if rest is not None else bias
        y = multiply_coded(operation, coded(a), coded(b), first, gemm, dtype, stream_of(generator, 6 + index))
        if rest is not None:
            y = y.float() + rest if bias is None else y.float() + rest + bias.float()
        return round_output(y, gemm.out, dtype, words)

    def gradient(
        self, name: str, a: Operand, b: Operand, first: Quantizer, before: Quantizer, kept: Kept, dtype: torch.dtype
    ) -> Tensor:
        """Return a product that is the gradient of a tensor which was rotated and rounded in the forward pass.

        Args:
            name: Of the product.
            a, b: Its operands.
            first: Quantiser of the first, whose outer rotation is undone.
            before: Quantiser of the operand of the forward pass that this is the gradient of.
            kept: What is kept of that operand.
            dtype: Of the result.
        """
        turned = kept.elements is not None
        outer = [t for t in first.transforms if isinstance(t, Hadamard) and t.axis == "outer" and t.undo]
        inner = [t for t in before.transforms if turned and isinstance(t, Hadamard) and t.axis == "inner"]
        if not outer and not inner and kept.slope is None:
            return self.product(name, a, b, None, dtype)
        y = self.product(name, a, b, None, torch.float64 if dtype == torch.float64 else torch.float32)
        signs = self._sign_key(outer, y)
        run = traced_unrotate if self._traced else unrotated
        return run(y, first, before, turned, kept.slope, signs, dtype)  # type: ignore[arg-type]

    def _made(self, name: str, t: Tensor, quantizer: Quantizer, dim: int, factor: Tensor | None = None) -> Operand:
        """Quantise a tensor, times a factor (float32, 0-d) where there is one."""
        rest = (dim, quantizer, self._folded, self._layer.name, name, factor)
        if self._counted and (quantizer.is_stochastic or quantizer.has_random_signs):
            if self._count is None:
                self._count = traced_count(t, self._layer.name)
            return traced_operand(t, *rest, count=self._count)
        signs = self._sign_key(quantizer.transforms, t)
        if self._traced:
            return traced_operand(t, *rest, signs=signs)  # type: ignore[arg-type]
        draws, x = draws_of(self._layer.generator, name, signs), t if dim == -1 else t.mT
        made = prepare(x, quantizer, draws, self._layer.state.get(name), folded=self._folded, factor=factor)
        if self._observer is not None:
            x = x if factor is None else x.float() * factor
            wide = torch.float64 if t.dtype == torch.float64 else torch.float32
            for transform in quantizer.transforms:  # what was rounded
                x, _ = transformed(x, transform, signs)
            self._observer(name, x, made.values(wide), quantizer, -1)
        return made

    def _sign_key(self, transforms: Iterable[Transform], t: Tensor) -> RandomKey | Tensor | None:
        """Return the key of this pass's random signs, the same for all operands; None where no transform has any."""
        if not any(isinstance(turn, Hadamard) and turn.signs == "random" for turn in transforms):
            return None
        if self._signs is None:
            stream = SIGNS + self._backward
            if self._traced:
                self._signs = traced_key(t, self._layer.name, stream)
            else:
                self._signs = drawn_key(stream_of(self._layer.generator, stream), t.device)
        return self._signs


def is_traced(t: Tensor) -> bool:
    """Say whether a tensor, inside an autograd.Function, is one that a compiler or a transform looks at."""
    return not is_bare(t)
