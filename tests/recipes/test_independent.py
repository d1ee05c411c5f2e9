# SPDX-License-Identifier: Apache-2.0
"""One layer of te_current on an H200 and one of te_nvfp4 on a B200, against an emulation that shares no code."""

import dataclasses

import numpy as np
import pytest
import torch

import fmtsim
from fmtsim import Rounding, get_recipe
from fmtsim.gemm.products.native import is_native
from tests.recipes import transformer_engine as te

pytestmark = pytest.mark.filterwarnings("ignore::fmtsim.support.errors.PlanUnknownWarning")

BF16, FP32 = torch.bfloat16, torch.float32
ON_THE_CARD = pytest.mark.skipif(not is_native("h200"), reason="needs an NVIDIA H200")
SHAPES = [(48, 256, 32), (160, 64, 144)]  # tokens, features in and out; one or both gradients promote their sums
NAMES = ("y", "dx", "dw", "dbias")
NAN = {BF16: 0x7FFF0000, FP32: 0x7FFFFFFF}


def numbers(kind, tokens, inner, outer):
    """Return x, w, g and a bias whose sums of rows are exact."""
    r = np.random.default_rng(7)
    x, w, g = (
        r.standard_normal((tokens, inner)),
        r.standard_normal((outer, inner)) / 8,
        r.standard_normal((tokens, outer)),
    )
    g = np.round(g * 64) / 2**16
    if kind == "wide":
        x, w = (t * np.exp2(r.integers(-5, 6, t.shape)) for t in (x, w))
        x[:, 16:48], w[:, 32:64] = x[:, 16:48] / 2**11, w[:, 32:64] / 2**11  # E4M3 scales that lie far apart
    if kind == "zeros":
        x[r.random(x.shape) < 0.5] = 0
        x[3], x[:, 16:32], w[:16, :16], g[:, 5] = 0, 0, 0, 0
    if kind == "nothing":
        x[:] = 0
    if kind == "tiny":
        x, w = x * 2.0**-140, w * 2.0**100  # subnormal bfloat16, whose scale would overflow
    if kind == "nan":
        x[5, 7] = np.nan
    return [torch.tensor(t, dtype=BF16) for t in (x, w, g, r.standard_normal(outer))]


def layer(recipe, target, x, w, g, bias=None, native=False):
    """Return y, dx, dw and dbias; native ones are made on the GPU."""
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=bias is not None, dtype=x.dtype)
    linear.load_state_dict({"weight": w} | ({} if bias is None else {"bias": bias}))
    fmtsim.convert(linear, recipe=recipe, target=target, native=native, generator=1)
    device = "cuda" if native else "cpu"
    x = x.clone().to(device).requires_grad_()
    y = linear.to(device)(x)
    y.backward(g.to(device))
    grads = [] if bias is None else [linear.bias.grad]
    return [t.detach().cpu() for t in (y, x.grad, linear.weight.grad, *grads)]


def plain(*tensors):
    return [None if t is None else t.float().numpy() for t in tensors]


def assert_bits(got, expected):
    for name, ours, theirs in zip(NAMES[: len(got)], got, expected, strict=True):
        bits = np.where(np.isnan(theirs), NAN[ours.dtype], theirs.astype(np.float32).view(np.int32))
        wrong = int((ours.float().numpy().view(np.int32) != bits).sum())
        assert not wrong, f"{wrong} of {bits.size} numbers of {name} differ"


def sums_of_rows(g):
    return te.rounded(g.astype(np.float64).sum(0), te.BF16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["normal", "wide", "zeros", "nothing", "tiny", "nan"])
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=ON_THE_CARD)], ids=["emulated", "native"])
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's, in autograd's own thread
def test_te_current_on_an_h200(native, kind, shape):
    x, w, g, bias = numbers(kind, *shape)
    arrays = plain(x, w, g, bias)
    expected = [*te.current_scaling_layer(*arrays), sums_of_rows(arrays[2])]
    assert_bits(layer("te_current", "h200", x, w, g, bias, native), expected)
    expected = te.current_scaling_layer(*arrays[:3], bfloat16=False)
    assert_bits(layer("te_current", "h200", x.float(), w.float(), g.float(), native=native), expected)


