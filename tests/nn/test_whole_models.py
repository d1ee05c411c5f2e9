# SPDX-License-Identifier: Apache-2.0
"""Recipes on whole models: Hugging Face's Llama, GPT-2 and BERT, a CNN; under autocast, checkpointing and compile."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fmtsim.casts.lanes import with_keys
from fmtsim.gemm.layers.compile import text_of
from fmtsim.gemm.layers.keys import Layer
from fmtsim.nn import EmulatedConv2d, EmulatedLinear, convert, report, revert, set_step
from fmtsim.recipes import Recipe, Rule, Steps, get_recipe, list_recipes
from fmtsim.support.errors import ArgumentError
from tests.support.bits import all_same_bits
from tests.support.models import hugging_face
from tests.support.operands import normal

TOKENS = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))


HEADS = {"llama": {"lm_head"}, "gpt2": {"lm_head"}, "bert": {"cls.predictions.decoder"}}
LAYERS = {"llama": 7, "gpt2": 4, "bert": 6}  # a block


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_hugging_face_models_train_and_come_back(kind):
    model = hugging_face(kind, layers=4)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    plain = model(input_ids=TOKENS, labels=TOKENS)
    convert(model, recipe="te_nvfp4")
    names = {row.name for row in report(model).converted}
    blocks = {name for name in names if any(f".{i}." in name for i in range(3))}
    assert len(blocks) == 3 * LAYERS[kind] and not any(".3." in name for name in names)  # the last block of four
    assert not names & HEADS[kind]
    assert list(model.state_dict()) == list(weights)
    out = model(input_ids=TOKENS, labels=TOKENS)
    out.loss.backward()
    assert not torch.equal(out.logits, plain.logits) and abs(float((out.loss - plain.loss).detach())) < 0.2
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters() if p.requires_grad)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    revert(model)
    assert torch.equal(model(input_ids=TOKENS, labels=TOKENS).logits, plain.logits)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_a_wide_format_changes_hugging_face_models_little(kind):
    """The same products in bfloat16: every layer is emulated, transposed weights included, and agrees to 1 %."""
    model = hugging_face(kind, layers=4)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    convert(model, recipe="e8m5")
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    for name, p in model.named_parameters():
        if name in plain and p.dim() == 2:
            assert float((p.grad - plain[name]).norm() / plain[name].norm().clamp(min=1e-6)) < 0.15, name


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2, groups=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 9, 32),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["te_current", "te_delayed", "te_mxfp8", "int8_mixed", "fp4_ms", "deepseek_v3", "lns"])
def test_a_cnn_learns_under_a_recipe(name):
    model = convert(cnn(), recipe=name, generator=1)
    assert sum(isinstance(m, EmulatedConv2d) for m in model) == 2 and isinstance(model[5], EmulatedLinear) == (
        name not in ("fp4_ms", "deepseek_v3")  # the head
    )
    x, y = normal(16, 4, 8, 8, seed=2), torch.arange(16) % 8
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5


def mlp(width=128):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Linear(width, width))


def step(model, x, call=None):
    model.zero_grad()
    y = (call or model)(x)
    y.float().square().mean().backward()
    return y.detach(), *(p.grad.clone() for p in model.parameters())


X = normal(128, 128, seed=3)
QUICK = ("amp_bf16", "te_delayed", "te_nvfp4_all", "quartet", "quartet2", "fp4_ms", "halo2", "deepseek_v3")
EVERYWHERE = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name in list_recipes(kind="training")
    if get_recipe(name).linear is not None
    and get_recipe(name).attention is None
    and name not in ("mu_s", "unit_scaling")  # which see a batch first, and check the loss
    and not any(rule.last_blocks for rule in get_recipe(name).rules)  # the model below has no blocks
]


@pytest.mark.parametrize("name", EVERYWHERE)
def test_compiled_and_checkpointed_models_have_the_bits_of_eager(name):
    """One opaque operator a product; two steps, so that what delayed scaling remembers is seen to move."""
    torch._dynamo.reset()
    eager, model = (convert(mlp(), recipe=name, generator=7) for _ in range(2))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for x in (X, X * 3):
        assert all_same_bits(step(eager, x), step(model, x, compiled))
    random = any(quantizer.is_random for quantizer in eager[0].emulation.config.operands.values())
    for reentrant in () if random else (True, False):
        plain, again = (convert(mlp(), recipe=name) for _ in range(2))
        x = X.clone().requires_grad_()
        call = lambda x, m=again, how=reentrant: checkpoint(m, x, use_reentrant=how)  # noqa: E731
        assert all_same_bits(step(plain, x), step(again, x, call))


def test_a_compiled_model_follows_a_schedule_and_another_batch():
    torch._dynamo.reset()
    base = get_recipe("te_current")
    rules = (Rule(steps=Steps(first=1, last=2), use=get_recipe("coat").linear), Rule(steps=Steps(first=3)))
    recipe = Recipe(name="r", linear=base.linear, rules=rules)
    eager, model = (convert(mlp(), recipe=recipe) for _ in range(2))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    seen = []
    for i in range(4):
        for m in (eager, model):
            set_step(m, i)
        x = X[: 128 - 8 * i]
        seen.append(step(eager, x))
        assert all_same_bits(seen[-1], step(model, x, compiled))
    with torch.no_grad():
        assert torch.equal(eager(X[:5]), compiled(X[:5]))


@pytest.mark.parametrize("name", ["te_current", "te_nvfp4", "quartet", "fp4_ms", "deepseek_v3", "bitnet", "halo2"])
def test_the_operators_pass_torchs_own_check(name):
    """Fake results have the shapes, strides and dtypes of real ones, and nothing aliases an input."""
    config = get_recipe(name).linear
    layer = Layer(config, 5)
    x = normal(64, 128, seed=1)
    for operand, quantizer in config.operands.items():
        if quantizer.source == "forward":
            continue
        key = torch.tensor([3, 0])
        keys = [key if wanted else None for wanted in (quantizer.is_stochastic, True, quantizer.has_random_signs)]
        for dim, folded in ((-1, False), (0, False), (0, True)):
            run = with_keys(torch.ops.fmtsim.quantize_operand, *keys)
            arguments = (x, dim, text_of(quantizer), folded, layer.name, operand, None, *keys)
            float8 = any(t.dtype.itemsize == 1 and t.dtype.is_floating_point for t in run(*arguments))
            utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")[float8 : 3 - float8]
            torch.library.opcheck(run, arguments, test_utils=utils)  # some check cannot sum float8
    slope = torch.rand(64, 128) < 0.5
    texts = text_of(config.dgrad.a), text_of(config.fprop.a)
    for turned in (False, True):
        given = x, *texts, slope, None, torch.bfloat16, turned
        torch.library.opcheck(torch.ops.fmtsim.unrotate.default, given)
        torch.library.opcheck(torch.ops.fmtsim.unrotate.default, (*given, *torch.rand(2, 1, 1)))
    parts = x, torch.rand(1, 128), torch.rand(64, 1), None, torch.rand(128), torch.bfloat16
    torch.library.opcheck(torch.ops.fmtsim.finish, (parts[0], parts[1].mT, *parts[2:]))


def test_a_graph_outlives_no_model():
    with pytest.raises(ArgumentError, match="gone was compiled for a model that is gone; compile the converted"):
        torch.ops.fmtsim.layer(X, X, None, "gone")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["te_delayed", "te_block", "fp4_ms"])
def test_inductor_keeps_the_bits_of_products(name):
    """Of results and of the weights' gradients; those of biases are sums in an order of the compiler's own."""
    torch._dynamo.reset()
    eager, model = (convert(nn.Sequential(*list(mlp())[2:]), recipe=name, generator=7) for _ in range(2))
    compiled = torch.compile(model, fullgraph=True)
    for one, other in zip(step(eager, X), step(model, X, compiled), strict=True):
        if one.dim() == 2:
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-9)  # 128 float32 numbers in another order


@pytest.mark.parametrize("name", ["te_current", "te_nvfp4_all", "quartet", "deepseek_v3", "te_delayed"])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(name, compiled):
    """Products see bfloat16 operands and return bfloat16; gradients are those of bfloat16 weights, in float32."""
    torch._dynamo.reset()
    model, half = (convert(mlp().bfloat16(), recipe=name, generator=7) for _ in range(2))
    model.float()  # of bfloat16 numbers, which some recipes would quantise without a cast
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model

    def cast(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(x)

    y, *grads = step(model, X, cast)
    z, *halves = step(half, X.bfloat16())
    assert y.dtype == torch.bfloat16 and torch.equal(y, z)
    assert all(g.dtype == torch.float32 and torch.equal(g, h.float()) for g, h in zip(grads, halves, strict=True))
