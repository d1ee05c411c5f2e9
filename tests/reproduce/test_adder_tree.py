# SPDX-License-Identifier: Apache-2.0
"""The adder tree of logarithms against a loop over exact fractions, and the errors that its tables must have."""

from decimal import Decimal, getcontext
from fractions import Fraction

import pytest
import torch

from fmtsim.formats.spec import LogFormat
from fmtsim.reproduce.adder_tree import adder_tree

LNS8 = LogFormat(name="lns8_g8", bits=8, gamma=8)


def product(a, b, gamma, entries, fraction_bits):
    """One output, from rows of (sign, exponent), in the order of a circuit: each term converted by itself."""
    getcontext().prec = 60
    total = Fraction(0)
    for (s, k), (t, m) in zip(a, b, strict=True):
        shift, rest = divmod(k + m, gamma)
        upper, lower = divmod(rest, gamma // entries)
        exact = Decimal(2) ** (Decimal(upper) / entries) * 2**fraction_bits
        constant = Fraction(int((exact + Decimal("0.5")).to_integral_value("ROUND_FLOOR")), 2**fraction_bits)
        total += s * t * 2**shift * constant * (1 + Fraction(lower, gamma))
    return total


@pytest.mark.parametrize("entries", [1, 2, 4, 8])
@pytest.mark.parametrize("gamma", [8, 16])
def test_the_tree_is_the_sum_of_converted_products(gamma, entries):
    fmt = LogFormat(name="lns", bits=8, gamma=gamma)
    codes = torch.randint(0, 256, (2, 3, 300), dtype=torch.uint8, generator=torch.Generator().manual_seed(entries))
    rows = [[[(-1 if c > 127 else 1, c & 127) for c in row] for row in matrix] for matrix in codes.tolist()]
    found = adder_tree(codes[0], codes[1], fmt, entries, 8)
    for m in range(3):
        for n in range(3):
            exact = product(rows[0][m], rows[1][n], gamma, entries, 8)
            assert Fraction(int(found[m, n]), gamma << 8) == exact


@pytest.mark.parametrize(("entries", "worst"), [(8, 1.0), (4, 1.125 / 2 ** (1 / 8)), (1, 1.5 / 2 ** (4 / 8))])
def test_a_conversion_errs_as_mitchells_line_does(entries, worst):
    """(1 + f) / 2^f at the lower remainder that is worst; 16 bits of a constant are to spare."""
    codes = torch.arange(8, dtype=torch.uint8)[:, None]
    found = adder_tree(codes, codes[:1], LNS8, entries, 16)[:, 0].double() / (8 << 16)
    ratio = found / 2.0 ** (torch.arange(8) / 8).double()
    assert float(ratio.max()) == pytest.approx(worst, abs=2e-5) and float(ratio.min()) == pytest.approx(1, abs=2e-5)
