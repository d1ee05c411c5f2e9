# SPDX-License-Identifier: Apache-2.0
"""Casts of other libraries by name, ``like=``: a record of each library's own arithmetic, from profiles/*.toml."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

import torch
from torch import Tensor

from fmtsim.casts import ops
from fmtsim.casts.arguments import inner_dim, prepare
from fmtsim.casts.encoded import Encoded
from fmtsim.casts.lanes import define_gradient, define_operator, keep_dtypes
from fmtsim.casts.profile_steps import DTYPES, RESULTS, run
from fmtsim.formats.block import BlockFormat, Format
from fmtsim.formats.element import ElementFormat
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import result_dtype
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import EncodedParts
from fmtsim.support.dispatch import constant_in_graphs, is_direct
from fmtsim.support.errors import ArgumentError, DtypeError, FormatError, did_you_mean, shown
from fmtsim.support.records import check_types


@dataclass(frozen=True, slots=True, kw_only=True)
class CastProfile:
    """Describe the cast of another library by its steps.

    Args:
        library: The name that ``like=`` takes.
        name: The variant, ``like="library/name"``; empty for what the library does by default.
        formats: Names of the formats for which the library has this cast.
        steps: The arithmetic, an operation that rounds once after another (``fmtsim.casts.profile_steps``).
        block: Elements along ``dim`` that share a scale, ``"row"``, ``"tensor"``, or None: each element alone. A block
            format whose own blocks have another size goes by that (``block_of``).
        inputs: dtypes of x that the library takes.
        function: What a user of the library calls.
        source: The file that says so, with its version.
        versions: The releases that were compared.
        device: Where the library computes.
        verified: What was compared, when, and with what result.
        notes: What a user would not guess.
        package: The library's name on PyPI.
        tables: Lists of numbers that steps name.
    """

    library: str
    name: str = ""
    formats: tuple[str, ...]
    steps: str
    block: int | Literal["row", "tensor"] | None = None
    inputs: tuple[str, ...] = ("fp32", "fp16", "bf16", "fp64")
    function: str = ""
    source: str = ""
    versions: str = ""
    device: str = "cpu"
    verified: str = ""
    notes: str = ""
    package: str = ""
    tables: dict[str, list[float]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_types(self, FormatError)

    @property
    def like(self) -> str:
        """What ``like=`` takes."""
        return f"{self.library}/{self.name}" if self.name else self.library

    def block_of(self, fmt: Format) -> int | str | None:
        """Return the block of a cast to one of ``formats``: 64 for int4_g64, although other formats share the steps."""
        inner = fmt.block[1] if isinstance(fmt, BlockFormat) and isinstance(self.block, int) else None
        return self.block if inner is None else inner

    def results(
        self, x: Tensor, fmt: Format, *, dim: int = -1, block_size: Any = None,
        trace: Callable[[str, str, Any], None] | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return what the steps compute, each of x's shape or with one number a block along ``dim``.

        Args:
            x: Tensor of any shape, of a dtype in ``inputs``.
            fmt: The format, one of ``formats``.
            dim: The dimension along which blocks run.
            block_size: Elements of a block, an int, where ``block`` is a number.
            trace: Called with text, name and result of each step.

        Raises:
            DtypeError: The library takes no such dtype.
            ArgumentError: Blocks do not fit x.
        """
        # 1. x as a matrix with a block in each row
        dtype = next((name for name, dtype in DTYPES.items() if dtype == x.dtype), None)
        if dtype not in self.inputs:
            raise DtypeError(f"x has dtype {x.dtype}; {self.like} takes {', '.join(self.inputs)}")
        moved = x.detach().reshape(1) if not x.dim() else x.detach().movedim(dim, -1)
        columns = moved.shape[-1]
        if isinstance(self.block, int):
            size = self.block_of(fmt) if block_size is None else block_size
            if type(size) is not int or size < 1 or columns % size:
                raise ArgumentError(
                    f"block_size={shown(size)} does not divide {columns} (dim={dim}); {self.like} takes whole blocks"
                )
        else:
            size = {None: 1, "row": columns, "tensor": x.numel()}[self.block]
            if block_size is not None:
                raise ArgumentError(f"block_size={shown(block_size)}: {self.like} has no size to choose; leave it out")
        if not x.numel():
            return {"value": x.float()}
        # 2. the library's arithmetic
        element = fmt.element if isinstance(fmt, BlockFormat) else fmt
        steps_fmt = element if isinstance(element, ElementFormat) else None
        rows, blocks_per_row = moved.reshape(-1, size), max(columns // size, 1)
        names = run(self.steps, rows, blocks_per_row, steps_fmt, self.tables, trace)
        # 3. back: one number an element, or one a block
        results: dict[str, Tensor] = {}
        for name in RESULTS:
            if name not in names:
                continue
            result = names[name]
            if name in ("value", "code"):
                shaped = result.expand(rows.shape).reshape(moved.shape).movedim(-1, dim) if x.dim() else result[0, 0]
            elif name == "tensor_scale":
                shaped = result.reshape(-1)[0]
            else:
                shaped = result.expand(len(rows), 1).reshape(-1, blocks_per_row)
            results[name] = shaped
        return results


@lru_cache(maxsize=1)
def _libraries() -> dict[str, Any]:
    """Return the files of profiles by library."""
    folder = files("fmtsim.casts") / "profiles"
    return {file.name.removesuffix(".toml"): file for file in folder.iterdir() if file.name.endswith(".toml")}


@lru_cache(maxsize=64)
def library_profiles(library: str) -> tuple[CastProfile, ...]:
    """Return the profiles of a library, the default first in the order of its file."""
    record = tomllib.loads(_libraries()[library].read_text(encoding="utf-8"))
    shared = {key: value for key, value in record.items() if key != "profile"}
    profiles = []
    for entry in record["profile"]:
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in {**shared, **entry}.items()
        }
        profiles.append(CastProfile(**fields))
    return tuple(profiles)


