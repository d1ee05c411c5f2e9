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
from fmtsim.machine.unknown import Nondeterministic, UnknownOrder
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


def test_float32_needs_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with fmtsim.simulate() as run:
        functional.conv2d(torch.ones(2, 16, 8, 8), torch.ones(16, 16, 3, 3), padding=1)
    assert dict(run.unknown) == {"convolution: float32 without torch.backends.cudnn.allow_tf32": 1}


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


RECORD = Path(__file__).parent / "data" / "h200_convolutions.csv"


def recorded(step, chosen=""):
    """Yield recorded passes, of which the digest of the result is known: the call, its digest, and its row."""
    with RECORD.open(encoding="ascii") as file:
        rows = [row for row in csv.reader(file) if chosen in ",".join(row)]
    for row in rows[::step]:
        seed, dims, n, c, side, k, kernel, stride, padding, dilation, groups, more = map(int, row[:12])
        layout, dtype, which, kind, digest_of = row[12], getattr(torch, row[13]), *row[14:]
        size, transposed = (side,) * dims, "t" in layout
        options = [[stride] * dims, [padding] * dims, [dilation] * dims, transposed, [more] * dims, groups]
        filters = (c, k // groups) if transposed else (k, c // groups)
        start = 300000 + 8 * seed
        w = numbers(start + 2, (*filters, *[kernel] * dims), "normal", dtype)
        x = numbers(start, (n, c, *size), kind, dtype)
        out = torch.ops.aten.convolution(x.to("meta"), w.to("meta"), None, *options).shape
        g = numbers(start + 1, tuple(out), kind, dtype)
        if "l" in layout:
            x, g = (t.contiguous(memory_format=torch.channels_last) for t in (x, g))
        yield row, (which, x, w, g, options), digest_of


def called(which, x, w, g, options):
    if which == "forward":
        return torch.ops.aten.convolution(x, w, None, *options)
    mask = [which == "dgrad", which == "wgrad", False]
    return torch.ops.aten.convolution_backward(g, x, w, None, *options, mask)[which == "wgrad"]


def differing(step, chosen=""):
    wrong = []
    for row, call, expected in recorded(step, chosen):
        with fmtsim.simulate(strict=True):
            wrong += [row] if digest(called(*call)) != expected else []
    return wrong


def test_recorded_passes_have_the_bits_of_an_h200():
    assert differing(15) == []


@pytest.mark.slow
def test_all_recorded_passes_have_the_bits_of_an_h200():
    assert differing(1) == []


@pytest.mark.parametrize(
    ("chosen", "unit", "plant"),
    [
        ("wgrad", "lanes", {"unit": "fma"}),
        ("wgrad", "blocks", {"unit": "lanes"}),
        ("float32,forward", "mma", {"tf32": "t"}),
        ("float32,dgrad", "sums", {"unit": "taps"}),
        ("float16,forward", "packed", {"tile": 2}),
        ("dgrad", "taps", {"descending": False}),
        ("wgrad", "images", {"unit": "fma"}),
        ("bfloat16,forward", "cutlass", {"descending": True}),
    ],
)
def test_an_error_in_an_order_is_seen(monkeypatch, chosen, unit, plant):
    real, seen = convolution.convolution_order, []

    def planted(*arguments):
        order = real(*arguments)
        seen.append(order.unit == unit)
        return order._replace(**plant) if order.unit == unit else order

    monkeypatch.setattr(convolution, "convolution_order", planted)
    for _, call, expected in recorded(1, chosen):
        seen.clear()
        with fmtsim.simulate():
            y = called(*call)
        if any(seen) and digest(y) != expected:
            return
    pytest.fail("no recorded pass sees the error")


def rounded(exact):
    """Return a fraction as float32, to nearest even."""
    near = np.float32(float(exact))
    around = near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))
    return min(around, key=lambda y: (abs(Fraction(float(y)) - exact), int(y.view(np.int32)) & 1))


