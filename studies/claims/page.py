# SPDX-License-Identifier: Apache-2.0
"""Write the tables of studies/claims/README.md anew: ``python -m studies.claims.page``, in the root of a checkout.

The tables show the records of the claims, what runs on GPUs gave (assets/h200_2026-11-27.json) and the numbers of the
miniatures (assets/miniature_2026-11-27.json). Text outside the marks stays as it is.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from fmtsim.support.table import markdown
from studies.claims.claim import Claim
from studies.claims.report import compared, short
from studies.claims.run import CLAIMS, Row

FOLDER: Final = Path(__file__).parent
PAGE: Final = FOLDER / "README.md"
ON_GPU: Final = FOLDER / "assets" / "h200_2026-11-27.json"
MINIATURE: Final = FOLDER / "assets" / "miniature_2026-11-27.json"
END: Final = "<!-- end -->"
Runs = Sequence[dict[str, Any]]


def runs_of(claim: Claim, record: Runs) -> list[dict[str, Any]]:
    """Return the runs of a claim in a record of runs on GPUs, without its controls."""
    return [run for run in record if run["claim"] == claim.name and "control" not in run]


def together(words: Sequence[str]) -> str:
    """Return what several runs gave: once where all agree."""
    if not words:
        return "-"
    if len(set(words)) > 1:
        return "; ".join(words)
    times = {1: "", 2: ", twice"}.get(len(words), f", {len(words)} times")
    return f"{words[0]}{times}"


def table_of_claims(claims: Iterable[Claim], record: Runs) -> str:
    """Return a row for each claim: name, what is claimed, source, and the verdicts in miniature and on a GPU."""
    rows = [("claim", "what is claimed", "source", "in miniature", "on a GPU")]
    for claim in claims:
        verdicts = [run["verdict"] for run in runs_of(claim, record)]
        rows.append((f"`{claim.name}`", claim.says, claim.source, claim.recorded, together(verdicts)))
    return markdown(rows)


def table_on_gpu(claims: Iterable[Claim], record: Runs, miniature: dict[str, Any]) -> str:
    """Return a row for each number of the claims that ran on a GPU: means over seeds, least and largest."""
    rows: list[tuple[str, ...]] = [
        ("claim", "number", "source", "in miniature", "on a GPU, by run", "verdict on a GPU")
    ]
    for claim in claims:
        runs = runs_of(claim, record)
        name = f"`{claim.name}`" if runs else ""
        for expected, *cells in _numbers(claim, runs, miniature):
            rows.append((name, expected, *cells))
            name = ""
    return markdown(rows)


def _numbers(claim: Claim, runs: Runs, miniature: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield name, bounds, number in miniature, numbers of the runs, and verdicts of each number that runs have."""
    small = miniature["claims"].get(claim.name, {"numbers": {}})["numbers"]
    for expected in claim.expected:
        measured = [Row(expected=expected, values=tuple(run["numbers"].get(expected.name, ()))) for run in runs]
        measured = [row for row in measured if row.values]
        if not measured:
            continue
        verdict = together([row.verdict for row in measured]) if expected.bounded else "-"
        ours = (small.get(expected.name) or [None])[0]
        in_miniature = "-" if ours is None else short(ours)
        by_run = "; ".join(_spread(row.values) for row in measured)
        yield expected.name, compared(expected), in_miniature, by_run, verdict


def _spread(values: Sequence[float]) -> str:
    """Return the mean of some numbers to four digits, with the least and the largest in parentheses."""
    mean = f"{sum(values) / len(values):.4g}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.4g} to {max(values):.4g})"


def with_tables(page: str, tables: dict[str, str]) -> str:
    """Return a page of Markdown with each table written anew between ``<!-- name -->`` and ``END``."""
    for name, table in tables.items():
        before, mark, rest = page.partition(f"<!-- {name} -->")
        _, end, after = rest.partition(END)
        if not mark or not end:
            raise ValueError(f"the page has no <!-- {name} --> with {END} behind it")
        page = f"{before}{mark}\n{table}\n{END}{after}"
    return page


def page() -> str:
    """Return the page with today's tables."""
    record, miniature = (json.loads(path.read_text(encoding="utf-8")) for path in (ON_GPU, MINIATURE))
    tables = {"claims": table_of_claims(CLAIMS, record), "gpu": table_on_gpu(CLAIMS, record, miniature)}
    return with_tables(PAGE.read_text(encoding="utf-8"), tables)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
