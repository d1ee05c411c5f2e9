# SPDX-License-Identifier: Apache-2.0
"""Integer accumulators of every width against sums of Python integers, on the CPU engine and the torch engine."""

import random

import pytest
import torch

import fmtsim
from fmtsim.casts import ops
from fmtsim.spec.datapath import IntegerDatapath
from fmtsim.support.errors import ArgumentError, DtypeError, FormatError
from tests.support.gemm_engine import gemm_spec

K = 700


def expected(a, b, c, bits, saturate, block):
    """Return the sums, brought into ``bits`` bits after every block."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def one(row, column, total):
        for start in range(0, K, block):
            total += sum(row[k] * column[k] for k in range(start, min(start + block, K)))
            total = sorted((low, total, high))[1] if saturate else (total - low) % 2**bits + low
        return total

    return [[one(row, column, total) for column, total in zip(b, totals, strict=True)] for row, totals in zip(a, c)]  # noqa: B905


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("block", [1, 32, K])
def test_every_width_from_16_to_40_and_the_ends(saturate, block):
    draw = random.Random(block)
    for bits in (2, *range(16, 41), 63, 64):
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        sides = [[[draw.choice((127, draw.randint(-128, 127))) for _ in range(K)] for _ in range(2)] for _ in "ab"]
        c = [[draw.choice((low, high, high // 2)) for _ in "ab"] for _ in "ab"]
        a, b = (torch.tensor(side, dtype=torch.int8) for side in sides)
        unit = IntegerDatapath(accumulator_bits=bits, saturate=saturate, block=block)
        dtype = torch.int32 if bits <= 32 else torch.int64
        for addend in (c, [[0, 0], [0, 0]]):
            wanted = expected(*sides, addend, bits, saturate, block)
            start, spec = torch.tensor(addend, dtype=dtype), gemm_spec(unit, "int8")
            assert fmtsim.mma(a, b, start, target=unit).tolist() == wanted, unit
            for name in ("cpu", "torch_engine"):
                engine, out = ops.load_engine(name), torch.empty(2, 2, dtype=dtype)
                if name == "torch_engine" or engine.supports_gemm(spec, a, b):
                    engine.gemm(a, b, start, None, None, spec, None, out)
                    assert out.tolist() == wanted, (name, unit)
        y = fmtsim.int_mm(a, b.T, target=unit)
        assert y.dtype == dtype and y.tolist() == wanted


def test_a_layer_trains_through_a_narrow_accumulator():
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    losses = {}
    for bits in (12, 16, 32, 40):
        torch.manual_seed(1)
        layer = torch.nn.Linear(32, 8)
        target = IntegerDatapath(accumulator_bits=bits, saturate=True, block=1)
        fmtsim.convert(layer, fmtsim.linear_config(x="int8", w="int8", g="int8", scaling="channel", target=target))
        optimizer = torch.optim.SGD(layer.parameters(), 0.3)
        for _ in range(20):
            optimizer.zero_grad()
            loss = (layer(x) - x[:, :8]).square().mean()
            loss.backward()
            optimizer.step()
        losses[bits] = loss.item()
    assert losses[32] == losses[40] < 0.2 < losses[12]
    assert losses[16] != losses[32]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: IntegerDatapath(accumulator_bits=65), ArgumentError, "accumulator_bits=65 is not possible; choose 2"),
        (lambda: fmtsim.Datapath(accumulator="int24"), FormatError, r"IntegerDatapath\(accumulator_bits=24, sat"),
        (lambda: fmtsim.mm(ONES, ONES, target=fmtsim.Datapath()), FormatError, r"an IntegerDatapath \(--target int"),
        (lambda: fmtsim.mma(ONES, ONES, ONES.int() << 15, target=IntegerDatapath(accumulator_bits=16)), ArgumentError,
         r"c holds numbers beyond 16 bits; clamp it to \(-32768, 32767\)"),
        (lambda: fmtsim.mm(ONES, ONES, target=IntegerDatapath(accumulator_bits=40), out_dtype=torch.int32), DtypeError,
         "choose torch.int64"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


ONES = torch.ones(4, 4, dtype=torch.int8)
