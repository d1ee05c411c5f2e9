# SPDX-License-Identifier: Apache-2.0
"""Hold reductions over ranks to their simulation, and time the FP8 all-reduce beside torch's, what a rank computes of
it by itself, and a backward pass of DistributedDataParallel with its hook. Where there are more ranks than GPUs they
share them, as if they were on several hosts, and only a rank's own work is timed.

python benchmarks/collectives.py [--device cuda] [--ranks 8] [--megabytes 1 10 100 1000] [--width 2048] [--layers 24]
    [--record FILE] [--operators]
"""

import argparse
import itertools
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import fmtsim
from fmtsim.distributed import (
    AutoFactor,
    Reduction,
    ReductionState,
    all_reduce,
    collective,
    fp8_hook,
    get_reduction,
    simulate,
)
from fmtsim.distributed.arithmetic import Batch
from fmtsim.distributed.collective import Stages, reduce_batch
from fmtsim.lab.cli.output import versions_of, write_json
from fmtsim.rounding.modes import Rounding

BYTES = {"torch fp32": 4, "torch bf16": 2, "all_reduce": 1, "hook's": 1, "hook's tree": 1}  # of an element that travels


def timed(verb: Callable[[], object], repeat: int, device: torch.device) -> dict[str, float]:
    """Return the milliseconds of one call among many, of the slowest rank of several, and the host's part of them."""
    for _ in range(3):
        verb()
    wait(device)
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    for _ in range(repeat):
        verb()
    host = time.perf_counter() - began
    wait(device)
    found = torch.tensor([time.perf_counter() - began, host], device=device)
    if dist.is_initialized():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return dict(zip(("ms", "host_ms"), (found / repeat * 1e3).tolist(), strict=True))


def told(times: dict[str, float]) -> str:
    return f"{times['ms']:9.3f} ({times['host_ms']:6.3f})"


def gpu_of(rank: int, ranks: int) -> torch.device:
    """Return the GPU of a rank, and tell NCCL, which has made no group yet, how to send.

    Where there are more ranks than GPUs, ranks share them and call themselves processes of several hosts, since NCCL
    gives a GPU to one rank of a host: messages go over sockets, and their bits are the same.
    """
    gpus = torch.cuda.device_count()
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # sums of a switch have an order of their own
    if ranks > gpus:
        os.environ["NCCL_HOSTID"] = f"host {rank // gpus}"
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    return device


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def differing(device: torch.device, rank: int, ranks: int) -> dict[str, int]:
    """Return how many reductions ran, on how many elements, and how many results differ from the simulation's: both
    orders, all factors, two formats, two roundings, and sizes that ranks do not divide.
    """
    kinds = itertools.product(("ring", "tree"), ("pre", "post", "sqrt", "auto"), ("e4m3", "e5m2"),
                              ("nearest_even", "stochastic"))  # fmt: skip
    runs = elements = wrong = 0
    for i, (algorithm, factor, name, mode) in enumerate(kinds):
        reduction = Reduction(
            format=fmtsim.get_format(name), factor=factor, auto=AutoFactor() if factor == "auto" else None,
            algorithm=algorithm, rounding=Rounding(mode=mode), seed=i,
        )  # fmt: skip
        for size in (3, 1003, 1 << 16, 1_000_003 if device.type == "cuda" else 10_007):
            each = [torch.randn(size, generator=torch.Generator().manual_seed(100 * i + r)) for r in range(ranks)]
            each = [(x * 2.0 ** (10 * r)).to(device) for r, x in enumerate(each)]
            expected = simulate(each, reduction, call=i).values[0]
            found = all_reduce(each[rank], reduction, call=i).values[0]
            wrong += int((found.view(torch.int32) != expected.view(torch.int32)).sum())
            runs, elements = runs + 1, elements + size
    total = torch.tensor(wrong, device=device)
    dist.all_reduce(total)
    return {"reductions": runs, "elements": elements, "differing": int(total)}


