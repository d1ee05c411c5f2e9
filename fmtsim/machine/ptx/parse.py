# SPDX-License-Identifier: Apache-2.0
"""PTX text as records: a module's entries, functions and variables, and the instructions of each body.

Source: PTX ISA 8.7, sections 4 (syntax), 5 (state spaces) and 6 (operands). Nothing is executed or checked here but the
syntax; ``instructions`` says what an instruction means, and refuses what it does not know.
"""

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fmtsim.support.errors import ArgumentError, shown


@dataclass(frozen=True, slots=True)
class Register:
    """A virtual register, a special register (``%tid.x``) or a predicate; ``!%p`` is negated."""

    name: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant: an integer, or the bits of a float of 32 or 64 bits."""

    value: int
    kind: str = "int"  # "int", "f32" or "f64"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name that is no register: a label, a variable, a parameter or a function."""

    name: str


@dataclass(frozen=True, slots=True)
class Group:
    """Operands in braces, those of a ``%p|%q`` destination, or the arguments of a call."""

    items: tuple["Operand", ...]


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]``, and the coordinates of ``[map, {x, y}]``."""

    base: "Register | Symbol | Immediate"
    offset: int = 0
    coordinates: tuple["Operand", ...] = ()


Operand = Register | Immediate | Symbol | Group | Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction: ``@!%p1 add.rn.f32 %r1, %r2, %r3;``."""

    opcode: tuple[str, ...]  # ("add", "rn", "f32")
    operands: tuple[Operand, ...]
    predicate: Register | None = None
    line: int  # of the PTX text, from 1
    source: str = ""  # "kernels.py:44", the place that Triton or NVRTC named last
    callers: tuple[str, ...] = ()  # the places where its function was inlined, outermost last
    text: str  # as written

    def __str__(self) -> str:
        caller = f", called from {self.callers[-1]}" if self.callers else ""
        place = f" ({self.source}{caller})" if self.source else ""
        return f"{self.text} in line {self.line} of the PTX{place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable or a parameter: a name in a state space."""

    name: str
    space: str  # "param", "global", "const", "shared" or "local"
    type: str  # of an element: "b8", "u64", "f32"
    count: int | None  # elements; None of an array whose size the launch gives
    align: int = 1
    values: tuple["int | str", ...] = ()  # codes of the first elements; a name stands for the address of a variable
    is_array: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, 0 where the launch gives its size."""
        return (self.count or 0) * width(self.type) // 8


@dataclass(slots=True, kw_only=True)
class Function:
    """An entry (a kernel) or a device function."""

    name: str
    is_entry: bool
    parameters: tuple[Variable, ...]
    results: tuple[Variable, ...] = ()
    required_threads: tuple[int, ...] | None = None  # .reqntid
    variables: list[Variable] = field(default_factory=list)  # declared in its body
    registers: dict[str, str] = field(default_factory=dict)  # types by name
    labels: dict[str, int] = field(default_factory=dict)  # numbers of instructions
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)  # .branchtargets
    body: list[Instruction] = field(default_factory=list)
    is_declared: bool = False  # without a body


@dataclass(slots=True, kw_only=True)
class Module:
    """All of one PTX text."""

    version: str
    target: str  # "sm_90a"
    functions: dict[str, Function]
    variables: dict[str, Variable]  # of the module
    programs: dict[Any, Any] = field(default_factory=dict, repr=False)  # what ``execute`` has made of entries

    @property
    def entries(self) -> list[str]:
        """Names of the kernels."""
        return [name for name, function in self.functions.items() if function.is_entry]


def register_names(operands: tuple[Operand, ...]) -> list[str]:
    """Return the names of all registers among operands."""
    names = []
    for operand in operands:
        if isinstance(operand, Register):
            names += [operand.name] if operand.name != "_" else []
        elif isinstance(operand, Group):
            names += register_names(operand.items)
        elif isinstance(operand, Address):
            names += register_names((operand.base, *operand.coordinates))
    return names


def width(kind: str) -> int:
    """Return the bits of a type: 8 of ``b8``, 1 of ``pred``."""
    return 1 if kind == "pred" else int(re.sub(r"\D", "", kind.partition("x")[0])) * int(kind.partition("x")[2] or 1)


_TOKEN = re.compile(r"""
    (?P<comment>//[^\n]*|/\*.*?\*/) | (?P<space>\s+) | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<float>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16})
  | (?P<decimal>\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
  | (?P<number>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?)
  | (?P<word>[.%$_a-zA-Z][\w$.%]*(?:::[\w$.]+)*)
  | (?P<mark>[-+{}()\[\]<>,;:=|!@*/&~])
""", re.VERBOSE | re.DOTALL)  # fmt: skip
_CALLERS = re.compile(r"@\[ ([^\s:]+:\d+)")  # of "// standard.py:263:15 @[ kernels.py:15:19 ]"
_MODULE_SPACES = {".global", ".const", ".shared", ".extern", ".visible", ".weak", ".common"}


_Named = Callable[[str], Register | Symbol]  # the register or symbol of a name where it stands


@dataclass(slots=True)
class _Token:
    text: str
    kind: str
    line: int


class _Reader:
    """Tokens of a text, read from front to back."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.tokens: list[_Token] = []
        at, line = 0, 1
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ArgumentError(f"line {line} of the PTX cannot be read at {shown(text[at : at + 20])}")
            kind, token = str(match.lastgroup), match.group()
            if kind not in ("comment", "space"):
                self.tokens.append(_Token(token, kind, line))
            line += token.count("\n")
            at = match.end()
        self.at = 0

    def __bool__(self) -> bool:
        return self.at < len(self.tokens)

    @property
    def next(self) -> str:
        """The token that comes next, empty at the end."""
        return self.tokens[self.at].text if self else ""

    @property
    def line(self) -> int:
        """The line of the token that comes next."""
        return self.tokens[min(self.at, len(self.tokens) - 1)].line

    def take(self, expected: str | None = None) -> str:
        """Return the next token and step over it.

        Raises:
            ArgumentError: It is another than ``expected``, or the text has ended.
        """
        token = self.next
        if not token or (expected is not None and token != expected):
            wanted = f"; expected {expected}" if expected else ""
            raise ArgumentError(f"line {self.line} of the PTX has {shown(token or 'its end')}{wanted}")
        self.at += 1
        return token

    def skip(self, token: str) -> bool:
        """Step over a token if it comes next."""
        found = self.next == token
        self.at += found
        return found

    def skip_braces(self) -> None:
        """Step over what stands in braces."""
        depth = 0
        while self:
            token = self.take()
            depth += (token == "{") - (token == "}")
            if depth == 0:
                return


def parse(text: str) -> Module:
    """Return the records of a PTX text.

    Raises:
        ArgumentError: A line that is not PTX, with its number.
    """
    reader = _Reader(text)
    module = Module(version="", target="", functions={}, variables={})
    # ".file 1 "/tmp/kernels.py"" stands behind the functions that name it
    files = {
        number: name.rpartition("/")[2] for number, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)
    }
    while reader:
        token = reader.take()
        if token == ".version":
            module.version = reader.take()
        elif token == ".target":
            module.target = reader.take()
            while reader.skip(","):
                reader.take()
        elif token == ".address_size":
            reader.take()
        elif token == ".file":
            reader.take(), reader.take()
            while reader.skip(","):  # time and size
                reader.take()
        elif token == ".section":
            reader.take()
            reader.skip_braces()
        elif token in (".entry", ".func"):
            function = _read_function(reader, token == ".entry", files)
            known = module.functions.get(function.name)
            if known is None or known.is_declared:
                module.functions[function.name] = function
        elif token in (".global", ".const", ".shared"):
            for variable in _read_variables(reader, token[1:]):
                module.variables[variable.name] = variable
        elif token == ".pragma":
            reader.take()
            reader.take(";")
        elif token not in _MODULE_SPACES and token != ";":
            raise ArgumentError(f"line {reader.line} of the PTX begins with {shown(token)}, which no module holds")
    return module


def _read_variables(reader: _Reader, space: str) -> list[Variable]:
    """Read ``.align 16 .b8 name[4] = {1, 2}, other;`` after its state space."""
    align, kind, variables = 1, "", []
    while reader.next.startswith("."):
        token = reader.take()
        if token == ".align":
            align = int(reader.take(), 0)
        elif token == ".attribute":
            while reader.take() != ")":
                pass
        elif token in (".v2", ".v4"):
            raise ArgumentError(f"line {reader.line} of the PTX declares a vector variable ({token})")
        elif token not in (".ptr", ".global", ".shared", ".local", ".const"):
            kind = token[1:]
    while True:
        name, count, is_array = reader.take(), 1, False
        values: tuple[int | str, ...] = ()
        if name.endswith(">"):
            raise ArgumentError(f"line {reader.line} of the PTX declares registers outside of .reg")
        size: int | None = count
        while reader.skip("["):
            is_array = True
            if reader.skip("]"):
                size = None
                continue
            size = (size or 1) * int(reader.take().rstrip("U"), 0)
            reader.take("]")
        if reader.skip("="):
            values = _read_values(reader, kind)
            size = len(values) if size is None else size
        variables.append(
            Variable(name=name, space=space, type=kind, count=size, align=align, values=values, is_array=is_array)
        )
        if not reader.skip(","):
            break
    reader.skip(";")
    return variables


def _read_values(reader: _Reader, kind: str) -> tuple[int | str, ...]:
    """Read the codes of an initialiser, with or without braces."""
    values: list[int | str] = []
    depth = 0
    while True:
        token = reader.take()
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
        elif token == "-":
            values.append(_element(_negative(_number(reader.take(), reader.line)), kind))
        elif token[0].isdigit():
            values.append(_element(_number(token, reader.line), kind))
        elif token not in (",", "(", ")") and not token.startswith("generic"):
            values.append(token)
        if depth == 0 and reader.next in (";", ","):
            return tuple(values)


def _read_function(reader: _Reader, is_entry: bool, files: dict[str, str]) -> Function:
    """Read an entry or a device function after its directive."""
    results = _read_parameters(reader) if reader.next == "(" else ()
    name = reader.take()
    parameters = _read_parameters(reader) if reader.next == "(" else ()
    function = Function(name=name, is_entry=is_entry, parameters=parameters, results=results)
    while reader.next not in ("{", ";"):
        directive = reader.take()
        numbers = []
        while reader.next and (reader.next[0].isdigit() or reader.next == ","):
            token = reader.take()
            if token != ",":
                numbers.append(int(token, 0))
        if directive == ".reqntid":
            function.required_threads = tuple(numbers)
    if reader.skip(";"):
        function.is_declared = True
        return function
    _read_body(reader, function, files)
    return function


def _read_parameters(reader: _Reader) -> tuple[Variable, ...]:
    """Read ``(.param .u64 a, .param .align 8 .b8 b[16])``."""
    reader.take("(")
    variables: list[Variable] = []
    while not reader.skip(")"):
        space = reader.take()
        if space not in (".param", ".reg"):
            raise ArgumentError(f"line {reader.line} of the PTX has a parameter in {space}; expected .param")
        one = _Reader("")
        start = reader.at
        while reader.next not in (",", ")"):
            reader.take()
        one.tokens, one.lines = reader.tokens[start : reader.at], reader.lines
        variables += _read_variables(one, "param")
        reader.skip(",")
    return tuple(variables)


def _read_body(reader: _Reader, function: Function, files: dict[str, str]) -> None:
    """Read the instructions of a function; names that a block in braces declares get its number behind them."""
    reader.take("{")
    scopes: list[dict[str, str]] = [{}]
    callers: tuple[str, ...] = ()
    source, blocks = "", 0

    def renamed(name: str) -> str:
        return next((scope[name] for scope in reversed(scopes) if name in scope), name)

    def named(token: str) -> Register | Symbol:
        name = renamed(token)
        return Register(name) if token[0] == "%" or token == "_" or name in function.registers else Symbol(name)

    while True:
        line, token = reader.line, reader.take()
        if token == "{":
            blocks += 1
            scopes.append({})
        elif token == "}":
            scopes.pop()
            if not scopes:
                return
        elif token == ";":
            continue
        elif token.startswith(".reg"):  # ".reg .b32", and NVRTC's ".reg.b16"
            kind = token[5:] or reader.take()[1:]
            _read_registers(reader, kind, function, scopes, blocks)
        elif token in (".local", ".shared", ".param", ".global", ".const"):
            for variable in _read_variables(reader, token[1:]):
                if len(scopes) > 1:
                    scopes[-1][variable.name] = f"{variable.name}${blocks}"
                function.variables.append(replace(variable, name=renamed(variable.name)))
        elif token == ".loc":
            file, row, _ = reader.take(), reader.take(), reader.take()
            source = f"{files.get(file, file)}:{row}"
            # LLVM's comment has all callers, innermost first; NVRTC writes the nearest behind inlined_at
            callers = tuple(_CALLERS.findall(reader.lines[line - 1]))
            while reader.skip(","):
                words = []
                while reader.next and reader.line == line and reader.next != ",":
                    words.append(reader.take())
                if words[0] == "inlined_at" and not callers:
                    callers = (f"{files.get(words[1], words[1])}:{words[2]}",)
        elif token in (".pragma", ".loc_end"):
            reader.take()
            reader.take(";")
        elif reader.next == ":" and token[0] != "@":
            reader.take(":")
            if reader.skip(".branchtargets"):
                names = [reader.take()]
                while reader.skip(","):
                    names.append(reader.take())
                function.branch_targets[token] = tuple(names)
                reader.take(";")
            elif reader.next in (".callprototype", ".calltargets"):
                raise ArgumentError(f"line {line} of the PTX calls through a pointer ({reader.next})")
            else:
                label = token
                if len(scopes) > 1:
                    scopes[-1][token] = label = f"{token}${blocks}"
                function.labels[label] = len(function.body)
        else:
            function.body.append(_read_instruction(reader, token, line, (source, *callers), named))


def _read_registers(reader: _Reader, kind: str, function: Function, scopes: list[dict[str, str]], block: int) -> None:
    """Read ``%r<573>;`` or ``p, q;`` behind ``.reg .b32``."""
    if kind in ("v2", "v4"):
        raise ArgumentError(f"line {reader.line} of the PTX declares vector registers (.{kind})")
    while True:
        name = reader.take()
        if reader.skip("<"):
            count = int(reader.take(), 0)
            reader.take(">")
            names = [f"{name}{i}" for i in range(count)]
        else:
            names = [name]
        for each in names:
            label = each
            if len(scopes) > 1:
                scopes[-1][each] = label = f"{each}${block}"
            function.registers[label] = kind
        if not reader.skip(","):
            break
    reader.take(";")


def _read_instruction(reader: _Reader, token: str, line: int, places: tuple[str, ...], named: _Named) -> Instruction:
    """Read one instruction, whose first token was taken."""
    predicate = None
    if token == "@":
        negated = reader.skip("!")
        predicate = Register(named(reader.take()).name, negated)
        line, token = reader.line, reader.take()
    opcode, operands = token, []
    while reader.next != ";":
        operands.append(_read_operand(reader, named))
        if not reader.skip(",") and reader.next not in (";", "(") and not isinstance(operands[-1], Group):
            raise ArgumentError(f"line {line} of the PTX has {shown(reader.next)} after an operand of {opcode}")
    reader.take(";")
    text = reader.lines[line - 1].partition("//")[0].strip()
    return Instruction(
        opcode=tuple(opcode.split(".")),
        operands=tuple(operands),
        predicate=predicate,
        line=line,
        source=places[0],
        callers=places[1:],
        text=text,
    )


def _read_operand(reader: _Reader, named: _Named) -> Operand:
    """Read one operand."""
    token = reader.take()
    if token in ("{", "("):
        return Group(tuple(_read_list(reader, "}" if token == "{" else ")", named)))
    if token == "[":
        base: Any = _read_operand(reader, named)
        offset = 0
        coordinates: tuple[Operand, ...] = ()
        if isinstance(base, Address):
            base, offset = base.base, base.offset
        if not isinstance(base, Register | Symbol | Immediate):
            raise ArgumentError(f"line {reader.line} of the PTX has an address of {base}")
        while reader.next in ("+", "-"):
            sign = -1 if reader.take() == "-" else 1
            sign = -sign if reader.skip("-") else sign
            offset += sign * _number(reader.take(), reader.line).value
        if reader.skip(","):
            group = _read_operand(reader, named)
            coordinates = group.items if isinstance(group, Group) else (group,)
        reader.take("]")
        return Address(base, offset, coordinates)
    if token == "!":
        return Register(named(reader.take()).name, True)
    if token == "-":
        return _negative(_number(reader.take(), reader.line))
    if token[0].isdigit():
        return _number(token, reader.line)
    operand: Operand = named(token)
    if reader.next == "|":
        items = [operand]
        while reader.skip("|"):
            items.append(_read_operand(reader, named))
        return Group(tuple(items))
    if reader.next in ("+", "-") and isinstance(operand, Symbol):  # a variable's address and an offset
        sign = -1 if reader.take() == "-" else 1
        return Address(operand, sign * _number(reader.take(), reader.line).value)
    return operand


def _read_list(reader: _Reader, end: str, named: _Named) -> Iterator[Operand]:
    while not reader.skip(end):
        yield _read_operand(reader, named)
        reader.skip(",")


def _negative(number: Immediate) -> Immediate:
    """Return minus a constant; of a float the sign bit changes."""
    return Immediate(
        -number.value if number.kind == "int" else number.value ^ 1 << int(number.kind[1:]) - 1, number.kind
    )


def _element(number: Immediate, kind: str) -> int:
    """Return the code of a constant as an element of an array: a decimal one of float32 is rounded."""
    if number.kind == "f64" and kind == "f32":
        return int.from_bytes(struct.pack("<f", *struct.unpack("<d", number.value.to_bytes(8, "little"))), "little")
    return number.value & ((1 << width(kind)) - 1)


def _number(token: str, line: int) -> Immediate:
    """Return the constant of a token."""
    if token[:2] in ("0f", "0F"):
        return Immediate(int(token[2:], 16), "f32")
    if token[:2] in ("0d", "0D"):
        return Immediate(int(token[2:], 16), "f64")
    if "." in token or ("e" in token.lower() and not token.lower().startswith("0x")):
        return Immediate(int.from_bytes(struct.pack("<d", float(token)), "little"), "f64")
    digits = token.rstrip("U")
    try:
        return Immediate(int(digits, 8 if re.fullmatch(r"0[0-7]+", digits) else 0))
    except ValueError:
        raise ArgumentError(f"line {line} of the PTX has {shown(token)}; expected an integer or 0f...") from None
