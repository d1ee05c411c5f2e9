"""How matrices of one shape are cast under one quantiser with a scale rule: launches, worked out once."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.parameters import draw_of
from fmtsim.cuda.cast.scaled_moments import mean_of
from fmtsim.cuda.cast.scaled_rules import MOMENTS, Way, history_bytes, multiplier_of
from fmtsim.cuda.cast.scaled_shape import LONG_COLUMNS, RUNS, TILES, WHOLE, WORDS_NONE, Shape
from fmtsim.cuda.runtime import program as runtime
from fmtsim.errors import DeviceError
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.quantizer import Quantizer
from fmtsim.spec.scaling import Scaling

INPUTS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NO_DRAW: Final = draw_of(Rounding(), None)
_FILES: Final = {WHOLE: "runs", RUNS: "runs", TILES: "tiles"}
_PARTS = 4  # blocks of threads a multiprocessor that find amaxes
_MOST_PARTS = 640  # of which scaled_runs.cu takes the amaxes


class Made(NamedTuple):
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


class Plan:
    """How matrices of one shape and layout are cast under one quantiser.

    Args:
        quantizer: Kept, so that no other object can take its identity.
        way: What it is to the kernels.
        shape: How the matrices lie in memory.
        dtype: Theirs.
        index: Of the device.
        fold: As in ``cast_scaled``.
    """

    def __init__(
        self, quantizer: Quantizer, way: Way, shape: Shape, dtype: torch.dtype, index: int, fold: bool
    ) -> None:
        assert quantizer.scaling is not None
        self._quantizer, self._scaling, self._way, self._shape = quantizer, quantizer.scaling, way, shape
        self._dtype, self._index, self._fold = dtype, index, fold
        self._counts, self._grid, self._drawn = shape.counts, shape.launch[0], shape.words != WORDS_NONE
        self._launches: dict[tuple[bool, bool], Callable[..., None]] = {}
        parts = min(max(shape.rows * shape.columns // 16384, 1), _PARTS * runtime.multiprocessors(index), _MOST_PARTS)
        self._parts = 1 if quantizer.scaling.statistic in MOMENTS else parts
        self._advances: dict[tuple[float, int, bool], Callable[..., None]] = {}
        self._amaxes: Callable[..., None] | None = None
        self._tensor: Tensor | None = None
        self._outer = multiplier_of(quantizer.scaling) if fold else 1.0

    def cast(self, x: Tensor, key: RandomKey | None, delayed: Memory | Frozen | None) -> Made:
        """Do what ``cast_scaled`` does."""
        values = torch.empty_like(x, dtype=torch.bfloat16)
        scale = torch.empty(self._counts, dtype=torch.float32, device=x.device)
        mask = torch.empty_like(x, dtype=torch.bool) if self._way.masks else None
        addresses = x.data_ptr(), values.data_ptr(), scale.data_ptr(), 0 if mask is None else mask.data_ptr()
        if delayed is not None:
            self._remembered(x, addresses, key, delayed)
        elif self._shape.kind in (WHOLE, LONG_COLUMNS):
            tops = self._amaxes_of(x)
            self._launch(False, False, key, *addresses, tops.data_ptr())
        else:
            self._launch(False, False, key, *addresses)
        outer = None if self._outer == 1.0 else self._constant(x.device)
        return Made(values, scale.mT if self._shape.turned else scale, outer, mask)

    def _constant(self, device: torch.device) -> Tensor:
        """Return the multiplier; what a graph captures is not there before it runs, and is not kept."""
        if self._tensor is not None:
            return self._tensor
        constant = torch.full((), self._outer, dtype=torch.float32, device=device)
        if not torch.cuda.is_current_stream_capturing():
            self._tensor = constant
        return constant

    def _remembered(
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
        """Launch the kernel of the memory; in_force: where the factor of this call is wanted, or 0."""
        known = memory.top, tops.shape[0], remembers
        launch = self._advances.get(known)
        if launch is None:
            found = runtime.kernel("scaled_history.cu", "advance", self._index)
            rest = np.uint32(tops.shape[0]), history_bytes(self._scaling, memory.top, remembers)
            launch = self._advances[known] = found.bound(1024, 5, *rest)
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
        shape, way = self._shape, self._way
        file, name, defines = variant(shape, way, INPUTS[self._dtype], self._fold, self._scaling, given, records)
        found = runtime.kernel(file, name, self._index, defines)
        memory = (*map(np.uint64, (shape.rows, shape.columns, *shape.steps)),)
        rest: tuple[Any, ...] = memory
        if shape.kind in (WHOLE, RUNS):
            rest = *memory, np.uint32(shape.units), np.uint32(self._parts)
        elif shape.kind == TILES:
            rest = *memory, np.uint32(shape.height), np.uint32(shape.width)
        rest = *rest, way.rule, way.grid.parameters, way.scale_grid
        pointers = {WHOLE: 6, RUNS: 6, TILES: 4}.get(shape.kind, 5)
        threads = shape.launch[1]

        def padded(addresses: tuple[int, ...]) -> tuple[int, ...]:
            return addresses + (0,) * (pointers - len(addresses))

        if self._drawn:
            return lambda grid, *addresses, draw: found(grid, threads, *map(np.uint64, padded(addresses)), *rest, draw)
        bound = found.bound(threads, pointers, *rest, _NO_DRAW)
        return lambda grid, *addresses: bound(grid, *padded(addresses))

    def _amaxes_of(self, x: Tensor) -> Tensor:
        """Return bits of amaxes, int32: of parts of the matrix, or of columns of memory; or those of its mean."""
        if self._scaling.statistic in MOMENTS:
            return mean_of(x, self._scaling.statistic, INPUTS[self._dtype])
        shape = self._shape
        long = shape.kind == LONG_COLUMNS
        if self._amaxes is None:
            file, name, defines = amax_variant(self._dtype, long)
            found = runtime.kernel(file, name, self._index, defines)
            sizes: tuple[Any, ...] = (np.uint64(shape.rows * shape.columns // 8),)
            if long:
                sizes = np.uint64(shape.rows), np.uint64(shape.columns)
            self._amaxes = found.bound(512, 2, *sizes)
        if long:
            tops = torch.zeros(shape.columns, dtype=torch.int32, device=x.device)
            grid = -(-shape.columns // 256) * -(-shape.rows // 128)
        else:
            tops = torch.empty(self._parts, dtype=torch.int32, device=x.device)
            grid = self._parts
        self._amaxes(grid, x.data_ptr(), tops.data_ptr())
        return tops


def variant(
    shape: Shape, way: Way, dtype: int, fold: bool, scaling: Scaling, given: bool, records: bool
) -> tuple[str, str, runtime.Defines]:
    """Return file, name and macros of the kernel that casts."""
    defines = way.defines(dtype, shape.words, fold)
    file = _FILES.get(shape.kind, "columns")
    options = {"HELD": shape.held} if shape.kind == TILES else {"RUN": shape.run}
    if file == "runs":
        options |= {"SOURCE": int(given), "RECORDS": int(records), "MOMENTS": int(scaling.statistic in MOMENTS)}
    return f"scaled_{file}.cu", f"cast_{file}", (*defines, *((name, str(value)) for name, value in options.items()))


def amax_variant(dtype: torch.dtype, columns: bool) -> tuple[str, str, runtime.Defines]:
    """Return file, name and macros of the kernel that finds amaxes, of columns or of parts."""
    return "scaled_amax.cu", f"amaxes_of_{'columns' if columns else 'parts'}", (("INPUT", str(INPUTS[dtype])),)
