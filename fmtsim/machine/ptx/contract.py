# SPDX-License-Identifier: Apache-2.0
"""Contraction: the products that ptxas fuses into sums, so that they are rounded once.

LLVM has written ``fma.rn`` where it may. ptxas (-O3) then fuses a product without a rounding modifier (``mul``, the
last product of ``div.full``, ``div.approx`` and ``rcp.approx``) into ``add`` and ``sub`` without one. The rule below
was found from the machine code of ptxas 12.8 and 13.0 for small programs; tests/machine/ptx/test_contract.py holds it
against ptxas on random programs: it is exact for straight code. Where blocks share products, ptxas makes some of them
again and fuses a few sums more. Where ptxas is installed, the machine code decides (``sass.disassembled``).
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fmtsim.machine.ptx.parse import Address, Function, Group, Immediate, Instruction, Register, register_names
from fmtsim.machine.ptx.sass import Listing

_TYPES = {"f32", "f64", "f16", "f16x2", "bf16", "bf16x2"}
_ROUNDINGS = {"rn", "rz", "rm", "rp"}
_POWERS = {(127 + k) << 23: 2.0**k for k in (-3, -2, -1, 1, 2, 3)}  # bits of float32
_APPROXIMATIONS = {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "div"}
_ONES = {("f32", 0x3F800000): 1, ("f32", 0xBF800000): -1, ("f64", 0x3FF0 << 48): 1, ("f64", 0xBFF0 << 48): -1}
# Instructions whose first operand is read, and those that read it and write it
_STORES = frozenset("st red bar barrier stmatrix prefetch cp bra brx ret call membar fence".split())  # noqa: SIM905
_UPDATES = {"wgmma"}
# Predicated arithmetic stays in its basic block; a predicated access to memory, shuffle or barrier becomes a branch
# around it within ptxas, and ends the block as what _ENDS names does.
_ARITHMETIC = frozenset(
    """abs add addc and bfe bfi bfind brev bmsk clz cnot copysign cos cvt cvta div dp2a dp4a ex2 fma fns lg2 lop3 mad
    mad24 max min mov mul mul24 neg not or popc prmt rcp rem rsqrt sad selp set setp shf shl shr sin slct sqrt sub subc
    szext tanh testp xor""".split()  # noqa: SIM905
)
_ENDS = {"bra", "brx", "ret", "exit", "trap", "call", "membar", "setmaxnreg", "pmevent", "brkpt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """A sum that is a fused multiply-add: ``+-product +- addend``, rounded once."""

    product: int  # number of the mul, div or rcp in the function's body, whose operands are those of its own place
    operand: int  # of the sum that the product replaces: 0 or 1
    negates_product: bool
    negates_addend: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Contraction:
    """The fused sums of a function, by their numbers in its body."""

    fusions: dict[int, Fusion]
    scaled: dict[int, tuple[int, float]] = field(default_factory=dict)  # products by 2^k: the product they scale, 2^k
    basis: str  # "sass" (machine code decided, or nothing can be fused) or "rule"
    doubts: tuple[str, ...] = ()  # what the machine code leaves open; empty: exact


def contracted(function: Function, listing: Listing | None = None) -> Contraction:
    """Return the sums that ptxas makes fused multiply-adds (``--fmad=false`` makes none, which the rule does not see).

    Args:
        function: a function of the module.
        listing: the module's machine code (``sass.disassembled``), which decides; None: the rule alone.
    """
    if not may_contract(function):
        return Contraction(fusions={}, basis="sass")
    program = _Program(function)
    fusions = program.fusions()
    codes = listing.instructions.get(function.name) if listing else None
    doubts = _not_computed(function, codes or {})
    if listing is None or codes is None:
        return Contraction(fusions=fusions, scaled=program.scaled(fusions), basis="rule", doubts=tuple(doubts))
    if not listing.is_same_release:
        doubts.append(f"PTX of another release was assembled by ptxas {listing.ptxas}")
    for number in program.sums:
        # 1. a sum's line holds FFMA or FADD (DFMA, HFMA2; HFMA2 by 1 is a sum, of -RZ and RZ a constant); where it
        #    holds neither, the sum is dead, folded or paired with another, and the rule stands
        letter = {"f32": "F", "f64": "D"}.get(function.body[number].opcode[-1], "H")
        names = [re.sub(r"^@!?U?P\w+ ", "", code) for code in codes.get(number, ()) if ", -RZ, RZ, " not in code]
        arithmetic = [name for name in names if re.match(letter + r"(FMA|ADD)", name)]
        fused = {"FMA" in name.partition(" ")[0] and ", 1, 1, " not in name for name in arithmetic}
        # 2. where code and rule differ, the code wins if the copies of a loop's body agree and one product can be meant
        text = str(function.body[number])
        if fused == {False}:
            fusions.pop(number, None)
        elif fused == {True}:
            options = [k for k in (0, 1) if program.source(number, k + 1, anywhere=True)[0] is not None]
            products = [program.fusion(number, k).product for k in options]
            gone = [k for k, p in zip(options, products, strict=True)
                    if not _multiplies(codes.get(p, ()), function.body[p].opcode[0])]  # fmt: skip
            if number in fusions and fusions[number].operand in (gone or options):
                continue
            if len(gone or options) == 1:
                fusions[number] = program.fusion(number, (gone or options)[0])
            else:
                doubts.append(f"{len(options)} products may be the one fused into {text}")
        elif fused:
            doubts.append(f"copies of {text} in an unrolled loop are fused and not fused")
    # 3. FMUL.D2 or .M2, in the line of either product, is one that is scaled before it is rounded
    shown = {i for i, of in codes.items() if any(re.search(r"FMUL\S*\.[DM][248]", code) for code in of)}
    scaled = {number: pair for number, pair in program.scaled(fusions).items() if shown & {number, pair[0]}}
    known = {*scaled, *(product for product, _ in scaled.values())}
    doubts += [f"{function.body[number]} is scaled in the same rounding" for number in shown - known]
    return Contraction(fusions=fusions, scaled=scaled, basis="sass", doubts=tuple(doubts))


def may_contract(function: Function) -> bool:
    """Return True if ptxas may fuse a sum, scale a product in one rounding, or compute an approximation otherwise."""
    kinds: dict[bool, set[str]] = {True: set(), False: set()}
    constants = _constants(function)
    for x in function.body:
        if _power(x, constants):
            return True
        if x.opcode[0] in ("add", "sub", "mul", "div", "rcp") and (key := _float(x)) is not None:
            kinds[x.opcode[0] in ("add", "sub")].add(key[0])
    return not kinds[True].isdisjoint(kinds[False]) or bool(_not_computed(function, {}))


def constant_divisors(function: Function) -> dict[int, int]:
    """Return the bits of the float32 divisors that are constants, by the number of ``div.full`` or ``div.approx``.

    ptxas replaces such a quotient by the product of the dividend and the divisor's correctly rounded reciprocal, which
    MUFU.RCP misses by one unit in the last place for 16 % of divisors.
    """
    constants = _constants(function)
    found = {}
    for number, instruction in enumerate(function.body):
        if instruction.opcode[0] == "div" and {"full", "approx"} & set(instruction.opcode):
            divisor = instruction.operands[2]
            value = constants.get(divisor.name) if isinstance(divisor, Register) else getattr(divisor, "value", None)
            if value is not None:
                found[number] = value
    return found


def _power(x: Instruction, constants: dict[str, int]) -> float:
    """Return 2^k, k = +-1, +-2 or +-3, where x multiplies float32 by it; else 0."""
    is_rounded_otherwise = {"rz", "rm", "rp"} & set(x.opcode) or x.opcode[:2] == ("div", "rn")
    if x.opcode[-1] != "f32" or x.opcode[0] not in ("mul", "div") or is_rounded_otherwise:
        return 0.0
    for operand in x.operands[1 if x.opcode[0] == "mul" else 2 :]:
        value = constants.get(operand.name) if isinstance(operand, Register) else getattr(operand, "value", None)
        if value in _POWERS:
            return _POWERS[value] if x.opcode[0] == "mul" else 1 / _POWERS[value]
    return 0.0


def _not_computed(function: Function, codes: Mapping[int, Sequence[str]]) -> list[str]:
    """Return what ptxas writes otherwise than the text says, unless the machine code of the line has the unit."""
    doubts, constants = [], _constants(function)
    written: dict[str, str] = {}  # approximations whose result a register has
    for number, x in enumerate(function.body):
        units = {unit for code in codes.get(number, ()) for unit in re.findall(r"MUFU\.\w+", code)}
        if x.opcode[0] in _APPROXIMATIONS and "approx" in x.opcode and len(x.operands) > 1:
            # 1. an approximation of a constant is rounded to nearest and not the unit's
            operand = x.operands[-1]
            name = operand.name if isinstance(operand, Register) else ""
            if (isinstance(operand, Immediate) or name in constants) and x.opcode[0] != "div" and not units:
                doubts.append(f"ptxas computes {x} of a constant by itself")
            # 2. 1 / 2^x is 2^-x, and 1 / (1 / x) is x
            elif (
                x.opcode[0] in ("rcp", "div")
                and "ftz" in x.opcode
                and written.get(name) in ("ex2", "rcp")
                and "MUFU.RCP" not in units
            ):
                doubts.append(f"ptxas joins {x} with the {written[name]} before it")
        for name in register_names(x.operands[:1]):
            written[name] = x.opcode[0] if {"approx", "ftz"} <= set(x.opcode) else ""
    return doubts


def _constants(function: Function) -> dict[str, int]:
    """Return the registers that only ever hold one constant."""
    values: dict[str, set[int | None]] = defaultdict(set)
    for x in function.body:
        for name in register_names(x.operands[:1]):
            source = x.operands[1] if x.opcode[0] == "mov" else None
            values[name].add(source.value if isinstance(source, Immediate) else None)
    constants = {name: next(iter(held)) for name, held in values.items() if len(held) == 1}
    return {name: value for name, value in constants.items() if value is not None}


def _multiplies(codes: tuple[str, ...], opcode: str) -> bool:
    """Return True if a product's line still multiplies: FMUL, or HFMA2 with -RZ as addend, beside the scaling steps."""
    products = [code for code in codes if re.match(r"[FDH]MUL|HFMA2\S* .*, -RZ", code)]
    if opcode == "div":
        products = [code for code in products if not code.endswith((", 0.25", ", 16777216"))]
    return len(products) > (opcode == "rcp")


