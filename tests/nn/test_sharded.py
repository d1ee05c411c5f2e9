# SPDX-License-Identifier: Apache-2.0
"""Converted models on two processes, under FSDP2, FSDP1 and DistributedDataParallel, against one that plays both."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fmtsim
from fmtsim.nn import convert, flash_attention_3, share_scales
from fmtsim.nn.conversion import STATE
from fmtsim.recipes import get_recipe
from tests.support.models import gpt

pytestmark = [
    pytest.mark.slow,  # two new processes
    pytest.mark.filterwarnings("ignore:recipe te_nvfp4 leaves the last 15% of the blocks"),
    pytest.mark.usefixtures("one_thread"),  # products have the last bits of one thread, as in the processes
]

RECIPES = {name: get_recipe(name) for name in ("te_delayed", "te_nvfp4", "quartet")}
RECIPES["attention"] = dataclasses.replace(
    RECIPES["te_delayed"], name="attention", attention=flash_attention_3(target=None)
)
HOW = ("fsdp", "fsdp1", "ddp")
STEPS, LR = 3, 0.1


def batch(step):
    """Return inputs and targets of four windows; a rank has two of them."""
    tokens = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def half(step, rank):
    return tuple(t[2 * rank : 2 * rank + 2] for t in batch(step))


def ours(name, rank):
    """A rank's model: the same weights everywhere, random numbers of its own."""
    return convert(gpt(context=16), recipe=RECIPES[name], generator=10 + rank)


def weights_of(model):
    return {key: t for key, t in model.state_dict().items() if "fmtsim" not in key}  # the rest are delayed scales


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        for name in RECIPES:
            for how in HOW:
                torch.save(trained(name, how, rank), f"{folder}/{name} {how} {rank}.pt")
    finally:
        dist.destroy_process_group()


def trained(name, how, rank):
    """Train one model on a rank; return weights, losses, gradients' first norm, state and keys."""
    model = ours(name, rank)
    share_scales(model)
    call = model
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif how == "fsdp1":
        blocks = ModuleWrapPolicy({type(model.blocks[0])})
        cpu = torch.device("cpu")
        model = call = FullyShardedDataParallel(model, auto_wrap_policy=blocks, device_id=cpu, use_orig_params=True)
    else:
        call = DistributedDataParallel(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for step in range(STEPS):
        loss = call(*half(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    whole = {key: t.full_tensor() if hasattr(t, "full_tensor") else t for key, t in weights_of(model).items()}
    return {"weights": whole, "losses": losses, "state": fmtsim.state(model)}


def reference(name, *, shared=True):
    """One process that plays both ranks: each half with a model of its own, the mean of their gradients."""
    models = [ours(name, rank) for rank in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    losses = []
    for step in range(STEPS):
        found = [model(*half(step, rank)) for rank, model in enumerate(models)]
        for loss in found:
            loss.backward()
        losses.append([loss.detach() for loss in found])
        for first, second in zip(*(model.parameters() for model in models), strict=True):
            mean = (first.grad + second.grad) / 2
            first.grad, second.grad = mean, mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if shared:
            share(*models)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    return weights_of(models[0]), losses, [fmtsim.state(model) for model in models]


def share(first, second):
    """Let both models remember the larger magnitude of a step, and scale by it."""
    for one, other in zip(first.modules(), second.modules(), strict=True):
        memory = dict(one._modules[STATE].named_children()) if STATE in one._modules else {}
        for operand, scale in memory.items():
            both = (scale, other._modules[STATE].get_submodule(operand))
            amax = max(b.amaxes[0].item() for b in both)
            for b in both if amax else ():  # else nothing ran
                b.amaxes[0] = amax
                b.factor.copy_(torch.tensor(57344.0 if operand[0] == "g" else 448.0) / b.amaxes.max())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, args=(str(folder),), nprocs=2)
    return {
        (name, how): [torch.load(folder / f"{name} {how} {rank}.pt") for rank in range(2)]
        for name in RECIPES
        for how in HOW
    }


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", RECIPES)
def test_two_ranks_have_the_bits_of_one_process_that_plays_both(name, how, runs):
    """Sums of two gradients do not depend on their order, and a half of them is exact: every bit is defined."""
    weights, losses, states = reference(name)
    for rank, run in enumerate(runs[name, how]):
        assert list(run["weights"]) == list(weights) == list(gpt(context=16).state_dict())
        assert all(torch.equal(run["weights"][key], weights[key]) for key in weights)
        assert run["losses"] == [pair[rank] for pair in losses]
        assert str(run["state"]) == str(states[rank])
    fmtsim.load_state(ours(name, 0), runs[name, how][0]["state"])
    plain = gpt(context=16)
    plain.load_state_dict(runs[name, how][0]["weights"], strict=True)
    assert not torch.equal(plain.blocks[0].up.weight, gpt(context=16).blocks[0].up.weight)


def test_scales_that_are_not_shared_are_seen(runs):
    weights, _, _ = reference("te_delayed", shared=False)
    assert not torch.equal(weights["blocks.0.up.weight"], runs["te_delayed", "ddp"][0]["weights"]["blocks.0.up.weight"])
