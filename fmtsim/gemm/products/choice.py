"""Which arithmetic and which order of sums a verb's arguments mean: a machine's, or a unit's."""

from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.dispatch import constant_in_graphs
from fmtsim.errors import ArgumentError, DtypeError
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.products.operands import OperandFormat
from fmtsim.gemm.products.operator import is_stochastic
from fmtsim.gemm.targets import target as targets
from fmtsim.gemm.units.unit import Unit, get_datapath, get_unit
from fmtsim.spec.call import LARGE_BLOCKS, GemmCall, Operation
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import Arithmetic, Datapath, IntegerDatapath, sum_dtype
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import schedule

_ACCUMULATE = {torch.float32: "fp32", torch.float16: "fp16", torch.float64: "fp64", torch.int32: "int32"}
_DTYPES = {name: dtype for dtype, name in _ACCUMULATE.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Say what multiplies: a target, or a unit or datapath, and what overrides its order of sums.

    Args:
        target: Name, path or record of a target; None where ``unit`` is given.
        unit: Name or record of a unit, or the record of an arithmetic.
        plan: Order of sums; None takes the target's, or one chain for a unit.
        accumulate: Format in which the unit sums; None takes its usual one.
        strict: Refuse a plan that is a guess.
    """

    target: Any = None
    unit: Any = None
    plan: GemmPlan | None = None
    accumulate: str | None = None
    strict: bool = False


class Resolved(NamedTuple):
    """What a call comes to: its definition, the unit's name if any, the format it sums in, the basis of its plan."""

    spec: GemmSpec
    unit: str | None
    accumulate: str
    basis: str


def choose(
    verb: str, target: Any, unit: Any, datapath: Any, plan: Any = None, accumulate: Any = None, strict: bool = False
) -> Choice:
    """Check that exactly one of target, unit and datapath is given, and return the choice.

    Raises:
        ArgumentError: None or several of them are given, or plan or accumulate is not one.
    """
    given = [name for name, value in (("target", target), ("unit", unit), ("datapath", datapath)) if value is not None]
    if len(given) != 1:
        what = f"{verb} got {' and '.join(f'{name}=' for name in given)}" if given else f"{verb} needs a machine"
        raise ArgumentError(
            f"{what}; pass one of target= (a machine with its library, 'h200'), unit= ('hopper.wgmma') or "
            "datapath= (a Datapath record)"
        )
    if datapath is not None and not isinstance(datapath, Arithmetic):
        raise ArgumentError(
            f"datapath={datapath!r} is not an arithmetic; pass a Datapath record, or unit= for a unit's name"
        )
    if plan is not None and not isinstance(plan, GemmPlan):
        raise ArgumentError(f"plan={plan!r} is not an order of sums; pass a GemmPlan(...)")
    if accumulate is not None and accumulate not in _DTYPES:
        raise ArgumentError(f"accumulate={accumulate!r} is not possible; choose one of {', '.join(_DTYPES)}")
    chosen = unit if datapath is None else datapath
    return Choice(target=target, unit=chosen, plan=plan, accumulate=accumulate, strict=strict)


def resolve(call: GemmCall, choice: Choice, a: OperandFormat, b: OperandFormat, scale: str | None = None) -> Resolved:
    """Return what a call means on the chosen machine.

    Args:
        call: The call.
        choice: The machine.
        a, b: Formats of the operands' values.
        scale: Format of scales inside the unit, where the call brings some.

    Raises:
        ArgumentError: The machine does not take the call, or its plan makes no sense for it.
    """
    if choice.target is not None:
        found = targets.get_target(choice.target).resolve(call, strict=choice.strict)
        path, unit, accumulate, basis = found.arithmetic, found.unit, found.accumulate, found.basis
        plan = choice.plan or found.plan
        if found.operands is not None:
            fmt = get_format(found.operands)
            assert isinstance(fmt, FloatFormat)  # as reading the plan file made sure
            a = b = fmt
    else:
        # The records themselves, so that a format that was never registered is judged too.
        path = get_datapath(choice.unit, a, b, choice.accumulate, scale)  # type: ignore[arg-type]
        unit = "" if isinstance(choice.unit, Arithmetic) else get_unit(choice.unit).name
        accumulate = choice.accumulate or _accumulates(choice.unit, path, a, b, scale)
        if isinstance(choice.unit, Arithmetic) and accumulate != _accumulates(path, path, a, b, scale):
            raise ArgumentError(f"accumulate={accumulate!r} is not what the datapath sums in; leave it out")
        plan, basis = choice.plan or _chain(call), "rule"
    check_plan(path, plan, call)
    return Resolved(GemmSpec(datapath=path, plan=plan, a=a, b=b), unit or None, accumulate, basis)


def _chain(call: GemmCall) -> GemmPlan:
    if call.scaling in LARGE_BLOCKS:
        return GemmPlan(
            promote_every=128,
            scaled_promotion=True,
            successive_scales=call.scaling == "row_block_128",
            source="a chain for every 128 products",
        )
    return GemmPlan(source="one chain, k in order: a unit alone names no library")


def _accumulates(unit: Any, path: Arithmetic, a: OperandFormat, b: OperandFormat, scale: str | None) -> str:
    if not isinstance(unit, Arithmetic):
        return get_unit(unit).find(a, b, None, scale).accumulate  # type: ignore[arg-type]
    if isinstance(path, IntegerDatapath):
        return "int32"
    if sum_dtype(path) == torch.float64:
        return "fp64"
    return "fp16" if isinstance(path, Datapath) and path.accumulator == get_format("fp16") else "fp32"


def check_plan(path: Arithmetic, plan: GemmPlan, call: GemmCall) -> None:
    """Refuse an order of sums that the unit or the call cannot follow."""
    schedule(1, path, plan)  # promotions of unit and plan that disagree
    if isinstance(path, IntegerDatapath) and (plan.scaled_promotion or plan.partial or plan.reduce == "in_place"):
        raise ArgumentError(
            "integer sums have neither scaled_promotion nor partial nor reduce='in_place'; leave them out of the plan"
        )
    if plan.reduce == "in_place" and call.scaling != "none":
        raise ArgumentError(
            f"reduce='in_place' adds parts to outputs that have no scales, and the scaling is {call.scaling!r}; choose "
            "'serial' or 'pairwise'"
        )
    if plan.scaled_promotion != (call.scaling in LARGE_BLOCKS):
        raise ArgumentError(
            f"a plan with scaled_promotion={plan.scaled_promotion} does not fit scaling {call.scaling!r}; "
            "scaled_promotion belongs to 1x128 and 128x128 scales"
        )
    if plan.scaled_promotion and plan.promote_every != 128:
        raise ArgumentError(f"promote_every={plan.promote_every} does not fit scales of 128 products; choose 128")
    if plan.scaled_promotion and plan.k_tile is not None and plan.k_tile % 128:
        raise ArgumentError(f"k_tile={plan.k_tile} does not hold whole chains of 128 products; choose a multiple")
    if isinstance(path, Datapath) and path.group > 1:
        for name in ("k_tile", "instruction_k", "promote_every"):
            value = getattr(plan, name)
            if value is not None and value % path.scale_block:
                raise ArgumentError(
                    f"{name}={value} cuts the unit's scale blocks of {path.scale_block} products; choose a multiple"
                )
        if plan.residue_first and call.k % path.scale_block:
            raise ArgumentError(
                f"residue_first with K={call.k} cuts the unit's scale blocks of {path.scale_block}; pad K"
            )


def accumulate_dtype(accumulate: str) -> torch.dtype:
    """Return the dtype of an accumulator by its name."""
    return _DTYPES[accumulate]


def accumulate_name(dtype: torch.dtype) -> str:
    """Return the name of an accumulator by its dtype."""
    if dtype not in _ACCUMULATE:
        names = ", ".join(str(allowed).removeprefix("torch.") for allowed in _ACCUMULATE)
        raise DtypeError(f"c has dtype {dtype}; pass one of {names}")
    return _ACCUMULATE[dtype]


def definition(
    call: tuple[Any, ...], choice: Choice, a: OperandFormat, b: OperandFormat, scale: str | None = None
) -> tuple[str, bool, str, bool]:
    """Return a call's definition as JSON, whether it draws random words, the format it sums in, and whether the unit
    takes the formats that were asked for, instead of another.

    Args:
        call: The fields of the GemmCall in order, without a and b.
        choice, a, b, scale: As in ``resolve``.
    """
    operation, *sizes = call[:4]
    # torch.compile makes a program for every shape on which a plan can depend, and one for all where none does.
    chain = choice.target is None and choice.plan is None
    sizes = [0 if chain else index(size) for size in (*sizes, call[-1])]
    call = (operation, *sizes[:3], *call[4:-1], sizes[3])
    machine = (choice.target, choice.unit, choice.plan, choice.accumulate, choice.strict)
    return _definition(a, b, scale, *machine, *call)


@constant_in_graphs
def _definition(
    a: OperandFormat, b: OperandFormat, scale: str | None, target: Any, unit: Any, plan: GemmPlan | None,
    accumulate: str | None, strict: bool, operation: Operation, m: int, n: int, k: int, *rest: Any,
) -> tuple[str, bool, str, bool]:  # fmt: skip
    """Take every record by itself: torch.compile finds those in a tuple or in another record only while it traces."""
    names = ("out", "accumulate", "fast_accum", "scaling", "bias", "a_layout", "b_layout", "batch")
    call = GemmCall(
        operation=operation, m=m, n=n, k=k, a=call_name(a), b=call_name(b), **dict(zip(names, rest, strict=True))
    )
    choice = Choice(target=target, unit=unit, plan=plan, accumulate=accumulate, strict=strict)
    found = resolve(call, choice, a, b, scale)
    return found.spec.to_json(), is_stochastic(found.spec), found.accumulate, (found.spec.a, found.spec.b) == (a, b)


def call_name(fmt: OperandFormat) -> str:
    """Return the name of an operand's format in a GemmCall, where -128 makes no difference to int8."""
    return "int8" if fmt.name == "int8_full" else fmt.name


def draw_keys(stochastic: bool, generator: Any, batch: int | None, device: torch.device) -> Tensor | None:
    """Return the keys of stochastic rounding: int64 [2], or [batch, 2], seed and offset; None where nothing is drawn.

    Args:
        stochastic: The unit rounds stochastically.
        generator: An int seed, a RandomKey, a torch.Generator on the CPU or the device, or None for torch's default.
        batch: Products of the call, None for a single one. With a seed, product i has offset i more than the
            first; a torch.Generator is drawn from once for each.
        device: Where the operands are.

    Raises:
        ArgumentError: The generator is none, is on another device, or nothing is drawn.
    """
    if not stochastic:
        if generator is not None:
            raise ArgumentError("generator= is for units that round stochastically; this one does not, leave it out")
        return None
    count = 1 if batch is None else batch
    if generator is None or isinstance(generator, torch.Generator):
        draws = [_draw(generator, device).cpu() for _ in range(count)]
        keys = torch.stack([torch.cat([draw, draw.new_zeros(1)]) for draw in draws]) if draws else _no_keys()
    else:
        seed, offset = _numbers(generator)
        keys = torch.tensor([[_signed(seed), _signed(offset + i)] for i in range(count)]) if count else _no_keys()
    return keys[0] if batch is None else keys


def drawn_key(generator: Any, device: torch.device) -> RandomKey:
    """Return one key as numbers; arguments as in ``draw_keys``. Not for code that a compiler traces."""
    if generator is None or isinstance(generator, torch.Generator):
        return RandomKey(int(_draw(generator, device)))
    return RandomKey(*map(_signed, _numbers(generator)))


def _draw(generator: torch.Generator | None, device: torch.device) -> Tensor:
    where = torch.device("cpu") if generator is None else generator.device
    if where.type not in ("cpu", device.type):
        raise ArgumentError(
            f"generator is on {where}, a on {device}; pass one on the CPU or on {device}, or an int seed"
        )
    return torch.randint(-(1 << 63), (1 << 63) - 1, (1,), generator=generator, device=where)


def _numbers(generator: Any) -> tuple[int, int]:
    seed, offset = generator if isinstance(generator, RandomKey) else (generator, 0)
    numbers = type(seed) is int and type(offset) is int
    if not numbers or not all(-(1 << 63) <= x < 1 << 64 for x in (seed, offset)):
        raise ArgumentError(f"generator={generator!r} is not a seed; pass an int of 64 bits or a torch.Generator")
    return seed, offset


def _no_keys() -> Tensor:
    return torch.empty(0, 2, dtype=torch.int64)


def _signed(number: int) -> int:
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >= 1 << 63 else number


def unit_takes(unit: Any, *formats: str) -> bool:
    """Say whether a unit by name or record has a mode for operands of these formats; an arithmetic takes all."""
    if isinstance(unit, Arithmetic):
        return True
    record: Unit = get_unit(unit)
    return any(mode.takes(*formats) for mode in record.modes)
