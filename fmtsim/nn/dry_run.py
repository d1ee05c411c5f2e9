# SPDX-License-Identifier: Apache-2.0
"""Run a model to look at it: what it holds is as before, and which module runs is known."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from fmtsim.nn.attention_mode import ATTENTION


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run something without gradients, by operators that can be counted; then put buffers and random states back."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    found = [getattr(m.__dict__.get("emulation"), "generator", None) for m in model.modules()]
    found += [m.__dict__[ATTENTION].call.generator for m in model.modules() if ATTENTION in m.__dict__]
    states = [(g, g.get_state()) for g in {id(g): g for g in found if isinstance(g, torch.Generator)}.values()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    fast = torch.backends.mha.get_fastpath_enabled()
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for generator, state in states:
                generator.set_state(state)
            for buffer, value in buffers:
                buffer.resize_(value.shape).copy_(value)


@contextmanager
def running_modules() -> Iterator[list[nn.Module]]:
    """Know which modules run: a list that has those whose forward is under way, the innermost last."""
    stack: list[nn.Module] = []

    def leave(*_: Any) -> None:
        if stack:
            stack.pop()

    before = hooks.register_module_forward_pre_hook(lambda module, _: stack.append(module))
    after = hooks.register_module_forward_hook(leave, always_call=True)
    try:
        yield stack
    finally:
        before.remove()
        after.remove()
