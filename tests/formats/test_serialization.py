# SPDX-License-Identifier: Apache-2.0
"""Formats as JSON and back."""

import dataclasses
import json
import pickle
import re

import pytest

from fmtsim.formats.block import BlockFormat
from fmtsim.formats.element import CodebookFormat, FloatFormat
from fmtsim.formats.registry import (
    format_from_dict,
    format_from_json,
    format_to_dict,
    format_to_json,
    get_format,
    list_formats,
)
from fmtsim.formats.scaling import Scaling, TensorScale, block_scaling
from fmtsim.support.errors import FormatError


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


_E8M0 = (
    '{"kind": "float", "name": "e8m0", "exponent_bits": 8, "mantissa_bits": 0, "bias": 127, "signed": false, '
    '"nan": "top", "infinities": false, "has_zero": false, "has_subnormals": false, '
    '"aliases": ["float8_e8m0fnu", "ue8m0"], "source": "OCP Microscaling Formats (MX) v1.0, section 5.4.1"}'
)
_BF16 = '{"kind": "float", "name": "bf16", "exponent_bits": 8, "mantissa_bits": 7}'
_INT4 = '{"kind": "int", "name": "int4", "bits": 4}'
_UINT4 = '{"kind": "int", "name": "uint4", "bits": 4, "signed": false, "symmetric": false}'
BEFORE_SCALING = {  # the fields of a block format before it had a Scaling
    f'"element": {_INT4}, "block": [1, 64]': Scaling(block=(1, 64), arithmetic="reciprocal"),
    f'"element": {_INT4}, "block": [1, 32], "scale": {_E8M0}, "scale_rule": "even"': block_scaling((1, 32), "even"),
    f'"element": {_INT4}, "block": [2, null], "scale": {_BF16}, "arithmetic": "divide"':
        Scaling(block=(2, None), scale=format_from_json(_BF16), arithmetic="divide"),
    f'"element": {_INT4}, "block": [1, 16], "scale": {_BF16}, "arithmetic": "encode", "tensor_scale": true':
        Scaling(block=(1, 16), scale=format_from_json(_BF16), tensor=TensorScale()),
    f'"element": {_UINT4}, "block": [1, 32], "zero_point": true': block_scaling((1, 32), zero_point=True),
}  # fmt: skip


@pytest.mark.parametrize("fields", BEFORE_SCALING)
def test_block_formats_of_old_files(fields):
    fmt = format_from_json(f'{{"kind": "block", "name": "old", {fields}, "aliases": ["o"], "source": "s"}}')
    scaling = BEFORE_SCALING[fields]
    assert fmt == BlockFormat(name="old", element=fmt.element, scaling=scaling, aliases=("o",), source="s")
    assert format_from_json(format_to_json(fmt)) == fmt


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not the JSON of a format: "),
        ("[1, 2]", "not the JSON of a format: '[1, 2]'"),
        ("{}", "kind=None is not a kind of format; choose one of float, int, codebook, log, block, log_tile"),
        ('{"kind": "posit"}', "kind='posit' is not a kind of format; choose one of float, int, codebook, log, "),
        ('{"kind": "int", "name": "x"}', "an IntFormat needs 'bits'"),
        ('{"kind": "int", "name": "x", "bits": 3, "colour": 1}', "an IntFormat has no field 'colour'; it has "),
        ('{"kind": "int", "name": "x", "bits": 99}', "format 'x': bits=99 is not allowed; choose 2 to 24"),
        ('{"kind": "block", "name": "b", "element": {"kind": "int"}, "block": [1, 2]}',
         "element: an IntFormat needs 'name' and 'bits'"),
        (f'{{"kind": "block", "name": "b", "element": {_INT4}, "scaling": {{"blok": [1, 2]}}}}',
         "scaling: a Scaling has no field 'blok'; it has allowed, arithmetic, block"),
        ('{"kind": "int", "name": {}, "bits": 4}', "IntFormat name={} is not allowed; pass text"),
        ('{"kind": "int", "name": "\\ud800", "bits": 4}', r"IntFormat name='\ud800' is not allowed; pass text"),
        ('{"kind": "int", "name": "x", "bits": true}', "IntFormat bits=True is not allowed; pass a whole number"),
        ('{"kind": {}, "name": "x"}', "kind={} is not a kind of format; choose one of float, int, codebook, "),
        ('{"kind": "codebook", "name": "x", "values": [1, 2, NaN]}', "not the JSON of a format: NaN is not a number"),
        ('{"kind": "codebook", "name": "x", "values": [1, "2"]}',
         "CodebookFormat values=(1, '2') is not allowed; pass a tuple (a number, ...)"),
        ('{"kind": "int", "kind": "log"}', "not the JSON of a format: 'kind' stands twice in one object"),
        ("[" * 100000, "not the JSON of a format: more than 64 objects or lists inside each other"),
        ('{"kind": "int", "name": "x", "bits": ' + "9" * 9999 + "}", "not the JSON of a format: "),
        ('{"kind": "int", "name": "x", "bits": ' + "9" * 999 + "}", "IntFormat bits=999999999999999999"),
        (f'{{"kind": "block", "name": "b", "element": {_INT4}, "scaling": {{"block": [1, 2], "scale": 4}}}}',
         "scaling.scale: 4 is not a format; write its name, or the fields of its record"),
        (
            f'{{"kind": "block", "name": "b", "element": {_INT4}, "block": [1, 2], "scale_rule": "up"}}',
            "scaling: Scaling exponent_rule='up' is not allowed; choose None, 'floor', 'ceil', 'rceil', 'even'",
        ),
    ],
)  # fmt: skip
def test_errors(text, message):
    with pytest.raises(FormatError, match=f"^{re.escape(message)}"):
        format_from_json(text)
