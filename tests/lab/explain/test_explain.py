# SPDX-License-Identifier: Apache-2.0
"""``fmtsim.explain``: the story agrees with the bits, for every kind of format and rounding."""

import itertools
import json
import math
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fmtsim
from fmtsim.casts.quantize import quantize
from fmtsim.formats.block import BlockFormat  # noqa: F401
from fmtsim.formats.display import bit_fields
from fmtsim.formats.element import CodebookFormat, FloatFormat
from fmtsim.formats.registry import get_format, list_formats
from fmtsim.formats.scaling import block_scaling  # noqa: F401
from fmtsim.gemm.products.explanation import explained
from fmtsim.gemm.products.resolver import recorded_calls
from fmtsim.lab.explain import explain
from fmtsim.lab.explain.explain_cast import decide, neighbours, tile_values
from fmtsim.lab.explain.product import explain_mm  # noqa: F401  # and others below: explanations.txt calls them
from fmtsim.rounding.modes import MODES, Rounding
from fmtsim.spec.datapath import Datapath  # noqa: F401
from fmtsim.spec.plan import GemmPlan  # noqa: F401
from fmtsim.support.errors import ArgumentError, DtypeError, FormatError
from fmtsim.support.table import jsonable
from tests.support.refusals import refused

ROW = [0.1, -3.3, 957.0, 0.0, -0.0, 1e-41, 2.5, -448.0, 1e38, 7.0, -0.26, 0.25]
ELEMENTS = [name for kind in ("float", "int", "codebook", "log") for name in list_formats(kind)]
SCALED = [*list_formats("block"), *list_formats("log_tile")]


@pytest.mark.parametrize(
    ("x", "format", "options", "rule", "value"),
    [
        (0.1, "e4m3", {}, "nearest", 0.1015625),
        (1.0, "e4m3", {}, "exact", 1.0),
        (-0.0, "e4m3", {}, "exact", -0.0),
        (0.25, "e2m1", {}, "tie_even", 0.0),
        (0.25, "e2m1", {"rounding": "nearest_away"}, "tie_away", 0.5),
        (0.25, "e2m1", {"rounding": "nearest_toward_zero"}, "tie_toward_zero", 0.0),
        (0.3, "e2m1", {"rounding": "down"}, "down", 0.0),
        (-0.3, "e2m1", {"rounding": "up"}, "up", -0.0),
        (0.3, "e2m1", {"rounding": "to_odd"}, "to_odd", 0.5),
        (464.0, "e4m3", {"overflow": "ieee"}, "tie_even", 448.0),
        (465.0, "e4m3", {}, "saturated", 448.0),
        (465.0, "e4m3", {"overflow": "ieee"}, "overflow", math.nan),
        (1e9, "e5m2", {"overflow": "ieee"}, "overflow", math.inf),
        (1e9, "e5m2", {"overflow": "ieee", "rounding": "toward_zero"}, "saturated", 57344.0),
        (math.inf, "e4m3", {}, "saturated", 448.0),
        (math.inf, "e5m2", {"overflow": "ieee"}, "infinity", math.inf),
        (math.inf, "e4m3", {"overflow": "ieee"}, "nan", math.nan),
        (math.nan, "e4m3", {}, "nan", math.nan),
        (math.nan, "e2m1", {}, "nan", 6.0),
        (-1.0, "ue4m3", {}, "unsigned", 0.0),
        (0.0, "e8m0", {}, "smallest", 2.0**-127),
        (0.5, "lns8_g8", {}, "smallest", 1.0),
        (7.4, "int4", {}, "nearest", 7.0),
        (7.6, "int4", {}, "saturated", 7.0),
        (2.5, "int4", {}, "tie_even", 2.0),
        (3.0, "nf4", {}, "saturated", 1.0),
        (0.5, CodebookFormat(name="far", values=(2.0**-60, 1.0)), {}, "tie_even", 2.0**-60),  # a float64 middle
    ],
)
def test_the_rule_is_named(x, format, options, rule, value):
    element = explain(x, format, **options).elements[0]
    assert element.decision.rule == rule
    assert repr(element.value) == repr(value)  # NaN and the sign of zero count


