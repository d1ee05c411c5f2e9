# SPDX-License-Identifier: Apache-2.0
"""Hold ``fmtsim.attribute``'s estimates to operands switched one at a time: ``python -m benchmarks.attribution``.

Small models are trained for some dozen steps, so that their losses have structure; the rank correlation (Spearman) of
estimates and exact costs over all operands is printed, of the loss, of the KL, and of the noise of gradients.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fmtsim
from fmtsim.lab.analysis.attribution import FIELDS
from fmtsim.lab.training.decoders import GPT, GPTConfig, Llama

RECIPES = ("te_current", "mxfp8", "te_nvfp4_all", "e2m1", "int8")
TOKENS, LENGTH = 64, 32

Batch = Callable[[int], Any]


def tokens(seed: int, rows: int = 16) -> Tensor:
    """Return sequences that follow a rule half of the time: each token is a multiple of the last one."""
    source = torch.Generator().manual_seed(seed)
    found = torch.randint(0, TOKENS, (rows, LENGTH + 1), generator=source)
    follows = torch.rand(rows, LENGTH + 1, generator=source) < 0.5
    for i in range(1, LENGTH + 1):
        found[:, i] = torch.where(follows[:, i], (5 * found[:, i - 1] + 1) % TOKENS, found[:, i])
    return found


def _own(model: type[nn.Module]) -> tuple[nn.Module, Batch]:
    sizes = GPTConfig(context=LENGTH, width=64, layers=4, heads=4, vocabulary=TOKENS)
    return model(sizes, seed=0), lambda seed: ((t := tokens(seed))[:, :-1], t[:, 1:])  # type: ignore[call-arg]


def _hf_llama() -> tuple[nn.Module, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config), lambda seed: {"input_ids": (t := tokens(seed)[:, :-1]), "labels": t}


def _hf_vit() -> tuple[nn.Module, Batch]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, image_size=16, patch_size=4,
        num_labels=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    shapes = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(99))

    def batch(seed: int) -> dict[str, Tensor]:
        source = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 8, (32,), generator=source)
        return {"pixel_values": shapes[labels] + 2 * torch.randn(32, 3, 16, 16, generator=source), "labels": labels}

    return ViTForImageClassification(config), batch


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "GPT": lambda: _own(GPT),
    "Llama": lambda: _own(Llama),
    "transformers Llama": _hf_llama,
    "transformers ViT": _hf_vit,
}


def trained(name: str, steps: int) -> tuple[nn.Module, Any]:
    """Return a model after some steps of Adam, and a batch that it has not seen."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(steps):
        optimizer.zero_grad()
        given = batch(step)
        output = model(**given) if isinstance(given, dict) else model(*given)
        (output if isinstance(output, Tensor) else output.loss).backward()
        optimizer.step()
    return model, batch(10_000)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the rank correlation of two lists; equal values share a rank."""
    ranks = torch.stack([_ranks(torch.tensor(each, dtype=torch.float64)) for each in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def correlations(model: nn.Module, batch: Any, **more: Any) -> tuple[dict[str, float], float, float]:
    """Return the rank correlations by kind of cost, and how long the estimate and the exact costs took in seconds."""
    start = time.perf_counter()
    estimate = fmtsim.attribute(model, batch, **more)
    middle = time.perf_counter()
    exact = fmtsim.attribute(model, batch, exact=True, **more)
    spent = middle - start, time.perf_counter() - middle
    found = {}
    for by, field in FIELDS.items():
        pairs = [(getattr(a, field), getattr(b, field)) for a, b in zip(estimate.rows, exact.rows, strict=True)]
        pairs = [pair for pair in pairs if None not in pair]
        if pairs:
            found[by] = spearman(*zip(*pairs, strict=True))
    return found, *spent


def _ranks(values: Tensor) -> Tensor:
    below = (values[:, None] > values).sum(1)
    return below + ((values[:, None] == values).sum(1) + 1) / 2


def main() -> None:
    """Print the table of docs/attribution.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=RECIPES, help="recipes, or formats of every operand")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    print("| Model | Formats | Loss | KL | Gradient | Estimate, s | Exact, s |\n|---|---|--:|--:|--:|--:|--:|")
    for name in given.models:
        model, batch = trained(name, given.steps)
        for formats in given.formats:
            how = {"recipe": formats} if formats in fmtsim.list_recipes(kind="training") else {"format": formats}
            found, quick, slow = correlations(model, batch, **how)
            cells = [f"{found[by]:.3f}" if by in found else "-" for by in FIELDS]
            print(f"| {name} | {formats} | {' | '.join(cells)} | {quick:.1f} | {slow:.1f} |", flush=True)


if __name__ == "__main__":
    main()
