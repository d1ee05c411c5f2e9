# SPDX-License-Identifier: Apache-2.0
"""What records have in common: fields that hold what their types say, and how JSON becomes records."""

import dataclasses
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from numbers import Integral
from operator import index
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fmtsim.support.errors import ArgumentError, FmtsimError, did_you_mean, keyword_error, position_error, shown

R = TypeVar("R")

LARGEST_FILE = 1 << 28  # bytes of JSON
DEEPEST = 64  # objects and lists inside each other

READERS: dict[Any, Callable[[Any, str], Any]] = {}
"""How values of a type are read where they are not objects of its fields; each takes a value and the way to it."""


def lists_fields(cls: type[R]) -> type[R]:
    """Make a dataclass list its fields where it is called with a keyword that it lacks, or with too many arguments.

    Its ``repr`` shows those fields alone that do not hold their default, unless it has one that is written out.
    """
    init, fields = cls.__init__, [field for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    needed = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    names, first = [field.name for field in fields], [field.name for field in fields if not field.kw_only]

    @wraps(init)
    def __init__(self: Any, *args: Any, **values: Any) -> None:
        try:
            init(self, *args, **values)
        except TypeError as error:
            unknown = [name for name in values if name not in names]
            if unknown:
                raise keyword_error(cls.__name__, unknown[0], names) from None
            if len(args) > len(first):
                keywords = [name for name in names if name not in first]
                raise position_error(cls.__name__, args[len(first)], first, keywords) from error
            absent = [name for name in needed if name not in (*first[: len(args)], *values)]
            if absent:
                needs = " and ".join(f"{name}=" for name in absent)
                raise TypeError(f"{cls.__name__}() needs {needs} (it takes {', '.join(names)})") from None
            raise

    def __repr__(self: Any) -> str:
        values = ((field, getattr(self, field.name)) for field in fields)
        return f"{cls.__name__}({', '.join(f'{field.name}={x!r}' for field, x in values if x != field.default)})"

    cls.__init__ = __init__  # type: ignore[method-assign]
    if hasattr(cls.__repr__, "__wrapped__"):  # the one that dataclass makes
        cls.__repr__ = __repr__  # type: ignore[method-assign]
    return cls


def check_types(record: Any, error: type[FmtsimError] = ArgumentError) -> None:
    """Raise an error where a field of a record does not hold what its type says."""
    cls: Any = type(record)
    for name, hint, default in _fields(cls):
        value = getattr(record, name)
        if value is default or _fits(value, hint):  # most fields of most records hold their default
            continue
        if not _fits(whole := as_int(value), hint):
            raise error(f"{type(record).__name__} {name}={shown(value)} is not allowed; {_allowed(hint)}")
        object.__setattr__(record, name, whole)


@cache
def type_hints(cls: Any) -> dict[str, Any]:
    """Return the types of a record's fields."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def checked(name: str, value: Any, hint: Any) -> Any:
    """Return an argument that is what a type says, whole numbers as ints; a list counts as a tuple.

    Raises:
        ArgumentError: It is not.
    """
    converted = as_int(tuple(value) if isinstance(value, list) else value)
    if not _fits(converted, hint):
        raise ArgumentError(f"{name}={shown(value)} is not allowed; {_allowed(hint)}")
    return converted


def read_value(text: str) -> Any:
    """Read a field's value from a word of the command line: an integer, none, true, false, or a name."""
    words = {"none": None, "true": True, "false": False}
    return int(text) if text.removeprefix("-").isdecimal() else words.get(text.lower(), text)


def parse_record(text: str, record: type, option: str) -> Any:
    """Build a record from ``field=value,...``: integers, none, true, false, and names.

    Raises:
        ArgumentError: A field is unknown, lacks a value, or has one that is not possible.
    """
    field_names = [field.name for field in dataclasses.fields(record)]
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or name not in field_names:
            fields = f"fields are {', '.join(field_names)}{did_you_mean(name, field_names)}"
            raise ArgumentError(f"{option} {item.strip()!r} is not FIELD=VALUE; {fields}")
        values[name] = read_value(value)
    return record(**values)


def check_items(value: Any, types: dict[str, Any], what: str) -> None:
    """Raise ArgumentError where something saved is not a dict with these items, each of its type."""
    if not isinstance(value, dict):
        raise ArgumentError(f"{what} is {shown(value)}; pass the dict that was saved")
    for name, hint in types.items():
        if name not in value:
            raise ArgumentError(f"{what} has no {name!r}; pass what was saved")
        if not _fits(value[name], hint):
            raise ArgumentError(f"{what} has {name!r}: {shown(value[name])}; it should be {_in_words(hint)}")


@cache
def _fields(cls: Any) -> tuple[tuple[str, Any, Any], ...]:
    """Return name, type and default of a record's fields; without a default, what no field holds."""
    hints = type_hints(cls)
    return tuple((field.name, hints[field.name], field.default) for field in dataclasses.fields(cls) if field.init)


def as_int(value: Any) -> Any:
    """Return a whole number of another library, such as a numpy.int64, as an int; other things as they are."""
    if type(value) is tuple:
        return tuple(map(as_int, value))
    return value if isinstance(value, bool) or not isinstance(value, Integral) else index(value)


def _fits(value: Any, hint: Any) -> bool:
    """Return True if a value is of a type; integers fit 64 bits, and text can be encoded as UTF-8."""
    origin, arguments = _apart(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, kind) for kind in arguments)
    if origin is Literal:
        return type(value) in {type(kind) for kind in arguments} and value in arguments
    if origin is tuple:
        kind = arguments[:1] * len(value) if arguments[-1] is ... and isinstance(value, tuple) else arguments
        return isinstance(value, tuple) and len(value) == len(kind) and all(map(_fits, value, kind))
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(key, arguments[0]) and _fits(item, arguments[1]) for key, item in value.items()
        )
    if hint is int or (hint is float and isinstance(value, int)):
        return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63
    if hint is str:
        return isinstance(value, str) and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))
    return hint is Any or isinstance(value, origin or hint)


