# SPDX-License-Identifier: Apache-2.0
"""Hold a GPU to the emulation of its matrix unit: native calls of every kind against it, bit by bit."""

import contextlib
import datetime
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

import fmtsim
from fmtsim.casts.ops import load_engine
from fmtsim.gemm.products.native import card_description, is_native
from fmtsim.gemm.products.operator import output_format
from fmtsim.gemm.targets.target import get_target, list_targets
from fmtsim.gemm.units.unit import Unit, get_unit
from fmtsim.lab.analysis.compare import Comparison, compare
from fmtsim.spec.call import UNIT_SCALES, GemmCall
from fmtsim.spec.datapath import IntegerDatapath
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, DeviceError, FmtsimError, PlanUnknownWarning, first_line
from fmtsim.support.executors import AnyExecutor, open_tasks
from tools.calibrate.evidence import CallEvidence, Data, Evidence, KindEvidence, check_family
from tools.calibrate.gpu import open_gpu
from tools.calibrate.recheck import shown
from tools.calibrate.unit_calls import DATA, Kind, Operands, digest, draw, emulate, kinds_of, orders

SAMPLE = 16  # rows and columns by which orders are told apart

Advance = Callable[[int, str], None]


class Card(Protocol):
    """A GPU whose library multiplies, or what stands in for one."""

    name: str
    capability: tuple[int, int]
    driver: str
    cublaslt: str
    target: str | None  # the target that describes it, where there is one

    def multiply(self, call: GemmCall, operands: Operands) -> tuple[Tensor, str]:
        """Return the result of a call on the CPU, and the name of the function of torch that ran.

        Raises:
            DeviceError: torch or its library refuses it, in all ways that there are.
        """
        ...


class TorchCard:
    """An NVIDIA GPU through torch's functions."""

    def __init__(self, device: str) -> None:
        open_gpu(device)
        self.device = torch.device(device)
        facts = torch.cuda.get_device_properties(self.device)
        self.name, self.capability = facts.name, (facts.major, facts.minor)
        self.cublaslt = card_description(self.device)["cublaslt"]
        self.driver = _driver()
        self.target = next((name for name in list_targets() if is_native(name, self.device)), None)

    def multiply(self, call: GemmCall, operands: Operands) -> tuple[Tensor, str]:
        """Return the result of a call, as ``Card.multiply`` says: by torch._scaled_mm where scaled_mm refuses it."""
        small = call.scaling in UNIT_SCALES
        if not small:
            name = {"mm": "torch.mm", "int_mm": "torch._int_mm"}.get(call.operation, "torch._scaled_mm")
            return self._run(call, operands, older=False), name
        try:
            return self._run(call, operands, older=False), "torch.nn.functional.scaled_mm"
        except DeviceError as error:
            if operands.tensor_a is None:
                with contextlib.suppress(DeviceError):
                    return self._run(call, operands, older=True), "torch._scaled_mm"
            raise DeviceError(str(error).partition("; pass native=False")[0]) from None

    def _run(self, call: GemmCall, operands: Operands, older: bool) -> Tensor:
        engine = load_engine("cuda")
        a, b = self._moved(operands.a), self._moved(operands.b)
        scales = (None if t is None else self._moved(t) for t in operands[2:])
        native = engine.NativeCall(
            function=call.operation, out_dtype=call.out, scaling=call.scaling, fast_accum=call.fast_accum,
            tf32=call.a == "tf32", fp16_accumulation=call.accumulate == "fp16", older=older,
        )  # fmt: skip
        try:
            return engine.run_native(native, a, b.mT, None, engine.NativeScales(*scales)).cpu()  # type: ignore[no-any-return]
        except torch.OutOfMemoryError:
            raise DeviceError(f"{self.name} has no memory left; see with nvidia-smi who else uses it") from None

    def _moved(self, t: Tensor) -> Tensor:
        """Return a tensor on the GPU, bytes as bytes: not every torch copies all of its small dtypes."""
        return t.to(self.device) if t.element_size() > 1 else t.view(torch.uint8).to(self.device).view(t.dtype)


