"""Products in order, each sum to nearest even, against the oracle: every arithmetic of chain.cu."""

from dataclasses import replace

import pytest
import torch

from fmtsim import GemmPlan
from fmtsim.cuda.gemm import chain as gemm_chain
from fmtsim.cuda.gemm.chain import BFLOATS, DOUBLES, FLOATS, HALVES
from fmtsim.formats.spec import FloatFormat
from fmtsim.spec.datapath import Datapath
from tests.cuda import gemms, paths
from tests.support.gemm_engine import DTYPES, KINDS, addend, check, check_kinds, gemm_spec, operand

FMA = Datapath(block=1, fraction_bits=None, rounding="nearest_even")
SHAPE = (5, 9, 45)


def custom(exponent_bits: int, mantissa_bits: int) -> FloatFormat:
    name = f"e{exponent_bits}m{mantissa_bits}"
    return FloatFormat(name=name, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits)


def shape_of(spec, k=SHAPE[2], with_c=False):
    unit = spec.datapath
    return gemm_chain.shape_of(spec, min(unit.block or k, k), k, with_c)


# Accumulator, operands, arithmetic; then whether sums are clamped to the accumulator's subnormals.
SEQUENTIAL = [
    ("fp16", "fp16", HALVES, False),
    ("bf16", "bf16", BFLOATS, False),
    ("fp32", "bf16", FLOATS, False),
    (custom(6, 9), "e4m3", FLOATS, False),
    (custom(8, 10), "bf16", DOUBLES, False),
    ("fp16", "bf16", DOUBLES, True),
]
RARER = [
    ("fp16", "e5m2", HALVES, False),
    ("bf16", "e4m3", BFLOATS, False),
    ("fp32", "fp32", FLOATS, False),
    (custom(5, 8), "e4m3", FLOATS, False),
    (custom(8, 13), "fp16", DOUBLES, False),
    (custom(4, 7), "e4m3", DOUBLES, True),
]
NATIVE = (HALVES, BFLOATS)


@pytest.mark.parametrize(("accumulator", "fmt", "numbers", "clamped"), SEQUENTIAL)
def test_multiply_adds_one_after_another(accumulator, fmt, numbers, clamped, device):
    spec = gemm_spec(replace(FMA, accumulator=accumulator), fmt)
    shape = shape_of(spec)
    assert (shape.numbers, shape.clamped) == (numbers, clamped)
    left = paths.check_kinds(gemm_chain, spec, SHAPE, ("normal", "sparse", "special", "codes"), device)
    assert left[:2] == [0, 0] and bool(left[2]) == (numbers not in NATIVE and shape.kept != 23)


@pytest.mark.slow
@pytest.mark.parametrize("with_c", [False, True])
@pytest.mark.parametrize(("accumulator", "fmt", "numbers", "clamped"), SEQUENTIAL + RARER)
def test_multiply_adds_of_every_kind(accumulator, fmt, numbers, clamped, with_c, device):
    spec = gemm_spec(replace(FMA, accumulator=accumulator), fmt)
    shape = shape_of(spec, with_c=with_c)
    assert (shape.numbers, shape.clamped) == (numbers, clamped)
    assert paths.check_kinds(gemm_chain, spec, SHAPE, KINDS, device, with_c)[0] == 0


@pytest.mark.parametrize("block", [4, 16])
def test_exact_blocks(block, device):
    spec = gemm_spec(replace(FMA, block=block), "e4m3")
    assert paths.check_kinds(gemm_chain, spec, SHAPE, ("normal", "wide"), device) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("accumulator", ["fp32", "bf16", "fp16", custom(8, 13)])
@pytest.mark.parametrize("block", [2, 3, 4, 24, None])
def test_exact_blocks_of_every_kind(block, accumulator, device):
    for fmt in ("e4m3", "bf16", "fp16"):
        spec = gemm_spec(replace(FMA, block=block, accumulator=accumulator), fmt)
        assert paths.check_kinds(gemm_chain, spec, SHAPE, KINDS, device, block == 3)[0] == 0


