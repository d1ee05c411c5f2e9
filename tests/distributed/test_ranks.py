# SPDX-License-Identifier: Apache-2.0
"""Collectives on four processes, and on two of them, against the simulation; hooks of DDP and FSDP2; errors."""

import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fmtsim.distributed import (
    ReductionState,
    all_gather,
    all_reduce,
    dispatch,
    fp8_hook,
    get_reduction,
    reduce_scatter,
    simulate,
)
from fmtsim.distributed.arithmetic import Batch
from fmtsim.distributed.fsdp import QuantizedAllGather, QuantizedReduceScatter
from fmtsim.distributed.gather import HALO
from fmtsim.distributed.ranks import Ranks, exchange
from fmtsim.formats.scaling import History, Scaling
from fmtsim.nn import convert, share_scales
from fmtsim.scaling.history import DelayedScale
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, CollectiveError, DtypeError
from tests.distributed.reduction_checks import (
    HOOKS,
    VERBS,
    ddp_agrees,
    edges_agree,
    factors_agree,
    fsdp_agrees,
    gathers_agree,
    layers_agree,
    nan_is_refused_and_nothing_written,
    reductions_agree,
    refused,
    same_bits,
    scales_are_shared,
    tokens_arrive,
)
from tests.distributed.sharded_training import SHARDED, recipes_agree
from tests.support.reductions import BASE, E4M3

# Processes fork from a server that has imported all this once and has compiled its kernels.
multiprocessing.set_forkserver_preload(["tests.distributed.preload", "tests.distributed.test_ranks"])


def fsdp_refuses(rank, size):
    state, world = ReductionState(BASE), dist.group.WORLD
    row, rows = torch.zeros(4), torch.ones(4 * size)
    scatter = QuantizedReduceScatter(state, (3,))
    refused("FSDP sends 4 elements of gradients a rank, but the unit's trainable parameters have 3: some take no part",
            scatter, row, rows, world, dist.ReduceOp.AVG)  # fmt: skip
    refused("but the reduction has average=True; leave its divide factor alone", scatter, row, rows, world,
            dist.ReduceOp.SUM)  # fmt: skip
    gather = QuantizedAllGather(E4M3, HALO, (5,), state.ranks)
    refused("FSDP sends 4 elements of weights a rank, but the unit's parameters have 5", gather, rows, row, world)
    refused("FSDP sends weights as torch.uint8, because the unit's parameters have several dtypes; give it one", gather,
            rows.byte(), row.byte(), world)  # fmt: skip
    alone, _ = dist.new_subgroups(1)
    refused(
        f"FSDP shards over ranks [{rank}], the ReductionState over [0, 1, 2, 3]; build it", gather, rows, row, alone
    )
    QuantizedReduceScatter(state, ())(row, rows * (rank + 1), world, dist.ReduceOp.AVG)  # one scale for all of it
    assert same_bits(row, simulate([torch.full((4,), r + 1.0) for r in range(size)], BASE).values[0])


