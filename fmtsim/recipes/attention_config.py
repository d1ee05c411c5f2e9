# SPDX-License-Identifier: Apache-2.0
"""The record of quantised attention: quantisers of its products' operands, forward and backward, and the target."""

import math
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch

from fmtsim.formats.block import Block, BlockFormat
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling
from fmtsim.gemm.layers.config import Gemm, LinearConfig, element_format
from fmtsim.gemm.products.resolver import gemm_call, resolve
from fmtsim.gemm.targets.target import find_target
from fmtsim.gemm.units.unit import is_unit, machine_name, unit_takes
from fmtsim.recipes.build import BF16, FORWARD, HIGH, scale_format
from fmtsim.spec.datapath import Arithmetic
from fmtsim.spec.operand import block_of, last_cast
from fmtsim.spec.quantizer import Clamp, Hadamard, Quantizer, StraightThrough
from fmtsim.support.errors import ArgumentError, FormatError, shown
from fmtsim.support.records import check_types, located

BACKWARD: Final = ("dv", "dp", "dq", "dk")
_FORWARD: Final = ("q", "k", "v", "p")
_AFTER_FORWARD: Final = Gemm(a=HIGH, b=FORWARD)
_WIDE: Final = (BF16, scale_format("fp16"), scale_format("fp32"))  # in which units take what is in high precision
_TENSORS: Final = {"dv": ("p", "do"), "dp": ("do", "v"), "dq": ("ds", "k"), "dk": ("ds", "q")}


Tile = tuple[int, int, int]
"""``(rows, stride, run)``: in every tile of so many rows, runs of rows that lie ``stride`` apart share a scale."""


Exp2 = tuple[int, int, int]
"""``(frequency, count, start)``: some of the softmax's 2^x are FlashAttention-4's cubic polynomial (Cody-Waite).

A block of keys is cut into fragments of 32 columns. In each but the last, from fragment ``start`` on, pairs of columns
are emulated whose place in the fragment, modulo ``frequency``, is one of the last ``count``. Source:
Dao-AILab/flash-attention 0251105a, flash_attn/cute: ``ex2_emulation_2``, ``apply_exp2_convert``.
"""


class Product(NamedTuple):
    """One of the six products of attention as its unit sees it.

    Attributes:
        target: Unit or datapath, None for float32.
        names: Of the operands, as in ``AttentionConfig.operands``.
        quantizers: Which made the elements that are multiplied; one without a format where these are values.
        inner: Elements along the product's sums that share a scale, None for all.
    """

    target: Any
    names: tuple[str, str]
    quantizers: tuple[Quantizer, Quantizer]
    inner: tuple[int | None, int | None]


