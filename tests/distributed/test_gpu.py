# SPDX-License-Identifier: Apache-2.0
"""Collectives over NCCL on 2, 4 and 8 GPUs: the bits are those of the simulation on the CPU."""

import dataclasses
import math
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import fmtsim
from benchmarks.collectives import gpu_of
from fmtsim.distributed import ReductionState, all_gather, all_reduce, dispatch, fp8_hook, simulate
from fmtsim.distributed.arithmetic import Batch
from fmtsim.support.errors import CollectiveError
from tests.distributed.reduction_checks import HOOKS, VERBS, inputs, refused, same_bits
from tests.distributed.sharded_training import SHARDED
from tests.support.operands import normal
from tests.support.reductions import BASE, CASES, gradients

LIMIT = 60  # seconds, of all processes of a test, where each has a GPU
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ranks_of = pytest.mark.parametrize("size", [2, 4, 8])


def start(rank, size, folder, seconds):
    torch.set_num_threads(1)
    device = gpu_of(rank, size)
    wait = timedelta(seconds=seconds)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=wait)
    return device


def worker(rank, size, folder, names):
    device = start(rank, size, folder, LIMIT / 2)
    for name in names:
        began = time.perf_counter()
        CHECKS[name](rank, size, device)
        if rank == 0:
            print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    dist.destroy_process_group()


def run(target, size, *arguments, limit=LIMIT):
    """Start a process a rank; all of them end in time, or the test fails. Where GPUs are fewer, ranks share them."""
    limit *= math.ceil(size / torch.cuda.device_count())
    processes = mp.spawn(target, args=(size, *arguments), nprocs=size, join=False)
    deadline = time.monotonic() + limit
    try:
        while not processes.join(1):
            assert time.monotonic() < deadline, f"processes hang after {limit} s"
    finally:
        for process in processes.processes:
            process.kill()


def disagreement_has_a_name(rank, size, device):
    """The last rank differs; all say so, and the group still works."""
    last = size - 1
    other, one = rank == last, torch.ones(3, device=device)
    began = time.monotonic()
    refused(f"rank 0 has [((3,), 'torch.float32')], rank {last} has [((4,), 'torch.float32')]", all_reduce,
            torch.ones(3 + other, device=device), "msamp")  # fmt: skip
    refused("rank 0 has ring of e4m3, factor sqrt", all_reduce, one, "bf16" if other else "msamp")
    refused("rank 0 has IntFormat('int8'", all_gather, one, "e4m3" if other else "int8")
    refused(f"rank 0 has 16, rank {last} has 32", dispatch, torch.ones(size, 16 + 16 * other, device=device),
            [1] * size)  # fmt: skip
    assert all_reduce(torch.ones(4, device=device), "bf16").values[0].tolist() == [1.0] * 4
    assert time.monotonic() - began < 30


def groups_are_apart(rank, size, device):
    """A second group of all ranks in between, and groups of one rank."""
    second, singles = dist.new_group([*range(size)]), [dist.new_group([r]) for r in range(size)]
    each = gradients(size, 100_003, 4)
    expected, mine = simulate(each, "msamp").values[0], each[rank].to(device)
    found = [all_reduce(mine, "msamp", group=group).values[0] for group in (None, second, None, second)]
    assert all(same_bits(x, expected) for x in found)
    alone = singles[rank]
    assert same_bits(all_reduce(mine, "msamp", group=alone).values[0], simulate([each[rank]], "msamp").values[0])
    assert same_bits(dispatch(mine[:64].reshape(4, 16), [4], "e4m3", group=alone).cpu(),
                fmtsim.quantize(each[rank][:64].reshape(4, 16), "e4m3"))  # fmt: skip


def a_large_bucket_agrees(rank, size, device):
    """Train on layers whose reductions are long enough that the backward pass overtakes them; the hook never waits."""
    for name in ("fp8lm", "bf16"):
        _large_bucket_agrees(rank, size, device, name)
    torch.cuda.set_sync_debug_mode("error")
    raising = dataclasses.replace(BASE, nonfinite="raise")
    refused("synchronizing", all_reduce, torch.ones(3, device=device), raising, error=RuntimeError)  # a planted wait
    torch.cuda.set_sync_debug_mode("default")


