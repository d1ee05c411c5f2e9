# SPDX-License-Identifier: Apache-2.0
"""Operators on elements, sorted and random ones: where each comes from, what is named, and errors that are seen."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import fmtsim
from fmtsim.machine import elementwise, indexing, random, sorting
from fmtsim.support.errors import ArgumentError, DeviceError
from tests.machine.cases import digest
from tests.machine.element_cases import element_cases
from tools.elementwise import SOURCE, functions, ptx

RECORD = json.loads((Path(__file__).parent / "data" / "h200.json").read_text("utf-8"))["cases"]


def test_every_function_is_compiled():
    with zipfile.ZipFile(SOURCE.with_suffix(".zip")) as archive:
        assert {name.partition(".")[0] for name in archive.namelist()} == set(functions())


def test_the_kept_ptx_is_the_compilers():
    with zipfile.ZipFile(SOURCE.with_suffix(".zip")) as archive:
        kept = {name: archive.read(name).decode() for name in archive.namelist()}
    try:
        made = ptx("mse_loss", functions()["mse_loss"])
    except DeviceError as error:
        pytest.skip(str(error))
    if not made["mse_loss.float32"].startswith(".version 9.0"):
        pytest.skip("another NVRTC than 13.0, whose functions differ: expm1f")
    assert all(kept[name] == text for name, text in made.items())


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "value"),
    [
        ("loss topk", sorting, "_BITONIC", 0),
        ("index scatter_add", indexing, "_positions", lambda x: torch.arange(x.numel()).flip(0).reshape(x.shape)),
        ("pool avg3s2p1", indexing, "rounding", lambda dtype: lambda x: x),
        ("multinomial 4x1000", random, "_UNROLL", 2),
        ("elements mse 2", elementwise, "_module", lambda name, dtype: MODULE(name, torch.float32)),
    ],
)
def test_planted_errors_are_seen(name, owner, attribute, value, monkeypatch):
    case = next(case for case in element_cases() if case.name == name)
    for planted in (False, True):
        if planted:
            monkeypatch.setattr(owner, attribute, value)
        with fmtsim.simulate(strict=True):
            assert (digest(*case.call("cpu")) == RECORD[name]) is not planted


MODULE = elementwise._module


def test_a_bitonic_network_exchanges_equal_elements():
    # by hand: of eight ones the first three stay, and the network of 32 turns them round
    with fmtsim.simulate(strict=True):
        assert torch.topk(torch.ones(8), 3).indices.tolist() == [2, 1, 0]
        assert torch.topk(torch.ones(80), 40).indices.tolist() == list(range(40))


def test_folding_adds_windows_in_ascending_order():
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((1, 2 * 9, 30)).astype(np.float32))
    expected = np.zeros((2, 7, 8), np.float32)
    columns = x[0].reshape(2, 3, 3, 5, 6).numpy()
    for i, j in np.ndindex(5, 6):
        for a, b in np.ndindex(3, 3):
            expected[:, i + a, j + b] += columns[:, a, b, i, j]
    with fmtsim.simulate(strict=True):
        found = functional.fold(x, (7, 8), 3)[0].numpy()
    assert np.array_equal(found, expected)


def test_what_a_gpu_does_not_repeat_is_named():
    x, twice = torch.rand(4, 8), torch.tensor([0, 0, 0, 1])
    with fmtsim.simulate() as run:
        x.index_add(0, twice, x)
        x.scatter(0, twice[None].expand(1, 4) * 0, x[:1, :4]), x.scatter(1, twice[None], x[:1])
        torch.ones(4, 8).index_add(0, twice, torch.ones(4, 8))  # sums of small integers are exact in any order
        functional.adaptive_avg_pool2d(torch.rand(1, 1, 8, 8).requires_grad_(), 3).sum().backward()
    assert len(run.nondeterministic) == 3  # noqa: PLR2004
    assert run.exact["index_add"] == 1
    with fmtsim.simulate() as run:
        torch.zeros(3).index_add(0, torch.tensor([1]), torch.tensor([1e-40]))
    assert any("subnormal" in guess for guess in run.guess)
    with pytest.raises(ArgumentError, match="several values at one place"), fmtsim.simulate(strict=True):
        x.index_add(0, twice, x)
