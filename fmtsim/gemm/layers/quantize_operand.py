# SPDX-License-Identifier: Apache-2.0
"""One operand of a product under a quantiser: transforms, a cast, scale rules, gradient rules.

``quantize_operand`` is the one way there: a GPU's fused kernels where they cover a quantiser, else torch operations
over the casts of any engine.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.casts.ops import cpu_engine, decode, encode, fused_engine, quantize
from fmtsim.casts.profile import quantize_like
from fmtsim.formats.block import Block, BlockFormat, Format, ScaledFormat
from fmtsim.formats.element import FloatFormat, IntFormat, LogFormat
from fmtsim.formats.representable import is_representable
from fmtsim.gemm.products.native import FP8_DTYPES
from fmtsim.gemm.products.operands import own_dtype
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.blocks import block_sizes, statistic
from fmtsim.scaling.history import DelayedScale, FrozenScale, LearningScale, StoredScale
from fmtsim.scaling.scaled_cast import cast, scales, slope, times_blocks, transformed
from fmtsim.scaling.scales import FLT_MIN
from fmtsim.spec.call import OperandFormat
from fmtsim.spec.cast import CastSpec, EncodedParts, RandomKey
from fmtsim.spec.operand import Keys, Operand, block_of, folds, last_cast, multiplied, spread
from fmtsim.spec.quantizer import Clamp, Quantizer, Sparsity, StraightThrough
from fmtsim.support.dispatch import is_bare
from fmtsim.support.errors import ArgumentError
from fmtsim.support.replay.gpu import constant

NO_KEYS = Keys()
_MOST = 4096  # casts that are remembered
_AGAIN = 1 << 40  # how far the keys of a second cast lie from those of the first

Memory = DelayedScale | FrozenScale | StoredScale | None


def quantize_operand(
    t: Tensor, quantizer: Quantizer, keys: Keys = NO_KEYS, state: Memory = None, *, dim: int = -1, folded: bool = False,
    factor: Tensor | None = None, narrow: bool = False,
) -> Operand:  # fmt: skip
    """Quantise a matrix whose products sum over ``dim``, 0 or -1; the result has that axis last, and blocks along it.

    Args:
        t: float16, bfloat16, float32 or float64 (which is rounded to float32 where anything but a cast is asked for).
        quantizer: What to do.
        keys: Random words of elements, by their places in t where a cast is all there is to it, else in the result.
        state: What a scale with a history remembers, or the scales of a stored weight.
        dim: The inner axis.
        folded: Multiply scales into elements: on a GPU where bfloat16 holds the products (``folds``), else those of
            block formats. Units take them apart.
        factor: What t, bfloat16, is multiplied with first (``multiplied``).
        narrow: t is float32, and stands for what torch casts it to in bfloat16; kernels round it as they read.
    """
    if quantizer.source == "stored":
        # 1. elements of a weight that lies on the grid of its scales, up to roundings of its own dtype
        w = t if dim == -1 else t.mT
        if not isinstance(state, StoredScale) or not state.scale.numel():
            raise ArgumentError(
                "the weight has no stored scales; fmtsim.ptq and fmtsim.load_state set those of what calibration ran"
            )
        element, scale = quantizer.format, state.scale
        element = element.element if isinstance(element, BlockFormat) else element  # type: ignore[assignment]
        tensor = state.tensor_scale if state.tensor_scale.numel() else None
        sizes = block_sizes(block_of(quantizer), w.shape)
        scales = spread(scale if tensor is None else scale * tensor, sizes, w.shape)
        spec = _plain_cast(Quantizer(format=element, overflow="saturate"), -1)
        w_q = quantize(torch.div(w.float(), torch.where(scales == 0, FLT_MIN, scales)), spec, torch.float32, None, None)
        dtype = elements_dtype(quantizer, w.dtype, is_on_gpu(w), False)
        return Operand(w_q.to(dtype), quantizer, scale, tensor, sizes)
    if keys is not NO_KEYS and quantizer.then is None:
        # 2. random keys of stochastic casts only: a cast that gets a key rounds stochastically
        rounds = quantizer.rounding.mode == "stochastic"
        rounds_scale = quantizer.scaling is not None and quantizer.scaling.scale_rounding == "stochastic"
        keys = keys._replace(elements=keys.elements if rounds else None, scales=keys.scales if rounds_scale else None)
    # 3. a GPU's fused kernels, which may update a state themselves unless it is being learned
    on_gpu = is_on_gpu(t)
    engine = fused_engine(t) if on_gpu and not quantizer.like else None
    if engine is not None:
        direct = state.direct() if isinstance(state, LearningScale) else state
        usable = direct is not None or not isinstance(state, LearningScale)
        t_q = engine.quantize_operand(t, quantizer, keys, direct, dim, folded, factor, narrow) if usable else None
        if t_q is not None:
            return t_q  # type: ignore[no-any-return]
    # 4. else a cast alone, or torch operations
    t = t.to(torch.bfloat16) if narrow else t
    cast = None
    if factor is None:
        key = id(quantizer), t.dtype, dim, folded, on_gpu  # hashing a quantiser takes longer than all else here
        remembered = _casts.get(key)
        cast = _cast_alone(key, quantizer) if remembered is None else remembered[1]
    t_q = _transformed(t, quantizer, keys, state, dim, folded, factor) if cast is None else _cast(t, cast, keys, dim)
    return _folded(t_q) if on_gpu and folded and t_q.scale is not None and folds(quantizer) else t_q


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the steps behind a sum."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_on_gpu(t: Tensor) -> bool:
    """Return True if a GPU's bfloat16 units may multiply what a tensor becomes."""
    return t.is_cuda and t.dtype != torch.float64


