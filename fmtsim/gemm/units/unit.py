# SPDX-License-Identifier: Apache-2.0
"""Matrix units by name: which operands each takes, how it adds their products, and what stands behind that."""

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from fmtsim.formats.block import Format
from fmtsim.formats.element import FloatFormat, LogFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import is_representable
from fmtsim.spec.datapath import (
    Arithmetic,
    Datapath,
    FmaDatapath,
    IntegerDatapath,
    LogDatapath,
    PairwiseDatapath,
    TwoStageDatapath,
    sum_dtype,
)
from fmtsim.support.errors import ArgumentError, did_you_mean, shown
from fmtsim.support.records import check_types, lists_fields
from fmtsim.support.table import Row, aligned, filled, html

Accumulate = Literal["fp32", "fp16", "fp64", "int32", "int64"]
Strength = Literal["recorded", "compared", "reported", "defined"]
ACCUMULATES: tuple[Accumulate, ...] = get_args(Accumulate)
STRENGTHS: dict[Strength, str] = {
    "recorded": "equal to recorded hardware bits",
    "compared": "equal to another model of the unit",
    "reported": "reported by a source",
    "defined": "true by definition",
}

_NAME = re.compile(r"[a-z0-9_.+-]+")


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Describe one way to use a unit: what it takes, what it sums in, and its arithmetic.

    Args:
        inputs: Names of the formats that both operands may have, in any mix; None takes every floating-point format.
        accumulate: Format of the addend and the result.
        datapath: How products are added.
        evidence: What shows that the arithmetic is so.
        strength: ``"recorded"`` (hardware bits), ``"compared"`` (another model of the unit agrees), ``"reported"``
            (a source says so) or ``"defined"`` (no machine claims it).
    """

    inputs: tuple[str, ...] | None
    accumulate: Accumulate
    datapath: Arithmetic
    evidence: str
    strength: Strength

    def __post_init__(self) -> None:
        inputs: object = self.inputs
        if isinstance(inputs, list | tuple):
            names = tuple(get_format(name).name for name in inputs)  # aliases become names, unknown ones are refused
            if not names:
                raise ArgumentError("inputs=() takes nothing; name formats, or pass None for every float format")
            object.__setattr__(self, "inputs", names)
        if not isinstance(self.datapath, Arithmetic):
            raise ArgumentError(f"datapath={shown(self.datapath)} is not a unit's arithmetic; pass a Datapath record")
        for name, allowed in (("accumulate", ACCUMULATES), ("strength", tuple(STRENGTHS))):
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in allowed:
                raise ArgumentError(
                    f"Mode {name}={shown(getattr(self, name))} is not possible; choose one of {', '.join(allowed)}"
                )
        check_types(self)

    @property
    def scale(self) -> str | None:
        """Name of the format of scales inside the unit, None where it has none."""
        fmt = self.datapath.scale if isinstance(self.datapath, Datapath) else None
        return None if fmt is None else fmt.name

    def takes(self, *formats: str | Format) -> bool:
        """Return True if operands of these formats, by name or record, can be multiplied here."""
        records = [get_format(fmt) for fmt in formats]
        if self.inputs is None:
            return all(isinstance(record, FloatFormat) for record in records)
        return all(record.name in self.inputs for record in records)

    def __str__(self) -> str:
        inputs = "any float format" if self.inputs is None else " ".join(self.inputs)
        return f"{inputs}{f' with {self.scale} scales' if self.scale else ''} -> {self.accumulate}"


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Unit:
    """Describe a matrix unit: a name, the modes it has, and where it is found.

    Args:
        name: Lower-case name, ``"hopper.wgmma"``.
        modes: Its modes; of several that take the same operands the first is meant unless ``scale=`` says otherwise.
        description: One sentence: whose unit it is and which instructions reach it.
    """

    name: str
    modes: tuple[Mode, ...]
    description: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ArgumentError(
                f"unit name {shown(self.name)} is not allowed; choose lower-case letters, digits and _ . + -"
            )
        modes: object = self.modes
        if not isinstance(modes, list | tuple) or not modes or not all(isinstance(mode, Mode) for mode in modes):
            raise ArgumentError(f"unit {self.name}: modes={shown(modes)} is not possible; pass one Mode or more")
        object.__setattr__(self, "modes", tuple(modes))
        check_types(self)

    def __hash__(self) -> int:
        return hash(self.name)  # short: resolved products are looked up by their unit

    def find(
        self, a_format: str | Format, b_format: str | Format, accumulate: str | None = None, scale: str | None = None
    ) -> Mode:
        """Return the mode for two operand formats; arguments and errors are those of ``mode``."""
        # 1. modes that take the operands and have the scale
        a, b = get_format(a_format), get_format(b_format)
        wanted = None if scale is None else get_format(scale).name
        taking = [mode for mode in self.modes if mode.takes(a, b) and (wanted is None or mode.scale == wanted)]
        # 2. the accumulator: that asked for, else the usual one where the unit has it, else that of the first mode
        if accumulate is None:
            wide = not all(is_representable(fmt, torch.float32) for fmt in (a, b))
            usual = "fp64" if wide else "fp32"
            accumulate = next((mode.accumulate for mode in taking if mode.accumulate == usual), None)
        fitting = [mode for mode in taking if accumulate is None or mode.accumulate == accumulate]
        if fitting:
            return fitting[0]
        # 3. nothing fits: the error has what was asked, what the unit takes, and units that take it
        scales, sums = f" with {wanted} scales" if wanted else "", f" -> {accumulate}" if accumulate else ""
        taken, elsewhere = "; ".join(map(str, self.modes)), units_that_take(a, b, accumulate, wanted)
        raise ArgumentError(
            f"unit {self.name} does not take {a.name} x {b.name}{scales}{sums}; it takes {taken}; {elsewhere}"
        )

    def mode(
        self, a_format: str | Format, b_format: str | Format, accumulate: str | None = None, scale: str | None = None
    ) -> Arithmetic:
        """Return how the unit adds products of two formats.

        Args:
            a_format: Format of the first operand, by name or record.
            b_format: Format of the second.
            accumulate: ``"fp32"``, ``"fp16"``, ``"fp64"`` or ``"int32"``; None takes fp32 (fp64 for operands
                beyond float32) where the unit has it for these operands, else the first it has.
            scale: Format of scales inside the unit (``"e8m0"``, ``"ue4m3"``), by name; None takes the first mode.

        Raises:
            ArgumentError: The unit does not take these operands so; the message lists what it takes.
            FormatError: A format is unknown.
        """
        return self.find(a_format, b_format, accumulate, scale).datapath

    def __repr__(self) -> str:
        return f"Unit({self.name!r}: {'; '.join(map(str, self.modes))})"

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.name, self.description, *aligned(self._rows()))))

    def _repr_html_(self) -> str:
        return f"<b>{escape(self.name)}</b> {escape(self.description)}{html(self._rows())}"

    def _rows(self) -> list[Row]:
        """Return the modes as a table: a header, and a row for each."""
        rows = []
        for mode in self.modes:
            inputs = "any float format" if mode.inputs is None else " ".join(mode.inputs)
            scales = f"{mode.scale} every {getattr(mode.datapath, 'scale_block', 0)}" if mode.scale else ""
            evidence = f"{STRENGTHS[mode.strength]}: {mode.evidence}"
            rows.append((inputs, mode.accumulate, describe(mode.datapath), scales, evidence))
        return filled(("inputs", "sum", "arithmetic", "scales", "evidence"), rows)


def units_that_take(a: Format, b: Format, accumulate: str | None, scale: str | None) -> str:
    """Return an error's hint on units that multiply two formats: their names, or what to pass where none does."""
    # units that take every float format (None) are no hardware: they come last
    names: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for unit in _units.values():
        for mode in unit.modes:
            if mode.takes(a, b) and accumulate in (None, mode.accumulate) and scale in (None, mode.scale):
                names[mode.inputs is not None][unit.name] = None
    if any(names.values()):
        return f"units that do: {', '.join(names[True] | names[False])}"
    record = "LogDatapath" if isinstance(a, LogFormat) and isinstance(b, LogFormat) else "Datapath"
    return f"no unit does; pass target={record}(...), a unit of your own"


