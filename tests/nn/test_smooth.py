# SPDX-License-Identifier: Apache-2.0
"""Smooth-SwiGLU: the same function as the plain layer, with scales that quantisation does not see."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtsim
from fmtsim.nn.swaps import SmoothSwiGLU, convert_swiglu, revert_swiglu, smooth_scale, smooth_swiglu
from fmtsim.support.errors import ArgumentError, DtypeError, FmtsimError
from tests.support.models import GatedMLP, gated
from tests.support.operands import normal
from tests.support.refusals import refused


def halves(*shape, seed=0, dtype=torch.float32):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=source).to(dtype) for _ in range(2)]


def test_the_formula():
    u, v = halves(3, 5, 8)
    z, s = smooth_swiglu(u, v)
    assert torch.equal(s, v.abs().amax(-1, keepdim=True))
    assert torch.equal(z, F.silu(u) * (v / s))
    z, s = smooth_swiglu(u, v, per="channel")
    assert torch.equal(s, v.abs().reshape(15, 8).amax(0))
    assert torch.equal(z, F.silu(u) * (v / s))


def test_powers_of_two_divide_exactly():
    u, v = halves(64, 32, dtype=torch.bfloat16)
    for per in ("token", "channel"):
        z, s = smooth_swiglu(u, v, per=per, power_of_two=True)
        assert torch.equal(torch.frexp(s).mantissa, torch.full_like(s, 0.5))
        assert bool((s >= v.abs().float()).all()) or per == "channel"
        assert torch.equal((v.float() / s) * s, v.float())
        assert bool(((v.float() / s).abs() <= 1).all())
    assert smooth_scale(torch.tensor([[4.0, 1.0]]), power_of_two=True).item() == 4.0


def test_zeros_and_nan():
    v = torch.tensor([[0.0, -0.0], [1.0, float("nan")], [float("inf"), 1.0]])
    s = smooth_scale(v)
    assert s[0].item() == 1.0 and s[1].isnan() and s[2].item() == float("inf")
    assert smooth_scale(v, power_of_two=True)[0].item() == 1.0
    assert smooth_scale(v, power_of_two=True)[1].isnan()
    z, _ = smooth_swiglu(torch.ones(3, 2), v)
    assert z[0].count_nonzero() == 0


@pytest.mark.parametrize("per", ["token", "channel"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_layer_is_the_plain_one(per, bias, power_of_two):
    torch.manual_seed(0)
    layer = SmoothSwiGLU(16, 48, bias=bias, per=per, power_of_two=power_of_two)
    x = torch.randn(4, 7, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    g = normal(4, 7, 16, seed=2)
    y = layer(x)
    plain = layer.down_proj(F.silu(layer.gate_proj(x)) * layer.up_proj(x))
    torch.testing.assert_close(y, plain, rtol=1e-5, atol=1e-6)
    ours = torch.autograd.grad(y, [x, *layer.parameters()], g)
    theirs = torch.autograd.grad(plain, [x, *layer.parameters()], g)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    _, s = smooth_swiglu(layer.gate_proj(x), layer.up_proj(x), per=per, power_of_two=power_of_two)
    assert y.requires_grad and not s.requires_grad  # DETACH_SCALED_SWIGLU=true


def test_a_converted_layer_quantises_what_is_smoothed():
    """The down projection's operand is z, whose tokens all have the same size; the plain one's is not."""
    torch.manual_seed(0)
    layer = SmoothSwiGLU(16, 32)
    x = normal(8, 16, seed=1)
    x[3] *= 100
    config = fmtsim.linear_config(x="e4m3", w=None, g=None)
    fmtsim.convert(layer, config)
    u, v = layer.gate_proj(x), layer.up_proj(x)
    z, s = smooth_swiglu(u, v)
    expected = (fmtsim.quantize(z, "e4m3") @ layer.down_proj.weight.T) * s
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    saturated = fmtsim.quantize(F.silu(u) * v, "e4m3")
    assert saturated.abs().max() == 448.0 > 448.0 * 0.9 > z.abs().max()


def test_a_scale_of_the_call_before():
    torch.manual_seed(0)
    layer = SmoothSwiGLU(16, 32, per="channel", delayed=True)
    first, second = halves(8, 16)
    plain = [layer.down_proj(F.silu(layer.gate_proj(x)) * layer.up_proj(x)) for x in (first, second)]
    torch.testing.assert_close(layer(first), plain[0], rtol=1e-5, atol=1e-6)
    kept = layer.up_proj(first).abs().amax(0)
    assert torch.equal(layer.previous, kept)
    assert 0 < kept.min() < 1 < kept.max()
    z, s = smooth_swiglu(layer.gate_proj(second), layer.up_proj(second), scale=kept)
    y = layer(second)
    assert torch.equal(y, F.linear(z, layer.down_proj.weight * s))
    torch.testing.assert_close(y, plain[1], rtol=1e-5, atol=1e-6)
    assert torch.equal(layer.previous, layer.up_proj(second).abs().amax(0))
    assert "previous" not in layer.state_dict()


def test_a_models_layers_and_back():
    model, x = gated(), normal(5, 32, seed=1)
    plain, keys = model(x), list(model.state_dict())
    assert convert_swiglu(model) is model
    assert ["forward" in vars(module) for module in model] == [True, False, True]
    assert isinstance(model[0], GatedMLP) and list(model.state_dict()) == keys
    torch.testing.assert_close(model(x), plain, rtol=1e-5, atol=1e-6)
    both = fmtsim.convert(model, format="e4m3")
    assert not torch.equal(both(x), plain)
    fmtsim.revert(both)
    assert torch.equal(revert_swiglu(model)(x), plain)
    assert not any("forward" in vars(module) for module in model)
    refused(r"Sequential has no converted gated layer; call convert_swiglu first", revert_swiglu, model)
    model[0].act_fn = model[2].act_fn = nn.GELU()
    refused(r"convert_swiglu found no gated layer in Sequential; .* act_fn=SiLU", convert_swiglu, model)


def test_errors():
    u, v = halves(2, 4)
    refused(r"per='row' is not allowed; choose 'token', 'channel'", smooth_swiglu, u, v, per="row")
    refused(r"u has shape \(2, 4\) and v \(2, 3\); pass two halves of one shape", smooth_swiglu, u, v[:, :3])
    for wrong, message in (
        (dict(u=1), "u is int, not a tensor"),
        (dict(v=v.long()), "v has dtype torch.int64"),
        (dict(scale=1.0), "scale is float, not a tensor"),
        (dict(scale=torch.ones(2, 2)), "scale of shape (2, 2) does not broadcast to v of (2, 4)"),
        (dict(power_of_two=1), "power_of_two=1 is not a flag"),
        (dict(u=u[:, :0], v=v[:, :0]), "v has shape (2, 0); pass [..., channels]"),
    ):  # fmt: skip
        refused(f"^{re.escape(message)}", smooth_swiglu, error=FmtsimError, **{"u": u, "v": v, **wrong})
    assert smooth_swiglu(u[:0], v[:0], per="channel")[1].tolist() == [1.0] * 4
    with pytest.raises(ArgumentError, match=r"input has shape \(2, 3\); pass \[..., 4\]"):
        SmoothSwiGLU(4, 8)(u[:, :3])
    with pytest.raises(DtypeError, match="input has dtype torch.float64, the weight torch.float32; convert one"):
        SmoothSwiGLU(4, 8)(u.double())
    refused(r"delayed=True with per='token' has no scale to keep; pass per='channel'", SmoothSwiGLU, 4, 8, delayed=True)


class Written(nn.Module):
    """Three linear layers of a size, in an order that names do not tell, and SiLU as a function."""

    def __init__(self, order, change=None, size=32):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(size, size) for _ in range(3))
        self.order, self.change = order, change

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.order)
        z = F.silu(gate(x)) * up(x)
        return down(z if self.change is None else self.change(z))


@pytest.mark.parametrize("order", [("w1", "w3", "w2"), ("w3", "w2", "w1")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_as_a_function_is_recognised_by_what_it_computes(order, dtype):
    torch.manual_seed(0)
    model, x = nn.Sequential(Written(order)).to(dtype), normal(8, 32, dtype=dtype)
    plain, state = model(x), torch.get_rng_state()
    fmtsim.convert(model, "intel_2t")
    assert torch.equal(torch.get_rng_state(), state) and "forward" in vars(model[0])
    assert "1 gated layers became Smooth-SwiGLU, a scale a token" in fmtsim.report(model).summary
    gate, up, down = (getattr(model[0], name) for name in order)
    z, s = smooth_swiglu(gate(x), up(x))
    assert torch.equal(model(x), down.gemm(z, down.weight, None) * s + down.bias)
    fmtsim.revert(model)
    torch.testing.assert_close(convert_swiglu(model, power_of_two=True)(x), plain, rtol=0.02, atol=0.004)  # bfloat16's
    assert torch.equal(revert_swiglu(model)(x), plain)


def test_what_computes_otherwise_is_named():
    torch.manual_seed(0)
    model = nn.Sequential(Written(("w1", "w2", "w3"), F.relu), Written(("w1", "w2", "w3"), lambda z: 1 + z / 0.97))
    assert "forward" not in vars(fmtsim.convert(model, "intel_2t")[0])
    assert "0, 1: SiLU among linear layers, and no gated layer" in fmtsim.report(model).summary
