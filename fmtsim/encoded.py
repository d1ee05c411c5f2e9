"""Encoded tensors: packed codes with the scales that decode them, in memory and in files."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fmtsim import ops
from fmtsim.errors import ArgumentError, CodeError, DataError, DtypeError, FormatError
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat
from fmtsim.formats.exact import codes_of_scales, scales_of_codes
from fmtsim.formats.interop import safetensors_tag, torch_dtype
from fmtsim.formats.packing import code_dtype, pack, packed_size, unpack
from fmtsim.formats.representable import FLOAT_DTYPES, result_dtype
from fmtsim.formats.serialization import format_from_json, format_to_json
from fmtsim.formats.spec import CodebookFormat, ElementFormat
from fmtsim.formats.tensor_file import StoredTensor, read_tensors, write_tensors
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, EncodedParts, block_counts

_LAYOUT = "1"  # of files; a reader refuses any other
_PLAIN = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}  # widths that need no packing
_PLAIN_TAGS = {8: "U8", 16: "U16", 32: "U32", 64: "U64"}
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
        tensor_scale: float32, 0-d, of two-level formats, else None.
        offsets: int32 zero points or the float32 lowest logarithms of LogFMT tiles, like ``scales``, else None.
    """

    format: Format
    shape: torch.Size
    dim: int
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

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
        shape, dim = torch.Size(shape), _negative_dim(dim, len(shape))
        if parts.codes.shape != shape:
            raise CodeError(f"codes of {fmt.name} have shape {tuple(parts.codes.shape)}; expected {tuple(shape)}")
        _require_values(parts.codes, fmt)
        codes = _pack(parts.codes, fmt.bits, dim)
        scales = parts.scales
        if scales is not None and isinstance(fmt, BlockFormat):
            scales = _store_scales(scales, fmt)
        rest = {"scales": scales, "tensor_scale": parts.tensor_scale, "offsets": parts.offsets}
        return _checked(Encoded(format=fmt, shape=shape, dim=dim, codes=codes, **rest))

    def parts(self) -> EncodedParts:
        """Return unpacked codes and float32 scales, as engines take them."""
        scales = self.scales
        if scales is not None and isinstance(self.format, BlockFormat):
            small = self.format.scale.bits <= 8
            scales = scales_of_codes(scales, self.format.scale) if small else scales.to(torch.float32)
        return EncodedParts(self.unpacked(), scales, self.tensor_scale, self.offsets)

    def unpacked(self) -> torch.Tensor:
        """Return the codes of the tensor's shape, as non-negative integers in ``code_dtype(bits)``."""
        bits = self.format.bits
        if bits in _PLAIN:
            codes = self.codes.to(code_dtype(bits))
            return codes & ((1 << bits) - 1) if bits in (16, 32) else codes
        rows = _rows(self.shape, self.dim)
        codes = unpack(self.codes, bits, rows[-1])
        return codes.reshape(rows).movedim(-1, self.dim) if self.shape else codes.reshape(())

    def decode(self, out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values.

        Args:
            out_dtype: float16, bfloat16, float32 or float64; None means float32 where it holds every value of the
                format, else float64. Values are rounded to it once, to nearest even.
            out: A tensor of the shape, on the codes' device, to write to and return.

        Raises:
            DtypeError: ``out_dtype`` or ``out`` has another dtype, or the two differ.
            ArgumentError: ``out`` has another shape or device.
        """
        if out is not None and (out.shape != self.shape or out.device != self.device):
            wanted = f"shape {tuple(self.shape)} on {self.device}"
            raise ArgumentError(f"out is {tuple(out.shape)} on {out.device}; pass a tensor of {wanted}")
        if out is not None and out_dtype not in (None, out.dtype):
            raise DtypeError(f"out has dtype {out.dtype} but out_dtype={out_dtype}; leave out_dtype out")
        dtype = out.dtype if out is not None else out_dtype or result_dtype(self.format, torch.float32)
        if dtype not in FLOAT_DTYPES:
            raise DtypeError(f"out_dtype={dtype} is not allowed; choose float16, bfloat16, float32 or float64")
        overflow = self.format.default_overflow
        spec = CastSpec(format=self.format, rounding=Rounding(), overflow=overflow, dim=self.dim)
        values = ops.decode(self.parts(), spec, dtype)
        return values if out is None else out.copy_(values)

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

    def to(self, device: torch.device | str) -> "Encoded":
        """Return the same on another device."""
        moved = {name: tensor.to(device) for name, tensor in self._tensors()}
        return Encoded(format=self.format, shape=self.shape, dim=self.dim, **moved)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a safetensors file, which appears complete or not at all.

        Codes and scales carry the dtype tags of safetensors where there are such (``F8_E4M3``, ``F4``, ``F8_E8M0``,
        ...); the metadata holds the format as JSON, the shape, ``dim`` and a checksum of everything.

        Raises:
            DataError: The file cannot be written.
        """
        stored = {}
        for name, (tag, shape, _, _) in _layout(self.format, self.shape, self.dim).items():
            tensor = getattr(self, name).detach().cpu().contiguous()
            stored[name] = StoredTensor(tag, shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
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
        fmt, shape, dim = _read_metadata(path, metadata)
        layout = _layout(fmt, shape, dim)
        if set(stored) != set(layout):
            raise CodeError(f"{path}: {fmt.name} has tensors {', '.join(layout)}; found {', '.join(sorted(stored))}")
        tensors = {}
        for name, (tag, elements, dtype, size) in layout.items():
            found = stored[name]
            if (found.tag, found.shape) != (tag, elements):
                raise CodeError(
                    f"{path}: tensor {name!r} is {found.tag} {list(found.shape)}; "
                    f"{fmt.name} of shape {tuple(shape)}, dim {dim} expects {tag} {list(elements)}"
                )
            raw = (
                torch.frombuffer(found.data, dtype=torch.uint8)
                if len(found.data)
                else torch.empty(0, dtype=torch.uint8)
            )
            tensors[name] = raw.view(dtype).reshape(size)
        encoded = Encoded(format=fmt, shape=shape, dim=dim, **tensors)
        try:
            _require_values(encoded.parts().codes, fmt)
        except CodeError as error:
            raise CodeError(f"{path}: {error}") from None
        return encoded

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("codes", *_PARTS):
            if (tensor := getattr(self, name)) is not None:
                yield name, tensor

    def __repr__(self) -> str:
        return (
            f"Encoded({self.format.name}, shape {tuple(self.shape)}, dim {self.dim}, {self.nbytes} bytes, "
            f"{self.bits_per_element:.4g} bits an element, {self.device})"
        )


_Layout = dict[str, tuple[str, tuple[int, ...], torch.dtype, tuple[int, ...]]]


def _layout(fmt: Format, shape: torch.Size, dim: int) -> _Layout:
    """Return tag and shape in a file, dtype and shape in memory, of every tensor that a format asks for."""
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    tag = None if isinstance(element, LogTileFormat) else safetensors_tag(element)
    rows, bits = _rows(shape, dim), fmt.bits
    packed = (*rows[:-1], packed_size(rows[-1], bits))
    layout: _Layout = {}
    if bits in _PLAIN:
        layout["codes"] = (tag or _PLAIN_TAGS[bits], tuple(shape), _PLAIN[bits], tuple(shape))
    elif tag is not None and rows[-1] * bits % 8 == 0:  # a tag below 8 bits counts elements, so rows end on bytes
        layout["codes"] = (tag, rows, torch.uint8, packed)
    else:
        layout["codes"] = ("U8", packed, torch.uint8, packed)
    if isinstance(fmt, BlockFormat | LogTileFormat):
        grid = block_counts(fmt, shape, dim)
        tag, dtype = _scale_type(fmt)
        layout["scales"] = (tag, grid, dtype, grid)
        if isinstance(fmt, LogTileFormat):
            layout["offsets"] = ("F32", grid, torch.float32, grid)
        elif fmt.zero_point:
            layout["offsets"] = ("I32", grid, torch.int32, grid)
        if isinstance(fmt, BlockFormat) and fmt.tensor_scale:
            layout["tensor_scale"] = ("F32", (), torch.float32, ())
    return layout


def _scale_type(fmt: BlockFormat | LogTileFormat) -> tuple[str, torch.dtype]:
    """Return the tag and the dtype in which a format's scales are stored."""
    if isinstance(fmt, LogTileFormat):
        return "F32", torch.float32
    if fmt.scale.bits <= 8:
        return safetensors_tag(fmt.scale) or "U8", torch.uint8
    dtype, tag = torch_dtype(fmt.scale), safetensors_tag(fmt.scale)
    if dtype is None or tag is None:
        raise FormatError(
            f"{fmt.name}: scales in {fmt.scale.name} have no dtype of their own; choose fp32, bf16 or fp16"
        )
    return tag, dtype


def _store_scales(scales: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """Return scales as they are stored, none of them rounded."""
    _, dtype = _scale_type(fmt)
    if dtype == torch.uint8:
        return codes_of_scales(scales, fmt.scale)
    stored = scales.to(dtype)
    wrong = (stored != scales) & ~scales.isnan()
    if not wrong.is_meta and bool(wrong.any()):
        raise CodeError(
            f"scale {scales[wrong][0].item():g} is not a value of {fmt.scale.name}; pass scales of that format"
        )
    return stored


def _checked(encoded: Encoded) -> Encoded:
    """Return the tensor if each part has the dtype and shape that its format asks for."""
    layout = _layout(encoded.format, encoded.shape, encoded.dim)
    for name in _PARTS:
        tensor: torch.Tensor | None = getattr(encoded, name)
        if (tensor is None) != (name not in layout):
            found, expected = ("none", "some") if tensor is None else ("some", "none")
            raise CodeError(f"{encoded.format.name}: {name} expected {expected}, found {found}")
        if tensor is not None and (tensor.dtype, tuple(tensor.shape)) != layout[name][2:]:
            _, _, dtype, size = layout[name]
            raise CodeError(
                f"{encoded.format.name}: {name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(size)}"
            )
    return encoded


def _require_values(codes: torch.Tensor, fmt: Format) -> None:
    """Refuse codes beyond the end of a codebook that does not fill its bits; packing refuses the rest."""
    element: ElementFormat | LogTileFormat = fmt.element if isinstance(fmt, BlockFormat) else fmt
    if codes.is_meta or not codes.numel() or not isinstance(element, CodebookFormat):
        return
    if int(codes.max()) >= len(element.values):
        raise CodeError(f"code {int(codes.max())} is outside {element.name} (0 to {len(element.values) - 1})")


def _read_metadata(path: str | os.PathLike[str], metadata: dict[str, str]) -> tuple[Format, torch.Size, int]:
    """Return what the metadata of a file says, checked."""
    if metadata.get("fmtsim") != _LAYOUT:
        raise DataError(f"{path}: layout {metadata.get('fmtsim')!r}; this version of fmtsim reads layout {_LAYOUT!r}")
    try:
        fmt = format_from_json(metadata["format"])
        sizes, dim = json.loads(metadata["shape"]), int(metadata["dim"])
    except (KeyError, ValueError) as error:
        raise DataError(f"{path}: the metadata is not that of an encoded tensor: {error}") from None
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise DataError(f"{path}: shape {metadata['shape']!r} in the metadata; expected a list of sizes")
    if not -max(len(sizes), 1) <= dim < 0:
        raise DataError(f"{path}: dim {dim} in the metadata; expected {-max(len(sizes), 1)} to -1")
    return fmt, torch.Size(sizes), dim


def _negative_dim(dim: int, rank: int) -> int:
    rank = max(rank, 1)
    if not -rank <= dim < rank:
        raise ArgumentError(f"dim={dim} is out of range for {rank} dimensions; choose {-rank} to {rank - 1}")
    return dim - rank if dim >= 0 else dim


def _rows(shape: torch.Size, dim: int) -> tuple[int, ...]:
    """Return the shape with ``dim`` moved last; a tensor without dimensions is a row of one."""
    if not shape:
        return (1,)
    sizes = list(shape)
    return (*sizes[:dim], *sizes[len(sizes) + dim + 1 :], sizes[dim])


def _pack(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    rows = codes.reshape(1) if codes.dim() == 0 else codes
    if bits not in _PLAIN:
        return pack(rows.movedim(dim, -1), bits)
    return pack(rows, bits).view(_PLAIN[bits]).reshape(codes.shape)
