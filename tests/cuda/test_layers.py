# SPDX-License-Identifier: Apache-2.0
"""Layers on a card: operands by fused kernels, outer scales, keys that are counted there; on the host and on a GPU."""

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim import EmulatedGEMM, get_format, quantize
from fmtsim.casts.ops import load_engine
from fmtsim.cuda.cast import scaled_operands, warp_hadamard
from fmtsim.gemm.layers import multiply
from fmtsim.gemm.layers.compile import quantizer_digest
from fmtsim.gemm.layers.config import Gemm, LinearConfig, linear_config
from fmtsim.gemm.layers.emulated_gemm import run_layer
from fmtsim.gemm.layers.keys import SIGNS, Layer, random_stream
from fmtsim.gemm.layers.quantize_operand import has_both, quantize_both, quantize_operand
from fmtsim.recipes import get_recipe
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.history import DelayedScale
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Keys
from fmtsim.spec.quantizer import Hadamard, Quantizer, StraightThrough
from tests.cuda.emulated_gpu import drawn, take_for_host
from tests.support.bits import assert_same_bits
from tests.support.operands import bfloat16s, normal

SHAPE = (96, 64)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "nvfp4", "e4m3"])
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_operands_are_those_of_quantize(name, rounding, on_card):
    x, fmt = bfloat16s(*SHAPE, device=on_card), get_format(name)
    quantizer = Quantizer(format=fmt, rounding=Rounding(mode=rounding))
    seed = 5 if rounding == "stochastic" else None
    keys = Keys() if seed is None else Keys(RandomKey(seed))
    for dim in (-1, 0):
        made = quantize_operand(x, quantizer, keys, dim=dim, folded=True)
        expected = quantize(x, fmt, rounding=rounding, dim=dim, generator=seed, out_dtype=torch.float32)
        assert made.elements.dtype == torch.bfloat16 and made.scale is None
        assert (made.tensor_scale is None) == (name != "nvfp4")
        assert_same_bits(made.values(torch.float32), expected if dim == -1 else expected.mT)
    assert has_both(x, quantizer) == (name != "e4m3")
    if name != "e4m3":
        for found, dim in zip(quantize_both(x, quantizer, *[keys.elements] * 2), (-1, 0), strict=True):
            assert_same_bits(found.elements, quantize_operand(x, quantizer, keys, dim=dim, folded=True).elements)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [None, "fp16", "e4m3"])
def test_what_bfloat16_does_not_hold_stays_wide(name, dtype, on_card):
    x = bfloat16s(*SHAPE, device=on_card).to(dtype)
    fmt = None if name is None else get_format(name)
    made = quantize_operand(x, Quantizer(format=fmt), folded=True)
    wide = dtype if name is None else torch.promote_types(dtype, torch.float32)
    assert made.elements.dtype == (torch.bfloat16 if name == "e4m3" and dtype != torch.float64 else wide)


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize(
    ("recipe", "name", "narrows"),
    [
        ("te_current", "w_f", True), ("te_mxfp8", "x_f", True), ("te_nvfp4", "x_f", True), ("quartet", "x_f", True),
        ("deepseek_v3", "x_f", True), ("deepseek_v3", "w_f", True), ("ao_rowwise", "w_f", True),
        ("int8_mixed", "x_f", True), ("halo0", "w_f", True), ("bitnet", "x_f", True), ("bitnet", "w_f", False),
        ("te_nvfp4", "w_f", False), ("te_nvfp4", "g_d", False),
    ],
)  # fmt: skip
def test_kernels_read_float32_as_what_it_becomes_in_bfloat16(recipe, name, narrows, dim, on_card):
    quantizer = get_recipe(recipe).linear.operands[name]
    x = normal(128, 256, seed=3)
    x[0, :8] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40, -3.4e38, 1.00390625, 1.01171875, 2.0**-134])
    for there in (x.to(on_card), normal(128, 256, seed=4, device=on_card) * 2.0**-40):
        if load_engine("cuda").narrows(there, quantizer, dim, True) is not narrows:
            assert dim == 0 and quantizer.gradient != StraightThrough()  # masks lie along rows alone
        keys = Keys(RandomKey(5)) if quantizer.is_stochastic else Keys()
        found = quantize_operand(there, quantizer, keys, dim=dim, folded=True, narrow=True)
        wanted = quantize_operand(there.to(torch.bfloat16), quantizer, keys, dim=dim, folded=True)
        for part in ("elements", "scale", "tensor_scale", "slope"):
            one, other = getattr(found, part), getattr(wanted, part)
            assert (one is None) == (other is None)
            if one is not None:
                assert one.stride() == other.stride()
                assert_same_bits(one.isnan(), other.isnan())
                assert_same_bits(one.nan_to_num(0.5), other.nan_to_num(0.5))  # a host's NaN has other bits than a GPU's


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11's tracer takes no frozen record for a constant")
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "e4m3"])
@pytest.mark.filterwarnings("ignore")  # of the compiler and of autograd
def test_compiled_layers_have_the_bits_of_eager_ones(name, rounding, on_card):
    config = linear_config(x=name, w=name, g=name, grad_rounding=rounding)
    x, w, g = (bfloat16s(*size, seed=i, device=on_card) for i, size in enumerate(((96, 64), (128, 64), (96, 128))))
    leaves = x.requires_grad_(), w.requires_grad_()

    def run(x, w):
        return EmulatedGEMM.apply(x, w, None, config, 7)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="inductor" if on_card.type == "cuda" else "aot_eager")
    expected, found = ([y := f(*leaves), *torch.autograd.grad(y, leaves, g)] for f in (run, compiled))
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)


