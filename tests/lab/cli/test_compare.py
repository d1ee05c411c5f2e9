# SPDX-License-Identifier: Apache-2.0
"""``fmtsim compare``: files of every kind, and what it says about them."""

import json

import numpy
import pytest
import torch
from safetensors.torch import save_file

from fmtsim.lab.cli.main import BAD_INPUT, main

X = numpy.linspace(-2, 2, 12, dtype=numpy.float32).reshape(3, 4)


def off_by_one(x):
    y = x.copy()
    y.view(numpy.int32)[1, 2] += 1
    return y


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    numpy.save("x.npy", X)
    numpy.save("y.npy", off_by_one(X))
    numpy.savez("two.npz", x=X, y=off_by_one(X))
    numpy.savez("other.npz", x=X, y=X, z=X[0])
    save_file({"x": torch.from_numpy(X), "w": torch.ones(3).to(torch.float8_e4m3fn)}, "t.safetensors")
    save_file({"x": torch.from_numpy(X), "w": torch.full((3,), 1.125).to(torch.float8_e4m3fn)}, "u.safetensors")
    return tmp_path


def test_equal_files(files, capsys):
    for pair in (("x.npy", "x.npy"), ("x.npy", "two.npz:x"), ("two.npz:x", "t.safetensors:x"), ("two.npz", "two.npz")):
        assert main(["compare", *pair]) == 0
        assert "all bits agree" in (out := capsys.readouterr().out) or "equal bits  12 (100 %)" in out


def test_two_tensors_of_other_names_are_named(files, capsys):
    numpy.savez("one.npz", x=X)
    numpy.savez("another.npz", y=X)
    assert main(["compare", "one.npz", "another.npz"]) == 0
    assert capsys.readouterr().err == "x of one.npz is compared with y of another.npz\n"
    assert main(["compare", "two.npz:y", "another.npz:y"]) == 1
    assert not capsys.readouterr().err


def test_a_planted_bit_in_a_file_is_found(files, capsys):
    assert main(["compare", "y.npy", "x.npy"]) == 1
    text = capsys.readouterr().out
    assert "first difference    [1, 2]: actual 0x3E3A2E8D" in text
    assert main(["compare", "t.safetensors", "u.safetensors"]) == 1
    text = capsys.readouterr().out
    assert "w       float8_e4m3fn         3          3        1       1         0.111" in text
    assert "w: first difference [0]: actual 0x38 = 1.0, expected 0x39 = 1.125" in text


def test_tensors_that_are_missing_or_differ_in_shape(files, capsys):
    assert main(["compare", "two.npz", "other.npz", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["errors"] == {"z": "only in other.npz"} and not record["equal"]
    assert (record["tensors"]["x"]["equal"], record["tensors"]["y"]["max_ulp"]) == (True, 1)
    numpy.savez("shapes.npz", x=X.T, y=X)
    assert main(["compare", "shapes.npz", "two.npz"]) == 1
    assert "x: actual has shape [4, 3], expected [3, 4]" in capsys.readouterr().out


def test_other_suffixes_of_the_same_files(files):
    (files / "t.st").write_bytes((files / "t.safetensors").read_bytes())
    for name in ("x.pth", "x.bin"):
        torch.save({"x": torch.from_numpy(X)}, name)
        assert main(["compare", name, "t.st:x"]) == 0
    assert main(["compare", "t.st", "u.safetensors"]) == 1


def test_the_plot(files, capsys):
    assert main(["compare", "y.npy", "x.npy", "--plot", "ulp.png"]) == 1
    assert (files / "ulp.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("x.npy", "no.npy"), "no.npy: no such file; did you mean 'y.npy' or 'x.npy'"),
        (("two.npz:q", "x.npy"), "two.npz has no tensor 'q'; it has x, y"),
        (("x.txt", "x.npy"), "x.txt is of no known kind; pass a .npy, .npz, .pt, .safetensors file"),
        (("bad.npy", "x.npy"), "cannot read bad.npy: "),
        (("bad.npz", "x.npy"), "cannot read bad.npz: "),
        (("bad.safetensors", "x.npy"), "cannot read bad.safetensors: "),
        (("none.npz", "none.npz"), "none.npz has no tensors to compare; fmtsim bisect compares what"),
        (("x.npy", "i.npy"), "actual has dtype float32, expected int64; bits compare within one dtype"),
    ],
)
def test_bad_input_is_one_line(files, capsys, words, message):
    for name in ("x.txt", "bad.npy", "bad.npz", "bad.safetensors"):
        (files / name).write_bytes(b"not a tensor")
    numpy.save("i.npy", numpy.arange(12).reshape(3, 4))
    numpy.savez("none.npz")
    assert main(["compare", *words]) == BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith(f"fmtsim: error: {message}") and error.count("\n") == 1
