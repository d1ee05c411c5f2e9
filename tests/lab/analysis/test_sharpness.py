# SPDX-License-Identifier: Apache-2.0
"""The closed form of sharpness against every corner of the box, and against a search by gradient."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from fmtsim.lab.training.sweep import sharpness
from fmtsim.support.errors import ArgumentError, DtypeError
from tests.support.operands import normal


def rise(z, target, moves):
    after = F.cross_entropy(z + moves, target.expand(len(moves)), reduction="none")
    before = F.cross_entropy(z, target)
    return (after - before) / (1 + before) * 100


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("eps", [5e-4, 0.1, 2.0])
def test_closed_form_is_the_best_corner(seed, eps):
    source = torch.Generator().manual_seed(seed)
    z = torch.randn(9, generator=source, dtype=torch.float64) * 4
    target = torch.randint(9, (), generator=source)
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=9)), dtype=torch.float64)
    moves = corners * eps * (z.abs() + 1)
    assert sharpness(z, target) == sharpness(z, target, 5e-4)
    assert float(sharpness(z, target, eps)) == pytest.approx(float(rise(z, target, moves).max()), rel=1e-12)


def test_no_ascent_climbs_higher():
    """Projected gradient ascent inside the box ends at the closed form, from the middle of the box."""
    source = torch.Generator().manual_seed(1)
    z, target = torch.randn(6, generator=source, dtype=torch.float64), torch.tensor(2)
    room = 0.3 * (z.abs() + 1)
    move = torch.zeros(1, 6, dtype=torch.float64, requires_grad=True)
    for _ in range(500):
        (slope,) = torch.autograd.grad(rise(z, target, move).sum(), move)
        move = (move.detach() + 0.1 * slope).clamp(-room, room).requires_grad_()
    assert float(rise(z, target, move.detach())) == pytest.approx(float(sharpness(z, target, 0.3)), rel=1e-12)


def test_shapes_and_wider_boxes():
    z = normal(3, 4, 7)
    targets = torch.zeros(3, 4, dtype=torch.int64)
    small, large = sharpness(z, targets), sharpness(z, targets, 1e-2)
    assert small.shape == (3, 4) and small.dtype == torch.float64
    assert bool((large > small).all()) and bool((small > 0).all())
    assert float(small[1, 2]) == float(sharpness(z[1, 2], targets[1, 2]))
    assert sharpness(torch.tensor([float("nan"), 0.0]), torch.tensor(0)).isnan()


def test_errors():
    with pytest.raises(DtypeError, match=r"logits have dtype torch.int64; pass float32 or float64"):
        sharpness(torch.tensor([1, 2]), torch.tensor(0))
    with pytest.raises(ArgumentError, match=r"targets of shape \(2,\) do not fit logits of shape \(3, 4\); pass one"):
        sharpness(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ArgumentError, match=r"eps=0 is not a width of a box; pass a number above 0, such as 5e-4"):
        sharpness(torch.zeros(4), torch.tensor(0), 0)
