"""Small calls recorded on an H200 that other recordings lack, replayed through the public verbs."""

import json
from pathlib import Path

import numpy
import pytest
import torch

from fmtsim.gemm.products.matmul import linear, mm
from fmtsim.gemm.products.scaled import scaled_mm
from fmtsim.spec.plan import GemmPlan

SETTLED = Path(__file__).parent / "data" / "h200_settled.npz"
STORED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def settled():
    """Yield small calls recorded on an H200: their facts and tensors, b as [N, K]."""
    stored = numpy.load(SETTLED)
    for i, meta in enumerate(json.loads(str(stored["meta"]))):
        names = [name for name in stored.files if name.startswith(f"{i:03d}.")]
        tensors = {}
        for name in names:
            part = name[4:]
            dtype = meta.get(part, "float32" if part.startswith("scale") else meta["a"])
            bits = torch.from_numpy(stored[name].view(f"i{stored[name].itemsize}")).view(STORED[stored[name].itemsize])
            tensors[part] = bits.view(getattr(torch, dtype))
        yield meta, tensors


def replayed(meta, tensors, **options):
    options |= {"target": "h200", "strict": True}
    a, b, out = tensors["a"], tensors["b"].t(), tensors["out"].dtype
    if meta["call"] == "linear":
        return linear(a, tensors["b"], tensors["bias"], **options)
    if meta["call"] == "mm":
        return mm(a, b, out_dtype=out, allow_tf32=meta.get("tf32", False), **options)
    scale_b = tensors["scale_b"].t() if "scaling" in meta else tensors["scale_b"]
    return scaled_mm(a, b, tensors["scale_a"], scale_b, out_dtype=out, use_fast_accum=meta["use_fast_accum"], **options)


def bits(t):
    return t.contiguous().view(STORED[t.element_size()])


def test_settled_calls_give_their_bits():
    """What earlier recordings lack: slices of TF32, partial sums in 16 bits, small splits, scales of 128 products.

    None of them is a guess.
    """
    seen = 0
    for meta, tensors in settled():
        assert torch.equal(bits(replayed(meta, tensors)), bits(tensors["out"])), meta
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
