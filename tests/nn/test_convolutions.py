# SPDX-License-Identifier: Apache-2.0
"""Emulated convolutions and Bilinear: torch's results without quantisers, products of a hand-made loop with them."""

import copy
import dataclasses
import itertools
import warnings

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.gemm.layers.config import linear_config
from fmtsim.gemm.layers.emulated_gemm import EmulatedGEMM
from fmtsim.nn import convert
from fmtsim.nn.modules import EmulatedModule
from fmtsim.support.errors import ArgumentError, CoverageWarning
from tests.support.models import CONVOLUTIONS, both, convolution
from tests.support.operands import normal

CONFIG = linear_config(x="mxfp8_e4m3", w="e4m3", g="mxfp8_e5m2")
TENSOR = linear_config(x="e4m3", w="e4m3", g="e5m2", scaling="tensor")
BIASED = dataclasses.replace(fmtsim.get_recipe("int8_static"), name="biased", bias_correction=True)


def whole_numbers(module):
    """Return the module in float64 with small whole numbers, of which every sum is exact in any order."""
    with torch.no_grad():
        for p in module.double().parameters():
            p.copy_(torch.randint(-4, 5, p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return module


def assert_is_torchs(module, *shapes, **options):
    g = torch.Generator().manual_seed(1)
    inputs = [torch.randint(-4, 5, shape, generator=g).double() for shape in shapes]
    for expected, found in zip(*both(whole_numbers(module), *inputs, **options), strict=True):
        assert torch.equal(expected, found) and expected.any()


@pytest.mark.parametrize("options", [
    {}, {"groups": 2, "bias": False}, {"stride": 3, "padding": 2, "dilation": 2},
    {"padding": "valid", "kernel_size": 1}, {"padding": "same", "kernel_size": 4, "dilation": 2},
    {"padding": 2, "padding_mode": "circular"},
    {"padding": 1, "padding_mode": "reflect", "groups": 2}, {"padding": "same", "padding_mode": "replicate"},
])  # fmt: skip
@pytest.mark.parametrize("batch", [(2,), ()])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")  # torch's own, once
def test_convolutions_are_torchs(options, batch, dims):
    cls = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    assert_is_torchs(cls(4, 8, **{"kernel_size": 3, **options}), (*batch, 4, 7, 8, 6)[: len(batch) + 1 + dims])


@pytest.mark.parametrize("options", [
    {}, {"groups": 2, "bias": False}, {"stride": 3, "padding": 2, "output_padding": 2}, {"kernel_size": 1},
    {"dilation": 3, "padding": 1, "output_padding": 2}, {"stride": 2, "output_padding": 1, "groups": 2},
])  # fmt: skip
@pytest.mark.parametrize("batch", [(2,), ()])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolutions_are_torchs(options, batch, dims):
    cls = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    assert_is_torchs(cls(4, 8, **{"kernel_size": 3, **options}), (*batch, 4, 3, 4, 2)[: len(batch) + 1 + dims])


def test_transposed_convolutions_take_output_sizes_as_torch_does():
    module = nn.ConvTranspose2d(4, 6, 3, stride=(2, 3), dilation=2)
    assert_is_torchs(module, (2, 4, 3, 2), output_size=[10, 9])
    with pytest.raises(ValueError, match=r"requested an output size of \[9, 7\], but valid sizes range from"):
        convert(module, format="e4m3")(torch.ones(2, 4, 3, 2), output_size=[9, 7])


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_bilinear_is_torchs(leading, bias):
    assert_is_torchs(nn.Bilinear(4, 6, 5, bias=bias), (*leading, 4), (*leading, 6))


def loop(module, x, g, config):
    """Return y and the gradients of a convolution: each window by itself, kernel positions added in float32."""
    transposed, dims, groups = module.transposed, len(module.kernel_size), module.groups
    taps = list(itertools.product(*map(range, module.kernel_size)))
    small, large = (x, g) if transposed else (g, x)  # the tensor of positions, and that of windows
    positions = list(itertools.product(*map(range, small.shape[2:])))
    wide = torch.zeros(*large.shape[:2], *(n + 2 * p for n, p in zip(large.shape[2:], module.padding, strict=True)))
    inner = (..., *(slice(p, n + p) for n, p in zip(large.shape[2:], module.padding, strict=True)))

    def place(position, tap):
        return (..., *(o * s + t * d for o, s, t, d in zip(position, module.stride, tap, module.dilation, strict=True)))

    def windows(t):  # [N, positions, C, taps]
        padded = wide.clone()
        padded[inner] = t.float()
        found = [torch.stack([padded[place(position, tap)] for tap in taps], -1) for position in positions]
        return torch.stack(found, 1).to(t.dtype)

    def added(t):
        total = wide.clone()
        for (i, tap), (j, position) in itertools.product(enumerate(taps), enumerate(positions)):
            total[place(position, tap)] += t[:, j, :, i].float()
        return total[inner]

    def split(t, dim):
        return t.chunk(groups, dim)

    rows = torch.stack([small[(..., *p)] for p in positions], 1) if transposed else windows(large)
    rows = [part.flatten(2).detach().requires_grad_() for part in split(rows, 2)]
    weights = [w.detach().flatten(1).requires_grad_() for w in split(module.weight, 0)]
    biases = [None] * groups if module.bias is None or transposed else split(module.bias.detach(), 0)
    products = [
        EmulatedGEMM.apply(row, w.t() if transposed else w, b, config)
        for row, w, b in zip(rows, weights, biases, strict=True)
    ]
    y = torch.cat(products, -1)
    if transposed:
        y = added(y.unflatten(-1, (-1, len(taps))))
        y = (y if module.bias is None else y + module.bias.detach().view(-1, *[1] * dims)).to(x.dtype)
        incoming = split(windows(g), 2)
    else:
        y = y.transpose(1, 2).unflatten(2, small.shape[2:])
        incoming = split(torch.stack([g[(..., *p)] for p in positions], 1), 2)
    torch.autograd.backward(products, [part.flatten(2) for part in incoming])
    dx = torch.cat([row.grad for row in rows], -1)
    dx = (
        dx.transpose(1, 2).unflatten(2, x.shape[2:])
        if transposed
        else added(dx.unflatten(-1, (-1, len(taps)))).to(x.dtype)
    )
    return y, dx, torch.cat([w.grad for w in weights]).view_as(module.weight)


@pytest.mark.parametrize("config", [CONFIG, TENSOR], ids=["blocks", "tensor"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in CONVOLUTIONS), *((n, torch.bfloat16) for n in CONVOLUTIONS if n != "Conv2d")],
)
def test_convolutions_multiply_what_a_loop_unfolds(name, dtype, config):
    module, x = convolution(name, dtype)
    x.requires_grad_()
    g = normal(*module(x).shape, seed=4, dtype=dtype)
    expected = loop(module, x.detach(), g, config)
    y = convert(module, recipe=config)(x)
    assert y.dtype == dtype
    y.backward(g)
    for each, found in zip(expected, (y, x.grad, module.weight.grad), strict=True):
        assert torch.equal(each, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bilinear_multiplies_its_second_input_and_sums_in_float32(dtype):
    torch.manual_seed(0)
    module = nn.Bilinear(3, 32, 5).to(dtype)
    x1, x2, g = (normal(7, n, seed=n, dtype=dtype).requires_grad_(n != 5) for n in (3, 32, 5))
    w = module.weight.detach().reshape(15, 32).requires_grad_()
    again = x2.detach().clone().requires_grad_()
    columns = EmulatedGEMM.apply(again, w, None, CONFIG)
    y = (columns.view(7, 5, 3).float() * x1.detach()[:, None].float()).sum(-1) + module.bias.detach().float()
    columns.backward((g.float()[:, :, None] * x1.detach().float()[:, None]).to(dtype).flatten(1))
    found = convert(module, recipe=CONFIG)(x1, x2)
    found.backward(g)
    assert torch.equal(found, y.to(dtype)) and torch.equal(x2.grad, again.grad)
    assert torch.equal(module.weight.grad.view(15, 32), w.grad)
    dx1 = (columns.detach().view(7, 5, 3).float() * g.float()[:, :, None]).sum(1)
    torch.testing.assert_close(x1.grad, dx1.to(dtype), rtol=1e-6, atol=1e-6)  # a float32 sum in torch's own order


def test_convolution_quantises_the_unfolded_input_along_channels_and_kernel():
    torch.manual_seed(0)
    config = linear_config(x="mxfp8_e4m3", w="mxfp8_e4m3", g="mxfp8_e5m2")
    rows = 2 * 5 * 6
    for module, outputs, inner in (
        (nn.Conv2d(4, 8, 3, padding=1), 8, 4 * 9),
        (nn.ConvTranspose2d(4, 8, 3, padding=1), 8 * 9, 4),
    ):
        convert(module, recipe=config)
        seen = {}
        module.emulation.observer = lambda part, seen=seen: (
            lambda operand, x, q, quantizer, dim: seen.update({operand: (x.shape, dim)})
        )
        module(torch.randn(2, 4, 5, 6)).sum().backward()
        assert seen["x_f"] == ((rows, inner), -1) and seen["w_f"] == ((outputs, inner), -1)
        assert seen["g_w"] == ((rows, outputs), 0) and seen["x_w"] == ((rows, inner), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_operator_keeps_torchs_rules(dtype):
    columns = normal(2, 3 * 2 * 3, 4 * 2, seed=1, dtype=dtype)
    torch.library.opcheck(torch.ops.fmtsim.fold.default, (columns, [4, 2], [10, 5], [2, 3], [2, 1], [3, 1]))


def test_a_model_of_them_learns_and_keeps_delayed_scales():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv1d(4, 16, 4, stride=2, padding=1), nn.GELU(), nn.Conv1d(16, 16, 3, padding=1))
    model = nn.ModuleList([encoder, nn.ConvTranspose1d(16, 4, 4, stride=2, padding=1), nn.Bilinear(4, 4, 4)])
    convert(model, recipe="te_delayed", filter_fn=lambda module, name: True)
    x, optimizer = normal(8, 4, 16, seed=1), torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        y = model[1](model[0](x)).mT
        loss = (model[2](y, x.mT) - x.mT).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert set(fmtsim.state(model)["layers"]) == {"0.0", "0.2", "1", "2"}


@pytest.mark.parametrize(
    "recipe", ["int8_static", "nvfp4_gptq", "int4_gptq", BIASED], ids=["int8", "nvfp4", "int4", "bias"]
)
def test_weights_are_rounded_in_place_after_training(recipe):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.ConvTranspose1d(8, 6, 3, groups=2), nn.ReLU())
    model = model.append(nn.Linear(12, 4)).requires_grad_(False)
    data = [normal(3, 4, 12, seed=s) for s in (4, 5)]
    exact, before = model(data[0]), copy.deepcopy(model.state_dict())
    fmtsim.ptq(model, recipe, data)
    assert {row.name for row in fmtsim.report(model).rows} == {"0", "2", "2 group 1", "4"}
    assert 0 < float((model(data[0]) - exact).norm() / exact.norm()) < (0.3 if "4_" in str(recipe) else 0.05)
    assert all(not torch.equal(model.state_dict()[key], before[key]) for key in ("0.weight", "2.weight"))
    pair = fmtsim.ptq(nn.Bilinear(4, 6, 5).requires_grad_(False), recipe, [(normal(9, 4), normal(9, 6, seed=1))])
    assert len(fmtsim.report(pair).rows) == 1


@pytest.mark.parametrize(("make", "shapes", "message"), [
    (lambda: nn.Conv1d(4, 8, 3), [(2, 3, 5)],
     r"Conv1d input of shape \(2, 3, 5\) does not fit; pass \[N, 4, L\] or \[4, L\]"),
    (lambda: nn.Conv2d(4, 8, 3), [(2, 3, 5, 5)], r"shape \(2, 3, 5, 5\) does not fit; pass \[N, 4, H, W\]"),
    (lambda: nn.ConvTranspose3d(4, 8, 3), [(4, 5, 5)], r"\(4, 5, 5\) does not fit; pass \[N, 4, D, H, W\] or \[4, D"),
    (lambda: nn.Conv2d(4, 8, 3, dilation=2, padding=1), [(4, 2, 9)],
     r"Conv2d input of shape \(4, 2, 9\) is too small: kernel_size=\(3, 3\), dilation=\(2, 2\) and padding=\(1, 1\) "
     r"leave an output of \(0, 7\); pass a larger input, or more padding"),
    (lambda: nn.ConvTranspose1d(4, 8, 3, padding=4), [(4, 2)], r"\(4, 2\) is too small: .* leave an output of \(0,\)"),
    (lambda: nn.ConvTranspose1d(4, 8, 3, output_padding=1), [(4, 2)],
     r"ConvTranspose1d output_padding=\(1,\) is not smaller than stride=\(1,\) or dilation=\(1,\); choose a smaller"),
    (lambda: nn.Bilinear(4, 6, 5), [(3, 4), (3, 5)],
     r"Bilinear inputs of shapes \(3, 4\) and \(3, 5\) do not fit; pass \[..., 4\] and \[..., 6\] with the same lea"),
    (lambda: nn.Bilinear(4, 6, 5), [(3, 4), (1, 6)], r"\(3, 4\) and \(1, 6\) do not fit"),
])  # fmt: skip
def test_what_does_not_fit(make, shapes, message):
    with pytest.raises(ArgumentError, match=message):
        convert(make(), recipe=TENSOR)(*map(torch.ones, shapes))


@pytest.mark.parametrize("name", ["Conv1d", "Conv2d", "Conv3d"])
def test_channels_last_changes_no_bit(name):
    module, x = convolution(name)
    convert(module, recipe=TENSOR)
    form = {3: torch.channels_last, 4: torch.channels_last_3d}.get(x.dim() - 1, torch.contiguous_format)
    results = []
    for layer, images in (
        (module, x),
        (copy.deepcopy(module).to(memory_format=form), x.contiguous(memory_format=form)),
    ):
        images.requires_grad_()
        y = layer(images)
        results.append([y, *torch.autograd.grad(y, [images, *layer.parameters()], normal(*y.shape, seed=5))])
    assert all(map(torch.equal, *results))


def test_autocast_gives_its_dtype():
    transposed, x = convolution("ConvTranspose1d")
    bilinear = convert(nn.Bilinear(4, 6, 5), recipe=TENSOR)
    with torch.autocast("cpu", torch.bfloat16):
        assert bilinear(normal(3, 4), normal(3, 6)).dtype == torch.bfloat16
        assert convert(transposed, recipe=TENSOR)(x).dtype == torch.bfloat16


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_second_derivatives_are_refused(name):
    module, x = convolution(name)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(convert(module, recipe=TENSOR)(x).square().sum(), x, create_graph=True)
    with pytest.raises(fmtsim.FmtsimError, match="EmulatedGEMM cannot be differentiated twice"):
        dx.sum().backward()


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_depthwise_layers_are_left_whatever_their_dimensions(kind):
    model = nn.ModuleList([nn.Linear(8, 8), kind(4, 8, 3, groups=4), kind(4, 8, 3, groups=2)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fmtsim.errors.CoverageWarning)
        convert(model, recipe=TENSOR)
    assert [isinstance(module, EmulatedModule) for module in model] == [True, False, True]


@pytest.mark.parametrize(("make", "size"), [
    (lambda: nn.Conv3d(6, 8, 2, groups=2), "4 x 24"), (lambda: nn.ConvTranspose2d(8, 16, 3, groups=2), "72 x 4"),
    (lambda: nn.Bilinear(4, 6, 5), "20 x 6"),
])  # fmt: skip
def test_sizes_that_a_rotation_does_not_divide_are_refused(make, size):
    with pytest.raises(ArgumentError, match=rf"layer '' \(w is {size}\): .*Hadamard size=32 does not divide"):
        convert(make(), recipe=fmtsim.get_recipe("quartet").linear)


def test_forwards_of_their_own_are_left():
    class Causal(nn.Conv1d):
        def _conv_forward(self, input, weight, bias):
            return super()._conv_forward(nn.functional.pad(input, (2, 0)), weight, bias)

    class Named(nn.ConvTranspose2d):
        pass

    with pytest.warns(CoverageWarning, match=r": 0 25.0 % \(overrides Conv1d.forward"):
        model = convert(nn.Sequential(Causal(4, 4, 3), Named(4, 4, 3)), recipe=TENSOR)
    assert fmtsim.report(model).left_alone[0].detail == "overrides Conv1d.forward; call fmtsim.EmulatedGEMM in it"
    assert type(model[1]).__name__ == "EmulatedNamed" and isinstance(model[1], Named)
