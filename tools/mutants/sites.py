# SPDX-License-Identifier: Apache-2.0
"""Where a source file can be changed by one small error, and the changed text.

Python goes by its syntax tree, CUDA C++ by its tokens. What no test is meant to see is left out: annotations, messages
of errors, assertions, decorators, sizes of caches, looks of plots, and in kernels bounds of launches and sizes of
arrays.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_OPERATORS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.Pow: "*",
    ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&", ast.BitXor: "|",
}  # fmt: skip
_NAMES = {
    "min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor", "amax": "amin",
    "maximum": "minimum", "minimum": "maximum", "fminf": "fmaxf", "fmaxf": "fminf", "fmin": "fmax", "fmax": "fmin",
}  # fmt: skip
_UNSEEN_KEYWORDS = (
    "maxsize", "stacklevel", "indent", "strict", "fontsize", "linewidth", "markersize", "dpi", "zorder",
)  # fmt: skip
_UNSEEN_NAMES = re.compile(r"_MOST|_CACHE|^__all__$")
_TOKENS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+", "/": "*",
    "%": "/", "&&": "||", "||": "&&", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "|",
}  # fmt: skip
_TOKEN = re.compile(r"(?<= )(<=|>=|==|!=|&&|\|\||<<|>>|[<>+\-*/%&|^])(?= )|\b(\d+)(?=u?l*\b(?!\.))|\b(fminf?|fmaxf?)\(")
_HIDDEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*|\bstatic_assert\([^;]*;'
    r"|__launch_bounds__\([^)]*\)",  # the assembler of the GPU alone reads them
    re.S | re.M,
)
# Sizes of arrays: of a longer one nothing could be seen, of a shorter one what C++ does not define.
_SIZES = re.compile(r"(?<![\w.>])(?!return |else |case )\w+[*&]{0,2} (?:\(&\w+\)|\w+)((?:\[[^\]\n;]*\])+)")


@dataclass(frozen=True)
class Mutant:
    """One changed place of a file: ``old`` at bytes ``start`` to ``end`` becomes ``new``."""

    file: str  # below the repository's root
    function: str  # Class.method; empty at the file's top level
    line: int  # from 1
    start: int
    end: int
    old: str
    new: str

    @property
    def area(self) -> str:
        """Return the room of the package: ``gemm``, ``cpu``, ``analysis``; files beside the rooms are ``top``."""
        return self.folder.rpartition("/")[2] or "top"

    @property
    def folder(self) -> str:
        """Return the room's folder in the package, ``gemm`` or ``cpu``; empty for files beside the rooms."""
        parts = self.file.split("/")[1:-1]
        return "/".join(parts[: 1 + (parts[:1] == ["lab"])])

    @property
    def key(self) -> str:
        """Return what names the mutant while its line stands, wherever the line moves."""
        text = (ROOT / self.file).read_bytes()
        begin = text.rfind(b"\n", 0, self.start) + 1
        line = text[begin : text.find(b"\n", self.start)].decode()
        return f"{self.file}:{self.function}: {line.strip()} [{self.start - begin}: {self.old} -> {self.new}]"

    def applied(self, root: Path = ROOT) -> bytes:
        """Return the text of the file below ``root`` with the error in it."""
        text = (root / self.file).read_bytes()
        assert text[self.start : self.end].decode() == self.old
        return text[: self.start] + self.new.encode() + text[self.end :]


@cache
def mutants_of(file: str) -> list[Mutant]:
    text = (ROOT / file).read_bytes()
    found = _Python(file, text).found if file.endswith(".py") else list(_kernel_mutants(file, text.decode()))
    return sorted(set(found), key=lambda mutant: (mutant.start, mutant.end, mutant.new))


