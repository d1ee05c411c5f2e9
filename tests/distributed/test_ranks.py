"""Collectives on four processes, and on two of them, against the simulation; hooks of DDP and FSDP2; errors."""

import dataclasses
import math
import multiprocessing
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fmtsim
from fmtsim.distributed import (
    AutoFactor,
    Reduction,
    ReductionState,
    all_gather,
    all_reduce,
    dispatch,
    fp8_hook,
    hook_fsdp,
    reduce_scatter,
    simulate,
)
from fmtsim.distributed.arithmetic import Batch
from fmtsim.distributed.gather import HALO
from fmtsim.distributed.simulate import simulate_batches
from fmtsim.errors import ArgumentError, CollectiveError
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.cast import cast
from tests.distributed.warm import BASE, CASES, E4M3, gradients

# Processes fork from a server that has imported all this once and has compiled its kernels.
multiprocessing.set_forkserver_preload(["tests.distributed.preload", "tests.distributed.test_ranks"])


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def inputs(ranks, seed):
    """Return two tensors a rank, bfloat16, with NaN and Inf in the second."""
    first, second = gradients(ranks, 37, seed), gradients(ranks, 10, seed + 100)
    return [[a.bfloat16(), b.reshape(2, 5).bfloat16()] for a, b in zip(first, second, strict=True)]


def reductions_agree(rank, size, group):
    for i, reduction in enumerate(CASES):
        each = inputs(size, i)
        if reduction.nonfinite != "raise":
            each[-1][1][0, 3], each[0][1][1, 1] = math.nan, math.inf
        expected = simulate(each, reduction, call=i)
        found = all_reduce(each[rank], reduction, call=i, group=group)
        assert all(same(a, b) for a, b in zip(found.values, expected.values, strict=True)), reduction
        assert found.counts.to_dict() == expected.counts[rank].to_dict(), reduction
        matrices = [torch.stack(gradients(size, 11, i + 50 * r)) for r in range(size)]
        batches = [Batch(x, (4, 7)) for x in matrices]
        mu = torch.tensor(1.0) if reduction.auto else None
        values, counts = simulate_batches(batches, reduction, mu, i)
        part = reduce_scatter(matrices[rank], reduction, sizes=(4, 7), call=i, group=group)
        assert same(part.values[0], values[rank]), reduction
        assert part.counts.to_dict() == counts[rank].to_dict(), reduction


def gathers_agree(rank, size, group):
    for name in ("int8", "e4m3", "int4"):
        shards = [x.reshape(3, 7) for x in gradients(size, 21, 3)]
        whole = torch.cat(shards)
        fmt = fmtsim.get_format(name)
        made = cast(whole, fmt, HALO, Rounding(), fmt.default_overflow)
        expected = made.values(whole.shape).reshape(size, 3, 7)
        assert same(all_gather(shards[rank], name, group=group), expected), name
    blocks = [x.reshape(2, 40) for x in gradients(size, 80, 4)]
    for name in ("mxfp8_e4m3", "mxfp4", "nvfp4", "logfmt8", "e5m2"):
        expected = torch.stack([fmtsim.quantize(x, name, out_dtype=torch.float32, pad=True) for x in blocks])
        assert same(all_gather(blocks[rank], name, scaling=None, group=group), expected), name
    spoiled = torch.ones(6)
    spoiled[0] = math.inf if rank == size - 1 else 1.0
    first, second = all_gather(spoiled, "int8", sizes=(2, 4), group=group).split([2, 4], 1)
    assert bool(first.isnan().all()) and bool((second == 1).all())
    only = all_gather(spoiled, "e4m3", group=group)
    assert int(only.isnan().sum()) == 1 and bool(only[-1, 0].isnan())


def tokens_arrive(rank, size, group):
    """Send (sender + receiver) % 3 rows of 200 numbers from each rank to each."""
    counts = [[(a + b) % 3 for b in range(size)] for a in range(size)]
    rows = [torch.stack([*gradients(sum(counts[a]) + 1, 200, 20 + a)])[: sum(counts[a])] for a in range(size)]
    for name in ("logfmt8", "logfmt10", "e4m3", "mxfp4"):
        expected = []
        for a in range(size):
            values = fmtsim.quantize(rows[a], name, out_dtype=torch.float32, pad=True)
            expected.append(values.split(counts[a])[rank])
        found = dispatch(rows[rank], counts[rank], name, group=group)
        assert same(found, torch.cat(expected)), name
    nothing = dispatch(torch.empty(0, 16, dtype=torch.bfloat16), [0] * size, group=group)
    assert nothing.shape == (0, 16) and nothing.dtype == torch.bfloat16


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))