def test_the_numbers_of_an_mx_block():
    story = explain([957.0, 1.0], "mxfp8_e4m3")
    (scale,) = story.scales
    assert (scale.amax, scale.value, scale.code) == (957.0, 2.0, "0x80")
    first, second = story.elements
    assert (first.bits, first.value, first.error) == ("0 1111 110", 896.0, Fraction(-61))
    assert (first.decision.x, first.decision.below, first.decision.above) == (Fraction(957, 2), 448.0, None)
    assert first.decision.below_distance == Fraction(61, 2)
    assert (second.decision.rule, second.value, second.decision.above_distance) == ("exact", 1.0, Fraction(1, 16))


TEXTS = Path(__file__).with_name("explanations.txt").read_text().split(">>> ")[1:]


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.split("\n")[0][:60])
def test_every_line_of_a_text(text):
    """Explanations as they are printed: each was read, and a change of one is meant."""
    call, _, expected = text.partition("\n")
    assert str(eval(call)) == expected.strip("\n")


@pytest.mark.parametrize("name", ELEMENTS)
def test_the_result_is_x_or_a_neighbour(name):
    fmt = get_format(name)
    for mode, x in itertools.product(MODES, ROW):
        rounding = Rounding(mode=mode)
        word = 1 << 31 if mode == "stochastic" else None
        decision = decide(x, fmt, rounding, "saturate", word)
        assert decision.value in (x, decision.below, decision.above) or decision.rule in (
            "saturated",
            "smallest",
            "unsigned",
        )
        assert bit_fields(decision.code, fmt).replace(" ", "") == f"{decision.code:0{fmt.bits}b}"
        if decision.below is not None:
            assert decision.below < x
        if decision.above is not None:
            assert decision.above > x


@pytest.mark.parametrize("name", ELEMENTS + SCALED)
def test_the_engine_agrees(name):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        story = explain(torch.tensor(ROW, dtype=dtype), name)
        assert story.engine_agrees, dtype
        json.dumps(jsonable(story.to_dict()), allow_nan=False)


@pytest.mark.parametrize("rule", ["amax", "floor", "ceil", "rceil", "even"])
def test_the_engine_agrees_where_an_element_reaches_beyond_float32(rule):
    for number in (0.1, 7, 1e300, 0.0, float("inf"), float("nan")):
        for element in ("fp64", FloatFormat(name="wide", exponent_bits=8, mantissa_bits=3, bias=125)):
            assert explain(number, element, block_size=8, scale_rule=rule).engine_agrees


@pytest.mark.parametrize("name", SCALED)
def test_a_scaled_number_leads_to_its_code(name):
    for mode in MODES:
        bits = 8 if mode == "stochastic" else None
        story = explain(torch.tensor(ROW), name, rounding=mode, random_bits=bits, generator=3)
        assert story.engine_agrees
        for element in story.elements:
            assert element.decision.code == element.code


def test_a_tie_in_a_tile_and_several_tiles():
    (scale,) = explain([1.0, 4.0], "logfmt3").scales
    values = tile_values(scale.offset, scale.value, get_format("logfmt3"))
    story = explain([1.0, 4.0, (values[2] + values[3]) / 2, 3.0, 3.0], "logfmt3", block_size=3)
    assert [element.decision.rule for element in story.elements[2:]] == ["tie_even", "exact", "exact"]
    assert story.elements[2].value == values[2] and len(story.scales) == 2 and story.engine_agrees


def test_a_nan_takes_its_block():
    story = explain([1.0, math.nan, 2.0, 3.0], "mxfp4", block_size=2)
    assert [element.decision.rule for element in story.elements] == ["nan", "nan", "exact", "exact"]
    assert math.isnan(story.scales[0].value)
    assert "the scale becomes NaN" in story.scales[0].steps[0]


def test_stochastic_words_are_those_of_quantize():
    x = torch.full((32,), 1.03)
    story = explain(x, "e4m3", rounding="stochastic", generator=5)
    values = [element.value for element in story.elements]
    assert values == quantize(x, "e4m3", rounding="stochastic", generator=5).tolist()
    assert set(values) == {1.0, 1.125}
    assert "0.24 of the way up" in story.elements[0].decision.reason


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32), st.sampled_from(ELEMENTS))
def test_neighbours_are_adjacent(x, name):
    fmt = get_format(name)
    below, above = neighbours(x, fmt)
    if math.isfinite(x) and below is not None and above is not None:
        assert below < x < above
        # Nothing of the format lies between a neighbour and x but x itself.
        assert neighbours(below, fmt)[1] in (x, above)
        assert neighbours(above, fmt)[0] in (x, below)


