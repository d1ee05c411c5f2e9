# SPDX-License-Identifier: Apache-2.0
"""Quantised attention in models that call torch's function, eager and under torch.compile."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fmtsim
from fmtsim.formats.scaling import Scaling
from fmtsim.gemm.layers.config import Gemm
from fmtsim.nn import convert
from fmtsim.nn.attention import QuantisedAttention, convert_attention, revert_attention
from fmtsim.nn.sdpa import AttentionCall, flash_attention_3, quantised_attention
from fmtsim.recipes import Recipe, get_recipe
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError
from tests.support.models import gpt
from tests.support.operands import normal

CONFIG = flash_attention_3(unit=None)


def batch():
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def test_the_mode_replaces_one_function():
    q, k, v = (normal(1, 2, 16, 32, seed=i) for i in range(3))
    with QuantisedAttention(CONFIG, generator=5):
        y = F.scaled_dot_product_attention(q, k, value=v, is_causal=True)
        z = F.softmax(q, -1)
    assert torch.equal(y, quantised_attention(q, k, v, is_causal=True, config=CONFIG, generator=5))
    assert torch.equal(z, F.softmax(q, -1))
    assert not torch.equal(y, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_a_model_and_back():
    model = gpt()
    plain, keys = model(*batch()).item(), list(model.state_dict())
    assert convert_attention(model, CONFIG, generator=1) is model
    changed = model(*batch())
    assert changed.item() != plain
    assert changed.item() == pytest.approx(plain, abs=0.02)
    changed.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    assert list(model.state_dict()) == keys
    assert revert_attention(model)(*batch()).item() == plain
    assert not model.blocks[0].attention._forward_hooks and not model.blocks[0].attention._forward_pre_hooks


def test_checkpointing_runs_the_same_attention_again():
    """The recomputed forward has the same signs, so gradients are those without checkpointing."""
    inputs, targets = batch()

    class Checkpointed(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    plain = convert_attention(gpt(), CONFIG)
    other = copy.deepcopy(gpt())
    other.blocks = nn.ModuleList(Checkpointed(block) for block in other.blocks)
    convert_attention(other, CONFIG)
    for model in (plain, other):
        torch.manual_seed(3)
        model(inputs, targets).backward()
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_an_error_inside_leaves_no_mode_behind():
    class Broken(nn.Module):
        def forward(self, x):
            F.scaled_dot_product_attention(x, x, x)
            raise RuntimeError("broken")

    model = convert_attention(Broken(), CONFIG, filter_fn=lambda module, name: True, generator=0)
    x = normal(1, 8, 16)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            model(x)
    q = quantised_attention(x, x, x, config=CONFIG, generator=0)
    assert not torch.equal(F.scaled_dot_product_attention(x, x, x), q)


def test_errors():
    with pytest.raises(ArgumentError, match=r"found no attention in Linear; pass filter_fn= to name the modules"):
        convert_attention(nn.Linear(4, 4), CONFIG)
    model = convert_attention(gpt(), CONFIG)
    with pytest.raises(ArgumentError, match=r"attention of 'blocks.0.attention' is converted already; call revert"):
        convert_attention(model, CONFIG)
    with pytest.raises(ArgumentError, match=r"GPT has no converted attention; call convert_attention first"):
        revert_attention(gpt())


pytestmark = [  # torch's own tracer
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning"),
]

TOKENS = torch.randint(0, 128, (2, 17), generator=torch.Generator().manual_seed(0))
STOCHASTIC = Quantizer(format=fmtsim.get_format("e5m2"), scaling=Scaling(), rounding=Rounding(mode="stochastic"))
DRAWING = dataclasses.replace(
    flash_attention_3(unit=None), dp=Gemm(a=STOCHASTIC, b=Quantizer(source="forward"))
)  # random signs forward, random roundings backward


def step(model, call=None):
    model.zero_grad()
    loss = (model if call is None else call)(TOKENS[:, :-1], TOKENS[:, 1:])
    loss.backward()
    return loss.detach(), *(p.grad.clone() for p in model.parameters())


@pytest.mark.parametrize("generator", [7, pytest.param(None, marks=pytest.mark.slow)])
def test_a_model_is_one_graph_with_the_bits_of_eager(generator):
    torch._dynamo.reset()
    recipe = dataclasses.replace(get_recipe("te_delayed"), name="both", attention=DRAWING)
    eager, model = (convert(gpt(context=16, width=32, layers=1), recipe=recipe, generator=generator) for _ in range(2))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    runs = []
    for _ in range(2):
        for run in ((eager, None), (model, compiled)):
            torch.manual_seed(3)
            runs.append(step(*run))
    assert all(map(torch.equal, runs[0], runs[1])) and all(map(torch.equal, runs[2], runs[3]))
    assert not torch.equal(runs[0][1], runs[2][1])  # new signs, or moved scales
    with fmtsim.observe(model) as stats:
        compiled(TOKENS[:, :-1], TOKENS[:, 1:])
    assert list(stats["blocks.0.attention"]) == ["q", "k", "v", "p"]


@pytest.mark.parametrize("linear", [None, pytest.param(get_recipe("te_current").linear, marks=pytest.mark.slow)])
def test_multihead_attention(linear):
    torch._dynamo.reset()
    recipe = Recipe(name="r", linear=linear, attention=DRAWING)
    torch.manual_seed(0)
    model = convert(nn.MultiheadAttention(32, 2, batch_first=True), recipe=recipe)
    x = torch.randn(2, 8, 32, requires_grad=True)
    results = []
    for compiler in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(3)
        y = compiler(lambda x: model(x, x, x, need_weights=False)[0])(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    assert all(map(torch.equal, *results))


def test_the_function_itself_compiles():
    torch._dynamo.reset()
    q = normal(1, 2, 8, 16)
    mask = normal(8, 8, seed=1)

    def run(q):
        with QuantisedAttention(DRAWING, generator=3):
            z = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        return quantised_attention(q, q, q * 2, attn_mask=mask, config=DRAWING, generator=3), z

    assert all(map(torch.equal, torch.compile(run, fullgraph=True, backend="aot_eager")(q), run(q)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_the_operators_pass_torchs_own_check(dtype):
    call = AttentionCall(DRAWING, 5)
    q, k, v = (torch.randn(2, 8, 16).to(dtype).requires_grad_() for _ in range(3))
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for mask in (None, torch.zeros(8, 8)):
        torch.library.opcheck(
            torch.ops.fmtsim.attention_forward,
            (q, k, v, mask, False, 0.25, call.name),
            test_utils=utils,
            rtol=0,
            atol=0,
        )


def test_a_graph_outlives_no_model():
    q = torch.ones(2, 8, 16)
    with pytest.raises(ArgumentError, match="attention-1 was compiled for a model that is gone; compile the convert"):
        torch.ops.fmtsim.attention_forward(q, q, q, None, False, 1.0, "attention-1")
