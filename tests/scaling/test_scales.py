# SPDX-License-Identifier: Apache-2.0
"""From a block's statistic to its scale: every field of the rule against exact fractions, by its definition.

What kernels do in one pass is compared with these torch operations elsewhere; here they stand alone.
"""

from dataclasses import replace
from fractions import Fraction
from typing import get_args

import numpy
import pytest
import torch

from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import LevelOrder, Scaling, TensorScale
from fmtsim.machine import mufu
from fmtsim.machine.arrays import apply
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.oracle import FP64, floor_log2, round_value
from fmtsim.scaling.blocks import block_sizes, blocked, folded_sum, statistic
from fmtsim.scaling.scaled_cast import cast, scales
from fmtsim.scaling.scales import power_of_two
from fmtsim.spec.cast import RandomKey
from tests.support.bits import assert_same_bits
from tests.support.operands import normal

E2M1, E4M3, FP32 = get_format("e2m1"), get_format("e4m3"), get_format("fp32")
LARGEST, LEAST = Fraction(torch.finfo(torch.float32).max), Fraction(torch.finfo(torch.float32).tiny)
DTYPES = {torch.float16: get_format("fp16"), torch.bfloat16: get_format("bf16"), torch.float32: FP32}


def rn(x, fmt=FP32) -> Fraction:
    """Round to nearest; what is beyond float32 becomes its largest number."""
    found = round_value(min(Fraction(x), LARGEST) if fmt == FP32 else Fraction(x), fmt, "nearest_even", "ieee")
    return Fraction(found)


def power(x: Fraction, up: bool) -> Fraction:
    """Return the power of two at or next to a positive number, 2**-126 to 2**127."""
    e = max(floor_log2(x), -126)
    return Fraction(2) ** min(e + (up and Fraction(2) ** e < x), 127)


def stored(x: Fraction, rule: Scaling) -> Fraction:
    return Fraction(round_value(x, rule.scale, "nearest_even", "saturate"))


def definition(a: Fraction, rule: Scaling, dtype=torch.float32) -> tuple[Fraction, Fraction, bool]:
    """Return a block's scale, what its elements meet, and whether they are divided by that."""
    eps, nothing = rn(Fraction(rule.eps)), a == 0
    if rule.eps_rule == "statistic":
        a = max(a, eps)
    elif rule.eps_rule == "sum":
        a = rn(a + eps)
    empty = nothing and a == 0
    top = rn(Fraction(E4M3.max if rule.top is None else rule.top) / 2**rule.margin)
    encodes, r = rule.arithmetic in ("encode", "double") and rule.factor is None, None
    if encodes:
        r = Fraction(1) if empty else rn(top / a) if rule.arithmetic == "encode" else rn(rn(top / a, FP64))
        if rule.power_of_two == "log2" and not empty:
            r = by_logarithm(a, top, DTYPES[dtype])
        elif rule.power_of_two and not empty:
            r = power(r, up=rule.power_of_two == "floor")
        s = rn(1 / r)
        if rule.multiplier != 1:
            s = rn(s * rn(Fraction(rule.multiplier)))
            r = rn(1 / s)
    else:
        how = {"multiply": lambda: rn(a * rn(1 / top)), "factor": lambda: rn(a * rn(Fraction(rule.factor)))}
        s = how.get("factor" if rule.factor else rule.arithmetic, lambda: rn(a / top))()
        s = max(rn(s + rn(Fraction(rule.offset))), LEAST, eps if rule.eps_rule == "scale" else LEAST)
        s = s if rule.power_of_two is None else power(s, up=rule.power_of_two == "ceil")
        s = rn(s * rn(Fraction(rule.multiplier)))
        s = s if rule.offset and rule.factor else Fraction(1) if empty else s
    if rule.allowed:
        s = next((rn(step) for step in rule.allowed if rn(step) >= s), rn(rule.allowed[-1]))
    kept = stored(s, rule)
    if rule.arithmetic == "divide":
        return kept, kept or LEAST, True
    if encodes and rule.scale == FP32 and not rule.allowed:
        return kept, r, False
    inverted = max(kept, eps) if rule.eps_rule == "inverse" else kept
    return kept, rn(1 / inverted) if inverted else LARGEST, False


