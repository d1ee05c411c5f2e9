"""One operand of a product under a quantiser: transforms, a cast, scale rules, gradient rules.

``quantize_operand`` is the one way there: a GPU's fused kernels where they cover a quantiser, else torch operations
over the casts of any engine. A compiler sees one operator that it never looks into, so that nothing is fused into steps
whose roundings count; what that operator returns follows from records (``layout_of``).
"""

import hashlib
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.errors import ArgumentError
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import is_representable
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.layers.keys import find_layer
from fmtsim.gemm.products.operands import own_dtype
from fmtsim.ops import Key, decode, encode, fused_engine, key_tensor, quantize_plain, random_key
from fmtsim.quantize import quantize
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.cast import cast
from fmtsim.scaling.hadamard import hadamard
from fmtsim.scaling.history import DelayedScale, FrozenScale, LearningScale
from fmtsim.scaling.signs import random_signs
from fmtsim.scaling.slope import slope
from fmtsim.scaling.statistics import block_sizes, statistic
from fmtsim.spec.cast import CastSpec, EncodedParts, RandomKey
from fmtsim.spec.gradient import Differentiable, StraightThrough
from fmtsim.spec.operand import Keys, Operand, block_of, folds, last_cast, spread
from fmtsim.spec.quantizer import Quantizer
from fmtsim.spec.transform import Clamp, Hadamard, Transform

NO_KEYS = Keys()
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_AGAIN = 1 << 40  # how far the keys of a second cast lie from those of the first
_MOST = 4096  # quantisers that are remembered
_quantizers: dict[str, Quantizer] = {}
_casts: dict[int, tuple[Quantizer, tuple[str, str]]] = {}

Memory = DelayedScale | FrozenScale | None


def quantize_operand(
    t: Tensor,
    quantizer: Quantizer,
    keys: Keys = NO_KEYS,
    state: Memory = None,
    *,
    dim: int = -1,
    folded: bool = False,
    factor: Tensor | None = None,
) -> Operand:
    """Quantise a matrix whose products sum over ``dim``, 0 or -1; the result has that axis last, and blocks along it.

    Args:
        t: float16, bfloat16, float32 or float64 (which is rounded to float32 where anything but a cast is asked for).
        quantizer: What to do.
        keys: Random words of elements, by their places in t where a cast is all there is to it, else in the result.
        state: What a scale with a history remembers.
        dim: The inner axis.
        folded: Multiply scales into elements: on a GPU where bfloat16 holds the products (``folds``), else those of
            block formats. Units take them apart.
        factor: float32, 0-d: what t, bfloat16, is multiplied with first; each product is rounded to float32.
    """
    on_gpu = is_on_gpu(t)
    engine = fused_engine(t) if on_gpu else None
    if engine is not None:
        usable, direct = _direct(state)
        made = engine.quantize_operand(t, quantizer, keys, direct, dim, folded, factor) if usable else None
        if made is not None:
            return made  # type: ignore[no-any-return]
    made = _quantized(t, quantizer, keys, state, dim, folded, factor)
    return _settled(made, folded) if on_gpu else made


def is_untouched(quantizer: Quantizer) -> bool:
    """Say whether a quantiser leaves a tensor as it is."""
    return quantizer.format is None and not quantizer.transforms and quantizer.then is None


def is_on_gpu(t: Tensor) -> bool:
    """Say whether a GPU's bfloat16 units may multiply what a tensor becomes."""
    return t.is_cuda and t.dtype != torch.float64


def _direct(state: Memory) -> tuple[bool, Memory]:
    """Return whether kernels may work on a state themselves, and what they then work on."""
    if not isinstance(state, LearningScale):
        return True, state
    found = state.direct()
    return found is not None, found


def _quantized(
    t: Tensor, quantizer: Quantizer, keys: Keys, state: Memory, dim: int, folded: bool, factor: Tensor | None
) -> Operand:
    if quantizer.is_cast and factor is None:
        return _cast(t, quantizer, keys.elements, dim, folded)
    x, rest = t if dim == -1 else t.mT, None
    x = x if factor is None else x.float() * factor
    for transform in quantizer.transforms:
        x, cut = transformed(x, transform, keys.signs)
        rest = cut if cut is not None else rest
    if quantizer.then is not None:
        return _cast_twice(x, quantizer, keys, state, folded)._replace(rest=rest)
    if quantizer.scaling is not None:
        return _scaled(x, quantizer, keys, state)._replace(rest=rest)
    return _cast(x, quantizer, keys.elements, -1, folded)._replace(rest=rest)