def list_profiles() -> list[str]:
    """Return what ``like=`` takes: the casts of other libraries that fmtsim reproduces.

    >>> "ml_dtypes" in list_profiles()
    True
    """
    return list(
        dict.fromkeys(profile.like for library in sorted(_libraries()) for profile in library_profiles(library))
    )


def get_profile(
    like: str, format: str | Format | torch.dtype, dtype: torch.dtype | None = None
) -> tuple[CastProfile, Format]:
    """Return the profile of a library for a format, and the format's record.

    Args:
        like: ``"library"`` or ``"library/variant"``, one of ``list_profiles()``; ``==version`` behind it asks for a
            release that was compared.
        format: As in ``quantize``.
        dtype: Of x, where the library has several casts to the format; the first that takes it, or the first of all.

    Raises:
        FormatError: There is no such library or variant, or it lacks the format.
    """
    if not isinstance(like, str):
        raise FormatError(f"like={shown(like)} is not a name; choose one of fmtsim.list_profiles()")
    like, _, version = (part.strip() for part in like.lower().partition("=="))
    library, _, name = like.partition("/")
    if library not in _libraries():
        close = did_you_mean(library, _libraries())
        raise FormatError(f"like={shown(like)} has no profile{close}; fmtsim.list_profiles() has all")
    profiles = [profile for profile in library_profiles(library) if profile.name == name]
    if not profiles:
        names = ", ".join(dict.fromkeys(shown(profile.like) for profile in library_profiles(library)))
        raise FormatError(f"like={shown(like)} has no profile; {library} has {names}")
    fmt = get_format(format)
    casts = [profile for profile in profiles if fmt in map(get_format, profile.formats)]
    if casts and not any(not version or version in profile.versions.split() for profile in casts):
        compared = ", ".join(dict.fromkeys(f"{profile.versions} ({profile.device})" for profile in casts))
        raise FormatError(
            f"{like}=={version} has no profile for {fmt.name}; compared were {compared}: {casts[0].notes} Leave the "
            f"version out, or hold the profile to it with python -m tools.peers {library} --versions in a checkout"
        )
    if casts:
        takes = (one for one in casts if any(DTYPES[each] == dtype for each in one.inputs))
        return next(takes, casts[0]), fmt
    # the library's other functions may have one
    others = [each.like for each in library_profiles(library) if fmt in map(get_format, each.formats)]
    also = "".join(f"; choose like={shown(other)}" for other in dict.fromkeys(others))
    has = ", ".join(dict.fromkeys(each for profile in profiles for each in profile.formats))
    raise FormatError(f"{shown(like)} has no cast to {fmt.name}; it has {has}{also}")


