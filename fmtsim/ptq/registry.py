# SPDX-License-Identifier: Apache-2.0
"""Names of recipes of post-training quantisation: the catalogue, those of users, and files."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fmtsim.ptq.spec import PtqRecipe
from fmtsim.recipes.names import Names
from fmtsim.recipes.serialization import recipe_to_dict, save_recipe
from fmtsim.support.records import load_record, record_of


def ptq_recipe_to_dict(recipe: PtqRecipe) -> dict[str, Any]:
    """Return a recipe as plain JSON types, defaults left out."""
    return recipe_to_dict(recipe)


def ptq_recipe_from_dict(record: dict[str, Any]) -> PtqRecipe:
    """Build a recipe from ``ptq_recipe_to_dict``'s record; raise ArgumentError or FormatError where it is none."""
    return record_of(PtqRecipe, record, "recipe")  # type: ignore[no-any-return]


def save_ptq_recipe(recipe: PtqRecipe, path: str | Path) -> None:
    """Write a recipe to a JSON file, which is accepted wherever a recipe's name is."""
    save_recipe(recipe, path)


def load_ptq_recipe(path: str | Path) -> PtqRecipe:
    """Read a recipe from a JSON file; raise ArgumentError with file and field where it is none."""
    return load_record(path, "recipe file", lambda value, name: record_of(PtqRecipe, value, f"{name}: recipe"))


def _catalogue() -> Iterable[PtqRecipe]:
    from fmtsim.ptq.catalogue import RECIPES

    return RECIPES


# What people call by its width alone.
_SEVERAL = {
    "fp8": ("e4m3_dynamic", "e4m3_static", "e4m3_token", "mxfp8"),
    "int8": ("int8_token", "int8_static", "int8_smooth"),
    "int4": ("int4_g128", "int4_channel", "int4_gptq"),
    "fp4": ("nvfp4", "mxfp4"),
}
_names = Names(
    PtqRecipe, "ptq recipe", "register_ptq_recipe", "unknown to ptq", "fmtsim.list_ptq_recipes()",
    _catalogue, load_ptq_recipe, _SEVERAL,
)  # fmt: skip


def get_ptq_recipe(recipe: str | Path | PtqRecipe) -> PtqRecipe:
    """Return the record of a recipe's name or alias, of a JSON file, or the record itself.

    Raises:
        ArgumentError: No such name or file; the message has names that are close.

    >>> import fmtsim
    >>> fmtsim.get_ptq_recipe("int8_static").name
    'int8_static'
    """
    return _names.get(recipe)


def list_ptq_recipes() -> list[str]:
    """Return the names of all recipes, without aliases, in the order of the alphabet.

    >>> import fmtsim
    >>> [name for name in fmtsim.list_ptq_recipes() if name.startswith("int8_s")]
    ['int8_smooth', 'int8_static']
    """
    return _names.names()


def register_ptq_recipe(recipe: PtqRecipe) -> None:
    """Make a recipe known under its name and aliases.

    Raises:
        ArgumentError: It is not a PtqRecipe, or another recipe has one of its names.
    """
    _names.register(recipe)
