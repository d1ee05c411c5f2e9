# SPDX-License-Identifier: Apache-2.0
"""search_while_training: one loop that trains weights and the policy that chooses formats and widths."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fmtsim.casts.arguments import takes
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.gemm.layers.keys import Layer
from fmtsim.lab.search.find_formats import DEFAULT, Sampler, budget_of, check_options, recipes_of, spared_heads
from fmtsim.lab.search.result import Policy, SearchResult, least_loss, result_of
from fmtsim.lab.search.switching import bits_of
from fmtsim.nn.convert import convert, revert
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.planning import machine_options
from fmtsim.ptq.calibrate import check_model, evaluating
from fmtsim.ptq.quantize_model import excepted
from fmtsim.recipes.ptq import PtqRecipe
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.progress import Progress, make_progress

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
# What treats channels alike and each by itself, so that a network of fewer is the same function of those.
_BETWEEN = (
    *_NORMS, nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Tanh, nn.Sigmoid,
    nn.Dropout, nn.Dropout2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Flatten,
)  # fmt: skip
_INPUTS, _OUTPUTS = ("in_channels", "in_features"), ("out_channels", "out_features", "num_features")


@dataclass(slots=True, kw_only=True)
class Link:
    """Hold the channels between two layers.

    Args:
        name: Of the layer that makes them.
        maker, reader: The layers.
        norms: Batch normalisation between them.
        channels: How many there are.
    """

    name: str
    maker: Any
    reader: Any = None
    norms: list[Any] = field(default_factory=list)

    @property
    def channels(self) -> int:
        """How many channels there are."""
        return int(self.maker.weight.shape[0])


def links_of(model: nn.Module) -> list[Link]:
    """Return what lies between each layer of a sequence and the next.

    Raises:
        ArgumentError: A module that is no nn.Sequential, or one in it through which channels cannot be followed.
    """
    if not isinstance(model, nn.Sequential):
        raise ArgumentError(
            f"widths= follow channels through an nn.Sequential, and the model is a {type(model).__name__}; "
            "leave widths= out"
        )
    links: list[Link] = []
    for name, module in _leaves(model, ""):
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1):
            if links:
                links[-1].reader = module
            links.append(Link(name=name, maker=module))
        elif links and isinstance(module, _NORMS):
            links[-1].norms.append(module)
        elif not isinstance(module, _BETWEEN):
            groups = " in groups" if isinstance(module, nn.Conv2d) else ""
            raise ArgumentError(
                f"widths= cannot follow channels through {name!r}, a {type(module).__name__}{groups}; use "
                "linear layers, convolutions without groups, batch normalisation, pooling and activations, or leave "
                "widths= out"
            )
    weights = [link.maker.weight for link in links]
    if len({id(w) for w in weights}) < len(weights):
        raise ArgumentError("widths= need a weight for each layer, and two layers share one; leave widths= out")
    return links[:-1]


def _leaves(model: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_children():
        if isinstance(module, nn.Sequential):
            yield from _leaves(module, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", module


def counted(link: Link, width: float) -> int:
    """Return how many channels a width is."""
    return max(1, round(width * link.channels))


@contextmanager
def narrowed(links: Sequence[Link], counts: Sequence[int]) -> Iterator[None]:
    """Let a model run with the first so many channels of each link; gradients reach the shared Parameters."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module, tensors, sizes in _parts(links, counts):
            for place in (module._parameters, module._buffers):
                mine = {name: t for name, t in tensors.items() if place.get(name) is not None}
                before.append((place, {name: place[name] for name in mine}))
                place.update(mine)
            before.append((vars(module), {name: getattr(module, name) for name in sizes}))
            vars(module).update(sizes)
        yield
    finally:
        for place, values in reversed(before):
            place.update(values)


@torch.no_grad()
def narrow(links: Sequence[Link], counts: Sequence[int]) -> None:
    """Take the other channels away for good. Parameters stay the same objects, in new shapes and without gradients."""
    for module, tensors, sizes in list(_parts(links, counts)):
        for name, t in tensors.items():
            parameter = getattr(module, name)
            parameter.data, parameter.grad = t.detach().clone(), None
        vars(module).update(sizes)


