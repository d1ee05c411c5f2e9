"""The verbs: quantize, encode and decode."""

from functools import lru_cache
from typing import Any

import torch

from fmtsim import autograd, ops
from fmtsim.encoded import Encoded
from fmtsim.errors import ArgumentError, CodeError, DtypeError, FormatError
from fmtsim.formats.block import Block, BlockFormat, Format, LogTileFormat, with_block
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import FLOAT_DTYPES, result_dtype
from fmtsim.formats.spec import OVERFLOWS, CodebookFormat, FloatFormat, IntFormat, ScaleRule
from fmtsim.ops import CastSpec, Key, RandomKey
from fmtsim.rounding.modes import Rounding, get_rounding

Generator = int | torch.Generator | RandomKey | None


def quantize(
    x: torch.Tensor,
    format: str | Format | torch.dtype,
    *,
    rounding: str | Rounding = "nearest_even",
    overflow: str | None = None,
    dim: int = -1,
    generator: Generator = None,
    random_bits: int | None = None,
    random_words: torch.Tensor | None = None,
    block_size: int | Block | None = None,
    scale_rule: ScaleRule | None = None,
    pad: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round a tensor to the values of a format.

    Args:
        x: Tensor of any shape and strides; float16, bfloat16, float32 or float64.
        format: Name, record or torch dtype of the format (``fmtsim.list_formats()``).
        rounding: Name of a mode or a ``Rounding``.
        overflow: ``"saturate"`` or ``"ieee"``; None takes the format's default.
        dim: The dimension along which blocks run; element formats do not look at it.
        generator: Source of random words for ``rounding="stochastic"``: an int seed, a ``torch.Generator`` on the
            CPU or on x's device, a ``RandomKey``, or None for torch's default CPU generator.
        random_bits: Random bits of stochastic rounding, 1 to 32; None means all.
        random_words: The random integers themselves, int64 of x's shape in ``[0, 2**random_bits)``, instead of a
            generator.
        block_size: Elements that share a scale, an int along ``dim`` or ``(outer, inner)``; turns an element format
            into a scaled one, and changes the block of a block format.
        scale_rule: ``"floor"``, ``"ceil"``, ``"rceil"``, ``"even"`` or ``"amax"``; None takes the format's.
        pad: Let blocks at the end of ``dim`` be short, as if padded with zeros and cropped.
        out_dtype: dtype of the result: float16, bfloat16, float32 or float64. None takes x's where every value of
            the format fits, else float32, else float64. Values are rounded to it once, to nearest even.
        out: Tensor of x's shape that receives the result (its dtype stands for ``out_dtype``); may be x itself. Where
            it overlaps x in any other way, x is copied first.

    Returns:
        Tensor of x's shape and device, with x's strides where these leave no gaps; or ``out``.

    NaN stays NaN (canonical, positive) where the format has one, else it becomes the largest value, or makes the
    block NaN; Inf saturates or stays as ``overflow`` says; -0 stays -0 where the format has it. The gradient passes
    straight through. Deterministic: stochastic results depend on the seed and an element's place alone, not on
    device, threads or layout. Every bit is defined in docs/semantics.md.

    Raises:
        FormatError: Unknown format, rounding or scale rule.
        DtypeError: x, out_dtype or out has another dtype.
        ArgumentError: A dim, block, generator, ``out`` or ``random_words`` that does not fit.

    >>> quantize(torch.tensor([0.1, 500.0, -0.0, float("nan")]), "e4m3").tolist()
    [0.1015625, 448.0, -0.0, nan]
    """
    _check_input(x)
    result = out_dtype if out is None else _check_out(x, out, out_dtype)
    text, dtype, block, random = _prepare(
        x, format, rounding, overflow, dim, random_bits, block_size, scale_rule, result
    )
    if block is not None:
        _check_blocks(x, block, dim, pad)
    key, words = _randomness(x, random, generator, random_words) if random or random_words is not None else (None, None)
    if out is not None:
        ops.quantize_out(x.detach() if x.requires_grad else x, out, text, key, words)
        return out
    if torch.compiler.is_compiling():  # it cannot trace forward-mode derivatives, and the operator has the others
        return torch.ops.fmtsim.quantize(x, text, dtype, ops.key_tensor(key), words)
    return autograd.quantize(x, text, dtype, key, words)


def quantize_(x: torch.Tensor, format: str | Format | torch.dtype, **options: Any) -> torch.Tensor:
    """Round a tensor in place to the values of a format; options are those of ``quantize`` but out and out_dtype.

    >>> quantize_(torch.tensor([1.3, 7.0]), "e2m1")
    tensor([1.5000, 6.0000])
    """
    return quantize(x, format, out=x, **options)


def encode(
    x: torch.Tensor,
    format: str | Format | torch.dtype,
    *,
    rounding: str | Rounding = "nearest_even",
    overflow: str | None = None,
    dim: int = -1,
    generator: Generator = None,
    random_bits: int | None = None,
    random_words: torch.Tensor | None = None,
    block_size: int | Block | None = None,
    scale_rule: ScaleRule | None = None,
    pad: bool = False,
) -> Encoded:
    """Round a tensor and return its packed codes and scales; arguments and errors are those of ``quantize``.

    ``encode(x, f).decode(out_dtype=d)`` has the bits of ``quantize(x, f, out_dtype=d)``.

    >>> q = encode(torch.arange(8.0), "e2m1")
    >>> q.nbytes, q.decode().tolist()
    (4, [0.0, 1.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0])
    """
    options = (rounding, overflow, dim, generator, random_bits, random_words, block_size, scale_rule, pad)
    text, key, words = _encoding(x, format, *options)
    spec = ops.spec_from_json(text)
    packed = ops.encode_packed(x.detach(), text, key) if words is None else None
    if packed is not None:
        return Encoded(format=spec.format, shape=x.shape, dim=spec.dim, **packed._asdict())
    return Encoded.from_parts(ops.encode(x.detach(), text, key, words), spec.format, x.shape, spec.dim)


def encode_parts(
    x: torch.Tensor, format: Format, *, rounding: Rounding, overflow: str | None, dim: int, generator: Generator,
    pad: bool,
) -> ops.EncodedParts:  # fmt: skip
    """Return codes in x's shape, not packed, and float32 scales [outer, inner]: what products are made of."""
    text, key, words = _encoding(x, format, rounding, overflow, dim, generator, None, None, None, None, pad)
    return ops.encode(x.detach(), text, key, words)


def _encoding(
    x: torch.Tensor, format: Any, rounding: Any, overflow: Any, dim: int, generator: Generator, random_bits: Any,
    random_words: Any, block_size: Any, scale_rule: Any, pad: bool,
) -> tuple[str, Key, torch.Tensor | None]:  # fmt: skip
    """Check the arguments and return the cast as text, the key and the words."""
    _check_input(x)
    spec_arguments = (format, rounding, overflow, dim, random_bits, block_size, scale_rule, None)
    text, _, block, random = _prepare(x, *spec_arguments)
    _check_blocks(x, block, dim, pad)
    return text, *_randomness(x, random, generator, random_words)


def decode(
    codes: torch.Tensor | Encoded,
    format: str | Format | torch.dtype | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the values of codes.

    Args:
        codes: What ``encode`` returned, or an integer tensor with one code an element (bit patterns from 0; signed
            integer formats also take negative numbers), or a torch float8 tensor.
        format: The element format of a plain tensor.
        out_dtype: float16, bfloat16, float32 or float64; None takes float32, or float64 for formats beyond it.

    Returns:
        Tensor of the codes' shape and device; NaN codes give the canonical NaN, -0 stays -0.

    Raises:
        CodeError: A code is outside the format.
        DtypeError: codes are not integers, or out_dtype is not one of the four.
        FormatError: The format is unknown, missing, or needs scales that a plain tensor does not carry.

    >>> decode(torch.tensor([0, 1, 8, 15]), "e2m1")
    tensor([ 0.0000,  0.5000, -0.0000, -6.0000])
    """
    if isinstance(codes, Encoded):
        if format is not None and get_format(format) != codes.format:
            raise FormatError(f"these codes are {codes.format.name}, not {get_format(format).name}; leave format out")
        return codes.decode(out_dtype=out_dtype)
    if not isinstance(codes, torch.Tensor):
        raise DtypeError(f"codes are {type(codes).__name__}, not a tensor; pass torch.tensor(codes)")
    if format is None:
        if not codes.dtype.is_floating_point:
            raise FormatError("a plain tensor of codes does not say its format; pass format=, for example 'e4m3'")
        format = codes.dtype
    fmt = get_format(format)
    if isinstance(fmt, BlockFormat | LogTileFormat):
        raise FormatError(f"{fmt.name} needs scales; decode what encode returned, or name an element format")
    dtype = _check_out_dtype(out_dtype) or result_dtype(fmt, torch.float32)
    patterns = _check_codes(codes, fmt)
    spec = CastSpec(format=fmt, rounding=Rounding(), overflow=fmt.default_overflow)
    return ops.decode(ops.EncodedParts(patterns), spec, dtype)


def _check_input(x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor):
        raise DtypeError(f"x is {type(x).__name__}, not a tensor; pass torch.tensor(x)")
    if x.dtype not in FLOAT_DTYPES:
        hint = "take the real and imaginary parts apart" if x.dtype.is_complex else "convert it with .float()"
        hint = "decode it with fmtsim.decode(x)" if x.dtype.is_floating_point else hint
        raise DtypeError(f"{_dtype_message('x', x.dtype)} ({hint})")
    if torch.compiler.is_compiling():  # dynamo cannot see layouts
        return
    if x.is_nested:
        raise ArgumentError("x is a nested tensor; pass its parts one by one (x.unbind()), or x.to_padded_tensor(0.0)")
    if x.layout != torch.strided:
        raise ArgumentError(f"x has layout {x.layout}; pass a dense tensor, for example x.to_dense()")


def _prepare(
    x: torch.Tensor, format: Any, rounding: Any, overflow: Any, dim: int, random_bits: int | None,
    block_size: Any, scale_rule: Any, out_dtype: torch.dtype | None,
) -> tuple[str, torch.dtype, tuple[str, int | None, int | None] | None, int]:  # fmt: skip
    """Check the arguments and return the cast as text, the result dtype, the block, and the random bits it needs."""
    rank = max(x.dim(), 1)
    if not isinstance(dim, int) or not -rank <= dim < rank:
        raise ArgumentError(
            f"dim={dim!r} is not a dimension of x of shape {tuple(x.shape)}; choose {-rank} to {rank - 1}"
        )
    inner = dim - rank if dim >= 0 else dim
    return _resolve(format, rounding, overflow, inner, random_bits, block_size, scale_rule, x.dtype, out_dtype)


def _resolve(*arguments: Any) -> tuple[str, torch.dtype, tuple[str, int | None, int | None] | None, int]:
    try:
        return _resolve_cached(*arguments)
    except TypeError:
        if _is_hashable(arguments):
            raise
        return _resolve_cached.__wrapped__(*arguments)  # of a list, say, which the checks will name


def _is_hashable(arguments: tuple[Any, ...]) -> bool:
    try:
        hash(arguments)
    except TypeError:
        return False
    return True


# What torch.compiler.assume_constant_result sets; calling that would import all of torch._dynamo with fmtsim.
_resolve._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=4096, typed=True)
def _resolve_cached(
    format: Any, rounding: Any, overflow: Any, dim: int, random_bits: int | None,
    block_size: Any, scale_rule: Any, dtype: torch.dtype, out_dtype: torch.dtype | None,
) -> tuple[str, torch.dtype, tuple[str, int | None, int | None] | None, int]:  # fmt: skip
    fmt = with_block(get_format(format), _check_block_size(block_size), scale_rule)
    mode = get_rounding(rounding, random_bits)
    if overflow not in (None, *OVERFLOWS):
        raise FormatError(f"unknown overflow {overflow!r}; choose 'saturate', 'ieee' or None for the format's default")
    spec = CastSpec(format=fmt, rounding=mode, overflow=overflow or fmt.default_overflow, dim=dim)
    result = _check_out_dtype(out_dtype) or result_dtype(fmt, dtype)
    random = mode.bits if mode.mode == "stochastic" else 0
    block = (fmt.name, *fmt.block) if isinstance(fmt, BlockFormat | LogTileFormat) else None
    return spec.to_json(), result, block, random


def _check_block_size(block_size: Any) -> Block | None:
    """Return a block as ``(outer, inner)``."""
    if block_size is None:
        return None
    block = tuple(block_size) if isinstance(block_size, tuple | list) else (1, block_size)
    sizes = [size for size in block if size is not None]
    if len(block) != 2 or not all(type(size) is int and 0 < size < 1 << 63 for size in sizes):
        raise ArgumentError(
            f"block_size={block_size!r} is not a block; choose an int of 1 or more, or (outer, inner), "
            "in which None means the whole extent"
        )
    return block


def _check_out_dtype(out_dtype: torch.dtype | None) -> torch.dtype | None:
    if out_dtype is not None and out_dtype not in FLOAT_DTYPES:
        raise DtypeError(f"out_dtype={out_dtype!r} is not allowed; choose torch.float16, bfloat16, float32 or float64")
    return out_dtype


def _dtype_message(name: str, dtype: torch.dtype) -> str:
    return f"{name} has dtype {dtype}; choose float16, bfloat16, float32 or float64"


def _check_blocks(x: torch.Tensor, block: tuple[str, int | None, int | None] | None, dim: int, pad: bool) -> None:
    if block is None or pad or x.dim() == 0:
        return
    name, outer, inner = block
    extent = x.shape[dim]
    if inner is not None and extent % inner:
        choice = _divisors(extent, inner)
        raise ArgumentError(f"{name}: block_size={inner} does not divide {extent} (dim={dim}); {choice}pass pad=True")
    if outer is not None and outer > 1:
        rows = x.numel() // extent if extent else 0
        if rows % outer:
            choice = _divisors(rows, outer)
            raise ArgumentError(
                f"{name}: block rows={outer} do not divide the {rows} rows across dim={dim}; {choice}pass pad=True"
            )


def _divisors(extent: int, wanted: int) -> str:
    """Suggest the divisors of extent next to the wanted size."""
    divisors = [size for size in range(2, min(extent, 4096) + 1) if extent % size == 0]
    below = [size for size in divisors if size < wanted][-1:]
    above = [size for size in divisors if size > wanted][:1]
    choice = " or ".join(str(size) for size in below + above)
    return f"choose {choice}, or " if choice else ""


def _randomness(
    x: torch.Tensor, random: int, generator: Generator, words: torch.Tensor | None
) -> tuple[Key, torch.Tensor | None]:
    """Return the key and the words."""
    if not random:
        if words is not None:
            raise ArgumentError("random_words belong to rounding='stochastic'; leave them out or choose that rounding")
        return None, None
    if words is not None:
        if generator is not None:
            raise ArgumentError("random_words and generator exclude each other; pass one of them")
        wanted = f"pass int64 {tuple(x.shape)} on {x.device}"
        if not isinstance(words, torch.Tensor):
            raise ArgumentError(f"random_words are {type(words).__name__}, not a tensor; {wanted}")
        if words.shape != x.shape or words.dtype != torch.int64 or words.device != x.device:
            raise ArgumentError(f"random_words are {words.dtype} {tuple(words.shape)} on {words.device}; {wanted}")
        return None, words
    if isinstance(generator, torch.Generator):
        if generator.device.type not in ("cpu", x.device.type):
            raise ArgumentError(
                f"generator is on {generator.device}, x on {x.device}; "
                f"pass one on the CPU or on {x.device}, or an int seed"
            )
        draw = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), generator=generator, device=generator.device).cpu()
        return torch.cat([draw, draw.new_zeros(1)]), None
    if generator is None:
        draw = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), device="cpu")
        return torch.cat([draw, draw.new_zeros(1)]), None
    seed, offset = generator if isinstance(generator, RandomKey) else (generator, 0)
    if not type(seed) is type(offset) is int or not -(1 << 63) <= seed < 1 << 64 or not -(1 << 63) <= offset < 1 << 64:
        raise ArgumentError(f"generator={generator!r} is not a seed; pass an int of 64 bits or a torch.Generator")
    return RandomKey(*(number - (1 << 64) if number >= 1 << 63 else number for number in (seed, offset))), None


def _check_out(x: torch.Tensor, out: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor that can receive the result."""
    if not isinstance(out, torch.Tensor):
        raise DtypeError(f"out is {type(out).__name__}, not a tensor; pass torch.empty_like(x)")
    if out.dtype not in FLOAT_DTYPES:
        raise DtypeError(_dtype_message("out", out.dtype))
    if out_dtype is not None and out_dtype != out.dtype:
        raise DtypeError(f"out has dtype {out.dtype} but out_dtype={out_dtype}; leave out_dtype out")
    if out.shape != x.shape or out.device != x.device or out.layout != x.layout:
        wanted = f"{x.layout} {tuple(x.shape)} on {x.device}"
        raise ArgumentError(
            f"out is {out.layout} {tuple(out.shape)} on {out.device}; x is {wanted}, and out must agree"
        )
    if not out.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)
    ):
        raise ArgumentError(
            f"out of shape {tuple(out.shape)} and strides {out.stride()} holds several elements in one place; "
            "pass out.contiguous(), or a tensor that was not expanded"
        )
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ArgumentError("out= does not support autograd; call quantize without out=, or under torch.no_grad()")
    return out.dtype


