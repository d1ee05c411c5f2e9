# SPDX-License-Identifier: Apache-2.0
"""The weights of a quantised model as codes and scales, with what the layers do to their inputs."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fmtsim.casts.encoded import Encoded
from fmtsim.casts.quantize import encode
from fmtsim.formats.block import BlockFormat, PackedFormat
from fmtsim.formats.element import ElementFormat, FloatFormat, IntFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling, TensorScale
from fmtsim.gemm.layers.quantize_operand import quantize_operand
from fmtsim.nn.conversion import STATE, root
from fmtsim.nn.modules import EmulatedLinear
from fmtsim.nn.state import converted_modules
from fmtsim.ptq.calibrate import check_loaded
from fmtsim.ptq.export.stored_tensors import spread_over
from fmtsim.ptq.ptq_state import Quantised, RoundedWeight
from fmtsim.ptq.reshape import DIVISOR, transform_input
from fmtsim.scaling.history import DelayedScale, StoredScale
from fmtsim.spec.operand import Operand, block_of
from fmtsim.spec.quantizer import Quantizer, Sparsity
from fmtsim.support.errors import ArgumentError

_E4M3 = get_format("e4m3")
assert isinstance(_E4M3, FloatFormat)
OMIT = "leave the layer out with ignore="  # about a layer whose sizes a layout does not take


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodedWeight:
    """Hold the weight of a linear layer as its elements and scales.

    Args:
        layer: The layer's name.
        element: Format of the elements.
        elements: Values of that format, [outputs, inputs].
        scale: float32 [row blocks, inner blocks].
        tensor_scale: float32, 0-d, of formats with a scale of the tensor, else None.
        block: Rows and columns that share a scale, none beyond the matrix.
        dtype: The Parameter's.
        x: Quantiser of the inputs.
        x_scale: float32, 0-d: the static scale of the inputs, None without.
        blocks: uint8 [outputs, bytes]: the weight in ggml's blocks, where ``element`` is such a format, else None.
    """

    layer: str
    element: ElementFormat | PackedFormat
    elements: Tensor
    scale: Tensor
    tensor_scale: Tensor | None
    block: tuple[int, int]
    dtype: torch.dtype
    x: Quantizer
    x_scale: Tensor | None
    blocks: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """What elements and scales give, float32, rounded once."""
        if self.blocks is not None:
            fmt: Any = self.element
            return Encoded(format=fmt, shape=self.elements.shape, dim=-1, codes=self.blocks).decode()
        elements = self.elements.double() + 0.0 if self.is_integer else self.elements.double()  # codes have no -0
        second = 1.0 if self.tensor_scale is None else self.tensor_scale.double()
        return (spread_over(elements, self.scale.double()) * second).float()

    @property
    def kind(self) -> str:
        """Its elements and what shares a scale, in words."""
        name = self.element.name
        return name if self.blocks is not None else f"{name} in blocks of {self.block}"

    def check_blocks(self) -> None:
        """Raise ArgumentError where blocks do not divide the weight."""
        rows, columns = self.elements.shape
        if rows % self.block[0] or columns % self.block[1]:
            raise self.refuse(f"blocks of {self.block} do not divide {rows} x {columns}", OMIT)

    @property
    def codes(self) -> Tensor:
        """Codes of the elements, unsigned."""
        return encode(self.elements.float(), self.element).unpacked()

    @property
    def integers(self) -> Tensor:
        """Elements of a signed integer format of at most 8 bits, int8."""
        return self.elements.to(torch.int8)

    @property
    def powers(self) -> Tensor:
        """Scales that are powers of two as codes of E8M0, uint8."""
        return encode(self.scale, "e8m0").unpacked()

    @property
    def per(self) -> str:
        """What shares a scale: ``"tensor"``, ``"channel"``, ``"group"`` or ``"block"``."""
        rows, columns = self.block
        if self.scale.numel() == 1:
            return "tensor" if self.elements.shape[0] > 1 or columns >= self.elements.shape[1] else "group"
        if rows > 1:
            return "block"
        return "channel" if columns >= self.elements.shape[1] else "group"

    @property
    def is_integer(self) -> bool:
        """Whether elements are signed integers of 8 bits or fewer, under real scales and no other."""
        e = self.element
        plain = isinstance(e, IntFormat) and e.signed and not e.fraction_bits and e.bits <= 8
        return plain and self.tensor_scale is None

    def is_mx(self, element: str) -> bool:
        """Return True if this is the MX format of an element: blocks of 32 under powers of two."""
        powers = bool(torch.frexp(self.scale).mantissa.eq(0.5).all())
        return self.is_element(element) and self.block == (1, 32) and self.tensor_scale is None and powers

    def is_element(self, name: str) -> bool:
        """Return True if elements are of a format by its name."""
        return self.element == get_format(name)

    @property
    def inputs(self) -> str:
        """How inputs are quantised, in a word: ``"none"``, ``"static"``, ``"tensor"``, ``"token"``, ``"token_zp"``,
        ``"mx"``, ``"nvfp4_static"`` (the scale of the tensor is static), or the quantiser itself where none
        of these fits."""
        fmt, block = self.x.format, block_of(self.x)
        if self.x.transforms or self.x.then is not None:
            return str(self.x)
        if fmt is None:
            return "none"
        if isinstance(fmt, BlockFormat) and (fmt.zero_point or fmt.power_of_two):
            return "token_zp" if fmt == get_format("uint8_channel_zp") else "mx" if block == (1, 32) else str(self.x)
        scaling = self.x.scaling
        if self.x_scale is not None and scaling is not None and scaling.tensor is not None:
            nvfp4 = Scaling(block=(1, 16), scale=_E4M3, tensor=TensorScale())  # type: ignore[arg-type]  # a float's record
            return "nvfp4_static" if self.inputs_are("e2m1") and scaling == nvfp4 else str(self.x)
        kinds: dict[Any, str] = {(1, None): "token", (None, None): "tensor" if self.x_scale is None else "static"}
        return kinds.get(block, str(self.x))

    def inputs_are(self, name: str) -> bool:
        """Return True if elements of the inputs are of a format by its name."""
        fmt = self.x.format
        return (fmt.element if isinstance(fmt, BlockFormat) else fmt) == get_format(name)

    def refuse(self, what: str, hint: str) -> ArgumentError:
        """Return the error for a layer that an export layout cannot store."""
        return ArgumentError(f"layer {self.layer!r}: {what}; {hint}")


def weights_of(model: nn.Module) -> tuple[list[CodedWeight], dict[str, Tensor]]:
    """Return the linear weights that a model quantises, and every other tensor of its state_dict by name.

    Raises:
        ArgumentError: Nothing is quantised, a weight was changed after ``fmtsim.ptq``, is offloaded, or has no codes
            of its own.
    """
    check_loaded(model)
    quantised: Quantised | None = root(model).quantised
    rounded: dict[str, RoundedWeight] = {} if quantised is None else quantised.weights
    coded = []
    for name, module in converted_modules(model, "export"):
        rotated = transform_input in module._forward_pre_hooks.values()
        if rotated or DIVISOR in module._buffers:
            what, option = ("rotated", "Rotate(online=True)") if rotated else ("divided by channel", "smooth=")
            raise ArgumentError(
                f"layer {name!r}: its inputs are {what} at every call, for which layouts have no place; "
                f"choose a recipe without {option}"
            )
        if isinstance(module, EmulatedLinear) and (coded_weight := _coded(name, module, rounded.get(name))) is not None:
            coded.append(coded_weight)
    if not coded:
        kinds = {module.original_class.__name__ for _, module in converted_modules(model, "export")} - {"Linear"}
        if rounded and kinds:
            raise ArgumentError(
                f"the quantised layers of {type(model).__name__} are {', '.join(sorted(kinds))}, and layouts have "
                "codes of nn.Linear alone; save it by fmtsim.state(model)"
            )
        raise ArgumentError(
            f"{type(model).__name__} has no linear layer with a quantised weight; call fmtsim.ptq(model, recipe, data) "
            "first, or train it under a recipe that quantises weights"
        )
    taken = {f"{weight.layer}.weight" for weight in coded}
    rest = {
        name: t.detach().cpu().contiguous()
        for name, t in model.state_dict().items()
        if name not in taken and STATE not in name.split(".")
    }
    return coded, rest


def _coded(name: str, module: Any, rounded: RoundedWeight | None) -> CodedWeight | None:
    if not name:
        raise ArgumentError("the model is a single layer, whose weight has no layer's name; wrap it in nn.Sequential")
    assert module.emulation is not None
    product, w = module.emulation.config.fprop, module.weight.detach()
    if rounded is None:  # a model in training: the weight is rounded in every forward pass
        if product.b.format is None or product.b.source == "stored":
            return None
        rotates = any(not isinstance(t, Sparsity) for t in product.b.transforms)
        if rotates or product.b.then is not None or product.b.is_random:
            raise ArgumentError(
                f"layer {name!r}: its weight is {product.b}, not one set of codes; choose a recipe that casts weights "
                "alone"
            )
        operand, x = _with_codes(name, quantize_operand(w, product.b)), product.a
    else:
        # elements and scales that fmtsim.ptq rounded, if they still give the weight
        quantizer = replace(rounded.w, source="stored", transforms=())
        if isinstance(fmt := rounded.w.format, PackedFormat) and rounded.blocks is not None:
            values = Encoded(format=fmt, shape=w.shape, dim=-1, codes=rounded.blocks.to(w.device)).decode()
            operand = Operand(values, quantizer)
        elif rounded.scale is None:
            operand = quantize_operand(w, replace(rounded.w, transforms=()))
        else:
            scales = StoredScale(rounded.scale.to(w.device), rounded.tensor_scale)
            operand = quantize_operand(w, quantizer, state=scales.to(w.device))
        if not torch.equal(_with_codes(name, operand).values(torch.float32).to(w.dtype), w):
            raise ArgumentError(
                f"layer {name!r}: its weight is not what fmtsim.ptq rounded, or was rounded under scales or zero "
                "points of GPTQ or HQQ; quantise again, with Gptq(groups='static')"
            )
        x = rounded.x
    blocks = None if rounded is None else rounded.blocks
    if isinstance(operand.quantizer.format, PackedFormat):
        blocks = encode(w, operand.quantizer.format, pad=True).codes if blocks is None else blocks
    fmt, block, scale, tensor_scale = operand.quantizer.format, operand.block, operand.scale, operand.tensor_scale
    element: Any = fmt.element if isinstance(fmt, BlockFormat) else fmt
    memory = dict(module._modules[STATE].named_children()).get("x_f") if STATE in module._modules else None
    x_scale = memory.scales().scale.reshape(()).cpu() if isinstance(memory, DelayedScale) else None
    one = torch.ones(1, 1) if tensor_scale is None else tensor_scale.reshape(1, 1)
    return CodedWeight(
        layer=name, element=element, elements=operand.elements.cpu(), scale=(scale if scale is not None else one).cpu(),
        tensor_scale=None if scale is None or tensor_scale is None else tensor_scale.cpu(),
        block=w.shape if scale is None else (min(block[0], w.shape[0]), min(block[1], w.shape[1])),
        dtype=w.dtype, x=x, x_scale=x_scale, blocks=None if blocks is None else blocks.cpu(),
    )  # fmt: skip


def _with_codes(name: str, operand: Operand) -> Operand:
    """Refuse an operand whose elements have no codes, or whose scales are multiplied in."""
    fmt = operand.quantizer.format
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    hidden = isinstance(fmt, BlockFormat) and (operand.scale is None or operand.has_row_level)
    if hidden or not isinstance(element, FloatFormat | IntFormat | PackedFormat):
        raise ArgumentError(
            f"layer {name!r}: weights are {operand.quantizer}, whose scales are not kept apart; choose floating-point "
            "or symmetric integer elements"
        )
    return operand
