# SPDX-License-Identifier: Apache-2.0
"""What a target multiplies of two quantised operands: elements with scales, integers, or values."""

from functools import lru_cache
from typing import Any, Literal, NamedTuple

from fmtsim.formats.block import BlockFormat, Format, LogTileFormat, PackedFormat
from fmtsim.formats.element import ElementFormat, FloatFormat, IntFormat, LogFormat
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.operand_scales import product_kind
from fmtsim.spec.call import OperandFormat, ScaleKind, scale_kind
from fmtsim.spec.operand import last_cast
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import FormatError

INT8: Any = get_format("int8_full")
_HINT = "pass target=Datapath(...), a unit of your own, which takes the values, or leave target= out"


class Route(NamedTuple):
    """Say what a target multiplies for two quantised operands.

    Attributes:
        how: ``"elements"``: elements with their scales, as libraries take them, and tensors in high precision.
            ``"integers"``: elements, whose exact sums are scaled afterwards. ``"values"``: numbers in the tensors'
            dtype. ``"numbers"``: values in float32, for a declared datapath.
        formats: Of the elements; None for tensors in high precision, whose dtype says it.
        kind: Of the scales that go with elements.
        multiplies: The rule of an operand's scales has a multiplier, which units do not take with the scales.
    """

    how: Literal["elements", "integers", "values", "numbers"]
    formats: tuple[OperandFormat | None, OperandFormat | None] = (None, None)
    kind: ScaleKind = "none"
    multiplies: bool = False


@lru_cache(maxsize=4096)
def route_of(
    a: Quantizer, b: Quantizer, transposed: tuple[bool, bool] = (False, False), *, dequantized: bool = False,
    declared: bool = False, logarithms: bool = False,
) -> Route:  # fmt: skip
    """Return what a target multiplies of two operands.

    Args:
        a, b: Their quantisers.
        transposed: Whether each is the transpose of its quantiser's result.
        dequantized: As in Gemm.
        declared: The target is a Datapath of the caller, which takes any values.
        logarithms: The target multiplies logarithms.

    Raises:
        FormatError: No unit multiplies elements or blocks of that kind, or not together.
    """
    last = last_cast(a), last_cast(b)
    high = [q.format is None for q in last]
    if all(high):
        return Route("elements")
    elements = [element_of(q.format) for q in last]
    bare = all(q.scaling is None and element is q.format for q, element in zip(last, elements, strict=True))
    if logarithms and not dequantized and all(isinstance(element, LogFormat) for element in elements):
        kinds = [_kind(q, is_transposed) for q, is_transposed in zip((a, b), transposed, strict=True)]
        return Route("elements", (elements[0], elements[1]), product_kind(*kinds))  # type: ignore[arg-type]
    if dequantized or (any(high) and not (declared and bare)):
        return Route("values")
    if declared and not all(isinstance(element, FloatFormat | IntFormat) for element in elements):
        return Route("numbers")
    kinds = [kind_of(q, is_transposed) for q, is_transposed in zip((a, b), transposed, strict=True)]
    kind = product_kind(*kinds)
    if all(isinstance(element, IntFormat) for element in elements):
        return Route("integers", (elements[0], elements[1]), kind)  # type: ignore[arg-type]
    if any(isinstance(element, IntFormat) for element in elements):
        names = " by ".join(q.format.name for q in last)  # type: ignore[union-attr]
        raise FormatError(f"no unit multiplies {names}: integers and floating point; {_HINT}")
    multiplies = any(q.scaling is not None and q.scaling.multiplier != 1 for q in last)
    return Route("elements", (elements[0], elements[1]), kind, multiplies)  # type: ignore[arg-type]


def kind_of(quantizer: Quantizer, transposed: bool = False) -> ScaleKind:
    """Return the kind of a quantiser's scales, or of the scales of the transposed matrix.

    Raises:
        FormatError: No unit multiplies its elements (codebooks, logarithms, zero points) or takes such scales.
    """
    fmt = last_cast(quantizer).format
    if fmt is not None and not isinstance(element_of(fmt), FloatFormat) and not _is_plain(fmt):
        raise FormatError(f"no unit multiplies {fmt.name}; {_HINT}")
    return _kind(quantizer, transposed)


def _kind(quantizer: Quantizer, transposed: bool) -> ScaleKind:
    last = last_cast(quantizer)
    fmt = last.format
    if fmt is None:
        return "none"
    element = element_of(fmt)
    scaling = last.scaling or (fmt.scaling if isinstance(fmt, BlockFormat) else None)
    if scaling is None:
        return "none"
    outer, inner = scaling.block[::-1] if transposed else scaling.block
    kind = scale_kind(outer, inner, "e8m0" if scaling.power_of_two else scaling.scale.name)
    if kind is None or (not isinstance(element, FloatFormat) and kind not in ("tensor", "row")):
        raise FormatError(
            f"no unit multiplies {element.name} in blocks of {(outer, inner)} with {scaling.scale.name} scales; units "  # type: ignore[union-attr]
            "and libraries take one scale a tensor or row, and for floating point E8M0 for 1x32 (MX), E4M3 for 1x16 or "
            f"16x16 (NVFP4) and float32 for 1x128 or 128x128; {_HINT}"
        )
    return kind


def element_of(fmt: Format | None) -> ElementFormat | LogTileFormat | PackedFormat | None:
    """Return the format of the elements of a format."""
    return fmt.element if isinstance(fmt, BlockFormat) else fmt


def _is_plain(fmt: Format) -> bool:
    """Return True if elements are integers that int8 holds, without zero points."""
    element = element_of(fmt)
    zero_point = isinstance(fmt, BlockFormat) and fmt.zero_point
    return (
        isinstance(element, IntFormat) and element.bits <= 8 and element.signed and element.eps == 1
        and not element.half_offset and not zero_point
    )  # fmt: skip
