# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.tools.jobs FOLDER COUNT SEED JOB...``: kill jobs at random moments, run them again, compare.

Each job runs in a child that is forked from this process, which has loaded torch, so that kills fall on the job's own
work. A job that is run again finds what the killed one left, and has to end with the files of one that ran undisturbed.
"""

import dataclasses
import io
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # loaded before the fork, or each child takes seconds for it when it makes an optimizer
from torch import nn

import fmtsim
import fmtsim.machine.operators  # loaded before the fork
import studies.claims.__main__ as claims_program
import tools.calibrate.__main__ as calibration
from fmtsim.formats.tensor_file import read_tensors
from fmtsim.gemm.units.unit import get_unit
from fmtsim.lab.analysis.audit import audit
from fmtsim.lab.analysis.compare import plot_ulps
from fmtsim.lab.analysis.trace import Trace
from fmtsim.lab.cli import training_commands  # noqa: F401
from fmtsim.lab.cli.main import main
from fmtsim.lab.search import Policy
from fmtsim.ptq import Gptq
from fmtsim.recipes.serialization import save_recipe
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.files import TEMPORARY, write_file
from fmtsim.support.plotting import png
from tests.support.fake_gpu import FakeGPU
from tests.support.ptq_models import ANYWHERE, DATA, mlp

SMALL = ["--batch-size", "2", "--context", "16", "--width", "16", "--layers", "1", "--heads", "2", "--steps", "12"]


def run_train(folder: Path) -> None:
    """Train under delayed scales that are rounded at random, going on from a checkpoint where there is one."""
    data = folder.parent / "text.txt"
    data.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    how = ["--format", "e4m3", "--grad-rounding", "stochastic", "--checkpoint-every", "1", "--resume", "--quiet"]
    assert main(["train", *SMALL, *how, "--data", str(data), "--out", str(folder)]) == 0


def run_calibrate(folder: Path) -> None:
    """Calibrate a stand-in for a GPU."""
    hopper = get_unit("hopper.wgmma")
    plan = lambda call: GemmPlan(k_tile=64, split=2) if call.k == 512 else GemmPlan()  # noqa: E731
    calibration.open_gpu = lambda device: FakeGPU(lambda call: hopper.mode(call.a, call.b, call.accumulate), plan)
    torch.cuda.get_device_capability = lambda device: (9, 0)
    shapes = folder.parent / "shapes.txt"
    shapes.write_text("64 512\n")
    words = ["--shapes", str(shapes), "--tokens", "32", "--dtypes", "bf16", "--quick", "--no-gradients"]
    assert calibration.main([*words, "--out", str(folder / "plan.json")]) == 0


def run_ptq(folder: Path) -> None:
    """Quantise a model and keep it."""
    model = fmtsim.ptq(mlp(), dataclasses.replace(ANYWHERE, weights=Gptq()), DATA)
    file = io.BytesIO()
    torch.save(fmtsim.state(model), file)
    write_file(folder / "model.pt", file.getvalue())


def run_search(folder: Path) -> None:
    """Search formats by a policy, and keep the recipe, the figures and the picture."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    data = [torch.randn(10, 32) for _ in range(2)]
    result = fmtsim.search(model.requires_grad_(False), data, bits=6, policy=Policy(steps=60))
    save_recipe(result.recipe(), folder / "searched.json")
    write_file(folder / "losses.json", json.dumps([result.losses, result.loss, result.formats, result.tried]))
    result.plot(folder / "front.png")


def run_sweep(folder: Path) -> None:
    """Train the points of a sweep, each of which is a line of a file as soon as it ends."""
    data = folder.parent / "text.txt"
    data.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    points = ["--schemes", "fp32,e4m3", "--lr", "1e-2", "--widths", "16", "--steps", "4", "--seeds", "0..2"]
    how = ["--context", "16", "--layers", "1", "--heads", "2", "--batch-size", "2", "--workers", "1", "--quiet"]
    assert main(["sweep", *points, *how, "--data", str(data), "--out", str(folder)]) == 0


def run_reproduce(folder: Path) -> None:
    """Measure two claims and keep the table and the numbers."""
    claims = [word for name in ("stochastic_bits", "dge") for word in ("--only", name)]
    assert claims_program.main([*claims, "--workers", "1", "--quiet", "--out", str(folder)]) in (0, 1)


def _small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(32), nn.Linear(32, 8)).bfloat16()


