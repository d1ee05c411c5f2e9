# SPDX-License-Identifier: Apache-2.0
"""Operands of products under a Hadamard transform and a cast, fused: bfloat16 in, bfloat16 values out (rotated.cu).

The bits are those of ``fmtsim.gemm.layers``: the transform of fmtsim/scaling/hadamard.py in float32, rounded to
bfloat16 where the quantiser says so, then the cast. Values are elements times block scales, which bfloat16 holds
exactly; a scale that all blocks share is returned beside them.

Casts are block formats whose values bfloat16 holds, and three rules of ``Scaling``: blocks of 32 elements under a power
of two of ``std * factor + offset`` with ties toward zero (QuEST) or of ``amax / top``, times a multiplier (Quartet);
and blocks of 16 under the two levels of Quartet II, also with scales that EDEN corrects over a transform.
"""

import struct
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.any_format import cast_bytes
from fmtsim.cuda.cast.parameters import FROM_FLOAT, NO_DRAW, draw_of, macros
from fmtsim.cuda.cast.scale_rules import BFLOAT16, fast_macros, float_bits
from fmtsim.cuda.runtime import Defines, device_index, kernel, multiprocessors
from fmtsim.cuda.runtime.launch import Bound
from fmtsim.formats.block import E8M0, FP32, BlockFormat, scaled
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling, TensorScale, block_scaling
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.philox import random_word
from fmtsim.spec.cast import CastSpec, RandomKey
from fmtsim.spec.operand import Operand
from fmtsim.spec.quantizer import ClipMask, Hadamard, Quantizer, StraightThrough, Transform
from fmtsim.support.replay.gpu import constant
from fmtsim.support.replay.hooks import Structure, packed

Keys = tuple[RandomKey | None, RandomKey | None]
Signs = RandomKey | int | None

_FILE, _THREADS, _TILE = "rotated.cu", 128, 8192  # a tile has 64 elements a thread
_PER_LANE = 32  # elements of a lane
_PARTS = 8  # blocks of threads a multiprocessor that look for the amax of a tensor
_GRID_LIMIT = 65535
_SIZES, _MASK = struct.Struct("<3q"), struct.Struct("<4I")
_MOST = 512  # layouts of a plan
_WORD = Rounding(mode="stochastic")  # draws whole words
_RANDOM = struct.Struct("<I12x")
_JOB = struct.Struct(f"<7q{_SIZES.size}s{_MASK.size + len(NO_DRAW) + _RANDOM.size}s")  # the kernels' first argument
SIZES = (16, 32)
_LONG = 128  # elements of the transform and of the group whose scales are corrected together
BF16, _E4M3 = (cast(FloatFormat, get_format(name)) for name in ("bf16", "e4m3"))
_TOLERANCE = "7.105427357601002e-15"  # 2^-47: how far the order of 128 sums in float64 moves a quotient, at most
_BLOCK_FORMAT, _DEVIATION, _LARGEST, _CORRECTED, _TWO_SCALES = range(5)  # CAST of the kernel
_PLAIN = Scaling(block=(1, 32), arithmetic="divide", power_of_two="floor")
_MULTIPLIERS = (1.0, 4 / 3)  # division by their float32 in four steps is exact (tests/cuda/test_rotated.py)
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
        launches: By dtype, shape, strides, whether a call multiplies first, whether it counts, whether it reads
            float32, and device.
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
    launches: dict[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bool, bool, bool, int], Launch]

    @property
    def lanes(self) -> int:
        """Lanes whose elements belong together: 32 each."""
        return 4 if self.draws_scales else 2


def covers(x: Tensor, quantizer: Quantizer, narrow: bool = False) -> bool:
    """Return True if ``cast_rotated`` takes a matrix under a quantiser; the device is not looked at.

    It takes bfloat16 ``[rows, inner]``, contiguous or the transposed view of such a matrix, ``inner`` a multiple of 64
    (and ``rows`` of 8 in a transposed view), under at most one Hadamard transform of 16 or 32 elements along the inner
    axis and one of these casts: a block format of up to 32 elements in a row whose values bfloat16 holds, or e2m1 under
    the rules of Quartet or the two levels of Quartet II; or under a transform of 128 and the
    corrected scales of Quartet II, ``inner`` then being a multiple of 128. ``narrow``: float32, as ``cast_rotated`` has
    it.
    """
    plan = plan_of(quantizer)
    if plan is None or x.dtype != (torch.float32 if narrow else torch.bfloat16) or x.dim() != 2 or not x.numel():
        return False
    if max(x.shape) > _GRID_LIMIT * 2 * _PER_LANE or x.shape[1] % (plan.lanes * _PER_LANE):
        return False
    return x.is_contiguous() or (not plan.masks and x.stride() == (1, x.shape[0]) and x.shape[0] % 8 == 0)


def counts_keys(quantizer: Quantizer) -> bool:
    """Return True if ``cast_rotated`` takes bfloat16 matrices under a quantiser whose sizes are multiples of 128."""
    plan = plan_of(quantizer)
    return plan is not None and not (plan.masks and quantizer.source != "original")


