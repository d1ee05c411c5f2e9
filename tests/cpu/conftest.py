# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the CPU engine's tests."""

import pytest

from fmtsim.cpu.runtime import pool


@pytest.fixture(autouse=True)
def own_threads(one_thread):
    """Keep torch on one thread, and give the engine its own number of threads back."""
    yield
    pool.set_num_threads(None)
