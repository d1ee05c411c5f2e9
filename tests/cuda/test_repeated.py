# SPDX-License-Identifier: Apache-2.0
"""Passes over layers that are repeated by what was written down of one, against passes that decide anew."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fmtsim
from fmtsim.gemm.layers import compile, emulated_gemm
from fmtsim.gemm.layers.compile import quantizer_digest
from fmtsim.gemm.layers.emulated_gemm import run_layer
from fmtsim.gemm.layers.keys import Layer
from fmtsim.gemm.layers.quantize_operand import quantize_operand
from fmtsim.recipes import get_recipe
from fmtsim.support.replay.programs import Programs
from fmtsim.support.replay.recorder import Program
from tests.cuda.emulated_gpu import drawn
from tests.support.bits import assert_same_bits
from tests.support.operands import bfloat16s

REPEATED = ("te_current", "te_mxfp8", "te_nvfp4", "mxfp4", "quartet", "quartet2", "deepseek_v3", "fp8lm")


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_passes_have_the_same_bits(name, on_card, monkeypatch):
    """Passes that are repeated by what was written down, and those that decide anew: same draws, same bits."""
    found = {}
    for repeats in (True, False):
        torch.manual_seed(0)
        layer = Layer(get_recipe(name).linear)
        w = torch.randn(128, 256).to(on_card).requires_grad_()
        bias = torch.randn(128).to(on_card).requires_grad_()
        g, made = bfloat16s(2, 64, 128, seed=1).to(on_card), []
        if not repeats:
            monkeypatch.setattr(Programs, "run", lambda self, key, tensors, function, alike=0: (function(), None))
        for i in range(5):
            x = bfloat16s(2, 64, 256, seed=i).to(on_card).requires_grad_()
            with torch.autocast(on_card.type, torch.bfloat16):
                y = run_layer(x, w, bias, layer)
            made += [y.detach(), *torch.autograd.grad(y, (x, w, bias), g)]
        found[repeats] = made
        programs = list(layer._programs._found.values())
        assert [type(each) for each in programs].count(Program) == 2 * repeats
    for repeated, decided in zip(found[True], found[False], strict=True):
        assert_same_bits(repeated, decided)


@pytest.mark.parametrize("name", ["te_nvfp4", "quartet"])
def test_what_compiled_code_calls_is_repeated(name, on_card, monkeypatch):
    """With the draws of its pass, and other tensors than the call that was written down."""
    layer, asked, _ = drawn(name, on_card)
    texts, decided = [quantizer_digest(layer.quantizers[each.name]) for each in asked], []
    monkeypatch.setattr(compile, "quantize_operand", lambda *x, **y: decided.append(x) or quantize_operand(*x, **y))
    counter = layer.counter(asked[0].t.device)  # with its index, as tensors have it
    for i in range(5):
        tensors = [each.t * 2.0**i for each in asked]  # with its strides
        how = [each.factor for each in asked], [each.dim for each in asked], [each.name for each in asked], texts
        made = torch.ops.fmtsim.call_draw_operands(layer.name, tensors, *how)
        counter.sub_(1)
        wanted = compile._draws(layer.name, tensors, *how)
        for one, other in zip(made, wanted, strict=True):
            assert one.stride() == other.stride()
            assert_same_bits(one, other)
    assert len(decided) == len(asked) * (5 + 2)


@pytest.mark.filterwarnings("ignore::fmtsim.support.errors.CoverageWarning")  # te_nvfp4 leaves the last layer out
@pytest.mark.parametrize("name", ["te_delayed", "ao_tensorwise", "te_nvfp4"])
def test_repeated_steps_remember_what_others_do(name, on_card, monkeypatch):
    """Training, evaluation, inference and activation checkpointing by turns; in the end in other buffers."""
    found, decided, real = [], [0, 0], emulated_gemm.forward
    for repeats in (True, False):
        if not repeats:
            monkeypatch.setattr(Programs, "run", lambda self, key, tensors, function, alike=0: (function(), None))

        def product(*given, repeats=repeats, **more):
            decided[repeats] += 1
            return real(*given, **more)

        monkeypatch.setattr(emulated_gemm, "forward", product)
        torch.manual_seed(0)
        model = fmtsim.convert(nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128)).to(on_card), recipe=name)
        made = []
        for i in range(14):
            x = bfloat16s(128, 128, seed=i, device=on_card) * (i + 1)
            with torch.autocast(on_card.type, torch.bfloat16):
                y = checkpoint(model, x, use_reentrant=False) if i % 5 == 4 else model(x)
                made.append(model.eval()(x).detach() if i % 3 == 2 else y.detach())
            with torch.inference_mode(), torch.autocast(on_card.type, torch.bfloat16):
                made.append(model(x).clone())
            model.train()
            y.float().square().sum().backward()
            if i == 8:
                model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
        found.append([*made, *(p.grad for p in model.parameters()), *model.buffers()])
    assert decided[True] < decided[False] // 2
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)


def test_saved_tensors_that_hooks_lay_out_anew(on_card):
    """A hook may give the backward pass tensors with other strides than those that a recording saved."""
    layer, grads = Layer(get_recipe("te_current").linear), {}
    w = torch.randn(64, 32).to(on_card).requires_grad_()
    g = bfloat16s(48, 64, seed=1).to(on_card)
    turned = torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() == 2 else t
    )
    for hooks in (nullcontext(), nullcontext(), nullcontext(), nullcontext(), turned):
        x = bfloat16s(48, 32, seed=2).to(on_card).requires_grad_()
        with hooks, torch.autocast(on_card.type, torch.bfloat16):
            y = run_layer(x, w, None, layer)
        grads[hooks] = torch.autograd.grad(y, (x, w), g)
        for grad, first in zip(grads[hooks], next(iter(grads.values())), strict=True):
            assert_same_bits(grad, first)
