# SPDX-License-Identifier: Apache-2.0
"""Jobs that SIGKILL ends at any moment leave whole files, and end as undisturbed ones when they are run again."""

import json
import sys

import pytest

from tests.support import faults
from tests.tools.jobs import JOBS


@pytest.mark.parametrize(
    ("jobs", "count"), [(("train",), 1), *(pytest.param((name,), 50, marks=pytest.mark.faults) for name in JOBS)]
)
def test_a_job_that_was_killed_ends_as_an_undisturbed_one(tmp_path, jobs, count):
    command = [sys.executable, "-m", "tests.tools.jobs", str(tmp_path), str(count), "1", *jobs]
    ended = faults.run(command, timeout=3000, OMP_NUM_THREADS="1")
    assert ended.status == 0, ended.stderr
    counts = json.loads(ended.stdout)
    assert all(found["equal"] == count for found in counts.values()), counts
    assert all(found["kills"] + found["ended before"] == count for found in counts.values()), counts
    print(counts)
