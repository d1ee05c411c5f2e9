# SPDX-License-Identifier: Apache-2.0
"""Recipes by name, for training and for post-training quantisation: the catalogues', registered ones, and files."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any, Literal, overload

from fmtsim.formats.block import Format
from fmtsim.recipes.ptq import PtqRecipe
from fmtsim.recipes.recipe import Recipe
from fmtsim.recipes.serialization import load_recipe
from fmtsim.support.errors import ArgumentError, did_you_mean, shown
from fmtsim.support.table import aligned

Kind = Literal["training", "ptq"]
_RECORDS: dict[Kind, Any] = {"training": Recipe, "ptq": PtqRecipe}
_LISTED_BY = {
    None: "fmtsim.list_recipes() has the names",
    "training": "fmtsim.list_recipes(kind='training') or fmtsim train --recipe list has the names",
    "ptq": "fmtsim.list_recipes(kind='ptq') or fmtsim ptq --scheme list has the names",
}
_OTHER_KIND = {
    "training": "quantises a trained model: call fmtsim.ptq(model, {name!r}, batches), or pass a recipe for training",
    "ptq": "is for training: call fmtsim.convert(model, recipe={name!r}), or pass a recipe for ptq",
}
# Widths, which several recipes share; each recipe has scales of its own.
_WIDTHS: dict[str, tuple[str, ...]] = {
    "fp8": (
        "te_current", "te_delayed", "te_block", "te_mxfp8", "ao_tensorwise", "ao_rowwise", "deepseek_v3",
        "e4m3_dynamic", "e4m3_static", "e4m3_token", "mxfp8_dynamic",
    ),
    "int8": ("int8_mixed", "switchback", "int8_token", "int8_static", "int8_smooth"),
    "int4": ("int4_g128", "int4_channel", "int4_gptq"),
    "fp4": ("te_nvfp4", "mxfp4", "quartet", "nvfp4_dynamic", "mxfp4_dynamic"),
}  # fmt: skip
_registered: dict[str, Recipe | PtqRecipe] = {}


@cache
def _catalogued() -> dict[str, Recipe | PtqRecipe]:
    """Return the recipes of both catalogues by name and alias; names are unique over both."""
    from fmtsim.recipes import catalogue, ptq_catalogue

    recipes: tuple[Recipe | PtqRecipe, ...] = (*catalogue.RECIPES, *ptq_catalogue.RECIPES)
    return {name: recipe for recipe in recipes for name in (recipe.name, *recipe.aliases)}


def _by_name(kind: Kind | None) -> dict[str, Recipe | PtqRecipe]:
    recipes = _catalogued() | _registered
    if kind is None:
        return recipes
    if not isinstance(kind, str) or kind not in _RECORDS:
        raise ArgumentError(f"kind={shown(kind)} is unknown; choose 'training' or 'ptq', or leave it out for both")
    return {name: recipe for name, recipe in recipes.items() if isinstance(recipe, _RECORDS[kind])}


@overload
def get_recipe(recipe: str | Path | Recipe, *, kind: Literal["training"]) -> Recipe: ...
@overload
def get_recipe(recipe: str | Path | PtqRecipe, *, kind: Literal["ptq"]) -> PtqRecipe: ...
@overload
def get_recipe(recipe: str | Path | Recipe | PtqRecipe, *, kind: None = None) -> Recipe | Any: ...
def get_recipe(recipe: str | Path | Recipe | PtqRecipe, *, kind: Kind | None = None) -> Recipe | PtqRecipe:
    """Return the record of a recipe's name or alias, of a JSON file, or the record itself.

    Args:
        recipe: Name, file or record.
        kind: ``"training"`` for a ``Recipe``, ``"ptq"`` for a ``PtqRecipe``; None takes both.

    Raises:
        ArgumentError: No such name or file (the message has names that are close), or a recipe of the other kind.

    >>> import fmtsim
    >>> fmtsim.get_recipe("te_current").name, fmtsim.get_recipe("w8a8").name
    ('te_current', 'int8_static')
    """
    recipes = _by_name(kind)
    if isinstance(recipe, Recipe | PtqRecipe):
        record: Recipe | PtqRecipe | None = recipe
    elif isinstance(recipe, Path) or (isinstance(recipe, str) and recipe.endswith(".json")):
        record = load_recipe(recipe)
    else:
        record = _by_name(None).get(recipe) if isinstance(recipe, str) else None
    if record is None:
        of_width = _WIDTHS.get(recipe.strip().lower(), ()) if isinstance(recipe, str) else ()
        offered = ", ".join(repr(name) for name in of_width if name in recipes)
        hint = f"; there are {offered}" if offered else did_you_mean(recipe, recipes)
        raise ArgumentError(f"recipe={shown(recipe)} is unknown{hint} ({_LISTED_BY[kind]}; a file ends in .json)")
    if kind is not None and not isinstance(record, _RECORDS[kind]):
        near = did_you_mean(recipe, recipes) if isinstance(recipe, str) else ""
        raise ArgumentError(
            f"recipe {shown(record.name)} {_OTHER_KIND[kind].format(name=record.name)}{near} ({_LISTED_BY[kind]})"
        )
    return record


def list_recipes(*, kind: Kind | None = None) -> list[str]:
    """Return the names of all recipes, without aliases, in alphabetical order.

    Args:
        kind: ``"training"`` or ``"ptq"`` for the names of one kind.

    >>> import fmtsim
    >>> [name for name in fmtsim.list_recipes(kind="training") if name.startswith("quartet")]
    ['quartet', 'quartet2', 'quartet2_4over6']
    """
    return sorted({recipe.name for recipe in _by_name(kind).values()})


def register_recipe(recipe: Recipe | PtqRecipe) -> None:
    """Make a recipe available under its name and aliases.

    Raises:
        ArgumentError: It is neither a Recipe nor a PtqRecipe, or another recipe has one of its names.

    >>> import dataclasses, fmtsim
    >>> recipe = fmtsim.get_recipe("te_current")
    >>> fmtsim.register_recipe(recipe)  # an equal record
    >>> fmtsim.register_recipe(dataclasses.replace(recipe, source="mine"))
    Traceback (most recent call last):
    fmtsim.support.errors.ArgumentError: a recipe named 'te_current' exists already; choose another name
    """
    if not isinstance(recipe, Recipe | PtqRecipe):
        raise ArgumentError(f"register_recipe takes a Recipe or a PtqRecipe, not {shown(recipe)}")
    names, recipes = (recipe.name, *recipe.aliases), _by_name(None)
    taken = [name for name in names if recipes.get(name, recipe) != recipe]
    if taken:
        raise ArgumentError(f"a recipe named {taken[0]!r} exists already; choose another name")
    _registered.update(dict.fromkeys(names, recipe))


_DESCRIPTIVE = ("aliases", "source", "notes", "variant", "name")


def diff(a: str | Path | Recipe | PtqRecipe, b: str | Path | Recipe | PtqRecipe) -> str:
    """Return a table of the fields in which two recipes differ, one line each: field, value in a, value in b.

    Raises:
        ArgumentError: One is for training and the other for post-training quantisation.

    >>> print(diff("te_current", "te_delayed").splitlines()[0].split()[0])
    field
    """
    first = get_recipe(a)
    second = get_recipe(b, kind="ptq" if isinstance(first, PtqRecipe) else "training")  # type: ignore[call-overload]
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
