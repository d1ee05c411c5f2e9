# SPDX-License-Identifier: Apache-2.0
"""``fmtsim.bisect`` of two launches: the line where their values part, by kernels whose lines are known to part."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch

import fmtsim
from fmtsim.support.errors import ArgumentError

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def twice(value):
        return value + value

    @triton.jit
    def softmax(x, y, n, SIZE: tl.constexpr):
        row, i = tl.program_id(0), tl.arange(0, SIZE)
        values = tl.load(x + row * n + i, i < n, -float("inf")).to(tl.float32)
        values = twice(values - tl.max(values, 0))
        weights = tl.exp(values)
        total = tl.sum(weights, 0)
        tl.store(y + row * n + i, (weights / total).to(y.dtype.element_ty), i < n)

    @triton.jit
    def squares(x, y, n, SIZE: tl.constexpr):
        i = tl.arange(0, SIZE)
        total = tl.zeros((SIZE,), tl.float32)
        for start in range(0, n, SIZE):
            value = tl.load(x + start + i)
            total = total + value * value
        tl.store(y + i, total, i < 16)

    @triton.jit
    def moved(x, y, SIZE: tl.constexpr, BY: tl.constexpr):
        i = tl.arange(0, SIZE)
        value = tl.load(x + (i + BY) % SIZE) * 2.0
        tl.store(y + i, value + 1.0)

    @triton.jit
    def exponentials(x, y, n, SIZE: tl.constexpr, FAST: tl.constexpr):
        i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        value = tl.load(x + i, i < n) / (3.0 if FAST else 3.00001)
        tl.store(y + i, tl.exp(value), i < n)

    @triton.jit
    def atomic(x, y, SIZE: tl.constexpr):
        tl.atomic_add(y, tl.sum(tl.load(x + tl.program_id(0) * SIZE + tl.arange(0, SIZE))))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def line(kernel, text: str) -> str:
    """Return where a line of a kernel is."""
    lines = kernel.raw_src if isinstance(kernel.raw_src, list) else kernel.raw_src.splitlines()
    number = kernel.starting_line_number + next(i for i, at in enumerate(lines) if text in at)
    return f"test_bisect_launches.py:{number}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reduction_parts_by_warps(dtype):
    x, y = random(64, 1000).to(dtype), torch.full((64, 1000), 7.0)
    four = partial(fmtsim.launch, softmax, 64, x, y, 1000, SIZE=1024, num_warps=4)
    found = fmtsim.bisect(four, partial(four, num_warps=8))
    assert y.eq(7).all()  # bisect runs on copies
    assert found.line == line(softmax, "total =") and found.source == "total = tl.sum(weights, 0)" and not found.equal
    assert found.distinct == ((1, 1), (1, 1)) and found.first.actual_code != found.first.expected_code
    # the values that the line has are those of the launches themselves
    for warps, shown in zip((4, 8), found.first.values, strict=True):
        record = fmtsim.launch(
            softmax, 64, x, y.clone(), 1000, SIZE=1024, num_warps=warps, watch="total", watch_block=found.block
        )
        assert record.watched[-1].values.item() == shown
    row, *_ = found.comparison.first.index
    assert found.block == (row, 0, 0) and found.tensor == "y" and found.first.hex[0] in str(found)
    assert fmtsim.bisect(four, four).equal and "no bit differs" in str(fmtsim.bisect(four, four))
    assert found.to_dict()["line"] == found.line
    # elements that a mask leaves out are values more, and no difference
    x, y = random(64, 1024), torch.empty(64, 1024)
    runs = (partial(fmtsim.launch, softmax, 64, x, y, 1024, SIZE=256 * warps, num_warps=warps) for warps in (4, 8))
    found = fmtsim.bisect(*runs)
    assert found.line == line(softmax, "total =") and "weights = tl.exp(values)" not in str(found)
    assert f"{line(softmax, 'weights =')} has more values in one of the launches" in found.note


def test_rounds_of_loops_and_fused_products():
    x, y = random(4096), torch.empty(256)
    fused = partial(fmtsim.launch, squares, 1, x, y, 4096, SIZE=256)
    found = fmtsim.bisect(fused, partial(fused, enable_fp_fusion=False))
    assert found.line == line(squares, "total = total") and found.round == 1  # the first one adds to zero
    assert "0 of 16 elements" not in str(found) and found.note == ""
    found = fmtsim.bisect(fused, partial(fused, SIZE=128))
    assert found.line == line(squares, "total = total") and found.round is None
    assert "runs another number of rounds in a and b" in found.note


def test_other_grids_and_the_same_values_elsewhere():
    x, y = random(512), torch.empty(512)
    first = partial(fmtsim.launch, exponentials, 4, x, y, 512, SIZE=128, FAST=True)
    found = fmtsim.bisect(first, partial(fmtsim.launch, exponentials, 8, x, y, 512, SIZE=64, FAST=False))
    assert found.line == line(exponentials, "value =") and found.block is None and "the grids differ" in found.note
    assert fmtsim.bisect(first, partial(fmtsim.launch, exponentials, 8, x, y, 512, SIZE=64, FAST=True)).equal
    found = fmtsim.bisect(*(partial(fmtsim.launch, moved, 1, x, y, SIZE=512, BY=by) for by in (0, 1)))
    assert not found.equal and not found.line and "each writes the same set of values" in str(found)


def test_inputs_and_what_is_refused():
    x, y = random(4, 64), torch.zeros(4, 64)
    run = partial(fmtsim.launch, softmax, 4, x, y, 64, SIZE=64)
    found = fmtsim.bisect(run, partial(fmtsim.launch, softmax, 4, x + 1, y, 64, SIZE=64))
    assert found.tensor == "x" and found.note == "x differed before the launches" and not found.line
    found = fmtsim.bisect(run, partial(fmtsim.launch, softmax, 4, x, y + 1, 64, SIZE=64))
    assert found.equal and "both began with a's" in found.note
    add = partial(fmtsim.launch, atomic, 4, random(4, 4096), torch.zeros(1), SIZE=4096)
    for pair, message in (
        ((run(), run), r"run_a is a launch that has run, .* pass functools.partial\(fmtsim.launch"),
        ((run, y), "run_b=.* is not a launch; .*compare with fmtsim.compare"),
        ((run, partial(torch.add, x)), "run_b=.* is not a launch"),
        ((partial(fmtsim.launch), run), "run_a: missing a required argument: 'kernel'"),
        ((run, add), "different kernels"),
        ((run, partial(fmtsim.launch, softmax, 4, x[:2], y, 64, SIZE=64)), "tensors differ in number, shape"),
        ((run, partial(run, num_wraps=8)), "no argument 'num_wraps'.*did you mean 'num_warps'"),
        ((add, partial(add, num_warps=8)), "the kernel has atomics, so that a block may depend on others"),
    ):
        with pytest.raises(ArgumentError, match=message):
            fmtsim.bisect(*pair)