class _Program:
    """Values, their uses and the products and sums of a function, a basic block at a time."""

    def __init__(self, function: Function) -> None:
        self.body = function.body
        self.uses: dict[int, list[int]] = defaultdict(list)  # instructions that read a value; -1: others, which keep it
        self.reads: dict[tuple[int, int], int] = {}  # (instruction, operand) -> the instruction whose value it reads
        self.readers: dict[str, list[int]] = defaultdict(list)  # instructions that read a register
        self.constants = _constants(function)
        self._number_values(_block_begins(function), self.constants)
        self.products = {i: key for i, x in enumerate(self.body) if (key := self._product(x)) is not None}
        self.all_uses = {p: self._through(p) for p in self.products}
        self.sums: dict[int, tuple[int | None, int | None]] = {}  # products that the two operands are
        for i, x in enumerate(self.body):
            if x.opcode[0] in ("add", "sub") and (key := _float(x)) is not None:
                pair = [self.source(i, k)[0] for k in (1, 2)]
                first, second = (p if p is not None and self.products[p] == key else None for p in pair)
                self.sums[i] = (first, second)

    def _number_values(self, begins: set[int], constants: dict[str, int]) -> None:
        """Find which instruction's value each operand reads, where both are in one block or it is times a constant."""
        times: dict[str, list[int]] = defaultdict(list)  # products by a constant move to the block of their sums
        for i, x in enumerate(self.body):
            for name in register_names(x.operands[:1]):
                held = [isinstance(o, Immediate) or getattr(o, "name", "") in constants for o in x.operands[1:]]
                times[name].append(i if self._product(x) and any(held) and (x.opcode[0] == "mul" or held[1]) else -1)
        movable = {name: numbers[0] for name, numbers in times.items() if len(numbers) == 1 and numbers[0] >= 0}
        live_in: set[str] = set()
        at_ends: list[tuple[str, int]] = []
        current: dict[str, int] = {}
        writers: dict[str, list[int]] = defaultdict(list)
        for i, x in enumerate(self.body):
            if i in begins:
                at_ends += current.items()
                current = {}
            opcode, first = x.opcode[0], x.operands[:1]
            stores = opcode in _STORES or (bool(first) and isinstance(first[0], Address))
            # a predicated result keeps its old value elsewhere, so it is read, too
            reads = x.operands if stores or opcode in _UPDATES or x.predicate else x.operands[1:]
            for k, operand in enumerate(reads, len(x.operands) - len(reads)):
                for name in register_names((operand,)):
                    self.readers[name].append(i)
                    value = current.get(name, movable.get(name, i))
                    if value < i:
                        is_merge = k == 0 and not stores and opcode not in _UPDATES
                        self.uses[value].append(-1 if is_merge else i)
                        self.reads[i, k] = value
                    else:
                        live_in.add(name)
            if x.predicate and x.predicate.name in current:
                self.uses[current[x.predicate.name]].append(i)
            for name in [] if stores else register_names(first):
                current[name] = i
                writers[name].append(i)
        for name, i in [*at_ends, *current.items()]:
            if name in live_in:  # read in another block, or at the loop's next turn
                self.uses[i].append(-1)
        self.written_once = {name: numbers[0] for name, numbers in writers.items() if len(numbers) == 1}

    def _product(self, x: Instruction) -> tuple[str, bool] | None:
        """Return type and flush of a product that may be fused."""
        kind, modifiers = x.opcode[0], set(x.opcode)
        if x.predicate or "sat" in modifiers or (kind == "rcp" and "ftz" in modifiers) or self._factor(x):
            return None
        is_product = kind == "mul" or (
            kind in ("div", "rcp") and modifiers & {"full", "approx"} and x.opcode[-1] == "f32"
        )
        return _float(x) if is_product else None

    def _factor(self, x: Instruction) -> int:
        """Return 1 or -1 where an instruction passes its operand on, as it is or negated; else 0."""
        if x.predicate or len(x.operands) < 2 or isinstance(x.operands[0], Group):  # noqa: PLR2004
            return 0
        if x.opcode[0] == "mov" and isinstance(x.operands[1], Register):
            return 1
        if x.opcode[0] == "neg" and x.opcode[-1] in _TYPES - {"bf16x2"} and "ftz" not in x.opcode:
            return -1
        last = x.operands[-1]
        if (
            x.opcode[0] in ("mul", "div")
            and _float(x) is not None
            and isinstance(last, Immediate)
            and "ftz" not in x.opcode
        ):
            return _ONES.get((x.opcode[-1], last.value), 0)
        return 0

    def source(self, i: int, k: int, *, anywhere: bool = False) -> tuple[int | None, int]:
        """Return the product that an operand is, through copies and negations, and its sign.

        Args:
            i: number of the instruction.
            k: its operand.
            anywhere: products of other blocks, too, whose register is written once.
        """
        sign = 1
        for _ in self.body:
            value = self.reads.get((i, k))
            operand = self.body[i].operands[k]
            if value is None and anywhere and isinstance(operand, Register):
                value = self.written_once.get(operand.name)
            factor = self._factor(self.body[value]) if value is not None else 0
            if value is None or not factor:
                return (value if value in self.products else None), sign
            i, k, sign = value, 1, sign * factor
        return None, sign

    def _through(self, i: int) -> list[int]:
        """Return the instructions that use a value, those behind copies and negations for these."""
        found = []
        for user in self.uses[i]:
            found += self._through(user) if user >= 0 and self._factor(self.body[user]) else [user]
        return found

    def fusion(self, number: int, operand: int) -> Fusion:
        """Return the fusion of a sum with the product that one of its operands is."""
        product, sign = self.source(number, operand + 1, anywhere=True)
        is_subtraction = self.body[number].opcode[0] == "sub"
        return Fusion(
            product=-1 if product is None else product,
            operand=operand,
            negates_product=(sign < 0) != (is_subtraction and operand == 1),
            negates_addend=is_subtraction and operand == 0,
        )

    def fusions(self) -> dict[int, Fusion]:
        """Apply the rule, a sum at a time in the order of the text."""
        addends: set[int] = set()  # products that have become the addend of a fused multiply-add: they must stay
        fused = {}

        def is_eligible(product: int) -> bool:
            users = self.all_uses[product]
            if product in addends:
                return False
            # 1. a product with one use is fused; one with more only if every use is a sum of the same type and flush
            #    in its block, or in any if it is by a constant, so that the product itself goes away
            for user in users if len(users) > 1 else ():
                pair = self.sums.get(user, (None, None))
                if product not in pair or pair[0] == pair[1]:
                    return False
                # 2. and none of these sums has a product with one use as its other operand, which goes first
                other = pair[1] if pair[0] == product else pair[0]
                if other is not None and len(self.all_uses[other]) == 1:
                    return False
            return True

        for number, pair in self.sums.items():
            # 3. of two eligible products the one with fewer uses is fused, the first operand's if they have as many
            uses = {k: len(self.all_uses[p]) for k, p in enumerate(pair) if p is not None and is_eligible(p)}
            if uses and pair[0] != pair[1]:
                k = min(uses, key=uses.__getitem__)
                fused[number] = self.fusion(number, k)
                other = self.source(number, 2 - k)[0]
                if other is not None:
                    addends.add(other)
        return fused

    def scaled(self, fusions: dict[int, Fusion]) -> dict[int, tuple[int, float]]:
        """Return the products by 2, 4, 8 or their reciprocals that are one with the product they scale.

        That has no other use; neither is fused into a sum, and the scaled one is not scaled again.
        """
        fused: set[int] = {fusion.product for fusion in fusions.values()}
        found: dict[int, tuple[int, float]] = {}
        for number, x in enumerate(self.body):
            scale = _power(x, self.constants)
            if number in fused or not scale:
                continue
            for k in (1, 2):
                name = getattr(x.operands[k], "name", "")
                inner = self.reads.get((number, k), self.written_once.get(name, -1))
                once = self.uses[inner] == [number] or (name in self.written_once and self.readers[name] == [number])
                flushes = ("ftz" in x.opcode) == ("ftz" in self.body[inner].opcode)
                if inner in self.products and inner not in found and once and flushes:
                    found[number] = inner, scale
        return found


