# SPDX-License-Identifier: Apache-2.0
"""OperandStats: counts worked out by hand, and scales that are those of encode."""

import math

import pytest
import torch

import fmtsim
from fmtsim.casts.quantize import encode, quantize
from fmtsim.formats.block import scaled
from fmtsim.formats.element import IntFormat, LogFormat
from fmtsim.formats.registry import get_format
from fmtsim.lab.analysis.measure import FIGURES, LOWEST_EXPONENT, block_scales, measure, measure_by_torch
from fmtsim.lab.analysis.stats import OperandStats, operand_in_words
from tests.support.operands import normal


def stats_of(values, name, dim=-1):
    x = torch.as_tensor(values, dtype=torch.float32)
    fmt = get_format(name) if isinstance(name, str) else name
    return OperandStats().add(x, quantize(x, fmt, dim=dim, pad=True, out_dtype=torch.float64), fmt, dim)


def test_counts_by_hand():
    # e2m1: 0.25 ties to zero, 7 is the first value whose nearest neighbour would be 8, inf and nan count apart.
    s = stats_of([0.0, 0.2, 0.25, 0.3, 1.0, 6.9, 7.1, -100.0, math.inf, math.nan], "e2m1")
    assert (s.elements, s.nonzero, s.underflowed, s.saturated, s.nonfinite) == (10, 7, 2, 2, 2)
    assert s.underflow_percent == 100 * 2 / 7 and s.saturation_percent == 100 * 2 / 8
    assert s.amax == 100.0 and s.format == "e2m1" and s.window == (0.5, 6.0)
    assert {i + LOWEST_EXPONENT: n for i, n in enumerate(s.exponents.tolist()) if n} == {-3: 1, -2: 2, 0: 1, 2: 2, 6: 1}


@pytest.mark.parametrize(("name", "shift"), [("e4m3", 0), ("mxfp8_e4m3", 2), ("logfmt8", 0), ("uint4_g32_zp", 0)])
def test_exponents_as_the_element_sees_them(name, shift):
    s = stats_of([[0.0, 0.3, 1.0, -100.0]], name)  # a scale of 2**(6 - 8)
    used = {i + LOWEST_EXPONENT: n for i, n in enumerate(s.scaled_exponents.tolist()) if n}
    assert used == {exponent + shift: 1 for exponent in (-2, 0, 6)}
    merged = OperandStats().merge(s).merge(s)
    assert torch.equal(merged.scaled_exponents, 2 * s.scaled_exponents) and merged.window == s.window


@pytest.mark.parametrize("name", ["e4m3", "mxfp4", "nvfp4"])
def test_statistics_do_not_depend_on_how_tensors_lie(name):
    x, fmt = normal(64, 96) * torch.logspace(-4, 4, 96), get_format(name)
    q = quantize(x, fmt, dim=0)
    plain = OperandStats().add(x.contiguous(), q.contiguous(), fmt, 0).to_dict()
    wide = torch.zeros(64, 192)
    wide[:, ::2] = x
    for same, dim in ((x.mT.contiguous().mT, 0), (wide[:, ::2], 0), (x.mT, -1), (x.mT.contiguous(), 1)):
        other = OperandStats().add(same, q if dim == 0 else q.mT, fmt, dim).to_dict()
        assert other.pop("sqnr_db") == pytest.approx(plain["sqnr_db"], rel=1e-12)  # sums are taken in another order
        assert other == {key: value for key, value in plain.items() if key != "sqnr_db"}
    spread = x[:1].expand(64, 96)
    assert (
        OperandStats().add(spread, quantize(spread, fmt), fmt).to_dict()["exponents"]
        == (OperandStats().add(spread.clone(), quantize(spread, fmt), fmt).to_dict()["exponents"])
    )


def both_measures(x, q, fmt, dim=-1):
    """Return what the CPU engine and torch count, without their sums of squares, which are compared here.

    Those add the same numbers, exact in float64, in other orders: n additions of 2**-53 each bound the difference.
    """
    engine, oracle = measure(x, q, fmt, dim), measure_by_torch(x.float(), q.float(), fmt, dim)
    sums = slice(FIGURES.index("signal"), FIGURES.index("noise") + 1)
    assert engine[sums].tolist() == pytest.approx(oracle[sums].tolist(), rel=2 * x.numel() * 2.0**-53 + 2.0**-50)
    engine[sums] = oracle[sums] = 0.0
    return engine, oracle


