# SPDX-License-Identifier: Apache-2.0
"""Products whose groups along the sum have scales: against float64, on the host and on a GPU."""

import math

import pytest
import torch

import fmtsim.cuda
from fmtsim.casts.quantize import quantize
from fmtsim.cuda.gemm import scaled_product
from fmtsim.cuda.gemm.scaled_product import covers_groups, multiply_groups, parts_of
from fmtsim.formats.registry import get_format
from fmtsim.gemm.layers.emulated_gemm import run_layer
from fmtsim.gemm.layers.keys import Layer
from fmtsim.recipes import get_recipe
from fmtsim.spec.operand import Operand
from fmtsim.spec.quantizer import Quantizer

SLOW = pytest.mark.slow


def factor(rows, depth, block, seed, transposed=False, apart=20, group=128):
    """E4M3 elements, scales from 2**-apart to 2**apart that are not powers of two."""
    generator = torch.Generator().manual_seed(seed)
    x = quantize(torch.randn(rows, depth, generator=generator) * 100, get_format("e4m3")).bfloat16()
    counts = -(-rows // block), -(-depth // group)
    scale = (
        torch.randn(counts, generator=generator).abs().clamp(min=0.1)
        * torch.randint(-apart, apart + 1, counts, generator=generator).exp2()
    )
    if transposed:
        x, scale = x.mT.contiguous().mT, scale.mT.contiguous().mT
    return Operand(x, Quantizer(), scale, block=(block, group))


def moved(x, device):
    """The same strides elsewhere; torch's ``to`` keeps them."""
    return x._replace(elements=x.elements.to(device), scale=x.scale.to(device))


def values(x):
    rows, depth = x.elements.shape
    scale = x.scale.double().repeat_interleave(x.block[0], 0)[:rows].repeat_interleave(x.block[1], 1)[:, :depth]
    return x.elements.double() * scale


def limit(a, b, parts):
    """How far a float32 result may be from the exact one.

    An instruction of the unit adds 16 exact products and a sum, cuts each to units of at least 2**-23 of the largest,
    and then the result: 18 cuts, each at most 2**-23 of the sum of all magnitudes of the group so far. A group of 128
    takes 8 instructions. Scaling rounds twice by 2**-24; every later addition, of groups and of parts, once.
    """
    groups = a.scale.shape[1]
    relative = 8 * 18 * 2.0**-23 + (2 + groups + parts) * 2.0**-24
    return values(a).abs() @ values(b).abs().mT * relative


def check(a, b, dtype, device, bias=None):
    added = None if bias is None else bias.to(device)
    assert covers_groups(moved(a, device), moved(b, device))
    found = multiply_groups(moved(a, device), moved(b, device), added, dtype)
    assert found.dtype == dtype and found.shape == (a.elements.shape[0], b.elements.shape[0])
    again = multiply_groups(moved(a, device), moved(b, device), added, dtype)
    assert torch.equal(found.view(torch.int16 if dtype == torch.bfloat16 else torch.int32),
                       again.view(torch.int16 if dtype == torch.bfloat16 else torch.int32))  # fmt: skip
    exact = values(a) @ values(b).mT + (0.0 if bias is None else bias.double())
    error = (found.cpu().double() - exact).abs()
    rounding = exact.abs() * (2.0**-8 if dtype == torch.bfloat16 else 0.0 if bias is None else 2.0**-24)
    assert bool((error <= limit(a, b, 16) * 1.01 + rounding).all()), float((error / limit(a, b, 16)).max())


@pytest.mark.parametrize(
    ("shape", "blocks", "transposed", "dtype"),
    [
        ((200, 136, 264), (1, 128), (False, False), torch.bfloat16),
        ((136, 152, 384), (1, 128), (False, True), torch.float32),
        ((136, 264, 520), (1, 1), (True, True), torch.float32),
        pytest.param((128, 128, 128), (1, 1), (True, False), torch.bfloat16, marks=SLOW),
        pytest.param((8, 8, 8), (1, 1), (True, True), torch.bfloat16, marks=SLOW),
        pytest.param((1, 4, 2048), (1, 128), (False, False), torch.float32, marks=SLOW),
        pytest.param((392, 264, 256), (128, 128), (False, True), torch.bfloat16, marks=SLOW),
        pytest.param((72, 136, 101), (1, 1), (True, True), torch.float32, marks=SLOW),
        pytest.param((3, 12, 1000), (1, 128), (False, False), torch.float32, marks=SLOW),
    ],
)
def test_sums_are_those_of_float64_but_for_rounding(shape, blocks, transposed, dtype, device):
    m, n, k = shape
    a, b = factor(m, k, blocks[0], 1, transposed[0]), factor(n, k, blocks[1], 2, transposed[1])
    check(a, b, dtype, device)
    check(a, b, dtype, device, torch.randn(n, generator=torch.Generator().manual_seed(3)).bfloat16())


def test_a_bias_begins_where_two_numbers_may(emulated, monkeypatch):
    """The kernel reads two at once, which a GPU does at multiples of 8 bytes alone, and the host anywhere."""
    seen, real = [], scaled_product.kernel

    def kernel(*given):
        run = real(*given)
        return lambda *words, **options: seen.append(words[5]) or run(*words, **options)

    monkeypatch.setattr(scaled_product, "kernel", kernel)
    a, b, numbers = factor(8, 128, 1, 1), factor(8, 128, 128, 2), torch.randn(9)
    found = multiply_groups(a, b, numbers[1:], torch.float32)
    assert torch.equal(seen[0], numbers[1:]) and seen[0].data_ptr() % 8 == 0
    assert torch.equal(found, multiply_groups(a, b, numbers[1:].clone(), torch.float32))


@SLOW
def test_groups_of_64(device):
    check(*(factor(72, 520, 1, seed, group=64) for seed in (1, 2)), torch.float32, device)


def test_scales_whose_product_leaves_the_range(device):
    """Columns that share a scale take it with the row's first, unless that product is far from one."""
    a, b = factor(16, 256, 1, 8, apart=0), factor(16, 256, 128, 9, apart=0)
    for x in (a, b):
        x.scale.mul_(2.0**-60)
    check(a, b, torch.float32, device)
    a.scale.mul_(2.0**125), b.scale.mul_(2.0**125)
    a.elements.zero_()  # 2**65 times 2**65 is not a float32
    assert not multiply_groups(moved(a, device), moved(b, device), None, torch.float32).any()


@pytest.mark.parametrize("parts", [1, 3])
def test_planted_errors_are_caught(parts, emulated, monkeypatch):
    """One element moved by its last place, one scale by a thousandth, or a part left out."""
    a, b = (factor(8, 768, block, block + 2, apart=0) for block in (1, 128))
    monkeypatch.setattr(scaled_product, "parts_of", lambda *_: (parts, 6 // parts))
    device = torch.device("cpu")
    check(a, b, torch.float32, device)
    real = multiply_groups

    def wrong(change):
        x = a._replace(elements=a.elements.clone(), scale=a.scale.clone())
        change(x)
        monkeypatch.setitem(
            globals(), "multiply_groups", lambda first, second, bias, dtype: real(x, second, bias, dtype)
        )
        with pytest.raises(AssertionError):
            check(a, b, torch.float32, device)

    place = int((a.elements[2].float() * a.scale[2].repeat_interleave(128)).abs().argmax())
    wrong(lambda x: x.elements[2, place].mul_(1.0625))
    wrong(lambda x: x.scale[3].mul_(1.001))
    wrong(lambda x: x.elements[:, 640:].zero_())


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_row(special, device):
    a, b = factor(16, 256, 1, 5), factor(16, 256, 128, 6)
    a.elements[3, 200], b.scale[0, 1] = special, 2.0
    found = multiply_groups(moved(a, device), moved(b, device), None, torch.float32).cpu()
    wanted = (values(a) @ values(b).mT).float()
    assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isinf(), wanted.isinf())
    assert torch.equal(found[found.isinf()], wanted[found.isinf()]) and bool(found[:3].isfinite().all())


def test_what_has_no_kernel_is_said(emulated):
    a, b = factor(16, 256, 1, 5), factor(16, 256, 128, 6)
    assert covers_groups(a, b)
    assert not covers_groups(a, b._replace(block=(128, 64)))
    assert not covers_groups(*(x._replace(block=(128, 32)) for x in (a, b)))
    assert not covers_groups(a._replace(elements=a.elements.float()), b)
    assert not covers_groups(a, factor(18, 256, 128, 6))  # rows of the result are stored four by four
    assert not covers_groups(*(factor(16, 100, 1, 5) for _ in range(2)))
    assert covers_groups(*(factor(16, 100, 1, 5, transposed=True) for _ in range(2)))
    assert not covers_groups(a._replace(elements=a.elements.repeat(1, 2)[:, :256]), b)


def test_parts_fill_a_device():
    """A product of few tiles is cut, one of many is not; all groups are in some part."""
    assert parts_of(8192, 2304, 6, 132)[0] == 1
    assert parts_of(768, 768, 64, 132)[0] > 1
    for groups in range(1, 70):
        parts, length = parts_of(256, 256, groups, 132)
        assert (parts - 1) * length < groups <= parts * length


def gradients(run, x, w, g):
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = run(x, w)
    return (y.detach(), *torch.autograd.grad(y, (x, w), g))


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=SLOW)])
def test_layers_take_the_kernel(compiled, on_card, monkeypatch):
    """The three products of DeepSeek-V3's layers: near those in float32, and the same bits compiled, with a bias."""
    generator = torch.Generator().manual_seed(7)
    sizes = (144, 256), (384, 256), (144, 384), (384,)
    x, w, g, added = (torch.randn(size, generator=generator).bfloat16().to(on_card) for size in sizes)
    layer = Layer(get_recipe("deepseek_v3").linear, None)

    def run(x, w):
        return run_layer(x, w, added if compiled else None, layer)

    calls, real = [], multiply_groups
    monkeypatch.setattr(fmtsim.cuda, "multiply_groups", lambda *given: calls.append(given) or real(*given))
    found = gradients(run, x, w, g)
    assert [tuple(not x.elements.is_contiguous() for x in given[:2]) for given in calls] == [
        (False, False),
        (False, True),
        (True, True),
    ]
    if compiled:
        torch._dynamo.reset()
        again = gradients(torch.compile(run, fullgraph=True, backend="aot_eager"), x, w, g)
        assert len(calls) == 6
        for a, b in zip(found, again, strict=True):
            assert torch.equal(a, b)
    count = len(calls)
    monkeypatch.setattr(fmtsim.cuda, "covers_groups", lambda *_: False)
    for a, b in zip(found, gradients(run, x, w, g), strict=True):
        assert float((a.float() - b.float()).abs().max()) <= 2.0**-7 * float(b.abs().max())
    assert len(calls) == count
