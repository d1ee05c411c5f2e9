# SPDX-License-Identifier: Apache-2.0
"""Models as their owners prepared them: forwards on instances, offloaded, parametrized and sharded weights."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import fmtsim
from fmtsim.nn import convert, report, revert
from fmtsim.support.errors import CoverageWarning
from tests.support.bits import assert_same_bits
from tests.support.operands import normal
from tests.support.refusals import refused

X = normal(32, 32, seed=1)
RECIPES = ("te_current", "te_delayed")


def seeded(make):
    torch.manual_seed(0)
    return make()


def net():
    return seeded(lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)))


def conv1d():
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils", reason="transformers is not installed")
    return nn.Sequential(pytorch_utils.Conv1D(32, 32))


# A layer of each kind, and its inputs.
LAYERS = {
    "linear": (lambda: nn.Linear(32, 32), (X,)),
    "bilinear": (lambda: nn.Bilinear(32, 32, 8), (X, X)),
    "conv2d": (lambda: nn.Conv2d(4, 8, 3), (normal(2, 4, 8, 8),)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 8, 3), (normal(2, 4, 8, 8),)),
    "conv1d": (conv1d, (X,)),
    "lstm": (lambda: nn.LSTM(32, 16), (X,)),
    "attention": (lambda: nn.MultiheadAttention(32, 4), (X, X, X)),
}


def hook(kind, model):
    """Hook every module as Accelerate does, or leave what its hooks leave behind."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    if kind == "cpu":
        return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    if kind == "disk":
        return accelerate.disk_offload(model, tempfile.mkdtemp(), execution_device=torch.device("cpu"))
    for module in list(model.modules()):
        accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())
    return model if kind == "bare" else accelerate.hooks.remove_hook_from_module(model, recurse=True)


def result(model, inputs):
    y = model(*inputs)
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("kind", ["bare", "removed", "cpu"])
@pytest.mark.parametrize("layer", LAYERS)
def test_hooked_layers_run_emulated(layer, kind):
    make, inputs = LAYERS[layer]
    if (layer, kind) == ("attention", "cpu"):
        model = convert(hook(kind, seeded(make)), "te_current")
        message = "w on meta; move them to one device, .*load it: Accelerate's offloaded weights are there while the"
        return refused(message, model, *inputs)  # its own forward reads out_proj's weight: torch's fails, too
    model, plain = hook(kind, seeded(make)), result(seeded(make), inputs)
    y = result(convert(model, "te_current"), inputs)
    assert_same_bits(y, result(convert(seeded(make), "te_current"), inputs))
    assert not torch.equal(y, plain)
    assert_same_bits(result(revert(model), inputs), plain)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_offloaded_models_train_and_are_reported(kind, recipe):
    model, other = convert(hook(kind, net()), recipe), convert(net(), recipe)
    x, z = (X.clone().requires_grad_() for _ in range(2))
    y, want = model(x), other(z)
    assert_same_bits(y, want)
    y.sum().backward()
    want.sum().backward()
    assert_same_bits(x.grad, z.grad)
    assert report(model).summary == report(other).summary
    refused("0.weight is on the meta device between the forwards of its layer, and", report, model, X)
    # hooks that come after convert, and leave before revert
    hooked = hook(kind, convert(net(), recipe))
    assert_same_bits(hooked(X), want)
    assert_same_bits(revert(hooked)(X), net()(X))


def test_offloaded_experts_and_attention_run_emulated():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, num_experts=4, num_experts_per_tok=2, vocab_size=64, head_dim=16, pad_token_id=0,
    )  # fmt: skip
    models = [seeded(lambda: transformers.Qwen3MoeForCausalLM(config).eval()) for _ in range(2)]
    convert(hook("cpu", models[0]), "te_current", attention="fa3", generator=0)
    convert(models[1], "te_current", attention="fa3", generator=0)
    with torch.no_grad():
        y, want = (model(torch.arange(32)[None]).logits for model in models)
    assert_same_bits(y, want)


def test_a_forward_that_hides_the_emulated_one_is_refused_by_name():
    model = net()
    old = model[0].forward
    model[0].forward = lambda t: old(t)
    message = "layer '0' .Linear. has a forward of its own on the instance, .*lambda.*take it off .del layer.forward."
    refused(message, convert, model, "te_current")
    assert type(model[2]) is nn.Linear
    assert len(report(convert(model, "te_current", filter_fn=lambda m, name: name == "2")).converted) == 1


