# SPDX-License-Identifier: Apache-2.0
"""What the tests of training share."""

import pytest

from fmtsim.lab.training.corpus import load_corpus


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return a file with a little text to train on."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    return path


@pytest.fixture(scope="module")
def corpus(text):
    """Return that text in windows of 16 bytes."""
    return load_corpus(text, 16)
