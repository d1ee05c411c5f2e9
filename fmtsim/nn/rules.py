# SPDX-License-Identifier: Apache-2.0
"""Which rule of a recipe a layer falls under, and what it runs at a step of training."""

import math
import re
import warnings

from torch import nn

from fmtsim.gemm.targets.doubts import caller_level
from fmtsim.nn.blocks import block_of, find_blocks
from fmtsim.nn.modules import emulated_class
from fmtsim.nn.raw_matmuls import own_matrices
from fmtsim.recipes.plan import LayerPlan
from fmtsim.recipes.spec import Recipe, Rule
from fmtsim.support.errors import ArgumentError, CoverageWarning


class Selector:
    """Tell the layers of a model apart as rules do.

    Args:
        model: Any module.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._own = own_matrices(model)
        first: dict[str, list[str]] = {}
        for name, own in self._own.items():
            first.setdefault(own.owner, []).append(name)
        self._layers = {
            layer: module
            for name, module in modules.items()
            for layer in first.get(name, [name] if emulated_class(type(module)) else [])
        }
        self._blocks = find_blocks(model)
        numbers = {name: i for i, name in enumerate(self._blocks)}
        self._places = {name: block_of(name, numbers) for name in self._layers}
        self._heads = self._find_heads()
        self._model = type(model).__name__

    def check(self, recipe: Recipe) -> None:
        """Refuse a rule whose name or kind fits no layer, or that counts blocks where there are none.

        Rules that are optional pass. One whose share of the blocks is more than doubled by rounding up to whole blocks
        warns, if it leaves them in high precision.

        Raises:
            ArgumentError: There is such a rule.
        """
        for i, rule in enumerate(recipe.rules):
            if not self._blocks and (rule.first_blocks or rule.last_blocks) and not rule.optional:
                field = "first_blocks" if rule.first_blocks else "last_blocks"
                raise ArgumentError(
                    f"rules[{i}] of recipe {recipe.name!r} has {field}={getattr(rule, field)!r}, and {self._model} has "
                    "no blocks to count: no nn.ModuleList or nn.Sequential whose elements all hold layers; name the "
                    "layers instead, with Rule(name='fc3|head') in dataclasses.replace(recipe, rules=...), or pass "
                    "Rule(optional=True)"
                )
            named = rule.name is not None or rule.kind is not None
            if named and not rule.optional and not any(self.fits(name, rule) for name in self._layers):
                some = ", ".join(list(self._layers)[:4])
                raise ArgumentError(
                    f"rules[{i}] of recipe {recipe.name!r} ({rule.where}) fits no layer of the model, which has {some}"
                    f"{' ...' if len(self._layers) > 4 else ''}; correct it, or pass Rule(optional=True)"
                )

        for rule in recipe.rules:
            for which in ("first", "last"):
                self._check_share(recipe.name, rule, which)

    def _check_share(self, recipe: str, rule: Rule, which: str) -> None:
        share, count = getattr(rule, f"{which}_blocks"), len(self._blocks)
        if not isinstance(share, float) or rule.use is not None or not count:
            return
        number = _number(share, count)
        if number > 2 * share * count:
            warnings.warn(
                f"recipe {recipe} leaves the {which} {share:.0%} of the blocks in high precision, which is {number} of "
                f"{count} in {self._model}; where that is not meant, give rules= of your own by dataclasses.replace",
                CoverageWarning,
                stacklevel=caller_level(),
            )

    def plan(self, name: str, recipe: Recipe) -> LayerPlan:
        """Return what a layer of the model runs under a recipe."""
        fitting: list[Rule] = []
        for rule in recipe.rules:
            if self.fits(name, rule):
                fitting.append(rule)
                if rule.steps is None:
                    break
        return LayerPlan(rules=tuple(fitting), default=recipe.linear)

    def fits(self, name: str, rule: Rule) -> bool:
        """Say whether a rule is about a layer."""
        names = {name, self._own[name].owner} if name in self._own else {name}
        if rule.name is not None and not any(re.search(rule.name, each) for each in names):
            return False
        if rule.kind is not None and rule.kind not in (cls.__name__ for cls in type(self._layers[name]).__mro__):
            return False
        if rule.head and name not in self._heads:
            return False
        if not (rule.first_blocks or rule.last_blocks):
            return True
        place, count = self._places[name], len(self._blocks)
        if place is None:
            return False
        return place < _number(rule.first_blocks, count) or place >= count - _number(rule.last_blocks, count)

    @property
    def heads(self) -> list[nn.Module]:
        """The layers that make logits."""
        return [self._own[name].module if name in self._own else self._layers[name] for name in self._heads]

    def _find_heads(self) -> set[str]:
        """Return the names of the last linear layer and of those that share its weight, unless it is in a block.

        A product that the model writes with the weight of an embedding is one, too.
        """
        tied = {name for name, own in self._own.items() if own.head}
        weights = {name: m.weight for name, m in self._layers.items() if isinstance(m, nn.Linear)}
        weights |= {name: getattr(own.module, own.parameter) for name, own in self._own.items()}
        linear = [name for name in self._layers if name in weights and weights[name].dim() == 2 and name not in tied]
        if not linear or self._places[linear[-1]] is not None:
            return tied
        return tied | {name for name in linear if weights[name] is weights[linear[-1]]}


def _number(blocks: int | float, count: int) -> int:
    return math.ceil(blocks * count) if isinstance(blocks, float) else blocks
