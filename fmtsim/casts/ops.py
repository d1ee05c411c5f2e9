# SPDX-License-Identifier: Apache-2.0
"""The dispatcher between verbs and engines: which engine does a call, and the torch operators that carry casts."""

import importlib
from functools import cache
from typing import Any, Literal, overload

import torch

from fmtsim.casts.lanes import (
    Key,
    define_operator,
    key_tensor,
    or_empty,
    or_none,
    random_key,
    with_keys,
)
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat, PackedFormat
from fmtsim.formats.element import CodebookFormat, IntFormat
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.representable import FLOAT8_DTYPES, narrowed
from fmtsim.spec.cast import (
    CastSpec,
    EncodedParts,
    block_bytes,
    block_counts,
    decoded_shape,
    level_shape,
    spec_from_json,
)
from fmtsim.spec.engine import CPUEngine, Engine, FusedEngine, TorchEngine
from fmtsim.support.dispatch import is_direct
from fmtsim.support.errors import ArgumentError, CodeError
from fmtsim.support.float64 import check_float64


def quantize(x: torch.Tensor, spec: CastSpec, dtype: torch.dtype, key: Key, words: torch.Tensor | None) -> torch.Tensor:
    """Round x to the values of a format; the result has x's shape and device, and the dtype."""
    if words is None and is_direct(x):
        return quantize_plain(x, spec, dtype, key)
    operator = with_keys(torch.ops.fmtsim.quantize, key)
    return operator(x, spec.to_json(), dtype, key_tensor(key), words)  # type: ignore[no-any-return]


