# SPDX-License-Identifier: Apache-2.0
"""Encoded tensors: packed codes with the scales that decode them, in memory and in files."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import InitVar, dataclass
from typing import Any

import torch

from fmtsim.casts import ops
from fmtsim.casts.arguments import (
    check_dense,
    check_out_dtype,
    check_readable,
    check_together,
    decoding_cast,
    short_codebook,
)
from fmtsim.casts.lanes import or_empty, or_none
from fmtsim.casts.stored import restore, restore_codes, restore_scales, store, stored_layout
from fmtsim.formats.block import Format, PackedFormat
from fmtsim.formats.packing import tensor_bytes, tensor_of_bytes
from fmtsim.formats.registry import format_from_json, format_to_json
from fmtsim.formats.representable import result_dtype
from fmtsim.formats.tensor_file import StoredTensor, read_tensors, write_tensors
from fmtsim.spec.cast import CastSpec, EncodedParts, spec_from_json
from fmtsim.support.dispatch import constant_in_graphs, is_readable
from fmtsim.support.errors import ArgumentError, CodeError, DataError, DtypeError, FormatError, shown
from fmtsim.support.records import located, parse_json
from fmtsim.support.table import facts_html

_LAYOUT = "1"  # of files; a reader refuses any other
_PARTS = ("scales", "tensor_scale", "offsets")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Encoded:
    """Hold a tensor as codes and scales, in as few bytes as its format needs.

    ``fmtsim.encode`` makes them; ``from_parts`` makes them from what an engine returns.

    Args:
        format: The format.
        shape: The shape of the tensor that was encoded.
        dim: The inner axis of blocks, as a negative number.
        codes: Codes of 8, 16, 32 and 64 bits in uint8, int16, int32 and int64 of the tensor's shape; codes of
            another width as packed bytes, ``dim`` moved last (docs/semantics.md, section 11).
        scales: ``[outer_blocks, inner_blocks]``: uint8 codes where the scale format has 8 bits or fewer, else values
            in its own dtype; the steps of LogFMT tiles in float32. None for element formats.
        tensor_scale: float32, of two-level formats, else None: 0-d, or ``[rows, windows]`` where rows of the operand or
            windows of blocks have their own.
        offsets: int32 zero points or the float32 lowest logarithms of LogFMT tiles, like ``scales``, else None.
        cast: The cast that made it, where torch.compile, vmap or export traced it; None elsewhere.
        validated: Codes and scales are known to be those of the format, which saves looking at them.

    Raises:
        CodeError: A part has another dtype or shape than the format asks for, or a code outside the format.
        ArgumentError, FormatError: ``shape`` is not a shape, ``dim`` not a dimension or ``format`` not a record; parts
            are on different devices.
    """

    format: Format
    shape: torch.Size
    dim: int
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    cast: CastSpec | None = None
    validated: InitVar[bool] = False

    def __post_init__(self, validated: bool) -> None:
        if not torch.compiler.is_compiling():  # which could not trace it
            fmt, shape, dim = self.format, self.shape, self.dim
            if not isinstance(fmt, Format):
                raise FormatError(f"format={shown(fmt)} is not a format record; pass fmtsim.get_format(name)")
            if not isinstance(shape, tuple) or not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
                raise ArgumentError(f"shape={shown(shape)} is not a shape; pass a tuple of sizes")
            if type(dim) is not int or not -max(len(shape), 1) <= dim < 0:
                raise ArgumentError(f"dim={shown(dim)} is not a dimension; choose {-max(len(shape), 1)} to -1")
            # each part has the dtype and the shape that its format asks for
            layout = stored_layout(fmt, torch.Size(shape), dim)
            for name in ("codes", *_PARTS):
                tensor: torch.Tensor | None = getattr(self, name)
                if (tensor is None) != (name not in layout):
                    states = ("some", "none") if tensor is None else ("none", "some")
                    raise CodeError(f"{fmt.name}: {name} expected {states[0]}, found {states[1]}")
                if tensor is None:
                    continue
                check_dense(name, tensor)
                _, _, dtype, size = layout[name]
                if (tensor.dtype, tuple(tensor.shape)) != (dtype, size):
                    raise CodeError(
                        f"{fmt.name}: {name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(size)}"
                    )
            check_together(codes=self.codes, **{name: getattr(self, name) for name in _PARTS})
            if not validated:
                _require_values(self)

    @staticmethod
    def _known(parts: EncodedParts, fmt: Format, shape: torch.Size, dim: int) -> "Encoded":
        """Return stored parts that ``encode`` made: their dtypes and shapes follow from the format."""
        encoded = object.__new__(Encoded)  # without the checks of __post_init__
        for name, value in zip(Encoded.__slots__, (fmt, shape, dim, *parts, None), strict=True):
            object.__setattr__(encoded, name, value)
        return encoded

    @staticmethod
    def from_parts(parts: EncodedParts, fmt: Format, shape: torch.Size | tuple[int, ...], dim: int = -1) -> "Encoded":
        """Pack what an engine's encode returned.

        Args:
            parts: Codes of the tensor's shape with the scales and offsets that the format asks for.
            fmt: The format.
            shape: The tensor's shape.
            dim: The inner axis of blocks.

        Raises:
            CodeError: A code, a scale, a shape or a dtype does not belong to the format.
            ArgumentError: ``dim`` is not a dimension of ``shape``.
        """
        rank = max(len(shape), 1)
        if not -rank <= dim < rank:
            raise ArgumentError(f"dim={dim} is out of range for {rank} dimensions; choose {-rank} to {rank - 1}")
        shape, dim = torch.Size(shape), dim - rank if dim >= 0 else dim
        if not isinstance(fmt, PackedFormat) and parts.codes.shape != shape:
            raise CodeError(f"codes of {fmt.name} have shape {tuple(parts.codes.shape)}; expected {tuple(shape)}")
        codes, scales = store(parts.codes, parts.scales, fmt, dim)
        scale_parts = EncodedParts(codes, scales, parts.tensor_scale, parts.offsets)._asdict()
        return Encoded(format=fmt, shape=shape, dim=dim, **scale_parts)

    def parts(self) -> EncodedParts:
        """Return unpacked codes and float32 scales, as engines take them."""
        if is_readable(self.codes) or isinstance(self.format, PackedFormat):  # whose bytes are the codes
            codes, scales = restore(self.codes, self.scales, self.format, self.dim, self.shape)
        else:
            given = self.codes, or_empty(self.codes, self.scales), self._cast().to_json(), self.shape
            codes, scales = torch.ops.fmtsim.restore(*given)
            scales = or_none(scales)
        return EncodedParts(codes, scales, self.tensor_scale, self.offsets)

    def unpacked(self) -> torch.Tensor:
        """Return the codes of the tensor's shape, as non-negative integers in ``code_dtype(bits)``."""
        return self.parts().codes

    def decode(self, out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values.

        Args:
            out_dtype: float16, bfloat16, float32 or float64, to which values are rounded once, to nearest even; or a
                float8 dtype that holds every value of the format. None means float32 where it holds all, else float64.
            out: A tensor of the shape, on the codes' device, to write to and return.

        Raises:
            DtypeError: ``out_dtype`` or ``out`` has another dtype, the two differ, or float8 lacks a value.
            ArgumentError: ``out`` has another shape or device.
        """
        if out is not None:
            check_dense("out", out)
            check_together(codes=self.codes, out=out)
        if out is not None and out.shape != self.shape:
            raise ArgumentError(f"out has shape {tuple(out.shape)}; pass a tensor of shape {tuple(self.shape)}")
        if out is not None and out_dtype not in (None, out.dtype):
            raise DtypeError(f"out has dtype {out.dtype} but out_dtype={out_dtype}; leave out_dtype out")
        cast = self._cast()
        result = out_dtype if out is None else out.dtype
        traced = torch.compiler.is_compiling()
        dtype, validated = _decoded_traced(cast.to_json(), result) if traced else _decoded(cast.format, result)
        values = ops.decode(self.parts(), cast, dtype, validated=validated)
        if isinstance(self.format, PackedFormat):  # a block at the end may be short
            values = values.narrow(self.dim, 0, self.shape[self.dim]) if self.shape else values[0]
        return values if out is None else out.copy_(values)

    dequantize = decode  # as torch and torchao call it

    def _cast(self) -> CastSpec:
        if self.cast is not None:
            return self.cast
        return (_decoding_traced if torch.compiler.is_compiling() else decoding_cast)(self.format, self.dim)

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for _, tensor in self._tensors())

    @property
    def bits_per_element(self) -> float:
        """Bits of all tensors for each element, 0 for an empty tensor."""
        count = math.prod(self.shape)
        return 8 * self.nbytes / count if count else 0.0

    def __getattr__(self, name: str) -> Any:
        # what tensors have, asked of codes
        step = "; decode() is the tensor, to(device) moves the codes" if hasattr(torch.Tensor, name) else ""
        raise AttributeError(f"Encoded has no attribute {name!r}{step}", name=name, obj=self)

    def to(self, device: torch.device | str) -> "Encoded":
        """Return the same on another device; ArgumentError says what dtypes and formats are passed to."""
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError):
            step = "values of a dtype are decode(dtype), another format is fmtsim.encode(decode(), format)"
            raise ArgumentError(f"to takes a device, not {shown(device)}; {step}") from None
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self._tensors()}
        return Encoded(format=self.format, shape=self.shape, dim=self.dim, **moved, validated=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a safetensors file, which appears complete or not at all.

        Codes and scales carry the dtype tags of safetensors where there are such (``F8_E4M3``, ``F4``, ``F8_E8M0``,
        ...); the metadata holds the format as JSON, the shape, ``dim`` and a checksum of everything.

        Raises:
            DataError: The file cannot be written.
            ArgumentError: The tensors have no numbers: they are on meta, or fake.
        """
        check_readable("the encoded tensor", self.codes)
        stored = {}  # the bytes of each part under the tag of its dtype
        for name, (tag, shape, _, _) in stored_layout(self.format, self.shape, self.dim).items():
            stored[name] = StoredTensor(tag, shape, tensor_bytes(getattr(self, name)))
        metadata = {"fmtsim": _LAYOUT, "format": format_to_json(self.format)}
        metadata |= {"shape": json.dumps(list(self.shape)), "dim": str(self.dim)}
        write_tensors(path, stored, metadata)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Encoded":
        """Read what ``save`` wrote, to the CPU.

        Raises:
            DataError: The file is missing, truncated, corrupt or not of this layout.
            CodeError: Its tensors do not fit its format, or hold codes that the format does not have.
        """
        stored, metadata = read_tensors(path)
        with located(str(path)):
            # 1. the metadata
            if metadata.get("fmtsim") != _LAYOUT:
                raise DataError(
                    f"layout {shown(metadata.get('fmtsim'))}; this version of fmtsim reads layout {_LAYOUT!r}"
                )
            try:
                fmt = format_from_json(metadata["format"])
                sizes, dim = parse_json(metadata["shape"]), int(metadata["dim"])
            except (KeyError, ValueError) as error:
                raise DataError(f"the metadata is not that of an encoded tensor: {error}") from None
            whole = isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)
            if not whole or math.prod(max(size, 1) for size in sizes) >= 1 << 63:
                raise DataError(f"shape {shown(metadata['shape'])} in the metadata; expected a list of sizes")
            if not -max(len(sizes), 1) <= dim < 0:
                raise DataError(f"dim {shown(dim)} in the metadata; expected {-max(len(sizes), 1)} to -1")
            # 2. the tensors that the format has
            shape = torch.Size(sizes)
            layout = stored_layout(fmt, shape, dim)
            if set(stored) != set(layout):
                raise CodeError(f"{fmt.name} has tensors {', '.join(layout)}; found {', '.join(sorted(stored))}")
            tensors: dict[str, Any] = {}
            for name, (tag, elements, dtype, size) in layout.items():
                part = stored[name]
                if (part.tag, part.shape) != (tag, elements):
                    raise CodeError(
                        f"tensor {name!r} is {part.tag} {list(part.shape)}; "
                        f"{fmt.name} of shape {tuple(shape)}, dim {dim} expects {tag} {list(elements)}"
                    )
                tensors[name] = tensor_of_bytes(part.data, dtype).reshape(size)
            return Encoded(format=fmt, shape=shape, dim=dim, **tensors)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("codes", *_PARTS):
            if (tensor := getattr(self, name)) is not None:
                yield name, tensor

    def _repr_html_(self) -> str:
        facts = [
            ("format", self.format.name), ("shape", str(tuple(self.shape))), ("blocks along dim", str(self.dim)),
            ("size", f"{self.nbytes:,} bytes, {self.bits_per_element:.4g} bits an element"),
            ("device", str(self.device)),
        ]  # fmt: skip
        return facts_html([*facts, *((name, f"{t.dtype} {tuple(t.shape)}") for name, t in self._tensors())])

    def __repr__(self) -> str:
        return (
            f"Encoded({self.format.name}, shape {tuple(self.shape)}, dim {self.dim}, {self.nbytes} bytes, "
            f"{self.bits_per_element:.4g} bits an element, {self.device})"
        )