def disagreement_has_a_name(rank, size):
    other = rank == 2
    refused("rank 0 has [((3,), 'torch.float32')], rank 2 has [((4,), 'torch.float32')]", all_reduce,
            torch.ones(4 if other else 3), "msamp")  # fmt: skip
    refused("'torch.float32')], rank 2 has [((3,), 'torch.bfloat16')]", all_reduce,
            torch.ones(3).to(torch.bfloat16 if other else torch.float32), "msamp")  # fmt: skip
    refused("rank 0 has ring of e4m3, factor sqrt", all_reduce, torch.ones(3), "bf16" if other else "msamp")
    refused("seed=5", all_reduce, torch.ones(3), dataclasses.replace(BASE, seed=5 if other else 6))
    refused("rank 0 has all_reduce, rank 2 has reduce_scatter", reduce_scatter if other else all_reduce,
            torch.ones(4), "msamp")  # fmt: skip
    refused("rank 0 has mu=0.5, call=0, rank 2 has mu=0.25, call=0", all_reduce, torch.ones(3), "fp8lm",
            mu=0.25 if other else torch.tensor(0.5))  # fmt: skip
    refused("rank 0 has mu=None, call=0, rank 2 has mu=None, call=1", all_reduce, torch.ones(3), "msamp",
            call=int(other))  # fmt: skip
    state, resumed = ReductionState("fp8lm"), {"reduction": repr(get_reduction("fp8lm")), "steps": 3, "calls": 7}
    if other:
        state.load_state_dict(resumed | {"mu": torch.tensor(2.0)})
    refused("rank 0 has a new state, rank 2 has a state of 3 steps and 7 calls, mu=2.0", state.reduce,
            Batch(torch.ones(1, 3), (3,)), ("x",))  # fmt: skip
    refused("rank 0 has 16, rank 2 has 32", dispatch, torch.ones(4, 32 if other else 16), [1] * 4)
    refused("counts=[1, 1] do not part x of shape (2, 16) among 4 ranks", dispatch, torch.ones(2, 16), [1, 1])
    refused(
        "nvfp4 has a scale of the whole tensor, but rows are sent apart", dispatch, torch.ones(4, 16), [1] * 4, "nvfp4"
    )
    refused("5 elements do not divide among 4 ranks; pad them", reduce_scatter, torch.ones(5), "msamp")
    refused("sizes=(3,) sum to 3, not to the 2 columns", reduce_scatter, torch.ones(8), "msamp", sizes=(3,))
    refused("sizes=(3, -1) sum to 2, not to the 2 columns; name", reduce_scatter, torch.ones(8), "msamp", sizes=(3, -1))
    refused("sizes=(3,) sum to 3, not to the 8 elements", all_gather, torch.ones(8), "int8", sizes=(3,))
    refused(
        "x has dtype torch.int64; choose float16, bfloat16, float32",
        all_gather,
        torch.ones(3).long(),
        "int8",
        error=DtypeError,
    )
    refused("sizes=(3, 5) belong to a scale that ranks share; pass a sc", all_gather, torch.ones(8), "mxfp4",
            scaling=None, sizes=(3, 5))  # fmt: skip
    refused("x has layout torch.sparse_coo; pass a dense tensor", all_gather, torch.ones(3).to_sparse(), "int8")
    refused("the tensors are on meta, but the process group carries cpu:gloo", all_reduce,
            torch.ones(3, device="meta"), "msamp")  # fmt: skip
    refused(
        "group=7 is not a process group; pass what dist.new_group returned", all_reduce, torch.ones(3), "bf16", group=7
    )
    refused("sizes='x' is not allowed; pass a tuple (a whole", all_gather, torch.ones(8), "int8", sizes="x")
    refused("sizes=8 is not allowed; pass a tuple (a whole", reduce_scatter, torch.ones(8), "msamp", sizes=8)
    refused("scaling=2.0 is not allowed; pass a Scaling or None", all_gather, torch.ones(8), "int8", scaling=2.0)
    for scaling in (HALO, None):
        assert all_gather(torch.ones(0, 64), "bf16", scaling=scaling).shape == (4, 0, 64)
    for counts in ((0.5,) * 4, 4, (True, None, 1, 1)):
        refused(f"counts={counts} is not allowed; pass a tuple (a whole number", dispatch, torch.ones(4, 16), counts)
    assert dispatch(torch.ones(4, 0), torch.ones(4, dtype=torch.int64)).shape == (4, 0)
    assert all_reduce(torch.ones(4), "bf16").values[0].tolist() == [1.0] * 4  # the group still works


def store_carries_words(rank, size):
    """Where a group reaches devices only, as NCCL's, ranks agree by notes in its store, which do not pile up."""
    world = dist.group.WORLD
    for turn in range(3):
        assert exchange(world, f"{rank} {turn}") == [f"{other} {turn}" for other in range(size)]
    store = dist.distributed_c10d._get_process_group_store(world)
    dist.barrier()
    kept = [store.check([f"fmtsim/{turn}/{other}"]) for turn in (1, 2, 3) for other in range(size)]
    assert kept == [False] * 2 * size + [True] * size
    with mock.patch.object(Ranks, "_on_cpus", False):
        disagreement_has_a_name(rank, size)
        tokens_arrive(rank, size, None)
        ranks, device = Ranks(), torch.device("cuda")  # gloo carries both
        ranks.agree(("x",), device)
        with mock.patch.object(Ranks, "_prints", side_effect=AssertionError):
            ranks.agree(("x",), device)  # what is agreed is not compared again
    with mock.patch.object(Ranks, "_by_messages", lambda self, x: False):  # the calls that NCCL takes
        reductions_agree(rank, size, None)
        gathers_agree(rank, size, None)


def start(rank, size, folder, seconds=60):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )


def pairs_agree(rank, size):
    """Reduce, gather and dispatch among two of the processes."""
    pair = dist.new_group([1, 3])
    if rank in (1, 3):
        for check in (reductions_agree, gathers_agree, tokens_arrive):
            check(rank // 2, 2, pair)
    else:
        refused("this process is not part of the group", all_reduce, torch.ones(3), "msamp", group=pair)


def verbs_agree(rank, size):
    for check in (reductions_agree, factors_agree, edges_agree, gathers_agree, tokens_arrive):
        check(rank, size, None)


def hybrid_sharding_agrees(rank, size):
    recipes_agree(rank, size, steps=2, recipes=("te_nvfp4",), replicas=2)


def worker(rank, folder, checks):
    start(rank, 4, folder)
    try:
        for check in checks:
            check(rank, 4)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "checks",
    [
        (verbs_agree, pairs_agree),
        (disagreement_has_a_name, store_carries_words),
        (layers_agree, ddp_agrees, fsdp_agrees, fsdp_refuses, nan_is_refused_and_nothing_written, scales_are_shared),
        (hybrid_sharding_agrees,),
    ],
    ids=["verbs", "words", "models", "hybrid sharding"],
)
def test_processes_and_the_simulation_give_the_same_bits(checks, tmp_path):
    mp.start_processes(worker, args=(str(tmp_path), checks), nprocs=4, start_method="forkserver")