def check_alone(like: str, *options: Any) -> None:
    """Raise ArgumentError for rounding, overflow, ... beside ``like``, which says all of that."""
    names = ("rounding", "overflow", "generator", "random_bits", "random_words", "scale_rule", "pad")
    for name, value in zip(names, options, strict=True):
        if (
            value is not None
            and value is not False
            and not (name == "rounding" and value in ("nearest_even", Rounding()))
        ):
            raise ArgumentError(f"{name}={shown(value)} with like={shown(like)}, which says how; leave {name}= out")


def quantize_like(
    x: Tensor, format: Any, like: str, *, dim: int = -1, block_size: Any = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return the values of another library's cast; arguments and the gradient are those of ``quantize``."""
    name, dtype = _result(format, like, x.dtype, out_dtype)
    arguments = x, name, like, inner_dim(x, dim), block_size, dtype
    if torch.compiler.is_compiling():
        return torch.ops.fmtsim.quantize_like(*arguments)  # type: ignore[no-any-return]
    return _QuantizeLike.apply(*arguments)  # type: ignore[no-any-return,attr-defined]


@constant_in_graphs
def _result(format: Any, like: str, dtype: torch.dtype, out_dtype: torch.dtype | None) -> tuple[str, torch.dtype]:
    """Return the format's name and the dtype of values: x's where it holds them, else float32 or float64."""
    profile, fmt = get_profile(like, format, dtype)
    if out_dtype is not None:
        return fmt.name, out_dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return fmt.name, wide if profile.block is not None else result_dtype(fmt, dtype)


def _values(x: Tensor, format: str, like: str, dim: int, block_size: Any, dtype: torch.dtype) -> Tensor:
    profile, fmt = get_profile(like, format, x.dtype)
    value = profile.results(x, fmt, dim=dim, block_size=block_size)["value"]
    return value.to(dtype).contiguous()


define_operator(
    "quantize_like(Tensor x, str format, str like, int dim, int? block_size, ScalarType dtype) -> Tensor",
    _values,
    lambda x, format, like, dim, block_size, dtype: x.new_empty(x.shape, dtype=dtype),
)


_QuantizeLike = define_gradient(
    "quantize_like",
    keep_dtypes,
    lambda ctx, grad: (grad.to(ctx.dtypes[0]), None, None, None, None, None),
    lambda ctx, tangent, *_: tangent.to(ctx.dtypes[1]),
    lambda x, *rest: _values(x, *rest) if is_direct(x) else torch.ops.fmtsim.quantize_like(x, *rest),
)


def encode_like(x: Tensor, format: Any, like: str, *, dim: int = -1, block_size: Any = None) -> Encoded:
    """Return the codes of another library's cast; arguments are those of ``encode``.

    Raises:
        FormatError: The library's scales have no place in the format's codes; ``quantize`` gives the values.
    """
    profile, fmt = get_profile(like, format, x.dtype)
    inner = inner_dim(x, dim)
    results = profile.results(x, fmt, dim=inner, block_size=block_size)
    # 1. a code an element: the library's own, or that of its value
    if isinstance(fmt, ElementFormat) and profile.block is None:
        if "code" not in results:
            value, overflow = results["value"], "ieee" if fmt.has_nan else "saturate"
            spec, *_ = prepare(value, fmt, "nearest_even", overflow, -1, None, None, None, None)
            return Encoded.from_parts(ops.encode(value, spec), fmt, x.shape, inner)
        return Encoded.from_parts(EncodedParts(results["code"].to(code_dtype(fmt.bits))), fmt, x.shape, inner)
    # 2. codes and scales, where the format has a place for them
    if not isinstance(fmt, BlockFormat) or "code" not in results or "scale" not in results:
        raise FormatError(f"{profile.like} gives values alone for {fmt.name}; call quantize(x, {fmt.name!r}, like=...)")
    tensor_scale, zero = results.get("tensor_scale"), results.get("zero")
    parts = EncodedParts(results["code"].to(code_dtype(fmt.bits)), results["scale"].float(), tensor_scale, zero)
    return Encoded.from_parts(parts, fmt, x.shape, inner)
