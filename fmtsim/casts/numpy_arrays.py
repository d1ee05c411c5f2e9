# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of verbs that are not tensors of floats: numpy arrays and torch's float8 tensors."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from fmtsim.casts.arguments import check_input, check_out, check_out_dtype
from fmtsim.formats.block import with_block
from fmtsim.formats.element import ElementFormat
from fmtsim.formats.interop import numpy_dtype
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import FLOAT8_DTYPES, FLOAT_DTYPES, narrowed, result_dtype
from fmtsim.support.dispatch import constant_in_graphs
from fmtsim.support.errors import ArgumentError, DtypeError, shown

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_KINDS = "float16, bfloat16, float32, float64 or a float8 dtype"


def array_bits(array: "numpy.ndarray[Any, Any]") -> Tensor:
    """Return the bits of an array as signed integers of its size, in its memory where torch can use that."""
    if not array.dtype.isnative:  # torch has the machine's byte order alone
        array = array.astype(array.dtype.newbyteorder("="))
    # torch takes neither negative strides nor those that are not whole elements
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.copy()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # it is only read
        return torch.from_numpy(array.view(f"i{array.itemsize}"))


def to_tensor(array: "numpy.ndarray[Any, Any]", name: str = "x") -> Tensor:
    """Return an array of floats as a tensor of the same dtype, which is only to be read.

    Raises:
        DtypeError: Its dtype is not one of float16, bfloat16, float32, float64 and ml_dtypes' names for torch's float8.
        ArgumentError: It is a masked array.
    """
    _check_unmasked(array, name)
    dtype = _torch_dtype(array.dtype)
    if dtype not in (*FLOAT_DTYPES, *FLOAT8_DTYPES):
        wide = array.dtype.kind in "iu" and array.dtype.itemsize > 2  # float32 would round such integers first
        hint = (
            "take the real and imaginary parts apart"
            if array.dtype.kind == "c"
            else f"convert it with {name}.astype('float{64 if wide else 32}')"
        )
        raise DtypeError(f"{name} has dtype {array.dtype}; choose {_KINDS} ({hint})")
    return array_bits(array).view(dtype)


def to_array(tensor: Tensor) -> "numpy.ndarray[Any, Any]":
    """Return a CPU tensor of floats as an array of the same dtype, ml_dtypes' where numpy has none, in its memory."""
    fmt = get_format(tensor.dtype)
    assert isinstance(fmt, ElementFormat)
    return tensor.detach().view(_BITS[tensor.element_size()]).numpy().view(numpy_dtype(fmt))


def as_floats(x: Any) -> Any:
    """Return an array, or a float8 tensor, as a tensor of floats with the same values; anything else as it is."""
    x = to_tensor(x) if isinstance(x, numpy.ndarray) else x
    return x.to(torch.float32) if isinstance(x, Tensor) and x.dtype in FLOAT8_DTYPES else x


def as_words(words: Any) -> Any:
    """Return an array of random words as a tensor, anything else as it is."""
    return array_bits(words) if isinstance(words, numpy.ndarray) and words.dtype == numpy.int64 else words


