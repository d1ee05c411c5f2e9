# SPDX-License-Identifier: Apache-2.0
"""compare: every figure against a slow count, on every kind of tensor, and in pieces."""

import math
import statistics
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy
import pytest
import torch

import fmtsim
from fmtsim.formats.registry import get_format
from fmtsim.lab.analysis import ulp
from fmtsim.lab.analysis.compare import bucket_name, compare, plot_ulps
from fmtsim.support.errors import DtypeError
from tests.support.operands import normal
from tests.support.refusals import refused

FLOATS = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.bfloat16, torch.float16, torch.float32, torch.float64,
)  # fmt: skip
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def of_bits(codes, dtype):
    return torch.tensor(codes, dtype=torch.int64).to(INTEGERS[dtype.itemsize]).view(dtype)


def random_bits(dtype, count, seed):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).flatten()


def place(code, fmt):
    """Count a code's place in the total order by hand."""
    if not fmt.signed:
        return code
    magnitude = code & (fmt.sign_mask - 1)
    return (-magnitude - fmt.has_negative_zero) if code & fmt.sign_mask else magnitude


def slow_sqnr(actual, expected):
    """Return 10 log10(signal / noise) of the pairs whose expected value is finite, in exact sums."""
    pairs = [(a, b) for a, b in zip(actual, expected, strict=True) if math.isfinite(b)]
    if not all(math.isfinite(a) for a, _ in pairs):
        return -math.inf
    signal = sum(Fraction(b) ** 2 for _, b in pairs)
    ratio = signal / sum((Fraction(a) - Fraction(b)) ** 2 for a, b in pairs)
    return 10 * (math.log10(ratio.numerator) - math.log10(ratio.denominator))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_signal_to_noise_of_finite_numbers(dtype):
    fmt = get_format(dtype)
    x, y = random_bits(dtype, 4000, 4), random_bits(dtype, 4000, 5)
    numbers = (x.double().abs() < 1e300) & (y.double().abs() < 1e300)  # differences of larger ones overflow
    x, y = (t.view(INTEGERS[dtype.itemsize])[numbers].view(dtype) for t in (x, y))
    sides = [[fmt.value(c & ((1 << fmt.bits) - 1)) for c in t.view(INTEGERS[dtype.itemsize]).tolist()] for t in (x, y)]
    got = compare(x, y).sqnr_db
    assert math.isfinite(got) and got == pytest.approx(slow_sqnr(*sides), rel=1e-12)  # sums in float64


def test_signal_to_noise_without_error_or_signal():
    zero, one, nan, inf = (torch.tensor([1.0, value]) for value in (0.0, 1.0, math.nan, math.inf))
    nothing = torch.zeros(2)
    assert (
        compare(nothing, nothing).sqnr_db == compare(-nothing, nothing).sqnr_db == compare(one, one).sqnr_db == math.inf
    )
    assert compare(one, nothing).sqnr_db == -math.inf
    assert compare(nan, one).sqnr_db == compare(inf, one).sqnr_db == -math.inf
    assert (
        compare(one, nan).sqnr_db == compare(one, inf).sqnr_db == math.inf
    )  # what was expected counts if it is finite
    assert compare(zero, one).sqnr_db == pytest.approx(10 * math.log10(2))
    assert compare(torch.tensor([1, 2]), torch.tensor([1, 3])).sqnr_db == pytest.approx(10.0)
    many = torch.ones((1 << 20) + 5)  # in pieces
    assert compare(1.5 * many, many).sqnr_db == pytest.approx(20 * math.log10(2))
    assert "SQNR                3.01 dB" in str(compare(zero, one)) and compare(zero, one).to_dict()["sqnr_db"] > 3