def element_formats(a: Quantizer, b: Quantizer) -> tuple[FloatFormat, FloatFormat] | None:
    """Return the formats of both operands, if a unit multiplies their elements; None if it multiplies values."""
    first, second = (element_format(last_cast(quantizer).format) for quantizer in (a, b))
    return (first, second) if isinstance(first, FloatFormat) and isinstance(second, FloatFormat) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Describe quantised attention: the operands of ``s = q k^T`` and ``p v``, and of their gradients.

    Backward, ``do`` is the gradient of the result and ``ds`` that of the scores; a Gemm names the quantisers of its two
    operands in the order that is written here. A quantiser with ``source="forward"`` takes the values of the forward
    pass, rotated and rounded as they were there; blocks run along the axis that the product sums over.

    Args:
        q, k, v, p: Quantisers; p is the matrix of softmax weights before normalisation.
        offset: Weights are ``2^offset`` times larger before they are quantised (8 in FlashAttention-3).
        columns: Keys of a block.
        rounded_sum: Divide by the sum of the quantised weights; False: of the unrounded ones, as FlashAttention-3 does.
        smooth_k: Remove the mean over all keys from k, which changes no weight (SageAttention).
        smooth_q: Remove the mean of every so many queries from q; its product with k, in high precision, is added to
            the scores (SageAttention 3). The means count as constants in gradients.
        q_tile, k_tile: Rows of q and k that share a scale lie apart (``Tile``), as a GPU's threads hold them.
        exp2: How 2^x of the weights is computed; None is torch's.
        target: The matrix unit or datapath of both forward products, None for float32; the Gemms of the gradients name
            their own. ``on`` takes the units of a GPU.
        dv: ``p^T do``, over the queries.
        dp: ``do v^T``, over the features of v.
        dq: ``ds k``, over the keys.
        dk: ``ds^T q``, over the queries.

    A unit multiplies elements, where both operands have such a format, and the float32 sums are scaled afterwards:
    scales are those of rows, or of blocks of rows. Where one operand is in high precision, it multiplies in the
    tensors' dtype (float32 where it takes that, else by a chain of float32 multiply-adds): elements that this dtype
    holds, if scales do not change along the sums, else values rounded to it. Softmax weights are values in the
    gradients: they are normalised after they were quantised, by the sum that ``rounded_sum`` names (that of unrounded
    ones leaves rows of p that do not sum to 1). A Datapath takes other formats' values in
    float32.

    Raises:
        ArgumentError, FormatError: A field that attention does not have, such as delayed scaling or a GPU with its
            library; operands that a unit does not multiply.
    """

    q: Quantizer = Quantizer()
    k: Quantizer = Quantizer()
    v: Quantizer = Quantizer()
    p: Quantizer = Quantizer()
    offset: float = 0
    columns: int = 128
    rounded_sum: bool = False
    smooth_k: bool = False
    smooth_q: int | None = None
    q_tile: Tile | None = None
    k_tile: Tile | None = None
    exp2: Exp2 | None = None
    target: Any = None
    dv: Gemm = Gemm(a=FORWARD, b=HIGH)
    dp: Gemm = _AFTER_FORWARD
    dq: Gemm = _AFTER_FORWARD
    dk: Gemm = _AFTER_FORWARD

    def __post_init__(self) -> None:
        for name in _FORWARD:
            quantizer = getattr(self, name)
            where = f"AttentionConfig {name}"
            _check_quantizer(where, quantizer)
            if quantizer.source != "original":
                raise FormatError(
                    f"{where} has source={quantizer.source!r}; only products of the backward pass choose one"
                )
            rotations = [transform for transform in quantizer.transforms if isinstance(transform, Hadamard)]
            if rotations and (name in "vp" or any(transform.axis == "outer" for transform in rotations)):
                raise FormatError(
                    f"{where} has a rotation ({rotations[0]}); q and k alone are rotated, along their features"
                )
            if name == "p" and quantizer.gradient != StraightThrough():
                raise FormatError(f"{where} has gradient={quantizer.gradient!r}; the weights' is straight through")
        for name in BACKWARD:
            gemm = getattr(self, name)
            if not isinstance(gemm, Gemm):
                raise ArgumentError(f"AttentionConfig {name}={shown(gemm)} is not a Gemm; pass Gemm(a=..., b=...)")
            plain = Gemm(a=gemm.a, b=gemm.b, target=gemm.target)
            if gemm != plain:
                raise ArgumentError(
                    f"AttentionConfig {name} has more than a=, b= and target=; leave its other fields out"
                )
            first = gemm.b if name == "dv" else gemm.a  # do, or ds
            for side, quantizer in (("a", gemm.a), ("b", gemm.b)):
                _check_quantizer(f"AttentionConfig {name}.{side}", quantizer)
                if any(
                    isinstance(transform, Hadamard) and transform.axis == "outer" for transform in quantizer.transforms
                ):
                    raise FormatError(f"AttentionConfig {name}.{side} rotates the outer axis; choose axis='inner'")
            if first.source != "original":
                raise FormatError(f"AttentionConfig {name}: a gradient has no forward values; leave source= out")
        if type(self.offset) not in (int, float) or not math.isfinite(self.offset):
            raise ArgumentError(f"AttentionConfig offset={shown(self.offset)} is not allowed; pass a finite number")
        if type(self.columns) is not int or self.columns < 1:
            raise ArgumentError(
                f"AttentionConfig columns={shown(self.columns)} is not allowed; pass a whole number from 1"
            )
        check_types(self)
        if self.smooth_q is not None and self.smooth_q < 1:
            raise ArgumentError(f"AttentionConfig smooth_q={self.smooth_q} is not allowed; pass 1 or more, or None")
        for name, tile in (("q_tile", self.q_tile), ("k_tile", self.k_tile)):
            if tile is not None and (min(tile) < 1 or tile[0] % tile[1] or tile[1] % tile[2]):
                raise ArgumentError(f"AttentionConfig {name}={tile} is no tile; each divides the number before it")
        if self.exp2 is not None and not (0 < self.exp2[1] <= self.exp2[0] and self.exp2[2] >= 0):
            raise ArgumentError(f"AttentionConfig exp2={self.exp2} is not allowed; keep 0 < count <= frequency")
        for name, product in self.products.items():
            if product.target is not None:
                with located(f"AttentionConfig {name}"):
                    _check_unit(product)

    def on(self, target: Any = None, **_: Any) -> "AttentionConfig":
        """Return the same attention with its six products on a unit or datapath, or on a GPU's units for them.

        No library has such a call: the accumulation order is that of the units alone, and what ``Recipe.on`` says of
        plans, accumulators and native calls means nothing here.

        Raises:
            ArgumentError, FormatError: A product whose operands the machine does not multiply; the message names both.
        """
        if target is not None and not is_unit(target):
            target = find_target(target)  # a GPU with its library, or a datapath as text
        units = dict.fromkeys(self.products, target)
        if target is not None and not is_unit(target):
            for name, product in self.products.items():
                a, b = element_formats(*product.quantizers) or (BF16, BF16)
                with located(f"AttentionConfig {name}"):
                    units[name] = target.takes(a.name, b.name, "fp32", "none")
        gradients = {name: replace(getattr(self, name), target=units[name]) for name in BACKWARD}
        return replace(self, target=units["s"], **gradients)

    @property
    def products(self) -> dict[str, Product]:
        """The products: ``"s"``, ``q k^T``, ``"o"``, ``p v``, and those of the gradients."""
        products = {}
        for name, tensors in (("s", ("q", "k")), ("o", ("p", "v"))):
            pair = getattr(self, tensors[0]), getattr(self, tensors[1])
            products[name] = Product(self.target, tensors, pair, (_block(pair[0])[1], _block(pair[1])[1]))
        for name, tensors in _TENSORS.items():
            gemm: Gemm = getattr(self, name)
            (a, of_a), (b, of_b) = map(self._multiplied, tensors, (gemm.a, gemm.b))
            products[name] = Product(
                gemm.target, (f"{name}.{tensors[0]}", f"{name}.{tensors[1]}"), (a, b), (of_a, of_b)
            )
        return products

    def _multiplied(self, tensor: str, quantizer: Quantizer) -> tuple[Quantizer, int | None]:
        """Return what made the elements of an operand of a gradient, and how many along its sums share a scale."""
        if quantizer.source != "forward":
            return quantizer, _block(quantizer)[1]
        source_quantizer = HIGH if tensor == "p" else getattr(self, tensor)  # normalised weights are values
        return source_quantizer, _block(source_quantizer)[0]

    @property
    def has_unit(self) -> bool:
        """Whether a unit multiplies in any of the products."""
        return any(product.target is not None for product in (self, self.dv, self.dp, self.dq, self.dk))

    @property
    def is_random(self) -> bool:
        """Whether it needs random numbers."""
        return any(quantizer.is_random for quantizer in self.operands.values())

    @property
    def operands(self) -> dict[str, Quantizer]:
        """The quantisers by tensor, those of a backward product as ``product.tensor``."""
        operands = {name: getattr(self, name) for name in _FORWARD}
        for name, tensors in _TENSORS.items():
            gemm: Gemm = getattr(self, name)
            operands |= {f"{name}.{tensors[0]}": gemm.a, f"{name}.{tensors[1]}": gemm.b}
        return operands

    def __str__(self) -> str:
        words = [f"q and k {self.q}"] if self.q == self.k else [f"q {self.q}", f"k {self.k}"]
        words += [f"v {self.v}", f"p {self.p}{f', 2^{self.offset:g} times as large' if self.offset else ''}"]
        words += ["k less its mean"] if self.smooth_k else []
        words += [f"q less the mean of each {self.smooth_q} rows"] if self.smooth_q else []
        tiles = (("q", self.q_tile), ("k", self.k_tile))
        words += [f"{name} in tiles of {t[0]} rows, {t[2]} of each {t[1]}" for name, t in tiles if t]
        words += [f"2^x by a polynomial {self.exp2}"] if self.exp2 else []
        words += [f"on {machine_name(self.target)}"] if self.target is not None else []
        default = {name: type(self).__dataclass_fields__[name].default for name in BACKWARD}
        gemms = {name: getattr(self, name) for name in BACKWARD}
        changed = [name for name, gemm in gemms.items() if replace(gemm, target=None) != default[name]]
        machines = {
            name: "" if gemm.target is None else f" on {machine_name(gemm.target)}" for name, gemm in gemms.items()
        }
        words += [f"{name} of {gemms[name].a} with {gemms[name].b}{machines[name]}" for name in changed]
        rest = {name: machines[name] for name in BACKWARD if name not in changed}
        if not changed or any(rest.values()):
            where = set(rest.values())
            text = where.pop() if len(where) == 1 else "".join(f", {name}{on}" for name, on in rest.items() if on)
            words.append(f"{'other ' if changed else ''}gradients in high precision{text}")
        return "; ".join(words)


def attention_like(config: LinearConfig) -> AttentionConfig:
    """Return attention whose operands are rounded as a layer's activations and gradients, in float32 on no machine."""
    x, g = config.fprop.a, config.dgrad.a
    after = Gemm(a=g, b=FORWARD)
    return AttentionConfig(q=x, k=x, v=x, p=x, dv=Gemm(a=FORWARD, b=g), dp=after, dq=after, dk=after)