def quiet_hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    torch.cuda.set_sync_debug_mode("error" if state.steps > 1 else "default")  # the first steps make tables
    try:
        return fp8_hook(state, bucket)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _large_bucket_agrees(rank, size, device, name):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(6))).to(device)
    state, parallel = ReductionState(name), DistributedDataParallel(net, bucket_cap_mb=4)
    parallel.register_comm_hook(state, quiet_hook)
    xs = [normal(64, 1024, seed=r).to(device) for r in range(size)]
    for _ in range(3):  # buckets are made anew behind the first pass
        net.zero_grad()
        mu = None if state.mu is None else state.mu.cpu()
        parallel(xs[rank]).square().mean().backward()
    each = [torch.autograd.grad(net(x).square().mean(), list(net.parameters())) for x in xs]
    for i, parameter in enumerate(net.parameters()):
        assert same_bits(parameter.grad, simulate([g[i].cpu() for g in each], name, mu=mu).values[0]), i


CHECKS = {
    **SHARDED,
    "groups": groups_are_apart,
    **VERBS,
    "large buckets": a_large_bucket_agrees,
    "disagreement": disagreement_has_a_name,
    **HOOKS,
}


def mourner(rank, size, folder):
    """The last rank ends between two collectives."""
    device, last = start(rank, size, folder, 5), size - 1
    x = torch.ones(6, device=device)
    assert same_bits(all_reduce(x, "msamp").values[0], simulate([x.cpu()] * size, "msamp").values[0])
    torch.cuda.synchronize()
    if rank == last:
        os._exit(0)
    began = time.monotonic()
    refused(f"rank {last} did not answer in the comparison of arguments; such a rank has ended", all_reduce, x[:5],
            "msamp", error=CollectiveError)  # fmt: skip
    refused(f"rank {last} did not answer in the exchange of row counts", ReductionState("msamp").ranks.gather_objects,
            3, "the exchange of row counts", error=CollectiveError)  # fmt: skip
    assert time.monotonic() - began < 20
    os._exit(0)  # NCCL cannot say goodbye to a rank that is gone


def widow(rank, size, folder):
    """The last rank ends when the ranks have agreed: the others are in the midst of a reduction."""
    device = start(rank, size, folder, 5)
    state, x = ReductionState("fp8lm"), torch.ones(1, 6, device=device)
    state.reduce(Batch(x, (6,)), ("x",))
    state.step()
    torch.cuda.synchronize()
    if rank == size - 1:
        os._exit(0)
    state.reduce(Batch(x, (6,)), ("x",))
    torch.cuda.synchronize()
    os._exit(0)


@on_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_simulation_has_the_bits_of_the_cpu(case):
    each = inputs(4, 3)
    if case.nonfinite != "raise":
        each[-1][1][0, 3], each[0][1][1, 1] = float("nan"), float("inf")
    expected = simulate(each, case)
    found = simulate([[x.cuda() for x in one] for one in each], case)
    assert all(same_bits(a, b) for a, b in zip(found.values, expected.values, strict=True))
    assert [c.to_dict() for c in found.counts] == [c.to_dict() for c in expected.counts]


@on_gpu
@ranks_of
@pytest.mark.parametrize(
    "names", [(*VERBS, "groups"), (*HOOKS, "large buckets", "disagreement")], ids=["verbs", "hooks"]
)
def test_gpu_ranks_and_the_simulation_give_the_same_bits(names, size, tmp_path):
    run(worker, size, str(tmp_path), names)


@on_gpu
@ranks_of
def test_gpu_sharded_training_under_recipes_is_that_of_one_process(size, tmp_path):
    run(worker, size, str(tmp_path), tuple(SHARDED)[: 1 + (size > 2)], limit=4 * LIMIT)


@on_gpu
@ranks_of
def test_gpu_a_rank_that_ends_is_named(size, tmp_path):
    run(mourner, size, str(tmp_path))


@pytest.mark.slow  # torch 2.11's watchdog takes a minute to write down what ran
@on_gpu
@ranks_of
def test_gpu_a_rank_that_ends_in_a_reduction_ends_the_others(size, tmp_path):
    """NCCL's watchdog ends the process when the group's timeout is over and it has written down what ran."""
    with pytest.raises((mp.ProcessExitedException, mp.ProcessRaisedException), match=r"rocess \d terminated"):
        run(widow, size, str(tmp_path), limit=2 * LIMIT)
