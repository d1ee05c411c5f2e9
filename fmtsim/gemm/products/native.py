# SPDX-License-Identifier: Apache-2.0
"""Run a product natively, by torch and its library, where the GPU is the target.

With ``native=None`` a verb runs natively if the tensors are on the GPU that the target describes and torch has the
call; with ``True`` it does, or raises an error that says why not; with ``False`` it emulates.
"""

import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.lanes import define_operator
from fmtsim.casts.ops import load_engine
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.operands import fp4_of_fp8, inner_length, matrix_layout, own_dtype
from fmtsim.gemm.targets.doubts import caller_level, warn_of_native_bug
from fmtsim.gemm.targets.question import DEFAULT
from fmtsim.gemm.targets.target import Target, get_target
from fmtsim.spec.call import LARGE_BLOCKS, UNIT_SCALES, GemmCall, Operands, ScaleKind
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.dispatch import constant_in_graphs
from fmtsim.support.errors import ArgumentError, DtypeError, FormatError, NativeWarning

_LIBRARY_SUMS = {
    "fp32": (torch.float16, torch.bfloat16, torch.float32),
    "fp16": (torch.float16,),
    "fp64": (torch.float64,),
    "int32": (torch.int8,),
}
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_FP4 = torch.float4_e2m1fn_x2
_BLOCK = 128
SCALED_MULTIPLE = 16
"""What torch._scaled_mm takes K and N in multiples of."""

_FACTS = ("scaling", "fast_accum", "tf32", "fp16_accumulation", "rows_per_scale_a", "rows_per_scale_b")


def is_native(target: str | Path | Target, device: torch.device | str | int = "cuda") -> bool:
    """Return True if products with a target run on a device's own unit; ``why_not_native`` says why they do not."""
    return why_not_native(target, device) is None


def why_not_native(target: str | Path | Target, device: torch.device | str | int = "cuda") -> str | None:
    """Return why products with a target are emulated on a device, None where the device computes them itself.

    The device's name, compute capability and multiprocessors have to be those that the target names, and no setting
    of the process may give cuBLAS other choices than the recorded ones. Other versions of torch or cuBLASLt than the
    recorded ones warn once (NativeWarning).

    Raises:
        ArgumentError: An unknown target.
    """
    # no GPU at all, then another GPU than the target's, then settings of this process
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    record = get_target(target)
    index = _cuda_index(place)
    if index is None and place.type == "cuda":
        return "torch sees no CUDA GPU"
    if index is None:
        return f"the tensors are on {place.type}, not on a CUDA GPU; move them there with .cuda()"
    return _gpu_reason(record, index)[0]


def emulation_reason(
    target: Any, plan: GemmPlan | None, device: torch.device, unsupported: str | None = None
) -> str | None:  # fmt: skip
    """Return why a product is emulated, None where the GPU computes it itself.

    Args:
        target: A GPU with its library, None for a unit or datapath.
        plan: The caller's own plan.
        device: Of the operands.
        unsupported: Why torch does not have the call, None where it has.
    """
    if target is None:
        return "a unit or datapath alone is not a GPU; name a GPU with its library as target="
    if plan is not None:
        return "plan= replaces the library's accumulation order"
    return unsupported or why_not_native(target, device)


def runs_natively(
    native: bool | None, target: Any, plan: GemmPlan | None, device: torch.device,
    unsupported: Callable[[], str | None],
) -> bool:  # fmt: skip
    """Return True if a product runs natively; ``unsupported`` is only called where the answer depends on it.

    Raises:
        ArgumentError: ``native=True`` and something stands in the way.
    """
    # on a CPU, or without a library, nothing is asked
    if native is False or (native is None and (target is None or _cuda_index(device) is None)):
        return False
    reason = None if target is None else unsupported()
    # cached for compiled code; the reason is a setting of the process, or lies in the call
    reason, setting = _decided(target, plan is not None, device.type, device.index, reason)
    if reason is None:
        return True
    if native:
        raise ArgumentError(f"native=True is not possible: {reason}; pass native=False to emulate the product")
    if setting:
        _warn_of_setting(reason)
    return False


def card_description(device: torch.device | str) -> dict[str, str]:
    """Return the name of a CUDA device and the version of its cuBLASLt for a record, {} for other devices."""
    index = _cuda_index(torch.device(device))
    if index is None:
        return {}
    version = load_engine("cuda").cublaslt_version()
    return {"card": torch.cuda.get_device_name(index), "cublaslt": f"cuBLASLt {version or 'unknown'}"}


