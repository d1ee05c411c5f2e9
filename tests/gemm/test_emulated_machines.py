# SPDX-License-Identifier: Apache-2.0
"""EmulatedGEMM on machines: each of its products has every bit of the public call on the same operands."""

from dataclasses import replace

import pytest
import torch

import fmtsim
from fmtsim import Datapath, EmulatedGEMM, Gemm, GemmPlan, LinearConfig, Quantizer, get_format, linear_config
from fmtsim.formats.block import scaled
from fmtsim.gemm.products import resolver
from fmtsim.recipes import get_recipe
from tests.gemm import layer_oracle
from tests.support.bits import assert_same_bits
from tests.support.operands import normal

pytestmark = pytest.mark.filterwarnings("ignore::fmtsim.support.errors.PlanUnknownWarning")  # a guess serves here
T, K, N = 64, 160, 48
SIZES = (T, K, N)


def tensors(dtype=torch.float32, sizes=SIZES, scale=1.0):
    t, k, n = sizes
    x, w, g = normal(t, k, seed=1) * scale, normal(n, k, seed=2), normal(t, n, seed=3) * 1e-3
    return [v.to(dtype) for v in (x, w, normal(n, seed=4), g)]


def run(x, w, bias, g, config, generator=None):
    given = [t.detach().clone().requires_grad_() for t in (x, w) + (() if bias is None else (bias,))]
    y = EmulatedGEMM.apply(*given[:2], given[2] if bias is not None else None, config, generator)
    return [y.detach(), *torch.autograd.grad(y, given, g)]


def config(x, w=None, g=None, **machine):
    return linear_config(x=x, w=w or x, g=g or x, **machine)


def calls_of(function, *arguments):
    """Return what a function returns, and the calls of a library or unit that it made."""
    calls, resolve = [], resolver.resolve
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolver, "resolve", lambda call: calls.append(call) or resolve(call))
        return function(*arguments), calls


def check(config, dtype=torch.float32, sizes=SIZES, bias=False):
    """Fail unless forward and both gradients are the public calls, seen by the library as it sees those."""
    x, w, added, g = tensors(dtype, sizes)
    added = added if bias else None
    got, calls = calls_of(run, x, w, added, g, config)
    expected, public = calls_of(layer_oracle.layer, x, w, added, g, config)
    for one, other in zip(got[:3], expected, strict=True):
        assert_same_bits(one, other)
    assert len(calls) == 3
    for call, other in zip(calls, public, strict=True):
        if call.target in fmtsim.list_targets():
            same = {} if call.operation == "scaled_mm" else {"operation": "mm", "fast_accum": False}
            assert replace(call.facts(), **same) == replace(other.facts(), **same)


def row(name):
    return scaled(get_format(name), (1, None))


