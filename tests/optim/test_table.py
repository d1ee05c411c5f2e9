"""The documentation holds the table that the records give."""

from pathlib import Path

import pytest

from fmtsim.optim.table import markdown

DOCUMENT = Path(__file__).parents[2] / "docs" / "optim.md"


@pytest.mark.skipif(not DOCUMENT.exists(), reason="runs in a checkout, where the documentation is")
def test_documentation_holds_the_table():
    assert markdown() in DOCUMENT.read_text(encoding="utf-8"), (
        "run python -m fmtsim.optim and put it into docs/optim.md"
    )
