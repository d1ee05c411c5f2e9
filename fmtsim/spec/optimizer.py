# SPDX-License-Identifier: Apache-2.0
"""What a step of an optimizer is: how each number is kept, the scheme that names all, and one parameter's step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.formats.element import CodebookFormat, ElementFormat
from fmtsim.formats.scaling import Block, History, Scaling
from fmtsim.rounding.codebooks import BUCKETS, KEY_SHIFT, LOWEST_KEY, NO_THRESHOLD, table_of
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import check_types

Counter = Callable[[torch.device], Tensor]
"""Gives the tensor of a device, int64, 0-d, that counts elements of gradients that are not finite."""

KINDS = ("first", "second", "weights")
PARAMETER_BITS, KIND_BITS = 20, 2
Nonfinite = Literal["propagate", "zero", "skip"]

GROUP_NUMBERS = 3
"""float32 numbers that an expanded group keeps: scale, power, centre."""
RMS_FACTOR = 3.0
"""Root mean squares of the first weights that a scale which is fixed at first reaches to."""
LEAST_INVERTED = 1e-12
"""The least scale that ``inverse`` inverts."""

STATE_RULES: dict[str, Scaling] = {
    "amax": Scaling(arithmetic="divide", empty="zero"),
    "inverse": Scaling(arithmetic="reciprocal", eps=LEAST_INVERTED, eps_rule="inverse", empty="zero"),
    "reciprocal": Scaling(arithmetic="decode_divides"),
    "power_of_two": Scaling(arithmetic="decode_divides", power_of_two="ceil", empty="previous"),
    "fixed": Scaling(statistic="rms", multiplier=RMS_FACTOR, arithmetic="divide", history=History(fixed=True)),
}
"""The scale rules that states may have, by the names that kernels have for them, for any block and least statistic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFormat:
    """Describe how a tensor of float32 numbers is kept between steps: codes of a format, and scales of a Scaling.

    A state is read in row-major order. Blocks ``(1, n)`` follow each other past the ends of rows, the last one may be
    short; ``(1, None)`` is a row of the last dimension, ``(None, None)`` the state. All arithmetic is float32, one IEEE
    operation at a time; ``top`` is the format's largest value, ``amax`` the largest magnitude of a block, raised to the
    Scaling's ``eps``; q is a value of the format. The rules of ``STATE_RULES``:

    ================  =============================  ==================  =========================
    rule              scale                          encoded             decoded
    ================  =============================  ==================  =========================
    (no Scaling)      -                              ``x``               ``q``
    ``amax``          ``s = amax / top``             ``x / s``           ``q * s``
    ``inverse``       ``s = amax / top``             ``x * (1 / t)``,    ``q * s``
                                                     ``t = max(s,
                                                     1e-12)``
    ``reciprocal``    ``s = top / amax``             ``x * s``           ``q / s``
    ``power_of_two``  ``s``: the largest power of    ``x * s``           ``q / s``, exact
                      two with ``s * amax <= top``
    ``fixed``         ``s = 3 rms / top`` of the     ``x / s``           ``q * s``
                      first numbers, never changed
    ================  =============================  ==================  =========================

    A block of zeros has s = 0 under ``amax`` (and is encoded as if it were 1) and ``inverse``, else s = 1; under
    ``power_of_two`` a block whose amax is zero or not finite keeps the scale it had. Unlike scales of operands, those
    of states may be subnormal, and NaN or Inf in a block is its amax.

    Args:
        format: The element format; None keeps float32.
        scaling: A rule of ``STATE_RULES`` with a block of its own, and an ``eps`` under ``eps_rule="statistic"``; None
            keeps no scale.
        ties: Where codebooks round what lies half-way: to the even code, or up.
        keep_sign: A negative number whose nearest value is zero takes the code below it.
        expand: Raise each block to a power first, so that it fills the format's range (COAT).
        least_of: The least magnitude that ``expand`` takes: ``"numbers"`` of those that are not zero; ``"lanes"`` what
            COAT's kernel finds in a block of 128, where a lane whose number is zero drops those it is compared with.
        rounding: To nearest even or stochastic; codebooks round to nearest.
    """

    format: ElementFormat | None = None
    scaling: Scaling | None = None
    ties: Literal["even", "up"] = "even"
    keep_sign: bool = False
    expand: bool = False
    least_of: Literal["numbers", "lanes"] = "numbers"
    rounding: Rounding = field(default_factory=Rounding)

    def __post_init__(self) -> None:
        check_types(self)
        outer, inner = self.block
        if outer not in (None, 1) or inner == 1 or (outer is None and inner is not None):
            raise ArgumentError(
                f"block={self.block} is not one of a state; choose (1, 2) or longer, (1, None) or (None, None)"
            )
        if self.scaling is not None and self.rule is None:
            raise ArgumentError(
                f"scaling={self.scaling!r} is not a rule of states; choose one of STATE_RULES of fmtsim.spec.optimizer "
                f"({', '.join(STATE_RULES)}), with a block of its own"
            )
        if self.format is None and (self.scaling is not None or self.expand):
            raise ArgumentError(f"scaling=[{self.scaling}], expand={self.expand} need a format; float32 takes neither")
        if self.format is not None and self.format.bits > 16:
            raise ArgumentError(
                f"a state of {self.format.bits} bits is not packed; choose a format of 16 bits or fewer"
            )
        if isinstance(self.format, CodebookFormat) and list(self.format.values) != sorted(set(self.format.values)):
            raise ArgumentError(f"{self.format.name} is not in order; sort its values and leave out repeated ones")
        if isinstance(self.format, CodebookFormat) and self.rounding.mode != "nearest_even":
            raise ArgumentError(f"codebooks round to nearest, not {shown(self.rounding.mode)}; leave rounding out")
        if self.expand and self.rule != "amax":
            raise ArgumentError(f"expand=True with scaling=[{self.scaling}] does not exist; choose STATE_RULES['amax']")
        if self.least_of == "lanes" and not (self.expand and self.block == (1, 128)):
            raise ArgumentError(
                f"least_of='lanes' with expand={self.expand}, block={self.block} does not exist; it is of expanded "
                "blocks (1, 128)"
            )

    @property
    def bits(self) -> int:
        """Width of a number without its share of scales."""
        return 32 if self.format is None else self.format.bits

    @property
    def stochastic(self) -> bool:
        """Whether encoding draws random words."""
        return self.rounding.mode == "stochastic"

    @property
    def block(self) -> Block:
        """Numbers that share a scale, ``(outer, inner)``."""
        return (None, None) if self.scaling is None else self.scaling.block

    @property
    def least(self) -> float:
        """What the largest magnitude of a block is raised to."""
        return self.scaling.eps if self.scaling is not None and self.scaling.eps_rule == "statistic" else 0.0

    @property
    def rule(self) -> str | None:
        """The name in ``STATE_RULES`` of the rule of its scales, None without scales."""
        return None if self.scaling is None else _rule_of(self.scaling)

    def block_of(self, shape: tuple[int, ...]) -> int:
        """Return how many numbers of a tensor share a scale."""
        outer, inner = self.block
        return inner or max(math.prod(shape if outer is None else shape[-1:]), 1)

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """Return the bytes that a tensor's state takes: the arithmetic that memory reports compare with."""
        count = math.prod(shape)
        numbers = 0 if self.scaling is None else GROUP_NUMBERS if self.expand else 1
        return -(-count * self.bits // 8) + 4 * numbers * -(-count // self.block_of(shape))


@lru_cache(maxsize=256)
def _rule_of(scaling: Scaling) -> str | None:
    eps = 0.0 if scaling.eps_rule == "statistic" else scaling.eps
    plain = replace(scaling, block=(None, None), eps=eps)
    return next((name for name, rule in STATE_RULES.items() if rule == plain), None)


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
        check_types(self)

    def formats(self, shape: tuple[int, ...], slots: tuple[str, ...]) -> dict[str, StateFormat]:
        """Return how each state of a parameter of this shape is kept, by slot; ``"weights"`` only where there are any.

        Args:
            shape: Of the parameter.
            slots: The states that its update rule has, of ``"first"`` and ``"second"``.
        """
        count = math.prod(shape)
        chosen = {slot: getattr(self, slot) for slot in slots}
        for slot, fmt in chosen.items():
            broken = self.whole_blocks and count % fmt.block_of(shape) != 0
            if count < self.minimum or broken:
                chosen[slot] = FLOAT32
        if self.weights is not None and not (self.matrices and len(shape) < 2):
            chosen["weights"] = self.weights
        return chosen


class Numbers(NamedTuple):
    """The scalars of one step of a parameter, float32 values as Python floats.

    decay_before, decay_after: what multiplies the parameter. penalty: weight decay that is part of the gradient.
    beta1, rest1, beta2, rest2: of the moments. correction: what divides sqrt(v). eps: added after it. size: what the
    direction is multiplied with before it is subtracted. bound: the largest direction.
    """

    decay_before: float = 1.0
    decay_after: float = 1.0
    penalty: float = 0.0
    beta1: float = 0.0
    rest1: float = 1.0
    beta2: float = 0.0
    rest2: float = 1.0
    correction: float = 1.0
    eps: float = 0.0
    size: float = 0.0
    bound: float = math.inf


class Hyperparameters(NamedTuple):
    """What the scalars of a step are worked out from on a device that counts steps itself.

    lr: The learning rate, float32 or float64 with one element where it is a tensor, read when the step is done. beta1,
    beta2: of the moments. eps, decay, bound: as of the optimizers.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    decay: float
    bound: float


@dataclass(frozen=True, slots=True)
class ParameterStep:
    """Say what one step of one parameter needs.

    Args:
        parameter: The parameter.
        gradient: Its gradient, dense, of its shape.
        state: What is remembered of it; ``done`` counts the step when all of it is written.
        step: The step's number, from 1.
        formats: How each state is kept.
        numbers: The scalars of the step.
        seed: Of stochastic rounding.
        index: The parameter's place among all of them.
        live: Where the device counts the step: what its scalars are worked out from there. The host knows neither the
            step nor the numbers then.
    """

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Any]
    step: int
    formats: Mapping[str, StateFormat]
    numbers: Numbers
    seed: int
    index: int
    live: Hyperparameters | None = None

    def key(self, kind: str) -> RandomKey:
        """Return the key of the random words of a state in this step: no generator, so no order of calls."""
        return key_of(self.seed, self.step, self.index, kind)

    def done(self) -> None:
        """Count the step."""
        if isinstance(self.state.get("step"), Tensor):
            self.state["step"].fill_(self.step)
        else:
            self.state["step"] = self.step


def key_of(seed: int, step: int, index: int, kind: str) -> RandomKey:
    """Return the Philox key of a state: the seed, and an offset of step, parameter and kind of state."""
    place = (step << PARAMETER_BITS | index) << KIND_BITS | KINDS.index(kind)
    return RandomKey(seed, place & ((1 << 63) - 1))


def in_parameter(fmt: StateFormat, dtype: torch.dtype) -> bool:
    """Return True if a parameter's dtype holds weights of a format, so that the state needs no copy of them."""
    native = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return fmt.format is not None and fmt.scaling is None and native.get(dtype) == fmt.format.name


class Book(NamedTuple):
    """The codebook of a state as kernels have it.

    values: float32 [256], or [16] of 4-bit codes. words: int32 of ``fmtsim.rounding.codebooks.Table``, both signs;
    under ``keep_sign`` those of negative numbers have the code below zero's where that would be zero. lowest: The key
    of the first bucket. least: What amax is raised to.
    """

    values: np.ndarray
    words: np.ndarray
    lowest: int
    least: float


def state_codebook(fmt: StateFormat) -> Book | None:
    """Return the codebook of a state for kernels, None where they do not know its format."""
    element = fmt.format
    if not isinstance(element, CodebookFormat) or fmt.rule != "amax" or fmt.expand:
        return None
    if len(element.values) not in (16, 256) or element.values[-1] != 1.0:
        return None
    try:
        table = table_of(element, fmt.ties)
    except ArgumentError:
        return None
    words = table.words.copy()
    if fmt.keep_sign:
        negative, zero = words[BUCKETS:], element.values.index(0.0)
        codes, turns = negative >> (KEY_SHIFT + 1), negative & (2 * NO_THRESHOLD - 1) != NO_THRESHOLD
        moved = (codes == zero) | ((codes == zero - 1) & turns)
        negative[moved] = (zero - 1) % len(element.values) << (KEY_SHIFT + 1) | NO_THRESHOLD
    return Book(table.values, words, LOWEST_KEY, fmt.least)
