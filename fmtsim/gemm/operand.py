"""One operand of a product under a quantiser with more to it than a cast: transforms, scale rules, gradient rules."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.errors import ArgumentError, FormatError
from fmtsim.formats.block import Block, BlockFormat, LogTileFormat
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.gemm.call import Scaling as Kind
from fmtsim.gemm.choice import draw_keys
from fmtsim.gemm.coding import Coded, code, holder
from fmtsim.gemm.operands import operand_format
from fmtsim.ops import RandomKey
from fmtsim.quantize import quantize
from fmtsim.scaling.cast import Scaled, cast, spread
from fmtsim.scaling.hadamard import hadamard
from fmtsim.scaling.history import DelayedScale
from fmtsim.scaling.quantizer import Quantizer
from fmtsim.scaling.scale import Scaling
from fmtsim.scaling.signs import random_signs
from fmtsim.scaling.slope import slope
from fmtsim.scaling.statistics import block_sizes, statistic
from fmtsim.scaling.transform import Clamp, Hadamard, Transform

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
        elements: Values of the element format, in a dtype that holds them.
        quantizer: What made them.
        scale: float32 [row blocks, inner blocks], or None.
        tensor: float32, 0-d: the scale of the whole matrix, or None.
        sizes: Rows and columns of a block.
        slope: float32: what the gradient of an element is multiplied with, or None.
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
        return self.tensor is None and (self.scale is None or self.scale.shape[1] == 1)

    def row_scales(self) -> Tensor | None:
        """Return the scale of every row, [rows, 1] or [1, 1], of an operand that is ``outer``."""
        rows = self.elements.shape[0]
        if self.scale is None or self.scale.shape[0] in (1, rows):
            return self.scale
        return self.scale.repeat_interleave(self.sizes[0], 0)[:rows]

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return what the elements stand for, rounded once to float32 or float64."""
        x = self.elements.to(torch.float64 if dtype == torch.float64 else torch.float32)
        if self.scale is None:
            return x
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
        if self.quantizer.then is not None or not isinstance(_element(fmt), FloatFormat | None):
            raise FormatError(f"no unit multiplies operands quantised as {self.quantizer}; leave unit= and target= out")
        if fmt is None:
            return Coded(self.elements, operand_format("operand", self.elements), "none")
        element = _element(fmt)
        assert isinstance(element, FloatFormat)
        if self.scale is None:
            return Coded(self.elements, element, "none")
        kind = _kind(self)
        return Coded(self.elements, element, kind, self.scale, self.tensor, self.sizes[0] if kind != "tensor" else 1)


class Draws(NamedTuple):
    """Where an operand's random numbers come from: words of elements and scales, and signs of rotations."""

    elements: Any = None
    scales: Any = None
    signs: Any = None


def prepare(x: Tensor, quantizer: Quantizer, draws: Draws, delayed: DelayedScale | None = None) -> Operand:
    """Quantise a matrix ``[rows, inner]``; blocks run along the inner axis.

    Args:
        x: float16, bfloat16, float32 or float64 (which is rounded to float32 where anything but a cast is asked for).
        quantizer: What to do.
        draws: Where random numbers come from.
        delayed: State of a scale with a history.
    """
    rest = None
    for transform in quantizer.transforms:
        x, cut = transformed(x, transform, draws.signs)
        rest = cut if cut is not None else rest
    made = _cast(x, quantizer, draws, delayed)
    if quantizer.then is not None:
        again = prepare(made.values(torch.float32), quantizer.then, draws)
        made = again._replace(quantizer=quantizer, slope=made.slope)
    return made._replace(rest=rest)


def transformed(x: Tensor, transform: Transform, signs: Any) -> tuple[Tensor, Tensor | None]:
    """Return a matrix after a transform, and what was cut off it."""
    if isinstance(transform, Clamp):
        return _clamped(x.float(), transform)
    y = rotated(x, transform, signs)
    if transform.rounded is not None:
        y = quantize(y, transform.rounded, out_dtype=torch.float32)
    return y, None


def rotated(x: Tensor, transform: Hadamard, signs: Any, *, inverse: bool = False) -> Tensor:
    """Rotate a matrix along the axis that a transform names, or back."""
    dim = -1 if transform.axis == "inner" else 0
    size = transform.size or x.shape[dim]
    return hadamard(x, size, _signs(transform, size, signs, x.device), dim=dim, inverse=inverse)


