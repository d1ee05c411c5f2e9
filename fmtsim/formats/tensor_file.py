# SPDX-License-Identifier: Apache-2.0
"""Safetensors files with dtypes of fewer than 8 bits and a checksum, written whole or not at all.

The layout is that of safetensors: the header's length in 8 little-endian bytes, a JSON header, the tensors' bytes.
Any reader of safetensors that knows the tags reads these files; the writer is our own because safetensors' does not
write the 6-bit tags yet. Packing below 8 bits is that of docs/semantics.md, section 11.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fmtsim.formats.packing import tensor_bytes, tensor_of_bytes
from fmtsim.support.errors import DataError, shown
from fmtsim.support.files import write_file
from fmtsim.support.records import LARGEST_FILE, parse_json, read_file

_TAG_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8, "I8": 8, "U8": 8,
    "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
TAGS = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4", torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
"""Dtypes of tensors in safetensors files, and their tags there."""
DTYPES = {tag: dtype for dtype, tag in TAGS.items()}
_CHECKSUM = "crc32"
_LOAD = "load it by torch.load or numpy.load, and save its tensors by safetensors.torch.save_file"
_PASS = "pass a .safetensors or .gguf file, or a folder with one"
_STARTS = {  # how files of other kinds begin, what they are, and the next step
    b"PK": ("a zip file, as torch.save or numpy.savez writes", _LOAD),
    b"\x80": ("a pickle, as torch.save wrote", _LOAD), b"\x93NUMPY": ("a file of numpy.save", _LOAD),
    b"\x89HDF": ("an HDF5 file", _PASS), b"\x89PNG": ("a PNG image", _PASS), b"\x1f\x8b": ("a gzip file", _PASS),
    b"version ": ("a Git LFS pointer", "fetch what it points to by git lfs pull"), b"{": ("JSON text", _PASS),
    b"GGUF": ("a GGUF file", "open it by fmtsim.open_checkpoint"), b"[": ("JSON text", _PASS),
}  # fmt: skip


class StoredTensor(NamedTuple):
    """A tensor in a file: its dtype tag, its shape in elements of that tag, and its bytes."""

    tag: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def tensor(self) -> torch.Tensor:
        """Return the tensor, in the memory of ``data`` where that is writable."""
        return tensor_of_bytes(self.data, DTYPES[self.tag]).reshape(self.shape)


def stored_tensor(x: torch.Tensor) -> StoredTensor:
    """Return a tensor as files hold it."""
    return StoredTensor(TAGS[x.dtype], tuple(x.shape), tensor_bytes(x))


class TensorPlace(NamedTuple):
    """Where the bytes of a tensor lie in a file, with its dtype tag and its shape in elements of that tag."""

    path: Path
    tag: str
    shape: tuple[int, ...]
    start: int
    size: int

    def read(self) -> bytearray:
        """Return the bytes, which are all that is read; raise DataError where the file has fewer by now."""
        data = bytearray(self.size)
        try:
            with open(self.path, "rb") as file:
                file.seek(self.start)
                count = file.readinto(data)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from None
        if count != self.size:
            raise DataError(f"{self.path}: {count} bytes at {self.start}, where {self.size} belong; it was truncated")
        return data


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]
) -> None:
    """Write tensors and metadata to a file that appears complete or not at all.

    Raises:
        DataError: The file cannot be written.
    """
    write_file(path, tensor_content(tensors, metadata))


def tensor_content(tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> bytes:
    """Return what a file of tensors and metadata holds."""
    # the widest elements first, so that each tensor starts at a multiple of its element's size
    names = sorted(tensors, key=lambda name: (-_TAG_BITS[tensors[name].tag], name))
    table, start = {}, 0
    for name in names:
        tag, shape, data = tensors[name]
        table[name] = {"dtype": tag, "shape": list(shape), "data_offsets": [start, start + len(data)]}
        start += len(data)
    payload = b"".join(tensors[name].data for name in names)
    signed = {**metadata, _CHECKSUM: _checksum(table, metadata, payload)}
    header = json.dumps({"__metadata__": signed, **table}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return b"".join((len(header).to_bytes(8, "little"), header, payload))


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Read what ``write_tensors`` wrote: the tensors by name and the metadata.

    Raises:
        DataError: The file is missing, truncated, not of this layout, or its checksum does not hold.
    """
    # 1. header and payload, of sizes that agree
    content = bytearray(read_file(path, DataError))
    path = Path(path)
    header, start = _header(path, content, len(content))
    payload = memoryview(content)[start:]
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DataError(f"{path}: the header has no metadata; expected a file that Encoded.save wrote")
    # 2. the checksum over both
    expected = metadata.pop(_CHECKSUM, None)
    if expected is None:
        raise DataError(f"{path}: the metadata has no {_CHECKSUM!r}; expected a file that Encoded.save wrote")
    checksum = _checksum(header, metadata, payload)
    if checksum != expected:
        raise DataError(f"{path}: the checksum is {checksum}, the file says {expected}; it is corrupt, write it again")
    # 3. tensors, which fill the payload
    tensors = {}
    for name, entry in header.items():
        tag, shape, (first, end) = _checked(path, name, entry)
        tensors[name] = StoredTensor(tag, shape, payload[first:end])
    if sum(len(tensor.data) for tensor in tensors.values()) != len(payload):
        raise DataError(f"{path}: tensors of the header share bytes or leave some out; it is corrupt")
    return tensors, metadata


