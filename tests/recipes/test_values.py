# SPDX-License-Identifier: Apache-2.0
"""Scales that are remembered from call to call, and published tables."""

import dataclasses

import pytest
import torch

from fmtsim.formats.scaling import History, Scaling
from fmtsim.gemm.layers.quantize_operand import quantize_operand
from fmtsim.recipes import get_recipe
from fmtsim.scaling.history import DelayedScale
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Keys
from fmtsim.spec.quantizer import Quantizer


def quantised(name, operand, x, key=0):
    draws = Keys(RandomKey(key, 0), RandomKey(key, 1 << 40), RandomKey(key, 2 << 40))
    return quantize_operand(x, get_recipe(name).linear.operands[operand], draws)


def test_delayed_scaling_follows_a_sequence():
    """Largest magnitudes 1, 1, 8, 1, ...: the scale of a call is of earlier ones, and 8 expires after 4 updates."""
    quantizer = Quantizer(format=get_recipe("te_delayed").linear.fprop.a.format,
                          scaling=Scaling(history=History(length=4), empty="previous"))  # fmt: skip
    delayed = DelayedScale(quantizer)
    seen, largest = [], []
    for amax in (1.0, 1.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        made = quantize_operand(torch.full((2, 2), amax), quantizer, Keys(), delayed)
        seen.append(float(448 * made.scale.item()))
        largest.append(float(made.values(torch.float32).max()))
    assert seen == pytest.approx([448.0, 1.0, 1.0, 8.0, 8.0, 8.0, 8.0, 1.0])
    assert largest[2] == 1.0  # saturates in the step of the jump


def test_fp8lms_first_calls_scale_by_themselves():
    """A window of 16: the first 16 uses take their own largest magnitude, later ones the largest of the 16 before."""
    quantizer = get_recipe("fp8lm").linear.fprop.a
    delayed = DelayedScale(quantizer)
    amaxes = [7.0] + [1.0] * 14 + [2.0] + [1.0] + [64.0] + [1.0] * 17
    factors = []
    for amax in amaxes:
        made = quantize_operand(torch.full((2, 2), amax), quantizer, Keys(), delayed)
        factors.append(float(1 / made.scale.item()))
    warm = [2.0 ** ((448 / amax).__trunc__().bit_length() - 1) for amax in amaxes[:16]]
    assert factors[:16] == warm == [64.0] + [256.0] * 14 + [128.0]
    assert factors[16] == 64.0  # 7 is among the 16 before
    assert factors[17] == 128.0  # 7 is not any more, 2 is; 64 saturates
    assert factors[18:34] == [4.0] * 16 and factors[34] == 256.0


def test_the_scale_of_a_window_is_refreshed_once_a_window():
    quantizer = get_recipe("intel_2t").linear.fprop.a
    short = dataclasses.replace(quantizer.scaling, history=History(length=4, refresh_every=4))
    delayed = DelayedScale(dataclasses.replace(quantizer, scaling=short))
    factors = []
    for amax in (3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        delayed.record(torch.tensor(amax))
        factors.append(float(delayed.factor))
    assert factors == [1, 1, 1, 64, 64, 64, 64, 128]  # floor2(240 / 3) and floor2(240 / 1)


@pytest.mark.parametrize(("rule", "factor"), [(None, 9.0), ("floor", 16.0), ("ceil", 8.0)])
def test_a_margin_lowers_what_the_largest_magnitude_becomes(rule, factor):
    fmt = get_recipe("te_delayed").linear.fprop.a.format
    scaling = Scaling(top=144.0, margin=2, power_of_two=rule, history=History(length=2))
    delayed = DelayedScale(Quantizer(format=fmt, scaling=scaling))
    delayed.record(torch.tensor(4.0))
    assert delayed.factor.item() == factor  # of 144 / 4 / 4; a scale's power below is a factor's above


def test_scales_of_zeros_and_of_wild_numbers():
    """A delayed scale stays where a tensor is all zeros; numbers that are not finite take no part in a scale."""
    delayed = DelayedScale(get_recipe("fp8lm").linear.fprop.a)
    delayed.record(torch.tensor(7.0))
    before = delayed.factor.clone()
    for _ in range(20):
        delayed.record(torch.tensor(0.0))
    assert torch.equal(delayed.factor, before)
    x = torch.tensor([[1.0, float("inf"), 3.5, float("nan")]])
    found = quantised("te_current", "x_f", x)
    assert float(found.scale) == 3.5 / 448 and found.values(torch.float32)[0, 3].isnan()
