# SPDX-License-Identifier: Apache-2.0
"""What observing every n-th step costs a converted model: time of steps with it over time of steps without.

    python benchmarks/observe_cost.py --recipe te_mxfp8 --device cuda --width 4096 --tokens 4096

Steps with and without take turns, and the median ratio of all turns is printed: other work on the machine slows both.
"""

import argparse
import statistics
import time

import torch
from torch import nn

import fmtsim


class Block(nn.Module):
    """A feed-forward block with its norm and residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of x's shape."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", default="te_mxfp8")
    parser.add_argument("--target", help="a machine that multiplies; none leaves that to torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    for name, value in (("width", 512), ("tokens", 512), ("blocks", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(asked.width) for _ in range(asked.blocks))).to(
        asked.device, getattr(torch, asked.dtype)
    )
    fmtsim.convert(model, recipe=asked.recipe, target=asked.target)
    x = torch.randn(asked.tokens, asked.width, device=asked.device, dtype=getattr(torch, asked.dtype))

    clock = time.perf_counter if x.is_cuda else time.process_time  # of the processor: others may use it, too

    def steps() -> float:
        began = clock()
        for _ in range(asked.every):
            model.zero_grad()
            model(x).square().mean().backward()
        if x.is_cuda:
            torch.cuda.synchronize()
        return clock() - began

    def observed() -> float:
        began = clock()
        with fmtsim.observe(model, every=asked.every) as stats:
            steps()
        assert stats.layers
        return clock() - began

    steps(), observed()
    turns = [(steps(), observed()) for _ in range(asked.turns)]
    ratio = statistics.median(after / before for before, after in turns)
    plain = 1e3 * statistics.median(before for before, _ in turns) / asked.every
    print(f"{asked.recipe}, {asked.device}: {plain:.2f} ms a step, times {ratio:.3f} observed every {asked.every}")


if __name__ == "__main__":
    main()
