# SPDX-License-Identifier: Apache-2.0
"""The verbs quantize, encode and decode, and the gradient of a cast, which passes straight through."""

from __future__ import annotations  # help shows the names of types

from importlib import import_module
from typing import Any, Never, TypeVar, overload

import numpy
import torch

from fmtsim.casts import numpy_arrays, ops, profile
from fmtsim.casts.arguments import (
    Generator,
    check_blocks,
    check_dense,
    check_input,
    check_out,
    decoding,
    only_casts,
    prepare,
    randomness,
    refuse_others,
    spelled,
)
from fmtsim.casts.encoded import Encoded
from fmtsim.casts.lanes import define_gradient, keep_dtypes, key_tensor, or_empty, or_none, plain_twin, with_keys
from fmtsim.casts.stored import store
from fmtsim.formats.block import Block, Format, PackedFormat
from fmtsim.formats.element import Overflow
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import FLOAT8_DTYPES, FLOAT_DTYPES
from fmtsim.formats.scaling import ScaleRule
from fmtsim.rounding.modes import Rounding, RoundingName
from fmtsim.spec.cast import EncodedParts
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.dispatch import is_bare, is_readable
from fmtsim.support.errors import ArgumentError, FormatError

Numbers = TypeVar("Numbers", torch.Tensor, "numpy.ndarray[Any, Any]")


def quantize(
    x: Numbers,
    format: str | Format | Quantizer | torch.dtype = None,  # type: ignore[assignment]  # fmt= is told its name
    rounding: RoundingName | Rounding = "nearest_even",
    *more: Never,
    overflow: Overflow | None = None,
    dim: int = -1,
    generator: Generator = None,
    random_bits: int | None = None,
    random_words: Numbers | None = None,
    block_size: int | Block | None = None,
    scale_rule: ScaleRule | None = None,
    pad: bool = False,
    out_dtype: torch.dtype | numpy.dtype[Any] | type | None = None,
    out: Numbers | None = None,
    like: str | None = None,
    **others: Never,
) -> Numbers:
    """Round a tensor, or a numpy array, to the values of a format.

    Args:
        x: Tensor of any shape and strides: float16, bfloat16, float32, float64, or one of torch's float8 dtypes, whose
            values are then rounded as float32 numbers (scales as well). Or a numpy array of such a dtype, those of
            ml_dtypes among them.
        format: Name, record or torch dtype of the format (``fmtsim.list_formats()``); or a ``Quantizer``, which says
            the rounding, overflow and scales, too (and may, for values alone, transform x or cast it twice).
        rounding: Name of a mode or a ``Rounding``.
        overflow: ``"saturate"`` or ``"ieee"``; None takes the format's default.
        dim: The dimension along which blocks run; element formats do not look at it.
        generator: Source of random words for ``rounding="stochastic"``: a ``torch.Generator`` on the CPU or on x's
            device, which goes on from call to call; an int seed or a ``RandomKey``, which give every call the same
            words, so a loop repeats them; or None for torch's default CPU generator.
        random_bits: Random bits of stochastic rounding, 1 to 32; None means all.
        random_words: The random integers themselves, int64 of x's shape in ``[0, 2**random_bits)``, instead of a
            generator.
        block_size: Elements that share a scale, an int along ``dim`` or ``(outer, inner)``; turns an element format
            into a scaled one, and changes the block of a block format.
        scale_rule: ``"floor"``, ``"ceil"``, ``"rceil"``, ``"even"`` or ``"amax"``; None takes the format's.
        pad: Let blocks at the end of ``dim`` be short, as if padded with zeros and cropped.
        out_dtype: dtype of the result: float16, bfloat16, float32 or float64, to which values are rounded once, to
            nearest even; or a float8 dtype that holds every value of the format, -0 and infinities among them. None
            takes x's where every value of the format fits, else float32, else float64. For an array, numpy's or
            ml_dtypes' name of it or torch's.
        out: Tensor (or array) of x's shape that receives the result (its dtype stands for ``out_dtype``); may be x
            itself. Where it overlaps x in any other way, x is copied first.
        like: Another library whose cast to this format is computed instead, to the bit: one of
            ``fmtsim.list_profiles()``. It says how to round, scale and saturate: leave the options for that out.

    Returns:
        Tensor of x's shape and device, with x's strides where these leave no gaps; or ``out``. For an array, an array
        of native byte order, with the bits of the tensor.

    NaN stays NaN (canonical, positive) where the format has one, else it becomes the largest value, or makes the
    block NaN; Inf saturates or stays as ``overflow`` says; -0 stays -0 where the format has it. The gradient passes
    straight through. Deterministic: stochastic results depend on the seed and an element's place alone, not on
    device, threads or layout. Every bit is defined in docs/semantics.md.

    Raises:
        FormatError: Unknown format, rounding or scale rule.
        DtypeError: x, out_dtype or out has another dtype, or a float8 one that lacks a value of the format.
        ArgumentError: A dim, block, generator, ``out`` or ``random_words`` that does not fit; a masked array.

    >>> quantize(torch.tensor([0.1, 500.0, -0.0, float("nan")]), "e4m3").tolist()
    [0.1015625, 448.0, -0.0, nan]
    >>> quantize(numpy.array([0.1, 500.0], dtype="float32"), "e4m3")
    array([1.015625e-01, 4.480000e+02], dtype=float32)
    >>> quantize(torch.tensor([0.1, 500.0]), "e4m3", out_dtype=torch.float8_e4m3fn).view(torch.uint8).tolist()
    [29, 126]
    """
    refuse_others(quantize, more, others)
    # 1. arrays and float8 tensors go by float tensors
    if not (
        isinstance(x, torch.Tensor) and x.dtype in FLOAT_DTYPES
        and (out_dtype is None or not isinstance(out_dtype, torch.dtype) or out_dtype not in FLOAT8_DTYPES)
        and (out is None or out is x or not isinstance(out, torch.Tensor) or out.dtype not in FLOAT8_DTYPES)
    ):  # fmt: skip
        options = {
            "rounding": rounding, "overflow": overflow, "dim": dim, "generator": generator, "random_bits": random_bits,
            "random_words": random_words, "block_size": block_size, "scale_rule": scale_rule, "pad": pad, "like": like,
        }  # fmt: skip
        return numpy_arrays.quantize(quantize, x, format, out_dtype, out, options)  # type: ignore[no-any-return]
    # 2. arguments become a cast, or the steps of another library's
    check_dense("x", x)
    result: Any = out_dtype if out is None else check_out(x, out, out_dtype)
    if isinstance(format, Quantizer) and not only_casts(format):
        if random_words is not None:
            raise ArgumentError("random_words go with a Quantizer that only casts; pass generator=")
        above = import_module("fmtsim.gemm.layers.quantize_tensor")  # of products, whose room lies above casts
        values: Any = above.quantize_tensor(x, format, dim=dim, generator=generator, pad=pad)
        values = values if result in (None, values.dtype) else quantize(values, result, out_dtype=result)
        return values if out is None else out.copy_(values)  # type: ignore[no-any-return]
    if isinstance(format, Quantizer) and format.like:
        format, like = format.format, format.like  # type: ignore[assignment]
    if like is not None:
        profile.check_alone(like, rounding, overflow, generator, random_bits, random_words, scale_rule, pad)
        values = profile.quantize_like(x, format, like, dim=dim, block_size=block_size, out_dtype=result)
        return values if out is None else out.copy_(values)  # type: ignore[no-any-return]
    cast, dtype, block, random = prepare(
        x, format, rounding, overflow, dim, random_bits, block_size, scale_rule, result
    )
    if block is not None:
        check_blocks(x, block, dim, pad)
    key, words = randomness(x, random, generator, random_words) if random or random_words is not None else (None, None)
    # 3. into a tensor of the caller: no gradient
    if out is not None:
        ops.quantize_out(x.detach() if x.requires_grad else x, out, cast, key, words)
        return out
    # 4. in a compiled graph the operator, with its gradient: torch.compile traces no forward-mode derivatives
    if torch.compiler.is_compiling():
        return with_keys(torch.ops.fmtsim.quantize, key)(x, cast.to_json(), dtype, key_tensor(key), words)
    # 5. under transforms and modes of torch a Function, with all derivatives; plain tensors around the dispatcher
    if words is not None or not is_bare(x):
        return _Quantize.apply(x, cast, dtype, key_tensor(key), words)  # type: ignore[no-any-return]
    if x.requires_grad and torch.is_grad_enabled():
        return _QuantizePlain.apply(x, cast, dtype, key)  # type: ignore[no-any-return]
    return ops.quantize_plain(x, cast, dtype, key)


