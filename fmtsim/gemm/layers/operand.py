"""What an operand of a product is after it was quantised: elements, and the scales that they lack."""

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fmtsim.errors import FormatError
from fmtsim.formats.block import FP32, Block, BlockFormat
from fmtsim.formats.representable import is_representable
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.gemm.layers.coding import Coded
from fmtsim.gemm.products.operands import operand_format
from fmtsim.scaling.cast import spread
from fmtsim.spec.call import Scaling as Kind
from fmtsim.spec.quantizer import Quantizer
from fmtsim.spec.scaling import Scaling

_HELD: Final = 8  # significant bits of bfloat16

_KINDS: dict[tuple[int | None, int | None, str], Kind] = {
    (None, None, "fp32"): "tensor",
    (1, None, "fp32"): "row",
    (1, 32, "e8m0"): "mx",
    (1, 16, "e4m3"): "nvfp4",
    (16, 16, "e4m3"): "nvfp4",
    (1, 128, "fp32"): "block_128",
    (128, 128, "fp32"): "block_128",
    (1, 128, "e8m0"): "block_128",
    (128, 128, "e8m0"): "block_128",
}


class Operand(NamedTuple):
    """A quantised matrix ``[rows, inner]``: elements, and scales of its blocks.

    Attributes:
        elements: Values of the element format, in a dtype that holds them; without ``scale`` they may have the scales
            of blocks in them.
        quantizer: What made them.
        scale: float32 [row blocks, inner blocks], or None.
        tensor: float32, 0-d: the scale of the whole matrix, or None.
        sizes: Rows and columns of a block.
        slope: float32, or bool for 1 and 0: what the gradient of an element is multiplied with; or None.
        rest: float32: what ``Clamp(compensate=True)`` cut off, or None.
    """

    elements: Tensor
    quantizer: Quantizer
    scale: Tensor | None = None
    tensor: Tensor | None = None
    sizes: tuple[int, int] = (1, 1)
    slope: Tensor | None = None
    rest: Tensor | None = None

    def turned(self) -> "Operand":
        """Return the transposed matrix, with the same elements and scales."""
        scale = None if self.scale is None else self.scale.mT
        return self._replace(elements=self.elements.mT, scale=scale, sizes=self.sizes[::-1], slope=None, rest=None)

    @property
    def outer(self) -> bool:
        """Whether each row has one scale at most, so that sums along it may be scaled instead of elements."""
        return self.scale is None or (self.tensor is None and self.scale.shape[1] == 1)

    def row_scales(self) -> Tensor | None:
        """Return the scale of every row, [rows, 1] or [1, 1], of an operand that is ``outer``."""
        rows = self.elements.shape[0]
        if self.scale is None:
            return None if self.tensor is None else self.tensor.reshape(1, 1)
        if self.scale.shape[0] in (1, rows):
            return self.scale
        return self.scale.repeat_interleave(self.sizes[0], 0)[:rows]

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return what the elements stand for, rounded once to float32 or float64."""
        x = self.elements.to(torch.float64 if dtype == torch.float64 else torch.float32)
        if self.scale is None:
            return x if self.tensor is None else x * self.tensor
        s = spread(self.scale, self.sizes, x.shape)
        if self.tensor is None:
            return x * s
        return (x.double() * s * self.tensor).to(x.dtype)  # element times scale is exact in float64

    def coded(self) -> Coded:
        """Return the operand of a machine.

        Raises:
            FormatError: No unit multiplies elements or blocks of that kind.
        """
        fmt = self.quantizer.format
        check_coded(self.quantizer)
        if fmt is None:
            return Coded(self.elements, operand_format("operand", self.elements), "none")
        element = _element(fmt)
        assert isinstance(element, FloatFormat)
        if self.scale is None:
            return Coded(self.elements, element, "none")
        kind = _kind(self)
        return Coded(self.elements, element, kind, self.scale, self.tensor, self.sizes[0] if kind != "tensor" else 1)


def check_coded(quantizer: Quantizer) -> None:
    """Refuse a quantiser whose elements and scales no unit multiplies.

    Raises:
        FormatError: It is one.
    """
    fmt, scaling = quantizer.format, quantizer.scaling
    if quantizer.then is not None or not isinstance(_element(fmt), FloatFormat | None):
        raise FormatError(f"no unit multiplies operands quantised as {quantizer}; leave unit= and target= out")
    if scaling is not None and (*scaling.block, scaling.scale.name) not in _KINDS:
        blocks = f"blocks of {scaling.block} with {scaling.scale.name} scales"
        raise FormatError(f"no unit multiplies {blocks}; leave unit= and target= out")


class Draws(NamedTuple):
    """Where an operand's random numbers come from: words of elements and scales, and signs of rotations.

    ``passes``, int64, 0-d, on a GPU, moves the keys of all three on; only that GPU's kernels look at it.
    """

    elements: Any = None
    scales: Any = None
    signs: Any = None
    passes: Tensor | None = None


def block_of(quantizer: Quantizer) -> Block:
    """Return the elements that share a scale, (1, 1) where there are none."""
    while quantizer.then is not None:
        quantizer = quantizer.then
    if quantizer.scaling is not None:
        return quantizer.scaling.block
    return quantizer.format.block if isinstance(quantizer.format, BlockFormat) else (1, 1)


def _kind(operand: Operand) -> Kind:
    scaling, fmt = operand.quantizer.scaling, operand.quantizer.format
    if scaling is None:
        assert isinstance(fmt, BlockFormat)
        block, scale = fmt.block, fmt.scale
    else:
        block, scale = scaling.block, scaling.scale
    found = _KINDS.get((*block, scale.name))
    if found is None:
        raise FormatError(f"no unit multiplies blocks of {block} with {scale.name} scales; leave unit= and target= out")
    return found


def folds(quantizer: Quantizer) -> bool:
    """Say whether bfloat16 holds elements times the scales of their blocks, a rule's ``multiplier`` left out.

    Products below 2**-133 are rounded to bfloat16's grid.
    """
    while quantizer.then is not None:
        quantizer = quantizer.then
    fmt, scaling = quantizer.format, quantizer.scaling
    if isinstance(fmt, BlockFormat):
        fits = _bits(fmt.element) + (fmt.scale.mantissa_bits + 1 if fmt.scale != FP32 else 24)
        return is_representable(fmt, torch.bfloat16) or fits <= _HELD
    if scaling is None or fmt is None or not is_representable(fmt, torch.bfloat16):
        return False
    return _bits(fmt) + _scale_bits(scaling) <= _HELD


def _bits(element: Any) -> int:
    """Return the significant bits of a number of a format."""
    if isinstance(element, FloatFormat):
        return element.mantissa_bits + 1
    return element.bits - element.signed if isinstance(element, IntFormat) else 24


def _scale_bits(scaling: Scaling) -> int:
    """Return the significant bits of a scale beyond those of a power of two."""
    if scaling.scale != FP32:
        return scaling.scale.mantissa_bits and scaling.scale.mantissa_bits + 1
    powers = scaling.power_of_two is not None and scaling.candidates == (1.0,)
    return 0 if powers and all(math.frexp(s)[0] == 0.5 for s in scaling.allowed) else 24


def _element(fmt: Any) -> Any:
    return fmt.element if isinstance(fmt, BlockFormat) else fmt
