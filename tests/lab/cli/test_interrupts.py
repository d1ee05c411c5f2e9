# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM end commands with one line."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fmtsim.lab.cli.main import main
from fmtsim.support import interrupts
from tests.support import faults

MODULE = [sys.executable, "-m", "fmtsim", "info"]
HANDLERS = (signal.SIGINT, signal.SIGTERM)
INTERRUPT, TERMINATE = (signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")
SIGNALS = pytest.mark.parametrize(("number", "status", "word"), [INTERRUPT, TERMINATE])


@pytest.fixture
def importing(tmp_path, monkeypatch):
    """Put a module in place of torch that says when it is loaded and takes a second."""
    loaded = tmp_path / "loaded"
    (tmp_path / "torch.py").write_text(f"import time; open({str(loaded)!r}, 'w'); time.sleep(1); raise SystemExit(7)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(Path(interrupts.__file__).parents[2])
    return loaded.exists


@SIGNALS
@pytest.mark.parametrize("how", ["module", "script"])
def test_at_import(importing, tmp_path, number, status, word, how):
    script = tmp_path / "fmtsim"
    script.write_text("import sys\nfrom fmtsim.lab.cli.main import main\nsys.exit(main())")
    command = MODULE if how == "module" else [sys.executable, str(script), "info"]
    ended = faults.run(command, kill=importing, number=number)
    assert (ended.status, ended.stdout, ended.stderr) == (status, "", f"\nfmtsim: {word}\n")


def test_programs_that_import_fmtsim_keep_their_handlers(importing):
    ended = faults.run("import fmtsim.nn", kill=importing, number=signal.SIGINT)
    assert "Traceback" in ended.stderr and "fmtsim: interrupted" not in ended.stderr


def test_what_nohup_starts_ignores_interrupts(importing):
    command = ["sh", "-c", f"trap '' INT; exec {' '.join(MODULE)}"]
    assert faults.run(command, kill=importing, number=signal.SIGINT).status == 7


@SIGNALS
def test_in_a_command(heard, monkeypatch, capsys, number, status, word):
    before = [signal.getsignal(each) for each in HANDLERS]
    monkeypatch.setattr("fmtsim.lab.cli.machine.run_info", lambda arguments: os.kill(os.getpid(), number))
    assert main(["info"]) == status
    assert capsys.readouterr().err == f"\nfmtsim: {word}\n"
    assert [signal.getsignal(each) for each in HANDLERS] == before


AGAIN = """
import os, signal, sys
from fmtsim.lab.cli import machine
from fmtsim.lab.cli.main import main

def run(arguments):
    try:
        exec("os.kill(os.getpid(), signal.SIGINT)", globals())
    finally:
        try:
            {last}
        except BaseException:
            print("went on")

machine.run_info = run
sys.exit(main(["info"]))
"""


@pytest.mark.parametrize(("number", "status", "word"), [INTERRUPT, pytest.param(*TERMINATE, marks=pytest.mark.slow)])
def test_a_second_signal_ends_a_command_that_cleans_up(number, status, word):
    ended = faults.run(AGAIN.format(last=f"os.kill(os.getpid(), {int(number)}); print('cleaned up')"))
    assert (ended.status, ended.stdout, ended.stderr) == (status, "", f"\nfmtsim: {word}\n")


def test_the_status_survives_an_interrupt_of_text_that_is_run(tmp_path):
    (tmp_path / "again.py").write_text(AGAIN.format(last="print('cleaned up')"))
    paths = f"{tmp_path}:{Path(interrupts.__file__).parents[2]}"
    ended = faults.run([sys.executable, "-m", "again"], PYTHONPATH=paths)  # python -c forgets what it remembers
    assert (ended.status, ended.stdout, ended.stderr) == (130, "cleaned up\n", "\nfmtsim: interrupted\n")


KILL = "os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(
    "callback",
    [
        f'exec(compile("{KILL}", "/llvmlite/binding.py", "exec"), globals())',
        pytest.param(
            f'exec(compile("(lambda: {KILL})()", "/llvmlite/binding.py", "exec"), globals())', marks=pytest.mark.slow
        ),
        f'exec("class Owner:\\n def __del__(self): (lambda: {KILL})()\\nOwner()", globals())',
    ],
)
def test_a_signal_where_exceptions_get_lost_ends_a_command_at_once(callback):
    plain = """exec("os.kill(os.getpid(), signal.SIGINT)", globals())"""
    ended = faults.run(AGAIN.format(last="print('cleaned up')").replace(plain, callback))
    assert (ended.status, ended.stdout, ended.stderr) == (130, "", "\nfmtsim: interrupted\n")


def test_a_thread_may_run_a_command(capsys):
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(main(["formats", "e4m3"])))
    thread.start()
    thread.join()
    assert statuses == [0]


@pytest.mark.faults
@SIGNALS
@pytest.mark.parametrize("seconds", [0.3, 1, 4, 8])
def test_worker_processes_of_a_command_end_with_it(number, status, word, seconds):
    """Ctrl-C of a terminal reaches them too, and they say nothing, whether they run or are still starting."""
    process = faults.start([sys.executable, "-m", "fmtsim", "verify", "--workers", "2"])
    try:
        while subprocess.run(["pgrep", "-c", "-g", str(process.pid)], capture_output=True).stdout < b"4":
            time.sleep(0.1)
        time.sleep(seconds)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        stderr = process.communicate(timeout=60)[1]
        assert (process.returncode, stderr) == (status, f"\nfmtsim: {word}\n")
        deadline = time.monotonic() + 20
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(process.pid, 0)
                time.sleep(0.1)
    finally:
        process.kill()