def test_an_engine_that_errs_is_caught(monkeypatch):
    def wrong(*arguments, **options):
        return quantize(*arguments, **options) + 1

    monkeypatch.setattr(sys.modules["fmtsim.lab.explain.explain_cast"], "quantize", wrong)
    story = explain(1.0, "e4m3")
    assert not story.engine_agrees
    assert "THE ENGINE GIVES OTHER BITS" in str(story)


def test_empty_input_explains_nothing():
    assert explain([], "mxfp4").elements == ()
    assert explain(torch.empty(0), "e4m3").engine_agrees


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        ("text", {}, DtypeError, "x='text' is not a number or a sequence of numbers; pass floats or a tensor"),
        (torch.ones(3, dtype=torch.int32), {}, DtypeError, "x has dtype torch.int32; choose float16"),
        (torch.ones(2, 2), {}, ArgumentError, r"x has shape \(2, 2\); pass a number or one row"),
        (torch.ones(65537), {}, ArgumentError, "x has 65537 numbers; pass at most 65536"),
        (1.0, {"overflow": "wrap"}, FormatError, "unknown overflow 'wrap'; choose 'saturate', 'ieee'"),
        (1.0, {"rounding": "even"}, FormatError, "unknown rounding 'even'; did you mean"),
        (1.0, {"scale_rule": "floor"}, FormatError, "needs a block; pass block_size="),
    ],
)
def test_bad_input(x, options, error, message):
    refused(message, explain, x, "e4m3", **options, error=error)


@pytest.mark.parametrize(
    "x", [5e-324, -5e-324, 1e-310, 1.7976931348623157e308, [5e-324, 1e308, 1.0], [-5e-324, math.nan]]
)
@pytest.mark.parametrize(
    "fmt", ["int11_half", "e4m3", "lns8_g8", "e8m0", "int3_half_f5", "mxfp4", "nvfp4", "logfmt8", "nf4"]
)
def test_numbers_at_the_ends_of_float64_are_explained(x, fmt):
    for rounding in ("nearest_even", "up", "to_odd"):
        found = explain(x, fmt, rounding=rounding)
        assert found.engine_agrees and str(found) and json.dumps(jsonable(found.to_dict()))


def test_a_relative_error_beyond_float64_is_infinite():
    (element,) = explain(5e-324, "int11_half").elements
    assert element.value == 0.5 and element.relative_error == math.inf and "+inf%" in str(explain(5e-324, "int11_half"))
    (element,) = explain(0.3, "int4").elements
    assert element.relative_error == element.to_dict()["relative_error"] == -1.0
    (element,) = explain(0.0, "int11_half").elements
    assert element.error == Fraction(1, 2) and element.relative_error is None


def test_a_tile_whose_largest_value_lies_beyond_float32():
    (element,) = explain(1.7976931348623157e308, "logfmt8").elements
    assert element.decision.rule == "overflow" and element.decision.above == math.inf


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: explain(10**400, "e4m3"), ArgumentError, "has an integer beyond float64; pass numbers up to"),
        (lambda: explain(10**5000, "e4m3"), ArgumentError, "x=int has an integer beyond float64"),
        (lambda: explain(["a"] * 99, "e4m3"), DtypeError, "is not a number or a sequence of numbers; pass"),
        (lambda: explain(torch.zeros(2, device="meta"), "e4m3"), ArgumentError, "x is on the meta device and hol"),
        (lambda: explain(1.0, "e4m3", overflow=["ieee"]), FormatError, r"unknown overflow \['ieee'\]; choose"),
        (lambda: explain(1.0, "e4m3", generator=None), ArgumentError, "explain draws from no generator; pass"),
        (
            lambda: explain(1.0, "e4m3", generator=torch.Generator()),
            ArgumentError,
            "explain draws from no generator; pass",
        ),
        (lambda: explain(1.0, "e4m3", generator="1"), ArgumentError, "generator='1' is not a seed"),
    ],
)
def test_what_explain_refuses(call, error, message):
    refused(message, call, error=error)


