# SPDX-License-Identifier: Apache-2.0
"""Products and models run natively and emulated: on a GPU, and here by stand-ins for what is native."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtsim
from fmtsim import compare, convert
from fmtsim.gemm.products import resolver
from fmtsim.gemm.products.native import is_native
from fmtsim.lab.analysis import compare_native as native_module
from fmtsim.lab.analysis.compare_native import compare_native
from fmtsim.support.errors import ArgumentError
from tests.support.bits import assert_same_bits
from tests.support.operands import normal
from tests.support.refusals import refused

BF16 = torch.bfloat16


def test_the_native_result_is_compared_with_the_emulated_one():
    asked = []

    def verb(x, *, bias, native, target):
        asked.append((native, x.dtype, bias.dtype, target))
        return torch.tensor([1.0, 2.0 if native else -2.0])

    found = compare_native(verb, torch.ones(2), bias=torch.ones(1), target="h200")
    assert asked == [(native, torch.float32, torch.float32, "h200") for native in (True, False)]
    assert not found.equal and str(found) == str(compare(torch.tensor([1.0, 2.0]), torch.tensor([1.0, -2.0])))


def test_operands_and_options_move_to_where_the_emulation_is():
    devices = []

    def verb(x, *, bias, native):
        devices.append((x.device.type, bias.device.type))
        return torch.ones(2)

    assert compare_native(verb, torch.ones(2), bias=torch.ones(1), emulate_on="meta").equal
    assert devices == [("cpu", "cpu"), ("meta", "meta")]


class Model(nn.Module):
    """A table, two layers, dropout and a norm with running statistics."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 64)
        self.layers = nn.Sequential(nn.Sequential(nn.Linear(64, 64)), nn.Dropout(0.5), nn.BatchNorm1d(64))
        self.head = nn.Linear(64, 32)

    def forward(self, tokens, x, scale=None):
        z = self.layers(self.table(tokens) + x)
        y = self.head(z)
        return {"y": y if scale is None else y * scale, "parts": [z, None]}


@pytest.fixture
def gpu(monkeypatch):
    """Let the CPU be an H200: what runs natively there is emulated, and noted."""
    calls, run = [], resolver.run_product

    def multiply(call, operands, dtype):
        calls.append((call.operation, operands.a.shape[0], dtype))
        added = operands if call.bias else operands._replace(bias=None)
        return run(call, added, dtype, native=False, quantized=True)

    monkeypatch.setattr(native_module, "why_not_native", lambda target, device: None)
    monkeypatch.setattr(resolver, "runs_natively", lambda native, *rest: native is True)
    monkeypatch.setattr(resolver, "multiply_natively", multiply)
    return calls


def prepared(recipe="te_delayed"):
    generator = torch.Generator().manual_seed(3)
    if recipe == "stochastic":
        recipe = fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3", scaling=None, grad_rounding="stochastic")
    model = convert(Model().to(BF16), recipe, target="h200", generator=generator)
    batch = torch.arange(32) % 16, normal(32, 64, seed=1).to(BF16).requires_grad_()
    return model, batch, generator


@pytest.mark.filterwarnings("ignore::fmtsim.support.errors.PlanUnknownWarning")
@pytest.mark.parametrize("recipe", ["te_delayed", "deepseek_v3", "int8_mixed", "bitnet", "amp_fp16", "stochastic"])
def test_a_model_runs_both_ways_and_is_left_as_it_was(recipe, gpu):
    model, batch, generator = prepared(recipe)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = copy.deepcopy(model.state_dict())
    states = torch.random.get_rng_state(), generator.get_state()
    scale = torch.ones(32, dtype=BF16, requires_grad=True)
    found = compare_native(model, *batch, scale=scale)
    assert found.equal and found.first is None and len(gpu) == 6
    assert (
        str(found)
        == f"{len(found.tensors)} tensors, {sum(c.count for c in found.tensors.values()):,} numbers: no bit differs"
    )
    assert list(found.tensors)[:2] == ["output['y']", "output['parts'][0]"]
    gradients = ["batch[1]", "batch['scale']", *(name for name, _ in model.named_parameters())]
    assert list(found.tensors)[2:] == [f"gradient of {name}" for name in gradients]
    assert found.tensors["gradient of head.weight"].shape == (32, 64)
    for mine, theirs in zip(model.state_dict().values(), before.values(), strict=True):
        assert_same_bits(mine, theirs)
    assert torch.equal(states[0], torch.random.get_rng_state()) and torch.equal(states[1], generator.get_state())
    assert batch[1].grad is None and scale.grad is None and model.table.weight.grad is None
    assert bool((model.head.weight.grad == 1).all()) and model.head.emulation.config.fprop.native is None


