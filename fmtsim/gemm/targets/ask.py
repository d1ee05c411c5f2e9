# SPDX-License-Identifier: Apache-2.0
"""Ask cuBLASLt itself what it would run for a call: host code of the library that torch loaded, no kernel runs.

Enumerators of cublasLt.h, library_types.h and cublas_api.h stand here as their numbers.
"""

import contextlib
import threading
from ctypes import (
    CDLL,
    byref,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
    create_string_buffer,
    sizeof,
)
from functools import cache, lru_cache
from typing import Any, Final

import torch

from fmtsim.casts.ops import load_engine
from fmtsim.gemm.targets.cublaslt import shared
from fmtsim.gemm.targets.question import Choice, Kind, Question
from fmtsim.spec.call import ScaleKind
from fmtsim.support.errors import DeviceError

_TYPES: Final = {"tf32": 0, "fp32": 0, "fp16": 2, "bf16": 14, "e4m3": 28, "e5m2": 29, "e2m1": 33}  # cudaDataType
_OUT: Final = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_COMPUTE: Final = {"32f": (68, 0), "tf32": (77, 0), "16f": (64, 2)}  # cublasComputeType_t, and the dtype of alpha
# cublasLtMatmulMatrixScale_t of the library's A and B, which are torch's second and first operand. Of large blocks
# torch's first operand, the activations, has those of 1x128.
_SCALE_MODES: Final[dict[ScaleKind, tuple[int, int]]] = {
    "tensor": (0, 0), "nvfp4": (1, 1), "mx": (2, 2), "row": (3, 3), "row_block_128": (4, 4), "block_128": (5, 4),
}  # fmt: skip
# cublasLtMatmulDescAttributes_t
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER, _A_SCALE_POINTER, _B_SCALE_POINTER, _FAST_ACCUM, _BIAS_TYPE = (
    3, 4, 7, 8, 17, 18, 25, 26)  # fmt: skip
_A_SCALE_MODE, _B_SCALE_MODE, _EPILOGUE_BIAS = 31, 32, 4
_MAX_WORKSPACE, _REDUCTION_MASK = 1, 3  # cublasLtMatmulPreferenceAttributes_t
_MASKS: Final = {"none": 0, "fp32": 2}  # cublasLtReductionScheme_t
_ROWS, _COLUMNS, _LD, _BATCH, _STRIDE = 2, 3, 4, 5, 6  # cublasLtMatrixLayoutAttribute_t
_ID, _TILE, _SPLIT, _REDUCTION, _CUSTOM, _STAGES = 0, 1, 2, 3, 5, 6  # cublasLtMatmulAlgoConfigAttributes_t
_SUCCESS, _REFUSALS = 0, (7, 15)  # cublasStatus_t: INVALID_VALUE, NOT_SUPPORTED
_ALGORITHM, _ANSWER = 64, 96  # bytes of cublasLtMatmulAlgo_t and of cublasLtMatmulHeuristicResult_t
_WORKSPACE: Final = slice(64, 72)  # of that result: bytes that the call needs
_SOMEWHERE: Final = 0x10000  # of a bias or scales, which the library does not look at
_WITHOUT_TENSOR_CORES, _WITHOUT_STAGES = (11, 13, 14, 16), (39, 66)


def choice(question: Question, target: Any) -> Choice | None:
    """Return what the cuBLASLt of this process chooses, where a target's GPU and versions are those of this machine.

    Args:
        question: A call.
        target: A Target, whose ``library`` and ``units`` say which GPU and versions it is about.

    Returns:
        None where another GPU, another torch or cuBLASLt, or no GPU is here, and where the library refuses the call
        or cannot be asked.
    """
    device = _gpu_index(target)
    if device is None:
        return None
    with _lock, contextlib.suppress(DeviceError):
        return _asker(device).choice(question)
    return None


_lock = threading.Lock()


@lru_cache(maxsize=64)
def _gpu_index(target: Any) -> int | None:
    """Return the number of a device that is a target's GPU, with its versions and no setting of its own."""
    if not torch.cuda.is_available():
        return None
    engine = load_engine("cuda")
    for index in range(torch.cuda.device_count()):
        if engine.other_gpu(target.library, target.families, index) is None:
            setting = engine.other_settings(index, workspaces=False)
            exact = not engine.other_versions(target.library) and setting is None
            return index if exact and engine.cublaslt() is not None else None
    return None


@cache
def _asker(device: int) -> "Asker":
    return open_asker(device)


