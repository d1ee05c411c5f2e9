"""Operands under a scale rule (``fmtsim.spec.scaling.Scaling``) in one or two launches: scales, elements, masks.

The bits are those of ``fmtsim.scaling.cast.cast``: the same float32 operations in the same order, the same random
words. What depends on quantiser, dtype, shape and layout alone is worked out once and saved as a plan.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda import runtime
from fmtsim.cuda.cast.parameters import DTYPES, NARROW, NO_DRAW, draw_of, macros
from fmtsim.cuda.cast.scaled_rules import (
    COLUMNS,
    LONG_COLUMNS,
    MOMENTS,
    TENSOR,
    TILES,
    WORDS_NONE,
    KernelRule,
    MatrixLayout,
    history_bytes,
    matrix_layout,
    multiplier_of,
    rule_of,
)
from fmtsim.errors import DeviceError
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.quantizer import Quantizer, scaling_for
from fmtsim.spec.scaling import Scaling

Keys = tuple[RandomKey | None, RandomKey | None]

_ALIGNED = 16
_MOST_PLANS = 512
_PARTS = 4  # blocks of threads a multiprocessor that find amaxes
_MOST_PARTS = 640  # of which scaled_rows.cu takes the amaxes
_FOLDED = 32  # numbers that a thread of the kernels of means adds up
_MEAN_THREADS = 256
_LAST = 1024 * _FOLDED  # numbers that their last block of threads adds up


class ScaledValues(NamedTuple):
    """A quantised matrix ``[rows, inner]``.

    Attributes:
        values: bfloat16, with the strides of x: elements; with ``fold`` element times block scale, rounded to nearest
            even where it needs bits below 2**-133, else exact. A scale that has a multiplier leaves it to ``tensor``.
        scale: float32 [row blocks, inner blocks]: what an element is multiplied with, all of it, also with ``fold``.
        tensor: float32, 0-d: what folded values are still multiplied with, or None for one.
        mask: bool, with the shape and strides of x: where the gradient passes (ClipMask, TrustMask), or None.
    """

    values: Tensor
    scale: Tensor
    tensor: Tensor | None
    mask: Tensor | None


class Memory(Protocol):
    """What delayed scaling remembers (``fmtsim.scaling.history.DelayedScale``); its buffers are updated in place."""

    amaxes: Tensor
    factor: Tensor
    calls: Tensor
    scaling: Scaling
    top: float
    group: Any

    def advance(self, amax: Tensor) -> Any:
        """Record an amax and return the scales of a call."""


class Frozen(Protocol):
    """The same where nothing is to be remembered (``fmtsim.scaling.history.FrozenScale``)."""

    memory: Memory


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
    rule = rule_of(quantizer)
    return rule is not None and rule.folds


def cast_scaled(
    x: Tensor,
    quantizer: Quantizer,
    keys: Keys = (None, None),
    fold: bool = False,
    delayed: Memory | Frozen | None = None,
) -> ScaledValues:
    """Quantise a matrix that ``covers``, blocks along its last axis.

    Args:
        x: [rows, inner]; float32, bfloat16 or float16.
        quantizer: Its format, rounding, overflow, scaling and gradient count.
        keys: Random words of elements and of scales; those of scales are never drawn here.
        fold: Return element times block scale; ``folds(quantizer)`` has to be true. Where ``ScaledValues.tensor`` is
            given, a block of zeros, Inf and NaN alone is folded with it as well, though its scale is 1.
        delayed: DelayedScale or FrozenScale of a scaling with a history: gives the scale of the call, and a
            DelayedScale records the largest magnitude of x.

    Returns:
        Values, scales and masks; nothing waits for the device, and results do not depend on the run.
    """
    plan = _plan_of(x, quantizer, fold)
    assert plan is not None  # the caller asked covers
    return plan.cast(x, keys[0], delayed)


_plans: dict[tuple[Any, ...], "_Plan | None"] = {}
_quantizers: dict[int, Quantizer] = {}


def _plan_of(x: Tensor, quantizer: Quantizer, fold: bool) -> "_Plan | None":
    index = runtime.device_index(x)
    key = id(quantizer), x.dtype, x.shape, x.stride(), index, fold
    try:
        return _plans[key]
    except KeyError:
        pass
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
        _quantizers.clear()
    _quantizers[id(quantizer)] = quantizer  # alive as long as its identity is a key
    plan = _plans[key] = _new_plan(x, quantizer, index, fold)
    return plan


def _new_plan(x: Tensor, quantizer: Quantizer, index: int, fold: bool) -> "_Plan | None":
    if quantizer.scaling is not None and quantizer.scaling.input_scale:
        quantizer = replace(quantizer, scaling=scaling_for(quantizer.scaling, x.dtype))
    rule = rule_of(quantizer) if index >= 0 and x.dtype in NARROW else None
    if rule is None or (fold and not rule.folds) or (x.is_cuda and not runtime.serves(index)):
        return None
    assert quantizer.scaling is not None
    scaling, stochastic = quantizer.scaling, quantizer.rounding.mode == "stochastic"
    layout = matrix_layout(x, scaling.block, statistic=scaling.statistic, stochastic=stochastic)
    return None if layout is None else _Plan(quantizer, rule, layout, x.dtype, index, fold)


class _Plan:
    """How matrices of one shape and layout are cast under one quantiser.

    Args:
        quantizer: Kept, so that no other object can take its identity.
        rule: What it is to the kernels.
        layout: How the matrices lie in memory.
        dtype: Theirs.
        index: Of the device.
        fold: As in ``cast_scaled``.
    """

    def __init__(
        self, quantizer: Quantizer, rule: KernelRule, layout: MatrixLayout, dtype: torch.dtype, index: int, fold: bool
    ) -> None:
        assert quantizer.scaling is not None
        self._quantizer, self._scaling, self._rule, self._layout = quantizer, quantizer.scaling, rule, layout
        self._dtype, self._index, self._fold = dtype, index, fold
        self._counts, self._grid, self._drawn = layout.counts, layout.launch[0], layout.words != WORDS_NONE
        parts = min(max(layout.rows * layout.columns // 16384, 1), _PARTS * runtime.multiprocessors(index), _MOST_PARTS)
        self._parts = 1 if quantizer.scaling.statistic in MOMENTS else parts
        self._launches: dict[tuple[Any, ...], Callable[..., None]] = {}  # by what a call asks of them
        self._tensor: Tensor | None = None
        self._outer = multiplier_of(quantizer.scaling) if fold else 1.0

    def cast(self, x: Tensor, key: RandomKey | None, delayed: Memory | Frozen | None) -> ScaledValues:
        """Do what ``cast_scaled`` does."""
        values = torch.empty_like(x, dtype=torch.bfloat16)
        scale = torch.empty(self._counts, dtype=torch.float32, device=x.device)
        mask = torch.empty_like(x, dtype=torch.bool) if self._rule.masks else None
        addresses = x.data_ptr(), values.data_ptr(), scale.data_ptr(), 0 if mask is None else mask.data_ptr()
        if delayed is not None:
            self._cast_delayed(x, addresses, key, delayed)
        elif self._layout.kind in (TENSOR, LONG_COLUMNS):
            tops = self._amaxes_of(x)
            self._launch(False, False, key, *addresses, tops.data_ptr())
        else:
            self._launch(False, False, key, *addresses)
        outer = None if self._outer == 1.0 else self._constant(x.device)
        return ScaledValues(values, scale.mT if self._layout.transposed else scale, outer, mask)

    def _constant(self, device: torch.device) -> Tensor:
        """Return the multiplier; what a graph captures is not there before it runs, and is not saved."""
        if self._tensor is not None:
            return self._tensor
        constant = torch.full((), self._outer, dtype=torch.float32, device=device)
        if not torch.cuda.is_current_stream_capturing():
            self._tensor = constant
        return constant

    def _cast_delayed(
        self, x: Tensor, addresses: tuple[int, ...], key: RandomKey | None, delayed: Memory | Frozen
    ) -> None:
        """Cast under the scale in force, and record the amax of x."""
        memory: Memory = vars(delayed).get("memory", delayed)
        remembers, history = memory is delayed, self._scaling.history
        assert history is not None
        if memory.group is not None and (remembers or history.immediate):
            amax = self._amaxes_of(x).amax().view(torch.float32)
            factor = delayed.advance(amax).factor  # type: ignore[union-attr]
            self._launch(True, False, key, *addresses, factor.data_ptr())
            return
        factor = memory.factor
        if factor.device != x.device:
            raise DeviceError(
                f"delayed scaling remembers on {factor.device}, but x is on {x.device}; move the model there"
            )
        if history.immediate:
            in_force = torch.empty((), dtype=torch.float32, device=x.device)
            self._advance(self._amaxes_of(x), memory, factor, in_force.data_ptr(), remembers)
            self._launch(True, False, key, *addresses, in_force.data_ptr())
        elif remembers:
            tops = torch.empty(self._grid, dtype=torch.int32, device=x.device)
            self._launch(True, True, key, *addresses, factor.data_ptr(), tops.data_ptr())
            self._advance(tops, memory, factor, 0, True)
        else:
            self._launch(True, False, key, *addresses, factor.data_ptr())

    def _advance(self, tops: Tensor, memory: Memory, factor: Tensor, in_force: int, remembers: bool) -> None:
        """Launch the kernel of the memory; in_force: where the factor of this call is asked for, or 0."""
        known = memory.top, tops.shape[0], remembers
        launch = self._launches.get(known)
        if launch is None:
            found = runtime.kernel("statistic.cu", "advance", self._index)
            rest = np.uint32(tops.shape[0]), history_bytes(self._scaling, memory.top, remembers)
            launch = self._launches[known] = found.bound(1024, 5, *rest)
        launch(1, tops.data_ptr(), memory.amaxes.data_ptr(), factor.data_ptr(), memory.calls.data_ptr(), in_force)

    def _launch(self, given: bool, records: bool, key: RandomKey | None, *addresses: int) -> None:
        launch = self._launches.get((given, records))
        if launch is None:
            launch = self._launches[given, records] = self._prepared(given, records)
        if self._drawn:
            launch(self._grid, *addresses, draw=draw_of(self._quantizer.rounding, key))
        else:
            launch(self._grid, *addresses)

    def _prepared(self, given: bool, records: bool) -> Callable[..., None]:
        """Return the launch of the kernel that casts, compiled."""
        layout, rule, threads = self._layout, self._rule, self._layout.launch[1]
        file, name, defines = variant(layout, rule, self._dtype, self._fold, self._scaling, given, records)
        found = runtime.kernel(file, name, self._index, defines)
        own: tuple[int, ...] = layout.units, self._parts
        if layout.kind in (TILES, COLUMNS, LONG_COLUMNS):
            own = (layout.height, layout.width) if layout.kind == TILES else ()
        places = (*map(np.uint64, (layout.rows, layout.columns, *layout.steps)), *map(np.uint32, own))
        rest = *places, rule.rule, rule.grid.parameters, rule.scale_grid
        pointers = {TILES: 4, COLUMNS: 5, LONG_COLUMNS: 5}.get(layout.kind, 6)

        def padded(addresses: tuple[int, ...]) -> tuple[int, ...]:
            return addresses + (0,) * (pointers - len(addresses))

        if self._drawn:
            return lambda grid, *addresses, draw: found(grid, threads, *map(np.uint64, padded(addresses)), *rest, draw)
        bound = found.bound(threads, pointers, *rest, NO_DRAW)
        return lambda grid, *addresses: bound(grid, *padded(addresses))

    def _amaxes_of(self, x: Tensor) -> Tensor:
        """Return bits of amaxes, int32: of parts of the matrix, or of columns of memory; or those of its mean."""
        if self._scaling.statistic in MOMENTS:
            return mean_of(x, self._scaling.statistic)
        layout, long = self._layout, self._layout.kind == LONG_COLUMNS
        launch = self._launches.get((long,))
        if launch is None:
            sizes = (layout.rows, layout.columns) if long else (layout.rows * layout.columns // 8,)
            found = runtime.kernel(*(amaxes := amax_variant(self._dtype, long))[:2], self._index, amaxes[2])
            launch = self._launches[(long,)] = found.bound(512, 2, *map(np.uint64, sizes))
        if long:
            tops = torch.zeros(layout.columns, dtype=torch.int32, device=x.device)
            grid = -(-layout.columns // 256) * -(-layout.rows // 128)
        else:
            tops = torch.empty(self._parts, dtype=torch.int32, device=x.device)
            grid = self._parts
        launch(grid, x.data_ptr(), tops.data_ptr())
        return tops


def mean_of(x: Tensor, statistic: str) -> Tensor:
    """Return the mean magnitude (``"mean_abs"``) or the root mean square (``"rms"``) of the finite elements of x.

    The sums are folded sums of float64 (``fmtsim.scaling.statistics``). x is contiguous and not empty.

    Returns:
        Bits of a float32, int32 [1].
    """
    index, defines, squares, total = runtime.device_index(x), mean_macros(x.dtype), statistic == "rms", x.numel()
    left = max(1 << (total - 1).bit_length(), _LAST) // _FOLDED
    sums = torch.empty(left, dtype=torch.float64, device=x.device)
    counts = torch.empty(left // _MEAN_THREADS, dtype=torch.int32, device=x.device)
    runtime.kernel("statistic.cu", "fold_elements", index, defines)(
        left // _MEAN_THREADS, _MEAN_THREADS, x, sums, counts, np.uint64(total), np.uint64(left), np.uint32(squares)
    )
    while left > _LAST:
        left //= _FOLDED
        before, sums = sums, torch.empty(left, dtype=torch.float64, device=x.device)
        runtime.kernel("statistic.cu", "fold_sums", index, defines)(
            left // _MEAN_THREADS, _MEAN_THREADS, before, sums, np.uint64(left)
        )
    found = torch.empty(1, dtype=torch.int32, device=x.device)
    numbers = map(np.uint32, (counts.numel(), left, squares))
    runtime.kernel("statistic.cu", "fold_last", index, defines)(1, 1024, sums, found, counts, *numbers)
    return found


def variant(
    layout: MatrixLayout, rule: KernelRule, dtype: torch.dtype, fold: bool, scaling: Scaling, given: bool, records: bool
) -> tuple[str, str, runtime.Defines]:
    """Return file, name and macros of the kernel that casts.

    given: under a factor instead of amaxes; records: writing the amaxes of parts.
    """
    defines = rule.defines(DTYPES[dtype], layout.words, fold)
    if layout.kind == TILES:
        return "scaled_tiles.cu", "cast_tiles", (*defines, *macros(CACHED=layout.cached))
    if layout.kind in (COLUMNS, LONG_COLUMNS):
        return "scaled_tiles.cu", "cast_columns", (*defines, *macros(RUN=layout.run))
    source = macros(RUN=layout.run, SOURCE=given, RECORDS=records, MOMENTS=scaling.statistic in MOMENTS)
    return "scaled_rows.cu", "cast_runs", (*defines, *source)


def amax_variant(dtype: torch.dtype, columns: bool) -> tuple[str, str, runtime.Defines]:
    """Return file, name and macros of the kernel that finds amaxes, of columns or of parts."""
    return "statistic.cu", f"amaxes_of_{'columns' if columns else 'parts'}", macros(INPUT=DTYPES[dtype])


def mean_macros(dtype: torch.dtype) -> runtime.Defines:
    """Return the macros of the kernels of means."""
    return macros(INPUT=DTYPES[dtype])
