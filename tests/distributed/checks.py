"""What holds on ranks of any backend and device: the bits are those of one process on the CPU."""

import dataclasses
import math

import torch
from torch import nn

import fmtsim
from fmtsim.distributed import ReductionState, all_gather, all_reduce, dispatch, hook_fsdp, reduce_scatter, simulate
from fmtsim.distributed.arithmetic import Batch
from fmtsim.distributed.gather import HALO
from fmtsim.distributed.simulate import simulate_batches
from fmtsim.errors import ArgumentError
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.cast import cast
from tests.distributed.warm import BASE, CASES, gradients


def refused(message, verb, *arguments, error=ArgumentError, **options):
    try:
        verb(*arguments, **options)
    except error as found:
        assert message in str(found), str(found)
    else:
        raise AssertionError(f"{verb} did not raise {message!r}")


def same(a, b):
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


def inputs(ranks, seed):
    """Return two tensors a rank, bfloat16, with NaN and Inf in the second."""
    first, second = gradients(ranks, 37, seed), gradients(ranks, 10, seed + 100)
    return [[a.bfloat16(), b.reshape(2, 5).bfloat16()] for a, b in zip(first, second, strict=True)]


def reductions_agree(rank, size, group, device="cpu"):
    for i, reduction in enumerate(CASES):
        each = inputs(size, i)
        if reduction.nonfinite != "raise":
            each[-1][1][0, 3], each[0][1][1, 1] = math.nan, math.inf
        expected = simulate(each, reduction, call=i)
        found = all_reduce([x.to(device) for x in each[rank]], reduction, call=i, group=group)
        assert all(same(a, b) for a, b in zip(found.values, expected.values, strict=True)), reduction
        assert found.counts.to_dict() == expected.counts[rank].to_dict(), reduction
        matrices = [torch.stack(gradients(size, 11, i + 50 * r)) for r in range(size)]
        batches = [Batch(x, (4, 7)) for x in matrices]
        mu = torch.tensor(1.0) if reduction.auto else None
        values, counts = simulate_batches(batches, reduction, mu, i)
        part = reduce_scatter(matrices[rank].to(device), reduction, sizes=(4, 7), call=i, group=group)
        assert same(part.values[0], values[rank]), reduction
        assert part.counts.to_dict() == counts[rank].to_dict(), reduction

    each = [torch.stack(x) for x in zip(*(gradients(size, 50, i) for i in range(4)), strict=True)]
    found = all_reduce(each[rank].to(device), BASE, group=group).values[0]
    planted = (each[::-1], dataclasses.replace(BASE, algorithm="tree")), (each[1:] + each[:1], BASE)
    assert size == 2 or not any(same(found, simulate(*wrong).values[0]) for wrong in planted), "an order that is wrong"


def gathers_agree(rank, size, group, device="cpu"):
    for name in ("int8", "e4m3", "int4"):
        shards = [x.reshape(3, 7) for x in gradients(size, 21, 3)]
        whole = torch.cat(shards)
        fmt = fmtsim.get_format(name)
        made = cast(whole, fmt, HALO, Rounding(), fmt.default_overflow)
        expected = made.values(whole.shape).reshape(size, 3, 7)
        assert same(all_gather(shards[rank].to(device), name, group=group), expected), name
    blocks = [x.reshape(2, 40) for x in gradients(size, 80, 4)]
    for name in ("mxfp8_e4m3", "mxfp4", "nvfp4", "logfmt8", "e5m2"):
        expected = torch.stack([fmtsim.quantize(x, name, out_dtype=torch.float32, pad=True) for x in blocks])
        assert same(all_gather(blocks[rank].to(device), name, scaling=None, group=group), expected), name
    spoiled = torch.ones(6, device=device)
    spoiled[0] = math.inf if rank == size - 1 else 1.0
    first, second = all_gather(spoiled, "int8", sizes=(2, 4), group=group).split([2, 4], 1)
    assert bool(first.isnan().all()) and bool((second == 1).all())
    only = all_gather(spoiled, "e4m3", group=group)
    assert int(only.isnan().sum()) == 1 and bool(only[-1, 0].isnan())


def tokens_arrive(rank, size, group, device="cpu"):
    """Send (sender + receiver) % 3 rows of 200 numbers from each rank to each."""
    counts = [[(a + b) % 3 for b in range(size)] for a in range(size)]
    rows = [torch.stack([*gradients(sum(counts[a]) + 1, 200, 20 + a)])[: sum(counts[a])] for a in range(size)]
    for name in ("logfmt8", "logfmt10", "e4m3", "mxfp4"):
        expected = []
        for a in range(size):
            values = fmtsim.quantize(rows[a], name, out_dtype=torch.float32, pad=True)
            expected.append(values.split(counts[a])[rank])
        found = dispatch(rows[rank].to(device), counts[rank], name, group=group)
        assert same(found, torch.cat(expected)), name
    nothing = dispatch(torch.empty(0, 16, dtype=torch.bfloat16, device=device), [0] * size, group=group)
    assert nothing.shape == (0, 16) and nothing.dtype == torch.bfloat16


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))


def loss_of(net, rank, step, device="cpu"):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
    return (net(x) * (1 + rank)).square().mean()


def local_gradients(size, step, weights, device="cpu"):
    """Return the gradients of every rank, parameter by parameter, computed here."""
    found = []
    for rank in range(size):
        net = model().to(device)
        net.load_state_dict(weights)
        loss_of(net, rank, step, device).backward()
        found.append([p.grad.cpu() for p in net.parameters()])
    return found


def fsdp_agrees(rank, size, device="cpu"):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net, plain = model().to(device), model()
    mesh = init_device_mesh(torch.device(device).type, (size,))
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
    loss_of(net, rank, 0, device).backward()
    state.step()
    each = local_gradients(size, 0, weights, device)
    for unit in ((0, 1), (2, 3)):
        expected = fsdp_bits([[g[i] for i in unit] for g in each], size)
        for i, rows in zip(unit, expected, strict=True):
            parameter = list(net.parameters())[i]
            mine = parameter.grad.to_local()
            own = rows.split(-(-len(rows) // size))
            assert same(mine, own[rank] if rank < len(own) else mine.new_empty(mine.shape)), i
    full = [p.full_tensor().cpu() for p in net.parameters()]
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
