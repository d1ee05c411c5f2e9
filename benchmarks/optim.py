# SPDX-License-Identifier: Apache-2.0
"""Time one step of AdamW, or of another rule, on the parameters of a GPT of 124 million, as it is and beside torch.

python benchmarks/optim.py [--device cuda] [--dtype bfloat16] [--width 768] [--layers 12] [--repeat 20]
    [--schemes bnb8 Lion:bnb8 Madam:lns_madam]
"""

import argparse
import statistics
import time

import torch

import fmtsim

VOCABULARY, CONTEXT = 50257, 1024


def shapes(width: int, layers: int) -> list[tuple[int, ...]]:
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,)]
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(VOCABULARY, width), (CONTEXT, width), *(block * layers), (width,), (width,)]


def parameters(sizes: list[tuple[int, ...]], device: str, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    found = []
    for size in sizes:
        p = torch.nn.Parameter((torch.randn(size, device=device) * 0.02).to(dtype))
        p.grad = torch.randn_like(p) * 1e-3
        found.append(p)
    return found


def milliseconds(optimizer: torch.optim.Optimizer, repeat: int, device: str) -> tuple[float, float, float]:
    """Return the median time of a step, its time among many without a pause, and the host's part of those."""
    cuda = device == "cuda"
    single = []
    for _ in range(3):
        optimizer.step()
    for _ in range(repeat):
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        single.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(repeat):
        optimizer.step()
    host = time.perf_counter() - began
    if cuda:
        torch.cuda.synchronize()
    total = time.perf_counter() - began
    return statistics.median(single) * 1e3, total / repeat * 1e3, host / repeat * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--schemes", nargs="*", default=["bnb8", "bnb8_2048", "ao_8bit"], metavar="[RULE:]SCHEME")
    options = parser.parse_args()
    sizes = shapes(options.width, options.layers)
    count = sum(torch.Size(size).numel() for size in sizes)
    where = f"{options.dtype}, {options.device}, {torch.get_num_threads()} threads"
    print(f"{len(sizes)} tensors, {count} parameters, {where}")
    runs = {"torch foreach": {"foreach": True}, "torch fused": {"fused": True}}
    print(f"{'':20s} {'step':>10s} {'of many':>10s} {'host':>10s}   ms")
    for name in (*runs, *options.schemes):
        torch.manual_seed(0)
        ps = parameters(sizes, options.device, getattr(torch, options.dtype))
        if name in runs:
            optimizer = torch.optim.AdamW(ps, lr=1e-3, **runs[name])
        else:
            rule, _, scheme = name.rpartition(":")
            optimizer = getattr(fmtsim.optim, rule or "AdamW")(ps, lr=1 / 1024, state=scheme)
        print(f"{name:20s}" + "".join(f" {t:10.3f}" for t in milliseconds(optimizer, options.repeat, options.device)))
        del ps, optimizer


if __name__ == "__main__":
    main()
