"""Library calls recorded on an H200, replayed through the public verbs.

The calls of tests/gemm/data/h200 were recorded with torch 2.11.0+cu130 and cuBLASLt 13.1.0; the layout of the files is
that of fmtsim/verify/recordings.py. They are the smaller ones of a larger recording, which `fmtsim verify gemm` replays
where it is at hand.
"""

from pathlib import Path

from fmtsim.cli.main import main

DATA = Path(__file__).with_name("data") / "h200"


def test_every_recorded_call_has_the_recorded_bits(capsys):
    assert main(["verify", "gemm", "--vectors", str(DATA)]) == 0
    assert "all bits agree" in capsys.readouterr().out