SLOW = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler and of autograd


def step(layer, x, w, g):
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = run_layer(x, w, None, layer)
    return (y.detach(), *torch.autograd.grad(y, (x, w), g))


def values_of(x, config, name, turned, draws):
    """The operand's values_of by torch operations alone, in float32."""
    quantizer = config.operands[name]
    made = quantize_operand(x.cpu().mT if turned else x.cpu(), quantizer, draws)
    return made.values(torch.float32)


def seeded(seed, name, config, count=0):
    index = list(config.operands).index(name)
    keys = (RandomKey(random_stream(seed, i), count) for i in (index, 12 + index, SIGNS + (name not in ("x_f", "w_f"))))
    return Keys(*keys)


@pytest.mark.parametrize("name", ["te_nvfp4", pytest.param("quartet", marks=SLOW)])
def test_compiled_layers_count_their_keys_on_the_card(name, on_card):
    """Every pass has its own keys, made of the layer's seed and the pass's number; products are those of the values."""
    config = get_recipe(name).linear
    layer = Layer(config, torch.Generator().manual_seed(9))
    x, w, g = (bfloat16s(*size, seed=i, device=on_card) for i, size in enumerate(((128, 128), (256, 128), (128, 256))))
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: run_layer(*t, None, layer), fullgraph=True, backend="aot_eager")

    def run():
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(compiled(*leaves), leaves, g)

    passes = [run() for _ in range(3)]
    assert not any(torch.equal(a, b) for a, b in zip(passes[1], passes[2], strict=True))
    count = int(layer.counter(x.device))
    assert count == 3  # backward passes: nothing is drawn forwards
    if name == "te_nvfp4":
        g_d = values_of(g, config, "g_d", False, seeded(layer.seed, "g_d", config, count))
        w_f = values_of(w, config, "w_f", False, Keys())
        torch.testing.assert_close(passes[2][0].float().cpu(), g_d @ w_f, rtol=1e-2, atol=1e-1)  # rounded to bfloat16
        other = values_of(g, config, "g_d", False, seeded(layer.seed, "g_d", config, count - 1)) @ w_f
        assert not torch.allclose(passes[2][0].float().cpu(), other, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("name", ["te_nvfp4", "quartet", "mxfp4", pytest.param("quartet2", marks=SLOW)])
def test_operands_of_a_pass_are_those_that_are_drawn_one_by_one(name, on_card):
    layer, asked, run = drawn(name, on_card)
    run()  # the first pass
    for each, made in zip(asked, run(), strict=True):
        keys, quantizer = seeded(layer.seed, each.name, layer.config, 2), layer.quantizers[each.name]
        alone = quantize_operand(each.t, quantizer, keys, dim=each.dim, folded=True, factor=each.factor)
        assert made.scale is alone.scale is made.slope is alone.slope is None
        assert made.elements.stride() == alone.elements.stride()
        assert_same_bits(made.elements, alone.elements)
        assert (made.tensor_scale is None) == (alone.tensor_scale is None)
        if made.tensor_scale is not None:
            assert_same_bits(made.tensor_scale, alone.tensor_scale)


def test_draws_of_another_pass_are_seen(on_card, monkeypatch):
    """The planted error: keys that are those of the first pass in every pass."""
    monkeypatch.setattr(Layer, "counter", lambda self, device: torch.ones((), dtype=torch.int64, device=device))
    with pytest.raises(AssertionError):
        test_operands_of_a_pass_are_those_that_are_drawn_one_by_one("te_nvfp4", on_card)


@pytest.mark.parametrize("name", ["te_nvfp4", pytest.param("quartet", marks=SLOW)])
def test_a_gradient_that_is_alone_is_the_same(name, on_card):
    """Its random words depend on the number of the pass, not on what else is drawn in it."""
    layer = Layer(get_recipe(name).linear, torch.Generator().manual_seed(9))
    x, w, g = (bfloat16s(*size, seed=i, device=on_card) for i, size in enumerate(((128, 128), (256, 128), (128, 256))))
    compiled = torch.compile(lambda *t: run_layer(*t, None, layer), fullgraph=True, backend="aot_eager")

    def gradients(of_x, of_w):
        torch._dynamo.reset()
        layer.counter(x.device).zero_()
        leaves = x.detach().requires_grad_(of_x), w.detach().requires_grad_(of_w)
        return torch.autograd.grad(compiled(*leaves), [t for t in leaves if t.requires_grad], g)

    dx, dw = gradients(True, True)
    assert_same_bits(*gradients(True, False), dx)
    assert_same_bits(*gradients(False, True), dw)


def test_operands_of_a_forward_pass_have_the_same_signs(on_card):
    """Rotations of both operands cancel, and the next pass has other ones."""
    turned = Quantizer(format="mxfp8_e4m3", transforms=(Hadamard(size=32, signs="random"),))
    config = LinearConfig(fprop=Gemm(a=turned, b=turned))
    layer = Layer(config, torch.Generator().manual_seed(9))
    x, w = (bfloat16s(*size, seed=i, device=on_card) for i, size in enumerate(((128, 128), (256, 128))))
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: run_layer(*t, None, layer), fullgraph=True, backend="aot_eager")
    found = compiled(x, w), compiled(x, w)
    assert int(layer.counter(x.device)) == 2 and not torch.equal(*found)
    for y in found:
        off = (y.float() - x.float() @ w.float().mT).norm() / y.float().norm()
        assert off < 0.06  # two roundings of 4 significant bits; signs that differ give 1.4