@cache
def _apart(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


def _allowed(hint: Any) -> str:
    """Say what a type allows: "choose" where that is a list, "pass" where it is a kind of thing."""
    leaves = _leaves(hint)
    values = [value for leaf in leaves if get_origin(leaf) is Literal for value in get_args(leaf)]
    if values and all(leaf is NoneType or get_origin(leaf) is Literal for leaf in leaves):
        return f"choose {', '.join(map(repr, [None, *values] if NoneType in leaves else values))}"
    return f"pass {_in_words(hint)}"


def _in_words(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_in_words, arguments)))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        return f"a tuple ({', '.join('...' if kind is ... else _in_words(kind) for kind in arguments)})"
    return _WORDS.get(hint) or f"a {getattr(origin or hint, '__name__', hint)}"


_WORDS = {int: "a whole number of 64 bits", float: "a number", bool: "True or False", str: "text", NoneType: "None"}


def read_file(path: str | os.PathLike[str], error: type[FmtsimError], largest: int | None = None) -> bytes:
    """Return what an ordinary file holds.

    Raises:
        error: There is none, it cannot be read, it is not an ordinary file, or it has more than ``largest`` bytes.
    """
    if not isinstance(path, str | os.PathLike):
        raise error(f"{shown(path)} is not a path; pass a str or a pathlib.Path")
    try:
        about = os.stat(path)
        if stat.S_ISREG(about.st_mode) and about.st_size <= (about.st_size if largest is None else largest):
            with open(path, "rb") as file:
                return file.read()
    except (OSError, ValueError, TypeError, MemoryError) as failure:  # ValueError: a null byte in a name
        reason = getattr(failure, "strerror", None) or str(failure) or "it does not fit into memory"
        raise error(f"cannot read {shown_path(path)}: {reason}") from None
    size = f"it has {about.st_size:,} bytes, at most {largest:,} are expected" if stat.S_ISREG(about.st_mode) else ""
    raise error(f"cannot read {shown_path(path)}: {size or 'it is not a file; name one'}")


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path as errors show it."""
    text = str(path)
    return text if text.isprintable() else shown(text)


def read_json(path: str | os.PathLike[str], error: type[FmtsimError], what: str, *, nan: bool = False) -> Any:
    """Return what a JSON file holds: no key twice, no NaN, no infinity (with ``nan`` they are numbers).

    Raises:
        error: It cannot be read, or is not JSON; ``what`` is what it should have been.
    """
    try:
        return parse_json(read_file(path, error, LARGEST_FILE).decode("utf-8"), nan)
    except ValueError as failure:
        if isinstance(failure, error):
            raise
        raise error(f"{shown_path(path)} is not a valid {what}: {failure}") from None


def parse_json(text: str, nan: bool = False) -> Any:
    """Return what JSON says; raise ValueError where it says nothing, or one thing twice."""
    if not isinstance(text, str):
        raise ValueError(f"{shown(text)} is not text")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=None if nan else _constant)
    except RecursionError:
        raise ValueError(f"more than {DEEPEST} objects or lists inside each other") from None
    check_depth(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shown(next(name for name in names if names.count(name) > 1))} stands twice in one object")
    return members


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def check_depth(value: Any, room: int = DEEPEST) -> None:
    """Raise ValueError where objects and lists lie too deep inside each other."""
    if isinstance(value, dict | list | tuple):
        if not room:
            raise ValueError(f"more than {DEEPEST} objects or lists inside each other")
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(item, room - 1)


@contextmanager
def located(path: str, kind: type[FmtsimError] | None = None) -> Iterator[None]:
    """Put the way to a field before what its record says is wrong, as an error of another kind if one is passed."""
    try:
        yield
    except FmtsimError as error:
        raise at(path, kind or type(error), str(error)) from None


def at(path: str, error: type[FmtsimError], text: str) -> FmtsimError:
    """Return an error about what lies at the end of a way."""
    return error(f"{path}: {text}" if path else text)


def record_of(cls: type, value: Any, path: str) -> Any:
    """Build a record of a class from an object of JSON; ``path`` is what errors call it."""
    a_name = f"a{'n' * (cls.__name__[0] in 'AEIO')} {cls.__name__}"
    value = record_fields(value, path, a_name)
    if path.count(".") > DEEPEST:
        raise at(path, ArgumentError, f"more than {DEEPEST} objects inside each other")
    fields = [field for field in dataclasses.fields(cls) if field.init]
    field_names = {field.name for field in fields}
    unknown = [name for name in value if name not in field_names]
    if unknown:
        has = ", ".join(sorted(field_names))
        raise at(path, ArgumentError, f"{a_name} has no field {shown(unknown[0])}; it has {has}")
    absent = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in value
    ]
    if absent:
        raise at(path, ArgumentError, f"{a_name} needs {' and '.join(map(repr, absent))}")
    hints = type_hints(cls)
    values = {name: _value(hints[name], item, f"{path}.{name}" if path else name) for name, item in value.items()}
    with located(path):
        return cls(**values)


def record_fields(value: Any, path: str, what: str) -> dict[str, Any]:
    """Return a copy of an object of JSON; raise ArgumentError where it is none."""
    if not isinstance(value, dict):
        raise at(path, ArgumentError, f"{shown(value)} is not an object; write the fields of {what}, {{...}}")
    return dict(value)


def kinds_of(hint: Any) -> dict[str, Any]:
    """Return the classes of records among what a type, or the items of a tuple, may be, by name."""
    leaves = _leaves(hint)
    items = [
        item
        for leaf in leaves
        if get_origin(leaf) is tuple
        for argument in get_args(leaf)
        for item in _leaves(argument)
    ]
    records: list[Any] = [leaf for leaf in (*leaves, *items) if dataclasses.is_dataclass(leaf)]
    return {record.__name__: record for record in records}


def _leaves(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _value(hint: Any, value: Any, path: str) -> Any:
    """Return a field's value, made of what JSON says; what fits nothing goes on to the record, which refuses it."""
    leaves = _leaves(hint)
    reader = next((READERS[leaf] for leaf in leaves if leaf in READERS), None)
    if value is None or reader is not None:
        return None if value is None else reader(value, path)  # type: ignore[misc]
    for leaf in leaves:
        arguments = get_args(leaf)
        if get_origin(leaf) is tuple:
            if not isinstance(value, list):
                if kinds_of(arguments[0]):
                    raise at(path, ArgumentError, f"{shown(value)} is not a list; write [...]")
                return value
            each = arguments[:1] * len(value) if arguments[-1] is ... else arguments
            if len(each) != len(value):
                return tuple(value)
            return tuple(
                _value(hint, item, f"{path}[{i}]") for i, (hint, item) in enumerate(zip(each, value, strict=True))
            )
        if get_origin(leaf) is dict and isinstance(value, dict) and arguments[1] is not Any:
            return {name: _value(arguments[1], item, f"{path}.{name}") for name, item in value.items()}
    kinds = kinds_of(hint)
    if not kinds or not isinstance(value, dict | str):
        return value
    if len(kinds) == 1:
        return record_of(next(iter(kinds.values())), value, path)
    # a record of one of several classes: the object says of which under "kind"
    fields = dict(value) if isinstance(value, dict) else {"kind": value}
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise at(path, ArgumentError, f"kind={shown(kind)} is unknown; choose one of {', '.join(kinds)}")
    return record_of(kinds[kind], fields, path)


def load_record(path: str | os.PathLike[str], what: str, read: Callable[[Any, str], R]) -> R:
    """Return what a JSON file says.

    Args:
        path: The file.
        what: What it should be, such as ``"recipe file"``.
        read: Takes what the file holds, and what errors call the file.

    Raises:
        ArgumentError: It cannot be read, is not JSON, or a field is wrong; the message has the file and the field.
    """
    value = read_json(path, ArgumentError, what)
    try:
        return read(value, str(path))
    except FmtsimError as error:
        raise ArgumentError(str(error)) from None
