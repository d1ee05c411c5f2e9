# SPDX-License-Identifier: Apache-2.0
"""Observation.loss_scale: the scale that it names saturates nothing, and the next one does."""

import math

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.lab.analysis.losses import loss_scale_of
from fmtsim.lab.analysis.stats import OperandStats
from fmtsim.support.errors import ArgumentError


def observed(loss_scale, **what):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    x, y = torch.randn(4, 16, 64), torch.randn(4, 16, 8)
    with fmtsim.observe(net, **what) as stats:
        for i in range(4):
            (loss_scale * nn.functional.mse_loss(net(x[i]), y[i])).backward()
    return stats


UNSCALED = {"recipe": fmtsim.linear_config(x="e4m3", w="e4m3", g="e5m2", scaling="none")}


def test_the_scale_saturates_nothing_and_twice_as_much_does():
    found = observed(2.0**-6, **UNSCALED).loss_scale()
    assert math.frexp(found.scale)[0] == 0.5 and 1.0 <= found.headroom < 2.0 and found.format == "e5m2"
    assert found.scale * found.amax * found.headroom == pytest.approx(57344.0)
    at, above = (observed(2.0**-6 * factor * found.scale, **UNSCALED) for factor in (1.0, 2.0))
    beyond = [
        max(s.amax for ops in stats.layers.values() for o, s in ops.items() if o[0] == "g") for stats in (at, above)
    ]
    assert beyond[0] <= 57344.0 < beyond[1]
    assert found.underflow_percent == pytest.approx(8.97, abs=0.01)
    assert at.loss_scale().scale == 1.0 and above.loss_scale().scale == 0.5
    assert str(found).splitlines()[0] == f"loss scale        2^{int(math.log2(found.scale))} = {found.scale:g}"
    assert found.to_dict()["scale"] == found.scale


def test_what_underflows_at_the_scale_by_hand():
    x = torch.tensor([57344.0 * 2.0**-10, 1.5 * 2.0**-27, 1.5 * 2.0**-28, 2.0**-40, 0.0])
    stats = OperandStats().add(x, fmtsim.quantize(x, "e5m2"), fmtsim.get_format("e5m2"))
    found = loss_scale_of({"a": {"g_w": stats}, "b": {"x_f": stats}})
    assert (found.scale, found.headroom, found.layer, found.operand) == (1024.0, 1.0, "a", "g_w")
    assert (found.underflow_percent, found.underflow_percent_scaled) == (75.0, 50.0)  # 1.5 * 2**-17 becomes 2**-16


@pytest.mark.parametrize("recipe", ["te_mxfp8", "te_current", "te_delayed", "deepseek_v3"])
def test_gradients_with_scales_of_their_own_need_none(recipe):
    found = observed(1.0, recipe=recipe).loss_scale()
    assert found.scale is None and str(found) == "gradients have scales of their own: they need no loss scale"
    assert found.to_dict()["headroom"] is None


def test_gradients_that_are_not_finite_are_told():
    stats = OperandStats()
    stats.add(torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.inf]), fmtsim.get_format("e5m2"))
    found = loss_scale_of({"a": {"g_w": stats}})
    assert str(found).splitlines()[-1].startswith("1 gradients were NaN or infinite: observe with a smaller loss scale")


def test_without_gradients_there_is_an_error():
    net = nn.Linear(4, 4)
    with fmtsim.observe(net, format="e4m3") as stats:
        net(torch.ones(2, 4))
    with pytest.raises(ArgumentError, match="loss_scale: no gradient observed; call backward inside the with"):
        stats.loss_scale()
    with fmtsim.observe(net, format="e4m3") as stats:
        (0.0 * net(torch.ones(2, 4)).sum()).backward()
    with pytest.raises(ArgumentError, match="only gradients that are zero or in high precision observed"):
        stats.loss_scale()
