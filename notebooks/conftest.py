# SPDX-License-Identifier: Apache-2.0
"""Which notebooks the default run of the tests leaves out: those that train models or draw many sums, 7 to 27 s each.

Of these it sees what they import and name (tests/test_docs.py); the verbs that they call have tests of their own.
"""

from importlib.util import find_spec

import pytest

SLOW = (
    "02_rounding", "03_underflow", "04_tensor_cores", "05_native", "06_recipes", "07_optimizers_and_wire", "08_ptq",
    "09_debugging", "10_whole_model", "11_kernels",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.suffix == ".ipynb" and item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)
        if item.path.stem == "11_kernels" and find_spec("triton") is None:
            item.add_marker(pytest.mark.skip(reason="Triton is not installed"))
