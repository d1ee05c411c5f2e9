# SPDX-License-Identifier: Apache-2.0
"""Time a traced step against the same step: ``python benchmarks/trace.py --device cuda``.

The model is that of ``benchmarks/step.py`` (a GPT of 124 million parameters in bfloat16 autocast), in eager mode,
plain and under recipes; steps are forward, backward and AdamW. Traced and plain steps alternate, and the ratio is that
of the medians; a traced step includes the record of all its operations.
"""

import argparse
import statistics
import time

import torch
from step import Step

import fmtsim


def seconds(step: Step, tokens: torch.Tensor, traced: bool, level: str) -> float:
    began = time.perf_counter()
    if traced:
        with fmtsim.tracing(step.model, level=level) as run:
            step(tokens)
        assert run.trace.operations
    else:
        step(tokens)
    if step.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--recipes", default="none,te_current", help="'none' is the plain model")
    parser.add_argument("--target", help="a GPU whose products are emulated or run, such as h200")
    parser.add_argument("--emulate", action="store_true", help="emulate the target's products")
    parser.add_argument("--layers", type=int, help="instead of 12")
    parser.add_argument("--width", type=int, help="instead of 768")
    parser.add_argument("--vocabulary", type=int, help="instead of 50304")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--level", default="modules", choices=("modules", "aten"))
    arguments = parser.parse_args()
    arguments.mode = "eager"
    size = arguments.batch, arguments.tokens + 1
    tokens = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(0)).to(arguments.device)
    for recipe in arguments.recipes.split(","):
        step = Step(None if recipe == "none" else recipe, arguments)
        for traced in (False, True, False, True):
            seconds(step, tokens, traced, arguments.level)
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(arguments.steps):
            for traced, found in times.items():
                found.append(seconds(step, tokens, traced, arguments.level))
        plain, traced_time = (statistics.median(times[each]) for each in (False, True))
        print(f"{recipe}: plain {1e3 * plain:.1f} ms, traced {1e3 * traced_time:.1f} ms, {traced_time / plain:.2f}x")


if __name__ == "__main__":
    main()
