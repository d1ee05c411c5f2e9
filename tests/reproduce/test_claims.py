# SPDX-License-Identifier: Apache-2.0
"""Every claim comes out as published, and does not where something is wrong; how results are told."""

import dataclasses
import math

import pytest
import torch

from fmtsim.errors import ArgumentError, FormatError
from fmtsim.reproduce import Claim, Expected, Measured, get_claims, run_claim, sequences
from fmtsim.reproduce.catalogue import CLAIMS
from fmtsim.reproduce.claim import exactly, near
from fmtsim.reproduce.report import about, markdown, plot_result, published, rows_of, short
from fmtsim.reproduce.samples import DISTRIBUTIONS, decibels, draw
from tests.support import records

BY_NAME = {claim.name: claim for claim in CLAIMS}

PLANTED = (  # claim, setting, a value that is wrong, a number that has to fail
    ("nvfp4", "formats", (("1x16, %", "mxfp4", None), ("16x16, %", "nvfp4_16x16", None)), "1x16, %"),
    ("mxfp4", "formats", tuple((f"{rule}, %", "mxfp4", "floor") for rule in ("rceil", "even", "ceil")), "ceil, %"),
    ("mxfp8", "formats", (("rceil, %", "mxfp8_e4m3", "floor"), ("floor, %", "mxfp8_e4m3", "floor")), "rceil, %"),
    ("eden", "operand_name", "x_f", "error, EDEN"),
    ("eden", "headroom", 2.0, "error, stochastic"),
    ("stochastic_bits", "random_bits", 16, "mean error, steps"),
    ("clip", "format", "e3m2", "best clip, sigma"),
    ("dge", "cap", 30.0, "mean slope"),
    ("occ", "recipe", "te_current", "t3, not clamped, dB"),
    ("halo", "times", 5.0, "channel, level 0"),
    ("smooth_swiglu", "times", 2.0, "delayed, plain: the spike"),
    ("flash_attention_3", "keys", 256, "baseline / FlashAttention-3"),
    ("accumulation", "unit", "blackwell.tcgen05", "uniform, never promoted"),
    ("delayed_scaling", "length", 8, "steps under it"),
    ("stochastic_sums", "steps", 50, "int8, 10 + 100 x 0.2, stochastic"),
    ("unit_scaling", "format", "e2m1", "unit, largest part of a gradient lost"),
    ("underflow", "format", "bf16", "progress without scaling"),
    ("underflow", "scale", 1.0, "largest power of two lost, log2"),
    ("underflow", "gradient", 1e-20, "progress with scaling"),
    ("reductions", "schemes", (("1/N first", "fp8lm_post"), ("1/N behind", "fp8lm_post"), ("mu", "fp8lm_post")),
     "mu, N = 64: at the largest"),
    ("reductions", "ranks", (1, 4), "1/N first, N = 64: to zero"),
    ("coverage", "outliers", (1.0, 2.0), "E4M3 - INT8, points"),
    ("coverage", "recipes", ("e4m3_static", "int8_smooth"), "E4M3 - INT8, points"),
    ("coat_states", "scheme", "coat_plain", "part of v lost, expanded"),
    ("moment_underflow", "formats", ("e4m3_ieee", "e3m4"), "part of v lost, e5m2"),
    ("fp8lm_memory", "scheme", "bnb8", "bytes, all with the gradient"),
    ("stochastic_weights", "scheme", "fp32", "200 + 100 x 1, stochastic"),
)  # fmt: skip


def test_settings_and_expectations_are_those_that_were_recorded():
    assert not records.changed("claim"), records.__doc__


@pytest.mark.parametrize("name", [claim.name for claim in CLAIMS if not claim.slow])
def test_claim(name):
    result = run_claim(BY_NAME[name])
    failed = [(row.expected.name, row.expected.published, row.ours) for row in result.rows if not row.passed]
    assert (result.error, failed) == ("", [])


