# SPDX-License-Identifier: Apache-2.0
"""Questions to cuBLASLt about a call and its answers, which decide the accumulation order; their form in files."""

import lzma
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import torch

from fmtsim.formats.element import FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.spec.call import GemmCall, Layout, Operation, ScaleKind
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, did_you_mean, shown

MIB: Final = 1 << 20
# Their numbers of parts jump from size to size, so that a tree's or a book's split between sizes that were asked is a
# guess: before this rule two of 19,823 random calls differed without a warning (H200, 2026-11-23).
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


Reductions = Literal["any", "fp32", "none"]


class Settings(NamedTuple):
    """Settings of a process that change what torch asks cuBLASLt; the defaults are torch's on Hopper.

    workspace: Bytes of CUBLAS_WORKSPACE_CONFIG, for products through cublasGemmEx.
    lt_workspace: Bytes of CUBLASLT_WORKSPACE_SIZE, for products through cublasLt: scaled ones, those with a bias, and
        all where ``library`` says so.
    reductions: ``"fp32"``: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction and the same for bf16 are
        False, so that partial sums are added in float32; ``"none"``: they are (False, False), and K is not split, which
        torch has for ``library="cublaslt"`` alone.
    library: torch.backends.cuda.preferred_blas_library.
    """

    workspace: int = 32 * MIB
    lt_workspace: int = MIB
    reductions: Reductions = "any"
    library: Literal["cublas", "cublaslt"] = "cublas"

    def describe(self) -> str:
        """Return the name of the settings, or those that are not torch's."""
        named = next((name for name, settings in NAMED.items() if settings == self), None)
        other = (f"{name}={x}" for name, x, usual in zip(self._fields, self, DEFAULT, strict=True) if x != usual)
        return named or ", ".join(other)


DEFAULT: Final = Settings()
# Under these settings an H100 and an H200 make the same choice in 720,000 of 720,000 questions (2026-11-27, cuBLASLt
# 13.1.0). 16-bit products are never split. FP8 with a scale for each tensor is: K in 2.1 % of the questions (1x16x8592
# has three parts, 64x16x8592 one), so that the bits of a row depend on its batch after all.
NAMED: Final = {"batch_invariant": Settings(16 * 8 << 10, 1 << 10, "none", "cublaslt")}
"""Settings by name. ``batch_invariant``: those of vLLM's VLLM_BATCH_INVARIANT=1 on Hopper."""
RECORDED: Final = (DEFAULT, Settings(reductions="fp32"), *NAMED.values())
"""Settings under which the library was asked, and its results were compared with emulated ones."""


def find_settings(given: Any, base: Settings = DEFAULT, **changes: Any) -> Settings:
    """Return settings by name, from a dict of their fields, or a record, with some changed.

    Raises:
        ArgumentError: There is no such name or field, or the library was never asked under such settings; the message
            lists those that are known.
    """
    known = f"known settings are {'; '.join(settings.describe() for settings in RECORDED[1:])}"
    if isinstance(given, str):
        if given not in NAMED:
            raise ArgumentError(f"settings {shown(given)} are unknown{did_you_mean(given, NAMED)}; {known}")
        given = NAMED[given]
    elif given is None or isinstance(given, dict):
        given, changes = base, {**(given or {}), **changes}
    unknown = next((name for name in changes if name not in Settings._fields), None)
    if unknown is not None:
        raise ArgumentError(f"{unknown} is not a setting of a target; settings are {', '.join(Settings._fields)}")
    settings = given._replace(**changes) if isinstance(given, Settings) else given
    if settings not in RECORDED:
        what = settings.describe() if isinstance(settings, Settings) else shown(settings)
        raise ArgumentError(f"no target has a record of cuBLASLt under the settings {what}; {known}")
    return settings


