# SPDX-License-Identifier: Apache-2.0
"""Products of block formats on Blackwell's units and libraries: those without a target, or refused."""

import pytest
import torch

import fmtsim
from fmtsim.support.errors import FormatError


@pytest.mark.parametrize("name", ["e4m3_1x128", "e4m3_128x128", "e4m3_1x128_pow2"])
def test_scales_of_128_products_do_not_go_into_a_unit_with_scales_of_its_own(name):
    model = torch.nn.Sequential(torch.nn.Linear(128, 48))
    with pytest.raises(FormatError, match="scales every 128 products, the unit has e8m0 scales every 32"):
        fmtsim.convert(model, format=name, target="blackwell.tcgen05.mxf8f6f4")
