# SPDX-License-Identifier: Apache-2.0
"""Architectures of Hugging Face on an H200: training steps by its own products have the bits of emulated ones."""

import copy
import warnings

import pytest
import torch

from fmtsim.gemm.products.native import is_native
from fmtsim.nn import convert
from tests.support.architectures import ARCHITECTURES, RECIPE, architecture
from tests.support.bits import assert_same_bits

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytestmark = [
    pytest.mark.skipif(not (torch.cuda.is_available() and is_native("h200")), reason="needs an NVIDIA H200"),
    pytest.mark.filterwarnings(
        "ignore"
    ),  # of the packages, and of orders that are guesses: they count where they differ
]


def step(model, batch):
    """Return logits and all gradients of a step with dropout of one seed."""
    torch.manual_seed(1)
    out = model.train()(**batch)
    logits = out.logits if hasattr(out, "logits") else out.logits_per_text
    logits.float().square().mean().backward()
    return {"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_native_steps_have_the_bits_of_emulated_ones(name, dtype):
    model, batch = architecture(name)
    model = model.to("cuda", dtype)
    batch = {key: t.to("cuda", dtype if t.is_floating_point() else t.dtype) for key, t in batch.items()}
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            native, emulated = (
                step(convert(copy.deepcopy(model), recipe=RECIPE, target="h200", native=how), batch)
                for how in (None, False)
            )
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(native) == set(emulated) and len(native) > 10
    for key, found in native.items():
        assert_same_bits(found, emulated[key])