PLANS = Path(__file__).parents[1] / "targets" / "plans"
_units: dict[str, Unit] = {}  # the catalogue's first, which the package registers
registrations = 0  # how often a record was registered: what was resolved before may mean another unit since


def get_unit(name: str | Unit) -> Unit:
    """Return the record of a matrix unit; a Unit is returned as it is.

    Raises:
        ArgumentError: The name is unknown; the message has names that are close.

    >>> import fmtsim
    >>> fmtsim.get_unit("hopper.wgmma").name
    'hopper.wgmma'
    """
    if isinstance(name, Unit):
        return name
    unit = _units.get(name.strip().lower()) if isinstance(name, str) else None
    if unit is None:
        books = isinstance(name, str) and (PLANS / f"{name.strip().lower()}.json").is_file()
        hint = "; get_target has GPUs with their libraries" if books else did_you_mean(name, _units)
        raise ArgumentError(f"unknown unit {shown(name)}{hint} (choose one of {', '.join(_units)})")
    return unit


def list_units() -> list[str]:
    """Return the names of all units, the catalogue's first.

    >>> import fmtsim
    >>> [name for name in fmtsim.list_units() if name.startswith("hopper")]
    ['hopper.mma', 'hopper.wgmma']
    """
    return list(_units)


def register_unit(unit: Unit | str, datapath: Arithmetic | None = None, *, overwrite: bool = False) -> Unit:
    """Make a unit known under its name, and return it; an equal record may be registered twice.

    Args:
        unit: The record; or a name, with a datapath that takes every format of its kind.
        datapath: The arithmetic of a unit that is a name.
        overwrite: Whether it may take the name of another.

    Raises:
        ArgumentError: The argument is not a Unit, or its name is taken and ``overwrite`` is False.

    >>> import fmtsim
    >>> sums = fmtsim.IntegerDatapath(accumulator_bits=24, saturate=True, block=1)
    >>> mac = register_unit("mac24", sums)  # doctest: +SKIP
    >>> print(mac.modes[0], "|", describe(mac.modes[0].datapath))  # doctest: +SKIP
    int8 int8_full -> int32 | int24 accumulators that saturate every 1 products
    >>> path = fmtsim.Datapath(block=32, fraction_bits=10, accumulator="e8m9")
    >>> why = {"evidence": "its RTL", "strength": "defined"}
    >>> modes = (Mode(inputs=("e4m3", "e5m2"), accumulate="fp32", datapath=path, **why),)  # or several
    >>> unit = Unit(name="mac24fp8", modes=modes)
    >>> unit.mode("e4m3", "e5m2") == path
    True
    >>> fmtsim.register_unit(unit)  # doctest: +SKIP
    """
    if isinstance(unit, str) and isinstance(datapath, Arithmetic):
        inputs: Any = {IntegerDatapath: ("int8", "int8_full"), LogDatapath: ("lns8_g8",)}.get(type(datapath))
        names = {torch.float32: "fp32", torch.float64: "fp64", torch.int32: "int32", torch.int64: "int64"}
        sums: Any = names[sum_dtype(datapath)]
        mode = Mode(inputs=inputs, accumulate=sums, datapath=datapath, evidence="by its name", strength="defined")
        unit = Unit(name=unit, modes=(mode,))
    elif not isinstance(unit, Unit) or datapath is not None:
        raise ArgumentError(
            f"unit={shown(unit)} is not a unit; pass register_unit('mine', Datapath(...)), or build a "
            "Unit(name=..., modes=(Mode(...), ...))"
        )
    if (PLANS / f"{unit.name}.json").is_file():  # target= takes names of both
        raise ArgumentError(f"unit name {shown(unit.name)} is that of a GPU with its library; choose another")
    registered = _units.get(unit.name)  # an equal record is no change, as where a module is run twice
    if registered is not None and registered != unit and not overwrite:
        raise ArgumentError(f"unit name {shown(unit.name)} is taken; choose another, or pass overwrite=True")
    global registrations
    registrations += 1
    _units[unit.name] = unit
    return unit


