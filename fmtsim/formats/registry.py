# SPDX-License-Identifier: Apache-2.0
"""Where formats are found: by name or alias, by dtype, or by a name that spells the format out; and as JSON."""

from __future__ import annotations  # help shows the names of types

import dataclasses
import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, cast

from fmtsim.formats.block import BLOCK_NAMES, Block, BlockFormat, Format, LogTileFormat, with_block
from fmtsim.formats.catalogue import LNS_SOURCE, LOGFMT_SOURCE, blocks, elements, integer
from fmtsim.formats.element import CodebookFormat, ElementFormat, FloatFormat, IntFormat, LogFormat, tapered
from fmtsim.formats.floating import FP32
from fmtsim.formats.packed import GGML_FORMATS, HIF4, PackedFormat
from fmtsim.formats.scaling import SCALE_RULES, History, ScaleRule, Scaling, TensorScale
from fmtsim.support.errors import ArgumentError, FormatError, did_you_mean, shown
from fmtsim.support.records import READERS, at, located, parse_json, record_of

if TYPE_CHECKING:
    import torch

Kind = Literal[
    "float", "int", "codebook", "log", "block", "log_tile", "wide", "fp8", "fp6", "fp4", "scale", "p3109", "mx",
    "nvfp4", "scaled", "packed", "ggml",
]  # fmt: skip
KINDS: dict[str, type] = {
    "float": FloatFormat,
    "int": IntFormat,
    "codebook": CodebookFormat,
    "log": LogFormat,
    "block": BlockFormat,
    "log_tile": LogTileFormat,
    "packed": PackedFormat,
}
_NAMES = {cls: kind for kind, cls in KINDS.items()}
_RECORDS = (Scaling, TensorScale, History)
_ALWAYS = ("name", "block")

_SPELLINGS = "'e3m4', 'e3m4_finite', 'e3m4_1x64_amax', 'int6', 'int6_full', 'int6_half', 'uint6', 'lns8_g8', 'logfmt8'"

_NAME = re.compile(r"[a-z0-9_.+-]+")
_FLOAT = re.compile(r"e([0-9]{1,9})m([0-9]{1,9})(_finite|_saturate)?")
_INT = re.compile(r"(u?)int([0-9]{1,9})(?:_(full|asymmetric|half))?(?:_f([0-9]{1,9}))?")
_LOG = re.compile(r"lns([0-9]{1,9})_g([0-9]{1,9})")
_TAPERED = re.compile(r"(posit|takum|takum_linear)([0-9]{1,9})")
_LOG_TILE = re.compile(r"logfmt([0-9]{1,9})")
_SIZE = "(?:[1-9][0-9]{0,17}|all)"
_BLOCKED = re.compile(rf"(.+)_({'|'.join(BLOCK_NAMES.values())}|{_SIZE}x{_SIZE})(?:_({'|'.join(SCALE_RULES)}))?")
# as vLLM and others write them
_WITH_WIDTH = re.compile(r"(?:fp|float)([0-9]{1,2})_(e[0-9]m[0-9](?:fn|fnuz|b11fnuz)?)")
_WIDTHS = {  # names of a width, which several formats have
    "fp4": ("e2m1", "nvfp4"), "fp6": ("e2m3", "e3m2", "mxfp6_e2m3"), "fp8": ("e4m3", "e5m2"),
    "mxfp6": ("mxfp6_e2m3", "mxfp6_e3m2"), "mxfp8": ("mxfp8_e4m3", "mxfp8_e5m2"), "bf8": ("e5m2", "e5m2fnuz"),
}  # fmt: skip

_LISTED = (
    "fields of varying width: 'hif8', 'posit8', 'takum8'; list the values: fmtsim.formats.element.CodebookFormat(...)"
)
_SHARED = "a shared power of two: 'msfp12', 'mxint8', or integers under one: 'int8_1x16_floor', 'int4_1x16_floor'"
_ELSEWHERE = {  # by beginnings
    "posit": _LISTED, "takum": _LISTED, "hif": _LISTED, "unum": _LISTED, "bfp": _SHARED, "msfp": _SHARED,
    "ternary": "-1, 0 and 1 are 'int2'",
}  # fmt: skip

