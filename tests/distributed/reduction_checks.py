# SPDX-License-Identifier: Apache-2.0
"""What holds on ranks of any backend and device: the bits are those of one process on the CPU."""

import copy
import dataclasses
import itertools
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fmtsim
from fmtsim.distributed import (
    AutoFactor,
    Reduction,
    ReductionState,
    TensorParallel,
    all_gather,
    all_reduce,
    dispatch,
    fp8_hook,
    hook_fsdp,
    parallelize,
    reduce_scatter,
    simulate,
)
from fmtsim.distributed.arithmetic import Batch
from fmtsim.distributed.gather import HALO
from fmtsim.distributed.simulated_reduce import simulate_batches
from fmtsim.nn import convert, flash_attention_3
from fmtsim.recipes import Recipe
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.scaled_cast import cast
from fmtsim.support.errors import ArgumentError
from tests.support.bits import assert_same_bits, same_bits
from tests.support.operands import normal
from tests.support.reductions import BASE, CASES, E4M3, gradients

ORDERS, FACTORS = ("ring", "tree"), ("pre", "post", "sqrt", "auto")
FORMATS, MODES = ("e4m3", "e5m2"), ("nearest_even", "stochastic")


def refused(message, verb, *arguments, error=ArgumentError, **options):
    try:
        verb(*arguments, **options)
    except error as found:
        assert message in str(found), str(found)
    else:
        raise AssertionError(f"{verb} did not raise {message!r}")


def inputs(ranks, seed):
    """Return two tensors a rank, bfloat16, with NaN and Inf in the second."""
    first, second = gradients(ranks, 37, seed), gradients(ranks, 10, seed + 100)
    return [[a.bfloat16(), b.reshape(2, 5).bfloat16()] for a, b in zip(first, second, strict=True)]


def reductions_agree(rank, size, group, device="cpu"):
    for i, reduction in enumerate(CASES):
        tensors_of = inputs(size, i)
        if reduction.nonfinite != "raise":
            tensors_of[-1][1][0, 3], tensors_of[0][1][1, 1] = math.nan, math.inf
        expected = simulate(tensors_of, reduction, call=i)
        reduced = all_reduce([x.to(device) for x in tensors_of[rank]], reduction, call=i, group=group)
        assert all(same_bits(a, b) for a, b in zip(reduced.values, expected.values, strict=True)), reduction
        assert reduced.counts.to_dict() == expected.counts[rank].to_dict(), reduction
        matrices = [torch.stack(gradients(size, 11, i + 50 * r)) for r in range(size)]
        batches = [Batch(x, (4, 7)) for x in matrices]
        mu = torch.tensor(1.0) if reduction.auto else None
        values, counts = simulate_batches(batches, reduction, mu, i)
        part = reduce_scatter(matrices[rank].to(device), reduction, sizes=(4, 7), call=i, group=group)
        assert_same_bits(part.values[0], values[rank], what=reduction)
        assert part.counts.to_dict() == counts[rank].to_dict(), reduction

    tensors_of = [torch.stack(x) for x in zip(*(gradients(size, 50, i) for i in range(4)), strict=True)]
    reduced = all_reduce(tensors_of[rank].to(device), BASE, group=group).values[0]
    planted = (tensors_of[::-1], dataclasses.replace(BASE, algorithm="tree")), (tensors_of[1:] + tensors_of[:1], BASE)
    assert size == 2 or not any(same_bits(reduced, simulate(*wrong).values[0]) for wrong in planted), (
        "an order that is wrong"
    )


def factors_agree(rank, size, group, device="cpu"):
    """Both orders, all factors, two formats, two roundings; sizes that divide by no number of ranks, NaN and Inf."""
    for i, (algorithm, factor, name, mode) in enumerate(itertools.product(ORDERS, FACTORS, FORMATS, MODES)):
        auto, mu = (AutoFactor(), 0.3) if factor == "auto" else (None, None)
        reduction = Reduction(format=fmtsim.get_format(name), factor=factor, auto=auto, algorithm=algorithm,
                              rounding=Rounding(mode=mode), seed=i)  # fmt: skip
        tensors_of = [[x.reshape(7, 13), x[:5].bfloat16().float()] for x in gradients(size, 91, i)]
        tensors_of[i % size][0][2, 3], tensors_of[-1][1][1] = math.inf, math.nan
        expected = simulate(tensors_of, reduction, mu=mu, call=i)
        strided = [x.to(device).repeat_interleave(2, -1)[..., ::2] for x in tensors_of[rank]]
        reduced = all_reduce(strided, reduction, mu=mu, call=i, group=group)
        assert all(same_bits(a, b) for a, b in zip(reduced.values, expected.values, strict=True)), reduction
        assert reduced.counts.to_dict() == expected.counts[rank].to_dict(), reduction
        if auto is not None:
            moved = [auto.next(torch.tensor(mu), c.saturated.cpu(), c.elements.cpu())
                     for c in (reduced.counts, expected.counts[0])]  # fmt: skip
            assert_same_bits(*moved, what=reduction)


