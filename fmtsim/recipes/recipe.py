# SPDX-License-Identifier: Apache-2.0
"""The record of a recipe: how each layer's products run, which layers are excepted, and when; as a table, too."""

import re
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Final, Literal

from fmtsim.formats.block import BlockFormat, Format
from fmtsim.formats.scaling import block_text
from fmtsim.gemm.layers.config import FORMULAS, LinearConfig, operand_product
from fmtsim.gemm.units.unit import is_unit, machine_name
from fmtsim.recipes.attention_config import AttentionConfig
from fmtsim.recipes.build import SavedActivations
from fmtsim.recipes.system import Level, OptimizerConfig, find_level
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import check_types, lists_fields, located
from fmtsim.support.table import aligned, filled, html

HEADINGS = ("product", "operand", "of", "transforms", "format", "scale", "rounding", "gradient")
_SOURCES = {"original": "the tensor", "forward": "the forward codes", "requantised": "the forward codes, again",
            "stored": "stored codes"}  # fmt: skip


def operand_rows(config: LinearConfig) -> list[tuple[str, ...]]:
    """Return a row for each operand, and for each product that is rounded, cells in the order of ``HEADINGS``."""
    rows: list[tuple[str, ...]] = []
    for name, quantizer in config.operands.items():
        product = FORMULAS[operand_product(name)]
        shown = product if not rows or rows[-1][0] != product and all(row[0] != product for row in rows) else ""
        rows.append((shown, name[0], *_cells(quantizer)))
        out = getattr(config, operand_product(name)).out
        if name in ("w_f", "w_d", "x_w") and out.format is not None:
            rows.append(("", product.partition(" ")[0], "the product", *_cells(out)[1:]))
    return rows


def _cells(quantizer: Quantizer) -> tuple[str, ...]:
    if quantizer.source == "forward":
        return (_SOURCES["forward"], *("",) * 5)
    formats, scales, roundings = [], [], []
    step: Quantizer | None = quantizer
    while step is not None:
        formats.append("high precision" if step.format is None else step.format.name)
        scales.append(_scale(step))
        drawn = "" if step.rounding.random_bits is None else f" ({step.rounding.random_bits} bits)"
        roundings.append("" if step.format is None else str(step.rounding.mode) + drawn)
        step = step.then
    transforms = "; ".join(map(str, quantizer.transforms))
    gradient = str(quantizer.gradient)
    return (
        _SOURCES[quantizer.source], transforms, " > ".join(formats), " > ".join(scales), " > ".join(roundings),
        "" if gradient == "straight through" else gradient,
    )  # fmt: skip


