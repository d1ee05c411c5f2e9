"""Names that are close to an unknown one."""

import pytest

from fmtsim.errors import did_you_mean

KNOWN = {"nearest_even": 0, "nearest_away": 1, "toward_zero": 2, "up": 3}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nearest_evn", "; did you mean 'nearest_even' or 'nearest_away'?"),
        (" Toward_Zero ", "; did you mean 'toward_zero'?"),
        ("even", "; did you mean 'nearest_even'?"),
        ("xyz", ""),
        ("", ""),
        (3, ""),
        (None, ""),
    ],
)
def test_close_names(name, hint):
    assert did_you_mean(name, KNOWN) == hint


def test_at_most_three_names():
    assert did_you_mean("h300", ["h200", "h100", "b200", "b300"]) == "; did you mean 'h200' or 'h100' or 'b300'?"


def test_no_names():
    assert did_you_mean("e4m3", []) == ""