def edges_agree(rank, size, group, device="cpu"):
    """Empty tensors, fewer elements than ranks, half precision, 0-d, zeros of both signs."""
    shapes = [(0,), (1,), (), (3, 0), (size + 1,), (2, 3)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        source = torch.Generator().manual_seed(1)
        tensors_of = [[torch.randn(shape, generator=source).to(dtype) for shape in shapes] for _ in range(size)]
        for other in tensors_of:
            other[-1][0] = -0.0
        for reduction in ("msamp", "fp8lm", "bf16", dataclasses.replace(BASE, algorithm="tree")):
            expected = simulate(tensors_of, reduction)
            reduced = all_reduce([x.to(device) for x in tensors_of[rank]], reduction, group=group)
            assert all(same_bits(a, b) for a, b in zip(reduced.values, expected.values, strict=True)), (
                dtype,
                reduction,
            )
            assert [x.shape for x in reduced.values] == [x.shape for x in tensors_of[rank]]
        nothing = all_reduce(torch.empty(0, dtype=dtype, device=device), "fp8lm", group=group)
        assert nothing.values[0].shape == (0,) and nothing.counts.to_dict()["elements"] == 0
    assert all_gather(torch.empty(0, 3, device=device), "int8", group=group).shape == (size, 0, 3)


def gathers_agree(rank, size, group, device="cpu"):
    for name in ("int8", "e4m3", "int4"):
        shards = [x.reshape(3, 7) for x in gradients(size, 21, 3)]
        whole = torch.cat(shards)
        fmt = fmtsim.get_format(name)
        encoded = cast(whole, fmt, HALO, Rounding(), fmt.default_overflow)
        expected = encoded.values(whole.shape).reshape(size, 3, 7)
        assert_same_bits(all_gather(shards[rank].to(device), name, group=group), expected, what=name)
    blocks = [x.reshape(2, 40) for x in gradients(size, 80, 4)]
    for name in ("mxfp8_e4m3", "mxfp4", "nvfp4", "logfmt8", "e5m2"):
        expected = torch.stack([fmtsim.quantize(x, name, out_dtype=torch.float32, pad=True) for x in blocks])
        assert_same_bits(all_gather(blocks[rank].to(device), name, scaling=None, group=group), expected, what=name)
    spoiled = torch.ones(6, device=device)
    spoiled[0] = math.inf if rank == size - 1 else 1.0
    first, second = all_gather(spoiled, "int8", sizes=(2, 4), group=group).split([2, 4], 1)
    assert bool(first.isnan().all()) and bool((second == 1).all())
    only = all_gather(spoiled, "e4m3", group=group)
    assert int(only.isnan().sum()) == 1 and bool(only[-1, 0].isnan())


SHARED = (
    TensorParallel(),
    TensorParallel(gradient="e5m2", reduction="msamp"),
    TensorParallel(gather="mxfp8_e4m3", scaling=None, dim=0),
    TensorParallel(gather=None),
    TensorParallel(sequence=False, reduction="msamp"),
)


def shared_out(settings, ranks, recipe):
    torch.manual_seed(0)
    net = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    net = parallelize(net, column="1", row="3", settings=settings, ranks=ranks)
    return net if recipe is None else fmtsim.convert(net, recipe=recipe)


def layers_agree(rank, size):
    """Share two layers out, among processes and among ranks that one process plays."""
    for settings, recipe in itertools.product(SHARED, (None, "te_current")):
        what = f"{settings} {recipe}"

        def part(t, settings=settings):
            return t.chunk(size, settings.dim)[rank] if settings.sequence else t

        x = normal(4, 8, 32, seed=3)
        xs = x.clone().requires_grad_(), part(x).clone().requires_grad_()
        nets = shared_out(settings, size, recipe), shared_out(settings, None, recipe)
        every, local = (net(one) for net, one in zip(nets, xs, strict=True))
        every.square().sum().backward()
        local.square().sum().backward()
        assert_same_bits(local, part(every), what=what)
        assert_same_bits(xs[1].grad, part(xs[0].grad), what=what)
        assert_same_bits(nets[1][3].bias.grad, nets[0][3].bias.grad, what=what)
        for layer, name in ((1, "weight"), (1, "bias"), (3, "weight")):
            shard, expected = nets[1][layer].shards[0], nets[0][layer].shards[rank]
            assert_same_bits(getattr(shard, name).grad, getattr(expected, name).grad, what=what)
    if rank == 0:
        assert "row parallel over 4 ranks" in repr(nets[1]) and "all in this process" in repr(nets[0])
    refused(
        "5 tokens (dim=-2) do not divide among 4 ranks; pad them", shared_out(SHARED[0], None, None)[3], x[0, :5, :16]
    )


def tokens_arrive(rank, size, group, device="cpu"):
    """Send (sender + receiver) % 3 rows of 200 numbers from each rank to each."""
    counts = [[(a + b) % 3 for b in range(size)] for a in range(size)]
    rows = [torch.stack([*gradients(sum(counts[a]) + 1, 200, 20 + a)])[: sum(counts[a])] for a in range(size)]
    for name in ("logfmt8", "logfmt10", "e4m3", "mxfp4"):
        expected = []
        for a in range(size):
            values = fmtsim.quantize(rows[a], name, out_dtype=torch.float32, pad=True)
            expected.append(values.split(counts[a])[rank])
        received = dispatch(rows[rank].to(device), counts[rank], name, group=group)
        assert_same_bits(received, torch.cat(expected), what=name)
    nothing = dispatch(torch.empty(0, 16, dtype=torch.bfloat16, device=device), [0] * size, group=group)
    assert nothing.shape == (0, 16) and nothing.dtype == torch.bfloat16


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))


