# SPDX-License-Identifier: Apache-2.0
"""What an instruction computes, traced into machine code: 16 threads of a block at a time, in vector registers.

The semantics of an instruction is a Python function of ``Vector`` values (``instructions``). Tracing it writes LLVM's
language; the compiled function runs over all threads of a block, whose registers are arrays:

    void function(registers, row, mask, threads)    row: offsets of the result and the operands in ``registers``

Threads whose byte of ``mask`` is 0 keep their results; a null mask keeps none.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import llvmlite.binding as llvm
import llvmlite.ir as ir

LANES = 16  # threads of a vector; a block has a multiple of 32
FIRST_OPERAND = 8  # entry of a row that holds the offset of the result; the operands' follow

_POINTER = ir.IntType(8).as_pointer()
_FLOATS = {16: ir.HalfType(), 32: ir.FloatType(), 64: ir.DoubleType()}


def bits(kind: str) -> int:
    """Return the bits of a kind: 32 of ``f32``, 1 of ``pred``."""
    return 1 if kind == "pred" else int(kind[1:])


def _scalar(kind: str) -> ir.Type:
    return _FLOATS[bits(kind)] if kind[0] == "f" and bits(kind) > 16 else ir.IntType(bits(kind))


class Vector:
    """A value of 16 threads while a function is traced: a kind (``u32``, ``b16``, ``f32``, ``pred`` ...) and LLVM's.

    Operators are those of the kind: integers wrap, ``>>`` of signed ones keeps the sign, floats round to nearest even.
    Python's numbers become constants of the other operand's kind. ``f16`` and ``bf16`` are ``b16``: codes.
    """

    __slots__ = ("kind", "value")
    builder: ir.IRBuilder  # of the function that is traced

    def __init__(self, kind: str, value: Any) -> None:
        self.kind, self.value = kind, value

    def constant(self, number: float) -> "Vector":
        """Return a constant of this kind."""
        return constant(self.kind, number)

    def _other(self, other: "Vector | float") -> Any:
        return other.value if isinstance(other, Vector) else self.constant(other).value

    def _binary(self, other: "Vector | float", integer: str, floating: str = "") -> "Vector":
        name = floating if self.kind[0] == "f" else integer
        return Vector(self.kind, getattr(self.builder, name)(self.value, self._other(other)))

    def __add__(self, other: "Vector | float") -> "Vector":
        return self._binary(other, "add", "fadd")

    def __sub__(self, other: "Vector | float") -> "Vector":
        return self._binary(other, "sub", "fsub")

    def __mul__(self, other: "Vector | float") -> "Vector":
        return self._binary(other, "mul", "fmul")

    def __truediv__(self, other: "Vector | float") -> "Vector":
        return self._binary(other, "", "fdiv")

    def __floordiv__(self, other: "Vector | float") -> "Vector":  # toward zero, by no zero
        return self._binary(other, "sdiv" if self.kind[0] == "s" else "udiv")

    def __mod__(self, other: "Vector | float") -> "Vector":
        return self._binary(other, "srem" if self.kind[0] == "s" else "urem")

    def __and__(self, other: "Vector | float") -> "Vector":
        return self._binary(other, "and_")

    def __or__(self, other: "Vector | float") -> "Vector":
        return self._binary(other, "or_")

    def __xor__(self, other: "Vector | float") -> "Vector":
        return self._binary(other, "xor")

    def __lshift__(self, other: "Vector | float") -> "Vector":  # by less than its bits
        return self._binary(other, "shl")

    def __rshift__(self, other: "Vector | float") -> "Vector":
        return self._binary(other, "ashr" if self.kind[0] == "s" else "lshr")

    def __invert__(self) -> "Vector":
        return Vector(self.kind, self.builder.not_(self.value))

    def __neg__(self) -> "Vector":
        if self.kind[0] != "f":
            return self.constant(0) - self
        return (self.view(f"u{bits(self.kind)}") ^ (1 << (bits(self.kind) - 1))).view(self.kind)  # of NaN, too

    def _compared(self, relation: str, other: "Vector | float") -> "Vector":
        if self.kind[0] == "f":  # false for NaN, but != is true
            compare = self.builder.fcmp_unordered if relation == "!=" else self.builder.fcmp_ordered
        else:
            compare = self.builder.icmp_signed if self.kind[0] == "s" else self.builder.icmp_unsigned
        return Vector("pred", compare(relation, self.value, self._other(other)))

    def __eq__(self, other: "Vector | float") -> "Vector":  # type: ignore[override]
        return self._compared("==", other)

    def __ne__(self, other: "Vector | float") -> "Vector":  # type: ignore[override]
        return self._compared("!=", other)

    def __lt__(self, other: "Vector | float") -> "Vector":
        return self._compared("<", other)

    def __le__(self, other: "Vector | float") -> "Vector":
        return self._compared("<=", other)

    def __gt__(self, other: "Vector | float") -> "Vector":
        return self._compared(">", other)

    def __ge__(self, other: "Vector | float") -> "Vector":
        return self._compared(">=", other)

    __hash__ = None  # type: ignore[assignment]

    def isnan(self) -> "Vector":
        """Return where a float is NaN."""
        return Vector("pred", self.builder.fcmp_unordered("uno", self.value, self.value))

    def view(self, kind: str) -> "Vector":
        """Return the same bits as another kind of the same width."""
        if _scalar(kind) == _scalar(self.kind):
            return Vector(kind, self.value)
        return Vector(kind, self.builder.bitcast(self.value, _vector(kind)))

    def to(self, kind: str) -> "Vector":
        """Return the number as another kind: integers wrap or extend their sign, floats round to nearest even."""
        source, target, build = self.kind, _vector(kind), self.builder
        if target == self.value.type:
            return Vector(kind, self.value)
        if kind[0] == "f" and source[0] == "f":
            convert = build.fpext if bits(kind) > bits(source) else build.fptrunc
        elif kind[0] == "f":
            convert = build.sitofp if source[0] == "s" else build.uitofp
        elif source[0] == "f":
            convert = build.fptosi if kind[0] == "s" else build.fptoui  # of a number in range
        elif bits(kind) > bits(source):
            convert = build.sext if source[0] == "s" else build.zext
        else:
            convert = build.trunc
        return Vector(kind, convert(self.value, target))

    def call(self, name: str, *others: "Vector | float") -> "Vector":
        """Return LLVM's intrinsic of this and other values of the kind: ``fma``, ``sqrt``, ``ctpop``, ``fshl`` ..."""
        flag = [ir.Constant(ir.IntType(1), 0)] if name in ("ctlz", "cttz", "abs") else []  # 0 is no special case
        arguments = [self.value, *(self._other(other) for other in others), *flag]
        kind = ir.FunctionType(self.value.type, [argument.type for argument in arguments])
        full = f"llvm.{name}.v{LANES}{'f' if self.kind[0] == 'f' else 'i'}{bits(self.kind)}"
        module = self.builder.module
        intrinsic = module.globals.get(full) or ir.Function(module, kind, full)
        return Vector(self.kind, self.builder.call(intrinsic, arguments))