def nearest():
    """te_nvfp4_all whose gradients round to nearest even, as NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING has them."""
    recipe = get_recipe("te_nvfp4_all")
    gemms = {
        name: dataclasses.replace(gemm, a=dataclasses.replace(gemm.a, rounding=Rounding()))
        for name, gemm in (("dgrad", recipe.linear.dgrad), ("wgrad", recipe.linear.wgrad))
    }
    return dataclasses.replace(recipe, name="nvfp4_nearest", linear=dataclasses.replace(recipe.linear, **gemms))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["normal", "wide", "zeros", "nothing"])
def test_te_nvfp4_on_a_b200(kind, shape):
    x, w, g, bias = numbers(kind, *shape)
    arrays = plain(x, w, g, bias)
    expected = [*te.nvfp4_layer(*arrays), sums_of_rows(arrays[2])]
    assert_bits(layer(nearest(), "b200", x, w, g, bias), expected)
    expected = te.nvfp4_layer(*arrays[:3], bfloat16=False)
    assert_bits(layer(nearest(), "b200", x.float(), w.float(), g.float()), expected)


def test_stochastic_gradients_of_te_nvfp4():
    """Multiplied by unit matrices, which E2M1 holds, gradients show their rounding: up in floor(256 f) of 256 cases."""
    g = numbers("normal", 480, 16, 32)[2]
    x = torch.tensor(np.kron(np.eye(30), te.rotation()), dtype=FP32)  # its transpose, rotated, is the unit matrix
    y, dx, dw = layer("te_nvfp4_all", "b200", x, torch.eye(32, 480), g.float())
    assert_bits([y], te.nvfp4_layer(*plain(x, torch.eye(32, 480), g), bfloat16=False)[:1])
    g = plain(g)[0]
    for found, rounded in ((dx[:, :32], g), (dw, te.rotated(g.T))):
        one = te.nvfp4(np.eye(16, dtype=np.float32))
        operand = te.nvfp4(rounded, cast=lambda values, fmt: np.clip(values, -6, 6))
        exact, scale = np.abs(operand[0]), np.repeat(operand[1], 16, 1) * 2688 * te.tensor_scales(operand, one)[0]
        unit = np.ldexp(1.0, te.exponent(exact, 0) - 1)
        down, up = np.floor(exact / unit), np.abs(found.numpy()) / scale / unit
        chance = np.floor(256 * (exact / unit - down)) / 256
        up = up - down
        assert np.abs(up - np.rint(up)).max() < 1e-6 and set(np.rint(up).ravel()) == {0, 1}
        assert not np.rint(up[chance == 0]).any()
        for some in (chance >= 0, chance < 0.25, chance > 0.75):
            assert abs((up - chance)[some].sum()) < 4 * np.sqrt((chance * (1 - chance))[some].sum())


def test_what_fmtsim_does_otherwise_than_transformer_engine():
    """Stated in docs/recipes.md: scales of tensors with Inf, and the order in which NVFP4's two tensor scales meet."""
    x, w, g, _ = numbers("normal", *SHAPES[0])
    arrays, got = plain(x, w, g), layer(nearest(), "b200", x, w, g)
    for theirs, ours in zip(te.nvfp4_layer(*arrays, order=1), got, strict=True):
        apart = np.abs(theirs.view(np.int32) - ours.float().numpy().view(np.int32)) >> 16
        assert apart.max() <= 1 and apart.mean() < 1e-3  # at most the last place of bfloat16
    x[5, 7] = torch.inf
    y = layer("te_current", "h200", x, w, g)[0]
    finite = torch.where(x.isinf(), 0, x)
    scale = te.current_scaling(finite.float().numpy(), te.E4M3)[1]
    largest = torch.where(x.isinf(), torch.tensor(448 * float(scale)), x.float())  # Inf is the largest element
    same = layer("te_current", "h200", largest.to(BF16), w, g)[0]
    assert torch.equal(torch.cat([y[:5], y[6:]]), torch.cat([same[:5], same[6:]]))
    assert not np.array_equal(y.float().numpy(), te.current_scaling_layer(*plain(x, w, g))[0])
