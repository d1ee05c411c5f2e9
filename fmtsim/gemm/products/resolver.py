# SPDX-License-Identifier: Apache-2.0
"""Resolve and run matrix products: from a GemmCall to a GemmSpec, then to the GPU's library or to an engine.

``run_product`` is the only way from verbs and layers to a product; ``resolve`` is the only way from a call to its
unit and accumulation order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from operator import index
from typing import Any, Final

import torch
from torch import Tensor

from fmtsim.casts.arguments import random_keys
from fmtsim.formats.element import FloatFormat, IntFormat, LogFormat
from fmtsim.formats.interop import dtype_name
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.native import multiply_natively, runs_natively, unsupported_reason
from fmtsim.gemm.products.operand_scales import check_unit_scales, unit_scales
from fmtsim.gemm.products.operands import DIRECT, inner_length, read_operand, stays_packed
from fmtsim.gemm.products.operator import OUT_DTYPES, finish, output_format, run_gemm
from fmtsim.gemm.targets import target as targets
from fmtsim.gemm.targets.doubts import warn_of_bug, without_doubts
from fmtsim.gemm.targets.kernel import CHAINS, ONE_CHAIN
from fmtsim.gemm.units import unit as units
from fmtsim.gemm.units.unit import get_unit, is_unit
from fmtsim.spec.call import LARGE_BLOCKS, SCALE_KINDS, GemmCall, Layout, OperandFormat, Operands, Operation
from fmtsim.spec.datapath import Arithmetic, Datapath, IntegerDatapath, LogDatapath, sum_dtype
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import adds_in_order, schedule
from fmtsim.support.dispatch import constant_in_graphs
from fmtsim.support.errors import ArgumentError, DtypeError, FormatError, shown

ACCUMULATE_DTYPES = {
    "fp32": torch.float32, "fp16": torch.float16, "fp64": torch.float64, "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip
_ACCUMULATE = {dtype: name for name, dtype in ACCUMULATE_DTYPES.items()}
_recording: ContextVar[dict[GemmCall, GemmSpec] | None] = ContextVar("recording", default=None)

NATIVE_DEVICES: Final = ("cuda",)  # types of devices that may be a target themselves


def check_target(verb: str, target: Any, plan: Any = None, accumulate: Any = None) -> Any:
    """Return a verb's ``target=``, a datapath's JSON as its record; refuse what names nothing that computes.

    Raises:
        ArgumentError: target is None or unknown, or plan or accumulate is not one.
    """
    if target is None:
        raise ArgumentError(
            f"{verb} needs target=: a GPU with its library ('h200', a plan file, a Target), a matrix unit alone "
            "('hopper.wgmma', a Unit) or a datapath (a Datapath record or its JSON)"
        )
    if plan is not None and not isinstance(plan, GemmPlan):
        raise ArgumentError(f"plan={shown(plan)} is not an accumulation order; pass a GemmPlan(...)")
    if accumulate is not None and (not isinstance(accumulate, str) or accumulate not in ACCUMULATE_DTYPES):
        names = ", ".join(ACCUMULATE_DTYPES)
        raise ArgumentError(f"accumulate={shown(accumulate)} is not possible; choose one of {names}")
    return target if isinstance(target, Arithmetic) else _known_target(verb, target)


@constant_in_graphs
def _known_target(verb: str, target: Any) -> Any:
    """Refuse a target that does not exist, before anything else is asked about the call."""
    if isinstance(target, str) and target == "recipe":
        raise ArgumentError(f"{verb} has no recipe whose target target='recipe' would be; name the target itself")
    record = targets.find_target(target)
    return record if isinstance(record, Arithmetic) else target


def run_product(
    call: GemmCall, operands: Operands, dtype: torch.dtype | None, *, native: bool | None = None, generator: Any = None,
    to_tf32: bool = False, quantized: bool = False, bare: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``a b^T + bias`` on a target: every verb, and every layer with a target, calls this.

    Args:
        call: What is asked; a bias that it does not have is added to the library's result.
        operands: The tensors; a and b as ``read_operand`` takes them.
        dtype: Of the result; None is that of the accumulator.
        native: As in ``mm``.
        generator: Random words of a unit that rounds stochastically.
        to_tf32: Round float32 operands to TF32, to nearest even.
        quantized: A layer quantised both operands: each holds values of its format in a dtype that engines take, the
            scales are of their kind, nothing is validated again, and the generator may go unused.
        bare: The tensors are ``fmtsim.support.dispatch.is_bare``.
    """
    a, b, formats = operands.a, operands.b, call.formats
    assert formats is not None
    # 1. natively, where the GPU is the target
    natively = call.native
    if natively is None:
        natively = _is_native(call, call.target, operands, dtype, native, quantized or to_tf32)
    if natively:
        y = multiply_natively(call, operands, dtype or a.dtype)
        return y if operands.bias is None or call.bias else finish(y, y.dtype, bias=operands.bias)
    # 2. the datapath, accumulation order and formats of the call
    spec = resolve(call)
    dtype = dtype or ACCUMULATE_DTYPES[spec.accumulate]
    if not spec.sum_dtype.is_floating_point and dtype != spec.sum_dtype:
        raise DtypeError(f"out_dtype={dtype} is not what integers sum to; choose {spec.sum_dtype}")
    if spec.sum_dtype.is_floating_point and dtype not in OUT_DTYPES:
        output_format(dtype)  # raises an error that lists the output dtypes
    # 3. operands and scales as engines take them
    a_values, b_values = a, b
    if spec.a.name == "tf32" and formats[0].name == "fp32":  # the unit ignores the low 13 bits
        a_values, b_values = (read_operand(x, spec.a, tf32="truncate") for x in (a, b))
    elif a.dtype not in DIRECT or b.dtype not in DIRECT:
        in_slices = spec.plan.k_end is None and not spec.stochastic  # FP4 may stay packed until then
        a_values, b_values = (
            x if in_slices and stays_packed(x) else read_operand(x, fmt) for x, fmt in zip((a, b), formats, strict=True)
        )
    scale_a, scale_b, result_scale = operands.scale_a, operands.scale_b, operands.result_scale
    if scale_a is not None or scale_b is not None:
        # inside the unit, or those of the promotion: one for every row
        if operands.rows_per_scale != (1, 1):
            scale_a, scale_b = operands.scales_of_rows(a_values.shape[-2], b_values.shape[-2])
        if quantized:
            check_unit_scales(spec.datapath, call.scaling)
        elif call.scaling not in LARGE_BLOCKS:
            scale_a, scale_b = unit_scales(scale_a, scale_b, a_values, b_values, spec.text)
    if result_scale is not None and not units.is_unit(call.target):  # libraries take it, and change nothing
        result_scale = None
    # 4. the random key of a unit that rounds stochastically
    key = None
    if spec.stochastic or (generator is not None and not quantized):
        key = random_keys(spec.stochastic, generator, a.shape[0] if a.dim() == 3 else None, a.device)
    # 5. the product, which is validated only if its operands may lie outside their formats
    decoded = a_values is not a and b_values is not b  # values of their formats by construction
    return run_gemm(
        Operands(a_values, b_values, operands.bias, operands.row, operands.column, scale_a, scale_b, result_scale),
        spec, dtype, random=key, validated=decoded or (quantized and formats == (spec.a, spec.b)),
        to_tf32=to_tf32 and spec.a.name == "tf32",  # the unit may take another format than was asked for
        bare=bare and key is None,
    )  # fmt: skip


