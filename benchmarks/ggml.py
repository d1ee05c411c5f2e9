# SPDX-License-Identifier: Apache-2.0
"""Time ggml's formats and HiF4 on one CPU thread beside a float32 copy: least processor time of runs in turns.

python benchmarks/ggml.py [--formats q4_0 q4_k] [--side 2048] [--repeats 7]
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import fmtsim


def least(functions: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Return the least processor time of each function, in seconds, of runs in turns."""
    seconds = [float("inf")] * len(functions)
    for _ in range(repeats):
        for i, function in enumerate(functions):
            begun = time.thread_time()
            function()
            seconds[i] = min(seconds[i], time.thread_time() - begun)
    return seconds


def main() -> None:
    """Print a row for each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    encoded = [name for name in fmtsim.list_formats("packed") if fmtsim.get_format(name).encoder]
    parser.add_argument("--formats", nargs="+", default=encoded)
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(arguments.side, arguments.side, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(x)
    print("| format | decode, share of a copy | Gelem/s | encode, share | Melem/s |\n|---|---|---|---|---|")
    for name in arguments.formats:
        q = fmtsim.encode(x, name)
        verbs = [lambda: out.copy_(x), lambda q=q: q.decode(), lambda name=name: fmtsim.encode(x, name)]
        copy, decode, encode = least(verbs, arguments.repeats)
        n = x.numel()
        shares = f"{copy / decode:.2f} | {n / decode / 1e9:.2f} | {copy / encode:.3f} | {n / encode / 1e6:.1f}"
        print(f"| {name} | {shares} |")


if __name__ == "__main__":
    main()
