# SPDX-License-Identifier: Apache-2.0
"""What subcommands refuse before they work, in one line: impossible sizes, devices and outputs."""

import numpy
import pytest
import torch

from fmtsim.lab.cli.main import BAD_INPUT, main
from fmtsim.lab.cli.options import MOST_THREADS, check_threads
from fmtsim.support.errors import ArgumentError

UNIT = ["--unit", "hopper.wgmma"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mm", "1000000", "1000000", "1000000", *UNIT], "not enough memory for this (tried to allocate 8000000000000"),
        (["mm", "2000000000", "9", "2000000000", *UNIT], "there is not enough memory for this (Storage size"),
        (["mm", "4", "20000000000", "4", *UNIT], "N = 20000000000 is not possible; choose 1 to 2,147,483,647"),
        (["mm", "4", "4", "4", *UNIT, "--seed", "-1"], "--seed -1 is not allowed; choose 0 to 2**62 - 1"),
        (["mm", "4", "4", "4", *UNIT, "--seed", "9" * 30], "is not allowed; choose 0 to 2**62 - 1"),
        (["mm", "4", "4", "4", *UNIT, "--device", "meta"], "--device meta is not there: Cannot copy out of meta"),
        (["train", "--device", "meta"], "--device meta is not there"),
        (["train", "--steps", "9" * 25], "is not allowed; choose 1 to 2,147,483,647"),
        (["train", "--width", "9" * 25], "is not allowed; choose 1 to 2,147,483,647"),
        (["bench", "--threads", "100000"], "--threads 100000 is not allowed; choose 1 to 1024"),
        (["bench", "--only", "nothing"], "the cases are 'e4m3 nearest', "),
        (["explain", "1", "--format", "e4m3", "--block-size", "9" * 30], "is not a block; choose an int of 1 or more"),
        (["calibrate", "--tokens", "-4"], "--tokens '-4' is not possible"),
    ],
)  # fmt: skip
def test_impossible_input_is_one_line(words, message, capsys):
    assert main(words) == BAD_INPUT
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1 and printed.out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError("Unable to allocate 8 TiB"), BAD_INPUT),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has ..."), BAD_INPUT),
        (RuntimeError("a defect"), None),
    ],
)
def test_want_of_memory_is_no_traceback_and_a_defect_is(error, code, monkeypatch, capsys):
    def failing(arguments):
        raise error

    monkeypatch.setattr("fmtsim.lab.cli.machine.run_info", failing)
    if code is None:
        with pytest.raises(RuntimeError, match="a defect"):
            main(["info"])
    else:
        assert main(["info"]) == code
        assert "there is not enough memory for this" in capsys.readouterr().err


def test_threads_that_no_machine_has():
    """Torch's thread library takes the process down where it cannot start as many."""
    check_threads(1)
    check_threads(MOST_THREADS)
    for count in (0, -4, MOST_THREADS + 1, 1 << 70):
        with pytest.raises(ArgumentError, match=rf"--threads {count} is not allowed; choose 1"):
            check_threads(count)


def test_what_was_found_is_printed_although_it_cannot_be_kept(tmp_path, capsys):
    numpy.savez(tmp_path / "a.npz", x=numpy.zeros(3, numpy.float32))
    numpy.savez(tmp_path / "b.npz", y=numpy.zeros(3, numpy.float32), z=numpy.zeros(1))
    a, b = str(tmp_path / "a.npz"), str(tmp_path / "b.npz")
    assert main(["compare", a, b, "--plot", str(tmp_path / "p.png")]) == BAD_INPUT
    printed = capsys.readouterr()
    assert "x: only in" in printed.out and "plot_ulps got no pair" in printed.err
    out = str(tmp_path / "y.npy")
    assert main(["mm", "4", "4", "4", *UNIT, "--out-dtype", "bfloat16", "--out", out]) == BAD_INPUT
    printed = capsys.readouterr()
    assert "first outputs:" in printed.out and "cannot hold bfloat16" in printed.err


def test_shapes_that_are_no_text(tmp_path, capsys):
    (tmp_path / "shapes").write_bytes(b"\x93NUMPY")
    assert main(["calibrate", "--shapes", str(tmp_path / "shapes")]) == BAD_INPUT
    assert "shapes is not text; write a line for each linear layer" in capsys.readouterr().err
