# SPDX-License-Identifier: Apache-2.0
"""Usual calls on small tensors: whoever has run them has compiled the CPU engine's usual kernels."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fmtsim.casts.quantize import encode
from fmtsim.lab.analysis.observe import observe
from fmtsim.lab.bench import cpu, gemm
from fmtsim.nn.convert import convert
from fmtsim.optim import AdamW

DECODED = ("bf16", "mxfp8_e4m3")  # of each a format: codes of elements, and of blocks
STATES = ("fp32", "bnb8", "coat")
RECIPES = ("te_current", "te_mxfp8", "quartet")


def usual_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names and calls: the casts and products of ``fmtsim bench``, decoding, optimizers, observed training."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for cast in cpu.CASES:
        yield f"cast {cast.name}", partial(cast.run, x, torch.empty_like(x))
    for name in DECODED:
        yield f"decode {name}", encode(x, name).decode
    for state in STATES:
        yield f"optimizer {state}", partial(_optimize, state)
    for recipe in RECIPES:
        yield f"training {recipe}", partial(_train, recipe)
    for case in gemm.CASES:
        yield f"product {case.name}", gemm.product_of(case, (64, 64, 128))
    yield "training te_current on h200", partial(_train, "te_current", target="h200")


def _optimize(state: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    parameter.grad = torch.ones(64, 64)
    AdamW([parameter], state=state).step()


def _train(recipe: str, **machine: Any) -> None:
    """Run one step of two layers forward and backward, observed; the second one stands for a head."""
    model = convert(torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 64)), recipe=recipe, **machine)
    with observe(model):
        model(torch.ones(128, 128)).sum().backward()
