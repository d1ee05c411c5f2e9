"""Recipes on several processes: shared delayed scales, gradients averaged, and ranks that disagree."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fmtsim
from fmtsim.errors import ArgumentError
from fmtsim.nn import convert, flash_attention_3, recipe_state, share_scales
from fmtsim.recipes import Recipe
from tests.support.operands import normal


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))


def batch(seed):
    return normal(32, 64, seed=seed) * (1 + seed)


def refused(net, said):
    try:
        share_scales(net)
    except ArgumentError as error:
        assert said in str(error), error
    else:
        raise AssertionError("ranks that disagree passed")


def train(net, rank):
    """Take three steps; what DDP holds must go before its group, or torch 2.13 may wait for ever for a thread."""
    parallel = DistributedDataParallel(net)
    for step in range(3):
        parallel(batch(2 * step + rank)).square().mean().backward()


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        net = convert(model(), recipe="te_delayed")
        share_scales(net)
        assert copy.deepcopy(net)[0].get_submodule("fmtsim_state.x_f").group is None
        train(net, rank)
        torch.save(recipe_state(net), f"{folder}/{rank}.pt")
        for recipes in (("te_delayed", "fp8lm"), ("te_current", "te_nvfp4_all")):
            said = f"layer '0' runs recipe {recipes[0]!r} on rank 0 and {recipes[1]!r} on rank 1; convert with one"
            refused(convert(model(), recipe=recipes[rank]), said)
        attention = flash_attention_3(unit=None, rotate=bool(rank))
        recipe = Recipe(name="mine", attention=attention)
        said = "layer 'attention' runs recipe 'mine' on rank 0 and 'mine' on rank 1 as another config; convert with one"
        refused(convert(nn.ModuleDict({"attention": nn.MultiheadAttention(32, 2)}), recipe=recipe), said)
    finally:
        dist.destroy_process_group()


def test_ranks_share_their_scales(tmp_path):
    mp.spawn(worker, args=(str(tmp_path),), nprocs=2)
    states = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    largest = torch.stack(
        [torch.stack([batch(2 * step + rank).abs().max() for rank in range(2)]).max() for step in range(3)]
    )
    for state in states:
        remembered = state["layers"]["0"]["x_f"]
        assert torch.equal(remembered["amaxes"][:3], largest.flip(0)) and int(remembered["calls"]) == 3
        assert torch.equal(remembered["factor"], torch.div(448.0, largest.max()))
    for layer in ("0", "2"):
        for operand in ("x_f", "w_f", "g_d"):
            for field in ("amaxes", "factor", "calls"):
                assert torch.equal(*(state["layers"][layer][operand][field] for state in states))


def test_without_ranks_there_is_nothing_to_share():
    with pytest.raises(
        ArgumentError, match="share_scales needs ranks; call torch.distributed.init_process_group first"
    ):
        fmtsim.share_scales(convert(model(), recipe="te_delayed"))
