# SPDX-License-Identifier: Apache-2.0
"""What the verbs are called with: checks of tensors, formats and blocks, and what a cast is made of."""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch

from fmtsim.casts.lanes import Key, signed
from fmtsim.formats.block import BlockFormat, Format, PackedFormat, ScaledFormat, with_block
from fmtsim.formats.element import OVERFLOWS, CodebookFormat, Overflow
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import FLOAT8_DTYPES, FLOAT_DTYPES, check_holds, result_dtype
from fmtsim.rounding.modes import Rounding, get_rounding
from fmtsim.spec.cast import CastSpec, RandomKey
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.dispatch import PLAIN_TYPES, constant_in_graphs, is_readable
from fmtsim.support.errors import ArgumentError, DtypeError, FormatError, keyword_error, position_error, shown

Verb = TypeVar("Verb", bound=Callable[..., Any])
Generator = int | torch.Generator | RandomKey | None
_SEEDS = -(1 << 63), (1 << 63) - 1  # the least, and what lies above the largest
NamedBlock = tuple[str, int | None, int | None] | None
"""The name of a format and the extents of its block; None for an element format."""


def check_whole(name: str, *types: type) -> None:
    """Refuse DTensors, whose operators would need sharding strategies: a shard has scales and sums of its own."""
    if any(cls.__name__ == "DTensor" for cls in types):
        text = (
            f"{name} is a DTensor (torch's parallelize_module makes them), for which fmtsim has no sharding strategies"
        )
        step = "share out a model's layers with fmtsim.distributed.parallelize, then convert it"
        raise ArgumentError(f"{text}; pass its to_local() or full_tensor(); {step}")


def check_dense(name: str, x: Any) -> None:
    """Refuse what is not a tensor whose elements lie in memory by strides; ``name`` is what errors call it."""
    if not isinstance(x, torch.Tensor):
        step = "the tensor comes first" if isinstance(x, str) else f"pass torch.tensor({name})"
        raise DtypeError(f"{name} is {type(x).__name__}, not a tensor; {step}")
    if type(x) not in PLAIN_TYPES:
        check_whole(name, type(x))
        if torch.nn.parameter.is_lazy(x):
            raise ArgumentError(f"{name} belongs to a lazy module and has no shape yet; run the module once first")
    if torch.compiler.is_compiling():  # dynamo cannot see layouts
        return
    if x.is_nested:
        raise ArgumentError(
            f"{name} is a nested tensor; pass its parts one by one ({name}.unbind()), or {name}.to_padded_tensor(0.0)"
        )
    if x.layout is not torch.strided:
        raise ArgumentError(f"{name} has layout {x.layout}; pass a dense tensor, for example {name}.to_dense()")


def check_together(**tensors: torch.Tensor | None) -> None:
    """Refuse tensors that no operation takes together: on different devices, or fake beside tensors that are not."""
    present = {name: t for name, t in tensors.items() if t is not None}
    first = next(iter(present))
    plain = True
    # 1. one device
    for name, t in present.items():
        plain = plain and type(t) in PLAIN_TYPES
        if t.device != present[first].device:
            step = f"for example {name}.to({first}.device)"
            if t.is_meta and name in ("w", "bias"):  # of a layer
                step += ", or load it: Accelerate's offloaded weights are there while the forward of their module runs"
            raise ArgumentError(
                f"{first} is on {present[first].device}, {name} on {t.device}; move them to one device, {step}"
            )
    # 2. beside a fake tensor torch takes neither subclasses nor tensors of another mode
    if not plain and not torch.compiler.is_compiling():
        modes = [t.fake_mode for t in present.values() if isinstance(t, torch._subclasses.FakeTensor)]
        for name, t in present.items() if modes else ():
            allowed = modes[0].allow_non_fake_inputs and type(t) in PLAIN_TYPES
            if not allowed and getattr(t, "fake_mode", None) is not modes[0]:
                raise ArgumentError(
                    f"{name} is a {type(t).__name__} beside a fake tensor, and torch does not take both; "
                    "make all of them fake by one FakeTensorMode"
                )


