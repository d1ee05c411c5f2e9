# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of products."""

import pytest

from tests.support.targets import install


@pytest.fixture
def notebook(monkeypatch):
    """Make every target= of the verbs one that keeps its calls."""
    return install(monkeypatch)
