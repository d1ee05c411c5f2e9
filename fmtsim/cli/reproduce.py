"""``fmtsim reproduce``: miniatures of what published schemes claim, and whether the same comes out here."""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fmtsim.cli.output import add_json_argument, format_table, jsonable, print_json
from fmtsim.errors import ArgumentError
from fmtsim.progress import Progress, make_progress

if TYPE_CHECKING:
    from fmtsim.reproduce import Claim, Result

FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--list", action="store_true", help="list the claims, and run none")
    parser.add_argument("--only", action="append", metavar="NAME", default=[],
                        help="run this claim alone; may be repeated (default: all)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="leave out claims that take more than ten seconds")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown, with the sources")
    text = "write claims.md, claims.json and, where matplotlib is installed, a plot of each claim with a curve"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the claims and print their table; 0 where all pass, 1 where one does not."""
    from fmtsim.reproduce import get_claims
    from fmtsim.reproduce.report import HEADER, about, markdown, rows_of

    claims = [claim for claim in get_claims(arguments.only) if not (arguments.quick and claim.slow)]
    if not claims:
        raise ArgumentError("every claim named with --only is slow; leave --quick out")
    if arguments.list:
        _print_list(claims, arguments.json)
        return 0
    if arguments.out is not None:
        from fmtsim.training.artifacts import check_folder

        check_folder(arguments.out)
    results = _run_all(claims, arguments.quiet)
    if arguments.json:
        print_json(_record(results))
    elif arguments.markdown:
        print(markdown(results), end="")
    else:
        print(format_table(HEADER, rows_of(results), left=(0, 1, 4)))
        print("\npublished by: p the paper, c its code, e an independent emulation, f a formula")
        for result in results:
            if not result.passed:
                print(f"\n{about(result.claim)}" + (f"\n  broke off: {result.error}" if result.error else ""))
        print(f"\n{_verdict(results)}")
    if arguments.out is not None:
        _write(arguments.out, results)
    return FAILED if any(not result.passed for result in results) else 0


def _run_all(claims: "Sequence[Claim]", quiet: bool) -> "list[Result]":
    """Run claims below a bar on a terminal; elsewhere a line says how each one ended."""
    from fmtsim.reproduce import run_claim

    results = []
    with make_progress(False if quiet else None, transient=True) as progress:
        progress.stage("claims", len(claims))
        for index, claim in enumerate(claims):
            progress.step(index, claim.name)
            result = run_claim(claim, partial(_advance, progress, claim.name, index))
            results.append(result)
            if not quiet and not sys.stderr.isatty():
                verdict = "passes" if result.passed else "FAILS"
                print(f"{claim.name}: {verdict}, {result.seconds:.1f} s", file=sys.stderr, flush=True)
    return results


def _advance(progress: Progress, name: str, index: int, share: float) -> None:
    progress.step(index + share, name)


def _print_list(claims: "Sequence[Claim]", as_json: bool) -> None:
    if as_json:
        names = ("name", "says", "source", "notes", "slow")
        print_json([{name: getattr(claim, name) for name in names} for claim in claims])
        return
    rows = [(claim.name, "slow" if claim.slow else "", claim.says) for claim in claims]
    print(format_table(("claim", "", "what it says"), rows, left=(0, 1, 2)))


def _record(results: "Sequence[Result]") -> dict[str, object]:
    return {"pass": all(result.passed for result in results), "claims": [result.to_dict() for result in results]}


def _verdict(results: "Sequence[Result]") -> str:
    failed = [result.claim.name for result in results if not result.passed]
    seconds = sum(result.seconds for result in results)
    ending = f"{len(failed)} of {len(results)} claims FAIL: {', '.join(failed)}" if failed else "all claims pass"
    return f"{len(results)} claim{'s' if len(results) > 1 else ''}, {seconds:.0f} s; {ending}"


def _write(folder: Path, results: "Sequence[Result]") -> None:
    """Write the table, the record, and the plots where matplotlib is installed."""
    from fmtsim.reproduce.report import markdown, plot_result

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "claims.md").write_text(markdown(results), encoding="utf-8")
    text = json.dumps(jsonable(_record(results)), indent=2, allow_nan=False)
    (folder / "claims.json").write_text(text + "\n", encoding="utf-8")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no plots: matplotlib is not installed (pip install 'fmtsim[viz]')", file=sys.stderr)
        return
    for result in results:
        plot_result(result, folder / f"{result.claim.name}.png")
