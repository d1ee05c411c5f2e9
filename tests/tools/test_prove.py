# SPDX-License-Identifier: Apache-2.0
"""Proofs by exhaustion, on small parts of their spaces; each finds a planted error."""

import itertools
import json
from dataclasses import replace

import pytest

import fmtsim
from fmtsim.casts.ops import load_engine
from fmtsim.formats.element import OVERFLOWS, FloatFormat
from fmtsim.lab.verify.outcome import PlantedError
from fmtsim.rounding.modes import MODES, Rounding
from tools import prove

FLUSHED = FloatFormat(name="flushed", exponent_bits=3, mantissa_bits=2, has_subnormals=False)
FORMATS = ("e2m1", "p3109_k4p1uf", "p3109_k4p2se", "int4", "int4_full", "uint3")


class TiesAway:
    """The CPU engine, but for ties, which go away from zero."""

    def __getattr__(self, name):
        cast = getattr(load_engine("cpu"), name)
        return lambda x, spec, *rest: cast(x, replace(spec, rounding=Rounding(mode="nearest_away")), *rest)


@pytest.fixture
def small(monkeypatch):
    """Make blocks of inputs small: block 0x3FA begins at 1.25, a tie of E2M1."""
    monkeypatch.setattr(prove, "BLOCK", 1 << 20)


@pytest.mark.parametrize("fmt", [*map(fmtsim.get_format, FORMATS), FLUSHED], ids=lambda fmt: fmt.name)
def test_the_definition_has_the_steps_of_the_oracle(fmt):
    overflows = OVERFLOWS if isinstance(fmt, FloatFormat) else ("saturate",)
    for mode, overflow, negative in itertools.product(set(MODES) - {"stochastic"}, overflows, (False, True)):
        defined, bisected = (
            dict(zip(*(part.tolist() for part in steps), strict=True))
            for steps in (f(fmt, mode, overflow, negative) for f in (prove.defined, prove.bisected))
        )
        codes = [defined[max(start for start in defined if start <= at)] for at in sorted({*defined, *bisected})]
        right = [bisected[max(start for start in bisected if start <= at)] for at in sorted({*defined, *bisected})]
        assert codes == right, (mode, overflow, negative)


@pytest.mark.parametrize("name", ["e2m1", "int4_half", "nf4"])
def test_casts_have_the_steps_bit_by_bit(name, small):
    outcome = prove.cast(fmtsim.get_format(name), "nearest_even", "saturate", (0x3FA, 0xFFF))
    assert outcome["differences"] == 0 and outcome["compared"] == 4 << 20 and len(outcome["blocks"]) == 2


@pytest.mark.parametrize("engine", [TiesAway(), PlantedError(load_engine("cpu"))], ids=["ties", "bit"])
def test_a_planted_error_of_a_cast_is_found(engine, small, monkeypatch):
    monkeypatch.setattr(prove, "load_engine", lambda name: engine)
    outcome = prove.cast(fmtsim.get_format("e2m1"), "nearest_even", "saturate", [0x3FA])
    assert outcome["differences"] in (2, 4)
    if isinstance(engine, TiesAway):
        assert outcome["first"] == "code of 0x3fa00000 (1.25) is 3, expected 2"


def test_a_record_is_gone_on_with(small, tmp_path, capsys):
    arguments = ["casts", "--format", "int2", "--rounding", "up", "--record", str(tmp_path / "casts.jsonl")]
    assert prove.main(arguments) == 0 and "33,554,432 results compared, 0 differ" in capsys.readouterr().out
    (line,) = map(json.loads, (tmp_path / "casts.jsonl").read_text().splitlines())
    assert line["name"] == "int2 up saturate" and len(line["blocks"]) == 16 and line["commit"] and line["machine"]
    assert prove.main([*arguments, "--rounding", "down"]) == 0 and "int2 down" in capsys.readouterr().out
    assert prove.main(arguments) == 0 and capsys.readouterr().out == "0 results compared, 0 differ\n"


def test_products_of_codes_and_scales(monkeypatch):
    for name in ("mxfp4", "nvfp4", "mxint8"):
        assert prove.decoded(fmtsim.get_format(name))["differences"] == 0
    monkeypatch.setattr(prove, "load_engine", lambda name: PlantedError(load_engine(name)))
    assert prove.decoded(fmtsim.get_format("mxfp4"))["differences"] == 2


def test_products_of_pairs_of_codes(monkeypatch):
    proof = next(proof for proof in prove.products(None) if proof.name == "hopper.wgmma fp32 e4m3 e5m2")
    codes = (0x00, 0x01, 0x80, 0x81, 0x38, 0x7C, 0x7F, 0xFE)
    assert proof.run(codes=codes) == {"compared": 192, "differences": 0, "first": ""}
    mma = fmtsim.mma
    monkeypatch.setattr(fmtsim, "mma", lambda *operands, **options: -mma(*operands, **options))
    outcome = proof.run(codes=codes)
    assert outcome["differences"] > 100 and outcome["first"].startswith("codes 0x00, 0x00 + None: -0.0, expected 0.0")
