# SPDX-License-Identifier: Apache-2.0
"""Quantised attention in models, eager and compiled; all six products on units against loops over heads."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtsim
from fmtsim.formats.scaling import Scaling
from fmtsim.gemm.layers.config import Gemm
from fmtsim.nn import convert
from fmtsim.nn.multihead_attention import QuantisedAttention, convert_attention, revert_attention
from fmtsim.nn.sdpa import AttentionCall, flash_attention_3, quantised_attention
from fmtsim.recipes import AttentionConfig, Recipe, get_recipe
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, FormatError
from tests.support.models import gpt
from tests.support.operands import normal
from tests.support.refusals import refused

FA3 = flash_attention_3(target=None)


def test_the_mode_replaces_one_function():
    q, k, v = (normal(1, 2, 16, 32, seed=i) for i in range(3))
    with QuantisedAttention(FA3, generator=5):
        y = F.scaled_dot_product_attention(q, k, value=v, is_causal=True)
        z = F.softmax(q, -1)
    assert torch.equal(y, quantised_attention(q, k, v, is_causal=True, config=FA3, generator=5))
    assert torch.equal(z, F.softmax(q, -1))
    assert not torch.equal(y, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_an_error_inside_leaves_no_mode_behind():
    class Broken(nn.Module):
        def forward(self, x):
            F.scaled_dot_product_attention(x, x, x)
            raise RuntimeError("broken")

    model = convert_attention(Broken(), FA3, filter_fn=lambda module, name: True, generator=0)
    x = normal(1, 8, 16)
    for _ in range(2):
        refused("broken", model, x, error=RuntimeError)
    q = quantised_attention(x, x, x, config=FA3, generator=0)
    assert not torch.equal(F.scaled_dot_product_attention(x, x, x), q)


def test_errors():
    with pytest.raises(ArgumentError, match=r"found no attention in Linear; pass filter_fn= to name the modules"):
        convert_attention(nn.Linear(4, 4), FA3)
    model = convert_attention(gpt(), FA3)
    refused(r"attention of 'blocks.0.attention' is converted already; call revert", convert_attention, model, FA3)
    refused(r"GPT has no converted attention; call convert_attention first", revert_attention, gpt())


STOCHASTIC = Quantizer(format=fmtsim.get_format("e5m2"), scaling=Scaling(), rounding=Rounding(mode="stochastic"))
DRAWING = dataclasses.replace(
    flash_attention_3(target=None), dp=Gemm(a=STOCHASTIC, b=Quantizer(source="forward"))
)  # random signs forward, random roundings backward


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


E4M3, E5M2, INT8, NVFP4 = (fmtsim.get_format(name) for name in ("e4m3", "e5m2", "int8", "nvfp4"))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORWARD = Quantizer(source="forward")
ROWS, WHOLE = Quantizer(format=E5M2, scaling=Scaling(block=(1, None))), Quantizer(format=E4M3, scaling=Scaling())
PLAIN = AttentionConfig(columns=16)
BLOCKS = dataclasses.replace(flash_attention_3(target=None, rotate=False), columns=16)
BLOCKS = dataclasses.replace(
    BLOCKS,
    **{name: dataclasses.replace(BLOCKS.q, scaling=Scaling(block=(16, None))) for name in "qk"},
    v=dataclasses.replace(BLOCKS.v, scaling=Scaling(block=(None, 16))),
)
HEADS = dataclasses.replace(flash_attention_3(target=None, rotate=False, blocks=False), columns=16)
EIGHT = dataclasses.replace(HEADS, dp=Gemm(a=ROWS, b=FORWARD), dq=Gemm(a=ROWS, b=FORWARD))


def inputs(dtype, heads=2, queries=40, keys=48, features=16):
    shapes = (heads, queries, 32), (heads, keys, 32), (heads, keys, features), (heads, queries, features)
    return [normal(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]


def run(config, q, k, v, g, **options):
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    y = quantised_attention(q, k, v, config=config, **options)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), g)]


def codes(x, name, block):
    """Return E4M3 or E5M2 values of each block of rows, and the scale of each row."""
    made, scales = [], []
    for part in x.float().split(block or len(x)):
        factor = torch.div(float(fmtsim.get_format(name).max), part.abs().amax())
        made.append(fmtsim.quantize(part * factor, name))
        scales.append(torch.reciprocal(factor).expand(len(part), 1))
    return torch.cat(made), torch.cat(scales)


def one_head(q, k, v, g, config, unit):
    """Return y, dq, dk and dv of a head; q, k and v in blocks of 16 rows, as wholes, or in high precision."""
    own, block, factor = q.dtype, {BLOCKS: 16, HEADS: None, EIGHT: None, PLAIN: 0}[config], q.shape[-1] ** -0.5
    wide = own if unit != "fp32_fma" else FP32

    def mm(a, b, dtype):
        if dtype in ("e4m3", "e5m2"):
            return fmtsim.mm(a, b.T, target=unit, formats=(dtype, "e4m3"), out_dtype=FP32)
        return fmtsim.mm(a.to(dtype), b.T.to(dtype), target=unit, out_dtype=FP32)

    ones = [torch.ones(len(t), 1) for t in (q, k, v)]
    (qc, qs), (kc, ks), (vc, vs) = (
        (t.float(), one) if block == 0 else codes(t, "e4m3", block) for t, one in zip((q, k, v), ones, strict=True)
    )
    fmt = wide if block == 0 else "e4m3"
    m, total, out, kept = (
        torch.full((len(q), 1), -math.inf),
        torch.zeros(len(q), 1),
        torch.zeros(len(q), v.shape[1]),
        [],
    )
    for j in reversed(range(0, len(k), 16)):
        part = slice(j, j + 16)
        t = mm(qc, kc[part], fmt) * ks[part].T * qs * (factor * 1.4426950408889634)
        new = torch.maximum(m, t.amax(1, keepdim=True))
        p = torch.exp2(t - (new - config.offset))
        rounded = p if block == 0 else fmtsim.quantize(p, "e4m3")
        shrink = torch.exp2(m - new)
        total, m = total * shrink + p.sum(1, keepdim=True), new
        out = out * shrink + mm(rounded, vc[part].T.contiguous(), fmt) * vs[j]
        kept.insert(0, (p, rounded, new))
    y = out / total
    weights, rounded = (torch.cat([each[i] * (torch.exp2(each[2] - m) / total) for each in kept], 1) for i in range(2))
    dv = mm(rounded.T.contiguous(), g.T.contiguous(), wide)
    if config == EIGHT:
        gc, gs = codes(g, "e5m2", 1)
        dp = mm(gc, vc, "e5m2") * vs.T * gs
    else:
        dp = mm(g, vc, wide) * vs.T
    ds = weights * (dp - (g.float() * y).sum(1, keepdim=True))
    if config == EIGHT:
        dc, ds_of = codes(ds, "e5m2", 1)
        dq = mm(dc, kc.T.contiguous(), "e5m2") * ks[0] * ds_of * factor
    elif block == 16:  # scales change along the sums: values
        dq = mm(ds, (kc * ks).T.contiguous(), wide) * factor
    else:
        dq = mm(ds, kc.T.contiguous(), wide) * ks[0] * factor
    if block == 16:
        dk = mm(ds.T.contiguous(), (qc * qs).T.contiguous(), wide) * factor
    else:
        dk = mm(ds.T.contiguous(), qc.T.contiguous(), wide) * qs[0] * factor
    return [t.to(own) for t in (y, dq, dk, dv)]


@pytest.mark.parametrize(
    ("machine", "unit", "dtype"),
    [({"target": "h200"}, "hopper.wgmma", BF16), ({"target": "b200"}, "blackwell.tcgen05", BF16),
     ({"target": "hopper.wgmma"}, "hopper.wgmma", FP16)],
)  # fmt: skip
@pytest.mark.parametrize("config", [BLOCKS, HEADS, EIGHT, PLAIN], ids=["blocks", "heads", "eight bits", "plain"])
def test_against_loops_over_heads(config, machine, unit, dtype):
    tensors = inputs(dtype)
    found = run(config.on(**machine), *tensors)
    for head in range(2):
        expected = one_head(*(t[head] for t in tensors), config, unit)
        for name, ours, theirs in zip(("y", "dq", "dk", "dv"), found, expected, strict=True):
            assert torch.equal(ours[head], theirs), name


def test_float32_and_a_datapath():
    """What no unit of 16 bits takes is a chain of float32 multiply-adds; a datapath takes everything."""
    tensors = inputs(FP32)
    found = run(PLAIN.on(target="h200"), *tensors)
    expected = one_head(*(t[1] for t in tensors), PLAIN, "fp32_fma")
    assert all(torch.equal(ours[1], theirs) for ours, theirs in zip(found, expected, strict=True))
    lns = Quantizer(format=fmtsim.get_format("lns8_channel"))
    chain = fmtsim.Datapath(block=1, fraction_bits=None, rounding=fmtsim.Rounding())
    config = AttentionConfig(q=lns, k=lns, columns=16)
    AttentionConfig(v=Quantizer(format=INT8)).on(
        target="hopper.wgmma"
    )  # beside high precision its values are multiplied
    for a, b in zip(run(config.on(target=chain), *tensors), run(config, *tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_gradients_multiply_where_their_gemms_say():
    tensors = inputs(BF16)
    base = HEADS.on(target="hopper.wgmma")
    alone = dataclasses.replace(HEADS, target="hopper.wgmma")  # gradients in float32
    first, second = run(base, *tensors), run(alone, *tensors)
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])
    only = dataclasses.replace(HEADS, dv=Gemm(a=FORWARD, target="hopper.wgmma"))
    third = run(only, *tensors)
    assert not torch.equal(third[3], run(HEADS, *tensors)[3]) and torch.equal(third[2], run(HEADS, *tensors)[2])


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: BLOCKS.on(target="a100"), ArgumentError,
         "AttentionConfig s: target a100 has no unit for e4m3 x e4m3 .*targets that do: .*h200"),
        (lambda: HEADS.on(target="ampere.mma"), ArgumentError, "AttentionConfig s: .*ampere.mma.*e4m3"),
        (lambda: AttentionConfig(v=Quantizer(format=INT8), p=WHOLE, target="hopper.wgmma"), FormatError,
         "AttentionConfig o: hopper.wgmma multiplies elements of floating-point formats, and v is int8; choose"),
        (lambda: AttentionConfig(dv=Gemm(a=FORWARD, target="blackwell.tcgen05.mxf8f6f4")), ArgumentError,
         "AttentionConfig dv: dv.p is in high precision, and blackwell.tcgen05.mxf8f6f4 multiplies neither 16-bit"),
        (lambda: AttentionConfig(q=Quantizer(format=NVFP4), k=WHOLE, target="hopper.wgmma"), ArgumentError,
         r"AttentionConfig s: q has two levels of scales \(nvfp4\); choose one, or leave target= out"),
        (lambda: AttentionConfig(q=WHOLE, k=WHOLE, dp=Gemm(a=WHOLE, b=FORWARD, target="volta.mma"), v=WHOLE),
         ArgumentError, "AttentionConfig dp: .*volta.mma.*e4m3"),
    ],
)  # fmt: skip
def test_operands_that_a_unit_does_not_take(make, error, said):
    refused(said, make, error=error)


def test_sizes_and_dtypes_are_looked_at_before_anything_runs():
    tensors = inputs(BF16)
    narrow = dataclasses.replace(WHOLE, scaling=Scaling(block=(1, 8)))
    for config, said in (
        (dataclasses.replace(HEADS, target="hopper.wgmma", q=narrow),
         "AttentionConfig q: one scale for 8 of 32 numbers changes inside the sums of s; choose blocks of whole rows"),
        (dataclasses.replace(BLOCKS, columns=24, target="hopper.wgmma"), "AttentionConfig v: one scale for 16 of 48 "),
        (dataclasses.replace(BLOCKS, dk=Gemm(a=ROWS, b=FORWARD)).on(target="h200"),
         "AttentionConfig dk.q: one scale for 16 of 40 numbers changes inside the sums of dk"),
        (PLAIN.on(target="volta.mma"),
         "AttentionConfig q is in high precision, and 'volta.mma' does not multiply torch.bfloat16; pass tensors of"),
    ):  # fmt: skip
        state = torch.get_rng_state()
        refused(said, quantised_attention, *tensors[:3], config=config)
        assert torch.equal(state, torch.get_rng_state())


def test_models_take_machines():
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    grads = []
    for how in ({"target": "h200"}, {"target": "hopper.wgmma"}, {"target": fmtsim.Datapath(block=8, fraction_bits=16)}):
        model = convert_attention(gpt(), HEADS, generator=1, **how)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        grads.append(model.blocks[0].attention.qkv.weight.grad)
    assert torch.equal(grads[0], grads[1]) and not torch.equal(grads[0], grads[2])
    model = gpt()
    refused("target a100 has no unit", convert_attention, model, HEADS, target="a100")
    with pytest.raises(ArgumentError, match=r"s: target='h200' is a GPU with its library, .* call AttentionConfig.on"):
        dataclasses.replace(HEADS, target="h200")
    with pytest.raises(ArgumentError, match="recipe fa3: AttentionConfig s: target a100 has no unit"):
        fmtsim.convert(model, recipe="fa3", target="a100")
    assert "forward" not in model.blocks[0].attention.__dict__


def test_the_text_says_what_runs_where():
    assert str(HEADS.on(target="h200")).endswith("on hopper.wgmma; gradients in high precision on hopper.wgmma")
    assert str(EIGHT.on(target="hopper.wgmma")).endswith(
        "dq of e5m2, [amax of each row] with the forward codes on hopper.wgmma; "
        "other gradients in high precision on hopper.wgmma"
    )
    assert "gradients in high precision on blackwell.tcgen05" in str(get_recipe("fa3").on(target="b200"))
    only = dataclasses.replace(HEADS, dv=Gemm(a=FORWARD, target="hopper.wgmma"))
    assert str(only).endswith("gradients in high precision, dv on hopper.wgmma")
