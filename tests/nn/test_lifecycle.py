# SPDX-License-Identifier: Apache-2.0
"""Every kind of conversion survives copies, pickles, files, compilers and checkpointing, and goes away again."""

import copy
import dataclasses
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fmtsim import observe
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling
from fmtsim.gemm.layers.config import Gemm, linear_config
from fmtsim.nn import convert, flash_attention_3, revert
from fmtsim.recipes import Recipe, Replacement, SavedActivations, get_recipe
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.quantizer import Quantizer
from tests.support.bits import all_same_bits
from tests.support.models import Experts, FalconLinear, NormedMLP, convolution, gated, gpt, net, snapshot
from tests.support.operands import normal

STOCHASTIC = Quantizer(format=get_format("e5m2"), scaling=Scaling(), rounding=Rounding(mode="stochastic"))
DRAWING = dataclasses.replace(  # random signs forward, random roundings backward
    flash_attention_3(target=None), dp=Gemm(a=STOCHASTIC, b=Quantizer(source="forward"))
)
ATTENTION = dataclasses.replace(get_recipe("te_delayed"), name="both", attention=DRAWING)
SMOOTH = Recipe(name="smooth", replace=(Replacement(kind="swiglu", by="SmoothSwiGLU"),))
ROUNDED = linear_config(x="e4m3", w="e4m3", g="e4m3", scaling=None, rounding="stochastic")
TENSOR = linear_config(x="e4m3", w="e4m3", g="e5m2", scaling="tensor")
TOKENS = torch.randint(0, 32, (2, 17), generator=torch.Generator().manual_seed(0))


class OwnLinear(nn.Linear):
    """A subclass that keeps the forward, and so is converted."""


class Dense(nn.Module):
    """Write products by hand: in a layer's forward, with a stack, and with the embedding as head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.proj = nn.Embedding(32, 16), FalconLinear(16, 16)
        self.w = nn.Parameter(torch.randn(3, 16, 16))

    def forward(self, tokens):
        x = self.proj(self.embedding(tokens[0]))
        x = torch.bmm(x.expand(3, -1, -1), self.w) + F.linear(x, self.w[1].T.to(torch.float32))
        return F.linear(x.sum(0), self.embedding.weight)


class Routed(nn.Module):
    """Two experts behind a norm and a layer that multiplies by itself; the head is the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.offset = nn.Embedding(32, 16), nn.Parameter(torch.randn(17, 16))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), FalconLinear(16, 16, bias=False), Experts()) for _ in range(2)
        )

    def forward(self, tokens):
        x = self.embedding(tokens[0]) + self.offset
        for block in self.blocks:
            x = x + block(x)
        return F.linear(x, self.embedding.weight)


def small_gpt():
    return gpt(context=16, width=32, layers=1)


def layers():
    return nn.Sequential(nn.Linear(32, 32), nn.GELU(), OwnLinear(32, 32))


IDS, ROWS = (TOKENS[:, :-1], TOKENS[:, 1:]), (normal(16, 32, seed=1),)
# The plain model, how it is converted, its inputs, the modules to checkpoint, and whether it is one graph.
CASES = {
    "layers": (layers, {"recipe": "te_delayed"}, ROWS, [""], True),
    "blocks": (lambda: net(blocks=2), {"recipe": "fp8lm"}, (normal(64, 128),), ["blocks.0", "blocks.1"], True),
    "stochastic": (layers, {"recipe": ROUNDED, "generator": 7}, ROWS, [], False),
    "attention": (small_gpt, {"recipe": ATTENTION}, IDS, ["blocks.0"], True),
    "gated": (gated, {"recipe": "intel_2t", "generator": 0}, ROWS, ["0"], False),
    "smooth": (gated, {"recipe": SMOOTH}, ROWS, ["2"], False),
    "coat": (NormedMLP, {"recipe": "coat"}, ROWS, ["mlp"], True),
    "saved": (NormedMLP, {"recipe": Recipe(name="saved", activations=SavedActivations())}, ROWS, ["mlp"], False),
    "unit scaling": (small_gpt, {"recipe": "unit_scaling", "generator": 0}, IDS, ["blocks.0"], True),
    "muS": (small_gpt, {"recipe": "mu_s", "generator": 0}, IDS, ["blocks.0"], False),
    "raw products": (Dense, {"recipe": "te_delayed"}, (TOKENS,), [], True),
    "experts": (Routed, {"recipe": ROUNDED}, (TOKENS,), ["blocks.0"], False),
    "bilinear": (lambda: nn.Bilinear(4, 6, 5), {"recipe": TENSOR}, (normal(3, 4), normal(3, 6, seed=2)), [""], True),
    **{
        name: (lambda name=name: convolution(name)[0], {"recipe": TENSOR}, (convolution(name)[1],), [""], True)
        for name in ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
    },
}  # fmt: skip
RESCALED = ("unit scaling", "muS")  # recipes that divide the weights, for good
# A reentrant checkpoint runs a module first without a gradient, where nothing is saved for the backward pass, and again
# without the model around it.
NOT_REENTRANT = ("coat", "saved", *RESCALED)
STRETCHES = [
    pytest.param(case, reentrant, id=f"{case}-{'reentrant' if reentrant else 'not reentrant'}")
    for case, (*_, names, _) in CASES.items() if names
    for reentrant in (True, False) if not (reentrant and case in NOT_REENTRANT)
]  # fmt: skip