def test_addends(device):
    for accumulator, fmt in (("bf16", "bf16"), (custom(8, 10), "bf16")):
        spec = gemm_spec(replace(FMA, accumulator=accumulator), fmt)
        paths.check_kinds(gemm_chain, spec, SHAPE, ("normal", "sparse"), device, with_c=True)
        a, b = operand(fmt, 3, 20, "normal", 1), operand(fmt, 4, 20, "sparse", 2)
        for kind in ("special", "codes", "tiny"):
            paths.check(gemm_chain, a, b, spec, addend(spec, 3, 4, kind, 3), device)
        paths.check(gemm_chain, a, b * 0, spec, torch.full((3, 4), -0.0), device)


def test_zeros_with_signs(device):
    spec = gemm_spec(replace(FMA, accumulator="bf16", signed_zero=True), "bf16")
    a = torch.tensor([[-0.0, -0.0], [0.0, -0.0], [1.0, -1.0], [-1e-30, 0.0]]).bfloat16()
    b = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1e-30, 1.0]]).bfloat16()
    for c in (None, torch.full((4, 3), -0.0)):
        assert paths.check(gemm_chain, a, b, spec, c, device) == 0
    assert not gemm_chain.supports(paths.job_of(a, b, gemm_spec(replace(spec.datapath, accumulator="fp16"), "bf16")))


def test_several_panels(device):
    spec = gemm_spec(replace(FMA, accumulator="bf16"), "bf16")
    assert paths.check_kinds(gemm_chain, spec, (130, 258, 3), ("normal",), device) == [0]
    a, b = operand("bf16", 130, 5, "normal", 1), operand("bf16", 131, 5, "normal", 2)
    a[129, 4] = torch.inf
    spec = gemm_spec(replace(FMA, accumulator=custom(8, 10)), "bf16")
    assert paths.check(gemm_chain, a, b, spec, None, device) == 2


# What does not fit is left to the general path.


def test_a_sum_that_doubles_would_round_twice_is_left(device):
    spec = gemm_spec(replace(FMA, accumulator=custom(8, 7)), "fp16")
    assert shape_of(spec).numbers == DOUBLES
    tiny, tie = 2.0**-24, 1 + 2.0**-8
    a = torch.tensor([[tiny, tie]]).half()
    for factor, left in ((1.0, 0), (tiny, 1)):  # 2^-24 breaks the tie within 53 bits, 2^-48 * 2^-7 does not
        b = torch.tensor([[factor, 1.0 if left == 0 else 2.0**7]]).half()
        assert paths.check(gemm_chain, a, b, spec, None, device) == left


def test_a_block_that_doubles_do_not_hold_is_left(device):
    spec = gemm_spec(replace(FMA, block=4), "bf16")
    a = torch.tensor([[2.0**30, 2.0**-30, -(2.0**30), 0.0]]).bfloat16()
    assert paths.check(gemm_chain, a, torch.ones(1, 4).bfloat16(), spec, None, device) == 1


def test_sums_beyond_the_accumulator_are_left(device):
    for accumulator, fmt in ((custom(5, 8), "e4m3"), ("fp16", "bf16")):
        spec = gemm_spec(replace(FMA, accumulator=accumulator), fmt)
        a, b = torch.full((1, 3), 256.0), torch.tensor([[200.0, 200.0, -200.0]])
        a, b = (x.to(DTYPES[fmt]) for x in (a, b))
        assert paths.check(gemm_chain, a, b, spec, None, device) == 1


# Plans and layouts, through the door.


def test_plans(monkeypatch, device):
    gemms.install(monkeypatch, device, fast=True)
    monkeypatch.setattr(gemms.DOOR, "_FAST", (gemm_chain,))
    spec = gemm_spec(replace(FMA, accumulator="bf16"), "bf16")
    for plan in (GemmPlan(k_tile=10, split=3, reduce="pairwise"), GemmPlan(promote_every=24), GemmPlan(
        k_tile=16, split=2, owner="interleaved", residue_first=True, partial="bf16"
    )):  # fmt: skip
        check_kinds(replace(spec, plan=plan), (2, 3, 85), ("normal", "normal"), seed=4, with_c=True)
    a = operand("bf16", 40, 6, "normal", 1).T
    check(a, operand("bf16", 7, 40, "normal", 2), spec)


