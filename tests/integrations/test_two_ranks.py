# SPDX-License-Identifier: Apache-2.0
"""Callbacks on two processes: each goes on with its own delayed scales, and the first observes and writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the folder and what each rank found."""
    for package in ("transformers", "accelerate", "lightning"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    folder = tmp_path_factory.mktemp("ranks")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "tests.integrations.two_ranks", str(folder)],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, [json.loads((folder / f"rank{rank}.json").read_text("utf-8")) for rank in (0, 1)]


@pytest.mark.parametrize("trainer", ["accelerate", "lightning", "transformers"])
def test_each_process_goes_on_with_its_own_scales(ranks, trainer):
    folder, (first, second) = ranks[0], [rank[trainer] for rank in ranks[1]]
    assert first["weights"] and second["weights"]
    assert first["remembered"][0] == first["remembered"][1] and second["remembered"][0] == second["remembered"][1]
    assert first["remembered"] != second["remembered"]
    assert first["losses"][0] == first["losses"][1] and len(first["losses"][0]) == 4
    assert first["history"] == [[1, 3], [1, 3]]
    assert second["losses"] == [[], []] and second["history"] == [[], []]
    pages = [(folder / trainer / f"{name}.html").read_text("utf-8") for name in ("whole", "again")]
    assert all("te_delayed" in page and "had not ended" not in page for page in pages)