def by_logarithm(a: Fraction, top: Fraction, fmt) -> Fraction:
    """``2**floor(log2((1 / a) * top))``, every step rounded to a dtype: a logarithm may carry into the next power."""
    with numpy.errstate(over="ignore", divide="ignore"):
        inverse = numpy.float64(round_value(rn(1 / a), fmt, "nearest_even", "ieee"))
        r = numpy.float64(
            round_value(float(numpy.float32(inverse) * numpy.float32(float(top))), fmt, "nearest_even", "ieee")
        )
        logarithm = round_value(float(numpy.log2(r)), fmt, "nearest_even", "ieee")
    return Fraction(2) ** int(min(max(numpy.floor(logarithm), -126), 127))


def statistics() -> torch.Tensor:
    """Numbers from 0 to float32's largest: powers of two, their neighbours, tops of formats, and what lies between."""
    powers = torch.tensor([2.0**e for e in (-149, -130, -127, -126, -125, -30, -9, -1, 0, 1, 8, 60, 126, 127)])
    near = torch.cat([torch.nextafter(powers, powers.new_tensor(side)) for side in (0.0, torch.inf)])
    drawn = normal(1, 24, seed=9).flatten().abs()
    tops = torch.tensor([0.0, 448.0, 6.0, 224.0, 1e-12, 1e-3, 0.3, float(LARGEST)])
    return torch.cat([powers, near, drawn, drawn[:6] * 1e-30, tops])[None]


