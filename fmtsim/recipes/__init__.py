# SPDX-License-Identifier: Apache-2.0
"""Recipes: published ways of running a model's matrix products in low precision, by name."""

from fmtsim.recipes.attention_config import AttentionConfig, flash_attention_3
from fmtsim.recipes.build import SavedActivations
from fmtsim.recipes.ptq import PtqRecipe
from fmtsim.recipes.recipe import LossScale, Recipe, Replacement, Rule, Steps
from fmtsim.recipes.recipe_registry import diff, get_recipe, list_recipes, register_recipe
from fmtsim.recipes.serialization import load_recipe, recipe_from_dict, recipe_to_dict, save_recipe
from fmtsim.recipes.system import Level, OptimizerConfig

__all__ = [
    "AttentionConfig", "Level", "LossScale", "OptimizerConfig", "PtqRecipe", "Recipe", "Replacement", "Rule",
    "SavedActivations", "Steps", "diff", "flash_attention_3", "get_recipe", "list_recipes", "load_recipe",
    "recipe_from_dict", "recipe_to_dict", "register_recipe", "save_recipe",
]  # fmt: skip
