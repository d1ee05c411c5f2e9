# SPDX-License-Identifier: Apache-2.0
"""Time convert, set_step and revert on a model of 1000 layers: ``python benchmarks/recipes.py [NAME ...]``."""

import sys
import time

import torch
from torch import nn

import fmtsim

LAYERS = 1000
NAMES = ("te_current", "te_nvfp4", "te_delayed", "quartet2", "amp_bf16")


def measure(name: str) -> tuple[float, float, float]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(LAYERS)))
    weights = [p.detach().clone() for p in model.parameters()]
    times = [time.perf_counter()]
    for work in (
        lambda: fmtsim.convert(model, recipe=name, total_steps=10),
        lambda: fmtsim.nn.set_step(model, 1),
        lambda: fmtsim.revert(model),
    ):
        work()
        times.append(time.perf_counter())
    if not all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True)):
        raise SystemExit(f"{name} changed a weight")
    first, second, third = (b - a for a, b in zip(times, times[1:], strict=False))
    return first, second, third


if __name__ == "__main__":
    print(f"{LAYERS} layers, seconds\n{'recipe':20}{'convert':>10}{'set_step':>10}{'revert':>10}")
    for name in sys.argv[1:] or NAMES:
        print(f"{name:20}" + "".join(f"{seconds:10.4f}" for seconds in measure(name)))
