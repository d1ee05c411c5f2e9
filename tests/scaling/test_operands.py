# SPDX-License-Identifier: Apache-2.0
"""What a quantised operand is made of: blocks of a tensor, seeds of signs, clamps, slopes of gradients, and values."""

import re

import pytest
import torch
from torch.sparse._semi_structured_conversions import _sparse_semi_structured_tile

from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.blocks import blocks_of, largest, windows
from fmtsim.scaling.hadamard_matrix import random_signs
from fmtsim.scaling.scaled_cast import Scaled, cast, slope, transformed
from fmtsim.scaling.scales import Scales
from fmtsim.spec.quantizer import Clamp, ClipMask, Differentiable, Sparsity, StraightThrough, TrustMask
from fmtsim.support.errors import ArgumentError
from tests.support.bits import assert_same_bits
from tests.support.operands import normal

E2M1, E4M3 = get_format("e2m1"), get_format("e4m3")

SHAPES = [
    ((), -1), ((5,), -1), ((4, 6), -1), ((4, 7), -2), ((2, 3, 5), -2), ((3, 2, 4), -3), ((4, 7), 0), ((3, 2, 4), 1),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("block", [(1, 2), (1, 3), (2, 2), (1, None), (None, 2), (None, None), (9, 9)])
def test_a_tensor_as_rows_of_blocks(shape, dim, block):
    count = 1
    for size in shape:
        count *= size
    x = torch.arange(1.0, count + 1).reshape(shape)
    how = blocks_of(shape, dim, block)
    matrix = x.reshape(1, 1) if not shape else x.movedim(dim, -1).reshape(-1, shape[dim])
    height, width = (min(b or n, n) for b, n in zip(block, matrix.shape, strict=True))
    assert (how.outer, how.inner, how.height, how.width) == (*matrix.shape, height, width)
    parts = [
        torch.nn.functional.pad(part, (0, width - part.shape[1], 0, height - part.shape[0])).flatten().tolist()
        for rows in matrix.split(height) for part in rows.split(width, 1)
    ]  # fmt: skip
    folded = how.fold(x)
    assert folded.tolist() == parts and torch.equal(how.unfold(folded), x)
    assert how.per_block(folded.amax(1)).shape == (how.rows, how.columns) == (
        -(-matrix.shape[0] // height), -(-matrix.shape[1] // width))  # fmt: skip


@pytest.mark.parametrize("limit", [1, 3, 7, 20, 1000])
def test_windows_cover_a_matrix_once(limit):
    x = torch.zeros(9, 7)
    for rows, columns in windows(x, limit):
        assert x[rows, columns].numel() <= max(limit, 1)
        x[rows, columns] += 1
    assert x.eq(1).all()
    assert largest(normal(3, 70000, seed=1), torch.abs).tolist() == normal(3, 70000, seed=1).abs().amax(1).tolist()


def test_a_generator_gives_one_seed():
    first, seeds = (torch.Generator().manual_seed(3) for _ in range(2))
    drawn = [int(torch.randint(-(1 << 63), (1 << 63) - 1, (1,), generator=seeds)) for _ in range(2)]
    assert [random_signs(64, first) for _ in range(2)] == [random_signs(64, (seed, 0)) for seed in drawn]


@pytest.mark.parametrize("generator", ["seed", 1.5, True, None, (1,), (1, 2, 3), (1, 2.0), ("a", 0)])
def test_what_signs_are_not_drawn_from(generator):
    message = f"generator={generator!r} is not one; pass an int seed, a RandomKey or a torch.Generator"
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        random_signs(4, generator)
    for size in (0, -1, 2.0, True):
        with pytest.raises(
            ArgumentError, match=f"^size={size!r} is not a number of signs; choose an int of 1 or more$"
        ):
            random_signs(size, 1)


@pytest.mark.parametrize(("level", "low", "high"), [(0.9, 0, 8), (0.75, 2, 6), (0.99, 0, 8), (1, 0, 8), (0.6, 3, 5)])
def test_clamps_to_the_places_of_sorted_numbers(level, low, high):
    x = normal(4, 9, seed=6)
    for rows in (x, x.bfloat16()):
        y, rest = transformed(rows, Clamp(level=level, per="row"), None)
        wide = rows.float()
        for row, got in zip(wide, y, strict=True):
            ordered = sorted(row.tolist())
            assert got.tolist() == [min(max(v, ordered[low]), ordered[high]) for v in row.tolist()]
        assert rest is None and y.dtype == rows.dtype
    y, rest = transformed(x, Clamp(level=level, compensate=True), None)
    ordered = sorted(x.flatten().tolist())
    places = int((1 - level) * 36), min(int(level * 36), 35)
    assert torch.equal(y, x.clamp(ordered[places[0]], ordered[places[1]])) and torch.equal(rest, x - y)


def test_slopes_of_each_rule():
    y = torch.tensor([[0.0, 0.2, 0.25, 0.3, 0.75, 1.2, 2.4, -2.5, 3.1, 5.0, 5.9, 6.0, -6.0, 6.1, -7.0, 0.5]])
    q = torch.tensor([[0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 2.0, -2.0, 3.0, 4.0, 6.0, 6.0, -6.0, 6.0, -6.0, 0.5]])
    made = Scaled(q, Scales(torch.ones(1, 1), torch.ones(1, 1)), y)
    assert slope(StraightThrough(), made, E2M1) is None
    assert slope(ClipMask(), made, E2M1).tolist() == (y.abs() < 6).tolist()
    for limit in (0.1, 0.25, 0.5):
        assert slope(TrustMask(limit=limit), made, E2M1).tolist() == ((y - q).abs() <= limit).tolist()
    grid = [s * v for v in (0.5, 1, 1.5, 2, 3, 4, 6) for s in (1, -1)] + [0.0]
    for k, cap in ((5.0, 3.0), (2.0, 1.2)):
        found = slope(Differentiable(k=k, cap=cap), made, E2M1)[0].tolist()
        for number, got in zip(y[0].tolist(), found, strict=True):
            below, above = (
                max((v for v in grid if v <= number), default=-6),
                min((v for v in grid if v >= number), default=6),
            )
            u = abs(2 * (number - below) / (above - below) - 1) if above > below else 1.0
            exact = 0.0 if abs(number) > 6 else min(u ** (1 / k - 1) / k, cap) if u else cap
            assert got == pytest.approx(exact, rel=1e-6)  # torch.pow's last bit is the device's


def test_values_are_products_rounded_once():
    q, s = torch.tensor([[3.0, -0.5, 6.0, 1.0]]), torch.tensor([[1 / 3, 1 / 7]])
    wide = s.repeat_interleave(2, 1)
    assert_same_bits(Scaled(q, Scales(s, s), q).values((1, 2)), q * wide)
    two = Scaled(q, Scales(s, s, tensor=torch.tensor(0.1)), q).values((1, 2))
    assert_same_bits(two, (q.double() * wide.double() * torch.tensor(0.1).double()).float())


def test_groups_whose_scales_are_corrected():
    """EDEN: scales times <y, y> / <y, q>, rounded again; a group of zeros keeps them."""
    x = normal(2, 64, seed=8)
    x[1, 32:] = 0
    rule = Scaling(block=(1, 16), arithmetic="divide", scale=E4M3, eden=32)
    plain = cast(x, E2M1, Scaling(block=(1, 16), arithmetic="divide", scale=E4M3), Rounding(), "saturate")
    found = cast(x, E2M1, rule, Rounding(), "saturate")
    assert_same_bits(found.elements, plain.elements)
    for i in range(2):
        for j in range(2):
            y, q = (t[i, 32 * j : 32 * j + 32].double() for t in (plain.scaled, plain.elements))
            over = float((y * q).sum())
            times = torch.tensor(float((y * y).sum()) / over if over else 1.0)  # sums of few bits, exact enough
            kept = plain.scales.scale[i, 2 * j : 2 * j + 2] * times
            assert found.scales.scale[i, 2 * j : 2 * j + 2].tolist() == kept.to(torch.float8_e4m3fn).float().tolist()


def sparse(x, **fields):
    return transformed(x, Sparsity(**fields), None)[0]


def test_sparsity_keeps_the_two_largest_of_four_and_the_earlier_of_equal_ones():
    few = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, float("nan"), float("inf")])
    fours = torch.cartesian_prod(few, few, few, few)  # every pattern of ties
    size = torch.nan_to_num(fours.abs(), nan=torch.finfo(torch.float32).max, posinf=1e30)
    kept = torch.zeros(fours.shape, dtype=torch.bool)
    for row, mask in zip(size.tolist(), kept, strict=True):
        for place in sorted(range(4), key=lambda i: (-row[i], i))[:2]:
            mask[place] = True
    assert_same_bits(sparse(fours.reshape(-1, 28)), torch.where(kept, fours, 0.0).reshape(-1, 28))
    assert sparse(fours.to(torch.bfloat16)).dtype == torch.bfloat16


def test_sparsity_of_tiles_is_that_of_torch_and_holds_for_the_transpose():
    x = torch.cat([normal(16, 64, seed=3), normal(16, 64, seed=4).round()])  # the second half has ties
    y = sparse(x, tiles=True)
    expected = (
        _sparse_semi_structured_tile(x.double().abs() + 1.0) != 0
    )  # its rule takes values, of which zero is dropped
    assert_same_bits(y, torch.where(expected, x, 0.0))
    for each in (y, y.mT):
        assert int((each.reshape(-1, 4) != 0).sum(1).max()) == 2
