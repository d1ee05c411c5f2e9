"""What quantised attention is: quantisers of the operands of its products, forward and backward, and who multiplies."""

from dataclasses import dataclass, replace
from typing import Any, Final

from fmtsim.errors import ArgumentError, FormatError, shown
from fmtsim.formats.registry import get_format
from fmtsim.gemm.layers.config import Gemm
from fmtsim.gemm.layers.route import element_of
from fmtsim.gemm.targets.target import get_target
from fmtsim.gemm.units.unit import describe, get_unit
from fmtsim.recipes.build import FORWARD, HIGH
from fmtsim.records import check_types
from fmtsim.spec.datapath import Arithmetic
from fmtsim.spec.gradient import StraightThrough
from fmtsim.spec.operand import last_cast
from fmtsim.spec.quantizer import Quantizer
from fmtsim.spec.scaling import Scaling
from fmtsim.spec.transform import Clamp, Hadamard

BACKWARD: Final = ("dv", "dp", "dq", "dk")
_FORWARD: Final = ("q", "k", "v", "p")
_AFTER_FORWARD: Final = Gemm(a=HIGH, b=FORWARD)


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
        unit: The matrix unit of both forward products, None for float32.
        dv: ``p^T do``, over the queries.
        dp: ``do v^T``, over the features of v.
        dq: ``ds k``, over the keys.
        dk: ``ds^T q``, over the queries.

    Raises:
        ArgumentError, FormatError: A field that attention does not have, such as delayed scaling or a target.
    """

    q: Quantizer = Quantizer()
    k: Quantizer = Quantizer()
    v: Quantizer = Quantizer()
    p: Quantizer = Quantizer()
    offset: int = 0
    columns: int = 128
    unit: Any = None
    dv: Gemm = Gemm(a=FORWARD, b=HIGH)
    dp: Gemm = _AFTER_FORWARD
    dq: Gemm = _AFTER_FORWARD
    dk: Gemm = _AFTER_FORWARD

    def __post_init__(self) -> None:
        for name in _FORWARD:
            _check_forward(name, getattr(self, name))
        for name in BACKWARD:
            _check_backward(name, getattr(self, name))
        if type(self.offset) is not int:
            raise ArgumentError(
                f"AttentionConfig offset={shown(self.offset)} is not a whole number; pass one, such as 8"
            )
        if type(self.columns) is not int or self.columns < 1:
            raise ArgumentError(
                f"AttentionConfig columns={shown(self.columns)} is not allowed; pass a whole number from 1"
            )
        check_types(self)
        if self.unit is not None and not isinstance(self.unit, Arithmetic):
            get_unit(self.unit)

    def on(self, target: Any = None, unit: Any = None, **_: Any) -> "AttentionConfig":
        """Return the same attention on a unit, or on a target's unit for its operands: no library has such a call."""
        if target is not None:
            q, k = (getattr(element_of(last_cast(x).format), "name", "bf16") for x in (self.q, self.k))
            unit = get_target(target).takes(q, k, "fp32", "none")
        return replace(self, unit=unit)

    @property
    def is_random(self) -> bool:
        """Whether it needs random numbers."""
        return any(quantizer.is_random for quantizer in self.operands.values())

    @property
    def operands(self) -> dict[str, Quantizer]:
        """The quantisers by tensor, those of a backward product as ``product.tensor``."""
        found = {name: getattr(self, name) for name in _FORWARD}
        for name, tensors in zip(BACKWARD, (("p", "do"), ("do", "v"), ("ds", "k"), ("ds", "q")), strict=True):
            gemm: Gemm = getattr(self, name)
            found |= {f"{name}.{tensors[0]}": gemm.a, f"{name}.{tensors[1]}": gemm.b}
        return found

    def __str__(self) -> str:
        words = [f"q and k {self.q}"] if self.q == self.k else [f"q {self.q}", f"k {self.k}"]
        words += [f"v {self.v}", f"p {self.p}{f', 2^{self.offset} times as large' if self.offset else ''}"]
        if self.unit is not None:
            words.append(f"on {describe(self.unit) if isinstance(self.unit, Arithmetic) else self.unit}")
        own = [name for name in BACKWARD if getattr(self, name) != type(self).__dataclass_fields__[name].default]
        words += [f"{name} of {getattr(self, name).a} with {getattr(self, name).b}" for name in own]
        return "; ".join([*words, *([] if own else ["gradients in high precision"])])


