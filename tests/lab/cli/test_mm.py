# SPDX-License-Identifier: Apache-2.0
"""``fmtsim mm``: one product, explained, on every kind of machine, and beside a made-up card."""

import json
from argparse import Namespace

import numpy
import pytest
import torch
from safetensors.torch import load_file

import fmtsim
from fmtsim import cuda
from fmtsim.gemm.products import native, resolver
from fmtsim.gemm.targets.target import find_target
from fmtsim.lab.cli.arguments.numbers import DATA
from fmtsim.lab.cli.main import BAD_INPUT, main
from fmtsim.lab.cli.options import read_target
from fmtsim.lab.cli.products import make_operands
from fmtsim.recipes.attention_config import AttentionConfig
from fmtsim.spec.datapath import Datapath, IntegerDatapath, LogDatapath
from fmtsim.support.errors import ArgumentError


@pytest.fixture
def record(capsys):
    def command(*words):
        assert main(["mm", *words, "--json"]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return json.loads(captured.out)

    return command


def test_the_text(capsys):
    assert main(["mm", "8", "12", "256", "--target", "hopper.wgmma"]) == 0
    text = capsys.readouterr().out
    for words in (
        "call      mm: [8, 256] e4m3 x [256, 12] e4m3 -> float32", "unit      hopper.wgmma: blocks of 32, F=13",
        "data      normal, seed 0", "relative error of all outputs against the exact sums:", "largest ",
        "bits against the exact sums rounded to float32:", "first outputs:\n  0x", "products/s (first call ",
    ):  # fmt: skip
        assert words in text


def test_the_bits_are_those_of_the_verb(tmp_path, record):
    operands = make_operands((16, 32, 320), ("e4m3", "e5m2"), "wide", 3)
    out = tmp_path / "y.npy"
    words = ("16", "32", "320", "--b-dtype", "e5m2", "--data", "wide", "--seed", "3", "--out", str(out))
    one = torch.ones(())
    for option, fast in ((), True), (("--slow",), False):
        found = record(*words, "--target", "h200", *option)
        y = fmtsim.scaled_mm(
            operands.a, operands.b, one, one, out_dtype=torch.float32, use_fast_accum=fast, target="h200"
        )
        assert fmtsim.compare(numpy.load(out), y).equal
        bits = y[0, :4].view(torch.int32).tolist()
        assert found["first_outputs"] == [f"0x{code & 0xFFFFFFFF:08X}" for code in bits]
        assert ("promot" in str(found["explanation"]) or "fresh chain" in str(found["explanation"])) != fast
    alone = record(*words, "--target", "hopper.wgmma", "--slow")
    y = fmtsim.mm(operands.a, operands.b, target="hopper.wgmma", out_dtype=torch.float32,
                  plan=fmtsim.GemmPlan(promote_every=128))  # fmt: skip
    assert fmtsim.compare(numpy.load(out), y).equal
    assert alone["against_exact"]["dtype"] == "float32"


def test_an_exact_unit_has_no_error(record):
    found = record("6", "5", "64", "--target", "exact", "--dtype", "bf16")
    assert found["against_exact"]["equal"] and found["relative_error"]["max"] < 2.0**-24
    integers = record("6", "5", "64", "--target", "int8", "--dtype", "int8")
    assert integers["against_exact"]["equal"] and integers["data"] == "uniform"


def test_a_worse_unit_has_a_larger_error(record):
    words = ("8", "8", "1024", "--data", "uniform", "--target")
    errors = [record(*words, f"block=32,fraction_bits={bits}")["relative_error"]["median"] for bits in (8, 11, 14)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2] > 0
    promoted = record(*words, "block=32,fraction_bits=8", "--plan", "promote_every=64")["relative_error"]["median"]
    assert promoted < errors[0] / 2


@pytest.mark.parametrize(
    "words",
    [
        ("--target", "ampere.mma", "--dtype", "tf32"),
        ("--target", "h200", "--dtype", "bf16", "--out-dtype", "bfloat16"),
        ("--target", "blackwell.tcgen05", "--dtype", "e2m3", "--b-dtype", "e5m2"),
        ("--target", "fp64_fma", "--dtype", "fp64"),
        ("--target", "h200", "--dtype", "fp16", "--accumulate", "fp16"), ("--target", "h200", "--dtype", "tf32"),
        ("--target", "rounding=stochastic,accumulator=bf16", "--dtype", "bf16"),
        ("--target", "hopper.wgmma", "--dtype", "fp16", "--accumulate", "fp16", "--out-dtype", "float32"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_kind_of_machine_runs(words, record):
    found = record("16", "16", "32", *words)
    assert found["products_per_second"] > 0 and found["rows_checked"] == 16
    assert found["relative_error"]["median"] < 0.1


def test_the_same_seed_gives_the_same_bits(record):
    words = ("4", "4", "64", "--target", "rounding=stochastic,fraction_bits=12,accumulator=bf16", "--seed")
    assert record(*words, "1")["first_outputs"] == record(*words, "1")["first_outputs"]
    assert record(*words, "1")["first_outputs"] != record(*words, "2")["first_outputs"]


def test_only_as_many_rows_are_checked_as_take_seconds(record, monkeypatch):
    monkeypatch.setattr("fmtsim.lab.cli.products.MAC_LIMIT", 3 * 64 * 16)
    assert record("8", "16", "64", "--target", "hopper.wgmma")["rows_checked"] == 3


def test_results_that_npy_cannot_hold(tmp_path, record):
    out = tmp_path / "y.safetensors"
    record("4", "4", "32", "--target", "hopper.wgmma", "--out-dtype", "bfloat16", "--out", str(out))
    assert load_file(out)["y"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", DATA)
def test_data(kind):
    a, b, *_ = make_operands((6, 7, 40), ("fp64", "e3m4"), kind, 0)
    assert a.shape == (6, 40) and b.shape == (40, 7) and bool(a.isfinite().all())
    again = make_operands((6, 7, 40), ("fp64", "e3m4"), kind, 0).a
    assert torch.equal(a, again) and not torch.equal(a, make_operands((6, 7, 40), ("fp64", "e3m4"), kind, 1).a)
    if kind == "uniform":
        assert bool(((a >= 0) & (a < 1)).all())
    if kind == "cancel":
        assert float((a[:, 0::2] + a[:, 1::2]).abs().max()) < 0.07 * float(a.abs().max())


def test_records_on_the_command_line():
    path = find_target("block=none, fraction_bits=10,accumulator=bf16,signed_zero=true,rounding=down")
    assert path == Datapath(block=None, fraction_bits=10, accumulator="bf16", signed_zero=True, rounding="down")
    for text, found in (("logarithms", LogDatapath()), (" logarithms ,entries=4", LogDatapath(entries=4)),
                        ("block=8", Datapath(block=8))):  # fmt: skip
        assert read_target(Namespace(target=text, plan=None)) == {"target": found, "plan": None}
    with pytest.raises(ArgumentError, match="--target 'block' is not FIELD=VALUE; fields are entries, fraction_bits"):
        read_target(Namespace(target="logarithms,block", plan=None))
    with pytest.raises(ArgumentError, match="--target 'bits=3' is not FIELD=VALUE; fields are block, fraction_bits"):
        read_target(Namespace(target="bits=3", plan=None))
    with pytest.raises(ArgumentError, match="'fracton_bits=8' is not FIELD=VALUE; .*; did you mean 'fraction_bits'"):
        read_target(Namespace(target="block=32,fracton_bits=8", plan=None))
    # target= in Python takes the same text
    x = torch.arange(64, dtype=torch.int8).view(2, 32)
    for text, record in (("integers,accumulator_bits=9", IntegerDatapath(accumulator_bits=9)),
                         ("block=4,fraction_bits=2", Datapath(block=4, fraction_bits=2))):  # fmt: skip
        a = x if text.startswith("integers") else x.float()
        assert torch.equal(fmtsim.mm(a, a.T, target=text), fmtsim.mm(a, a.T, target=record))
    assert AttentionConfig().on(text).target == record
    with pytest.raises(ArgumentError, match="^unknown target 'integer'; did you mean 'integers' or 'int8'"):
        fmtsim.mm(a, a.T, target="integer")
    with pytest.raises(ArgumentError, match=r"^target 'bits=3' is not FIELD=VALUE; fields are block, fraction_bits"):
        fmtsim.mm(a, a.T, target="bits=3")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "fmtsim mm needs --target; try --target h200, or --target hopper.wgmma for a unit alone"),
        (("--target", "3.json"), "--target 3.json: there is no file 3.json; pass a file that is there"),
        (("--target", "hoper.wgmma"), "--target 'hoper.wgmma' is unknown; did you mean 'hopper.wgmma'"),
        (("--target", "integers"), "IntegerDatapath does not multiply e4m3 x e4m3; choose integer formats "
         "(formats='int8'; fmtsim mm --dtype int8), or another datapath"),
        (("--target", "exact", "--dtype", "mxfp4"), "mxfp4 is neither a floating-point format nor int8"),
        (("--target", "volta.mma"), "unit volta.mma does not take e4m3 x e4m3"),
        (("--target", "exact", "--slow", "--plan", "split=1"), "--slow and --plan both give an accumulation order"),
        (("--target", "exact", "--plan", "split=0"), "GemmPlan split=0 is not possible"),
        (("--target", "exact", "--out", "y.npy", "--out-dtype", "bfloat16"),
         "--out y.npy cannot hold bfloat16; choose a"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(words, message, capsys):
    assert main(["mm", "4", "4", "32", *words]) == BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith(f"fmtsim: error: {message}") and error.count("\n") == 1


def test_sizes_are_checked(capsys):
    assert main(["mm", "0", "4", "32", "--target", "exact"]) == BAD_INPUT
    assert "M = 0 is not possible; choose 1 or more" in capsys.readouterr().err


WORDS = ["mm", "32", "48", "64", "--target", "h200", "--out-dtype", "bfloat16"]


@pytest.fixture
def card(monkeypatch):
    """Let native calls return what emulation gives, with one bit flipped where ``flip`` says so."""
    state = {"flip": None, "calls": 0}

    def run(call, a, b, bias=None, scales=None):
        state["calls"] += 1
        options = {"out_dtype": call.out_dtype, "target": "h200", "native": False}
        if call.function == "scaled_mm":
            y = fmtsim.scaled_mm(a, b, scales.a, scales.b, use_fast_accum=call.fast_accum, **options)
        else:
            y = fmtsim.mm(a, b, **options)
        if state["flip"] is not None:
            y.view(torch.int16)[state["flip"]] ^= 1
        return y

    monkeypatch.setattr(cuda, "run_native", run)
    monkeypatch.setattr(native, "_cuda_index", lambda device: 0)
    monkeypatch.setattr(resolver, "NATIVE_DEVICES", ("cpu",))
    monkeypatch.setattr(native, "_gpu_reason", lambda target, index: (None, False))
    return state


@pytest.mark.parametrize("dtype", ["e4m3", "bf16"])
def test_equal_bits(card, capsys, dtype):
    assert main([*WORDS, "--dtype", dtype, "--check", "native"]) == 0
    said = capsys.readouterr().out
    assert "native and emulated: all bits agree" in said and "natively, by torch." in said and card["calls"]


def test_a_changed_bit_is_found(card, capsys):
    card["flip"] = (3, 5)
    assert main([*WORDS, "--check", "native"]) == 1
    said = capsys.readouterr().out
    assert "native against emulated (expected):" in said and "[3, 5]: actual 0x" in said
    assert main([*WORDS, "--check", "native", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["native_against_emulated"]
    assert found["first"]["index"] == [3, 5] and found["count"] - found["equal_count"] == 1


def test_emulate_keeps_the_card_out(card, capsys):
    assert main([*WORDS, "--emulate"]) == 0
    assert card["calls"] == 0 and "emulated: native=False" in capsys.readouterr().out
    assert main(WORDS) == 0 and card["calls"]  # without it the card multiplies where it is the target


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "hopper.wgmma", "--check", "native"], "--check native runs the GPU that --target names, but a"),
        (["--target", "h200", "--emulate", "--check", "native"], "but --emulate forbids it"),
        (["--target", "h200", "--check", "native"], "native=True is not possible: the tensors are on cpu"),
        (["--target", "h200", "--device", "nowhere"], "--device nowhere is not there"),
    ],
)  # fmt: skip
def test_what_cannot_be(words, message, capsys):
    assert main(["mm", "16", "16", "32", *words]) == BAD_INPUT
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
