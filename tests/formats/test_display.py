# SPDX-License-Identifier: Apache-2.0
"""What a format looks like as a table, as text and as HTML."""

import re
from html.parser import HTMLParser

import pytest
import torch

from fmtsim.formats.display import code_table, format_facts, format_html, text_table
from fmtsim.formats.element import CodebookFormat
from fmtsim.formats.registry import get_format, list_formats
from fmtsim.support.errors import ArgumentError, FormatError


class Balance(HTMLParser):
    """Check that every tag is closed in order, and collect the text of the cells."""

    def __init__(self):
        super().__init__()
        self.open, self.cells = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.cells.append(data)


def test_rows_of_a_float():
    rows = code_table(get_format("e2m1"))
    assert [row.code for row in rows] == list(range(16))
    assert rows[5] == (5, "0 10 1", 3.0)
    assert rows[15] == (15, "1 11 1", -6.0)
    assert [row.value for row in rows[:8]] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize(
    ("name", "code", "bits"),
    [
        ("e8m0", 127, "01111111"), ("ue5m3", 0b10101110, "10101 110"), ("int4", 9, "1001"), ("nf4", 3, "0011"),
        ("lns8_g8", 0x81, "1 0000001"),
    ],
)  # fmt: skip
def test_fields(name, code, bits):
    fmt = get_format(name)
    assert code_table(fmt)[code] == (code, bits, fmt.value(code))


def test_a_block_shows_its_element():
    assert code_table(get_format("nvfp4")) == code_table(get_format("e2m1"))


def test_a_short_codebook_has_as_many_rows_as_values():
    fmt = CodebookFormat(name="three", values=(-1.0, 0.0, 1.0))
    assert [row.bits for row in code_table(fmt)] == ["00", "01", "10"]


def test_no_table():
    with pytest.raises(FormatError, match=r"^tf32 has 2\*\*19 codes; tables stop at 16 bits$"):
        code_table(get_format("tf32"))
    assert len(code_table(get_format("int16"))) == 1 << 16
    with pytest.raises(
        FormatError, match="^logfmt8 has no table of codes: its values depend on the range of each tile$"
    ):
        code_table(get_format("logfmt8"))


def test_text_of_e2m1():
    assert (
        text_table(get_format("e2m1")).replace("  |  ", "|")
        == f"""\
name           e2m1
aliases        float4_e2m1fn, float4_e2m1fn_x2, fp4
bits           4 (1 sign, 2 exponent, 1 mantissa)
bias           1
max            6
min normal     1
min subnormal  0.5
specials       no Inf, no NaN
overflow       saturate
source         {get_format("e2m1").source}

    0  0 00 0             0|    4  0 10 0             2|    8  1 00 0            -0|   12  1 10 0            -2
    1  0 00 1           0.5|    5  0 10 1             3|    9  1 00 1          -0.5|   13  1 10 1            -3
    2  0 01 0             1|    6  0 11 0             4|   10  1 01 0            -1|   14  1 11 0            -4
    3  0 01 1           1.5|    7  0 11 1             6|   11  1 01 1          -1.5|   15  1 11 1            -6"""
    )


def test_columns():
    lines = text_table(get_format("e2m1"), columns=1).splitlines()
    assert lines[-1] == "   15  1 11 1            -6"
    assert len(text_table(get_format("e2m1"), columns=5).splitlines()) == 11 + 4
    with pytest.raises(ArgumentError, match="^columns=0 is not allowed; choose 1 or more$"):
        text_table(get_format("e2m1"), columns=0)


def test_text_without_codes():
    text = text_table(get_format("logfmt8"))
    assert "tile              1 x 128\nsteps             126\nbits per element  8.5\n" in text
    assert "  |  " not in text_table(get_format("fp32"))


def test_facts_of_a_block():
    facts = dict(format_facts(get_format("nvfp4")))
    assert facts["block"] == "1 x 16" and facts["scale"] == "e4m3 by amax" and facts["tensor scale"] == "fp32"
    assert facts["arithmetic"] == "encode" and facts["bits per element"] == "4.5"
    assert dict(format_facts(get_format("uint4_g32_zp")))["zero point"] == "one integer a block"
    assert dict(format_facts(get_format("int8_channel")))["block"] == "1 x all"


def test_html_is_well_formed():
    for name in (name for name in list_formats() if "p3109" not in name):
        fmt, page = get_format(name), Balance()
        page.feed(format_html(fmt))
        assert page.open == [] and page.cells[:2] == ["name", name]
        has_codes = name != "logfmt8" and name not in list_formats("packed") and fmt.bits <= 8
        assert ("codes" in page.cells) == has_codes, name


def test_html_escapes_what_users_write():
    fmt = CodebookFormat(name="two", values=(0.0, 1.0), source="<script>alert('&')</script>")
    assert "<script>" not in format_html(fmt)
    assert "&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;" in format_html(fmt)


def test_html_rows():
    html = format_html(get_format("e4m3"))
    assert "<tr><td>0x7F</td><td><code>0 1111 111</code></td><td>nan</td></tr>" in html
    assert len(re.findall("<td>0x..</td>", html)) == 256


def test_block_formats_say_both_ranges():
    nvfp4, mxfp4, zero_point = map(get_format, ("nvfp4", "mxfp4", "uint4_g32_zp"))
    assert (nvfp4.max, nvfp4.min, nvfp4.element.max) == (2688.0, -2688.0, 6.0)
    assert (mxfp4.max, mxfp4.min) == (6 * 2.0**127, -6 * 2.0**127)
    assert (zero_point.min, zero_point.element.min) == (-zero_point.max, 0)
    facts = dict(format_facts(nvfp4))
    assert facts["element range"] == "-6 to 6"
    assert facts["range with scales"] == "-2688 to 2688, times the scale of the tensor"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2,
                                   torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e8m0fnu])  # fmt: skip
def test_floats_have_the_names_of_finfo(dtype):
    info, fmt = torch.finfo(dtype), get_format(dtype)
    for name in ("bits", "eps", "max", "min", "tiny", "smallest_normal", "resolution"):
        assert getattr(fmt, name) == getattr(info, name), name


def test_values_are_what_rounding_returns():
    assert get_format("e2m1").values == (-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6)
    assert get_format("int4").values == tuple(range(-7, 8)) and get_format("int4_full").values[0] == -8
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    finite = codes[codes.isfinite()].double().unique()
    assert list(get_format("fp16").values) == finite.tolist()
    assert get_format("lns8_g8").values[-1] == get_format("lns8_g8").max
    with pytest.raises(FormatError, match="fp32 has 2\\*\\*32 codes; tables stop at 16 bits"):
        get_format("fp32").values  # noqa: B018


def test_a_picture_of_a_format_has_its_values_and_its_saw(tmp_path):
    pytest.importorskip("matplotlib")
    figure = get_format("mxfp4").plot(tmp_path / "mxfp4.png")
    ticks, errors = figure.axes
    assert (tmp_path / "mxfp4.png").exists() and ticks.get_xlabel() == "the 15 finite values of e2m1"
    assert len(ticks.collections[0].get_segments()) == 15
    points = dict(zip(*errors.lines[0].get_data(), strict=True))
    assert points[0.75] == pytest.approx(100 / 3) and points[1.0] == 0 and points[5.0] == pytest.approx(20)
    with pytest.raises(FormatError, match="logfmt8 has no table of codes"):
        get_format("logfmt8").plot()
