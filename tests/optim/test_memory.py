# SPDX-License-Identifier: Apache-2.0
"""Bytes that states take, measured against the arithmetic and what the sources say; the documentation's table."""

import pytest
import torch

import fmtsim
from fmtsim.optim import Scheme
from fmtsim.optim.catalogue import bytes_per_parameter, scaled_state

# bytes a parameter of both moments and of kept weights: codes, and scales of large tensors
PUBLISHED = {
    "fp32": 8.0, "bnb8": 2 + 8 / 256, "bnb8_2048": 2 + 8 / 2048, "fp8lm": 1 + 2 + 2, "fp8lm_o1": 4 + 4 + 2,
    "fp8lm_v8": 1 + 1 + 2, "fp8lm_w8": 1 + 2 + 1, "intel_2t": 1 + 1 + 2, "coat": 2 + 24 / 128,
    "coat_plain": 2 + 8 / 128, "ao_8bit": 2 + 8 / 256, "ao_4bit": 1 + 8 / 128, "ao_fp8": 2 + 8 / 256,
    "deepseek_v3": 4.0, "bf16_sr": 8.0, "int8_weights": 8 + 1 + 4 / 512,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_states_take_what_their_bits_say(name):
    dtype = torch.bfloat16 if name == "bf16_sr" else torch.float32
    parameters = [
        torch.nn.Parameter(torch.randn(256, 512, dtype=dtype)),
        torch.nn.Parameter(torch.randn(64, dtype=dtype)),
    ]
    optimizer = fmtsim.optim.AdamW(parameters, state=name)
    assert fmtsim.optim.memory(optimizer).per_parameter() == 0
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    found = fmtsim.optim.memory(optimizer)
    expected = sum(found.expected.values())
    assert abs(found.per_parameter() * found.elements - expected) <= 0.05 * expected
    assert found.per_parameter() == pytest.approx(PUBLISHED[name], rel=0.01)
    assert found.per_parameter("parameters", "gradients") == 2 * parameters[0].element_size()
    assert f"{found.elements} parameters" in str(found) and "arithmetic" in str(found)


def test_a_scheme_of_ones_own():
    e5m2 = scaled_state(fmtsim.get_format("e5m2"), "amax", (1, 64))
    p = torch.nn.Parameter(torch.randn(128, 128))
    optimizer = fmtsim.optim.AdamW([p], state=Scheme(name="mine", first=e5m2, second=e5m2))
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert fmtsim.optim.memory(optimizer).per_parameter() == 2 + 8 / 64


def test_memory_that_parameters_share_counts_once():
    flat = torch.zeros(8192)
    parameters = [torch.nn.Parameter(half) for half in flat.split(4096)]
    found = fmtsim.optim.memory(fmtsim.optim.AdamW(parameters))
    assert (found.elements, found.measured["parameters"]) == (8192, 4 * 8192)


def test_the_table_is_of_a_matrix_of_1024_rows_and_columns():
    tensors, rows = (bytes_per_parameter(fmtsim.optim.get_scheme(name)) for name in ("fp8lm", "int8_weights"))
    assert (tensors, rows) == (1 + 2 + 2 + 3 * 4 / 1024**2, 4 + 4 + 1 + 4 / 1024)