def _cast_twice(x: Tensor, quantizer: Quantizer, keys: Keys, state: Memory, folded: bool) -> Operand:
    assert quantizer.then is not None
    made = quantize_operand(x, _first(quantizer), keys, state, folded=folded)
    bare = made.scale is made.tensor_scale is None and made.elements.dtype == torch.bfloat16  # values already
    elements, scales = (key and RandomKey(key.seed, key.offset + _AGAIN) for key in keys[:2])
    again = keys._replace(elements=elements, scales=scales)
    values = made.elements if bare else made.values(torch.float32)
    second = quantize_operand(values, quantizer.then, again, folded=folded)
    return second._replace(quantizer=quantizer, slope=made.slope)


@lru_cache(maxsize=256)
def _first(quantizer: Quantizer) -> Quantizer:
    """Return the first cast of a quantiser that casts twice."""
    return replace(quantizer, transforms=(), then=None)


def transformed(x: Tensor, transform: Transform, signs: Any) -> tuple[Tensor, Tensor | None]:
    """Return a matrix after a transform, and what was cut off it."""
    if isinstance(transform, Clamp):
        return _clamped(x.float(), transform)
    y = rotated(x, transform, signs)
    if transform.rounded is not None:
        y = quantize(y, transform.rounded, out_dtype=torch.float32)
    return y, None


def rotated(x: Tensor, transform: Hadamard, signs: Any, *, inverse: bool = False) -> Tensor:
    """Rotate a matrix along the axis that a transform names, or back; ``signs`` is the key of random ones."""
    dim = -1 if transform.axis == "inner" else 0
    size = transform.size or x.shape[dim]
    mask = random_signs(size, signs) if transform.signs == "random" else transform.signs
    return hadamard(x, size, mask, dim=dim, inverse=inverse)


def _clamped(x: Tensor, transform: Clamp) -> tuple[Tensor, Tensor | None]:
    """Clamp to quantiles, elements of the sorted magnitudes' places ``int((1 - level) n)`` and ``int(level n)``."""
    rows = x.reshape(1, -1) if transform.per == "tensor" else x
    n = rows.shape[1]
    places = [min(max(int(part * n), 0), n - 1) for part in (1 - transform.level, transform.level)]
    ordered = rows.sort(dim=1).values
    low, high = (ordered[:, place : place + 1] for place in places)
    y = rows.clamp(low, high).reshape(x.shape)
    return y, x - y if transform.compensate else None


def _cast(t: Tensor, quantizer: Quantizer, key: RandomKey | None, dim: int, folded: bool) -> Operand:
    """Cast a matrix without a scale rule, words drawn by the places of t."""
    fmt = quantizer.format
    if fmt is None:
        return Operand(t if dim == -1 else t.mT, quantizer)
    text = _cast_texts(quantizer)[0 if dim == -1 else 1]
    if keeps_scales(quantizer, folded, is_on_gpu(t)):
        assert isinstance(fmt, BlockFormat)
        parts = encode(t, text, key)
        x = _elements(parts, fmt.element) if dim == -1 else _elements(parts, fmt.element).mT  # type: ignore[arg-type]
        return Operand(x, quantizer, parts.scales, parts.tensor_scale, block_sizes(fmt.block, x.shape))
    wide = torch.float64 if t.dtype == torch.float64 else torch.float32
    dtype = wide if folded or not isinstance(fmt, FloatFormat) else holder(fmt)
    values = quantize_plain(t, text, wide if dtype.itemsize == 1 else dtype, key)
    return Operand((values if dim == -1 else values.mT).to(dtype), quantizer)  # on its grid: nothing is rounded