@pytest.mark.parametrize("same", [0, 1500])  # without equal pairs the median lies far from zero
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_figure_against_a_slow_count(dtype, same):
    fmt = get_format(dtype)
    x, y = random_bits(dtype, 3000, 1), random_bits(dtype, 3000, 2)
    y[:same] = x[:same]
    near = random_bits(dtype, 500, 3)
    x[:500] = near
    y[:500] = (near.view(INTEGERS[dtype.itemsize]) ^ 3).view(dtype)
    got = compare(x, y)
    codes = [[c & ((1 << fmt.bits) - 1) for c in t.view(INTEGERS[dtype.itemsize]).tolist()] for t in (x, y)]
    apart, payloads, single, zeros, absolute, relative = [], 0, 0, 0, 0.0, 0.0
    for a, b in zip(*codes, strict=True):
        va, vb = fmt.value(a), fmt.value(b)
        if a == b:
            apart.append(0)
            continue
        payloads += math.isnan(va) and math.isnan(vb)
        single += math.isnan(va) != math.isnan(vb)
        if math.isnan(va) or math.isnan(vb):
            continue
        zeros += va == vb == 0
        apart.append(min(abs(place(a, fmt) - place(b, fmt)), 2**63 - 1))
        gap = abs(va - vb)
        absolute = max(absolute, gap)
        relative = max(relative, math.inf if math.isinf(gap) or (gap and not vb) else gap / abs(vb) if gap else 0.0)
    assert got.count == 3000 and got.dtype == str(dtype).removeprefix("torch.")
    assert got.equal_count == sum(a == b for a, b in zip(*codes, strict=True))
    assert got.mismatches == 3000 - got.equal_count and not got.equal
    assert (got.nan_payloads, got.nan_single, got.zero_signs) == (payloads, single, zeros)
    assert (got.max_ulp, got.median_ulp) == (max(apart), statistics.median_low(apart))
    assert (got.max_absolute, got.max_relative) == (absolute, relative)
    assert got.sqnr_db == pytest.approx(slow_sqnr(*([fmt.value(c) for c in side] for side in codes)), rel=1e-12)  # sums
    assert sum(pairs for _, _, pairs in got.ulp_histogram) == len(apart)
    for low, high, pairs in got.ulp_histogram:
        assert pairs == sum(low <= d <= high for d in apart)


@pytest.mark.parametrize("dtype", [d for d in FLOATS if d.itemsize == 1], ids=str)
def test_the_order_of_codes_is_that_of_their_values(dtype):
    fmt = get_format(dtype)
    raw, kind = ulp.read_codes(of_bits(list(range(256)), dtype), "x")
    order = sorted(zip(ulp.places(raw, kind).tolist(), range(256), strict=True))
    numbers = [fmt.value(code) for _, code in order if not math.isnan(fmt.value(code))]
    assert numbers == sorted(numbers)
    finite = [p for p, code in order if not math.isnan(fmt.value(code))]
    assert [b - a for a, b in zip(finite, finite[1:], strict=False)] == [1] * (len(finite) - 1)


def test_neighbours_are_one_apart():
    one = torch.tensor([1.0, 0.0, -1.0, torch.finfo(torch.float32).max])
    up = torch.nextafter(one, torch.tensor(math.inf))
    got = compare(up, one)
    assert (got.max_ulp, got.median_ulp, got.ulp_histogram) == (1, 1, ((0, 0, 0), (1, 1, 4)))
    assert got.max_absolute == got.max_relative == math.inf  # Inf against the largest value; something against zero
    signs = compare(torch.tensor([-0.0, 0.0]), torch.tensor([0.0, 0.0]))
    assert (signs.zero_signs, signs.max_ulp, signs.max_absolute, signs.max_relative) == (1, 1, 0.0, 0.0)


def test_nan_has_a_distance_to_its_own_bits_alone():
    x = of_bits([0x7FFFFFFF, 0x7FFFFFFF, 0x7FC00000, 0x3F800000], torch.float32)
    y = of_bits([0x7FFFFFFF, 0x7FC00000, 0x3F800000, 0x7F800001], torch.float32)
    got = compare(x, y)
    assert (got.equal_count, got.nan_payloads, got.nan_single, got.max_ulp, got.median_ulp) == (1, 1, 2, 0, 0)
    nothing = compare(x[1:2], y[1:2])
    assert (nothing.max_ulp, nothing.median_ulp, nothing.ulp_histogram) == (None, None, ())
    assert "ulp distance" not in str(nothing) and "NaN of other bits" in str(nothing)
    assert str(nothing.first) == "[0]: actual 0x7FFFFFFF = nan, expected 0x7FC00000 = nan"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64])
def test_integers(dtype):
    info = torch.iinfo(dtype)
    x = torch.tensor([info.min, 5, 7, info.max], dtype=dtype)
    y = torch.tensor([info.max, 5, 5, info.max - 1], dtype=dtype)
    got = compare(x, y)
    span = min(info.max - info.min, 2**63 - 1)
    assert (got.equal_count, got.max_ulp, got.median_ulp) == (1, span, 1)
    assert (got.max_absolute, got.max_relative) == (float(span), float(span) / float(info.max))
    assert (got.first.index, got.first.actual, got.first.expected) == ((0,), info.min, info.max)


