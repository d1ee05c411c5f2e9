# SPDX-License-Identifier: Apache-2.0
"""What the engine reads stays the caller's: memory that FSDP2 may free, and views of every layout."""

from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
import torch

import fmtsim
from fmtsim.cpu.runtime import jit, pool
from fmtsim.cpu.runtime.pool import array_of
from tests.support.bits import assert_same_bits
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


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_stores_past_the_caches_write_the_same_values(rounding, monkeypatch):
    x = normal(40, 129, seed=0)
    for name, overflow in (("e4m3", "saturate"), ("e4m3", "ieee"), ("bf16", "ieee")):
        results = []
        for least in (1 << 40, 0):
            monkeypatch.setattr(pool, "_LARGE", least)
            out = torch.empty(x.numel() + 32)[16:-16].view(x.shape)
            out.fill_(-7.0)
            assert pool.past_caches(x, out) == (least == 0 and out.data_ptr() % 64 == 0)
            generator = 3 if rounding == "stochastic" else None
            results.append(fmtsim.quantize(x, name, rounding=rounding, overflow=overflow, generator=generator, out=out))
        assert_same_bits(results[1], results[0])
    assert not pool.past_caches(x, x) and not pool.past_caches(x, out.view(-1)[1:])


@pytest.mark.parametrize(
    ("name", "columns", "dim"),
    [("mxfp4", 160, -1), ("mxfp4", 129, -2), ("nvfp4", 144, -1), ("nvfp4", 160, -2), ("int8_channel", 129, -1)],
)
def test_blocks_past_the_caches_have_the_same_values(name, columns, dim, monkeypatch):
    x, results = normal(64, columns, seed=0), []
    for least in (1 << 40, 0):
        monkeypatch.setattr(pool, "_LARGE", least)
        out = torch.full((x.numel() + 32,), -7.0)
        results.append(fmtsim.quantize(x, name, dim=dim, out=out[16:-16].view(x.shape)))
        assert (out[:16] == -7).all() and (out[-16:] == -7).all()
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[1], fmtsim.decode(fmtsim.encode(x, name, dim=dim)))


itself = jit.borrowing(lambda x: x)
total = numba.njit(lambda x: itself(x).sum())


def test_helpers_that_count_no_references_return_no_arrays():
    with pytest.raises(Exception, match="<lambda> returns an array, and does not count references to it"):
        total(np.zeros(3))


def test_a_thread_keeps_memory_by_name():
    x = pool.memory("one name", (3, 5), torch.float32)
    x.fill_(2.0)
    again, other = pool.memory("one name", (15,), torch.float32), pool.memory("another", (3, 5), torch.float32)
    assert x.shape == (3, 5) and again.data_ptr() == x.data_ptr() and (again == 2).all()
    with ThreadPoolExecutor(1) as thread:
        elsewhere = thread.submit(pool.memory, "one name", (2, 7), torch.float8_e4m3fn).result()
    assert elsewhere.shape == (2, 7) and elsewhere.dtype == torch.float8_e4m3fn
    assert len({tensor.data_ptr() for tensor in (x, other, elsewhere)}) == 3