_formats: dict[str, Format] = {}  # by name, in the order of registration
_lookup: dict[str, Format] = {}  # by lower-case name and alias


def get_format(format: str | Format | torch.dtype | Any) -> Format:
    """Return the record of a format.

    Names ignore case. A name that is not registered may spell a format out: ``eXmY`` (IEEE 754 rules above 8 bits,
    one NaN and no Inf at 8 bits, finite below), ``eXmY_finite`` (neither NaN nor Inf at any width), ``eXmY_saturate``
    (its ``overflow`` is ``"saturate"``), ``intN``,
    ``intN_full``, ``intN_half``, ``uintN`` (each with ``_fF`` for F fraction bits), ``lnsB_gG``, ``logfmtN``,
    ``positN``, ``takumN`` and ``takum_linearN`` up to 16 bits.
    Behind each of these and each registered name may stand other blocks and a scale rule, as ``quantize`` takes them:
    ``e4m3_1x64_amax``, ``mxfp4_1x16_even``, ``int6_channel_amax`` (a row), ``e4m3_tensor_amax``. So the names of
    formats that verbs make are taken back. ``fp8_e4m3`` is ``e4m3`` and so on; ``fp8`` alone is an error, because
    libraries mean ``e4m3``, ``e5m2`` or both by it. Tags of safetensors (``F8_E4M3``) and types of ONNX
    (``FLOAT8E4M3FN``) are names, too.

    Args:
        format: A name or alias, a format record (returned as it is), a torch dtype, or a numpy or ml_dtypes dtype.

    Raises:
        FormatError: The name is unknown, spells a format outside the limits, or the argument is not a format.

    >>> import fmtsim
    >>> e4m3 = fmtsim.get_format("e4m3")
    >>> e4m3.max, e4m3.min_normal, e4m3.bits
    (448.0, 0.015625, 8)
    >>> fmtsim.get_format("e5m3").max  # spelled out by its name
    61440.0
    """
    if isinstance(format, str):
        fmt = _lookup.get(format)
        return fmt if fmt is not None else _find(format)
    if isinstance(format, Format):
        return format
    name = _dtype_name(format)
    if name is None:
        raise FormatError(
            f"format={shown(format)} is not a name, a format record or a dtype; pass a name such as 'e4m3'"
        )
    fmt = _lookup.get(name) or _parse(name)
    if fmt is None:
        raise FormatError(f"dtype {format} has no format; pass a name from fmtsim.list_formats()")
    return fmt


class FormatNames(list[str]):
    """Names of formats; ``print``, and a notebook, show them by family, a line each."""

    def __str__(self) -> str:
        families: dict[str, list[str]] = {}
        for name in self:
            families.setdefault(family_of(_formats[name]), []).append(name)
        return "\n".join(f"{family}: {' '.join(names)}" for family, names in families.items())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


FAMILIES: tuple[Kind, ...] = (
    "wide", "fp8", "fp6", "fp4", "scale", "p3109", "int", "codebook", "log", "mx",
    "nvfp4", "scaled", "ggml",
)  # fmt: skip


def family_of(fmt: Format) -> str:
    """Return what a format is filed under for the eye: a width, a standard, or how its scales are made."""
    if isinstance(fmt, BlockFormat):
        mx = fmt.power_of_two and fmt.block == (1, 32)
        return "mx" if mx else "nvfp4" if fmt.tensor_scale else "scaled"
    if isinstance(fmt, FloatFormat):
        named = "p3109" if fmt.name.startswith("p3109") else "" if fmt.signed else "scale"
        return named or (f"fp{fmt.bits}" if fmt.bits in (4, 6, 8) else "wide")
    if isinstance(fmt, PackedFormat):
        return "ggml" if fmt.type else "scaled"
    return "log" if isinstance(fmt, LogTileFormat) else _NAMES[type(fmt)]


