# SPDX-License-Identifier: Apache-2.0
"""Write the table of recipes into docs/recipes.md: ``python -m tools.recipes_page``, in the root of a checkout."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.recipes.catalogue import RECIPES
from fmtsim.recipes.spec import Recipe
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.table import markdown

PAGE = Path("docs/recipes.md")
_KEPT = "the forward codes"
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


def briefly(config: LinearConfig) -> tuple[str, str]:
    """Return the operands of the forward and of the two backward products in a few words each."""
    brief = {name: _KEPT if q.source == "forward" else str(q) for name, q in config.operands.items()}
    x, w = brief["x_f"], brief["w_f"]
    forward = x if x == w else f"x {x}; w {w}"
    first, second = brief["g_w"], brief["g_d"]
    pairs = [(second, brief["w_d"]), (second if first == _KEPT else first, brief["x_w"])]
    texts = [a if a == b else f"{a} with {b}" for a, b in pairs]
    if config.wgrad.out not in (Quantizer(), config.fprop.out):
        texts[1] += f", to {config.wgrad.out}"
    return forward, texts[0] if texts[0] == texts[1] else "; ".join(texts)


if __name__ == "__main__":
    PAGE.write_text(with_catalogue(PAGE.read_text(encoding="utf-8"), RECIPES), encoding="utf-8")
