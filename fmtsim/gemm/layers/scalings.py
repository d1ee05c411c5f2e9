# SPDX-License-Identifier: Apache-2.0
"""Scalings of operands by name; apart from config.py, which needs torch: the command line offers these names."""

from typing import Literal

from fmtsim.formats.scaling import Block, ScaleRule

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
