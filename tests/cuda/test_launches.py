"""How kernels are specialised and launched is what was recorded: a change is meant, or it is an error."""

import subprocess
import sys
from pathlib import Path

from tests.cuda import launches

ROOT = Path(__file__).resolve().parents[2]


def recorded(of_launches):
    return {line for line in launches.FILE.read_text().splitlines() if line.startswith("any ") != of_launches}


def test_definitions_are_those_that_were_recorded():
    different = sorted(recorded(of_launches=False) ^ set(launches.digests(launches.definitions()).splitlines()))
    assert not different, "\n".join(["see tests/cuda/launches.py:", *different])


def digests_of_a_process():
    """Run all launches in a process of its own: what an engine has learnt in other tests may spare it launches."""
    code = "import fmtsim.cpu; from tests.cuda import launches; print(launches.digests(), end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_launches_are_those_that_were_recorded():
    """One of three processes has to agree: under load one was seen whose products were told other words."""
    for _ in range(3):
        found = digests_of_a_process()
        different = sorted(recorded(of_launches=True) ^ set(found))
        if not different:
            break
    assert not different, "\n".join(["see tests/cuda/launches.py:", *different])
    calls = {line.rsplit(" ", 2)[0] for line in found}
    assert len(calls) == len(found) and sum(" warmup " in line for line in found) > 30


def test_a_planted_error_is_seen(monkeypatch):
    """One byte more of shared memory."""
    monkeypatch.setattr(launches, "CAPABILITIES", ((9, 0),))
    monkeypatch.setattr(launches.sanitize, "PARTS", {"steps": launches.sanitize.PARTS["steps"]})
    before = launches.digests()
    said = launches.said
    monkeypatch.setattr(launches, "said", lambda argument: said(argument).replace("int64:7", "int64:8"))
    assert before != launches.digests()
    assert launches.digests().count("\n") == before.count("\n")