def _is_native(
    call: GemmCall, target: Any, operands: Operands, dtype: torch.dtype | None, native: bool | None, converted: bool
) -> bool:
    """Return True if the GPU of the operands is the target and has the call; arguments as of ``run_product``."""
    a, b = operands.a, operands.b
    if not native and (a.device.type not in NATIVE_DEVICES or units.is_unit(target)):
        return False
    scales_result = operands.result_scale is not None
    return runs_natively(
        native, None if units.is_unit(target) else target, call.plan, a.device,
        lambda: unsupported_reason(call, (a.dtype, b.dtype), dtype, scales_result, converted),
    )  # fmt: skip


def resolve(call: GemmCall) -> GemmSpec:
    """Return the datapath, accumulation order and formats of a call, cached.

    Warns once a process for each call whose plan is a guess, and for each whose library drops the end of K.

    Raises:
        ArgumentError: The target or unit does not take the call, its plan makes no sense for it, or it is a guess and
            ``strict`` is set.
    """
    if call.spec is not None:
        return call.spec  # type: ignore[no-any-return]
    record = targets.find_target(call.target)
    target = None if isinstance(record, units.Unit | Arithmetic) else record
    # A unit's name may be registered for another record later.
    spec, doubted = _resolved(call, units.registrations if target is None else target)
    calls = _recording.get()
    if calls is not None:
        calls[call] = spec
    if doubted is not None and target is not None:
        guess = spec.basis == "guess"
        if guess:
            target.doubt(doubted, spec.plan, call.strict)
        if spec.plan.k_end is not None and call.plan is None:
            warn_of_bug(target, doubted, spec.plan, guess=guess)
    return spec


