# SPDX-License-Identifier: Apache-2.0
"""What a quantiser is: transforms, a scale rule, a format and a rounding, and the rule of its gradient."""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch

from fmtsim.formats.block import BlockFormat, Format, ScaledFormat
from fmtsim.formats.element import FloatFormat, Overflow
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling, check_use
from fmtsim.rounding.modes import Rounding, RoundingName, get_rounding
from fmtsim.support.errors import FormatError, shown
from fmtsim.support.records import check_types, lists_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class StraightThrough:
    """Pass the gradient as if nothing had been rounded."""

    def __str__(self) -> str:
        return "straight through"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipMask:
    """Pass the gradient where ``|x / scale|`` is below the format's largest value, zero elsewhere."""

    def __str__(self) -> str:
        return "clip mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustMask:
    """Pass the gradient where rounding moved the element by no more than a number of scales, zero elsewhere.

    Args:
        limit: That number, in units of the scale.
    """

    limit: float = 0.5

    def __post_init__(self) -> None:
        check_types(self, FormatError)
        if not self.limit > 0:
            raise FormatError(f"TrustMask limit={self.limit!r} is not allowed; choose a number above 0")

    def __str__(self) -> str:
        return f"trust mask of {self.limit:g} scales"


@dataclass(frozen=True, slots=True, kw_only=True)
class Differentiable:
    """Multiply the gradient by the slope of a smooth step between neighbouring values (differentiable estimator, DGE).

    With ``u = 2 (x - low) / (high - low) - 1`` in the interval of the scaled element x, the slope is
    ``min(|u|^(1/k - 1) / k, cap)``, and zero outside the format's range.

    Args:
        k: Steepness of the step.
        cap: Largest slope.
    """

    k: float = 5.0
    cap: float = 3.0

    def __post_init__(self) -> None:
        check_types(self, FormatError)
        if not (self.k > 1 and self.cap > 0):
            raise FormatError(f"Differentiable k={self.k!r}, cap={self.cap!r} is not allowed; choose k > 1 and cap > 0")

    def __str__(self) -> str:
        return f"DGE k={self.k:g} cap={self.cap:g}"


GradientRule = StraightThrough | ClipMask | TrustMask | Differentiable


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Hadamard:
    """Rotate groups of neighbours by a Hadamard matrix.

    Args:
        size: Elements of a group; None rotates the whole axis.
        axis: ``"inner"``, the axis of the product's sums, where two rotations cancel; or ``"outer"``.
        signs: What each element of a group is multiplied with first: nothing, a bit mask (bit j set: element j changes
            its sign), or ``"random"`` signs, new in every forward and in every backward pass and the same for all
            operands in it. (Schemes that multiply the signs of the last pass by random ones draw from the same
            distribution.)
        rounded: Format in which the result is kept, None for float32.
        undo: Rotate the product back along the outer axis; along the inner one the rotations of two operands cancel.
    """

    size: int | None = 16
    axis: Literal["inner", "outer"] = "inner"
    signs: int | Literal["random"] | None = None
    rounded: FloatFormat | None = None
    undo: bool = False

    def __post_init__(self) -> None:
        check_types(self, FormatError)
        if self.size is not None and self.size < 2:
            raise FormatError(
                f"Hadamard size={self.size!r} is not allowed; choose 2 or more, or None for the whole axis"
            )
        mask = type(self.signs) is int and self.size is not None and 0 <= self.signs < 1 << self.size
        if not mask and self.signs not in (None, "random"):
            raise FormatError(
                f"Hadamard signs={self.signs!r} is not allowed; choose None, 'random' or a mask of size bits"
            )

    def __str__(self) -> str:
        words = [f"Hadamard {self.size or 'all'}"]
        words += ["of the outer axis"] if self.axis == "outer" else []
        words += ["random signs" if self.signs == "random" else f"signs {self.signs:#x}"] if self.signs else []
        words += [f"in {self.rounded.name}"] if self.rounded else []
        return ", ".join([*words, *(["undone"] if self.undo else [])])


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Clamp:
    """Clamp a tensor to its own quantiles.

    Args:
        level: The upper quantile, 0.5 to 1; the lower one is ``1 - level``.
        per: ``"tensor"``, or ``"row"`` for a quantile of each row.
        compensate: Add the product of what was cut off, in high precision, to the result (outlier compensation).
    """

    level: float
    per: Literal["tensor", "row"] = "tensor"
    compensate: bool = False

    def __post_init__(self) -> None:
        check_types(self, FormatError)
        if not 0.5 < self.level <= 1:
            raise FormatError(f"Clamp level={self.level!r} is not allowed; choose a quantile above 0.5, such as 0.99")

    def __str__(self) -> str:
        return f"clamp to {self.level:g} of each {self.per}{', compensated' if self.compensate else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
    """Keep two of every four neighbours, those of largest magnitude, and make the others zero (2:4 sparsity).

    Of equal magnitudes the earlier is kept; NaN counts as larger than any number. The gradient goes to all elements.

    Args:
        tiles: Keep two of four along both axes, so that the matrix and its transpose are sparse in one way: in a
            tile of 4 x 4, largest magnitude first, an element is kept where its row and its column have room (the rule
            of torch's ``_sparse_semi_structured_tile``, of magnitudes). A tile may then keep fewer than eight.
    """

    tiles: bool = False

    def __post_init__(self) -> None:
        check_types(self, FormatError)

    def __str__(self) -> str:
        return "2:4 sparse" + (" both ways" if self.tiles else "")


