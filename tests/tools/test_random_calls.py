# SPDX-License-Identifier: Apache-2.0
"""Random calls that are recorded on a GPU: a recording of the emulation itself is equal, and a planted bit is found."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fmtsim.gemm.targets.target import get_target
from tools import random_calls
from tools.random_calls import digest, emulated, main, name_of


def recording(path, seed, count, change=lambda i, x: x):
    calls, target = random_calls.random_calls(seed, count), get_target("h200")
    found = [change(i, emulated(call, target)[0]) for i, call in enumerate(calls)]
    about = {
        "seed": seed, "calls": count, "gpu": "a card", "torch": "2", "sizes": [*map(len, found)],
        "digest": digest(calls),
    }  # fmt: skip
    np.savez_compressed(path, about=json.dumps(about), bits=np.frombuffer(b"".join(found), np.uint8))
    return calls


def test_a_recording_of_the_emulation_is_equal(tmp_path, capsys):
    recording(tmp_path / "a.npz", 3, 25, lambda i, x: b"" if i == 4 else x)
    assert main(["compare", str(tmp_path / "a.npz")]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("all"))
    assert row.split()[1:3] == ["24", "100.00%"] and row.split()[-1] == "0"


def test_a_planted_bit_is_found(tmp_path, capsys):
    calls, target = random_calls.random_calls(3, 25), get_target("h200")
    known = next(i for i, call in enumerate(calls) if target.find(call).basis != "guess")
    recording(tmp_path / "a.npz", 3, 25, lambda i, x: bytes([x[0] ^ 1]) + x[1:] if i == known else x)
    assert main(["compare", str(tmp_path / "a.npz")]) == 1
    assert f"differs without a warning: {calls[known]}" in capsys.readouterr().out


def test_calls_are_those_of_their_seed(tmp_path, monkeypatch):
    calls = random_calls.random_calls(1, 400)
    assert calls == random_calls.random_calls(1, 400) != random_calls.random_calls(2, 400)
    assert len({name_of(call) for call in calls}) >= 12
    recording(tmp_path / "a.npz", 1, 3)
    before = random_calls.random_calls
    monkeypatch.setattr(random_calls, "random_calls", lambda *given: [replace(x, m=x.m + 1) for x in before(*given)])
    with pytest.raises(SystemExit, match="was recorded by an fmtsim with other models; record it again"):
        main(["compare", str(tmp_path / "a.npz")])
