# SPDX-License-Identifier: Apache-2.0
"""Measure what autograd keeps of a block, and what is estimated: ``python benchmarks/activation_memory.py``.

Storages are counted once, Parameters and what layers keep of their weights not. In the emulation each layer keeps its
own elements of its input, on a GPU in bfloat16, so that a second number counts each different input once, in the
recipe's format. The last number is that of ``fmtsim.lab.training_memory``.
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fmtsim
from fmtsim.gemm.layers.watch import Watcher, watching
from fmtsim.lab.memory import ModelSize
from fmtsim.lab.training.decoders import Block, GPTConfig, LlamaBlock

RUNS = (("Llama", None), ("Llama", "te_current"), ("Llama", "coat"), ("GPT", None), ("GPT", "te_current"),
        ("GPT", "coat"), ("GPT", "checkpointing"))  # fmt: skip


def bytes_kept(block: nn.Module, x: Tensor) -> tuple[int, int]:
    """Return the bytes that autograd keeps: as they are, and with inputs of layers in the formats of their recipe."""
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    own |= {b.untyped_storage().data_ptr() for b in block.buffers()}
    kept: dict[int, Tensor] = {}
    of_layers: set[int] = set()  # storages that only layers keep
    inputs: dict[tuple[int, Any], float] = {}
    weight: torch.Size | None = None  # of the layer that runs

    def pack(t: Tensor) -> Tensor:
        at = t.untyped_storage().data_ptr()
        if at not in own and t.shape != weight:
            known = at in kept
            kept[at] = t  # which keeps the address from being used anew
            if weight is None:
                of_layers.discard(at)
            elif not known:
                of_layers.add(at)
        return t

    class Layers(Watcher):
        def layer(self, run: Any, layer: Any, x: Tensor, w: Tensor) -> Tensor:
            nonlocal weight
            q, weight = layer.config.fprop.a, w.shape
            if q.format is not None and layer.config.wgrad.b.source == "forward":  # codes are kept, else the input
                inputs[x.untyped_storage().data_ptr(), q] = x.numel() * q.format.bits / 8
            alive.append(x)
            try:
                return run(x, w)
            finally:
                weight = None

    alive: list[Tensor] = []
    with saved_tensors_hooks(pack, lambda t: t), watching(Layers()):
        block(x)
    total = sum(t.untyped_storage().nbytes() for t in kept.values())
    rest = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in of_layers)
    return total, rest + round(sum(inputs.values()))


def estimate(block: nn.Module, recipe: str | None, tokens: int, width: int, heads: int) -> float:
    """Return the bytes of a token that ``training_memory`` counts of a block in bfloat16."""
    gated = isinstance(block, LlamaBlock)
    inner = block.mlp.up_proj.out_features if gated else 4 * width
    size = ModelSize(name="block", blocks=1, hidden=width, intermediate=inner, heads=heads, kv_heads=heads,
                     head_dim=width // heads, vocabulary=1, gated=gated)  # fmt: skip
    again = recipe == "checkpointing"
    found = fmtsim.lab.training_memory(size, None if again else recipe, tokens=tokens,
                                   checkpointing="full" if again else "none")  # fmt: skip
    return found["activations"] / tokens


class Checkpointed(nn.Module):
    """Run a block again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to itself."""
        return checkpoint(self.block, x, use_reentrant=True)


def main() -> None:
    """Print the table of docs/howto/memory.md, whose first rows docs/recipes.md has."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, size in (("width", 512), ("heads", 8), ("tokens", 1024)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--device", default="cpu")
    sizes = parser.parse_args()
    print("| Block | Recipe | Kept by the emulation | In the recipe's formats | Estimate |\n|---|---|---|---|---|")
    for kind, recipe in RUNS:
        torch.manual_seed(0)
        config = GPTConfig(context=sizes.tokens, width=sizes.width, heads=sizes.heads)
        block = (LlamaBlock(config) if kind == "Llama" else Block(sizes.width, sizes.heads)).bfloat16()
        block = block.to(sizes.device)
        expected = estimate(block, recipe, sizes.tokens, sizes.width, sizes.heads)
        if recipe == "checkpointing":
            block = Checkpointed(block)
        elif recipe is not None:
            fmtsim.convert(block, recipe=recipe)
        x = torch.randn(1, sizes.tokens, sizes.width).bfloat16().to(sizes.device).requires_grad_()
        emulated, system = (count / sizes.tokens for count in bytes_kept(block, x))
        cells = (f"{count / sizes.width:.2f}" for count in (emulated, system, expected))
        print(f"| {kind} | {recipe or 'plain bfloat16'} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
