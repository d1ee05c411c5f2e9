# SPDX-License-Identifier: Apache-2.0
"""The grid of a weight: one scale an element that stays, and the rounding of other values to it."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.quantize import quantize
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.gemm.layers.operand import quantize_operand
from fmtsim.rounding.modes import RoundingName
from fmtsim.spec.operand import Keys, block_of, spread
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError


def nearest(w: Tensor, quantizer: Quantizer) -> Tensor:
    """Return a weight as its quantiser rounds it, with the bits of ``fmtsim.convert``'s products; float32."""
    return w if quantizer.format is None else quantize_operand(w, quantizer, Keys()).values(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Hold the values that the elements of a weight may take, each under its own scale.

    Args:
        element: The element format.
        scale: float64 [N, K].
        quantizer: What made the scales, where they may be made anew.
        width: Columns that share scales; 0 where all do, or none, so that scales stay.
        whole: Largest magnitude of the weight under a scale of the tensor, which stays; 0 without one.
    """

    element: Any
    scale: Tensor
    quantizer: Quantizer = Quantizer()
    width: int = 0
    whole: float = 0.0

    def round(self, w: Tensor, columns: slice | int, mode: RoundingName = "nearest_even") -> Tensor:
        """Return values of some columns rounded to the grid, saturating; float64 of w's shape."""
        s = self.scale[:, columns]
        return quantize((w / s), self.element, rounding=mode, overflow="saturate", out_dtype=torch.float64) * s

    def permuted(self, order: Tensor) -> "Grid":
        """Return the grid of the columns in another order."""
        return replace(self, scale=self.scale[:, order])

    def remake(self, start: int, w: Tensor) -> None:
        """Make the scales of one group of columns, in place, as the quantiser makes them of other numbers.

        Args:
            start: The group's first column.
            w: [N, at most width], rounded to float32; beyond ``whole`` it counts as that.
        """
        columns, w = w.shape[1], w.float()
        if self.whole:
            w = torch.nn.functional.pad(w.clamp(-self.whole, self.whole), (0, 2 * self.width - columns))
            w[0, -1] = self.whole  # a group beside them that the scale of the tensor is made of
        self.scale[:, start : start + columns] = _scales(w, self.quantizer)[:, :columns]


def grid_of(w: Tensor, quantizer: Quantizer) -> Grid:
    """Return the grid that a quantiser lays over a weight: scales made of the weight as it is.

    Raises:
        ArgumentError: The quantiser has no grid that stays while elements change.
    """
    fmt = quantizer.format
    blocks = isinstance(fmt, BlockFormat)
    hidden = blocks and quantize_operand(w[:1, :1], quantizer, Keys()).scale is None
    if fmt is None or isinstance(fmt, LogTileFormat) or hidden:
        raise ArgumentError(
            f"weights = {quantizer} have no scales apart from their elements; choose an element format with "
            "scaling=Scaling(...), an MX format or nvfp4, or weights=None"
        )
    width = block_of(quantizer)[1] or 0
    scaling = quantizer.scaling
    two = fmt.tensor_scale if isinstance(fmt, BlockFormat) else scaling is not None and scaling.tensor is not None
    return Grid(
        element=fmt.element if isinstance(fmt, BlockFormat) else fmt,
        scale=_scales(w, quantizer),
        quantizer=quantizer,
        width=width if blocks or scaling is not None else 0,
        whole=float(w.abs().max()) if two else 0.0,
    )


def _scales(w: Tensor, quantizer: Quantizer) -> Tensor:
    """Return the scale of every element of a weight, float64."""
    made = quantize_operand(w, quantizer, Keys())
    scale = torch.ones(w.shape, dtype=torch.float64)
    if made.scale is not None:
        scale = spread(made.scale, made.block, w.shape).double()
    if made.tensor_scale is not None:
        scale = scale * made.tensor_scale.double()
    return torch.where(scale == 0, 2.0**-126, scale)  # a block of zeros under a scale that underflowed
