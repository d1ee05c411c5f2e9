# SPDX-License-Identifier: Apache-2.0
"""Rounding of weights: GPTQ against exact fractions, learned rounding against all choices there are."""

import itertools
import sys
from fractions import Fraction

import pytest
import torch

from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling
from fmtsim.ptq import Gptq, LearnedRounding
from fmtsim.ptq.weight_grid import Grid, gptq, grid_of, learned_rounding, nearest, output_error
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError
from tests.ptq.ptq_oracle import brain_surgeon, encoded_step
from tests.support.operands import normal

N, K, ROWS = 4, 9, 40


def problem(seed):
    source = torch.Generator().manual_seed(seed)
    x = torch.randint(-9, 10, (ROWS, K), generator=source).double()
    x[:, 1] = 2 * x[:, 0] + torch.randint(-1, 2, (ROWS,), generator=source)  # inputs that lean on each other
    w = torch.randn(N, K, generator=source)
    steps = torch.tensor([2.0**-2, 0.3, 2.0**-1, 0.125], dtype=torch.float64)
    return x, w, Grid(element=get_format("int4"), scale=steps[:, None].expand(N, K).clone()), steps


def exact(x, w, steps, act_order, **groups):
    gram = [
        [sum(Fraction(a) * Fraction(b) for a, b in zip(p, q, strict=True)) for q in x.T.tolist()] for p in x.T.tolist()
    ]
    # a sixteenth of the mean of the diagonal
    mean = sum(gram[i][i] for i in range(K)) / K / 16
    for i in range(K):
        gram[i][i] += mean
    order = sorted(range(K), key=lambda i: -gram[i][i]) if act_order else range(K)
    found = brain_surgeon(w.tolist(), gram, [Fraction(s) for s in steps.tolist()], 7, order, **groups)
    return torch.tensor([[float(v) for v in row] for row in found], dtype=torch.float64)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_gptq_has_the_exact_choices(seed, act_order):
    x, w, grid, steps = problem(seed)
    q = gptq(w, x.mT @ x, grid, Gptq(damping=1 / 16, act_order=act_order))
    assert torch.equal((q / steps[:, None]).round(), (exact(x, w, steps, act_order) / steps[:, None]).round())
    assert torch.equal(q, (q / steps[:, None]).round() * steps[:, None])  # on the grid


def test_gptq_in_blocks_is_gptq_in_one(monkeypatch):
    x, w, grid, steps = problem(11)
    monkeypatch.setattr(sys.modules["fmtsim.ptq.weight_grid"], "BLOCK", 2)
    q = gptq(w, x.mT @ x, grid, Gptq(damping=1 / 16))
    assert torch.equal((q / steps[:, None]).round(), (exact(x, w, steps, False) / steps[:, None]).round())


def grouped(width):
    quantizer = Quantizer(format=get_format("int4"), scaling=Scaling(block=(1, width)))
    return quantizer, {"made": lambda numbers: encoded_step(numbers, 7), "width": width}


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("block", "width"), [(128, 4), (3, 4), (3, 3), (2, 5)])  # the last group is short
def test_groups_are_scaled_as_they_are_reached(monkeypatch, block, width, act_order):
    monkeypatch.setattr(sys.modules["fmtsim.ptq.weight_grid"], "BLOCK", block)
    differ = set()
    for seed in range(2):
        x, w, _, steps = problem(seed)
        quantizer, made = grouped(width)
        found = {}
        for groups in ("static", "dynamic", "lazy"):
            settings = Gptq(damping=1 / 16, act_order=act_order, groups=groups)
            found[groups] = gptq(w, x.mT @ x, grid_of(w, quantizer), settings)
        assert torch.equal(found["dynamic"], exact(x, w, steps, act_order, **made))
        assert torch.equal(found["lazy"], exact(x, w, steps, act_order, **made, lazy=block))
        differ |= {(a, b) for a in found for b in found if not torch.equal(found[a], found[b])}
    assert ("static", "dynamic") in differ and (("lazy", "dynamic") in differ or block == width)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_groups_of_block_formats_keep_the_scale_of_the_tensor(fmt):
    w = normal(6, 72, seed=4)
    quantizer = Quantizer(format=get_format(fmt))
    grid = grid_of(w, quantizer)
    scale = grid.scale.clone()
    for start in range(0, 72, grid.width):  # made of the weight itself they are what they were
        grid.remake(start, w[:, start : start + grid.width].double())
        assert torch.equal(grid.scale, scale)
    changed = torch.zeros_like(w)
    changed[:, :32] = w[:, :32] / 8
    grid.remake(0, changed[:, : grid.width])
    other = grid_of(torch.cat((changed[:, : grid.width], w[:, grid.width :]), 1), quantizer).scale
    assert torch.equal(grid.scale, other) and not torch.equal(other, scale)
    grid.remake(0, w[:, : grid.width] * 1e6)  # as much as the scale of the tensor allows
    assert (grid.scale[:, 0] == grid.scale.max()).all() if fmt == "nvfp4" else (grid.scale[:, 0] > 1e4).all()


