# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Record kernels on a GPU::

    python -m tools.kernels OUT.zip                        # all, some minutes on an H100
    python -m tools.kernels OUT.zip --only triton --match flash
    python -m tools.kernels OUT.zip --pack SMALL.zip       # what tests read

Status 1 where a case failed; the others are in the record all the same.
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

GROUPS = ("triton", "cuda", "unit", "range", "instruction")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.kernels", description=__doc__.partition("::")[0])
    parser.add_argument("out", type=Path, help="zip to write; a case that it has is not run again")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--match", default="", help="part of the names of the cases to run")
    parser.add_argument("--without", default="", help="part of the names of cases that are left out")
    parser.add_argument("--seconds", type=float, default=240.0, help="no case starts later")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--pack", type=Path, help="write OUT.zip's cases, shortened for tests, to this zip; needs no GPU"
    )
    arguments = parser.parse_args(words)
    if arguments.pack:
        from tools.kernels.record import Records

        Records(arguments.out).pack(arguments.pack, {"triton": 3072, "cuda": 3072, "ptx": 256})
        return 0
    began, status = time.monotonic(), 0
    for group in arguments.only.split(","):
        left = arguments.seconds - (time.monotonic() - began)
        if not arguments.child:  # a process a group, again where a context was lost: a fault must not end the rest
            for _ in range(4):
                size = _count(arguments.out)
                command = [
                    "--only",
                    group,
                    "--match",
                    arguments.match,
                    "--without",
                    arguments.without,
                    "--seconds",
                    f"{left:.0f}",
                    "--child",
                ]
                done = subprocess.run(
                    [sys.executable, "-m", "tools.kernels", str(arguments.out), *command], check=False
                )
                status |= done.returncode
                left = arguments.seconds - (time.monotonic() - began)
                if done.returncode == 0 or _count(arguments.out) == size or left < 0:
                    break
            print(f"{group}: {time.monotonic() - began:.0f} s", flush=True)
            continue
        status |= _run(arguments.out, group, arguments.match, arguments.without, left)
    return status


def _count(path: Path) -> int:
    if not path.exists():
        return 0
    with zipfile.ZipFile(path) as file:
        return len(file.namelist())


def _run(path: Path, group: str, match: str, without: str, seconds: float) -> int:
    import torch

    from tools.kernels.record import record, write

    have = set(zipfile.ZipFile(path).namelist()) if path.exists() else set()
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    if "machine.json" not in have:
        versions = {name: importlib.import_module(name).__version__ for name in ("torch", "triton", "numpy")}
        write(path, ("machine", dict(kind="machine", device=torch.cuda.get_device_name(), **versions), "", b""))
        print(json.dumps(versions), torch.cuda.get_device_name(), flush=True)
    if group == "triton":
        import triton

        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))
    if group == "range":
        from tools.kernels.instruction_cases import record_ranges

        return record_ranges(path, have, match, seconds)
    cases = importlib.import_module(f"tools.kernels.{group}_cases").cases()
    chosen = [case for case in cases if match in case.name and f"{case.name}.json" not in have]
    chosen = [case for case in chosen if not without or without not in case.name]
    return int(record(path, chosen, seconds) > 0)


if __name__ == "__main__":
    sys.exit(main())
