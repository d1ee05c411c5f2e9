# SPDX-License-Identifier: Apache-2.0
"""What a GPU is asked after a change of kernels or plans: one check after the other, each alone, with a limit::

    python -m tools.run_on_gpu --out found                 # all, some 35 minutes on an H200
    python -m tools.run_on_gpu --out found --only tests,trace

Each check's output goes to ``found/NAME.txt``; a line says how it ended. Status 1 where one failed or ran out of time.
"""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from fmtsim.lab.cli.output import format_table

_PYTEST = "-m pytest -q -o addopts= --import-mode=importlib -p no:cacheprovider -m 'not slow'"
_WORDS = {"pytest": shlex.split(_PYTEST)} | {
    name: ["-m", name] for name in ("fmtsim", "benchmarks.suite", "tools.calibrate")
}
_ROWS = [shlex.split(line) for line in Path(__file__).with_suffix(".txt").read_text().splitlines() if line[0] != "#"]
CHECKS = [(name, (*_WORDS.get(first, [first]), *rest), int(seconds)) for name, seconds, first, *rest in _ROWS]


def run(words: tuple[str, ...], seconds: int, out: Path) -> tuple[str, float]:
    """Return how a check ended and how long it took; its output goes to a file."""
    began = time.monotonic()
    with out.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                [sys.executable, *words], stdout=file, stderr=subprocess.STDOUT, timeout=seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return f"more than {seconds} s", time.monotonic() - began
    return "passed" if code == 0 else f"status {code}", time.monotonic() - began


def main(words: list[str] | None = None) -> int:
    names = [name for name, _, _ in CHECKS]
    parser = argparse.ArgumentParser(prog="python -m tools.run_on_gpu", description=__doc__.partition("::")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for what the checks print")
    parser.add_argument("--only", default=",".join(names), help=f"of {', '.join(names)}")
    arguments = parser.parse_args(words)
    asked = arguments.only.split(",")
    if unknown := [name for name in asked if name not in names]:
        parser.error(f"--only: there is no check {unknown[0]!r}; choose from {', '.join(names)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, command, seconds in CHECKS:
        if name not in asked:
            continue
        ended, took = run(command, seconds, arguments.out / f"{name}.txt")
        lines = (arguments.out / f"{name}.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        rows.append((name, ended, f"{took:.0f}", lines[-1][:100] if lines else ""))
        print(f"{name}: {ended}, {took:.0f} s", flush=True)
    print(format_table(("check", "ended", "s", "last line"), rows, left=(0, 1, 3)))
    return int(any(ended != "passed" for _, ended, _, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
