# SPDX-License-Identifier: Apache-2.0
"""Hold the size of the house against ``size.toml``: the first check.

``python -m tools.size`` prints each room's lines beside its bound and fails where one is above it, where the bounds of
rooms add up to more than their sum allows, or where a room's tests exceed 0.8 of its code without a reason.
``python -m tools.size --change [COMMIT]`` prints what each room has grown by since a commit (default: the last one).

It needs Python 3.11 and git, and nothing else.
"""

import argparse
import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (".py", ".pyi", ".cu", ".cuh", ".js", ".css")
UPSTAIRS = ("fmtsim/lab", "fmtsim/integrations")
OUTSIDE = ("studies", "benchmarks", "tools", "docs", "notebooks", "findings")
NOT_OF_THE_WHEEL = ("tests/studies", "tests/benchmarks", "tests/tools")
MOST_TESTS = 0.8  # lines of tests for a line of code


def room_of(file: str) -> str:
    """Return the room of a source file, ``fmtsim/gemm`` or ``tests/lab/cli``: a folder below ``lab`` is a room."""
    parts = file.split("/")[:-1]
    if parts[0] in OUTSIDE:
        return parts[0]
    return "/".join(parts[: 3 if parts[1:2] == ["lab"] else 2])


def lines_of(content: bytes) -> int:
    """Return the number of lines of a file."""
    return content.count(b"\n") + (not content.endswith(b"\n") and bool(content))


def tracked() -> list[str]:
    """Return the paths that git tracks or would track."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(name for name in names if name and (ROOT / name).is_file())


def measure(files: Iterable[str], read: "Reader") -> tuple[Counter[str], Counter[str]]:
    """Return lines of code by room, and words of pages by folder."""
    lines, words = Counter[str](), Counter[str]()
    for name in files:
        if name.endswith(SOURCES) and "/" in name:
            lines[room_of(name)] += lines_of(read(name))
        elif name.endswith(".md") and (name.startswith("docs/") or "/" not in name):
            words[name.rpartition("/")[0] or name] += len(read(name).split())
    return lines, words


class Reader:
    """Read files of the work tree, or of a commit."""

    def __init__(self, commit: str | None = None) -> None:
        self._commit = commit

    def __call__(self, name: str) -> bytes:
        """Return a file's bytes."""
        if self._commit is None:
            return (ROOT / name).read_bytes()
        command = ["git", "-C", str(ROOT), "show", f"{self._commit}:{name}"]
        return subprocess.run(command, capture_output=True, check=True).stdout


def counts() -> dict[str, int]:
    """Return how many public names and commands there are, from the sources that define them."""
    stub = ast.parse((ROOT / "fmtsim" / "__init__.pyi").read_text("utf-8"))
    names = sum(len(node.names) for node in stub.body if isinstance(node, ast.ImportFrom))
    for node in ast.parse((ROOT / "fmtsim" / "lab" / "cli" / "main.py").read_text("utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "GROUPS" and node.value:
            groups = ast.literal_eval(node.value)
    return {"public names": names, "commands": sum(map(len, groups.values()))}


def sums_of(lines: Counter[str]) -> dict[str, int]:
    """Return the sums that have bounds of their own."""
    wheel = {room: count for room, count in lines.items() if room.split("/")[0] == "fmtsim"}
    upstairs = sum(count for room, count in wheel.items() if room.startswith(UPSTAIRS))
    tests = (c for room, c in lines.items() if room.split("/")[0] == "tests" and room not in NOT_OF_THE_WHEEL)
    total = sum(wheel.values())
    return {"wheel": total, "downstairs": total - upstairs, "lab and integrations": upstairs, "tests": sum(tests)}


def check(lines: Counter[str], words: Counter[str], counted: dict[str, int], bounds: dict[str, dict]) -> list[str]:
    """Print the table; return what is above its bound."""
    above: list[str] = []

    def row(name: str, value: int, most: int | None, note: str = "") -> None:
        if most is None:
            above.append(f"{name} has no bound; add one to size.toml")
        elif value > most:
            above.append(f"{name}: {value:,}, at most {most:,}")
        shown = "-" if most is None else f"{most:,}"
        print(f"{name:34s} {value:9,}  at most {shown:>9s}  {note}{'  ABOVE' * (most is None or value > most)}")

    for name, value in lines.items():
        if name not in bounds["rooms"]:
            row(name, value, None)
    for name, most in bounds["rooms"].items():
        code = lines[name.replace("tests/", "fmtsim/", 1)] if name.startswith("tests/") else 0
        share = lines[name] / code if code else 0.0
        if share > MOST_TESTS and name not in bounds["reasons"]:
            above.append(f"{name}: {share:.2f} of its code, above {MOST_TESTS} without a reason in size.toml")
        row(name, lines[name], most, f"{share:.2f} of its code" if code else "")
    for name, value in (*sums_of(lines).items(), ("words in docs", _docs(words)), *counted.items()):
        row(name, value, bounds["sums"].get(name))
    for name in (name for name in words if not name.startswith("docs")):
        if name in bounds["words"]:
            row(f"words in {name}", words[name], bounds["words"][name])
    allowed = sums_of(Counter(bounds["rooms"]))
    above += [
        f"the bounds of rooms add up to {allowed[name]:,} for {name}, at most {most:,}"
        for name, most in bounds["sums"].items()
        if allowed.get(name, 0) > most
    ]
    return above


def _docs(words: Counter[str]) -> int:
    return sum(count for folder, count in words.items() if folder.startswith("docs"))


def show_change(commit: str) -> None:
    """Print by how much rooms and pages have grown since a commit."""
    listing = ["git", "-C", str(ROOT), "ls-tree", "-r", "--name-only", "-z", commit]
    names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0")
    before, now = measure(filter(None, names), Reader(commit)), measure(tracked(), Reader())
    for what, old, new in zip(("lines", "words"), before, now, strict=True):
        grown = {name: new[name] - old[name] for name in {*old, *new} if new[name] != old[name]}
        for name, change in sorted(grown.items(), key=lambda item: -item[1]):
            print(f"{change:+9,}  {name}")
        print(f"{sum(grown.values()):+9,}  {what} in all, since {commit}\n")


def main() -> int:
    """Check or compare; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.size", description=__doc__.splitlines()[0])
    parser.add_argument("--change", nargs="?", const="HEAD", metavar="COMMIT", help="what has grown since a commit")
    arguments = parser.parse_args()
    if arguments.change is not None:
        show_change(arguments.change)
        return 0
    bounds = tomllib.loads((ROOT / "size.toml").read_text("utf-8"))
    above = check(*measure(tracked(), Reader()), counts(), bounds)
    print("\n".join(above) if above else "all within size.toml")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