def _cast_texts(quantizer: Quantizer) -> tuple[str, str]:
    """Return a plain cast along the last and along the first dimension of a matrix as JSON, found by identity."""
    found = _casts.get(id(quantizer))
    if found is None:
        if len(_casts) >= _MOST:
            _casts.clear()
        fmt = quantizer.format
        assert fmt is not None
        overflow = quantizer.overflow or fmt.default_overflow
        specs = (CastSpec(format=fmt, rounding=quantizer.rounding, overflow=overflow, dim=dim) for dim in (-1, -2))
        across, down = (spec.to_json() for spec in specs)
        found = _casts[id(quantizer)] = quantizer, (across, down)  # alive as long as its identity is a key
    return found[1]


def _elements(parts: EncodedParts, element: FloatFormat) -> Tensor:
    """Return the values of codes, in the dtype that holds them."""
    dtype = holder(element)
    if own_dtype(element) in _FP8:
        return parts.codes.view(dtype)
    spec = CastSpec(format=element, rounding=Rounding(), overflow=element.default_overflow)
    return decode(EncodedParts(parts.codes), spec, torch.float32).to(dtype)


@lru_cache(maxsize=256)
def holder(fmt: FloatFormat) -> torch.dtype:
    """Return the smallest dtype of engines that holds a format's values."""
    own = own_dtype(fmt)
    if own in (torch.bfloat16, torch.float16, torch.float64, *_FP8):
        return own
    wide = get_format("e4m3")
    assert isinstance(wide, FloatFormat)
    small = fmt.mantissa_bits <= wide.mantissa_bits and fmt.max <= wide.max and fmt.min_subnormal >= wide.min_subnormal
    return torch.float8_e4m3fn if small and not fmt.infinities else torch.float32


def keeps_scales(quantizer: Quantizer, folded: bool, on_gpu: bool) -> bool:
    """Say whether a plain cast leaves the scales of a block format beside its elements."""
    fmt = quantizer.format
    return isinstance(fmt, BlockFormat) and isinstance(fmt.element, FloatFormat) and (on_gpu or not folded)


def _scaled(x: Tensor, quantizer: Quantizer, keys: Keys, state: Memory) -> Operand:
    element, scaling = quantizer.format, quantizer.scaling
    assert scaling is not None and element is not None and not isinstance(element, BlockFormat | LogTileFormat)
    given = None
    if scaling.history is not None:
        if state is None:
            raise ArgumentError(
                "delayed scaling needs a state to remember in; run the layer inside a model that fmtsim.convert made"
            )
        given = state.advance(statistic(x, (None, None), "amax"))
    overflow = quantizer.overflow or element.default_overflow
    made = cast(x, element, scaling, quantizer.rounding, overflow, keys[:2], given)
    dtype = holder(element) if isinstance(element, FloatFormat) else torch.float32
    return Operand(
        made.elements.to(dtype),  # on the dtype's grid: nothing is rounded
        quantizer,
        made.scales.scale,
        made.scales.tensor,
        block_sizes(scaling.block, x.shape),
        slope(quantizer.gradient, made, element),
    )


def _settled(made: Operand, folded: bool) -> Operand:
    """Return an operand as every way of making it leaves it on a GPU.

    Elements are bfloat16 where that holds them, but those of plain casts for a unit; ``folded``, they have the scales
    of their blocks in them where it holds the products (``folds``), and a rule's multiplier is left to
    ``tensor_scale``.
    """
    last = last_cast(made.quantizer)
    if not _is_bfloat16(last, folded):
        return made
    made = made._replace(elements=made.elements.to(torch.bfloat16))  # on its grid: nothing is rounded
    if made.scale is None or not folded or not folds(last):
        return made
    scale, times = made.scale, 1.0 if last.scaling is None else last.scaling.multiplier
    if times != 1:
        constant = _constant(times, scale.device)
        scale, made = scale / constant, made._replace(tensor_scale=constant)  # a power of two times it: exact
    elements = made.elements.float() * spread(scale, made.block, made.elements.shape)
    return made._replace(elements=elements.to(torch.bfloat16), scale=None)


def _is_bfloat16(last: Quantizer, folded: bool) -> bool:
    """Say whether the elements of a cast are bfloat16 on a GPU."""
    fmt = last.format
    if fmt is None or (last.scaling is None and not folded):
        return False
    apart = isinstance(fmt, BlockFormat) and isinstance(fmt.element, FloatFormat)
    return is_representable(fmt.element if apart else fmt, torch.bfloat16)  # type: ignore[union-attr]


