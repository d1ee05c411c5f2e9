# SPDX-License-Identifier: Apache-2.0
"""Hold profiles of other libraries' casts (``fmtsim/casts/profiles``) to the libraries, bit by bit::

    python -m tools.peers                                  # every library that has a runner
    python -m tools.peers onnxruntime jax/jit --full       # two, the second's variant alone, 50 M values each
    python -m tools.peers jax --versions jax==0.13.0       # a new release
    python -m tools.peers torch --python torch=PYTHON      # in an environment that is there

Each library runs in an environment of its own, which the command makes outside the tree from the first line of
``tools/peers/runners/LIBRARY.py``. What is done is kept, and not done again unless a profile, a runner, a version or
the inputs change. The status is 1 where a value differs.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from fmtsim.casts.profile import CastProfile, library_profiles
from fmtsim.formats.registry import get_format
from fmtsim.lab.cli.output import format_table
from tools.peers import inputs

HERE = Path(__file__).resolve().parent
FULL, USUAL, AT_LEAST = 50_000_000, 1 << 20, 1 << 16  # values of a library, of a profile and format, of slow casts
HEAD = ("library", "variant", "format", "x", "package", "values", "differ")


def runner_of(library: str) -> Path:
    return HERE / "runners" / f"{library}.py"


def environment(library: str, cache: Path, versions: dict[str, str]) -> Path:
    """Return the Python of a library's environment, made where its marker does not name these packages."""
    # 1. the packages that the runner names, in the versions that were asked for
    packages = runner_of(library).read_text().partition("\n")[0].removeprefix("# pip: ").split()
    names = [re.split("[=<>~]", package)[0] for package in packages]
    packages = [f"{n}=={versions[n]}" if n in versions else p for n, p in zip(names, packages, strict=True)]
    asked = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:8] if set(names) & versions.keys() else ""
    folder = cache / "-".join(part for part in (library, asked) if part)
    marker, python = folder / "packages.txt", folder / "bin" / "python"
    # 2. installed once
    if not marker.exists() or marker.read_text().split() != packages:
        print(f"{library}: installing {' '.join(packages)} into {folder}", flush=True)
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        marker.write_text(" ".join(packages))
    return python


def stored(x: Tensor) -> "numpy.ndarray[Any, Any]":
    """Return x as runners read it: bfloat16 as its bits."""
    return x.view(torch.int16).numpy().view("uint16") if x.dtype == torch.bfloat16 else x.numpy()


def run_library(python: Path, library: str, requests: list[dict[str, Any]], tensors: list[Tensor], folder: Path) -> Any:
    """Write requests, run the library on them, and return its versions; results stand in ``folder``."""
    for request, x in zip(requests, tensors, strict=True):
        numpy.save(folder / request["x"], stored(x))
    (folder / "requests.json").write_text(json.dumps(requests))
    quiet = {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "3"}
    # the path begins with what runners share (peer), not with their folder, whose files have libraries' names
    code = "import runpy, sys; sys.path[0] = sys.argv.pop(1); sys.argv.pop(0); "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [python, "-c", code, str(HERE), str(runner_of(library)), str(folder)]
    subprocess.run(command, check=True, env=os.environ | quiet, cwd=folder)
    return json.loads((folder / "versions.json").read_text())


def differing(ours: Tensor, theirs: Tensor, numbers: bool) -> Tensor:
    """Mark what differs: numbers by their bits as float64, where NaN equals NaN; integers as they are."""
    if not numbers:
        return ours.to(torch.int64) != theirs.to(torch.int64)
    ours, theirs = ours.double(), theirs.double()
    return (ours.view(torch.int64) != theirs.view(torch.int64)) & ~(ours.isnan() & theirs.isnan())


def compare(profile: CastProfile, format: str, x: Tensor, results: Any) -> tuple[int, int, str]:
    """Return how many elements of x were compared, how many differ in any result, and the first of them."""
    ours = profile.results(x, get_format(format))
    wrong, first = torch.zeros(x.shape, dtype=torch.bool), ""
    for name in ("value", "code", "scale", "zero", "tensor_scale"):
        if name not in results or name not in ours:
            continue
        theirs = torch.from_numpy(numpy.atleast_1d(results[name]))
        if name == "code" and theirs.dtype == torch.uint8 and theirs.numel() != x.numel():
            raise SystemExit(f"{profile.like} {format}: {theirs.numel()} codes for {x.numel()} elements")
        mine = ours[name].reshape(-1)
        marks = differing(mine, theirs.reshape(-1), name not in ("code", "zero"))
        if not marks.any():
            continue
        # an element for each of the block's results
        place = int(marks.nonzero()[0])
        each = x.numel() // marks.numel()
        wrong |= marks.repeat_interleave(each).view(x.shape)
        if not first:
            block = x.reshape(-1)[place * each : (place + 1) * each]
            if name == "value" and profile.block is not None:
                block = x[tuple(int(i) for i in numpy.unravel_index(place, x.shape))]
            number = [float(v).hex() for v in block.reshape(-1)[:8].tolist()]
            first = f"{name} at {place}: x {number}: fmtsim {shown(mine[place])}, {profile.library} "
            first += shown(theirs.reshape(-1)[place])
    if "value" not in ours or "value" not in results:
        raise SystemExit(f"{profile.like} {format}: no value")
    return x.numel(), int(wrong.sum()), first


