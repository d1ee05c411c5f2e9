# SPDX-License-Identifier: Apache-2.0
"""The oracle of matrix products against recorded hardware: dot products of eight GPUs, probes and calls of an H200."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fmtsim import GemmPlan, get_format, get_unit
from fmtsim.gemm.products import operator
from fmtsim.spec.gemm_spec import GemmSpec
from tests.support.bits import assert_same_bits, differing
from tests.support.gemm_oracle import sums
from tests.support.recorded import GOLDEN, VECTORS, needs_golden, needs_vectors
from tools.calibrate.recordings import Recording, read_calls, read_dots
from tools.calibrate.replay import replay_call

DOTS = sorted(path.stem for path in VECTORS.glob("mtc_*.npz"))
PROBES = ("probe_minexp_bf16_fp32", "probe_minexp_fp16_fp16", "probe_minexp_tf32_fp32", "probe_special_bf16_fp32")


def mismatches(name: str, rows: slice, **wrong) -> list[int]:
    """Return the rows of a recording of dot products where the oracle of a catalogued unit differs."""
    folder, kind = (GOLDEN, "probe") if name.startswith("probe") else (VECTORS, "dots")
    dots = read_dots(Recording(path=folder / f"{name}.npz", kind=kind))
    unit, fmt = get_unit(dots.unit).mode(dots.format, dots.format, dots.accumulate), get_format(dots.format)
    spec = GemmSpec(datapath=replace(unit, **wrong), plan=GemmPlan(), a=fmt, b=fmt)
    a, b, d = dots.a[rows], dots.b[rows], dots.d[rows]
    if dots.format == "tf32":  # instructions ignore the low 13 bits of their operands
        a, b = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b))
    c = torch.zeros_like(d) if dots.c is None else dots.c[rows]
    rows_of = zip(*(x.split(1) for x in (a, b, c)), strict=True)
    return differing(torch.cat([sums(x, y, spec, d.dtype, c=z[None])[0] for x, y, z in rows_of]), d)


@needs_vectors
@pytest.mark.parametrize("count", [25, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DOTS)
def test_dot_products(name, count):
    assert mismatches(name, slice(count)) == []


@needs_golden
@pytest.mark.parametrize("name", PROBES)
def test_probes(name):
    assert mismatches(name, slice(None)) == []


@needs_vectors
@needs_golden
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("mtc_A100_fp16_fp32", {"fraction_bits": 23}),
        ("mtc_H200_bf16_fp32", {"block": 8}),
        ("mtc_H200_bf16_fp32", {"term_rounding": "down"}),
        ("mtc_H200_E4M3_fp16", {"paired": False}),
        ("mtc_H200_E4M3_fp16", {"promote_every": None}),
        ("probe_minexp_bf16_fp32", {"min_exponent": -132}),
        ("probe_minexp_fp16_fp16", {"min_exponent": -22}),
    ],  # fmt: skip
)
def test_a_wrong_unit_is_seen(name, wrong):
    assert mismatches(name, slice(200), **wrong) != []


def check_call(name: str, index: int, outputs: int, monkeypatch) -> None:
    """Replay a call with the oracle in an engine's place, which sums a few outputs; fail unless they are recorded."""
    call = read_calls(Recording(path=GOLDEN / f"h200_{name}.npz", kind="calls"))[index]
    m, n = call.out.shape
    draw = random.Random(index)
    places = [(draw.randrange(m), draw.randrange(n)) for _ in range(outputs)]
    if "special" in call.label:  # the first rows and columns hold NaN, Inf and zeros
        places = [(i, j) for i in range(6) for j in range(6)]

    def gemm(a, b, c, scale_a, scale_b, spec, random, out):
        assert out.shape == call.out.shape and (c, scale_a, scale_b) == (None, None, None)
        out.zero_()
        for i, j in places:
            out[i, j] = sums(a[i : i + 1], b[j : j + 1], spec, out.dtype)[0, 0]

    monkeypatch.setattr(operator, "_SUMS", 1 << 40)
    monkeypatch.setattr(operator, "gemm_engine", lambda *_: SimpleNamespace(gemm=gemm))
    found = replay_call(call, "h200")
    rows, columns = zip(*places, strict=True)
    assert_same_bits(found[rows, columns], call.out[rows, columns], what=call.label)


COUNTS = {"fp8": 39, "f16": 67, "tf32": 11}
CALLS = [(name, index) for name, count in COUNTS.items() for index in range(count)]


@needs_golden
@pytest.mark.parametrize("outputs", [1, pytest.param(24, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "index"), CALLS)
def test_outputs_of_recorded_calls(name, index, outputs, monkeypatch):
    check_call(name, index, outputs, monkeypatch)
