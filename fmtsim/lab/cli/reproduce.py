# SPDX-License-Identifier: Apache-2.0
"""``fmtsim reproduce``: miniatures of what published schemes claim, and whether the same comes out here."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from fmtsim.lab.cli.options import check_threads, usable_cores
from fmtsim.lab.cli.output import answer, format_table, json_text
from fmtsim.lab.reproduce import Claim, Result, get_claims, run_claim, run_claims
from fmtsim.lab.reproduce.claim import Verdict
from fmtsim.lab.reproduce.report import HEADER, LEFT, about, ending, markdown, plot_result, rows_of
from fmtsim.support.errors import ArgumentError
from fmtsim.support.files import Content, check_folder, write_folder
from fmtsim.support.plotting import png
from fmtsim.support.progress import Progress, make_progress

WORSE, BROKE_OFF = 1, 3


def run(arguments: argparse.Namespace) -> int:
    """Run the claims and print their table.

    Returns 0 where every claim shows at least what is recorded of it, 1 where one shows less, 3 where one broke off.
    """
    claims = [claim for claim in get_claims(arguments.claims) if not (arguments.quick and claim.slow)]
    if arguments.seeds is not None and arguments.seeds < 1:
        raise ArgumentError(f"--seeds {arguments.seeds} runs nothing; choose 1 or more")
    if not claims:
        raise ArgumentError("every claim named with --only is slow; leave --quick out")
    if arguments.list:
        names = ("name", "recorded", "says", "source", "notes", "bounds", "slow")
        record = [{name: getattr(claim, name) for name in names} for claim in claims]
        rows = [(claim.name, claim.recorded, "slow" if claim.slow else "", claim.says) for claim in claims]
        header = ("claim", "recorded", "", "what it says")
        answer(arguments, record, lambda: format_table(header, rows, left=(0, 1, 2, 3)))
        return 0
    if arguments.out is not None:
        check_folder(arguments.out)
    workers = usable_cores() if arguments.workers is None else arguments.workers
    check_threads(workers, "--workers")
    results = _run_all(claims, arguments.seeds, arguments.quiet, workers)
    answer(arguments, _record(results), lambda: _text(results, arguments.markdown))
    if arguments.out is not None:
        _write(arguments.out, results)
    return _status(results)


def _status(results: Sequence[Result]) -> int:
    """Return the exit code: an experiment that broke off is worse than one that shows less."""
    if any(result.error for result in results):
        return BROKE_OFF
    return WORSE if any(result.worse for result in results) else 0


def _text(results: Sequence[Result], as_markdown: bool) -> str:
    if as_markdown:
        return markdown(results).removesuffix("\n")
    parts = [format_table(HEADER, rows_of(results), left=LEFT)]
    for result in results:
        if result.worse:
            parts.append(f"\n{about(result.claim)}" + (f"\n  broke off: {result.error}" if result.error else ""))
    return "\n".join([*parts, f"\n{_summary(results)}"])


def _run_all(claims: Sequence[Claim], seeds: int | None, quiet: bool, workers: int) -> list[Result]:
    """Run claims below a bar on a terminal; elsewhere a line says how each one ended."""
    results = {}
    with make_progress(False if quiet else None, transient=True) as progress:
        progress.stage("claims", len(claims))
        if workers > 1 and sum(claim.slow for claim in claims) > 1:
            every = run_claims(claims, workers, seeds=seeds)
        else:
            every = (
                run_claim(claim, partial(_tell, progress, at, claim.name), seeds=seeds)
                for at, claim in enumerate(claims)
            )
        for done, result in enumerate(every, 1):
            results[result.claim.name] = result
            progress.step(done, result.claim.name)
            if not quiet and not sys.stderr.isatty():
                print(f"{result.claim.name}: {ending(result)}, {result.seconds:.1f} s", file=sys.stderr, flush=True)
    return [results[claim.name] for claim in claims]


def _tell(progress: Progress, done: int, name: str, share: float) -> None:
    progress.step(done + share, name)


def _record(results: Sequence[Result]) -> dict[str, object]:
    worse = [result.claim.name for result in results if result.worse]
    return {"worse": worse, "claims": [result.to_dict() for result in results]}


def _summary(results: Sequence[Result]) -> str:
    """Return a line that counts verdicts, and names claims that show less than is recorded."""
    counts = Counter("broke off" if result.error else result.verdict for result in results)
    found = ", ".join(f"{counts[word]} {word}" for word in (*get_args(Verdict), "broke off") if counts[word])
    worse = ", ".join(result.claim.name for result in results if result.worse)
    recorded = f"WORSE than recorded: {worse}" if worse else "nothing is worse than recorded"
    seconds = sum(result.seconds for result in results)
    return f"{len(results)} claim{'s' if len(results) > 1 else ''}, {seconds:.0f} s: {found}; {recorded}"


def _write(folder: Path, results: Sequence[Result]) -> None:
    """Write the table, the record, and the plots where matplotlib is installed."""
    contents: dict[str, Content] = {"claims.md": markdown(results), "claims.json": json_text(_record(results)) + "\n"}
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no plots: matplotlib is not installed (pip install 'fmtsim[viz]')", file=sys.stderr)
    else:
        drawn = {f"{result.claim.name}.png": plot_result(result) for result in results}
        contents |= {name: png(figure) for name, figure in drawn.items() if figure is not None}
    write_folder(folder, contents)
