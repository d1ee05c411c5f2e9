"""Products whose groups along the sum have scales: against float64, on the host and on a GPU."""

import math

import pytest
import torch

from fmtsim.cuda import scaled_product
from fmtsim.cuda.scaled_product import Factor, multiply, parts_of
from fmtsim.formats.registry import get_format
from fmtsim.quantize import quantize

SLOW = pytest.mark.slow


def factor(rows, depth, block, seed, turned=False, group=128):
    """E4M3 elements, scales from 2**-20 to 2**20 that are no powers of two."""
    generator = torch.Generator().manual_seed(seed)
    x = quantize(torch.randn(rows, depth, generator=generator) * 100, get_format("e4m3")).bfloat16()
    counts = -(-rows // block), -(-depth // group)
    scale = torch.randn(counts, generator=generator).abs().clamp(min=0.1) * torch.randint(-20, 20, counts).exp2()
    if turned:
        x, scale = x.mT.contiguous().mT, scale.mT.contiguous().mT
    return Factor(x, scale, (block, group))


def moved(x, device):
    """The same strides elsewhere; torch's ``to`` keeps them."""
    return Factor(x.elements.to(device), x.scale.to(device), x.sizes)


def values(x):
    rows, depth = x.elements.shape
    scale = x.scale.double().repeat_interleave(x.sizes[0], 0)[:rows].repeat_interleave(x.sizes[1], 1)[:, :depth]
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


def check(a, b, dtype, device):
    assert scaled_product.covers(moved(a, device), moved(b, device))
    found = multiply(moved(a, device), moved(b, device), dtype)
    assert found.dtype == dtype and found.shape == (a.elements.shape[0], b.elements.shape[0])
    again = multiply(moved(a, device), moved(b, device), dtype)
    assert torch.equal(found.view(torch.int16 if dtype == torch.bfloat16 else torch.int32),
                       again.view(torch.int16 if dtype == torch.bfloat16 else torch.int32))  # fmt: skip
    exact = values(a) @ values(b).mT
    error = (found.cpu().double() - exact).abs()
    rounding = exact.abs() * 2.0**-8 if dtype == torch.bfloat16 else 0.0
    assert bool((error <= limit(a, b, 16) * 1.01 + rounding).all()), float((error / limit(a, b, 16)).max())


@pytest.mark.parametrize(
    ("shape", "blocks", "turned", "dtype"),
    [
        ((200, 136, 264), (1, 128), (False, False), torch.bfloat16),
        ((136, 152, 384), (1, 128), (False, True), torch.float32),
        ((136, 264, 520), (1, 1), (True, True), torch.float32),
        pytest.param((128, 128, 128), (1, 1), (True, False), torch.bfloat16, marks=SLOW),
        pytest.param((8, 8, 8), (1, 1), (True, True), torch.bfloat16, marks=SLOW),
        pytest.param((1, 4, 2048), (1, 128), (False, False), torch.float32, marks=SLOW),
        pytest.param((392, 264, 256), (128, 128), (False, True), torch.bfloat16, marks=SLOW),
        pytest.param((3, 12, 1000), (1, 128), (False, False), torch.float32, marks=SLOW),
    ],
)
def test_sums_are_those_of_float64_but_for_rounding(shape, blocks, turned, dtype, device):
    m, n, k = shape
    a, b = factor(m, k, blocks[0], 1, turned[0]), factor(n, k, blocks[1], 2, turned[1])
    check(a, b, dtype, device)