def list_formats(kind: Kind | None = None) -> list[str]:
    """Return the names of all registered formats, of one kind, or of one family; printed, they stand by family.

    Args:
        kind: ``"float"``, ``"int"``, ``"codebook"``, ``"log"``, ``"block"``, ``"log_tile"``, ``"packed"``; a
            family, which cuts these finer: ``"wide"`` (floats above 8 bits), ``"fp8"``, ``"fp6"``, ``"fp4"``,
            ``"scale"`` (unsigned floats), ``"p3109"``, ``"mx"``, ``"nvfp4"``, ``"ggml"``, ``"scaled"`` (other
            blocks); or None for all.

    Raises:
        FormatError: The kind is unknown.

    >>> import fmtsim
    >>> "mxfp4" in fmtsim.list_formats("block")
    True
    >>> print(fmtsim.list_formats("fp6"))
    fp6: e2m3 e3m2
    """
    if kind is None:
        return FormatNames(_formats)
    if not isinstance(kind, str) or kind not in (*KINDS, *FAMILIES):
        names = ", ".join(dict.fromkeys((*KINDS, *FAMILIES)))
        raise FormatError(f"kind={shown(kind)} is not a kind of format; choose one of {names}, or None for all")
    of_kind = lambda fmt: isinstance(fmt, KINDS[kind]) if kind in KINDS else family_of(fmt) == kind  # noqa: E731
    return FormatNames(name for name, fmt in _formats.items() if of_kind(fmt))


def register_format(record: Format, overwrite: bool = False) -> Format:
    """Make a format known under its name and aliases, and return it.

    Registering an equal record twice does nothing.

    Args:
        record: The format.
        overwrite: Whether it may take names that other formats hold; a format that loses its name is forgotten,
            one that loses an alias keeps its name.

    Raises:
        FormatError: The argument is not a format record, a name cannot be looked up, or is taken.

    >>> import fmtsim
    >>> fmtsim.register_format(fmtsim.get_format("e4m3")).name  # an equal record
    'e4m3'
    """
    if not isinstance(cast(object, record), Format):
        kinds = ", ".join(cls.__name__ for cls in KINDS.values())
        raise FormatError(f"record={shown(record)} is not a format; build one of {kinds}")
    names = [name.lower() for name in (record.name, *record.aliases)]
    for name in names:
        if not _NAME.fullmatch(name):
            raise FormatError(f"format name {shown(name)} is not allowed; choose letters, digits and _ . + -")
    if all(_lookup.get(name) == record for name in names):
        return record
    for name in names:
        holder = _lookup.get(name)
        if holder is not None and not overwrite:
            raise FormatError(f"format name {name!r} is taken by {holder!r}; choose another, or pass overwrite=True")
        if holder is not None and holder.name.lower() == name:
            del _formats[holder.name]
            for old in [old for old, fmt in _lookup.items() if fmt is holder]:
                del _lookup[old]
    _formats[record.name] = record
    _lookup.update(dict.fromkeys(names, record))
    return record


