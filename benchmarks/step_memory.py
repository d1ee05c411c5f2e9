# SPDX-License-Identifier: Apache-2.0
"""Measure the memory of training steps on a GPU, and estimate it: ``python benchmarks/step_memory.py``.

Llamas in bfloat16, which compute the loss in bfloat16, too, with torch's AdamW, whose states are bfloat16 as well. The
gradients of an earlier backward pass are there, as with gradient accumulation, so that all that the estimate counts is
there at once when the pass begins.
"""

import argparse
import gc
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fmtsim
from fmtsim.lab.memory import MemoryEstimate, ModelSize, StoredFormats
from fmtsim.lab.memory.estimate import GB
from fmtsim.lab.training.decoders import GPTConfig, Llama, LlamaBlock

SIZES = ((1024, 8, 16, 4096, 4), (2048, 16, 16, 2048, 4), (4096, 8, 32, 4096, 2))
"""Width, blocks, heads, tokens of a sequence, sequences."""
HEADER = ("Width x blocks, tokens", "Checkpointing", "Before the step, GB", "After the forward pass", "Peak")


def measured(config: GPTConfig, batch: int, again: str) -> tuple[int, int, int]:
    """Return the bytes that are allocated before a step, after its forward pass, and at most."""
    model = Llama(config, 0).bfloat16().cuda()
    if again == "full":
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.randint(0, config.vocabulary, (batch, config.context + 1), device="cuda")

    def loss() -> Tensor:
        return model(tokens[:, :-1], tokens[:, 1:])  # type: ignore[no-any-return]

    for _ in range(2):  # states exist from the first step on
        loss().backward()
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, value = torch.cuda.memory_allocated(), loss()
    behind = torch.cuda.memory_allocated()
    value.backward()
    return before, behind, torch.cuda.max_memory_allocated()


def estimate(config: GPTConfig, batch: int, again: str) -> MemoryEstimate:
    """Return the estimate of the same step."""
    with torch.device("meta"):
        inner = LlamaBlock(config).mlp.up_proj.out_features
    size = ModelSize(
        name="llama", blocks=config.layers, hidden=config.width, intermediate=inner, heads=config.heads,
        kv_heads=config.heads, head_dim=config.width // config.heads, vocabulary=config.vocabulary, tied=True,
    )  # fmt: skip
    return fmtsim.lab.training_memory(
        size, optimizer="deepseek_v3", formats=StoredFormats(master=None, loss="bf16"), batch=batch,
        tokens=config.context, checkpointing=again,  # type: ignore[arg-type]
    )  # fmt: skip


def rows(vocabulary: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows: measured and estimated."""
    for width, blocks, heads, context, batch in SIZES:
        config = GPTConfig(context=context, width=width, layers=blocks, heads=heads, vocabulary=vocabulary)
        for again in ("none", "full"):
            gc.collect()  # a block that is checkpointed refers to itself
            expected = estimate(config, batch, again)
            before = sum(expected[name] for name in ("weights", "gradients", "first moment", "second moment"))
            behind = before + expected["activations"] + expected["head and loss"]
            pairs = zip(measured(config, batch, again), (before, behind, expected.total), strict=True)
            cells = (f"{found / GB:.3f} ({wanted / GB:.3f})" for found, wanted in pairs)
            yield f"{width} x {blocks}, {batch} x {context}", again, *cells


def main() -> None:
    """Print a table: measured, and in brackets estimated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=32000)
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for row in rows(parser.parse_args().vocabulary):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
