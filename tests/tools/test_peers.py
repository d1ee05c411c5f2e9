# SPDX-License-Identifier: Apache-2.0
"""Comparisons with libraries that are installed; a planted difference is found, made small and printed."""

from random import Random

import pytest
import torch

import fmtsim
from tools.fuzz import peers

INSTALLED = [(name, draw) for name in ("ml_dtypes", "gfloat", "gguf") for draw in peers.PEERS[name][1]]


@pytest.mark.parametrize(("name", "draw"), INSTALLED, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of the peers
def test_peers_have_the_same_bits(name, draw):
    findings = peers.Findings()
    for seed in range(6):
        findings.add(name, draw(Random(seed)), seed)
    assert findings.compared.total() > 100_000 and not findings.first, str(findings)


def test_a_planted_error_is_made_one_element(monkeypatch):
    quantize = fmtsim.quantize
    monkeypatch.setattr(fmtsim, "quantize", lambda x, fmt, how, **rest: quantize(x, fmt, "nearest_away", **rest))
    monkeypatch.setattr(peers, "data", lambda r, fmt, dtype, shape: torch.full(shape, 2.5, dtype=dtype))
    findings, draw = peers.Findings(), peers.PEERS["ml_dtypes"][1][0]
    for seed in range(60):
        findings.add("ml_dtypes", draw(Random(seed)), seed)
    text = findings.first["ml_dtypes", "casts"]
    assert "{0: '2.5 (0x40200000)'}: fmtsim 3.0 (0x40400000), peer 2.0 (0x40000000)" in text and "e2m1" in text
    assert "rule: nearest_even takes the even code; overflow='saturate'" in text and text in str(findings)


def test_a_difference_in_a_block_needs_few_of_its_numbers():
    x = torch.arange(64.0).reshape(2, 32)
    total = peers.Comparison(
        what="sums", details="", x=x, row=32, rule="", ours=lambda x: x.reshape(-1, 32).sum(1),
        theirs=lambda x: x.sum(1) + (x[:, 3] > 4) * 2.0, known=(("large", lambda x, ours, theirs: ours > 9e9),),
    )  # fmt: skip
    text = total.smallest(total.outcome(x)[2])
    assert text == "{3: '35.0 (0x420c0000)'} at 0: fmtsim 35.0 (0x420c0000), peer 37.0 (0x42140000)"
    turned = x.t().contiguous().t()
    layout = peers.Comparison(
        what="sums",
        details="",
        x=turned,
        row=32,
        rule="",
        ours=lambda x: x.sum(1) + (x.stride(0) == 1),
        theirs=total.ours,
    )
    assert "differs in this layout alone: shape (2, 32), strides (1, 2)" in layout.smallest(layout.outcome(turned)[2])


def test_absent_peers_are_named_and_errors_are_findings(monkeypatch, capsys):
    monkeypatch.setitem(peers.PEERS, "absent", ("no_such_module", []))
    monkeypatch.setitem(peers.PEERS, "broken", ("json", [lambda r: 1 / 0]))
    findings = peers.run(["absent", "broken"], 1e-5, 5)
    assert capsys.readouterr().out == "absent is skipped: there is no module no_such_module\n"
    assert findings.differing.total() >= 1 and "raised ZeroDivisionError('division by zero') (seed 5)" in str(findings)
