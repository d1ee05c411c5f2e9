"""Library calls recorded on an H200, replayed through the public verbs.

The calls of tests/gemm/data/h200 were recorded with torch 2.11.0+cu130 and cuBLASLt 13.1.0; the layout of the files is
that of fmtsim/verify/recordings.py. They are the smaller ones of a larger recording, which `fmtsim verify gemm` replays
where it is at hand.
"""

from pathlib import Path

import numpy as np
import pytest

from fmtsim.cli.main import main

DATA = Path(__file__).with_name("data") / "h200"


def test_every_recorded_call_has_the_recorded_bits(capsys):
    assert main(["verify", "gemm", "--vectors", str(DATA)]) == 0
    assert "all bits agree" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["h200_fp8.npz", "h200_f16.npz", "h200_tf32.npz"])
def test_one_changed_bit_is_seen(name, tmp_path, capsys):
    arrays = dict(np.load(DATA / name))
    arrays["000.out"] = arrays["000.out"].copy()
    arrays["000.out"][3, 5] ^= 1
    np.savez(tmp_path / name, **arrays)
    assert main(["verify", "gemm", "--vectors", str(tmp_path)]) == 1
    assert "[3, 5]" in capsys.readouterr().out