@pytest.mark.slow
@pytest.mark.parametrize(("accumulator", "fmt"), [("fp16", "fp16"), (custom(6, 9), "e4m3"), (custom(8, 10), "bf16")])
def test_plans_of_every_arithmetic(accumulator, fmt, monkeypatch, device):
    gemms.install(monkeypatch, device, fast=True)
    monkeypatch.setattr(gemms.DOOR, "_FAST", (gemm_chain,))
    for block in (1, 8):
        spec = gemm_spec(replace(FMA, accumulator=accumulator, block=block), fmt)
        for plan in (GemmPlan(k_tile=20, split=3), GemmPlan(promote_every=24)):
            check_kinds(replace(spec, plan=plan), (2, 3, 85), ("normal", "special"), seed=4, with_c=True)


def test_units_that_it_does_not_take():
    takes = lambda spec, **rest: shape_of(spec, **rest) is not None  # noqa: E731
    assert takes(gemm_spec(FMA, "bf16"))
    for unit in (replace(FMA, rounding="toward_zero"), replace(FMA, fraction_bits=25), replace(FMA, accumulator="fp64"),
                 replace(FMA, promote_every=4, promotion="fp16"), replace(FMA, block=4, signed_zero=True)):  # fmt: skip
        assert not takes(gemm_spec(unit, "bf16"))
    assert not takes(gemm_spec(FMA, "fp64"))
    assert not takes(gemm_spec(replace(FMA, accumulator=custom(8, 10)), "fp32"))
    assert not takes(gemm_spec(FMA, "bf16", plan=GemmPlan(promote_every=8, scaled_promotion=True)))


def test_a_planted_error_is_found(monkeypatch, device):
    spec = gemm_spec(replace(FMA, accumulator=custom(6, 9)), "e4m3")
    real = gemm_chain.shape_of
    monkeypatch.setattr(gemm_chain, "shape_of", lambda *given: real(*given)._replace(kept=8))
    with pytest.raises(AssertionError, match="differ"):
        paths.check_kinds(gemm_chain, spec, SHAPE, ("normal",), device)


# The proof that chain.cu gives of its rounding, on numbers.


def nearest(n: int, bits: int) -> int:
    """Return a positive integer rounded to so many bits, to nearest even."""
    cut = max(n.bit_length() - bits, 0)
    whole, rest = n >> cut, n & ((1 << cut) - 1)
    half = 1 << cut >> 1
    return (whole + (rest > half or (rest == half and cut > 0 and whole & 1))) << cut


def in_two_operations(x: int, kept: int, precision: int, sign: int = -1) -> int:
    """Return an integer of ``precision`` bits rounded to kept + 1 bits as chain.cu does it, with (2^cut + sign) x."""
    power = 1 << (precision - 1 - kept)
    g = nearest((power + sign) * x, precision)
    r = sign * (g - power * x)
    assert nearest(r, precision) == r
    return r


def around(kept: int, precision: int):
    """Yield significands around the midpoints and the ends of places, of a binade from end to end."""
    step = 1 << (precision - 1 - kept)
    places = {*range(1 << kept, (1 << kept) + 4), *range((2 << kept) - 4, (2 << kept)), 3 << kept >> 1}
    for place in sorted(places):
        for center in (0, step // 4, step // 2, step):
            yield from (x for i in range(-40, 41) if (x := place * step + center + i).bit_length() == precision)


@pytest.mark.parametrize(
    ("precision", "kept"), [(24, 0), (24, 1), (24, 7), (24, 10), (53, 7), (53, 10), (53, 23), (53, 25)]
)
def test_two_operations_round_to_nearest_even(precision, kept):
    for x in around(kept, precision):
        assert in_two_operations(x, kept, precision) == nearest(x, kept + 1), hex(x)


def test_the_nearest_two_operations_do_not():
    assert any(in_two_operations(x, 7, 24, sign=1) != nearest(x, 8) for x in around(7, 24))
    assert any(in_two_operations(x, 11, 24) != nearest(x, 12) for x in around(11, 24))
