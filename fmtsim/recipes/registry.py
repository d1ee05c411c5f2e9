"""Names of recipes: the catalogue, those of users, and files."""

from collections.abc import Iterable

from fmtsim.recipes.names import Names
from fmtsim.recipes.serialization import load_recipe
from fmtsim.recipes.spec import Recipe


def _catalogue() -> Iterable[Recipe]:
    from fmtsim.recipes.catalogue import RECIPES

    return RECIPES


_names = Names(
    Recipe, "recipe", "register_recipe", "unknown", "fmtsim.list_recipes() or fmtsim train --recipe list",
    _catalogue, load_recipe,
)  # fmt: skip


get_recipe = _names.get
list_recipes = _names.names
register_recipe = _names.register