def loss_of(net, rank, step, device="cpu"):
    x = normal(6, 8, seed=10 * step + rank, device=device)
    return (net(x) * (1 + rank)).square().mean()


def local_gradients(size, step, weights, device="cpu"):
    """Return the gradients of every rank, parameter by parameter, computed here."""
    gradients_of = []
    for rank in range(size):
        net = model().to(device)
        net.load_state_dict(weights)
        loss_of(net, rank, step, device).backward()
        gradients_of.append([p.grad.cpu() for p in net.parameters()])
    return gradients_of


def ddp_agrees(rank, size, device="cpu"):
    """Train three steps with several buckets: gradients, mu and counts are the simulation's."""
    rounding, auto = Rounding(mode="stochastic"), AutoFactor(threshold=0.0, growth_steps=10)
    state = ReductionState(Reduction(format=E4M3, factor="auto", auto=auto, rounding=rounding, seed=2))
    net = DistributedDataParallel(model().to(device), bucket_cap_mb=0.0002)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    places, seen = {id(p): i for i, p in enumerate(net.parameters())}, []

    def noted(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append([places[id(p)] for p in bucket.parameters()])
        return fp8_hook(state, bucket)

    net.register_comm_hook(state, noted)
    mu, middle, calls = torch.tensor(1.0), None, 0
    for step in range(3):
        net.zero_grad()
        loss_of(net, rank, step, device).backward()
        gradients_of = local_gradients(size, step, net.module.state_dict(), device)
        assert (len(seen) > 1) == (step > 0) and sorted(sum(seen, [])) == [0, 1, 2, 3], seen
        counts = None
        for order in seen:
            expected = simulate([[g[i] for i in order] for g in gradients_of], state.reduction, mu=mu, call=calls)
            for i, value in zip(order, expected.values, strict=True):
                assert_same_bits(list(net.parameters())[i].grad, value, what=(step, i))
            counts = expected.counts[rank] if counts is None else counts.plus(expected.counts[rank])
            calls += 1
        seen.clear()
        mu = auto.next(mu, counts.saturated, counts.elements)
        assert state.report() == {"steps": step + 1, "mu": float(mu), **counts.to_dict()}
        optimizer.step()
        if step == 1:
            middle = state.state_dict()
    again = ReductionState(state.reduction)
    again.load_state_dict(middle)
    assert (again.steps, again.calls, float(again.mu)) == (2, middle["calls"], middle["mu"])
    for wrong in (torch.tensor(math.nan), torch.tensor(0.0)):
        refused("is not a factor; pass a finite number above 0", again.load_state_dict, middle | {"mu": wrong})
    refused("this state has 'mu': None; it should be a Tensor", again.load_state_dict, middle | {"mu": None})
    refused("the state is of another reduction", ReductionState("msamp").load_state_dict, middle)
    refused("this state has no 'reduction'; pass what was saved", again.load_state_dict, {"steps": 3})
    refused("state=3 is not a ReductionState", fp8_hook, 3, None)


def fsdp_agrees(rank, size, device="cpu"):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net, plain = model().to(device), model()
    mesh = init_device_mesh(torch.device(device).type, (size,))
    refused("Sequential has no FSDP2 unit; call torch's fully_shard", hook_fsdp, net, gather="int8")
    refused("there is nothing to hook; pass a ReductionState", hook_fsdp, net)
    refused("state='fp8lm' is not a ReductionState; hook_fsdp(model, R", hook_fsdp, net, "fp8lm")
    for module in (net[0], net):
        fully_shard(module, mesh=mesh)
    state = ReductionState(BASE)
    refused("mxfp4 has scales of its own; pass scaling=None", hook_fsdp, net, gather="mxfp4")
    hook_fsdp(net, state, gather="int8")
    weights = {}
    for name, weight in plain.state_dict().items():
        encoded = cast(weight.reshape(1, -1), fmtsim.get_format("int8"), HALO, Rounding(), "saturate")
        weights[name] = encoded.values((1, weight.numel())).reshape(weight.shape)
    loss_of(net, rank, 0, device).backward()
    state.step()
    gradients_of = local_gradients(size, 0, weights, device)
    for unit in ((0, 1), (2, 3)):
        expected = fsdp_bits([[g[i] for i in unit] for g in gradients_of], size)
        for i, rows in zip(unit, expected, strict=True):
            parameter = list(net.parameters())[i]
            mine = parameter.grad.to_local()
            local = rows.split(-(-len(rows) // size))
            assert_same_bits(mine, local[rank] if rank < len(local) else mine.new_empty(mine.shape), what=i)
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


def nan_is_refused_and_nothing_written(rank, size, device="cpu"):
    state = ReductionState(dataclasses.replace(BASE, nonfinite="raise"))
    before = state.state_dict()
    x = torch.full((3,), math.nan if rank == 1 else 1.0, device=device)
    refused("NaN or Inf elements (3 on rank 1)", all_reduce, x, state.reduction)
    net = DistributedDataParallel(model().to(device), gradient_as_bucket_view=True)
    net.register_comm_hook(state, fp8_hook)
    loss_of(net.module, rank, 0, device).backward()
    alone = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    loss = loss_of(net, rank, 0, device) * (math.nan if rank == 1 else 1.0)
    refused("on rank 1) and nonfinite='raise'; nothing was reduced", loss.backward)
    assert rank == 1 or all(same_bits(p.grad, g) for p, g in zip(net.parameters(), alone, strict=True))
    assert state.state_dict() == before
    dist.barrier()


def scales_are_shared(rank, size, device="cpu"):
    """Delayed scales follow the largest magnitudes of all ranks; ranks with other recipes are told."""
    torch.manual_seed(0)
    net = convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).to(device), recipe="te_delayed")
    fmtsim.nn.share_scales(net)
    assert copy.deepcopy(net)[0].get_submodule("fmtsim_state.x_f").group is None
    parallel = DistributedDataParallel(net)
    batches = [normal(32, 64, seed=i) * (1 + i) for i in range(3 * size)]
    for step in range(3):
        parallel(batches[size * step + rank].to(device)).square().mean().backward()
    largest = torch.stack([torch.stack(batches[size * step : size * (step + 1)]).abs().max() for step in range(3)])
    remembered = fmtsim.state(net)["layers"]
    x = remembered["0"]["x_f"]
    assert_same_bits(x["amaxes"][:3], largest.flip(0))
    assert int(x["calls"]) == 3 and torch.equal(x["factor"].cpu(), torch.div(448.0, largest.max()))
    mine = torch.cat([remembered[layer][operand][field].reshape(-1).float().to(device) for layer in "01"
                      for operand in ("x_f", "w_f", "g_d") for field in ("amaxes", "factor", "calls")])  # fmt: skip
    copies = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(copies, mine)
    assert all(same_bits(other, mine) for other in copies) and int((mine > 0).sum()) >= 18
    plain = nn.Sequential(nn.Linear(64, 64))
    for recipes in (("te_delayed", "fp8lm"), ("te_current", "te_nvfp4_all")):
        said = f"layer '0' runs recipe {recipes[0]!r} on rank 0 and {recipes[1]!r} on rank 1; convert with one"
        refused(said, fmtsim.nn.share_scales, convert(copy.deepcopy(plain).to(device), recipe=recipes[rank == 1]))
    attention = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 2)}).to(device)
    recipe = Recipe(name="mine", attention=flash_attention_3(target=None, rotate=rank == 1))
    said = "layer 'attention' runs recipe 'mine' on rank 0 and 'mine' on rank 1 as another config; convert with one"
    refused(said, fmtsim.nn.share_scales, convert(attention, recipe=recipe))


# What ranks do alone, and with models: of a rank, the number of ranks, and their devices.
VERBS = {
    "factors": lambda rank, size, device: factors_agree(rank, size, None, device),
    "formats": lambda rank, size, device: reductions_agree(rank, size, None, device),
    "edges": lambda rank, size, device: edges_agree(rank, size, None, device),
    "gathers": lambda rank, size, device: gathers_agree(rank, size, None, device),
    "tokens": lambda rank, size, device: tokens_arrive(rank, size, None, device),
}
HOOKS = {
    "shared scales": scales_are_shared,
    "ddp": ddp_agrees,
    "fsdp": fsdp_agrees,
    "nan": nan_is_refused_and_nothing_written,
}