def _find(text: str) -> Format:
    """Look a name up in lower case, then read it as the spelling of a format."""
    name = text.strip().lower().removeprefix("torch.")
    fmt = _lookup.get(name) or _parse(name) or _blocked(name)
    if fmt is None:  # tags of safetensors (F8_E4M3, I8) and types of ONNX (FLOAT8E4M3FN)
        name = re.sub(r"^([fiu])(?=\d+(_|$))", lambda tag: {"f": "fp", "i": "int", "u": "uint"}[tag[1]], name)
        name = re.sub(r"^float(\d)(?=e)", r"float\1_", name)
        fmt = _lookup.get(name) or _parse(name)
    if fmt is None and (match := _WITH_WIDTH.fullmatch(name)):
        fmt = _lookup.get(match[2]) or _parse(match[2])
        fmt = fmt if fmt is not None and fmt.bits == int(match[1]) else None
    if fmt is not None:
        return fmt
    several = " or ".join(map(repr, _WIDTHS.get(name.replace("float", "fp"), ())))
    elsewhere = next((text for word, text in _ELSEWHERE.items() if name.startswith(word)), "")
    elsewhere = "a Quantizer's JSON file is a recipe: recipe=, --recipe" if name.endswith(".json") else elsewhere
    hint = f"; did you mean {several}?" if several else f"; {elsewhere}" if elsewhere else did_you_mean(name, _lookup)
    raise FormatError(
        f"unknown format {shown(text)}{hint} "
        f"(fmtsim.list_formats() has all names; others are spelled out: {_SPELLINGS})"
    )


@lru_cache(maxsize=512)
def _parse(name: str) -> Format | None:
    """Build the format that a lower-case name spells out, None where it spells none."""
    if match := _FLOAT.fullmatch(name):
        return _float(name, int(match[1]), int(match[2]), match[3])
    if match := _INT.fullmatch(name):
        unsigned, bits, grid, fraction = match.groups()
        if unsigned and grid:
            raise FormatError(f"{name}: unsigned integers have no {grid!r} grid; choose uint{bits} or int{bits}_{grid}")
        grid = {None: "symmetric", "asymmetric": "full"}.get(grid, grid)
        return integer(int(bits), signed=not unsigned, grid=grid, fraction_bits=int(fraction or 0))
    if match := _LOG.fullmatch(name):
        return LogFormat(name=name, bits=int(match[1]), gamma=int(match[2]), source=LNS_SOURCE)
    if match := _TAPERED.fullmatch(name):
        return tapered(match[1], int(match[2]))
    if match := _LOG_TILE.fullmatch(name):
        return LogTileFormat(name=name, bits=int(match[1]), source=LOGFMT_SOURCE)
    return None


def _blocked(name: str) -> Format | None:
    """Build a format from another by blocks and scale rules, named as ``with_block`` does; None where there is none."""
    changes: list[tuple[Block, ScaleRule | None]] = []
    while match := _BLOCKED.fullmatch(name):
        name, size, rule = match.groups()
        block = next((block for block, word in BLOCK_NAMES.items() if word == size), None)
        outer, inner = block or (None if part == "all" else int(part) for part in size.split("x"))
        changes.append(((outer, inner), cast(ScaleRule | None, rule)))
        if fmt := _lookup.get(name) or _parse(name):
            for new_block, scale_rule in reversed(changes):
                fmt = with_block(fmt, new_block, scale_rule)
            return fmt
    return None


def _float(name: str, exponent_bits: int, mantissa_bits: int, ending: str | None) -> FloatFormat:
    """Build ``eXmY`` with the specials that its width suggests, or none."""
    for field, value, low, high in (("exponent_bits", exponent_bits, 1, 8), ("mantissa_bits", mantissa_bits, 0, 23)):
        if not low <= value <= high:
            raise FormatError(
                f"{name}: {field}={value} is not allowed; choose {low} to {high}, or register a FloatFormat of your own"
            )
    bits, finite = 1 + exponent_bits + mantissa_bits, ending == "_finite"
    return FloatFormat(
        name=name,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        nan="none" if finite or bits < 8 else "ieee" if bits > 8 else "top",
        infinities=bits > 8 and not finite,
        overflow="saturate" if ending == "_saturate" else None,
        source="spelled out by its name",
    )


