# SPDX-License-Identifier: Apache-2.0
"""Who waits for kernels to be compiled is told so, once, and ``fmtsim warmup`` compiles them ahead."""

import io
import json
import threading
from types import SimpleNamespace

import pytest
import torch

from fmtsim.casts.ops import load_engine
from fmtsim.lab.cli import machine
from fmtsim.lab.cli.main import BAD_INPUT, main
from fmtsim.lab.cli.usual_calls import usual_calls
from fmtsim.support import compilation
from fmtsim.support.compilation import compiling
from fmtsim.support.folder import kernel_folder


class Terminal(io.StringIO):
    """Claim to be one, and tell when a line has come."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()

    def isatty(self):
        return True

    def flush(self):
        self.told.set()


@pytest.fixture
def terminal(monkeypatch):
    """Put standard error on a terminal, in a process that has compiled nothing yet and has no patience."""
    stream = Terminal()
    monkeypatch.setattr(
        compilation, "sys", SimpleNamespace(stderr=stream)
    )  # pytest puts its own in place of sys.stderr
    monkeypatch.setattr(compilation, "compiled", [])
    monkeypatch.setattr(compilation, "_spent", 0.0)
    monkeypatch.setattr(compilation, "_said", False)
    monkeypatch.setattr(compilation, "PATIENCE", 0.0)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return stream


def test_a_line_says_once_what_is_compiled_and_where_it_is_kept(terminal, tmp_path):
    with compiling("cast.elements", tmp_path):
        assert terminal.told.wait(60)
    said = f"fmtsim: compiling cast.elements and other kernels, once; they are kept in {tmp_path} (fmtsim warmup does "
    said += "it ahead)\n"
    assert terminal.getvalue() == said
    compilation._say_compiling("another", None)
    assert terminal.getvalue() == said and compilation.compiled == ["cast.elements"]


def test_the_line_says_that_nothing_can_be_kept(terminal):
    with compiling("cast.elements", None):
        assert terminal.told.wait(60)
    assert "and other kernels, and in every process, for want of a folder (fmtsim" in terminal.getvalue()


@pytest.fixture
def timers(monkeypatch):
    """Return the intervals of timers, with None behind those that were started."""
    found = []

    def timer(interval, function, arguments):
        found.append(interval)
        return SimpleNamespace(start=lambda: found.append(None), cancel=lambda: None)

    monkeypatch.setattr(compilation, "threading", SimpleNamespace(Timer=timer))
    return found


def test_seconds_add_up_before_anything_is_said(terminal, timers, monkeypatch):
    times = iter([0.0, 0.4, 10.0, 10.5, 20.0, 23.0, 30.0, 30.0])
    monkeypatch.setattr(compilation, "PATIENCE", 1.0)
    monkeypatch.setattr(compilation, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    for _ in range(4):
        with compiling("cast.elements", None):
            pass
    assert timers == [1.0, None, 0.6, None, pytest.approx(0.1), None, 0.0, None]


@pytest.mark.parametrize("case", ["a pipe", "no stream", "a worker", "another rank"])
def test_nothing_is_said_without_a_terminal_of_this_process(case, terminal, timers, monkeypatch):
    if case == "a pipe":
        monkeypatch.setattr(compilation.sys, "stderr", io.StringIO())
    elif case == "no stream":
        monkeypatch.setattr(compilation.sys, "stderr", None)
    elif case == "a worker":
        monkeypatch.setattr(compilation.multiprocessing, "parent_process", lambda: object())
    else:
        monkeypatch.setenv("LOCAL_RANK", "1")
    with compiling("cast.elements", None):
        pass
    assert timers == [0.0]


def test_what_fails_was_not_compiled(terminal):
    with pytest.raises(ZeroDivisionError), compiling("cast.elements", None):
        raise ZeroDivisionError
    assert compilation.compiled == []


def test_kernels_of_the_cpu_are_counted(terminal, tmp_path, monkeypatch):
    pytest.importorskip("numba")
    from fmtsim.cpu.runtime import jit, kernel_cache

    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: tmp_path)

    def double(x):  # type: ignore[no-untyped-def]
        return x + x

    assert jit.kernel(double)(3) == 6 and jit.kernel(double)(4) == 8
    assert [name.rpartition(".")[2] for name in compilation.compiled] == ["double"]  # the second one was loaded


def test_warmup_runs_the_calls_and_says_what_it_took(terminal, monkeypatch, capsys):
    ran = []

    def first():
        with compiling("cast.elements", None):
            ran.append("first")

    monkeypatch.setattr(
        "fmtsim.lab.cli.usual_calls.usual_calls", lambda: iter([("a", first), ("b", lambda: ran.append("second"))])
    )
    assert main(["warmup", "--quiet", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert ran == ["first", "second"] and found.pop("seconds") >= 0
    kept = str(kernel_folder("cpu"))
    assert found == {"device": "cpu", "ready": "2 casts, products and steps", "compiled": 1, "folder": kept}
    assert main(["warmup", "--device", "cpu", "--quiet"]) == 0
    assert capsys.readouterr().out.endswith("are still compiled by the first of these\n")
    assert terminal.getvalue() == ""  # what it does is on its own display


def test_warmup_of_a_gpu_shows_how_far_it_is(monkeypatch, capsys):
    engines, steps = {"cpu": load_engine("cpu")}, []

    def on_gpu(device, advance):
        for done in range(3):
            advance(done, 2)
        return 7

    engines["cuda"] = SimpleNamespace(available=lambda: True, warmup=on_gpu)
    monkeypatch.setattr(machine, "load_engine", engines.get)
    monkeypatch.setattr("fmtsim.lab.cli.usual_calls.usual_calls", lambda: iter(()))
    shown = SimpleNamespace(
        stage=lambda label, total: steps.append((label, total)), step=lambda done: steps.append(done)
    )
    assert machine._on_gpu(torch.device("cuda"), shown) == "7 kernels" and steps == [("cuda", 2), 0, 1, 2]
    assert main(["warmup", "--json"]) == 0
    assert [each["device"] for each in json.loads(capsys.readouterr().out)] == ["cpu", "cuda"]


def test_warmup_refuses_devices_without_kernels(monkeypatch, capsys):
    monkeypatch.setattr(machine, "check_device", lambda name: None)
    assert main(["warmup", "--device", "xpu"]) == BAD_INPUT
    assert "--device xpu has no kernels to compile; choose cpu, cuda or cuda:1" in capsys.readouterr().err


def test_usual_calls_run():
    calls = dict(usual_calls())
    assert {name.split()[0] for name in calls} == {"cast", "encode", "decode", "optimizer", "training", "product"}
    for call in calls.values():
        call()
