# SPDX-License-Identifier: Apache-2.0
"""Time fmtsim against mmaemu on the CPU: the exact FP8 product of a Hopper tensor core, with the same bits.

mmaemu (https://github.com/astding/mmaemu) emulates the same unit. Both packages in one environment:

    python benchmarks/mmaemu.py

or each in its own, given the interpreter of the one that has mmaemu:

    python benchmarks/mmaemu.py --mmaemu-python /path/to/other/bin/python

Both run one thread, each in a process of its own, on the same operands. mmaemu is neither a dependency nor part of
the tests.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SHAPES = ((256, 256, 1024), (512, 512, 2048))
TARGET = 100.0

# What both processes do: argv is the folder, the shape, and how often to time.
_COMMON = """
import json, statistics, sys, time
import torch
folder, m, n, k, repeats = sys.argv[1], *map(int, sys.argv[2:6])
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
a, w = (
    torch.randn(rows, k, generator=generator).mul(40).clamp(-448, 448).to(torch.float8_e4m3fn) for rows in (m, n)
)
def timed(product):
    result, taken = product(), []
    for _ in range(repeats):
        start = time.perf_counter()
        product()
        taken.append(time.perf_counter() - start)
    torch.save(result.view(torch.int32), f"{folder}/{NAME}.pt")
    print(json.dumps({"seconds": statistics.median(taken), "version": VERSION}))
"""
_OURS = (
    """
import fmtsim
from importlib.metadata import PackageNotFoundError, version
NAME = "fmtsim"
try:
    VERSION = version("fmtsim")
except PackageNotFoundError:
    VERSION = "source tree"
"""
    + _COMMON
    + """
timed(lambda: fmtsim.mm(a, w.t(), target="hopper.wgmma", out_dtype=torch.float32))
"""
)
_THEIRS = (
    """
import mmaemu
NAME, VERSION = "mmaemu", mmaemu.__version__
"""
    + _COMMON
    + """
timed(lambda: mmaemu.accumulate(a, w, use_fast_accum=True, splitk=1))
"""
)


def run(python: str, program: str, folder: str, shape: tuple[int, ...], repeats: int, cwd: str | None = None) -> dict:
    words = [python, "-c", program, folder, *map(str, shape), str(repeats)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        sys.exit(f"{python} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(shape: tuple[int, ...], ours: str, theirs: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        # Ours before and after, so that a machine that is busy for a while does not decide.
        first = run(ours, _OURS, folder, shape, 9)
        other = run(theirs, _THEIRS, folder, shape, 1, cwd=folder)  # away from this file, which has its name
        second = run(ours, _OURS, folder, shape, 9)
        differing = _differing(folder)
    seconds = (first["seconds"] + second["seconds"]) / 2
    return {
        "shape": list(shape),
        "fmtsim": first["version"],
        "mmaemu": other["version"],
        "fmtsim_seconds": seconds,
        "mmaemu_seconds": other["seconds"],
        "ratio": other["seconds"] / seconds,
        "target": TARGET,
        "met": other["seconds"] / seconds >= TARGET,
        "differing_outputs": differing,
    }


def _differing(folder: str) -> int:
    """Return how many outputs differ in a bit."""
    import torch

    x, y = (torch.load(Path(folder) / f"{name}.pt", weights_only=True) for name in ("fmtsim", "mmaemu"))
    return int((x != y).sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mmaemu-python", default=sys.executable, help="interpreter that has mmaemu")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("M", "N", "K"), help="instead of the two usual ones")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    arguments = parser.parse_args()
    shapes = [tuple(arguments.shape)] if arguments.shape else SHAPES
    records = [compare(shape, sys.executable, arguments.mmaemu_python) for shape in shapes]
    if arguments.json:
        print(json.dumps(records, indent=2))
    for record in () if arguments.json else records:
        print(
            f"{'x'.join(map(str, record['shape']))}: fmtsim {1e3 * record['fmtsim_seconds']:.1f} ms, "
            f"mmaemu {record['mmaemu']} {record['mmaemu_seconds']:.2f} s, {record['ratio']:.0f}x "
            f"(target {TARGET:.0f}x: {'met' if record['met'] else 'MISSED'}), "
            f"{record['differing_outputs']} outputs differ"
        )
    return 1 if any(record["differing_outputs"] for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
