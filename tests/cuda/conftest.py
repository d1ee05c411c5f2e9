# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of the CUDA engine."""

import pytest
import torch

from fmtsim.cuda import torch_calls as gpu
from fmtsim.gemm.products import native, resolver
from tests.cuda.emulated_gpu import take_for_gpu


@pytest.fixture
def on_card(device, monkeypatch):
    """Take the emulated device for a GPU."""
    take_for_gpu(device, monkeypatch)
    return device


class Properties:
    multi_processor_count, major, minor = 132, 9, 0


@pytest.fixture
def hopper(monkeypatch):
    """Pretend that device 0 is an H200 with the recorded library."""
    for variable in gpu._VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
    monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: False)
    monkeypatch.setattr(native, "_cuda_index", lambda device: 0)
    monkeypatch.setattr(resolver, "NATIVE_DEVICES", ("cpu",))
    monkeypatch.setattr(native, "_warn_of_versions", lambda name, library: None)
    native._other_gpu.cache_clear()
    native._warn_of_setting.cache_clear()
    yield monkeypatch
    native._other_gpu.cache_clear()
