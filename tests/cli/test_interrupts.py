"""Ctrl-C and SIGTERM end the command line with one line and the status that shells expect."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from fmtsim import interrupts
from fmtsim.cli.main import main
from tests.support import faults

MODULE = [sys.executable, "-m", "fmtsim", "info"]
HANDLERS = (signal.SIGINT, signal.SIGTERM)
SIGNALS = pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)


@pytest.fixture
def importing(tmp_path, monkeypatch):
    """Put a module in place of torch that says when it is loaded and takes a second."""
    loaded = tmp_path / "loaded"
    (tmp_path / "torch.py").write_text(f"import time; open({str(loaded)!r}, 'w'); time.sleep(1); raise SystemExit(7)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(Path(interrupts.__file__).parents[1])
    return loaded.exists


@SIGNALS
@pytest.mark.parametrize("how", ["module", "script"])
def test_at_import(importing, tmp_path, number, status, word, how):
    script = tmp_path / "fmtsim"
    script.write_text("import sys\nfrom fmtsim.cli.main import main\nsys.exit(main())")
    command = MODULE if how == "module" else [sys.executable, str(script), "info"]
    ended = faults.run(command, kill=importing, number=number)
    assert (ended.status, ended.stdout, ended.stderr) == (status, "", f"\nfmtsim: {word}\n")


def test_programs_that_import_fmtsim_keep_their_handlers(importing):
    ended = faults.run("import fmtsim", kill=importing, number=signal.SIGINT)
    assert "Traceback" in ended.stderr and "fmtsim: interrupted" not in ended.stderr


def test_what_nohup_starts_ignores_interrupts(importing):
    command = ["sh", "-c", f"trap '' INT; exec {' '.join(MODULE)}"]
    assert faults.run(command, kill=importing, number=signal.SIGINT).status == 7


@pytest.fixture
def heard():
    """Give this process the usual handler, which a runner in the background has not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@SIGNALS
def test_in_a_command(heard, monkeypatch, capsys, number, status, word):
    before = [signal.getsignal(each) for each in HANDLERS]
    monkeypatch.setattr("fmtsim.cli.info.run", lambda arguments: os.kill(os.getpid(), number))
    assert main(["info"]) == status
    assert capsys.readouterr().err == f"\nfmtsim: {word}\n"
    assert [signal.getsignal(each) for each in HANDLERS] == before


AGAIN = """
import os, signal, sys
from fmtsim.cli import info
from fmtsim.cli.main import main

def run(arguments):
    try:
        exec("os.kill(os.getpid(), signal.SIGINT)", globals())
    finally:
        {last}

info.run = run
sys.exit(main(["info"]))
"""


@SIGNALS
def test_a_second_signal_ends_a_command_that_cleans_up(number, status, word):
    ended = faults.run(AGAIN.format(last=f"os.kill(os.getpid(), {int(number)}); print('cleaned up')"))
    assert (ended.status, ended.stdout, ended.stderr) == (status, "", f"\nfmtsim: {word}\n")


def test_the_status_survives_an_interrupt_of_text_that_is_run():
    ended = faults.run(AGAIN.format(last="print('cleaned up')"))
    assert (ended.status, ended.stdout, ended.stderr) == (130, "cleaned up\n", "\nfmtsim: interrupted\n")


def test_a_thread_may_run_a_command(capsys):
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(main(["formats", "e4m3"])))
    thread.start()
    thread.join()
    assert statuses == [0]


@pytest.mark.parametrize("program", ["/bin/fmtsim", str(Path(interrupts.__file__).with_name("__main__.py"))])
@pytest.mark.parametrize(
    ("program_runs", "handler"), [("fmtsim", signal.SIG_DFL), ("other", signal.default_int_handler)]
)
def test_worker_processes_of_a_command_end_without_a_word(heard, monkeypatch, program, program_runs, handler):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "from multiprocessing...", "--multiprocessing-fork"])
    monkeypatch.setattr(sys, "argv", [program if program_runs == "fmtsim" else "/bin/other", "verify"])
    interrupts._begin()
    assert signal.getsignal(signal.SIGINT) is handler
