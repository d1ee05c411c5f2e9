"""How much of a tensor a format lost: underflow, saturation, signal-to-noise ratio and where its exponents lie."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtsim.float64 import capable
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat, with_block
from fmtsim.formats.spec import ElementFormat, FloatFormat, IntFormat
from fmtsim.quantize import encode

LOWEST_EXPONENT, HIGHEST_EXPONENT = -160, 160  # of the histogram; what lies beyond is counted at its ends
_BINS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1


@dataclass(slots=True, kw_only=True)
class Counts:
    """Count what happened to elements that were cast.

    Args:
        elements: Elements seen.
        nonzero: Finite elements that were not zero.
        underflowed: Those that became zero.
        saturated: Finite elements whose nearest value lies beyond the format's largest, under their block's scale.
        nonfinite: NaN and infinite elements; they enter no other count.
        amax: Largest finite magnitude.
        signal: Sum of squares of the finite elements.
        noise: Sum of squares of their errors; infinite where a finite element became Inf or NaN.
    """

    elements: int = 0
    nonzero: int = 0
    underflowed: int = 0
    saturated: int = 0
    nonfinite: int = 0
    amax: float = 0.0
    signal: float = 0.0
    noise: float = 0.0

    @property
    def underflow_percent(self) -> float:
        """Share of the non-zero elements that became zero."""
        return 100.0 * self.underflowed / self.nonzero if self.nonzero else 0.0

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

    def count(self, other: "Counts") -> None:
        """Add the counts of others."""
        for name in ("elements", "nonzero", "underflowed", "saturated", "nonfinite", "signal", "noise"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.amax = max(self.amax, other.amax)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Say what a format lost of one operand in one step.

    Args:
        elements: Elements seen.
        underflow_percent: Share of the non-zero elements that became zero.
        saturation_percent: Share of the finite elements that lie beyond the format's largest value.
        sqnr_db: Signal to quantisation noise ratio in dB: inf where nothing was lost, NaN for a tensor of zeros.
        amax: Largest finite magnitude.
        nonfinite: NaN and infinite elements.
    """

    elements: int
    underflow_percent: float
    saturation_percent: float
    sqnr_db: float
    amax: float
    nonfinite: int

    @classmethod
    def of(cls, counts: Counts) -> "Sample":
        """Return the figures of counts."""
        return cls(**{field.name: getattr(counts, field.name) for field in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types; infinite and undefined ratios are None."""
        return asdict(self) | {"sqnr_db": self.sqnr_db if math.isfinite(self.sqnr_db) else None}


@dataclass(slots=True, kw_only=True)
class OperandStats(Counts):
    """Count what happened to one operand, over all calls that were added.

    Args:
        elements, nonzero, underflowed, saturated, nonfinite, amax, signal, noise: As in ``Counts``.
        format: Name of the format, "high precision" for none; of several, one after the other.
        exponents: Elements by ``floor(log2|x|)``, from LOWEST_EXPONENT to HIGHEST_EXPONENT, int64.
        scaled_exponents: The same of x divided by its block's scale: what the element format sees.
        window: Smallest and largest magnitude of the element format, None where there is none.
    """

    format: str = ""
    exponents: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64), repr=False)
    scaled_exponents: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64), repr=False)
    window: tuple[float, float] | None = None

    def add(self, x: Tensor, q: Tensor, fmt: Format | None, dim: int = -1) -> "OperandStats":
        """Count a tensor, its quantised values and the format they are in (None for high precision); return self."""
        x, q = _plain(x), _plain(q)
        self.format = "high precision" if fmt is None else fmt.name
        self.elements += x.numel()
        if x.numel() == 0:
            return self
        x, q, strange = _finite(x, q)
        nonzero = int(torch.count_nonzero(x))
        self.nonfinite += strange
        self.nonzero += nonzero
        # Zero stays zero wherever a format has one, and where it has none no result is zero.
        self.underflowed += max(0, nonzero - int(torch.count_nonzero(q)))
        self.amax = max(self.amax, float(x.abs().amax()))
        self.signal += _squares(x)
        noise = _squares(x - q)
        self.noise += noise if math.isfinite(noise) else math.inf
        counts = _exponents(x)
        self.exponents += counts
        if fmt is None or isinstance(fmt, LogTileFormat) or (isinstance(fmt, BlockFormat) and fmt.zero_point):
            self.scaled_exponents += counts  # such a grid is laid over its block's range: nothing lies beyond
            return self
        element = fmt.element if isinstance(fmt, BlockFormat) else fmt
        scaled = x
        if isinstance(fmt, BlockFormat):
            scaled = _blocks(x, fmt, dim) / block_scales(x, fmt, dim).to(x.dtype)[:, None, :, None]
        low, high = _limits(element)
        self.saturated += int(torch.count_nonzero(scaled > high)) + int(torch.count_nonzero(scaled < low))
        self.scaled_exponents += counts if scaled is x else _exponents(scaled)
        self.window = (_smallest(element), element.max)
        return self

    def merge(self, other: "OperandStats") -> "OperandStats":
        """Add the counts of other statistics; return self."""
        self.format = ", ".join(dict.fromkeys(filter(None, (*self.format.split(", "), other.format))))
        self.count(other)
        self.exponents += other.exponents
        self.scaled_exponents += other.scaled_exponents
        self.window = other.window or self.window
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types; infinite and undefined ratios are None."""
        return {
            "format": self.format,
            **Sample.of(self).to_dict(),
            "exponents": _by_exponent(self.exponents),
            "scaled_exponents": _by_exponent(self.scaled_exponents),
            "window": None if self.window is None else list(self.window),
        }


def _by_exponent(counts: Tensor) -> dict[int, int]:
    return {i + LOWEST_EXPONENT: int(counts[i]) for i in counts.nonzero().flatten().tolist()}


def operand_in_words(operand: str) -> str:
    """Return an operand's tensor and product in words; a name that is none of an operand as it is.

    >>> operand_in_words("g_w"), operand_in_words("q"), operand_in_words("dv.a")
    ('gradients, weight gradient', 'queries, attention', "attention's dv")
    """
    tensors = {"x": "activations", "w": "weights", "g": "gradients"}
    products = {"f": "forward", "d": "input gradient", "w": "weight gradient"}
    attention = {"q": "queries", "k": "keys", "v": "values", "p": "softmax weights"}
    tensor, _, product = operand.partition("_")
    if tensor in tensors and product in products:
        return f"{tensors[tensor]}, {products[product]}"
    if operand[:2] in ("dq", "dk", "dv", "dp"):
        return f"attention's {operand[:2]}"
    return f"{attention[operand]}, attention" if operand in attention else operand


def block_scales(x: Tensor, fmt: BlockFormat, dim: int) -> Tensor:
    """Return the scale of each block of x, float64 ``[outer_blocks, inner_blocks]``, zero points left aside.

    Scales follow from the largest magnitudes alone, so those are encoded in the place of whole blocks.
    """
    largest = _blocks(x.abs(), fmt, dim).amax((1, 3))
    parts = encode(largest, with_block(fmt, (1, 1)), dim=-1).parts()
    scales = torch.ones_like(largest) if parts.scales is None else parts.scales
    scales = scales.double()
    return scales if parts.tensor_scale is None else scales * parts.tensor_scale.double()


def _blocks(x: Tensor, fmt: BlockFormat, dim: int) -> Tensor:
    """Return the operand matrix (docs/semantics.md, section 4), padded with zeros: [blocks, rows, blocks, columns]."""
    moved = x.movedim(dim, -1) if x.dim() else x.reshape(1)
    matrix = moved.reshape(-1, moved.shape[-1])
    rows, columns = (size or extent for size, extent in zip(fmt.block, matrix.shape, strict=True))
    matrix = F.pad(matrix, (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows))
    return matrix.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _plain(x: Tensor) -> Tensor:
    return x.detach() if x.dtype == torch.float64 else capable(x.detach().float())


def _finite(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return both tensors with zeros where x is not finite, and the number of those places."""
    if bool(x.abs().amax().isfinite()):
        return x, q.to(x.dtype), 0
    kept = x.isfinite()
    zero = x.new_zeros(())
    return torch.where(kept, x, zero), torch.where(kept, q.to(x.dtype), zero), int((~kept).sum())


def _squares(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _limits(element: ElementFormat) -> tuple[float, float]:
    """Return the magnitudes beyond which rounding to nearest leaves the format's range."""
    if isinstance(element, FloatFormat):
        margin = math.ldexp(0.5, element.max_exponent - element.mantissa_bits)
        return (-element.max - margin if element.signed else element.min - _smallest(element) / 2, element.max + margin)
    if isinstance(element, IntFormat):
        return element.min - element.eps / 2, element.max + element.eps / 2
    margin = (
        element.max * 2.0**-20
    )  # of a table nothing lies halfway to the next value; leave room for the scale's rounding
    return element.min - margin, max(getattr(element, "values", (element.max,))) + margin


def _smallest(element: ElementFormat) -> float:
    if isinstance(element, FloatFormat):
        return element.min_subnormal
    if isinstance(element, IntFormat):
        return element.eps / 2 if element.half_offset else element.eps
    values = getattr(element, "values", None) or element.magnitudes  # type: ignore[union-attr]
    return min(abs(v) for v in values if v)


def _exponents(x: Tensor) -> Tensor:
    """Count the exponents of a float32 or float64 tensor without NaN; zeros and infinities have none."""
    counts = torch.zeros(_BINS, dtype=torch.int64)
    if x.dtype == torch.float32:
        # bits: s eeeeeeee mmm...; field e stands for exponent e - 127, field 0 for zero and subnormals.
        fields = torch.bincount((x.contiguous().view(torch.int32).flatten() >> 23) & 0xFF, minlength=256).cpu()
        first = -126 - LOWEST_EXPONENT
        counts[first : first + 254] += fields[1:255]
        if int(fields[0]) == x.numel() - int(torch.count_nonzero(x)):
            return counts
        x = x[x.abs() < torch.finfo(torch.float32).smallest_normal]
    powers = torch.frexp(x[(x != 0) & x.isfinite()].double()).exponent.long() - 1
    bins = powers.clamp(LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT
    return counts + torch.bincount(bins, minlength=_BINS).cpu()