def _parts(links: Sequence[Link], counts: Sequence[int]) -> Iterator[tuple[Any, dict[str, Tensor], dict[str, int]]]:
    rows = {link.maker: n for link, n in zip(links, counts, strict=True)}
    columns = {}
    for link, n in zip(links, counts, strict=True):
        columns[link.reader] = link.reader.weight.shape[1] // link.channels * n  # flattened: positions of a channel
        for norm in link.norms:
            rows[norm] = n
    for module in dict.fromkeys([*rows, *columns]):
        height, width = rows.get(module), columns.get(module)
        names = ("weight", "bias", "running_mean", "running_var")
        tensors = {name: t[:height] for name in names if (t := getattr(module, name, None)) is not None}
        if width is not None:
            tensors["weight"] = tensors["weight"][:, :width]
        sizes = {**dict.fromkeys(_INPUTS, width), **dict.fromkeys(_OUTPUTS, height)}
        yield module, tensors, {name: n for name, n in sizes.items() if n is not None and hasattr(module, name)}


LEARNING = Policy(steps=750, rate=0.05, penalty=1.0, entropy=0.0, sharpen=0.1)


def search_while_training(
    model: nn.Module, loss_of: Callable[[int], Tensor], optimizer: torch.optim.Optimizer, budget: float | None = None,
    *, bits: float | None = None, formats: Sequence[str | PtqRecipe] = DEFAULT, widths: Sequence[float] = (1.0,),
    policy: Policy = LEARNING, warmup: int = 250, ignore: Sequence[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None, progress: bool | None = None, target: Any = None,
    plan: GemmPlan | None = None, native: bool | None = None,
) -> SearchResult:  # fmt: skip
    """Train a model in place, and find a recipe and a width for each layer in the same steps; nothing is trained after.

    Each step draws a recipe for each layer, and a width for each layer but the last, from a policy; the model runs so,
    and the one set of weights, which all formats and widths share, follows the gradient (straight through forward
    casts; backward products are in high precision). After the first ``warmup`` steps, whose draws are uniform, the
    policy follows REINFORCE on ``-loss - policy.penalty * |cost / budget - 1|``. At the end the likeliest assignment
    within the budget is chosen: widths first, then recipes, exactly.

    This is FLIQS (Dotzel et al., arXiv:2308.03290) as far as its abstract and its authors' code say; the paper's
    settings are unverified. Theirs are one set of weights, the reward of the absolute value, uniform draws at first,
    Adam on the logits, and the entropy that is penalised along a rising cosine. Ours are scales, made of the tensor at
    hand where the authors' code can clip at percentiles, and the last choice, which keeps within the budget.

    A width takes the first so many output channels of a layer, and what reads them, out of the shared weights: the
    model is the narrower one, not one with zeros. It needs an nn.Sequential.

    Args:
        model: In training mode, where it has layers that know the difference; it is changed.
        loss_of: ``loss_of(step)`` returns the loss of a batch, a tensor of one element, by running the model; steps
            count from 0. Also called without gradients: at step 0 to count multiply-adds, and with the batch behind
            the last step, in evaluation mode, to measure the result.
        optimizer: Steps the model's parameters. Where widths were taken away, make a new one afterwards.
        budget: Bit operations of a batch, as in ``fmtsim.search``.
        bits: Instead: the budget of all layers, at full width, at so many bits in both operands.
        formats: Recipes of ``fmtsim.ptq``; scales are made from the tensor at hand, also where a recipe calibrates.
        widths: Fractions of the channels of a layer.
        policy: How it learns, and in how many steps; ``entropy`` and ``sharpen`` are its regularisation.
        warmup: Steps before.
        ignore, filter_fn, progress, target, plan, native: As in ``fmtsim.search``.

    Returns:
        The choice, with the loss of the trained model in it, the loss in high precision and how much each layer alone
        adds in each recipe, all at the widths chosen; widths, and the policy's last chances. The model is converted
        to the choice, and narrow. Deterministic for seeds, on one device and number of threads.

    Raises:
        ArgumentError: No assignment is within the budget, a loss that is not finite, channels that cannot be followed,
            and what ``search`` and ``convert`` raise. The model keeps the weights that it had until then, unconverted.

    >>> import torch, fmtsim
    >>> from fmtsim.lab.search import Policy
    >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    >>> x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    >>> loss_of = lambda step: (model(x) - x).square().mean()
    >>> adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    >>> short = Policy(steps=20, rate=0.05, penalty=1.0, entropy=0.0, sharpen=0.1)
    >>> options = {"bits": 6, "policy": short, "warmup": 5, "widths": (0.5, 1.0)}
    >>> found = search_while_training(model, loss_of, adam, **options)
    >>> found.cost <= found.budget, model[0].out_features == found.widths["0"]
    (True, True)
    """
    check_model("search_while_training", model)
    check_options(budget, bits, policy, None)
    if not takes(loss_of, 0):
        raise ArgumentError(f"loss_of={shown(loss_of)} is not a function of a step; write loss_of=lambda step: ...")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"optimizer={shown(optimizer)} is not a torch.optim.Optimizer; pass "
            "torch.optim.Adam(model.parameters(), lr=1e-3)"
        )
    if type(warmup) is not int or warmup < 0:
        raise ArgumentError(f"warmup={shown(warmup)} is not a number of steps; pass 0 or more")
    if policy is None:
        raise ArgumentError("policy=None: a search while training follows a policy; leave policy= out for the default")
    good = isinstance(widths, Sequence) and len(widths) > 0 and all(type(w) in (int, float) for w in widths)
    if not good or not all(0 < w <= 1 for w in widths) or len(set(widths)) < len(widths):
        raise ArgumentError(
            f"widths={shown(widths)} are not allowed; pass different fractions of the channels, above 0 and at most 1, "
            "such as (0.5, 1.0)"
        )
    fractions = tuple(widths)
    recipes, left_out = recipes_of(formats, machine_options(target, plan, native, "search_while_training"))
    method = next((recipe for recipe in recipes.values() if recipe.weights is not None), None)
    if method is not None:
        raise ArgumentError(
            f"recipe {method.name!r} rounds trained weights by {method.weights}; a search while training rounds to "
            "nearest: choose recipes without weights="
        )
    links = links_of(model) if fractions != (1.0,) else []
    with make_progress(progress, verb="search_while_training") as show:
        search = _Search(model, loss_of, recipes, links, fractions, filter_fn, ignore)
        try:
            least, most = (
                search.costs(search.channels([fractions.index(pick(fractions))] * len(links))) for pick in (min, max)
            )
            allowed = budget_of(budget, bits, sum(search.adds.values()), least, most)
            search.train(optimizer, policy, warmup, allowed, show)
            picked, counts = search.likeliest(allowed)
            narrow(links, counts)
            reference, losses = search.each_alone(warmup + policy.steps)
        finally:
            revert(model)
    result = result_of(
        list(search.modules), recipes, picked, losses, search.costs(counts), budget=allowed, loss=math.nan,
        tried=search.tried, left_out=left_out | spared_heads(model, ignore, search.modules), reference=reference,
        widths={link.name: n for link, n in zip(links, counts, strict=True)}, chances=search.chances(),
    )  # fmt: skip
    convert(model, result.recipe().prescribed, filter_fn=lambda module, name: name in result.formats)
    return replace(result, loss=_measured(model, loss_of, warmup + policy.steps))


