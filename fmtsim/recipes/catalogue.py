"""The table of recipes. Each record names the version of the source that it follows."""

from fmtsim.recipes import float4, float8, integers, wide
from fmtsim.recipes.spec import Recipe

RECIPES: tuple[Recipe, ...] = (*wide.RECIPES, *float8.RECIPES, *float4.RECIPES, *integers.RECIPES)
