# SPDX-License-Identifier: Apache-2.0
"""Library calls recorded on an H200, replayed through the public verbs."""

from pathlib import Path

import pytest
import torch

from fmtsim.lab.cli.main import main
from fmtsim.spec.plan import GemmPlan
from tests.support.bits import assert_same_bits, bits
from tests.support.settled import replayed, settled

DATA = Path(__file__).with_name("data") / "h200"


def test_every_recorded_call_has_the_recorded_bits(capsys):
    assert main(["verify", "gemm", "--vectors", str(DATA)]) == 0
    assert "all bits agree" in capsys.readouterr().out


def test_settled_calls_give_their_bits():
    """What earlier recordings lack: slices of TF32, partial sums in 16 bits, small splits, scales of 128 products.

    None of them is a guess.
    """
    seen = 0
    for meta, tensors in settled():
        assert_same_bits(replayed(meta, tensors), tensors["out"], what=meta)
        seen += 1
    assert seen == 9


@pytest.mark.parametrize(
    ("what", "planted"),
    [
        ({"call": "linear"}, GemmPlan()),  # one column with a bias: rounded before the bias and after
        ({"scaling": "block_1x128_1x128"}, GemmPlan(promote_every=128, scaled_promotion=True)),
        (
            {"scaling": "block_1x128_128x128"},
            GemmPlan(promote_every=128, scaled_promotion=True, successive_scales=True),
        ),
    ],
    ids=["linear", "row blocks", "blocks"],
)
def test_another_order_of_roundings_is_seen(what, planted):
    meta, tensors = next((m, t) for m, t in settled() if m | what == m)
    assert not torch.equal(bits(replayed(meta, tensors, plan=planted)), bits(tensors["out"]))