RULES = {
    "divide": {"arithmetic": "divide"},
    "reciprocal": {"arithmetic": "reciprocal"},
    "multiply": {"arithmetic": "multiply"},
    "encode": {"arithmetic": "encode"},
    "double": {"arithmetic": "double", "eps": 1e-12},
    "double without eps": {"arithmetic": "double", "top": 3.3},
    "statistic": {"arithmetic": "reciprocal", "eps": 1e-4},
    "sum": {"arithmetic": "reciprocal", "eps": 1e-10, "eps_rule": "sum"},
    "large sum": {"arithmetic": "encode", "eps": 2.0**104, "eps_rule": "sum"},
    "scale": {"arithmetic": "multiply", "eps": 1e-3, "eps_rule": "scale"},
    "inverse": {"arithmetic": "reciprocal", "eps": 1e-3, "eps_rule": "inverse"},
    "factor": {"arithmetic": "divide", "factor": 0.3},
    "factor encoded": {"arithmetic": "encode", "factor": 1.7, "margin": 3},
    "offset": {"arithmetic": "divide", "factor": 2.92 / 6, "offset": 1e-8, "power_of_two": "floor"},
    "offset of a top": {"arithmetic": "reciprocal", "offset": 0.25},
    "top and margin": {"arithmetic": "reciprocal", "top": 57344.0, "margin": 2},
    "margin": {"arithmetic": "encode", "margin": 1},
    "floor": {"arithmetic": "divide", "power_of_two": "floor"},
    "ceil": {"arithmetic": "reciprocal", "power_of_two": "ceil"},
    "floor encoded": {"arithmetic": "encode", "power_of_two": "floor"},
    "ceil encoded": {"arithmetic": "encode", "power_of_two": "ceil", "multiplier": 1.25},
    "multiplier": {"arithmetic": "divide", "top": 4.0, "power_of_two": "floor", "multiplier": 4 / 3},
    "allowed": {"arithmetic": "divide", "allowed": (2.0**-8, 2.0**-4, 0.3, 1.0, 16.0)},
    "allowed encoded": {"arithmetic": "encode", "allowed": (0.25, 2.0)},
    "stored": {"arithmetic": "reciprocal", "scale": E4M3},
    "stored divided": {"arithmetic": "divide", "scale": E4M3},
    "stored encoded": {"arithmetic": "encode", "scale": get_format("bf16")},
    "stored multiplier": {"arithmetic": "encode", "scale": get_format("fp16"), "multiplier": 3.0},
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_rules_by_their_definition(name):
    rule, a = Scaling(**RULES[name]), statistics()
    found = scales(a, rule, E4M3.max)
    expected = [definition(Fraction(number), rule) for number in a[0].tolist()]
    for which, got in enumerate((found.scale, found.factor)):
        exact = torch.tensor([[float(row[which]) for row in expected]])
        assert_same_bits(got, exact, a, what=("scale", "factor")[which])
    assert {found.divides} == {row[2] for row in expected} and found[3:] == (None,) * 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_powers_by_rounded_logarithms(dtype):
    rule, top = Scaling(power_of_two="log2"), DTYPES[dtype]
    a = statistics().to(dtype).float()
    a = torch.cat([a[a < top.max], 448.0 / (2.0 ** torch.arange(-6.0, 9.0) * (1 + 2.0**-9))]).to(dtype).float()[None]
    found = scales(a, rule, E4M3.max, dtype=dtype)
    exact = torch.tensor([[float(definition(Fraction(n), rule, dtype)[1]) for n in a[0].tolist()]])
    assert_same_bits(found.factor, exact, a)
    assert_same_bits(scales(a, rule, E4M3.max, dtype=torch.float64).factor, scales(a, rule, E4M3.max).factor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_a_rounded_logarithm_carries(dtype):
    """Numbers on both sides of every turn, each as the top of a block whose largest magnitude is 1."""
    rule, last = Scaling(power_of_two="log2"), 2.0 ** -DTYPES[dtype].mantissa_bits
    for exponent in range(-14, 16):
        turns = [2.0**exponent * (2 - n * last) for n in range(1, 13)]
        for top in turns:
            logarithm = round_value(float(numpy.log2(top)), DTYPES[dtype], "nearest_even", "ieee")
            assert scales(torch.ones(1, 1), rule, top, dtype=dtype).factor.item() == 2.0 ** (logarithm // 1), top


def test_a_candidate_multiplies_a_scale_and_is_stored():
    rule, a = Scaling(scale=E4M3, arithmetic="reciprocal", candidates=(1.0, 0.7)), statistics()
    found = scales(a, rule, E4M3.max, times=0.7)
    exact = [stored(rn(definition(Fraction(n), rule)[0] * rn(Fraction(0.7))), rule) for n in a[0].tolist()]
    exact = [[float(torch.tensor(float(s) * 1.0)) for s in exact]]
    assert_same_bits(found.scale, torch.tensor(exact), a)
    assert found.divides and found.factor is found.scale


def test_powers_of_two_at_the_ends():
    x = torch.tensor([0.0, 1e-45, 2.0**-126, 1.5 * 2.0**-126, 2.0**127, 1.5 * 2.0**127, float(LARGEST)])
    assert power_of_two(x, up=False).tolist() == [2.0**-126] * 4 + [2.0**127] * 3
    assert power_of_two(x, up=True).tolist() == [2.0**-126] * 3 + [2.0**-125] + [2.0**127] * 3


# Two levels.


def te(a, amax, c, m, times, store):
    """Transformer Engine's order (docs/semantics.md, section 6)."""
    encode = rn(rn(c * m) / amax) if amax else Fraction(1)
    encode = encode or Fraction(1)
    decode = rn(1 / encode)
    s = store(rn(rn(a * rn(encode * rn(1 / m))) * times))
    return decode, s, rn(1 / rn(s * decode)) if rn(s * decode) else LARGEST


def torchao(a, amax, c, m, times, store):
    t = rn(amax / rn(c * m)) or Fraction(1)
    s = store(min(max(rn(rn(rn(a / m) / t) * times), Fraction(1, 64)), c))
    return t, s, rn(rn(1 / t) / s)


def quartet2(a, amax, c, m, times, store):
    t = rn(rn(amax / c) / m) or Fraction(1)
    s = store(rn(rn(rn(a / m) * times) / t)) or Fraction(1)
    return t, s, rn(s * t)


def te_quotient(a, amax, c, m, times, store):
    encode = rn(rn(c * m) / max(amax, rn(Fraction(1e-12))))
    s = store(rn(rn(a * rn(encode * rn(1 / m))) * times))
    return rn(amax / rn(c * m)) or Fraction(1), s, rn(encode / s) if s else Fraction(0)


def fouroversix(a, amax, c, m, times, store):
    encode = rn(rn(c * m) / amax) if amax else Fraction(1)
    decode = rn(1 / encode)
    s = store(rn(rn(rn(a / m) * encode) * times))
    return decode, s, rn(1 / rn(s * decode)) if rn(s * decode) else LARGEST


def modelopt(a, amax, c, m, times, store):
    t = rn(amax / rn(c * m)) or Fraction(1)
    s = store(min(max(rn((rn(a / rn(m * t)) or Fraction(1)) * times), Fraction(1, 512)), c))
    return t, s, rn(s * t) or Fraction(2) ** -126


def compressed_tensors(a, amax, c, m, times, store):
    """A number over a tensor is its reciprocal times the number; Inf becomes 1."""
    exact = rn(1 / max(amax, Fraction(2) ** -126)) * rn(c * m)
    encode = rn(exact) if exact < LARGEST else Fraction(1)
    s = store(rn(rn(rn(a / m) * encode) * times)) or Fraction(1, 8)
    return rn(1 / encode), s, rn(s / encode) or Fraction(2) ** -126


def approximate(x):
    """rcp.approx.ftz.f32 as the simulated unit computes it."""
    return min(
        Fraction(min(float(apply(mufu.rcp, numpy.array([float(x)], numpy.float32))[0]), float(LARGEST))), LARGEST
    )


def trtllm(a, amax, c, m, times, store):
    encode = rn(rn(c * m) / amax) if amax else Fraction(1)
    s = store(rn(rn(encode * rn(a * approximate(m))) * times))
    return rn(1 / encode), s, approximate(rn(s * approximate(encode)))


ORDERS = [te, te_quotient, fouroversix, trtllm, modelopt, compressed_tensors, torchao, quartet2]


def test_every_order_is_here():
    assert [order.__name__ for order in ORDERS] == list(get_args(LevelOrder))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize(("top", "whole", "times"), [(None, None, 1.0), (5.3, 255.99, 1.0), (None, 256.0, 1.5)])
def test_two_levels_by_their_authors_order(order, top, whole, times):
    """Blocks from the tensor's largest down to nothing; factors beyond float32 are its largest number."""
    rule = Scaling(block=(1, 16), scale=E4M3, top=top, tensor=TensorScale(top=whole, order=order.__name__),
                   candidates=(1.0, times))  # fmt: skip
    c, m = rn(Fraction(whole or 448.0)), rn(Fraction(top or 6.0))
    blocks = torch.cat([normal(1, 12, seed=3).abs().flatten(), torch.tensor([0.0, 4.0, 2.0**-9, 2.0**-12, 1e-30])])
    for size in (1.0, 1e-30, 2.0**-120, 2.0**-130, 3e-42, 1e35, 0.0):
        a = (blocks * size)[None]
        found = scales(a, rule, E2M1.max, times=times)
        amax = Fraction(float(a.max()))
        exact = [order(Fraction(n), amax, c, m, rn(Fraction(times)), lambda s: stored(s, rule)) for n in a[0].tolist()]
        assert found.tensor is not None and found.tensor.item() == float(exact[0][0]), size
        for which, got in enumerate((found.scale, found.factor), 1):
            assert_same_bits(got, torch.tensor([[float(row[which]) for row in exact]]), a, what=f"{size} {which}")
        assert found.divides == (order in (modelopt, compressed_tensors, quartet2))
    empty = scales(torch.zeros(0, 0), rule, E2M1.max)
    assert empty.tensor is not None and empty.tensor.item() == 1 and empty.scale.shape == (0, 0)


@pytest.mark.parametrize(("block", "spans"), [((1, None), [(0, 7)]), ((1, 64), [(0, 4), (4, 7)])])
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_rows_and_windows_are_tensors_of_their_own(block, spans, order):
    rule = Scaling(block=(1, 16), scale=E4M3, tensor=TensorScale(order=order.__name__, block=block))
    whole = replace(rule, tensor=TensorScale(order=order.__name__))
    a = normal(3, 7, seed=5).abs() * torch.tensor([[1.0], [1e-20], [0.0]])
    found = scales(a, rule, E2M1.max)
    for row in range(3):
        for start, stop in spans:
            apart = scales(a[row : row + 1, start:stop], whole, E2M1.max)
            for got, expected in zip(found[:2], apart[:2], strict=True):
                assert_same_bits(got[row, start:stop], expected[0])
            assert found.tensor[row, start:stop].unique().tolist() == [apart.tensor.item()]


def test_a_tensor_scale_that_vanishes_is_one():
    rule = Scaling(block=(1, 16), scale=E4M3, top=1e-9, tensor=TensorScale(top=1e-30))
    found = scales(torch.tensor([[1e20, 1e-30]]), rule, E2M1.max)
    assert found.tensor is not None and found.tensor.item() == 1  # RN32(RN32(c m) / amax) is 0
    assert found.scale.tolist() == [[448.0, stored(rn(Fraction(1e-30) * rn(1 / rn(Fraction(1e-9)))), rule)]]


def test_zeros_stay_zeros_under_a_factor_beyond_float32():
    """Inf would make them NaN, and NaN 6."""
    x = normal(4, 64, seed=3) * 3e-42
    x[2, 3], x[3, 4] = 0.0, -0.0
    scaling = Scaling(block=(1, 16), scale=E4M3, tensor=TensorScale(order="torchao"))
    found = cast(x, E2M1, scaling, Rounding(), "saturate")
    assert found.elements[2, 3].item() == 0 and found.elements[3, 4].signbit()


# Statistics.


def fold(terms: list[float]) -> float:
    """Add element i and i + n / 2 until one is left, n a power of two."""
    terms = terms + [0.0] * ((1 << (len(terms) - 1).bit_length()) - len(terms))
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [terms[i] + terms[i + half] for i in range(half)]
    return terms[0]


@pytest.mark.parametrize("count", range(1, 18))
def test_folded_sums(count):
    x = normal(3, count, seed=count).double() * 2.0 ** torch.arange(count)
    assert folded_sum(x).tolist() == [fold(row) for row in x.tolist()]


def measured(part: list[float], kind: str) -> float:
    there = [x for x in part if numpy.isfinite(x)]
    count = max(len(there), 1)
    x = [v if numpy.isfinite(v) else 0.0 for v in part]
    if kind == "amax":
        return max(map(abs, x))
    if kind == "mean_abs":
        return fold(list(map(abs, x))) / count
    if kind == "std":
        mean = fold(x) / count
        x = [v - mean if numpy.isfinite(w) else 0.0 for v, w in zip(x, part, strict=True)]
    return float(numpy.sqrt(fold([v * v for v in x]) / count))


@pytest.mark.parametrize("block", [(1, 3), (1, 7), (2, 4), (1, None), (None, 4), (None, None)])
@pytest.mark.parametrize("kind", ["amax", "std", "rms", "mean_abs", "one"])
def test_statistics_of_blocks(block, kind):
    """Zeros that fill short blocks do not count, nor do NaN and Inf; what overflows is the largest float32."""
    x = normal(5, 14, seed=2)
    x[0, 1], x[1, 0], x[2, :8], x[4, 13] = torch.nan, -torch.inf, torch.nan, float(LARGEST)
    rows, columns = block_sizes(block, x.shape)
    for tensor in (x, torch.where(x.isfinite(), x, 0.5).double() * 3):
        found = statistic(tensor, block, kind)
        for i in range(found.shape[0]):
            for j in range(found.shape[1]):
                part = torch.nn.functional.pad(tensor, (0, columns, 0, rows), value=torch.nan)
                part = part[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].double().flatten().tolist()
                exact = 1.0 if kind == "one" else min(measured(part, kind), float(LARGEST))
                assert found[i, j].item() == numpy.float32(exact), (i, j)
        assert found.dtype == torch.float32
        assert found.shape == (-(-5 // rows), -(-14 // columns)) == blocked(tensor, (rows, columns)).shape[:2]


# Candidates and corrections.


@pytest.mark.parametrize("metric", ["mae", "mse"])
def test_the_candidate_of_least_error_counts(metric):
    x = normal(24, 32, seed=4)
    x[3] = 0.0  # a tie: the first
    candidates = (1.0, 1.3, 0.9)
    rule = Scaling(block=(1, 16), arithmetic="reciprocal", candidates=candidates, metric=metric)
    found = cast(x, E2M1, rule, Rounding(), "saturate")
    once, a = Scaling(block=(1, 16), arithmetic="reciprocal"), statistic(x, (1, 16), "amax")
    given = [scales(a, rule, E2M1.max, times=times) for times in candidates]
    tried = [cast(x, E2M1, once, Rounding(), "saturate", given=made) for made in given]
    chosen = set()
    for i in range(24):
        for j in range(2):
            part = (i, slice(16 * j, 16 * j + 16))
            errors = []
            for one in tried:
                off = [abs(a - b) for a, b in zip(one.values((1, 16))[part].tolist(), x[part].tolist(), strict=True)]
                errors.append(fold(off if metric == "mae" else [v * v for v in off]))
            best = errors.index(min(errors))
            chosen.add(best)
            assert_same_bits(found.elements[part], tried[best].elements[part], x[part])
            assert_same_bits(found.scaled[part], tried[best].scaled[part], x[part])
            assert_same_bits(found.scales.scale[i, j], tried[best].scales.scale[i, j])
            assert_same_bits(found.values((1, 16))[part], tried[best].values((1, 16))[part], x[part])
    assert chosen == {0, 1, 2}


def test_scales_and_elements_have_words_of_their_own():
    x, keys = normal(4, 64, seed=5), (RandomKey(1, 2), RandomKey(3, 4))
    rule = Scaling(block=(1, 16), arithmetic="reciprocal", scale=E4M3, scale_rounding="stochastic")
    rounding = Rounding(mode="stochastic")
    found = cast(x, E2M1, rule, rounding, "saturate", keys)
    same = scales(statistic(x, (1, 16), "amax"), rule, E2M1.max, keys[1])
    assert_same_bits(found.scales.scale, same.scale)
    again = cast(x, E2M1, rule, rounding, "saturate", (keys[0], None), given=same)
    assert_same_bits(found.elements, again.elements)
    other = cast(x, E2M1, rule, rounding, "saturate", (keys[1], keys[0]))
    assert not torch.equal(other.elements, found.elements) and not torch.equal(other.scales.scale, same.scale)
    plain = cast(x, E2M1, rule, Rounding(), "saturate", keys)  # elements to nearest: no words
    assert_same_bits(plain.elements, cast(x, E2M1, rule, Rounding(), "saturate", (None, keys[1])).elements)


def test_the_logarithm_of_nothing_is_the_least_power():
    """``(1 / a) * top`` rounds to zero in float16: its logarithm is -Inf, and the factor 2**-126 as the clamp says."""
    rule, a = Scaling(power_of_two="log2"), torch.tensor([[65504.0, 1.0, 2.0**-14]])
    exact = [[float(by_logarithm(Fraction(n), Fraction(2) ** -26, DTYPES[torch.float16])) for n in a[0].tolist()]]
    assert exact[0][:2] == [2.0**-126] * 2 and exact[0][2] == 2.0**-12
    assert_same_bits(scales(a, rule, 2.0**-26, dtype=torch.float16).factor, torch.tensor(exact), a)
