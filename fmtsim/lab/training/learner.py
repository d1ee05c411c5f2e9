# SPDX-License-Identifier: Apache-2.0
"""What learns in a run: a model with its optimizers, the factor of its loss, and the ranks that share its batches."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fmtsim.lab.training.config import CLIP as CLIP
from fmtsim.lab.training.config import FINAL_SHARE, TrainConfig
from fmtsim.lab.training.loss_scale import LossScaler
from fmtsim.lab.training.models import repeatable
from fmtsim.lab.training.ranks import RankReduction
from fmtsim.lab.training.schemes import ADAMW, Scheme
from fmtsim.nn.scaled_linear import mu_parameter_groups
from fmtsim.optim import AdamW, Madam

BETAS, WEIGHT_DECAY, WARMUP_SHARE = (0.9, 0.95), 0.1, 0.1
FEWEST_WARMUP_STEPS = 20  # after fewer, AdamW overshoots at the default peak in some seeds, in float32 as well
MADAM_RATE = 8  # times AdamW's: octaves a unit of the normalised gradient, 1/31 at the default
SCALED_RATE = 32  # times AdamW's: at a width of 128 weights of unit variance move as those of variance 0.02^2 do
PEAK = "peak_lr"  # in a group of an optimizer: its rate at the top of the schedule


class Learner:
    """Train a model, step for step.

    Args:
        model: Returns its loss for inputs and targets.
        scheme: How it is trained.
        config: The comparison.

    Attributes:
        optimizers: One, or two where Madam leaves some parameters to AdamW.
        scaler: The factor of the loss.
        reduction: Of the gradients of several ranks; None with a single one.
    """

    def __init__(self, model: torch.nn.Module, scheme: Scheme, config: TrainConfig) -> None:
        self.model, self.scheme, self.config = model, scheme, config
        self.optimizers = make_optimizers(model, scheme, config)
        self.scaler = LossScaler(scheme.loss_scale)
        self.ranks = config.ranks or 1
        self.reduction = RankReduction(scheme.reduced_by) if self.ranks > 1 else None

    @property
    def optimizer(self) -> str:
        """The optimizer and its rates in words."""
        rates = ", rates of mu_parameter_groups" * (self.scheme.unit_variance and self.scheme.states.rule == "adamw")
        return f"{self.scheme.states}{rates}"

    @property
    def reduced(self) -> str:
        """How gradients are reduced over how many ranks, in words; empty with a single one."""
        if self.reduction is None:
            return ""
        return f"{self.scheme.reduced_by} over {self.ranks} ranks ({self.reduction.reduction})"

    def backward(self, inputs: Tensor, targets: Tensor, step: int) -> Tensor:
        """Give the parameters the gradients of a batch, and return its loss, float32, 0-d; the factor is still in them.

        With ranks each takes its part of the batch, one after another, and their gradients are reduced.
        """
        with repeatable(self.model, self.config.seed, step):
            return self._backward(inputs, targets)

    def _backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.reduction is None:
            return backward(self.model, inputs, targets, self.scheme, self.scaler)
        parameters = list(self.model.parameters())
        losses, gradients = [], []
        for x, y in zip(inputs.chunk(self.ranks), targets.chunk(self.ranks), strict=True):
            losses.append(backward(self.model, x, y, self.scheme, self.scaler))
            gradients.append([p.grad for p in parameters])
            for p in parameters:
                p.grad = None
        for p, g in zip(parameters, self.reduction.reduce(gradients), strict=True):
            p.grad = g
        return torch.stack(losses).mean()

    def unscale(self) -> bool:
        """Take the factor out of the gradients and clip them; say whether the optimizers may step."""
        taken = self.scaler.unscale(self.model.parameters())
        if self.config.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        return taken

    def set_rate(self, step: int) -> None:
        """Set the learning rates of a step, counted from 1."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group[PEAK] * schedule(step, self.config.steps, self.config.final_rate)

    def step(self, *, taken: bool) -> None:
        """Let the optimizers step where the gradients may be taken, and drop these."""
        for optimizer in self.optimizers:
            if taken:
                optimizer.step()
            optimizer.zero_grad()

    def state_bytes(self) -> float:
        """Return the bytes of weights and states a parameter; weights that a scheme keeps count as it keeps them."""
        kept, elements = 0, 0
        for optimizer in self.optimizers:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                state = {name: x for name, x in optimizer.state[p].items() if isinstance(x, Tensor) and name != "step"}
                own = any(name.startswith("weights") for name in state)
                kept += sum(x.nbytes for x in state.values()) + p.nbytes * (not own)
                elements += p.numel()
        return kept / max(elements, 1)

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs beside the model to go on with the same bits."""
        return {
            "moments": [optimizer.state_dict()["state"] for optimizer in self.optimizers],
            "scaler": self.scaler.state_dict(),
            "reduction": None if self.reduction is None else self.reduction.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a ``state_dict`` of the same scheme and config."""
        for optimizer, saved in zip(self.optimizers, state["moments"], strict=True):
            moments = {int(index): moment for index, moment in saved.items()}
            optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
        self.scaler.load_state_dict(state["scaler"])
        if self.reduction is not None:
            self.reduction.load_state_dict(state["reduction"])


