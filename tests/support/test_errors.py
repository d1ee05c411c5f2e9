# SPDX-License-Identifier: Apache-2.0
"""Errors: bad input is one line, every error is the project's, and close names are suggested."""

import pytest

from fmtsim.lab.cli.main import BAD_INPUT, main
from fmtsim.support import errors
from fmtsim.support.errors import FmtsimError, did_you_mean

BAD = [
    (["formats", "e4m33*"], "no format matches 'e4m33*'; fmtsim formats without a pattern lists all"),
    (["formats", "nvfp4", "--kind", "int"], "no format of kind int matches 'nvfp4'"),
    (["formats", "e4m33"], "e4m33"),
    (["formats", "e4m4x", "--codes"], "unknown format 'e4m4x'; did you mean"),
    (
        ["formats", "logfmt8", "--codes"],
        "logfmt8 has no table of codes: its values depend on the range of each tile; try fmtsim explain",
    ),
    (["formats", "fp32", "--codes", "--all"], "fp32 has 2**32 codes; --all stops at 16 bits, leave it out"),
    (["formats", "e4m3", "--codes", "--code", "256"], "code 256 is outside e4m3; choose 0 to 255 (0xFF)"),
    (["formats", "e4m3", "--codes", "--code", "x"], "'x' is not an integer; write 17, 0x11 or 0b10001"),
    (["formats", "e4m3", "--codes", "--columns", "0"], "--columns 0 is not allowed; choose 1 or more"),
    (["cast", "ten", "--to", "e4m3"], "'ten' is not a number of float64; write 0.1, -3e-5, 0x1.8p-3, inf or nan"),
    (["cast", "1e999", "--to", "e4m3"], "1e999 is beyond float64 (1.797e308); write inf if infinity is meant"),
    (
        ["cast", "1", "--to", "mxfp4"],
        "mxfp4 scales whole blocks, so a number alone has no cast; try fmtsim explain NUMBER",
    ),
    (
        ["formats", "q4_k", "--codes"],
        "q4_k has no table of codes, which are bytes of blocks; fmtsim formats q4_k shows it",
    ),
    (["cast", "1", "--to", "q4_k"], "so a number alone has no cast; try fmtsim.quantize(x, 'q4_k')"),
    (["cast", "1", "--to", "fp9"], "unknown format 'fp9'"),
    (["cast", "1", "--to", "e4m3", "--rounding", "nearst"], "--rounding 'nearst' is unknown; did you mean"),
    (["cast", "1", "--to", "e4m3", "--overflow", "wrap"], "--overflow 'wrap' is unknown; choose one of saturate, ieee"),
    (
        ["cast", "1", "--to", "e4m3", "--rounding", "stochastic", "--random-bits", "40"],
        "--random-bits 40 is not allowed",
    ),
    (["explain", "1", "--format", "e4m3", "--scale-rule", "floor"], "needs a block"),
    (
        ["explain", "1", "--format", "mxfp4", "--scale-rule", "flor"],
        "--scale-rule 'flor' is unknown; did you mean 'floor'?",
    ),
    (["explain", "1", "--format", "mxfp4", "--block-size", "0"], "--block-size 0 is not possible; choose 1 or more"),
    (
        ["explain", "1", "--format", "mxfp4", "--overflow", "x"],
        "--overflow 'x' is unknown; choose one of saturate, ieee",
    ),
    (["verify", "--format", "zzz"], "unknown format 'zzz'"),
    (
        ["verify", "--exhaustive", "--format", "e3m2"],
        "e3m2 has no exhaustive check; choose e4m3, e5m2, bf16, fp16, e2m1",
    ),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_line(words, message, capsys):
    assert main(words) == BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fmtsim: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_every_error_is_an_fmtsim_error():
    raised = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    classes = [value for value in raised if not issubclass(value, Warning)]
    assert len(classes) > 4
    for cls in classes:
        assert issubclass(cls, FmtsimError)
        assert cls.__doc__


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