def test_gradients_are_scaled_and_turned_back_in_one_step(on_card, monkeypatch):
    """Observed products are scaled by themselves: the same bits, which a scale that is left out is not among."""
    layer = Layer(get_recipe("quartet").linear, 3)
    x, w, g = (bfloat16s(*size, seed=i, device=on_card) for i, size in enumerate(((64, 128), (192, 128), (64, 192))))

    def gradients(observer=None):
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(run_layer(*leaves, None, layer, observer), leaves, g)

    apart = gradients(lambda *_: None)
    for one, other in zip(gradients(), apart, strict=True):
        assert_same_bits(one, other)
    finish = warp_hadamard.finish_rotated
    monkeypatch.setattr(warp_hadamard, "finish_rotated", lambda *given: finish(*given[:-1], (given[-1][0], None)))
    assert not any(torch.equal(one, other) for one, other in zip(gradients(), apart, strict=True))


def test_each_tensor_of_a_batch_counts_as_a_pass(on_card):
    layer, asked, run = drawn("quartet", on_card)
    names, (g, *others), dims, factors = (list(each) for each in zip(*asked, strict=True))
    rest = factors, dims, names, [quantizer_digest(layer.quantizers[name]) for name in names]
    run_operator, batched = torch.ops.fmtsim.draw_operands, g[None].repeat(2, 1, 1)
    given = layer.name, [g, *others], *rest
    torch.library.opcheck(run_operator, given, test_utils=("test_schema", "test_faketensor"))
    layer.counter(batched.device).zero_()
    found = torch.vmap(lambda g: run_operator(layer.name, [g, *others], *rest))(batched)
    layer.counter(batched.device).zero_()
    for expected, each in zip((run(), run()), range(2), strict=True):
        for made, parts in zip(expected, found, strict=True):
            assert_same_bits(parts[each], made.elements)


@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("te_block", marks=SLOW)])
def test_blocks_of_128_are_cast_with_fewer_reads(name, on_card, monkeypatch):
    """Gradients along both axes at once, elements that are quantised again with their scales: the same bits."""
    config = get_recipe(name).linear
    x, w, g = (bfloat16s(*size, seed=i, device=on_card) for i, size in enumerate(((256, 128), (136, 128), (256, 136))))

    layer = Layer(config, None)

    def run(x, w):
        return run_layer(x, w, None, layer)

    def steps(run):
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(run(*leaves), leaves, g)

    torch._dynamo.reset()
    at_once = [steps(run), steps(torch.compile(run, fullgraph=True, backend="aot_eager"))]
    monkeypatch.setattr(scaled_operands, "covers_both", lambda *_: False)
    apart = steps(run)
    for made in at_once:
        for one, other in zip(made, apart, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize(
    "name", ["te_delayed", pytest.param("te_current", marks=SLOW), pytest.param("te_block", marks=SLOW)]
)
def test_kernels_serve_layers_and_remember(name, on_card):
    """Three steps have the numbers of layers without kernels, to the order of float32 sums; delayed scales move."""
    config = get_recipe(name).linear
    x, w, g = (bfloat16s(*size, seed=i) for i, size in enumerate(((128, 256), (128, 256), (128, 128))))

    def memory(device):
        quantizers = {key: q for key, q in config.operands.items() if q.scaling is not None and q.scaling.history}
        return {key: DelayedScale(q).to(device) for key, q in quantizers.items()}

    layers = Layer(config, None, memory(on_card)), Layer(config, None, memory("cpu"))
    for i in range(3):
        found = step(layers[0], *(t.to(on_card) * 2**i for t in (x, w, g)))
        with pytest.MonkeyPatch.context() as patch:
            take_for_host(patch)
            wanted = step(layers[1], *(t * 2**i for t in (x, w, g)))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.cpu().float(), b.float(), rtol=2**-7, atol=float(b.abs().max()) * 2**-8)
    for key, remembered in layers[0].state.items():
        assert torch.equal(remembered.amaxes.cpu(), layers[1].state[key].amaxes)
        assert int(remembered.calls) == 3


