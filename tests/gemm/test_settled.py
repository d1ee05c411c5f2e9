"""Small calls recorded on an H200 that other recordings lack, replayed through the public verbs."""

import json
from pathlib import Path

import numpy
import pytest
import torch

from fmtsim.errors import PlanUnknownWarning
from fmtsim.gemm import target as targets
from fmtsim.gemm.matmul import linear, mm
from fmtsim.gemm.plan import GemmPlan
from fmtsim.gemm.scaled import scaled_mm

HAS_SLICES = "part_k" in GemmPlan.__dataclass_fields__
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


def replayed(meta, tensors):
    a, b, out = tensors["a"], tensors["b"].t(), tensors["out"].dtype
    if meta["call"] == "linear":
        return linear(a, tensors["b"], tensors["bias"], target="h200")
    if meta["call"] == "mm":
        return mm(a, b, out_dtype=out, allow_tf32=meta.get("tf32", False), target="h200")
    scale_b = tensors["scale_b"].t() if "scaling" in meta else tensors["scale_b"]
    return scaled_mm(
        a, b, tensors["scale_a"], scale_b, out_dtype=out, use_fast_accum=meta["use_fast_accum"], target="h200"
    )


def test_settled_calls_give_their_bits():
    """What earlier recordings lack: slices of TF32, partial sums in 16 bits, small splits, scales of 128 products."""
    seen = 0
    for meta, tensors in settled():
        beyond = meta["call"] == "linear" or meta.get("scaling") == "block_1x128_1x128"
        if beyond or (meta["K"] == 364 and not HAS_SLICES):
            continue
        bits = STORED[tensors["out"].element_size()]
        assert torch.equal(replayed(meta, tensors).view(bits), tensors["out"].contiguous().view(bits)), meta
        seen += 1
    assert seen == 6 + HAS_SLICES


def test_what_a_plan_cannot_say_yet(monkeypatch):
    """One column with a bias: the product is rounded to 16 bits before the bias is added. It is called a guess."""
    monkeypatch.setattr(targets, "_warned", set())
    meta, tensors = next((m, t) for m, t in settled() if m["call"] == "linear")
    with pytest.warns(PlanUnknownWarning, match="A bias with one column"):
        got = replayed(meta, tensors)
    assert not torch.equal(got, tensors["out"])
    exact = tensors["a"].double() @ tensors["b"].double().t()
    twice = (exact.bfloat16() + tensors["bias"]).sub(tensors["out"]).abs().max()
    once = (exact + tensors["bias"].double()).bfloat16().sub(tensors["out"]).abs().max()
    assert twice < once
