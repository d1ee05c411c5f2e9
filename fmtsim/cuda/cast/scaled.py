"""Operands under a scale rule (``fmtsim.spec.scaling.Scaling``) in one or two launches: scales, elements, masks.

The bits are those of ``fmtsim.scaling.cast.cast``: the same float32 operations in the same order, the same random
words. What depends on quantiser, dtype, shape and layout alone is worked out once and kept.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fmtsim.cuda.cast.scaled_plan import INPUTS, Frozen, Made, Memory, Plan, amax_variant, variant
from fmtsim.cuda.cast.scaled_rules import way_of
from fmtsim.cuda.cast.scaled_shape import shape_of
from fmtsim.cuda.runtime import program as runtime
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.gradient import ClipMask
from fmtsim.spec.quantizer import Quantizer, scaling_for
from fmtsim.spec.scaling import History, Scaling

__all__ = ["Made", "cast_scaled", "covers", "folds", "variants"]

Keys = tuple[RandomKey | None, RandomKey | None]

_ALIGNED = 16
_MOST = 512  # plans that are kept


def covers(x: Tensor, quantizer: Quantizer) -> bool:
    """Say whether ``cast_scaled`` takes a matrix under a quantiser; looks at no data, and is quick.

    x is on a CUDA device at a 16-byte address, contiguous or the transpose of a contiguous matrix, whose rows in memory
    have a multiple of eight elements. Transforms and ``then`` of the quantiser are not looked at.
    """
    return _plan_of(x, quantizer, False) is not None and x.data_ptr() % _ALIGNED == 0


def folds(quantizer: Quantizer) -> bool:
    """Say whether bfloat16 holds element times block scale (without the rule's multiplier), so that ``fold`` may be.

    True for scales that are powers of two and for short ones under short elements (E4M3 under E2M1).
    """
    way = way_of(quantizer)
    return way is not None and way.folds


def cast_scaled(
    x: Tensor,
    quantizer: Quantizer,
    keys: Keys = (None, None),
    fold: bool = False,
    delayed: Memory | Frozen | None = None,
) -> Made:
    """Quantise a matrix that ``covers``, blocks along its last axis.

    Args:
        x: [rows, inner]; float32, bfloat16 or float16.
        quantizer: Its format, rounding, overflow, scaling and gradient count.
        keys: Random words of elements and of scales; those of scales are never drawn here.
        fold: Return element times block scale; ``folds(quantizer)`` has to be true. Where ``Made.tensor`` is given, a
            block of zeros, Inf and NaN alone is folded with it as well, though its scale is 1.
        delayed: DelayedScale or FrozenScale of a scaling with a history: gives the scale of the call, and a
            DelayedScale records the largest magnitude of x.

    Returns:
        Values, scales and masks; nothing waits for the device, and results do not depend on the run.
    """
    plan = _plan_of(x, quantizer, fold)
    assert plan is not None  # the caller asked covers
    return plan.cast(x, keys[0], delayed)


_plans: dict[tuple[Any, ...], Plan | None] = {}
_quantizers: dict[int, Quantizer] = {}


def _plan_of(x: Tensor, quantizer: Quantizer, fold: bool) -> Plan | None:
    index = runtime.device_index(x)
    key = id(quantizer), x.dtype, x.shape, x.stride(), index, fold
    try:
        return _plans[key]
    except KeyError:
        pass
    if len(_plans) >= _MOST:
        _plans.clear()
        _quantizers.clear()
    _quantizers[id(quantizer)] = quantizer  # alive as long as its identity is a key
    plan = _plans[key] = _new_plan(x, quantizer, index, fold)
    return plan


def _new_plan(x: Tensor, quantizer: Quantizer, index: int, fold: bool) -> Plan | None:
    scaling = quantizer.scaling
    if scaling is not None and scaling.input_scale:
        quantizer = replace(quantizer, scaling=scaling_for(scaling, x.dtype))
    way = way_of(quantizer) if index >= 0 and x.dtype in INPUTS else None
    if way is None or (fold and not way.folds) or (x.is_cuda and not runtime.serves(index)):
        return None
    assert quantizer.scaling is not None
    drawn = quantizer.rounding.mode == "stochastic"
    shape = shape_of(x, quantizer.scaling.block, statistic=quantizer.scaling.statistic, drawn=drawn)
    return None if shape is None else Plan(quantizer, way, shape, x.dtype, index, fold)


def variants() -> Iterator[tuple[str, str, runtime.Defines]]:
    """Yield file, kernel and macros of every kind of kernel: those of common recipes, in two dtypes."""
    yield "scaled_history.cu", "advance", ()
    e8m0 = get_format("e8m0")
    assert isinstance(e8m0, FloatFormat)
    pairs, power = (1, 32), Scaling(power_of_two="ceil")
    std = Scaling(block=pairs, statistic="std", factor=0.5, arithmetic="divide", power_of_two="floor", scale=e8m0)
    delayed = replace(power, history=History())
    for dtype in (torch.bfloat16, torch.float32):
        for columns in (False, True):
            yield amax_variant(dtype, columns)
        yield from _of("e4m3", Scaling(), dtype, turns=False)
        yield from _of("e4m3", delayed, dtype, turns=False)
        yield from _of("e5m2", delayed, dtype, "stochastic", turns=False)
        for block in ((1, None), (1, 128), (128, 128)):
            yield from _of("e4m3", replace(power, block=block), dtype)
        yield from _of("e4m3", Scaling(block=(1, None)), dtype, turns=False, columns=1 << 16)
        yield from _of("int8", Scaling(block=(1, None)), dtype)
        yield from _of("e2m1", std, dtype, "nearest_toward_zero", turns=False)
        yield from _of("e2m1", replace(power, block=pairs), dtype, "stochastic")


def _of(
    name: str, scaling: Scaling, dtype: torch.dtype, mode: str = "nearest_even", turns: bool = True, columns: int = 256
) -> Iterator[tuple[str, str, runtime.Defines]]:
    """Yield what casts a matrix under a quantiser, and what casts its transpose."""
    element = get_format(name)
    assert isinstance(element, FloatFormat | IntFormat)
    rounding = Rounding(mode=mode)  # type: ignore[arg-type]
    clipped = {"gradient": ClipMask()} if scaling.statistic == "std" else {}
    way = way_of(Quantizer(format=element, scaling=scaling, rounding=rounding, **clipped))  # type: ignore[arg-type]
    assert way is not None
    x = torch.empty(256, columns, dtype=dtype, device="meta")
    given = scaling.history is not None
    for matrix in (x, x.mT) if turns else (x,):
        shape = shape_of(matrix, scaling.block, statistic=scaling.statistic, drawn=mode == "stochastic")
        assert shape is not None
        for fold in {False, way.folds and not given and scaling.block != (1, None)}:
            yield variant(shape, way, INPUTS[dtype], fold, scaling, given, given)