def hard_numbers(*shape):
    """Return numbers of all magnitudes of float32, among them zeros, subnormals, NaN and infinities."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-12, 12, shape, generator=generator)
    flat = x.view(-1)
    flat[::7] = 0.0
    flat[3::11] *= 2.0**-100
    flat[5::97] *= 2.0**-130
    flat[100:102] = torch.tensor([math.nan, -math.inf])
    flat[13::131] = 2.0**127
    return x


@pytest.mark.parametrize("block", [None, (2, 2), (1, 16), (1, 32), (3, 5), (128, 128), (1, None), (None, None)])
@pytest.mark.parametrize("name", ["e4m3", "e2m1", "int8", "nf4"])
@pytest.mark.parametrize("rule", ["floor", "amax"])
def test_the_engine_counts_what_torch_counts(name, block, rule):
    fmt = get_format(name) if block is None else scaled(get_format(name), block, rule)
    for x in (hard_numbers(70, 333), hard_numbers(70, 333).nan_to_num(0, 0, 0), hard_numbers(2, 5000).bfloat16()):
        for dim in (-1, 0):
            q = quantize(x, fmt, dim=dim, pad=True)
            engine, oracle = both_measures(x, q, fmt, dim)
            assert torch.equal(engine, oracle)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp6_e2m3", "mxint8", "logfmt8", "uint4_g32_zp", "fp32", "fp16", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_engine_counts_tensors_of_all_shapes_and_layouts(name, dtype):
    fmt = name and get_format(name)
    whole = hard_numbers(3, 20, 66).clamp(-6e4, 6e4).to(dtype)
    for x in (
        whole,
        whole.mT,
        whole[:, ::3, 1::2],
        whole[0],
        whole[0].mT,
        whole[:1, :1, 0].expand(4, 3),
        whole[0, 0, 0],
    ):
        for dim in range(-max(1, x.dim()), 0) if x.dim() else (-1,):
            q = x if fmt is None else quantize(x, fmt, dim=dim, pad=True)
            for values in (q, q.flatten().clone().reshape(q.shape)):
                engine, oracle = both_measures(x, values, fmt, dim)
                assert torch.equal(engine, oracle), (x.shape, x.stride(), dim)


def test_threads_change_no_figure():
    x, fmt = normal(300, 1000), get_format("mxfp8_e4m3")
    q = quantize(x, fmt, pad=True)
    alone = measure(x, q, fmt)
    fmtsim.set_num_threads(3)
    try:
        assert torch.equal(measure(x, q, fmt), alone)
    finally:
        fmtsim.set_num_threads(None)


def test_results_that_are_not_finite_are_kept_and_infinitely_wrong():
    x, q = torch.tensor([1.0, 2.0, 3.0, math.inf]), torch.tensor([math.nan, -math.inf, 0.0, 0.0])
    engine, oracle = measure(x, q, None), measure_by_torch(x, q, None, -1)
    assert torch.equal(engine[:6], oracle[:6]) and engine[:6].tolist() == [4, 3, 1, 0, 1, 3]
    assert engine[7] == oracle[7] == math.inf


def test_noise_ratio_by_hand():
    s = stats_of([1.0, 2.5], "e2m1")  # 2.5 ties to 2
    assert (s.signal, s.noise) == (pytest.approx(7.25), pytest.approx(0.25))
    assert s.sqnr_db == pytest.approx(10 * math.log10(29))
    assert stats_of([1.0, 2.0], "e2m1").sqnr_db == math.inf
    assert math.isnan(stats_of([0.0], "e2m1").sqnr_db)
    assert stats_of([1e9, 1.0], "fp16").sqnr_db == -math.inf  # overflows to Inf there
    assert stats_of([1e9, 1.0], "fp16").saturation_percent == 50.0


def test_ratio_of_a_known_format():
    x = (
        torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)) + 1
    )  # one binade: uniform error of a step of 1/8
    s = OperandStats().add(x, quantize(x, "e4m3"), get_format("e4m3"))
    assert s.sqnr_db == pytest.approx(10 * math.log10(float(x.double().square().mean()) * 12 * 64), abs=0.05)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "nvfp4", "mxint8", "e4m3", "nf4"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scales_are_those_of_encode(name, dim):
    x = normal(3, 20, 70) * torch.logspace(-3, 3, 70)
    fmt = get_format(name)
    fmt = fmt if hasattr(fmt, "block") else scaled(fmt, (8, 16))
    parts = encode(x, fmt, dim=dim, pad=True).parts()
    expected = parts.scales.double() * (1.0 if parts.tensor_scale is None else parts.tensor_scale.double())
    assert torch.equal(block_scales(x, fmt, dim), expected)


def test_saturation_is_counted_under_the_scale_of_the_block():
    # floor scales by 2^(2 - 2): 7.5 lies beyond 7, where e2m1 would need its next value; 6.5 only rounds to 6.
    assert stats_of([7.5, 1.0, 1.0, 1.0], "mxfp4").saturated == 1
    assert stats_of([6.5, 1.0, 1.0, 1.0], "mxfp4").saturated == 0
    assert stats_of([7.5, 1.0, 1.0, 1.0], scaled(get_format("e2m1"), (1, None))).saturated == 0


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "int8", "nf4"])
def test_real_scales_saturate_nothing(name):
    x = normal(64, 64)
    assert stats_of(x, scaled(get_format(name), (1, 16))).saturated == 0


@pytest.mark.parametrize(
    "fmt", [LogFormat(name="lns", bits=8, gamma=8), IntFormat(name="half", bits=4, symmetric=False, half_offset=True)]
)
def test_formats_without_zero_never_underflow(fmt):
    assert stats_of([0.0, 1e-3, -1e-3, 2.0], fmt).underflowed == 0


def test_exponents_reach_from_subnormals_to_float64():
    s = stats_of([2.0**-149, 2.0**-127, 2.0**-126, 0.0, -3.0, 2.0**127], "fp32")
    assert {i + LOWEST_EXPONENT: n for i, n in enumerate(s.exponents.tolist()) if n} == {
        -149: 1, -127: 1, -126: 1, 1: 1, 127: 1,
    }  # fmt: skip
    x = torch.tensor([2.0**-300, 1.0, 2.0**300], dtype=torch.float64)
    s = OperandStats().add(x, x, None)
    assert [s.exponents[0], s.exponents[-LOWEST_EXPONENT], s.exponents[-1]] == [1, 1, 1]


def test_asymmetric_integers_saturate_on_both_sides():
    fmt = IntFormat(name="i", bits=8, symmetric=False)
    assert stats_of([-128.4, -128.6, 127.4, 127.6, 0.5], fmt).saturated == 2


def test_high_precision_loses_nothing():
    x = torch.randn(8)
    s = OperandStats().add(x, x, None)
    assert s.format == "high precision" and s.sqnr_db == math.inf and s.underflow_percent == 0.0 and s.window is None


def test_adding_and_merging_are_the_same():
    x, y = normal(5), torch.tensor([1e-9, 1e9])
    both = stats_of(x, "e4m3").merge(stats_of(y, "e4m3")).to_dict()
    fmt = get_format("e4m3")
    assert both == OperandStats().add(x, quantize(x, fmt), fmt).add(y, quantize(y, fmt), fmt).to_dict()
    assert both["underflow_percent"] == 100 / 7 and both["saturation_percent"] == 100 / 7


def test_merged_statistics_have_the_format_of_either():
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    known = stats_of(x, "e4m3").format
    assert known is not None
    assert OperandStats().merge(stats_of(x, "e4m3")).format == known == stats_of(x, "e4m3").merge(OperandStats()).format


def test_empty_and_all_zero_tensors():
    assert stats_of(torch.empty(0, 4), "mxfp4").elements == 0
    s = stats_of(torch.zeros(2, 40), "nvfp4")
    assert (s.elements, s.nonzero, s.underflowed, s.saturated) == (80, 0, 0, 0)


def test_operands_of_attention_s_gradients_in_words():
    assert [operand_in_words(f"{name}.a") for name in ("dq", "dk", "dv", "dp")] == [
        f"attention's {name}" for name in ("dq", "dk", "dv", "dp")
    ]
    assert operand_in_words("p") == "softmax weights, attention" and operand_in_words("other") == "other"
