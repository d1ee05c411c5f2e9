# SPDX-License-Identifier: Apache-2.0
"""The dispatcher between verbs and engines: which engine does a call, and the torch operators that carry casts."""

import importlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal, overload

import torch

from fmtsim.formats.block import BlockFormat, Format, LogTileFormat, PackedFormat
from fmtsim.formats.element import CodebookFormat, IntFormat
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.representable import FLOAT8_DTYPES, narrowed
from fmtsim.spec.cast import (  # fmt: skip
    CastSpec,
    EncodedParts,
    Random,
    RandomKey,
    block_bytes,
    block_counts,
    decoded_shape,
    level_shape,
    spec_from_json,
)
from fmtsim.spec.engine import CPUEngine, Engine, FusedEngine, TorchEngine
from fmtsim.support.dispatch import is_plain
from fmtsim.support.errors import ArgumentError, CodeError, FmtsimError
from fmtsim.support.float64 import check_float64

Key = RandomKey | torch.Tensor | None
"""Where random words come from, as verbs have it: numbers below 2**63, or int64 [seed, offset]; None draws none."""


_library = torch.library.Library("fmtsim", "DEF")
READS_HOST: Sequence[torch.Tag] = tuple(filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))  # newer torch
"""Tags of operators that read numbers from the CPU: a CUDA graph would keep those of its recording."""


def define_operator(
    schema: str, function: Callable[..., Any], shapes: Callable[..., Any] | None,
    dispatch: str = "CompositeExplicitAutograd", tags: Sequence[torch.Tag] = (), *, keyed: bool = False,
) -> None:  # fmt: skip
    """Register an operator of torch: what computes it, and what it gives for tensors without numbers.

    Args:
        schema: Name, arguments and results.
        function: What computes it; autograd sees nothing of it.
        shapes: Returns empty tensors like the results; None for one that is made of other operators.
        dispatch: Key of the dispatcher.
        tags: Of the operator.
        keyed: It takes random keys: register an overload for calls with one as well (``with_keys``).
    """
    name, _, rest = schema.partition("(")
    for signature, more in ((name, ()), (f"{name}.keyed", READS_HOST))[: 1 + keyed]:
        _library.define(f"{signature}({rest}", tags=(*tags, *more))
        _library.impl(signature, function, dispatch)
        if shapes is not None:
            torch.library.register_fake(f"fmtsim::{signature}", shapes, lib=_library)
            operator = getattr(getattr(torch.ops.fmtsim, name), signature[len(name) + 1 :] or "default")
            torch.library.register_vmap(f"fmtsim::{signature}", partial(_over_batch, operator), lib=_library)


def _over_batch(operator: Any, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """Run an operator for each tensor of a batch: blocks, and the places of random words, do not cross it."""
    dims = (*in_dims, *[None] * (len(arguments) - len(in_dims)))  # torch leaves out arguments that have their default
    count = info.batch_size
    rows = [_batch_of(value, dim, count) for value, dim in zip(arguments, dims, strict=True)]
    results = [operator(*row) for row in zip(*rows, strict=True)]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results)[:count], 0
    parts = [torch.stack(part)[:count] for part in zip(*results, strict=True)]
    return type(results[0])(parts), type(results[0])(0 for _ in parts)


def _batch_of(value: Any, dim: Any, count: int) -> list[Any]:
    """Return an argument, or a list of them, for each tensor of a batch."""
    if isinstance(value, list) and isinstance(dim, list):
        return [list(values) for values in zip(*map(_batch_of, value, dim, [count] * len(value)), strict=True)]
    if not isinstance(value, torch.Tensor) or dim is None:
        return [value] * max(count, 1)
    if count:
        return list(value.movedim(dim, 0))
    return [value.new_zeros(value.movedim(dim, 0).shape[1:])]  # one of zeros tells what the result of none looks like


def with_keys(operator: Any, *keys: Any) -> Any:
    """Return the overload of an operator for a call with these random keys, which lie on the CPU, or with none."""
    return operator.default if all(key is None for key in keys) else operator.keyed


def quantize(x: torch.Tensor, spec: CastSpec, dtype: torch.dtype, key: Key, words: torch.Tensor | None) -> torch.Tensor:
    """Round x to the values of a format; the result has x's shape and device, and the dtype."""
    if _is_direct(words, x):
        return quantize_plain(x, spec, dtype, key)
    run = with_keys(torch.ops.fmtsim.quantize, key)
    result: torch.Tensor = run(x, spec.to_json(), dtype, key_tensor(key), words)
    return result


