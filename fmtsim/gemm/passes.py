"""One pass, forward or backward, of a layer whose operands are more than casts: its operands and its products."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.gemm.call import Operation
from fmtsim.gemm.choice import draw_keys
from fmtsim.gemm.config import LinearConfig
from fmtsim.gemm.machine import multiply_coded, round_output
from fmtsim.gemm.operand import Draws, Operand, block_of, multiply_operands, prepare, rotated, transformed
from fmtsim.gemm.streams import Generator, stream_of
from fmtsim.ops import RandomKey
from fmtsim.scaling.history import DelayedScale, FrozenScale
from fmtsim.scaling.quantizer import Quantizer
from fmtsim.scaling.statistics import block_sizes
from fmtsim.scaling.transform import Hadamard

Observer = Callable[[str, Tensor, Tensor, Quantizer, int], None]
State = Mapping[str, DelayedScale | FrozenScale]

OPERANDS = tuple(LinearConfig().operands)
PRODUCTS = ("fprop", "dgrad", "wgrad")


class Kept(NamedTuple):
    """What the backward pass keeps of an operand of the forward one.

    Attributes:
        elements, scale, tensor: As in Operand; None where the backward pass takes the original.
        slope: As in Operand.
        signs: int64 [2]: the key of the random signs of its rotations, or None.
    """

    elements: Tensor | None = None
    scale: Tensor | None = None
    tensor: Tensor | None = None
    slope: Tensor | None = None
    signs: Tensor | None = None


def kept_of(operand: Operand, later: Quantizer) -> Kept:
    """Return what a backward product that quantises as ``later`` needs of an operand."""
    if later.source == "original":
        return Kept(slope=operand.slope)
    return Kept(operand.elements, operand.scale, operand.tensor, operand.slope)


class Pass:
    """Quantise and multiply in one pass of a layer.

    Args:
        config: The layer's definition.
        generator: Where random numbers come from.
        observer: Sees every operand, or None.
        state: What delayed scaling remembers, by operand.
        backward: Which pass.
    """

    def __init__(
        self, config: LinearConfig, generator: Generator, observer: Observer | None, state: State, *, backward: bool
    ) -> None:
        self._config, self._generator, self._observer, self._state = config, generator, observer, state
        self._backward = backward
        self._signs: RandomKey | None = None

    def operand(self, name: str, t: Tensor, dim: int) -> Operand:
        """Quantise a tensor whose products sum over ``dim``, 0 or -1; the result has that axis last."""
        return self._made(name, t if dim == -1 else t.mT, self._config.operands[name], dim)

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
            return self._made(name, original.mT, quantizer, 0)
        assert kept.elements is not None
        sizes = block_sizes(block_of(before), kept.elements.shape)
        forward = Operand(kept.elements, before, kept.scale, kept.tensor, sizes).turned()
        if quantizer.source == "forward":
            return forward
        return self._made(name, forward.values(torch.float32), quantizer, 0)

    def product(self, name: str, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return ``a b^T + bias`` of a product of the layer, rounded as it says."""
        index = PRODUCTS.index(name)
        gemm = getattr(self._config, name)
        words = stream_of(self._generator, 9 + index)
        if gemm.emulated:
            operation: Operation = "mm" if index else "linear"
            rest = _rest(a, b)
            first = None if rest is not None else bias
            y = multiply_coded(
                operation, a.coded(), b.coded(), first, gemm, dtype, stream_of(self._generator, 6 + index)
            )
            if rest is not None:
                y = y.float() + rest if bias is None else y.float() + rest + bias.float()
            return round_output(y, gemm.out, dtype, words)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        y = multiply_operands(a, b, wide)
        rest = _rest(a, b)
        y = y if rest is None else y + rest
        y = y if bias is None else y + bias.to(wide)
        return round_output(y, gemm.out, dtype, words) if gemm.out.format is not None else y.to(dtype)

    def finish(self, y: Tensor, first: Quantizer, before: Quantizer, kept: Kept, dtype: torch.dtype) -> Tensor:
        """Turn a gradient of a rounded, rotated operand into that of the tensor itself.

        Args:
            y: [rows, columns]: the product.
            first: Quantiser of the product's first operand, whose outer rotation is undone.
            before: Quantiser of the operand of the forward pass that this is the gradient of.
            kept: What is kept of that operand.
            dtype: Of the result.
        """
        for transform in reversed(first.transforms):
            if isinstance(transform, Hadamard) and transform.axis == "outer" and transform.undo:
                y = rotated(y, transform, self._sign_key(transform, y), inverse=True)
        if kept.slope is not None:
            y = y * kept.slope
        if kept.elements is not None:  # the product was one of the rotated tensors
            for transform in reversed(before.transforms):
                if isinstance(transform, Hadamard) and transform.axis == "inner":
                    y = rotated(y, transform, None, inverse=True)
        return y.to(dtype)

    def _made(self, name: str, t: Tensor, quantizer: Quantizer, dim: int) -> Operand:
        index = OPERANDS.index(name)
        draws = Draws(
            stream_of(self._generator, index), stream_of(self._generator, 12 + index), self._signs_for(quantizer, t)
        )
        made = prepare(t, quantizer, draws, self._state.get(name))
        if self._observer is not None:
            wide = torch.float64 if t.dtype == torch.float64 else torch.float32
            for transform in quantizer.transforms:  # what was rounded
                t, _ = transformed(t, transform, draws.signs)
            self._observer(name, t, made.values(wide), quantizer, -1)
        return made

    def _signs_for(self, quantizer: Quantizer, t: Tensor) -> Any:
        for transform in quantizer.transforms:
            if isinstance(transform, Hadamard) and transform.signs == "random":
                return self._sign_key(transform, t)
        return None

    def _sign_key(self, transform: Hadamard, t: Tensor) -> RandomKey | None:
        """Return the key of this pass's random signs, the same for all operands."""
        if transform.signs != "random":
            return None
        if self._signs is None:
            keys = draw_keys(True, stream_of(self._generator, 18 + self._backward), None, t.device)
            assert keys is not None
            self._signs = RandomKey(*keys.tolist())
        return self._signs


def _rest(a: Operand, b: Operand) -> Tensor | None:
    """Return the product of what was cut off the first operand with the second, in float32."""
    return None if a.rest is None else torch.mm(a.rest, b.values(torch.float32).mT)