def constant(kind: str, number: float) -> Vector:
    """Return a constant of a kind; integers wrap, those of a float kind are its bits."""
    if kind[0] == "f" and isinstance(number, int):
        return constant(f"u{bits(kind)}", number).view(kind)
    value = int(number) & ((1 << bits(kind)) - 1) if kind[0] != "f" else float(number)
    return Vector(kind, ir.Constant(_vector(kind), [value] * LANES))


def where(condition: Vector, a: Vector | float, b: Vector | float) -> Vector:
    """Return a where a predicate holds, else b."""
    like = a if isinstance(a, Vector) else b
    assert isinstance(like, Vector)
    return Vector(like.kind, Vector.builder.select(condition.value, like._other(a), like._other(b)))


def _vector(kind: str) -> ir.Type:
    return ir.VectorType(_scalar(kind), LANES)


def apply(address: int, x: Vector) -> Vector:
    """Return a compiled function ``void(pointer to 16 inputs, pointer to 16 results)`` of a value."""
    build = Vector.builder
    with build.goto_entry_block():
        source, result = build.alloca(x.value.type), build.alloca(x.value.type)
    build.store(x.value, source)
    word = ir.IntType(64)
    kind = ir.FunctionType(word, [word, word])
    function = build.inttoptr(word(address), kind.as_pointer())
    build.call(function, [build.ptrtoint(source, word), build.ptrtoint(result, word)])
    return Vector(x.kind, build.load(result))


Semantics = Callable[..., Any]


