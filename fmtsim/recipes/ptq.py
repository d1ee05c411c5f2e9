# SPDX-License-Identifier: Apache-2.0
"""The record of a recipe for post-training quantisation: operands, calibration, and methods on top of them."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fmtsim.formats.scaling import History
from fmtsim.gemm.layers.config import Gemm, LinearConfig
from fmtsim.gemm.layers.operand import keeps_scales
from fmtsim.recipes.attention import AttentionConfig
from fmtsim.recipes.spec import Recipe, Rule
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.quantizer import Hadamard, Quantizer, Sparsity
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import check_types, located

RangeRule = Literal["absmax", "percentile", "mse"]
Groups = Literal["static", "dynamic", "lazy"]
_NO_MACHINE = dict.fromkeys(("target", "plan", "native"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Describe how the static scale of an activation follows from calibration data: the largest value it covers.

    Args:
        rule: ``"absmax"`` the largest magnitude of all batches; ``"percentile"`` a quantile of the magnitudes;
            ``"mse"`` the clip of least squared error among ``steps`` that divide the largest magnitude evenly.
        percentile: Of the second rule, in percent.
        steps: Of the third rule.
        samples: Magnitudes that a part keeps of each batch for the last two rules, evenly strided.
    """

    rule: RangeRule = "absmax"
    percentile: float = 99.99
    steps: int = 80
    samples: int = 1 << 14

    def __post_init__(self) -> None:
        check_types(self)
        if not (isinstance(self.percentile, int | float) and 0 < self.percentile <= 100):
            raise ArgumentError(
                f"Calibration percentile={shown(self.percentile)} is not one; choose above 0, at most 100"
            )
        for name in ("steps", "samples"):
            _whole("Calibration", name, getattr(self, name), 2)

    def __str__(self) -> str:
        return f"{self.percentile:g} % percentile" if self.rule == "percentile" else self.rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Smooth:
    """Describe SmoothQuant (Xiao et al., arXiv:2211.10438, equation 4).

    Channel j of an input is divided by, and column j of the weight multiplied with,
    ``max|x_j|**alpha / max|w_j|**(1 - alpha)``.

    Args:
        alpha: How much of the difficulty moves from the activations into the weights, 0 to 1.
        after: Which linear layers: ``"norm"`` those whose input a normalisation module has just made, as the source
            does; ``"any"`` all of them, which hurts where outliers sit in tokens instead of channels.
    """

    alpha: float = 0.5
    after: Literal["norm", "any"] = "norm"

    def __post_init__(self) -> None:
        if not isinstance(self.after, str) or self.after not in ("norm", "any"):
            raise ArgumentError(f"Smooth after={shown(self.after)} is unknown; choose 'norm' or 'any'")
        check_types(self)
        if not (isinstance(self.alpha, int | float) and 0 <= self.alpha <= 1):
            raise ArgumentError(f"Smooth alpha={shown(self.alpha)} is not allowed; choose a number from 0 to 1")

    def __str__(self) -> str:
        return f"SmoothQuant alpha {self.alpha:g}" + (" everywhere" if self.after == "any" else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Equalise:
    """Describe cross-layer equalisation of weights (Nagel et al., arXiv:1906.04721, section 4.1).

    Args:
        pairs: Names of layers in pairs, the second one fed by the first through nothing but functions with
            ``f(s x) = s f(x)`` for ``s > 0`` such as ReLU; empty finds them inside the model's nn.Sequential.
        rounds: How often all pairs are equalised in turn.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    rounds: int = 3

    def __post_init__(self) -> None:
        _whole("Equalise", "rounds", self.rounds, 1)
        good = isinstance(self.pairs, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in self.pairs)
        if not good:
            raise ArgumentError(f"Equalise pairs={shown(self.pairs)} are not pairs; write (('fc1', 'fc2'),)")
        check_types(self)

    def __str__(self) -> str:
        return "weights equalised" + (f" in {len(self.pairs)} pairs" if self.pairs else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq:
    """Describe GPTQ (Frantar et al., arXiv:2210.17323): columns rounded in turn, the rest making up for each error.

    Args:
        damping: Share of the mean of the Hessian's diagonal that is added to it.
        act_order: Round the columns with the largest inputs first.
        groups: When the scales of a group of columns are made: ``"static"`` before the first column, of the original
            weight; ``"dynamic"`` when the group is reached, of the weight as the errors so far have changed it, which
            is what the paper describes; ``"lazy"`` then, too, but without the errors of the block of 128 columns that
            is being worked on, which is what the authors' code does. Under ``act_order`` the last two group columns in
            the order they are taken, so that storage needs each column's group, too.
    """

    damping: float = 0.01
    act_order: bool = False
    groups: Groups = "static"

    def __post_init__(self) -> None:
        check_types(self)
        if not (isinstance(self.damping, int | float) and self.damping >= 0):
            raise ArgumentError(f"Gptq damping={shown(self.damping)} is not allowed; choose a number from 0")

    def __str__(self) -> str:
        order = ", act-order" if self.act_order else ""
        return f"GPTQ damping {self.damping:g}{order}" + (f", {self.groups} groups" if self.groups != "static" else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedRounding:
    """Describe AdaRound (Nagel et al., arXiv:2004.10568): up or down is learned from the layer's output error.

    Args:
        steps: Of Adam.
        rate: Its learning rate.
        regularisation: Weight of the term that drives each choice to 0 or 1: the mean over all weights, relative to the
            error of rounding to nearest. Little of it leaves choices between, where nearest decides after all.
        beta: First and last exponent of that term, falling linearly.
        warmup: Share of the steps without it.
        sweeps: Passes over the columns afterwards that turn single choices where that helps; the source has none.
    """

    steps: int = 150
    rate: float = 0.02
    regularisation: float = 100.0
    beta: tuple[float, float] = (20.0, 2.0)
    warmup: float = 0.2
    sweeps: int = 2

    def __post_init__(self) -> None:
        _whole("LearnedRounding", "steps", self.steps, 1)
        _whole("LearnedRounding", "sweeps", self.sweeps, 0)
        check_types(self)
        if not (self.rate > 0 and self.regularisation >= 0 and 0 <= self.warmup < 1):
            raise ArgumentError(
                f"LearnedRounding rate={self.rate!r}, regularisation={self.regularisation!r}, warmup={self.warmup!r}; "
                "choose a rate above 0, a regularisation from 0 and a warmup from 0 to below 1"
            )

    def __str__(self) -> str:
        return f"learned rounding, {self.steps} steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class PtqRecipe:
    """Describe how a trained model becomes a quantised one.

    Args:
        name: Its name.
        x: Quantiser of the activations; without a format they stay in high precision.
        w: Quantiser of the weights, blocks along the inner axis (``block=(1, None)`` is an output channel).
        calibration: How a static scale of x is found, for an x with one scale a tensor; None makes scales from the
            tensor at hand.
        smooth, equalise: What is done to weights and inputs before.
        weights: How weights are rounded; None rounds every element to nearest.
        bias_correction: Add the mean error of the layer's outputs on the calibration data to the bias (Nagel et al.,
            arXiv:1906.04721, section 4.2, measured instead of derived).
        batch_norm: Measure the statistics of batch normalisation anew in the quantised model.
        attention: Quantisers of attention, for models that call torch's scaled_dot_product_attention; those of k and
            v stand for a quantised cache.
        extended: Quantiser of the inputs of normalisation and softmax modules, at every call, and of embeddings, once;
            scales are made of the tensor at hand. Functions that no module calls, and additions, stay as they are.
        rules: Layers that run otherwise; the first that fits counts. Only ``a`` and ``b`` of a rule's ``use.fprop``
            count.
        target, plan, native: The machine that the quantised layers multiply on, as in Gemm; without one products
            are float32, in no particular order.
        aliases, source, notes: As in Recipe.
    """

    name: str
    x: Quantizer = Quantizer()
    w: Quantizer = Quantizer()
    calibration: Calibration | None = None
    smooth: Smooth | None = None
    equalise: Equalise | None = None
    weights: Gptq | LearnedRounding | None = None
    bias_correction: bool = False
    batch_norm: bool = False
    attention: AttentionConfig | None = None
    extended: Quantizer | None = None
    rules: tuple[Rule, ...] = ()
    target: Any = None
    plan: GemmPlan | None = None
    native: bool | None = None
    aliases: tuple[str, ...] = ()
    source: str = ""
    notes: str = ""

    @property
    def linear(self) -> LinearConfig:
        """Operands of a layer without rules, as ``fmtsim.attribute`` takes them."""
        return LinearConfig(fprop=Gemm(a=self.x, b=self.w))

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise ArgumentError(f"PtqRecipe name={shown(self.name)} is not a name; pass a word such as 'my_int8'")
        kinds: dict[str, Any] = {
            "calibration": Calibration | None, "smooth": Smooth | None, "equalise": Equalise | None,
            "weights": Gptq | LearnedRounding | None, "attention": AttentionConfig | None,
            "extended": Quantizer | None,
        }  # fmt: skip
        for name, kind in ({"x": Quantizer, "w": Quantizer} | kinds).items():
            if not isinstance(getattr(self, name), kind):
                raise ArgumentError(
                    f"PtqRecipe {name}={shown(getattr(self, name))} is not a {getattr(kind, '__name__', kind)}"
                )
        check_types(self)
        if self.extended is not None and (self.extended.format is None or self.extended.is_random):
            raise ArgumentError(
                f"PtqRecipe {shown(self.name)} extended={self.extended}: choose a format, rounded to nearest"
            )
        if any(rule.steps is not None for rule in self.rules):
            raise ArgumentError(
                f"PtqRecipe {shown(self.name)}: a Rule with steps= is one of training; leave steps= out"
            )
        for where, x, w in self._operands():
            _check_operands(f"PtqRecipe {shown(self.name)}{where}", x, w)
            if w.transforms and self.weights is not None:
                raise ArgumentError(
                    f"PtqRecipe {shown(self.name)}{where}: weights={self.weights} would fill what {w.transforms[0]} "
                    "made zero; choose weights=None, or leave the transform out"
                )
        if self.calibration is not None and not any(is_static(x) for _, x, _ in self._operands()):
            raise ArgumentError(
                f"PtqRecipe {shown(self.name)}: calibration= with x = {self.x}, which has no scale of a tensor; "
                "give x Scaling() with block=(None, None), or leave calibration= out"
            )
        if self.machine or self.plan is not None or self.native is not None:
            with located(f"PtqRecipe {shown(self.name)}"):
                for where, x, w in self._operands():
                    with located(where.strip()):
                        self._check_machine(x, w)
                with located("attention"):
                    _ = self.serving_attention

    def _check_machine(self, x: Quantizer, w: Quantizer) -> None:
        """Refuse operands that the target does not multiply, and weights whose scales are not stored for it."""
        self.product(x, w)
        moving = isinstance(self.weights, Gptq) and self.weights.groups != "static" and w.format is not None
        if moving and x.format is not None:
            raise ArgumentError(
                f"weights={self.weights}: a machine is not handed scales that groups make as they are reached; choose "
                "Gptq(groups='static'), or leave x in high precision"
            )

    def _operands(self) -> list[tuple[str, Quantizer, Quantizer]]:
        used = [(f" rules[{i}]", rule.use) for i, rule in enumerate(self.rules) if rule.use is not None]
        return [("", self.x, self.w), *((where, use.fprop.a, use.fprop.b) for where, use in used)]

    def on(self, target: Any = None, **machine: Any) -> "PtqRecipe":
        """Return the same recipe on a machine, or on none.

        Args:
            target: As in ``fmtsim.mm``.
            machine: ``plan`` and ``native`` of Gemm; what is left out is None.

        Raises:
            ArgumentError, FormatError: The machine does not multiply an operand; the message names it.
        """
        if isinstance(target, str) and target == "recipe":
            raise ArgumentError(f"ptq recipe {self.name!r} names no machine; pass target='h200' or another")
        return dataclasses.replace(self, **{**_NO_MACHINE, **machine, "target": target})

    @property
    def on_machine(self) -> dict[str, Any]:
        """The fields that name the machine, as keywords of ``on``."""
        return {name: getattr(self, name) for name in _NO_MACHINE}

    @property
    def machine(self) -> str:
        """What multiplies, in a few words; empty where that is float32 in no particular order."""
        return Gemm(target=self.target).machine

    @property
    def serving_attention(self) -> AttentionConfig | None:
        """The quantised attention, on the recipe's machine where q and k are quantised, not a cache alone."""
        how = self.attention
        if how is None or not self.machine or how.q.format is None or how.k.format is None:
            return how
        return how.on(target=self.target)

    @property
    def prescribed(self) -> Recipe:
        """The recipe whose forward products have these quantisers, scales made from the tensor at hand."""
        return self._recipe(self.product)

    def product(self, x: Quantizer, w: Quantizer) -> Gemm:
        """Return the forward product of two operands on the recipe's machine."""
        return Gemm(a=x, b=w, **self.on_machine)

    def served(self, x: Quantizer, w: Quantizer) -> Gemm:
        """Return the forward product of a quantised layer: a stored weight, and the scale of x as calibrated.

        A target multiplies the weight's elements, with the scales under which they were rounded. Without a target, or
        without such scales (a format that keeps none, scales that moved with GPTQ), the stored values are multiplied.
        """
        x = fixed(x) if self.calibration is not None and is_static(x) else x
        apart = w.scaling is not None or keeps_scales(w, folded=False, on_gpu=False)
        moving = isinstance(self.weights, Gptq) and self.weights.groups != "static"
        stored = bool(self.machine) and apart and not moving
        return self.product(x, dataclasses.replace(w, source="stored", transforms=()) if stored else Quantizer())

    @property
    def inference(self) -> Recipe:
        """The recipe that a quantised model runs: weights as they are stored, static scales as calibrated.

        ``fmtsim.convert`` with it, ``load_state_dict`` and ``fmtsim.load_state`` restore a quantised model.
        """
        return self._recipe(self.served)

    def _recipe(self, product: Callable[[Quantizer, Quantizer], Gemm]) -> Recipe:
        def config(x: Quantizer, w: Quantizer) -> LinearConfig:
            return LinearConfig(fprop=product(x, w))

        rules = tuple(
            rule if rule.use is None else dataclasses.replace(rule, use=config(rule.use.fprop.a, rule.use.fprop.b))
            for rule in self.rules
        )
        idle = self.x.format is None and self.w.format is None
        return Recipe(name=self.name, linear=None if idle else config(self.x, self.w), rules=rules)

    def __str__(self) -> str:
        ranges = "from the tensor at hand" if self.calibration is None else f"calibrated by {self.calibration}"
        lines = [self.name, f"x: {self.x}" + (f", {ranges}" if self.x.format else ""), f"w: {self.w}"]
        lines += [self.machine] if self.machine else []
        methods = [str(part) for part in (self.equalise, self.smooth, self.weights) if part is not None]
        methods += ["bias correction"] * self.bias_correction + ["batch norm measured anew"] * self.batch_norm
        lines += [f"with: {', '.join(methods)}"] if methods else []
        lines += [f"attention: {self.attention}"] if self.attention is not None else []
        lines += [f"normalisation, softmax, embeddings: {self.extended}"] if self.extended is not None else []
        for rule in self.rules:
            how = "high precision" if rule.use is None else f"x: {rule.use.fprop.a}; w: {rule.use.fprop.b}"
            lines.append(f"rule: {rule.where}: {how}")
        lines += [f"{name}: {getattr(self, name)}" for name in ("source", "notes") if getattr(self, name)]
        return "\n".join(lines)