def quantize_plain(
    x: torch.Tensor, spec: CastSpec, dtype: torch.dtype, key: Key, words: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute ``quantize``, for an x that ``is_plain`` or behind the operator."""
    out = torch.empty_like(x) if dtype is x.dtype else _empty_like(x, dtype)
    _quantize_into(x.detach() if x.requires_grad else x, out, spec, key, words)  # threads of engines record gradients
    return out


def quantize_out(x: torch.Tensor, out: torch.Tensor, spec: CastSpec, key: Key, words: torch.Tensor | None) -> None:
    """Do what ``quantize`` does into out."""
    # 1. copy_ is what modes, transforms and lazy negation of out are made for
    if words is not None or not is_direct(x, out):
        out.copy_(quantize(x, spec, out.dtype, key, words))
        return
    # 2. plain tensors: a copy of an x that writing out would change before it is read
    _quantize_into(x.detach().clone() if _overlap(x, out) else x, out, spec, key, None)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)  # autograd must notice where out was saved for a backward


def _quantize_into(
    x: torch.Tensor, out: torch.Tensor, spec: CastSpec, key: Key, words: torch.Tensor | None
) -> None:  # fmt: skip
    """Quantise plain x into plain out, which lies in one place with it or does not overlap it."""
    random = words if key is None or words is not None else random_key(key)
    # 1. a GPU's fast dispatch: one look-up and one launch
    if x.is_cuda and load_engine("cuda").quantize_contiguous(x, spec, out, random):
        return
    # 2. any engine
    _check_data(x, spec, words)
    engine_for("quantize", spec, x, out).quantize(x, spec, random, out)


def encode(x: torch.Tensor, spec: CastSpec, key: Key = None, words: torch.Tensor | None = None) -> EncodedParts:
    """Return the codes of x and what they need to be decoded."""
    if words is None and is_direct(x):
        return _encode(x, spec, key, None)
    operator = with_keys(torch.ops.fmtsim.encode, key)
    codes, *others = operator(x, spec.to_json(), key_tensor(key), words)
    return EncodedParts(codes, *map(or_none, others))


def _encode(x: torch.Tensor, spec: CastSpec, key: Key, words: torch.Tensor | None) -> EncodedParts:
    _check_data(x, spec, words)
    random = words if key is None or words is not None else random_key(key)
    return engine_for("encode", spec, x).encode(x.detach(), spec, random)


def encode_packed(x: torch.Tensor, spec: CastSpec, key: Key) -> EncodedParts | None:
    """Return codes and scales as an encoded tensor keeps them, written in one pass; None where no kernel does that."""
    if not x.is_cuda or not is_direct(x) or not load_engine("cuda").supports("encode_packed", spec, x):
        return None
    _check_data(x, spec, None)
    return load_engine("cuda").encode_packed(x, spec, random_key(key))


def decode(parts: EncodedParts, spec: CastSpec, dtype: torch.dtype, *, validated: bool = False) -> torch.Tensor:
    """Return the values of codes; shape and device are those of ``parts.codes`` (of ggml's bytes: whole blocks').

    With ``validated`` all codes are known to be in ``code_dtype`` and to lie in the format. A float8 ``dtype`` holds
    every value of the format.
    """
    if dtype in FLOAT8_DTYPES:
        return narrowed(decode(parts, spec, torch.float32, validated=validated), dtype)
    if is_direct(*[part for part in parts if part is not None]):
        return _decode(parts, spec, dtype, validated)
    others = [or_empty(parts.codes, part).detach() for part in parts[1:]]
    return torch.ops.fmtsim.decode(parts.codes, *others, spec.to_json(), dtype, validated)


def _decode(parts: EncodedParts, spec: CastSpec, dtype: torch.dtype, validated: bool) -> torch.Tensor:
    # 1. codes of the format, which negative integers may stand for
    codes = parts.codes if validated else _patterns(parts.codes, spec.format)
    # 2. room for the values, which packed blocks have more of than bytes
    shape = decoded_shape(spec, codes.shape)
    like = codes if codes.shape == shape else codes.new_empty(shape)
    out = _empty_like(like, dtype, memory_format=torch.contiguous_format)
    engine_for("decode", spec, out).decode(parts._replace(codes=codes), spec, out)
    return out


def engine_for(verb: str, spec: CastSpec, *tensors: torch.Tensor) -> Engine:
    """Return the engine for a verb on these tensors: kernels for their device where they cover it, else torch."""
    if tensors[0].is_cpu:
        return load_engine("cpu")  # which hands on what its kernels do not cover
    engine = fused_engine(tensors[0])
    if engine is not None and engine.supports(verb, spec, *tensors):
        return engine
    return load_engine("torch_engine")


def fused_engine(x: torch.Tensor) -> FusedEngine | None:
    """Return the engine that has fused kernels for operands on a tensor's device, None where none has."""
    if not x.is_cuda:
        return None
    engine = load_engine("cuda")
    return engine if engine.serves(x.get_device()) else None


def cpu_engine(x: torch.Tensor) -> CPUEngine | None:
    """Return the CPU's engine where its kernels may take a tensor around the dispatcher; None elsewhere."""
    return load_engine("cpu") if x.is_cpu and is_direct(x) else None


@overload
def load_engine(name: Literal["cuda"]) -> FusedEngine: ...
@overload
def load_engine(name: Literal["cpu"]) -> CPUEngine: ...
@overload
def load_engine(name: Literal["torch_engine"]) -> TorchEngine: ...
@cache
def load_engine(name: str) -> Any:
    """Return an engine, imported when it is first needed."""
    return importlib.import_module(f"fmtsim.{name}")


def _check_data(x: torch.Tensor, cast: CastSpec, words: torch.Tensor | None) -> None:
    """Refuse what only the elements show; verbs see no elements while torch.compile, vmap or export trace them."""
    if words is not None and words.numel():
        low, high, bits = int(words.min()), int(words.max()), cast.rounding.bits
        if low < 0 or high >= 1 << bits:
            raise ArgumentError(f"random_words reach from {low} to {high}; choose 0 to 2**{bits} - 1")
    element = cast.format.element if isinstance(cast.format, BlockFormat) else cast.format
    if isinstance(element, LogTileFormat | PackedFormat) or element.nan_policy != "error" or element.has_nan:
        return
    if bool(x.isnan().any()):
        raise ArgumentError(
            f"x holds NaN, which {cast.format.name} lacks and its record forbids; remove NaN or set nan_policy='max'"
        )


def _overlap(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Return True if writing out could change elements of x that are still to be read: one memory, two places."""
    if x is out:
        return False
    if (x.data_ptr(), x.stride(), x.dtype) == (out.data_ptr(), out.stride(), out.dtype):
        return False
    (first, last), (first_out, last_out) = _span(x), _span(out)
    return x.device == out.device and first < last_out and first_out < last


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte behind its last."""
    if x.is_contiguous():
        return x.data_ptr(), x.data_ptr() + x.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size() * (x.numel() > 0)


def _empty_like(x: torch.Tensor, dtype: torch.dtype, **how: Any) -> torch.Tensor:
    if dtype is torch.float64:
        instead = "pass out_dtype=torch.float32 where the format fits, or move the tensor to the CPU"
        check_float64(x.device, "the result", instead)
    return torch.empty_like(x, dtype=dtype, requires_grad=False, **how)


def _patterns(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return codes as bit patterns in the format's code dtype; raise CodeError for one outside the format."""
    if codes.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has few operations for them
        codes = codes.to(torch.int64)
    # 1. the range of codes: negative ones stand for signed integers
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    limit = len(element.values) if isinstance(element, CodebookFormat) else 1 << fmt.bits
    lowest = -(limit >> 1) if isinstance(element, IntFormat) and element.signed else 0
    # 2. whether all lie in it, unless the dtype has no others
    whole = codes.dtype == torch.uint8 and lowest == 0 and limit > 255
    if codes.numel() and fmt.bits < 63 and not whole:
        low, high = (int(bound) for bound in codes.aminmax())
        if low < lowest or high >= limit:
            wrong = low if low < lowest else high
            raise CodeError(f"code {wrong} is outside {element.name}; its codes are {lowest} to {limit - 1}")
    return (codes.to(torch.int64) & (limit - 1) if lowest else codes).to(code_dtype(fmt.bits))


def _encode_shapes(x, text, key=None, words=None):  # type: ignore[no-untyped-def]
    cast = spec_from_json(text)
    fmt, scales, tensor_scale, offsets = cast.format, None, None, None
    size = block_bytes(fmt, x.shape, cast.dim) if isinstance(fmt, PackedFormat) else x.shape
    codes = torch.empty(size, dtype=code_dtype(fmt.bits), device=x.device)
    if isinstance(fmt, BlockFormat | LogTileFormat):
        scales = codes.new_empty(block_counts(fmt, x.shape, cast.dim), dtype=torch.float32)
        if isinstance(fmt, LogTileFormat):
            offsets = torch.empty_like(scales)
        elif fmt.zero_point:
            offsets = torch.empty_like(scales, dtype=torch.int32)
        if isinstance(fmt, BlockFormat) and fmt.tensor_scale:
            tensor_scale = codes.new_empty(level_shape(fmt, x.shape, cast.dim), dtype=torch.float32)
    return codes, *(or_empty(codes, part) for part in (scales, tensor_scale, offsets))


# The operators compute what plain calls do, of a cast as text.
define_operator(
    "quantize(Tensor x, str spec, ScalarType dtype, Tensor? key=None, Tensor? words=None) -> Tensor",
    lambda x, text, dtype, key=None, words=None: quantize_plain(x, spec_from_json(text), dtype, key, words),
    lambda x, text, dtype, key=None, words=None: torch.empty_like(x, dtype=dtype),
    keyed=True,
)
define_operator(
    "encode(Tensor x, str spec, Tensor? key=None, Tensor? words=None) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, text, key=None, words=None: tuple(
        or_empty(x, part) for part in _encode(x, spec_from_json(text), key, words)
    ),
    _encode_shapes,
    keyed=True,
)
define_operator(
    "decode(Tensor codes, Tensor scales, Tensor tensor_scale, Tensor offsets, str spec, ScalarType dtype, "
    "bool validated=False) -> Tensor",
    lambda codes, scales, tensor_scale, offsets, text, dtype, validated=False: _decode(
        EncodedParts(codes, *map(or_none, (scales, tensor_scale, offsets))), spec_from_json(text), dtype, validated
    ),
    lambda codes, scales, tensor_scale, offsets, text, dtype, validated=False: codes.new_empty(
        decoded_shape(spec_from_json(text), codes.shape), dtype=dtype
    ),
)
