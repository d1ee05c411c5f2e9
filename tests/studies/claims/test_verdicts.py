# SPDX-License-Identifier: Apache-2.0
"""What numbers show of a claim, over seeds, and how results are told."""

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from fmtsim.support.errors import ArgumentError, FormatError
from studies.claims import Claim, Expected, Measured, get_claims, run_claim, run_claims
from studies.claims.claim import exactly, native, near
from studies.claims.report import about, compared, ending, markdown, plot_result, rows_of, short
from studies.claims.run import Result
from tests.support.refusals import refused

FIGURE = Expected(name="f", low=1.0, high=2.0, published=1.5, origin="paper", part=(0.5, 4.0))
DIRECTION = Expected(name="d", low=0.0)


def claim(expected=(FIGURE, DIRECTION), measure=None, **more):
    def numbers(tell):
        tell(0.5)
        return Measured(numbers={"f": 1.5, "d": 0.12345}, curves={"c": [(1.0, 2.0), (2.0, 4.0)]}, ticks=("u", "v"))

    fields = {"says": "it is so", "source": "me", "recorded": "shown", "bounds": "source", "expected": expected} | more
    return Claim(name="mine", measure=measure or numbers, **fields)


def test_bounds():
    expected = near("n", -2.0, 0.5, "paper")
    assert expected == Expected(name="n", low=-3.0, high=-1.0, published=-2.0, origin="paper")
    assert exactly("n", 2.0).verdict(2.0) == "shown" and exactly("n", 2.0).verdict(2.0 + 1e-12) == "not shown"
    assert not Expected(name="n").bounded and DIRECTION.bounded
    refused(r"n: nothing lies between low=2 and high=1; exchange them", Expected, name="n", low=2, high=1)
    refused(r"n: nothing lies between low=4 and high=3; exchange them", Expected, name="n", part=(4, 3))
    with pytest.raises(ArgumentError, match=r"n: origin='hearsay' is unknown; choose paper, code, formula"):
        Expected(name="n", published=1.0, origin="hearsay")
    refused(r"n: standard_errors= belong to a lower bound; give low= alone", Expected, name="n", standard_errors=2)
    how = {"low": 0.0, "high": 1.0, "standard_errors": 2}
    refused(r"n: standard_errors= belong to a lower bound; give low= alone", Expected, name="n", **how)
    refused(r"n: published=1.0 with origin=None; give both or neither", Expected, name="n", published=1.0)
    refused(r"n: published=None with origin='code'; give both or neither", Expected, name="n", origin="code")
    with pytest.raises(ArgumentError, match=r"'mine' expects \['d', 'd'\]; name at least one number, and each once"):
        claim(expected=(DIRECTION, DIRECTION))


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(1.0, "shown"), (2.0, "shown"), (2.1, "shown in part"), (0.5, "shown in part"), (0.4, "not shown"),
     (math.nan, "not shown"), (math.inf, "not shown")],
)  # fmt: skip
def test_what_a_number_shows(value, verdict):
    assert FIGURE.verdict(value) == verdict
    assert native("speed", 2.0).verdict(value) == "not ours"


@pytest.mark.parametrize(
    ("expected", "numbers", "verdict"),
    [
        ((FIGURE, DIRECTION), {"f": 1.5, "d": 1.0}, "shown"),
        ((FIGURE, DIRECTION), {"f": 3.0, "d": 1.0}, "shown in part"),
        ((FIGURE, DIRECTION), {"f": 1.5, "d": -1.0}, "not shown"),
        ((FIGURE, DIRECTION), {"f": 1.5}, "not shown"),
        ((DIRECTION,), {"d": 1.0}, "shown in part"),  # no figure of the source is compared with
        ((Expected(name="o"), FIGURE), {"o": 7.0, "f": 1.5}, "shown"),
        ((Expected(name="o"), FIGURE), {"o": math.nan, "f": 1.5}, "not shown"),
        ((native("s", 2.0),), {}, "not ours"),
        ((native("s", 2.0), FIGURE), {"f": 1.5}, "shown"),
        ((native("s", 2.0), DIRECTION), {"d": 1.5}, "shown in part"),
    ],
)
def test_what_numbers_show_of_a_claim(expected, numbers, verdict):
    assert claim(expected).verdict(numbers) == verdict


def test_less_than_recorded_is_worse_and_more_is_not():
    for recorded, worse, told in (
        ("shown", True, "shown in part (WORSE than recorded: shown)"),
        ("shown in part", False, "shown in part"),
        ("not shown", False, "shown in part (better than recorded: not shown)"),
    ):
        result = run_claim(claim((DIRECTION,), recorded=recorded))
        assert (result.worse, ending(result)) == (worse, told)


