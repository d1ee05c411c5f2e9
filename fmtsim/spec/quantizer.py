# SPDX-License-Identifier: Apache-2.0
"""What a quantiser is: transforms, a scale rule, a format and a rounding, and what its gradient is."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import torch

from fmtsim.formats.block import BlockFormat, Format, LogTileFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat, Overflow
from fmtsim.rounding.modes import Rounding, RoundingName, get_rounding
from fmtsim.spec.gradient import GradientRule, StraightThrough
from fmtsim.spec.scaling import Scaling
from fmtsim.spec.transform import Hadamard, Transform
from fmtsim.support.errors import FormatError, shown
from fmtsim.support.records import check_types

Source = Literal["original", "forward", "requantised", "stored"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """Describe how one operand of one matrix product is quantised.

    Blocks always run along the contraction axis of the product in question.

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
    """

    format: Format | None = None
    rounding: Rounding = Rounding()
    overflow: Overflow | None = None
    scaling: Scaling | None = None
    transforms: tuple[Transform, ...] = ()
    source: Source = "original"
    gradient: GradientRule = StraightThrough()
    then: "Quantizer | None" = None

    if TYPE_CHECKING:  # what is taken is more than what fields hold

        def __init__(
            self, *, format: str | Format | torch.dtype | None = None, rounding: RoundingName | Rounding = ...,
            overflow: Overflow | None = None, scaling: Scaling | None = None, transforms: tuple[Transform, ...] = (),
            source: Source = "original", gradient: GradientRule = ..., then: "Quantizer | None" = None,
        ) -> None: ...  # fmt: skip

    def __post_init__(self) -> None:
        if self.format is not None:  # names become records
            object.__setattr__(self, "format", get_format(self.format))
        object.__setattr__(self, "rounding", get_rounding(self.rounding))
        scaled = self.scaling is not None
        if scaled and not isinstance(self.scaling, Scaling):
            raise FormatError(f"Quantizer scaling={shown(self.scaling)} is not a Scaling; pass Scaling(block=..., ...)")
        check_types(self, FormatError)
        if scaled and (self.format is None or isinstance(self.format, BlockFormat | LogTileFormat)):
            what = "no format" if self.format is None else f"{self.format.name}, which has blocks of its own"
            raise FormatError(f"Quantizer scaling= with {what}; pass an element format such as e4m3")
        if self.scaling is not None and (self.scaling.exponent_rule or self.scaling.zero_point):
            raise FormatError(
                f"Quantizer scaling=[{self.scaling}] is that of a block format; pass BlockFormat(element=, scaling=)"
            )
        if self.gradient != StraightThrough() and not scaled:
            raise FormatError(
                f"Quantizer gradient={shown(self.gradient)} needs the scaled elements; pass scaling= as well"
            )
        if self.source == "stored" and (self.format is None or self.transforms or self.then is not None):
            raise FormatError(
                "Quantizer source='stored' takes a weight as it was rounded; pass format= without transforms"
            )
        if self.source == "forward" and (self.format is not None or self.transforms or self.then is not None):
            raise FormatError("Quantizer source='forward' takes what the forward pass made; leave the other fields out")

    @property
    def is_cast(self) -> bool:
        """Whether a cast by ``fmtsim.quantize`` is all there is to it."""
        return self.scaling is None and not self.transforms and self.then is None and self.source == "original"

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
        if self.source == "forward":
            return "the forward codes"
        words: list[str] = [] if self.source == "original" else [self.source]
        words += [str(transform) for transform in self.transforms]
        words.append(self._cast())
        words += [f"[{self.scaling}]"] if self.scaling else []
        words += [] if self.gradient == StraightThrough() else [str(self.gradient)]
        words += [f"then {self.then}"] if self.then else []
        return ", ".join(words)

    def _cast(self) -> str:
        if self.format is None:
            return "high precision"
        mode = "" if self.rounding.mode == "nearest_even" else f" {self.rounding.mode}"
        return self.format.name + mode + (f" {self.overflow}" if self.overflow else "")


def scaling_for(scaling: Scaling, dtype: torch.dtype) -> Scaling:
    """Return a scale rule for tensors of a dtype: one with ``input_scale`` gets the format of that dtype."""
    return _stored_as(scaling, dtype) if scaling.input_scale else scaling


@lru_cache(maxsize=256)
def _stored_as(scaling: Scaling, dtype: torch.dtype) -> Scaling:
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    stored = scaling.scale if name is None else get_format(name)
    assert isinstance(stored, FloatFormat)
    return replace(scaling, input_scale=False, scale=stored)
