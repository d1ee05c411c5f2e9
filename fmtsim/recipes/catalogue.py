# SPDX-License-Identifier: Apache-2.0
"""The table of recipes. Each record names the version of the source that it follows."""

from collections.abc import Iterable
from typing import Final

from fmtsim.recipes import float4, float8, integers, wide
from fmtsim.recipes.spec import Recipe
from fmtsim.recipes.table import briefly
from fmtsim.support.table import markdown

RECIPES: tuple[Recipe, ...] = (*wide.RECIPES, *float8.RECIPES, *float4.RECIPES, *integers.RECIPES)
MARKS: Final = ("<!-- recipes -->", "<!-- end -->")


def catalogue_markdown(recipes: Iterable[Recipe]) -> str:
    """Return the recipes as a Markdown table, one line each: name, what it runs, source."""
    rows = [("Name", "Operands forward", "Operands backward (dx; dw)", "Beside it", "Source")]
    for recipe in recipes:
        names = "`, `".join((recipe.name, *recipe.aliases))
        forward, backward = ("high precision",) * 2 if recipe.linear is None else briefly(recipe.linear)
        beside = [f"{rule.where}: {briefly(rule.use)[0] if rule.use else 'high precision'}" for rule in recipe.rules]
        beside += [text for name, text in recipe.facts() if name not in ("rule", "source", "notes")]
        rows.append((f"`{names}`", forward, backward, "; ".join(beside), recipe.source))
    return markdown(rows)


def with_catalogue(page: str, recipes: Iterable[Recipe]) -> str:
    """Return a page of Markdown with the table of recipes written anew between its two ``MARKS``."""
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{catalogue_markdown(recipes)}\n{MARKS[1]}{after}"
