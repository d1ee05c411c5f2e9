# SPDX-License-Identifier: Apache-2.0
"""What a multiplier's parts are, and the data of claims about models that are quantised after training."""

import pytest
import torch

from fmtsim.casts.quantize import decode
from fmtsim.formats.registry import get_format
from fmtsim.lab.reproduce.multipliers import gates, logarithm_gates, luts, multiplier
from fmtsim.lab.reproduce.served import _front, formats, images
from fmtsim.spec.datapath import LogDatapath


@pytest.mark.parametrize("name", ["int4", "int8", "e2m1", "e3m2", "e4m3", "e5m2_finite", "e2m5_finite"])
def test_a_sum_holds_256_products_exactly_and_in_no_fewer_bits(name):
    fmt = get_format(name)
    codes = torch.arange(1 << fmt.bits)
    values = decode(codes, fmt, out_dtype=torch.float64)
    values = values[values.isfinite()].abs().unique()
    step = float(values[values > 0].min()) ** 2
    products = torch.outer(values, values) / step
    assert torch.equal(products, products.round())
    top = int(products.max()) * 256
    assert top.bit_length() <= multiplier(fmt).accumulator <= top.bit_length() + 2  # a sign, and a carry


def test_costs_by_hand():
    # INT4: 16 ANDs, 12 full adders, a sum of 16 bits; E2M1: 4 ANDs, 2 + 2 + 16 adders, 3 levels of choices
    assert gates(get_format("int4")) == 16 + 5 * (12 + 16) and luts(get_format("int4")) == 12 + 16
    assert gates(get_format("e2m1")) == 4 + 5 * (2 + 2 + 16) + 3 * 3 * 16
    assert luts(get_format("e2m1")) == 2 + 2 + 16 * (1 + 2)
    # a product of 4 bits grows to 5, 7 and 8 bits: 3, 3 and 6 choices, and 2, 4 and 2 bits that have one source
    assert gates(get_format("e2m1"), least=True) == 4 + 5 * (2 + 2 + 16) + 3 * (3 + 3 + 6) + 2 + 4 + 2
    # with choices of four: to 7 and 8 bits
    assert luts(get_format("e2m1"), least=True) == 2 + 2 + 16 + 7 + 8
    # Logarithms of 7 bits, 31 octaves of products, a sum of 24 bits; one constant is 256, of four 256, 304, 362 and 431
    lns8 = get_format("lns8_g8")
    assert logarithm_gates(lns8, LogDatapath(entries=1)) == 5 * (7 + 24) + 3 * 24 * 5 + 5 * 24 / 32
    # one bit grows to 2, 4, 8, 16 and 24: 8 choices in the last level, else bits that have one source
    assert (
        logarithm_gates(lns8, LogDatapath(entries=1), least=True) == 5 * 31 + 2 + 4 + 8 + 16 + 16 + 3 * 8 + 5 * 24 / 32
    )
    ones = 1 + 3 + 5 + 7
    assert logarithm_gates(lns8, LogDatapath(entries=4)) == 5 * 31 + 360 + 4 * 24 + 5 * 24 * ones / 32


def test_images_differ_by_seed_and_kinds_can_be_told_apart():
    (x, kinds), (again, _), (other, _) = images(64, 1), images(64, 1), images(64, 2)
    assert torch.equal(x, again) and not torch.equal(x, other) and kinds.unique().numel() == 8
    assert set(formats((4,))) == {"int4", "e2m1", "e3m0"}


def test_the_front_is_what_nothing_beats():
    points = {"int3": (1.0, 9.0), "int4": (2.0, 5.0), "e2m1": (2.0, 6.0), "e3m2": (3.0, 5.0), "e4m3": (4.0, 1.0)}
    assert _front(points) == ["int3", "int4", "e4m3"]