def _driver() -> str:
    """Return the version of NVIDIA's driver, "unknown" where the system does not say."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def check_unit(unit: str, card: Card, advance: Advance = lambda done, text: None) -> Evidence:
    """Run the calls of every kind that reaches a unit on a GPU and emulated, and compare the bits.

    Raises:
        ArgumentError: The unit is unknown, not the GPU's, or reached by no call.
    """
    record = get_unit(unit)
    check_family(record.name, card.name, card.capability)
    kinds = kinds_of(record)
    if not kinds:
        raise ArgumentError(f"no call of torch reaches unit {record.name}; choose one that multiplies 16 bits or fewer")
    results = []
    for done, (kind, owner) in enumerate(kinds):
        advance(done, kind.name)
        results.append(_check_kind(kind, owner, card))
    return Evidence(
        unit=record.name, card=card.name, capability=card.capability, driver=card.driver, torch=torch.__version__,
        cublaslt=card.cublaslt, fmtsim=fmtsim.__version__, date=datetime.date.today().isoformat(), kinds=tuple(results),
    )  # fmt: skip


def _check_kind(kind: Kind, unit: Unit, card: Card) -> KindEvidence:
    calls: list[CallEvidence] = []
    refused = []
    for seed, call in enumerate(kind.calls()):
        order = None
        for data in DATA if call.operation != "int_mm" else DATA[:1]:
            try:
                plans = orders(call, _known_order(call, unit, card)) if order is None else [order]
                operands = draw(call, data, seed, kind.tensor_scales)
                native, function = card.multiply(call, operands)
                calls.append(_compared(kind, call, data, seed, operands, native, function, unit, plans))
                order = calls[-1].plan
            except FmtsimError as error:
                refused.append(f"{shown(call)}: {first_line(error)}")
    some = f"{len(refused)} calls were not run, such as {refused[0]}" if calls and refused else "".join(refused[:1])
    return KindEvidence(name=kind.name, unit=unit.name, calls=tuple(calls), note=some)


def _known_order(call: GemmCall, unit: Unit, card: Card) -> GemmPlan | None:
    """Return the order that the GPU's target has for a call; None where it guesses, or where there is no target.

    Raises:
        DeviceError: The library runs the call on something else than the unit.
    """
    if card.target is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanUnknownWarning)
        spec = get_target(card.target).resolve(call)
    mine = unit.mode(call.a, call.b, call.accumulate)
    if spec.datapath != mine and not isinstance(mine, IntegerDatapath):
        raise DeviceError(f"target {card.target} runs it on {spec.unit}, which adds otherwise")
    return None if spec.basis == "guess" else spec.plan


def _compared(
    kind: Kind, call: GemmCall, data: Data, seed: int, operands: Operands, native: Tensor, function: str, unit: Unit,
    plans: Iterable[GemmPlan],
) -> CallEvidence:  # fmt: skip
    if tuple(native.shape) != (call.m, call.n) or native.dtype != call.out:
        raise DeviceError(f"{function} returned {native.dtype} {tuple(native.shape)}")
    plan, emulated, comparison = _nearest(call, operands, native, unit, plans)
    return CallEvidence(
        operation=call.operation, m=call.m, n=call.n, k=call.k, a=call.a, b=call.b, out=_name(call.out),
        scaling=call.scaling, accumulate=call.accumulate, fast_accum=call.fast_accum, data=data, seed=seed,
        tensor_scales=kind.tensor_scales, function=function, operands=digest(*operands), native=digest(native),
        emulated=digest(emulated), outputs=comparison.count, mismatches=comparison.mismatches, plan=plan,
        first="" if comparison.equal else str(comparison.first),
    )  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return "int32" if dtype == torch.int32 else output_format(dtype).name


def _nearest(
    call: GemmCall, operands: Operands, native: Tensor, unit: Unit, plans: Iterable[GemmPlan]
) -> tuple[GemmPlan, Tensor, Comparison]:
    """Return the first order with the GPU's bits, or the one with most of them, and what it gives.

    Most orders are told apart by a few rows and columns.
    """
    rows, columns = (torch.linspace(0, size - 1, min(size, SAMPLE)).long() for size in (call.m, call.n))
    few, expected = _picked(call, operands, rows, columns), native[rows[:, None], columns]
    best: tuple[GemmPlan, Tensor, Comparison] | None = None
    for plan in plans:
        if best is not None and digest(emulate(call, few, unit.name, plan)) != digest(expected):
            continue
        emulated = emulate(call, operands, unit.name, plan)
        comparison = compare(native, emulated)
        if best is None or comparison.mismatches < best[2].mismatches:
            best = plan, emulated, comparison
        if comparison.equal or call.operation == "int_mm":
            break
    assert best is not None  # there is an order for every call
    return best


def _picked(call: GemmCall, operands: Operands, rows: Tensor, columns: Tensor) -> Operands:
    a, b, scale_a, scale_b, *whole = operands
    if call.scaling != "tensor" and scale_a is not None and scale_b is not None:
        scale_a = scale_a[rows]
        scale_b = scale_b[:, columns] if call.scaling == "row" else scale_b[columns]
    return Operands(_rows(a, rows), _rows(b, columns), scale_a, scale_b, *whole)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    raw = x.view(torch.uint8) if x.element_size() == 1 else x
    return raw[rows].view(x.dtype)


def emulate_again(evidence: Evidence, executor: AnyExecutor = None) -> list[int | None]:
    """Return for each kind how many calls give other bits than the GPU's here and now, None for one that never ran.

    Operands are drawn anew by seed, so that no GPU is needed. ``executor`` is that of ``run_sweep``.

    Raises:
        ArgumentError: This torch draws other operands.
    """
    with open_tasks(evidence, executor) as tasks:
        return [wrong for _, wrong in sorted(tasks.each_done(_wrong_calls, range(len(evidence.kinds))))]


def _wrong_calls(evidence: Evidence, index: int) -> int | None:
    kind, wrong = evidence.kinds[index], 0
    for call in kind.calls:
        operands = draw(call.call, call.data, call.seed, call.tensor_scales)
        if digest(*operands) != call.operands:
            raise ArgumentError(
                f"{kind.name}, {shown(call.call)}: torch {torch.__version__} draws other operands than "
                f"{evidence.torch} did; read the evidence where that is installed"
            )
        wrong += digest(emulate(call.call, operands, kind.unit, call.plan)) != call.native
    return wrong if kind.calls else None