@contextmanager
def recorded_calls() -> Iterator[dict[GemmCall, GemmSpec]]:
    """Collect the calls that this thread resolves, each once and in order, with their specs.

    Silences warnings of guesses and library bugs: the caller reports the basis of each plan.
    """
    with without_doubts(), seen_calls() as calls:
        yield calls


@contextmanager
def seen_calls() -> Iterator[dict[GemmCall, GemmSpec]]:
    """Collect calls as ``recorded_calls`` does, without silencing warnings."""
    calls: dict[GemmCall, GemmSpec] = {}
    token = _recording.set(calls)
    try:
        yield calls
    finally:
        _recording.reset(token)


def product_call(
    operation: Operation, formats: tuple[OperandFormat, OperandFormat], operands: Operands, dtype: torch.dtype | None,
    *, native: bool | None, to_tf32: bool = False, target: Any, **facts: Any,
) -> GemmCall:  # fmt: skip
    """Return the ``gemm_call`` of a verb's operands.

    In traced code it has no sizes where the GPU is the target: one compiled program serves all sizes.
    """
    a, b = operands.a, operands.b
    asked = {"operation": operation, "formats": formats, "out": dtype or a.dtype, "target": target, **facts}
    if torch.compiler.is_dynamo_compiling():
        unsized = gemm_call(sizes=(0, 0, 0), resolves=False, native=True, **asked)
        if _is_native(unsized, target, operands, dtype, native, to_tf32):
            return unsized
        asked["native"] = False
    batch = a.shape[0] if a.dim() == 3 else 1
    return gemm_call(sizes=(a.shape[-2], b.shape[-2], inner_length(a)), batch=batch, **asked)


def gemm_call(
    operation: Operation, formats: tuple[OperandFormat, OperandFormat], sizes: tuple[int, int, int], out: torch.dtype,
    *, target: Any, plan: GemmPlan | None = None, batch: int = 1, layouts: tuple[Layout, Layout] = ("row", "row"),
    resolves: bool = True, **facts: Any,
) -> GemmCall:  # fmt: skip
    """Return the GemmCall of these fields, a constant of the graph where torch.compile traces the caller.

    Args:
        operation, target, plan, batch: As in GemmCall.
        formats: Of both operands.
        sizes: M, N and K; they become 0, and one compiled program serves all sizes, where neither a library nor a plan
            depends on them.
        out: Dtype of the result.
        layouts: How a library sees both operands.
        resolves: In traced code, resolve the call at once (``GemmCall.spec``).
        facts: Further fields of GemmCall.
    """
    m = n = k = count = 0
    if plan is not None or not is_unit(target):
        m, n, k, count = index(sizes[0]), index(sizes[1]), index(sizes[2]), index(batch)
    traced = resolves and torch.compiler.is_dynamo_compiling()
    return _constant_call(*formats, target, plan, traced, operation, m, n, k, count, out, *layouts, **facts)