def _block(quantizer: Quantizer) -> Block:
    """Return rows and inner elements that share a scale; without scales, all do."""
    last = last_cast(quantizer)
    return block_of(quantizer) if last.scaling is not None or isinstance(last.format, BlockFormat) else (None, None)


def _check_unit(product: Product) -> None:
    """Refuse operands that a unit does not multiply."""
    unit, quantizers = product.target, product.quantizers
    if not is_unit(unit):
        raise ArgumentError(
            f"target={shown(unit)} is a GPU with its library, which has no call for attention; choose a unit or a "
            "Datapath, or call AttentionConfig.on, which takes that GPU's units"
        )
    operands = dict(zip(product.names, map(last_cast, quantizers), strict=True))
    high = [name for name, quantizer in operands.items() if quantizer.format is None]
    wide_format = next((fmt for fmt in _WIDE if unit_takes(unit, fmt)), None)
    if high and wide_format is None:
        raise ArgumentError(
            f"{high[0]} is in high precision, and {machine_name(unit)} multiplies neither 16-bit floats nor float32; "
            f"give {high[0]} a quantiser, or choose another unit"
        )
    for name, quantizer in {} if high else operands.items():
        if not isinstance(element_format(quantizer.format), FloatFormat) and not isinstance(unit, Arithmetic):
            raise FormatError(
                f"{machine_name(unit)} multiplies elements of floating-point formats, and {name} is {quantizer}; "
                "choose another format, pass a Datapath, which takes the values, or leave target= out"
            )
        fmt, scaling = quantizer.format, quantizer.scaling
        if scaling.tensor if scaling else isinstance(fmt, BlockFormat) and fmt.tensor_scale:
            raise ArgumentError(f"{name} has two levels of scales ({quantizer}); choose one, or leave target= out")
    a, b = element_formats(*quantizers) or (wide_format or BF16,) * 2
    resolve(gemm_call("mm", (a, b), (0, 0, 0), torch.float32, target=unit))


