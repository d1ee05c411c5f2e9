# SPDX-License-Identifier: Apache-2.0
"""Formats as JSON: what operators, files and user-made records are written in."""

import dataclasses
import json
from functools import lru_cache
from typing import Any

from fmtsim.formats.block import BlockFormat, Format, LogTileFormat
from fmtsim.formats.floating import FP32
from fmtsim.formats.scaling import History, Scaling, TensorScale
from fmtsim.formats.spec import CodebookFormat, FloatFormat, IntFormat, LogFormat
from fmtsim.support.errors import ArgumentError, FormatError, shown
from fmtsim.support.records import at, parse_json, record_of

KINDS: dict[str, type] = {
    "float": FloatFormat,
    "int": IntFormat,
    "codebook": CodebookFormat,
    "log": LogFormat,
    "block": BlockFormat,
    "log_tile": LogTileFormat,
}
_NAMES = {cls: kind for kind, cls in KINDS.items()}
_RECORDS = (Scaling, TensorScale, History)
_ALWAYS = ("name", "block")


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
        fields["scaling"] = _scaling_of_old(fields)
    try:
        return record_of(KINDS[kind], fields, path)  # type: ignore[no-any-return]
    except ArgumentError as error:  # a field that is none
        raise FormatError(str(error)) from None


def _scaling_of_old(fields: dict[str, Any]) -> dict[str, Any]:
    """Take the scale's fields of a block format, as they were written before it had a Scaling, out of a record."""
    taken = {name: fields.pop(name) for name in _OLD if name in fields}
    rule = taken.pop("scale_rule", "amax")
    scaling: dict[str, Any] = {"arithmetic": "reciprocal", "scale": format_to_dict(FP32)} | taken
    scaling["exponent_rule"] = None if rule == "amax" else rule
    scaling["tensor"] = {} if scaling.pop("tensor_scale", False) else None
    return scaling


_OLD = ("block", "scale", "scale_rule", "arithmetic", "tensor_scale", "zero_point")


@lru_cache(maxsize=1024)
def format_to_json(fmt: Format) -> str:
    """Return a format as one line of JSON."""
    return json.dumps(format_to_dict(fmt))


def format_from_json(text: str) -> Format:
    """Build a format from a line of JSON; raise FormatError where it is none."""
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
