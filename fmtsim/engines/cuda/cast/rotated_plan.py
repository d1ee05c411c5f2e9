# SPDX-License-Identifier: Apache-2.0
"""Which rotations and casts the kernels of rotated operands take, and the macros that specialise them.

Casts are those of block formats whose values bfloat16 holds, and three rules of ``Scaling``: for blocks of 32 elements
whose scales are powers of two ``floor(statistic="std" * factor + offset)`` with ties toward zero, which is QuEST, and
``floor(amax / top) * multiplier``; and for blocks of 16 the two levels of Quartet II, also with scales that EDEN
corrects over the elements of a transform.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeGuard, cast

import numpy as np
import torch

from fmtsim.engines.cuda.cast.block_macros import BFLOAT16, fast_macros, float_bits
from fmtsim.engines.cuda.cast.general import cast_bytes
from fmtsim.engines.cuda.cast.parameters import NO_DRAW, macros
from fmtsim.engines.cuda.runtime import Defines
from fmtsim.engines.cuda.runtime.launch import Bound
from fmtsim.formats.block import E8M0, FP32, BlockFormat, scaled
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling, TensorScale, block_scaling
from fmtsim.formats.spec import FloatFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec
from fmtsim.spec.quantizer import ClipMask, Hadamard, Quantizer, StraightThrough, Transform

SIZES = (16, 32)
_LONG = 128  # elements of the transform and of the group whose scales are corrected together
BF16, _E4M3 = (cast(FloatFormat, get_format(name)) for name in ("bf16", "e4m3"))
_TOLERANCE = "7.105427357601002e-15"  # 2^-47: how far the order of 128 sums in float64 moves a quotient, at most
_BLOCK_FORMAT, _DEVIATION, _LARGEST, _CORRECTED, _TWO_SCALES = range(5)  # CAST of the kernel
_PLAIN = Scaling(block=(1, 32), arithmetic="divide", power_of_two="floor")
_MULTIPLIERS = (1.0, 4 / 3)  # division by their float32 in four steps is exact (tests/engines/cuda/test_rotated.py)
_TAIL = 48  # bytes of a Cast behind its Draw


_Found = tuple[CastSpec, Defines, float | None]


class Launch(NamedTuple):
    """How matrices of one shape and layout are cast.

    Attributes:
        find, cast: Launches of the kernels that find the amaxes of a tensor, where its scale needs them, and that cast.
        grid: Of the second.
        parts: Blocks of threads of the first, and numbers that it leaves.
        sizes: Bytes of rows, columns and parts.
        signs: Bytes of the signs of a rotation, empty where each call has its own.
    """

    find: Bound | None
    cast: Bound
    grid: tuple[int, int]
    parts: int
    sizes: bytes
    signs: bytes


class Plan(NamedTuple):
    """How a quantiser is computed.

    Attributes:
        size: Elements of the transform, 1 where there is none.
        signs: Its signs, as in ``Hadamard``.
        rounded: Whether its result becomes bfloat16.
        two_level: Whether there is a scale of the tensor.
        masks: Whether there is a mask.
        outside: A constant that the values are to be multiplied with, or None.
        drawn: The rounding that takes random words: of the elements, or
        draws_scales: of the scales.
        defines: Macros of the cast.
        head, tail: A ``Cast`` before and behind its ``Draw``.
        launches: By dtype, shape, strides, whether a call multiplies first, whether it counts, and device.
    """

    size: int
    signs: int | Literal["random"] | None
    rounded: bool
    two_level: bool
    masks: bool
    outside: float | None
    drawn: Rounding
    draws_scales: bool
    defines: Defines
    head: bytes
    tail: bytes
    launches: dict[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bool, bool, int], Launch]

    @property
    def cast_size(self) -> int:
        """Bytes of a ``Cast``."""
        return len(self.head) + len(NO_DRAW) + len(self.tail)

    @property
    def lanes(self) -> int:
        """Lanes whose elements belong together: 32 each."""
        return 4 if self.draws_scales else 2


def kernel_macros(plan: Plan, transposed: bool, multiplies: bool = False, counts: bool = False) -> Defines:
    """Return the macros of a kernel that casts along the rows, ``transposed`` along the columns.

    ``multiplies``: it casts products with a number; ``counts``: its keys move on by a number on the device.
    """
    own = macros(
        LANES=plan.lanes, SCALED=multiplies, COUNTED=counts, DOWN=transposed, SIZE=plan.size, NARROWS=plan.rounded,
        MASKS=plan.masks and not transposed,
    )  # fmt: skip
    return (*plan.defines, *own)


def plan_of(quantizer: Quantizer) -> Plan | None:
    """Return how a quantiser is computed, None where the kernels do not serve."""
    found = _plans.get(id(quantizer))
    if found is None or found[0] is not quantizer:  # hashing a quantiser takes as long as a launch
        if len(_plans) > 4096:
            _plans.clear()
        found = _plans[id(quantizer)] = quantizer, _plan_of(quantizer)
    return found[1]


_plans: dict[int, tuple[Quantizer, Plan | None]] = {}


def rotation_of(transforms: tuple[Transform, ...], sizes: tuple[int, ...] = SIZES) -> Hadamard | None:
    """Return the only rotation among transforms if it is along the inner axis and of one of these sizes, else None."""
    if len(transforms) != 1 or not isinstance(transforms[0], Hadamard):
        return None
    turn = transforms[0]
    return turn if turn.axis == "inner" and turn.size in sizes else None


@lru_cache(maxsize=256)
def _plan_of(quantizer: Quantizer) -> Plan | None:
    corrects = quantizer.scaling is not None and quantizer.scaling.eden is not None
    turn = rotation_of(quantizer.transforms, (_LONG,) if corrects else SIZES)
    if (turn is None and (quantizer.transforms or corrects)) or quantizer.then or quantizer.source == "forward":
        return None
    if turn is not None and turn.rounded not in (None, BF16):
        return None
    rounding = quantizer.rounding
    if rounding.mode not in _ROUNDINGS or (rounding.variant, rounding.layout) != ("a", "word"):
        return None
    found = (_block if quantizer.scaling is None else _scaled)(quantizer)
    if found is None:
        return None
    spec, own, outside = found
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    defines = fast_macros(spec, torch.float32, BFLOAT16, fmt.tensor_scale)
    if defines is None:
        return None
    whole = cast_bytes(spec, None, torch.device("cpu"))  # float formats need no tables on a device
    return Plan(
        size=1 if turn is None else turn.size or 1,
        signs=None if turn is None else turn.signs,
        rounded=turn is not None and turn.rounded is not None,
        two_level=fmt.tensor_scale,
        masks=quantizer.gradient == ClipMask(),
        outside=outside,
        drawn=Rounding(mode="stochastic") if corrects else rounding,
        draws_scales=corrects,
        defines=(*defines, *own, ("RUN", str(fmt.block[1]))),
        head=whole[: -_TAIL - len(NO_DRAW)],
        tail=whole[-_TAIL:],
        launches={},
    )


def _block(quantizer: Quantizer) -> _Found | None:
    """Return the cast of a block format and the macros that only these kernels have."""
    fmt, rounding = quantizer.format, quantizer.rounding
    if not isinstance(fmt, BlockFormat) or not isinstance(fmt.element, FloatFormat) or fmt.block not in _BLOCKS:
        return None
    if rounding.mode not in ("nearest_even", "stochastic") or quantizer.gradient != StraightThrough():
        return None
    spec = CastSpec(format=fmt, rounding=rounding, overflow=quantizer.overflow or fmt.default_overflow)
    return spec, _numbers(_BLOCK_FORMAT), None


_BLOCKS = ((1, 16), (1, 32))
_ROUNDINGS = ("nearest_even", "nearest_toward_zero", "nearest_away", "stochastic")


def _scaled(quantizer: Quantizer) -> _Found | None:
    """Return the same of a scale rule; the cast of the spec is not the rule's, its elements are."""
    fmt, scaling, rounding = quantizer.format, quantizer.scaling, quantizer.rounding
    if not _small(fmt) or (quantizer.overflow or fmt.default_overflow) != "saturate" or scaling is None:
        return None
    if scaling.tensor is not None:
        return _two_scales(quantizer, fmt, scaling)
    spec = CastSpec(format=scaled(fmt, (1, 32), "floor"), rounding=rounding, overflow="saturate")
    deviation = replace(_PLAIN, statistic="std", factor=scaling.factor, offset=scaling.offset, scale=E8M0)
    if scaling == deviation and scaling.factor is not None and scaling.offset >= 2.0**-100:
        if rounding.mode != "nearest_toward_zero" or quantizer.gradient not in (ClipMask(), StraightThrough()):
            return None
        return spec, _numbers(_DEVIATION, FACTOR=scaling.factor, OFFSET=scaling.offset), None
    largest = replace(_PLAIN, top=scaling.top, multiplier=scaling.multiplier, scale=FP32)
    top = float(fmt.max) if scaling.top is None else scaling.top
    if scaling != largest or scaling.multiplier not in _MULTIPLIERS or not 2 <= top <= 2.0**20:
        return None
    if rounding.mode not in ("nearest_even", "stochastic") or quantizer.gradient != StraightThrough():
        return None
    multiplier = np.float32(scaling.multiplier)
    own = _numbers(_LARGEST, TOP=top, MULTIPLIER=multiplier, MULTIPLIER_RECIPROCAL=np.float32(1) / multiplier)
    return spec, (*own, ("DIVIDES", str(int(multiplier != 1)))), float(multiplier) if multiplier != 1 else None