def test_wide_unsigned_integers_and_bool():
    x = torch.tensor([0, 2**63 - 1], dtype=torch.int64).view(torch.uint64)
    y = torch.tensor([1, -(2**63)], dtype=torch.int64).view(torch.uint64)  # 1, 2**63
    got = compare(x, y)
    assert (got.max_ulp, got.median_ulp, got.first.expected, got.dtype) == (1, 1, 1, "uint64")
    assert got.max_relative == 1.0
    flags = compare(torch.tensor([True, False]), torch.tensor([True, True]))
    assert (flags.mismatches, flags.first.actual, flags.dtype) == (1, 0, "bool")


def test_numpy_and_ml_dtypes_arrays():
    x = numpy.linspace(-3, 3, 24, dtype=numpy.float32).reshape(4, 6)
    y = x.copy()
    y[2, 3] = numpy.nextafter(y[2, 3], numpy.float32(9))
    for a, b in ((x, y), (torch.from_numpy(x), y), (x[::-1], y[::-1]), (x.astype(">f4"), y), (x.T, y.T)):
        got = compare(a, b)
        assert (got.mismatches, got.max_ulp) == (1, 1)
    frozen = x.copy()
    frozen.flags.writeable = False
    assert compare(frozen, frozen).equal
    for name in ("bfloat16", "float8_e4m3fn", "float6_e2m3fn", "float4_e2m1fn", "float8_e3m4", "float8_e8m0fnu"):
        dtype = getattr(ml_dtypes, name)
        a, b = abs(x).astype(dtype), (abs(x) + 1).astype(dtype)
        got = compare(a, b)
        assert (got.dtype, got.count) == (name, 24) and not got.equal and compare(a, a).equal
    assert compare(x.astype(ml_dtypes.bfloat16), torch.from_numpy(x).bfloat16()).equal
    assert compare(numpy.float32(3), torch.tensor(3.0)).shape == ()


def test_six_bit_codes_in_bytes():
    x = numpy.arange(64, dtype=numpy.uint8).view(ml_dtypes.float6_e2m3fn)
    got = compare(x, numpy.zeros(64, dtype=numpy.uint8).view(ml_dtypes.float6_e2m3fn))
    assert (got.max_ulp, got.zero_signs, got.max_absolute) == (32, 1, 7.5)


@pytest.mark.parametrize("size", [1, 7, 16, 1000])
def test_pieces_keep_the_order_of_elements(size):
    x = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    for view in (x, x.permute(3, 1, 0, 2), x[:, ::2, 1:, ::3], x.transpose(0, 3), x[0, 0, 0, 0], x[:0]):
        pieces = list(ulp.chunks(view, view, size))
        assert all(a.numel() <= max(size, 1) and torch.equal(a, b) for a, b in pieces)
        assert torch.cat([a for a, _ in pieces]).tolist() == view.reshape(-1).tolist()


def test_many_pieces_give_the_figures_of_one(monkeypatch):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(7, 9, generator=generator).double()
    y = (x * (1 + 1e-7 * torch.randn(7, 9, generator=generator))).double()
    y[5], y[0, 0] = x[5], 2 * x[0, 0]
    whole = compare(x, y)
    for size in (1, 5, 32):
        monkeypatch.setattr(ulp.chunks, "__defaults__", (size,))
        got = compare(x, y)
        assert got.sqnr_db == pytest.approx(whole.sqnr_db, rel=1e-14)  # sums of other pieces
        assert replace(got, sqnr_db=whole.sqnr_db) == whole
        assert compare(x.t(), y.t()).max_ulp == whole.max_ulp
        assert compare(x.t(), y.t()).first.index == (0, 0)


def test_large_expanded_tensors_are_never_copied_whole(monkeypatch):
    x = torch.zeros(64, 1, dtype=torch.uint8).expand(64, 1 << 17)
    sizes = []
    reshape = torch.Tensor.reshape
    monkeypatch.setattr(torch.Tensor, "reshape", lambda t, *shape: sizes.append(t.numel()) or reshape(t, *shape))
    got = compare(x, x + 1)
    assert (got.mismatches, got.max_ulp) == (1 << 23, 1)
    assert max(sizes) == ulp.CHUNK


