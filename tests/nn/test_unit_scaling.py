# SPDX-License-Identifier: Apache-2.0
"""Unit-scaled and mu-scaled operations against their formulas: factors forwards and backwards, and unit variance."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtsim
from fmtsim.nn import unit_scaling as unit
from fmtsim.nn.scaled_model import (
    MuLinear,
    MuReadout,
    MuResidual,
    UnitLinear,
    UnitReadout,
    mu_parameter_groups,
)
from tests.support.operands import float64s
from tests.support.refusals import refused


def logarithmic(weight, low, high):
    return math.exp(weight * math.log(high) + (1 - weight) * math.log(low))


def pulled(function, inputs, g):
    """Return the value and the gradients of a function."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, g.expand_as(y) if y.dim() else torch.ones_like(y))]


GELU = (2 / (1 - 1 / math.pi)) ** 0.5
N = 32  # the last dimension of the inputs


ELEMENTWISE = {  # operation, the plain one, factor of the output, factors of the gradients
    "gelu": (unit.gelu, F.gelu, (0.8, GELU), None),
    "gelu, free": (lambda x: unit.gelu(x, constrained=False), F.gelu, (0.8, GELU), (0.8, 2**0.5)),
    "gelu of 2": (lambda x: unit.gelu(x, 2.0), lambda x: F.gelu(2 * x) / 2, (1 / (1 + 0.25 / 4), GELU), None),
    "silu": (unit.silu, F.silu, (0.8, GELU), None),
    "silu, free": (lambda x: unit.silu(x, constrained=False), F.silu, (0.8, GELU), (0.5, 2**0.5)),
    "silu of 3": (lambda x: unit.silu(x, 3.0), lambda x: x * torch.sigmoid(3 * x), (1 / (1 + 0.25 / 9), GELU), None),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_nonlinearities(name):
    ours, plain, (weight, high), back = ELEMENTWISE[name]
    out = logarithmic(weight, 2.0, high)
    back = out if back is None else logarithmic(back[0], 2.0, back[1])
    x, g = float64s(2, 8, N), float64s(2, 8, N, seed=1)
    y, dx = pulled(ours, [x], g)
    z, dz = pulled(plain, [x], g)
    torch.testing.assert_close(y, z * out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dx, dz * back, rtol=1e-12, atol=1e-12)


def test_softmax_and_gated_product():
    x, gate, g = (float64s(2, 8, N, seed=seed) for seed in (0, 2, 1))
    for mult in (1.0, 4.0):
        out = logarithmic(1 / (1 + 4 / mult**2), N, N**0.5)
        back = logarithmic(1 / (1 + 4 / mult**2), N / mult, (N / mult) ** 0.5)
        z, dz = pulled(lambda x, m=mult: F.softmax(m * x, -1), [x], g)
        y, dx = pulled(lambda x, m=mult: unit.softmax(x, m), [x], g)
        torch.testing.assert_close([y, dx], [z * out, dz * out], rtol=1e-12, atol=1e-12)
        _, dx = pulled(lambda x, m=mult: unit.softmax(x, m, constrained=False), [x], g)
        torch.testing.assert_close(dx, dz * back, rtol=1e-12, atol=1e-12)
        factor = logarithmic(1 / (1 + 1 / mult**2), 2.0, 2**0.5)
        ours = pulled(lambda x, gate, m=mult: unit.silu_glu(x, gate, m), [x, gate], g)
        plain = pulled(lambda x, gate, m=mult: x * gate * torch.sigmoid(m * gate), [x, gate], g)
        torch.testing.assert_close(ours, [t * factor for t in plain], rtol=1e-12, atol=1e-12)


def test_factors_of_one_row():
    assert unit.linear_factors(torch.ones(1, 16), torch.ones(4, 16), constrained=False) == (0.25, 0.5, 1.0)


def test_products():
    a, b, g = float64s(2, 16, 8), float64s(8, 24), float64s(2, 16, 24, seed=1)
    y, da, db = pulled(torch.matmul, [a, b], g)
    f = 8**-0.5
    torch.testing.assert_close(pulled(unit.matmul, [a, b], g), [y * f, da * f, db * f], rtol=1e-12, atol=1e-12)
    free = pulled(lambda a, b: unit.matmul(a, b, constrained=False), [a, b], g)
    torch.testing.assert_close(free, [y * f, da * 24**-0.5, db * 16**-0.5], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("length", "mult", "dropout", "causal", "flat"),
    [
        (64, 1.0, 0.0, False, 1 / 8),
        (64, 1.0, 0.0, True, math.sqrt(math.log(64) / 64)),
        (64, 3.0, 0.0, False, 1 / 8),
        (64, 0.5, 0.25, False, 1 / 8),
        (1, 3.0, 0.0, True, 1.0),  # the logarithm of one row is 0
    ],
)
def test_attention(length, mult, dropout, causal, flat):
    """Of d = 16: the factor is sqrt(1 - dropout) / (flat ** (1 - w)), with w = mult^2 / (mult^2 + 4 d)."""
    q, k, v, g = (float64s(2, length, 16, seed=i) for i in range(4))
    factor = math.sqrt(1 - dropout) * flat ** (mult**2 / (mult**2 + 64) - 1)
    how = {"is_causal": causal, "dropout_p": dropout}

    def plain(q, k, v):
        torch.manual_seed(7)
        return F.scaled_dot_product_attention(q, k, v, scale=mult / 16, **how)

    def ours(q, k, v):
        torch.manual_seed(7)
        return unit.attention(q, k, v, mult=mult, **how)

    scaled = [t * factor for t in pulled(plain, [q, k, v], g)]
    torch.testing.assert_close(pulled(ours, [q, k, v], g), scaled, rtol=1e-10, atol=1e-10)


def test_dropout_is_scaled_where_it_drops_and_where_it_does_not():
    x, g = float64s(16, N), float64s(16, N, seed=1)
    for training in (True, False):
        torch.manual_seed(7)
        plain = pulled(lambda x, on=training: F.dropout(x, 0.36, on), [x], g)
        torch.manual_seed(7)
        ours = pulled(lambda x, on=training: unit.dropout(x, 0.36, on), [x], g)
        torch.testing.assert_close(ours, [t * 0.8 for t in plain], rtol=1e-12, atol=1e-12)


def test_relu_is_scaled_by_the_spread_of_half_a_normal_distribution():
    x, g = float64s(16, N), float64s(16, N, seed=1)
    y, dx = pulled(F.relu, [x], g)
    torch.testing.assert_close(pulled(unit.relu, [x], g), [y * GELU, dx * GELU], rtol=1e-12, atol=1e-12)
    free = pulled(lambda x: unit.relu(x, constrained=False), [x], g)
    torch.testing.assert_close(free, [y * GELU, dx * 2**0.5], rtol=1e-12, atol=1e-12)


def test_sums_losses_and_norms():
    x, y, g = (float64s(16, N, seed=seed) for seed in (0, 2, 1))
    half = 0.5**0.5
    torch.testing.assert_close(pulled(unit.add, [x, y], g), [(x + y) * half, g * half, g * half])
    targets = torch.arange(16)
    plain = pulled(lambda z: F.cross_entropy(z, targets, reduction="sum"), [x], torch.ones(()))
    ours = pulled(lambda z: unit.cross_entropy(z, targets), [x], torch.ones(()))
    torch.testing.assert_close(ours, [plain[0] / 16, plain[1] * N / (N - 1) ** 0.5])
    sums = pulled(lambda z: unit.cross_entropy(z, targets, reduction="sum"), [x], torch.ones(()))
    torch.testing.assert_close(sums, [plain[0], ours[1]])
    ignored = torch.where(targets < 4, -100, targets)
    assert unit.cross_entropy(x, ignored).item() == pytest.approx(F.cross_entropy(x, ignored).item())
    w, b = float64s(N, seed=3), float64s(N, seed=4)
    x, g = x.view(2, 8, N), g.view(2, 8, N)
    plain = pulled(lambda x, w, b: F.layer_norm(x, (N,), w, b), [x, w, b], g)
    ours = pulled(unit.layer_norm, [x, w, b], g)
    torch.testing.assert_close(ours, [*plain[:2], plain[2] / 4, plain[3] / 4])
    plain = pulled(lambda x, w: F.rms_norm(x, (N,), w, 1e-5), [x, w], g)
    torch.testing.assert_close(pulled(unit.rms_norm, [x, w], g), [*plain[:2], plain[2] / 4])
    torch.testing.assert_close(unit.layer_norm(x), F.layer_norm(x, (N,)))
    tokens = (torch.arange(16) % 5).view(2, 8)
    table = float64s(64, N)
    plain = pulled(lambda w: F.embedding(tokens, w), [table], g)
    torch.testing.assert_close(pulled(lambda w: unit.embedding(tokens, w), [table], g), [plain[0], plain[1] * 2])
    torch.testing.assert_close(unit.dropout(x, 0.25, training=False), x * 0.75**0.5)


@pytest.mark.parametrize("tau", [1.0, 0.3])
def test_residuals_have_the_gradient_of_the_function(tau):
    """The factors of the branch act in one place forwards and in another backwards; the gradient is the same."""
    x, w, g = float64s(16, N), float64s(N, N, seed=2), float64s(16, N, seed=1)

    def ours(x):
        branch, skip = unit.residual_split(x, tau)
        return unit.residual_add(torch.tanh(branch @ w), skip, tau)

    whole = math.sqrt(1 + tau**2)
    plain = pulled(lambda x: (tau * torch.tanh(x @ w) + x) / whole, [x], g)
    torch.testing.assert_close(pulled(ours, [x], g), plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("cls", "factors"),
    [
        (UnitLinear, (64**-0.5, 64**-0.5, 40**-0.5)),
        (UnitReadout, (1 / 64, 32**-0.5, 40**-0.5)),
        (MuLinear, (1 / 8, 1 / 8, 1 / 8)),
        (MuReadout, (1 / 64, 1 / 64, 1 / 64)),
    ],
)
def test_layers(cls, factors):
    torch.manual_seed(0)
    layer = cls(64, 32, dtype=torch.float64)
    assert float(layer.weight.detach().std()) == pytest.approx(1.0, abs=0.05)
    assert layer.bias.count_nonzero() == 0
    x, g = float64s(4, 10, 64), float64s(4, 10, 32, seed=1)
    w, b = layer.weight.detach(), float64s(32, seed=5)
    layer.bias.data.copy_(b)
    x = x.requires_grad_()
    y = layer(x)
    y.backward(g)
    out, of_x, of_w = factors
    torch.testing.assert_close(y, (x @ w.T + b) * out)
    torch.testing.assert_close(x.grad, g @ w * of_x)
    torch.testing.assert_close(layer.weight.grad, (g.flatten(0, 1).T @ x.detach().flatten(0, 1)) * of_w)
    torch.testing.assert_close(layer.bias.grad, g.sum((0, 1)) * of_w)


@pytest.mark.parametrize(("cls", "recipe"), [(UnitLinear, "unit_scaling"), (MuLinear, "mu_s")])
def test_converted_layers_quantise_before_the_factors(cls, recipe):
    """Operands and gradient are cast as they are, without scales; the factors multiply the products."""
    torch.manual_seed(0)
    model = nn.Sequential(cls(64, 32, bias=False), nn.ReLU(), cls(32, 16, bias=False), nn.Linear(16, 2))
    before = copy.deepcopy(model.state_dict())
    fmtsim.convert(model, recipe)
    layer = model[0]
    x, g = float64s(8, 64).float().requires_grad_(), float64s(8, 32, seed=1).float()
    names = {"x": "e4m3fnuz", "g": "e5m2"} if recipe == "unit_scaling" else {"x": "e4m3", "g": "e5m2"}
    xq, wq = (fmtsim.quantize(t.detach(), names["x"]) for t in (x, layer.weight))
    gq = fmtsim.quantize(g, names["g"], overflow="saturate")
    out, of_x, of_w = layer.factors(x)
    y = layer(x)
    y.backward(g)
    torch.testing.assert_close(y, xq @ wq.T * out)
    torch.testing.assert_close(x.grad, gq @ wq * of_x)
    torch.testing.assert_close(layer.weight.grad, gq.T @ xq * of_w)
    fmtsim.revert(model)
    assert type(layer) is cls
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_mu_residual_and_learning_rates():
    torch.manual_seed(0)
    block = MuResidual(MuLinear(64, 64, bias=False), 64, tau=0.3)
    x = torch.randn(8, 64)
    expected = math.sqrt(0.7) * x + math.sqrt(0.3) * F.layer_norm(x @ block.branch.weight.T / 8, (64,))
    torch.testing.assert_close(block(x), expected)
    for layer, width in ((block, 64), (UnitLinear(64, 2), 64), (MuReadout(3, 2), 3)):
        refused(rf"input has shape \(8, 5\); pass \[..., {width}\]", layer, x[:, :5])
        assert layer(torch.ones(0, width)).shape[0] == 0
    refused("tau=2 is not a part of the variance; choose 0 to 1", MuResidual, block.branch, 64, tau=2)
    model = nn.Sequential(nn.Embedding(4, 64), block, MuLinear(64, 1024), MuReadout(64, 4))
    rates = {id(group["params"][0]): group["lr"] for group in mu_parameter_groups(model, 0.1)}
    assert rates[id(block.branch.weight)] == pytest.approx(0.1 * 2)
    assert rates[id(model[0].weight)] == rates[id(model[3].weight)] == rates[id(block.norm.weight)] == 0.1
    assert len(rates) == len(list(model.parameters()))