def _pass_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return grad.to(ctx.dtypes[0]), None, None, None, None


def _pass_tangent(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
    return tangent.to(ctx.dtypes[1])


# Quantise forwards, pass derivatives through: where torch looks on, and for tensors that are plain but for a gradient.
_Quantize = define_gradient("quantize", keep_dtypes, _pass_gradient, _pass_tangent, ops.quantize)
_QuantizePlain = plain_twin("quantize", keep_dtypes, _pass_gradient, ops.quantize_plain)


def quantize_(
    x: Numbers,
    format: str | Format | Quantizer | torch.dtype = None,  # type: ignore[assignment]  # fmt= is told its name
    rounding: RoundingName | Rounding = "nearest_even",
    **options: Any,
) -> Numbers:
    """Round a tensor or an array in place; arguments are those of ``quantize`` but out and out_dtype.

    >>> quantize_(torch.tensor([1.3, 7.0]), "e2m1")
    tensor([1.5000, 6.0000])
    """
    return quantize(x, format, rounding, out=x, **options)


def encode(
    x: torch.Tensor | numpy.ndarray[Any, Any],
    format: str | Format | Quantizer | torch.dtype = None,  # type: ignore[assignment]  # fmt= is told its name
    rounding: RoundingName | Rounding = "nearest_even",
    *more: Never,
    overflow: Overflow | None = None,
    dim: int = -1,
    generator: Generator = None,
    random_bits: int | None = None,
    random_words: torch.Tensor | numpy.ndarray[Any, Any] | None = None,
    block_size: int | Block | None = None,
    scale_rule: ScaleRule | None = None,
    pad: bool = False,
    like: str | None = None,
    **others: Never,
) -> Encoded:
    """Round a tensor and return its packed codes and scales; arguments and errors are those of ``quantize``.

    Codes are tensors, those of an array too, on the CPU. ``encode(x, f).decode(out_dtype=d)`` has the bits of
    ``quantize(x, f, out_dtype=d)`` for every dtype d that both give.

    >>> q = encode(torch.arange(8.0), "e2m1")
    >>> q.nbytes, q.decode().tolist()
    (4, [0.0, 1.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0])
    """
    refuse_others(encode, more, others)
    # 1. arguments become a cast
    tensor, integers = numpy_arrays.as_floats(x), numpy_arrays.as_words(random_words)
    check_input(tensor, float8=True)
    if isinstance(format, Quantizer) and format.like:
        format, like = format.format, format.like  # type: ignore[assignment]
    if like is not None:
        profile.check_alone(like, rounding, overflow, generator, random_bits, random_words, scale_rule, pad)
        return profile.encode_like(tensor, format, like, dim=dim, block_size=block_size)
    cast, _, block, random = prepare(tensor, format, rounding, overflow, dim, random_bits, block_size, scale_rule, None)
    if block is not None:
        check_blocks(tensor, block, dim, pad)
    key, words = randomness(tensor, random, generator, integers)
    # 2. packed codes from one pass of a kernel
    packed = ops.encode_packed(tensor.detach(), cast, key) if words is None else None
    fmt, inner = cast.format, cast.dim
    if packed is not None:
        return Encoded._known(packed, fmt, tensor.shape, inner)
    # 3. codes of the tensor's shape, then packed: what an engine made needs no look at its range
    parts = ops.encode(tensor.detach(), cast, key, words)
    if is_readable(tensor):
        codes, scales = store(parts.codes, parts.scales, fmt, inner, validated=True)
        return Encoded._known(parts._replace(codes=codes, scales=scales), fmt, tensor.shape, inner)
    # 4. the same where nothing has numbers yet, by an operator; packed blocks are bytes already
    if not isinstance(fmt, PackedFormat):
        codes, scales = torch.ops.fmtsim.store(parts.codes, or_empty(tensor, parts.scales), cast.to_json())
        parts = parts._replace(codes=codes, scales=or_none(scales))
    return Encoded(format=fmt, shape=tensor.shape, dim=inner, cast=cast, validated=True, **parts._asdict())


for _verb in (quantize, encode):
    spelled(_verb)
cast = quantize
"""``quantize``, as the command line calls it."""


@overload
def decode(
    codes: torch.Tensor | Encoded, format: str | Format | torch.dtype | None = None, *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def decode(
    codes: numpy.ndarray[Any, Any], format: str | Format | torch.dtype | None = None, *, out_dtype: Any = None
) -> numpy.ndarray[Any, Any]: ...  # fmt: skip
def decode(
    codes: torch.Tensor | Encoded | numpy.ndarray[Any, Any],
    format: str | Format | torch.dtype | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Return the values of codes.

    Args:
        codes: What ``encode`` returned, or an integer tensor with one code an element (bit patterns from 0; signed
            integer formats also take negative numbers), or a torch float8 tensor; or a numpy array of such.
        format: The element format of a plain tensor.
        out_dtype: float16, bfloat16, float32 or float64, rounded to once; or a float8 dtype that holds every value of
            the format, -0 and infinities among them. None takes float32, or float64 for formats beyond it.

    Returns:
        Tensor of the codes' shape and device, an array for an array; NaN codes give the canonical NaN, -0 stays -0.

    Raises:
        CodeError: A code is outside the format.
        DtypeError: codes are not integers, or out_dtype is another dtype, or a float8 one that lacks a value.
        FormatError: The format is unknown, missing, or needs scales that a plain tensor does not carry.

    >>> decode(torch.tensor([0, 1, 8, 15]), "e2m1")
    tensor([ 0.0000,  0.5000, -0.0000, -6.0000])
    """
    # 1. what knows its format, and arrays
    if isinstance(codes, Encoded):
        if format is not None and get_format(format) != codes.format:
            raise FormatError(f"these codes are {codes.format.name}, not {get_format(format).name}; leave format out")
        return codes.decode(out_dtype=out_dtype)
    if isinstance(codes, numpy.ndarray):
        return numpy_arrays.decode(decode, codes, format, out_dtype)  # type: ignore[no-any-return]
    # 2. a tensor of codes: float8 dtypes say their format
    check_dense("codes", codes)
    if format is None:
        if not codes.dtype.is_floating_point:
            raise FormatError("a plain tensor of codes does not say its format; pass format=, for example 'e4m3'")
        format = codes.dtype
    # 3. its bits, decoded
    cast, dtype = decoding(format, codes.dtype, out_dtype)
    patterns = codes.view(torch.uint8) if codes.dtype.is_floating_point else codes
    return ops.decode(EncodedParts(patterns), cast, dtype)