def _signs(transform: Hadamard, size: int, draws: Any, device: torch.device) -> int | None:
    if transform.signs != "random":
        return transform.signs
    return random_signs(size, _key(draws, device))


def _clamped(x: Tensor, transform: Clamp) -> tuple[Tensor, Tensor | None]:
    """Clamp to quantiles, elements of the sorted magnitudes' places ``int((1 - level) n)`` and ``int(level n)``."""
    rows = x.reshape(1, -1) if transform.per == "tensor" else x
    n = rows.shape[1]
    places = [min(max(int(part * n), 0), n - 1) for part in (1 - transform.level, transform.level)]
    ordered = rows.sort(dim=1).values
    low, high = (ordered[:, place : place + 1] for place in places)
    y = rows.clamp(low, high).reshape(x.shape)
    return y, x - y if transform.compensate else None


def _cast(x: Tensor, quantizer: Quantizer, draws: Draws, delayed: DelayedScale | None) -> Operand:
    fmt = quantizer.format
    if fmt is None:
        return Operand(x, quantizer)
    if quantizer.scaling is not None:
        return _scaled(x, quantizer, quantizer.scaling, draws, delayed)
    if isinstance(fmt, BlockFormat) and isinstance(fmt.element, FloatFormat):
        made = code(x, quantizer, -1, draws.elements, check=False)
        return Operand(made.values, quantizer, made.scales, made.whole, block_sizes(fmt.block, x.shape))
    stream = draws.elements if quantizer.rounding.mode == "stochastic" else None
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    values = quantize(
        x, fmt, rounding=quantizer.rounding, overflow=quantizer.overflow, generator=stream, pad=True, out_dtype=wide
    )
    return Operand(values, quantizer)


def _scaled(x: Tensor, quantizer: Quantizer, scaling: Scaling, draws: Draws, delayed: DelayedScale | None) -> Operand:
    element = quantizer.format
    assert element is not None and not isinstance(element, BlockFormat | LogTileFormat)
    keys = (
        _key(draws.elements, x.device) if quantizer.rounding.mode == "stochastic" else None,
        _key(draws.scales, x.device) if scaling.scale_rounding == "stochastic" else None,
    )
    given = None
    if scaling.history is not None:
        if delayed is None:
            raise ArgumentError(
                "delayed scaling needs a state to remember in; run the layer inside a model that fmtsim.convert made"
            )
        amax = statistic(x, (None, None), "amax")
        if bool(scaling.history.immediate):
            delayed.record(amax)
            given = delayed.scales()
        else:
            given = delayed.scales()
            delayed.record(amax)
    overflow = quantizer.overflow or element.default_overflow
    made: Scaled = cast(x, element, scaling, quantizer.rounding, overflow, keys, given)
    dtype = holder(element) if isinstance(element, FloatFormat) else torch.float32
    return Operand(
        made.elements.to(dtype),  # on the dtype's grid: nothing is rounded
        quantizer,
        made.scales.scale,
        made.scales.tensor,
        block_sizes(scaling.block, x.shape),
        slope(quantizer.gradient, made, element),
    )


def _key(draws: Any, device: torch.device) -> RandomKey:
    keys = draw_keys(True, draws, None, device)
    assert keys is not None  # random words were asked for
    return RandomKey(*keys.tolist())


def _element(fmt: Any) -> Any:
    return fmt.element if isinstance(fmt, BlockFormat) else fmt


def multiply_operands(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """Return ``a b^T`` in float32 or float64, sums in no particular order.

    Where no scale lies between products, the elements are multiplied and the sums scaled: by the scales of b's rows
    first, then by those of a's. Sums of integers are exact and rounded once.
    """
    if not (a.outer and b.outer):
        return torch.mm(a.values(dtype), b.values(dtype).mT)
    whole = isinstance(a.quantizer.format, IntFormat) and isinstance(b.quantizer.format, IntFormat)
    wide = torch.float64 if whole else dtype
    y = torch.mm(a.elements.to(wide), b.elements.to(wide).mT).to(dtype)
    columns, rows = b.row_scales(), a.row_scales()
    y = y if columns is None else y * columns.mT
    return y if rows is None else y * rows


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
