# SPDX-License-Identifier: Apache-2.0
"""Hadamard transforms in one pass: the bits of their definition, and that the verb takes the kernel."""

import pytest
import torch

import fmtsim.cuda
from fmtsim.cuda.cast import warp_hadamard as engine
from fmtsim.scaling import hadamard as verbs
from fmtsim.scaling.hadamard import transform
from fmtsim.scaling.hadamard_matrix import base_matrix, random_signs, sign_bits
from tests.support.bits import assert_same_bits
from tests.support.operands import numbers

SLOW = pytest.mark.slow

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


def rows(size, dtype):
    """Return special rows, and groups of NaN with a sign, of zeros with either sign, and of Inf."""
    x = numbers((6, 2 * size), dtype)
    nan = torch.tensor(float("nan"), dtype=dtype)
    cases = ([-nan] + [1.0] * (size - 1), [-0.0] * size, [0.0] * size, [float("inf")] * 2 + [-0.0] * (size - 2))
    return torch.cat([x, torch.tensor(cases, dtype=dtype).view(2, 2 * size)])


def drawn(size):
    return sign_bits(random_signs(size, 3), size)


def defined(x, size, flips, inverse):
    return transform(x, size, -1, base_matrix(1), flips, inverse)


@pytest.mark.parametrize("size", [16, pytest.param(32, marks=SLOW), pytest.param(64, marks=SLOW), 128, 256, 512])
def test_transforms_have_the_bits_of_their_definition(size, device):
    for dtype in DTYPES if size == 16 else DTYPES[:2]:
        x = rows(size, dtype)
        for flips, inverse in ((None, False), (drawn(size), False), (drawn(size), True)):
            on_device = None if flips is None else flips.to(device)
            found = engine.hadamard(x.to(device), size, on_device, inverse)
            assert_same_bits(found, defined(x, size, flips, inverse), what=(dtype, inverse))


def test_the_verb_takes_the_kernel(device, monkeypatch):
    """Elsewhere than in groups along the last dimension of Sylvester's matrix it takes torch operations."""
    x, signs = rows(128, torch.bfloat16), torch.randn(32, generator=torch.Generator().manual_seed(1))
    late = torch.cat([x.view(-1)[:1], x.view(-1)]).to(device)[1:].view(x.shape)  # where no vector begins
    calls = ((x, 128, 5, -1), (x, 32, signs, 1), (x.mT, 8, None, 0), (x.mT, 16, 9, -2), (x.mT[:, :1], 1, None, -1))
    wanted = [verbs.hadamard(t, size, s, dim=dim, inverse=True) for t, size, s, dim in calls]
    taken, real = [], engine.hadamard
    monkeypatch.setattr(fmtsim.cuda, "hadamard", lambda t, size, *rest: taken.append(size) or real(t, size, *rest))
    monkeypatch.setattr(verbs, "fused_engine", lambda t: fmtsim.cuda)
    for (t, size, s, dim), y in zip(calls, wanted, strict=True):
        assert_same_bits(verbs.hadamard(t.to(device), size, s, dim=dim, inverse=True), y)
    assert_same_bits(verbs.hadamard(late, 128, 5, inverse=True), wanted[0])
    assert taken == [128, 32, 128]
    assert verbs.hadamard(x[:0].to(device), 16).shape == (0, 256)
    own = verbs.hadamard(
        x.to(device), 16, matrix=torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    )
    assert own.shape == x.shape and taken == [128, 32, 128, 16]


def test_derivatives_are_transforms_by_the_kernel(device, monkeypatch):
    x, g = rows(64, torch.bfloat16)[:4], torch.randn(4, 128, generator=torch.Generator().manual_seed(2))
    found = []
    for place, on_card in ((x, False), (x.to(device), True)):
        monkeypatch.setattr(verbs, "fused_engine", lambda t, on=on_card: fmtsim.cuda if on else None)
        leaf = place.clone().requires_grad_()
        verbs.hadamard(leaf, 64, 77).backward(g.to(leaf.device))
        found.append(leaf.grad)
    assert_same_bits(*found)