def test_a_grid_rounds_float32_quotients_as_casts_do():
    quantizer = Quantizer(format=get_format("int4"), scaling=Scaling(block=(1, None), arithmetic="divide"))
    half = torch.arange(0.5, 6.5) * torch.rand(50_000, 1, generator=torch.Generator().manual_seed(0))
    w = torch.cat([half, half[:, 1:2] * (14 / 3)], 1)  # next to ties under the scale that the last one makes
    grid, plain = grid_of(w, quantizer), nearest(w, quantizer)
    assert torch.equal(grid.round(w.double(), slice(None)).float(), plain)
    exact = (w.double() / grid.scale).round() * grid.scale
    assert not torch.equal(exact.float(), plain)  # quotients of float64 are off these ties


def test_one_scale_a_row_or_tensor_is_made_once():
    x, w, _, _ = problem(2)
    for block in ((1, None), (None, None)):
        grid = grid_of(w, Quantizer(format=get_format("int4"), scaling=Scaling(block=block)))
        static, dynamic = (gptq(w, x.mT @ x, grid, Gptq(groups=groups)) for groups in ("static", "dynamic"))
        assert torch.equal(static, dynamic)


def test_gptq_without_correlations_is_nearest():
    _, w, grid, _ = problem(3)
    assert torch.equal(gptq(w, torch.eye(K) * 3, grid, Gptq()), grid.round(w.double(), slice(None)))


@pytest.mark.parametrize("seed", range(4))
def test_gptq_beats_nearest_on_its_data(seed):
    x, w, grid, _ = problem(seed)
    h = x.mT @ x
    plain = grid.round(w.double(), slice(None))
    assert output_error(w, gptq(w, h, grid, Gptq()), h).sum() < output_error(w, plain, h).sum()


def test_gptq_of_dead_and_dependent_inputs():
    x, w, grid, _ = problem(5)
    x[:, 4] = 0
    q = gptq(w, x.mT @ x, grid, Gptq())
    assert torch.equal(q[:, 4], grid.round(w[:, 4:5].double(), slice(4, 5))[:, 0])
    x[:, 1] = 2 * x[:, 0]
    with pytest.raises(ArgumentError, match=r"Hessian of 9 inputs is not positive definite with damping=0; raise Gptq"):
        gptq(w, x.mT @ x, grid, Gptq(damping=0))
    assert torch.equal(gptq(w, torch.zeros(K, K), grid, Gptq()), grid.round(w.double(), slice(None)))


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "int4", "e4m3", "e2m1", "int4_g32"])
def test_the_grid_of_a_weight_rounds_it_as_its_quantiser(fmt):
    w = normal(8, 64, seed=1)
    element = fmt in ("int4", "e4m3", "e2m1")
    quantizer = Quantizer(format=get_format(fmt), scaling=Scaling(block=(1, 32)) if element else None)
    q = grid_of(w, quantizer).round(w.double(), slice(None)).float()
    same = (q - nearest(w, quantizer)).abs() <= 1e-6 * w.abs().max()  # s rounded once more in float32
    assert same.all()


def test_a_format_without_scales_of_its_own_is_refused():
    with pytest.raises(ArgumentError, match=r"have no scales apart from their elements; choose an element format"):
        grid_of(torch.randn(4, 32), Quantizer(format=get_format("uint8_channel_zp")))


