# SPDX-License-Identifier: Apache-2.0
"""What a comparison of two trainings is: two schemes, a model, and how long and on how many ranks it is trained."""

import math
from dataclasses import dataclass

from fmtsim.lab.training.gpt import GPTConfig, check_size
from fmtsim.lab.training.schemes import Scheme
from fmtsim.support.errors import ArgumentError

CLIP, FINAL_SHARE = 1.0, 0.1  # norm of gradients, share of the peak rate after the last step
RANKS = 2  # of a low-precision reduction, unless told otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Say everything about a comparison but the text.

    Args:
        simulated: The scheme under test.
        baseline: What it is compared with.
        model: Sizes of the model.
        architecture: ``"gpt"``, ``"llama"``, or a function that returns a model, as ``"FILE.py:function"``.
        steps: Optimizer steps of each run.
        batch_size: Windows a step.
        ranks: Simulated ranks that share the windows of a step; None is 2 where the scheme reduces gradients in few
            bits, else 1. The baseline's gradients are reduced over as many, in float32.
        lr: Peak learning rate of AdamW; it warms up over a tenth of the steps (at least 20, or half of
            a shorter run) and decays to ``final_rate``, as a cosine. Madam's is ``MADAM_RATE`` times as large.
        final_rate: Share of the peak that is left after the last step.
        clip: Norm at which gradients are clipped; None clips none.
        seed: Of weights, batches and stochastic rounding.
        device: Where models and batches are.
    """

    simulated: Scheme
    baseline: Scheme
    model: GPTConfig
    architecture: str = "gpt"
    steps: int
    batch_size: int
    ranks: int | None = None
    lr: float
    final_rate: float = FINAL_SHARE
    clip: float | None = CLIP
    seed: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            check_size(name, getattr(self, name))
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ArgumentError(f"--lr {self.lr} is not allowed; choose a number above 0, such as 2e-3")
        if not 0 <= self.final_rate <= 1:
            raise ArgumentError(f"--final-rate {self.final_rate} is not a share; choose 0 to 1")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ArgumentError(f"--clip {self.clip} is not a norm; choose a number above 0, or 0 for no clipping")
        if not 0 <= self.seed < 1 << 63:
            raise ArgumentError(f"--seed {self.seed} is not allowed; choose 0 to 2**63 - 1")
        self._share()

    def _share(self) -> None:
        """Fill in the number of ranks, and refuse one that does not fit."""
        reduction = self.simulated.reduced_by if self.simulated.reduces else None
        asked = self.ranks is not None
        ranks = self.ranks if self.ranks is not None else RANKS if reduction else 1
        check_size("ranks", ranks)
        if reduction and ranks == 1:
            raise ArgumentError(
                f"--ranks 1 has no gradients to reduce by {reduction}; pass --ranks 2 or more, or --reduction fp32"
            )
        if self.batch_size % ranks:
            default = "" if asked else f" (the default where gradients are reduced by {reduction})"
            raise ArgumentError(
                f"--ranks {ranks}{default} does not divide --batch-size {self.batch_size}; choose a divisor"
            )
        object.__setattr__(self, "ranks", ranks)
