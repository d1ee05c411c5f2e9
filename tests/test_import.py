"""What `import fmtsim` loads, and which module may import which."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fmtsim

ROOT = Path(fmtsim.__file__).parent

# Imports point from right to left. Modules of one rank may import each other.
LAYERS = (
    {"errors", "folder", "progress", "table", "plotting"},
    {"formats"},
    {"rounding"},
    {"spec"},
    {"dispatch"},
    {"ops"},
    {"quantize", "encoded", "autograd", "arguments"},
    {"scaling"},
    {"gemm"},
    {"recipes"},
    {"nn", "optim", "distributed", "ptq", "search"},
    {"analysis"},
    {"training", "explain", "verify", "bench", "calibration", "reproduce"},
    {"cli"},
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
ENGINES = {"torch_engine", "cpu", "cuda"}
ENGINE_MAY_IMPORT = {"errors", "folder", "formats", "rounding", "spec", "scaling"}
HEAVY = ("numba", "llvmlite", "cuda", "matplotlib", "rich", "safetensors")


def parts_imported(source: str, module: str, *, everywhere: bool = False) -> set[str]:
    """Return the first-level parts of fmtsim that a module imports while it is being imported itself.

    With ``everywhere`` the imports inside functions count too. Imports for type checkers alone never count.
    """
    package = module.split(".")[:-1]
    found: set[str] = set()
    for node in _statements(ast.parse(source), everywhere):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            full = ".".join(part for part in (base, node.module) if part)
            names = [f"{full}.{alias.name}" for alias in node.names] if full == "fmtsim" else [full]
        found |= {name.split(".")[1] for name in names if name.startswith("fmtsim.")}
    return found


def _statements(tree: ast.AST, everywhere: bool):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _statements(node, everywhere)


def violations(source: str, module: str) -> list[str]:
    """Return one line for every import of a module that points the wrong way."""
    part = module.split(".")[1]
    imported = parts_imported(source, module) - {part}
    if part in ENGINES:
        imported = parts_imported(source, module, everywhere=True)
        wrong = imported - {part} - ENGINE_MAY_IMPORT
        return [f"{module}: an engine imports fmtsim.{name}" for name in sorted(wrong)]
    lines = [f"{module}: imports the engine fmtsim.{name} at module level" for name in sorted(imported & ENGINES)]
    for name in sorted(imported - ENGINES):
        if part not in RANK or name not in RANK:
            lines.append(f"{module}: fmtsim.{part if part not in RANK else name} has no layer in this test")
        elif RANK[name] > RANK[part]:
            lines.append(f"{module}: fmtsim.{part} imports fmtsim.{name}, which lies above it")
    return lines


def modules() -> list[tuple[str, Path]]:
    """Return the dotted name and path of every module below the package's front door."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts not in {("__init__",), ("__main__",)}:
            found.append((".".join(("fmtsim", *parts)), path))
    return found


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_point_one_way(module, path):
    assert violations(path.read_text(encoding="utf-8"), module) == []


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("fmtsim.formats.spec", "import fmtsim.ops", "fmtsim.formats imports fmtsim.ops, which lies above it"),
        ("fmtsim.formats.spec", "from fmtsim import gemm", "fmtsim.formats imports fmtsim.gemm, which lies above it"),
        ("fmtsim.spec.plan", "from ..nn.convert import f", "fmtsim.spec imports fmtsim.nn, which lies above it"),
        ("fmtsim.quantize", "from fmtsim.cpu import casts", "imports the engine fmtsim.cpu at module level"),
        ("fmtsim.cpu.casts", "def f():\n    import fmtsim.gemm", "an engine imports fmtsim.gemm"),
        ("fmtsim.newcomer", "import fmtsim.ops", "fmtsim.newcomer has no layer in this test"),
    ],
)
def test_a_planted_import_is_seen(module, source, message):
    assert any(message in line for line in violations(source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fmtsim.quantize", "def f():\n    from fmtsim.cpu import casts"),
        ("fmtsim.ops", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fmtsim.cpu"),
        ("fmtsim.cli.main", "import fmtsim.ops\nfrom . import cast"),
        ("fmtsim.cpu.gemm.engine", "from fmtsim.spec.plan import GemmPlan"),
    ],
)
def test_allowed_imports_pass(module, source):
    assert violations(source, module) == []


def test_import_is_light_silent_and_strict():
    """Importing the package loads no compiler and no plotting or terminal library, prints nothing, warns of nothing."""
    # torch itself may warn while it is imported, so it comes first.
    code = (
        "import sys, torch, warnings; warnings.simplefilter('error'); before = set(sys.modules); import fmtsim; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    assert "fmtsim" in line.split() and not set(line.split()) & set(HEAVY)


def test_import_leaves_torch_compile_alone():
    """torch imports its tracer, and sympy with it, when somebody compiles: more than a second."""
    code = "import sys, fmtsim; print(sorted({'torch._dynamo', 'sympy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_the_front_door_lists_what_it_has():
    assert len(set(fmtsim.__all__)) == len(fmtsim.__all__)
    missing = [name for name in fmtsim.__all__ if not hasattr(fmtsim, name)]
    assert missing == []
