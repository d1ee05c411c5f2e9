# SPDX-License-Identifier: Apache-2.0
"""Inputs of tools.peers and its comparison of a profile's results with a library's."""

import numpy
import pytest
import torch

from fmtsim.casts.profile import get_profile
from fmtsim.formats.registry import get_format
from tools.peers import inputs
from tools.peers.__main__ import compare, stored


def results_of(like: str, x: torch.Tensor, format: str) -> dict[str, "numpy.ndarray"]:
    profile, fmt = get_profile(like, format)
    return {name: tensor.numpy().copy() for name, tensor in profile.results(x, fmt).items()}


@pytest.mark.parametrize(("name", "place"), [("value", 5), ("code", 5)])
def test_a_planted_difference_is_counted_and_named(name, place):
    x = torch.linspace(-500, 500, 101)
    results = results_of("ml_dtypes", x, "e4m3")
    profile, _ = get_profile("ml_dtypes", "e4m3")
    assert compare(profile, "e4m3", x, results) == (101, 0, "")
    results[name][place] += 1  # a value below 464 in size
    total, wrong, first = compare(profile, "e4m3", x, results)
    assert (total, wrong) == (101, 1) and first.startswith(f"{name} at {place}: ")


def test_signs_of_zero_differ_and_nan_equals_nan():
    profile, _ = get_profile("ml_dtypes", "e4m3")
    x = torch.tensor([0.0, float("nan"), 1.0])
    for value, wrong in (([0.0, -numpy.nan, 1.0], 0), ([-0.0, numpy.nan, 1.0], 1)):
        assert compare(profile, "e4m3", x, {"value": numpy.array(value, "float32")})[1] == wrong


def test_a_scale_that_differs_marks_its_block():
    x = torch.randn(4, 64)
    profile, _ = get_profile("torch/per_channel", "int8_full")
    results = results_of("torch/per_channel", x, "int8_full")
    results["scale"].reshape(-1)[2] *= 2
    assert compare(profile, "int8_full", x, results)[:2] == (256, 64)


@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_inputs_hold_each_boundary_and_its_neighbours(dtype):
    x = torch.cat(list(inputs.elements("e4m3", dtype, 1000)))
    tie = torch.tensor(464.0, dtype=inputs.DTYPES[dtype])
    for number in (tie, tie.nextafter(tie + 8), tie.nextafter(tie - 8)):
        assert (x == number).any() and (x == -number).any()
    assert x.isnan().any() and x.isinf().any() and (x == 0).any()
    assert stored(x).dtype == (numpy.uint16 if dtype == "bf16" else x.numpy().dtype)


@pytest.mark.parametrize("block", [32, "row", "tensor"])
def test_blocks_have_edges_of_scales_zeros_and_nan(block):
    parts = list(inputs.blocks("e2m1", "fp32", block, 1 << 18))
    size = {32: 32, "row": inputs.COLUMNS, "tensor": 16 * inputs.COLUMNS}[block]
    rows = torch.cat([part.reshape(-1, size) for part in parts])
    amaxes = rows.abs().amax(1)
    mantissas = torch.frexp(amaxes[amaxes.isfinite()])[0]
    assert (mantissas == 0.5).any() and (mantissas == 0.75).any() and (amaxes == 0).any() and amaxes.isnan().any()
    assert get_format("e2m1").max == 6 and (amaxes.isinf()).any()
