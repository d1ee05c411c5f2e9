# SPDX-License-Identifier: Apache-2.0
"""Native products: torch's call for a product, the switches that decide its bits, and which GPU computes it.

Nothing here emulates. ``NativeCall`` describes a call, ``torch_call`` returns torch's function and arguments for it,
and ``run`` calls that under exactly the switches that the description names. ``other_gpu``, ``other_settings`` and
``other_versions`` compare the GPU, its settings and its library with those that a target was recorded on.

The FP8, 16-bit, TF32 and int8 calls ran on an H200. The calls with MX and NVFP4 scales follow torch's API and are
tested up to the call: no Blackwell GPU has run them.
"""

import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtsim.support.errors import DeviceError, first_line

_LINE = 16  # bytes to which cuBLASLt wants FP8 operands aligned
_BLOCK = 128
# By kind of scales: torch.nn.functional.ScalingType of both operands where blocks are rows, and dtype of small scales.
_SMALL = {"mx": ("BlockWise1x32", torch.float8_e8m0fnu), "nvfp4": ("BlockWise1x16", torch.float8_e4m3fn)}
_lock = threading.RLock()
# Variables that give cuBLAS another workspace, which who asks cuBLASLt names, and those that give it another arithmetic
# or another choice of kernels.
_WORKSPACES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE")
_VARIABLES = (
    "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATE_DOUBLE_PRECISION",
    "CUBLAS_EMULATION_STRATEGY",
    "NVIDIA_TF32_OVERRIDE",
    "DISABLE_ADDMM_CUDA_LT",
)
# What torch takes for CUBLAS_WORKSPACE_CONFIG where it is not set, by major compute capability: 32 MiB on Hopper.
_SAME_WORKSPACE = {9: (":4096:8",)}
# Major compute capabilities of the families after which units are named.
_MAJORS = {"volta": 7, "turing": 7, "ampere": 8, "ada": 8, "hopper": 9, "blackwell": 10, "rtx_blackwell": 12}
_LIBRARY = re.compile(r"(?P<gpu>NVIDIA [^(,]+?)\s*(\((?P<sizes>[^)]*) multiprocessors\))?(,|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCall:
    """Describe a product that torch is to compute.

    Args:
        function: ``"mm"``, ``"bmm"``, ``"linear"``, ``"scaled_mm"`` or ``"int_mm"``.
        out_dtype: Dtype of the result.
        scaling: Kind of scales of scaled_mm: ``"tensor"``, ``"row"``, ``"block_128"``, ``"row_block_128"``, ``"mx"``
            or ``"nvfp4"``.
        fast_accum: use_fast_accum of scaled_mm.
        tf32: Whether float32 operands are rounded to TF32.
        fp16_accumulation: Whether float16 products are summed in float16.
        rows_per_scale_a, rows_per_scale_b: Rows that share the scales of a block of 128: 1 or 128.
        older: Take torch._scaled_mm for MX and NVFP4, too, which torch had first; it takes no tensor scales then.
    """

    function: str
    out_dtype: torch.dtype
    scaling: str = "none"
    fast_accum: bool = False
    tf32: bool = False
    fp16_accumulation: bool = False
    rows_per_scale_a: int = 1
    rows_per_scale_b: int = 1
    older: bool = False


class NativeScales(NamedTuple):
    """Hold the scales of both operands.

    ``a`` and ``b`` are float32: one element, one for each row, or [row blocks, blocks along K]; for MX and NVFP4 codes
    [rows, blocks] as uint8. ``tensor_scale_a`` and ``tensor_scale_b`` are those of two-level NVFP4. ``result``
    multiplies an FP8 result.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    tensor_scale_a: Tensor | None = None
    tensor_scale_b: Tensor | None = None
    result: Tensor | None = None


class TorchCall(NamedTuple):
    """A function of torch with its arguments; calling it computes the product."""

    name: str
    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> Tensor:
        """Return the product."""
        return self.function(*self.arguments, **self.options)


def run(
    call: NativeCall, a: Tensor, b: Tensor, bias: Tensor | None = None, scales: NativeScales | None = None
) -> Tensor:
    """Return the product that torch computes on the tensors' device.

    Args:
        call: Which product.
        a: [..., M, K] in its own dtype; the strides matter for the order of sums, and are kept for 16 bits and more.
        b: [..., K, N].
        bias: [N], for linear and scaled_mm.
        scales: Of scaled_mm.

    Raises:
        DeviceError: torch or its library refuses the call; the message has torch's own first line. Out of memory is
            torch.OutOfMemoryError, as ever.
    """
    native = torch_call(call, a, b, bias, scales or NativeScales())
    try:
        with torch.no_grad(), torch.autocast(a.device.type, enabled=False), switches(call):
            return native()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        what = " x ".join(f"{list(x.shape)} {x.dtype}" for x in (a, b))
        raise DeviceError(
            f"{native.name} refused {what} -> {call.out_dtype}: {first_line(error)}; "
            "pass native=False to emulate the product"
        ) from error


def torch_call(call: NativeCall, a: Tensor, b: Tensor, bias: Tensor | None, scales: NativeScales) -> TorchCall:
    """Return the function of torch that a product is, with its arguments; nothing is computed but copies to layouts."""
    if call.function in ("mm", "bmm"):
        wide = {} if call.out_dtype == a.dtype else {"out_dtype": call.out_dtype}
        return TorchCall(f"torch.{call.function}", getattr(torch, call.function), (a, b), wide)
    if call.function == "linear":
        return TorchCall("torch.nn.functional.linear", F.linear, (a, b.mT, bias), {})
    a, b = row_major(a), row_major(b.mT).mT
    if call.function == "int_mm":
        return TorchCall("torch._int_mm", torch._int_mm, (a, b), {})
    if call.scaling in ("tensor", "row"):
        return _scaled(call, a, b, bias, scales)
    # torch.nn.functional.scaled_mm with blocks of 128 (Hopper), or with MX or NVFP4 scales (Blackwell).
    if call.older and call.scaling in _SMALL and scales.tensor_scale_a is scales.tensor_scale_b is None:
        dtype = _SMALL[call.scaling][1]
        pair = [swizzled(s).view(dtype) for s in scales[:2]]  # type: ignore[arg-type]
        how = {"bias": bias, "out_dtype": call.out_dtype, "use_fast_accum": call.fast_accum}
        return TorchCall("torch._scaled_mm", torch._scaled_mm, (a, b, *pair), how)
    kinds: Any = getattr(F, "ScalingType", None)
    swizzles: Any = getattr(F, "SwizzleType", None)
    function: Any = getattr(F, "scaled_mm", None)
    if kinds is None or function is None:
        raise DeviceError(f"torch {torch.__version__} has no torch.nn.functional.scaled_mm; take torch 2.10 or later")
    assert scales.a is not None and scales.b is not None
    lists: list[list[Tensor]]
    recipes: list[list[Any]]
    if call.scaling in _SMALL:
        name, dtype = _SMALL[call.scaling]
        lists = [[swizzled(s).view(dtype)] for s in scales[:2]]  # type: ignore[arg-type]
        recipes = [[getattr(kinds, name)], [getattr(kinds, name)]]
        for tensor_scale, listed, recipe in zip(scales[2:4], lists, recipes, strict=True):
            if tensor_scale is not None:
                listed.append(tensor_scale.reshape(()))
                recipe.append(kinds.TensorWise)
        orders = [[swizzles.SWIZZLE_32_4_4] + [swizzles.NO_SWIZZLE] * (len(listed) - 1) for listed in lists]
    else:
        rows = call.rows_per_scale_a, call.rows_per_scale_b
        lists = [[block_scales(s, height)] for s, height in zip(scales[:2], rows, strict=True)]  # type: ignore[arg-type]
        recipes = [[kinds.BlockWise1x128 if height == 1 else kinds.BlockWise128x128] for height in rows]
        orders = [[swizzles.NO_SWIZZLE], [swizzles.NO_SWIZZLE]]
    options = {
        "swizzle_a": orders[0], "swizzle_b": orders[1], "bias": bias, "output_dtype": call.out_dtype,
        "use_fast_accum": call.fast_accum,
    }  # fmt: skip
    arguments = (a, b, lists[0], recipes[0], lists[1], recipes[1])
    return TorchCall("torch.nn.functional.scaled_mm", function, arguments, options)


def _scaled(call: NativeCall, a: Tensor, b: Tensor, bias: Tensor | None, scales: NativeScales) -> TorchCall:
    """Return torch._scaled_mm with one scale for each tensor, or for each row of a and column of b."""
    shapes: tuple[tuple[int, ...], ...] = ((), ()) if call.scaling == "tensor" else ((a.shape[0], 1), (1, b.shape[1]))
    pair = [_single(s, a) if shape == () else _vector(s, shape, a) for s, shape in zip(scales[:2], shapes, strict=True)]
    options: dict[str, Any] = {"bias": bias, "out_dtype": call.out_dtype, "use_fast_accum": call.fast_accum}
    if scales.result is not None and call.out_dtype.itemsize == 1:
        options["scale_result"] = scales.result.reshape(())
    return TorchCall("torch._scaled_mm", torch._scaled_mm, (a, b, *pair), options)


def block_scales(scales: Tensor, rows_per_scale: int) -> Tensor:
    """Return float32 scales [row blocks, blocks along K] in the layout that torch takes.

    1x128: the same shape with the rows contiguous. 128x128: K first, padded with ones to a multiple of 4, K contiguous.
    """
    if rows_per_scale == 1:
        return scales.t().contiguous().t()
    blocks = scales.shape[1]
    padded = scales.new_ones(scales.shape[0], -(-blocks // 4) * 4)
    padded[:, :blocks] = scales
    return padded.t()


def swizzled(codes: Tensor) -> Tensor:
    """Return codes [rows, blocks] of small scales, flat, in the order that cuBLAS takes (1D block scaling factors).

    Rows are padded to 128, blocks to 4, both with zeros. Tiles of 128 x 4 follow each other along a row of tiles; row r
    of a tile lies at ``16 (r mod 32) + 4 (r div 32)``, its four codes side by side.
    """
    rows, blocks = codes.shape
    down, across = -(-rows // _BLOCK), -(-blocks // 4)
    padded = codes.new_zeros(down * _BLOCK, across * 4)
    padded[:rows, :blocks] = codes
    return padded.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def row_major(x: Tensor) -> Tensor:
    """Return a matrix of 8-bit numbers with its rows contiguous and aligned, itself where it is so already."""
    if x.is_contiguous() and x.data_ptr() % _LINE == 0:
        return x
    return x.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(x.dtype)


def _single(scale: Tensor | None, like: Tensor) -> Tensor:
    return torch.ones((), device=like.device) if scale is None else scale.reshape(())


def _vector(scale: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    if scale is None or scale.numel() == 1:
        return _single(scale, like).expand(shape).contiguous()
    return scale.reshape(shape).contiguous()


@contextmanager
def switches(call: NativeCall) -> Iterator[None]:
    """Set what torch's products look at besides their operands, and restore it.

    TF32 and float16 sums are as the call says; partial sums may be rounded to 16 bits and K may be split, and cuBLAS is
    preferred, as torch has it by default. The switches belong to the process: a product that another thread starts
    meanwhile sees them too. Calls of fmtsim wait for each other.
    """
    matmul = torch.backends.cuda.matmul
    wanted: dict[str, Any] = {
        "allow_fp16_accumulation": call.fp16_accumulation,
        "allow_fp16_reduced_precision_reduction": (True, True),
        "allow_bf16_reduced_precision_reduction": (True, True),
    }
    with _lock, ExitStack() as stack:
        precision = matmul.fp32_precision
        if (precision == "tf32") != call.tf32:
            _set(stack, "fp32_precision", "tf32" if call.tf32 else "ieee", precision)
        for name, value in wanted.items():
            now = getattr(matmul, name)
            if isinstance(value, tuple):
                now = (now, getattr(matmul, f"{name}_split_k", True))
            if now != value:
                _set(stack, name, value, now)
        preferred = torch.backends.cuda.preferred_blas_library
        library = preferred()
        if library == torch._C._BlasBackend.Cublaslt:
            stack.callback(preferred, library)
            preferred("cublas")
        yield


def _set(stack: ExitStack, name: str, value: Any, before: Any) -> None:
    stack.callback(setattr, torch.backends.cuda.matmul, name, before)
    setattr(torch.backends.cuda.matmul, name, value)


# Whether a GPU is that of a target.


def other_gpu(library: str, families: frozenset[str], index: int) -> str | None:
    """Return why a device is not the GPU of a target, None where it is.

    Args:
        library: ``Target.library``: the GPU's name first, its multiprocessors in brackets, then versions.
        families: Names of GPU families that the target's units belong to.
        index: Number of the device.
    """
    if torch.version.hip is not None:
        return "torch is built for ROCm, and the target is an NVIDIA GPU"
    parsed = _LIBRARY.match(library)
    if parsed is None:
        return f"its library is {library!r}, which is not an NVIDIA GPU"
    name, wanted = torch.cuda.get_device_name(index), parsed["gpu"]
    if re.match(rf"{re.escape(wanted)}(?![0-9A-Za-z])", name) is None:
        return f"the device is a {name}, the target a {wanted}"
    majors = {_MAJORS[family] for family in families if family in _MAJORS}
    major, minor = torch.cuda.get_device_capability(index)
    if majors and major not in majors:
        return f"the device has compute capability {major}.{minor}, the target {min(majors)}.x"
    count = torch.cuda.get_device_properties(index).multi_processor_count
    if parsed["sizes"] is not None and count not in map(int, re.findall(r"\d+", parsed["sizes"])):
        return f"the device has {count} multiprocessors, the target {parsed['sizes']}"
    return None


def other_settings(index: int, *, workspaces: bool = True) -> str | None:
    """Return the setting of the process that changes cuBLAS's choices from a target's records, or None.

    Args:
        index: Number of the device.
        workspaces: Look at the sizes of workspaces, too.
    """
    for name in (*_WORKSPACES, *_VARIABLES) if workspaces else _VARIABLES:
        value = os.environ.get(name)
        if value is None:
            continue
        major = torch.cuda.get_device_capability(index)[0]
        if name != "CUBLAS_WORKSPACE_CONFIG" or value not in _SAME_WORKSPACE.get(major, ()):
            return f"{name}={value} is set, with which cuBLAS may choose other kernels; unset it before Python starts"
    if torch.cuda.tunable.is_enabled():
        return "torch.cuda.tunable chooses kernels of its own; torch.cuda.tunable.enable(False) ends that"
    carveout = getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)()
    if carveout is not None:
        return f"{carveout} multiprocessors are kept from FP8 products (torch's sm_carveout); set it back to None"
    return None


def other_versions(library: str) -> list[str]:
    """Return which versions differ from those in a target's ``library``: ``"torch 2.12.0 instead of 2.11.0"``, ..."""
    here = {"torch": torch.__version__, "cuBLASLt": cublaslt_version()}
    different = []
    for name, version in here.items():
        recorded = re.search(rf"{name} (\S+?)(,|$)", library)
        if recorded is not None and version is not None and not _same(version, recorded[1]):
            different.append(f"{name} {version} instead of {recorded[1]}")
    return different


def _same(here: str, recorded: str) -> bool:
    """Compare as many parts of a version as were recorded."""
    return here == recorded or here.startswith(f"{recorded}.") or here.startswith(f"{recorded}+")


@cache
def cublaslt() -> ctypes.CDLL | None:
    """Return the cuBLASLt that torch loads; None where there is none."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


@cache
def cublaslt_version() -> str | None:
    """Return the version of the cuBLASLt that torch loads, ``"13.1.0"``; None where it cannot be asked."""
    library = cublaslt()
    try:
        if library is None:
            return None
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        number = int(library.cublasLtGetVersion())
    except AttributeError:
        return None
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