def quantize_out(x: torch.Tensor, out: torch.Tensor, spec: CastSpec, key: Key, words: torch.Tensor | None) -> None:
    """Do what ``quantize`` does into out."""
    if not _is_direct(words, x, out):  # copy_ is what modes, transforms and lazy negation of out are made for
        out.copy_(quantize(x, spec, out.dtype, key, words))
        return
    _quantize_into(x.detach().clone() if _overlap(x, out) else x, out, spec, key)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)  # autograd must notice where out was saved for a backward


def quantize_plain(x: torch.Tensor, spec: CastSpec, dtype: torch.dtype, key: Key) -> torch.Tensor:
    """Do what the operator does, without the dispatcher, for an x that ``is_plain``."""
    out = torch.empty_like(x) if dtype is x.dtype else _empty_like(x, dtype)
    _quantize_into(x.detach() if x.requires_grad else x, out, spec, key)  # engines have threads, which record gradients
    return out


def _quantize_into(x: torch.Tensor, out: torch.Tensor, spec: CastSpec, key: Key) -> None:
    """Quantise plain x into plain out, which lies in one place with it or does not overlap it."""
    random = None if key is None else _random(key, None)
    # 1. a GPU's fast dispatch: one look-up and one launch
    if x.is_cuda and load_engine("cuda").quantize_contiguous(x, spec, out, random):
        return
    # 2. any engine
    _check_data(x, spec, None)
    engine_for("quantize", spec, x, out).quantize(x, spec, random, out)


def key_tensor(key: Key) -> torch.Tensor | None:
    """Return a key as the operators take it: int64 [seed, offset] on the CPU."""
    return torch.tensor([signed(number) for number in key]) if isinstance(key, RandomKey) else key


