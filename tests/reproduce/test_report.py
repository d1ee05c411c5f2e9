"""How results are told: four digits, whose number it is, Markdown, and plots."""

import dataclasses

import pytest

from fmtsim.reproduce import Claim, Expected, Measured, run_claim
from fmtsim.reproduce.report import about, markdown, plot_result, published, rows_of, short


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
    assert axes.get_yscale() == "symlog" and low < 0 and high > 0.3


def test_a_number_without_bounds_is_shown_and_not_judged():
    open_ended = Expected(name="n")
    shown = Claim(
        name="c", says="s", source="t", measure=lambda tell: Measured(numbers={"n": 2.0}), expected=(open_ended,)
    )
    (cells,) = rows_of([run_claim(shown)])
    assert cells[1:5] == ("n", "-", "2", "-") and not open_ended.bounded and Expected(name="n", low=0).bounded
