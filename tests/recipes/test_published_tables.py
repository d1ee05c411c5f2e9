"""The tables of trained recipes in the README and in docs/performance.md say what the record says."""

import json
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "docs/records/training_recipes_h200.json").read_text())


def rows():
    """Each recipe beside plain bfloat16 of its own run."""
    for number, run in enumerate((RECORD["runs"], RECORD["later"]), 1):
        base = run["bf16"]
        for name, own in run.items():
            losses = own["losses"]
            loss = statistics.mean(losses)
            plain = name == "bf16"
            over = "" if plain else f"{loss - statistics.mean(base['losses']):+.4f}"
            ratio = own["milliseconds"] / base["milliseconds"]
            title = f"`{'amp_bf16' if plain else name}`"
            title += " (plain bfloat16)" * (plain and number == 1) + f", run {number}" * (plain or number == 2)
            numbers = f"{loss:.4f} | {max(losses) - min(losses):.4f} | {over} | {own['milliseconds']:.2f} | {ratio:.2f}"
            yield f"| {title} | {numbers} |"


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_a_row_compares_with_its_own_run(page):
    lines = (ROOT / page).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| recipe | loss |")) + 2
    expected = list(rows())
    assert lines[start : start + len(expected)] == expected
