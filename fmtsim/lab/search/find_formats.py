# SPDX-License-Identifier: Apache-2.0
"""search: find a format for each layer under a budget of bit operations, exactly or by a policy."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fmtsim.lab.search.result import Policy, SearchResult, least_loss, result_of
from fmtsim.lab.search.switching import Loss, SwitchingModel, relative_noise, require_some
from fmtsim.nn.planning import machine_options
from fmtsim.ptq.calibrate import batches_of, check_model
from fmtsim.ptq.quantize_model import HEAD, output_heads
from fmtsim.recipes.ptq import PtqRecipe, is_static
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, FmtsimError, shown
from fmtsim.support.executors import AnyExecutor, open_tasks
from fmtsim.support.progress import Progress, make_progress


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


DEFAULT = ("w4a4", "minifloat_e3m2", "e4m3_static")


def search(
    model: nn.Module, calibration_data: Any, budget: float | None = None, *, bits: float | None = None,
    formats: Sequence[str | PtqRecipe] = DEFAULT, policy: Policy | None = None,
    sensitivity: Mapping[str, Any] | None = None, loss: Loss | None = None,
    ignore: Sequence[str] | None = None, filter_fn: Callable[[nn.Module, str], bool] | None = None,
    progress: bool | None = None, target: Any = None, plan: GemmPlan | None = None, native: bool | None = None,
    executor: AnyExecutor = None,
) -> SearchResult:  # fmt: skip
    """Find a recipe for each layer of a trained model so that the loss is small and the cost within a budget.

    The cost of a layer is its multiply-adds of a batch of the data, times the bits of w, times the bits of x (the
    bit operations of FLIQS; scales are not counted, and high precision counts as 16 bits). Nothing is trained.

    Without ``policy`` the model is run once for each layer and recipe, that layer alone quantised, and the assignment
    of the least sum of these losses within the budget is chosen exactly: that losses add up is an assumption of this
    package, not FLIQS's method. With a ``Policy`` whole assignments are sampled, run and rewarded as in FLIQS, whose
    policy we start from zero logits; the best assignment within the budget that was run counts, the additive one among
    them. FLIQS quantises batches as it goes and may train; here layers come calibrated from ``fmtsim.ptq``'s steps.

    Args:
        model: A trained model; it is not changed.
        calibration_data: As in ``fmtsim.ptq``; costs and losses are means of its batches.
        budget: Bit operations of a batch.
        bits: Instead: the budget of all layers at so many bits in both operands.
        formats: Recipes of ``fmtsim.ptq`` to choose from, without rules and other methods than ``weights``.
        policy: Search by sampling.
        sensitivity: By recipe what ``fmtsim.attribute(model, batch, loss, recipe.linear)`` finds, in place of a run for
            each layer and recipe: a layer's loss is the sum of its operands'. None runs them.
        loss: ``loss(output, reference)`` of a batch, a number, reference being the unquantised model's output;
            None is the squared error of all outputs relative to their squares. NaN counts as infinite.
        ignore: Layers to leave in high precision, as in ``fmtsim.ptq``: None is the head of a language model.
        filter_fn: ``filter_fn(module, name)`` says which layers take part; the rest stays in high precision.
        progress: As in ``fmtsim.ptq``.
        target, plan, native: The machine that will multiply, as in ``fmtsim.ptq``: losses are those of
            the model there. Recipes that it does not run are left out; the result says which and why.
        executor: A ``concurrent.futures.Executor``, ``dask://HOST:PORT`` or ``ray://HOST:PORT`` that runs the layers
            alone, each with as many CPU threads as torch has here; None runs them in this process.

    Returns:
        The choice with its costs and losses; ``fmtsim.ptq(model, result.recipe(), data)`` applies it. Deterministic for
        a seed, on one device and number of threads.

    Raises:
        ArgumentError: No assignment is within the budget (the message has the least one), the machine runs no recipe,
            and what ``ptq`` raises.

    >>> import torch, fmtsim
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    >>> found = fmtsim.search(model, [torch.randn(32, 64, generator=torch.Generator().manual_seed(0))], bits=6)
    >>> found.cost <= found.budget
    True
    """
    check_model("search", model)
    check_options(budget, bits, policy, loss)
    if executor is not None and sensitivity is not None:
        raise ArgumentError(f"executor={shown(executor)} has nothing to run beside sensitivity; leave one of them out")
    recipes, left_out = recipes_of(formats, machine_options(target, plan, native, "search"))
    batches = batches_of(calibration_data)
    with make_progress(progress, verb="search") as show:
        switching = SwitchingModel(model, recipes, batches, filter_fn, loss or relative_noise, show, ignore)
        left_out |= switching.left_out
        recipes = {name: recipe for name, recipe in recipes.items() if name not in left_out}
        layers, names = list(switching.forms), list(recipes)
        costs = [[switching.forms[layer][name].cost for name in names] for layer in layers]
        allowed = budget_of(budget, bits, switching.adds, costs, costs)
        if sensitivity is None:
            show.stage("layers alone", len(layers) * len(names))
            alone = [{layer: name} for layer in layers for name in names]
            with open_tasks(switching, executor) as tasks:
                done = {(*formats.items(),): loss for formats, loss in tasks.each_done(SwitchingModel.run, alone, show)}
            losses = [[done[((layer, name),)] for name in names] for layer in layers]
        else:
            losses = _attributed(sensitivity, layers, names)
        picked, _ = least_loss(costs, losses, allowed)
        searched = _Found(switching, layers, names, costs, allowed)
        searched.offer(picked)
        if policy is not None:
            _sample(searched, policy, show)
    assert searched.best is not None
    return result_of(
        layers, recipes, searched.best, losses, costs, budget=allowed, loss=searched.loss, tried=len(searched.known),
        left_out=left_out | spared_heads(model, ignore, layers),
    )  # fmt: skip


def spared_heads(model: nn.Module, ignore: Sequence[str] | None, layers: Collection[str]) -> dict[str, str]:
    """Return the head of a language model by name, and why it is not among the layers of a search."""
    return {name: HEAD for name in output_heads(model) if ignore is None and name not in layers}


class _Found:
    """Run assignments, each once, and keep the best within the budget, the first in a tie."""

    def __init__(
        self, switching: SwitchingModel, layers: list[str], names: list[str], costs: list[list[int]], budget: int
    ) -> None:
        self._model, self._layers, self._names = switching, layers, names
        self._costs, self.budget = costs, budget
        self.known: dict[tuple[int, ...], float] = {}
        self.best: list[int] | None = None
        self.loss = math.inf

    def named(self, picked: Sequence[int]) -> dict[str, str]:
        return {layer: self._names[i] for layer, i in zip(self._layers, picked, strict=True)}

    def cost(self, picked: Sequence[int]) -> int:
        return sum(row[i] for row, i in zip(self._costs, picked, strict=True))

    def offer(self, picked: Sequence[int]) -> float:
        key = tuple(picked)
        if key not in self.known:
            self.known[key] = self._model.run(self.named(picked))
        loss = self.known[key]
        within = self.cost(picked) <= self.budget
        if within and (self.best is None or loss < self.loss):
            self.best, self.loss = list(picked), loss
        return loss


def _sample(found: _Found, policy: Policy, show: Progress) -> None:
    """Follow REINFORCE: quality is one minus the root of the loss."""
    sampler = Sampler(
        policy, len(found._layers), len(found._names), torch.Generator().manual_seed(policy.seed), adam=False
    )
    show.stage("policy", policy.steps)
    for step in range(policy.steps):
        picked = sampler.draw()
        loss = found.offer(picked)
        over = abs(found.cost(picked) / found.budget - 1)
        root = math.copysign(math.sqrt(abs(loss)), loss)  # a loss of one's own may be negative
        sampler.learn(1 - root - policy.penalty * over if math.isfinite(loss) else -1.0, step)
        show.step(step + 1)
    found.offer(sampler.logits.argmax(1).tolist())


def _attributed(sensitivity: Any, layers: list[str], names: list[str]) -> list[list[float]]:
    """Return the losses of layers by recipe as the rows of attributions have them."""
    costs: dict[tuple[str, str], float] = {}
    for name in names:
        rows = getattr(sensitivity.get(name), "rows", None) if isinstance(sensitivity, Mapping) else None
        if rows is None:
            raise ArgumentError(
                f"sensitivity={shown(sensitivity)} has no Attribution of recipe {name!r}; pass a dict with one for "
                "each of formats=, made by fmtsim.attribute(model, batch, loss, fmtsim.get_recipe(name).linear)"
            )
        for row in rows:
            if row.module is not None and row.loss is not None:
                costs[row.module, name] = costs.get((row.module, name), 0.0) + row.loss
    missing = next((key for layer in layers for key in ((layer, name) for name in names) if key not in costs), None)
    if missing is not None:
        raise ArgumentError(
            f"sensitivity of recipe {missing[1]!r} has no loss of layer {missing[0]!r}; attribute the same model, with "
            "a batch that runs the layer, or leave it out with filter_fn="
        )
    return [[costs[layer, name] for name in names] for layer in layers]


def check_options(budget: Any, bits: Any, policy: Any, loss: Any) -> None:
    """Refuse budgets, policies and losses that are none."""
    if (budget is None) == (bits is None):
        raise ArgumentError("pass exactly one of budget= (bit operations of a batch) and bits= (of both operands)")
    name, value = ("budget", budget) if bits is None else ("bits", bits)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 < value < math.inf):
        raise ArgumentError(f"search {name}={shown(value)} is not allowed; pass a finite number above 0")
    if policy is not None and not isinstance(policy, Policy):
        raise ArgumentError(
            f"policy={shown(policy)} is not a Policy; write policy=Policy() (from fmtsim.lab.search import Policy), or "
            "leave it out"
        )
    if loss is not None and not callable(loss):
        raise ArgumentError(f"loss={shown(loss)} is not a function; write loss=lambda output, reference: ...")


def budget_of(
    budget: float | None, bits: float | None, adds: int, cheapest: list[list[int]], dearest: list[list[int]]
) -> int:
    """Return the bit operations that are allowed; raise ArgumentError where no assignment has so few."""
    least, most = sum(map(min, cheapest)), sum(map(max, dearest))
    allowed = int(adds * min(bits, 64) ** 2 if bits is not None else budget)  # type: ignore[arg-type]  # one is there
    if allowed < least:
        raise ArgumentError(
            f"no assignment meets a budget of {allowed:.6g} bit operations; the least is {least} "
            f"({(least / adds) ** 0.5:.3g} bits in both operands), the dearest {most}; "
            "raise the budget, or offer cheaper formats"
        )
    return allowed


def recipes_of(
    formats: Sequence[str | PtqRecipe], machine: dict[str, Any] | None
) -> tuple[dict[str, PtqRecipe], dict[str, str]]:
    """Return the recipes by name, on a machine where one is given, and why it does not run others."""
    named = [formats] if isinstance(formats, str | PtqRecipe) else formats
    if not isinstance(named, Sequence):
        raise ArgumentError(f"formats={shown(formats)}; pass names or recipes, at least one")
    recipes = [get_recipe(f, kind="ptq") for f in named]
    if not recipes or len({r.name for r in recipes}) < len(recipes):
        raise ArgumentError(f"formats={shown(formats)}; pass recipes of different names, at least one")
    for r in recipes:
        more = (r.rules, r.rotate, r.smooth, r.equalise, r.sequential, r.bias_correction, r.batch_norm, r.attention)
        if any(more):
            raise ArgumentError(
                f"recipe {r.name!r} changes more than one layer's operands; search takes x, w, calibration and weights"
            )
        if r.weights != recipes[0].weights:
            raise ArgumentError(f"recipes {recipes[0].name!r} and {r.name!r} round weights differently; choose one way")
    calibrations = {r.calibration for r in recipes if is_static(r.x)}
    if len(calibrations) > 1:
        raise ArgumentError("formats= mixes rules of calibration, and a model has one; choose recipes of one rule")
    if machine is not None:
        usable, left_out = {}, {}
        for r in recipes:
            try:
                usable[r.name] = r.on(**machine)
            except FmtsimError as error:
                left_out[r.name] = str(error)
        require_some(usable, left_out)
        return usable, left_out
    if any(r.on_machine != recipes[0].on_machine for r in recipes):
        raise ArgumentError("formats= are on different machines, and a model has one; pass target=")
    return {r.name: r for r in recipes}, {}
