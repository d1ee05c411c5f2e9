# SPDX-License-Identifier: Apache-2.0
"""What a long job shows: bars on a terminal, lines elsewhere, nothing if so asked."""

import io
import sys

import pytest

from fmtsim.support import progress
from fmtsim.support.progress import Bars, Lines, Of, OneLine, Progress, make_progress


class Terminal(io.StringIO):
    """Claim to be one."""

    def isatty(self):
        return True


class Notebook(io.StringIO):
    """Stand in for a notebook's stream."""


Notebook.__module__ = "ipykernel.iostream"


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose last number is the time."""
    times = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: times[-1])
    return times


def lines_of(clock, total, seconds, note=""):
    """Return what a stage of so many steps prints when each of them takes so long."""
    stream = io.StringIO()
    lines = Lines(stream)
    lines.stage("weights", total)
    for done in range(1, total + 1):
        clock.append(clock[-1] + seconds)
        lines.step(done, note)
    return stream.getvalue().splitlines()


def test_a_quick_stage_leaves_one_line(clock):
    assert lines_of(clock, 25, 0.0125, "loss 1.5") == ["weights: 25/25  loss 1.5  0.3 s"]
    assert lines_of(clock, 1, 0.25) == ["weights: 1/1  0.2 s"]


def test_a_slow_stage_prints_tenths_with_the_time_left(clock):
    printed = lines_of(clock, 25, 3.0)
    assert len(printed) == 10
    assert printed[0] == "weights: 3/25  9.0 s, 1 min 6 s left"
    assert printed[-1] == "weights: 25/25  1 min 15 s"


def test_lines_keep_a_pause_between_them(clock):
    assert [line.split("  ")[0] for line in lines_of(clock, 10, 1.0)] == [f"weights: {n}/10" for n in (2, 4, 6, 8, 10)]


def test_steps_of_a_slow_stage_that_are_no_tenth_print_nothing(clock):
    assert len(lines_of(clock, 1000, 5.0)) == 10


def test_a_stage_without_steps_and_parts_of_a_step(clock):
    stream = io.StringIO()
    lines = Lines(stream)
    lines.stage("rules", 0)
    lines.step(0)
    lines.stage("claims", 4)
    clock.append(3.0)
    lines.step(1.5, "eden")
    assert stream.getvalue() == "claims: 1/4  eden  3.0 s, 5.0 s left\n"


def test_lines_say_what_happened():
    stream = io.StringIO()
    Lines(stream).say("stopped")
    assert stream.getvalue() == "stopped\n"


def test_bars_on_a_terminal():
    pytest.importorskip("rich")
    stream = Terminal()
    with make_progress(None, stream) as show:
        assert type(show) is Bars
        show.stage("weights [all]", 3)
        show.step(3, "loss [1]")
        show.say("[bold] stays")
    assert all(text in stream.getvalue() for text in ("weights [all]", "3/3", "loss [1]", "[bold] stays"))


def test_transient_bars_leave_nothing_behind():
    pytest.importorskip("rich")
    stream = Terminal()
    with make_progress(True, stream, transient=True) as show:
        show.stage("checks", 2)
        show.step(0.5, "e4m3")
    assert "0/2" in stream.getvalue() and stream.getvalue().endswith("\x1b[2K")


def test_a_notebook_gets_one_bar(clock):
    stream = Notebook()
    with make_progress(None, stream, verb="search") as show:
        assert type(show) is OneLine
        part = Of(show, "e4m3")
        part.stage("weights", 4)
        for done in (1, 2, 4):
            clock.append(clock[-1] + (0.01 if done == 2 else 3.0))
            part.step(done, "up")
        part.say("unchanged")
    drawn = [text for text in stream.getvalue().split("\r") if text.strip()]
    assert drawn == [
        "search: e4m3: weights [........................] 0/4  0.0 s",
        "search: e4m3: weights [######..................] 1/4  up  3.0 s, 9.0 s left",
        "search: e4m3: weights [########################] 4/4  up  6.0 s",
        "e4m3: unchanged\n",
        "search: done in 6.0 s\n",
    ]
    with pytest.raises(ZeroDivisionError), make_progress(True, stream):
        1 / 0  # noqa: B018
    assert "failed after 0.0 s" in stream.getvalue()


def test_who_gets_what(monkeypatch):
    elsewhere = io.StringIO()
    assert type(make_progress(None, elsewhere)) is Progress and type(make_progress(True, elsewhere)) is Lines
    assert type(make_progress(False, Terminal())) is Progress
    with make_progress(False, elsewhere) as show:
        show.stage("weights", 3)
        show.step(3)
        show.say("words")
    assert elsewhere.getvalue() == ""
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert type(make_progress(None, Terminal())) is Lines