def is_static(x: Quantizer) -> bool:
    """Return True if a quantiser has a scale of the tensor, made of its amax, which calibration may fix."""
    s = x.scaling
    if s is None or s.statistic != "amax":
        return False
    return s.block == (None, None) if s.tensor is None else s.tensor.order == "te"


def fixed(x: Quantizer) -> Quantizer:
    """Return a quantiser with a static scale, which calibration sets."""
    assert x.scaling is not None
    scaling = dataclasses.replace(x.scaling, history=History(length=1, fixed=True), candidates=(1.0,))
    return dataclasses.replace(x, scaling=scaling)


def _check_operands(where: str, x: Quantizer, w: Quantizer) -> None:
    if any(q.scaling is not None and q.scaling.history is not None for q in (x, w)):
        raise ArgumentError(f"{where}: a scale with a history is one of training; leave history= out")
    pruned = all(isinstance(t, Sparsity) for t in w.transforms)
    if not pruned or w.then is not None or any(isinstance(t, Hadamard) for t in x.transforms):
        raise ArgumentError(
            f"{where}: weights are stored as they are rounded; leave then= out, and transforms= but Sparsity()"
        )


def _whole(record: str, name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ArgumentError(f"{record} {name}={shown(value)} is not allowed; choose a whole number from {least}")
