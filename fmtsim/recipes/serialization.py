"""Recipes as JSON: records as objects without their defaults, formats by name where they are catalogued."""

import contextlib
import dataclasses
import json
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fmtsim.errors import ArgumentError, FmtsimError, FormatError
from fmtsim.formats.block import Format
from fmtsim.formats.registry import get_format
from fmtsim.formats.serialization import format_from_dict, format_to_dict
from fmtsim.gemm.layers.config import Gemm, LinearConfig
from fmtsim.recipes.attention import BACKWARD, AttentionConfig
from fmtsim.recipes.spec import LossScale, Recipe, Replacement, Rule, Steps
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.datapath import Arithmetic
from fmtsim.spec.gemm_spec import record_from_dict, record_to_dict
from fmtsim.spec.gradient import ClipMask, Differentiable, StraightThrough, TrustMask
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.quantizer import Quantizer
from fmtsim.spec.scaling import History, Scaling, TensorScale
from fmtsim.spec.transform import Clamp, Hadamard

Records = Mapping[str, tuple[type, ...]]

# The record of a field, by the field's name; several where the object says which under "kind".
RECORDS: dict[str, tuple[type, ...]] = {
    "linear": (LinearConfig,),
    "use": (LinearConfig,),
    "rules": (Rule,),
    "steps": (Steps,),
    "attention": (AttentionConfig,),
    "replace": (Replacement,),
    "loss_scale": (LossScale,),
    "scaling": (Scaling,),
    "history": (History,),
    "tensor": (TensorScale,),
    "rounding": (Rounding,),
    "transforms": (Hadamard, Clamp),
    "gradient": (StraightThrough, ClipMask, TrustMask, Differentiable),
} | {
    **dict.fromkeys(("fprop", "dgrad", "wgrad", *BACKWARD), (Gemm,)),
    **dict.fromkeys(("a", "b", "out", "then", "q", "k", "v", "p"), (Quantizer,)),
}
_FORMATS = ("format", "scale", "rounded")
_MACHINES = ("unit", "plan", "target")
_LISTS = ("rules", "transforms")


def recipe_to_dict(record: Any, records: Records = RECORDS) -> dict[str, Any]:
    """Return a recipe, or a part of one, as plain JSON types, defaults left out."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value != field.default:
            fields[field.name] = _plain(field.name, value, records)
    return fields


def _plain(name: str, value: Any, records: Records) -> Any:
    if isinstance(value, Format):
        return _format_text(value)
    if isinstance(value, Arithmetic | GemmPlan):
        return record_to_dict(value)
    if isinstance(value, tuple):
        return [_plain(name, item, records) for item in value]
    if dataclasses.is_dataclass(value):
        kinds = records[name]
        own = recipe_to_dict(value, records)
        return {"kind": type(value).__name__} | own if len(kinds) > 1 else own
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


def record_of(cls: type, record: Any, path: str, records: Records = RECORDS) -> Any:
    """Build a record of a class from an object of JSON; ``path`` is what errors call it.

    Args:
        cls: The class.
        record: The object.
        path: The way to it, for messages.
        records: The class, or classes, of a field's records by the field's name.
    """
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
    values = {name: _value(name, value, f"{path}.{name}", records) for name, value in record.items()}
    with _located(path):
        return cls(**values)


def _value(name: str, value: Any, path: str, records: Records) -> Any:
    if value is None:
        return None
    if name in _LISTS and not isinstance(value, list):
        raise ArgumentError(f"{path}: {reprlib.repr(value)} is not a list; write [...]")
    if isinstance(value, list):
        return tuple(_item(name, item, f"{path}[{i}]", records) for i, item in enumerate(value))
    return _item(name, value, path, records)


def _item(name: str, value: Any, path: str, records: Records) -> Any:
    if name in _FORMATS:
        if not isinstance(value, str | dict):
            raise ArgumentError(
                f"{path}: {reprlib.repr(value)} is no format; write its name, or the fields of its record"
            )
        with _located(path):
            return get_format(value) if isinstance(value, str) else format_from_dict(value)
    if name in _MACHINES:
        with _located(path):
            return record_from_dict(value) if isinstance(value, dict) else value
    if isinstance(value, list):
        return tuple(value)
    if name not in records or not isinstance(value, dict | str):
        return value
    kinds = {cls.__name__: cls for cls in records[name]}
    if len(kinds) == 1:
        return record_of(next(iter(kinds.values())), value, path, records)
    fields = dict(value) if isinstance(value, dict) else {"kind": value}
    kind = fields.pop("kind", None)
    if kind not in kinds:
        raise ArgumentError(f"{path}: kind={kind!r} is unknown; choose one of {', '.join(kinds)}")
    return record_of(kinds[kind], fields, path, records)


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write a recipe to a JSON file, which is accepted wherever a recipe's name is."""
    Path(path).write_text(json.dumps(recipe_to_dict(recipe), indent=2) + "\n", encoding="utf-8")


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe from a JSON file; raise what ``recipe_from_dict`` does, and ArgumentError where it is no JSON."""
    return record_of(Recipe, read_record(path), f"{path}: recipe")  # type: ignore[no-any-return]


def read_record(path: str | Path) -> Any:
    """Return what a JSON file of a recipe holds; raise ArgumentError where it cannot be read or is no JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} is no recipe file: {error}") from None
