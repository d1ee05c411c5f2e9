# SPDX-License-Identifier: Apache-2.0
"""The claim of quantisation-aware training: it recovers most of what quantising afterwards loses."""

import copy

import torch

from fmtsim.lab.reproduce.claim import Claim, Measured, Tell, near, settings
from fmtsim.lab.reproduce.experiment import last_loss
from fmtsim.lab.reproduce.widths import text
from fmtsim.lab.training.decoders import GPT, GPTConfig
from fmtsim.nn.convert import convert

_LENGTH = 32


def recovered(
    tell: Tell, *, recipe: str, steps: int, tuned: int, lr: float, width: int, batch: int, seed: int
) -> Measured:
    """Train a small GPT, tune it further with and without its quantisers, and quantise both; compare perplexities.

    The part that is recovered is that of the perplexity lost by the model that was tuned without.
    """
    model = GPT(GPTConfig(context=_LENGTH, width=width, layers=2, heads=4), seed)
    _train(model, steps, lr, batch, seed)
    tell(0.4)
    aware = convert(copy.deepcopy(model), recipe, generator=seed, filter_fn=GPT.without_head)
    for network in (model, aware):
        _train(network, tuned, lr / 10, batch, seed + 1)
    tell(0.9)
    full = _perplexity(model, seed)
    after = _perplexity(convert(model, recipe, generator=seed, filter_fn=GPT.without_head), seed)
    during = _perplexity(aware, seed)
    return Measured(
        numbers={
            "perplexity, high precision": full, "perplexity, quantised afterwards": after,
            "perplexity, quantised in training": during, "recovered, %": 100 * (after - during) / (after - full),
        },
    )  # fmt: skip


def _train(model: torch.nn.Module, steps: int, lr: float, batch: int, seed: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)

    def loss_of(step: int) -> torch.Tensor:
        tokens = text(batch, _LENGTH + 1, 1_000_000 * seed + step)
        return model(tokens[:, :-1], tokens[:, 1:])  # type: ignore[no-any-return]

    last_loss(steps, 5, loss_of, optimizer)


@torch.no_grad()
def _perplexity(model: torch.nn.Module, seed: int) -> float:
    tokens = text(256, _LENGTH + 1, 1_000_000 * seed + 999_999)
    return float(model(tokens[:, :-1], tokens[:, 1:]).double().exp())


CLAIMS = (
    Claim(
        name="qat", recorded="not shown", bounds="before", seeds=5, slow=True,
        says="quantisation-aware training recovers 68 % of the perplexity that int4 weights and int8 activations lose",
        source="PyTorch, Quantization-Aware Training for Large Language Models (Llama 3 on wikitext); TorchAO 36027d8",
        measure=recovered,
        settings=settings(recipe="ao_int4_qat", steps=150, tuned=50, lr=4e-3, width=64, batch=8, seed=0),
        expected=(near("recovered, %", 68.0, 0.1, "paper", part=(10.0, 100.0)),),
        notes="a GPT of two blocks on a made language, of whose perplexity four bits lose a few parts in a thousand "
        "at most: less than the scatter of tuning, so that nothing is there to recover",
    ),
)  # fmt: skip
