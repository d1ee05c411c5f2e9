# SPDX-License-Identifier: Apache-2.0
"""Questions to cuBLASLt about a call and its answers, which decide the accumulation order; their form in files."""

import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple, get_args

import numpy as np
import torch

from fmtsim.formats.interop import dtype_name
from fmtsim.spec.call import GemmCall, Layout, Operation, ScaleKind

MIB: Final = 1 << 20
CUTLASS: Final = (21, 23, 24)  # ALGO_ID


class Choice(NamedTuple):
    """cuBLASLt's choice for a call: those of its nine config attributes that decide the accumulation order.

    algorithm: ALGO_ID, the family of kernels.
    split: SPLITK_NUM, parts of K; 1 where nothing is split, -1 for kernels that share tiles of the result (stream-K).
    reduction: REDUCTION_SCHEME, 0 where nothing is split.
    custom: CUSTOM_OPTION of the kernels without tensor cores (algorithms 11, 13, 14 and 16, and 55 where it splits),
        TILE_ID of others where split is -1, else 0.
    stages: STAGES_ID, which names the tile of K, of all but algorithms 39 and 66, where it is 0.
    """

    algorithm: int
    split: int = 1
    reduction: int = 0
    custom: int = 0
    stages: int = 0

    def describe(self) -> str:
        """Return the choice in words."""
        parts = {-1: ", stream-K", 1: ""}.get(self.split, f", {self.split} parts")
        facts = (("reduction scheme", self.reduction), ("custom option", self.custom), ("stages", self.stages))
        return f"algorithm {self.algorithm}{parts}" + "".join(f", {name} {value}" for name, value in facts if value)


class Kind(NamedTuple):
    """Dtypes and settings of a call, as the library sees them.

    a, b: Formats of torch's operands: the library's B and A.
    out: Dtype of the result.
    compute: ``"32f"``, ``"tf32"`` or ``"16f"``.
    bias: The bias is the library's epilogue.
    scaling: Kind of scales.
    fast_accum: use_fast_accum.
    """

    a: str
    b: str
    out: torch.dtype
    compute: str = "32f"
    bias: bool = False
    scaling: ScaleKind = "none"
    fast_accum: bool = False

    @property
    def workspace(self) -> int:
        """Bytes of workspace that torch offers the library: through cublasLt one MiB, through cublasGemmEx 32."""
        return MIB if self.bias or self.scaling != "none" else 32 * MIB


class Question(NamedTuple):
    """A call as the library sees it, [m, k] times [k, n].

    layout: 0: K is contiguous in both operands (fprop), 1: in the first alone (dgrad), 2: in neither (wgrad), 3: in the
        second alone.
    """

    kind: Kind
    layout: int
    m: int
    n: int
    k: int
    batch: int = 1


_LAYOUTS: Final[dict[tuple[Layout, Layout], int]] = {
    ("row", "row"): 0,
    ("row", "column"): 1,
    ("column", "column"): 2,
    ("column", "row"): 3,
}


def question_of(call: GemmCall) -> Question | None:
    """Return what torch asks cuBLASLt about a call; None where it does not ask, or the question is not known.

    But in bmm, torch calls an operand with a single row or column contiguous in the way of [M, K] and [K, N]. A bias is
    the library's own where K and N are more than 1; else torch puts it into the result beforehand.
    """
    if call.a in ("fp64", "int8"):
        return None
    bias = call.bias and (call.operation == "scaled_mm" or (call.k > 1 and call.n > 1))
    compute = "16f" if call.accumulate == "fp16" else "tf32" if call.a == "tf32" else "32f"
    fast = call.operation == "scaled_mm" and call.fast_accum
    kind = Kind(call.a, call.b, call.out, compute, bias, call.scaling, fast)
    free = call.operation != "bmm"
    a = "row" if free and 1 in (call.m, call.k) else call.a_layout
    b = "column" if free and 1 in (call.n, call.k) else call.b_layout
    return Question(kind, _LAYOUTS[a, b], call.m, call.n, call.k, call.batch)