def open_tensors(path: Path) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """Read the header of a safetensors file of any writer: where its tensors lie, by name, and the metadata.

    Raises:
        DataError: The file is missing, truncated or not of this layout; no checksum is looked at.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            file.seek(0)
            content = file.read(8 + length if length <= min(size - 8, LARGEST_FILE) else 9)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    header, start = _header(path, content, size)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DataError(f"{path}: the metadata are not texts by name; it is corrupt")
    places = {}
    for name, entry in header.items():
        tag, shape, (first, end) = _checked(path, name, entry)
        places[name] = TensorPlace(path, tag, shape, start + first, end - first)
    return places, metadata


def _header(path: Path, content: bytes | bytearray, size: int) -> tuple[dict[str, Any], int]:
    """Return the header of a file of ``size`` bytes, of which the first are passed, and where its tensors begin."""
    if size < 8:
        raise DataError(f"{path}: {size} bytes are too few for a safetensors file; it is empty or truncated")
    length = int.from_bytes(content[:8], "little")
    if length > len(content) - 8:
        if content[8:9] not in (b"", b"{"):  # as the JSON of a header begins
            for start, (kind, step) in _STARTS.items():
                if content.startswith(start):
                    raise DataError(f"{path} is {kind}, not safetensors; {step}")
            begins = f"it begins with {bytes(content[:8])!r}"
            raise DataError(f"{path} is neither safetensors, GGUF nor a file that fmtsim wrote: {begins}; {_PASS}")
        raise DataError(
            f"{path}: a header of {length} bytes is announced, {size - 8} follow; it is truncated or corrupt"
        )
    try:
        header = parse_json(content[8 : 8 + length].decode("utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: the header is not JSON ({error}); it is corrupt") from None
    if not isinstance(header, dict):
        raise DataError(f"{path}: the header is a {type(header).__name__}, expected a JSON object; it is corrupt")
    spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__" and _is_entry(entry)]
    payload, announced = size - 8 - length, max((end for _, end in spans), default=0)
    if announced != payload:
        raise DataError(f"{path}: {payload} bytes of tensors, the header says {announced}; it is truncated or corrupt")
    return header, 8 + length


def _is_entry(entry: Any) -> bool:
    """Return True if a header's entry has dtype, shape and offsets of the right kinds."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return False
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or not isinstance(entry["dtype"], str):
        return False
    return len(offsets) == 2 and all(type(one) is int and 0 <= one < 1 << 63 for one in shape + offsets)


def _checked(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Return tag, shape and first and last byte that a header has of a tensor, if they fit each other."""
    if not _is_entry(entry):
        raise DataError(f"{path}: the header's entry for {name!r} is malformed; it is corrupt")
    tag, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if tag not in _TAG_BITS:
        raise DataError(f"{path}: tensor {name!r} has dtype {shown(tag)}; expected one of {', '.join(_TAG_BITS)}")
    bits = _TAG_BITS[tag]
    for size in shape:
        bits *= size
    if (end - start) * 8 != bits:
        raise DataError(f"{path}: tensor {name!r} has {end - start} bytes; {tag} {list(shape)} takes {-(-bits // 8)}")
    return tag, shape, (start, end)


def _checksum(table: Mapping[str, Any], metadata: Mapping[str, str], payload: bytes | memoryview) -> str:
    """Return the CRC-32 of all that a file says, its header in a canonical spelling."""
    header = json.dumps([dict(table), dict(metadata)], sort_keys=True).encode()
    return f"{zlib.crc32(payload, zlib.crc32(header)):08x}"