@lru_cache(maxsize=64)
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def has_both(t: Tensor, quantizer: Quantizer) -> bool:
    """Say whether a GPU's kernels quantise a matrix along both its axes from one read."""
    fmt = quantizer.format
    if not quantizer.is_cast or not isinstance(fmt, BlockFormat) or not is_on_gpu(t):
        return False
    return isinstance(fmt.element, FloatFormat) and folds(quantizer) and fused_engine(t) is not None


def quantize_both(t: Tensor, quantizer: Quantizer, across: Any, down: Any) -> tuple[Operand, Operand]:
    """Quantise a matrix that ``has_both`` for sums over its last and over its first dimension, scales folded in."""
    engine = fused_engine(t)
    both = None if engine is None else engine.quantize_both(t, quantizer, (across, down))
    if both is not None:
        return both  # type: ignore[no-any-return]
    first, second = (quantize_operand(t, quantizer, Keys(key), dim=dim, folded=True)
                     for key, dim in ((across, -1), (down, 0)))  # fmt: skip
    return first, second


class Part(NamedTuple):
    """A tensor of an operand: its dtype, and whether it is the transpose of a contiguous matrix."""

    dtype: torch.dtype
    transposed: bool


@lru_cache(maxsize=4096)
def layout_of(quantizer: Quantizer, dtype: torch.dtype, on_gpu: bool, dim: int, folded: bool) -> dict[str, Part]:
    """Return the tensors that ``quantize_operand`` makes of one of a dtype, by their names in Operand."""
    last, turns = last_cast(quantizer), dim == 0 and (on_gpu or not quantizer.transforms)
    fmt, scaling, wide = last.format, last.scaling, torch.float32
    if not quantizer.transforms and quantizer.then is None and quantizer.scaling is None:
        wide = torch.promote_types(dtype, torch.float32)
    keeps, folds_here = keeps_scales(last, folded, on_gpu), on_gpu and folded and folds(last)
    if fmt is None:
        elements = dtype if is_untouched(quantizer) else torch.float32
    elif on_gpu and _is_bfloat16(last, folded):
        elements = torch.bfloat16
    elif scaling is not None:
        elements = holder(fmt) if isinstance(fmt, FloatFormat) else torch.float32
    elif keeps:
        assert isinstance(fmt, BlockFormat) and isinstance(fmt.element, FloatFormat)
        elements = holder(fmt.element)
    else:
        elements = wide if folded or not isinstance(fmt, FloatFormat) else holder(fmt)
    found = {"elements": Part(elements, turns)}
    if (scaling is not None or keeps) and not folds_here:
        found["scale"] = Part(torch.float32, turns)
    two_level = fmt.tensor_scale if keeps and isinstance(fmt, BlockFormat) else scaling and scaling.tensor
    if two_level or (folds_here and scaling is not None and scaling.multiplier != 1):
        found["tensor_scale"] = Part(torch.float32, False)
    if not isinstance(quantizer.gradient, StraightThrough):
        smooth = isinstance(quantizer.gradient, Differentiable)
        found["slope"] = Part(torch.float32 if smooth else torch.bool, turns)
    if any(isinstance(transform, Clamp) and transform.compensate for transform in quantizer.transforms):
        found["rest"] = Part(torch.float32, turns)
    return found


def traced_operand(
    t: Tensor,
    quantizer: Quantizer,
    keys: tuple[Key, Key, Key],
    source: tuple[str, str],
    *,
    dim: int,
    folded: bool,
    factor: Tensor | None,
    passes: Tensor | None = None,
) -> Operand:
    """Do what ``quantize_operand`` does as one node of a graph.

    Args:
        keys: Of elements, scales and signs.
        source: The layer's name and the operand's, where scales are remembered or passes are counted; else empty.
        passes: The number of the pass, int64, 0-d, on the device, that all keys follow from; None takes ``keys``.
        t, quantizer, dim, folded, factor: As there.
    """
    given = [key_tensor(key) for key in keys]
    found = torch.ops.fmtsim.quantize_operand(t, dim, text_of(quantizer), folded, *source, factor, *given, passes)
    parts = dict(zip(layout_of(quantizer, t.dtype, is_on_gpu(t), dim, folded), found, strict=True))
    shape = t.shape if dim == -1 else t.shape[::-1]
    return Operand(quantizer=quantizer, block=block_sizes(block_of(quantizer), torch.Size(shape)), **parts)


