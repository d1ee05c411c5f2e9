# SPDX-License-Identifier: Apache-2.0
"""Training under FSDP2 and recipes on ranks of any backend and device, against one process that plays all ranks."""

import copy
import functools

import torch
from torch import nn

import fmtsim
from fmtsim.distributed import ReductionState, hook_fsdp
from fmtsim.nn import convert
from fmtsim.scaling.history import DelayedScale
from tests.distributed.reduction_checks import fsdp_bits
from tests.support.bits import assert_same_bits
from tests.support.operands import normal
from tests.support.reductions import BASE

RECIPES = ("te_current", "te_delayed", "te_nvfp4", "deepseek_v3")
RATE = 2.0**-4  # a power of two: products with it are exact, whichever instruction does them


def layers(recipe, device):
    """Return a small converted model; sums go in the order of k, so that bits are defined."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(k, n), nn.ReLU()) for k, n in ((64, 144), (144, 48), (48, 33))]
    return convert(nn.Sequential(*blocks).to(device), recipe=recipe, target="chain", generator=5)


def loss_of(net, rank, step, device):
    x = normal(32, 64, seed=100 * step + rank, device=device) * (1 + rank)
    return net(x).square().mean()


class Player:
    """Play all ranks in one process: a copy of the model for each, whose delayed scales are shared by hand."""

    def __init__(self, recipe, size, device, replicas=1):
        self.nets = [layers(recipe, device)]
        self.nets += [copy.deepcopy(self.nets[0]) for _ in range(size - 1)]
        self.device, self.shards = device, size // replicas

    def step(self, step):
        """Train all ranks for a step, and return the parameters and rank 0's loss."""
        remembered = [copy.deepcopy(memory.state_dict()) for memory in self._memories(0)]
        losses, gradients_of = [], []
        for rank, net in enumerate(self.nets):
            net.zero_grad()
            loss = loss_of(net, rank, step, self.device)
            loss.backward()
            losses.append(loss.detach())
            gradients_of.append([p.grad for p in net.parameters()])
        self._share(remembered)
        groups = [gradients_of[first : first + self.shards] for first in range(0, len(gradients_of), self.shards)]
        mean = functools.partial(torch.mean, dim=0)  # of replicas, as torch's all-reduce has it
        for unit in ((0, 1), (2, 3, 4, 5)):
            reduced = [fsdp_bits([[g[i] for i in unit] for g in group], self.shards) for group in groups]
            for i, values in zip(unit, zip(*reduced, strict=True), strict=True):
                for net in self.nets:
                    parameter = list(net.parameters())[i]
                    parameter.data.sub_(RATE * mean(torch.stack(values)).reshape(parameter.shape))
        return [p.detach() for p in self.nets[0].parameters()], losses[0]

    def _memories(self, rank):
        return [module for module in self.nets[rank].modules() if isinstance(module, DelayedScale)]

    def _share(self, remembered):
        """Record the largest magnitudes of all ranks in place of each rank's own."""
        for memories, before in zip(zip(*map(self._memories, range(len(self.nets))), strict=True), remembered,
                                    strict=True):  # fmt: skip
            largest = torch.stack([memory.amaxes[0] for memory in memories]).amax()
            for memory in memories:
                memory.load_state_dict(before)
                memory.record(largest)


def recipes_agree(rank, size, device="cpu", *, steps=20, recipes=RECIPES, replicas=1):
    """Train under FSDP2, or hybrid sharding with replicas, in step with rank 0's player: all weights are its."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape, names = ((size,), ("shard",)) if replicas == 1 else ((replicas, size // replicas), ("replicate", "shard"))
    mesh = init_device_mesh(torch.device(device).type, shape, mesh_dim_names=names)
    for recipe in recipes:
        net = layers(recipe, device)
        for module in (net[0], net):
            fully_shard(module, mesh=mesh)
        fmtsim.nn.share_scales(net)
        state = ReductionState(BASE, group=mesh["shard"].get_group())
        hook_fsdp(net, state)
        player = Player(recipe, size, device, replicas) if rank == 0 else None
        for step in range(steps):
            net.zero_grad()
            loss = loss_of(net, rank, step, device)
            loss.backward()
            state.step()
            with torch.no_grad():
                for parameter in net.parameters():
                    local = parameter.to_local()
                    local.sub_(RATE * parameter.grad.to_local())
            weights = [p.full_tensor().detach() for p in net.parameters()]
            if player is None:
                continue
            played, played_loss = player.step(step)
            assert_same_bits(loss.detach(), played_loss, what=(recipe, step))
            for i, (weight, own) in enumerate(zip(weights, played, strict=True)):
                assert_same_bits(weight, own, what=(recipe, step, i))
        if rank == 0:
            fresh = layers(recipe, device).parameters()
            assert all(bool(w.isfinite().all()) and not torch.equal(w, p) for w, p in zip(weights, fresh, strict=True))


SHARDED = {
    "sharded": recipes_agree,
    "hybrid": lambda rank, size, device: recipes_agree(rank, size, device, steps=5, replicas=2),
}