@constant_in_graphs  # torch.compile cannot see through what asks the GPU
def _decided(target: Any, planned: bool, kind: str, index: int | None, reason: str | None) -> tuple[str | None, bool]:
    """Return why a product is emulated (None: it is native), and whether a setting of the process is the reason."""
    device = torch.device(kind) if index is None else torch.device(kind, index)
    reason = emulation_reason(target, GemmPlan() if planned else None, device, reason)
    if reason is None:
        _last_targets[index] = target
        return None, False
    number = _cuda_index(device)
    if target is None or number is None:
        return reason, False
    return reason, _gpu_reason(get_target(target), number) == (reason, True)


def _cuda_index(device: torch.device) -> int | None:
    """Return the number of a CUDA device, None for others and where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _gpu_reason(target: Target, index: int) -> tuple[str | None, bool]:
    """Return why a GPU is not that of a target, and whether a setting is the reason; warn once of other versions."""
    # 1. the GPU's name, compute capability and multiprocessors
    other = _other_gpu(target, index)
    if other is not None:
        return other, False
    # 2. a target with products or settings of its own is never the plain library
    if target.overrides:
        return f"target {target.name} has products of another library than cuBLAS", False
    if target.settings != DEFAULT:
        return f"the target has the settings {target.settings.describe()}, and native products run with torch's", False
    # 3. switches of the process that give cuBLAS other choices; versions only warn
    setting = load_engine("cuda").other_settings(index)
    if setting is None:
        _warn_of_versions(target.name, target.library)
    return setting, setting is not None


@lru_cache(maxsize=64)
def _other_gpu(target: Target, index: int) -> str | None:
    return load_engine("cuda").other_gpu(target.library, target.families, index)


@cache
def _warn_of_versions(name: str, library: str) -> None:
    different = load_engine("cuda").other_versions(library)
    if different:
        warnings.warn(
            f"target {name} was recorded with other versions than are here: {', '.join(different)}. Native products "
            "are what this library computes; emulated ones keep the recorded accumulation orders. "
            "`python -m tools.calibrate` asks this library.",
            NativeWarning,
            stacklevel=caller_level(),
        )


@cache
def _warn_of_setting(reason: str) -> None:
    warnings.warn(
        f"the GPU is the target, but the product is emulated: {reason}. Pass native=False where that is meant.",
        NativeWarning,
        stacklevel=caller_level(),
    )


def check_library(
    call: GemmCall, sizes: tuple[int, int, int], dtype: torch.dtype | None, rows_per_scale: tuple[int, int] = (1, 1)
) -> None:
    """Refuse what torch._int_mm and torch._scaled_mm, or cuBLAS below them, refuse on an NVIDIA GPU.

    Args:
        call: The call, with its formats.
        sizes: M, N and K.
        dtype: Of the result, None for that of the accumulator.
        rows_per_scale: Rows of a block of scales of both operands.
    """
    m, n, k = sizes
    if call.operation == "int_mm" and (m <= 16 or k % 8 or n % 8 or not k or not n):
        raise ArgumentError(
            f"torch._int_mm on CUDA takes M above 16 and K and N that are multiples of 8, not M={m}, K={k}, N={n}; "
            "pad the operands, or name a unit as target="
        )
    if call.operation != "scaled_mm" or call.formats is None:
        return
    names = call.formats[0].name, call.formats[1].name
    if names == ("e5m2", "e5m2"):
        raise DtypeError("cuBLAS does not multiply e5m2 by e5m2; make one operand e4m3, or name a unit as target=")
    if names == ("e4m3", "e4m3") and dtype == torch.float8_e5m2:
        raise DtypeError("cuBLAS has no e5m2 output for e4m3 by e4m3; choose torch.float8_e4m3fn or a wider dtype")
    if any(fmt.bits > 8 for fmt in call.formats):
        raise DtypeError(f"torch._scaled_mm takes 8-bit and 4-bit operands, not {' x '.join(names)}; call mm")
    if call.fast_accum and "e2m1" in names:
        raise ArgumentError("torch._scaled_mm has no use_fast_accum for 4-bit operands; leave it False")
    if k % SCALED_MULTIPLE or n % SCALED_MULTIPLE:
        raise ArgumentError(
            f"torch._scaled_mm takes K and N that are multiples of {SCALED_MULTIPLE}, not K={k}, N={n}; "
            f"pad, take another dtype than {names[0]}, or name a unit as target="
        )
    if rows_per_scale == (_BLOCK, _BLOCK):
        raise FormatError(
            "torch._scaled_mm has no 128x128 by 128x128 scales; give one operand 1x128, or name a unit as target="
        )


def unsupported_reason(
    call: GemmCall, dtypes: tuple[torch.dtype, torch.dtype], dtype: torch.dtype | None, scales_result: bool = False,
    converted: bool = False,
) -> str | None:  # fmt: skip
    """Return why torch does not have a product with results in ``dtype``, None where it does.

    Args:
        call: What is asked, with the formats.
        dtypes: Of the operands.
        dtype: Of the result, None for that of the accumulator.
        scales_result: FP8 results are scaled.
        converted: Operands hold values of their formats (float32 ones: of TF32) and are cast where needed.
    """
    operation, kind, formats = call.operation, call.scaling, call.formats
    assert formats is not None
    # 1. each operand in the dtype of its format; a layer's values are cast to it, exactly
    for name, dtype_in, fmt in zip("ab", dtypes, formats, strict=True):
        fmt_dtype = own_dtype(fmt)
        if operation == "scaled_mm" and (
            fmt_dtype not in (*FP8_DTYPES, _FP4) or not (converted or dtype_in == fmt_dtype)
        ):
            return f"torch does not multiply {name} of dtype {dtype_in} with {fmt.name} numbers"
        if operation != "scaled_mm" and dtype_in != (torch.float32 if converted and fmt.name == "tf32" else fmt_dtype):
            return f"torch does not multiply {dtype_in} tensors as {fmt.name}"
    if operation == "scaled_mm":
        # 2. torch._scaled_mm: sums, scales and results that cuBLASLt has
        if call.accumulate not in ("", "fp32"):
            return f"torch does not sum FP8 products in {call.accumulate}"
        if scales_result and kind not in ("tensor", "row"):
            return "torch.nn.functional.scaled_mm has no scale_result"
        operands = [own_dtype(fmt) for fmt in formats]
        if kind in LARGE_BLOCKS and call.fast_accum:
            return "torch has no use_fast_accum with 1x128 and 128x128 scales"
        if kind in LARGE_BLOCKS and torch.float8_e5m2 in operands:
            return "torch.nn.functional.scaled_mm multiplies e4m3 alone with 1x128 and 128x128 scales"
        if kind in ("row", *LARGE_BLOCKS) and dtype is not None and dtype.itemsize == 1:
            return f"cuBLASLt gives no {dtype} results with {kind} scales"
        allowed = {"mx": (FP8_DTYPES, (_FP4,)), "nvfp4": ((_FP4,),)}.get(kind, (FP8_DTYPES,))
        if not any(set(operands) <= set(dtypes) for dtypes in allowed):
            return f"torch does not multiply {operands[0]} by {operands[1]} with {kind} scales"
        return None
    # 3. torch.mm and its kin: equal dtypes, their sums and results
    a_dtype, b_dtype = dtypes
    if a_dtype != b_dtype:
        return f"torch does not multiply {a_dtype} by {b_dtype}"
    sums = call.accumulate or "fp32"
    if a_dtype not in _LIBRARY_SUMS[sums] or (sums == "fp16" and dtype != torch.float16):
        return f"torch does not sum {a_dtype} products in {sums} for {dtype} results"
    if call.bias and dtype != a_dtype:
        return f"torch.nn.functional.linear gives {a_dtype}, not {dtype}"
    return None


def multiply_natively(call: GemmCall, operands: Operands, dtype: torch.dtype) -> Tensor:
    """Return a product that torch has as torch computes it, with the bias if the call has one."""
    a, b, formats = operands.a, operands.b, call.formats
    assert formats is not None
    scale_a = scale_b = tensor_a = tensor_b = None
    if call.operation == "scaled_mm":
        # a layer may hold FP8 values in wider dtypes: the cast back is exact
        a, b = (_in_dtype(x, own_dtype(fmt)) for x, fmt in zip((a, b), formats, strict=True))
        if call.scaling in ("tensor", "row"):
            scale_a, scale_b = operands.row, operands.column
        else:
            # small scales as codes, one for each row; large ones as float32
            small = operands.scale_a, operands.scale_b
            if call.scaling in UNIT_SCALES:
                small = operands.scales_of_rows(a.shape[0], b.shape[0])
            scale_a, scale_b = (_codes(s, call.scaling) for s in small)
            tensor_a, tensor_b = operands.row, operands.column
    # an operator: compiled graphs call it, and it keeps the strides that the library's choice depends on
    return torch.ops.fmtsim.native_gemm(  # type: ignore[no-any-return]
        a, b.mT, call.operation, dtype, operands.bias if call.bias else None, scale_a, scale_b, tensor_a, tensor_b,
        operands.result_scale, call.scaling, call.fast_accum, formats[0].name == "tf32", call.accumulate == "fp16",
        *operands.rows_per_scale,
    )  # fmt: skip


def _in_dtype(x: Tensor, fmt_dtype: torch.dtype | None) -> Tensor:
    """Cast values of a format to the format's dtype: exact."""
    if x.dtype == fmt_dtype:
        return x
    return fp4_of_fp8(x) if fmt_dtype == _FP4 else x.to(fmt_dtype)


