"""What holds on ranks of any backend and device: the bits are those of one process on the CPU."""

import math

import torch

import fmtsim
from fmtsim.distributed import all_gather, all_reduce, dispatch, reduce_scatter, simulate
from fmtsim.distributed.arithmetic import Batch
from fmtsim.distributed.gather import HALO
from fmtsim.distributed.simulate import simulate_batches
from fmtsim.errors import ArgumentError
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.cast import cast
from tests.distributed.warm import CASES, gradients


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