@pytest.mark.parametrize("seed", range(5))
def test_learned_rounding_comes_close_to_the_best_of_all_choices(seed):
    x, w, grid, _ = problem(seed)
    h = x.mT @ x
    low, high = grid.round(w.double(), slice(None), "down"), grid.round(w.double(), slice(None), "up")
    choices = torch.tensor(list(itertools.product((0.0, 1.0), repeat=K)), dtype=torch.float64)
    best = torch.stack([
        output_error(w[i].expand(len(choices), K), low[i] + (high[i] - low[i]) * choices, h).min() for i in range(N)
    ])  # fmt: skip
    plain = output_error(w, grid.round(w.double(), slice(None)), h)
    found = learned_rounding(w, h, grid, LearnedRounding())
    error = output_error(w, found, h)
    assert ((found == low) | (found == high)).all()
    assert (error >= best - 1e-9).all() and (error <= plain).all()
    assert error.sum() <= best.sum() + 0.35 * (plain.sum() - best.sum())


def correlated():
    """Return a weight, the Hessian of inputs that depend on each other, and the weight's grid."""
    source = torch.Generator().manual_seed(0)
    w, mix = torch.randn(32, 64, generator=source), torch.randn(64, 64, generator=source)
    x = (torch.randn(500, 64, generator=source) @ mix).double()
    return w, x.mT @ x, grid_of(w, Quantizer(format=get_format("int4"), scaling=Scaling(block=(1, 32))))


def test_gradients_alone_decide():
    """Without the passes afterwards; too weak a regularisation leaves choices between, which nearest then decides."""
    w, h, grid = correlated()
    plain, errors = output_error(w, grid.round(w.double(), slice(None)), h).sum(), []
    for weight in (100.0, 0.01):
        settings = LearnedRounding(sweeps=0, regularisation=weight)
        errors.append(output_error(w, learned_rounding(w, h, grid, settings), h).sum() / plain)
    assert errors[0] < 0.8 < 0.9 < errors[1] <= 1


def by_autograd(w, low, high, h, settings):
    """Return where the definition rounds up, by torch's gradients and torch's Adam, in float64."""
    share = ((w - low) / (high - low)).where(high > low, 0.0).clamp(0, 1)
    v = torch.logit((share + 0.1) / 1.2).requires_grad_()
    adam = torch.optim.Adam([v], lr=settings.rate)
    for i in range(settings.steps):
        soft = (1.2 * torch.sigmoid(v) - 0.1).clamp(0, 1)
        off = w - (low + (high - low) * soft)
        done = (i / settings.steps - settings.warmup) / (1 - settings.warmup)
        beta = settings.beta[0] + (settings.beta[1] - settings.beta[0]) * done
        loss = ((off @ h) * off).sum() + settings.regularisation * (1 - (2 * soft - 1).abs() ** beta).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return torch.sigmoid(v.detach()) >= 0.5


def test_gradients_are_those_of_autograd():
    """The first step follows the regularisation: without it gradients begin at zero, and Adam makes steps of noise."""
    w, h, grid = correlated()
    w = w.double()
    low, high, plain = (grid.round(w, slice(None), mode) for mode in ("down", "up", "nearest_even"))
    h = h / output_error(w, plain, h).sum()
    settings = LearnedRounding(steps=30, rate=0.1, regularisation=1.0, beta=(2.0, 4.0), warmup=0.0, sweeps=0)
    wanted = torch.where(by_autograd(w, low, high, h, settings), high, low)
    better = output_error(w, wanted, h) < output_error(w, plain, h)
    assert torch.equal(learned_rounding(w, h, grid, settings), torch.where(better[:, None], wanted, plain))
    assert bool(better.any()) and not torch.equal(wanted, plain)


def test_learned_rounding_in_pieces_is_one(monkeypatch):
    x, w, grid, _ = problem(2)
    whole = learned_rounding(w, x.mT @ x, grid, LearnedRounding(steps=50))
    monkeypatch.setattr(sys.modules["fmtsim.ptq.weight_grid"], "PIECE", 1)
    assert torch.equal(learned_rounding(w, x.mT @ x, grid, LearnedRounding(steps=50)), whole)


def test_learned_rounding_that_learned_badly_is_nearest():
    x, w, grid, _ = problem(1)
    h = x.mT @ x
    wild = LearnedRounding(steps=3, rate=100.0)
    plain = output_error(w, grid.round(w.double(), slice(None)), h)
    assert (output_error(w, learned_rounding(w, h, grid, wild), h) <= plain).all()
