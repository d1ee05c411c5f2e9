# SPDX-License-Identifier: Apache-2.0
"""What the engine reads stays the caller's: memory that FSDP2 may free, and views of every layout."""

import numpy as np
import pytest
import torch

import fmtsim
from fmtsim.engines.cpu.runtime.pool import array_of
from tests.support.operands import normal


@pytest.fixture
def ranks(monkeypatch):
    """Pretend that ranks exist: only FSDP2 frees memory that a tensor still names."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_can_be_resized_afterwards(dtype, ranks):
    x, w = (normal(32, 64, seed=i).to(dtype) for i in range(2))
    for name in ("e4m3", "mxfp4", "nvfp4", "int8_channel", "nf4"):
        fmtsim.quantize(x, name), fmtsim.encode(x, name)
    fmtsim.mm(x, w.t(), target="exact")
    assert x.untyped_storage().resizable() and w.untyped_storage().resizable()
    x.untyped_storage().resize_(0)


def test_an_array_is_the_tensors_memory(ranks):
    x = normal(6, 8, seed=0)
    for view in (x, x.t(), x[1:4, ::2], x[0].expand(3, 8), x.view(torch.int32)[:0], x[2, 3]):
        assert np.array_equal(array_of(view), view.numpy()) and array_of(view).strides == view.numpy().strides
    made = array_of(torch.full((1000,), 3.0))  # the array keeps the tensor alive
    assert (made == 3).all() and made.flags.writeable
