# SPDX-License-Identifier: Apache-2.0
"""How kernels are specialised and launched is what was recorded: a change is meant, or it is an error."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.cuda import launches

ROOT = Path(__file__).resolve().parents[3]


def recorded(capability):
    return {line for line in launches.FILE.read_text().splitlines() if line.startswith(f"{capability} ")}


def heap_is_low():
    """Return True if the heap lies so low that its addresses look like numbers: Python built without PIE."""
    maps = Path("/proc/self/maps")
    heaps = [line for line in maps.read_text().splitlines() if line.endswith("[heap]")] if maps.exists() else []
    return any(int(line.split("-")[0], 16) < 0x5000 << 32 for line in heaps)


told = pytest.mark.skipif(heap_is_low(), reason="this Python's heap lies where numbers do")


@told
def test_definitions_are_those_that_were_recorded():
    different = sorted(recorded("any") ^ set(launches.digests(launches.definitions()).splitlines()))
    assert not different, "\n".join(["see tests/engines/cuda/launches.py:", *different])


@told
@pytest.mark.parametrize(
    "capability",
    [c if c == (9, 0) else pytest.param(c, marks=pytest.mark.slow) for c in launches.CAPABILITIES],
    ids=str,
)
def test_launches_are_those_that_were_recorded(capability):
    """In a process of its own: what an engine has learnt in other tests may spare it launches."""
    code = "import fmtsim.engines.cpu; from tests.engines.cuda import launches; "
    code += f"print(launches.digests(launches.launches([{capability}])), end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    different = sorted(recorded(".".join(map(str, capability))) ^ set(found))
    assert not different, "\n".join(["see tests/engines/cuda/launches.py:", *different])
    calls = {line.rsplit(" ", 2)[0] for line in found}
    assert len(calls) == len(found) and sum(" warmup " in line for line in found) > 10


def test_a_planted_error_is_seen(monkeypatch):
    """One byte more of shared memory."""
    monkeypatch.setattr(launches, "CAPABILITIES", ((9, 0),))
    monkeypatch.setattr(launches.sanitize, "PARTS", {"steps": launches.sanitize.PARTS["steps"]})
    before = launches.digests()
    said = launches.said
    monkeypatch.setattr(launches, "said", lambda argument: said(argument).replace("int64:7", "int64:8"))
    assert before != launches.digests()
    assert launches.digests().count("\n") == before.count("\n")