@pytest.mark.slow
@pytest.mark.parametrize("name", [claim.name for claim in CLAIMS if claim.slow])
def test_slow_claim(name):
    result = run_claim(BY_NAME[name])
    failed = [(row.expected.name, row.expected.published, row.ours) for row in result.rows if not row.passed]
    assert (result.error, failed) == ("", [])


@pytest.mark.parametrize(("name", "setting", "value", "number"), PLANTED)
def test_a_planted_error_makes_a_claim_fail(name, setting, value, number):
    claim = BY_NAME[name]
    assert setting in dict(claim.settings)
    changed = dataclasses.replace(claim, settings=tuple((dict(claim.settings) | {setting: value}).items()))
    result = run_claim(changed)
    assert not result.passed
    assert number in [row.expected.name for row in result.rows if not row.passed]


def test_a_wrong_quantiser_makes_a_claim_fail(monkeypatch):
    """The error of one operation inside the experiment shows, not only that of a setting."""
    import fmtsim.reproduce.blocks as blocks

    right = blocks.quantize
    monkeypatch.setattr(blocks, "quantize", lambda x, fmt: right(x, fmt, rounding="toward_zero"))
    assert not run_claim(BY_NAME["nvfp4"]).passed


@pytest.mark.parametrize("name", ["eden", "occ", "stochastic_bits"])
def test_equal_settings_give_equal_numbers(name):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = run_claim(BY_NAME[name])
    torch.manual_seed(6)
    second = run_claim(BY_NAME[name])
    assert first.measured.numbers == second.measured.numbers
    torch.manual_seed(5)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_curve_of_sums_has_a_point_for_each_number_added():
    found = sequences.sums(lambda part: None, steps=3, copies=2, seed=0)
    assert all([place for place, _ in curve] == [0, 1, 2, 3] for curve in found.curves.values())


def test_the_caller_keeps_its_random_numbers():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    run_claim(BY_NAME["smooth_swiglu"])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_error_inside_is_a_claim_that_fails():
    def broken(tell):
        raise FormatError("a format that does not exist")

    claim = Claim(name="broken", says="", source="", measure=broken, expected=(exactly("n", 1.0),))
    result = run_claim(claim)
    assert (result.passed, result.error) == (False, "a format that does not exist")
    assert math.isnan(result.rows[0].ours)


def test_a_number_that_is_missing_or_nan_fails():
    def measure(tell, value):
        return Measured(numbers={"n": value})

    claim = Claim(
        name="c", says="", source="", measure=measure, expected=(Expected(name="n"),), settings=(("value", 1.0),)
    )
    assert run_claim(claim).passed
    assert not run_claim(dataclasses.replace(claim, settings=(("value", math.nan),))).passed
    assert not run_claim(dataclasses.replace(claim, expected=(Expected(name="m"),))).passed


def test_bounds():
    assert near("n", -2.0, 0.5) == Expected(name="n", low=-3.0, high=-1.0, published=-2.0, origin="emulation")
    assert exactly("n", 2.0).holds(2.0) and not exactly("n", 2.0).holds(2.0 + 1e-12)
    with pytest.raises(ArgumentError, match=r"n: nothing lies between low=2 and high=1; exchange them"):
        Expected(name="n", low=2, high=1)
    with pytest.raises(ArgumentError, match=r"n: origin='hearsay' is unknown; choose paper, code, emulation, formula"):
        Expected(name="n", origin="hearsay")
    with pytest.raises(ArgumentError, match=r"claim 'c' expects \['n', 'n'\]; name at least one number, and each once"):
        Claim(
            name="c", says="", source="", measure=lambda tell: None, expected=(Expected(name="n"), Expected(name="n"))
        )


def test_names():
    assert get_claims() == CLAIMS
    assert [claim.name for claim in get_claims(["halo", "eden"])] == ["eden", "halo"]
    with pytest.raises(
        ArgumentError, match=r"unknown claim 'edem'; did you mean 'eden' or 'dge'\? \(fmtsim reproduce --list"
    ):
        get_claims(["edem"])
    assert len(BY_NAME) == len(CLAIMS)


