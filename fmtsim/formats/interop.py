# SPDX-License-Identifier: Apache-2.0
"""Formats as others know them: torch dtypes, ml_dtypes, safetensors tags, and codes as tensors of those."""

import dataclasses
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fmtsim.formats.element import CodebookFormat, ElementFormat, FloatFormat, IntFormat, LogFormat
from fmtsim.formats.packing import pack
from fmtsim.formats.registry import get_format
from fmtsim.support.errors import DtypeError, FormatError

if TYPE_CHECKING:
    import numpy


class _View(NamedTuple):
    """One row of names: ours, torch's dtype, ml_dtypes' or numpy's dtype, safetensors' tag."""

    name: str
    torch: str | None
    numpy: str | None
    safetensors: str | None


# Tags: safetensors 0.6 and later; ml_dtypes 0.5 and later. Every format without a row travels as plain bytes.
_VIEWS = (
    _View("fp64", "float64", "float64", "F64"),
    _View("fp32", "float32", "float32", "F32"),
    _View("bf16", "bfloat16", "bfloat16", "BF16"),
    _View("fp16", "float16", "float16", "F16"),
    _View("e4m3", "float8_e4m3fn", "float8_e4m3fn", "F8_E4M3"),
    _View("e5m2", "float8_e5m2", "float8_e5m2", "F8_E5M2"),
    _View("e4m3fnuz", "float8_e4m3fnuz", "float8_e4m3fnuz", "F8_E4M3FNUZ"),
    _View("e5m2fnuz", "float8_e5m2fnuz", "float8_e5m2fnuz", "F8_E5M2FNUZ"),
    _View("e8m0", "float8_e8m0fnu", "float8_e8m0fnu", "F8_E8M0"),
    _View("e4m3_ieee", None, "float8_e4m3", None),
    _View("e4m3b11fnuz", None, "float8_e4m3b11fnuz", None),
    _View("e3m4", None, "float8_e3m4", None),
    _View("e2m3", None, "float6_e2m3fn", "F6_E2M3"),
    _View("e3m2", None, "float6_e3m2fn", "F6_E3M2"),
    _View("e2m1", "float4_e2m1fn_x2", "float4_e2m1fn", "F4"),
    _View("int16", "int16", "int16", "I16"),
    _View("int8", "int8", "int8", "I8"),
    _View("int4", None, "int4", None),
    _View("int2", None, "int2", None),
    _View("uint16", "uint16", "uint16", "U16"),
    _View("uint8", "uint8", "uint8", "U8"),
    _View("uint4", None, "uint4", None),
    _View("uint2", None, "uint2", None),
)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a torch dtype's name as numpy, files and tables have it: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(fmt: ElementFormat) -> torch.dtype | None:
    """Return the torch dtype whose bit patterns are the format's codes, None where this torch has none.

    ``torch.float4_e2m1fn_x2`` holds two codes an element. The dtype's codes are the format's, but torch's own casts to
    it may round otherwise, those to ``float8_e8m0fnu`` above all (docs/semantics.md, section 2).
    """
    view = _view(fmt)
    return getattr(torch, view.torch, None) if view and view.torch else None


def numpy_dtype(fmt: ElementFormat) -> "numpy.dtype[Any] | None":
    """Return the numpy or ml_dtypes dtype whose bit patterns are the format's codes, None where there is none.

    Types of fewer than 8 bits hold one code a byte. Imports ml_dtypes.
    """
    import ml_dtypes  # noqa: F401  # registers its dtypes' names with numpy
    import numpy

    view = _view(fmt)
    return numpy.dtype(view.numpy) if view and view.numpy else None


def safetensors_tag(fmt: ElementFormat) -> str | None:
    """Return the dtype tag of safetensors whose bit patterns are the format's codes, None where there is none."""
    view = _view(fmt)
    return view.safetensors if view else None


def codes_to_tensor(codes: torch.Tensor, fmt: ElementFormat) -> torch.Tensor:
    """Return codes as a tensor of the torch dtype whose bit patterns they are, without changing a bit.

    Args:
        codes: Integers in ``[0, 2**bits)``; the last dimension is even for ``float4_e2m1fn_x2``.
        fmt: Their format.

    Raises:
        DtypeError: torch has no dtype for the format.
        CodeError: A code does not fit the format's bits.
    """
    dtype = torch_dtype(fmt)
    if dtype is None:
        raise DtypeError(f"torch {torch.__version__} has no dtype for {fmt.name}; keep the codes, or decode them")
    if fmt.bits == 8 and codes.dtype == torch.uint8:
        return codes.view(dtype)
    if fmt.bits * codes.shape[-1] % 8 if codes.dim() else fmt.bits < 8:
        raise DtypeError(
            f"an odd number of {fmt.name} codes ({tuple(codes.shape)}) does not fill {dtype}; pad the last dim"
        )
    packed = pack(codes.reshape(1) if codes.dim() == 0 else codes, fmt.bits)
    tensor = packed.view(dtype)
    return tensor.reshape(codes.shape) if fmt.bits >= 8 else tensor


@lru_cache(maxsize=512)
def _view(fmt: ElementFormat) -> _View | None:
    """Find the row whose format gives every code the same value."""
    signature = _signature(fmt)
    return next((view for view in _VIEWS if _signature(get_format(view.name)) == signature), None)  # type: ignore[arg-type]


def _signature(fmt: ElementFormat) -> ElementFormat:
    """Return the format stripped of all that does not change what a code means."""
    neutral = {"name": "", "aliases": (), "source": "", "nan_policy": "max"}
    if isinstance(fmt, FloatFormat):
        return dataclasses.replace(fmt, bias=fmt.exponent_bias, overflow=None, **neutral)  # type: ignore[arg-type]
    if isinstance(fmt, IntFormat):
        return dataclasses.replace(fmt, symmetric=False, **neutral)  # type: ignore[arg-type]
    if isinstance(fmt, CodebookFormat | LogFormat):
        return dataclasses.replace(fmt, **neutral)  # type: ignore[arg-type]
    raise FormatError(f"{fmt!r} is not an element format; pass its element")
