# SPDX-License-Identifier: Apache-2.0
"""Time a training step under recipes against the plain one in bfloat16, both compiled: ``python benchmarks/step.py``.

The model is a GPT of 124 million parameters at 8 x 1024 tokens, in bfloat16 autocast with float32 weights and torch's
fused AdamW; its tied output head stays in bfloat16. Each recipe's steps alternate with those of the plain model, and
the ratio is that of the medians.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

import fmtsim
from fmtsim.training.gpt import GPT, GPTConfig

RECIPES = (
    "te_current", "te_delayed", "te_block", "te_mxfp8", "fp8lm", "coat", "ao_tensorwise", "ao_rowwise", "unit_scaling",
    "te_nvfp4", "te_nvfp4_all", "mxfp4", "quartet",
)  # fmt: skip
SIZE = {"context": 1024, "width": 768, "layers": 12, "vocabulary": 50304}


class Step:
    """One model's training step."""

    def __init__(self, recipe: str | None, arguments: argparse.Namespace) -> None:
        size = SIZE | {name: value for name in SIZE if (value := getattr(arguments, name, None))}
        size["heads"] = size["width"] // 64
        self.model: nn.Module = GPT(GPTConfig(**size), seed=0).to(arguments.device)
        if recipe is not None:
            machine = {"target": arguments.target, "native": False if arguments.emulate else None}
            fmtsim.convert(
                self.model,
                recipe=recipe,
                generator=1,
                filter_fn=GPT.without_head,
                total_steps=1000,
                **(machine if arguments.target else {}),
            )
            some = torch.zeros(1, 8, dtype=torch.long, device=arguments.device)
            with torch.no_grad(), torch.autocast(arguments.device, torch.bfloat16):
                self.model(some, some)  # recipes that scale a model look at one batch before it is compiled
        fused = arguments.device == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)
        self.run = self.model if arguments.mode == "eager" else torch.compile(self.model, mode=arguments.mode)
        self.device = arguments.device

    def __call__(self, tokens: Tensor) -> Tensor:
        """Take a step and return the loss, without waiting for it."""
        with torch.autocast(self.device, torch.bfloat16):
            loss: Tensor = self.run(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def seconds(step: Step, tokens: Tensor, count: int) -> float:
    wait = torch.cuda.synchronize if tokens.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(count):
        step(tokens)
    wait()
    return (time.perf_counter() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--layers", type=int, help="fewer than 12 for a quick look")
    parser.add_argument("--width", type=int, help="another than 768, a multiple of 64")
    parser.add_argument("--target", help="what multiplies under the recipes, such as h200")
    parser.add_argument("--emulate", action="store_true", help="the target, also where the GPU is one")
    parser.add_argument("--mode", default="default", help="of torch.compile, or eager")
    arguments = parser.parse_args()
    torch._dynamo.config.recompile_limit = 1 + 2 * len(arguments.recipes)  # one model's code is compiled for each
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, SIZE["vocabulary"], (arguments.batch, SIZE["context"] + 1), generator=generator)
    tokens = tokens.to(arguments.device)
    plain = Step(None, arguments)
    for _ in range(3):
        plain(tokens)
    name = torch.cuda.get_device_name() if tokens.is_cuda else "the CPU"
    print(f"{arguments.batch} x {SIZE['context']} tokens on {name}, torch {torch.__version__}")
    print(f"{'recipe':16}{'step, ms':>10}{'plain, ms':>11}{'ratio':>8}{'first, s':>10}{'loss':>9}")
    for recipe in arguments.recipes:
        step = Step(recipe, arguments)
        start = time.perf_counter()
        for _ in range(3):
            step(tokens)
        first = seconds(step, tokens, 1) + time.perf_counter() - start
        times = [
            (seconds(step, tokens, arguments.steps), seconds(plain, tokens, arguments.steps))
            for _ in range(arguments.rounds)
        ]
        own, base = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        print(f"{recipe:16}{own:10.2f}{base:11.2f}{own / base:8.3f}{first:10.1f}{float(step(tokens)):9.4f}", flush=True)
        del step


if __name__ == "__main__":
    main()
