# SPDX-License-Identifier: Apache-2.0
"""Train a GPT of 10.8 million parameters under recipes on a GPU: ``python benchmarks/training.py [RECIPE ...]``.

Bytes of Python's standard library, 16 x 256 a step, AdamW with a cosine schedule in bfloat16 autocast, compiled. Prints
the loss on held-out text (mean of three seeds, and their spread), what it is above that of bfloat16, and the time of a
step over that in bfloat16; writes them as JSON with ``--record``.
"""

import argparse
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fmtsim
from benchmarks.suite.device import layers_machine
from fmtsim.lab.cli.output import write_json
from fmtsim.lab.training.corpus import Corpus, load_corpus, sample
from fmtsim.lab.training.decoders import GPT, GPTConfig
from fmtsim.lab.training.learner import schedule

RECIPES = ("te_delayed", "te_current", "te_block", "te_mxfp8", "te_nvfp4", "mxfp4", "quartet", "quartet2")
SIZE = {"context": 256, "width": 384, "layers": 6, "heads": 6}


def run(recipe: str | None, arguments: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """Train with each seed and return the losses, and the milliseconds of a step."""
    size = GPTConfig(**SIZE | ({"layers": 2, "width": 128, "heads": 2} if arguments.tiny else {}))
    model: nn.Module = GPT(size, seed=0).to(arguments.device)
    if recipe is not None:
        fmtsim.convert(model, recipe=recipe, generator=1, filter_fn=GPT.without_head, total_steps=arguments.steps)
    fresh = fmtsim.state(model) if recipe is not None else None
    compiled = torch.compile(model, mode=arguments.mode)
    losses, times = [], []
    for seed in range(arguments.seeds):
        model.load_state_dict(GPT(size, seed=seed).state_dict())
        if fresh is not None:
            fmtsim.load_state(model, fresh)
        times.append(train(model, compiled, seed, recipe, arguments, corpus))
        losses.append(validate(model, compiled, arguments, corpus))
    return {"losses": losses, "milliseconds": min(times)}


def train(
    model: nn.Module, compiled: Any, seed: int, recipe: str | None, arguments: argparse.Namespace, corpus: Corpus
) -> float:
    """Train and return the milliseconds of a step, without the first tenth of all steps."""
    fused = arguments.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    generator, start = torch.Generator().manual_seed(seed), 0.0
    data = corpus.train.to(arguments.device)
    starts = torch.randint(data.numel() - 257, (arguments.steps, 16, 1), generator=generator).to(arguments.device)
    offsets = torch.arange(257, device=arguments.device)
    for step in range(arguments.steps):
        if step == arguments.steps // 10:
            start = clock(arguments.device)
        if recipe is not None:
            fmtsim.nn.set_step(model, step)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * schedule(step, arguments.steps)
        text = data[starts[step] + offsets].long()
        with torch.autocast(arguments.device, torch.bfloat16):
            loss = compiled(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return (clock(arguments.device) - start) / (arguments.steps - arguments.steps // 10) * 1e3


def clock(device: str) -> float:
    """Return the time at which everything asked for is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def validate(model: nn.Module, compiled: Any, arguments: argparse.Namespace, corpus: Corpus) -> float:
    """Return the mean loss of 64 batches of held-out text, the same for all models, in nats a byte."""
    generator, losses = torch.Generator().manual_seed(1234), []
    with torch.no_grad(), torch.autocast(arguments.device, torch.bfloat16):
        for _ in range(64):
            pair = sample(corpus.validation, 16, SIZE["context"], generator, arguments.device)
            losses.append(compiled(*pair).float().clone())
    return float(torch.stack(losses).mean())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--mode", default="reduce-overhead", help="of torch.compile")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a quick look")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # one model's code is compiled for each recipe
    corpus = load_corpus(None, SIZE["context"])
    about = {**layers_machine(arguments.device), "command": shlex.join(["python", *sys.argv])}
    results: list[dict[str, Any]] = []
    columns = {"loss": ".4f", "spread": ".4f", "over_bf16": "+.4f", "milliseconds": ".2f", "ratio": ".2f"}
    print(f"{'recipe':14}" + "".join(f"{name:>14}" for name in columns))
    for recipe in (None, *arguments.recipes):
        run_of = run(recipe, arguments, corpus)
        mean, spread = statistics.mean(run_of["losses"]), max(run_of["losses"]) - min(run_of["losses"])
        result = {"case": recipe or "bf16", **run_of, "loss": mean, "spread": spread}
        base = results[0] if results else result
        result |= {"over_bf16": mean - base["loss"], "ratio": result["milliseconds"] / base["milliseconds"]}
        results.append(result)
        cells = (f"{result[name]:14{spec}}" for name, spec in columns.items())
        print(f"{result['case']:14}" + "".join(cells), flush=True)
        if arguments.record is not None:
            write_json(arguments.record, {"machine": about, "results": results})


if __name__ == "__main__":
    main()
