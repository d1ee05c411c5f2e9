# SPDX-License-Identifier: Apache-2.0
"""What arithmetic a GPU's unit has: measured by probes, put together, held to random data, and named."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fmtsim.formats.element import FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.gemm.units.unit import describe, get_unit, list_units
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.call import GemmCall
from fmtsim.spec.datapath import FP32, Arithmetic, Datapath, IntegerDatapath
from fmtsim.support.errors import ArgumentError, DeviceError, shown
from tools.calibrate import probes
from tools.calibrate.campaign import SEEDS, find_plan
from tools.calibrate.gpu import GPU

SIZE, K = 256, 512
WRAP = 1 << 18  # products of 127^2 whose sum leaves int32
MORE_SEEDS = (1, 2, 3, 4, 5, 6)
FAMILIES = {7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell", 12: "rtx_blackwell"}
MODES = ("bf16", "fp16", "fp16 sums", "tf32", "e4m3", "e5m2", "int8")
FMA = Datapath(block=1, fraction_bits=None, rounding=Rounding(mode="nearest_even"), signed_zero=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of one kind of product."""

    mode: str  # of ``MODES``
    arithmetic: Arithmetic | None  # what the probes say; None where they contradict each other
    unit: str | None  # the catalogue's unit with this arithmetic, None where there is none
    facts: tuple[tuple[str, str], ...]  # what each probe showed, in words
    outputs: int = 0  # results of random data compared with the arithmetic
    mismatches: int = 0  # those that differ; the arithmetic is not the GPU's where there are any

    @property
    def known(self) -> bool:
        """Whether the arithmetic was found and confirmed."""
        return self.arithmetic is not None and self.outputs > 0 and not self.mismatches

    def __str__(self) -> str:
        if self.arithmetic is None:
            return f"{self.mode}: no arithmetic explains the probes; {'; '.join(': '.join(x) for x in self.facts)}"
        name = self.unit or f"not in the catalogue, {self.arithmetic!r}"
        bits = f"{self.outputs:,} results compared, {self.mismatches:,} differ"
        return f"{self.mode}: {name}; {describe(self.arithmetic)}; {bits}"


def bench_call(mode: str) -> GemmCall:
    """Return the call that carries a mode's probes."""
    sizes: dict[str, Any] = {"m": SIZE, "n": SIZE, "k": K}
    if mode in ("e4m3", "e5m2"):
        return GemmCall(operation="scaled_mm", a=mode, b="e4m3", out=torch.float32, scaling="tensor", **sizes)
    if mode == "int8":
        return GemmCall(operation="int_mm", a="int8", b="int8", out=torch.int32, accumulate="int32", **sizes)
    if mode == "fp16 sums":
        return GemmCall(operation="mm", a="fp16", b="fp16", out=torch.float16, accumulate="fp16", **sizes)
    if mode not in MODES:
        raise ArgumentError(f"mode={shown(mode)} is not possible; choose one of {', '.join(MODES)}")
    return GemmCall(operation="mm", a=mode, b=mode, out=torch.float32, **sizes)


def measure(gpu: GPU, mode: str, family: str = "") -> Measured:
    """Measure the arithmetic of one kind of product.

    Args:
        mode: Of ``MODES``.
        family: Units whose names begin with it are preferred where several have the same arithmetic.
    """
    if mode == "int8":
        return _integers(gpu, family)
    call = bench_call(mode)
    block = probes.block_length(gpu, call)
    facts: dict[str, str] = {"block": str(block)}
    unknown = lambda: Measured(mode=mode, arithmetic=None, unit=None, facts=tuple(facts.items()))  # noqa: E731
    if block is None:
        return unknown()
    bench = probes.Bench(gpu, call, block)
    facts |= {f"bits of {name}": bits for name, bits in probes.special_values(bench).items()}
    fma = FMA if block == 1 and call.accumulate == "fp32" else None  # units of two or three products are not known
    path = fma if block < 4 else _fused(bench, facts)
    if mode == "tf32":
        facts["operands rounded to TF32"] = str(probes.tf32_rounding(bench))
    if path is None or facts.get("operands rounded to TF32", "nearest_even") != "nearest_even":
        return unknown()
    finding = find_plan(gpu, call, path, seeds=(*SEEDS, *MORE_SEEDS))
    facts["confirmed"] = finding.note or "yes"
    wrong = 0 if finding.status == "verified" else finding.outputs
    name = catalogue_name(path, call, family, bool(int(facts.get("bound seen", "0"))))
    return Measured(mode=mode, arithmetic=name[1] if name else path, unit=name[0] if name else None,
                    facts=tuple(facts.items()), outputs=finding.outputs, mismatches=wrong)  # fmt: skip


