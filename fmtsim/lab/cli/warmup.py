# SPDX-License-Identifier: Apache-2.0
"""``fmtsim warmup``: compile kernels now, so that no later call waits for the compiler."""

import argparse
import time
from typing import Any

import torch

from fmtsim.casts.ops import load_engine
from fmtsim.lab.bench.usual import usual_calls
from fmtsim.lab.cli.options import check_device
from fmtsim.lab.cli.output import answer, format_table
from fmtsim.support import compilation
from fmtsim.support.errors import ArgumentError
from fmtsim.support.folder import kernel_folder
from fmtsim.support.progress import Progress, make_progress


def run(arguments: argparse.Namespace) -> int:
    """Compile, and print how many kernels were compiled in how many seconds, and where they are kept."""
    devices = _devices(arguments.device)
    compilation.expect_compiling()
    found = []
    with make_progress(False if arguments.quiet else None, transient=True) as progress:
        for device in devices:
            before, start = len(compilation.compiled), time.perf_counter()
            ready = _on_cpu(progress) if device.type == "cpu" else _on_gpu(device, progress)
            compiled, seconds = len(compilation.compiled) - before, time.perf_counter() - start
            kept = kernel_folder(device.type)
            found.append({"device": str(device), "ready": ready, "compiled": compiled, "seconds": seconds,
                          "folder": None if kept is None else str(kept)})  # fmt: skip
    answer(arguments, found, lambda: _text(found))
    return 0


def _devices(name: str | None) -> list[torch.device]:
    """Return the devices whose kernels are compiled."""
    if name is None:
        return [torch.device("cpu"), *([torch.device("cuda")] if load_engine("cuda").available() else [])]
    check_device(name)
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"--device {name} has no kernels to compile; choose cpu, cuda or cuda:1")
    return [device]


def _on_cpu(progress: Progress) -> str:
    """Run the usual calls, and return how many there were."""
    calls = list(usual_calls())
    progress.stage("cpu", len(calls))
    for done, (name, call) in enumerate(calls):
        progress.step(done, name)
        call()
    progress.step(len(calls))
    return f"{len(calls)} casts, products and steps"


def _on_gpu(device: torch.device, progress: Progress) -> str:
    """Compile and load the kernels of a GPU, and return how many there are."""

    def advance(done: int, total: int) -> None:
        if not done:
            progress.stage(str(device), total)
        progress.step(done)

    return f"{load_engine('cuda').warmup(device, advance=advance)} kernels"


def _text(found: list[dict[str, Any]]) -> str:
    rows = [(each["device"], each["ready"], f"{each['compiled']:,}", f"{each['seconds']:.1f}",
             each["folder"] or "nowhere: every process compiles anew") for each in found]  # fmt: skip
    table = format_table(("device", "ready", "compiled now", "seconds", "kept in"), rows, left=(0, 1, 4))
    return f"{table}\nkernels that rarer calls take are still compiled by the first of these"
