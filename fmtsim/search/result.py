"""What a search is told and what it finds."""

import re
from dataclasses import dataclass

from fmtsim.errors import ArgumentError
from fmtsim.gemm.config import Gemm, LinearConfig
from fmtsim.ptq.spec import PtqRecipe
from fmtsim.recipes.spec import Rule
from fmtsim.table import ruled

HIGH_BITS = 16  # what an operand that stays in high precision counts as


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Describe the search by a policy, as in FLIQS (Dotzel et al., arXiv:2308.03290; details unverified).

    A softmax over formats for each layer; assignments are sampled from it and run, and REINFORCE follows the reward
    ``quality - penalty * |cost / budget - 1|`` with entropy regularisation that falls as a cosine.

    Args:
        steps: Assignments that are tried.
        rate: Step size of the logits.
        penalty: Weight of the cost in the reward.
        entropy: Weight of the entropy at the start.
        seed: Of the samples.
    """

    steps: int = 200
    rate: float = 0.5
    penalty: float = 0.5
    entropy: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 1 or not (self.rate > 0 and self.penalty >= 0):
            raise ArgumentError(
                f"Policy steps={self.steps!r}, rate={self.rate!r}, penalty={self.penalty!r}; "
                "choose 1 step or more, a rate above 0 and a penalty from 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Hold the formats that a search chose.

    Args:
        formats: Recipe by layer.
        cost: Bit operations of a batch, summed over layers: multiply-adds x bits of w x bits of x.
        budget: What it had to stay within.
        loss: Loss of the model that runs these formats, measured.
        losses: Loss of the model where one layer alone runs one recipe, by layer and recipe.
        costs: Bit operations, likewise.
        recipes: The records, by name.
        tried: Assignments that were run, beside those of one layer.
    """

    formats: dict[str, str]
    cost: int
    budget: int
    loss: float
    losses: dict[str, dict[str, float]]
    costs: dict[str, dict[str, int]]
    recipes: dict[str, PtqRecipe]
    tried: int = 0

    def recipe(self, name: str = "searched") -> PtqRecipe:
        """Return the recipe that gives each layer its format, for ``fmtsim.ptq``."""
        rules = tuple(
            Rule(name=f"^{re.escape(layer)}$", use=_config(self.recipes[chosen])) if layer else _whole(layer)
            for layer, chosen in self.formats.items()
        )
        first = next((r for r in self.recipes.values() if r.calibration is not None), None)
        used = [self.recipes[chosen] for chosen in self.formats.values()]
        calibrated = any(r.calibration is not None for r in used)
        weights = next(iter(self.recipes.values())).weights
        calibration = first.calibration if first is not None and calibrated else None
        return PtqRecipe(name=name, calibration=calibration, weights=weights, rules=rules)

    def __str__(self) -> str:
        cells: list[tuple[str, ...]] = [("layer", *self.recipes, "chosen")]
        for layer, chosen in self.formats.items():
            cells.append((layer, *(f"{self.losses[layer][name]:.2e}" for name in self.recipes), chosen))
        share = 100 * self.cost / self.budget
        total = f"{self.cost:.4g} bit operations, {share:.1f} % of the budget; loss {self.loss:.3e}"
        return "\n".join((*ruled(cells), total))


def _config(recipe: PtqRecipe) -> LinearConfig:
    return LinearConfig(fprop=Gemm(a=recipe.x, b=recipe.w))


def _whole(layer: str) -> Rule:
    raise ArgumentError("the model is itself a layer; quantise it with fmtsim.ptq and the recipe in formats['']")
