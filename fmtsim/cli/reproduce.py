# SPDX-License-Identifier: Apache-2.0
"""``fmtsim reproduce``: miniatures of what published schemes claim, and whether the same comes out here."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fmtsim.cli.output import answer, format_table, json_text
from fmtsim.errors import ArgumentError
from fmtsim.files import Content, check_folder, write_folder
from fmtsim.plotting import png
from fmtsim.progress import make_progress
from fmtsim.reproduce import Claim, Result, get_claims, run_claim
from fmtsim.reproduce.report import HEADER, about, markdown, plot_result, rows_of

FAILED = 1


def run(arguments: argparse.Namespace) -> int:
    """Run the claims and print their table; 0 where all pass, 1 where one does not."""
    claims = [claim for claim in get_claims(arguments.claims) if not (arguments.quick and claim.slow)]
    if not claims:
        raise ArgumentError("every claim named with --only is slow; leave --quick out")
    if arguments.list:
        names = ("name", "says", "source", "notes", "slow")
        record = [{name: getattr(claim, name) for name in names} for claim in claims]
        rows = [(claim.name, "slow" if claim.slow else "", claim.says) for claim in claims]
        answer(arguments, record, lambda: format_table(("claim", "", "what it says"), rows, left=(0, 1, 2)))
        return 0
    if arguments.out is not None:
        check_folder(arguments.out)
    results = _run_all(claims, arguments.quiet)
    answer(arguments, _record(results), lambda: _text(results, arguments.markdown))
    if arguments.out is not None:
        _write(arguments.out, results)
    return FAILED if any(not result.passed for result in results) else 0


def _text(results: Sequence[Result], as_markdown: bool) -> str:
    if as_markdown:
        return markdown(results).removesuffix("\n")
    parts = [format_table(HEADER, rows_of(results), left=(0, 1, 4))]
    parts.append("\npublished by: p the paper, c its code, e an independent emulation, f a formula")
    for result in results:
        if not result.passed:
            parts.append(f"\n{about(result.claim)}" + (f"\n  broke off: {result.error}" if result.error else ""))
    return "\n".join([*parts, f"\n{_verdict(results)}"])


def _run_all(claims: Sequence[Claim], quiet: bool) -> list[Result]:
    """Run claims below a bar on a terminal; elsewhere a line says how each one ended."""
    results = []
    with make_progress(False if quiet else None, transient=True) as progress:
        progress.stage("claims", len(claims))
        for index, claim in enumerate(claims):
            progress.step(index, claim.name)
            result = run_claim(claim, lambda share, at=index, name=claim.name: progress.step(at + share, name))  # type: ignore[misc]
            results.append(result)
            if not quiet and not sys.stderr.isatty():
                verdict = "passes" if result.passed else "FAILS"
                print(f"{claim.name}: {verdict}, {result.seconds:.1f} s", file=sys.stderr, flush=True)
    return results


def _record(results: Sequence[Result]) -> dict[str, object]:
    return {"pass": all(result.passed for result in results), "claims": [result.to_dict() for result in results]}


def _verdict(results: Sequence[Result]) -> str:
    failed = [result.claim.name for result in results if not result.passed]
    seconds = sum(result.seconds for result in results)
    ending = f"{len(failed)} of {len(results)} claims FAIL: {', '.join(failed)}" if failed else "all claims pass"
    return f"{len(results)} claim{'s' if len(results) > 1 else ''}, {seconds:.0f} s; {ending}"


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