@pytest.mark.parametrize("name", ["e4m3", "nvfp4"])
def test_arrays_keep_their_dtype_and_float8_has_its_values(name):
    x = torch.tensor([0.1, -3.0, 0.0, 448.0]).bfloat16()
    array = x.float().numpy().astype(ml_dtypes.bfloat16)
    assert explain(array, name).to_dict() == explain(x, name).to_dict()
    small = x.to(torch.float8_e5m2)
    assert explain(small, name).to_dict() == explain(small.float(), name).to_dict()
    for integers in (x.int(), x.int().numpy()):
        refused("^x has dtype .*int32; choose float16", explain, integers, name, error=DtypeError)


E8M0, ONES = torch.float8_e8m0fnu, torch.ones
SCALED_CALLS = {  # the scales of a [32, 256] and b [256, 128], and further arguments of scaled_mm
    "tensor": (ONES(()), ONES(()), {}),
    "row": (ONES(32, 1), ONES(1, 128), {"bias": torch.zeros(128, dtype=torch.bfloat16)}),
    "1x128": (ONES(32, 2), ONES(2, 1), {}),
    "mx": (ONES(32, 8).to(E8M0), ONES(128, 8).to(E8M0),
           {"scale_recipes": "BlockWise1x32", "swizzles": "NO_SWIZZLE", "target": "b200"}),
    "unit": (ONES(()), ONES(()), {"target": "hopper.wgmma", "formats": "e4m3"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED_CALLS)
def test_explain_mm_with_scales_explains_the_call_of_scaled_mm(kind):
    """The rows are those of the call that scaled_mm itself resolves."""
    a = torch.zeros(32, 256).to(torch.float8_e4m3fn)
    b = torch.zeros(128, 256).to(torch.float8_e4m3fn).t()
    scale_a, scale_b, more = SCALED_CALLS[kind]
    options = {"target": "h200", "out_dtype": torch.bfloat16} | more
    with recorded_calls() as calls:
        fmtsim.scaled_mm(a, b, scale_a, scale_b, **options)
    ((call, spec),) = calls.items()
    found = fmtsim.explain_mm(a, b, scale_a=scale_a, scale_b=scale_b, **options)
    assert found.rows == explained(replace(call, m=32, n=128, k=256, batch=1), spec, "").rows
    plain = {name: value for name, value in options.items() if name in ("target", "out_dtype", "formats")}
    if kind in ("row", "1x128"):
        assert found.rows != fmtsim.explain_mm(a, b, **plain).rows


def test_explain_mm_refuses_a_part_of_the_scales():
    a = torch.zeros(16, 16).to(torch.float8_e4m3fn)
    said = "bias, scale_recipes and swizzles of explain_mm are those of scaled_mm; pass both scales"
    for options in ({"scale_a": ONES(())}, {"bias": torch.zeros(16)}, {"swizzles": "NO_SWIZZLE"}):
        refused(said, fmtsim.explain_mm, a, a.t(), target="h200", **options)
    refused("explain_mm of a layer takes no scale_a=", fmtsim.explain_mm, torch.nn.Linear(2, 2), 2, scale_a=ONES(()))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nvfp4_row", "row scale = largest magnitude 6 / (448 * 6) = 6 / 2688 = 0.00223214, kept in fp32"),
        ("nvfp4_1x64", "window scale = largest magnitude 3 / (448 * 6) = 3 / 2688 = 0.00111607, kept in fp32"),
        (
            "nvfp4_four_six_mae_256",
            "tensor scale = largest magnitude 6 / (256 * 6) = 6 / 1536 = 0.00390625, kept in fp32",
        ),
    ],
)
def test_scales_above_those_of_blocks_are_explained(name, said):
    explanation = fmtsim.explain([3.0] * 64 + [6.0] * 64, name)
    scale = explanation.scales[0]
    assert said in scale.steps and f"{scale.tensor_scale:g}" in said
    assert explanation.scales[-1].tensor_scale == pytest.approx(6 / float(said.partition("(")[2].partition(" ")[0]) / 6)