@constant_in_graphs
def _constant_call(
    a: OperandFormat, b: OperandFormat, target: Any, plan: GemmPlan | None, traced: bool, operation: Operation, m: int,
    n: int, k: int, batch: int, out: torch.dtype, a_layout: Layout, b_layout: Layout, accumulate: str | None = None,
    **facts: Any,
) -> GemmCall:  # fmt: skip
    # Every record is an argument of its own: torch.compile guards on none inside a tuple or another record.
    call = GemmCall(
        operation=operation, m=m, n=n, k=k, a=call_name(a), b=call_name(b), formats=(a, b), out=out, target=target,
        plan=plan, batch=batch, a_layout=a_layout, b_layout=b_layout, accumulate=accumulate or "", **facts,
    )  # fmt: skip
    return replace(call, spec=resolve(call)) if traced else call


@lru_cache(maxsize=4096)
def _resolved(call: GemmCall, record: Any) -> tuple[GemmSpec, GemmCall | None]:
    """Resolve a call, and return its facts where the plan needs a warning, else None.

    ``record``, part of the cache's key, is the Target, or how often units were registered.
    """
    # a target asks its books and rules; formats that no name stands for go along
    if not isinstance(record, int):
        spec = record.resolve(call.facts(), strict=call.strict)
        if call.formats is not None and (call_name(spec.a), call_name(spec.b)) == (call.a, call.b):
            spec = replace(spec, a=call.formats[0], b=call.formats[1])
        spec = spec if call.plan is None else replace(spec, plan=call.plan)
    else:
        # The records themselves, so that a format that was never registered is judged too.
        formats: Any = call.formats or (get_format(call.a), get_format(call.b))
        plan = call.plan or CHAINS.get(call.scaling, ONE_CHAIN)
        a, b = formats
        # a unit by name has a mode for the formats, sums and scales
        if not isinstance(call.target, Arithmetic):
            unit = get_unit(call.target)
            extent = SCALE_KINDS.get(call.scaling)
            mode = unit.find(a, b, call.accumulate or None, extent and extent.unit_scale)
            spec = GemmSpec(datapath=mode.datapath, plan=plan, a=a, b=b, unit=unit.name, accumulate=mode.accumulate)
        else:
            path = call.target
            # a datapath takes every format of its kind
            kind, words = _TAKES.get(type(path), (FloatFormat, "floating-point formats"))
            if not all(isinstance(fmt, kind) for fmt in formats):
                integers = all(isinstance(fmt, IntFormat) for fmt in formats)
                other = "an IntegerDatapath (--target integers,accumulator_bits=24)" if integers else "another datapath"
                raise FormatError(
                    f"{type(path).__name__} does not multiply {a.name} x {b.name}; choose {words}, or {other}"
                )
            if isinstance(path, LogDatapath):
                if a.gamma != b.gamma:
                    raise FormatError(
                        f"{a.name} has {a.gamma} steps an octave, {b.name} {b.gamma}; choose formats of one gamma"
                    )
                if path.entries > a.gamma:
                    raise ArgumentError(
                        f"entries={path.entries} is more than the {a.gamma} steps of {a.name}; choose {a.gamma}"
                    )
                if path.lowest_exponent(a, b) + path.accumulator_bits > 128 and sum_dtype(path) == torch.float32:
                    raise FormatError(
                        f"sums of products of {a.name} x {b.name} leave float32; choose formats of fewer octaves, or "
                        "accumulator_bits=26 or more, whose sums are float64"
                    )
            if call.accumulate not in ("", _accumulates(path)):
                raise ArgumentError(
                    f"accumulate={shown(call.accumulate)} is not what the datapath sums in; leave it out"
                )
            spec = GemmSpec(datapath=path, plan=plan, a=a, b=b, accumulate=_accumulates(path))
    check_plan(spec.datapath, spec.plan, call)
    return spec, call.facts() if spec.basis == "guess" or spec.plan.k_end is not None else None


_TAKES: dict[type, tuple[type, str]] = {
    IntegerDatapath: (IntFormat, "integer formats (formats='int8'; fmtsim mm --dtype int8)"),
    LogDatapath: (LogFormat, "logarithmic formats (formats='lns8_g8'; fmtsim mm --dtype lns8_g8; recipe='lns')"),
}


