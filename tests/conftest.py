"""Make helpers of the tests importable as ``tests.*`` wherever pytest is started; what several folders share."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@pytest.fixture
def one_thread():
    """Keep torch on one thread, and give it back the number that it had."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