class _Python(ast.NodeVisitor):
    def __init__(self, file: str, text: bytes) -> None:
        self.found: list[Mutant] = []
        self._file, self._text, self._within = file, text, []  # type: ignore[var-annotated]
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.visit(ast.parse(text))

    def _span(self, node: Any) -> tuple[int, int]:
        begin, end = self._lines[node.lineno - 1], self._lines[node.end_lineno - 1]
        return begin + node.col_offset, end + node.end_col_offset

    def _add(self, start: int, end: int, new: str) -> None:
        old = self._text[start:end].decode()
        line = self._text.count(b"\n", 0, start) + 1
        if old != new:
            self.found.append(Mutant(self._file, ".".join(self._within), line, start, end, old, new))

    def _replace_between(self, left: ast.AST, right: ast.AST, new: str) -> None:
        """Replace the operator between two operands, parentheses aside."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self._text[start:end].decode()
        match = re.search(r"[^\s()#\\]+(?: not| in)?", gap)
        if match and "#" not in gap:
            self._add(start + match.start(), start + match.end(), new)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self._within.append(node.name)
        if isinstance(node, ast.FunctionDef):
            for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                self.visit(default)
        for statement in node.body[ast.get_docstring(node) is not None :]:
            self.visit(statement)
        self._within.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if not any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
            self.visit_FunctionDef(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        return

    visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = visit_Raise  # type: ignore[assignment]

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(target, ast.Name) and _UNSEEN_NAMES.search(target.id) for target in node.targets):
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        unseen = isinstance(node.target, ast.Name) and _UNSEEN_NAMES.search(node.target.id)
        if node.value is not None and not unseen:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        for first, op, second in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self._replace_between(first, second, _COMPARISONS[type(op)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not _is_text(node.left) and not _is_text(node.right) and not _is_type(node):
            new = _OPERATORS.get(type(node.op))
            if new is not None:
                self._replace_between(node.left, node.right, new)
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        new = _OPERATORS.get(type(node.op))
        if new is not None and not _is_text(node.value):
            self._replace_between(node.target, node.value, f"{new}=")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for first, second in zip(node.values, node.values[1:], strict=False):
            self._replace_between(first, second, "or" if isinstance(node.op, ast.And) else "and")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            start = self._span(node)[0]
            self._add(start, start + (4 if isinstance(node.op, ast.Not) else 1), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value, (start, end) = node.value, self._span(node)
        if isinstance(value, bool):
            self._add(start, end, str(not value))
        elif isinstance(value, int):
            self._add(start, end, str(value + 1))
            if value > 1:
                self._add(start, end, str(value - 1))
        elif isinstance(value, float):
            self._add(start, end, repr(2 * value if value else 1.0))

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.visit_IfExp(node)

    def visit_IfExp(self, node: ast.IfExp | ast.If) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare | ast.UnaryOp):  # those have mutants of their own
            start, end = self._span(test)
            self._add(start, end, f"not ({self._text[start:end].decode()})")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value in (None, False)):
                self._add(*self._span(node), "return None")
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add(*self._span(node), "pass")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break | ast.Continue) -> None:
        self._add(*self._span(node), "continue" if isinstance(node, ast.Break) else "break")

    visit_Continue = visit_Break

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
        end = self._span(node.func)[1]
        if name in _NAMES:
            self._add(end - len(name), end, _NAMES[name])
        self.visit(node.func)
        for argument in node.args[: self._seen_arguments(name, node)]:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in _UNSEEN_KEYWORDS:
                self.visit(keyword.value)

    def _seen_arguments(self, name: str | None, call: ast.Call) -> int | None:
        """Return how many arguments may be changed: pool.run's last two, but for multiples above 1, pick threads."""
        if name != "run" or not self._file.startswith(("fmtsim/machine/", "fmtsim/cpu/")):
            return None
        return 2 if [ast.unparse(argument) for argument in call.args[2:3]] == ["1"] else 3


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_type(node: ast.expr) -> bool:
    """Return True if an expression names types: ``int | None``, ``Sequence[int] | Tensor``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _is_type(node.left) or _is_type(node.right)
    name = node.value if isinstance(node, ast.Subscript) else node
    text = getattr(name, "attr", None) or getattr(name, "id", None) or ""
    named = text in ("int", "float", "str", "bool", "bytes", "dict", "list", "tuple")
    return named or (text.lstrip("_")[:1].isupper() and not text.isupper())


def _kernel_mutants(file: str, text: str) -> Iterator[Mutant]:
    shown = _HIDDEN.sub(lambda hidden: re.sub(r"[^\n]", " ", hidden[0]), text)
    shown = _SIZES.sub(lambda array: array[0][: -len(array[1])] + " " * len(array[1]), shown)
    assert len(shown) == len(text) and text.isascii()
    function = ""
    heads = {m.start(): m[1] for m in re.finditer(r"^\S[^\n;]*?\b(\w+)\(", shown, re.M)}
    for match in _TOKEN.finditer(shown):
        function = next((heads[at] for at in reversed(heads) if at <= match.start()), "")
        line = text.count("\n", 0, match.start()) + 1
        if match[1]:
            news = [_TOKENS[match[1]]]
        elif match[2]:
            value = int(match[2])
            news = [str(value + 1)] + ([str(value - 1)] if value > 1 else [])
        else:
            news = [_NAMES[match[3]]]
        start, end = next(match.span(group) for group in (1, 2, 3) if match[group])
        for new in news:
            yield Mutant(file, function, line, start, end, text[start:end], new)
