# SPDX-License-Identifier: Apache-2.0
"""What sets two recipes apart, field by field."""

import dataclasses
from pathlib import Path
from typing import Any

from fmtsim.formats.block import Format
from fmtsim.recipes.registry import get_recipe
from fmtsim.recipes.spec import Recipe
from fmtsim.support.table import aligned

_DESCRIPTIVE = ("aliases", "source", "notes", "variant", "name")


def diff(a: str | Path | Recipe, b: str | Path | Recipe) -> str:
    """Return a table of the fields in which two recipes differ, one line each: field, value in a, value in b.

    >>> print(diff("te_current", "te_delayed").splitlines()[0].split()[0])
    field
    """
    first, second = get_recipe(a), get_recipe(b)
    lines = list(_differences("", first, second))
    if not lines:
        return f"{first.name} and {second.name} are the same"
    return "\n".join(aligned([("field", first.name, second.name), *lines]))


def _differences(path: str, a: Any, b: Any) -> Any:
    if a == b:
        return
    if _record(a) and type(a) is type(b):
        for field in dataclasses.fields(a):
            if path or field.name not in _DESCRIPTIVE:
                dotted = f"{path}.{field.name}" if path else field.name
                yield from _differences(dotted, getattr(a, field.name), getattr(b, field.name))
        return
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) and any(map(_record, (*a, *b))):
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _differences(f"{path}[{i}]", one, other)
        return
    yield path, _text(a), _text(b)


def _record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and not isinstance(value, Format)


def _text(value: Any) -> str:
    if isinstance(value, Format):
        return value.name
    return "; ".join(map(str, value)) if isinstance(value, tuple) else str(value)
