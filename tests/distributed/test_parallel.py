# SPDX-License-Identifier: Apache-2.0
"""Layers that ranks share out, in one process: the function is that of the model, what travels is rounded, and errors.

That real ranks have the same bits is in test_ranks.py.
"""

import copy

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.distributed import AutoFactor, Reduction, TensorParallel, parallelize, simulate
from fmtsim.nn.modules import EmulatedModule
from fmtsim.support.errors import ArgumentError
from tests.support.bits import assert_same_bits
from tests.support.operands import normal
from tests.support.refusals import refused

E4M3 = fmtsim.get_format("e4m3")


def net(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12, bias), nn.Linear(12, 8, bias))


def shared_out(model, ranks=2, **settings):
    return parallelize(model, column="0", row="1", settings=TensorParallel(**settings), ranks=ranks)


def whole_numbers(model):
    """Give a model small whole numbers, whose sums are exact in any order."""
    for i, p in enumerate(model.parameters()):
        p.data = (4 * normal(*p.shape, seed=i)).round()
    return model


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_function_is_the_models(ranks, sequence):
    plain = whole_numbers(net())
    shared = shared_out(copy.deepcopy(plain), ranks, gather=None, sequence=sequence)
    x = normal(3, 4, 8, seed=9).mul(4).round().requires_grad_()
    other = x.detach().clone().requires_grad_()
    for model, t in ((plain, x), (shared, other)):
        y = model(t)
        (y * torch.arange(8.0)).sum().backward()
    assert_same_bits(shared(other), plain(x))
    assert_same_bits(other.grad, x.grad)
    for i, dim in ((0, 0), (1, 1)):
        assert_same_bits(torch.cat([s.weight.grad for s in shared[i].shards], dim), plain[i].weight.grad)
    assert_same_bits(torch.cat([s.bias.grad for s in shared[0].shards]), plain[0].bias.grad)
    assert_same_bits(shared[1].bias.grad, plain[1].bias.grad)


def test_what_travels_is_rounded_once():
    """Written out for two ranks: E4M3 tokens under one power of two, sums in bfloat16, gradients gathered in E5M2."""
    model, x = net(bias=False), normal(4, 8, seed=1)
    (w0, w1), given = (layer.weight.detach() for layer in model), x.clone().requires_grad_()
    sums = Reduction(format=fmtsim.get_format("bf16"), scaling=None, average=False)
    y = shared_out(model, reduction=sums, gradient="e5m2")(given)
    g = normal(4, 8, seed=2)
    y.backward(g)

    def sent(t, name, top):
        scale = 2.0 ** torch.ceil(torch.log2(t.abs().max() / top))
        return fmtsim.quantize(t / scale, name, out_dtype=torch.float32) * scale

    tokens, halves = sent(x, "e4m3", 448.0), [slice(0, 6), slice(6, 12)]
    parts = [(tokens @ w0[half].T) @ w1[:, half].T for half in halves]
    assert_same_bits(y.detach(), simulate(parts, sums).values[0])
    assert not torch.equal(y.detach(), parts[0] + parts[1])
    every = sent(g, "e5m2", 57344.0)
    assert_same_bits(given.grad, simulate([every @ w1[:, half] @ w0[half] for half in halves], sums).values[0])


def test_shards_are_layers_that_recipes_convert():
    model = fmtsim.convert(shared_out(net()), recipe="te_current")
    converted = [name for name, module in model.named_modules() if isinstance(module, EmulatedModule)]
    assert converted == ["0.shards.0", "0.shards.1", "1.shards.0", "1.shards.1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "2"}, "column='2' fits no plain nn.Linear of Sequential; they are: 0, 1"),
        ({"column": "("}, "column='(' is not a regular expression; write 'q_proj|k_proj|v_proj'"),
        ({"row": "0"}, "column='0' and row='0' both fit '0'; make them differ"),
        ({"ranks": 5}, "layer '0': out_features=12 does not divide among 5 ranks; choose other ranks, or leave it out"),
        ({"ranks": 0}, "0 ranks are not supported"),
        ({"ranks": None}, "a collective needs ranks; call torch.distributed.init_process_group first"),
        ({"ranks": 2, "group": 3}, "ranks=2 plays ranks in this process, group= has real ones; pass one of them"),
        ({"settings": "e4m3"}, "settings='e4m3' is not allowed; pass a TensorParallel"),
    ],
)
def test_refused(options, message):
    model = net()
    with pytest.raises(ArgumentError) as error:
        parallelize(model, **{"column": "0", "row": "1", "ranks": 2} | options)
    assert message in str(error.value) and type(model[0]) is type(model[1]) is nn.Linear


def test_settings_refused():
    automatic = Reduction(format=E4M3, factor="auto", auto=AutoFactor())
    for settings, message in (
        ({"reduction": automatic}, "remembers a factor or draws numbers; choose one with a fixed factor"),
        ({"gather": "nvfp4"}, "nvfp4 has scales of its own; pass scaling=None, or an element format"),
    ):
        refused(message, TensorParallel, **settings)
    with pytest.raises(ArgumentError, match=r"3 tokens \(dim=-2\) do not divide among 2 ranks; pad them, or pass"):
        shared_out(net())(torch.ones(3, 8))
    with pytest.raises(ArgumentError, match=r"dim=-2 of the tokens is not one of x of shape \(8,\); pass TensorPar"):
        shared_out(net())(torch.ones(8))