def cast_rotated(
    x: Tensor,
    quantizer: Quantizer,
    keys: Keys = (None, None),
    signs: Signs = None,
    factor: Tensor | None = None,
    count: Tensor | None = None,
    narrow: bool = False,
) -> Operand | None:
    """Rotate and quantise a matrix; None where ``covers`` says that it is not taken.

    Args:
        x: bfloat16 ``[rows, inner]``, contiguous or a transposed view.
        quantizer: What to do.
        keys: Random words of elements and of scales; by an element's place in ``[rows, inner]``, whatever the strides.
        signs: The key of a rotation with ``signs="random"``, or its mask.
        factor: float32, 0-d: what x is multiplied with first, each product rounded to float32: the scale that values
            which are quantised again were left without. None is 1.
        count: int64, 0-d, on the device: what the offsets of all keys are larger by, so that a CUDA graph that is
            replayed draws anew. None is 0.
        narrow: x is float32, and rounded to bfloat16 as it is read.

    Returns:
        Elements times block scales, bfloat16, with the strides of x; a bool slope under a ``ClipMask``; and what all
        are still to be multiplied with: the scale of the tensor of two-level formats, or the constant
        ``multiplier`` of a ``Scaling``, also of blocks in which no element is finite and not zero, whose scale is 1 by
        definition (zeros do not tell, NaN and Inf come out as 6 times one or the other).

    NaN, Inf and -0 come out as ``quantize_operand`` has them, NaN canonical. Nothing waits for the device.
    """
    plan, index = plan_of(quantizer), device_index(x)
    if plan is None:
        return None
    where = x.dtype, x.shape, x.stride(), factor is not None, count is not None, narrow, index
    how = plan.launches.get(where)
    if how is None:
        if not covers(x, quantizer, narrow):
            return None
        how = plan.launches[where] = _prepared(plan, *where[1:])
    scale = None if plan.outside is None else constant(plan.outside, x.device)
    if plan.two_level:
        scale = torch.empty((), device=x.device)
    key = keys[plan.draws_scales]
    assert plan.drawn.mode != "stochastic" or key is not None
    values = torch.empty_like(x, dtype=torch.bfloat16)  # with its strides
    mask = torch.empty_like(x, dtype=torch.bool) if plan.masks else None
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    parts = None if how.find is None else torch.empty(how.parts, dtype=torch.int32, device=x.device)
    sign_bytes = how.signs or _signs_of(plan.signs, plan.size, signs)
    sign_bytes = packed(signs, sign_bytes, partial(_signs_of, plan.signs, plan.size))
    job = Structure(_JOB, (x, values, mask, parts, scale, factor, count, how.sizes, sign_bytes))
    if how.find is not None:
        how.find(how.parts, job)
    how.cast(how.grid, job, plan.head + draw_of(plan.drawn, key) + plan.tail)
    return Operand(values, quantizer, tensor_scale=scale, slope=mask)