class Kind(NamedTuple):
    """Dtypes and settings of a call, as the library sees them.

    a, b: Formats of torch's operands: the library's B and A.
    out: Dtype of the result.
    compute: ``"32f"``, ``"tf32"`` or ``"16f"``.
    bias: The bias is the library's epilogue.
    scaling: Kind of scales.
    fast_accum: use_fast_accum.
    room: Bytes of workspace, 0 for those that torch offers where no setting says otherwise.
    reductions: How partial sums of 16-bit products may be added, as in Settings.
    """

    a: str
    b: str
    out: torch.dtype
    compute: str = "32f"
    bias: bool = False
    scaling: ScaleKind = "none"
    fast_accum: bool = False
    room: int = 0
    reductions: Reductions = "any"

    @property
    def workspace(self) -> int:
        """Bytes of workspace that torch offers the library: through cublasLt one MiB, through cublasGemmEx 32."""
        return self.room or (MIB if self.bias or self.scaling != "none" else 32 * MIB)


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


def library_question(call: GemmCall, settings: Settings = DEFAULT) -> Question | None:
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
    if settings != DEFAULT:
        # bytes of workspace that settings leave a kind of calls; 0 where they are the usual ones
        through_lt = kind.bias or kind.scaling != "none" or settings.library == "cublaslt"
        room = settings.lt_workspace if through_lt else settings.workspace
        # torch forbids any reduction for 16-bit operands alone, and those that round to 16 bits with a bias, and where
        # sums are float32 and results are not
        half = kind.a in ("bf16", "fp16") and kind.scaling == "none"
        rounds = bias or settings.reductions == "none" or (compute == "32f" and kind.out.itemsize == 2)
        reductions = settings.reductions if half and rounds else "any"
        kind = kind._replace(room=0 if room == kind.workspace else room, reductions=reductions)
    free = call.operation != "bmm"
    a = "row" if free and 1 in (call.m, call.k) else call.a_layout
    b = "column" if free and 1 in (call.n, call.k) else call.b_layout
    return Question(kind, _LAYOUTS[a, b], call.m, call.n, call.k, call.batch)


def book_question(question: Question) -> Question:
    """Return the question that books and trees answer: where sums stay in float32, that of torch's own settings."""
    usual = question.kind.reductions != "fp32"
    return question if usual else question._replace(kind=question.kind._replace(reductions="any"))


def answers_question(choice: Choice, question: Question) -> bool:
    """Return True if the choice for ``book_question`` is that for a question: nvjet adds in float32 in any case.

    Of 119,661 such choices on an H200, and 917 on an H100, none was another where reductions had to be in float32.
    """
    return question.kind.reductions != "fp32" or choice.algorithm == 66


def question_call(question: Question) -> GemmCall:
    """Return a call for which torch asks cuBLASLt this question."""
    kind, layout, m, n, k, batch = question
    operation: Operation = "linear" if kind.bias else "bmm" if batch > 1 else "mm"
    a_layout, b_layout = next(layouts for layouts, number in _LAYOUTS.items() if number == layout)
    return GemmCall(
        operation=operation if kind.scaling == "none" else "scaled_mm", m=m, n=n, k=k, a=kind.a, b=kind.b, out=kind.out,
        accumulate="fp16" if kind.compute == "16f" else "fp32", fast_accum=kind.fast_accum or kind.scaling == "none",
        scaling=kind.scaling, bias=kind.bias, a_layout=a_layout, b_layout=b_layout, batch=batch,
    )  # fmt: skip


