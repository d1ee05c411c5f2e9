"""Fixtures of the tests of the CUDA engine."""

import pytest

from tests.support.emulated_gpu import take_for_gpu


@pytest.fixture
def on_card(device, monkeypatch):
    """Take the emulated device for a GPU."""
    take_for_gpu(device, monkeypatch)
    return device