def call_of(question: Question) -> GemmCall:
    """Return a call for which torch asks cuBLASLt this question."""
    kind, layout, m, n, k, batch = question
    operation: Operation = "linear" if kind.bias else "bmm" if batch > 1 else "mm"
    a_layout, b_layout = next(layouts for layouts, number in _LAYOUTS.items() if number == layout)
    return GemmCall(
        operation=operation if kind.scaling == "none" else "scaled_mm", m=m, n=n, k=k, a=kind.a, b=kind.b, out=kind.out,
        accumulate="fp16" if kind.compute == "16f" else "fp32", fast_accum=kind.fast_accum or kind.scaling == "none",
        scaling=kind.scaling, bias=kind.bias, a_layout=a_layout, b_layout=b_layout, batch=batch,
    )  # fmt: skip


WINDOW: Final = 1 << 15  # bytes that deflate looks back
LARGEST: Final = 1 << 24  # bytes of a decompressed piece, and the largest size in a run


def pack(families: Sequence[Sequence[tuple[int, int]]]) -> bytes:
    """Return runs as planes of bytes: how many a family has, where each begins after the one before, its choice."""
    starts = [start - before for runs in families for start, before in zip(
        (s for s, _ in runs), (0, *(s for s, _ in runs)), strict=False)]  # fmt: skip
    choices = [number for runs in families for _, number in runs]
    return planes([len(runs) for runs in families], 2) + planes(starts, 3) + planes(choices, 2)


def unpack(packed: bytes, families: int, place: int) -> tuple[list[int], list[int]]:
    """Return where the runs of one of so many families begin, and their choices.

    Raises:
        ValueError: The bytes are others.
    """
    runs, remainder = divmod(len(packed) - 2 * families, 5)
    if remainder or runs < 0:
        raise ValueError("a block has another size than its families")
    low, high = packed[:families], packed[families : 2 * families]
    begin = sum(low[:place]) + (sum(high[:place]) << 8)
    end = begin + low[place] + (high[place] << 8)
    a, b, c, d, e = (packed[2 * families + plane * runs :][begin:end] for plane in range(5))
    starts = accumulate(x | y << 8 | z << 16 for x, y, z in zip(a, b, c, strict=True))
    return list(starts), [x | y << 8 for x, y in zip(d, e, strict=True)]


def planes(numbers: Sequence[int] | np.ndarray[Any, Any], width: int) -> bytes:
    """Return the lowest bytes of all numbers, then the next ones, which compresses well."""
    return np.asarray(numbers, dtype="<u4").view(np.uint8).reshape(-1, 4).T[:width].tobytes()


def from_planes(packed: bytes, width: int) -> np.ndarray[Any, Any]:
    """Return what ``planes`` was given, as uint64."""
    wide = np.zeros((len(packed) // width, 4), dtype=np.uint8)
    wide[:, :width] = np.frombuffer(packed, dtype=np.uint8).reshape(width, -1).T
    return wide.view("<u4")[:, 0].astype(np.uint64)


def deflate(content: bytes, dictionary: bytes = b"") -> bytes:
    """Return bytes compressed, by a dictionary of bytes like them."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, dictionary[-WINDOW:])
    return packer.compress(content) + packer.flush()


def inflate(content: bytes | memoryview, dictionary: bytes = b"") -> bytes:
    """Return what ``deflate`` was given; ValueError or zlib.error where it was not."""
    packer = zlib.decompressobj(-15, dictionary[-WINDOW:])
    inflated = packer.decompress(content, LARGEST)
    if not packer.eof:
        raise ValueError("a block does not end")
    return inflated


def kind_to_list(kind: Kind) -> list[Any]:
    """Return a kind of calls as plain JSON types."""
    return [dtype_name(value) if isinstance(value, torch.dtype) else value for value in kind]


def kind_from_list(values: list[Any]) -> Kind:
    """Read what ``kind_to_list`` gives; raise ValueError, TypeError or AttributeError where it is not a kind."""
    kind = Kind(*values)
    out = getattr(torch, kind.out)  # type: ignore[call-overload]
    if not isinstance(out, torch.dtype) or kind.scaling not in get_args(ScaleKind):
        raise ValueError(f"{values} is not a kind of calls")
    return kind._replace(out=out)