def open_asker(device: int = 0, *, cached: bool = True) -> "Asker":
    """Return the Asker of torch's cuBLASLt for a device.

    Args:
        device: Number of the device.
        cached: The library may answer from its cache, as it answers torch. Calls whose hashes are equal share an entry
            there, so that some of 10,000 questions get another call's answer. False switches the cache of this process
            off for good.

    Raises:
        DeviceError: torch has no cuBLASLt, or it does not start.
    """
    library = load_engine("cuda").cublaslt() if torch.cuda.is_available() else None
    if library is None:
        raise DeviceError("torch has no GPU with cuBLASLt here; ask on a machine with an NVIDIA GPU and a torch for it")
    try:
        torch.cuda.init()
        if not cached:
            library.cublasLtHeuristicsCacheSetCapacity(c_size_t(0))
        with torch.cuda.device(device):
            return Asker(library)
    except RuntimeError as error:  # of a forked process, or a GPU that is out of order
        raise DeviceError(f"cuBLASLt cannot be asked here: {error}") from None


class Asker:
    """Ask a cuBLASLt, from one thread at a time. Descriptors are made once a kind of calls, and changed for a question.

    Args:
        library: libcublasLt, with the current device's context.

    Raises:
        DeviceError: The library does not start.
    """

    def __init__(self, library: CDLL) -> None:
        self._functions, self._handle = _Functions(library), c_void_p()
        self._functions.call("cublasLtCreate", byref(self._handle))
        self._products: dict[tuple[Kind, int], _Product | None] = {}
        self._answers: dict[bytes, tuple[Choice, int]] = {}
        self._answer, self._count = create_string_buffer(_ANSWER), c_int()

    def choice(self, question: Question) -> Choice | None:
        """Return the library's first answer, None where it refuses the call; errors as of ``answer``."""
        answer = self.answer(question)
        return None if answer is None else answer[0]

    def answer(self, question: Question) -> tuple[Choice, int] | None:
        """Return the library's first answer and the TILE_ID of its kernel, None where it refuses the call.

        Raises:
            DeviceError: The library fails otherwise.
        """
        # 1. the descriptors of the kind, which is asked about only if its dtypes and scales have the library's numbers
        kind = question.kind
        key = kind, question.layout
        if key not in self._products:
            scaled = kind.scaling == "none" or kind.scaling in _SCALE_MODES
            formats = kind.a in _TYPES and kind.b in _TYPES and kind.out in _OUT and kind.compute in _COMPUTE
            self._products[key] = _Product(self._functions, *key) if formats and scaled else None
        product = self._products[key]
        if product is None:
            return None
        # 2. the heuristic's first answer
        product.resize(question)
        status = self._functions.heuristic(
            self._handle, product.call, product.a, product.b, product.c, product.d, product.preference, 1,
            self._answer, byref(self._count),
        )  # fmt: skip
        if status in _REFUSALS or (status == _SUCCESS and self._count.value < 1):
            return None
        if status != _SUCCESS:
            raise DeviceError(f"cublasLtMatmulAlgoGetHeuristic fails with status {status} for {question}")
        # 3. the attributes of its algorithm that decide the order
        algorithm = self._answer.raw[:_ALGORITHM]
        if algorithm not in self._answers:
            values, written = [], c_size_t()
            for attribute in (_ID, _TILE, _SPLIT, _REDUCTION, _CUSTOM, _STAGES):
                value = c_int32()
                status = self._functions.config(self._answer, attribute, byref(value), sizeof(value), byref(written))
                values.append(value.value if status == _SUCCESS else 0)
            self._answers[algorithm] = normalised(*values), values[1]
        choice, tile = self._answers[algorithm]
        if choice.split == -1:
            choice = shared(choice, question, int.from_bytes(self._answer.raw[_WORKSPACE], "little"))
        return choice, tile


def normalised(algorithm: int, tile: int, split: int, reduction: int, custom: int, stages: int) -> Choice:
    """Return a Choice of the library's attributes, 0 where one does not decide the order."""
    split = split or 1
    has_option = algorithm in _WITHOUT_TENSOR_CORES or (algorithm in (55, 63) and split > 1)
    if algorithm == 63:
        custom = custom or 2  # the same order; 0 stands for an option that is not known
    return Choice(
        algorithm,
        split,
        reduction if split > 1 else 0,
        custom if has_option else tile if split == -1 else 0,
        0 if algorithm in _WITHOUT_STAGES and split != -1 else stages,
    )


class _Functions:
    """The library's functions, with the types of their arguments."""

    def __init__(self, library: CDLL) -> None:
        self._library = library
        self.heuristic = library.cublasLtMatmulAlgoGetHeuristic
        self.heuristic.argtypes = [c_void_p] * 7 + [c_int, c_void_p, c_void_p]
        self.config = library.cublasLtMatmulAlgoConfigGetAttribute
        self.config.argtypes = [c_void_p, c_int, c_void_p, c_size_t, c_void_p]
        self.layout = library.cublasLtMatrixLayoutSetAttribute
        self.layout.argtypes = [c_void_p, c_int, c_void_p, c_size_t]

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            DeviceError: It fails.
        """
        status = getattr(self._library, name)(*arguments)
        if status != _SUCCESS:
            raise DeviceError(f"{name} fails with status {status}; see with nvidia-smi whether the GPU can be used")

    def create(self, name: str, *arguments: Any) -> c_void_p:
        """Call a function that creates an object, and return the object's handle."""
        handle = c_void_p()
        self.call(name, byref(handle), *arguments)
        return handle


