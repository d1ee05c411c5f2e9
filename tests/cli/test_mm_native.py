"""``fmtsim mm --device --check native``: both results, their comparison and the exit code, on a made-up card."""

import json

import pytest
import torch

import fmtsim
from fmtsim import cuda
from fmtsim.cli.main import BAD_INPUT, main
from fmtsim.gemm.products import native

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
    monkeypatch.setattr(native, "_index_of", lambda device: 0)
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
        (["--unit", "hopper.wgmma", "--check", "native"], "--check native runs the GPU that --target names, but a"),
        (["--target", "h200", "--emulate", "--check", "native"], "but --emulate forbids it"),
        (["--target", "h200", "--check", "native"], "native=True is not possible: the tensors are on cpu"),
        (["--target", "h200", "--device", "nowhere"], "--device nowhere is not there"),
    ],
)  # fmt: skip
def test_what_cannot_be(words, message, capsys):
    assert main(["mm", "16", "16", "32", *words]) == BAD_INPUT
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
