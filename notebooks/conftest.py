# SPDX-License-Identifier: Apache-2.0
"""Which notebooks the default run of the tests leaves out: those that train or calibrate models, 7 to 27 s each."""

import pytest

SLOW = ("03_underflow", "06_recipes", "07_optimizers_and_wire", "08_ptq", "09_debugging", "10_whole_model")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.suffix == ".ipynb" and item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)