def is_unit(target: Any) -> bool:
    """Return True if a target is a matrix unit or a datapath alone, False for a GPU with its library."""
    if isinstance(target, str):
        return target.strip().lower() in _units
    return isinstance(target, Unit | Arithmetic)


def unit_takes(unit: str | Unit | Arithmetic, *formats: str | Format) -> bool:
    """Return True if a unit by name or record has a mode for operands of these formats; an arithmetic takes all."""
    return isinstance(unit, Arithmetic) or any(mode.takes(*formats) for mode in get_unit(unit).modes)


def takes_logarithms(unit: str | Unit | Arithmetic | None) -> bool:
    """Return True if a unit by name or record, or an arithmetic, multiplies logarithms."""
    modes = () if unit is None or isinstance(unit, Arithmetic) else get_unit(unit).modes
    return any(isinstance(path, LogDatapath) for path in (unit, *(mode.datapath for mode in modes)))


def machine_name(machine: object) -> str:
    """Return what to call a target, a unit (both by name or record) or an arithmetic."""
    return describe(machine) if isinstance(machine, Arithmetic) else getattr(machine, "name", None) or str(machine)


def describe(datapath: Arithmetic) -> str:
    """Return a unit's arithmetic in a line: blocks, bits kept, rounding."""
    match datapath:
        case IntegerDatapath():
            after = f"saturate every {datapath.block} products" if datapath.saturate else "wrap"
            return f"int{datapath.accumulator_bits} accumulators that {after}"
        case LogDatapath():
            table = f"{datapath.entries} constants of {datapath.fraction_bits} bits"
            return f"logarithms in blocks of {datapath.block}, {table}, clamped to {datapath.accumulator_bits} bits"
        case PairwiseDatapath():
            return f"products in pairs of {datapath.block}, each sum rounded and flushed"
        case FmaDatapath():
            halves = (
                f"even and odd k of blocks of {datapath.block} apart" if datapath.parity else "odd k of pairs first"
            )
            return f"fused multiply-adds, {halves}, each sum rounded and flushed"
        case TwoStageDatapath():
            halves = ", even and odd k apart" if datapath.parity else ""
            return f"blocks of {datapath.block}, F={datapath.fraction_bits}{halves}, addend aligned after, nearest_even"
    # the fused unit, whose fields have a default that is left out
    blocks = "all of K at once" if datapath.block is None else f"blocks of {datapath.block}"
    if datapath.group > 1:
        blocks += f" in groups of {datapath.group}"
    width = "exact" if datapath.fraction_bits is None else f"F={datapath.fraction_bits}"
    least = "" if datapath.min_exponent is None else f", E>={datapath.min_exponent}"
    late = "" if datapath.promote_every is None else f", addend after {datapath.promote_every}"
    return f"{blocks}, {width}{least}{late}, {datapath.rounding.mode} to {datapath.accumulator.name}"