def _decoded(fmt: Format, out_dtype: torch.dtype | None) -> tuple[torch.dtype, bool]:
    """Return the dtype of decoded values, and whether every pattern of the format's bits is a code."""
    return check_out_dtype(out_dtype, fmt) or result_dtype(fmt, torch.float32), short_codebook(fmt) is None


# torch.compile takes formats of its inputs for a constant, but no result of a constant: such a cast goes by its text.
_decoding_traced = constant_in_graphs(lambda fmt, dim: spec_from_json(decoding_cast(fmt, dim).to_json()))
_decoded_traced = constant_in_graphs(lambda text, dtype: _decoded(spec_from_json(text).format, dtype))


def _require_values(encoded: Encoded) -> None:
    """Refuse codes beyond the end of a codebook that does not fill its bits, and scales outside their format."""
    if not is_readable(encoded.codes):
        return
    if encoded.scales is not None:
        restore_scales(encoded.scales, encoded.format)  # refuses codes that are no scale
    book = short_codebook(encoded.format)
    if book is None or not encoded.codes.numel():  # every pattern of bits is a code
        return
    codes = restore_codes(encoded.codes, encoded.format, encoded.dim, encoded.shape)
    if int(codes.max()) >= len(book.values):
        raise CodeError(f"code {int(codes.max())} is outside {book.name} (0 to {len(book.values) - 1})")
