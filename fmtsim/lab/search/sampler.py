# SPDX-License-Identifier: Apache-2.0
"""A policy over options of several decisions, which follows REINFORCE."""

import math

import torch

from fmtsim.lab.search.result import Policy


class Sampler:
    """Draw an option for each decision from a softmax of its own, from equal chances on.

    Args:
        policy: How it learns.
        decisions, options: Sizes of the table of logits, float64.
        source: Of the draws.
        adam: Step by Adam, as the authors' code does, not along the gradient itself.
    """

    def __init__(self, policy: Policy, decisions: int, options: int, source: torch.Generator, adam: bool) -> None:
        self.policy, self._source, self._mean = policy, source, math.nan
        self.logits = torch.zeros(decisions, options, dtype=torch.float64)
        kind = torch.optim.Adam if adam else torch.optim.SGD
        self._optimizer = kind([self.logits], lr=policy.rate, maximize=True)  # type: ignore[call-arg]  # both have it

    def draw(self) -> list[int]:
        """Return an option for each decision."""
        self._picked = torch.multinomial(self.logits.softmax(1), 1, generator=self._source)[:, 0]
        return self._picked.tolist()

    def learn(self, reward: float, step: int) -> None:
        """Follow the gradient of what was drawn last, its reward measured against a moving mean, and of the entropy."""
        policy, chances = self.policy, self.logits.softmax(1)
        self._mean = reward if math.isnan(self._mean) else 0.9 * self._mean + 0.1 * reward
        taken = torch.nn.functional.one_hot(self._picked, chances.shape[1]).double()
        logs = chances.clamp(min=1e-12).log()
        spread = -chances * (logs - (chances * logs).sum(1, keepdim=True))  # the gradient of the entropy
        falls = 0.5 * (1 + math.cos(math.pi * step / policy.steps))
        weight = policy.entropy * falls - policy.sharpen * (1 - falls)
        self.logits.grad = (reward - self._mean) * (taken - chances) + weight * spread
        self._optimizer.step()
