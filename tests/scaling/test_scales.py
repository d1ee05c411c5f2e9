"""Orders of float32 operations of two levels of scales, against exact fractions."""

from fractions import Fraction

import pytest
import torch

from fmtsim.formats.block import FP32
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling, TensorScale
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.oracle import round_value
from fmtsim.scaling.cast import cast
from tests.support.operands import normal

E2M1, E4M3 = get_format("e2m1"), get_format("e4m3")
FLT_MAX = Fraction(torch.finfo(torch.float32).max)


def rn32(x: Fraction) -> Fraction:
    return Fraction(round_value(min(x, FLT_MAX), FP32, "nearest_even", "ieee"))


def stored(x: Fraction) -> Fraction:
    return Fraction(round_value(x, E4M3, "nearest_even", "saturate"))


def torchao(blocks: list[list[Fraction]]) -> tuple[Fraction, list[Fraction], list[Fraction]]:
    """Return the tensor's scale, those of its blocks, and what their elements are multiplied with."""
    amaxes = [max(map(abs, block)) for block in blocks]
    t = rn32(max(amaxes) / 2688) or Fraction(1)
    scales = [stored(min(max(rn32(rn32(a / 6) / t), Fraction(1, 64)), Fraction(448))) for a in amaxes]
    return t, scales, [rn32(rn32(1 / t) / s) for s in scales]


@pytest.mark.parametrize("size", [1.0, 1e-30, 2.0**-120, 2.0**-130, 3e-42, 1e35])
def test_the_order_of_torchao(size):
    """A factor beyond float32 is its largest number: zeros stay zeros (Inf would make them NaN, and NaN 6)."""
    x = normal(4, 64, seed=3) * size
    x[1, :16], x[2, 3], x[3, 4] = x[1, :16] * 2.0**-12, 0.0, -0.0
    scaling = Scaling(block=(1, 16), scale=E4M3, tensor=TensorScale(order="torchao"))
    found = cast(x, E2M1, scaling, Rounding(), "saturate")
    blocks = [[Fraction(v) for v in block] for block in x.view(-1, 16).tolist()]
    t, scales, factors = torchao(blocks)
    assert found.scales.tensor is not None and Fraction(found.scales.tensor.item()) == t
    assert [Fraction(s) for s in found.scales.scale.flatten().tolist()] == scales
    assert [Fraction(r) for r in found.scales.factor.flatten().tolist()] == factors
    expected = [
        round_value(rn32(v * r) if v > 0 else -rn32(-v * r), E2M1, "nearest_even", "saturate")
        for block, r in zip(blocks, factors, strict=True)
        for v in block
    ]
    assert found.elements.flatten().tolist() == expected
    assert found.elements[2, 3].item() == 0 and found.elements[3, 4].signbit()