UNITS = {
    "bf16": config("bf16", target="hopper.wgmma"),
    "fp16": config("fp16", target="ampere.mma"),
    "tf32": config("tf32", target="hopper.wgmma"),
    "fp32": config("fp32", target="fp32_fma"),
    "high precision": config(None, target="fp32_fma"),
    "e4m3": config("e4m3", target="hopper.wgmma"),
    "e4m3 and e5m2": config("e4m3", g="e5m2", target="hopper.mma"),
    "tensor": config("e4m3_tensor", g="e5m2_tensor", target="hopper.wgmma"),
    "rows": config(row("e4m3"), g=row("e5m2"), target="ada.mma"),
    "one of two": config("e4m3_tensor", "e4m3", "e5m2", target="hopper.wgmma"),
    "the other": config("e4m3", "e4m3_tensor", "e5m2_tensor", target="hopper.wgmma"),
    "blocks": config("e4m3_1x128", "e4m3_128x128", target="hopper.wgmma"),
    "blocks by powers of two": config("e4m3_1x128_pow2", "e4m3_128x128_pow2", target="hopper.wgmma"),
    "e2m1": config("e2m1", target="blackwell.tcgen05"),
    "e3m2 row": config(row("e3m2"), row("e2m1"), row("e5m2"), target="rtx_blackwell.mma"),
    "mxfp8": config("mxfp8_e4m3", g="mxfp8_e5m2", target="blackwell.tcgen05.mxf8f6f4"),
    "mxfp6 and mxfp4": config("mxfp6_e2m3", "mxfp4", "mxfp6_e3m2", target="blackwell.tcgen05.mxf8f6f4"),
    "mxfp4": config("mxfp4", target="blackwell.tcgen05.mxf4"),
    "nvfp4": config("nvfp4", target="blackwell.tcgen05.nvf4"),
    "nvfp4 squares": config("nvfp4", "nvfp4_16x16", target="blackwell.tcgen05.nvf4"),
    "nvfp4 of rows": config("nvfp4_row", g="nvfp4_per_token", target="blackwell.tcgen05.nvf4"),
    "nvfp4 of one's rows": config("nvfp4_row", "nvfp4", target="blackwell.tcgen05.nvf4"),
    "nvfp4 of the other's": config("nvfp4", "nvfp4_row", target="blackwell.tcgen05.nvf4"),
    "fnuz": config("e4m3fnuz", g="e5m2fnuz", target="cdna3.mfma"),
    "pairs": config("bf16", target="cdna2.mfma"),
    "exact": config("e3m4", target="exact"),
    "my own": config("e5m2", target=Datapath(block=12, fraction_bits=9, accumulator="bf16", rounding="nearest_even")),
}  # fmt: skip
TARGETS = {
    "bf16": config("bf16", target="h200"),
    "fp16": config("fp16", target="h200"),
    "tf32": config("tf32", target="h200"),
    "fp32": config("fp32", target="h200"),
    "e4m3": config("e4m3", g="e5m2", target="h200"),
    "tensor": config("e4m3_tensor", g="e5m2_tensor", target="h200"),
    "tensor fast": config("e4m3_tensor", g="e5m2_tensor", target="h200", fast_accum=True),
    "rows": config(row("e4m3"), g=row("e5m2"), target="h200", fast_accum=True),
    "one of two": config("e4m3_tensor", "e4m3", "e5m2", target="h200"),
    "blocks": config("e4m3_1x128", "e4m3_128x128", target="h200"),
    "mxfp8": config("mxfp8_e4m3", g="mxfp8_e5m2", target="chain"),
    "nvfp4": config("nvfp4", target="chain"),
    "nvfp4 of rows": config("nvfp4_row", "nvfp4", target="b200"),
}


@pytest.mark.parametrize("name", UNITS)
def test_products_on_units(name):
    check(UNITS[name])