def check_module(verb: str, model: Any) -> None:
    """Refuse what is not a module."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"{verb} takes a torch.nn.Module, not {type(model).__name__}; pass the model itself")


def check_saved(verb: str, *tensors: torch.Tensor) -> None:
    """Refuse tensors that torch does not keep for a gradient: those made in inference mode."""
    if not torch.compiler.is_compiling() and any(x.is_inference() for x in tensors):
        raise ArgumentError(
            f"{verb}: a tensor was made in inference mode, and torch keeps none of those for a gradient; "
            "pass a clone of it, or call under torch.no_grad()"
        )


def takes(function: Any, *arguments: Any) -> bool:
    """Return True if something can be called with these arguments, as far as its signature tells."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*arguments)
    except ValueError:  # functions written in C may have no signature
        return True
    except TypeError:
        return False
    return True


def spelled(verb: Verb, like: Any = None) -> Verb:
    """Give a verb that refuses other arguments itself the signature that help shows, with the keywords of ``like``."""
    own = [p for p in inspect.signature(verb).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    more = [p for p in inspect.signature(like or len).parameters.values() if p.kind is p.KEYWORD_ONLY]
    verb.__signature__ = inspect.signature(verb).replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    return verb


def refuse_others(verb: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Raise TypeError for arguments that a verb lacks, with the keyword that says the same here, or close names."""
    for name in keywords:
        raise keyword_error(verb.__name__, name, inspect.signature(verb).parameters)
    for value in arguments:
        parameters = inspect.signature(verb).parameters.values()
        names = [[p.name for p in parameters if (p.kind is p.KEYWORD_ONLY) == keyword] for keyword in (False, True)]
        raise position_error(verb.__name__, value, *names)


def check_flags(**flags: Any) -> None:
    """Refuse flags that are neither True nor False; ``native`` may be None."""
    for name, value in flags.items():
        if value is not True and value is not False and not (value is None and name == "native"):
            none = "None (where possible), " if name == "native" else ""
            raise ArgumentError(f"{name}={shown(value)} is not a flag; pass {none}True or False")


def check_readable(name: str, x: torch.Tensor) -> None:
    """Refuse a tensor whose elements cannot be looked at."""
    if not is_readable(x):
        where = "is on meta" if x.is_meta else "is fake, or traced by torch.compile, torch.export or vmap"
        raise ArgumentError(f"{name} {where}, so it has no numbers to look at; pass a tensor on a device, uncompiled")


def check_input(x: torch.Tensor, name: str = "x", *, float8: bool = False) -> None:
    """Refuse what is not a dense tensor of a dtype that casts take; the verbs take float8 as well."""
    check_dense(name, x)
    if x.dtype not in FLOAT_DTYPES and not (float8 and x.dtype in FLOAT8_DTYPES):
        # float32 holds integers of up to 16 bits; a wider one would be rounded twice
        narrow = x.dtype.itemsize < 4
        hint = "convert it with .float()" if narrow else "convert it with .double(), which is exact below 2**53"
        hint = "take the real and imaginary parts apart" if x.dtype.is_complex else hint
        hint = "decode it with fmtsim.decode(x)" if x.dtype.is_floating_point else hint
        raise DtypeError(f"{_dtype_message(name, x.dtype, float8)} ({hint})")


def check_features(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Refuse an input that does not go with the weight [..., features] of a layer."""
    check_input(x, "input")
    check_together(input=x, weight=weight)
    if x.dim() < 1 or x.shape[-1] != weight.shape[-1]:
        raise ArgumentError(f"input has shape {tuple(x.shape)}; pass [..., {weight.shape[-1]}]")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise DtypeError(f"input has dtype {x.dtype}, the weight {weight.dtype}; convert one, or use torch.autocast")
    if torch.is_grad_enabled():
        check_saved("a layer", x)


def inner_dim(x: torch.Tensor, dim: int) -> int:
    """Return a dimension of x as a negative number, counted from the last; a scalar has one."""
    rank = max(x.dim(), 1)
    if type(dim) is not int or not -rank <= dim < rank:
        raise ArgumentError(
            f"dim={shown(dim)} is not a dimension of x of shape {tuple(x.shape)}; choose {-rank} to {rank - 1}"
        )
    return dim - rank if dim >= 0 else dim


def prepare(
    x: torch.Tensor, format: Any, rounding: Any, overflow: Any, dim: int, random_bits: int | None,
    block_size: Any, scale_rule: Any, out_dtype: torch.dtype | None,
) -> tuple[CastSpec, torch.dtype, NamedBlock, int]:  # fmt: skip
    """Check the arguments and return the cast, the result dtype, the block, and the random bits it needs."""
    inner = inner_dim(x, dim)  # counted from the last: one cast for tensors of any rank
    arguments = format, rounding, overflow, inner, random_bits, block_size, scale_rule, x.dtype, out_dtype
    if not torch.compiler.is_compiling():
        try:
            return _resolve(*arguments)
        except TypeError:  # from a check, which raises again below, or from an argument that has no hash
            pass
    return _resolve_any(*arguments)


@constant_in_graphs
def _resolve_any(*arguments: Any) -> tuple[CastSpec, torch.dtype, NamedBlock, int]:
    """Do what ``_resolve`` does for arguments that the cache may be unable to hash, such as a list."""
    try:
        hash(arguments)
    except TypeError:
        return _resolve.__wrapped__(*arguments)  # whose checks name the argument
    resolved = _resolve(*arguments)
    resolved[0].to_json()  # torch.compile reads the text of a constant, but cannot trace how it is written
    return resolved


@lru_cache(maxsize=4096, typed=True)
def _resolve(
    format: Any, rounding: Any, overflow: Any, dim: int, random_bits: int | None,
    block_size: Any, scale_rule: Any, dtype: torch.dtype, out_dtype: torch.dtype | None,
) -> tuple[CastSpec, torch.dtype, NamedBlock, int]:  # fmt: skip
    if isinstance(format, Quantizer):
        format, rounding, overflow, _ = cast_options(format, rounding, overflow, random_bits, block_size, scale_rule)
        random_bits = block_size = scale_rule = None
    fmt = with_block(get_format(format), block_size, scale_rule)
    mode = get_rounding(rounding, random_bits)
    if overflow is not None and (not isinstance(overflow, str) or overflow not in OVERFLOWS):
        message = "choose 'saturate', 'ieee' or None for the format's default"
        raise FormatError(f"unknown overflow {shown(overflow)}; {message}")
    if isinstance(fmt, PackedFormat) and (mode != Rounding() or overflow == "ieee"):
        raise FormatError(f"{fmt.name} is rounded as its source does; leave rounding= and overflow= out")
    spec = CastSpec(format=fmt, rounding=mode, overflow=overflow or fmt.default_overflow, dim=dim)
    result = check_out_dtype(out_dtype, fmt) or result_dtype(fmt, dtype)
    random = mode.bits if mode.mode == "stochastic" else 0
    block = (fmt.name, *fmt.block) if isinstance(fmt, ScaledFormat) else None
    return spec, result, block, random


def cast_options(
    quantizer: Quantizer, rounding: Any = None, overflow: Any = None, random_bits: Any = None, block_size: Any = None,
    scale_rule: Any = None, like: Any = None,
) -> tuple[Format, Rounding, Overflow | None, str | None]:  # fmt: skip
    """Return format, rounding, overflow and like of a Quantizer that only casts; refuse a verb's own beside it."""
    rounding = None if rounding in ("nearest_even", Rounding()) else rounding
    options = {"rounding": rounding, "overflow": overflow, "random_bits": random_bits, "block_size": block_size,
               "scale_rule": scale_rule, "like": like}  # fmt: skip
    for name, value in options.items():
        if value is not None:
            text = f"{name}={shown(value)} beside a Quantizer, which says how to round and scale"
            raise ArgumentError(f"{text}; leave it out, or write it into dataclasses.replace(quantizer, ...)")
    cast = quantizer.as_cast()
    assert cast.format is not None
    return cast.format, cast.rounding, cast.overflow, cast.like or None


@constant_in_graphs
def only_casts(quantizer: Quantizer) -> bool:
    """Return True if a Quantizer is a cast to a format alone."""
    try:
        return bool(quantizer.as_cast())
    except FormatError:  # transforms, a second cast, or a rule that block formats lack
        return False


def check_out_dtype(out_dtype: torch.dtype | None, fmt: Format) -> torch.dtype | None:
    """Return the dtype; raise DtypeError for one that results do not have, or a float8 one that lacks a value."""
    if out_dtype is None or (isinstance(out_dtype, torch.dtype) and out_dtype in FLOAT_DTYPES):
        return out_dtype
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in FLOAT8_DTYPES:
        kinds = "torch.float16, bfloat16, float32, float64 or a float8 dtype"
        raise DtypeError(f"out_dtype={shown(out_dtype)} is not allowed; choose {kinds}")
    check_holds(fmt, out_dtype)
    return out_dtype


def _dtype_message(name: str, dtype: torch.dtype, float8: bool) -> str:
    rest = "float32, float64 or a float8 dtype" if float8 else "float32 or float64"
    return f"{name} has dtype {dtype}; choose float16, bfloat16, {rest}"


def check_blocks(x: torch.Tensor, block: NamedBlock, dim: int, pad: bool) -> None:
    """Refuse a tensor that whole blocks do not fill, unless it may be padded."""
    check_flags(pad=pad)
    if block is None or pad or x.dim() == 0:
        return
    name, outer, inner = block
    extent = x.shape[dim]
    # 1. along dim
    if inner is not None and extent % inner:
        choice = _divisors(extent, inner)
        raise ArgumentError(f"{name}: block_size={inner} does not divide {extent} (dim={dim}); {choice}pass pad=True")
    # 2. across it, where all other dimensions count as one
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


def randomness(
    x: torch.Tensor, random: int, generator: Generator, words: torch.Tensor | None
) -> tuple[Key, torch.Tensor | None]:
    """Return the key and the words."""
    # 1. a cast that draws nothing
    if not random:
        if words is not None:
            raise ArgumentError("random_words belong to rounding='stochastic'; leave them out or choose that rounding")
        return None, None
    # 2. words of the caller, one for each element
    if words is not None:
        if generator is not None:
            raise ArgumentError("random_words and generator exclude each other; pass one of them")
        wanted = f"pass int64 {tuple(x.shape)} on {x.device}"
        if not isinstance(words, torch.Tensor):
            raise ArgumentError(f"random_words are {type(words).__name__}, not a tensor; {wanted}")
        check_dense("random_words", words)
        if words.shape != x.shape or words.dtype != torch.int64 or words.device != x.device:
            raise ArgumentError(f"random_words are {words.dtype} {tuple(words.shape)} on {words.device}; {wanted}")
        check_together(x=x, random_words=words)
        return None, words
    # 3. a key, from which engines make the word of each place
    return drawn_key(generator, x.device), None


def drawn_key(generator: Generator, device: torch.device, name: str = "x") -> RandomKey | torch.Tensor:
    """Return the numbers of a seed, or int64 [seed, offset] drawn from a generator, None being torch's default one.

    Args:
        generator: The argument of a verb.
        device: Where its tensors are.
        name: Of the first of them.

    Raises:
        ArgumentError: The argument is not a generator, or it is on another device.
    """
    # 1. one int64 from a generator, on the CPU: the key stays a tensor, so that a compiled graph draws in every call
    if generator is None or isinstance(generator, torch.Generator):
        where = torch.device("cpu") if generator is None else generator.device
        if where.type not in ("cpu", device.type):
            raise ArgumentError(
                f"generator is on {where}, {name} on {device}; pass one on the CPU or on {device}, or an int seed"
            )
        draw = torch.randint(*_SEEDS, (1,), generator=generator, device=where).cpu()
        return torch.cat([draw, draw.new_zeros(1)])
    # 2. a seed, signed or unsigned
    seed, offset = generator if isinstance(generator, RandomKey) else (generator, 0)
    if not type(seed) is type(offset) is int or not -(1 << 63) <= seed < 1 << 64 or not -(1 << 63) <= offset < 1 << 64:
        raise ArgumentError(f"generator={shown(generator)} is not a seed; pass an int of 64 bits or a torch.Generator")
    return RandomKey(signed(seed), signed(offset))


def drawn_numbers(count: int, generator: Generator, device: torch.device) -> list[RandomKey]:
    """Return what so many calls of ``drawn_key`` do, always as numbers and in less time."""
    if generator is None or (isinstance(generator, torch.Generator) and generator.device.type == "cpu"):  # at once
        seeds = torch.randint(*_SEEDS, (count,), generator=generator, device="cpu")
        return [RandomKey(seed) for seed in seeds.tolist()]
    keys = [drawn_key(generator, device) for _ in range(count)]  # a GPU's generator: one number at a time
    return [key if isinstance(key, RandomKey) else RandomKey(*key.tolist()) for key in keys]


def random_keys(stochastic: bool, generator: Generator, batch: int | None, device: torch.device) -> torch.Tensor | None:
    """Return the keys of the products of a call: int64 [2], or [batch, 2]; None where nothing is drawn.

    Args:
        stochastic: The unit rounds stochastically.
        generator: As in ``drawn_key``.
        batch: Products of the call, None for a single one. With a seed, product i has offset i more than the first; a
            torch.Generator is drawn from once for each.
        device: Where the operands are.

    Raises:
        ArgumentError: The argument is not a generator, it is on another device, or nothing is drawn.
    """
    if not stochastic:
        if generator is not None:
            raise ArgumentError("generator= is for units that round stochastically; this one does not, leave it out")
        return None
    keys: list[RandomKey | torch.Tensor] = []
    for i in range(1 if batch is None else batch):
        key = keys[0] if keys and isinstance(keys[0], RandomKey) else drawn_key(generator, device, "a")
        keys.append(RandomKey(key.seed, signed(key.offset + i)) if isinstance(key, RandomKey) else key)
    tensors = [torch.as_tensor(key) for key in keys]
    if batch is None:
        return tensors[0]
    return torch.stack(tensors) if tensors else torch.empty(0, 2, dtype=torch.int64)


def check_out(x: torch.Tensor, out: torch.Tensor, out_dtype: Any) -> torch.dtype:
    """Return the dtype of a tensor that can receive the result."""
    # 1. its dtype
    check_dense("out", out)
    if out.dtype not in FLOAT_DTYPES and out.dtype not in FLOAT8_DTYPES:
        raise DtypeError(_dtype_message("out", out.dtype, True))
    if out_dtype is not None and (not isinstance(out_dtype, torch.dtype) or out_dtype != out.dtype):
        raise DtypeError(f"out has dtype {out.dtype} but out_dtype={shown(out_dtype)}; leave out_dtype out")
    # 2. its shape and its place
    if out.shape != x.shape or out.device != x.device or out.layout != x.layout:
        wanted = f"{x.layout} {tuple(x.shape)} on {x.device}"
        raise ArgumentError(
            f"out is {out.layout} {tuple(out.shape)} on {out.device}; x is {wanted}; pass torch.empty_like(x)"
        )
    check_together(x=x, out=out)
    # 3. its memory: no two elements share a place, and strides do not interleave in a way that no slice or view makes
    reach = 0  # of the dimensions seen so far, the finest first
    for stride, size in () if out.is_contiguous() else sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ArgumentError(
                f"out of shape {tuple(out.shape)} and strides {out.stride()} holds several elements in one place; "
                "pass out.contiguous(), or a tensor that was not expanded"
            )
        reach += (size - 1) * stride
    # 4. what autograd allows
    if not torch.compiler.is_compiling() and out.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError("out was made in inference mode, and torch writes to it in there alone; pass out.clone()")
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ArgumentError("out= does not support autograd; call quantize without out=, or under torch.no_grad()")
    return out.dtype


@constant_in_graphs
def decoding(format: Any, codes: torch.dtype, out_dtype: torch.dtype | None) -> tuple[CastSpec, torch.dtype]:
    """Return the cast whose codes a plain tensor of a dtype holds, and the dtype of its values."""
    fmt = get_format(format)
    # 1. a format whose values are made of codes alone
    if isinstance(fmt, ScaledFormat) and not isinstance(fmt, PackedFormat):
        raise FormatError(f"{fmt.name} needs scales; decode what encode returned, or name an element format")
    # 2. codes in the dtype of the format, or integers
    if codes.is_floating_point and codes.itemsize == 1:
        stored = get_format(codes)
        if stored != fmt:
            raise FormatError(
                f"codes have dtype {codes}, which is {stored.name}, not {fmt.name}; "
                "leave format out or pass codes.view(torch.uint8)"
            )
    elif codes not in _CODES:
        raise DtypeError(f"codes have dtype {codes}; pass integers, or what fmtsim.encode returned")
    cast = decoding_cast(fmt, -1)
    cast.to_json()  # as in _resolve_any
    return cast, check_out_dtype(out_dtype, fmt) or result_dtype(fmt, torch.float32)


_CODES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


@lru_cache(maxsize=4096)
def decoding_cast(fmt: Format, dim: int) -> CastSpec:
    """Return the cast whose codes are decoded: its rounding plays no part."""
    return CastSpec(format=fmt, rounding=Rounding(), overflow=fmt.default_overflow, dim=dim)


def short_codebook(fmt: Format) -> CodebookFormat | None:
    """Return the codebook of a format whose bits have patterns that are not codes, None where all are."""
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    return element if isinstance(element, CodebookFormat) and len(element.values) < 1 << element.bits else None
