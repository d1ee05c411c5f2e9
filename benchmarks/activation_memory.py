"""Measure what autograd keeps of a block of a Llama between its passes: ``python benchmarks/activation_memory.py``.

Storages are counted once, Parameters and what layers keep of their weights not. The emulation holds elements of FP8
inputs of layers in bfloat16, so that a second number counts them as the recipe's format has them: of a layer each
different input once.
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import fmtsim
from fmtsim.gemm.layers.watch import Watcher, watching
from fmtsim.training.gpt import GPTConfig
from fmtsim.training.llama import LlamaBlock

RECIPES = (None, "te_current", "coat")


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


def main() -> None:
    """Print the table of docs/recipes.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, size in (("width", 512), ("heads", 8), ("tokens", 1024)):
        parser.add_argument(f"--{name}", type=int, default=size)
    sizes = parser.parse_args()
    print("| Recipe | Kept by the emulation | In the recipe's formats | Of bfloat16 |\n|---|---|---|---|")
    base = 0
    for recipe in RECIPES:
        torch.manual_seed(0)
        block = LlamaBlock(GPTConfig(context=sizes.tokens, width=sizes.width, heads=sizes.heads)).bfloat16()
        if recipe is not None:
            fmtsim.convert(block, recipe=recipe)
        x = torch.randn(1, sizes.tokens, sizes.width).bfloat16().requires_grad_()
        emulated, system = bytes_kept(block, x)
        base = base or system
        cells = (f"{count / sizes.tokens / sizes.width:.2f}" for count in (emulated, system))
        print(f"| {recipe or 'plain bfloat16'} | {' | '.join(cells)} | {system / base:.2f} |")


if __name__ == "__main__":
    main()
