# SPDX-License-Identifier: Apache-2.0
"""The engine fixture: each test that asks for it runs once with every engine."""

import pytest

from tests.equality.engines import CUDA_ENGINES, HOST_ENGINES, Engine


@pytest.fixture(params=HOST_ENGINES + CUDA_ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Return one engine after the other."""
    name = request.param
    return Engine(name, request.getfixturevalue(f"{name}_device") if name in CUDA_ENGINES else None)


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Keep torch on one thread: the tensors are small, and other tests may run beside these."""
