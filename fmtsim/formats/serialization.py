"""Formats as JSON: what operators, files and user-made records are written in."""

import dataclasses
import json
from functools import lru_cache
from typing import Any

from fmtsim.errors import FormatError
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat
from fmtsim.formats.spec import CodebookFormat, FloatFormat, IntFormat, LogFormat

KINDS: dict[str, type] = {
    "float": FloatFormat,
    "int": IntFormat,
    "codebook": CodebookFormat,
    "log": LogFormat,
    "block": BlockFormat,
    "log_tile": LogTileFormat,
}
_NAMES = {cls: kind for kind, cls in KINDS.items()}
_TUPLES = ("aliases", "values", "block")


def format_to_dict(fmt: Format) -> dict[str, Any]:
    """Return a format as plain JSON types, defaults left out; ``format_from_dict`` reads it back."""
    record: dict[str, Any] = {"kind": _NAMES[type(fmt)]}
    for field in dataclasses.fields(fmt):
        value = getattr(fmt, field.name)
        if field.name in ("name", "block") or value != field.default:
            record[field.name] = format_to_dict(value) if isinstance(value, Format) else value
    return record


def format_from_dict(record: dict[str, Any]) -> Format:
    """Build a format from ``format_to_dict``'s record; raise FormatError where it is not one."""
    fields = dict(record)
    kind = fields.pop("kind", None)
    if kind not in KINDS:
        raise FormatError(f"kind={kind!r} is not a kind of format; choose one of {', '.join(KINDS)}")
    for name, value in fields.items():
        if isinstance(value, dict):
            fields[name] = format_from_dict(value)
        elif name in _TUPLES:
            fields[name] = tuple(value)
    try:
        return KINDS[kind](**fields)
    except TypeError as error:
        raise FormatError(f"not a {kind} format: {error}") from None


@lru_cache(maxsize=1024)
def format_to_json(fmt: Format) -> str:
    """Return a format as one line of JSON."""
    return json.dumps(format_to_dict(fmt))


@lru_cache(maxsize=1024)
def format_from_json(text: str) -> Format:
    """Build a format from a line of JSON."""
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise FormatError(f"not the JSON of a format: {error}") from None
    if not isinstance(record, dict):
        raise FormatError(f"not the JSON of a format: {text[:60]!r}")
    return format_from_dict(record)
