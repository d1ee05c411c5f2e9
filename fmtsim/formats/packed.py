# SPDX-License-Identifier: Apache-2.0
"""Block formats in a run of bytes, of ggml and HiF4: how many elements share how many, and which bits are what."""

import importlib
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fmtsim.formats.display import Displayed
from fmtsim.support.errors import FmtsimError, FormatError, shown
from fmtsim.support.records import check_types

SOURCE = "ggml d99724f2: src/ggml-common.h, quantize_row_*_ref and dequantize_row_* of src/ggml-quants.c"
Encoder = Literal[
    "largest", "range", "rounded", "signs", "fp4", "searched_range", "searched_signed", "searched_3bit", "codebook",
    "micro_exponents",
]  # fmt: skip


class Field(NamedTuple):
    """Name ``count`` numbers of ``bits`` bits that stand in consecutive bytes of a block.

    16 bits are float16, 8 bits a byte each. Narrower numbers come in groups of ``group``: number i of a group stands in
    its byte ``i % width``, at bit ``bits * (i // width)``, with ``width = group * bits / 8``. A group of 0 is a
    packing of its own: the six-bit scales and minima of Q4_K and Q5_K, or the base-3 digits of TQ1_0.
    """

    name: str
    bits: int
    count: int  # type: ignore[assignment]  # mypy takes tuple's method for it
    group: int = 1
    size: int = 0  # bytes

    @property
    def width(self) -> int:
        """Bytes of a group."""
        return self.group * self.bits // 8

    @property
    def low(self) -> str:
        """The field whose numbers these bits continue, or the field itself."""
        return self.name.removeprefix("high_")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFormat(Displayed):
    """Describe a block in a run of bytes: ``x ~= d * scale * code``, plus a minimum.

    Codes of a tensor are the bytes of its blocks, uint8, as a GGUF file has them; values are float32.

    Args:
        name: The name under which the format is listed.
        type: ggml's name, empty of other formats.
        number: The type's number in a GGUF file, -1 of other formats.
        elements: Elements of a block.
        bytes: Bytes of a block.
        fields: Fields in the order of the bytes. ``d`` and ``min`` are for the block (several ``d``: for its parts),
            ``scales`` for parts (beside ``min``, minima follow), ``exponents`` with any ending for parts, the longest
            first, ``codes`` for elements; ``high_`` bits continue these. No fields: the package gguf decodes the
            format.
        part: Elements of a part.
        zero: The code of 0, without ``values``.
        scale_zero: The number in ``scales`` that stands for 0.
        values: Values of the codes.
        d_format: ``"fp16"``; ``"e8m0"`` or ``"e4m3"``, of which ``d`` is half; ``"e6m2"`` (bias 48, 0xFF is NaN), of
            which it is a quarter.
        encoder: How the source encodes, without an importance matrix; None where fmtsim decodes only.
        search: Numbers that the encoder is told.
        aliases: Other names.
        source: The document that defines the format.
    """

    name: str
    elements: int
    bytes: int
    type: str = ""
    number: int = -1
    fields: tuple[tuple[str, int, int, int, int], ...] = ()
    part: int = 32
    zero: int = 0
    scale_zero: int = 0
    values: tuple[float, ...] = ()
    d_format: Literal["fp16", "e8m0", "e4m3", "e6m2"] = "fp16"
    encoder: Encoder | None = None
    search: tuple[float, ...] = ()
    aliases: tuple[str, ...] = ()
    source: str = SOURCE

    def __post_init__(self) -> None:
        check_types(self, FormatError)
        if self.elements < 1 or self.bytes < 1:
            raise FormatError(
                f"format {shown(self.name)}: elements={self.elements}, bytes={self.bytes}; a block has 1 or more"
            )
        size = sum(field.size for field in self.layout)
        if self.fields and size != self.bytes:
            raise FormatError(
                f"format {shown(self.name)}: fields have {size} bytes, not bytes={self.bytes}; choose {size}"
            )

    @property
    def layout(self) -> tuple[Field, ...]:
        """The fields with names for their numbers."""
        return tuple(Field(*field) for field in self.fields)

    def field(self, name: str) -> Field | None:
        """Return a field by its name, None where the block has none."""
        return next((field for field in self.layout if field.name == name), None)

    def bits_of(self, name: str) -> int:
        """Return the bits of a field, 0 where the block has none."""
        field = self.field(name)
        return 0 if field is None else field.bits

    @property
    def has_nan(self) -> bool:
        """Whether blocks that hold NaN are encoded, by a scale that is NaN."""
        return self.d_format == "e6m2"

    @property
    def block(self) -> tuple[int, int]:
        """Elements of a block, ``(outer, inner)``."""
        return 1, self.elements

    @property
    def bits(self) -> int:
        """Width of a code, which is a byte of a block."""
        return 8

    @property
    def bits_per_element(self) -> float:
        """Storage of an element with its share of the scales."""
        return 8 * self.bytes / self.elements

    @property
    def default_overflow(self) -> Literal["saturate"]:
        """Elements saturate; a scale beyond float16 is Inf."""
        return "saturate"

    @property
    def code_fields(self) -> tuple[tuple[str, int], ...]:
        """The fields of a code."""
        return (("byte of a block", 8),)

    def facts(self) -> list[tuple[str, str]]:
        """Return what there is to say about the format as pairs of a heading and a text."""
        fields = ", ".join(f"{field.name} {field.count} x {field.bits} bits" for field in self.layout)
        return [
            ("block", f"{self.elements} elements in {self.bytes} bytes"),
            ("bits per element", f"{self.bits_per_element:g}"),
            ("fields", fields or "codebooks of the package gguf"),
            ("encoded", "by its source's reference function" if self.encoder else "no; decoded by the package gguf"),
        ]

    def __repr__(self) -> str:
        return f"PackedFormat({self.name!r}: {self.elements} elements in {self.bytes} bytes)"