class Tracer:
    """Compile semantics to machine code, each once.

    ``request`` asks for code; the first ``address`` behind it compiles all that was asked for, in one go.
    """

    def __init__(self) -> None:
        self._waiting: dict[Any, tuple[Semantics, Sequence[str], Sequence[str]]] = {}
        self._addresses: dict[Any, int] = {}
        self._engines: list[Any] = []  # they own the code

    def request(self, key: Any, semantics: Semantics, results: Sequence[str], operands: Sequence[str]) -> Self:
        """Ask for the code of semantics with results and operands of these kinds."""
        if key not in self._addresses:
            self._waiting[key] = semantics, results, operands
        return self

    def address(self, key: Any) -> int:
        """Return the address of a function that was requested."""
        if self._waiting:
            self._compile()
        return self._addresses[key]

    def _compile(self) -> None:
        """Compile all that waits, as one module."""
        module = ir.Module("ptx")
        names = {key: f"row{i}" for i, key in enumerate(self._waiting)}
        for key, request in self._waiting.items():
            _write(module, names[key], *request)
        machine = _machine()
        parsed = llvm.parse_assembly(str(module))
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
        passes.getModulePassManager().run(parsed, passes)
        engine = llvm.create_mcjit_compiler(parsed, machine)
        engine.finalize_object()
        self._engines.append(engine)
        self._addresses |= {key: engine.get_function_address(name) for key, name in names.items()}
        self._waiting.clear()


def _machine() -> Any:
    """Return a compiler for this processor; the engine that it is given to owns it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=2, jit=True)


def _write(module: ir.Module, name: str, semantics: Semantics, results: Sequence[str], operands: Sequence[str]) -> None:
    """Write the function of one row: a loop over vectors of threads, once with and once without a mask."""
    word = ir.IntType(64)
    kind = ir.FunctionType(ir.VoidType(), [_POINTER, word.as_pointer(), _POINTER, word])
    function = ir.Function(module, kind, name)
    registers, row, mask, threads = function.args
    build = ir.IRBuilder(function.append_basic_block("entry"))
    masked, plain, end = (function.append_basic_block(label) for label in ("masked", "plain", "end"))
    # 1. where the registers of the results and the operands begin
    bases = []
    for i in range(len(results) + len(operands)):
        offset = build.load(build.gep(row, [word(FIRST_OPERAND + i)]))
        bases.append(build.gep(registers, [offset]))
    zero = ir.Constant(_POINTER, None)
    build.cbranch(build.icmp_unsigned("==", mask, zero), plain, masked)
    for block, uses_mask in ((plain, False), (masked, True)):
        build.position_at_end(block)
        body = function.append_basic_block(block.name + "_body")
        build.branch(body)
        build.position_at_end(body)
        at = build.phi(word)
        at.add_incoming(word(0), block)
        # 2. read the operands of 16 threads, and compute
        Vector.builder = build
        vectors = [_read(build, base, k, at) for base, k in zip(bases[len(results) :], operands, strict=True)]
        outcome = semantics(*vectors)
        outcomes = outcome if isinstance(outcome, tuple) else (outcome,)
        # 3. write the results of the threads that run
        running = Vector("pred", build.trunc(_load(build, build.gep(mask, [at]), ir.IntType(8)), _vector("pred"))) if (
            uses_mask) else None  # fmt: skip
        for base, k, result in zip(bases, results, outcomes, strict=False):
            assert result.kind[0] in "bus" or k == "pred" or result.kind == k, (name, result.kind, k)
            if running is not None:
                result = where(running, result, _read(build, base, k, at).view(result.kind))
            _store(build, base, k, at, result)
        following = build.add(at, word(LANES))
        at.add_incoming(following, build.block)
        build.cbranch(build.icmp_signed("<", following, threads), body, end)
    build.position_at_end(end)
    build.ret_void()


def _load(build: ir.IRBuilder, pointer: Any, scalar: ir.Type) -> Any:
    loaded = build.load(build.bitcast(pointer, ir.VectorType(scalar, LANES).as_pointer()))
    loaded.align = 1
    return loaded


def _read(build: ir.IRBuilder, base: Any, kind: str, at: Any) -> Vector:
    """Read a register of 16 threads; a predicate is a byte of 0 or 1."""
    if kind == "pred":
        return Vector(kind, build.trunc(_load(build, build.gep(base, [at]), ir.IntType(8)), _vector("pred")))
    place = build.gep(base, [build.mul(at, at.type(bits(kind) // 8))])
    return Vector(kind, _load(build, place, _scalar(kind)))


def _store(build: ir.IRBuilder, base: Any, kind: str, at: Any, result: Vector) -> None:
    """Write a register of 16 threads."""
    value = result.value
    if kind == "pred":
        value = build.zext(value, ir.VectorType(ir.IntType(8), LANES))
    place = build.gep(base, [build.mul(at, at.type(max(bits(kind) // 8, 1)))])
    build.store(value, build.bitcast(place, value.type.as_pointer())).align = 1
