# SPDX-License-Identifier: Apache-2.0
"""How much of a tensor a format lost: underflow, saturation, signal-to-noise ratio and where its exponents lie."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fmtsim.formats.block import Format
from fmtsim.gemm.layers.config import OPERANDS, PRODUCTS
from fmtsim.lab.analysis.measure import BINS, FIGURES, LOWEST_EXPONENT, magnitude_range, measure
from fmtsim.recipes.attention_config import BACKWARD
from fmtsim.support.plotting import BLUE, ORANGE, label_axes, new_panels, saved, set_title
from fmtsim.support.table import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIDES = [f"{product}.{side}" for product in BACKWARD for side in "ab"]
_NAMES: Final = (*OPERANDS, *"qkvp", *_SIDES, *PRODUCTS, "s", "o", *BACKWARD)
_PLACES: Final = {name: place for place, name in enumerate(_NAMES)}


@dataclass(slots=True, kw_only=True)
class Counts:
    """Count what happened to elements that were cast."""

    elements: int = 0  # elements seen
    nonzero: int = 0  # finite elements that were not zero
    underflowed: int = 0  # those that became zero
    # finite elements whose nearest value lies beyond the format's largest, under their block's scale
    saturated: int = 0
    nonfinite: int = 0  # NaN and infinite elements; they enter no other count
    amax: float = 0.0  # largest finite magnitude
    signal: float = 0.0  # sum of squares of the finite elements
    noise: float = 0.0  # sum of squares of their errors; infinite where a finite element became Inf or NaN

    @property
    def underflow_percent(self) -> float:
        """Share of the non-zero elements that became zero; NaN for a tensor of zeros, which has none to lose."""
        return 100.0 * self.underflowed / self.nonzero if self.nonzero else math.nan

    @property
    def saturation_percent(self) -> float:
        """Share of the finite elements that lie beyond the largest value."""
        finite = self.elements - self.nonfinite
        return 100.0 * self.saturated / finite if finite else 0.0

    @property
    def sqnr_db(self) -> float:
        """Signal to quantisation noise ratio in dB: inf where nothing was lost, NaN for a tensor of zeros."""
        if self.signal == 0.0:
            return math.nan
        if self.noise == 0.0:
            return math.inf
        return -math.inf if math.isinf(self.noise) else 10.0 * math.log10(self.signal / self.noise)

    @property
    def mse(self) -> float:
        """Mean squared error of the finite elements; NaN where there are none."""
        finite = self.elements - self.nonfinite
        return self.noise / finite if finite else math.nan

    def count(self, other: "Counts") -> None:
        """Add the counts of others."""
        for name in FIGURES:
            mine, its = getattr(self, name), getattr(other, name)
            setattr(self, name, max(mine, its) if name == "amax" else mine + its)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Say what a format lost of one operand in one step."""

    elements: int  # elements seen
    underflow_percent: float  # share of the non-zero elements that became zero; NaN for a tensor of zeros
    saturation_percent: float  # share of the finite elements that lie beyond the format's largest value
    sqnr_db: float  # signal to quantisation noise ratio in dB: inf where nothing was lost, NaN for a tensor of zeros
    amax: float  # largest finite magnitude
    nonfinite: int  # NaN and infinite elements

    @classmethod
    def of(cls, counts: Counts) -> "Sample":
        """Return the figures of counts."""
        return cls(**{field.name: getattr(counts, field.name) for field in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types; infinite and undefined ratios are None."""
        return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in asdict(self).items()}


@dataclass(slots=True, kw_only=True)
class OperandStats(Counts):
    """Count what happened to one operand, over all calls that were added.

    Args:
        elements, nonzero, underflowed, saturated, nonfinite, amax, signal, noise: As in ``Counts``.
        format: Name of the format, "high precision" for none; of several, one after the other.
        exponents: Elements by ``floor(log2|x|)``, from LOWEST_EXPONENT to HIGHEST_EXPONENT, int64.
        scaled_exponents: The same of x divided by its block's scale: what the element format sees.
        window: Smallest and largest magnitude of the element format, None where there is none.
        without: Of a product, ``noise`` where one loss of its Datapath is taken away, by that loss.
    """

    format: str = ""
    exponents: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64), repr=False)
    scaled_exponents: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64), repr=False)
    window: tuple[float, float] | None = None
    without: dict[str, float] = field(default_factory=dict)

    @property
    def bits_lost(self) -> dict[str, float]:
        """Bits by which a product is better where one loss alone is taken away; inf where nothing else is lost."""
        ratio = lambda noise: 1.0 if noise == self.noise else self.noise / noise if noise else math.inf  # noqa: E731
        return {loss: 0.5 * math.log2(ratio(n)) if ratio(n) > 0 else math.nan for loss, n in self.without.items()}

    def add(self, x: Tensor, q: Tensor, fmt: Format | None, dim: int = -1) -> "OperandStats":
        """Count a tensor, its quantised values and the format they are in (None for high precision); return self."""
        return self.read(measure(x, q, fmt, dim), fmt)

    def read(self, measured: Tensor, fmt: Format | None) -> "OperandStats":
        """Count what ``measure`` returned for a tensor in a format; return self."""
        numbers = measured.cpu()
        figures = dict(zip(FIGURES, numbers[: len(FIGURES)].tolist(), strict=True))
        floats = ("amax", "signal", "noise")
        whole: Any = {name: value if name in floats else int(value) for name, value in figures.items()}
        counts = numbers[len(FIGURES) :].long()
        return self.merge(
            OperandStats(
                **whole, format="high precision" if fmt is None else fmt.name, exponents=counts[:BINS],
                scaled_exponents=counts[BINS:], window=magnitude_range(fmt),
            )
        )  # fmt: skip

    def merge(self, other: "OperandStats") -> "OperandStats":
        """Add the counts of other statistics; return self."""
        self.format = ", ".join(dict.fromkeys(filter(None, (*self.format.split(", "), other.format))))
        self.count(other)
        self.exponents += other.exponents
        self.scaled_exponents += other.scaled_exponents
        self.window = other.window or self.window
        self.without = {loss: noise + self.without.get(loss, 0.0) for loss, noise in other.without.items()}
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types; infinite and undefined ratios are None."""
        return {
            "format": self.format, **Sample.of(self).to_dict(), "exponents": _by_exponent(self.exponents),
            "scaled_exponents": _by_exponent(self.scaled_exponents),
            "window": None if self.window is None else list(self.window),
            **({"bits_lost": {k: x if math.isfinite(x) else None for k, x in self.bits_lost.items()}} if self.without
               else {}),
        }  # fmt: skip


@dataclass(slots=True, kw_only=True)
class TensorStats(OperandStats):
    """Say what a format does to one tensor; ``fmtsim.observe(x, format)`` makes it.

    Args:
        cosine: Of the angle between the tensor and its values in the format, both without elements that are NaN or
            infinite in either, in float64; NaN where one of them has only zeros.
    """

    cosine: float = math.nan

    def __str__(self) -> str:
        percent, shares = (self.underflow_percent, self.saturation_percent), ("became zero", "beyond the largest value")
        pairs = [("format", self.format), ("elements", f"{self.elements:,}")]
        pairs += [(name, f"{share:.4g} %") for name, share in zip(shares, percent, strict=True)]
        pairs += [("SQNR", f"{self.sqnr_db:.4g} dB"), ("MSE", f"{self.mse:.4g}"), ("cosine", f"{self.cosine:.8g}")]
        return "\n".join(aligned([*pairs, ("largest", f"{self.amax:.6g}"), ("NaN or infinite", f"{self.nonfinite:,}")]))

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types; infinite and undefined ratios are None."""
        more = {"mse": self.mse, "cosine": self.cosine}
        return OperandStats.to_dict(self) | {name: x if math.isfinite(x) else None for name, x in more.items()}

    def plot(self, path: str | Path | None = None, *, ax: Any = None) -> "Figure":
        """Draw elements by exponent, divided by their block's scale, and where the format's elements end.

        Args:
            path: Where to save a PNG.
            ax: Axes to draw into.

        Raises:
            FmtsimError: matplotlib is missing, or the file cannot be written.
        """
        (figure, (panel,)), counts = new_panels(6.4, 3.2, ax), _by_exponent(self.scaled_exponents)
        panel.bar(list(counts), list(counts.values()), width=0.9, color=BLUE)
        for end in self.window or ():
            panel.axvline(math.log2(end), color=ORANGE, linestyle="--")
        label_axes(panel, "exponent, floor(log2|x / scale|)", "elements")
        set_title(panel, f"{self.format}: SQNR {self.sqnr_db:.4g} dB, {self.underflow_percent:.3g} % became zero")
        return saved(figure, path)


def _by_exponent(counts: Tensor) -> dict[int, int]:
    return {i + LOWEST_EXPONENT: int(counts[i]) for i in counts.nonzero().flatten().tolist()}


def in_order(operands: Iterable[str]) -> list[str]:
    """Return names of operands, each once, in the order that all tables have: those of layers, of attention, others.

    >>> in_order(["dv.b", "p", "g_d", "g_w", "w_d", "q", "g_w"])
    ['g_d', 'w_d', 'g_w', 'q', 'p', 'dv.b']
    """
    return sorted(set(operands), key=lambda name: (_PLACES.get(name, len(_PLACES)), name))


def operand_in_words(operand: str) -> str:
    """Return an operand's tensor and product in words; any other name is returned unchanged.

    >>> operand_in_words("g_w"), operand_in_words("q"), operand_in_words("dv.a"), operand_in_words("dgrad")
    ('gradients, weight gradient', 'queries, attention', "attention's dv", 'product, input gradient')
    """
    tensors = {"x": "activations", "w": "weights", "g": "gradients"}
    products = {"f": "forward", "d": "input gradient", "w": "weight gradient"}
    attention = {"q": "queries", "k": "keys", "v": "values", "p": "softmax weights", "s": "scores", "o": "output"}
    tensor, _, product = operand.partition("_")
    if tensor in tensors and product in products:
        return f"{tensors[tensor]}, {products[product]}"
    if operand in PRODUCTS:
        return f"product, {products[operand[0]]}"
    if operand in ("s", "o", *BACKWARD):
        return f"product, attention's {attention.get(operand, operand)}"
    if operand[:2] in BACKWARD:
        return f"attention's {operand[:2]}"
    return f"{attention[operand]}, attention" if operand in attention else operand
