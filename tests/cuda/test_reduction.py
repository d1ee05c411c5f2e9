# SPDX-License-Identifier: Apache-2.0
"""Kernels of reductions, all ranks in one process: bits and counts are the simulation's, on the host and on a GPU."""

import dataclasses
import math
from unittest import mock

import pytest
import torch

import fmtsim
from fmtsim import cuda
from fmtsim.casts import ops
from fmtsim.cuda.cast.reduction_stages import ReductionStages, covers_reduction
from fmtsim.distributed import AutoFactor, get_reduction
from fmtsim.distributed.arithmetic import Batch, Hop, canonical, factors_of
from fmtsim.distributed.collective import Stages, stages_of
from fmtsim.distributed.peers import TOPS_BYTES as MEMORY_BEGINS
from fmtsim.distributed.peers import Peers
from fmtsim.distributed.simulated_reduce import simulate_batches
from fmtsim.formats.scaling import Scaling
from fmtsim.rounding.modes import Rounding
from tests.support.bits import assert_same_bits
from tests.support.reductions import BASE, gradients

STOCHASTIC = Rounding(mode="stochastic")
MSAMP = get_reduction("msamp")
CASES = {
    "ring": (MSAMP, 2),
    "ring of 3": (dataclasses.replace(BASE, format=fmtsim.get_format("e5m2"), overflow="ieee", average=False), 3),
    "tree of 5": (dataclasses.replace(BASE, algorithm="tree", overflow="ieee"), 5),
    "int8": (dataclasses.replace(MSAMP, format=fmtsim.get_format("int8"), algorithm="tree"), 2),
    "stochastic ring": (dataclasses.replace(BASE, rounding=STOCHASTIC, seed=9), 3),
    "stochastic tree": (dataclasses.replace(MSAMP, rounding=STOCHASTIC, seed=9, algorithm="tree"), 3),
    "automatic factor": (get_reduction("fp8lm"), 2),
    "no scale, a sum": (dataclasses.replace(BASE, scaling=None, average=False), 2),
    "one": (get_reduction("fp8lm_pre"), 1),
}


def batches_of(ranks, sizes, dtype, rows=1):
    """Return matrices whose tensors differ in magnitude, with NaN, Inf, zeros of both signs and a tensor of zeros."""
    columns = sum(sizes)
    each = gradients(ranks, rows * columns, 7)
    for rank, x in enumerate(each):
        view = x.view(rows, columns)
        for i, part in enumerate(view.split(sizes, 1)):
            part *= 4.0 ** (5 * i - 7)
        view[:, sum(sizes[:1]) : sum(sizes[:2])] *= 0.0
        if columns > 9:
            view[0, -1 - rank], view[-1, -2 - rank] = math.inf, math.nan
    return [Batch(x.to(dtype).view(rows, columns), tuple(sizes)) for x in each]


def mu_of(reduction, device="cpu"):
    return torch.tensor(3.0, device=device) if reduction.auto is not None else None