def test_a_planted_bit_is_found():
    x = normal(64, 65, seed=5).bfloat16()
    assert compare(x, x.clone()).equal and compare(x, x.clone()).first is None
    for index in ((0, 0), (63, 64), (17, 3)):
        y = x.clone()
        y.view(torch.int16)[index] ^= 1
        got = compare(y, x)
        assert (got.mismatches, got.first.index, got.max_ulp, got.equal) == (1, index, 1, False)


def test_shapes_dtypes_and_kinds_must_agree():
    x = torch.zeros(2, 3)
    refused(r"actual has shape \[2, 3\], expected \[3, 2\]; reshape", compare, x, x.t())
    with pytest.raises(DtypeError, match="actual has dtype float32, expected float64; bits compare within one dtype"):
        compare(x, x.double())
    refused("actual is a list; pass a torch tensor or a numpy array", compare, [1.0], x)
    refused("expected has layout torch.sparse_coo; pass a dense tensor, for", compare, x, x.to_sparse())
    with pytest.raises(DtypeError, match="actual has dtype torch.complex64, whose elements have no order of codes"):
        compare(x.to(torch.complex64), x)
    with pytest.raises(DtypeError, match="actual has dtype torch.float4_e2m1fn_x2"):
        compare(torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), x)
    refused("actual has dtype 'str32', which has no order of codes", compare, numpy.array(["a"]), x, error=DtypeError)
    refused("complex128", compare, numpy.array([1j]), x, error=DtypeError)


def test_empty_and_gradients():
    got = compare(torch.empty(0, 3), torch.empty(0, 3))
    assert got.equal and got.max_ulp is None and "0 of float32" in str(got)
    x = torch.ones(3, requires_grad=True)
    assert compare(x, x * 1).equal


def test_texts_and_records():
    x = torch.tensor([[1.0, math.nan, 0.0, 8.0]])
    y = torch.tensor([[1.0, 2.0, -0.0, 8.5]])
    got = fmtsim.compare(x, y)
    text = str(got)
    for line in ("equal bits          1 (25 %)", "NaN on one side     1", "zero of other sign  1",
                 "first difference    [0, 1]: actual 0x7FC00000 = nan, expected 0x40000000 = 2.0"):  # fmt: skip
        assert line in text
    assert text.splitlines()[-1].split() == ["to", "2^19", "1", "25", "######"]
    html = got._repr_html_()
    assert html.startswith("<table>") and "first difference" in html and "<script" not in html
    record = got.to_dict()
    assert (record["equal"], record["max_ulp"], record["first"]["actual_hex"]) == (False, 524288, "0x7FC00000")
    assert str(compare(x, x)).splitlines() == [
        "elements    4 of float32, shape [1, 4]", "equal bits  4 (100 %)",
    ]  # fmt: skip
    assert compare(x, x)._repr_html_().count("<table>") == 1
    assert [bucket_name(*b) for b in ((0, 0), (2, 2), (3, 4), (2049, 4096), (4097, 8192))] == [
        "0", "2", "3-4", "2049-4096", "to 2^13",
    ]  # fmt: skip


def test_the_picture(tmp_path):
    x = normal(500, seed=6)
    got = compare(x * 1.00001, x)
    figure = got.plot(tmp_path / "ulp.png", title="a title")
    assert (tmp_path / "ulp.png").read_bytes().startswith(b"\x89PNG")
    (panel,) = figure.axes
    assert panel.get_xlabel() == "distance in units of the last place" and panel.get_yscale() == "log"
    assert sum(bar.get_height() for bar in panel.patches) == pytest.approx(100.0)  # shares in percent add up
    both = plot_ulps({"a": got, "b": compare(x, x)})
    (panel,) = both.axes
    assert [t.get_text() for t in panel.get_legend().get_texts()] == ["a", "b"]
    count = len(got.ulp_histogram)
    assert [bar.get_x() for bar in panel.patches] == pytest.approx([*(place - 0.425 for place in range(count)), 0.0])
    assert {round(bar.get_width(), 9) for bar in panel.patches} == {0.425} and panel.get_ylim()[1] == 150
    shares = [100 * pairs / 500 for *_, pairs in got.ulp_histogram]
    assert [bar.get_height() for bar in panel.patches] == [*shares, 100.0]
    assert panel.get_ylim()[0] == pytest.approx(min(share for share in shares if share) / 3)
    refused("plot_ulps got no pair of numbers", plot_ulps, {"none": compare(x[:0], x[:0])})
