# SPDX-License-Identifier: Apache-2.0
"""Recipes by name (the catalogue's, those of users, and files), and what sets two of them apart."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from fmtsim.formats.block import Format
from fmtsim.recipes.serialization import load_recipe
from fmtsim.recipes.spec import Recipe
from fmtsim.support.errors import ArgumentError, did_you_mean, shown
from fmtsim.support.table import aligned

R = TypeVar("R")


class Names(Generic[R]):
    """Find records, which have a ``name`` and ``aliases``, by those, or in JSON files.

    Args:
        record: Their class.
        what: What one of them is called in messages.
        register: The function that registers one, likewise.
        unknown: What follows a name that is none.
        hint: Where the names are listed.
        catalogue: Returns the records that are known from the start.
        load: Reads a record from a file.
        several: Names that several records could mean, each with theirs, for the message.
    """

    def __init__(
        self, record: type[R], what: str, register: str, unknown: str, hint: str,
        catalogue: Callable[[], Iterable[R]], load: Callable[[str | Path], R],
        several: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._several = several
        self._record, self._what, self._register, self._unknown, self._hint = record, what, register, unknown, hint
        self._catalogue, self._load = catalogue, load
        self.registered: dict[str, R] = {}

    def get(self, recipe: str | Path | R) -> R:
        """Return the record of a name or alias, of a JSON file, or the record itself.

        Raises:
            ArgumentError: No such name or file.
        """
        if isinstance(recipe, self._record):
            return recipe
        if isinstance(recipe, Path) or (isinstance(recipe, str) and recipe.endswith(".json")):
            return self._load(recipe)
        known = self._by_name | self.registered
        if isinstance(recipe, str) and recipe in known:
            return known[recipe]
        named = self._several.get(recipe.strip().lower(), ()) if isinstance(recipe, str) else ()
        hint = f"; there are {', '.join(map(repr, named))}" if named else did_you_mean(recipe, known)
        raise ArgumentError(
            f"recipe={shown(recipe)} is {self._unknown}{hint} ({self._hint} has the names; a file ends in .json)"
        )

    def names(self) -> list[str]:
        """Return the names of all records, without aliases, in the order of the alphabet."""
        return sorted({record.name for record in (*self._by_name.values(), *self.registered.values())})  # type: ignore[attr-defined]

    def register(self, recipe: R) -> None:
        """Make a record known under its name and aliases; raise ArgumentError where another record has one of them."""
        if not isinstance(recipe, self._record):
            raise ArgumentError(f"{self._register} takes a {self._record.__name__}, not {shown(recipe)}")
        names = (recipe.name, *recipe.aliases)  # type: ignore[attr-defined]
        known = self._by_name | self.registered
        taken = [name for name in names if known.get(name, recipe) != recipe]
        if taken:
            raise ArgumentError(f"a {self._what} named {taken[0]!r} exists already; choose another name")
        self.registered.update(dict.fromkeys(names, recipe))

    @cached_property
    def _by_name(self) -> dict[str, R]:
        return {name: record for record in self._catalogue() for name in (record.name, *record.aliases)}  # type: ignore[attr-defined]


def _catalogue() -> Iterable[Recipe]:
    from fmtsim.recipes.catalogue import RECIPES

    return RECIPES


# What people call by its width alone; each has its own scales.
_SEVERAL = {
    "fp8": ("te_current", "te_delayed", "te_block", "te_mxfp8", "ao_tensorwise", "ao_rowwise", "deepseek_v3"),
    "int8": ("int8_mixed", "switchback"),
    "fp4": ("te_nvfp4", "mxfp4", "quartet"),
}
_names = Names(
    Recipe, "recipe", "register_recipe", "unknown", "fmtsim.list_recipes() or fmtsim train --recipe list",
    _catalogue, load_recipe, _SEVERAL,
)  # fmt: skip


def get_recipe(recipe: str | Path | Recipe) -> Recipe:
    """Return the record of a recipe's name or alias, of a JSON file, or the record itself.

    Raises:
        ArgumentError: No such name or file; the message has names that are close.

    >>> import fmtsim
    >>> fmtsim.get_recipe("te_current").name
    'te_current'
    """
    return _names.get(recipe)


def list_recipes() -> list[str]:
    """Return the names of all recipes, without aliases, in the order of the alphabet.

    >>> import fmtsim
    >>> [name for name in fmtsim.list_recipes() if name.startswith("quartet")]
    ['quartet', 'quartet2', 'quartet2_4over6']
    """
    return _names.names()


def register_recipe(recipe: Recipe) -> None:
    """Make a recipe known under its name and aliases.

    Raises:
        ArgumentError: It is not a Recipe, or another recipe has one of its names.

    >>> import dataclasses, fmtsim
    >>> recipe = fmtsim.get_recipe("te_current")
    >>> fmtsim.register_recipe(recipe)  # an equal record
    >>> fmtsim.register_recipe(dataclasses.replace(recipe, source="mine"))
    Traceback (most recent call last):
    fmtsim.support.errors.ArgumentError: a recipe named 'te_current' exists already; choose another name
    """
    _names.register(recipe)


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
