"""How an optimizer keeps its numbers: the record of one state, and the scheme that names all of them."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from fmtsim.errors import ArgumentError
from fmtsim.formats.spec import CodebookFormat, ElementFormat
from fmtsim.rounding.modes import Rounding

ScaleRule = Literal["none", "amax", "inverse", "reciprocal", "power_of_two", "fixed"]
Nonfinite = Literal["propagate", "zero", "skip"]
SCALE_RULES: tuple[ScaleRule, ...] = get_args(ScaleRule)

GROUP_NUMBERS = 3
"""float32 numbers that an expanded group keeps: scale, power, centre."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFormat:
    """Describe how a tensor of float32 numbers is kept between steps, in row-major order, block by block.

    All arithmetic is float32, one IEEE operation at a time; ``top`` is the format's largest value, ``amax`` the largest
    magnitude of a block, raised to ``least``; q is a value of the format:

    ================  =============================  ==================  =========================
    scale rule        scale                          encoded             decoded
    ================  =============================  ==================  =========================
    ``none``          -                              ``x``               ``q``
    ``amax``          ``s = amax / top``             ``x / s``           ``q * s``
    ``inverse``       ``s = amax / top``             ``x * (1 / t)``,    ``q * s``
                                                     ``t = max(s,
                                                     1e-12)``
    ``reciprocal``    ``s = top / amax``             ``x * s``           ``q / s``
    ``power_of_two``  ``s``: the largest power of    ``x * s``           ``q * (1 / s)``, exact
                      two with ``s * amax <= top``
    ``fixed``         ``s = 3 rms / top`` of the     ``x / s``           ``q * s``
                      first numbers, never changed
    ================  =============================  ==================  =========================

    A block of zeros has s = 0 under ``amax`` (and is encoded as if it were 1) and ``inverse``, else s = 1; under
    ``power_of_two`` a block whose amax is zero or not finite keeps the scale it had.

    Args:
        format: The element format; None keeps float32.
        block: Numbers that share a scale; ``"row"`` is the last dimension, ``"tensor"`` all.
        scale: One of SCALE_RULES.
        least: What amax is raised to.
        ties: Where codebooks round what lies half-way: to the even code, or up.
        keep_sign: A negative number whose nearest value is zero takes the code below it.
        expand: Raise each block to a power first, so that it fills the format's range (COAT).
        rounding: To nearest even or stochastic; codebooks round to nearest.
    """

    format: ElementFormat | None = None
    block: int | Literal["tensor", "row"] = "tensor"
    scale: ScaleRule = "none"
    least: float = 0.0
    ties: Literal["even", "up"] = "even"
    keep_sign: bool = False
    expand: bool = False
    rounding: Rounding = field(default_factory=Rounding)

    def __post_init__(self) -> None:
        if self.block not in ("tensor", "row") and (not isinstance(self.block, int) or self.block < 2):
            raise ArgumentError(f"block={self.block!r} is not allowed; choose 2 or more, 'row' or 'tensor'")
        if self.scale not in SCALE_RULES:
            raise ArgumentError(f"scale={self.scale!r} is unknown; choose one of {', '.join(SCALE_RULES)}")
        if self.format is None and (self.scale != "none" or self.expand):
            raise ArgumentError(f"scale={self.scale!r}, expand={self.expand} need a format; float32 takes neither")
        if self.format is not None and self.format.bits > 16:
            raise ArgumentError(
                f"a state of {self.format.bits} bits is not packed; choose a format of 16 bits or fewer"
            )
        if isinstance(self.format, CodebookFormat) and list(self.format.values) != sorted(set(self.format.values)):
            raise ArgumentError(f"{self.format.name} is not in order; sort its values and leave out repeated ones")
        if isinstance(self.format, CodebookFormat) and self.rounding.mode != "nearest_even":
            raise ArgumentError(f"codebooks round to nearest, not {self.rounding.mode!r}; leave rounding out")
        if self.expand and self.scale != "amax":
            raise ArgumentError(f"expand=True with scale={self.scale!r} does not exist; choose scale='amax'")

    @property
    def bits(self) -> int:
        """Width of a number without its share of scales."""
        return 32 if self.format is None else self.format.bits

    @property
    def stochastic(self) -> bool:
        """Whether encoding draws random words."""
        return self.rounding.mode == "stochastic"

    def block_of(self, shape: tuple[int, ...]) -> int:
        """Return how many numbers of a tensor share a scale."""
        if isinstance(self.block, int):
            return self.block
        count = 1
        for extent in shape if self.block == "tensor" else shape[-1:]:
            count *= extent
        return max(count, 1)

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """Return the bytes that a tensor's state takes: the arithmetic that memory reports compare with."""
        count = 1
        for extent in shape:
            count *= extent
        numbers = 0 if self.scale == "none" else GROUP_NUMBERS if self.expand else 1
        return -(-count * self.bits // 8) + 4 * numbers * -(-count // self.block_of(shape))


FLOAT32 = StateFormat()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Name a way to keep everything that an optimizer remembers.

    Args:
        name: What ``state=`` takes.
        source: Where the scheme is from.
        first: The first moment, or momentum: numbers of both signs.
        second: The second moment: never negative.
        weights: How parameters themselves are kept; None leaves them in their own dtype, rounded to nearest.
        minimum: Tensors of fewer elements keep float32 moments.
        whole_blocks: Tensors that blocks do not divide keep float32 moments.
        matrices: Only tensors of two and more dimensions have their weights in ``weights``.
        decay: When decoupled weight decay multiplies a parameter: before the update or after it.
        folded: Bias corrections are part of the step's size and of eps instead of dividing the moments.
        nonfinite: What NaN and Inf in a gradient do. ``"propagate"``: what arithmetic makes of them; ``"zero"``: that
            element's moments become zero and its parameter stays; ``"skip"``: the whole tensor stays.
    """

    name: str
    source: str = ""
    first: StateFormat = FLOAT32
    second: StateFormat = FLOAT32
    weights: StateFormat | None = None
    minimum: int = 0
    whole_blocks: bool = False
    matrices: bool = False
    decay: Literal["before", "after"] = "before"
    folded: bool = False
    nonfinite: Nonfinite = "propagate"

    def __post_init__(self) -> None:
        if self.nonfinite not in get_args(Nonfinite):
            raise ArgumentError(
                f"nonfinite={self.nonfinite!r} is unknown; choose one of {', '.join(get_args(Nonfinite))}"
            )
        if self.decay not in ("before", "after"):
            raise ArgumentError(f"decay={self.decay!r} is unknown; choose 'before' or 'after'")

    def formats(self, shape: tuple[int, ...], slots: tuple[str, ...]) -> dict[str, StateFormat]:
        """Return how each state of a parameter of this shape is kept, by slot; ``"weights"`` only where there are any.

        Args:
            shape: Of the parameter.
            slots: The states that its update rule has, of ``"first"`` and ``"second"``.
        """
        count = 1
        for extent in shape:
            count *= extent
        chosen = {slot: getattr(self, slot) for slot in slots}
        for slot, fmt in chosen.items():
            broken = self.whole_blocks and count % fmt.block_of(shape) != 0
            if count < self.minimum or broken:
                chosen[slot] = FLOAT32
        if self.weights is not None and not (self.matrices and len(shape) < 2):
            chosen["weights"] = self.weights
        return chosen
