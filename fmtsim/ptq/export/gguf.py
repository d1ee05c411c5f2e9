# SPDX-License-Identifier: Apache-2.0
"""GGUF files: weights in ggml's blocks and other tensors, written and read by the package ``gguf``."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmtsim.casts.encoded import Encoded
from fmtsim.formats.ggml import GGML_FORMATS, GgmlFormat, gguf_package
from fmtsim.ptq.export.weights import CodedWeight
from fmtsim.support.errors import DataError, FmtsimError, first_line

_GROUP = 32
_CHOICES = "choose q8_0, q4_k or mxfp4_weights, or another layout="
_PLAIN = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")
_FORMATS = {fmt.type: fmt for fmt in GGML_FORMATS}


def library() -> Any:
    """Return the package ``gguf``; raise FmtsimError where it is missing."""
    return gguf_package("layout='gguf'")


def blocks_of(weight: CodedWeight) -> tuple[Tensor, str]:
    """Return a weight as ggml's blocks, uint8 [outputs, bytes], and their type."""
    rows, columns = weight.elements.shape
    if weight.inputs != "none":
        raise weight.refuse(f"GGUF stores weights alone, and inputs are {weight.x}", _CHOICES)
    if isinstance(fmt := weight.element, GgmlFormat):
        assert weight.blocks is not None
        if not hasattr(library().GGMLQuantizationType, fmt.type):
            raise weight.refuse(f"the package gguf has no type {fmt.type}", _CHOICES)
        if columns % fmt.elements:
            raise weight.refuse(
                f"{fmt.name} has blocks of {fmt.elements}, which do not divide {columns} inputs", "leave the layer out"
            )
        return weight.blocks, fmt.type
    if weight.block != (1, _GROUP) or columns % _GROUP or weight.tensor_scale is not None:
        raise weight.refuse(f"GGUF's blocks are 1 x {_GROUP}, and these {weight.block} of {rows} x {columns}", _CHOICES)
    fours = (rows, columns // _GROUP, _GROUP)
    if weight.is_mx("e2m1"):
        scales, halves, kind = weight.powers, weight.codes, "MXFP4"
    elif weight.is_integer and weight.element.bits in (4, 8):
        scales, halves, kind = _half(weight), weight.integers.to(torch.int16) + 8, "Q4_0"
    else:
        raise weight.refuse(f"GGUF has no {weight.element.name} in blocks of {weight.block}", _CHOICES)
    if weight.is_integer and weight.element.bits == 8:
        codes, kind = weight.integers.view(torch.uint8).reshape(fours), "Q8_0"
    else:  # element i of a block shares a byte with element i + 16
        low, high = halves.to(torch.uint8).reshape(fours).chunk(2, -1)
        codes = low | high << 4
    return torch.cat([scales.reshape(rows, columns // _GROUP, -1).view(torch.uint8), codes], -1).reshape(rows, -1), kind


def _half(weight: CodedWeight) -> Tensor:
    half = weight.scale.to(torch.float16)
    if not torch.equal(half.float(), weight.scale):
        raise weight.refuse("GGUF's scales are float16, which does not hold these", "choose q8_0 or q4_0, whose are")
    return half


def content(coded: Mapping[str, CodedWeight], rest: Mapping[str, Tensor], architecture: str) -> bytes:
    """Return the bytes of a file of weights and other tensors by name."""
    gguf, types = library(), {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for name, weight in coded.items():
            blocks, types[name] = blocks_of(weight)
            writer.add_tensor(name, blocks.numpy(), raw_dtype=gguf.GGMLQuantizationType[types[name]])
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


def readers(path: Path) -> dict[str, tuple[str, Callable[[], Encoded | Tensor]]]:
    """Return what reads each tensor of a file, by name, with the type of its blocks, "" of ordinary numbers.

    Those in ggml's blocks are Encoded, in formats such as ``q4_k``; others are tensors of their dtype.
    """
    with _located(path):
        tensors = library().GGUFReader(path).tensors
        kinds = {tensor.name: tensor.tensor_type.name for tensor in tensors}
        return {
            tensor.name: (
                "" if kinds[tensor.name] in _PLAIN else f"GGUF {kinds[tensor.name]}",
                partial(_read, path, tensor),
            )
            for tensor in tensors
        }


def _read(path: Path, tensor: Any) -> Encoded | Tensor:
    with _located(path):
        return _values(tensor)


@contextmanager
def _located(path: Path) -> Iterator[None]:
    """Name the file in errors: of damaged bytes the package raises anything."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except FmtsimError:
        raise
    except Exception as error:
        raise DataError(f"{path} is not a GGUF file that can be read: {first_line(error)}") from None


def _values(tensor: Any) -> Encoded | Tensor:
    kind, shape = tensor.tensor_type.name, torch.Size(int(n) for n in reversed(tensor.shape))
    raw = torch.from_numpy(np.array(tensor.data))
    if (fmt := _FORMATS.get(kind)) is not None:
        return Encoded(format=fmt, shape=shape, dim=-1, codes=raw.reshape(*shape[:-1], -1), validated=True)
    if raw.dtype == torch.uint8 and kind != "BF16":
        known = ", ".join(sorted(_FORMATS))
        raise DataError(f"{tensor.name!r} is of type {kind}; known are ordinary numbers and {known}")
    return (raw.view(torch.bfloat16) if kind == "BF16" else raw).reshape(shape)
