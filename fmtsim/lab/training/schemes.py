# SPDX-License-Identifier: Apache-2.0
"""How a model is trained: its scheme (formats, scaling, rounding, machine), and the two schemes of a comparison."""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fmtsim.distributed.reduction import get_reduction
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import ScalingName
from fmtsim.gemm.layers.config import Gemm, LinearConfig, linear_config, usual_scaling
from fmtsim.lab.training.decoders import GPTConfig, check_size
from fmtsim.optim.catalogue import get_scheme
from fmtsim.recipes.recipe import LossScale, Recipe, Rule
from fmtsim.recipes.serialization import recipe_to_dict
from fmtsim.recipes.system import OptimizerConfig
from fmtsim.rounding.modes import RoundingName
from fmtsim.spec.datapath import Datapath, IntegerDatapath, LogDatapath
from fmtsim.spec.gemm_spec import record_to_dict
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError

HIGH_PRECISION = "fp32"
ADAMW = OptimizerConfig(state=HIGH_PRECISION)  # torch's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Name a way of training: formats, scaling, rounding and target as on the command line.

    Args:
        format: Format of activations and weights; ``"fp32"`` without a target converts nothing.
        grad_format: Format of gradients; None means e5m2 for element formats of 8 bits and fewer, else ``format``, as
            for an IntegerDatapath.
        scaling: One of SCALINGS; None means the format's own blocks, ``"tensor"`` for element formats of 8 bits and
            fewer, ``"none"`` for wider ones.
        rounding: Rounding of activations and weights.
        grad_rounding: Rounding of gradients.
        target: What multiplies: a GPU with its library or a matrix unit alone, by name or path, or a datapath; None
            multiplies in float32.
        plan: Accumulation order instead of the target's own.
        fast_accum: use_fast_accum of the target's forward products.
        fast_backward: use_fast_accum of the products of gradients as well.
        recipe: A recipe instead of formats, scaling, rounding and fast sums; ``format`` is ``"fp32"`` then.
        autocast: Dtype of everything else under ``torch.autocast``, instead of the recipe's own.
        optimizer: Optimizer and state scheme instead of the recipe's own, or of AdamW in float32.
        reduction: Reduction of gradients over ranks by name, instead of the recipe's own, or of float32's mean.
        rules: Exceptions for layers, ahead of the recipe's own, as ``convert`` takes them.

    Raises:
        ArgumentError: An unknown state scheme or reduction, or options that need others.
    """

    format: str
    grad_format: str | None = None
    scaling: ScalingName | None = None
    rounding: RoundingName = "nearest_even"
    grad_rounding: RoundingName = "nearest_even"
    target: str | Datapath | IntegerDatapath | LogDatapath | None = None
    plan: GemmPlan | None = None
    fast_accum: bool = False
    fast_backward: bool = False
    recipe: Recipe | None = None
    autocast: str | None = None
    optimizer: OptimizerConfig | None = None
    reduction: str | None = None
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        if self.fast_backward and not self.fast_accum:
            raise ArgumentError("--fast-backward extends --fast-accum to gradients; pass --fast-accum as well")
        if self.recipe is not None and self.autocast is None:
            object.__setattr__(self, "autocast", self.recipe.autocast)
        get_scheme(self.states.state)
        get_reduction(self.reduced_by)

    @property
    def simulated(self) -> bool:
        """Whether anything is quantised, or multiplied by a target."""
        return bool(self.recipe or self.rules) or get_format(self.format).name != HIGH_PRECISION or self.emulated

    @property
    def emulated(self) -> bool:
        """Whether a target multiplies."""
        return self.target is not None

    def simpler(self, baseline: "Scheme") -> dict[str, "Scheme"]:
        """Return this scheme with one part after another taken away, by that part: each step of the gap is the part's.

        ``"arithmetic"``: products in float32 on no machine. ``"optimizer"``: that, and the baseline's optimizer and
        reduction. ``"operands"``: the baseline. Parts that the scheme does not have are left out.
        """
        rules = tuple(replace(rule, use=rule.use and rule.use.on()) for rule in self.rules)
        exact = replace(self, target=None, plan=None, recipe=self.recipe and self.recipe.on(), rules=rules)
        usual = replace(exact, optimizer=baseline.states, reduction=baseline.reduced_by)
        steps, before = {"arithmetic": exact, "optimizer": usual, "operands": baseline}, self
        parts = dict[str, Scheme]()
        for part, scheme in steps.items():
            # 1. nothing is left that the baseline does not do
            bare = not (scheme.simulated or scheme.autocast or baseline.simulated)
            learns_alike = (scheme.states, scheme.reduced_by) == (baseline.states, baseline.reduced_by)
            after = baseline if bare and learns_alike else scheme
            # 2. a part is what this step took away
            if after._in_force != before._in_force:
                parts[part] = after
            before = after
        return parts

    @property
    def _in_force(self) -> dict[str, Any]:
        return self.to_dict() | {"grad_format": self.gradient, "scaling": self.scaling_in_force}

    @property
    def states(self) -> OptimizerConfig:
        """The optimizer in force."""
        return self.optimizer or (self.recipe and self.recipe.optimizer) or ADAMW

    @property
    def reduced_by(self) -> str:
        """The reduction of gradients in force, where there are ranks."""
        return self.reduction or (self.recipe and self.recipe.reduction) or HIGH_PRECISION

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced otherwise than in float32, which needs ranks."""
        return self.reduced_by != HIGH_PRECISION

    @property
    def unit_variance(self) -> bool:
        """Whether the recipe gives weights unit variance, which wants other learning rates."""
        return self.recipe is not None and any(one.kind == "operations" for one in self.recipe.replace)

    @property
    def gathered(self) -> str:
        """The format in which the chosen level of a recipe gathers weights, else empty."""
        return (self.recipe and self.recipe.gathered) or ""

    @property
    def gradient(self) -> str:
        """The format of gradients in force."""
        alike = isinstance(self.target, IntegerDatapath) or usual_scaling(get_format(self.format)) != "tensor"
        return self.grad_format or (self.format if alike else "e5m2")

    @property
    def scaling_in_force(self) -> str:
        """What shares a scale, in words."""
        if self.recipe is not None:
            return "the recipe's"
        return self.scaling or usual_scaling(get_format(self.format)) or "the format's own blocks"

    @property
    def label(self) -> str:
        """A short description for legends and tables."""
        optimizer = str(self.states) if self.states != ADAMW else ""
        system = (optimizer, f"gradients reduced by {self.reduced_by}" if self.reduces else "")
        return ", ".join(filter(None, (self._products, *system)))

    @property
    def _products(self) -> str:
        machine = Gemm(**self.machine, fast_accum=self.fast_accum).machine
        if self.recipe is not None:
            return ", ".join(filter(None, (self.recipe.name, machine)))
        if not self.simulated:
            return HIGH_PRECISION
        formats = self.format if self.gradient == self.format else f"{self.format}/{self.gradient}"
        scaling = self.scaling or usual_scaling(get_format(self.format))
        names = {"nearest_even": "", "stochastic": "SR"}
        forward, backward = (names.get(mode, mode) for mode in (self.rounding, self.grad_rounding))
        parts = [formats, "unscaled" if scaling == "none" else f"scaled by {scaling}" if scaling else ""]
        if forward == backward:
            parts.append(forward)
        else:
            parts += [f"{tensors} {mode}" for tensors, mode in (("x w", forward), ("g", backward)) if mode]
        parts += [machine, "also of gradients" if self.fast_backward else ""]
        parts += [f"{len(self.rules)} rule{'s' * (len(self.rules) > 1)}" if self.rules else ""]
        return ", ".join(filter(None, parts))

    @property
    def machine(self) -> dict[str, Any]:
        """Target and plan of the products, as keywords of ``convert``."""
        return {"target": self.target, "plan": self.plan}

    def linear_config(self) -> LinearConfig:
        """Return the config of every layer without a recipe, without its machine.

        Raises:
            FormatError, ArgumentError: The options do not fit together.
        """
        config = linear_config(
            x=self.format, w=self.format, g=self.gradient, scaling=self.scaling, rounding=self.rounding,
            grad_rounding=self.grad_rounding, fast_accum=self.fast_accum,
        )  # fmt: skip
        backward = {name: replace(getattr(config, name), fast_accum=self.fast_backward)
                    for name in ("dgrad", "wgrad")}  # fmt: skip
        return replace(config, **backward)

    @property
    def loss_scale(self) -> LossScale | None:
        """How the loss is scaled."""
        return None if self.recipe is None else self.recipe.loss_scale

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types, records of units, plans and recipes as in their files."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.recipe is not None:
            values["recipe"] = recipe_to_dict(self.recipe)
        values["rules"] = [recipe_to_dict(rule) for rule in self.rules]
        records = Datapath | IntegerDatapath | LogDatapath | GemmPlan
        return {
            name: record_to_dict(value) if isinstance(value, records) else value for name, value in values.items()
        } | {"optimizer": asdict(self.states), "reduction": self.reduced_by}


