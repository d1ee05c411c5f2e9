# SPDX-License-Identifier: Apache-2.0
"""The record of a recipe for post-training quantisation: operands, calibration, and methods on top of them."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fmtsim.formats.floating import FP32
from fmtsim.formats.scaling import History
from fmtsim.gemm.layers.config import Gemm, LinearConfig
from fmtsim.gemm.layers.quantize_operand import keeps_scales
from fmtsim.recipes.attention_config import AttentionConfig
from fmtsim.recipes.ptq_methods import Awq, Calibration, Clip, Equalise, Gptq, Hqq, LearnedRounding, Rotate, Smooth
from fmtsim.recipes.recipe import Recipe, Rule
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.quantizer import Hadamard, Quantizer, Sparsity
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import check_types, lists_fields, located

Sequential = Literal["block", "layer"]
_NO_MACHINE = dict.fromkeys(("target", "plan", "native"))


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class PtqRecipe:
    """Describe how a trained model becomes a quantised one.

    Args:
        name: Its name.
        x: Quantiser of the activations; without a format they stay in high precision.
        w: Quantiser of the weights, blocks along the inner axis (``block=(1, None)`` is an output channel).
        calibration: How a static scale of x is found, for an x with one scale a tensor; None makes scales from the
            tensor at hand.
        smooth, equalise: What is done to weights and inputs before: SmoothQuant's factors or AWQ's, equal ranges.
        rotate: Rotate the residual stream of a decoder before all else.
        weights: How weights are rounded; None rounds every element to nearest. HQQ takes an unsigned integer format
            with zero points, such as ``"uint4_g64_zp"``.
        sequential: What is calibrated after its quantised predecessors, in the order in which the model runs it:
            ``"block"`` each block of layers (the outermost numbered module, such as ``model.layers.3``), as GPTQ's
            authors do; ``"layer"`` each layer, those with the same input together; None takes all statistics from the
            model in high precision, in one stage. A stage takes two passes over the data.
        bias_correction: Add the mean error of the layer's outputs on the calibration data to the bias (Nagel et al.,
            arXiv:1906.04721, section 4.2, measured instead of derived).
        batch_norm: Measure the statistics of batch normalisation anew in the quantised model.
        fused: Give layers that servers fuse (q, k, v; gate, up) one scale of the tensor, where w has such scales.
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
    smooth: Smooth | Awq | None = None
    equalise: Equalise | None = None
    rotate: Rotate | None = None
    weights: Gptq | LearnedRounding | Clip | Hqq | None = None
    sequential: Sequential | None = None
    bias_correction: bool = False
    batch_norm: bool = False
    fused: bool = True
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
    def needs_data(self) -> str:
        """What calibration data is needed for, in a few words; empty where a recipe needs none."""
        needs = {
            "the static scales of its inputs": self.calibration is not None,
            str(self.smooth): self.smooth is not None,
            str(self.weights): not isinstance(self.weights, Hqq | None),
            "quantised predecessors": self.sequential is not None,
            "bias correction": self.bias_correction,
            "batch norm measured anew": self.batch_norm,
            "a call that reaches its attention": self.attention is not None,
        }
        return " and ".join(what for what, needed in needs.items() if needed)

    @property
    def linear(self) -> LinearConfig:
        """Operands of a layer without rules, as ``fmtsim.attribute`` takes them."""
        return LinearConfig(fprop=Gemm(a=self.x, b=self.w))

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise ArgumentError(f"PtqRecipe name={shown(self.name)} is not a name; pass a word such as 'my_int8'")
        kinds: dict[str, Any] = {
            "calibration": Calibration | None, "smooth": Smooth | Awq | None, "equalise": Equalise | None,
            "rotate": Rotate | None,
            "weights": Gptq | LearnedRounding | Clip | Hqq | None, "attention": AttentionConfig | None,
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
                        self.product(x, w)
                        if self.moves_scales and w.format is not None and x.format is not None:
                            raise ArgumentError(
                                f"weights={self.weights}: a machine is not handed scales or zero points that the "
                                "method makes itself; choose Gptq(groups='static'), or leave x in high precision"
                            )
                with located("attention"):
                    _ = self.serving_attention

    @property
    def moves_scales(self) -> bool:
        """Whether weights are rounded under other scales or zero points than their quantiser makes of them."""
        return isinstance(self.weights, Hqq) or (isinstance(self.weights, Gptq) and self.weights.groups != "static")

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
        keeps = keeps_scales(w, folded=False, on_gpu=False)
        apart = w.scaling is not None or (keeps and w.format.scaling.level_block == (None, None))  # type: ignore[union-attr]
        stored = bool(self.machine) and apart and not self.moves_scales
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
        methods = [str(part) for part in (self.rotate, self.equalise, self.smooth, self.weights) if part is not None]
        methods += ["bias correction"] * self.bias_correction + ["batch norm measured anew"] * self.batch_norm
        methods += [f"each {self.sequential} after its quantised predecessors"] if self.sequential else []
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
    """Return a quantiser with a static scale, which calibration sets: a power of two is one in float32, too."""
    assert x.scaling is not None
    power: dict[str, Any] = {"power_of_two": "ceil", "scale": FP32} if x.scaling.power_of_two == "log2" else {}
    history = History(length=1, fixed=True)
    scaling = dataclasses.replace(x.scaling, history=history, candidates=(1.0,), **power)
    return dataclasses.replace(x, scaling=scaling)


def _check_operands(where: str, x: Quantizer, w: Quantizer) -> None:
    if any(q.scaling is not None and q.scaling.history is not None for q in (x, w)):
        raise ArgumentError(f"{where}: a scale with a history is one of training; leave history= out")
    pruned = all(isinstance(t, Sparsity) for t in w.transforms)
    if not pruned or w.then is not None or any(isinstance(t, Hadamard) for t in x.transforms):
        raise ArgumentError(
            f"{where}: weights are stored as they are rounded; leave then= out, and transforms= but Sparsity()"
        )
