# SPDX-License-Identifier: Apache-2.0
"""``python -m fmtsim.recipes``: write the table of recipes into docs/recipes.md, in the root of a checkout."""

from pathlib import Path

from fmtsim.recipes.catalogue import RECIPES, with_catalogue

PAGE = Path("docs/recipes.md")

if __name__ == "__main__":
    PAGE.write_text(with_catalogue(PAGE.read_text(encoding="utf-8"), RECIPES), encoding="utf-8")