def _check_quantizer(where: str, quantizer: Any) -> None:
    if not isinstance(quantizer, Quantizer):
        raise ArgumentError(f"{where}={shown(quantizer)} is not a Quantizer; pass Quantizer(format=...)")
    if quantizer.source == "stored":
        raise FormatError(f"{where} has source='stored', which weights of layers have; leave source= out")
    if any(isinstance(transform, Clamp) and transform.compensate for transform in quantizer.transforms):
        raise FormatError(f"{where} has Clamp(compensate=True), which attention does not; leave compensate= out")
    if quantizer.scaling is not None and quantizer.scaling.history is not None:
        raise FormatError(f"{where} has a history, and attention remembers nothing; choose Scaling without history=")


def flash_attention_3(*, target: Any = "hopper.wgmma", rotate: bool = True, blocks: bool = True) -> AttentionConfig:
    """Return the FP8 attention of FlashAttention-3 (Shah et al., arXiv:2407.08608, section 3.3).

    Args:
        target: The matrix unit of both products; None multiplies in float32.
        rotate: Incoherent processing: random signs and a Hadamard matrix over q and k.
        blocks: A scale for every 128 queries and keys; else one a head, as the released kernels take them.
    """
    e4m3 = get_format("e4m3")
    across, along = (Scaling(block=(128, None)), Scaling(block=(None, 128))) if blocks else (Scaling(), Scaling())
    rotation = (Hadamard(size=None, signs="random"),) if rotate else ()
    qk = Quantizer(format=e4m3, scaling=across, transforms=rotation)
    v = Quantizer(format=e4m3, scaling=along)
    return AttentionConfig(q=qk, k=qk, v=v, p=Quantizer(format=e4m3), offset=8, target=target)
