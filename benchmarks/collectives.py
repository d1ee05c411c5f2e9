# SPDX-License-Identifier: Apache-2.0
"""Time the FP8 all-reduce beside torch's, and a backward pass of DistributedDataParallel with its hook.

python benchmarks/collectives.py [--device cuda] [--ranks 2] [--megabytes 1 10 100 500] [--width 2048] [--layers 24]
"""

import argparse
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from fmtsim.distributed import ReductionState, all_reduce, fp8_hook, get_reduction
from fmtsim.distributed.arithmetic import Batch


def milliseconds(verb: Callable[[], object], repeat: int, device: torch.device) -> tuple[float, float]:
    """Return the time of one call among many, of the slowest rank, and the host's part of it."""
    for _ in range(3):
        verb()
    wait(device)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repeat):
        verb()
    host = time.perf_counter() - began
    wait(device)
    found = torch.tensor([time.perf_counter() - began, host], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return tuple((found / repeat * 1e3).tolist())


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def reductions(megabytes: list[float], repeat: int, device: torch.device, rank: int) -> None:
    names = ("torch fp32", "torch bf16", "all_reduce", "hook's", "hook's tree")
    show(rank, f"{'MB of fp32':>12s}" + "".join(f" {name:>18s}" for name in names) + "   ms (host)")
    for size in megabytes:
        x = torch.randn(max(int(size * 2**20) // 4, 1), generator=torch.Generator().manual_seed(rank)).to(device)
        copies = [x.clone(), x.bfloat16()]
        verbs: list[Callable[[], object]] = [partial(dist.all_reduce, copy) for copy in copies]
        verbs.append(partial(all_reduce, x, "msamp"))
        for reduction in (ReductionState("msamp"), ReductionState(replace(get_reduction("msamp"), algorithm="tree"))):
            verbs.append(partial(reduction.reduce, Batch(x.unsqueeze(0), (x.numel(),)), ("x", x.numel())))
        times = [milliseconds(verb, repeat, device) for verb in verbs]
        show(rank, f"{size:12g}" + "".join(f" {total:9.3f} ({host:6.3f})" for total, host in times))
        del x, copies, verbs


def backward(width: int, layers: int, repeat: int, device: torch.device, rank: int) -> None:
    """Time forward and backward of a stack of linear layers, with gradients summed in several ways, also in buckets
    of another size than torch's.
    """
    x = torch.randn(2048 if device.type == "cuda" else 64, width, device=device)
    runs = {"no sum": None, "torch fp32": None, "fp16 hook": None, "fp8 hook": 25, "fp8, 100 MB": 100}
    times = []
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

        times.append(milliseconds(step, repeat, device))
    show(rank, f"forward and backward, {layers} layers of {width} x {width}, {layers * width**2 * 4 / 2**20:g} MB")
    for name, (total, host) in zip(runs, times, strict=True):
        show(rank, f"{name:>12s} {total:9.3f} ({host:6.3f})   ms (host)")


def show(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


def work(rank: int, options: argparse.Namespace, port: int) -> None:
    cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=options.ranks
    )
    where = torch.cuda.get_device_name() if cuda else "CPU"
    show(rank, f"{options.ranks} ranks, {where}, torch {torch.__version__}")
    reductions(options.megabytes, options.repeat, device, rank)
    backward(options.width, options.layers, options.repeat, device, rank)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=float, nargs="*", default=[1, 10, 100, 500])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=10)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, args=(options, port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