def run_simulate(folder: Path) -> None:
    """Train on a simulated GPU, going on from the file that is written after every step."""
    model, path = _small(), folder / "model.pt"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["steps"]
    with fmtsim.simulate(target="h200"):
        for step in range(done, 12):
            torch.manual_seed(step)  # of dropout, too
            optimizer.zero_grad()
            model(torch.randn(16, 32).bfloat16()).float().square().mean().backward()
            optimizer.step()
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": step + 1}, file)
            write_file(path, file.getvalue())


def run_audit(folder: Path) -> None:
    """Record the trace of a simulated step unless a file has it, audit it, and keep the result."""
    path = folder / "run.safetensors"
    if not path.exists():
        model = _small()
        with fmtsim.simulate(target="h200"), fmtsim.trace(model, level="aten", tensors=True) as run:
            model(torch.ones(16, 32).bfloat16()).float().sum().backward()
        run.trace.save(path)
    result = audit(Trace.load(path), target="h200")
    write_file(folder / "audit.json", json.dumps(result.to_dict()))


JOBS: dict[str, Callable[[Path], None]] = {
    "train": run_train, "calibrate": run_calibrate, "ptq": run_ptq, "search": run_search, "sweep": run_sweep,
    "reproduce": run_reproduce, "simulate": run_simulate, "audit": run_audit,
}  # fmt: skip


def results(folder: Path) -> dict[str, object]:
    """Return what the files of a job say, each of them read whole; what differs between equal runs is left out."""
    contents: dict[str, object] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(TEMPORARY):
            continue
        content: object = path.read_bytes()
        if path.suffix == ".json":
            hook = lambda x: {k: v for k, v in x.items() if k not in ("seconds", "ran")}  # noqa: E731
            content = json.loads(path.read_text(), object_hook=hook)
        elif path.suffix == ".jsonl":
            content = [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in path.open()]
        elif path.suffix == ".md":  # the last column of a table is how long a claim took
            content = re.sub(r"[0-9-]+ [0-9:]+ UTC|[0-9.]+ (s\b|\|$)", "", path.read_text("utf-8"), flags=re.M)
        elif path.suffix == ".html":
            content = re.sub(r"fmtsim train [^\"<]*|[0-9-]+ [0-9:]+ UTC|[0-9.]+ s, ", "", path.read_text("utf-8"))
        elif path.suffix == ".safetensors":
            read_tensors(path)
        elif path.suffix == ".pt":
            torch.load(path, weights_only=True)
        elif path.suffix == ".png":
            assert path.read_bytes().endswith(b"IEND\xaeB`\x82")
        contents[path.name] = content
    return contents


def forked(job: Callable[[Path], None], folder: Path, moment: float | None = None) -> tuple[int, float]:
    """Run a job in a child, killed after so many seconds; return its status and how long it ran."""
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            job(folder)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    while moment is not None and time.monotonic() - began < moment:
        time.sleep(0.001)
    if moment is not None:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return status, time.monotonic() - began


def campaign(name: str, place: Path, count: int, seed: int) -> dict[str, int]:
    """Kill a job so many times, each time from the beginning, and run it again; return counts of what happened."""
    job, draw = JOBS[name], random.Random(f"{name} {seed}")
    (whole := place / "whole").mkdir(parents=True)
    assert forked(job, whole)[0] == 0  # and compiles kernels
    (again := place / "again").mkdir()
    status, longest = forked(job, again)
    expected = results(whole)
    assert status == 0 and results(again) == expected
    counts = dict.fromkeys(("kills", "ended before", "left something", "left a temporary", "equal"), 0)
    for number in range(count):
        (folder := place / str(number)).mkdir()
        status, _ = forked(job, folder, draw.uniform(0, longest))
        files_left = results(folder)
        counts["kills"] += status == signal.SIGKILL
        counts["ended before"] += status == 0
        counts["left something"] += status == signal.SIGKILL and bool(files_left)
        counts["left a temporary"] += len(files_left) < len(list(folder.iterdir()))
        counts["equal"] += forked(job, folder)[0] == 0 and results(folder) == expected
    return counts


if __name__ == "__main__":
    torch.set_num_threads(1)
    png(plot_ulps({"loaded": fmtsim.compare(torch.ones(1), torch.ones(1))}, title="before the fork"))
    place, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps({name: campaign(name, place / name, count, seed) for name in sys.argv[4:]}))
