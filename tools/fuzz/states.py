# SPDX-License-Identifier: Apache-2.0
"""Targets that take what was saved beside a model: quantised models, delayed scales, optimizers."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fmtsim
from fmtsim.optim import AdamW
from tools.fuzz.corrupt import anything, mutated


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def _stepped(scheme: str) -> AdamW:
    net = _net()
    optimizer = AdamW(net.parameters(), state=scheme)
    net(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    return optimizer


def quantised() -> tuple[dict[str, Any], Callable[[Any], object]]:
    """Return what a quantised model is, and what loads it into a fresh one."""
    good = fmtsim.ptq_state(fmtsim.ptq(_net(), "int8_static", [torch.linspace(-1, 1, 64).reshape(4, 16)]))
    return good, lambda state: fmtsim.load_ptq(_net(), state)(torch.ones(2, 16))


def delayed() -> tuple[dict[str, Any], Callable[[Any], object]]:
    """Return what delayed scaling remembers, and what loads it."""
    model = fmtsim.convert(_net(), recipe="te_delayed", filter_fn=lambda module, name: True)
    return fmtsim.recipe_state(model), lambda state: fmtsim.load_recipe_state(model, state)


def optimizer() -> tuple[dict[str, Any], Callable[[Any], object]]:
    """Return the state of an optimizer, and what loads it."""
    held = _stepped("coat")
    return held.state_dict(), lambda state: held.load_state_dict(state)


def make(good: Any) -> Callable[[random.Random], Any]:
    """Return what exchanges a few things in a state."""
    return lambda rng: mutated(rng, good, anything)
