# SPDX-License-Identifier: Apache-2.0
"""The records of methods of post-training quantisation: how ranges, weights and roundings are chosen."""

from dataclasses import dataclass
from typing import Any, Literal

from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import check_types

RangeRule = Literal["absmax", "percentile", "mse"]
Groups = Literal["static", "dynamic", "lazy"]


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
class Awq:
    """Describe the search of AWQ (Lin et al., arXiv:2306.00978): inputs divided, columns of weights multiplied.

    Of the exponents r = 0, 1/steps, ... below 1, that with the least squared error of the layer's outputs counts, its
    weight rounded to nearest and its inputs in high precision. Channel j is scaled by
    ``mean|x_j|**r / (mean_i v_ij**(1 - r) + 1e-4)``, at least 1e-4, over the geometric mean of the largest and the
    smallest; v are magnitudes relative to the largest of their group. Columns of zeros, too.

    Args:
        steps: Exponents that are tried.
        duo: Let the weight count, too; otherwise the factor is ``mean|x_j|**r``.
        after: As in Smooth.
    """

    steps: int = 20
    duo: bool = True
    after: Literal["norm", "any"] = "any"

    def __post_init__(self) -> None:
        check_types(self)
        _whole("Awq", "steps", self.steps, 1)

    def __str__(self) -> str:
        return f"AWQ, {self.steps} exponents" + ("" if self.duo else " of inputs alone")


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
class Rotate:
    """Describe the rotations of QuaRot (Ashkboos et al., arXiv:2404.00456) and the fixed part of SpinQuant's.

    The residual stream is rotated by a Hadamard matrix with random signs, which the weights around it absorb, as they
    do the weights of RMS normalisation. The head gets a weight of its own.

    Args:
        seed: Of the signs.
        heads: Rotate the values of each head, too, absorbed by the layers around attention.
        online: Transform the input of ``down_proj`` at every call; its weight absorbs the inverse.
    """

    seed: int = 0
    heads: bool = True
    online: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        _whole("Rotate", "seed", self.seed, 0)

    def __str__(self) -> str:
        words = ["values"] * self.heads + ["down_proj online"] * self.online
        return f"rotated, seed {self.seed}" + "".join(f", {word}" for word in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Describe the clipping of AWQ (its authors' code): each group's largest magnitude is lowered where that helps.

    Of the shares 1, 1 - 1/steps, ... above 1/2 of a group's largest magnitude, the first with the least squared error
    of what the group adds to the outputs counts; the weight is then rounded to nearest.

    Args:
        steps: Parts of the largest magnitude.
        skip: Layers whose name has one of these in it are rounded to nearest alone: a product of queries and keys
            follows, for which the error of the outputs says little.
    """

    steps: int = 20
    skip: tuple[str, ...] = ("q_", "k_", "query", "key", "Wqkv")

    def __post_init__(self) -> None:
        check_types(self)
        _whole("Clip", "steps", self.steps, 2)

    def __str__(self) -> str:
        return f"clipped in steps of 1/{self.steps}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hqq:
    """Describe HQQ (Badri and Shaji, Half-Quadratic Quantization, 2023), which needs no data.

    A group's scale is its range over the number of steps of the grid; its zero point, a real number, is moved so that
    ``|w - w_q|**norm`` shrinks: the rounded weight and the error, shrunk by ``e - |e|**(norm - 1) / beta``, take turns.
    It ends after ``steps``, or where the mean error of the whole weight falls no more.

    Args:
        steps: At most.
        norm: The exponent p, above 0, at most 1.
        beta: Weight of the error; the package leaves it as it is, though its paper lets it grow by 1.01 a step.
    """

    steps: int = 20
    norm: float = 0.7
    beta: float = 10.0

    def __post_init__(self) -> None:
        check_types(self)
        _whole("Hqq", "steps", self.steps, 1)
        if not (0 < self.norm <= 1 and 0 < self.beta < float("inf")):
            raise ArgumentError(
                f"Hqq norm={self.norm!r}, beta={self.beta!r}; choose a norm above 0, at most 1, and a beta above 0"
            )

    def __str__(self) -> str:
        return f"HQQ, {self.steps} steps, norm {self.norm:g}"


def _whole(record: str, name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ArgumentError(f"{record} {name}={shown(value)} is not allowed; choose a whole number from {least}")