CLIP, FINAL_SHARE = 1.0, 0.1  # norm of gradients, share of the peak rate after the last step
RANKS = 2  # of a low-precision reduction, unless told otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Say everything about a comparison but the text."""

    simulated: Scheme  # the scheme under test
    baseline: Scheme  # what it is compared with
    model: GPTConfig  # sizes of the model
    architecture: str = "gpt"  # ``"gpt"``, ``"llama"``, or a function that returns a model, as ``"FILE.py:function"``
    steps: int  # optimizer steps of each run
    batch_size: int  # windows a step
    # simulated ranks that share the windows of a step; None is 2 where the scheme reduces gradients in few bits, else
    # 1. The baseline's gradients are reduced over as many, in float32.
    ranks: int | None = None
    # peak learning rate of AdamW; it warms up over a tenth of the steps (at least 20, or half of a shorter run) and
    # decays to ``final_rate``, as a cosine. Madam's is ``MADAM_RATE`` times as large.
    lr: float
    final_rate: float = FINAL_SHARE  # share of the peak that is left after the last step
    clip: float | None = CLIP  # norm at which gradients are clipped; None clips none
    seed: int  # of weights, batches and stochastic rounding
    device: str = "cpu"  # where models and batches are

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
        # Fill in the number of ranks, and refuse one that does not fit.
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