@pytest.mark.parametrize("product", range(6))
def test_a_bit_that_one_native_product_has_otherwise_is_found(product, gpu, monkeypatch):
    model, batch, _ = prepared()
    multiply = resolver.multiply_natively

    def flipped(*arguments, **options):
        y = multiply(*arguments, **options)
        if len(gpu) == product + 1:
            y.view(torch.int16)[0, 0] ^= 1
        return y

    monkeypatch.setattr(resolver, "multiply_natively", flipped)
    found = compare_native(model, *batch, loss=lambda y: F.mse_loss(y["y"].float(), torch.zeros(32, 32)))
    wrong = [name for name, each in found.tensors.items() if not each.equal]
    assert "loss" in found.tensors and not found.equal and found.first == (wrong[0], found.tensors[wrong[0]].first)
    # Products in their order: of the first layer and the head forward, then dx and dw of the head, then of the first.
    only = {3: "gradient of head.weight", 5: "gradient of layers.0.0.weight"}
    assert wrong == [only[product]] if product in only else len(wrong) >= 1
    assert str(found).splitlines()[-1].endswith(f"numbers: {len(wrong)} tensors differ") and wrong[0] in str(found)
    assert wrong[0].replace("'", "&#x27;") in found._repr_html_()


def test_an_output_of_one_number_is_what_is_differentiated(gpu, monkeypatch):
    model, batch, _ = prepared()
    seeds, backward = [], torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda y, g: seeds.append(g) or backward(y, g))
    compare_native(model, *batch)
    model.register_forward_hook(lambda module, given, y: y["y"].sum())
    assert compare_native(model, *batch).equal
    several, one = seeds[0], seeds[2]
    assert [tuple(g.shape) for g in several] == [(32, 32), (32, 64)] and not several[0].equal(
        torch.ones(32, 32, dtype=BF16)
    )
    assert len(one) == 1 and float(one[0]) == 1.0 and torch.equal(several[0], seeds[1][0])


def test_a_text_shows_some_of_many_tensors_that_differ():
    each = compare(torch.tensor([1.0]), torch.tensor([2.0]))
    text = str(native_module.ModelComparison(tensors={f"t{i}": each for i in range(23)})).splitlines()
    assert text[-3].startswith("t19 ") and text[-2:] == ["... and 3 more", "23 tensors, 23 numbers: 23 tensors differ"]


def test_errors_of_models_to_compare(gpu, monkeypatch):
    model, batch, _ = prepared()
    with pytest.raises(ArgumentError, match="compare_native found no converted module in Linear; convert it first"):
        compare_native(nn.Linear(4, 4), torch.ones(4, 4))
    with pytest.raises(
        ArgumentError, match="compare_native got 3; pass a product such as fmtsim.mm, or a converted model"
    ):
        compare_native(3, torch.ones(4, 4))
    plain = convert(nn.Linear(4, 4), format="e4m3")
    with pytest.raises(ArgumentError, match="no layer of the model has a target; convert it with target=, for example"):
        compare_native(plain, torch.ones(4, 4))
    refused("emulates a model on its own GPU; leave emulate_on= out", compare_native, model, *batch, emulate_on="cpu")
    with pytest.raises(ArgumentError, match="loss=3 is not a function of the model's output; write loss=lambda y: "):
        compare_native(model, *batch, loss=3)
    with pytest.raises(
        ArgumentError, match="loss= returned .*; return one number that depends on the model's parameters"
    ):
        compare_native(model, *batch, loss=lambda y: y["y"])
    monkeypatch.setattr(Model, "forward", lambda *_: "text")
    refused("the model returned 'text', which holds no tensor", compare_native, model, *batch)
    monkeypatch.undo()
    refused("layer 'layers.0.0': native=True is not possible: the tensors are on cpu", compare_native, model, *batch)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's, in autograd's own thread
@pytest.mark.skipif(not is_native("h200"), reason="needs an NVIDIA H200")
@pytest.mark.parametrize("recipe", ["te_delayed", "te_block", "deepseek_v3", "int8_mixed", "amp_bf16"])
def test_an_h200_has_the_bits_of_its_emulation(recipe):
    model, batch, _ = prepared(recipe)
    found = compare_native(
        model.cuda(), *(t.detach().cuda() for t in batch), loss=lambda y: y["y"].float().square().mean()
    )
    assert found.equal, found