def signed(number: int) -> int:
    """Return an integer of 64 bits as int64 has it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def random_key(key: torch.Tensor | None) -> RandomKey | None:
    """Return a key that an operator got, int64 [seed, offset] on the CPU, as numbers."""
    return None if key is None else RandomKey(*key.tolist())


def _is_direct(words: torch.Tensor | None, *tensors: torch.Tensor) -> bool:
    """Return True if a call may go around the dispatcher; words of users may be tensors of any kind."""
    return words is None and not torch.compiler.is_compiling() and all(map(is_plain, tensors))


def encode(x: torch.Tensor, spec: CastSpec, key: Key = None, words: torch.Tensor | None = None) -> EncodedParts:
    """Return the codes of x and what they need to be decoded."""
    if words is None and not torch.compiler.is_compiling() and is_plain(x):  # as _is_direct, in less of the host's time
        _check_data(x, spec, None)
        random = None if key is None else _random(key, None)
        return engine_for("encode", spec, x).encode(x.detach(), spec, random)
    operator = with_keys(torch.ops.fmtsim.encode, key)
    codes, scales, tensor_scale, offsets = operator(x, spec.to_json(), key_tensor(key), words)
    return EncodedParts(codes, *_absent(scales, tensor_scale, offsets))


def encode_packed(x: torch.Tensor, spec: CastSpec, key: Key) -> EncodedParts | None:
    """Return codes and scales as an encoded tensor keeps them, written in one pass; None where no kernel does that."""
    if not x.is_cuda or torch.compiler.is_compiling() or not is_plain(x):
        return None
    engine = load_engine("cuda")
    if not engine.supports("encode_packed", spec, x):
        return None
    _check_data(x, spec, None)
    parts: EncodedParts = engine.encode_packed(x, spec, _random(key, None))
    return parts


def decode(parts: EncodedParts, spec: CastSpec, dtype: torch.dtype, *, validated: bool = False) -> torch.Tensor:
    """Return the values of codes; shape and device are those of ``parts.codes`` (of ggml's bytes: whole blocks').

    With ``validated`` all codes are known to be in ``code_dtype`` and to lie in the format. A float8 ``dtype`` holds
    every value of the format.
    """
    if dtype in FLOAT8_DTYPES:
        return narrowed(decode(parts, spec, torch.float32, validated=validated), dtype)
    others = [parts.codes.new_empty(0) if part is None else part.detach() for part in parts[1:]]
    return torch.ops.fmtsim.decode(parts.codes, *others, spec.to_json(), dtype, validated)


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
    return load_engine("cpu") if x.is_cpu and not torch.compiler.is_compiling() and is_plain(x) else None


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


def _absent(*tensors: torch.Tensor) -> list[torch.Tensor | None]:
    """Turn the one-dimensional empty tensors that stand for nothing into None."""
    return [None if tensor.dim() == 1 else tensor for tensor in tensors]


def _random(key: Key, words: torch.Tensor | None) -> Random:
    if words is not None or key is None:
        return words
    return random_key(key) if isinstance(key, torch.Tensor) else key


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


def _quantize(x, spec, dtype, key=None, words=None):  # type: ignore[no-untyped-def]
    out = _empty_like(x, dtype)
    cast = spec_from_json(spec)
    _check_data(x, cast, words)
    engine_for("quantize", cast, x, out).quantize(x.detach(), cast, _random(key, words), out)
    return out


def _encode(x, spec, key=None, words=None):  # type: ignore[no-untyped-def]
    cast = spec_from_json(spec)
    _check_data(x, cast, words)
    parts = engine_for("encode", cast, x).encode(x.detach(), cast, _random(key, words))
    return tuple(x.new_empty(0, dtype=torch.float32) if part is None else part for part in parts)


def _decode(codes, scales, tensor_scale, offsets, spec, dtype, validated=False):  # type: ignore[no-untyped-def]
    cast = spec_from_json(spec)
    codes = codes if validated else _patterns(codes, cast.format)
    shape = decoded_shape(cast, codes.shape)
    like = codes if codes.shape == shape else codes.new_empty(shape)
    out = _empty_like(like, dtype, memory_format=torch.contiguous_format)
    parts = EncodedParts(codes, *_absent(scales, tensor_scale, offsets))
    engine_for("decode", cast, out).decode(parts, cast, out)
    return out


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


def _decode_shapes(codes, scales, tensor_scale, offsets, spec, dtype, validated=False):  # type: ignore[no-untyped-def]
    return codes.new_empty(decoded_shape(spec_from_json(spec), codes.shape), dtype=dtype)


def _encode_shapes(x, spec, key=None, words=None):  # type: ignore[no-untyped-def]
    cast = spec_from_json(spec)
    fmt = cast.format
    size = block_bytes(fmt, x.shape, cast.dim) if isinstance(fmt, PackedFormat) else x.shape
    codes = torch.empty(size, dtype=code_dtype(fmt.bits), device=x.device)
    # an operator returns four tensors: empty ones of one dimension stand for what a format does not have
    nothing = [codes.new_empty(0, dtype=torch.float32) for _ in range(3)]
    if not isinstance(fmt, BlockFormat | LogTileFormat):
        return codes, *nothing
    scales = codes.new_empty(block_counts(fmt, x.shape, cast.dim), dtype=torch.float32)
    two_level = isinstance(fmt, BlockFormat) and fmt.tensor_scale
    second = level_shape(fmt, x.shape, cast.dim) if isinstance(fmt, BlockFormat) else ()
    tensor_scale = codes.new_empty(second, dtype=torch.float32) if two_level else nothing[1]
    if isinstance(fmt, LogTileFormat):
        return codes, scales, tensor_scale, torch.empty_like(scales)
    return codes, scales, tensor_scale, torch.empty_like(scales, dtype=torch.int32) if fmt.zero_point else nothing[2]


def _straight_through(ctx, grad):  # type: ignore[no-untyped-def]
    return grad.to(ctx.dtype), None, None, None, None


def _keep_dtype(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.dtype = inputs[0].dtype


class OnceOnly(torch.autograd.Function):
    """Pass a gradient through, and raise an error that explains itself when it is differentiated again.

    ``OnceOnly.apply(gradient, message, *sources)``: sources are the tensors that the gradient depends on.
    """

    @staticmethod
    def forward(grad: torch.Tensor, message: str, *sources: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient."""
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep the message."""
        ctx.message = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Refuse."""
        raise FmtsimError(ctx.message)


define_operator(
    "quantize(Tensor x, str spec, ScalarType dtype, Tensor? key=None, Tensor? words=None) -> Tensor",
    _quantize,
    lambda x, spec, dtype, key=None, words=None: torch.empty_like(x, dtype=dtype),
    keyed=True,
)
define_operator(
    "encode(Tensor x, str spec, Tensor? key=None, Tensor? words=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _encode,
    _encode_shapes,
    keyed=True,
)
define_operator(
    "decode(Tensor codes, Tensor scales, Tensor tensor_scale, Tensor offsets, str spec, ScalarType dtype, "
    "bool validated=False) -> Tensor",
    _decode,
    _decode_shapes,
)
for _name in ("fmtsim::quantize", "fmtsim::quantize.keyed"):
    torch.library.register_autograd(_name, _straight_through, setup_context=_keep_dtype, lib=_library)
