# SPDX-License-Identifier: Apache-2.0
"""What a cast is, what encode returns, and the key of its random words: what verbs hand to engines."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from fmtsim.formats.block import Block, BlockFormat, Format, LogTileFormat, PackedFormat
from fmtsim.formats.element import Overflow
from fmtsim.formats.registry import format_from_dict, format_to_dict
from fmtsim.rounding.modes import Rounding
from fmtsim.support.errors import CodeError


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSpec:
    """Say everything about a cast except the data: what verbs hand to engines, and the key of engines' caches.

    Args:
        format: The target format.
        rounding: How values are rounded.
        overflow: What happens beyond the largest value.
        dim: The inner axis of blocks as a negative number, -1 for the last dimension.
    """

    format: Format
    rounding: Rounding
    overflow: Overflow
    dim: int = -1
    _hash: int = field(init=False, repr=False, compare=False)
    _text: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(_fields(self)))

    def __hash__(self) -> int:  # caches of engines ask for it in every call
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, CastSpec) and self._hash == other._hash and _fields(self) == _fields(other)

    def __reduce__(self) -> tuple[Any, ...]:  # without the hash: other processes have other hashes of strings
        return partial(CastSpec, format=self.format, rounding=self.rounding, overflow=self.overflow, dim=self.dim), ()

    def to_json(self) -> str:
        """Return the cast as one line of JSON, which torch's operators and compiled graphs carry; written once."""
        if not self._text:
            rounding = [self.rounding.mode, self.rounding.random_bits, self.rounding.variant, self.rounding.layout]
            record = {"format": format_to_dict(self.format), "rounding": rounding}
            object.__setattr__(self, "_text", json.dumps(record | {"overflow": self.overflow, "dim": self.dim}))
        return self._text


_fields = attrgetter("format", "rounding", "overflow", "dim")


class RandomKey(NamedTuple):
    """The seed and offset of a stream of random words (docs/semantics.md, section 9), both 64-bit."""

    seed: int
    offset: int = 0


class EncodedParts(NamedTuple):
    """What engines return from encode and take in decode.

    codes: the tensor's shape, unsigned bit patterns in ``code_dtype(bits)``; of ggml's formats ``block_bytes``.
    scales: float32 ``[outer_blocks, inner_blocks]`` of block formats (steps of LogFMT tiles), else None.
    tensor_scale: float32 of ``level_shape``, 0-d unless rows or windows have their own; None with one level.
    offsets: like scales: int32 zero points, or the float32 lowest logarithms of LogFMT tiles, else None.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None
    offsets: torch.Tensor | None = None


Random = RandomKey | torch.Tensor | None


@lru_cache(maxsize=4096)
def spec_from_json(text: str) -> CastSpec:
    """Read back what ``CastSpec.to_json`` wrote; the cast keeps the text."""
    record = json.loads(text)
    mode, random_bits, variant, layout = record["rounding"]
    rounding = Rounding(mode=mode, random_bits=random_bits, variant=variant, layout=layout)
    fmt = format_from_dict(record["format"])
    spec = CastSpec(format=fmt, rounding=rounding, overflow=record["overflow"], dim=record["dim"])
    object.__setattr__(spec, "_text", text)
    return spec


def matrix_shape(shape: Sequence[int], dim: int) -> tuple[int, int]:
    """Return the outer and the inner extent of a tensor that is seen as a matrix along ``dim``, a negative number."""
    sizes = list(shape) or [1]
    inner = sizes.pop(dim)
    return math.prod(sizes), inner


def block_counts(fmt: Format, shape: torch.Size, dim: int, block: Block | None = None) -> tuple[int, int]:
    """Return how many blocks, those of the format or others, a tensor has along the outer and the inner axis."""
    assert isinstance(fmt, BlockFormat | LogTileFormat)
    sizes = list(shape) or [1]
    inner = sizes.pop(dim)
    outer = math.prod(sizes)
    rows, columns = fmt.block if block is None else block  # None: the whole axis
    return -(-outer // (rows or outer)) if outer else 0, -(-inner // (columns or inner)) if inner else 0


def level_shape(fmt: BlockFormat, shape: torch.Size, dim: int) -> tuple[int, ...]:
    """Return the shape of the second level of scales of a tensor: () where the tensor has one number."""
    block = fmt.scaling.level_block
    return () if block == (None, None) else block_counts(fmt, shape, dim, block)


def block_bytes(fmt: PackedFormat, shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return the shape of the bytes of packed blocks: that of a tensor with ``dim`` moved last, in whole blocks."""
    sizes = list(shape) or [1]
    inner = sizes.pop(dim)
    return *sizes, -(-inner // fmt.elements) * fmt.bytes


def decoded_shape(spec: CastSpec, shape: torch.Size) -> tuple[int, ...]:
    """Return the shape of the values of codes, or of bytes of packed blocks, whole ones along the last dimension."""
    fmt, size = spec.format, shape[-1] if shape else 1
    if not isinstance(fmt, PackedFormat):
        return shape
    if size % fmt.bytes:
        raise CodeError(
            f"{fmt.name}: {size} bytes (dim=-1) are not whole blocks of {fmt.bytes} bytes ({fmt.elements} elements); "
            "pass the bytes of whole rows"
        )
    sizes = list(shape[:-1])
    sizes.insert(len(sizes) + 1 + spec.dim, size // fmt.bytes * fmt.elements)
    return tuple(sizes)


def in_one_order(x: torch.Tensor, out: torch.Tensor, ordered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one-dimensional views of input and output in the same order, or copies where there are none.

    Element by element any common order will do, so a transposed tensor needs no copy unless random words fix the order.
    """
    if not ordered and x.stride() == out.stride() and not x.is_contiguous() and _dense(x):
        return x.as_strided((x.numel(),), (1,)), out.as_strided((x.numel(),), (1,))
    target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    return x.contiguous().view(-1), target.view(-1)


def _dense(x: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