def _codes(scales: Tensor | None, kind: ScaleKind) -> Tensor | None:
    """Return scales as the library takes them: small ones as codes, others as they are."""
    if scales is None or kind not in UNIT_SCALES or scales.dtype == torch.uint8:
        return scales
    if kind == "nvfp4":
        return scales.to(torch.float8_e4m3fn).view(torch.uint8)  # exact: they are E4M3 numbers
    # A power of two's exponent field is its E8M0 code; 2^-127, a subnormal, has 0, and NaN 255.
    return (scales.contiguous().view(torch.int32) >> 23 & 0xFF).to(torch.uint8)


_last_targets: dict[int | None, Any] = {}  # by CUDA device, the target for which it last multiplied natively
_inspected: set[tuple[Any, ...]] = set()  # native calls that were checked for a dropped end of K
_MOST_INSPECTED = 1 << 16


def _warn_of_dropped_k(a: Tensor, b: Tensor, bias: bool, call: Any, facts: tuple[Any, ...]) -> None:
    """Warn once for each native call of which the library drops the end of K; a repeated call costs one lookup."""
    # once for each call: its sizes, strides, dtypes and facts
    target = _last_targets.get(a.device.index)
    key = (
        target, call.function, a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, call.out_dtype, bias, facts,
    )  # fmt: skip
    if target is None or key in _inspected:
        return
    if len(_inspected) == _MOST_INSPECTED:
        _inspected.clear()
    _inspected.add(key)
    warn_of_native_bug(get_target(target), _native_call(a, b, bias, call))


