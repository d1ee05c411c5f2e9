"""How a scale comes to be, where a block format alone cannot say it: statistics, targets, history, corrections."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from fmtsim.errors import FormatError
from fmtsim.formats.block import FP32, Block
from fmtsim.formats.spec import FloatFormat

Statistic = Literal["amax", "std", "rms", "mean_abs", "one"]
Arithmetic = Literal["divide", "reciprocal", "encode", "multiply", "double"]
PowerOfTwo = Literal["floor", "ceil"]
Floor = Literal["statistic", "sum", "scale"]
Empty = Literal["one", "previous"]
Levels = Literal["te", "torchao", "quartet2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Describe delayed scaling: the scale of a call follows from the largest magnitudes of earlier ones.

    Args:
        length: Calls that are remembered.
        algorithm: ``"max"`` takes the largest magnitude remembered, ``"most_recent"`` the last.
        refresh_every: Calls between two updates of the scale; 1 updates it after each.
        immediate: Calls at the beginning that take the scale from the tensor itself.
        fixed: Calls record nothing: the scale is what calibration (``fmtsim.ptq``) or a loaded state set, 1 before.
    """

    length: int = 1024
    algorithm: Literal["max", "most_recent"] = "max"
    refresh_every: int = 1
    immediate: int = 0
    fixed: bool = False

    def __post_init__(self) -> None:
        _require(not self.fixed or not self.immediate, f"fixed=True with immediate={self.immediate}", "immediate=0")
        for name, least in (("length", 1), ("refresh_every", 1), ("immediate", 0)):
            value = getattr(self, name)
            _require(type(value) is int and value >= least, f"History {name}={value!r}", f"a whole number from {least}")
        _one_of("History algorithm", self.algorithm, ("max", "most_recent"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorScale:
    """Describe the float32 scale of a whole tensor that brings its block scales into the range of their format.

    Args:
        top: What a block's scale is at most, the tensor's largest element given; None means the scale format's max.
        order: Whose order of float32 operations: Transformer Engine's, torchao's or Quartet II's.
    """

    top: float | None = None
    order: Levels = "te"

    def __post_init__(self) -> None:
        _positive("TensorScale top", self.top)
        _one_of("TensorScale order", self.order, get_args(Levels))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Describe how the scale of a block follows from its elements; an element is then ``round(x / scale)``.

    All operations are float32, each rounded to nearest even, in the order that ``fmtsim.scaling.scales`` defines.

    Args:
        block: Elements that share a scale, ``(outer, inner)`` as in BlockFormat; None is the whole extent.
        statistic: What is taken of a block: the largest magnitude, the standard deviation (population, mean removed),
            the root mean square, the mean magnitude, or the number one (a scale that is fixed).
        factor: The scale is ``statistic * factor + offset``; None means that the statistic becomes ``top``.
        offset: Added to the scale before it is rounded.
        top: What the statistic becomes in the element format; None means the format's largest value.
        margin: The top is ``top * 2**-margin``.
        eps: Least statistic, number added to it, or least scale, as ``eps_rule`` says.
        eps_rule: ``"statistic"`` max(statistic, eps), ``"sum"`` statistic + eps, ``"scale"`` max(scale, eps).
        arithmetic: ``"divide"`` s = statistic / top, elements x / s; ``"reciprocal"`` elements x * (1 / s);
            ``"multiply"`` s = statistic * (1 / top), elements x * (1 / s); ``"encode"`` r = top / statistic, elements
            x * r, s = 1 / r; ``"double"`` as encode, r being the float32 of a float64 quotient.
        power_of_two: Round the scale to a power of two, down or up ("encode" rounds r the other way).
        multiplier: What a scale is multiplied by after it became a power of two.
        scale: The format that stores the scale.
        scale_rounding: Rounding into that format; under ``eden`` that of the corrected scales.
        allowed: Scales to choose from, ascending: the least that is not below the scale, or the largest.
        tensor: The second level, or None.
        candidates: Numbers that a block's scale is multiplied with; the one of least error counts, the first in a tie.
        metric: The error that candidates are compared by: mean absolute or mean squared.
        eden: Elements of a group whose scales are corrected so that ``<x, q> = <x, x>`` (EDEN); None corrects nothing.
        empty: Scale of a block of zeros: one, or what it was before.
        history: Delayed scaling, or None.
    """

    block: Block = (None, None)
    statistic: Statistic = "amax"
    factor: float | None = None
    offset: float = 0.0
    top: float | None = None
    margin: int = 0
    eps: float = 0.0
    eps_rule: Floor = "statistic"
    arithmetic: Arithmetic = "encode"
    power_of_two: PowerOfTwo | None = None
    multiplier: float = 1.0
    scale: FloatFormat = FP32
    scale_rounding: Literal["nearest_even", "stochastic"] = "nearest_even"
    allowed: tuple[float, ...] = ()
    tensor: TensorScale | None = None
    candidates: tuple[float, ...] = (1.0,)
    metric: Literal["mae", "mse"] = "mae"
    eden: int | None = None
    empty: Empty = "one"
    history: History | None = None

    def __post_init__(self) -> None:
        for name, values in (
            ("statistic", Statistic), ("eps_rule", Floor), ("arithmetic", Arithmetic), ("empty", Empty)
        ):  # fmt: skip
            _one_of(f"Scaling {name}", getattr(self, name), get_args(values))
        _one_of("Scaling power_of_two", self.power_of_two, (None, *get_args(PowerOfTwo)))
        _one_of("Scaling scale_rounding", self.scale_rounding, ("nearest_even", "stochastic"))
        _one_of("Scaling metric", self.metric, ("mae", "mse"))
        sizes = self.block if isinstance(self.block, tuple) and len(self.block) == 2 else (0, 0)
        possible = all(size is None or (type(size) is int and size > 0) for size in sizes)
        _require(possible, f"Scaling block={self.block!r}", "(outer, inner), whole numbers from 1, or None for all")
        for name in ("factor", "top", "multiplier"):
            _positive(f"Scaling {name}", getattr(self, name))
        for value in (*self.candidates, *self.allowed):
            _positive("Scaling candidates and allowed", value)
        _require(list(self.allowed) == sorted(self.allowed), f"Scaling allowed={self.allowed}", "an ascending tuple")
        _require(self.eps >= 0 and self.offset >= 0, f"eps={self.eps}, offset={self.offset}", "numbers from 0")
        _require(bool(self.candidates), "no candidates", "(1.0,) or several")
        _require(self.tensor is None or self.scale != FP32, "tensor= with scale fp32", "a scale such as e4m3")
        _require(
            self.factor is None or self.top is None,
            "factor= and top= together",
            "one: a factor, or what becomes the top",
        )
        whole = self.block == (None, None)
        _require(self.history is None or whole, f"history= with block={self.block}", "block=(None, None)")
        previous = self.empty == "previous" and self.history is None
        _require(not previous, "empty='previous' without a history", "history=, or empty='one'")

    def __str__(self) -> str:
        outer, inner = ("all" if size is None else str(size) for size in self.block)
        words = [f"{self.statistic} of {outer}x{inner}"]
        words += [f"x {self.factor:g}"] if self.factor is not None else []
        words += [f"to {self.top:g}"] if self.top is not None else []
        words += [f"margin {self.margin}"] if self.margin else []
        words += [f"power of two by {self.power_of_two}"] if self.power_of_two else []
        words += [f"in {self.scale.name}"] if self.scale != FP32 else []
        words += [f"tensor scale ({self.tensor.order})"] if self.tensor else []
        words += [f"best of {', '.join(f'{c:g}' for c in self.candidates)} by {self.metric}"] * (
            len(self.candidates) > 1
        )
        words += [f"EDEN over {self.eden}"] if self.eden else []
        if self.history:
            words.append(
                "calibrated" if self.history.fixed else f"{self.history.algorithm} of {self.history.length} calls"
            )
        return ", ".join(words)


def _require(condition: bool, given: str, allowed: str) -> None:
    if not condition:
        raise FormatError(f"{given} is not allowed; choose {allowed}")


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    _require(value in allowed, f"{name}={value!r}", ", ".join(map(repr, allowed)))


def _positive(name: str, value: float | None) -> None:
    good = value is None or (isinstance(value, int | float) and math.isfinite(value) and value > 0)
    _require(good, f"{name}={value!r}", "a finite number above 0")