class _Matrix:
    """A layout of the library, whose attributes are set where they change."""

    def __init__(self, functions: _Functions, dtype: int) -> None:
        self._set = functions.layout
        self.pointer = functions.create(
            "cublasLtMatrixLayoutCreate", c_int(dtype), c_uint64(8), c_uint64(8), c_int64(8)
        )
        self._current = {_ROWS: 8, _COLUMNS: 8, _LD: 8, _BATCH: 1, _STRIDE: 0}

    def resize(self, rows: int, columns: int, batch: int) -> None:
        attributes = self._current
        if attributes[_ROWS] != rows:
            self._change(_ROWS, c_uint64(rows))
            self._change(_LD, c_int64(rows))
        if attributes[_COLUMNS] != columns:
            self._change(_COLUMNS, c_uint64(columns))
        if attributes[_BATCH] != batch:
            self._change(_BATCH, c_int32(batch))
        if attributes[_STRIDE] != (stride := rows * columns if batch > 1 else 0):
            self._change(_STRIDE, c_int64(stride))

    def _change(self, attribute: int, value: Any) -> None:
        status = self._set(self.pointer, attribute, byref(value), sizeof(value))
        if status != _SUCCESS:
            raise DeviceError(f"cublasLtMatrixLayoutSetAttribute {attribute}={value.value} fails with status {status}")
        self._current[attribute] = value.value


class _Product:
    """The library's descriptors of one kind and layout: column-major, its A is torch's second operand."""

    def __init__(self, functions: _Functions, kind: Kind, layout: int) -> None:
        compute, alpha = _COMPUTE[kind.compute]
        self._functions = functions
        self.call = functions.create("cublasLtMatmulDescCreate", c_int(compute), c_int(alpha))
        self._transposed = layout in (0, 3), layout in (2, 3)
        self._set(_TRANSA, c_int32(self._transposed[0]))
        self._set(_TRANSB, c_int32(self._transposed[1]))
        narrow = kind.out.itemsize == 1
        wide = torch.float16 if narrow else kind.out  # of the bias, and of a C that is not read
        if kind.bias:
            self._set(_EPILOGUE, c_int32(_EPILOGUE_BIAS))
            self._set(_BIAS_POINTER, c_void_p(_SOMEWHERE))
            self._set(_BIAS_TYPE, c_int32(_OUT[wide]))
        if kind.scaling != "none":
            self._set(_FAST_ACCUM, c_int8(kind.fast_accum))
            modes = _SCALE_MODES[kind.scaling]
            for pointer, attribute, mode in zip(
                (_A_SCALE_POINTER, _B_SCALE_POINTER), (_A_SCALE_MODE, _B_SCALE_MODE), modes, strict=True
            ):
                self._set(pointer, c_void_p(_SOMEWHERE))
                if mode:
                    self._set(attribute, c_int32(mode))
        self.preference = functions.create("cublasLtMatmulPreferenceCreate")
        preferences: dict[int, Any] = {_MAX_WORKSPACE: c_uint64(kind.workspace)}
        if kind.reductions != "any":
            preferences[_REDUCTION_MASK] = c_uint32(_MASKS[kind.reductions])
        for attribute, value in preferences.items():
            functions.call("cublasLtMatmulPreferenceSetAttribute", self.preference, c_int(attribute), byref(value),
                           c_size_t(sizeof(value)))  # fmt: skip
        self._matrices = [_Matrix(functions, dtype) for dtype in (_TYPES[kind.b], _TYPES[kind.a], _OUT[wide])]
        if narrow:
            self._matrices.append(_Matrix(functions, _OUT[kind.out]))
        self.a, self.b, self.c, self.d = (matrix.pointer for matrix in (*self._matrices, self._matrices[-1])[:4])

    def _set(self, attribute: int, value: Any) -> None:
        self._functions.call("cublasLtMatmulDescSetAttribute", self.call, c_int(attribute), byref(value),
                             c_size_t(sizeof(value)))  # fmt: skip

    def resize(self, question: Question) -> None:
        """Set the sizes of all matrices."""
        rows, columns, k, batch = question.n, question.m, question.k, question.batch
        a, b = ((rows, k), (k, columns))
        for matrix, shape, transposed in zip(self._matrices, (a, b), self._transposed, strict=False):
            matrix.resize(*(shape[::-1] if transposed else shape), batch)
        for matrix in self._matrices[2:]:
            matrix.resize(rows, columns, batch)
