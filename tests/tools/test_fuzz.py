# SPDX-License-Identifier: Apache-2.0
"""Every target with the inputs that failed once and some others; and that a report finds a planted defect."""

import subprocess
import sys

import pytest
import torch.distributed as dist
from hypothesis import strategies as st

from fmtsim.support.errors import ArgumentError
from tools.fuzz.__main__ import TARGETS
from tools.fuzz.target import Report, Target

SEED = 1  # of the default tests, which fail or pass alike every day; the command draws others


@pytest.fixture(scope="module", autouse=True)
def no_group_stays():
    """End the process group that targets of collectives make: other modules test what happens without one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_input_ends_in_a_result_or_an_error_of_our_own(target):
    report = Report()
    report.run(target, target.count, SEED)
    assert not report.defects, str(report)


@pytest.mark.slow
def test_targets_of_a_package_that_is_not_installed_are_skipped_by_name():
    missing = "for name in ('gguf', 'safetensors'): sys.modules[name] = None"
    command = f"import sys\n{missing}\nfrom tools.fuzz.__main__ import main\nsys.argv[1:] = ['--minutes', '0']\nmain()"
    lines = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    gone = {"export.gguf": "gguf", "tensors.safetensors": "safetensors", "weights.safetensors": "safetensors"}
    assert set(lines[:3]) == {f"{name} is skipped: there is no module {module}" for name, module in gone.items()}
    assert f", {len(TARGETS) - 3} targets, " in lines[3]


def test_a_report_tells_results_errors_and_defects_apart():
    def call(value):
        if value > 50:
            raise ArgumentError("value is too large; pass at most 50")
        return 1 // value

    report = Report()
    report.run(Target("division", st.integers(1, 100), call, failed=(0,)), 50, seed=1)
    assert report.ends["division: results"] > 0 and report.ends["division: own errors"] > 0
    assert report.ends["division: defects"] == 1 and report.calls == sum(report.ends.values()) <= 51
    (key,) = report.defects
    assert key.startswith("division: ZeroDivisionError") and report.defects[key][0] == "0"


def test_an_error_that_says_nothing_is_a_defect():
    def call(value):
        raise ArgumentError(" ")

    report = Report()
    report.run(Target("silent", st.just(1), call), 1, seed=1)
    assert len(report.defects) == 1
