# SPDX-License-Identifier: Apache-2.0
"""What shares a scale in a linear layer, by name."""

from typing import Literal

from fmtsim.formats.block import Block, BlockFormat, Format, LogTileFormat
from fmtsim.formats.scaling import ScaleRule

ScalingName = Literal["none", "tensor", "channel", "block32", "tile128", "mx"]

# Scaling by name: block (outer, inner along the contraction axis) of x and g, block of w, scale rule.
SCALINGS: dict[ScalingName, tuple[Block, Block, ScaleRule] | None] = {
    "none": None,
    "tensor": ((None, None), (None, None), "amax"),
    "channel": ((1, None), (1, None), "amax"),
    "block32": ((1, 32), (1, 32), "amax"),
    "tile128": ((1, 128), (128, 128), "amax"),
    "mx": ((1, 32), (1, 32), "floor"),
}


def usual_scaling(fmt: Format) -> ScalingName | None:
    """Return ``"tensor"`` for element formats of 8 bits and fewer, ``"none"`` for wider, None for those with blocks."""
    if isinstance(fmt, BlockFormat | LogTileFormat):
        return None
    return "tensor" if fmt.bits <= 8 else "none"
