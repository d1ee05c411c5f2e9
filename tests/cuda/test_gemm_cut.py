"""Units that cut or round terms, and round sums to nearest, stochastically or to few exponents, against the oracle."""

from dataclasses import replace

import pytest
import torch

from fmtsim import GemmPlan
from fmtsim.cuda.gemm import cut as gemm_cut
from fmtsim.formats.spec import FloatFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.datapath import Datapath
from tests.cuda import gemms, paths
from tests.support.gemm_engine import KINDS, addend, check_kinds, gemm_spec, operand

HALF = Datapath(block=16, fraction_bits=25, min_exponent=-133, rounding="nearest_even")
E5M9 = FloatFormat(name="e5m9", exponent_bits=5, mantissa_bits=9)
E8M13 = FloatFormat(name="e8m13", exponent_bits=8, mantissa_bits=13)
NEAREST = replace(HALF, term_rounding="nearest_even")
SHAPE = (5, 9, 45)

UNITS = {
    "bfloat16 sums": (replace(HALF, accumulator="bf16"), "bf16"),
    "float16 sums": (replace(HALF, accumulator="fp16"), "fp16"),
    "float16 sums, cut": (replace(HALF, accumulator="fp16", fraction_bits=13, rounding="toward_zero"), "bf16"),
    "stochastic": (replace(HALF, accumulator="bf16", rounding="stochastic"), "bf16"),
    "down": (replace(HALF, term_rounding="down", block=32, fraction_bits=13, accumulator=E8M13), "e4m3"),
    "terms to nearest": (replace(NEAREST, min_exponent=None), "bf16"),
    "terms to nearest, few places": (replace(NEAREST, fraction_bits=3, accumulator="fp16"), "fp16"),
}
RARER = {
    "terms to nearest, longest integers": (replace(NEAREST, block=32, fraction_bits=24), "fp16"),
    "terms to nearest, cut sums": (replace(NEAREST, block=5, fraction_bits=0, rounding="toward_zero"), "e4m3"),
    "terms to nearest, high alignment": (replace(NEAREST, min_exponent=10, fraction_bits=8, block=4), "e5m2"),
    "terms to nearest, stochastic": (
        replace(NEAREST, fraction_bits=6, accumulator="bf16", rounding="stochastic"), "bf16",
    ),
    "terms to nearest, another format": (replace(NEAREST, operand="fp16", fraction_bits=10), "bf16"),
    "float32 sums": (HALF, "tf32"),
    "any alignment": (replace(HALF, min_exponent=None, block=5), "fp16"),
    "high alignment": (replace(HALF, min_exponent=10, fraction_bits=13), "bf16"),
    "few exponents": (replace(HALF, block=4, accumulator=E5M9, rounding="toward_zero"), "e5m2"),
    "operands of another format": (replace(HALF, operand="fp16"), "bf16"),
    "13 bits": (replace(HALF, rounding=Rounding(mode="stochastic", random_bits=13)), "bf16"),
    "8 bits, variant b": (
        replace(HALF, accumulator="fp16", rounding=Rounding(mode="stochastic", random_bits=8, variant="b")), "fp16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNITS)
def test_units(name, device):
    unit, fmt = UNITS[name]
    left = paths.check_kinds(gemm_cut, gemm_spec(unit, fmt), SHAPE, ("normal", "sparse", "special"), device)
    assert left == [0, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("with_c", [False, True])
@pytest.mark.parametrize("name", [*UNITS, *RARER])
def test_units_on_every_kind(name, with_c, device):
    unit, fmt = (UNITS | RARER)[name]
    for shape in (SHAPE, (3, 64, 40)) if unit.rounding.mode == "stochastic" else (SHAPE,):
        assert paths.check_kinds(gemm_cut, gemm_spec(unit, fmt), shape, KINDS, device, with_c)[0] == 0


@pytest.mark.parametrize("block", [16, 5])
@pytest.mark.parametrize("with_c", [False, True])
def test_ties_of_terms(with_c, block, device):
    """All terms but the largest, and the addend, lie between two numbers of the grid; their sums are odd and even."""
    unit = replace(NEAREST, block=block, fraction_bits=4, accumulator="fp32")
    spec = gemm_spec(unit, "bf16")
    generator = torch.Generator().manual_seed(block)
    drawn = lambda *shape: torch.randint(-16, 17, shape, generator=generator)  # noqa: E731
    a, b = (2 * drawn(33, 6 * block) + 1) / 2, torch.ones(20, 6 * block)
    a[:, ::block] = 16.0
    b[1::2] = torch.where(drawn(10, 6 * block) > 0, 1.0, -1.0)
    c = (2 * drawn(33, 20) + 1) / 2 if with_c else None
    assert paths.check(gemm_cut, a.bfloat16(), b.bfloat16(), spec, c, device) == 0
    even = a[:, 1:2] * torch.ones(1, block)  # sums to nearest of all terms at once would differ
    assert (even.sum(1) != even.round().sum(1)).any()


def test_the_longest_sums_of_terms(device):
    """As many of the largest terms as a block has, of one sign, and an addend as large: below 2^31 places by one."""
    spec = gemm_spec(replace(NEAREST, min_exponent=None), "fp16")
    assert gemm_cut.shape_of(spec, 16) is not None
    largest = torch.full((2, 48), 2.0 - 2.0**-10).half()
    signs = torch.tensor([[1.0], [-1.0]]).half()
    c = torch.tensor([[3.999, -3.999], [3.9999998, 2.5]])
    for addend_of in (None, c, -c):
        assert paths.check(gemm_cut, largest * signs, largest, spec, addend_of, device) == 0
    assert gemm_cut.shape_of(gemm_spec(replace(NEAREST, min_exponent=None, fraction_bits=26), "fp16"), 16) is None


@pytest.mark.parametrize("name", ["bfloat16 sums", "float16 sums, cut", "down"])
def test_exponents_compared_ahead(name, device, monkeypatch):
    """Every rounding could do that; which do is a matter of speed. Blocks of 32 have no stage to spare."""
    monkeypatch.setattr(gemm_cut, "_AHEAD", range(8))
    unit, fmt = UNITS[name]
    assert paths.check_kinds(gemm_cut, gemm_spec(unit, fmt), (3, 4, 150), ("normal", "special"), device, True) == [0, 1]
    spec = gemm_spec(replace(unit, block=16), fmt, plan=GemmPlan(promote_every=64))
    assert paths.check_kinds(gemm_cut, spec, (3, 4, 150), ("normal",), device) == [0]


def test_random_words_of_four_columns(device):
    """Columns in multiples of 64 share counters; several panels, of which both operands change places."""
    unit, fmt = UNITS["stochastic"]
    assert paths.check_kinds(gemm_cut, gemm_spec(unit, fmt), (3, 192, 20), ("normal",), device) == [0]
    assert paths.check_kinds(gemm_cut, gemm_spec(unit, fmt), (130, 64, 5), ("normal",), device) == [0]


def test_blocks_without_products(device):
    unit, fmt = UNITS["bfloat16 sums"]
    a, b = operand(fmt, 3, 40, "normal", 1), operand(fmt, 4, 40, "normal", 2)
    a[:, 8:30] = 0.0
    b[1] = -0.0
    for c in (None, addend(gemm_spec(unit, fmt), 3, 4, "normal", 3), torch.full((3, 4), -0.0)):
        assert paths.check(gemm_cut, a, b, gemm_spec(unit, fmt), c, device) == 0


def test_tiles_are_left(device):
    a, b = operand("bf16", 130, 20, "normal", 1), operand("bf16", 131, 20, "normal", 2)
    a[129, 4] = torch.nan
    assert paths.check(gemm_cut, a, b, gemm_spec(UNITS["bfloat16 sums"][0], "bf16"), None, device) == 2
    ones = torch.full((1, 16), 100.0).bfloat16()
    assert paths.check(gemm_cut, ones, ones, gemm_spec(UNITS["float16 sums"][0], "bf16"), None, device) == 1
    small = torch.full((1, 16), 2.0**-66).bfloat16()  # sums are subnormal
    assert paths.check(gemm_cut, small, small, gemm_spec(UNITS["bfloat16 sums"][0], "bf16"), None, device) == 1


def test_plans(monkeypatch, device):
    gemms.install(monkeypatch, device, fast=True)
    monkeypatch.setattr(gemms.DOOR, "_FAST", (gemm_cut,))
    unit, fmt = UNITS["bfloat16 sums"]
    for plan in (GemmPlan(k_tile=20, split=3), GemmPlan(promote_every=32)):
        check_kinds(gemm_spec(unit, fmt, plan=plan), (2, 3, 85), ("normal", "normal"), seed=4, with_c=True)


def test_units_that_it_does_not_take():
    takes = lambda unit: gemm_cut.shape_of(gemm_spec(unit, "bf16"), min(unit.block, 45)) is not None  # noqa: E731
    assert takes(HALF)
    third = Rounding(mode="stochastic", random_bits=8, variant="c")
    changes = [dict(rounding="up"), dict(rounding=third), dict(accumulator="fp64"), dict(block=2), dict(block=64)]
    changes += [dict(fraction_bits=None), dict(term_rounding="nearest_away"), dict(signed_zero=True)]
    for change in changes:
        assert not takes(replace(HALF, **change))


def test_a_planted_error_is_found(monkeypatch, device):
    unit, fmt = UNITS["bfloat16 sums"]
    real = gemm_cut.shape_of
    monkeypatch.setattr(gemm_cut, "shape_of", lambda *given: real(*given)._replace(fraction=12))
    with pytest.raises(AssertionError, match="differ"):
        paths.check_kinds(gemm_cut, gemm_spec(unit, fmt), SHAPE, ("normal",), device)


def test_a_planted_error_of_terms_is_found(monkeypatch, device):
    unit, fmt = UNITS["terms to nearest"]
    real = gemm_cut.shape_of
    down = gemm_cut.MODES.index("down")
    monkeypatch.setattr(gemm_cut, "shape_of", lambda *given: real(*given)._replace(terms=down))
    with pytest.raises(AssertionError, match="differ"):
        paths.check_kinds(gemm_cut, gemm_spec(unit, fmt), SHAPE, ("normal",), device)
