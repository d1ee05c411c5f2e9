"""Recipes as JSON: records as objects without their defaults, formats by name where they are catalogued."""

import contextlib
import dataclasses
import json
import reprlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from fmtsim.errors import ArgumentError, FmtsimError, FormatError
from fmtsim.files import write_file
from fmtsim.formats.block import Format
from fmtsim.formats.registry import get_format
from fmtsim.formats.serialization import format_from_dict, format_to_dict
from fmtsim.recipes.spec import Recipe
from fmtsim.spec.datapath import Arithmetic
from fmtsim.spec.gemm_spec import record_from_dict, record_to_dict
from fmtsim.spec.plan import GemmPlan


class _Field(NamedTuple):
    """What a field of a record may hold, as its type says.

    Attributes:
        records: Records of these classes; of several where the object says which under "kind".
        formats: Whether it holds a format.
        machines: Whether it holds a unit, a target or a plan.
        several: Whether it holds a list of records.
    """

    records: dict[str, type]
    formats: bool
    machines: bool
    several: bool


@cache
def _fields(cls: Any) -> dict[str, _Field]:
    found = {}
    for name, hint in get_type_hints(cls).items():
        leaves = list(_leaves(hint))
        kinds: list[Any] = [leaf for leaf in leaves if dataclasses.is_dataclass(leaf)]
        formats, machines = any(issubclass(kind, Format) for kind in kinds), Any in leaves or GemmPlan in leaves
        records = {} if formats or machines else {kind.__name__: kind for kind in kinds}
        found[name] = _Field(records, formats, machines, bool(records) and get_origin(hint) is tuple)
    return found


def _leaves(hint: Any) -> Iterator[Any]:
    """Yield the types in a union, or in a tuple of them."""
    if get_origin(hint) not in (Union, UnionType, tuple):
        yield hint
        return
    for part in get_args(hint):
        yield from _leaves(part)


def recipe_to_dict(record: Any) -> dict[str, Any]:
    """Return a recipe, or a part of one, as plain JSON types, defaults left out."""
    fields = _fields(record.__class__)
    found = ((field, getattr(record, field.name)) for field in dataclasses.fields(record))
    return {field.name: _plain(fields[field.name], value) for field, value in found if value != field.default}


def _plain(field: _Field, value: Any) -> Any:
    if isinstance(value, Format):
        return _format_text(value)
    if isinstance(value, Arithmetic | GemmPlan):
        return record_to_dict(value)
    if isinstance(value, tuple):
        return [_plain(field, item) for item in value]
    if dataclasses.is_dataclass(value):
        kind = {"kind": type(value).__name__} if len(field.records) > 1 else {}
        return kind | recipe_to_dict(value)
    return value


def _format_text(fmt: Format) -> Any:
    try:
        known = get_format(fmt.name)
    except FormatError:
        known = None
    return fmt.name if known == fmt else format_to_dict(fmt)


def recipe_from_dict(record: dict[str, Any]) -> Recipe:
    """Build a recipe from ``recipe_to_dict``'s record.

    Raises:
        ArgumentError: A field that no record has, or one of another type; it names the way to the field.
        FormatError: A format, rounding or scale rule that does not exist; likewise.
    """
    return record_of(Recipe, record, "recipe")  # type: ignore[no-any-return]


@contextlib.contextmanager
def _located(path: str) -> Iterator[None]:
    """Put the way to a field before what its record says is wrong."""
    try:
        yield
    except FmtsimError as error:
        raise type(error)(f"{path}: {error}") from None
    except TypeError as error:
        raise ArgumentError(f"{path}: {error}") from None


def record_of(cls: type, record: Any, path: str) -> Any:
    """Build a record of a class from an object of JSON; ``path`` is what errors call it."""
    if not isinstance(record, dict):
        what = reprlib.repr(record)
        raise ArgumentError(f"{path}: {what} is not an object; write the fields of a {cls.__name__}, {{...}}")
    fields = dataclasses.fields(cls)
    known = {field.name for field in fields}
    unknown = [name for name in record if name not in known]
    if unknown:
        raise ArgumentError(f"{path}: a {cls.__name__} has no field {unknown[0]!r}; it has {', '.join(sorted(known))}")
    absent = [field.name for field in fields if field.default is dataclasses.MISSING and field.name not in record]
    if absent:
        raise ArgumentError(f"{path}: a {cls.__name__} needs {' and '.join(map(repr, absent))}")
    types = _fields(cls)
    values = {name: _value(types[name], value, f"{path}.{name}") for name, value in record.items()}
    with _located(path):
        return cls(**values)


def _value(field: _Field, value: Any, path: str) -> Any:
    if value is None:
        return None
    if field.several and not isinstance(value, list):
        raise ArgumentError(f"{path}: {reprlib.repr(value)} is not a list; write [...]")
    if isinstance(value, list):
        return tuple(_item(field, item, f"{path}[{i}]") for i, item in enumerate(value))
    return _item(field, value, path)


def _item(field: _Field, value: Any, path: str) -> Any:
    kinds = field.records
    if field.formats:
        if not isinstance(value, str | dict):
            raise ArgumentError(
                f"{path}: {reprlib.repr(value)} is no format; write its name, or the fields of its record"
            )
        with _located(path):
            return get_format(value) if isinstance(value, str) else format_from_dict(value)
    if field.machines:
        with _located(path):
            return record_from_dict(value) if isinstance(value, dict) else value
    if isinstance(value, list):
        return tuple(value)
    if not kinds or not isinstance(value, dict | str):
        return value
    if len(kinds) == 1:
        return record_of(next(iter(kinds.values())), value, path)
    fields = dict(value) if isinstance(value, dict) else {"kind": value}
    kind = fields.pop("kind", None)
    if kind not in kinds:
        raise ArgumentError(f"{path}: kind={kind!r} is unknown; choose one of {', '.join(kinds)}")
    return record_of(kinds[kind], fields, path)


def save_recipe(recipe: Any, path: str | Path) -> None:
    """Write a recipe to a JSON file, which is accepted wherever a recipe's name is."""
    write_file(path, json.dumps(recipe_to_dict(recipe), indent=2) + "\n")


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe from a JSON file; raise what ``recipe_from_dict`` does, and ArgumentError where it is no JSON."""
    return record_of(Recipe, read_record(path), f"{path}: recipe")  # type: ignore[no-any-return]


def read_record(path: str | Path) -> Any:
    """Return what a JSON file of a recipe holds; raise ArgumentError where it cannot be read or is no JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} is no recipe file: {error}") from None