def _scale(quantizer: Quantizer) -> str:
    if quantizer.scaling is not None:
        return str(quantizer.scaling)
    fmt: Format | None = quantizer.format
    if not isinstance(fmt, BlockFormat):
        return "" if fmt is None else "none"
    level = ", tensor scale" if fmt.tensor_scale else ""
    return f"{block_text(fmt.block)}, {fmt.scale.name} by {fmt.scaling.rule_text}{level}"


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Name a stretch of training.

    Args:
        first: Steps done where it begins, or the fraction of the run where it begins (a float between 0 and 1).
        last: Steps done where it ends, or such a fraction; None is the end of the run.
    """

    first: int | float = 0
    last: int | float | None = None

    def __post_init__(self) -> None:
        for name, value in (("first", self.first), ("last", self.last)):
            fraction = isinstance(value, float) and 0 < value < 1  # 1.0 equals 1, another step
            if value is not None and not fraction and not (type(value) is int and value >= 0):
                raise ArgumentError(
                    f"Steps {name}={shown(value)} is not allowed; "
                    "pass a step from 0, or a fraction of the run above 0 and below 1, such as 0.82"
                )
        check_types(self)
        if type(self.last) is type(self.first) and self.last <= self.first:
            raise ArgumentError(
                f"Steps first={self.first}, last={self.last} hold no step; last is the step behind the last one"
            )

    def holds(self, step: int, total: int | None) -> bool:
        """Return True if a step lies in the stretch, counted by the steps before it; fractions need the step count.

        Raises:
            ArgumentError: A bound is a fraction and ``total`` is None.
        """
        return self._bound(self.first, total) <= step and (self.last is None or step < self._bound(self.last, total))

    def overlaps(self, other: "Steps", total: int | None) -> bool:
        """Return True if some step lies in both stretches; fractions need the number of all steps."""
        first = max(self._bound(self.first, total), self._bound(other.first, total))
        lasts = [self._bound(s.last, total) for s in (self, other) if s.last is not None]
        return first < min(lasts, default=first + 1)

    @staticmethod
    def _bound(value: int | float, total: int | None) -> int:
        if isinstance(value, int):
            return value
        if total is None:
            raise ArgumentError(f"the schedule says {value:g} of the run; pass total_steps= so that it has a length")
        return round(value * total)

    def __str__(self) -> str:
        names = [
            f"{value:.0%}" if isinstance(value, float) else str(value) for value in (self.first, self.last or "end")
        ]
        return f"steps {names[0]} to {names[1]}"


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Describe an exception: layers or steps that run under another config than the recipe's ``linear``.

    A layer has to fulfil everything that is given. The first rule of a recipe that fits a layer and step counts.

    Args:
        use: How those run; None leaves them in high precision.
        name: A regular expression that is searched for in the module's name.
        kind: The name of the module's class or of one of its bases, such as ``"Conv2d"``.
        first_blocks: The layers of the first so many blocks, or of a fraction of them (a float below 1, rounded up).
            Blocks are the elements of each outermost ``nn.ModuleList`` or ``nn.Sequential`` whose elements all hold
            convertible layers, in the model's order (the stages of a ResNet, an encoder and its decoder); a list of
            several classes around one of a single class does not count. A model without blocks is an error.
        last_blocks: The layers of the last so many blocks.
        head: The last linear layer of the model, and any layer that shares its weight.
        steps: When; None is always.
        optional: A name or kind that fits no layer of a model, or blocks where it has none, are an error unless this
            is set.
    """

    use: LinearConfig | None = None
    name: str | None = None
    kind: str | None = None
    first_blocks: int | float = 0
    last_blocks: int | float = 0
    head: bool = False
    steps: Steps | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        if self.use is not None and not isinstance(self.use, LinearConfig):
            raise ArgumentError(
                f"Rule use={shown(self.use)} is not a LinearConfig or None; build one with linear_config()"
            )
        check_types(self)
        if self.name is not None:
            try:
                re.compile(self.name)
            except re.error as error:
                raise ArgumentError(f"Rule name={shown(self.name)} is not a regular expression: {error}") from None
        for name in ("first_blocks", "last_blocks"):
            value = getattr(self, name)
            if not (type(value) is int and value >= 0) and not (isinstance(value, float) and 0 < value < 1):
                raise ArgumentError(
                    f"Rule {name}={shown(value)} is not allowed; pass a whole number from 0, or a fraction"
                )
        everything = not (self.name or self.kind or self.first_blocks or self.last_blocks or self.head or self.steps)
        if everything:
            raise ArgumentError("a Rule that fits every layer and step belongs into the recipe's linear=; narrow it")

    @property
    def where(self) -> str:
        """Which layers and steps it is about, in a few words."""
        parts = [f"name ~ {self.name}"] if self.name else []
        parts += [self.kind] if self.kind else []
        parts += [f"first {_share(self.first_blocks)} blocks"] if self.first_blocks else []
        parts += [f"last {_share(self.last_blocks)} blocks"] if self.last_blocks else []
        parts += ["head"] if self.head else []
        parts += [str(self.steps)] if self.steps else []
        return ", ".join(parts)

    def __str__(self) -> str:
        return f"{self.where}: {'high precision' if self.use is None else self.use}"


def _share(blocks: int | float) -> str:
    return f"{blocks:.0%} of the" if isinstance(blocks, float) else str(blocks)


