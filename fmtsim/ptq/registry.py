"""Names of recipes of post-training quantisation: the catalogue, those of users, and files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fmtsim.ptq.spec import Calibration, Equalise, Gptq, LearnedRounding, PtqRecipe, Smooth
from fmtsim.recipes.names import Names
from fmtsim.recipes.serialization import RECORDS, read_record, recipe_to_dict, record_of
from fmtsim.spec.quantizer import Quantizer

_OWN: dict[str, tuple[type, ...]] = {
    "x": (Quantizer,),
    "w": (Quantizer,),
    "calibration": (Calibration,),
    "smooth": (Smooth,),
    "equalise": (Equalise,),
    "weights": (Gptq, LearnedRounding),
}


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
    return ptq_recipe_from_dict(read_record(path))


def _catalogue() -> Iterable[PtqRecipe]:
    from fmtsim.ptq.catalogue import RECIPES

    return RECIPES


_names = Names(
    PtqRecipe, "ptq recipe", "register_ptq_recipe", "unknown to ptq", "fmtsim.list_ptq_recipes()",
    _catalogue, load_ptq_recipe,
)  # fmt: skip
get_ptq_recipe = _names.get
list_ptq_recipes = _names.names
register_ptq_recipe = _names.register