@pytest.mark.parametrize("name", TARGETS)
def test_products_on_targets(name):
    check(TARGETS[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("machine", [{"target": "hopper.wgmma"}, {"target": "h200"}], ids=["unit", "target"])
def test_products_of_halves_with_a_bias(dtype, machine):
    x, w, bias, g = tensors(dtype)
    for name in ("bf16" if dtype == torch.bfloat16 else "fp16", "e4m3_tensor", None):
        c = config(name, **machine)
        got = run(x, w, bias, g, c)
        for one, expected in zip(got, layer_oracle.layer(x, w, bias, g, c), strict=False):
            assert_same_bits(one, expected)
        assert_same_bits(got[3], g.sum(0, dtype=torch.float32).to(dtype))


@pytest.mark.parametrize("name", ["e4m3", "tensor fast", "rows", "one of two", "blocks", "mxfp8", "nvfp4"])
def test_sizes_that_a_library_refuses_are_padded_with_zeros(name):
    x, w, bias, g = tensors(torch.float32, (21, 40, 34))
    pads = {"x": (0, 8, 0, 11), "w": (0, 8, 0, 14), "g": (0, 14, 0, 11)}
    whole = [torch.nn.functional.pad(t, pads[which]) for which, t in (("x", x), ("w", w), ("g", g))]
    for added in (None, bias):
        more = None if added is None else torch.nn.functional.pad(added, (0, 14))
        got = run(x, w, added, g, TARGETS[name])
        expected = run(whole[0], whole[1], more, whole[2], TARGETS[name])
        for one, other in zip(got[:3], expected, strict=False):
            assert one.is_contiguous()
            assert_same_bits(one, other[: one.shape[0], : one.shape[1]])


@pytest.mark.parametrize("name", ["te_current", "ao_rowwise", "deepseek_v3", "int8_mixed"])
@pytest.mark.parametrize("sizes", [(0, 128, 128), (128, 0, 128), (128, 128, 0), (0, 0, 0)])
def test_empty_operands_have_no_scales_and_zeros_for_a_product(name, sizes):
    m, n, k = sizes
    x, w, bias = torch.zeros(m, k, requires_grad=True), torch.zeros(n, k, requires_grad=True), torch.ones(n)
    y = fmtsim.EmulatedGEMM.apply(x, w, bias, get_recipe(name).linear.on(target="h200"))
    y.sum().backward()
    assert torch.equal(y, torch.ones(m, n))
    assert not x.grad.any() and not w.grad.any()


def test_ragged_sizes_and_several_batch_dimensions_on_a_unit():
    for name in ("bf16", "tensor", "mxfp8", "nvfp4", "nvfp4 of rows", "blocks"):
        check(UNITS[name], sizes=(21, 40, 34))
    x, w, bias, g = tensors()
    flat = run(x, w, bias, g, UNITS["tensor"])
    deep = run(x.view(4, 16, K), w, bias, g.view(4, 16, N), UNITS["tensor"])
    assert_same_bits(deep[0].view(T, N), flat[0])
    assert_same_bits(deep[1].view(T, K), flat[1])
    assert_same_bits(deep[2], flat[2])


def test_float32_results_get_their_bias_in_float32():
    x, w, bias, g = tensors()
    for c in (TARGETS["bf16"], TARGETS["tensor"], UNITS["bf16"], UNITS["tensor"]):
        assert_same_bits(run(x, w, bias, g, c)[0], layer_oracle.layer(x, w, None, g, c)[0] + bias)
    exact = config(None, target="exact")
    assert_same_bits(run(x, w, bias, g, exact)[0], fmtsim.linear(x, w, bias, target="exact"))
    assert_same_bits(run(x, w, bias, g, TARGETS["fp32"])[0], fmtsim.linear(x, w, bias, target="h200"))


def test_what_a_library_does_not_write_is_rounded_from_its_float32_result():
    halves, doubles = tensors(torch.float16), tensors(torch.float64)
    x, w, bias, g = halves
    y = layer_oracle.layer(x, w, None, g, TARGETS["bf16"], torch.float32)[0]
    assert_same_bits(run(*halves, TARGETS["bf16"])[0], (y + bias.float()).half())  # torch has no bf16 x bf16 -> fp16
    x, w, bias, g = doubles
    y = layer_oracle.layer(x, w, None, g, TARGETS["tensor"], torch.float32)[0]
    assert_same_bits(run(*doubles, TARGETS["tensor"])[0], (y + bias.float()).double())


def test_every_product_has_a_machine_quantisers_plan_and_output_of_its_own():
    x, w, _, g = tensors()
    tensor = [Quantizer(format=get_format(f)) for f in ("e4m3_tensor", "e5m2_tensor", "bf16")]
    c = LinearConfig(
        fprop=Gemm(a=tensor[0], b=tensor[0], target="hopper.wgmma", plan=GemmPlan(promote_every=64)),
        dgrad=Gemm(a=tensor[1], b=tensor[0], target="h200", fast_accum=True, out=tensor[2]),
        wgrad=Gemm(a=tensor[2], b=tensor[2], target=Datapath(block=4), plan=GemmPlan(k_tile=16, split=2)),
    )
    y, dx, dw = run(x, w, None, g, c)
    expected = layer_oracle.layer(x, w, None, g, replace(c, dgrad=replace(c.dgrad, out=Quantizer())))
    assert_same_bits(y, expected[0])
    assert_same_bits(dw, expected[2])
    assert_same_bits(dx, layer_oracle.product(g, w.mT, c.dgrad, torch.bfloat16).float())
    assert not torch.equal(dx, expected[1])
    chain = replace(c, fprop=replace(c.fprop, plan=None))
    assert not torch.equal(run(x, w, None, g, chain)[0], y)


@pytest.mark.parametrize("machine", [{"target": "hopper.wgmma"}, {"target": "h200"}, {}], ids=["unit", "gpu", "none"])
def test_outputs_are_rounded_to_their_own_format(machine):
    x, w, bias, g = tensors()
    q = Quantizer(format=get_format("e4m3_tensor"))
    base = Gemm(a=q, b=q, **machine)
    wide = run(x, w, bias, g, LinearConfig(fprop=base))[0]

    def y(**out):
        return run(x, w, bias, g, LinearConfig(fprop=replace(base, out=Quantizer(**out))), 7)[0]

    for name in ("bf16", "fp16", "e4m3", "e2m3", "int8", "mxfp4", "e5m2", "tf32"):
        fmt = get_format(name)
        if name != "e5m2" or "target" not in machine:  # cuBLAS has no such output for e4m3 x e4m3
            assert_same_bits(y(format=fmt), fmtsim.quantize(wide, fmt, pad=True, out_dtype=torch.float32))
    assert_same_bits(y(format=get_format("e5m2"), overflow="ieee"), fmtsim.quantize(wide, "e5m2", overflow="ieee"))
    down = fmtsim.Rounding(mode="down")
    assert_same_bits(y(format=get_format("bf16"), rounding=down), fmtsim.quantize(wide, "bf16", rounding="down"))
    drawn = Quantizer(format=get_format("e4m3"), rounding=fmtsim.Rounding(mode="stochastic"))
    first = y(format=drawn.format, rounding=drawn.rounding)
    assert_same_bits(first, y(format=drawn.format, rounding=drawn.rounding))
    grid = fmtsim.quantize(first, "e4m3")
    assert_same_bits(first, grid)
    assert 0 < (first != fmtsim.quantize(wide, "e4m3")).sum() < first.numel()


STOCHASTIC = Datapath(block=8, fraction_bits=12, accumulator="e5m6", rounding="stochastic")


DRAWING = {
    "sums": config("bf16", target=STOCHASTIC),
    "operands": linear_config(x="e4m3", w="e4m3", g="e5m2", rounding="stochastic", grad_rounding="stochastic"),
}


@pytest.mark.parametrize("name", DRAWING)
def test_stochastic_products_repeat_from_a_seed_and_from_a_generator(name):
    (x, w, _, g), c = tensors(), DRAWING[name]
    state = torch.get_rng_state()
    for make in (lambda: 7, lambda: torch.Generator().manual_seed(7)):
        first, second = run(x, w, None, g, c, make()), run(x, w, None, g, c, make())
        for one, two in zip(first, second, strict=True):
            assert_same_bits(one, two)
    other = run(x, w, None, g, c, 8)
    assert all(not torch.equal(p, q) for p, q in zip(first, other, strict=True))
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(7)
    drawn = [run(x, w, None, g, c)[0] for _ in range(2)]
    assert not torch.equal(*drawn)
    torch.manual_seed(7)
    assert_same_bits(run(x, w, None, g, c)[0], drawn[0])


def test_stochastic_sums_have_the_bits_of_the_public_call():
    x, w, _, g = tensors()
    c = config("bf16", target=STOCHASTIC)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    y, dx, dw = run(x, w, None, g, c, generators[0])
    for got, (a, b) in zip((y, dx, dw), ((x, w), (g, w.mT), (g.mT, x.mT)), strict=True):
        assert_same_bits(got, layer_oracle.product(a, b, c.fprop, torch.float32, generator=generators[1]))


def test_stochastic_sums_and_stochastic_outputs_draw_apart():
    # One product of one: sum and output round the same number with words of the same element and block.
    x, w = torch.full((256, 1), 1.0), torch.full((1, 1), 1.0 + 2.0**-8)
    q = Quantizer(format=get_format("e2m3"), rounding=fmtsim.Rounding(mode="stochastic"))
    unit = Datapath(block=1, fraction_bits=None, accumulator="e8m7", rounding="stochastic")
    exact = Quantizer(format=get_format("fp32"))
    sums = LinearConfig(fprop=Gemm(a=exact, b=exact, target=unit))
    w = w + 2.0**-4
    both = LinearConfig(fprop=replace(sums.fprop, out=q))
    plain = LinearConfig(fprop=replace(sums.fprop, target="exact", out=q))
    up = EmulatedGEMM.apply(x, w, None, sums, 5) > 1.0 + 2.0**-4
    out = [EmulatedGEMM.apply(x, w, None, c, 5) > 1.0 for c in (both, plain)]
    agree = (up == out[1]).float().mean()
    assert 0.2 < up.float().mean() < 0.8 and 0.2 < out[1].float().mean() < 0.8
    assert 0.3 < agree < 0.7


def test_stochastic_operands_are_the_same_on_every_machine():
    x, w, _, g = tensors()
    c = linear_config(x="e4m3_tensor", w="e4m3_tensor", g="e5m2_tensor", rounding="stochastic",
                      grad_rounding="stochastic", target="exact")  # fmt: skip
    seen = {}

    def observer(operand, original, quantised, *_):
        seen.setdefault(operand, []).append(quantised)

    for machine in ({"target": "exact"}, {"target": None}):
        gemms = {name: replace(getattr(c, name), **machine) for name in ("fprop", "dgrad", "wgrad")}
        leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = EmulatedGEMM.apply(*leaf, None, LinearConfig(**gemms), 11, observer)
        torch.autograd.grad(y, leaf, g)
    for first, second in seen.values():
        assert_same_bits(first, second)


@pytest.mark.parametrize("generator", [None, 5, "generator"])
def test_looking_changes_nothing(generator):
    x, w, _, g = tensors()
    c = linear_config(x="e4m3_tensor", w="e4m3_tensor", g="e5m2_tensor", rounding="stochastic",
                      grad_rounding="stochastic", target="hopper.wgmma")  # fmt: skip
    results, seen = [], {}
    for observer in (None, lambda operand, x, q, *_: seen.update({operand: q})):
        torch.manual_seed(2)
        stream = torch.Generator().manual_seed(1) if generator == "generator" else generator
        leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = EmulatedGEMM.apply(*leaf, None, c, stream, observer)
        results.append([y.detach(), *torch.autograd.grad(y, leaf, g)])
    for one, two in zip(*results, strict=True):
        assert_same_bits(one, two)
    assert not torch.equal(seen["g_d"], seen["g_w"])  # both uses of the gradient are drawn


def test_nan_and_infinities_pass_through():
    x, w, _, g = tensors(torch.bfloat16)
    x[3, 5], x[7, 1], g[2, 2] = torch.nan, torch.inf, -torch.inf
    for c in (UNITS["bf16"], TARGETS["bf16"], UNITS["e4m3"], UNITS["tensor"], UNITS["mxfp8"]):
        for got, expected in zip(run(x, w, None, g, c), layer_oracle.layer(x, w, None, g, c), strict=True):
            assert_same_bits(got, expected)
        assert run(x, w, None, g, c)[0][3].isnan().all()