REPLACEMENTS: Final = {"swiglu": ("SmoothSwiGLU",), "operations": ("UnitScaled", "MuScaled")}
"""What recipes exchange in a model, and what for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """Describe one exchange that a recipe makes in a model.

    Args:
        kind: What: ``"swiglu"``, gated feed-forward layers; ``"operations"``, all that the model's forward calls, for
            those of unit variance, with weights divided by their standard deviation.
        by: What they become: ``"SmoothSwiGLU"``; ``"UnitScaled"``, the operations of ``fmtsim.nn.unit_scaling``, or
            ``"MuScaled"``, those of muS.
        per: A scale for each ``"token"`` or ``"channel"`` of a gated layer.
        power_of_two: Scales of gated layers rounded up to powers of two.
        tau: Part of the variance that comes from each residual branch, for ``"MuScaled"``; the paper takes 0.4 for 4
            layers, and less for more.
        optional: A model without such modules is an error unless this is set.
    """

    kind: str
    by: str
    per: Literal["token", "channel"] = "token"
    power_of_two: bool = False
    tau: float = 0.4
    optional: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 < self.tau < 1:
            raise ArgumentError(
                f"Replacement tau={self.tau!r} is not a part of the variance; choose one between 0 and 1"
            )
        for name, allowed in (("kind", tuple(REPLACEMENTS)), ("by", REPLACEMENTS.get(self.kind, ()))):
            if getattr(self, name) not in allowed:
                raise ArgumentError(
                    f"Replacement {name}={getattr(self, name)!r} is unknown; choose {' or '.join(map(repr, allowed))}"
                )

    def __str__(self) -> str:
        if self.kind == "operations":
            residual = f", residual branches of variance {self.tau:g}" if self.by == "MuScaled" else ""
            return f"operations become {self.by}, weights of unit variance{residual}"
        words = [f"{self.kind} becomes {self.by}", f"a scale a {self.per}"]
        words += ["powers of two"] if self.power_of_two else []
        return ", ".join([*words, *(["where there is one"] if self.optional else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Describe the factor that keeps small gradients above a format's smallest number.

    Args:
        initial: The first factor.
        growth: What it is multiplied with after ``interval`` steps without overflow.
        backoff: What it is multiplied with after an overflow.
        interval: Steps; None keeps the factor for good (static scaling).
        hysteresis: Overflows that are let pass before the factor backs off.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int | None = 2000
    hysteresis: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("initial", "growth", "backoff"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < float("inf")):
                raise ArgumentError(f"LossScale {name}={shown(value)} is not allowed; pass a finite number above 0")
        for name in ("interval", "hysteresis"):
            value = getattr(self, name)
            if not (type(value) is int and value >= 1) and not (name == "interval" and value is None):
                raise ArgumentError(f"LossScale {name}={shown(value)} is not allowed; pass a whole number from 1")

    def __str__(self) -> str:
        if self.interval is None:
            return f"times {self.initial:g}"
        condition = f" after {self.hysteresis} overflows" if self.hysteresis > 1 else " after an overflow"
        return (
            f"times {self.initial:g}, x{self.growth:g} after {self.interval} clean steps, x{self.backoff:g}{condition}"
        )


# A recipe's records: the class of one, or of each of several in a tuple, and what to write.
_PARTS: Final[tuple[tuple[str, Any, str], ...]] = (
    ("linear", LinearConfig, "build one with linear_config()"),
    ("rules", (Rule,), "write rules=(Rule(...),)"),
    ("attention", AttentionConfig, "pass flash_attention_3()"),
    ("replace", (Replacement,), "write replace=(Replacement(kind='swiglu', by='SmoothSwiGLU'),)"),
    ("activations", SavedActivations, "pass SavedActivations()"),
    ("aliases", (str,), "write aliases=(name, ...)"),
    ("loss_scale", LossScale, "pass LossScale()"),
    ("optimizer", OptimizerConfig, "pass OptimizerConfig(state='coat')"),
    ("levels", (Level,), "write levels=(Level(name='O1'),)"),
)


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Name a way of training.

    Args:
        name: The name it is listed under.
        linear: How linear layers and convolutions run; None leaves them in high precision.
        rules: Exceptions among linear layers and convolutions, the first that fits counts.
        attention: How attention runs wherever modules call torch's scaled_dot_product_attention; None leaves it in
            high precision.
        autocast: Dtype that everything else runs in under ``torch.autocast``, None for the model's own.
        loss_scale: Scaling of the loss, or None.
        replace: Modules and operations that it exchanges.
        activations: What norms, activation functions and gated products keep for the backward pass; None keeps all.
        optimizer: Its optimizer and how states are kept, which a training loop builds; None is a float32 one.
        reduction: How gradients of several ranks are summed, by a name of ``fmtsim.distributed.REDUCTIONS``, or None.
        levels: Stages of both; ``optimizer`` and ``reduction`` are those of one of them.
        machine: What it was made for: a target's or a unit's name, or a Datapath; ``target="recipe"`` selects it.
        variant: What sets it apart from its namesakes: ``"paper"`` or ``"code"``, or empty.
        aliases: Other names.
        source: Where it is defined, with the version that was read.
        notes: What the source does that a record cannot say.
        multiple: The source refuses rows and features that this does not divide; here a last block may be short.
    """

    name: str
    linear: LinearConfig | None = None
    rules: tuple[Rule, ...] = ()
    attention: AttentionConfig | None = None
    autocast: Literal["bfloat16", "float16"] | None = None
    loss_scale: LossScale | None = None
    replace: tuple[Replacement, ...] = ()
    activations: SavedActivations | None = None
    optimizer: OptimizerConfig | None = None
    reduction: str | None = None
    levels: tuple[Level, ...] = ()
    machine: str | Datapath | None = None
    variant: Literal["", "paper", "code"] = ""
    aliases: tuple[str, ...] = ()
    source: str = ""
    notes: str = ""
    multiple: int = 1

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise ArgumentError(f"Recipe name={shown(self.name)} is not a name; pass a word such as 'my_fp8'")
        for name, kind, hint in _PARTS:
            value = getattr(self, name)
            if isinstance(kind, tuple):
                good = isinstance(value, tuple) and all(isinstance(one, kind) and one for one in value)
                what = f"a tuple of {'names' if kind == (str,) else kind[0].__name__}"
            else:
                good = value is None or isinstance(value, kind)
                what = f"a{'n' * (kind in (AttentionConfig, OptimizerConfig))} {kind.__name__} or None"
            if not good:
                raise ArgumentError(f"Recipe {name}={shown(value)} is not {what}; {hint}")
        check_types(self)

    @property
    def made_for(self) -> Any:
        """The target that it was made for; ArgumentError where it names none."""
        if self.machine is None:
            raise ArgumentError(f"recipe {self.name} names no machine; pass target='h200' or another")
        return self.machine

    def on(self, target: Any = None, **machine: Any) -> "Recipe":
        """Return the same recipe on a machine, which multiplies in every layer and in attention.

        Layers that a rule leaves in high precision are products of that machine, too, where it is a GPU with its
        library, which multiplies every dtype. A unit or datapath alone leaves them as they are.

        Args:
            target: As in ``fmtsim.mm``, or ``"recipe"`` for the machine that the recipe was made for.
            machine: ``plan``, ``accumulate`` and ``native`` of Gemm.

        Raises:
            ArgumentError, FormatError: The machine does not multiply an operand; the message says which.
        """
        if isinstance(target, str) and target == "recipe":
            return self.on(self.made_for, **machine)
        machine["target"] = target
        whole = None if target is None or is_unit(target) else LinearConfig()
        with located(f"recipe {self.name}"):
            linear = whole if self.linear is None else self.linear
            rules = tuple(
                replace(rule, use=None if (use := rule.use or whole) is None else use.on(**machine))
                for rule in self.rules
            )
            return replace(
                self, rules=rules, linear=None if linear is None else linear.on(**machine),
                attention=None if self.attention is None else self.attention.on(**machine),
            )  # fmt: skip

    def at_level(self, name: str) -> "Recipe":
        """Return the recipe with the optimizer and the reduction of one of its levels; ArgumentError for others."""
        level = find_level(self.name, self.levels, name)
        return replace(
            self, name=f"{self.name} {level.name}", aliases=(), levels=(level,), optimizer=level.optimizer,
            reduction=level.reduction,
        )  # fmt: skip

    @property
    def gathered(self) -> str | None:
        """Format in which ranks that share out weights send them, at the chosen level; else None."""
        return self.levels[0].gather if len(self.levels) == 1 else None

    @property
    def left_to_training(self) -> tuple[str, ...]:
        """What ``convert`` leaves to the training loop, in words: autocast, loss scaling, optimizer and reduction."""
        parts = [f"torch.autocast in {self.autocast}"] if self.autocast is not None else []
        parts += [f"scaling of the loss ({self.loss_scale})"] if self.loss_scale is not None else []
        parts += [f"optimizer states (fmtsim.optim.{self.optimizer})"] if self.optimizer else []
        parts += [f"reduction of gradients (fmtsim.distributed, {self.reduction!r})"] if self.reduction else []
        return (f"left to the training loop: {' and '.join(parts)}",) if parts else ()

    def facts(self) -> list[tuple[str, str]]:
        """Return what it says beside the operands of layers: a name and a text each."""
        facts = [("rule", str(rule)) for rule in self.rules]
        facts += [("attention", str(self.attention))] if self.attention is not None else []
        facts += [("autocast", f"the rest in {self.autocast}")] if self.autocast is not None else []
        facts += [("loss", str(self.loss_scale))] if self.loss_scale is not None else []
        facts += [("modules", str(one)) for one in self.replace]
        facts += [("activations", str(self.activations))] if self.activations is not None else []
        facts += [("optimizer", str(self.optimizer))] if self.optimizer else []
        facts += [("reduction", f"gradients reduced by {self.reduction}")] if self.reduction else []
        facts += [("level", str(level)) for level in self.levels]
        facts += [("machine", machine_name(self.machine))] if self.machine is not None else []
        facts += [("variant", f"as in the {self.variant}")] if self.variant else []
        facts += [("source", self.source)] if self.source else []
        return facts + ([("notes", self.notes)] if self.notes else [])

    def __str__(self) -> str:
        title = self.name + (f" ({', '.join(self.aliases)})" if self.aliases else "")
        lines = ["linear layers stay in high precision"]
        if self.linear is not None:
            lines = aligned(filled(HEADINGS, operand_rows(self.linear)))
        return "\n".join([title, *lines, *(f"{name}: {text}" for name, text in self.facts())])

    def _repr_html_(self) -> str:
        parts = [f"<b>{escape(self.name)}</b>"]
        parts += [] if self.linear is None else [html([HEADINGS, *operand_rows(self.linear)])]
        parts += [f"<div>{escape(name)}: {escape(text)}</div>" for name, text in self.facts()]
        return "".join(parts)