def one_of_eight(rank, folder):
    start(rank, 8, folder)
    for check in (VERBS | HOOKS | SHARDED).values():
        check(rank, 8, "cpu")
    dist.destroy_process_group()


@pytest.mark.slow
def test_eight_processes(tmp_path):
    """What test_gpu.py does with as many GPUs; two minutes on two cores."""
    mp.start_processes(one_of_eight, args=(str(tmp_path),), nprocs=8, start_method="forkserver")


@pytest.mark.slow
def test_the_benchmark_holds_eight_processes_to_the_simulation(tmp_path):
    record, script = tmp_path / "record.json", Path(__file__).parents[2] / "benchmarks" / "collectives.py"
    words = ["--ranks", "8", "--megabytes", "0.01", "--width", "16", "--layers", "1", "--repeat", "1"]
    subprocess.run([sys.executable, script, *words, "--record", record], check=True)
    found = json.loads(record.read_text())
    assert found["bits"] == {"reductions": 128, "elements": 32 * (3 + 1003 + 65536 + 10007), "differing": 0}
    assert found["machine"]["ranks"] == 8 and found["machine"]["command"].endswith(str(record))
    (row,), (own,) = found["reductions"], found["own work"]
    assert own["elements"] == 2621 and own["tree"]["ms"] > own["copy"]["ms"]
    assert row["elements"] == 2621 and row["hook's"]["busbw"] == 2621 * 1.75 / row["hook's"]["ms"] / 1e6
    assert found["backward"]["fp8 hook"]["ms"] > 0


def mourner(rank, folder):
    """Rank 2 does not come to one collective in time, and ends before another."""
    start(rank, 3, folder)
    late = dist.new_group([0, 1, 2], timeout=timedelta(seconds=0.5))
    if rank != 2:
        refused("rank 2 did not answer in the comparison of arguments", all_reduce, torch.ones(3), "msamp", group=late,
                error=CollectiveError)  # fmt: skip
    x = torch.ones(6)
    assert same_bits(all_reduce(x, "msamp").values[0], simulate([x] * 3, "msamp").values[0])
    model = DistributedDataParallel(nn.Linear(3, 2))
    model.register_comm_hook(ReductionState("msamp"), fp8_hook)
    for _ in range(2):  # in the second one torch arranges its buckets
        model(x[:3]).sum().backward()
    if rank == 2:
        os._exit(0)
    refused("rank 2 did not answer in the comparison of arguments", model(x[:3]).sum().backward, error=CollectiveError)
    refused("rank 2 did not answer in the comparison of recipes", share_scales,
            convert(nn.Linear(64, 64), recipe="te_delayed"), error=CollectiveError)  # fmt: skip
    state = ReductionState("fp8lm")
    before = state.state_dict()
    try:
        state.reduce(Batch(x.reshape(1, 6), (6,)), ("x",))
    except CollectiveError as error:
        assert "rank 2 did not answer in the comparison of arguments" in str(error), error
        assert "Nothing was written; restart the ranks from a checkpoint. torch says: " in str(error)
    else:
        raise AssertionError("a rank was gone, and no rank noticed")
    assert state.state_dict() == before
    with mock.patch.object(Ranks, "_on_cpus", False):
        refused("rank 2 did not answer in the comparison of arguments; such a rank has ended, hangs, or", all_reduce, x,
                "msamp", group=late, error=CollectiveError)  # fmt: skip
        refused("torch says: no note of rank 2 after 0.5 s", Ranks(late).gather_objects, 1, "a count",
                error=CollectiveError)  # fmt: skip
    wires = torch.zeros(3, 4, dtype=torch.uint8)
    refused("rank 2 did not answer in the casts", state.ranks.exchange, wires, "the casts", error=CollectiveError)
    refused("rank 2 did not answer in the sums", state.ranks.gather, wires[0], "the sums", error=CollectiveError)
    refused("a rank did not answer in the maxima", state.ranks.largest, x, "the maxima", error=CollectiveError)
    memory = DelayedScale(Quantizer(format=E4M3, scaling=Scaling(history=History(length=4))))
    memory.group = dist.group.WORLD
    refused("a rank did not answer in the exchange of a delayed scale's largest magnitude; it has ended", memory.record,
            torch.ones(()), error=CollectiveError)  # fmt: skip
    assert memory.amaxes.tolist() == [0.0] * 4 and int(memory.calls) == 0
    os._exit(0)  # gloo cannot say goodbye to a rank that is gone


def test_a_rank_that_ends_is_named(tmp_path):
    mp.start_processes(mourner, args=(str(tmp_path),), nprocs=3, start_method="forkserver")


def test_without_ranks():
    message = "a collective needs ranks; call torch.distributed.init_process_group first"
    for verb in (lambda: all_reduce(torch.ones(3), "msamp"), lambda: ReductionState("msamp")):
        with pytest.raises(ArgumentError, match=message):
            verb()
    with pytest.raises(
        ArgumentError, match="share_scales needs ranks; call torch.distributed.init_process_group first"
    ):
        share_scales(convert(nn.Linear(64, 64), recipe="te_delayed"))