Transform = Hadamard | Clamp | Sparsity


Source = Literal["original", "forward", "requantised", "stored"]


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """Describe how one operand of one matrix product is quantised; called with a tensor, it quantises that.

    Verbs that take a format take a Quantizer as well. Blocks always run along the contraction axis of the product in
    question.

    Args:
        format: The target format, a record or what ``get_format`` takes; None leaves the operand in high precision
            (after its transforms).
        rounding: How values are rounded, a record or a name.
        overflow: What happens beyond the largest value; None means the format's own rule.
        scaling: How an element format is scaled; None means not at all, or as a block format says.
        transforms: What happens to the operand first, in order.
        source: What a product of the backward pass quantises: ``"original"``, the high-precision tensor;
            ``"forward"``, nothing: it takes the quantised tensor of the forward pass (for the second use of the
            gradient: of the first) as it is; ``"requantised"``, that quantised tensor, again.
            ``"stored"`` is for weights of a forward product that were rounded before: elements and scales are those
            that they were rounded with.
        gradient: What the gradient of the rounding is taken to be, for operands of the forward product.
        then: A quantiser that the values go through next, for schemes that simulate a format inside another.
        like: Another library whose cast to ``format`` this is (``fmtsim.list_profiles()``), blocks and scales included.
    """

    format: Format | None = field(default=None, kw_only=False)
    rounding: Rounding = Rounding()
    overflow: Overflow | None = None
    scaling: Scaling | None = None
    transforms: tuple[Transform, ...] = ()
    source: Source = "original"
    gradient: GradientRule = StraightThrough()
    then: "Quantizer | None" = None
    like: str = ""

    if TYPE_CHECKING:  # what is taken is more than what fields hold

        def __init__(
            self, format: str | Format | torch.dtype | None = None, *, rounding: RoundingName | Rounding = ...,
            overflow: Overflow | None = None, scaling: Scaling | None = None, transforms: tuple[Transform, ...] = (),
            source: Source = "original", gradient: GradientRule = ..., then: "Quantizer | None" = None, like: str = "",
        ) -> None: ...  # fmt: skip

    def __post_init__(self) -> None:
        if self.format is not None:  # names become records
            object.__setattr__(self, "format", get_format(self.format))
        object.__setattr__(self, "rounding", get_rounding(self.rounding))
        scaled = self.scaling is not None
        if scaled and not isinstance(self.scaling, Scaling):
            raise FormatError(f"Quantizer scaling={shown(self.scaling)} is not a Scaling; pass Scaling(block=..., ...)")
        check_types(self, FormatError)
        if scaled and (self.format is None or isinstance(self.format, ScaledFormat)):
            what = "no format" if self.format is None else f"{self.format.name}, which has blocks of its own"
            raise FormatError(f"Quantizer scaling= with {what}; pass an element format such as e4m3")
        if self.scaling is not None:
            check_use("Quantizer", self.scaling, "a quantiser")
            if self.scaling.level_block != (None, None):
                raise FormatError(
                    f"Quantizer scaling=[{self.scaling}]: pass a block format such as 'nvfp4_row' instead"
                )
            if self.scaling.empty == "previous" and self.scaling.history is None:
                raise FormatError("empty='previous' without a history is not allowed; choose history=, or empty='one'")
        if self.gradient != StraightThrough() and not scaled:
            raise FormatError(
                f"Quantizer gradient={shown(self.gradient)} needs the scaled elements; pass scaling= as well"
            )
        says_more = scaled or self.overflow is not None or self.rounding != Rounding() or self.source == "stored"
        if self.like and (self.format is None or says_more):
            raise FormatError(
                f"Quantizer like={shown(self.like)} says how to round and scale; pass format= and leave rounding=, "
                "overflow=, scaling= and source='stored' out"
            )
        if self.source == "stored" and (self.format is None or self.transforms or self.then is not None):
            raise FormatError(
                "Quantizer source='stored' takes a weight as it was rounded; pass format= without transforms"
            )
        if self.source == "forward" and (self.format is not None or self.transforms or self.then is not None):
            raise FormatError("Quantizer source='forward' takes what the forward pass made; leave the other fields out")

    def __call__(self, x: Any, **options: Any) -> Any:
        """Return ``fmtsim.quantize(x, self, **options)``.

        >>> Quantizer("e2m1")(torch.tensor([2.4, 100.0]))
        tensor([2., 6.])
        """
        import fmtsim  # its verbs lie above records

        return fmtsim.quantize(x, self, **options)

    def as_cast(self) -> "Quantizer":
        """Return the same cast by a format alone, as verbs on tensors take it: scales become those of a block format.

        Raises:
            FormatError: It is more than a cast, or its scale rule is none of block formats.

        >>> Quantizer("e4m3", scaling=Scaling(block=(1, 32))).as_cast().format.block
        (1, 32)
        """
        if self.format is None or self.transforms or self.then or self.source != "original":
            raise FormatError(f"Quantizer [{self}] is no cast to a format; fmtsim.quantize returns its values")
        if self.gradient != StraightThrough():
            raise FormatError(f"Quantizer gradient={self.gradient} belongs to layers; leave it out")
        if self.scaling is None:
            return self
        name = f"{self.format.name} [{self.scaling}]"
        try:
            return replace(self, scaling=None, format=BlockFormat(name, self.format, self.scaling))  # type: ignore[arg-type]
        except FormatError as error:
            reason = str(error).partition("; choose")[0]
            raise FormatError(f"Quantizer is no format ({reason}); fmtsim.quantize returns its values") from None

    @property
    def is_cast(self) -> bool:
        """Whether the quantiser is a cast by ``fmtsim.quantize`` and nothing else."""
        return not (self.scaling or self.transforms or self.then or self.like or self.source in ("forward", "stored"))

    @property
    def is_stochastic(self) -> bool:
        """Whether elements or scales are rounded by random numbers."""
        scales = self.scaling is not None and self.scaling.scale_rounding == "stochastic"
        return self.rounding.mode == "stochastic" or scales or (self.then is not None and self.then.is_stochastic)

    @property
    def has_random_signs(self) -> bool:
        """Whether a Hadamard transform has random signs."""
        return any(isinstance(transform, Hadamard) and transform.signs == "random" for transform in self.transforms)

    @property
    def is_random(self) -> bool:
        """Whether it needs random numbers of any kind."""
        later = self.then is not None and self.then.is_random
        return self.is_stochastic or self.has_random_signs or later

    def __str__(self) -> str:
        return self.text()

    def text(self, nearest_even: str = "") -> str:
        """Return the quantiser in words; ``nearest_even`` is what stands behind a format that is rounded so."""
        if self.source == "forward":
            return "the forward codes"
        words: list[str] = [] if self.source == "original" else [self.source]
        words += [str(transform) for transform in self.transforms]
        words.append(self._cast(nearest_even))
        words += [f"[{self.scaling}]"] if self.scaling else []
        words += [] if self.gradient == StraightThrough() else [str(self.gradient)]
        words += [f"then {self.then}"] if self.then else []
        return ", ".join(words)

    def _cast(self, nearest_even: str) -> str:
        if self.format is None:
            return "high precision"
        mode = nearest_even if self.rounding.mode == "nearest_even" else f" {self.rounding.mode}"
        like = f" like {self.like}" if self.like else ""
        return self.format.name + mode + (f" {self.overflow}" if self.overflow else "") + like


def scaling_for(scaling: Scaling, dtype: torch.dtype) -> Scaling:
    """Return a scale rule for tensors of a dtype: one with ``input_scale`` gets the format of that dtype."""
    return _stored_as(scaling, dtype) if scaling.input_scale else scaling


@lru_cache(maxsize=256)
def _stored_as(scaling: Scaling, dtype: torch.dtype) -> Scaling:
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    stored = scaling.scale if name is None else get_format(name)
    assert isinstance(stored, FloatFormat)
    return replace(scaling, input_scale=False, scale=stored)
