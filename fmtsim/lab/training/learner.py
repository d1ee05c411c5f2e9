# SPDX-License-Identifier: Apache-2.0
"""What learns in a run: a model with its optimizers, its loss scaling, and the ranks that share its batches."""

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fmtsim.distributed.arithmetic import require_mu
from fmtsim.distributed.reduction import Reduction, get_reduction
from fmtsim.distributed.simulated_reduce import simulate
from fmtsim.lab.training.schemes import ADAMW, FINAL_SHARE, Scheme, TrainConfig
from fmtsim.lab.training.schemes import CLIP as CLIP
from fmtsim.lab.training.training_models import repeatable
from fmtsim.nn.scaled_model import mu_parameter_groups
from fmtsim.optim import AdamW, Madam
from fmtsim.recipes.recipe import LossScale


class LossScaler:
    """Scale a loss, divide the gradients by the scale, and return whether the step may be taken.

    The schedule is that of ``torch.amp.GradScaler`` for one optimizer, number for number (PyTorch, aten's
    AmpGradScalerKernels): ``interval`` clean steps in a row multiply the factor by ``growth`` where the result is
    finite; an overflow multiplies it by ``backoff`` and begins the count anew. With ``hysteresis`` above 1 (Megatron,
    apex) the factor is kept until so many overflows have happened since the last clean step.

    Args:
        rule: The record; None scales nothing, and every step is taken.

    Attributes:
        scale: The factor in force, a float32 number.
        skipped: Steps that were not taken because a gradient was not finite.
        nonfinite: Steps with such gradients, taken or not.
    """

    def __init__(self, rule: LossScale | None) -> None:
        self.rule = rule
        self.scale = 1.0 if rule is None else _float32(rule.initial)
        self.skipped = self.nonfinite = 0
        self._clean = 0
        self._left = 1 if rule is None else rule.hysteresis

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs to go on with the same bits."""
        return {name: value for name, value in vars(self).items() if name != "rule"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a ``state_dict`` of the same rule."""
        vars(self).update({name: state[name] for name in self.state_dict()})

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the factor."""
        return loss if self.rule is None else loss * self.scale

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Multiply gradients by ``float32(1 / scale)`` (a static factor divides them), in place.

        Returns:
            Whether the optimizer may step: a rule skips gradients that are not finite, without one they count.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        finite = all(bool(g.isfinite().all()) for g in gradients)
        self.nonfinite += not finite
        if self.rule is None:
            return True
        self.skipped += not finite
        inverse = _float32(1 / self.scale) if self.scale else math.inf
        for g in gradients:
            if self.rule.interval is None:
                g.div_(self.scale)
            elif inverse != 1:
                g.mul_(inverse)
        if self.rule.interval is not None and not finite:
            self._clean = 0
            self._left -= 1
            if self._left <= 0:
                self.scale = _float32(self.scale * self.rule.backoff)
        elif self.rule.interval is not None:
            self._left = self.rule.hysteresis
            self._clean += 1
            if self._clean == self.rule.interval:
                grown = _float32(self.scale * self.rule.growth)
                self.scale = grown if math.isfinite(grown) else self.scale
                self._clean = 0
        return finite


def _float32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).float())


class RankReduction:
    """Reduce the gradients of simulated ranks, step for step; the automatic factor moves as on processes.

    Attributes:
        mu: The automatic factor in force, float32, 0-d; None for fixed factors.
        calls: Reductions so far.
    """

    def __init__(self, reduction: str | Reduction) -> None:
        self.reduction = get_reduction(reduction)
        self.mu = require_mu(self.reduction, None, torch.device("cpu"))
        self.calls = 0

    def reduce(self, gradients: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """Return one gradient a parameter of those of each rank; None where no rank has one, else zeros stand in."""
        columns = list(zip(*gradients, strict=True))
        present = {i: g for i, column in enumerate(columns) for g in column if g is not None}
        reduced: list[Tensor | None] = [None] * len(columns)
        if not present:
            return reduced
        ranks = [
            [torch.zeros_like(like) if (g := grads[i]) is None else g for i, like in present.items()]
            for grads in gradients
        ]
        result = simulate(ranks, self.reduction, mu=self.mu, call=self.calls)
        self.calls += 1
        if self.mu is not None and self.reduction.auto is not None:
            counts = result.counts[0]  # of reduced elements, which are the same on all ranks
            self.mu = self.reduction.auto.next(self.mu.to(counts.saturated.device), counts.saturated, counts.elements)
        for i, value in zip(present, result.values, strict=True):
            reduced[i] = value
        return reduced

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs to go on with the same bits."""
        return {"mu": self.mu, "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a ``state_dict`` of the same reduction."""
        self.mu, self.calls = state["mu"], state["calls"]


BETAS, WEIGHT_DECAY, WARMUP_SHARE = (0.9, 0.95), 0.1, 0.1
FEWEST_WARMUP_STEPS = 20  # after fewer, AdamW overshoots at the default peak in some seeds, in float32 as well
MADAM_RATE = 8  # times AdamW's: octaves a unit of the normalised gradient, 1/31 at the default
SCALED_RATE = 32  # times AdamW's: at a width of 128 weights of unit variance move as those of variance 0.02^2 do
PEAK = "peak_lr"  # in a group of an optimizer: its rate at the top of the schedule


class Learner:
    """Train a model, step for step.

    Args:
        model: Returns its loss for inputs and targets.

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
        """Divide the gradients by the loss scale and clip them; return True if the optimizers may step."""
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
        state_total, elements = 0, 0
        for optimizer in self.optimizers:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                state = {name: x for name, x in optimizer.state[p].items() if isinstance(x, Tensor) and name != "step"}
                holds_weights = any(name.startswith("weights") for name in state)
                state_total += sum(x.nbytes for x in state.values()) + p.nbytes * (not holds_weights)
                elements += p.numel()
        return state_total / max(elements, 1)

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
    states, groups = scheme.states, [_group(list(model.parameters()), config.lr, config)]
    if scheme.unit_variance:
        groups = [
            _group(group["params"], group["lr"], config)
            for group in mu_parameter_groups(model, SCALED_RATE * config.lr)
        ]
    if states == ADAMW:
        return [torch.optim.AdamW(groups, betas=BETAS)]
    if states.rule == "adamw":
        return [AdamW(groups, betas=BETAS, state=states.state, seed=config.seed)]
    parameters = list(model.parameters())
    first = [p for p in parameters if _moved(p)]
    rest = [p for p in parameters if not _moved(p)]
    optimizers: list[torch.optim.Optimizer] = []
    if first:
        peak = MADAM_RATE * config.lr
        optimizers.append(Madam([{"params": first, PEAK: peak}], lr=peak, state=states.state, seed=config.seed))
    return optimizers + ([torch.optim.AdamW([_group(rest, config.lr, config)], betas=BETAS)] if rest else [])


def _moved(p: Tensor) -> bool:
    return p.dim() > 1 and bool(p.detach().any())


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
