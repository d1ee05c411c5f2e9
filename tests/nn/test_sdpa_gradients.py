# SPDX-License-Identifier: Apache-2.0
"""Gradients of quantised attention against loops in float64 over what the forward pass made."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

import fmtsim
from fmtsim.formats.scaling import History, Scaling
from fmtsim.gemm.layers.config import Gemm
from fmtsim.nn.sdpa import quantised_attention
from fmtsim.recipes import AttentionConfig, flash_attention_3
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.quantizer import Clamp, ClipMask, Hadamard, Quantizer
from fmtsim.support.errors import ArgumentError, FmtsimError, FormatError
from tests.support.operands import normal
from tests.support.refusals import refused

E4M3, E5M2 = fmtsim.get_format("e4m3"), fmtsim.get_format("e5m2")
FORWARD, HIGH = Quantizer(source="forward"), Quantizer()
LOG2E = 1.4426950408889634


def tensors(*shapes, seed=0, dtype=torch.float32):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=source).to(dtype).requires_grad_() for shape in shapes]


def whole(x, name="e4m3", fmt=E4M3):
    """Values of a matrix under one scale, float64."""
    scale = torch.div(float(fmt.max), x.float().abs().amax())
    return (fmtsim.quantize(x.float() * scale, name) * torch.reciprocal(scale)).double()


def oracle(q, k, v, g, *, operands, p_of=lambda p: p, causal=False, offset=0):
    """Return dq, dk and dv of one head, element by element, of what ``operands`` makes of tensors by product.

    ``operands(product, tensor, x)`` gets the float64 matrix with the product's sums along the last axis.
    """
    (length, d), keys = q.shape, len(k)
    qf, kf, vf = (operands("f", name, t.double()) for name, t in (("q", q), ("k", k), ("v", v.T)))
    vf = vf.T
    factor = d**-0.5
    weights, rounded = torch.zeros(length, keys).double(), torch.zeros(length, keys).double()
    for i in range(length):
        seen = [j for j in range(keys) if not causal or j <= i]
        t = [float((qf[i] * kf[j]).sum()) * factor * LOG2E for j in seen]
        top = max(t)
        p = [2 ** (one - top + offset) for one in t]
        for j, one in zip(seen, p, strict=True):
            weights[i, j], rounded[i, j] = one / sum(p), p_of(one) / sum(p)
    out = rounded @ vf
    made = {"p": (weights.T, rounded.T), "k": (k.double().T, kf.T), "q": (q.double().T, qf.T), "v": (v.double(), vf)}

    def operand(product, name, x=None):
        return operands(product, name, x) if x is not None else operands(product, name, *made[name])

    dv = operand("dv", "p") @ operand("dv", "do", g.double().T).T
    dp = operand("dp", "do", g.double()) @ operand("dp", "v").T
    ds = torch.zeros_like(dp)
    for i in range(length):
        mean = float((g[i].double() * out[i]).sum())
        for j in range(keys):
            ds[i, j] = weights[i, j] * (dp[i, j] - mean)
    dq = operand("dq", "ds", ds) @ operand("dq", "k").T * factor
    dk = operand("dk", "ds", ds.T.contiguous()) @ operand("dk", "q").T * factor
    return dq, dk, dv


def gradients(q, k, v, g, **how):
    y = quantised_attention(q, k, v, **how)
    return torch.autograd.grad(y, (q, k, v), g)


def close(ours, expected, tolerance=2e-5):
    for a, b in zip(ours, expected, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < tolerance


KEEP = torch.rand(2, 1, 40, 50, generator=torch.Generator().manual_seed(3)) < 0.5
KEEP[..., 0] = True
MASKS = {
    "none": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.7}, "bool": {"attn_mask": KEEP},
    "one row": {"attn_mask": KEEP[0, 0, :1]}, "added": {"attn_mask": normal(40, 50, seed=4)},
    "added and -inf": {"attn_mask": torch.where(KEEP, 0.3, -math.inf)},
}  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
def test_without_rounding_values_and_gradients_are_torchs(mask):
    """Groups of heads under each mask; one head alone where there is none."""
    shapes = ((40, 16), (50, 16), (50, 24)) if mask == "none" else ((2, 4, 40, 16), (2, 2, 50, 16), (2, 2, 50, 8))
    q, k, v = tensors(*shapes)
    options = MASKS[mask] | {"enable_gqa": q.dim() > 2}
    y = F.scaled_dot_product_attention(q, k, v, **options)
    ours = quantised_attention(q, k, v, config=AttentionConfig(columns=16), **options)
    torch.testing.assert_close(ours, y, rtol=1e-5, atol=1e-5)
    g = normal(*y.shape, seed=9)
    for a, b in zip(*(torch.autograd.grad(t, (q, k, v), g) for t in (ours, y)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("unit", [None, "hopper.wgmma"])
def test_straight_through_on_the_forward_values(causal, unit):
    """By default every product takes what the forward pass made, in high precision."""
    base = flash_attention_3(target=unit, rotate=False, blocks=False)
    q, k, v = tensors((24, 16), (24, 16), (24, 8), seed=1)
    g = normal(24, 8, seed=2)
    ours = gradients(q, k, v, g, config=base, is_causal=causal)

    def operands(product, name, x, forward=None):
        return whole(x) if product == "f" else x if forward is None else forward

    expected = oracle(
        q.detach(), k.detach(), v.detach(), g, operands=operands, causal=causal, offset=8,
        p_of=lambda p: float(fmtsim.quantize(torch.tensor(p), "e4m3")),
    )  # fmt: skip
    # A sum in another order moves a weight to its neighbour now and then, which moves sums by a part of 2^-4.
    close(ours, expected, 2e-3)
    exact = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=causal), (q, k, v), g)
    assert all(float((a - b).norm() / b.norm()) > 5e-3 for a, b in zip(ours, exact, strict=True))


def test_quantised_gradients_take_their_own_operands():
    """Each of the four products with quantisers of its own, from the originals, the forward values or those again."""
    eight, five = (Quantizer(format=fmt, scaling=Scaling()) for fmt in (E4M3, E5M2))
    again = dataclasses.replace(eight, source="requantised")
    config = AttentionConfig(
        q=eight, k=eight, v=eight, columns=64,
        dv=Gemm(a=eight, b=five), dp=Gemm(a=five, b=FORWARD), dq=Gemm(a=five, b=again), dk=Gemm(a=HIGH, b=eight),
    )  # fmt: skip
    q, k, v = tensors((24, 16), (20, 16), (20, 8), seed=3)
    g = normal(24, 8, seed=4)
    ours = gradients(q, k, v, g, config=config)
    rules = {("dv", "p"): eight, ("dv", "do"): five, ("dp", "do"): five, ("dp", "v"): FORWARD, ("dq", "ds"): five,
             ("dq", "k"): again, ("dk", "ds"): HIGH, ("dk", "q"): eight}  # fmt: skip

    def operands(product, name, x, forward=None):
        if product == "f":
            return whole(x)
        rule = rules[product, name]
        source = {"original": x, "forward": forward, "requantised": forward}[rule.source]
        return source if rule.format is None else whole(source, rule.format.name, rule.format)

    expected = oracle(q.detach(), k.detach(), v.detach(), g, operands=operands)
    close(ours, expected, 2e-3)


def test_rotations_are_turned_back():
    """Rotated but not rounded, gradients are those of exact attention, whatever the products of ds take."""
    turn = Quantizer(transforms=(Hadamard(size=None, signs="random"),))
    q, k, v = tensors((2, 32, 16), (2, 64, 16), (2, 64, 8), seed=5)
    g = normal(2, 32, 8, seed=6)
    expected = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), g)
    cancels = Quantizer(transforms=(Hadamard(size=16, signs="random"),))
    for changes in ({}, {"dq": Gemm(a=HIGH, b=HIGH), "dk": Gemm(a=cancels, b=cancels)}):
        config = AttentionConfig(q=turn, k=turn, **changes)
        for a, b in zip(gradients(q, k, v, g, config=config, generator=3), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_unit_multiplies_gradients_too():
    row = Quantizer(format=E5M2, scaling=Scaling(block=(1, None)))
    one = Quantizer(format=E4M3, scaling=Scaling())
    base = dataclasses.replace(flash_attention_3(rotate=False, blocks=False), columns=64)
    on_unit = {"dp": Gemm(a=row, b=FORWARD, target="hopper.wgmma"), "dq": Gemm(a=row, b=one, target="hopper.wgmma")}
    off = {name: dataclasses.replace(gemm, target=None) for name, gemm in on_unit.items()}
    q, k, v = tensors((32, 16), (32, 16), (32, 16), seed=7)
    g = normal(32, 16, seed=8)
    first, second = (gradients(q, k, v, g, config=dataclasses.replace(base, **how)) for how in (on_unit, off))
    assert not torch.equal(first[0], second[0]) and torch.equal(first[2], second[2])
    torch.testing.assert_close(first, second, rtol=0, atol=2e-3)


def test_stochastic_gradients_repeat_with_the_key_and_do_not_change_the_result():
    g_of = Quantizer(format=E5M2, scaling=Scaling(), rounding=Rounding(mode="stochastic"))
    config = AttentionConfig(dp=Gemm(a=g_of, b=FORWARD), dq=Gemm(a=g_of, b=FORWARD))
    q, k, v = tensors((2, 16, 16), (2, 16, 16), (2, 16, 16))
    g = normal(2, 16, 16, seed=1)
    runs = [gradients(q, k, v, g, config=config, generator=seed) for seed in (1, 1, 2)]
    assert all(map(torch.equal, runs[0], runs[1])) and not torch.equal(runs[0][0], runs[2][0])
    assert torch.equal(runs[0][2], runs[2][2])  # dv takes neither
    y = quantised_attention(q, k, v, config=config, generator=1)
    assert torch.equal(y, quantised_attention(q, k, v, config=AttentionConfig()))


def test_a_gradient_rule_masks_what_saturated():
    """Under a clip mask the largest element of each tensor passes no gradient."""
    clip = Quantizer(format=E4M3, scaling=Scaling(top=224.0), gradient=ClipMask())
    half = dataclasses.replace(clip, scaling=Scaling(top=896.0))  # twice what the format holds
    q, k, v = tensors((8, 16), (8, 16), (8, 16))
    g = torch.ones(8, 16)
    for quantizer, masked in ((clip, False), (half, True)):
        found = gradients(q, k, v, g, config=AttentionConfig(q=quantizer, v=quantizer))
        for t, d in ((q, found[0]), (v, found[2])):
            inside = t.detach().abs() < 448 / (quantizer.scaling.top / t.detach().abs().amax())
            assert bool((d[~inside] == 0).all()) and bool((~inside).any()) == masked


def test_a_row_that_sees_nothing_has_no_gradient():
    q, k, v = tensors((4, 16), (8, 16), (8, 16))
    keep = torch.ones(4, 8, dtype=torch.bool)
    keep[2] = False
    dq, dk, dv = gradients(
        q, k, v, torch.ones(4, 16), config=flash_attention_3(target=None), attn_mask=keep, generator=0
    )
    assert dq[2].count_nonzero() == 0 and bool(torch.cat((dq, dk, dv)).isfinite().all())


def test_dtypes_and_second_derivatives():
    q, k, v = tensors((2, 16, 16), (2, 16, 16), (2, 16, 16), dtype=torch.bfloat16)
    dq, dk, dv = gradients(
        q, k, v, torch.ones(2, 16, 16).bfloat16(), config=flash_attention_3(target=None), generator=0
    )
    assert dq.dtype == dk.dtype == dv.dtype == torch.bfloat16
    y = quantised_attention(q, k, v, config=AttentionConfig())
    (first,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    with pytest.raises(FmtsimError, match="quantised attention cannot be differentiated twice"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"q": "e4m3"}, ArgumentError, "AttentionConfig q='e4m3' is not a Quantizer; pass Quantizer"),
        ({"dv": Quantizer()}, ArgumentError, r"AttentionConfig dv=.* is not a Gemm; pass Gemm\(a="),
        ({"dp": Gemm(target="h200")}, ArgumentError, "AttentionConfig dp: target='h200' is a GPU with its library"),
        ({"dq": Gemm(a=FORWARD)}, FormatError, "AttentionConfig dq: a gradient has no forward values; leave source="),
        ({"q": FORWARD}, FormatError, "AttentionConfig q has source='forward'; only products of the backward pass"),
        ({"v": Quantizer(transforms=(Hadamard(),))}, FormatError,
         r"AttentionConfig v has a rotation \(Hadamard 16\); q and k alone are rotated"),
        ({"dk": Gemm(b=Quantizer(transforms=(Hadamard(axis="outer"),)))}, FormatError, "dk.b rotates the outer axis"),
        ({"k": Quantizer(transforms=(Clamp(level=0.9, compensate=True),))}, FormatError,
         r"AttentionConfig k has Clamp\(compensate=True\), which attention does not; leave compensate= out"),
        ({"dk": Gemm(b=Quantizer(transforms=(Clamp(level=0.9, compensate=True),)))}, FormatError,
         r"AttentionConfig dk.b has Clamp\(compensate=True\), which attention does not"),
        ({"dv": Gemm(a=FORWARD, b=Quantizer(format=E4M3, scaling=Scaling(history=History())))}, FormatError,
         "AttentionConfig dv.b has a history, and attention remembers nothing"),
        ({"dv": Gemm(a=HIGH, b=FORWARD)}, FormatError, "AttentionConfig dv: a gradient has no forward values"),
        ({"dk": Gemm(a=Quantizer(transforms=(Hadamard(axis="outer"),)))}, FormatError, "dk.a rotates the outer axis"),
        ({"q": Quantizer(transforms=(Hadamard(axis="outer"),))}, FormatError, "AttentionConfig q has a rotation"),
        ({"p": Quantizer(transforms=(Hadamard(),))}, FormatError, "AttentionConfig p has a rotation"),
        ({"p": Quantizer(format=E4M3, scaling=Scaling(), gradient=ClipMask())}, FormatError,
         "AttentionConfig p has gradient="),
        ({"q": Quantizer(format=E4M3, scaling=Scaling(history=History()))}, FormatError,
         "AttentionConfig q has a history, and attention remembers nothing; choose Scaling without history="),
        ({"dk": Gemm(b=dataclasses.replace(Quantizer(format=E4M3), source="stored"))}, FormatError,
         "AttentionConfig dk.b has source='stored', which weights of layers have; leave source= out"),
        ({"offset": "8"}, ArgumentError, "AttentionConfig offset=.8. is not allowed; pass a finite number"),
        ({"columns": 0.5}, ArgumentError, "AttentionConfig columns=0.5 is not allowed; pass a whole number from 1"),
        ({"columns": 0}, ArgumentError, "AttentionConfig columns=0 is not allowed; pass a whole number from 1"),
        ({"target": "hopper.wgma"}, ArgumentError, "AttentionConfig s: .*hopper.wgma"),
    ],
)  # fmt: skip
def test_wrong_configs_are_refused(changes, error, said):
    refused(said, AttentionConfig, error=error, **changes)


def test_least_numbers_are_taken():
    config = AttentionConfig(columns=1, offset=-3)
    assert (config.columns, config.offset) == (1, -3)
    q, k, v = tensors((2, 8, 16), (2, 8, 16), (2, 8, 16))
    y = quantised_attention(q, k, v, config=AttentionConfig(columns=1))
    torch.testing.assert_close(y, torch.nn.functional.scaled_dot_product_attention(q, k, v))  # rounding apart


def test_text_and_operands():
    config = dataclasses.replace(flash_attention_3(), dp=Gemm(a=Quantizer(format=E5M2), b=FORWARD))
    assert str(config).endswith("on hopper.wgmma; dp of e5m2 with the forward codes")
    assert str(flash_attention_3(target=None)) == (
        "q and k Hadamard all, random signs, e4m3, [amax of 128xall]; v e4m3, [amax of allx128]; "
        "p e4m3, 2^8 times as large; gradients in high precision"
    )
    assert config.operands["dp.do"].format == E5M2 and list(config.operands)[:4] == ["q", "k", "v", "p"]
    assert math.isclose(LOG2E, math.log2(math.e))
