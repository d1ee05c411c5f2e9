"""Names of recipes of post-training quantisation: the catalogue, those of users, and files."""

import difflib
import json
from functools import cache
from pathlib import Path
from typing import Any

from fmtsim.errors import ArgumentError
from fmtsim.ptq.spec import Calibration, Equalise, Gptq, LearnedRounding, PtqRecipe, Smooth
from fmtsim.recipes.serialization import RECORDS, recipe_to_dict, record_of
from fmtsim.scaling.quantizer import Quantizer

_OWN: dict[str, tuple[type, ...]] = {
    "x": (Quantizer,),
    "w": (Quantizer,),
    "calibration": (Calibration,),
    "smooth": (Smooth,),
    "equalise": (Equalise,),
    "weights": (Gptq, LearnedRounding),
}
_registered: dict[str, PtqRecipe] = {}


def get_ptq_recipe(recipe: str | Path | PtqRecipe) -> PtqRecipe:
    """Return the recipe of a name or alias, of a JSON file, or the record itself.

    Raises:
        ArgumentError: No such name or file.
    """
    if isinstance(recipe, PtqRecipe):
        return recipe
    if isinstance(recipe, Path) or (isinstance(recipe, str) and recipe.endswith(".json")):
        return load_ptq_recipe(recipe)
    known = _by_name() | _registered
    if isinstance(recipe, str) and recipe in known:
        return known[recipe]
    close = difflib.get_close_matches(str(recipe), known, n=2, cutoff=0.4)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ArgumentError(
        f"recipe={recipe!r} is unknown to ptq{hint} (fmtsim.list_ptq_recipes() has the names; a file ends in .json)"
    )


def list_ptq_recipes() -> list[str]:
    """Return the names of all recipes of post-training quantisation, without aliases."""
    return sorted({recipe.name for recipe in (*_by_name().values(), *_registered.values())})


def register_ptq_recipe(recipe: PtqRecipe) -> None:
    """Make a recipe known under its name and aliases; raise ArgumentError where a name is taken."""
    if not isinstance(recipe, PtqRecipe):
        raise ArgumentError(f"register_ptq_recipe takes a PtqRecipe, not {recipe!r}")
    names = (recipe.name, *recipe.aliases)
    taken = [name for name in names if name in _by_name() or _registered.get(name, recipe) != recipe]
    if taken:
        raise ArgumentError(f"a ptq recipe named {taken[0]!r} exists already; choose another name")
    _registered.update(dict.fromkeys(names, recipe))


def ptq_recipe_to_dict(recipe: PtqRecipe) -> dict[str, Any]:
    """Return a recipe as plain JSON types, defaults left out."""
    return recipe_to_dict(recipe, RECORDS | _OWN)


def ptq_recipe_from_dict(record: dict[str, Any]) -> PtqRecipe:
    """Build a recipe from ``ptq_recipe_to_dict``'s record; raise ArgumentError or FormatError where it is none."""
    if isinstance(record, dict) and isinstance(record.get("equalise"), dict):  # JSON has no tuples
        pairs = record["equalise"].get("pairs", [])
        record = record | {"equalise": record["equalise"] | {"pairs": [tuple(pair) for pair in pairs]}}
    return record_of(PtqRecipe, record, "recipe", RECORDS | _OWN)  # type: ignore[no-any-return]


def save_ptq_recipe(recipe: PtqRecipe, path: str | Path) -> None:
    """Write a recipe to a JSON file, which is accepted wherever a recipe's name is."""
    Path(path).write_text(json.dumps(ptq_recipe_to_dict(recipe), indent=2) + "\n", encoding="utf-8")


def load_ptq_recipe(path: str | Path) -> PtqRecipe:
    """Read a recipe from a JSON file; raise ArgumentError where it is none."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ArgumentError(f"{path} is no recipe file: {error}") from None
    return ptq_recipe_from_dict(record)


@cache
def _by_name() -> dict[str, PtqRecipe]:
    from fmtsim.ptq.catalogue import RECIPES

    return {name: recipe for recipe in RECIPES for name in (recipe.name, *recipe.aliases)}
