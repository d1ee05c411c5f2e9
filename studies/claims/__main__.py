# SPDX-License-Identifier: Apache-2.0
"""``python -m studies.claims``: reproduce published claims at small scale, and report which hold."""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from fmtsim.lab.cli.main import run_program
from fmtsim.lab.cli.options import EXECUTOR, add_json, check_device, count, flag, option, repeated, workers_of
from fmtsim.lab.cli.output import answer, format_table, json_text
from fmtsim.support.errors import ArgumentError
from fmtsim.support.files import Content, check_folder, write_folder
from fmtsim.support.plotting import png
from fmtsim.support.progress import Progress, make_progress
from studies.claims import Claim, Result, get_claims, run_claim, run_claims
from studies.claims.claim import Verdict
from studies.claims.report import HEADER, LEFT, about, ending, markdown, plot_result, rows_of

WORSE, BROKE_OFF = 1, 3  # exit codes
SUMMARY = "Reproduce published claims at small scale, and report which hold."


def declare_reproduce(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    flag(parser, "--list", "list the claims, and run none")
    repeated(parser, "--only", "run only this claim (default: all)", dest="claims")
    flag(parser, "--quick", "leave out claims that take more than ten seconds")
    count(parser, "--seeds", "run experiments with so many seeds (default: as many as each claim asks for)")
    option(parser, "--first-seed", "the first of these seeds; others than 0 try claims with other random numbers", 0)
    count(parser, "--workers", "processes that share slow claims, a CPU thread each (default: one a core)")
    option(parser, "--executor", EXECUTOR, metavar="URL")
    option(parser, "--device", "run claims that have a size for a GPU on this one, cuda or cuda:1", metavar="DEVICE")
    option(parser, "--budget", "begin no training there after this time, such as 25min; the same command goes on")
    flag(parser, "--markdown", "print the table in Markdown, with the sources")
    text = "write claims.md, claims.json and, where matplotlib is installed, a plot of each claim with a curve"
    option(parser, "--out", text, metavar="DIR", type=Path)
    flag(parser, "--quiet", "show no progress")
    add_json(parser)


def run_reproduce(arguments: argparse.Namespace) -> int:
    """Run the claims and print their table.

    Returns 0 where every claim shows at least what is recorded of it, 1 where one shows less, 3 where one broke off.
    """
    claims = [claim for claim in get_claims(arguments.claims) if not (arguments.quick and claim.slow)]
    if arguments.seeds is not None and arguments.seeds < 1:
        raise ArgumentError(f"--seeds {arguments.seeds} runs nothing; choose 1 or more")
    if arguments.first_seed < 0:
        raise ArgumentError(f"--first-seed {arguments.first_seed} is negative; choose 0 or more")
    if not claims:
        raise ArgumentError("every claim named with --only is slow; leave --quick out")
    if arguments.list:
        names = ("name", "recorded", "says", "source", "notes", "bounds", "slow")
        record = [{name: getattr(claim, name) for name in names} | {"card": bool(claim.card)} for claim in claims]
        rows = [
            (claim.name, claim.recorded, "slow, GPU" if claim.card else "slow" if claim.slow else "", claim.says)
            for claim in claims
        ]
        header = ("claim", "recorded", "", "what it says")
        answer(arguments, record, lambda: format_table(header, rows, left=(0, 1, 2, 3)))
        return 0
    if arguments.out is not None:
        check_folder(arguments.out)
    if arguments.budget is not None and arguments.device is None:
        raise ArgumentError("--budget is of --device; add that, or leave it out")
    workers = workers_of(arguments)
    run = _run_all if arguments.device is None else _run_on_card
    results = run(claims, arguments, workers)
    answer(arguments, _record(results), lambda: _text(results, arguments.markdown))
    if arguments.out is not None:
        _write(arguments.out, results)
    # An experiment that broke off is worse than one that shows less.
    return BROKE_OFF if any(r.error for r in results) else WORSE if any(r.worse for r in results) else 0


def _text(results: Sequence[Result], as_markdown: bool) -> str:
    if as_markdown:
        return markdown(results).removesuffix("\n")
    parts = [format_table(HEADER, rows_of(results), left=LEFT)]
    for result in results:
        if result.worse:
            parts.append(f"\n{about(result.claim)}" + (f"\n  broke off: {result.error}" if result.error else ""))
    return "\n".join([*parts, f"\n{_summary(results)}"])


def _run_all(claims: Sequence[Claim], arguments: argparse.Namespace, workers: int) -> list[Result]:
    """Run claims below a bar on a terminal; elsewhere a line says how each one ended."""
    results, quiet, executor = {}, arguments.quiet, arguments.executor
    seeds = {"seeds": arguments.seeds, "first_seed": arguments.first_seed}
    with make_progress(False if quiet else None, transient=True) as progress:
        progress.stage("claims", len(claims))
        if executor is not None or (workers > 1 and sum(claim.slow for claim in claims) > 1):
            every = run_claims(claims, workers, **seeds, executor=executor)
        else:
            every = (
                run_claim(claim, partial(_tell, progress, at, claim.name), **seeds) for at, claim in enumerate(claims)
            )
        for done, result in enumerate(every, 1):
            results[result.claim.name] = result
            progress.step(done, result.claim.name)
            if not quiet and not sys.stderr.isatty():
                print(f"{result.claim.name}: {ending(result)}, {result.seconds:.1f} s", file=sys.stderr, flush=True)
    return [results[claim.name] for claim in claims]


def _run_on_card(claims: Sequence[Claim], arguments: argparse.Namespace, workers: int) -> list[Result]:
    """Run those of the claims that have a size for a GPU, or all that are named."""
    from studies.claims.card import run_on_card

    if arguments.out is None:
        raise ArgumentError("--device keeps each training in a folder, and goes on there; pass --out DIR")
    check_device(arguments.device)
    claims = [claim for claim in claims if claim.card or arguments.claims]
    how = {name: getattr(arguments, name) for name in ("device", "seeds", "first_seed", "executor")}
    with make_progress(False if arguments.quiet else None) as progress:
        return run_on_card(
            claims, arguments.out, progress, budget=_seconds(arguments.budget), workers=workers, **how
        )  # fmt: skip


def _seconds(budget: str | None) -> float | None:
    """Return how long a budget such as 25min is."""
    if budget is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", budget)
    if match is None:
        raise ArgumentError(f"--budget {budget} is no time; pass a number of s, min or h, such as 25min")
    return float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]