def _two_scales(quantizer: Quantizer, fmt: FloatFormat, scaling: Scaling) -> _Found | None:
    """Return the same of the two levels of Quartet II, whose scales EDEN may correct."""
    assert scaling.tensor is not None
    tensor = TensorScale(top=scaling.tensor.top, order="quartet2")
    plain = Scaling(block=(1, 16), top=scaling.top, scale=_E4M3, tensor=tensor, metric=scaling.metric)
    corrects = scaling.eden is not None
    rule = replace(plain, scale_rounding="stochastic", eden=_LONG) if corrects else plain
    top = float(fmt.max) if scaling.top is None else scaling.top
    largest = float(_E4M3.max) if scaling.tensor.top is None else scaling.tensor.top
    rounding = "nearest_away" if corrects else "nearest_even"
    if scaling != rule or quantizer.rounding.mode != rounding or quantizer.gradient != StraightThrough():
        return None
    if not (1 <= top <= 2.0**20 and 1 <= largest <= 2.0**20):
        return None
    blocks = BlockFormat(
        name="two_scales",
        element=fmt,
        scaling=block_scaling((1, 16), scale=_E4M3, arithmetic="encode", tensor=TensorScale()),
    )
    spec = CastSpec(format=blocks, rounding=Rounding(), overflow="saturate")
    own = _numbers(_CORRECTED if corrects else _TWO_SCALES, TOP=top, TENSOR_TOP=largest)
    return spec, (*own, ("GROUP", str(_LONG)), ("TOLERANCE", _TOLERANCE)) if corrects else own, None


def _small(fmt: Any) -> TypeGuard[FloatFormat]:
    """Say whether bfloat16 holds the values of a format under all scales of float32."""
    return isinstance(fmt, FloatFormat) and fmt.mantissa_bits <= 7 and fmt.min_subnormal >= 2.0**-7 and not fmt.has_nan


def _numbers(cast: int, **values: Any) -> Defines:
    """Return macros: what is cast how, and numbers as the bits of their float32."""
    return macros(CAST=cast, **{name: float_bits(value) for name, value in values.items()})