def quantize(
    verb: Callable[..., Tensor], x: Any, format: Any, out_dtype: Any, out: Any, options: dict[str, Any]
) -> Any:
    """Do what ``verb``, quantize for tensors of floats, does for arrays, and from and to float8."""
    # 1. an array: as a tensor in its memory, and back
    if isinstance(x, numpy.ndarray):
        tensor = to_tensor(x)
        if out is None:
            dtype = _checked_dtype(out_dtype)
        else:
            if not isinstance(out, numpy.ndarray):
                raise DtypeError(f"out is {type(out).__name__} and x an array; pass numpy.empty_like(x)")
            dtype = to_tensor(out, "out").dtype
            if out_dtype is not None and _checked_dtype(out_dtype) != dtype:
                raise DtypeError(f"out has dtype {out.dtype} but out_dtype={shown(out_dtype)}; leave out_dtype out")
            if out.shape != x.shape:
                raise ArgumentError(f"out has shape {out.shape}; x has {x.shape}; pass numpy.empty_like(x)")
            if not out.flags.writeable:
                raise ArgumentError("out is an array that cannot be written; pass out.copy(), or numpy.empty_like(x)")
        options = {**options, "random_words": as_words(options["random_words"])}
        array = to_array(verb(tensor, format, out_dtype=dtype, **options))
        if out is None:
            return array
        numpy.copyto(out, array)  # out may overlap x, which was read before
        return out
    # 2. a float8 tensor becomes float32, which holds all of its values
    check_input(x, float8=True)
    dtype = out_dtype if out is None else check_out(x, out, out_dtype)
    dtype = _result_dtype(format, options["block_size"], options["scale_rule"], x.dtype, dtype)
    wide = x.to(torch.float32) if x.dtype in FLOAT8_DTYPES else x
    # 3. a float8 result is narrowed from float32: exact, since its dtype holds every value of the format
    if isinstance(dtype, torch.dtype) and dtype in FLOAT8_DTYPES:
        result = narrowed(verb(wide, format, **options), dtype)
    else:  # the verb checks it
        result = verb(wide, format, out_dtype=dtype, **options)
    return result if out is None else out.copy_(result)


def decode(verb: Callable[..., Tensor], codes: "numpy.ndarray[Any, Any]", format: Any, out_dtype: Any) -> Any:
    """Do what ``verb``, decode for tensors, does for an array of integers or of a dtype of ml_dtypes."""
    _check_unmasked(codes, "codes")
    wanted = _checked_dtype(out_dtype)
    dtype = _torch_dtype(codes.dtype)  # by its name, which ml_dtypes and torch share
    if dtype is None or codes.dtype.kind not in "iu" and dtype not in FLOAT8_DTYPES:
        raise DtypeError(f"codes have dtype {codes.dtype}; pass integers, float8, or what fmtsim.encode returned")
    return to_array(verb(array_bits(codes).view(dtype), format, out_dtype=wanted))


def _checked_dtype(out_dtype: Any) -> torch.dtype | None:
    """Return the torch dtype for one of torch's, numpy's or ml_dtypes'."""
    if out_dtype is None or isinstance(out_dtype, torch.dtype):
        return out_dtype
    import ml_dtypes  # noqa: F401  # registers its dtypes' names with numpy

    try:
        wanted = numpy.dtype(out_dtype)
    except (TypeError, ValueError):
        raise DtypeError(f"out_dtype={shown(out_dtype)} is not a dtype; choose {_KINDS}") from None
    dtype = _torch_dtype(wanted) if wanted.isnative else None
    if dtype not in (*FLOAT_DTYPES, *FLOAT8_DTYPES):
        raise DtypeError(f"out_dtype={shown(out_dtype)} is not allowed; choose {_KINDS}")
    return dtype


def _check_unmasked(array: "numpy.ndarray[Any, Any]", name: str) -> None:
    if isinstance(array, numpy.ma.MaskedArray):
        raise ArgumentError(f"{name} is a masked array, and the mask would be lost; pass {name}.filled(0)")


def _torch_dtype(dtype: "numpy.dtype[Any]") -> torch.dtype | None:
    """Return torch's dtype of the same name, None where there is none."""
    same_name = getattr(torch, dtype.name, None)
    return same_name if isinstance(same_name, torch.dtype) else None


@constant_in_graphs
def _result_dtype(format: Any, block_size: Any, scale_rule: Any, x_dtype: torch.dtype, wanted: Any) -> Any:
    """Return the dtype of the result; a float8 one holds every value of the format."""
    fmt = with_block(get_format(format), block_size, scale_rule)
    return result_dtype(fmt, x_dtype) if wanted is None else check_out_dtype(wanted, fmt)