class Alone:
    """Stand for a group whose messages take no time: this rank gets what it sends."""

    group = None

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def largest(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """Return this rank's."""
        return x

    def exchange(self, wires: torch.Tensor, what: str) -> torch.Tensor:
        """Return what this rank sends."""
        self.sent = wires
        return wires

    def gather(self, wire: torch.Tensor, what: str) -> torch.Tensor:
        """Return as many bytes as arrive, some of those that were sent."""
        return self.sent


def own_work(megabytes: list[float], repeat: int, device: torch.device, ranks: int) -> list[dict[str, Any]]:
    """Time what one of many ranks computes, without messages, beside a copy of the tensor, and return a row a size."""
    print(f"{'MB of fp32':>12s} {'copy':>18s} {'ring':>18s} {'tree':>18s}   ms (host) of a rank's own work", flush=True)
    rows, msamp = [], get_reduction("msamp")
    for size in megabytes:
        x = normal(size, 0, device)
        out, row = torch.empty_like(x), {"megabytes": size, "elements": x.numel()}
        batch, alone = Batch(x.unsqueeze(0), (x.numel(),)), Alone(ranks)
        verbs: dict[str, Callable[[], object]] = {"copy": partial(out.copy_, x)}
        for order in ("ring", "tree"):
            reduction = replace(msamp, algorithm=order)
            verbs[order] = partial(reduce_batch, batch, reduction, None, 0, alone, out, scatter=False)
        for name, verb in verbs.items():
            row[name] = timed(verb, repeat, device)
        print(f"{size:12g}" + "".join(f" {told(row[name])}" for name in verbs), flush=True)
        rows.append(row)
        del x, out, batch, verbs, verb
    return rows


def normal(megabytes: float, seed: int, device: torch.device) -> torch.Tensor:
    count = max(int(megabytes * 2**20) // 4, 1)
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(device)


def reductions(
    megabytes: list[float], repeat: int, device: torch.device, rank: int, ranks: int
) -> list[dict[str, Any]]:
    """Time sums of as many elements, and return a row a size.

    busbw is NCCL's: the bytes that travel an element times 2 (ranks - 1) / ranks, over the time.
    """
    show(rank, f"{'MB of fp32':>12s}" + "".join(f" {name:>26s}" for name in BYTES) + "   ms (host), GB/s busbw")
    rows = []
    for size in megabytes:
        x = normal(size, rank, device)
        copies = [x.clone(), x.bfloat16()]
        verbs: list[Callable[[], object]] = [partial(dist.all_reduce, copy) for copy in copies]
        verbs.append(partial(all_reduce, x, "msamp"))
        for reduction in (ReductionState("msamp"), ReductionState(replace(get_reduction("msamp"), algorithm="tree"))):
            verbs.append(partial(reduction.reduce, Batch(x.unsqueeze(0), (x.numel(),)), ("x", x.numel())))
        row: dict[str, Any] = {"megabytes": size, "elements": x.numel()}
        for (name, width), verb in zip(BYTES.items(), verbs, strict=True):
            row[name] = timed(verb, repeat, device)
            row[name]["busbw"] = width * x.numel() * 2 * (ranks - 1) / ranks / row[name]["ms"] / 1e6
        row["hook's over torch fp32"] = row["hook's"]["ms"] / row["torch fp32"]["ms"]
        row["hook's over torch bf16"] = row["hook's"]["ms"] / row["torch bf16"]["ms"]
        show(rank, f"{size:12g}" + "".join(f" {told(row[name])} {row[name]['busbw']:7.1f}" for name in BYTES))
        rows.append(row)
        del x, copies, verbs, verb
    return rows


def backward(width: int, layers: int, repeat: int, device: torch.device, rank: int) -> dict[str, dict[str, float]]:
    """Time forward and backward of a stack of linear layers, with gradients summed in several ways, also in buckets
    of another size than torch's.
    """
    x = torch.randn(2048 if device.type == "cuda" else 64, width, device=device)
    runs = {"no sum": None, "torch fp32": None, "fp16 hook": None, "fp8 hook": 25, "fp8, 100 MB": 100}
    times = {}
    show(rank, f"forward and backward, {layers} layers of {width} x {width}, {layers * width**2 * 4 / 2**20:g} MB")
    for name, bucket in runs.items():
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(device)
        parallel = DistributedDataParallel(net, bucket_cap_mb=bucket)
        if bucket is not None:
            parallel.register_comm_hook(ReductionState("msamp"), fp8_hook)
        elif name == "fp16 hook":
            parallel.register_comm_hook(None, fp16_compress_hook)

        def step(parallel: nn.Module = parallel, alone: bool = name == "no sum") -> None:
            parallel.require_backward_grad_sync = not alone
            parallel(x).square().mean().backward()

        times[name] = timed(step, repeat, device)
        show(rank, f"{name:>12s} {told(times[name])}   ms (host)")
    return times


def machine(device: torch.device, ranks: int) -> dict[str, Any]:
    """Return what a measurement depends on, and how to make it again."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(), "ranks": ranks,
        "devices": min(ranks, torch.cuda.device_count()) if cuda else 1,
        "backend": f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if cuda else "gloo",
        "nvls": os.environ.get("NCCL_NVLS_ENABLE"), "cuda": torch.version.cuda, **versions_of(("fmtsim", "torch")),
        "command": " ".join(["python", *sys.argv]), "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def show(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


def work(rank: int, options: argparse.Namespace, port: int) -> None:
    cuda = options.device == "cuda"
    device = gpu_of(rank, options.ranks) if cuda else torch.device("cpu")
    if not cuda:
        torch.set_num_threads(1)
    if options.operators:
        collective.stages_of = Stages
    about = machine(device, options.ranks)
    record: dict[str, Any] = {"machine": about}

    def keep(name: str, found: Any) -> None:
        record[name] = found
        if rank == 0 and options.record is not None:
            write_json(options.record, record)  # what there is: a run may be cut short

    show(rank, ", ".join(f"{name} {value}" for name, value in about.items() if name not in ("command", "date")))
    if rank == 0:  # the others wait for it
        keep("own work", own_work(options.megabytes, options.repeat, device, options.ranks))
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=options.ranks
    )
    keep("bits", differing(device, rank, options.ranks))
    show(rank, "{differing} of {elements} elements of {reductions} reductions differ".format(**record["bits"]))
    if cuda and about["devices"] < options.ranks:
        show(rank, f"{options.ranks} ranks take turns on {about['devices']} GPU(s): nothing else is timed")
    else:
        keep("reductions", reductions(options.megabytes, options.repeat, device, rank, options.ranks))
        keep("backward", backward(options.width, options.layers, options.repeat, device, rank))
    dist.destroy_process_group()
    if record["bits"]["differing"]:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=float, nargs="*", default=[1, 10, 100, 1000])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--record", type=Path, help="write what was measured as JSON")
    parser.add_argument("--operators", action="store_true", help="do in torch operators what kernels of a GPU do")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, and torch finds none; leave it out for the CPU")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, args=(options, port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