def _tell(progress: Progress, done: int, name: str, share: float) -> None:
    progress.step(done + share, name)


def _record(results: Sequence[Result]) -> dict[str, object]:
    worse = [result.claim.name for result in results if result.worse]
    return {"worse": worse, "claims": [result.to_dict() for result in results]}


def _summary(results: Sequence[Result]) -> str:
    counts = Counter("broke off" if result.error else result.verdict for result in results)
    tally = ", ".join(f"{counts[word]} {word}" for word in (*get_args(Verdict), "broke off") if counts[word])
    worse = ", ".join(result.claim.name for result in results if result.worse)
    recorded = f"WORSE than recorded: {worse}" if worse else "nothing is worse than recorded"
    seconds = sum(result.seconds for result in results)
    return f"{len(results)} claim{'s' if len(results) > 1 else ''}, {seconds:.0f} s: {tally}; {recorded}"


def _write(folder: Path, results: Sequence[Result]) -> None:
    contents: dict[str, Content] = {"claims.md": markdown(results), "claims.json": json_text(_record(results)) + "\n"}
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no plots: matplotlib is not installed (pip install 'fmtsim[viz]')", file=sys.stderr)
    else:
        drawn = {f"{result.claim.name}.png": plot_result(result) for result in results}
        contents |= {name: png(figure) for name, figure in drawn.items() if figure is not None}
    write_folder(folder, contents)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program("python -m studies.claims", SUMMARY, declare_reproduce, run_reproduce, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