def test_every_claim_says_who_claims_what():
    for claim in CLAIMS:
        assert claim.says and claim.source
        assert hash(claim) is not None
        seeded = any(name in ("seed", "seeds") for name, _ in claim.settings)
        exact = ("dge", "loss_scaling", "delayed_scaling", "memory", "fp8lm_memory", "optimizer_parity")
        assert seeded or claim.name in exact, f"{claim.name} draws numbers without a seed"


def test_distributions_have_the_moments_they_should():
    variances = {"uniform": 1 / 3, "gauss": 1.0, "laplace": 2.0, "t5": 5 / 3}
    for name, variance in variances.items():
        x = draw(name, 200_000, 1).double()
        assert abs(float(x.mean())) < 0.02
        assert float(x.var()) == pytest.approx(variance, rel=0.05)
    assert set(DISTRIBUTIONS) - set(variances) == {"t3", "rare"}
    far = float((draw("rare", 200_000, 1).abs() > 6).float().mean())
    assert far == pytest.approx(0.9e-3, rel=0.2)  # nine in ten of one in a thousand
    with pytest.raises(ArgumentError, match=r"distribution 'cauchy' is unknown; choose one of uniform, gauss"):
        draw("cauchy", 10, 0)
    assert decibels(0.0) == math.inf and decibels(0.01) == pytest.approx(20.0)


def claim(**more):
    def measure(tell):
        tell(0.5)
        return Measured(numbers={"a | b": 2.0, "n": 0.12345}, curves={"c": [(1.0, 2.0), (2.0, 4.0)]}, ticks=("u", "v"))

    expected = (Expected(name="a | b", low=1.0, published=2.0), Expected(name="n", high=0.1))
    return Claim(name="mine", says="it is so", source="me", measure=measure, expected=expected, **more)


def test_numbers():
    assert [short(x) for x in (65536.0, 0.5, 0.00123456, 123456.7, -0.0)] == [
        "65536",
        "0.5",
        "0.001235",
        "1.235e+05",
        "-0",
    ]
    assert published(Expected(name="n", published=0.5, origin="code")) == "0.5 c"
    assert [published(Expected(name="n", **bound)) for bound in ({"low": 2}, {"high": 0.1}, {"low": 1, "high": 2})] == [
        "> 2",
        "< 0.1",
        "-",
    ]


def test_rows_and_markdown():
    result = run_claim(claim(notes="smaller"))
    assert not result.passed
    rows = list(rows_of([result]))
    assert rows[0][:5] == ("mine", "a | b", "2 p", "2", "yes")
    assert rows[1] == ("", "n", "< 0.1", "0.1235", "NO", "")
    text = markdown([result])
    assert "| mine | a \\| b | 2 p | 2 | yes |" in text
    assert text.endswith("- **mine**: it is so (me). Here: smaller.\n")
    assert about(claim()) == "**mine**: it is so (me)."


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    figure = plot_result(run_claim(claim()), tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["u", "v"]
    assert axes.lines[0].get_xydata().tolist() == [[1.0, 2.0], [2.0, 4.0]]


def test_zeros_are_drawn_on_a_logarithmic_axis():
    pytest.importorskip("matplotlib")
    curves = {"some": [(1.0, 0.0), (2.0, 0.001), (4.0, 0.3)], "none": [(1.0, 0.0), (4.0, 0.0)]}
    drawn = dataclasses.replace(claim(), measure=lambda tell: Measured(numbers={}, curves=curves, logarithmic="xy"))
    (axes,) = plot_result(run_claim(drawn)).axes
    low, high = axes.get_ylim()
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "symlog") and low < 0 and high > 0.3


def test_a_number_without_bounds_is_shown_and_not_judged():
    open_ended = Expected(name="n")
    shown = Claim(
        name="c", says="s", source="t", measure=lambda tell: Measured(numbers={"n": 2.0}), expected=(open_ended,)
    )
    (cells,) = rows_of([run_claim(shown)])
    assert cells[1:5] == ("n", "-", "2", "-") and not open_ended.bounded and Expected(name="n", low=0).bounded