def _transformed(
    t: Tensor, quantizer: Quantizer, keys: Keys, state: Memory, dim: int, folded: bool, factor: Tensor | None
) -> Operand:
    """Multiply, transform and scale a matrix in torch operations, then cast its elements."""
    t, rest, on_gpu = multiplied(t, factor), None, is_on_gpu(t)
    x = t if dim == -1 else t.mT
    for transform in quantizer.transforms:
        x, cut = transformed(x, transform, keys.signs)
        rest = cut if cut is not None else rest
    if quantizer.then is not None:
        # two casts, each with random keys of its own
        first = quantize_operand(x, _first(quantizer), keys, state, folded=folded)
        bare = first.scale is first.tensor_scale is None and first.elements.dtype == torch.bfloat16  # values already
        elements, scales = (key and RandomKey(key.seed, key.offset + _AGAIN) for key in keys[:2])
        again = keys._replace(elements=elements, scales=scales)
        values = first.elements if bare else dequantize(first, torch.float32)
        second = quantize_operand(values, quantizer.then, again, folded=folded)
        operand = second._replace(quantizer=quantizer, slope=first.slope)
    elif quantizer.like:
        values = quantize_like(x, quantizer.format, quantizer.like, out_dtype=wide_dtype(x.dtype))
        operand = Operand(values, quantizer)
    elif quantizer.scaling is not None:
        operand = _scaled(x, quantizer, keys, state, folded, on_gpu)
    else:
        operand = _cast(x, _resolve_cast(quantizer, x.dtype, -1, folded, on_gpu), keys, -1)
    return operand._replace(rest=rest)


@lru_cache(maxsize=256)
def _first(quantizer: Quantizer) -> Quantizer:
    """Return the first cast of a quantiser that casts twice."""
    return replace(quantizer, transforms=(), then=None)


class _Cast(NamedTuple):
    """A cast without a scale rule, resolved for matrices of one dtype.

    Attributes:
        quantizer: The quantiser.
        spec: The cast; None where it changes nothing.
        dtype: Of the elements.
        element: Their format, where the scales of its blocks stay beside them.
        block: Rows and columns of those.
        codes: The float8 dtype whose bits the codes of that format are, None where there is none.
    """

    quantizer: Quantizer
    spec: CastSpec | None
    dtype: torch.dtype
    element: OperandFormat | None = None
    block: Block = (1, 1)
    codes: torch.dtype | None = None


