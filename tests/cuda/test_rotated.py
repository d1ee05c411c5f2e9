# SPDX-License-Identifier: Apache-2.0
"""Rotated operands and inverse rotations on the device: the bits of ``quantize_operand`` and of torch operations."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fmtsim
from fmtsim.cuda.cast import rotated, warp_hadamard
from fmtsim.formats.scaling import TensorScale
from fmtsim.gemm.layers.quantize_operand import quantize_operand
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.scaled_cast import rotated as transform
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Keys, spread
from fmtsim.spec.quantizer import Clamp, ClipMask, Hadamard
from tests.support.bits import INTEGERS, assert_same_bits
from tests.support.casts import slow_but
from tests.support.operands import numbers

SLOW = pytest.mark.slow

KEYS = (RandomKey(0x1234567890ABCDEF, 5), RandomKey(6, 1 << 40))
SIGNS = RandomKey(9, 1)
NAN = {4: 0x7FC00000, 2: 0x7FC0}
LAYERS = {name: fmtsim.get_recipe(name).linear.operands for name in ("te_nvfp4", "mxfp4", "quartet", "quartet2")}


def canonical(x):
    """Return the bits of a tensor, with one NaN."""
    return x.contiguous().view(INTEGERS[x.element_size()]).masked_fill(x.isnan(), NAN[x.element_size()])


def wanted(x, quantizer, key):
    """Return values without the scale that all blocks share, that scale, and the mask."""
    made = quantize_operand(x, quantizer, Keys(key, key, SIGNS))
    scale, outside = made.scale, made.tensor_scale
    if quantizer.scaling is not None and quantizer.scaling.multiplier != 1:
        outside = torch.tensor(quantizer.scaling.multiplier)  # scales are its product with powers of two
        scale = torch.where(scale == 1, 1.0, torch.exp2(scale.double().log2().floor()).float())
    values = (made.elements.float() * spread(scale, made.block, x.shape)).bfloat16()
    return values, outside, made.slope


def check(found, x, quantizer, key):
    values, outside, slope = wanted(x, quantizer, key)
    assert found.elements.shape == x.shape and found.elements.dtype == torch.bfloat16
    assert torch.equal(canonical(found.elements.cpu()), canonical(values))
    assert_same_bits(found.tensor_scale, outside)
    assert (found.slope is None) == (slope is None)
    assert slope is None or torch.equal(found.slope.cpu().float(), slope)


def matrices(shape):
    """Yield matrices: of ordinary numbers alone, where the scale of the tensor is one, of all kinds, of rows whose
    magnitudes reach from where squares underflow to where they overflow, and of those whose scales are subnormal."""
    for special in (False, True):
        yield numbers(shape, torch.bfloat16, special=special)
    powers = torch.linspace(-100, 100, shape[0]).round()
    yield (numbers(shape, torch.bfloat16).float() * torch.exp2(powers)[:, None]).bfloat16()
    yield (numbers(shape, torch.bfloat16).float() * 2.0**-124).bfloat16()


@pytest.mark.parametrize(
    ("layer", "name", "turned"),
    slow_but(
        3, ("quartet", "x_f", False), ("quartet2", "g_d", False), ("quartet2", "x_f", False), ("te_nvfp4", "x_w", True),
        ("te_nvfp4", "x_w", False), ("te_nvfp4", "g_w", False), ("mxfp4", "x_w", True), ("mxfp4", "g_w", False),
        ("quartet", "w_d", True), ("quartet", "g_d", False), ("quartet2", "g_w", True), ("quartet2", "w_f", True),
    ),
)  # fmt: skip
def test_operands_have_the_bits_of_their_definition(layer, name, turned, device):
    quantizer = LAYERS[layer][name]
    shapes = ((128, 8), (256, 72)) if turned else ((3, 128), (70, 256))
    for shape in shapes if layer == "quartet2" else ((192, 72), (64, 8)) if turned else ((70, 192), (3, 64)):
        for matrix in matrices(shape):
            x, moved = (m.mT if turned else m for m in (matrix, matrix.to(device)))
            assert rotated.covers(moved, quantizer)
            found = rotated.cast_rotated(moved, quantizer, (KEYS[0], KEYS[0]), SIGNS)
            assert found.elements.stride() == moved.stride()
            check(found, x, quantizer, KEYS[0])


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["quartet", "quartet2"])
def test_values_that_are_quantised_again(layer, device):
    quantizer, factor = LAYERS[layer]["w_d"], torch.tensor(0.37)
    x = numbers((128, 24), torch.bfloat16)
    moved, scale = (t.to(device) for t in (x, factor))
    found = rotated.cast_rotated(moved.mT, quantizer, (KEYS[0], KEYS[0]), SIGNS, scale)
    check(found, (x.float() * factor).mT, quantizer, KEYS[0])


@pytest.mark.parametrize("turned", [False, pytest.param(True, marks=SLOW)])
def test_corrections_near_a_tie(turned, device, monkeypatch):
    """Nearly every group takes the path of quotients that the order of sums might round otherwise."""
    monkeypatch.setattr(rotated, "_TOLERANCE", "1e-3")
    before = LAYERS["quartet2"]["g_w"]
    scaling = replace(before.scaling, tensor=replace(before.scaling.tensor, top=200.0 + turned))  # a plan of its own
    quantizer = replace(before, scaling=scaling)
    for matrix in matrices((128, 128)):
        x, moved = (m.mT if turned else m for m in (matrix, matrix.to(device)))
        check(rotated.cast_rotated(moved, quantizer, (None, KEYS[1]), SIGNS), x, quantizer, KEYS[1])


def test_signs_may_be_a_mask(device):
    turn = Hadamard(size=32, signs=0xDEADBEEF)
    quantizer = replace(LAYERS["quartet"]["x_f"], transforms=(turn,))
    given = replace(quantizer, transforms=(replace(turn, signs="random"),))
    x = numbers((4, 64), torch.bfloat16)
    check(rotated.cast_rotated(x.to(device), quantizer), x, quantizer, None)
    check(rotated.cast_rotated(x.to(device), given, signs=turn.signs), x, quantizer, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=SLOW)])
@pytest.mark.parametrize("turn", [Hadamard(size=32), pytest.param(Hadamard(size=16, signs=0xD7E8), marks=SLOW), None])
def test_gradients_are_turned_back(turn, dtype, device):
    generator = torch.Generator().manual_seed(3)
    y = torch.randn(37, 192, generator=generator) * torch.exp2(torch.arange(37.0) * 6 - 100)[:, None]
    y[0, 0], y[1, 1], y[2], y[3], y[4, 5] = math.nan, math.inf, 0.0, -0.0, 3e38
    y[4, 6], y[4, 7] = 1 + 2.0**-8, 1 + 3 * 2.0**-8  # ties of bfloat16, the first goes down
    mask = torch.rand(y.shape, generator=generator) > 0.25
    turns = () if turn is None else (turn,)
    assert warp_hadamard.covers_finish(y, turns)
    one, other = torch.tensor(4 / 3), torch.tensor(0.7)
    for chosen, scales in ((mask, (one, other)), (mask, (None, other)), (None, (None, None))):
        x = y
        for factor in (*scales, None if chosen is None else chosen.float()):
            x = x if factor is None else x * factor
        x = x if turn is None else transform(x, turn, None, inverse=True)
        there = None if chosen is None else chosen.to(device)
        given = [None if scale is None else scale.to(device) for scale in scales]
        found = warp_hadamard.finish_rotated(y.to(device), there, turns, dtype, given)
        assert found.dtype == dtype
        assert torch.equal(canonical(found.cpu()), canonical(x.to(dtype)))


@pytest.mark.parametrize("name", ["g_d", "x_f"])
@pytest.mark.parametrize("turned", [False, True])
def test_operands_that_are_not_rotated(name, turned, device):
    quantizer = LAYERS["te_nvfp4"][name]
    x = numbers((64, 128), torch.bfloat16)
    x = x.mT if turned else x
    moved = x.mT.contiguous().to(device).mT if turned else x.to(device)
    key = RandomKey(5) if quantizer.rounding.mode == "stochastic" else None
    check(rotated.cast_rotated(moved, quantizer, (key, None)), x, quantizer, key)


@pytest.mark.parametrize(
    ("layer", "name"), slow_but(2, ("te_nvfp4", "g_w"), ("quartet", "g_d"), ("quartet2", "g_d"), ("mxfp4", "x_w"))
)
@pytest.mark.parametrize("turned", [False, pytest.param(True, marks=SLOW)])
def test_keys_move_on_by_a_count_on_the_device(layer, name, turned, device):
    quantizer = LAYERS[layer][name]
    x = numbers((128, 128), torch.bfloat16).to(device)
    x = x.mT if turned else x
    for count in (0, 3, (1 << 33) + 5):
        moved = (RandomKey(5, 2 + count), RandomKey(6, 7 + count)), RandomKey(8, 1 + count)
        wanted = rotated.cast_rotated(x, quantizer, *moved)
        found = rotated.cast_rotated(
            x, quantizer, (RandomKey(5, 2), RandomKey(6, 7)), RandomKey(8, 1), count=torch.tensor(count, device=device)
        )
        assert torch.equal(found.elements.cpu().view(torch.int16), wanted.elements.cpu().view(torch.int16))
    other = rotated.cast_rotated(x, quantizer, (RandomKey(5, 2), RandomKey(6, 7)), RandomKey(8, 1))
    assert not torch.equal(found.elements, other.elements)  # the count has done something


def test_what_the_kernels_take():
    te, quest, largest = LAYERS["te_nvfp4"]["g_w"], LAYERS["quartet"]["x_f"], LAYERS["quartet"]["g_w"]
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    turn = Hadamard(size=32)
    assert all(rotated.covers(x, quantizer) for quantizer in (te, quest, largest))
    assert rotated.covers(x.mT, te) and not rotated.covers(x.mT, quest)
    for refused in (x.float(), x[:, :80], x[:, ::2], x[:0], x[0], x[:60, :64].mT, x[:, :64].mT):
        assert not rotated.covers(refused, te)
    for changes in (
        {"transforms": (Hadamard(size=64),)},
        {"transforms": (turn, turn)},
        {"transforms": (Hadamard(size=32, axis="outer"),)},
        {"transforms": (Clamp(level=0.99),)},
        {"transforms": (replace(turn, rounded=fmtsim.get_format("fp16")),)},
        {"rounding": Rounding(mode="stochastic", random_bits=8, layout="cvt_rs")},
        {"rounding": Rounding(mode="stochastic", variant="b")},
        {"rounding": Rounding(mode="up")},
        {"overflow": "ieee"},
        {"format": fmtsim.get_format("nvfp4_16x16")},
        {"then": quest},
    ):
        assert not rotated.covers(x, replace(te, **changes))
    refused = (
        (quest, ({"statistic": "rms"}, {"offset": 0.0}, {"block": (1, 64)}, {"power_of_two": "ceil"})),
        (largest, ({"multiplier": 1.5}, {"top": 1.0}, {"candidates": (1.0, 1.5)}, {"arithmetic": "encode"})),
    )
    for quantizer, several in refused:
        for changes in several:
            assert not rotated.covers(x, replace(quantizer, scaling=replace(quantizer.scaling, **changes)))
    long = LAYERS["quartet2"]["g_w"]
    assert rotated.covers(x, long) and not rotated.covers(x[:, :64], long)
    for changes in ({"eden": 64}, {"scale_rounding": "nearest_even"}, {"tensor": None}, {"tensor": TensorScale()}):
        assert not rotated.covers(x, replace(long, scaling=replace(long.scaling, **changes)))
    assert not rotated.covers(x, replace(long, transforms=(turn,)))
    assert not rotated.covers(x, replace(largest, gradient=ClipMask()))
    assert not rotated.covers(x, replace(quest, rounding=Rounding()))
    for y, turns in ((torch.zeros(2, 80), ()), (torch.zeros(2, 64), (replace(turn, signs="random"),)), (x, (turn,))):
        assert not warp_hadamard.covers_finish(y, turns)


def test_division_by_four_thirds_is_exact():
    """The product with the reciprocal, corrected once, is the quotient rounded, for every significand."""
    c = np.float32(4 / 3)
    reciprocal = np.float32(1) / c
    for part in np.split(np.arange(1 << 23, 1 << 24, dtype=np.float32), 16):
        near = part * reciprocal
        over = near.astype(np.float64) * np.float64(c) - part  # products of two float32 are exact in float64
        product = over.astype(np.float32).astype(np.float64) * np.float64(reciprocal)
        total = near - product
        lost = near - (total + product)  # of the sum in float64: enough to break a tie, were there one
        rounded = total.astype(np.float32)
        ties = np.abs(total - rounded) == np.spacing(rounded) / 2
        assert not (ties & (lost != 0)).any()
        assert (rounded == part / c).all()


def test_planted_errors_are_caught(emulated, monkeypatch):
    signs_of = rotated._signs_of
    flipped = lambda *given: bytes([signs_of(*given)[0] ^ 1]) + signs_of(*given)[1:]  # noqa: E731
    monkeypatch.setattr(rotated, "_signs_of", flipped)
    with pytest.raises(AssertionError):
        test_signs_may_be_a_mask(torch.device("cpu"))
    monkeypatch.undo()
    finish = warp_hadamard.finish_rotated
    for wrong in (
        lambda y, mask, *rest: finish(y, None, *rest),
        lambda y, mask, turns, dtype, scales: finish(y, mask, turns, dtype, (scales[0], None)),
    ):
        monkeypatch.setattr(warp_hadamard, "finish_rotated", wrong)
        with pytest.raises(AssertionError):
            test_gradients_are_turned_back(None, torch.bfloat16, torch.device("cpu"))
