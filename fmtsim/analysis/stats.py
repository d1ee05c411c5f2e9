"""How much of a tensor a format lost: underflow, saturation, signal-to-noise ratio and where its exponents lie."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fmtsim.formats.block import BlockFormat, Format, LogTileFormat
from fmtsim.formats.spec import ElementFormat, FloatFormat, IntFormat
from fmtsim.quantize import encode

LOWEST_EXPONENT, HIGHEST_EXPONENT = -160, 160  # of the histogram; what lies beyond is counted at its ends
_BINS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1


@dataclass(slots=True, kw_only=True)
class OperandStats:
    """Count what happened to one operand, over all calls that were added.

    Args:
        format: Name of the format, "high precision" for none.
        elements: Elements seen.
        nonzero: Finite elements that were not zero.
        underflowed: Those that became zero.
        saturated: Finite elements whose nearest value lies beyond the format's largest, under their block's scale.
        nonfinite: NaN and infinite elements; they enter no other count.
        amax: Largest finite magnitude.
        signal: Sum of squares of the finite elements.
        noise: Sum of squares of their errors; infinite where a finite element became Inf or NaN.
        exponents: Elements by ``floor(log2|x|)``, from LOWEST_EXPONENT to HIGHEST_EXPONENT, int64.
        scaled_exponents: The same of x divided by its block's scale: what the element format sees.
        window: Smallest and largest magnitude of the element format, None where there is none.
    """

    format: str = ""
    elements: int = 0
    nonzero: int = 0
    underflowed: int = 0
    saturated: int = 0
    nonfinite: int = 0
    amax: float = 0.0
    signal: float = 0.0
    noise: float = 0.0
    exponents: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))
    scaled_exponents: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))
    window: tuple[float, float] | None = None

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

    def add(self, x: Tensor, q: Tensor, fmt: Format | None, dim: int = -1) -> "OperandStats":
        """Count a tensor, its quantised values and the format they are in; return self."""
        x, q = x.detach().double(), q.detach().double()
        finite = x.isfinite()
        kept = x[finite]
        errors = kept - q[finite]
        self.format = "high precision" if fmt is None else fmt.name
        self.elements += x.numel()
        self.nonfinite += x.numel() - kept.numel()
        self.nonzero += int((kept != 0).sum())
        self.underflowed += int(((kept != 0) & (q[finite] == 0)).sum())
        self.amax = max(self.amax, float(kept.abs().max()) if kept.numel() else 0.0)
        self.signal += float(kept.square().sum())
        self.noise += float(errors.square().sum()) if bool(errors.isfinite().all()) else math.inf
        self.exponents += _exponents(kept)
        if fmt is None or isinstance(fmt, LogTileFormat) or (isinstance(fmt, BlockFormat) and fmt.zero_point):
            self.scaled_exponents += _exponents(kept)  # such a grid is laid over its block's range: nothing lies beyond
            return self
        element = fmt.element if isinstance(fmt, BlockFormat) else fmt
        scaled = kept / element_scales(x, fmt, dim)[finite] if isinstance(fmt, BlockFormat) else kept
        low, high = _limits(element)
        self.saturated += int(((scaled > high) | (scaled < low)).sum())
        self.scaled_exponents += _exponents(scaled)
        self.window = (_smallest(element), element.max)
        return self

    def merge(self, other: "OperandStats") -> "OperandStats":
        """Add the counts of other statistics; return self."""
        self.format = self.format or other.format
        for name in ("elements", "nonzero", "underflowed", "saturated", "nonfinite", "signal", "noise"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.amax = max(self.amax, other.amax)
        self.exponents += other.exponents
        self.scaled_exponents += other.scaled_exponents
        self.window = other.window
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types; infinite and undefined ratios are None."""
        used = self.exponents.nonzero().flatten().tolist()
        return {
            "format": self.format,
            "elements": self.elements,
            "underflow_percent": self.underflow_percent,
            "saturation_percent": self.saturation_percent,
            "sqnr_db": self.sqnr_db if math.isfinite(self.sqnr_db) else None,
            "amax": self.amax,
            "nonfinite": self.nonfinite,
            "exponents": {i + LOWEST_EXPONENT: int(self.exponents[i]) for i in used},
        }


def element_scales(x: Tensor, fmt: BlockFormat, dim: int = -1) -> Tensor:
    """Return the scale that each element of x gets under a block format, float64, in x's shape."""
    parts = encode(x, fmt, dim=dim, pad=True).parts()
    if parts.scales is None or x.numel() == 0:
        return torch.ones(x.shape, dtype=torch.float64, device=x.device)
    moved = x.movedim(dim, -1) if x.dim() else x.reshape(1)
    inner = moved.shape[-1]
    outer = x.numel() // inner
    scales = parts.scales.double()
    if parts.tensor_scale is not None:
        scales = scales * parts.tensor_scale.double()
    for axis, (size, extent) in enumerate(zip(fmt.block, (outer, inner), strict=True)):
        scales = scales.repeat_interleave(extent if size is None else size, dim=axis).narrow(axis, 0, extent)
    return scales.reshape(moved.shape).movedim(-1, dim) if x.dim() else scales.reshape(())


def _limits(element: ElementFormat) -> tuple[float, float]:
    """Return the magnitudes beyond which rounding to nearest leaves the format's range."""
    if isinstance(element, FloatFormat):
        margin = math.ldexp(0.5, element.max_exponent - element.mantissa_bits)
        return (-element.max - margin if element.signed else element.min - _smallest(element) / 2, element.max + margin)
    if isinstance(element, IntFormat):
        return element.min - element.eps / 2, element.max + element.eps / 2
    margin = element.max * 2.0**-20  # of a table nothing lies halfway to the next value; leave room for the scale's rounding
    return element.min - margin, max(getattr(element, "values", (element.max,))) + margin


def _smallest(element: ElementFormat) -> float:
    if isinstance(element, FloatFormat):
        return element.min_subnormal
    if isinstance(element, IntFormat):
        return element.eps / 2 if element.half_offset else element.eps
    values = getattr(element, "values", None) or element.magnitudes  # type: ignore[union-attr]
    return min(abs(v) for v in values if v)


def _exponents(x: Tensor) -> Tensor:
    powers = torch.frexp(x[(x != 0) & x.isfinite()]).exponent.long() - 1  # a scale of 0 or NaN leaves no exponent
    bins = powers.clamp(LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT
    return torch.bincount(bins, minlength=_BINS).cpu()
