# SPDX-License-Identifier: Apache-2.0
"""Cases of reductions, and what runs each of them once."""

import dataclasses

import torch

import fmtsim
from fmtsim.distributed import get_reduction, simulate
from fmtsim.rounding.modes import Rounding

E4M3 = fmtsim.get_format("e4m3")
BASE = get_reduction("fp8lm_post")
CASES = (
    get_reduction("fp8lm"),
    get_reduction("fp8lm_pre"),
    get_reduction("msamp"),
    get_reduction("bf16"),
    dataclasses.replace(BASE, algorithm="tree"),
    dataclasses.replace(BASE, format=fmtsim.get_format("e5m2"), average=False, overflow="ieee"),
    dataclasses.replace(BASE, format=fmtsim.get_format("e2m1"), nonfinite="saturate", algorithm="tree"),
    dataclasses.replace(BASE, format=fmtsim.get_format("int6"), nonfinite="raise"),
    dataclasses.replace(BASE, rounding=Rounding(mode="stochastic"), seed=9),
    dataclasses.replace(BASE, rounding=Rounding(mode="stochastic"), seed=9, algorithm="tree"),
)


def gradients(ranks, n, seed, spread=2.0):
    """Return numbers over several binades with some zeros of both signs."""
    source = torch.Generator().manual_seed(seed)
    size = torch.exp(torch.randn(n, generator=source) * spread)
    x = torch.randn(ranks, n, generator=source) * size
    x[:, :1], x[:1, 1:2] = 0.0, -0.0
    return list(x)


def warm():
    """Compile what the reductions need, on one thread, as processes are forked from this one."""
    torch.set_num_threads(1)
    for case in CASES:
        simulate(gradients(2, 8, 0), case)
