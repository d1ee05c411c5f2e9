# SPDX-License-Identifier: Apache-2.0
"""The claim of quantisation-aware training: it recovers most of what quantising afterwards loses."""

import copy
import math
from typing import Any

import torch

from fmtsim.lab.training.corpus import load_corpus, sample
from fmtsim.lab.training.decoders import GPT, GPTConfig
from fmtsim.nn.convert import convert
from studies.claims.claim import Claim, Expected, Measured, Tell, near, settings
from studies.claims.experiment import generator, trainings
from studies.claims.gpts import train_text
from studies.claims.widths import text

_LENGTH = 32


def recovered(tell: Tell, **how: object) -> Measured:
    """Train a small GPT, tune it further with and without its quantisers, and quantise both; compare perplexities.

    The part that is recovered is that of the perplexity lost by the model that was tuned without.
    """
    ((full, after, during),) = trainings(tell, perplexities_of, [how])
    return Measured(
        numbers={
            "perplexity, high precision": full, "perplexity, quantised afterwards": after,
            "perplexity, quantised in training": during, "recovered, %": 100 * (after - during) / (after - full),
            "lost, %": 100 * (after / full - 1),
        },
    )  # fmt: skip


def perplexities_of(
    *, recipe: str, steps: int, tuned: int, lr: float, decay: float, clip: float, warmup: int,
    width: int, batch: int, seed: int, layers: int = 2, heads: int = 4, context: int = _LENGTH, real: bool = False,
    mixed: bool = False, device: str = "cpu",
) -> list[float]:  # fmt: skip
    """Return the perplexities of a model tuned in high precision, of the same quantised, and of one tuned quantised.

    All are of one pretrained model, and see the same text: another process would train another model on a GPU, whose
    gradients of embeddings are sums in any order. The rate of tuning is a tenth of the first one and does not fall.
    ``mixed`` trains under autocast to bfloat16; perplexities are those of float32.
    """
    model = GPT(GPTConfig(context=context, width=width, layers=layers, heads=heads), seed).to(device)
    text_of: dict[str, Any] = {"batch": batch, "clip": clip, "context": context, "real": real, "mixed": mixed}
    train_text(model, 1000 * seed, lr=lr, steps=steps, decay=decay, warmup=warmup, **text_of)
    aware = convert(copy.deepcopy(model), recipe, generator=seed, filter_fn=GPT.without_head)
    for network in (model, aware):
        train_text(network, 1000 * (seed + 1), lr=lr / 10, steps=tuned, decay=0.0, warmup=0, **text_of)
    after = convert(copy.deepcopy(model), recipe, generator=seed, filter_fn=GPT.without_head)
    return [_perplexity(network, seed, context, real) for network in (model, after, aware)]


@torch.no_grad()
def _perplexity(model: GPT, seed: int, context: int, real: bool) -> float:
    """Return the perplexity of 256 lines of the made language, or of 2048 windows of the held-out tenth of sources."""
    device, source = str(model.position.device), generator(seed)
    if real:
        held_out = load_corpus(None, context).validation
        batches = [sample(held_out, 64, context, source, device) for _ in range(32)]
    else:
        tokens = text(256, context + 1, 1_000_000 * seed + 999_999).to(device)
        batches = [(tokens[:, :-1], tokens[:, 1:])]
    return float(torch.stack([model(*batch).double() for batch in batches]).mean().exp())


CLAIMS = (
    Claim(
        name="qat", recorded="not shown", bounds="after", seeds=5, slow=True,
        says="quantisation-aware training recovers 68 % of the perplexity that int4 weights and int8 activations lose",
        source="PyTorch, Quantization-Aware Training for Large Language Models (Llama 3 on wikitext); TorchAO 36027d8",
        measure=recovered,
        settings=settings(
            recipe="ao_int4_qat", steps=150, tuned=50, lr=4e-3, decay=0.0, clip=math.inf, warmup=0,
            width=64, batch=8, seed=0,
        ),
        recorded_on_card="not shown",
        card=settings(
            steps=1500, tuned=500, lr=1e-3, decay=0.9, clip=1.0, warmup=20, width=512, batch=32, layers=8, heads=8,
            context=256, real=True, mixed=True,
        ),
        expected=(
            Expected(name="lost, %", low=1.0),  # of less there is nothing to recover
            near("recovered, %", 68.0, 0.1, "paper", part=(10.0, 100.0)),
            Expected(name="perplexity, high precision"),
            Expected(name="perplexity, quantised afterwards"),
            Expected(name="perplexity, quantised in training"),
        ),
        notes="a GPT of two blocks on a made language, of whose perplexity four bits lose a few parts in a thousand "
        "at most: less than the scatter of tuning, so that nothing is there to recover. On a GPU 25 million parameters "
        "on Python's sources, tuned on the same text; the source tunes Llama 3 8B on C4. Its 96 % of HellaSwag's "
        "accuracy is not tried",
    ),
)  # fmt: skip
