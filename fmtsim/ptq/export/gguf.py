# SPDX-License-Identifier: Apache-2.0
"""GGUF files: weights in ggml's blocks and other tensors, written by the package ``gguf``."""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from mmap import ACCESS_READ, mmap
from pathlib import Path
from struct import calcsize, unpack_from
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.casts.encoded import Encoded
from fmtsim.formats.packed import GGML_FORMATS, PackedFormat, gguf_package
from fmtsim.ptq.export.layouts import Reordered
from fmtsim.ptq.export.weights import OMIT, CodedWeight
from fmtsim.spec.cast import block_bytes
from fmtsim.support.errors import DataError, first_line

_GROUP = 32
_CHOICES = "choose q8_0, q4_k or mxfp4_weights, or another layout="
_TYPES: dict[int, PackedFormat | torch.dtype] = {
    0: torch.float32, 1: torch.float16, 24: torch.int8, 25: torch.int16, 26: torch.int32, 27: torch.int64,
    28: torch.float64, 30: torch.bfloat16, **{fmt.number: fmt for fmt in GGML_FORMATS},
}  # fmt: skip
_TEXT, _ARRAY = 8, 9  # kinds of values in a header; others have these sizes
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def library() -> Any:
    """Return the package ``gguf``; raise FmtsimError where it is missing."""
    return gguf_package("layout='gguf'")


