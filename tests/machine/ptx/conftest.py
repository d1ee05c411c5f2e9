# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests that launch kernels."""

import pytest

import fmtsim
from fmtsim.support.errors import DeviceError


@pytest.fixture
def nvrtc() -> None:
    """Skip where CUDA C++ cannot be compiled."""
    try:
        fmtsim.launch('extern "C" __global__ void nothing() {}', 1, block=32)
    except DeviceError as error:
        pytest.skip(str(error))