def shown(number: Tensor) -> str:
    value = number.item()
    return f"{value!r} ({value.hex()})" if isinstance(value, float) else repr(value)


def drawn(profile: CastProfile, format: str, dtype: str, count: int) -> Iterator[Tensor]:
    """Yield the tensors of one profile, format and dtype."""
    block = profile.block_of(get_format(format))
    if block is None:
        return inputs.elements(format, dtype, count)
    whole = inputs.blocks(format, dtype, block, count)
    if not isinstance(block, int) or '"tensor"' not in profile.steps:
        return whole
    # a scale of the whole tensor as well: many tensors, few of them with NaN or Inf
    parts = ((*inputs.beside_each_other(x, block)[:4096].split(16), x[:64]) for x in whole)
    return (part for tensors in parts for part in tensors)


def hold(library: str, variant: str | None, options: argparse.Namespace, done: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield a row of the table for each profile, format and dtype of a library, and keep it in ``done``."""
    pinned = dict(pair.split("==") for pair in options.versions)
    pythons = dict(pair.split("=", 1) for pair in options.python)
    on_cpu = [p for p in library_profiles(library) if p.device == "cpu"]  # those of a GPU are recorded elsewhere
    profiles = [p for p in on_cpu if variant is None or p.name == variant]
    cases = [(p, f, dtype) for p in profiles for f in p.formats for dtype in p.inputs if options.format in ("", f)]
    count = max(FULL // max(len(cases), 1), USUAL) if options.full else options.values
    sources = runner_of(library).read_text() + Path(inputs.__file__).read_text() + str(sorted(pinned.items()))
    python: Path | None = None
    for profile, format, dtype in cases:
        text = f"{profile.steps}{profile.tables}{profile.block}{count}{sources}"
        key = " ".join([profile.like, format, dtype, hashlib.sha256(text.encode()).hexdigest()[:16]])
        if key not in done or options.again:
            python = python or Path(pythons.get(library) or environment(library, options.cache, pinned))
            total, wrong, first, versions = 0, 0, "", {}
            tensors: list[Tensor] = []
            for x in [*drawn(profile, format, dtype, count), None]:
                # runs of at most 4 M elements; small tensors go together
                if tensors and (x is None or sum(map(torch.numel, tensors)) + x.numel() > 1 << 22):
                    with tempfile.TemporaryDirectory() as name:
                        requests = [
                            {"profile": profile.name, "format": format, "x": f"{i}.npy", "dtype": dtype, "dim": -1,
                             "block": profile.block_of(get_format(format)), "out": f"{i}_out.npz"}
                            for i in range(len(tensors))
                        ]  # fmt: skip
                        versions = run_library(python, library, requests, tensors, Path(name))
                        for request, tensor in zip(requests, tensors, strict=True):
                            if not (Path(name) / request["out"]).exists():  # the library refused it
                                continue
                            with numpy.load(Path(name) / request["out"]) as results:
                                values, differ, place = compare(profile, format, tensor, results)
                            total, wrong, first = total + values, wrong + differ, first or place
                    tensors = []
                if x is not None:
                    tensors.append(x)
            package = " ".join(f"{n} {v}" for n, v in versions.items())
            done[key] = [library, profile.name, format, dtype, package, total, wrong, first]
        yield done[key]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY[/VARIANT]", help="default: all that have a runner")
    parser.add_argument("--versions", nargs="*", default=[], metavar="PACKAGE==V", help="in place of the runner's")
    parser.add_argument("--python", nargs="*", default=[], metavar="LIBRARY=PYTHON", help="environments that are there")
    parser.add_argument("--format", default="", help="of all formats, this one")
    parser.add_argument("--values", type=int, default=USUAL, help=f"random values of a case (default {USUAL:,})")
    parser.add_argument("--full", action="store_true", help=f"{FULL:,} values of a library")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/fmtsim/peers", help="environments, results")
    parser.add_argument("--output", type=Path, help="a JSON file of the table, for the docs")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(min(torch.get_num_threads(), 2))
    names = options.libraries or sorted(path.stem for path in (HERE / "runners").glob("*.py"))
    rows, failed = [], 0
    kept = options.cache / "results.json"
    for name in names:
        library, slash, variant = name.partition("/")
        done = json.loads(kept.read_text()) if kept.exists() else {}
        for row in hold(library, variant if slash else None, options, done):
            rows.append(row)
            print(f"{' '.join(row[:4])}: {row[5]:,} values, {row[6]:,} differ {row[7]}", flush=True)
            others = json.loads(kept.read_text()) if kept.exists() else {}  # of commands that run beside this one
            kept.write_text(json.dumps(others | done))
            failed += row[6]
    print(format_table(HEAD, [(*row[:5], f"{row[5]:,}", f"{row[6]:,}") for row in rows], left=(0, 1, 2, 3, 4)))
    refused = tomllib.loads((HERE / "not_reproduced.toml").read_text()).get("cast", [])
    for cast in (cast for cast in refused if not options.libraries or cast["library"] in names):
        print(f"not reproduced: {cast['library']}, {cast['what']}: {cast['why']}")
    if options.output:
        options.output.write_text(json.dumps([dict(zip((*HEAD, "first"), row, strict=True)) for row in rows], indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