def make_optimizers(model: torch.nn.Module, scheme: Scheme, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a scheme.

    Madam moves matrices. What a factor cannot move (vectors, whose zeros stay, and matrices of zeros) keeps a float32
    AdamW beside it.
    """
    states, groups = scheme.states, list(_groups(model, scheme, config))
    if states == ADAMW:
        return [torch.optim.AdamW(groups, betas=BETAS)]
    if states.rule == "adamw":
        return [AdamW(groups, betas=BETAS, state=states.state, seed=config.seed)]
    parameters = list(model.parameters())
    first = [p for p in parameters if _moved(p)]
    rest = [p for p in parameters if not _moved(p)]
    found: list[torch.optim.Optimizer] = []
    if first:
        peak = MADAM_RATE * config.lr
        found.append(Madam([{"params": first, PEAK: peak}], lr=peak, state=states.state, seed=config.seed))
    return found + ([torch.optim.AdamW([_group(rest, config.lr, config)], betas=BETAS)] if rest else [])


def _moved(p: Tensor) -> bool:
    return p.dim() > 1 and bool(p.detach().any())


def _groups(model: torch.nn.Module, scheme: Scheme, config: TrainConfig) -> Iterator[dict[str, Any]]:
    """Yield the groups of AdamW: one, or where a recipe gives weights unit variance those of its rates."""
    if not scheme.unit_variance:
        yield _group(list(model.parameters()), config.lr, config)
        return
    for group in mu_parameter_groups(model, SCALED_RATE * config.lr):
        yield _group(group["params"], group["lr"], config)


def _group(parameters: list[Any], peak: float, config: TrainConfig) -> dict[str, Any]:
    """Return a group whose decay a step does not depend on its rate."""
    decay = WEIGHT_DECAY * (config.lr / peak)
    return {"params": parameters, "lr": peak, PEAK: peak, "weight_decay": decay}


def schedule(step: int, steps: int, final: float = FINAL_SHARE) -> float:
    """Return the share of the peak learning rate at a step: linear warm-up, then a cosine down to ``final``."""
    warm = max(1, round(WARMUP_SHARE * steps), min(FEWEST_WARMUP_STEPS, steps // 2))
    if step <= warm:
        return step / warm
    done = (step - warm) / max(1, steps - warm)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))


def autocast(scheme: Scheme, device: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which everything but products runs in the dtype that a scheme names."""
    if scheme.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=getattr(torch, scheme.autocast))


def backward(model: torch.nn.Module, inputs: Tensor, targets: Tensor, scheme: Scheme, scaler: LossScaler) -> Tensor:
    """Add the gradients of a batch to the model's, and return the loss, float32, 0-d; the factor is still in them."""
    with autocast(scheme, str(inputs.device)):
        loss = model(inputs, targets)
    scaler.scaled(loss).backward()
    return loss.detach()
