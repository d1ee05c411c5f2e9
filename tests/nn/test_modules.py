# SPDX-License-Identifier: Apache-2.0
"""Emulated MultiheadAttention: torch's results without quantisers, one product each projection with them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtsim
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.nn import convert
from tests.support.models import both
from tests.support.operands import normal
from tests.support.refusals import refused


def make_inputs(kind, batch_first, kdim=8, vdim=8):
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, length, size, generator=g) for length, size in ((5, 8), (6, kdim), (6, vdim)))
    inputs = {"self": (q, q, q), "memory": (q, k, k), "three": (q, k, v)}[kind]
    if batch_first:
        return inputs
    turned = {t: t.transpose(0, 1).contiguous() for t in dict.fromkeys(inputs)}
    return tuple(turned[t] for t in inputs)


@pytest.mark.parametrize("kind", ["self", "memory", "three"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_attention_is_torchs(kind, batch_first, need_weights, options):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)
    results = both(module, *make_inputs(kind, batch_first), need_weights=need_weights)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_attention_with_other_key_and_value_sizes_is_torchs():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 4, kdim=6, vdim=10, batch_first=True)
    results = both(module, *make_inputs("three", True, kdim=6, vdim=10), average_attn_weights=False)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
CAUSAL = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "masks",
    [
        {"key_padding_mask": PADDING},
        {"attn_mask": CAUSAL, "is_causal": True},
        {"attn_mask": CAUSAL, "key_padding_mask": PADDING, "is_causal": True},
        {"attn_mask": normal(4, 5, 5, seed=2)},
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_attention_masks_are_torchs(need_weights, masks, training):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
    results = both(module, *make_inputs("self", True), need_weights=need_weights, **masks)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_attention_without_a_batch_and_with_dropout():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, dropout=0.5)
    x = torch.randn(5, 8)
    module.eval()
    torch.testing.assert_close(*both(module, x, x, x, average_attn_weights=False), rtol=1e-5, atol=1e-6)
    convert(module.train(), recipe=LinearConfig())
    weights = module(x, x, x)[1]
    assert (weights == 0).any()


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("self", ["in_proj", "out_proj"]),
        ("memory", ["q_proj", "kv_proj", "out_proj"]),
        ("three", ["q_proj", "k_proj", "v_proj", "out_proj"]),
    ],
)
def test_attention_projects_in_as_few_products_as_torch(kind, parts):
    module = convert(
        nn.MultiheadAttention(8, 2, batch_first=True), recipe=fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3")
    )
    seen = []
    module.emulation.observer = lambda part: lambda operand, *_: seen.append((part, operand))
    module(*make_inputs(kind, True))
    assert seen == [(part, operand) for part in parts for operand in ("x_f", "w_f")]


def test_attention_projections_are_quantised():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True, bias=False)
    x = torch.randn(2, 5, 8)
    weights = [module.in_proj_weight.detach().clone(), module.out_proj.weight.detach().clone()]
    convert(module, recipe=fmtsim.linear_config(x="e2m1", w="e2m1", g="e2m1"))
    assert max(w.abs().max() for w in weights) < 1
    with torch.no_grad():
        module.in_proj_weight.mul_(1e-3)  # e2m1 without a scale turns these to zero: no query, key or value is left
    assert not F.threshold(module(x, x, x)[0].abs(), 0.0, 0.0).any()


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ((torch.ones(2, 3, 7),) * 3, {}, r"have \(7, 7, 7\) features; expected \(8, 8, 8\)"),
        ((torch.ones(2, 3, 8), torch.ones(3, 8), torch.ones(3, 8)), {}, r"have 3, 2 and 2 dimensions; all need 3"),
        ((torch.ones(2, 3, 8),) * 3, {"is_causal": True}, r"is a hint about attn_mask; pass attn_mask too"),
    ],
)
def test_attention_rejects_what_does_not_fit(inputs, options, message):
    module = convert(nn.MultiheadAttention(8, 2, batch_first=True), recipe=LinearConfig())
    refused(message, module, *inputs, **options)


def test_attention_rejects_nested_tensors():
    module = convert(nn.MultiheadAttention(8, 2, batch_first=True), recipe=LinearConfig())
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
    refused(r"takes no nested tensors; pass padded tensors with key_padding_mask", module, nested, nested, nested)


def test_attention_in_threads_multiplies_with_its_own_weights():
    modules = [convert(nn.MultiheadAttention(32, 4, batch_first=True), format="e4m3") for _ in range(4)]
    x = normal(2, 64, 32)
    alone = [module(x, x, x)[0] for module in modules]
    with ThreadPoolExecutor(len(modules)) as pool:
        together = pool.map(lambda module: [module(x, x, x)[0] for _ in range(8)], modules)
    for expected, found in zip(alone, together, strict=True):
        assert all(torch.equal(y, expected) for y in found)


@pytest.mark.parametrize("shape", [(8, 4), (2, 8, 4), (4,)])
def test_models_write_into_the_output_of_a_layer(shape):
    layer, x = convert(nn.Linear(4, 4), recipe=LinearConfig()), normal(*shape).requires_grad_()
    y = layer(x)
    expected = torch.autograd.grad((y * 2 + 1).square().sum(), (x, *layer.parameters()))
    found = torch.autograd.grad(layer(x).mul_(2).add_(1).square().sum(), (x, *layer.parameters()))
    assert all(map(torch.equal, expected, found))