def _accumulates(path: Arithmetic) -> str:
    if isinstance(path, Datapath) and path.accumulator == get_format("fp16") and sum_dtype(path) == torch.float32:
        return "fp16"
    return _ACCUMULATE[sum_dtype(path)]


def check_plan(path: Arithmetic, plan: GemmPlan, call: GemmCall) -> None:
    """Refuse an accumulation order that the unit or the call cannot follow."""
    if isinstance(path, LogDatapath) and plan != ONE_CHAIN:
        raise ArgumentError("a LogDatapath adds its blocks one after another; leave plan= out")
    # what each kind of datapath has no order for, then scales that a plan's tiles must hold whole
    schedule(1, path, plan)  # promotions of unit and plan that disagree
    if isinstance(path, IntegerDatapath) and (plan.scaled_promotion or plan.partial or plan.reduce == "in_place"):
        raise ArgumentError(
            "integer sums have neither scaled_promotion nor partial nor reduce='in_place'; leave them out of the plan"
        )
    if isinstance(path, IntegerDatapath) and (plan.reduce == "neighbours" or not adds_in_order(plan)):
        raise ArgumentError(
            "integer sums have neither lanes nor reduce='folded' or 'neighbours'; leave them out of the plan"
        )
    if plan.reduce == "in_place" and call.scaling != "none":
        raise ArgumentError(
            f"reduce='in_place' adds parts to outputs that have no scales, and the scaling is {call.scaling!r}; choose "
            "'serial', 'pairwise' or 'neighbours'"
        )
    if plan.scaled_promotion != (call.scaling in LARGE_BLOCKS):
        raise ArgumentError(
            f"a plan with scaled_promotion={plan.scaled_promotion} does not fit scaling {shown(call.scaling)}; "
            "scaled_promotion belongs to 1x128 and 128x128 scales"
        )
    if plan.scaled_promotion and isinstance(path, Datapath) and path.scale is not None:
        raise FormatError(
            f"the operands have scales every 128 products, the unit has {path.scale.name} scales every "
            f"{path.scale_block}; choose another unit (fmtsim.list_units()), or a Datapath without scale="
        )
    if plan.scaled_promotion and plan.promote_every != 128:
        raise ArgumentError(f"promote_every={plan.promote_every} does not fit scales of 128 products; choose 128")
    if plan.scaled_promotion and plan.k_tile is not None and plan.k_tile % 128:
        raise ArgumentError(f"k_tile={plan.k_tile} does not hold whole chains of 128 products; choose a multiple")
    if isinstance(path, Datapath) and path.group > 1 and path.scale_block:
        # a unit whose groups have one scale each: the plan cuts none of its scale blocks
        block, cut = path.scale_block, f"the unit's scale blocks of {path.scale_block}"
        for name in ("k_tile", "instruction_k", "promote_every"):
            value = getattr(plan, name)
            if value is not None and value % block:
                raise ArgumentError(f"{name}={value} cuts {cut} products; choose a multiple")
        if plan.k_tile is not None and -(-plan.k_tile // plan.lanes) % block:
            text = f"lanes={plan.lanes} of k_tile={plan.k_tile} cut {cut} products"
            raise ArgumentError(f"{text}; choose whole blocks for each")
        if plan.residue_first and call.k % block:
            raise ArgumentError(f"residue_first with K={call.k} cuts {cut}; pad K")


def integer_sums(target: Any) -> torch.dtype:
    """Return the dtype of a target's sums of integers: int64 of a datapath of more than 32 bits, else int32."""
    return sum_dtype(target) if isinstance(target, IntegerDatapath) else torch.int32


def accumulate_name(dtype: torch.dtype) -> str:
    """Return the name of an accumulator by its dtype."""
    if dtype not in _ACCUMULATE:
        names = ", ".join(dtype_name(allowed) for allowed in _ACCUMULATE)
        raise DtypeError(f"c has dtype {dtype}; pass one of {names}")
    return _ACCUMULATE[dtype]


def call_name(fmt: OperandFormat) -> str:
    """Return the name of an operand's format in a GemmCall, where -128 makes no difference to int8."""
    return "int8" if fmt.name == "int8_full" else fmt.name
