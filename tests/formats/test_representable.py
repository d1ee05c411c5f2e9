# SPDX-License-Identifier: Apache-2.0
"""Which dtypes hold every value of a format, by rounding each of its values to the dtype."""

import math

import pytest
import torch

from fmtsim.formats.element import CodebookFormat, FloatFormat, IntFormat
from fmtsim.formats.registry import get_format, list_formats
from fmtsim.formats.representable import FLOAT_DTYPES, is_representable, result_dtype

ELEMENTS = [get_format(name) for kind in ("float", "int", "codebook", "log") for name in list_formats(kind)]
EDGES = [
    *(get_format(name) for name in ("int9_half", "int8_half_f23", "int8_half_f24", "int12", "int13", "e5m10", "e8m10")),
    IntFormat(name="large", bits=18, fraction_bits=1),
    *(FloatFormat(name="f", exponent_bits=5, mantissa_bits=m, bias=bias) for m, bias in ((8, 17), (8, 18), (10, 14))),
    *(FloatFormat(name="f", exponent_bits=8, mantissa_bits=m, bias=b) for m, b in ((7, 128), (7, 126), (8, 127))),
    *(CodebookFormat(name="c", values=(0.0, v)) for v in (65504.0, 65536.0, 2.0**-24, 2.0**-25, 2.0**-133, 2.0**-134)),
    *(CodebookFormat(name="c", values=(0.0, v)) for v in (1 + 2.0**-10, 1 + 2.0**-11, -1 - 2.0**-7, -1 - 2.0**-8)),
    *(CodebookFormat(name="c", values=(0.0, v)) for v in (2.0**-149, 2.0**-150, 1e39, 1 + 2.0**-23, 1 + 2.0**-24)),
]  # fmt: skip


@pytest.mark.parametrize("fmt", [f for f in ELEMENTS if f.bits <= 8] + EDGES, ids=lambda fmt: fmt.name)
def test_a_dtype_holds_a_format_whose_values_it_does_not_round(fmt):
    count = len(fmt.values) if isinstance(fmt, CodebookFormat) else 1 << fmt.bits
    every = [fmt.value(code) for code in range(count)]
    values = torch.tensor([value for value in every if math.isfinite(value)], dtype=torch.float64)
    held = [dtype for dtype in FLOAT_DTYPES if torch.equal(values.to(dtype).double(), values)]
    assert [dtype for dtype in FLOAT_DTYPES if is_representable(fmt, dtype)] == held
    for dtype in FLOAT_DTYPES:
        wider = [wide for wide in (torch.float32, torch.float64) if wide in held]
        assert result_dtype(fmt, dtype) == (dtype if dtype in held else wider[0])


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("mxfp8_e4m3", FLOAT_DTYPES[1:]), ("mxint8", FLOAT_DTYPES[1:]), ("mxfp4", FLOAT_DTYPES[1:]),
        ("nvfp4", FLOAT_DTYPES[2:]), ("int8_channel", FLOAT_DTYPES[2:]), ("logfmt8", FLOAT_DTYPES[2:]),
    ],
)  # fmt: skip
def test_scales_count(name, dtypes):
    assert tuple(dtype for dtype in FLOAT_DTYPES if is_representable(get_format(name), dtype)) == dtypes
