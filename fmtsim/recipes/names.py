# SPDX-License-Identifier: Apache-2.0
"""Records by name: a catalogue's, those of users, and files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Generic, TypeVar

from fmtsim.support.errors import ArgumentError, did_you_mean, shown

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
