"""The grid of a weight: one scale an element that stays, and the rounding of other values to it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmtsim.errors import ArgumentError
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.gemm.operand import Draws
from fmtsim.gemm.prepare import prepare
from fmtsim.quantize import quantize
from fmtsim.scaling.cast import spread
from fmtsim.scaling.quantizer import Quantizer


def nearest(w: Tensor, quantizer: Quantizer) -> Tensor:
    """Return a weight as its quantiser rounds it, with the bits of ``fmtsim.convert``'s products; float32."""
    return w if quantizer.format is None else prepare(w, quantizer, Draws()).values(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Hold the values that the elements of a weight may take, each under its own scale.

    Args:
        element: The element format.
        scale: float64 [N, K].
    """

    element: Any
    scale: Tensor

    def round(self, w: Tensor, columns: slice | int, mode: str = "nearest_even") -> Tensor:
        """Return values of some columns rounded to the grid, saturating; float64 of w's shape."""
        s = self.scale[:, columns]
        return quantize((w / s), self.element, rounding=mode, overflow="saturate", out_dtype=torch.float64) * s

    def permuted(self, order: Tensor) -> "Grid":
        """Return the grid of the columns in another order."""
        return Grid(element=self.element, scale=self.scale[:, order])


def grid_of(w: Tensor, quantizer: Quantizer) -> Grid:
    """Return the grid that a quantiser lays over a weight: scales made of the weight as it is.

    Raises:
        ArgumentError: The quantiser has no grid that stays while elements change.
    """
    fmt = quantizer.format
    blocks = isinstance(fmt, BlockFormat)
    hidden = blocks and prepare(w[:1, :1], quantizer, Draws()).scale is None
    if fmt is None or isinstance(fmt, LogTileFormat) or hidden:
        raise ArgumentError(
            f"weights = {quantizer} have no scales apart from their elements; choose an element format with "
            "scaling=Scaling(...), an MX format or nvfp4, or weights=None"
        )
    made = prepare(w, quantizer, Draws())
    scale = torch.ones(w.shape, dtype=torch.float64)
    if made.scale is not None:
        scale = spread(made.scale, made.sizes, w.shape).double()
    if made.tensor is not None:
        scale = scale * made.tensor.double()
    scale = torch.where(scale == 0, 2.0**-126, scale)  # a block of zeros under a scale that underflowed
    return Grid(element=fmt.element if isinstance(fmt, BlockFormat) else fmt, scale=scale)