class _Search:
    """Run a converted model under any assignment, and learn which one.

    Attributes:
        modules: The layers that take part, by name.
        adds: Their multiply-adds of a batch, at full width.
    """

    def __init__(
        self, model: nn.Module, loss_of: Callable[[int], Tensor], recipes: dict[str, PtqRecipe], links: list[Link],
        fractions: tuple[float, ...], filter_fn: Any, ignore: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self._model, self._loss_of, self._links, self._fractions = model, loss_of, links, fractions
        products = [recipe.prescribed.linear for recipe in recipes.values()]
        self._layers = [Layer(config or LinearConfig()) for config in products]
        self._bits = [bits_of(recipe.w) * bits_of(recipe.x) for recipe in recipes.values()]
        self._names = list(recipes)
        self._full = [link.channels for link in links]
        spared, _ = excepted(model, next(iter(recipes.values())), ignore)
        convert(model, spared.prescribed, filter_fn=filter_fn)
        self.modules = {n: m for n, m in model.named_modules() if isinstance(m, EmulatedModule)}
        self._assign([None] * len(self.modules))
        try:
            adds: Counter[str] = Counter()

            def observer(name: str) -> Callable[[str], Any]:
                inputs: list[int] = []

                def record(operand: str, t: Tensor, q: Tensor, quantizer: Any, dim: int) -> None:
                    if operand == "x_f":
                        inputs.append(t.numel())
                    elif operand == "w_f":
                        adds[name] += inputs.pop() * t.shape[0]

                return lambda part: record

            for name, module in self.modules.items():
                assert module.emulation is not None
                module.emulation.observer = observer(name)
            try:
                _measured(self._model, self._loss_of, 0)
            finally:
                for module in self.modules.values():
                    assert module.emulation is not None
                    module.emulation.observer = None
            idle = next((name for name in self.modules if not adds[name]), None)
            if idle is not None:
                raise ArgumentError(
                    f"loss_of never ran layer {idle!r}; return the loss of a batch that runs it, or leave it out with "
                    "filter_fn="
                )
            self.adds = dict(adds)
        except BaseException:
            revert(model)
            raise

    def _assign(self, picked: Sequence[int | None]) -> None:
        for module, option in zip(self.modules.values(), picked, strict=True):
            how = module.emulation
            assert how is not None
            layer = Layer(LinearConfig()) if option is None else self._layers[option]
            how.config, how.products = layer.config, dict.fromkeys(how.products, layer)

    def channels(self, wide: Sequence[int]) -> list[int]:
        return [counted(link, self._fractions[i]) for link, i in zip(self._links, wide, strict=True)]

    def costs(self, counts: Sequence[int]) -> list[list[int]]:
        """Return bit operations by layer and recipe where links have so many channels."""
        share: dict[nn.Module, list[int]] = {}
        for link, full, n in zip(self._links, self._full, counts, strict=True):
            for module in (link.maker, link.reader):
                top, bottom = share.get(module, [1, 1])
                share[module] = [top * n, bottom * full]
        rows = []
        for name, module in self.modules.items():
            top, bottom = share.get(module, [1, 1])
            rows.append([self.adds[name] * top // bottom * bits for bits in self._bits])
        return rows

    def train(self, optimizer: Any, policy: Policy, warmup: int, budget: int, show: Progress) -> None:
        """Train weights for all steps, and the policy after the first ones."""
        source = torch.Generator().manual_seed(policy.seed)
        self._formats = Sampler(policy, len(self.modules), len(self._names), source, adam=True)
        self._widths = Sampler(policy, len(self._links), len(self._fractions), source, adam=True)
        seen = set()
        for step in range(-warmup, policy.steps):
            if step in (-warmup, 0):
                show.stage("warm-up" if step < 0 else "weights and policy", -step if step else policy.steps)
            picked, wide = self._formats.draw(), self._widths.draw() if self._links else []
            seen.add((*picked, *wide))
            loss = self._step(optimizer, picked, wide, warmup + step)
            if step >= 0:
                cost = sum(row[i] for row, i in zip(self.costs(self.channels(wide)), picked, strict=True))
                reward = -loss - policy.penalty * abs(cost / budget - 1)
                self._formats.learn(reward, step)
                if self._links:
                    self._widths.learn(reward, step)
            show.step(step + 1 + (warmup if step < 0 else 0))
        self.tried = len(seen)

    def _step(self, optimizer: Any, picked: list[int], wide: list[int], step: int) -> float:
        self._assign(picked)
        with narrowed(self._links, self.channels(wide)):
            loss = _checked(self._loss_of(step), step, learns=True)
            if not math.isfinite(loss.item()):
                raise ArgumentError(
                    f"the loss of step {step} is {loss.item()}; lower the learning rate, clip gradients, or offer "
                    "wider formats"
                )
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def likeliest(self, budget: int) -> tuple[list[int], list[int]]:
        """Return the recipes, and the channels of each link: the likeliest within the budget, widths first.

        Where no recipes fit, the link goes narrower whose chance falls least.
        """
        chances = self._widths.logits.log_softmax(1).tolist()
        wide = [max(range(len(row)), key=row.__getitem__) for row in chances]
        while sum(map(min, self.costs(self.channels(wide)))) > budget:
            falls = [
                (row[now] - row[i], link, i)
                for link, (row, now) in enumerate(zip(chances, wide, strict=True))
                for i in range(len(row))
                if self._fractions[i] < self._fractions[now]
            ]
            _, link, option = min(falls)
            wide[link] = option
        unlikely = (-self._formats.logits.log_softmax(1)).tolist()
        picked, _ = least_loss(self.costs(self.channels(wide)), unlikely, budget)
        return picked, self.channels(wide)

    def chances(self) -> dict[str, dict[str, float]]:
        rows = self._formats.logits.softmax(1).tolist()
        return {layer: dict(zip(self._names, row, strict=True)) for layer, row in zip(self.modules, rows, strict=True)}

    def each_alone(self, step: int) -> tuple[float, list[list[float]]]:
        """Return the loss in high precision, and by how much it rises where one layer alone runs one recipe."""
        high: list[int | None] = [None] * len(self.modules)

        def loss(picked: Sequence[int | None]) -> float:
            self._assign(picked)
            return _measured(self._model, self._loss_of, step)

        reference, options = loss(high), range(len(self._names))
        return reference, [
            [loss([*high[:i], option, *high[i + 1 :]]) - reference for option in options] for i in range(len(high))
        ]


def _measured(model: nn.Module, loss_of: Callable[[int], Tensor], step: int) -> float:
    with evaluating(model), torch.no_grad():
        return _checked(loss_of(step), step, learns=False).item()


def _checked(loss: Any, step: int, learns: bool) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1 and (loss.requires_grad or not learns):
        return loss
    raise ArgumentError(
        f"loss_of({step}) returned {shown(loss)}; return the loss of a batch, a tensor of one element with a gradient"
    )
