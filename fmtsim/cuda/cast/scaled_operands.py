# SPDX-License-Identifier: Apache-2.0
"""Operands under a scale rule (``fmtsim.formats.scaling.Scaling``) in one or two launches: scales, elements, masks.

The bits are those of ``fmtsim.scaling.scaled_cast.cast``: the same float32 operations in the same order, the same
random words. A plan, computed once, holds what depends on quantiser, dtype, shape and layout alone.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda import runtime
from fmtsim.cuda.cast.layout import (
    COLUMNS,
    LONG_COLUMNS,
    TENSOR,
    TILES,
    WORDS_NONE,
    MatrixLayout,
    matrix_layout,
)
from fmtsim.cuda.cast.parameters import DTYPES, FROM_FLOAT, NARROW, NO_DRAW, draw_of, macros
from fmtsim.cuda.cast.scale_rules import MOMENTS, KernelRule, history_bytes, rule_of
from fmtsim.formats.scaling import Scaling
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Operand
from fmtsim.spec.quantizer import Quantizer, scaling_for
from fmtsim.support.errors import DeviceError
from fmtsim.support.replay.gpu import constant

Keys = tuple[RandomKey | None, RandomKey | None]
Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None]  # x, values, scales, mask

_ALIGNED = 16
_MOST_PLANS = 512
_PARTS = 4  # blocks of threads a multiprocessor that find amaxes
_MOST_PARTS = 640  # of which scaled_rows.cu takes the amaxes
_FOLDED = 32  # numbers that a thread of the kernels of means adds up
_MEAN_THREADS = 256
_LAST = 1024 * _FOLDED  # numbers that their last block of threads adds up
_GROUP = 128  # rows and columns that share scales where these are multiplied in, or found along both

# A plan casts x; x times the numbers of its blocks; x along both axes; x, float32, rounded to bfloat16.
ALONE, GROUPED, BOTH, NARROWED = range(4)


def covers(x: Tensor, quantizer: Quantizer, factor: Tensor | None = None, narrow: bool = False) -> bool:
    """Return True if ``cast_scaled`` takes a matrix under a quantiser; looks at no data, and is quick.

    x is on a CUDA device at a 16-byte address, contiguous or the transpose of a contiguous matrix, whose rows in memory
    have a multiple of eight elements. Transforms and ``then`` of the quantiser are not looked at. A factor goes with
    the transpose of a bfloat16 matrix of whole blocks of 128 columns, under blocks of 128 of its rows.
    """
    return _plan_for(x, quantizer, False, factor, narrow) is not None


def covers_both(x: Tensor, quantizer: Quantizer) -> bool:
    """Return True if ``cast_both`` takes a matrix under a quantiser; looks at no data, so that a compiler may ask."""
    return x.dim() == 2 and x.is_contiguous() and _plan_of(x.mT, quantizer, False, BOTH) is not None


def folds(quantizer: Quantizer) -> bool:
    """Return True if bfloat16 holds element times block scale (without the rule's multiplier), so that ``fold`` may be.

    True for scales that are powers of two and for short ones under short elements (E4M3 under E2M1).
    """
    rule = rule_of(quantizer)
    return rule is not None and rule.folds


def cast_scaled(
    x: Tensor,
    quantizer: Quantizer,
    keys: Keys = (None, None),
    fold: bool = False,
    delayed: Any = None,
    factor: Tensor | None = None,
    narrow: bool = False,
) -> Operand | None:
    """Quantise a matrix, blocks along its last axis; None where ``covers`` says that it is not taken.

    Args:
        x: [rows, inner]; float32, bfloat16 or float16.
        quantizer: Its format, rounding, overflow, scaling and gradient count.
        keys: Random words of elements and of scales; those of scales are never drawn here.
        fold: Return element times block scale; ``folds(quantizer)`` has to be true. Where there is a multiplier, a
            block of zeros, Inf and NaN alone is folded with it as well, though its scale is 1.
        delayed: DelayedScale or FrozenScale (fmtsim.scaling.history) of a scaling with a history: gives the scale of
            the call, and a DelayedScale records the largest magnitude of x in its buffers, in place.
        factor: float32: what each block of 128 columns of a row of x.mT is multiplied with first, the products being
            rounded to float32; None is ones.
        narrow: x is float32, and rounded to bfloat16 as it is read.

    Returns:
        bfloat16 elements with the strides of x, the scales of their blocks, and a bool slope under a ClipMask or a
        TrustMask. With ``fold`` elements times block scales, rounded to nearest even where they need bits below
        2**-133, else exact; a scale that has a multiplier leaves it to ``tensor_scale``.

    Nothing waits for the device, and results do not depend on the run.
    """
    plan = _plan_for(x, quantizer, fold, factor, narrow)
    return None if plan is None else plan.cast(x, quantizer, keys[0], delayed, factor)


def cast_both(x: Tensor, quantizer: Quantizer, fold: bool) -> tuple[Operand, Operand]:
    """Return ``cast_scaled`` of a matrix that ``covers_both`` and of its transpose, from one read."""
    plan, x = _plan_of(x.mT, quantizer, fold, BOTH), x if x.data_ptr() % _ALIGNED == 0 else x.clone()
    assert plan is not None  # the caller asked covers_both
    return plan.cast_both(x, quantizer)


_plans: dict[tuple[Any, ...], "_Plan | None"] = {}
_quantizers: dict[int, Quantizer] = {}


def _plan_for(x: Tensor, quantizer: Quantizer, fold: bool, factor: Tensor | None, narrow: bool) -> "_Plan | None":
    if x.data_ptr() % _ALIGNED:
        return None
    if factor is None:
        return _plan_of(x, quantizer, fold, NARROWED if narrow else ALONE)
    fits = factor.is_contiguous() and factor.shape == (x.shape[1], x.shape[0] // _GROUP)
    return _plan_of(x, quantizer, fold, GROUPED) if fits else None


def _plan_of(x: Tensor, quantizer: Quantizer, fold: bool, what: int) -> "_Plan | None":
    index = runtime.device_index(x)
    key = id(quantizer), x.dtype, x.shape, x.stride(), index, fold, what
    try:
        return _plans[key]
    except KeyError:
        pass
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
        _quantizers.clear()
    _quantizers[id(quantizer)] = quantizer  # alive as long as its identity is a key
    plan = _plans[key] = _new_plan(x, quantizer, index, fold, what)
    return plan


def _new_plan(x: Tensor, quantizer: Quantizer, index: int, fold: bool, what: int) -> "_Plan | None":
    dtype = {GROUPED: torch.float32, NARROWED: torch.bfloat16}.get(what, x.dtype)
    if quantizer.scaling is not None and quantizer.scaling.input_scale:
        quantizer = replace(quantizer, scaling=scaling_for(quantizer.scaling, dtype))
    rule = rule_of(quantizer) if index >= 0 and x.dtype in NARROW else None
    if rule is None or (fold and not rule.folds) or (x.is_cuda and not runtime.serves(index)):
        return None
    assert quantizer.scaling is not None
    scaling, stochastic = quantizer.scaling, quantizer.rounding.mode == "stochastic"
    layout = matrix_layout(x, scaling.block, statistic=scaling.statistic, stochastic=stochastic)
    if layout is None or (what in (GROUPED, BOTH) and (layout.kind, layout.run) != (COLUMNS, _GROUP)):
        return None
    if what == NARROWED and (x.dtype != torch.float32 or scaling.statistic in MOMENTS):
        return None
    if what == GROUPED and (x.dtype != torch.bfloat16 or layout.columns % _GROUP):
        return None
    plain = not stochastic and not rule.masks and scaling.multiplier == 1 and scaling.history is None
    if what == BOTH and not (plain and scaling.block == (1, _GROUP)):
        return None
    block = tuple(size if extent is None else extent for size, extent in zip(x.shape, scaling.block, strict=True))
    return _Plan(quantizer, rule, layout, block, dtype, index, fold, what)


class _Plan:
    """How matrices of one shape and layout are cast under one quantiser.

    Args:
        quantizer: Referenced, so that no other object can take its identity.
        rule: The quantiser as kernels take it.
        layout: How the matrices lie in memory.
        block: Rows and columns of a block.
        dtype: Of what is cast, after what ``what`` does first.
        index: Of the device.
        fold: As in ``cast_scaled``.
        what: ALONE, GROUPED, BOTH or NARROWED.
    """

    def __init__(
        self, quantizer: Quantizer, rule: KernelRule, layout: MatrixLayout, block: tuple[int, ...], dtype: torch.dtype,
        index: int, fold: bool, what: int,
    ) -> None:  # fmt: skip
        assert quantizer.scaling is not None
        self._quantizer, self._scaling, self._rule, self._layout = quantizer, quantizer.scaling, rule, layout
        self._dtype, self._index, self._fold, self._size, self._what = dtype, index, fold, layout.launch, what
        self._block = block[0], block[1]
        parts = min(max(layout.rows * layout.columns // 16384, 1), _PARTS * runtime.multiprocessors(index), _MOST_PARTS)
        self._parts = 1 if quantizer.scaling.statistic in MOMENTS else parts
        extents = (layout.height, layout.width) if layout.kind == TILES else (layout.units, self._parts)
        places = (*map(np.uint64, (layout.rows, layout.columns, *layout.steps)), *map(np.uint32, extents))
        self._rest = *places, rule.rule, rule.grid.parameters, rule.scale_grid
        self._launches: dict[tuple[Any, ...], Callable[..., None]] = {}  # by what a call asks of them
        self._outer = float(np.float32(quantizer.scaling.multiplier)) if fold else 1.0

    def cast(
        self, x: Tensor, quantizer: Quantizer, key: RandomKey | None, delayed: Any, factor: Tensor | None
    ) -> Operand:
        """Compute ``cast_scaled``."""
        values = torch.empty_like(x, dtype=torch.bfloat16)
        scale = torch.empty(self._layout.counts, dtype=torch.float32, device=x.device)
        mask = torch.empty_like(x, dtype=torch.bool) if self._rule.masks else None
        tensors = x, values, scale, mask
        if delayed is not None:
            self._cast_delayed(x, tensors, key, delayed)
        elif self._layout.kind in (TENSOR, LONG_COLUMNS):
            self._launch(key, tensors, self._amaxes_of(x))
        else:
            self._launch(key, tensors, factor)
        return self._operand(values, quantizer, scale.mT if self._layout.transposed else scale, mask)

    def cast_both(self, x: Tensor, quantizer: Quantizer) -> tuple[Operand, Operand]:
        """Compute ``cast_both``; the layout is that of the transpose."""
        rows, columns = (torch.empty_like(x, dtype=torch.bfloat16) for _ in range(2))
        of_rows = torch.empty(x.shape[0], -(-x.shape[1] // _GROUP), dtype=torch.float32, device=x.device)
        of_columns = torch.empty(self._layout.counts, dtype=torch.float32, device=x.device)
        self._launch(None, (x, columns, of_columns, None), of_rows, rows)
        first = self._operand(rows, quantizer, of_rows, None)
        return first, self._operand(columns.mT, quantizer, of_columns.mT, None)

    def _operand(self, values: Tensor, quantizer: Quantizer, scale: Tensor, mask: Tensor | None) -> Operand:
        if not self._fold:
            return Operand(values, quantizer, scale, None, self._block, mask)
        outer = None if self._outer == 1.0 else constant(self._outer, values.device)
        return Operand(values, quantizer, None, outer, self._block, mask)

    def _cast_delayed(self, x: Tensor, tensors: Tensors, key: RandomKey | None, delayed: Any) -> None:
        """Cast under the scale in force, and record the amax of x."""
        memory = vars(delayed).get("memory", delayed)
        remembers, history = memory is delayed, self._scaling.history
        assert history is not None
        if memory.group is not None and (remembers or history.immediate):
            amax = self._amaxes_of(x).amax().view(torch.float32)
            self._launch(key, tensors, delayed.advance(amax).factor, given=True)
            return
        factor = memory.factor
        if factor.device != x.device:
            raise DeviceError(
                f"delayed scaling remembers on {factor.device}, but x is on {x.device}; move the model there"
            )
        if history.immediate:
            in_force = torch.empty((), dtype=torch.float32, device=x.device)
            self._advance(self._amaxes_of(x), memory, in_force, remembers)
            self._launch(key, tensors, in_force, given=True)
        else:
            tops = torch.empty(self._size[0], dtype=torch.int32, device=x.device) if remembers else None
            self._launch(key, tensors, factor, tops, given=True)
            if tops is not None:
                self._advance(tops, memory, None, True)

    def _advance(self, tops: Tensor, memory: Any, in_force: Tensor | None, remembers: bool) -> None:
        """Launch the kernel that records amaxes; in_force: receives the factor of this call, or None."""
        key = memory.top, tops.shape[0], remembers
        launch = self._launches.get(key)
        if launch is None:
            compiled = runtime.kernel("statistic.cu", "advance", self._index)
            rest = np.uint32(tops.shape[0]), history_bytes(self._scaling, memory.top, remembers)
            launch = self._launches[key] = compiled.bound(1024, 5, *rest)
        launch(1, tops, memory.amaxes, memory.factor, memory.calls, in_force)

    def _launch(
        self, key: RandomKey | None, tensors: Tensors, source: Tensor | None = None,
        tops: Tensor | None = None, given: bool = False,
    ) -> None:  # fmt: skip
        """Launch the cast.

        source: Amaxes, numbers of blocks or, with ``given``, a factor. tops: Receives amaxes of parts. A cast along
        both axes of x writes the scales and the values of its rows to these two.
        """
        (grid, threads), key_of = self._size, (given, tops is not None)
        launch = self._launches.get(key_of)
        if launch is None:
            launch = self._launches[key_of] = self._prepared(given, tops is not None)
        if self._layout.words == WORDS_NONE:
            launch(grid, *tensors, source, tops)
        else:
            launch(grid, threads, *tensors, source, tops, *self._rest, draw_of(self._quantizer.rounding, key))

    def _prepared(self, given: bool, records: bool) -> Callable[..., None]:
        """Return the kernel that casts, compiled; without random words a launch that takes a grid and addresses."""
        layout = self._layout
        file, name, defines = variant(
            layout, self._rule, self._dtype, self._fold, self._scaling, given, records, self._what
        )
        compiled = runtime.kernel(file, name, self._index, defines)
        return compiled.bound(self._size[1], 6, *self._rest, NO_DRAW) if layout.words == WORDS_NONE else compiled

    def _amaxes_of(self, x: Tensor) -> Tensor:
        """Return bits of amaxes, int32: of parts of the matrix, or of columns of memory; or those of its mean."""
        if self._scaling.statistic in MOMENTS:
            return mean_of(x, self._scaling.statistic)
        layout, long = self._layout, self._layout.kind == LONG_COLUMNS
        launch = self._launches.get((long,))
        if launch is None:
            sizes = (layout.rows, layout.columns) if long else (layout.rows * layout.columns // 8,)
            name = f"amaxes_of_{'columns' if long else 'parts'}"
            defines = input_macros(self._dtype, self._what == NARROWED)
            compiled = runtime.kernel("statistic.cu", name, self._index, defines)
            launch = self._launches[(long,)] = compiled.bound(512, 2, *map(np.uint64, sizes))
        if long:
            tops = torch.zeros(layout.columns, dtype=torch.int32, device=x.device)
            grid = -(-layout.columns // 256) * -(-layout.rows // 128)
        else:
            tops = torch.empty(self._parts, dtype=torch.int32, device=x.device)
            grid = self._parts
        launch(grid, x, tops)
        return tops


def mean_of(x: Tensor, statistic: str) -> Tensor:
    """Return the mean magnitude (``"mean_abs"``) or the root mean square (``"rms"``) of the finite elements of x.

    The sums are folded sums of float64 (``fmtsim.scaling.blocks``). x is contiguous and not empty.

    Returns:
        Bits of a float32, int32 [1].
    """
    index, defines, squares, total = runtime.device_index(x), input_macros(x.dtype), statistic == "rms", x.numel()
    remaining = max(1 << (total - 1).bit_length(), _LAST) // _FOLDED
    sums = torch.empty(remaining, dtype=torch.float64, device=x.device)
    counts = torch.empty(remaining // _MEAN_THREADS, dtype=torch.int32, device=x.device)
    runtime.kernel("statistic.cu", "fold_elements", index, defines)(
        remaining // _MEAN_THREADS,
        _MEAN_THREADS,
        x,
        sums,
        counts,
        np.uint64(total),
        np.uint64(remaining),
        np.uint32(squares),
    )
    while remaining > _LAST:
        remaining //= _FOLDED
        before, sums = sums, torch.empty(remaining, dtype=torch.float64, device=x.device)
        runtime.kernel("statistic.cu", "fold_sums", index, defines)(
            remaining // _MEAN_THREADS, _MEAN_THREADS, before, sums, np.uint64(remaining)
        )
    mean = torch.empty(1, dtype=torch.int32, device=x.device)
    numbers = map(np.uint32, (counts.numel(), remaining, squares))
    runtime.kernel("statistic.cu", "fold_last", index, defines)(1, 1024, sums, mean, counts, *numbers)
    return mean


def variant(
    layout: MatrixLayout, rule: KernelRule, dtype: torch.dtype, fold: bool, scaling: Scaling, given: bool,
    records: bool, what: int = ALONE,
) -> tuple[str, str, runtime.Defines]:  # fmt: skip
    """Return file, name and macros of the kernel that casts.

    given: under a factor instead of amaxes; records: writing the amaxes of parts; what: what a plan does.
    """
    defines = (*rule.defines(DTYPES[dtype], layout.words, fold), *(FROM_FLOAT if what == NARROWED else ()))
    if layout.kind == TILES:
        return "scaled_tiles.cu", "cast_tiles", (*defines, *macros(CACHED=layout.cached))
    if layout.kind in (COLUMNS, LONG_COLUMNS):
        extra = {GROUPED: {"GROUPED": 1}, BOTH: {"BOTH": 1}}.get(what, {})
        return "scaled_tiles.cu", "cast_columns", (*defines, *macros(RUN=layout.run, **extra))
    source = macros(RUN=layout.run, SOURCE=given, RECORDS=records, MOMENTS=scaling.statistic in MOMENTS)
    return "scaled_rows.cu", "cast_runs", (*defines, *source)


def input_macros(dtype: torch.dtype, narrow: bool = False) -> runtime.Defines:
    """Return the macros of the kernels of amaxes and means; ``narrow``: they read float32."""
    return (*macros(INPUT=DTYPES[dtype]), *(FROM_FLOAT if narrow else ()))