def _dtype_name(dtype: Any) -> str | None:
    """Return the name under which a torch, numpy or ml_dtypes dtype is listed, None for anything else."""
    if (type(dtype).__module__, type(dtype).__name__) == ("torch", "dtype"):  # the command line needs no torch
        return str(dtype).removeprefix("torch.")
    if isinstance(dtype, type) and dtype.__module__ == "builtins":
        return None  # numpy would read int, float and bool as dtypes of the platform's choice
    import numpy  # torch has loaded it already where it exists; formats do not need it otherwise

    try:
        return numpy.dtype(dtype).name if dtype is not None else None
    except Exception:  # of numpy, for an object that is not a dtype
        return None


def read_format(value: Any, path: str) -> Format:
    """Return the format that a name or a record in a file says; ``path`` is what errors call it."""
    if isinstance(value, str):
        with located(path):
            return get_format(value)
    if isinstance(value, dict):
        return format_from_dict(value, path)
    raise at(path, FormatError, f"{shown(value)} is not a format; write its name, or the fields of its record")


def format_to_dict(fmt: Format) -> dict[str, Any]:
    """Return a format as plain JSON types, defaults left out; ``format_from_dict`` reads it back."""
    return {"kind": _NAMES[type(fmt)]} | _to_dict(fmt)


def _to_dict(record: Any) -> dict[str, Any]:
    values = {field.name: (getattr(record, field.name), field.default) for field in dataclasses.fields(record)}
    return {
        name: format_to_dict(value) if isinstance(value, Format)
        else _to_dict(value) if isinstance(value, _RECORDS)
        else value
        for name, (value, default) in values.items() if name in _ALWAYS or value != default
    }  # fmt: skip


def format_from_dict(record: dict[str, Any], path: str = "") -> Format:
    """Build a format from ``format_to_dict``'s record; raise FormatError where it is not one.

    Args:
        record: The record.
        path: What errors call it, where it is a part of something.
    """
    if not isinstance(record, dict):
        raise at(path, FormatError, f"{shown(record)} is not an object; write the fields of a format, {{...}}")
    fields = dict(record)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise at(path, FormatError, f"kind={shown(kind)} is not a kind of format; choose one of {', '.join(KINDS)}")
    if kind == "block" and "scaling" not in fields:
        # a block format as it was written before it had a Scaling: its own fields say how the scale is made
        taken = {name: fields.pop(name) for name in _OLD if name in fields}
        rule = taken.pop("scale_rule", "amax")
        scaling: dict[str, Any] = {"arithmetic": "reciprocal", "scale": format_to_dict(FP32)} | taken
        scaling["exponent_rule"] = None if rule == "amax" else rule
        scaling["tensor"] = {} if scaling.pop("tensor_scale", False) else None
        fields["scaling"] = scaling
    try:
        return record_of(KINDS[kind], fields, path)  # type: ignore[no-any-return]
    except ArgumentError as error:  # an unknown field
        raise FormatError(str(error)) from None


_OLD = ("block", "scale", "scale_rule", "arithmetic", "tensor_scale", "zero_point")


@lru_cache(maxsize=1024)
def format_to_json(fmt: Format) -> str:
    """Return a format as one line of JSON."""
    return json.dumps(format_to_dict(fmt))


def format_from_json(text: str) -> Format:
    """Build a format from a line of JSON; raise FormatError where it is not one."""
    if not isinstance(text, str):
        raise FormatError(f"not the JSON of a format: {shown(text)}")
    return _format_from_json(text)


@lru_cache(maxsize=1024)
def _format_from_json(text: str) -> Format:
    try:
        record = parse_json(text)
    except ValueError as error:
        raise FormatError(f"not the JSON of a format: {error}") from None
    if not isinstance(record, dict):
        raise FormatError(f"not the JSON of a format: {shown(text)}")
    return format_from_dict(record)


READERS.update(dict.fromkeys(KINDS.values(), read_format))


# The catalogue: elements first, because blocks are made of them.
for _element in elements():
    register_format(_element)
for _block in blocks(lambda name: cast(ElementFormat, _lookup.get(name) or _parse(name))):
    register_format(_block)
for _packed in (*GGML_FORMATS, HIF4):
    register_format(_packed)
