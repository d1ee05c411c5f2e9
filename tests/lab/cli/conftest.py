# SPDX-License-Identifier: Apache-2.0
"""What several tests of commands ask for."""

import signal

import pytest


@pytest.fixture
def heard():
    """Give this process the usual handler, which a runner in the background has not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