LARGEST: Final = 1 << 24  # bytes of a decompressed piece, and the largest size in a run
FILTERS: Final = ({"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 22, "pb": 0},)  # of bytes without a grid


def from_planes(packed: bytes, width: int) -> np.ndarray[Any, Any]:
    """Return numbers of ``width`` bytes, which are packed as the lowest bytes of all, then the next ones; uint64."""
    wide = np.zeros((len(packed) // width, 4), dtype=np.uint8)
    wide[:, :width] = np.frombuffer(packed, dtype=np.uint8).reshape(width, -1).T
    return wide.view("<u4")[:, 0].astype(np.uint64)


def decompress(packed: bytes | memoryview) -> bytes:
    """Return bytes that were compressed under ``FILTERS``; ValueError or LZMAError where they were not."""
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=FILTERS)
    content = unpacker.decompress(packed, LARGEST)
    if not unpacker.eof:
        raise ValueError("a piece does not end")
    return content


def kind_from_list(values: list[Any]) -> Kind:
    """Read a kind from JSON types; raise ValueError, TypeError or AttributeError where it is none."""
    kind = Kind(*values)
    out = getattr(torch, kind.out)  # type: ignore[call-overload]
    names = kind.scaling in get_args(ScaleKind) and kind.reductions in get_args(Reductions)
    if not isinstance(out, torch.dtype) or not names:
        raise ValueError(f"{values} is not a kind of calls")
    return kind._replace(out=out)


Architecture = Literal["sm_90", "sm_100", "sm_103"]


class Order(NamedTuple):
    """The accumulation order of a choice.

    plan: The accumulation order.
    unit: Unit that runs, where it is not the target's for such operands.
    operands: Format in which that unit takes them, where it is not the call's: float32 that is not rounded to TF32.
    certain: False where results of zeros or subnormal products had other signs on the GPU.
    """

    plan: GemmPlan
    unit: str | None = None
    operands: str | None = None
    certain: bool = True


def plan_order(**fields: Any) -> Order:
    """Return the order of a plan's fields; a call with one part has no fields of a reduction."""
    if fields.get("split", 1) == 1:
        gone = ("split", "part_k", "partial", "round_trip", "reduce") + (
            () if "residue_first" in fields else ("k_tile",)
        )
        fields = {name: value for name, value in fields.items() if name not in gone}
    return Order(cached_plan(tuple(fields.items())))


@lru_cache(maxsize=4096)
def cached_plan(fields: tuple[tuple[str, Any], ...]) -> GemmPlan:
    """Return a plan of fields, cached: making one checks them all."""
    return GemmPlan(**dict(fields))


def sourced(plan: GemmPlan, source: str, verified: bool = False) -> GemmPlan:
    """Return a copy of a plan with another source; ``replace`` would check all fields again, which takes longer."""
    copy = object.__new__(GemmPlan)
    for name in GemmPlan.__dataclass_fields__:
        object.__setattr__(copy, name, getattr(plan, name))
    object.__setattr__(copy, "source", source)
    object.__setattr__(copy, "verified", verified)
    return copy


def reduction_fields(choice: Choice, call: GemmCall) -> dict[str, Any] | None:
    """Return how partial sums are added: REDUCTION_SCHEME 0 and 1 in the output, 2 as they are, 4 rounded to it."""
    out = get_format(call.out)
    assert isinstance(out, FloatFormat)
    rounded = None if out.name == "fp32" else out
    if choice.algorithm == 21 and choice.reduction == 1 and call.bias and rounded and call.accumulate == "fp32":
        return None  # neither of two such products on an H200 had the order below
    # In place: r = RN(p_0), r = RN(r + p_i), a bias in the first part: 0 of 256 results differ in each of 10 calls of
    # heads (H200, 2026-11-21).
    if choice.reduction in (0, 1):  # without a rounding and a bias this is the sum of the parts as they are
        return {"partial": rounded, "reduce": "in_place"} if rounded is not None or call.bias else {}
    # FP16 accumulation: parts in binary16, rounded after every addition: 122 of 125 shapes (H200, 2026-11-21).
    if call.accumulate == "fp16":
        return {"partial": out, "round_trip": True} if choice.reduction == 2 else None
    # OUTPUT_TYPE (4): parts are rounded to the result's 16 bits, added in float32 and rounded once: 954 of 954 calls of
    # CUTLASS's 16-bit kernels in all layouts (H200, 2026-11-21).
    if choice.reduction not in (2, 4):
        return None
    return {"partial": rounded if choice.reduction == 4 else None, "bias_after_rounding": call.bias}


def slice_width(call: GemmCall, split: int) -> int:
    """Return the products of a slice, whose starts are aligned to whole lines where K lies along rows."""
    # H200, 2026-11-21: TF32 64x64x64, 24 parts logged: slices of 32, so 2; 160x128x680: 10 slices of 68.
    align, line = (4, 32) if call.a in ("tf32", "fp32") else (8, 64)
    question = library_question(call)
    along_rows = question is not None and (question.layout != 2 or 1 in (call.m, call.n))
    step = line if along_rows and call.k % line == 0 else align
    return ceil_div(ceil_div(call.k, split), step) * step


def ceil_div(number: int, divisor: int) -> int:
    """Return a quotient of whole numbers, rounded up."""
    return -(-number // divisor)
