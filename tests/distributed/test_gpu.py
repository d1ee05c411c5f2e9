"""Collectives over NCCL on two GPUs: the bits are those of the simulation on the CPU."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from fmtsim.distributed import ReductionState, all_reduce, fp8_hook, simulate
from tests.distributed.checks import fsdp_agrees, gathers_agree, inputs, reductions_agree, refused, same, tokens_arrive
from tests.distributed.warm import BASE, CASES

GPUS = 2
needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < GPUS, reason=f"needs {GPUS} GPUs")


def ddp_agrees(rank, device):
    torch.manual_seed(0)
    net = torch.nn.Linear(24, 40, bias=False).to(device)
    parallel = DistributedDataParallel(net, device_ids=[device])
    state = ReductionState(BASE)
    parallel.register_comm_hook(state, fp8_hook)
    inputs = [torch.randn(6, 24, generator=torch.Generator().manual_seed(r)).to(device) for r in range(GPUS)]
    parallel(inputs[rank]).square().sum().backward()
    each = [torch.autograd.grad(net(x).square().sum(), net.weight)[0].cpu() for x in inputs]
    assert same(net.weight.grad, simulate(each, BASE).values[0])
    assert state.report()["steps"] == 1


def worker(rank, folder):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=GPUS, device_id=device)
    try:
        for check in (reductions_agree, gathers_agree, tokens_arrive):
            check(rank, GPUS, None, device)
        ddp_agrees(rank, device)
        fsdp_agrees(rank, GPUS, device)
        refused("rank 0 has [((3,), 'torch.float32')], rank 1 has [((4,), 'torch.float32')]", all_reduce,
                torch.ones(3 + rank, device=device), "msamp")  # fmt: skip
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_simulation_has_the_bits_of_the_cpu(case):
    each = inputs(4, 3)
    if case.nonfinite != "raise":
        each[-1][1][0, 3], each[0][1][1, 1] = float("nan"), float("inf")
    expected = simulate(each, case)
    found = simulate([[x.cuda() for x in one] for one in each], case)
    assert all(same(a, b) for a, b in zip(found.values, expected.values, strict=True))
    assert [c.to_dict() for c in found.counts] == [c.to_dict() for c in expected.counts]


@needs_gpus
def test_gpu_ranks_and_the_simulation_give_the_same_bits(tmp_path):
    mp.spawn(worker, args=(str(tmp_path),), nprocs=GPUS)
