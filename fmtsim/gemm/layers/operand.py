"""What units are told of a quantised operand, and where its random numbers come from."""

from typing import Any, NamedTuple

from torch import Tensor

from fmtsim.errors import FormatError
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.layers.coding import Coded
from fmtsim.gemm.products.operands import operand_format
from fmtsim.spec.call import ScaleKind as Kind
from fmtsim.spec.operand import Operand
from fmtsim.spec.quantizer import Quantizer

_KINDS: dict[tuple[int | None, int | None, str], Kind] = {
    (None, None, "fp32"): "tensor",
    (None, None, "bf16"): "tensor",
    (1, None, "fp32"): "row",
    (1, None, "bf16"): "row",
    (1, 32, "e8m0"): "mx",
    (1, 16, "e4m3"): "nvfp4",
    (16, 16, "e4m3"): "nvfp4",
    (1, 128, "fp32"): "block_128",
    (128, 128, "fp32"): "block_128",
    (1, 128, "e8m0"): "block_128",
    (128, 128, "e8m0"): "block_128",
}


def coded(operand: Operand) -> Coded:
    """Return an operand as machines take it.

    Raises:
        FormatError: No unit multiplies elements or blocks of that kind.
    """
    fmt = operand.quantizer.format
    check_coded(operand.quantizer)
    if fmt is None:
        return Coded(operand.elements, operand_format("operand", operand.elements), "none")
    element = _element(fmt)
    assert isinstance(element, FloatFormat)
    if operand.scale is None:
        return Coded(operand.elements, element, "none")
    kind = _kind(operand)
    tall = operand.block[0] if kind != "tensor" else 1
    return Coded(operand.elements, element, kind, operand.scale, operand.tensor_scale, tall)


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


def _element(fmt: Any) -> Any:
    return fmt.element if isinstance(fmt, BlockFormat) else fmt
