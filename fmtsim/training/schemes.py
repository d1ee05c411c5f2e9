"""From the options of ``fmtsim train`` to quantisers: a format, a way of scaling it, and rounding."""

import dataclasses
from dataclasses import dataclass

from fmtsim.errors import ArgumentError, FormatError
from fmtsim.formats.block import Block, BlockFormat, Format, LogTileFormat, scaled
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import ScaleRule
from fmtsim.gemm.config import LinearConfig, linear_config

# Scaling by name: block (outer, inner along the contraction axis) of x and g, block of w, scale rule.
SCALINGS: dict[str, tuple[Block, Block, ScaleRule] | None] = {
    "none": None,
    "tensor": ((None, None), (None, None), "amax"),
    "channel": ((1, None), (1, None), "amax"),
    "block32": ((1, 32), (1, 32), "amax"),
    "tile128": ((1, 128), (128, 128), "amax"),
    "mx": ((1, 32), (1, 32), "floor"),
}
HIGH_PRECISION = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Name a way of training: formats, scaling and rounding as on the command line.

    Args:
        format: Format of activations and weights; ``"fp32"`` converts nothing.
        grad_format: Format of gradients; None means e5m2 for element formats of 8 bits and fewer, else ``format``.
        scaling: One of SCALINGS; None means the format's own blocks, ``"tensor"`` for element formats of 8 bits and
            fewer, ``"none"`` for wider ones.
        rounding: Rounding of activations and weights.
        grad_rounding: Rounding of gradients.
    """

    format: str
    grad_format: str | None = None
    scaling: str | None = None
    rounding: str = "nearest_even"
    grad_rounding: str = "nearest_even"

    @property
    def simulated(self) -> bool:
        """Whether anything is quantised."""
        return get_format(self.format).name != HIGH_PRECISION

    @property
    def gradient(self) -> str:
        """The format of gradients in force."""
        return self.grad_format or ("e5m2" if _default_scaling(get_format(self.format)) == "tensor" else self.format)

    @property
    def label(self) -> str:
        """A short description for legends and tables."""
        if not self.simulated:
            return HIGH_PRECISION
        formats = self.format if self.gradient == self.format else f"{self.format}/{self.gradient}"
        scaling = self.scaling or _default_scaling(get_format(self.format))
        names = {"nearest_even": "", "stochastic": "SR"}
        forward, backward = (names.get(mode, mode) for mode in (self.rounding, self.grad_rounding))
        parts = [formats, "unscaled" if scaling == "none" else scaling and f"scaled by {scaling}"]
        if forward == backward:
            parts.append(forward)
        else:
            parts += [f"{tensors} {mode}" for tensors, mode in (("x w", forward), ("g", backward)) if mode]
        return ", ".join(filter(None, parts))

    def linear_config(self) -> LinearConfig:
        """Return the quantisers; raise FormatError or ArgumentError where the options do not fit together."""
        x, w = (_scale(self.format, self.scaling, weight) for weight in (False, True))
        g = _scale(self.gradient, self.scaling, False)
        return linear_config(x=x, w=w, g=g, rounding=self.rounding, grad_rounding=self.grad_rounding)


def _default_scaling(fmt: Format) -> str:
    if isinstance(fmt, BlockFormat | LogTileFormat):
        return ""
    return "tensor" if fmt.bits <= 8 else "none"


def _scale(name: str, scaling: str | None, weight: bool) -> Format:
    fmt = get_format(name)
    if scaling is not None and scaling not in SCALINGS:
        raise ArgumentError(f"--scaling {scaling} is unknown; choose one of {', '.join(SCALINGS)}")
    if isinstance(fmt, BlockFormat | LogTileFormat):
        if scaling is not None:
            raise FormatError(
                f"--scaling {scaling} does not go with {fmt.name}, which has blocks of its own; "
                "leave it out, or name an element format"
            )
        return fmt
    scaling = scaling or _default_scaling(fmt)
    blocks = SCALINGS[scaling]
    if blocks is None:
        return fmt
    wrapped = scaled(fmt, blocks[1] if weight else blocks[0], blocks[2])
    return dataclasses.replace(wrapped, name=f"{fmt.name}_{scaling}")
