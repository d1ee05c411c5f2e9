"""Names of recipes: the catalogue, those of users, and files."""

import difflib
from functools import cache
from pathlib import Path

from fmtsim.errors import ArgumentError
from fmtsim.recipes.serialization import load_recipe
from fmtsim.recipes.spec import Recipe

_registered: dict[str, Recipe] = {}


def get_recipe(recipe: str | Path | Recipe) -> Recipe:
    """Return the recipe of a name or alias, of a JSON file, or the record itself.

    Raises:
        ArgumentError: No such name or file.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Path) or (isinstance(recipe, str) and recipe.endswith(".json")):
        return load_recipe(recipe)
    known = _by_name() | _registered
    if isinstance(recipe, str) and recipe in known:
        return known[recipe]
    close = difflib.get_close_matches(str(recipe).strip().lower(), known, n=2, cutoff=0.4)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ArgumentError(
        f"recipe={recipe!r} is unknown{hint} (fmtsim.list_recipes() or fmtsim train --recipe list has the names; "
        "a file ends in .json)"
    )


def list_recipes() -> list[str]:
    """Return the names of all recipes, without aliases."""
    return sorted({recipe.name for recipe in (*_by_name().values(), *_registered.values())})


def register_recipe(recipe: Recipe) -> None:
    """Make a recipe known under its name and aliases; raise ArgumentError where a name is taken."""
    if not isinstance(recipe, Recipe):
        raise ArgumentError(f"register_recipe takes a Recipe, not {recipe!r}")
    names = (recipe.name, *recipe.aliases)
    taken = [name for name in names if name in _by_name() or _registered.get(name, recipe) != recipe]
    if taken:
        raise ArgumentError(f"a recipe named {taken[0]!r} exists already; choose another name")
    _registered.update(dict.fromkeys(names, recipe))


@cache
def _by_name() -> dict[str, Recipe]:
    from fmtsim.recipes.catalogue import RECIPES

    return {name: recipe for recipe in RECIPES for name in (recipe.name, *recipe.aliases)}
