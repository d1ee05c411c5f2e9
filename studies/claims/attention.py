# SPDX-License-Identifier: Apache-2.0
"""The claim of FlashAttention-3: FP8 attention with less than half of the error."""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtsim.nn.sdpa import flash_attention_3, quantised_attention
from studies.claims.claim import Claim, Measured, Tell, near, settings
from studies.claims.experiment import generator, told


def flash_attention(
    tell: Tell, *, heads: int, queries: int, keys: int, features: int, outliers: float, times: float, seed: int
) -> Measured:
    """Measure the root mean squared error of FP8 attention on normal numbers with rare outliers."""
    source = generator(seed)

    def numbers(length: int) -> Tensor:
        shape = (1, heads, length, features)
        rare = torch.rand(shape, generator=source) < outliers
        return torch.randn(shape, generator=source) + times * torch.randn(shape, generator=source) * rare

    q, k, v = numbers(queries), numbers(keys), numbers(keys)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    full = flash_attention_3()
    baseline = flash_attention_3(target=None, rotate=False, blocks=False)
    configs = {
        "baseline": dataclasses.replace(baseline, offset=0), "FlashAttention-3": full,
        "without blocks": flash_attention_3(blocks=False), "without rotation": flash_attention_3(rotate=False),
    }  # fmt: skip
    errors = {}
    for name, config in told(tell, list(configs.items())):
        y = quantised_attention(q, k, v, config=config, generator=seed).double()
        errors[name] = float((y - exact).square().mean().sqrt())
    return Measured(numbers=errors | {"baseline / FlashAttention-3": errors["baseline"] / errors["FlashAttention-3"]})


_TABLE = {"baseline": 2.4e-2, "FlashAttention-3": 9.1e-3, "without blocks": 9.3e-3, "without rotation": 2.4e-2}

CLAIMS = (
    Claim(
        name="flash_attention_3", recorded="shown in part", bounds="source", seeds=5, slow=True,
        says="random signs, rotations and block scales lower the error of FP8 attention with outliers 2.6 times",
        source="Shah et al., FlashAttention-3, arXiv:2407.08608, table 3",
        measure=flash_attention,
        settings=settings(heads=8, queries=1024, keys=4096, features=128, outliers=1e-3, times=10.0, seed=1),
        card=settings(keys=8448),
        expected=(
            near("baseline / FlashAttention-3", 2.6, 0.02, "paper", part=(1.0, math.inf)),
            *(near(name, error, 0.025, "paper", part=(error / 2, error * 2)) for name, error in _TABLE.items()),
        ),
        notes="4096 keys, 1024 queries, 8 heads of 128; the source gives no length. Bounds are its two digits; a part "
        "is any gain, or an error within a factor of two. The keys decide: with 8448, a length of the source's "
        "benchmarks, the ratio is 2.77 (0.0251, 0.00905, 0.00921 and 0.0213). There 9 % of the queries have an outlier "
        "that meets one of a key, and two thirds of the baseline's squared error; a rotation spreads it. The place of "
        "the tensor's scale changes nothing, softmax weights in float16, as the source's baseline has them, 1 to 2 %",
    ),
)  # fmt: skip