def _native_call(a: Tensor, b: Tensor, bias: bool, call: Any) -> GemmCall:
    """Return the GemmCall of a native call."""
    # the facts that a target is asked by, read off the tensors
    names = ["tf32" if call.tf32 else get_format(x.dtype).name for x in (a, b)]
    sums = {torch.int8: "int32", torch.float64: "fp64"}.get(a.dtype, "fp16" if call.fp16_accumulation else "fp32")
    batch = a.shape[0] if call.function == "bmm" else 1
    return GemmCall(
        operation=call.function, m=a.shape[:-1].numel() // batch, n=b.shape[-1], k=inner_length(a), a=names[0],
        b=names[1], out=call.out_dtype, accumulate=sums, fast_accum=call.fast_accum, scaling=call.scaling, bias=bias,
        a_layout=matrix_layout(a), b_layout=matrix_layout(b, transposed=True), batch=batch,
    )  # fmt: skip


def _native_gemm(a, b, function, dtype, bias=None, *rest):  # type: ignore[no-untyped-def]
    engine = load_engine("cuda")
    scales, facts = engine.NativeScales(*rest[:5]), dict(zip(_FACTS, rest[5:], strict=False))
    call = engine.NativeCall(function=function, out_dtype=dtype, **facts)
    _warn_of_dropped_k(a, b, bias is not None, call, rest[5:])
    a, b, bias = (None if t is None else t.detach() for t in (a, b, bias))
    return engine.run_native(call, a, b, bias, scales).contiguous()


define_operator(
    "native_gemm(Tensor a, Tensor b, str function, ScalarType dtype, Tensor? bias=None, Tensor? scale_a=None, "
    "Tensor? scale_b=None, Tensor? tensor_scale_a=None, Tensor? tensor_scale_b=None, Tensor? result_scale=None, "
    "str scaling='none', bool fast_accum=False, bool tf32=False, bool fp16_accumulation=False, int rows_per_scale_a=1, "
    "int rows_per_scale_b=1) -> Tensor",
    _native_gemm,
    lambda a, b, function, dtype, *_: torch.empty((*a.shape[:-1], b.shape[-1]), dtype=dtype, device=a.device),
    tags=(torch.Tag.needs_exact_strides,),  # a library's accumulation order depends on them
)