def test_a_converted_model_learns_its_scales_on_the_card(on_card):
    model = fmtsim.convert(nn.Sequential(nn.Linear(128, 128, bias=False)).to(on_card).bfloat16(), recipe="te_delayed")
    model(bfloat16s(128, 128, device=on_card)).float().sum().backward()
    state = fmtsim.state(model)["layers"]["0"]
    assert all(int(memory["calls"]) == 1 and float(memory["amaxes"][0]) > 0 for memory in state.values())


def gradients(run, model, x):
    model.zero_grad(set_to_none=True)
    run(x).float().square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", ["te_nvfp4_all", "quartet", "quartet2", "intel_2t"])
def test_replayed_graphs_draw_anew_gpu(name):
    """Gradients of replays of one CUDA graph lie as far apart as those of eager steps, and no two are equal."""
    if not fmtsim.cuda.available():
        pytest.skip("needs a GPU")

    def model():
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to("cuda", torch.bfloat16)
        return fmtsim.convert(made, recipe=name, generator=1, total_steps=100)

    def distances(steps):
        return [float((a - b).norm() / b.norm()) for i, a in enumerate(steps) for b in steps[:i]]

    x, eager, traced_model = bfloat16s(128, 256, device="cuda"), model(), model()
    torch._dynamo.reset()
    compiled = torch.compile(traced_model, mode="reduce-overhead")
    # compiled code first, which then makes what casts keep; its first runs record the graph
    found = distances([gradients(compiled, traced_model, x) for _ in range(8)][-4:])
    wanted = distances([gradients(eager, eager, x) for _ in range(4)])
    assert min(found) > 0
    assert sum(found) == pytest.approx(sum(wanted), rel=0.1)  # six distances, which scatter by about 2 %


def test_kernels_cast_twice(on_card, monkeypatch):
    """DeepSeek-V3's inputs behind attention, kept in E5M6 and cast again: two launches, the same bits."""
    quantizer = get_recipe("deepseek_v3").rules[2].use.wgrad.b
    x = bfloat16s(128, 256, seed=5)
    calls, real = [], scaled_operands.cast_scaled
    monkeypatch.setattr(scaled_operands, "cast_scaled", lambda *given: calls.append(given) or real(*given))
    made = quantize_operand(x.to(on_card).mT, quantizer, Keys(), folded=True)
    assert len(calls) == 2 and made.scale is None and calls[1][0].dtype == torch.bfloat16
    with pytest.MonkeyPatch.context() as patch:
        take_for_host(patch)
        wanted = quantize_operand(x.mT, quantizer, Keys())
    assert torch.equal(made.values(torch.float32).cpu(), wanted.values(torch.float32))
    assert made.quantizer is quantizer and len(calls) == 2


@pytest.mark.parametrize(
    ("name", "shape"), [("int8_mixed", (17, 40, 24)), ("int8_mixed", (64, 96, 80)), ("halo2", (32, 64, 32))]
)
def test_layers_of_integers_have_the_bits_of_float64(name, shape, on_card, monkeypatch):
    """Forward and backward: by a GPU's int8 units, and by products in float64."""
    (m, k, n), calls, made, int_mm = shape, [], [], torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda *x: calls.append(x) or int_mm(*x))
    layer = Layer(get_recipe(name).linear)
    for units in (True, False):
        if not units:
            monkeypatch.setattr(multiply, "is_on_gpu", lambda t: False)
        x, w, g = (bfloat16s(*size, seed=i, device=on_card) for i, size in enumerate(((m, k), (n, k), (m, n))))
        y = run_layer(x.requires_grad_(), w.requires_grad_(), None, layer)
        made.append([y.detach(), *torch.autograd.grad(y, (x, w), g)])
        assert len(calls) == 3
    for one, other in zip(*made, strict=True):
        assert_same_bits(one, other)
