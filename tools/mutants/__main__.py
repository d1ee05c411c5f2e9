# SPDX-License-Identifier: Apache-2.0
"""Plant small errors in the package and see which of them the tests find::

    python -m tools.mutants                      # a sample of 60 errors, others every week of the calendar
    python -m tools.mutants --count 150 --seed 7 # a fresh sample; --area gemm or --file fmtsim/... narrows it
    python -m tools.mutants --record             # run all tests under coverage.py and write seen.txt anew
    python -m tools.mutants --record new         # only tests that seen.txt lacks, and add them

An error that changes nothing that could be seen stands in equivalent.txt with its reason and is not drawn.
"""

import argparse
import datetime
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tools.mutants.seen import collected, read_map, write_map
from tools.mutants.sites import ROOT, Mutant, mutants_of
from tools.mutants.trial import Outcome, Trials, stop

EQUIVALENT = Path(__file__).with_name("equivalent.txt")


def main() -> int:
    """Run the command; the status is 1 where too few errors were found."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__.split("::")[0])
    parser.add_argument("--count", type=int, default=60, help="how many errors (default 60)")
    parser.add_argument("--all", action="store_true", help="every error of the area, file or package (days)")
    parser.add_argument("--seed", type=int, help="of the sample (default: year and week of the calendar)")
    parser.add_argument("--area", help="a room of the package: gemm, cpu, ...")
    parser.add_argument("--file", help="one file")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--limit", type=float, default=90, help="seconds of tests for each error (default 90)")
    parser.add_argument("--at-least", type=float, default=100, help="percent to be found for status 0 (default 100)")
    parser.add_argument("--list", action="store_true", help="show the sample, run nothing")
    parser.add_argument("--record", nargs="?", const="all", choices=("all", "new"),
                        help="write the map from functions to tests anew, or add the tests that it lacks")  # fmt: skip
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupted)
    if options.record:
        return record(options.record == "new")
    sys.stderr.write(age_of_map())
    sample = draw(None if options.all else options.count, options.seed, options.area, options.file)
    if options.list:
        for mutant in sample:
            print(mutant.key)
        return 0
    return report(Trials(options.jobs, options.limit).run(sample), len(sample), options.at_least)


def interrupted(number: int, _: object) -> None:
    """End the tests that run, and the command."""
    stop()
    sys.stderr.write("interrupted\n")
    os._exit(128 + number)


def draw(count: int | None, seed: int | None, area: str | None, file: str | None) -> list[Mutant]:
    """Return a sample of mutants: of each area in proportion to the root of its size, at least one; None means all."""
    if seed is None:
        year, week, _ = datetime.date.today().isocalendar()
        seed = 100 * year + week
    skipped = equivalents()
    areas = defaultdict(list)
    for path in package_files():
        if file in (None, path):
            for mutant in mutants_of(path):
                if area in (None, mutant.area):
                    areas[mutant.area].append(mutant)
    if count is None:
        return [mutant for all_ in areas.values() for mutant in all_ if mutant.key not in skipped]
    chance = random.Random(seed)
    weight = sum(len(all_) ** 0.5 for all_ in areas.values())
    drawn = []
    for _, all_ in sorted(areas.items()):
        wanted = max(1, round(count * len(all_) ** 0.5 / weight))
        order = chance.sample(all_, min(len(all_), 3 * wanted + 20))
        drawn += [mutant for mutant in order if mutant.key not in skipped][:wanted]
    chance.shuffle(drawn)
    return drawn[:count]


def package_files() -> list[str]:
    paths = (path for path in (ROOT / "fmtsim").rglob("*") if path.suffix in (".py", ".cu", ".cuh"))
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def equivalents() -> dict[str, str]:
    """Return the reasons of mutants that change nothing that could be seen, by their keys."""
    lines = EQUIVALENT.read_text().splitlines()
    pairs = (line.rsplit("  # ", 1) for line in lines if line and not line.startswith("#"))
    return {key: reason for key, reason in pairs}


def report(outcomes: Iterable[Outcome], count: int, least: float) -> int:
    """Print what is not found as it is known, then the score of each area; return the command's status."""
    areas = defaultdict(list)
    for i, outcome in enumerate(outcomes, 1):
        areas[outcome.mutant.area].append(outcome.verdict == "found")
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{i} of {count}\r")
        if outcome.verdict != "found":
            print(f"{outcome.verdict}: line {outcome.mutant.line} of {outcome.mutant.key}", flush=True)
        if outcome.verdict == "error":
            print(f"    {outcome.by}")
    for area, found in sorted(areas.items()):
        print(f"{area:14} {sum(found):4} of {len(found):4}  {100 * sum(found) / len(found):5.1f} %")
    found = sum(areas.values(), [])
    print(f"{sum(found)} of {count} planted errors found, {100 * sum(found) / max(count, 1):.1f} %")
    return int(100 * sum(found) < least * count)


def missing() -> list[str]:
    """Return the tests of a default run that the map does not name."""
    named = read_map()[1]
    return [test for test in collected() if test not in named]


def age_of_map() -> str:
    """Return a warning where 5 % of the tests are newer than the map, else nothing."""
    new, all_ = len(missing()), len(collected())
    if 20 * new < all_:
        return ""
    return f"seen.txt lacks {new} of {all_} tests; renew it by python -m tools.mutants --record new (or --record)\n"


def record(only_new: bool) -> int:
    with tempfile.TemporaryDirectory() as notes:
        options = ["--cov=fmtsim", "--cov-context=test", "--cov-report=", "-p", "tools.mutants.seen", "-q", "-n2"]
        more = {"PYTHONPATH": str(ROOT), "FMTSIM_SEEN": notes, "COVERAGE_FILE": f"{notes}/coverage"}
        if only_new:
            more["FMTSIM_ONLY"] = f"{notes}/only.txt"
            Path(more["FMTSIM_ONLY"]).write_text("\n".join(missing()))
        command = [sys.executable, "-m", "pytest", *options, "tests"]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **more})
        if done.returncode not in (0, 1):
            return done.returncode
        print(f"{write_map(f'{notes}/coverage', notes, only_new)} functions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
