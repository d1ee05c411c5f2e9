# SPDX-License-Identifier: Apache-2.0
"""Small calls recorded on an H200 that other recordings lack, replayed through the public verbs."""

import json
from pathlib import Path

import numpy
import torch

from fmtsim.gemm.products.matmul import linear, mm
from fmtsim.gemm.products.scaled_mm import scaled_mm

SETTLED = Path(__file__).parents[1] / "gemm" / "data" / "h200_settled.npz"
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
    """Return what the public verbs give for a recorded call."""
    options |= {"target": "h200", "strict": True}
    a, b, out = tensors["a"], tensors["b"].t(), tensors["out"].dtype
    if meta["call"] == "linear":
        return linear(a, tensors["b"], tensors["bias"], **options)
    if meta["call"] == "mm":
        return mm(a, b, out_dtype=out, allow="tf32" if meta.get("tf32", False) else None, **options)
    scale_b = tensors["scale_b"].t() if "scaling" in meta else tensors["scale_b"]
    return scaled_mm(a, b, tensors["scale_a"], scale_b, out_dtype=out, use_fast_accum=meta["use_fast_accum"], **options)