def test_a_later_forward_is_counted_by_what_it_runs():
    model = net()
    plain, x = model[0].forward, X
    convert(model, "te_current")
    emulated = model[0].forward
    model[0].forward = lambda t: emulated(t)
    assert_same_bits(model(x), convert(net(), "te_current")(x))
    assert "100 % of weight" in report(model).summary
    model[0].forward = lambda t: plain(t)
    message = (
        "layer '0' ran, and was not emulated: a forward that was set on the instance after convert, .*lambda.*call"
    )
    with pytest.warns(CoverageWarning, match=message):
        model(x)
    model(x)  # told once
    for told in (report(model), report(model, x)):
        assert told.coverage.share == 0.5 and "te_current: 50.0 % of weight multiply-adds simulated" in told.summary
        assert told.rows[0].detail.startswith("not emulated: a forward that was set on the instance")
    del model[0].forward
    assert "100 % of weight" in report(model, x).summary
    assert_same_bits(revert(model)(x), net()(x))


class Branches(nn.ModuleList):
    def forward(self, x, which=(0, 2)):
        return sum(self[i](x) for i in which)


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_that_no_forward_reached_are_named(compiled):
    model = convert(Branches(nn.Linear(32, 32) for _ in range(4)), "te_current")
    assert "not reached" not in report(model).summary  # nothing ran yet
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    run(X)
    summary = report(model).summary
    assert "100 %" in summary and summary.endswith("2 of 4 converted layers not reached so far: 1,3")
    run(X, (1, 3))
    assert "not reached" not in report(model).summary


class Twice(nn.Module):
    def forward(self, w):
        return 2 * w


PARAMETRIZED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", Twice()),
    "hook": torch.nn.utils.weight_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", PARAMETRIZED)
def test_products_see_the_parametrized_weight(kind, recipe):
    def parametrized(model):
        seeded(lambda: PARAMETRIZED[kind](model[0]))
        return model.eval()

    weight = parametrized(net())(X) is not None and parametrized(net())[0].weight.detach()
    plain = net().eval()
    plain[0].weight.data = weight
    want = convert(plain, recipe)(X)
    before, after = convert(parametrized(net()), recipe), parametrized(convert(net(), recipe))
    for model in (before, after):
        assert_same_bits(model(X), want)
        assert report(model).summary == report(plain).summary
    revert(before)
    if kind != "hook":
        refused("layer '0' became a ParametrizedEmulatedLinear after convert; undo that change", revert, after)


class Adapter(nn.ModuleDict):
    """LoRA around a layer, as PEFT wraps it."""

    def forward(self, x):
        return self["base_layer"](x) + self["b"](self["a"](x)) * 2.0


def test_adapters_are_emulated_if_they_come_first_and_named_if_they_come_later():
    def adapted(model):
        torch.manual_seed(0)
        a, b = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
        model[0] = Adapter({"base_layer": model[0], "a": a, "b": b})
        return model

    first, later = convert(adapted(net()), "te_current"), adapted(convert(net(), "te_current"))
    assert "100 % of weight" in report(first, X).summary
    assert "0.a, 0.b 11.1 % (added after convert; fmtsim.revert(model)" in report(later, X).summary
    base = convert(net(), "te_current")[0](X)
    assert_same_bits(later[0](X), base + later[0]["b"](later[0]["a"](X)) * 2.0)
    assert not torch.equal(first[0](X), later[0](X))


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_torchs_tensor_parallelism_is_refused_with_what_to_use(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan, what = {"0": ColwiseParallel(), "2": RowwiseParallel()}, "is a DTensor .*fmtsim.distributed.parallelize"
    for recipe in RECIPES:
        model = convert(parallelize_module(net(), mesh, plan), recipe)
        refused(f"x of layer '0' {what}", model, X)
        refused(what, torch.compile(model, backend="aot_eager"), X)
    refused(what, parallelize_module(convert(net(), "te_current"), mesh, plan), X)
    with pytest.raises(
        AttributeError, match=r"remembers of its scales has no weight; .*fmtsim.distributed.parallelize"
    ):
        parallelize_module(convert(net(), "te_delayed"), mesh, plan)
    t = distribute_tensor(X.bfloat16(), mesh, [Shard(0)])
    refused(f"x {what}", fmtsim.quantize, t, "e4m3")
    refused(f"x {what}", fmtsim.encode, t, "e4m3")
    refused(f"a {what}", fmtsim.mm, t, t, target="h200")
    with fmtsim.simulate(target="h200"):
        refused(f"an operand of aten.mm.default {what}", torch.mm, t, t)


def test_what_a_recipe_takes_and_its_source_refuses_is_reported():
    model = convert(net(), "te_mxfp8")
    assert model(X[:24]).shape == (24, 32)
    assert report(model).summary.endswith("its source refuses rows and features that 32 does not divide, fmtsim not")
