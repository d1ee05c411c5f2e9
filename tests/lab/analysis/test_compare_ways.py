# SPDX-License-Identifier: Apache-2.0
"""``compare`` of a function, eager and compiled: chains that an H200 ran both ways, and the roundings that vanish."""

import hashlib

import pytest
import torch

import fmtsim
from fmtsim.lab.analysis.compare_ways import _run
from fmtsim.support.errors import ArgumentError

WAYS = ("torch", "torch.compile")
CHAINS = {
    "mul_add": lambda a, b, c: a * b + c, "add_mul": lambda a, b, c: (a + b) * c, "sub": lambda a, b, c: a - b * c,
    "three": lambda a, b, c: ((a * b) * c) + a, "sub2": lambda a, b, c: a * b - c,
    "relu": lambda a, b, c: torch.relu(a * b) - c,
}  # fmt: skip
# SHA-256 (16 digits) of 65,536 results, eager and compiled: H200, torch 2.11.0+cu130, Triton 3.6.0, 2026-11-28.
RECORDED = {
    "bfloat16 mul_add": ("e946b9fe181a3259", "063eadf21ebe57f3"),
    "bfloat16 add_mul": ("c7c6e9f38c10a0ef", "519f1dc74e50099d"),
    "bfloat16 three": ("ed77a7efd564f3e0", "e343ecde13a1e83e"),
    "bfloat16 sub": ("26f9482b94a04cf4", "daf5e344fd5c1622"),
    "bfloat16 sub2": ("36d745ddeef9cc40", "fb9d2b39ae8954d2"),
    "bfloat16 relu": ("c841098966bb649c", "1c5a513a0b61fa3b"),
    "float16 mul_add": ("f8f7ba67f95c0014", "064fee91c5b9e7e0"),
    "float16 add_mul": ("83029f3cfdd94c0a", "a352cb2b3e5c4ec2"),
    "float16 three": ("a1ae8b26528241e3", "2809eda9353d8f89"),
    "float16 sub": ("2055f7a7fee9b77c", "b657fb4030606942"),
    "float16 sub2": ("817b0682dd50fdad", "a6d0c28329ebc5d7"),
    "float16 relu": ("cf8ef7c4eb87c9d2", "7cbcee5b072eb02e"),
    "float32 mul_add": ("26b92c07c730d419", "e584f39eee798681"),
    "float32 add_mul": ("7006a735d0e0c810", "7006a735d0e0c810"),
    "float32 three": ("3c48cb988fdb1f60", "503b7befb02d30fe"),
    "float32 sub": ("4f31b2b076c0dcfb", "5d249f46e0555602"),
    "float32 sub2": ("39611f37ab72d31f", "fac74cdd4daebc1e"),
    "float32 relu": ("e458d88c3cc0f11b", "e458d88c3cc0f11b"),
}


def inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1 << 16, generator=generator).to(dtype) for _ in range(3))


def digest(x):
    return hashlib.sha256(x.view(torch.int16 if x.itemsize == 2 else torch.int32).numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("key", RECORDED)
def test_both_ways_have_a_cards_bits(key, monkeypatch):
    dtype, name = key.split()
    runs = []
    monkeypatch.setattr(
        "fmtsim.lab.analysis.compare_ways._run", lambda *arguments: runs.append(_run(*arguments)) or runs[-1]
    )
    result = fmtsim.compare(CHAINS[name], inputs(getattr(torch, dtype)), like=WAYS)
    (eager,), (compiled,) = runs[:2]
    assert (digest(eager), digest(compiled)) == RECORDED[key]
    assert result.equal == (RECORDED[key][0] == RECORDED[key][1])


def test_each_rounding_that_vanishes_is_named():
    result = fmtsim.compare(CHAINS["three"], inputs(torch.bfloat16), like=WAYS)
    assert [(row.operation.split()[0], row.what.split()[0]) for row in result.vanished] == [
        ("mul", "kept"), ("mul_1", "kept"), ("mul_1", "fused"),
    ]  # fmt: skip
    assert all(row.alone for row in result.vanished) and result.vanished[0].put_back
    assert result.vanished[2].put_back == 0  # a product of two bfloat16 numbers is exact in float32
    assert "15,976 of 65,536" in str(result) and result.to_dict()["equal"] is False
    relu = fmtsim.compare(CHAINS["relu"], inputs(torch.bfloat16), like=WAYS)
    assert [row.alone for row in relu.vanished] == [0, 0]  # either rounding keeps the other's result
    assert fmtsim.compare(lambda a, b: a + b, inputs(torch.bfloat16)[:2], like=WAYS).equal


def test_what_is_not_modelled_is_said():
    result = fmtsim.compare(lambda a, b, c: torch.softmax(a * b, -1) + c, inputs(torch.bfloat16), like=WAYS)
    assert any("softmax" in note for note in result.notes) and not result.vanished
    with pytest.raises(ArgumentError, match=r"not a pair that is known; choose \('torch', 'torch.compile'\)"):
        fmtsim.compare(CHAINS["sub"], inputs(torch.float32), like=("torch", "jax"))
    with pytest.raises(ArgumentError, match="hold no tensor"):
        fmtsim.compare(CHAINS["sub"], (1.0,), like=WAYS)