_casts: dict[tuple[Any, ...], tuple[Quantizer, _Cast | None]] = {}  # an entry keeps the quantiser of its id alive


def _cast_alone(key: tuple[Any, ...], quantizer: Quantizer) -> _Cast | None:
    """Return ``_cast_of`` of a quantiser that only casts, else None; cache the answer by its key."""
    if len(_casts) >= _MOST:
        _casts.clear()
    cast = _resolve_cast(quantizer, *key[1:]) if quantizer.is_cast else None
    _casts[key] = quantizer, cast
    return cast


@lru_cache(maxsize=4096)
def _resolve_cast(quantizer: Quantizer, dtype: torch.dtype, dim: int, folded: bool, on_gpu: bool) -> _Cast:
    """Resolve the cast of a quantiser without a scale rule for matrices of a dtype."""
    fmt = quantizer.format
    overflow = quantizer.overflow or (fmt and fmt.default_overflow)
    # the tensor's own dtype already: nothing to do unless infinities saturate or the result is folded
    is_own_dtype = isinstance(fmt, FloatFormat) and own_dtype(fmt) == dtype and overflow == "ieee"
    if fmt is None or (is_own_dtype and not folded):  # a cast to the tensor's own dtype, infinities included
        return _Cast(quantizer, None, dtype)
    cast_dtype = elements_dtype(quantizer, dtype, on_gpu, folded)
    cast = _Cast(quantizer, _plain_cast(quantizer, -1 if dim == -1 else -2), cast_dtype)
    if keeps_scales(quantizer, folded, on_gpu):
        assert isinstance(fmt, BlockFormat)
        codes = own_dtype(fmt.element)  # type: ignore[arg-type]
        codes = codes if codes in FP8_DTYPES else None
        cast = cast._replace(element=fmt.element, block=fmt.block, codes=codes)  # type: ignore[arg-type]
    return cast


def _cast(t: Tensor, cast: _Cast, keys: Keys, dim: int) -> Operand:
    """Cast a matrix without a scale rule; random words follow the positions in t."""
    quantizer, spec, dtype, element, block, codes = cast
    if spec is None:
        return Operand(t if dim == -1 else t.mT, quantizer)
    if element is not None:
        parts = encode(t, spec, keys.elements)
        x = _elements(parts, element, dtype) if codes is None else parts.codes.view(codes).to(dtype)
        x = x if dim == -1 else x.mT
        sizes = block_sizes(block, x.shape) if None in block else block
        return Operand(x, quantizer, parts.scales, parts.tensor_scale, sizes)  # type: ignore[arg-type]
    values = quantize(t, spec, dtype if dtype.itemsize > 1 else torch.float32, keys.elements, None)
    return Operand((values if dim == -1 else values.mT).to(dtype), quantizer)  # on its grid: nothing is rounded


@lru_cache(maxsize=4096)
def _plain_cast(quantizer: Quantizer, dim: int) -> CastSpec:
    """Return a plain cast along a dimension of a matrix."""
    fmt = quantizer.format
    assert fmt is not None
    overflow = quantizer.overflow or fmt.default_overflow
    return CastSpec(format=fmt, rounding=quantizer.rounding, overflow=overflow, dim=dim)


def _elements(parts: EncodedParts, element: OperandFormat, dtype: torch.dtype) -> Tensor:
    """Return the values of codes in a dtype that holds them."""
    spec = CastSpec(format=element, rounding=Rounding(), overflow=element.default_overflow)
    return decode(EncodedParts(parts.codes), spec, torch.float32).to(dtype)


@lru_cache(maxsize=256)
def holder(fmt: Format) -> torch.dtype:
    """Return the smallest dtype of engines that holds a float format's values; float32 for others."""
    if not isinstance(fmt, FloatFormat):
        return torch.float32
    fmt_dtype = own_dtype(fmt)
    if fmt_dtype in (torch.bfloat16, torch.float16, torch.float64, *FP8_DTYPES):
        return fmt_dtype
    return torch.float8_e4m3fn if is_representable(fmt, torch.float8_e4m3fn) else torch.float32