def loss_of(net, rank, step):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    return (net(x) * (1 + rank)).square().mean()


def local_gradients(size, step, weights):
    """Return the gradients of every rank, parameter by parameter, computed here."""
    found = []
    for rank in range(size):
        net = model()
        net.load_state_dict(weights)
        loss_of(net, rank, step).backward()
        found.append([p.grad for p in net.parameters()])
    return found


def ddp_agrees(rank, size):
    auto = AutoFactor(threshold=0.0, growth_steps=10)
    state = ReductionState(Reduction(format=E4M3, factor="auto", auto=auto))
    net = DistributedDataParallel(model())
    places, seen = {id(p): i for i, p in enumerate(net.parameters())}, []

    def noted(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append([places[id(p)] for p in bucket.parameters()])
        return fp8_hook(state, bucket)

    net.register_comm_hook(state, noted)
    mu, middle = torch.tensor(1.0), None
    for step in range(3):
        net.zero_grad()
        loss_of(net, rank, step).backward()
        each = local_gradients(size, step, net.module.state_dict())
        (order,) = seen  # one bucket, in an order that torch changes behind the first step
        seen.clear()
        expected = simulate([[g[i] for i in order] for g in each], state.reduction, mu=mu)
        for i, value in zip(order, expected.values, strict=True):
            assert same(list(net.parameters())[i].grad, value), (step, i)
        counts = expected.counts[rank]
        mu = auto.next(mu, counts.saturated, counts.elements)
        assert state.report() == {"steps": step + 1, "mu": float(mu), **counts.to_dict()}
        if step == 1:
            middle = state.state_dict()
    again = ReductionState(state.reduction)
    again.load_state_dict(middle)
    assert (again.steps, again.calls, float(again.mu)) == (2, 2, middle["mu"])
    refused("the state is of another reduction", ReductionState("msamp").load_state_dict, middle)
    refused("this state has steps; pass what", again.load_state_dict, {"steps": 3})
    refused("state=3 is not a ReductionState", fp8_hook, 3, None)


def nan_is_refused_and_nothing_written(rank, size):
    state = ReductionState(dataclasses.replace(BASE, nonfinite="raise"))
    before = state.state_dict()
    x = torch.full((3,), math.nan if rank == 1 else 1.0)
    refused("NaN or Inf elements (3 on rank 1)", all_reduce, x, state.reduction)
    net = DistributedDataParallel(model())
    net.register_comm_hook(state, fp8_hook)
    loss = loss_of(net, rank, 0) * (math.nan if rank == 1 else 1.0)
    refused("on rank 1) and nonfinite='raise'; nothing was reduced", loss.backward)
    assert state.state_dict() == before
    dist.barrier()


def fsdp_agrees(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net, plain = model(), model()
    mesh = init_device_mesh("cpu", (size,))
    refused("Sequential has no FSDP2 unit; call torch's fully_shard", hook_fsdp, net)
    for module in (net[0], net):
        fully_shard(module, mesh=mesh)
    state = ReductionState(BASE)
    refused("mxfp4 has scales of its own; pass scaling=None", hook_fsdp, net, gather="mxfp4")
    hook_fsdp(net, state, gather="int8")
    weights = {}
    for name, weight in plain.state_dict().items():
        made = cast(weight.reshape(1, -1), fmtsim.get_format("int8"), HALO, Rounding(), "saturate")
        weights[name] = made.values((1, weight.numel())).reshape(weight.shape)
    loss_of(net, rank, 0).backward()
    state.step()
    each = local_gradients(size, 0, weights)
    for unit in ((0, 1), (2, 3)):
        expected = fsdp_bits([[g[i] for i in unit] for g in each], size)
        for i, rows in zip(unit, expected, strict=True):
            parameter = list(net.parameters())[i]
            mine = parameter.grad.to_local()
            own = rows.split(-(-len(rows) // size))
            assert same(mine, own[rank] if rank < len(own) else mine.new_empty(mine.shape)), i
    full = [p.full_tensor() for p in net.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(full, plain.parameters(), strict=True))  # shards stay as they were
    assert state.report()["steps"] == 1 and state.report()["elements"] == sum(
        -(-len(p) // size) * size * (p.numel() // len(p)) for p in full
    )


def fsdp_bits(each, size):
    """Reduce the parameters of a unit together: each padded to equal shards, one scale each."""
    batches = []
    for tensors in each:
        padded = [nn.functional.pad(x.reshape(len(x), -1), (0, 0, 0, -len(x) % size)) for x in tensors]
        rows = [x.reshape(size, -1) for x in padded]
        batches.append(Batch(torch.cat(rows, 1), tuple(x.shape[1] for x in rows)))
    values, _ = simulate_batches(batches, BASE, None)
    parts = values.split(batches[0].sizes, 1)
    return [p.reshape(-1, *x.shape[1:])[: len(x)] for p, x in zip(parts, each[0], strict=True)]


def refused(message, verb, *arguments, error=ArgumentError, **options):
    try:
        verb(*arguments, **options)
    except error as found:
        assert message in str(found), str(found)
    else:
        raise AssertionError(f"{verb} did not raise {message!r}")


def disagreement_has_a_name(rank, size):
    other = rank == 2
    refused("rank 0 has [((3,), 'torch.float32')], rank 2 has [((4,), 'torch.float32')]", all_reduce,
            torch.ones(4 if other else 3), "msamp")  # fmt: skip
    refused("'torch.float32')], rank 2 has [((3,), 'torch.bfloat16')]", all_reduce,
            torch.ones(3).to(torch.bfloat16 if other else torch.float32), "msamp")  # fmt: skip
    refused("rank 0 has ring of e4m3, factor sqrt", all_reduce, torch.ones(3), "bf16" if other else "msamp")
    refused("rank 0 has all_reduce, rank 2 has reduce_scatter", reduce_scatter if other else all_reduce,
            torch.ones(4), "msamp")  # fmt: skip
    refused("counts=[1, 1] do not part x of shape (2, 16) among 4 ranks", dispatch, torch.ones(2, 16), [1, 1])
    refused(
        "nvfp4 has a scale of the whole tensor, but rows are sent apart", dispatch, torch.ones(4, 16), [1] * 4, "nvfp4"
    )
    refused("5 elements do not divide among 4 ranks; pad them", reduce_scatter, torch.ones(5), "msamp")
    refused("sizes=(3,) sum to 3, not to the 2 columns", reduce_scatter, torch.ones(8), "msamp", sizes=(3,))
    refused("sizes=(3,) sum to 3, not to the 8 elements", all_gather, torch.ones(8), "int8", sizes=(3,))
    assert all_reduce(torch.ones(4), "bf16").values[0].tolist() == [1.0] * 4  # the group still works


def start(rank, size, folder, seconds=60):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )


def worker(rank, folder):
    start(rank, 4, folder)
    try:
        pair = dist.new_group([1, 3])
        if rank in (1, 3):
            for check in (reductions_agree, gathers_agree, tokens_arrive):
                check(rank // 2, 2, pair)
        else:
            refused("this process is not part of the group", all_reduce, torch.ones(3), "msamp", group=pair)
        for check in (reductions_agree, gathers_agree, tokens_arrive):
            check(rank, 4, None)
        for check in (disagreement_has_a_name, ddp_agrees, fsdp_agrees, nan_is_refused_and_nothing_written):
            check(rank, 4)
    finally:
        dist.destroy_process_group()


def test_processes_and_the_simulation_give_the_same_bits(tmp_path):
    mp.start_processes(worker, args=(str(tmp_path),), nprocs=4, start_method="forkserver")


def mourner(rank, folder):
    """Rank 2 ends between two collectives, and rank 1 in the middle of the next."""
    start(rank, 3, folder, seconds=3)
    x = torch.ones(6)
    assert same(all_reduce(x, "msamp").values[0], simulate([x] * 3, "msamp").values[0])
    if rank == 2:
        os._exit(0)
    state = ReductionState("fp8lm")
    before = state.state_dict()
    try:
        state.reduce(Batch(x.reshape(1, 6), (6,)), ("x",))
    except CollectiveError as error:
        assert "rank 2 did not answer in the comparison of arguments" in str(error), error
        assert "Nothing was written; restart the ranks from a checkpoint. torch says: " in str(error)
    else:
        raise AssertionError("a rank was gone, and nobody noticed")
    assert state.state_dict() == before
    os._exit(0)  # gloo cannot say goodbye to a rank that is gone


def test_a_rank_that_ends_is_named(tmp_path):
    mp.start_processes(mourner, args=(str(tmp_path),), nprocs=3, start_method="forkserver")


def test_without_ranks():
    message = "a collective needs ranks; call torch.distributed.init_process_group first"
    for verb in (lambda: all_reduce(torch.ones(3), "msamp"), lambda: ReductionState("msamp")):
        with pytest.raises(ArgumentError, match=message):
            verb()