def _fused(bench: probes.Bench, facts: dict[str, str]) -> Datapath | None:
    """Put together what the probes of a fused unit say; None where one of them makes no sense."""
    bits = probes.fraction_bits(bench)
    accumulator_bits = probes.accumulator_bits(bench)
    facts |= {"fraction bits": str(bits), "accumulator bits": str(accumulator_bits)}
    terms = "toward_zero" if bits is None else probes.term_rounding(bench, bits)
    sums = probes.sum_rounding(bench, accumulator_bits)
    seen, bound = (
        (False, None) if bits is None else probes.lowest_exponent(bench, bits, accumulator_bits, str(terms), str(sums))
    )
    early = bits is None or probes.joins(bench, bits, str(terms))
    facts |= {"terms": str(terms), "sums": str(sums), "lowest exponent": str(bound) if seen else "cannot be seen"}
    facts |= {"bound seen": str(int(seen)), "running sum": "aligned with the products" if early else "added last"}
    if None in (terms, sums) or not early:
        return None
    zeros = [text for name, text in facts.items() if "-0 and -0" in name or "rounded to zero" in name]
    signed = any(text.startswith("0x8") for text in zeros)
    return Datapath(block=bench.block, fraction_bits=bits, term_rounding=terms,  # type: ignore[arg-type]
                    rounding=Rounding(mode=sums), accumulator=_accumulator(bench.call, accumulator_bits),  # type: ignore[arg-type]
                    min_exponent=bound, signed_zero=signed)  # fmt: skip


def _accumulator(call: GemmCall, kept: int) -> FloatFormat:
    if call.accumulate == "fp16" and kept == 10:
        fmt = get_format("fp16")
        assert isinstance(fmt, FloatFormat)
        return fmt
    return FP32 if kept == FP32.mantissa_bits else FloatFormat(name=f"e8m{kept}", exponent_bits=8, mantissa_bits=kept)


def catalogue_name(path: Arithmetic, call: GemmCall, family: str, bound_seen: bool) -> tuple[str, Arithmetic] | None:
    """Return the name and arithmetic of a catalogued unit that adds a call's products like a given one.

    Where the lower bound of the exponent cannot be seen, any will do.
    """
    later = lambda name: (  # noqa: E731
        not (family and name.startswith(f"{family}.")), not name.endswith(("wgmma", "tcgen05"))
    )  # fmt: skip
    same = [
        (name, mode.datapath)
        for name in sorted(list_units(), key=later)
        for mode in get_unit(name).modes
        if mode.inputs is not None and mode.takes(call.a, call.b) and mode.accumulate == call.accumulate
        and _alike(mode.datapath, path, bound_seen)
    ]  # fmt: skip
    return same[0] if same else None


def _alike(known: Arithmetic, path: Arithmetic, bound_seen: bool) -> bool:
    if not isinstance(known, Datapath) or not isinstance(path, Datapath):
        return known == path
    if not bound_seen:
        known = dataclasses.replace(known, min_exponent=path.min_exponent)
    mine, other = path.accumulator, known.accumulator
    same = (mine.exponent_bits, mine.mantissa_bits) == (other.exponent_bits, other.mantissa_bits)
    return known == dataclasses.replace(path, accumulator=other if same else mine)


def _integers(gpu: GPU, family: str) -> Measured:
    """Ask whether int8 sums are exact, and whether they wrap."""
    generator = torch.Generator().manual_seed(SEEDS[0])
    call = bench_call("int8")
    a, b = (torch.randint(-128, 128, (64, K), generator=generator, dtype=torch.int8) for _ in range(2))
    exact = (a.long() @ b.long().t()).int()
    wrong = int((gpu.ask(call, a, b) != exact).sum())
    long = dataclasses.replace(call, m=32, n=32, k=2 * WRAP)
    ones = torch.full((1, 2 * WRAP), 127, dtype=torch.int8)
    up, back = ones.clone(), ones.clone()
    up[:, WRAP:] = 0
    back[:, WRAP:] = -127
    top, returned = (int(gpu.ask(long, x, ones)[0, 0]) for x in (up, back))
    wrapped = (127 * 127 * WRAP + (1 << 31)) % (1 << 32) - (1 << 31)
    facts = (("2^18 times 127^2", f"{top}"), ("and 2^18 times -127^2 after it", f"{returned}"))
    if (top, returned) == (wrapped, 0):
        path = IntegerDatapath()
    elif top == (1 << 31) - 1 and returned != 0:
        path = IntegerDatapath(saturate=True)
    else:  # such as sums that wrap on the way and are clamped at the end
        return Measured(mode="int8", arithmetic=None, unit=None, facts=facts)
    name = catalogue_name(path, call, family, False)
    return Measured(mode="int8", arithmetic=path, unit=name[0] if name else None, facts=facts, outputs=exact.numel(),
                    mismatches=wrong)  # fmt: skip


def measure_all(gpu: GPU, modes: Sequence[str] = MODES, family: str = "") -> Iterator[Measured]:
    """Measure some kinds of products; one that the GPU refuses is reported without an arithmetic."""
    for mode in modes:
        try:
            yield measure(gpu, mode, family)
        except DeviceError as error:
            yield Measured(mode=mode, arithmetic=None, unit=None, facts=(("refused", str(error)),))


def family_of(capability: tuple[int, int]) -> str:
    """Return how the names of units of a compute capability begin."""
    return {(7, 5): "turing", (8, 9): "ada"}.get(capability, FAMILIES.get(capability[0], ""))


def arithmetics(found: Iterable[Measured]) -> dict[tuple[str, str], Any]:
    """Return the confirmed arithmetic by operand format and accumulator."""
    table = {}
    for measured in found:
        if measured.known:
            call = bench_call(measured.mode)
            table[call.a, call.accumulate] = measured.arithmetic
    return table