def _check_codes(codes: torch.Tensor, fmt: FloatFormat | IntFormat | CodebookFormat | Any) -> torch.Tensor:
    """Return codes as bit patterns in the format's code dtype, or say which one is outside."""
    if codes.dtype.is_floating_point and codes.dtype.itemsize == 1:
        held = get_format(codes.dtype)
        if held != fmt:
            raise FormatError(
                f"codes have dtype {codes.dtype}, which is {held.name}, not {fmt.name}; "
                "leave format out or pass codes.view(torch.uint8)"
            )
        return codes.view(torch.uint8)
    if codes.dtype.is_floating_point or codes.dtype.is_complex or codes.dtype == torch.bool:
        raise DtypeError(f"codes have dtype {codes.dtype}; pass integers, or what fmtsim.encode returned")
    if codes.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has few operations for them
        codes = codes.to(torch.int64)
    limit = len(fmt.values) if isinstance(fmt, CodebookFormat) else 1 << fmt.bits
    lowest = -(limit >> 1) if isinstance(fmt, IntFormat) and fmt.signed else 0
    whole = codes.dtype == torch.uint8 and lowest == 0 and limit > 255  # a dtype without other codes
    if codes.numel() and fmt.bits < 63 and not whole:
        low, high = int(codes.min()), int(codes.max())
        if low < lowest or high >= limit:
            wrong = low if low < lowest else high
            raise CodeError(f"code {wrong} is outside {fmt.name}; its codes are {lowest} to {limit - 1}")
    return (codes.to(torch.int64) & (limit - 1) if lowest else codes).to(code_dtype(fmt.bits))