@lru_cache(maxsize=4096)
def elements_dtype(quantizer: Quantizer, dtype: torch.dtype, on_gpu: bool, folded: bool) -> torch.dtype:
    """Return the dtype of the elements that ``quantize_operand`` makes of a tensor of a dtype.

    On a GPU it is bfloat16 where that holds them, but for those of plain casts for a unit.
    """
    last = last_cast(quantizer)
    if last.like:
        return wide_dtype(dtype)
    fmt, only_cast = last.format, not quantizer.transforms and quantizer.then is None and quantizer.scaling is None
    if fmt is None:
        in_dtype = all(isinstance(t, Clamp | Sparsity) for t in quantizer.transforms)
        keeps = only_cast or (quantizer.then is None and in_dtype)
        return dtype if keeps else torch.float32
    # a GPU's 16-bit units multiply bfloat16
    if on_gpu and is_bfloat16(last, folded):
        return torch.bfloat16
    # elements alone, in the smallest dtype of engines that holds them
    if last.scaling is not None or keeps_scales(last, folded, on_gpu):
        return holder(fmt.element if isinstance(fmt, BlockFormat) else fmt)  # type: ignore[arg-type]
    wide = torch.promote_types(dtype, torch.float32) if only_cast else torch.float32
    return holder(fmt) if isinstance(fmt, FloatFormat) and not folded else wide


def keeps_scales(quantizer: Quantizer, folded: bool, on_gpu: bool) -> bool:
    """Return True if a plain cast leaves the scales of a block format beside its elements."""
    fmt = quantizer.format
    if not isinstance(fmt, BlockFormat) or fmt.zero_point or fmt.alternative:
        return False
    if fmt.scaling.level_block != (None, None):  # scales of rows follow the sums of a unit
        return not folded and fmt.scaling.level_block == (1, None) and isinstance(fmt.element, FloatFormat)
    if isinstance(fmt.element, IntFormat | LogFormat):
        return not folded
    return isinstance(fmt.element, FloatFormat) and (on_gpu or not folded)


def _scaled(x: Tensor, quantizer: Quantizer, keys: Keys, state: Memory, folded: bool, on_gpu: bool) -> Operand:
    element, scaling = quantizer.format, quantizer.scaling
    assert scaling is not None and element is not None and not isinstance(element, ScaledFormat)
    scale = None
    if scaling.history is not None:
        if state is None or isinstance(state, StoredScale):
            raise ArgumentError(
                "delayed scaling needs a state to remember in; run the layer inside a model that fmtsim.convert made"
            )
        # 1. delayed scaling: the scale follows from earlier steps, the statistic of x joins the history
        nothing = torch.zeros((), device=x.device)  # an empty batch counts as one of zeros
        scale = state.advance(statistic(x, (None, None), "amax") if x.numel() else nothing)
        if scaling.tensor is not None:  # what is remembered is the scale of the tensor: blocks have theirs from x
            factor = scale.factor.reshape(())
            scale = scales(statistic(x, scaling.block, "amax"), scaling, float(element.max), fixed_factor=factor)
    overflow = quantizer.overflow or element.default_overflow
    sizes = block_sizes(scaling.block, x.shape)
    # 2. scales of the blocks, then elements under them
    dtype = torch.bfloat16 if on_gpu and is_bfloat16(quantizer, folded) else holder(element)  # nothing is rounded
    straight = isinstance(quantizer.gradient, StraightThrough)
    result = cast(x, element, scaling, quantizer.rounding, overflow, keys[:2], scale, dtype, keeps_scaled=not straight)
    # 3. what the gradient of each element is multiplied with; None passes it straight through
    slopes = None if straight else slope(quantizer.gradient, result, element)
    return Operand(result.elements, quantizer, result.scales.scale, result.scales.tensor, sizes, slopes)


