"""How a quantisation shows its progress on a terminal, in a notebook and elsewhere."""

import io

import pytest

import fmtsim
from fmtsim.ptq.progress import Bars, Lines, Of, OneLine, Quiet, make_progress
from tests.ptq.samples import ANYWHERE, DATA, mlp


def test_progress_lines(capsys):
    fmtsim.ptq(mlp(), ANYWHERE, DATA, progress=True)
    shown = [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["ptq: channels 2/2", "ptq: calibration 2/2", "ptq: weights 2/2", "ptq: measurement 2/2"]
    fmtsim.ptq(mlp(), "int8_static", DATA)
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Notebook(io.StringIO):
    pass


Notebook.__module__ = "ipykernel.iostream"


def test_progress_in_a_notebook_is_one_line():
    stream = Notebook()
    with make_progress(None, stream, "search") as show:
        assert type(show) is OneLine
        Of(show, "e4m3").stage("weights", 4)
        show.step(4)
    drawn = stream.getvalue().split("\r")
    assert drawn[0] == "" and drawn[1].startswith("search: e4m3: weights [........................] 0/4")
    assert "[########################] 4/4" in drawn[2]
    assert drawn[3].startswith("search: done in ") and drawn[3].endswith("\n") and len(drawn) == 4
    with pytest.raises(ZeroDivisionError), make_progress(True, stream):
        1 / 0  # noqa: B018
    assert "ptq: failed after" in stream.getvalue()


def test_progress_of_a_search_names_recipes(capsys):
    fmtsim.search(mlp(), DATA, bits=6, formats=["w4a4"], progress=True)
    assert "search: w4a4: weights 2/2" in capsys.readouterr().err


def test_progress_bars_on_a_terminal():
    pytest.importorskip("rich")
    stream = Terminal()
    with make_progress(None, stream) as show:
        assert type(show) is Bars
        show.stage("weights", 3)
        show.step(3)
    assert "weights" in stream.getvalue() and "3/3" in stream.getvalue()
    assert type(make_progress(False, stream)) is Quiet and type(make_progress(None, io.StringIO())) is Quiet
    assert type(make_progress(True, io.StringIO())) is Lines
