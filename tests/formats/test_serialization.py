"""Formats as JSON and back."""

import dataclasses
import json
import pickle
import re

import pytest

from fmtsim.errors import FormatError
from fmtsim.formats.registry import get_format, list_formats
from fmtsim.formats.serialization import format_from_dict, format_from_json, format_to_dict, format_to_json
from fmtsim.formats.spec import CodebookFormat, FloatFormat


@pytest.mark.parametrize("name", [*list_formats(), "e3m3", "int20_half", "lns6_g2", "logfmt5"])
def test_round_trip(name):
    fmt = get_format(name)
    text = format_to_json(fmt)
    assert "\n" not in text
    assert format_from_json(text) == fmt
    assert format_from_dict(json.loads(text)) == fmt
    assert hash(format_from_json(text)) == hash(fmt)
    assert pickle.loads(pickle.dumps(fmt)) == fmt


def test_defaults_are_left_out():
    fmt = FloatFormat(name="e3m3", exponent_bits=3, mantissa_bits=3)
    assert format_to_dict(fmt) == {"kind": "float", "name": "e3m3", "exponent_bits": 3, "mantissa_bits": 3}


def test_every_field_survives():
    fmt = FloatFormat(
        name="odd", exponent_bits=3, mantissa_bits=3, bias=-2, signed=False, nan="top", infinities=False,
        has_subnormals=False, overflow="ieee", nan_policy="error", aliases=("a", "b"), source="a test",
    )  # fmt: skip
    back = format_from_json(format_to_json(fmt))
    assert dataclasses.asdict(back) == dataclasses.asdict(fmt)


def test_values_keep_every_bit():
    fmt = CodebookFormat(name="thirds", values=(-1 / 3, 0.0, 1e-45, 2 / 3))
    assert format_from_json(format_to_json(fmt)).values == fmt.values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not the JSON of a format: "),
        ("[1, 2]", "not the JSON of a format: '[1, 2]'"),
        ("{}", "kind=None is not a kind of format; choose one of float, int, codebook, log, block, log_tile"),
        ('{"kind": "posit"}', "kind='posit' is not a kind of format; choose one of float, int, codebook, log, "),
        ('{"kind": "int", "name": "x"}', "not a int format: "),
        ('{"kind": "int", "name": "x", "bits": 3, "colour": 1}', "not a int format: "),
        ('{"kind": "int", "name": "x", "bits": 99}', "format 'x': bits=99 is not allowed; choose 2 to 24"),
        ('{"kind": "block", "name": "b", "element": {"kind": "int"}, "block": [1, 2]}', "not a int format: "),
    ],
)
def test_errors(text, message):
    with pytest.raises(FormatError, match=f"^{re.escape(message)}"):
        format_from_json(text)
