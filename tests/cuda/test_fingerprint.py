# SPDX-License-Identifier: Apache-2.0
"""Fingerprints by a kernel: those of the host, in one read of a tensor."""

import math

import pytest
import torch

from fmtsim.casts.ops import load_engine
from fmtsim.lab.analysis import fingerprint
from fmtsim.lab.analysis.fingerprint import Fingerprints

SHAPES = ((), (3,), (5, 7), (37, 384), (8, 3, 130), (2, 66000), (70001,), (4, 2, 1024), (9, 2052), (8, 16, 64))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)


@pytest.fixture
def by_kernel(device, monkeypatch):
    """Let all tensors be read by the kernel, and those that it does not take be seen."""
    monkeypatch.setattr(fingerprint, "fused_engine", lambda x: load_engine("cuda"))
    left, real = [], fingerprint._sum_runs
    monkeypatch.setattr(fingerprint, "_sum_runs", lambda x: left.append(x.shape) or real(x))
    return left


def tensor(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * 50
    return x.to(dtype) if dtype.is_floating_point else x.abs().to(dtype)


def on_host(x, batch):
    """Return the fingerprint without a GPU's kernel."""
    prints = Fingerprints()
    prints.batch = batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "fused_engine", lambda x: None)
        prints.add(x)
    return prints.finish()[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_finds_what_the_host_finds(dtype, device, by_kernel):
    tensors = [tensor(shape, dtype) for shape in SHAPES]
    for batch in (0, 8):
        wanted = [on_host(x, batch) for x in tensors]
        by_kernel.clear()
        prints = Fingerprints()
        prints.batch = batch
        assert [prints.add(x.to(device))[0] for x in tensors] == list(range(len(tensors)))
        assert prints.finish() == wanted and not by_kernel


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_largest_magnitudes(dtype, device, by_kernel):
    prints, wanted = Fingerprints(), []
    kept = []
    for value in (-250.0, -math.inf, math.nan):
        for place in (0, 777, 37 * 385 - 1):
            x = tensor((37, 385), dtype)
            x.view(-1)[place] = value
            kept.append(x.to(device))
            prints.add(kept[-1])
            wanted.append(abs(value))
    assert [str(each.amax) for each in prints.finish()] == [str(value) for value in wanted] and not by_kernel


def test_what_lies_otherwise_in_memory_or_is_read_otherwise(device, by_kernel):
    x = tensor((6, 260), torch.float32)
    late = torch.zeros(6 * 260 + 1, device=device)[1:].view(6, 260).copy_(x)
    prints = Fingerprints()
    for t in (
        x.to(device),
        late,
        x.t().contiguous().to(device).t(),
        x.double().to(device),
        torch.zeros(0, 4).to(device),
    ):
        prints.add(t)
    odd = torch.zeros(6 * 260 + 1, dtype=torch.bfloat16, device=device)[1:].view(6, 260).copy_(x)
    prints.add(odd), prints.add(x.bfloat16().to(device))
    found, left = prints.finish(), list(by_kernel)
    assert found[0] == found[1] == found[2] == on_host(x, 0) and found[3] == on_host(x.double(), 0)
    assert found[4] == fingerprint.Fingerprint("0" * 16, (), None) and found[5] == found[6]
    assert left == [(6, 260), (0, 4), (6, 260)]  # float64, nothing, words between words; strides are copied


def test_many_tensors_have_room(device, by_kernel, monkeypatch):
    monkeypatch.setattr(fingerprint, "_NUMBERS", 20)
    prints = Fingerprints()
    prints.batch = 8
    tensors = [tensor((8, n), torch.float32).to(device) for n in range(1, 6)]
    for x in tensors:
        prints.add(x)
    assert len({id(each.numbers) for each in prints._readings}) == 3
    assert [each.parts for each in prints.finish()] == [on_host(x.cpu(), 8).parts for x in tensors]
