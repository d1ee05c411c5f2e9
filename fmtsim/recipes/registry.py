# SPDX-License-Identifier: Apache-2.0
"""Names of recipes: the catalogue, those of users, and files."""

from collections.abc import Iterable
from pathlib import Path

from fmtsim.recipes.names import Names
from fmtsim.recipes.serialization import load_recipe
from fmtsim.recipes.spec import Recipe


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