def chained(pairs):
    total = np.float32(0)
    for a, b in pairs:
        total = rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(total)))
    return total


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_channel_a_group_is_a_chain_of_multiply_adds(dtype):
    # 3 images of 7 x 6 pixels, 4 channels to 8, kernel 3 x 3, stride 2, padding 1: PyTorch's own kernels
    x, w = numbers(1, (3, 4, 7, 6), "normal", dtype), numbers(2, (8, 1, 3, 3), "normal", dtype)
    with fmtsim.simulate(strict=True):
        y = functional.conv2d(x, w, stride=2, padding=1, groups=4)
        g = numbers(3, tuple(y.shape), "normal", dtype)
        dx, dw, _ = torch.ops.aten.convolution_backward(
            g, x, w, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 4, [True, True, False]
        )
    inside = [(p, q, 2 * p + r - 1, 2 * q + s - 1, r, s) for p, q, r, s in np.ndindex(4, 3, 3, 3)]
    inside = [at for at in inside if 0 <= at[2] < 7 and 0 <= at[3] < 6]
    for channel, p, q in ((5, 0, 0), (2, 3, 2), (7, 1, 1)):
        pairs = [(w[channel, 0, r, s], x[2, channel // 2, h, v]) for i, j, h, v, r, s in inside if (i, j) == (p, q)]
        assert y[2, channel, p, q] == torch.tensor(float(chained(pairs))).to(dtype)
    for h, v in ((0, 0), (3, 3), (6, 5)):
        taps = sorted((r, s, i, j) for i, j, a, b, r, s in inside if (a, b) == (h, v))
        pairs = [(w[2 + m, 0, r, s], g[1, 2 + m, i, j]) for m in range(2) for r, s, i, j in taps]
        assert dx[1, 1, h, v] == torch.tensor(float(chained(pairs))).to(dtype)
    # the weight's gradient: a warp an image, a thread every 32nd pixel (here one), then threads and warps by halving
    warps = []
    for image in range(3):
        lanes = [np.float32(0)] * 32
        for i, j, h, v, r, s in inside:
            if (r, s) == (0, 2):
                lanes[3 * i + j] = chained([(x[image, 1, h, v], g[image, 3, i, j])])
        while len(lanes) > 1:
            lanes = [a + b for a, b in zip(lanes[: len(lanes) // 2], lanes[len(lanes) // 2 :], strict=True)]
        warps += lanes
    assert dw[3, 0, 0, 2] == torch.tensor(float((warps[0] + warps[2]) + warps[1])).to(dtype)


def test_shapes_between_recorded_ones():
    def shape(channels, outputs, side, batch=2):
        return Shape(batch, channels, outputs, (3, 3), (1, 1), (1, 1), (side, side), (side, side))

    assert not convolution_order("forward", shape(16, 16, 8), torch.float32).guess
    between, near = shape(72, 56, 8), shape(72, 56, 9)
    assert convolution_order("forward", between, torch.float32) == Order("mma", 64, "a")
    assert convolution_order("forward", near, torch.float32) == Order("mma", 64, "a", guess=True)
    for unlike in (shape(64, 64, 8, 4096), shape(64, 64, 8)._replace(size=(8, 9))):
        with pytest.raises(UnknownOrder):
            convolution_order("forward", unlike, torch.float32)
    with fmtsim.simulate() as run:
        functional.conv2d(torch.ones(2, 72, 9, 9), torch.ones(56, 72, 3, 3), padding=1)
    assert list(run.guess) == ["convolution: forward of a convolution in the order of recorded shapes that are near"]
    with pytest.raises(Nondeterministic, match="dgrad of a convolution, whose products the GPU adds in no order"):
        convolution_order("dgrad", shape(16, 32, 8), torch.float32)


def test_a_transposed_convolution_is_the_gradient_of_another():
    x, w = numbers(1, (2, 16, 8, 8), "normal", BF16), numbers(2, (16, 16, 3, 3), "normal", BF16)
    with fmtsim.simulate(strict=True):
        y = functional.conv_transpose2d(x, w, padding=1)
        options = [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False]
        dx = torch.ops.aten.convolution_backward(x, torch.zeros_like(y), w, None, *options)[0]
    assert torch.equal(y, dx)
