# SPDX-License-Identifier: Apache-2.0
"""Convolutions: an order of sums by shape, shapes without one, and an oracle of single sums."""

import csv
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import fmtsim
from fmtsim.machine import convolution
from fmtsim.machine.convolution import Order, Shape, convolution_order
from fmtsim.machine.unknown import UnknownOrder
from tests.machine.cases import digest, numbers

BF16, FP16 = torch.bfloat16, torch.float16


def patches(batch: int, outputs: int, patch: int, side: int) -> Shape:
    return Shape(batch, 3, outputs, (patch, patch), (patch, patch), (0, 0), (side // patch,) * 2, (side, side))


def line(batch: int, channels: int, outputs: int, length: int, stride: int) -> Shape:
    return Shape(batch, channels, outputs, (1, 3), (1, stride), (0, 1), (1, length // stride), (1, length))


@pytest.mark.parametrize(
    ("which", "shape", "dtype", "order"),
    [
        # kernels that a profiler named on the GPU, at the shapes of published models
        ("forward", patches(1, 768, 16, 224), BF16, "cutlass"),
        ("wgrad", patches(1, 768, 16, 224), BF16, "cutlass"),
        ("wgrad", patches(8, 768, 16, 224), FP16, "mma"),
        ("wgrad", patches(16, 768, 16, 224), BF16, "cutlass32+3"),
        ("forward", patches(2, 384, 16, 224), BF16, "fma"),
        ("wgrad", patches(2, 1024, 14, 224), FP16, "cutlass32/5"),
        ("wgrad", patches(2, 128, 16, 64), BF16, "lanes"),
        ("forward", line(1, 80, 384, 3000, 1), BF16, "mma64"),
        ("forward", line(2, 384, 384, 3000, 2), BF16, "mma64"),
        ("dgrad", line(1, 384, 384, 3000, 2), BF16, "cutlass64"),
        ("dgrad", line(2, 384, 384, 3000, 2), FP16, "mma64-"),
        ("wgrad", line(2, 80, 384, 3000, 1), BF16, "cutlass64+10"),
    ],
)
def test_orders_of_models(which, shape, dtype, order):
    known, expected = convolution_order(which, shape, dtype), Order.parse(order)
    assert known._replace(tile=0) == expected._replace(tile=0)
    assert known.tile == expected.tile or (known.slices == 1 and (which == "wgrad" or shape.channels == 3))


@pytest.mark.parametrize(
    ("shape", "which"),
    [
        (patches(1, 768, 16, 224)._replace(stride=(8, 8)), "forward"),  # windows that overlap
        (patches(1, 760, 16, 224), "forward"),  # no multiple of 16
        (patches(1, 768, 16, 224)._replace(out=(14, 7)), "forward"),
        (patches(1, 768, 16, 224), "dgrad"),
        (patches(4096, 768, 16, 224), "wgrad"),
        (line(1, 384, 512, 3000, 2), "forward"),
    ],
)
def test_shapes_without_a_record_are_unknown(shape, which):
    with pytest.raises(
        UnknownOrder, match=f"{which} of a batch of {shape.batch}, .* no recorded range of shapes has it"
    ):
        convolution_order(which, shape, BF16)


def convolved(**changes):
    how = {"x": torch.ones(2, 3, 64, 64, dtype=BF16), "weight": torch.ones(128, 3, 16, 16, dtype=BF16), "stride": 16}
    return functional.conv2d(**{"input" if k == "x" else k: v for k, v in (how | changes).items()})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x": torch.ones(2, 3, 64, 64).double(), "weight": torch.ones(128, 3, 16, 16).double()}, "torch.float64 op"),
        ({"dilation": 2}, "forward of a batch of 2, 3 channels to 128 of 3 x 3 pixels"),
        ({"x": torch.ones(2, 64, 64, 3, dtype=BF16).permute(0, 3, 1, 2)}, "forward of .*, channels last"),
        ({"x": torch.ones(2, 3, 70, 70, dtype=BF16)}, "forward of a batch of 2, 3 channels to 128 of 4 x 4 pixels"),
        ({"x": torch.full((2, 3, 32, 32), 2.0**-140), "weight": torch.ones(32, 3, 8, 8), "stride": 8}, ".* subnormal"),
    ],
)
def test_what_was_not_recorded_is_unknown(changes, reason):
    with fmtsim.simulate() as run:
        convolved(**changes)
    (what,) = run.unknown
    assert re.match(f"convolution: {reason}", what)


def test_other_switches_are_unknown(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with fmtsim.simulate() as run:
        convolved()
    assert dict(run.unknown) == {"convolution: cudnn.benchmark, deterministic algorithms, or no cuDNN": 1}
    x = torch.ones(1, 1, 4, 4, 4, dtype=BF16)
    with fmtsim.simulate() as run:
        functional.conv3d(x, x)
    assert "convolution: other than one or two dimensions" in run.unknown


def test_a_sum_is_its_chain_of_steps():
    # Whisper's second convolution at one place: 64 channels of each tap, 16 a step, a zero of padding at the left
    x, w = (numbers(i, shape, "normal", BF16) for i, shape in ((1, (2, 64, 100)), (2, (64, 64, 3))))
    with fmtsim.simulate(strict=True):
        y = functional.conv1d(x, w, stride=2, padding=1)
    for place in (0, 7):
        acc = torch.zeros(1, 1)
        for tap in range(3):
            column = x[1, :, 2 * place + tap - 1] if 2 * place + tap else torch.zeros(64, dtype=BF16)
            for channel in range(0, 64, 16):
                step = slice(channel, channel + 16)
                acc = fmtsim.mma(column[None, step], w[5, step, tap][None], acc, target="hopper.mma")
        assert y[1, 5, place] == acc[0, 0].to(BF16)


def test_another_order_is_seen(monkeypatch):
    x, w = (numbers(i, shape, "normal", FP16) for i, shape in ((1, (2, 384, 200)), (2, (384, 384, 3))))
    with fmtsim.simulate(strict=True):
        right = functional.conv1d(x, w, stride=2, padding=1)
    for order in (Order("mma", 32), Order("mma", 64, descending=True), Order("fma")):
        monkeypatch.setattr(convolution, "convolution_order", lambda *_, order=order: order)
        with fmtsim.simulate(strict=True):
            other = functional.conv1d(x, w, stride=2, padding=1)
        assert torch.allclose(right, other, rtol=0.1, atol=0.1) and digest(right) != digest(other)


def test_results_in_slices_that_are_subnormal_are_unknown(monkeypatch):
    monkeypatch.setattr(convolution, "convolution_order", lambda *_: Order("cutlass", 32, slices=2, rounded=True))
    tiny = torch.full((2, 3, 32, 32), 2.0**-133, dtype=BF16)
    with pytest.raises(UnknownOrder, match="wgrad in slices whose sums are subnormal in float32"):
        convolution._weight_gradient(torch.ones(2, 64, 4, 4, dtype=BF16), tiny, patches(2, 64, 8, 32))


def test_each_place_of_an_input_has_the_taps_that_reach_it():
    x, w = (numbers(i, shape, "normal", BF16) for i, shape in ((1, (2, 64, 100)), (2, (64, 64, 3))))
    g = numbers(3, (2, 64, 50), "normal", BF16)
    with fmtsim.simulate(strict=True):
        dx, dw, _ = torch.ops.aten.convolution_backward(
            g, x, w, None, [2], [1], [1], False, [0], 1, [True, True, False]
        )
    x, w = (t.double().requires_grad_() for t in (x, w))
    functional.conv1d(x, w, stride=2, padding=1).backward(g.double())
    for ours, exact in ((dx, x.grad), (dw, w.grad)):
        torch.testing.assert_close(ours.double(), exact, rtol=2**-7, atol=0.05)  # one rounding to bfloat16, and sums