def blocks_of(weight: CodedWeight) -> tuple[Tensor, str]:
    """Return a weight as ggml's blocks, uint8 [outputs, bytes], and their type."""
    rows, columns = weight.elements.shape
    if weight.inputs != "none":
        raise weight.refuse(f"GGUF stores weights alone, and inputs are {weight.x}", _CHOICES)
    if isinstance(fmt := weight.element, PackedFormat):
        assert weight.blocks is not None
        if not hasattr(library().GGMLQuantizationType, fmt.type):
            raise weight.refuse(f"the package gguf has no type {fmt.type or fmt.name}", _CHOICES)
        if columns % fmt.elements:
            raise weight.refuse(f"{fmt.name} has blocks of {fmt.elements}, which do not divide {columns} inputs", OMIT)
        return weight.blocks, fmt.type
    if weight.block != (1, _GROUP) or columns % _GROUP or weight.tensor_scale is not None:
        raise weight.refuse(f"GGUF's blocks are 1 x {_GROUP}, and these {weight.block} of {rows} x {columns}", _CHOICES)
    fours = (rows, columns // _GROUP, _GROUP)
    if weight.is_mx("e2m1"):
        scales, halves, kind = weight.powers, weight.codes, "MXFP4"
    elif weight.is_integer and weight.element.bits in (4, 8):
        half = weight.scale.to(torch.float16)
        if not torch.equal(half.float(), weight.scale):
            raise weight.refuse(
                "GGUF's scales are float16, which does not hold these", "choose q8_0 or q4_0, whose are"
            )
        scales, halves, kind = half, weight.integers.to(torch.int16) + 8, "Q4_0"
    else:
        raise weight.refuse(f"GGUF has no {weight.kind}", _CHOICES)
    if weight.is_integer and weight.element.bits == 8:
        codes, kind = weight.integers.view(torch.uint8).reshape(fours), "Q8_0"
    else:  # element i of a block shares a byte with element i + 16
        low, high = halves.to(torch.uint8).reshape(fours).chunk(2, -1)
        codes = low | high << 4
    return torch.cat([scales.reshape(rows, columns // _GROUP, -1).view(torch.uint8), codes], -1).reshape(rows, -1), kind


def content(coded: Mapping[str, tuple[Tensor, str]], rest: Mapping[str, Tensor], architecture: str) -> bytes:
    """Return the bytes of a file of weights, as ``blocks_of`` has them, and other tensors by name."""
    gguf = library()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for name, (blocks, kind) in coded.items():
            writer.add_tensor(name, blocks.numpy(), raw_dtype=gguf.GGMLQuantizationType[kind])
        for name, t in rest.items():
            if t.dtype == torch.bfloat16:
                kind = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(name, t.view(torch.uint8).numpy(), raw_dtype=kind)
            else:
                writer.add_tensor(name, t.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


class _Stored(NamedTuple):
    """A tensor in a file: its format or dtype, its shape, its first byte and how many."""

    format: PackedFormat | torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


def is_gguf(path: Path) -> bool:
    """Return True for a file that begins as GGUF files do, or is called one."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except (OSError, ValueError):  # ValueError: a null byte in a name
        start = b""
    return start == b"GGUF" or path.suffix.lower() == ".gguf"


def readers(paths: Sequence[Path]) -> dict[str, tuple[str, Callable[[], Encoded | Reordered | Tensor]]]:
    """Return what reads each tensor of a file, or of all its parts, by name, with the type of its blocks.

    Those in ggml's blocks are Encoded, in formats such as ``q4_k``; others are tensors of their dtype. ``x.scale`` (one
    number, or one for each expert) is multiplied into ``x.weight``, as llama.cpp multiplies the product. Only what
    stands before the tensors is read (the package gguf takes seconds for a vocabulary).

    Raises:
        DataError: A file is missing, damaged, of another version or a part without the others; a tensor has an unknown
            type, rows that are not whole blocks, or an end beyond the file.
    """
    tensors: dict[str, tuple[Path, _Stored]] = {}
    for number, path in enumerate(paths):
        with _located(path):
            with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
                found, split = _header(data)
            part, count = split.get(b"split.no", 0), split.get(b"split.count", 1)
            if max(count, 1) != len(paths) or (count > 1 and part != number):
                raise DataError(
                    f"it is part {part + 1} of {count} (split.no, split.count); call the parts "
                    f"-00001-of-{count:05}.gguf and so on, in one folder"
                )
            tensors |= {name: (path, stored) for name, stored in found.items()}
    total = split.get(b"split.tensors.count", len(tensors))
    if len(paths) > 1 and total != len(tensors):
        raise DataError(f"{paths[0]} and its parts have {len(tensors)} tensors, split.tensors.count says {total}")
    result: dict[str, tuple[str, Callable[[], Encoded | Reordered | Tensor]]] = {}
    for name, (path, stored) in tensors.items():
        if name.endswith(".scale") and f"{name.removesuffix('scale')}weight" in tensors:
            continue  # of a weight, with which it is read
        kind = f"GGUF {stored.format.type}" if isinstance(stored.format, PackedFormat) else ""
        scale = tensors.get(f"{name.removesuffix('weight')}scale") if name.endswith(".weight") else None
        result[name] = (
            kind,
            partial(_read, path, stored) if scale is None else partial(_scaled, name, path, stored, *scale),
        )
    return result


def _scaled(name: str, path: Path, stored: _Stored, scale_path: Path, scale_stored: _Stored) -> Reordered | Tensor:
    """Return a weight with its scale: one number, or one for each expert, the first dimension of three."""
    weight, scale = _read(path, stored), _read(scale_path, scale_stored)
    experts = stored.shape[0] if len(stored.shape) == 3 else 1
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.numel() not in (1, experts):
        kind = f"{scale_stored.format} {list(scale_stored.shape)}"
        raise DataError(f"{scale_path}: the scale of {name!r} is {kind}; expected float32, one number or {experts}")
    factors = scale.reshape(-1, *(1,) * (len(stored.shape) - 1))
    if isinstance(weight, Tensor):
        return weight.float() * factors
    return Reordered(encoded=weight, factors=factors)


def _header(data: mmap) -> tuple[dict[str, _Stored], dict[bytes, int]]:
    """Return the tensors that a header lists (versions 2 and 3, little-endian), and of what the file is a part."""
    place, alignment = 8, 32
    split: dict[bytes, int] = {}

    def number(code: str) -> int:
        nonlocal place
        place += calcsize(code)
        return int(unpack_from(code, data, place - calcsize(code))[0])

    def text() -> bytes:
        nonlocal place
        size = number("<Q")
        place += size
        return data[place - size : place]

    def skip(kind: int) -> None:
        nonlocal place
        if kind != _ARRAY:
            size = number("<Q") if kind == _TEXT else _SIZES[kind]
            place += size
            return
        item, count = number("<I"), number("<Q")
        if item in _SIZES:
            place += count * _SIZES[item]
            return
        for _ in range(count):
            skip(item)

    # 1. what it is, and pairs of a key and a value
    if data[:4] != b"GGUF" or int.from_bytes(data[4:8], "little") not in (2, 3):
        raise ValueError(f"it begins with {data[:8]!r}, not with GGUF and version 2 or 3")
    count, pairs = number("<Q"), number("<Q")
    for _ in range(pairs):
        key, kind = text(), number("<I")
        begun = place
        skip(kind)
        if key == b"general.alignment":
            alignment = unpack_from("<I", data, begun)[0]
        if key.startswith(b"split.") and kind in _SIZES:
            split[key] = int.from_bytes(data[begun : begun + _SIZES[kind]], "little")
    # 2. names, shapes (the last dimension first), types and places of tensors, which are counted from behind the list
    listed = []
    for _ in range(count):
        name, rank = text().decode(), number("<I")
        listed.append((name, tuple(number("<Q") for _ in range(rank))[::-1], number("<I"), number("<Q")))
    first = -(-place // alignment) * alignment
    return {name: _checked(name, shape, kind, first + start, len(data)) for name, shape, kind, start in listed}, split


def _checked(name: str, shape: tuple[int, ...], kind: int, start: int, end: int) -> _Stored:
    """Return a tensor that lies in its file, of whole blocks."""
    fmt = _TYPES.get(kind)
    if fmt is None:
        known = ", ".join(f"{number} ({t.type if isinstance(t, PackedFormat) else t})" for number, t in _TYPES.items())
        raise DataError(f"{name!r} is of type {kind}; known are {known}")
    if isinstance(fmt, PackedFormat):
        row = shape[-1] if shape else 1
        if row % fmt.elements:
            raise DataError(
                f"{name!r} has rows of {row} elements, which blocks of {fmt.elements} ({fmt.type}) do not fill"
            )
        size = math.prod(shape) // fmt.elements * fmt.bytes
    else:
        size = math.prod(shape) * fmt.itemsize
    if start + size > end:
        raise DataError(f"{name!r} ends at byte {start + size}, the file at {end}; it is truncated")
    return _Stored(fmt, shape, start, size)


def _read(path: Path, stored: _Stored) -> Encoded | Tensor:
    with _located(path):
        raw = torch.from_numpy(np.fromfile(path, np.uint8, stored.size, offset=stored.start))
        if isinstance(stored.format, torch.dtype):
            return raw.view(stored.format).reshape(stored.shape)
        shape = torch.Size(stored.shape)
        codes = raw.reshape(block_bytes(stored.format, shape, -1))
        return Encoded(format=stored.format, shape=shape, dim=-1, codes=codes, validated=True)


@contextmanager
def _located(path: Path) -> Iterator[None]:
    """Name the file in errors: damaged bytes give any."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:
        raise DataError(f"{path} is not a GGUF file that can be read: {first_line(error)}") from None