def plain(case):
    torch.manual_seed(0)
    return CASES[case][0]()


def converted(case):
    return convert(plain(case), **CASES[case][1])


def steps(model, inputs, call=None, count=2):
    """Return outputs and gradients of a few steps, and what the model remembers of them."""
    results = []
    torch.manual_seed(5)
    for _ in range(count):
        leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
        model.zero_grad()
        y = (model if call is None else call)(*leaves)
        y.square().sum().backward()
        results += [y.detach(), *(t.grad for t in leaves if t.is_floating_point())]
        results += [p.grad.clone() for p in model.parameters()]
    return [*results, *(b.clone() for b in model.buffers())]


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("case", CASES)
def test_copies_stay_converted_have_a_memory_of_their_own_and_revert(case):
    model, inputs = converted(case), CASES[case][2]
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), through_a_file(model)]
    expected = steps(model, inputs)
    for other in copies:
        assert all_same_bits(steps(other, inputs), expected)
        assert [type(module) for module in revert(other).modules()] == [type(m) for m in plain(case).modules()]
        assert not any("fmtsim" in key for module in other.modules() for key in vars(module))


@pytest.mark.parametrize("case", [name for name, (*_, graph) in CASES.items() if graph])
def test_one_graph_has_the_bits_of_eager(case):
    """Two steps of a model from a file, so that new signs and moved scales are seen, and whose they are."""
    torch._dynamo.reset()
    eager, model, inputs = converted(case), through_a_file(converted(case)), CASES[case][2]
    if case in RESCALED:
        eager(*inputs), model(*inputs)  # which finds the residual branches
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    assert all_same_bits(steps(eager, inputs), steps(model, inputs, compiled))
    if case == "attention":
        with observe(model) as stats:
            compiled(*inputs)
        assert list(stats["blocks.0.attention"]) == ["q", "k", "v", "p"]


@pytest.mark.parametrize(("case", "reentrant"), STRETCHES)
def test_checkpointing_changes_no_bit(case, reentrant):
    """A forward pass that is run again has the signs, the random words and the scales of its first run."""
    _, how, inputs, names, _ = CASES[case]
    model = plain(case)
    for module in map(model.get_submodule, filter(None, names)):
        module.forward = lambda *x, forward=module.forward: checkpoint(forward, *x, use_reentrant=reentrant)
    convert(model, **how)
    call = (lambda *x: checkpoint(model, *x, use_reentrant=reentrant)) if "" in names else None
    reference = converted(case)
    reference.load_state_dict(model.state_dict())
    assert all_same_bits(steps(reference, inputs), steps(model, inputs, call))


@pytest.mark.parametrize("case", CASES)
def test_revert_leaves_the_plain_model(case):
    model, (_, how, inputs, *_) = plain(case), CASES[case]
    before, weights, y = snapshot(model), copy.deepcopy(model.state_dict()), model(*inputs)
    assert convert(model, **how) is model
    assert [key for key in model.state_dict() if "fmtsim" not in key] == list(weights)
    steps(model, inputs)
    assert case in RESCALED or all(torch.equal(model.state_dict()[key], value) for key, value in weights.items())
    assert not torch.equal(model(*inputs), y)
    model.zero_grad()
    assert revert(model) is model
    if case not in RESCALED:
        assert snapshot(model) == before and torch.equal(model(*inputs), y)
    other = plain(case)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(model(*inputs), other(*inputs))
    assert not any("fmtsim" in key or key == "forward" for module in model.modules() for key in vars(module))