def gguf_package(what: str) -> Any:
    """Return the package ``gguf``; raise FmtsimError where it is missing."""
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise FmtsimError(f"{what} needs the package gguf; pip install 'fmtsim[gguf]'") from None


def _field(name: str, bits: int, count: int, group: int = 1, size: int = 0) -> Field:
    return Field(name, bits, count, group, size or bits * count // 8)


def _format(name: str, number: int, elements: int, size: int, *fields: Field, **more: Any) -> PackedFormat:
    kind = more.pop("type", name.upper())
    return PackedFormat(name=name, type=kind, number=number, elements=elements, bytes=size, fields=fields, **more)


_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice E2M1, whose -0 ggml writes 0
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_D, _MIN = _field("d", 16, 1), _field("min", 16, 1)
_K = (_D, _MIN, _field("scales", 6, 16, 0))
_QUARTERS, _NIBBLES, _FIFTHS = _field("codes", 2, 256, 128), _field("codes", 4, 32, 32), _field("high_codes", 1, 32, 8)
_PAIRS, _HIGH = _field("codes", 4, 256, 64), _field("high_codes", 1, 256, 256)

GGML_FORMATS: tuple[PackedFormat, ...] = (
    _format("q1_0", 41, 128, 18, _D, _field("codes", 1, 128, 8), values=(-1, 1), encoder="signs"),
    _format("q2_0", 42, 64, 18, _D, _field("codes", 2, 64, 4), zero=1, encoder="rounded", search=(1, 0)),
    _format("q4_0", 2, 32, 18, _D, _NIBBLES, zero=8, encoder="largest"),
    _format("q4_1", 3, 32, 20, _D, _MIN, _NIBBLES, encoder="range"),
    _format("q5_0", 6, 32, 22, _D, _FIFTHS, _NIBBLES, zero=16, encoder="largest"),
    _format("q5_1", 7, 32, 24, _D, _MIN, _FIFTHS, _NIBBLES, encoder="range"),
    _format("q8_0", 8, 32, 34, _D, _field("codes", 8, 32), encoder="rounded", search=(127, 0)),
    _format("q2_k", 10, 256, 84, _field("scales", 4, 32, 32), _QUARTERS, _D, _MIN, part=16, encoder="searched_range",
            search=(3, 15, -0.5)),
    _format("q3_k", 11, 256, 110, _HIGH, _QUARTERS, _field("scales", 4, 16, 16),
            _field("high_scales", 2, 16, 16), _D, part=16, zero=4, scale_zero=32, encoder="searched_3bit"),
    _format("q4_k", 12, 256, 144, *_K, _PAIRS, encoder="searched_range", search=(15, 20, -1.0)),
    _format("q5_k", 13, 256, 176, *_K, _HIGH, _PAIRS, encoder="searched_range", search=(31, 15, -0.5)),
    _format("q6_k", 14, 256, 210, _field("codes", 4, 256, 128), _field("high_codes", 2, 256, 128),
            _field("scales", 8, 16), _D, part=16, zero=32, encoder="searched_signed"),
    _format("iq4_nl", 20, 32, 18, _D, _NIBBLES, values=_IQ4, encoder="codebook", search=(0,)),
    _format("iq4_xs", 23, 256, 136, _D, _field("high_scales", 2, 8, 4), _field("scales", 4, 8, 2),
            _field("codes", 4, 256, 32), scale_zero=32, values=_IQ4, encoder="codebook", search=(7,)),
    _format("tq1_0", 34, 256, 54, _field("codes", 2, 256, 0, 52), _D, zero=1, encoder="rounded", search=(1, 1)),
    _format("tq2_0", 35, 256, 66, _QUARTERS, _D, zero=1, encoder="rounded", search=(1, 1)),
    _format("mxfp4_ggml", 39, 32, 17, _field("d", 8, 1), _NIBBLES, type="MXFP4", values=_FP4, d_format="e8m0",
            encoder="fp4"),
    _format("nvfp4_ggml", 40, 64, 36, _field("d", 8, 4), _field("codes", 4, 64, 16), type="NVFP4", part=16, values=_FP4,
            d_format="e4m3", encoder="fp4"),
    *(
        _format(name, number, 256, size, source="ggml d99724f2; gguf 0.19 decodes it")
        for name, number, size in (
            ("iq1_s", 19, 50), ("iq1_m", 29, 56), ("iq2_xxs", 16, 66), ("iq2_xs", 17, 74), ("iq2_s", 22, 82),
            ("iq3_xxs", 18, 98), ("iq3_s", 21, 110),
        )
    ),
)  # fmt: skip
"""The block formats of GGUF files; those without fields have codebooks of thousands of numbers, which gguf holds."""

HIF4 = PackedFormat(
    name="hif4", elements=64, bytes=36, part=4, d_format="e6m2", encoder="micro_exponents",
    aliases=("hifloat4", "hifx4"),
    fields=(_field("d", 8, 1), _field("exponents_of_8", 1, 8, 8), _field("exponents_of_4", 1, 16, 8),
            _field("codes", 4, 64, 2)),
    values=(*range(8), -0.0, *range(-1, -8, -1)),  # quarters: sign, an integer bit and two of a fraction
    source="HiFloat4, global-computing-consortium/HiFloat4 6d937b6: quant_cy/base/QFuncs/hifx.py in float32; the order "
    "of its bytes is fmtsim's",
)  # fmt: skip
"""HiFloat4: an E6M2 scale for 64 elements, and a doubling for each 8 and each 4 of them."""

NEED_MATRIX = ("iq1_s", "iq2_xxs", "iq2_xs")
"""Formats that ggml refuses to encode without an importance matrix."""