def _float(x: Instruction) -> tuple[str, bool] | None:
    """Return type and flush of floating point arithmetic without a rounding modifier."""
    modifiers = set(x.opcode)
    return (x.opcode[-1], "ftz" in modifiers) if x.opcode[-1] in _TYPES and not modifiers & _ROUNDINGS else None


def _block_begins(function: Function) -> set[int]:
    """Return the numbers of the instructions that begin a basic block of ptxas."""
    targets = set()
    for x in function.body:
        if x.opcode[0] in ("bra", "brx"):
            targets |= {getattr(o, "name", "") for o in x.operands}
    targets |= {label for labels in function.branch_targets.values() for label in labels}
    begins = {at for label, at in function.labels.items() if label in targets}
    for i, x in enumerate(function.body):
        kind, modifiers = x.opcode[0], set(x.opcode)
        is_subroutine = (
            (kind in ("div", "rcp", "sqrt") and bool(modifiers & _ROUNDINGS))  # of IEEE: a call
            or (kind in ("rsqrt", "sqrt") and x.opcode[-1] == "f64" and "ftz" not in modifiers)
            or (kind in ("div", "rem") and x.opcode[-1] in ("u64", "s64", "u16", "s16", "s32"))
        )
        is_fence = (kind == "fence" and "proxy" not in modifiers and "mbarrier_init" not in modifiers) or (
            kind == "griddepcontrol" and "launch_dependents" in modifiers
        )
        if kind in _ENDS or is_subroutine or is_fence or (x.predicate and kind not in _ARITHMETIC):
            begins |= {i, i + 1}
    return begins