def traced_both(t: Tensor, quantizer: Quantizer, across: Key, down: Key) -> tuple[Operand, Operand]:
    """Do what ``quantize_both`` does as one node of a graph."""
    keys = key_tensor(across), key_tensor(down)
    rows, columns, *scale = torch.ops.fmtsim.quantize_both(t, text_of(quantizer), *keys)
    one, other = (Operand(x, quantizer, tensor_scale=scale[0] if scale else None) for x in (rows, columns))
    return one, other


@lru_cache(maxsize=4096)
def text_of(quantizer: Quantizer) -> str:
    """Return the text by which an operator finds a quantiser: the same in every process."""
    text = hashlib.sha256(repr(quantizer).encode()).hexdigest()[:24]
    _quantizers[text] = quantizer
    return text


def quantizer_of(text: str) -> Quantizer:
    """Return the quantiser of a text."""
    return _quantizers[text]


def _operand(t, dim, quantizer, folded, layer, name, factor, elements, scales, signs, passes):  # type: ignore[no-untyped-def]
    q, found = _quantizers[quantizer], find_layer(layer) if layer else None
    keys = Keys(random_key(elements), random_key(scales), random_key(signs))
    if passes is not None:
        assert found is not None
        keys = found.counted_keys(name, passes)
    state = None if found is None else found.state.get(name)
    made = quantize_operand(t, q, keys, state, dim=dim, folded=folded, factor=factor)
    layout = layout_of(q, t.dtype, is_on_gpu(t), dim, folded)
    return [_own(getattr(made, field), part, t) for field, part in layout.items()]


def _own(x: Tensor, part: Part, t: Tensor) -> Tensor:
    """Return a tensor in the layout that the compiler was told, and never the operand itself."""
    whole = x.mT.contiguous().mT if part.transposed else x.contiguous()
    return whole.clone() if whole.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() else whole


def _fake_operand(t, dim, quantizer, folded, layer, name, factor, elements, scales, signs, passes):  # type: ignore[no-untyped-def]
    q = _quantizers[quantizer]
    rows, columns = t.shape if dim == -1 else t.shape[::-1]
    outer, inner = block_of(q)
    blocks = (1 if outer is None else -(-rows // outer), 1 if inner is None else -(-columns // inner))
    made = []
    for field, part in layout_of(q, t.dtype, is_on_gpu(t), dim, folded).items():
        shape = {"scale": blocks, "tensor_scale": ()}.get(field, (rows, columns))
        x = t.new_empty(shape[::-1] if part.transposed else shape, dtype=part.dtype)
        made.append(x.mT if part.transposed else x)
    return made


def _both(t, quantizer, across, down):  # type: ignore[no-untyped-def]
    rows, columns = quantize_both(t, _quantizers[quantizer], random_key(across), random_key(down))
    scale = [] if rows.tensor_scale is None else [rows.tensor_scale]
    return [rows.elements.contiguous(), columns.elements.mT.contiguous().mT, *scale]


def _fake_both(t, quantizer, across, down):  # type: ignore[no-untyped-def]
    scale = [t.new_empty((), dtype=torch.float32)] if _quantizers[quantizer].format.tensor_scale else []  # type: ignore[union-attr]
    return [t.new_empty(t.shape, dtype=torch.bfloat16), t.new_empty(t.shape, dtype=torch.bfloat16).mT, *scale]


_library = torch.library.Library("fmtsim", "FRAGMENT")
_library.define("quantize_both(Tensor t, str quantizer, Tensor? across, Tensor? down) -> Tensor[]")
_library.impl("quantize_both", _both, "CompositeExplicitAutograd")
torch.library.register_fake("fmtsim::quantize_both", _fake_both, lib=_library)
_library.define(
    "quantize_operand(Tensor t, int dim, str quantizer, bool folded, str layer, str name, Tensor? factor, "
    "Tensor? elements, Tensor? scales, Tensor? signs, Tensor? passes) -> Tensor[]"
)
_library.impl("quantize_operand", _operand, "CompositeExplicitAutograd")
torch.library.register_fake("fmtsim::quantize_operand", _fake_operand, lib=_library)