def saved_operand(saved: tuple[Tensor | None, ...], quantizer: Quantizer) -> Operand:
    """Return the operand whose elements, scale and scale of the tensor were saved."""
    elements, scale, tensor_scale = saved[:3]
    assert elements is not None
    return Operand(elements, quantizer, scale, tensor_scale, block_sizes(block_of(quantizer), elements.shape))


def dequantize(x: Operand, dtype: torch.dtype, buffer: str | None = None) -> Tensor:
    """Return ``x.values(dtype)``, by a CPU kernel if it covers x, in memory by the name ``buffer``, which is reused."""
    if dtype == torch.float64 or not x.elements.is_cpu or x.has_row_level:
        return x.values(dtype)
    if x.scale is not None:
        return times_blocks(x.elements, x.scale, x.block, tensor_scale=x.tensor_scale, buffer=buffer)
    y = widened(x.elements, dtype, buffer)
    return y if x.tensor_scale is None else y * x.tensor_scale


def widened(x: Tensor, dtype: torch.dtype, buffer: str | None = None) -> Tensor:
    """Return elements in a wider dtype, likewise; torch's own conversion of float8 is slow on a CPU."""
    engine = cpu_engine(x) if dtype == torch.float32 and x.dtype in FP8_DTYPES and x.dim() == 2 and x.numel() else None
    return x.to(dtype) if engine is None else engine.widened(x, buffer)


def _folded(operand: Operand) -> Operand:
    """Return an operand with the scales of its blocks in its elements, which bfloat16 holds (``folds``).

    A rule's multiplier is left to ``tensor_scale``.
    """
    operand = multiplier_apart(operand)
    assert operand.scale is not None
    elements = operand.elements.float() * spread(operand.scale, operand.block, operand.elements.shape)
    return operand._replace(elements=elements.to(torch.bfloat16), scale=None)


def multiplier_apart(operand: Operand) -> Operand:
    """Return an operand whose rule's multiplier is its ``tensor_scale``: scales of blocks are then those of units."""
    scaling = last_cast(operand.quantizer).scaling
    if operand.scale is None or scaling is None or scaling.multiplier == 1:
        return operand
    times, device = scaling.multiplier, operand.scale.device
    factor = (
        constant(times, device) if is_bare(operand.scale) else torch.full((), times, dtype=torch.float32, device=device)
    )
    return operand._replace(scale=operand.scale / factor, tensor_scale=factor)  # a power of two times it: exact


def is_bfloat16(last: Quantizer, folded: bool) -> bool:
    """Return True if the elements of a cast are bfloat16 on a GPU."""
    fmt = last.format
    if fmt is None or (last.scaling is None and not folded):
        return False
    apart = isinstance(fmt, BlockFormat) and isinstance(fmt.element, FloatFormat)
    return is_representable(fmt.element if apart else fmt, torch.bfloat16)  # type: ignore[union-attr]


def has_both(t: Tensor, quantizer: Quantizer) -> bool:
    """Return True if a GPU's kernels quantise a matrix along both its axes from one read."""
    fmt, scaling = quantizer.format, quantizer.scaling
    if scaling is not None:  # rules of other blocks have no such kernel
        engine = fused_engine(t) if scaling.block == (1, 128) and is_on_gpu(t) else None
        return engine is not None and engine.has_both(t, quantizer)
    if not quantizer.is_cast or not isinstance(fmt, BlockFormat) or not is_on_gpu(t):
        return False
    return isinstance(fmt.element, FloatFormat) and folds(quantizer) and fused_engine(t) is not None


def quantize_both(t: Tensor, quantizer: Quantizer, across: Any, down: Any) -> tuple[Operand, Operand]:
    """Quantise a matrix that ``has_both`` for sums over its last and over its first dimension, scales folded in.

    Those that bfloat16 does not take in lie beside.
    """
    engine = fused_engine(t)
    both = None if engine is None else engine.quantize_both(t, quantizer, (across, down))
    if both is not None:
        return both  # type: ignore[no-any-return]
    first, second = (quantize_operand(t, quantizer, Keys(key), dim=dim, folded=True)
                     for key, dim in ((across, -1), (down, 0)))  # fmt: skip
    return first, second