def _prepared(
    plan: Plan, shape: tuple[int, ...], strides: tuple[int, ...], multiplies: bool, counts: bool, narrow: bool,
    index: int,
) -> Launch:  # fmt: skip
    """Return the launches for matrices of a shape and layout; computed once, because it takes longer than a launch."""
    contiguous = strides[1] == 1
    defines = kernel_macros(plan, not contiguous, multiplies, counts, narrow)
    finds = kernel(_FILE, "rotated_amax", index, defines).bound(_THREADS, (_JOB.size,)) if plan.two_level else None
    cast_size = len(plan.head) + len(NO_DRAW) + len(plan.tail)
    casts = kernel(_FILE, "cast_rotated", index, defines).bound(_THREADS, (_JOB.size, cast_size))
    rows, columns = shape if contiguous else shape[::-1]
    height = 2 * _PER_LANE if contiguous else plan.lanes * _PER_LANE
    grid = -(-columns * height // _TILE), -(-rows // height)
    parts = 0 if finds is None else min(grid[0] * grid[1], _PARTS * multiprocessors(index))
    signs = b"" if plan.signs == "random" else _signs_of(plan.signs, plan.size, None)
    if len(plan.launches) >= _MOST:
        plan.launches.clear()
    return Launch(finds, casts, grid, parts, _SIZES.pack(rows, columns, parts), signs)


@lru_cache(maxsize=4096)  # layers of a model have keys of their own
def _signs_of(transform_signs: Signs | Literal["random"], size: int, signs: Signs) -> bytes:
    """Return the bytes of the signs of a lane's elements, and of the key that draws more of them.

    Args:
        transform_signs: Those of the transform, or where they come from.
        size: Of the transform.
        signs: What is drawn from, or the mask, where they are random.
    """
    source = signs if transform_signs == "random" else transform_signs
    key, mask = None, source if isinstance(source, int) else 0
    if isinstance(source, RandomKey):  # bit j of word w of a key changes the sign of element 32 w + j of a group
        key, words = source, range(-(-size // 32))
        mask = sum(random_word(key, word) << 32 * word for word in words) & ((1 << size) - 1)
    bits = mask * 0x10001 if size == 16 else mask  # groups of fewer are repeated
    draw = NO_DRAW if key is None else draw_of(_WORD, key)
    return _MASK.pack(*(bits >> 32 * place & 0xFFFFFFFF for place in range(4))) + draw + _RANDOM.pack(key is not None)


# How a quantiser is computed.


def kernel_macros(
    plan: Plan, transposed: bool, multiplies: bool = False, counts: bool = False, narrow: bool = False
) -> Defines:
    """Return the macros of a kernel that casts along the rows, ``transposed`` along the columns.

    ``multiplies``: it casts products with a number; ``counts``: its keys move on by a number on the device;
    ``narrow``: it reads float32.
    """
    launch = macros(
        LANES=plan.lanes, SCALED=multiplies, COUNTED=counts, DOWN=transposed, SIZE=plan.size, NARROWS=plan.rounded,
        MASKS=plan.masks and not transposed,
    )  # fmt: skip
    return (*plan.defines, *launch, *(FROM_FLOAT if narrow else ()))


def plan_of(quantizer: Quantizer) -> Plan | None:
    """Return the plan of a quantiser, None where the kernels do not serve."""
    entry = _plans.get(id(quantizer))
    if entry is None or entry[0] is not quantizer:  # hashing a quantiser takes as long as a launch
        if len(_plans) > 4096:
            _plans.clear()
        entry = _plans[id(quantizer)] = quantizer, _plan_of(quantizer)
    return entry[1]


_plans: dict[int, tuple[Quantizer, Plan | None]] = {}


def inner_rotation(transforms: tuple[Transform, ...], sizes: tuple[int, ...] = SIZES) -> Hadamard | None:
    """Return the only rotation among transforms if it is along the inner axis and of one of these sizes, else None."""
    if len(transforms) != 1 or not isinstance(transforms[0], Hadamard):
        return None
    rotation = transforms[0]
    return rotation if rotation.axis == "inner" and rotation.size in sizes else None


@lru_cache(maxsize=256)
def _plan_of(quantizer: Quantizer) -> Plan | None:
    corrects = quantizer.scaling is not None and quantizer.scaling.eden is not None
    rotation = inner_rotation(quantizer.transforms, (_LONG,) if corrects else SIZES)
    if (rotation is None and (quantizer.transforms or corrects)) or quantizer.then or quantizer.source == "forward":
        return None
    if rotation is not None and rotation.rounded not in (None, BF16):
        return None
    rounding = quantizer.rounding
    if rounding.mode not in _ROUNDINGS or (rounding.variant, rounding.layout) != ("a", "word"):
        return None
    rule = (_block if quantizer.scaling is None else _scaled)(quantizer)
    if rule is None:
        return None
    spec, cast_defines, outside = rule
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    defines = fast_macros(spec, torch.float32, BFLOAT16, fmt.tensor_scale)
    if defines is None:
        return None
    whole = cast_bytes(spec, None, torch.device("cpu"))  # float formats need no tables on a device
    return Plan(
        size=1 if rotation is None else rotation.size or 1,
        signs=None if rotation is None else rotation.signs,
        rounded=rotation is not None and rotation.rounded is not None,
        two_level=fmt.tensor_scale,
        masks=quantizer.gradient == ClipMask(),
        outside=outside,
        drawn=Rounding(mode="stochastic") if corrects else rounding,
        draws_scales=corrects,
        defines=(*defines, *cast_defines, ("RUN", str(fmt.block[1]))),
        head=whole[: -_TAIL - len(NO_DRAW)],
        tail=whole[-_TAIL:],
        launches={},
    )


def _block(quantizer: Quantizer) -> _Found | None:
    """Return the cast of a block format, the macros of these kernels alone, and the constant that stays outside."""
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
    """Return what ``_block`` does for a scale rule; the spec of the cast describes its elements alone."""
    fmt, scaling, rounding = quantizer.format, quantizer.scaling, quantizer.rounding
    if (
        not isinstance(fmt, FloatFormat)
        or (quantizer.overflow or fmt.default_overflow) != "saturate"
        or scaling is None
    ):
        return None
    if (
        fmt.mantissa_bits > 7 or fmt.min_subnormal < 2.0**-7 or fmt.has_nan
    ):  # bfloat16 has to hold values under any scale
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
    defines = _numbers(_LARGEST, TOP=top, MULTIPLIER=multiplier, MULTIPLIER_RECIPROCAL=np.float32(1) / multiplier)
    return spec, (*defines, ("DIVIDES", str(int(multiplier != 1)))), float(multiplier) if multiplier != 1 else None


def _two_scales(quantizer: Quantizer, fmt: FloatFormat, scaling: Scaling) -> _Found | None:
    """Return what ``_block`` does for the two levels of Quartet II, whose scales EDEN may correct."""
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
    defines = _numbers(_CORRECTED if corrects else _TWO_SCALES, TOP=top, TENSOR_TOP=largest)
    return spec, (*defines, ("GROUP", str(_LONG)), ("TOLERANCE", _TOLERANCE)) if corrects else defines, None


def _numbers(cast: int, **values: Any) -> Defines:
    """Return macros: CAST, and numbers as the bits of their float32."""
    return macros(CAST=cast, **{name: float_bits(value) for name, value in values.items()})