def run(make, batches, reduction, call, out_dtype, scatter):
    """Run the stages of all ranks in step, and return results, counts, largest magnitudes, and what travelled."""
    ranks, hop = len(batches), Hop(reduction, call)
    outs = [b.x.new_full((b.x.numel() // (ranks if scatter else 1),), 3.0, dtype=out_dtype) for b in batches]
    stages = [make(batch, hop, rank, ranks, out) for rank, (batch, out) in enumerate(zip(batches, outs, strict=True))]
    own = torch.stack([s.amaxes() for s in stages])
    encode, decode = stages[0].factors(own.amax(0), mu_of(reduction, own.device))
    wires = [s.cast(encode) for s in stages]
    assert all(wire.shape[1] % 16 == 0 for wire in wires)
    sums = torch.stack([s.sum(torch.stack([wire[r] for wire in wires])) for r, s in enumerate(stages)])
    counts = []
    for r, s in enumerate(stages):
        given = wires[0] if ranks == 1 else sums[r : r + 1] if scatter else sums
        counts.append([int(count) for count in s.finish(given, decode)])
    return outs, counts, own.cpu(), torch.cat([*wires, sums]).cpu()


def kernels(batch, hop, rank, ranks, out, peers=None):
    with mock.patch.object(ops, "fused_engine", lambda x: cuda):
        made = stages_of(batch, hop, rank, ranks, out, peers)
    assert isinstance(made, ReductionStages)
    return made


class Linked(Peers):
    """Ranks of one process, which reach each other's memory by its address; nothing to wait for."""

    def __init__(self, rank, memories):
        self.rank, self.size, self._memory = rank, len(memories), memories[rank]
        self._codes_bytes = (len(self._memory) - MEMORY_BEGINS) // (self.size + 1) * self.size
        self._table = torch.tensor([memory.data_ptr() for memory in memories], device=self._memory.device)

    def begin(self, stride):
        assert self.size * stride <= self._codes_bytes

    def _meet(self):
        return self._table.data_ptr()


@pytest.mark.parametrize("name", ["ring", "ring of 3", "tree of 5", "stochastic tree"])
@pytest.mark.parametrize("scatter", [False, True])
def test_ranks_that_read_each_others_memory_have_the_bits_of_the_simulation(device, name, scatter):
    """Every rank's stages in step, twice in the same memory; the second call has other numbers."""
    reduction, ranks = CASES[name]
    size = MEMORY_BEGINS + (ranks + 1) * 8192
    memories = [torch.full((size,), 171, dtype=torch.uint8, device=device) for _ in range(ranks)]
    for call, sizes in enumerate(((1, 130, 0, 5003, 3, 7, 0), (2000, 96))):
        batches = batches_of(ranks, sizes, torch.float32, ranks if scatter else 1)
        values, _ = simulate_batches(batches, reduction, mu_of(reduction), call)
        there = [Batch(batch.x.to(device), batch.sizes) for batch in batches]
        outs = [b.x.new_empty(b.x.numel() // (ranks if scatter else 1)) for b in there]
        peers = [Linked(rank, memories) for rank in range(ranks)]
        hop = Hop(reduction, call)
        stages = [kernels(b, hop, r, ranks, out, peers[r]) for r, (b, out) in enumerate(zip(there, outs, strict=True))]
        tops = [one.amaxes() for one in stages]
        factors = [s.factors(p.largest(t, ""), None) for s, p, t in zip(stages, peers, tops, strict=True)]
        wires = [one.cast(encode) for one, (encode, _) in zip(stages, factors, strict=True)]
        sums = [s.sum(p.exchange(w, "")) for s, p, w in zip(stages, peers, wires, strict=True)]
        for rank, (one, out) in enumerate(zip(stages, outs, strict=True)):
            one.finish(sums[rank][None] if scatter else peers[rank].gather(sums[rank], ""), factors[rank][1])
            assert_same_bits(out, canonical((values[rank] if scatter else values).reshape(-1)), what=rank)


def check(case, sizes, dtype, device, rows=1, out_dtype=torch.float32):
    reduction, ranks = case
    batches = batches_of(ranks, sizes, dtype, rows)
    values, expected = simulate_batches(batches, reduction, mu_of(reduction), 3)
    there = [Batch(batch.x.to(device), batch.sizes) for batch in batches]
    travelled = []
    for make, given in ((kernels, there), (Stages, batches)):
        outs, counts, *rest = run(make, given, reduction, 3, out_dtype, rows > 1)
        for rank, (out, count) in enumerate(zip(outs, counts, strict=True)):
            row = values[rank] if rows > 1 else values
            assert_same_bits(out, canonical(row.reshape(-1).to(out_dtype)), what=(make, rank))
            told = list(expected[rank].to_dict().values())
            assert count[3:] == told[3:] and (rows > 1 or count[:3] == told[:3]), (make, rank)
        travelled.append(rest)
        if rows > 1:
            assert [sum(c[i] for c in counts) for i in range(3)] == told[:3]
    assert all(map(torch.equal, *travelled))  # ranks may differ in what they run
    return values


@pytest.mark.parametrize("name", CASES)
def test_kernels_have_the_bits_and_counts_of_the_simulation(device, name):
    """Tensors of several sizes: chunks of whole vectors, and sizes that no number of ranks divides."""
    ranks = CASES[name][1]
    found = check(CASES[name], (ranks * 4 * 1500,), torch.float32, device)
    assert int((found != 0).sum()) > 500
    check(CASES[name], (1, 130, 0, 5003, 3, 7, 0), torch.float32, device)
    check(CASES[name], (2,), torch.float32, device)
    if name != "one":
        check(CASES[name], (30, 3, 7), torch.bfloat16, device, rows=ranks, out_dtype=torch.bfloat16)


def test_half_precision_and_memory_that_is_not_aligned(device):
    check(CASES["ring"], (4000, 96), torch.float16, device)
    x = torch.arange(1, 4098, dtype=torch.float32, device=device)[1:]
    assert x.data_ptr() % 16
    batches = [Batch(x[None], (4096,)), Batch(-x[None].flip(1), (4096,))]
    outs, *_ = run(kernels, batches, MSAMP, 0, torch.float32, False)
    assert_same_bits(outs[0], simulate_batches([Batch(b.x.cpu(), b.sizes) for b in batches], MSAMP, None)[0][0])


RULES = (
    BASE.scaling,
    Scaling(),
    Scaling(arithmetic="multiply", margin=3),
    Scaling(arithmetic="encode", multiplier=1.5),
    Scaling(arithmetic="double", power_of_two="floor", eps=1e-12, eps_rule="statistic"),
    Scaling(arithmetic="reciprocal", eps=1e-6, eps_rule="sum", top=2.0**-10),
    Scaling(arithmetic="reciprocal", power_of_two="ceil", eps=2.0**-20, eps_rule="scale"),
)


@pytest.mark.parametrize("scaling", RULES, ids=range(len(RULES)))
def test_factors_of_tensors_are_those_of_operators(device, scaling):
    """Largest magnitudes of all sizes: zero, the smallest and the largest, powers of two and their neighbours."""
    bits = torch.arange(1 << 10, dtype=torch.int64) * 0x1FE017 % 0x7F800000
    powers = torch.arange(255)[:, None] * (1 << 23) + torch.tensor([-1, 0, 1])
    ends = torch.tensor([0, 1, 0x7F7FFFFF])
    tops = torch.cat([bits, powers.clamp(min=0).flatten(), ends]).int().view(torch.float32)
    for factor, average, name in (("sqrt", True, "e4m3"), ("pre", False, "e5m2"), ("auto", True, "int8")):
        auto = AutoFactor() if factor == "auto" else None
        reduction = dataclasses.replace(MSAMP, scaling=scaling, factor=factor, auto=auto, average=average,
                                        format=fmtsim.get_format(name))  # fmt: skip
        x = torch.ones(1, len(tops), device=device)
        stages = kernels(Batch(x, (1,) * len(tops)), Hop(reduction), 0, 3, torch.empty_like(x[0]))
        found = stages.factors(tops.to(device), mu_of(reduction, device))
        assert_same_bits(torch.stack(found), torch.stack(factors_of(tops, reduction, 3, mu_of(reduction))), what=factor)


def test_what_kernels_leave_to_operators():
    def covers(ranks=2, dtype=torch.float32, out=torch.float32, **changes):
        reduction = dataclasses.replace(MSAMP, **changes)
        x, y = torch.ones(1, 8, dtype=dtype), torch.ones(8, dtype=out)
        return covers_reduction(Hop(reduction).spec, reduction.scaling, x, ranks, y)

    assert covers() and covers(64) and covers(dtype=torch.bfloat16, out=torch.bfloat16)
    assert covers(rounding=STOCHASTIC) and covers(format=fmtsim.get_format("e5m2"))
    assert not covers(65) and not covers(dtype=torch.float64) and not covers(out=torch.float16)
    for name in ("bf16", "fp32", "e2m1", "int6"):
        assert not covers(format=fmtsim.get_format(name))
    assert not covers(rounding=Rounding(mode="up")) and covers(scaling=None)
    assert not covers(scaling=Scaling(statistic="one")) and not covers(scaling=Scaling(power_of_two="log2"))
    assert not covers(format=dataclasses.replace(fmtsim.get_format("int8"), name="strict", nan_policy="error"))