def test_seeds_are_run_apart_and_their_mean_is_judged():
    seen = []

    def measure(tell, *, seed):
        seen.append(seed)
        return Measured(numbers={"f": seed / 1000})

    parts = []
    drawn = claim((FIGURE,), measure, settings=(("seed", 1000),), seeds=3)
    result = run_claim(drawn, parts.append)
    assert seen == [1000, 2000, 3000] and result.rows[0].values == (1.0, 2.0, 3.0) and result.verdict == "shown"
    (_, row) = rows_of([result])
    assert row[3:5] == ("2", "1 to 3")
    assert run_claim(drawn, seeds=1).rows[0].values == (1.0,)
    every = claim((FIGURE,), lambda tell, *, seeds: Measured(numbers={"f": sum(seeds)}), settings=(("seeds", (5,)),))
    assert run_claim(every).rows[0].ours == 5 and run_claim(every, seeds=3).rows[0].ours == 0 + 1 + 2
    assert run_claim(every, first_seed=7).rows[0].ours == 12 and run_claim(drawn, seeds=2, first_seed=3).rows[
        0
    ].values == (4.0, 5.0)
    assert len(run_claim(claim(), seeds=3).runs) == 1  # draws nothing


@pytest.mark.parametrize(
    ("values", "verdict"),
    [((0.9, 1.1), "shown in part"), ((0.2, 1.8), "not shown"), ((5.0,), "not shown"), ((1.0, math.inf), "not shown"),
     ((0.0, 1.0, 2.0), "not shown"), ((0.0, 1.0, 2.0, 1.0), "shown in part"), ((), "not shown")],
)  # fmt: skip
def test_a_mean_must_lie_standard_errors_above_a_bound(values, verdict):
    sure = Expected(name="d", low=0.0, standard_errors=2.0)
    result = Result(claim=claim((sure,)), runs=tuple(Measured(numbers={"d": value}) for value in values), seconds=0.0)
    assert result.verdict == verdict and result.rows[0].verdict == ("shown" if "part" in verdict else "not shown")
    assert compared(sure) == ">= 0 by 2 standard errors" and result.to_dict()["numbers"][0]["standard_errors"] == 2


def test_an_error_inside_is_told_and_is_worse_than_anything():
    def broken(tell):
        raise FormatError("a format that does not exist")

    result = run_claim(claim(measure=broken, recorded="not shown"))
    assert (result.worse, result.error, ending(result)) == (True, "a format that does not exist", "BROKE OFF")
    assert math.isnan(result.rows[0].ours)


def test_numbers():
    found = [short(x) for x in (65536.0, 0.5, 0.00123456, 123456.7, -0.0)]
    assert found == ["65536", "0.5", "0.001235", "1.235e+05", "-0"]
    assert compared(exactly("n", 0.5, "code")) == "0.5 code"
    bounds = ({"low": 2}, {"high": 0.1}, {"low": 1, "high": 2}, {"low": 1, "high": 1}, {})
    found = [compared(Expected(name="n", **bound)) for bound in bounds]
    assert found == [">= 2", "<= 0.1", "1 to 2", "= 1", "-"]


def test_rows_and_markdown():
    named = claim(expected=(dataclasses.replace(DIRECTION, low=1.0), FIGURE, Expected(name="a | b")), notes="smaller")
    result = run_claim(named)
    rows = list(rows_of([result]))
    assert rows[0][:6] == ("mine", "", "", "", "", "not shown (WORSE than recorded: shown)")
    assert rows[1] == ("", "d", ">= 1", "0.1235", "", "not shown", "")
    assert rows[2] == ("", "f", "1.5 paper", "1.5", "", "shown", "")
    assert rows[3] == ("", "a | b", "-", "-", "", "not shown", "")
    text = markdown([result])
    assert "|  | f | 1.5 paper | 1.5 |  | shown |  |" in text and "a \\| b" in text
    assert text.endswith("- **mine**: it is so (me). Here: smaller. Bounds: the source's.\n")
    assert about(claim(bounds="after")) == "**mine**: it is so (me). Bounds: ours, set after numbers were seen."


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
    drawn = claim(measure=lambda tell: Measured(numbers={}, curves=curves, logarithmic="xy"))
    (axes,) = plot_result(run_claim(drawn)).axes
    low, high = axes.get_ylim()
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "symlog") and low < 0 and high > 0.3


def test_claims_in_processes_are_those_of_one(one_thread):
    claims = get_claims(["dge", "lns_adder_tree"])
    found = {result.claim.name: result for result in run_claims(claims, 2, seeds=2)}
    assert len(found) == 2 and not any(result.error for result in found.values())
    assert all(found[claim.name].runs == run_claim(claim, seeds=2).runs for claim in claims)
    with ThreadPoolExecutor(2) as pool:
        again = {result.claim.name: result.runs for result in run_claims(claims, seeds=2, executor=pool)}
    assert again == {name: result.runs for name, result in found.items()}
