# SPDX-License-Identifier: Apache-2.0
"""Bits that a number takes in a format, and in what a recipe makes of an operand, scales of blocks included."""

from dataclasses import replace

from fmtsim.formats.block import BlockFormat, Format
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import CodebookFormat, FloatFormat, IntFormat, LogFormat
from fmtsim.spec.quantizer import Quantizer

ELEMENTS = FloatFormat | IntFormat | CodebookFormat | LogFormat


def bits_per_element(fmt: str | Format, columns: int | None = None) -> float:
    """Return the bits of an element with its share of the scales of blocks.

    Args:
        fmt: A format, by name or as a record.
        columns: Extent of the axis that blocks run along, for a format with a scale a row; None leaves out scales that
            are shared by a whole extent. The scale of a whole tensor is never counted.

    Raises:
        FormatError: There is no such format.

    >>> bits_per_element("bf16"), bits_per_element("nvfp4"), bits_per_element("int8_channel", 4096)
    (16.0, 4.5, 8.0078125)
    """
    found = get_format(fmt)
    if isinstance(found, ELEMENTS):
        return float(found.bits)
    if isinstance(found, BlockFormat) and columns is not None and found.block[0] is not None:
        found = replace(found, scaling=replace(found.scaling, block=(found.block[0], found.block[1] or columns)))
    return float(found.bits_per_element)


def bits_of(quantizer: Quantizer) -> float | None:
    """Return the bits of an element of a quantised operand with its share of scales, None where it is not quantised.

    Scales that a whole row, column or tensor shares are not counted.
    """
    if quantizer.format is None:
        return None
    bits, scaling = bits_per_element(quantizer.format), quantizer.scaling
    if scaling is not None and None not in scaling.block:
        outer, inner = scaling.block
        bits += scaling.scale.bits / (outer * inner)  # type: ignore[operator]
    return bits