def _check_forward(name: str, quantizer: Any) -> None:
    where = f"AttentionConfig {name}"
    _check_quantizer(where, quantizer)
    if quantizer.source != "original":
        raise FormatError(f"{where} has source={quantizer.source!r}; only products of the backward pass choose one")
    rotations = [transform for transform in quantizer.transforms if isinstance(transform, Hadamard)]
    if rotations and (name in "vp" or any(transform.axis == "outer" for transform in rotations)):
        raise FormatError(f"{where} has a rotation ({rotations[0]}); q and k alone are rotated, along their features")
    if name == "p" and quantizer.gradient != StraightThrough():
        raise FormatError(f"{where} has gradient={quantizer.gradient!r}; the weights' is straight through")


def _check_backward(name: str, gemm: Any) -> None:
    if not isinstance(gemm, Gemm):
        raise ArgumentError(f"AttentionConfig {name}={shown(gemm)} is not a Gemm; pass Gemm(a=..., b=...)")
    plain = Gemm(a=gemm.a, b=gemm.b, unit=gemm.unit)
    if gemm != plain:
        raise ArgumentError(f"AttentionConfig {name} has more than a=, b= and unit=; leave its other fields out")
    first = gemm.b if name == "dv" else gemm.a  # do, or ds
    for side, quantizer in (("a", gemm.a), ("b", gemm.b)):
        _check_quantizer(f"AttentionConfig {name}.{side}", quantizer)
        if any(isinstance(transform, Hadamard) and transform.axis == "outer" for transform in quantizer.transforms):
            raise FormatError(f"AttentionConfig {name}.{side} rotates the outer axis; choose axis='inner'")
    if first.source != "original":
        raise FormatError(f"AttentionConfig {name}: a gradient has no forward values; leave source= out")


def _check_quantizer(where: str, quantizer: Any) -> None:
    if not isinstance(quantizer, Quantizer):
        raise ArgumentError(f"{where}={shown(quantizer)} is not a Quantizer; pass Quantizer(format=...)")
    if any(isinstance(transform, Clamp) and transform.compensate for transform in quantizer.transforms):
        raise FormatError(f"{where} has Clamp(compensate=True), which attention does not; leave compensate= out")
    if quantizer.scaling is not None and quantizer.scaling.history is not None:
        raise FormatError(f"{where} has a history, and attention remembers nothing; choose Scaling without history=")


def flash_attention_3(*, unit: Any = "hopper.wgmma", rotate: bool = True, blocks: bool = True) -> AttentionConfig:
    """Return the FP8 attention of FlashAttention-3 (Shah et al., arXiv:2407.08608, section 3.3).

    Args:
        unit: The matrix unit of both products; None multiplies in float32.
        rotate: Incoherent processing: random signs and a Hadamard matrix over q and k.
        blocks: A scale for every 128 queries and keys; else one a head, as the released kernels take them.
    """
    e4m3 = get_format("e4m3")
    across, along = (Scaling(block=(128, None)), Scaling(block=(None, 128))) if blocks else (Scaling(), Scaling())
    rotation = (Hadamard(size=None, signs="random"),) if rotate else ()
    qk = Quantizer(format=e4m3, scaling=across, transforms=rotation)
    v = Quantizer(format=e4m3, scaling=along)
    return AttentionConfig(q=qk, k=qk, v=v, p=Quantizer(format=e4m3), offset=8, unit=unit)
