"""Recipes: published ways of running a model's matrix products in low precision, by name."""

from fmtsim.recipes.diff import diff
from fmtsim.recipes.registry import get_recipe, list_recipes, register_recipe
from fmtsim.recipes.serialization import load_recipe, recipe_from_dict, recipe_to_dict, save_recipe
from fmtsim.recipes.spec import AttentionConfig, LossScale, Recipe, Rule, Steps

__all__ = [
    "AttentionConfig",
    "LossScale",
    "Recipe",
    "Rule",
    "Steps",
    "diff",
    "get_recipe",
    "list_recipes",
    "load_recipe",
    "recipe_from_dict",
    "recipe_to_dict",
    "register_recipe",
    "save_recipe",
]
