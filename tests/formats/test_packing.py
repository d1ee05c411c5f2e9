# SPDX-License-Identifier: Apache-2.0
"""Tensors as bytes."""

import pytest
import torch

from fmtsim.formats.packing import tensor_bytes, tensor_of_bytes
from tests.support.bits import assert_same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_bytes_of_a_tensor_and_back(dtype):
    x = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]]).to(dtype)
    data = tensor_bytes(x.T)
    assert data == x.T.contiguous().view(torch.uint8).numpy().tobytes()
    assert_same_bits(tensor_of_bytes(data, dtype).view(3, 2), x.T.contiguous())
    assert tensor_bytes(x[0, 1]) == tensor_bytes(x[:1, 1:2]) and tensor_bytes(x[:0]) == b""
    assert tensor_of_bytes(b"", dtype).shape == (0,) and tensor_of_bytes(b"", dtype).dtype == dtype


def test_a_tensor_of_bytes_shares_the_memory_that_is_writable():
    data, constant = bytearray(b"abc"), b"abc"
    tensor_of_bytes(data)[0], tensor_of_bytes(constant)[0] = 0, 0
    assert data == b"\0bc" and constant == b"abc"
