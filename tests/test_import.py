# SPDX-License-Identifier: Apache-2.0
"""What `import fmtsim` loads, and which module may import which."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import fmtsim

ROOT = Path(fmtsim.__file__).parent

# Imports point from right to left. Rooms of one rank may import each other. ``lab`` is the upper storey: nothing below
# imports it, not even inside a function.
LAYERS = (
    {"support"},
    {"formats"},
    {"rounding"},
    {"spec"},
    {"casts"},
    {"scaling"},
    {"gemm"},
    {"machine"},
    {"recipes"},
    {"nn", "optim", "distributed", "ptq"},
    {"lab.search"},
    {"lab.memory"},
    {"lab.analysis"},
    {"testing"},
    {"lab.training", "lab.explain", "lab.verify", "integrations"},
    {"lab.cli"},
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
ENGINES = {"torch_engine", "cpu", "cuda"}
ENGINE_MAY_IMPORT = {"support", "formats", "rounding", "spec", "scaling"}
# Folders inside an engine that a room above may import, inside functions or not: how kernels are compiled and run.
ARROWS = [("machine", "cpu.runtime")]
STOREYS = ("lab",)  # folders whose rooms are one level further down
parse = cache(ast.parse)  # which takes most of the time of several tests
HEAVY = ("numba", "llvmlite", "cuda", "matplotlib", "rich", "safetensors")


def parts_imported(source: str, module: str, *, everywhere: bool = False) -> set[str]:
    """Return the rooms of fmtsim that a module imports while it is being imported itself.

    With ``everywhere`` the imports inside functions count too. Imports for type checkers alone never count.
    """
    package = module.split(".")[:-1]
    found: set[str] = set()
    for node in _statements(parse(source), everywhere):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            full = ".".join(part for part in (base, node.module) if part)
            whole = full in ("fmtsim", *(f"fmtsim.{name}" for name in STOREYS))
            names = [f"{full}.{alias.name}" for alias in node.names] if whole else [full]
        found |= {room_of(name) for name in names if name.startswith("fmtsim.") and not is_allowed(module, name)}
    return found


def is_allowed(module: str, name: str) -> bool:
    """Return True if an arrow leads from a module's room to the folder in which a name lies."""
    return any(room_of(module) == room and f"{name}.".startswith(f"fmtsim.{folder}.") for room, folder in ARROWS)


def room_of(module: str) -> str:
    """Return the room of a module: its folder's name, of two levels in ``lab``."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 1 + (parts[0] in STOREYS)])


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
    part = room_of(module)
    imported = parts_imported(source, module) - {part}
    if part in ENGINES:
        imported = parts_imported(source, module, everywhere=True)
        wrong = imported - {part} - ENGINE_MAY_IMPORT - {"torch_engine"}  # which does what kernels leave
        return [f"{module}: an engine imports fmtsim.{name}" for name in sorted(wrong)]
    lines = [f"{module}: imports the engine fmtsim.{name} at module level" for name in sorted(imported & ENGINES)]
    if not part.startswith(("lab", "integrations", "testing")):
        climbs = sorted(n for n in parts_imported(source, module, everywhere=True) if n.startswith("lab"))
        lines += [f"{module}: the library imports fmtsim.{name} of the laboratory" for name in climbs]
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
        if parts not in {("__init__",), ("__main__",), ("lab", "__init__")}:
            found.append((".".join(("fmtsim", *parts)), path))
    return found


def test_imports_point_one_way():
    assert [line for module, path in modules() for line in violations(path.read_text("utf-8"), module)] == []


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        (
            "fmtsim.formats.element",
            "import fmtsim.casts.ops",
            "fmtsim.formats imports fmtsim.casts, which lies above it",
        ),
        (
            "fmtsim.formats.element",
            "from fmtsim import gemm",
            "fmtsim.formats imports fmtsim.gemm, which lies above it",
        ),
        ("fmtsim.spec.plan", "from ..nn.convert import f", "fmtsim.spec imports fmtsim.nn, which lies above it"),
        (
            "fmtsim.quantize",
            "from fmtsim.cpu import casts",
            "imports the engine fmtsim.cpu at module level",
        ),
        (
            "fmtsim.machine.norm",
            "from fmtsim.cpu.gemm.engine import gemm",
            "imports the engine fmtsim.cpu at module level",
        ),
        ("fmtsim.cpu.casts", "def f():\n    import fmtsim.gemm", "an engine imports fmtsim.gemm"),
        ("fmtsim.newcomer", "import fmtsim.casts.ops", "fmtsim.newcomer has no layer in this test"),
        (
            "fmtsim.nn.convert",
            "def f():\n    from fmtsim.lab import analysis",
            "imports fmtsim.lab.analysis of the laboratory",
        ),
    ],
)
def test_a_planted_import_is_seen(module, source, message):
    assert any(message in line for line in violations(source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fmtsim.casts.quantize", "def f():\n    from fmtsim.cpu import casts"),
        ("fmtsim.casts.ops", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fmtsim.cpu"),
        ("fmtsim.lab.cli.main", "import fmtsim.casts.ops\nfrom . import cast"),
        ("fmtsim.cpu.gemm.engine", "from fmtsim.spec.plan import GemmPlan"),
        ("fmtsim.machine.norm", "from fmtsim.cpu.runtime.pool import run"),
    ],
)
def test_allowed_imports_pass(module, source):
    assert violations(source, module) == []


def of_the_checkout(source: str) -> set[str]:
    """Return the folders that the wheel does not have and a source imports from."""
    found = set()
    for node in _statements(parse(source), everywhere=True):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        found |= {name.split(".")[0] for name in names}
    return found & {"studies", "benchmarks", "tools", "tests"}


def test_the_wheel_imports_nothing_of_the_checkout():
    assert [module for module, path in modules() if of_the_checkout(path.read_text("utf-8"))] == []
    assert of_the_checkout("def f():\n    from tools.calibrate import learn\nimport studies.claims") == {
        "tools",
        "studies",
    }


def imported_modules(path: Path, module: str, known: set[str]) -> set[str]:
    """Return the modules of fmtsim that a file imports anywhere, inside functions too, but not for type checkers."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in _statements(parse(path.read_text(encoding="utf-8")), everywhere=True):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package * (node.level == 1)
            full = ".".join(part for part in (base, node.module) if part)
            names = [f"{full}.{alias.name}" if f"{full}.{alias.name}" in known else full for alias in node.names]
        found |= {name for name in names if name in known}
    return found - {module}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set(), [start]
        while todo:
            for name in graph[todo.pop()] - seen:
                seen.add(name)
                todo.append(name)
        reached[start] = seen
    groups = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in graph if a in reached[a]}
    return [list(group) for group in sorted(groups)]


def test_no_modules_import_each_other():
    files = {module.removesuffix(".__init__"): path for module, path in modules()}
    graph = {module: imported_modules(path, module, set(files)) for module, path in files.items()}
    assert sum(map(len, graph.values())) > 1000  # the graph is there
    assert circles(graph) == []


def test_a_planted_circle_is_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def engine_modules_named(source: str, inside: set[str]) -> list[str]:
    """Return the modules of engines that a source imports anywhere, or has as a string that is not a docstring."""
    tree, below = parse(source), tuple(f"{name}." for name in inside)
    prose = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    names = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in prose]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    texts = [name for name in names if isinstance(name, str)]
    return [t for t in texts if f"{t}.".startswith(below) or f"fmtsim.{t}.".startswith(below)]


def engine_modules() -> set[str]:
    names = {module.removesuffix(".__init__") for module, _ in modules()}
    return {name for name in names if room_of(name) in ENGINES and name.count(".") > 1}


def test_nothing_inside_an_engine_is_named_outside():
    inside = engine_modules()
    found = {module: engine_modules_named(path.read_text(encoding="utf-8"), inside) for module, path in modules()}
    outside = {module: [name for name in names if not is_allowed(module, name)] for module, names in found.items()}
    assert not any(names for module, names in outside.items() if room_of(module) not in ENGINES), outside
    assert sum(map(len, found.values())) > 100  # engines do


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ('load_engine("cuda.cast")', True),
        ('importlib.import_module("fmtsim.cpu.optim.optimizer_steps")', True),
        ("def f():\n    from fmtsim.cuda import runtime", True),
        ('load_engine("cuda")', False),
        ('"""The words of fmtsim.cuda.runtime."""', False),
        ('warn("run fmtsim.cuda.warmup() first")', False),
    ],
)
def test_a_planted_name_of_an_engine_module_is_seen(source, seen):
    assert bool(engine_modules_named(source, engine_modules())) == seen


def imported(code: str) -> set[str]:
    """Return the top-level modules that a program imports, strictly and in silence, beyond those of its first line."""
    first, _, rest = code.partition("\n")
    whole = (
        f"import sys, warnings\n{first}\nwarnings.simplefilter('error')\nbefore = set(sys.modules)\n{rest}\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    result = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    return set(line.split())


def test_import_is_light_silent_and_strict():
    """Importing the package loads neither torch nor another library; names are imported when they are asked for."""
    found = imported("\nimport fmtsim")
    assert "fmtsim" in found and not found & {"torch", "numpy", "ml_dtypes", *HEAVY}


def test_a_scaling_alone_reads_names_of_formats():
    imported("from fmtsim.formats.scaling import Scaling\nScaling(scale='uint6')")


def test_public_names_are_light_silent_and_strict():
    """All public names but those of the CPU engine, and results that can be plotted, load none of the libraries.

    Nor does torch import its tracer, and sympy with it: at the first compilation that takes more than a second.
    """
    # torch itself may warn while it is imported, so it comes first.
    found = imported(
        "import torch\nimport fmtsim, fmtsim.lab.analysis.compare, fmtsim.lab.analysis.losses\n"
        "[getattr(fmtsim, n) for n in fmtsim.__all__ if not n.endswith('num_threads')]\n"
        "from fmtsim import *\nassert 'torch._dynamo' not in sys.modules"
    )
    assert "fmtsim" in found and not found & {*HEAVY, "sympy"}


FUNCTIONS = """
import os, sys, torch
for before in ("fmtsim", "fmtsim.lab.explain.product, fmtsim.casts.quantize, fmtsim.ptq.quantize_model"):
    if os.fork() == 0:
        exec(f"import {before}")
        import fmtsim
        names = [fmtsim.explain, fmtsim.ptq, fmtsim.quantize, fmtsim.search]
        from fmtsim import explain, ptq, quantize, search
        assert names == [explain, ptq, quantize, search]
        print(*(type(one).__name__ for one in [*names, fmtsim.optim, fmtsim.cuda, fmtsim.formats]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0 and "fmtsim" not in sys.modules
"""


def test_a_function_is_there_whether_or_not_the_module_of_its_name_has_loaded():
    result = subprocess.run([sys.executable, "-c", FUNCTIONS], capture_output=True, text=True, check=True)
    assert result.stdout.split() == (["function"] * 4 + ["module"] * 3) * 2


def test_the_front_door_lists_what_it_has():
    assert len(set(fmtsim.__all__)) == len(fmtsim.__all__) > 60
    missing = [name for name in fmtsim.__all__ if not hasattr(fmtsim, name)]
    assert missing == [] and fmtsim.__all__ == [name for name in dir(fmtsim) if not name.startswith("__")]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'fmtsim' has no attribute 'quantise'") as error:
        fmtsim.quantise  # noqa: B018
    assert (error.value.name, error.value.obj) == ("quantise", fmtsim)


def test_all_operators_come_with_two_names():
    """What the docstring says of programs on disk, which name operators: no module registers more."""
    defining = [m for m, path in modules() if "define_operator(" in path.read_text("utf-8")]
    code = (
        "import importlib, torch\n"
        "def names(): return {n for n in torch._C._dispatch_get_all_op_names() if n.startswith('fmtsim::')}\n"
        "from fmtsim import mma, nn\nbefore = names()\n"
        f"for module in {defining}: importlib.import_module(module)\n"
        "print(len(before), *(names() - before))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, *missing = result.stdout.split()
    assert int(count) > 25 and len(defining) > 8 and missing == []


LICENCE = "SPDX-License-Identifier: Apache-2.0"
SOURCES = {".py": "#", ".pyi": "#", ".cu": "//", ".cuh": "//", ".h": "//", ".cpp": "//", ".js": "//", ".css": "/*"}


def unlicensed(folders):
    """Return the source files whose first line does not name the licence."""
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in SOURCES]
    return [path for path in files if not path.read_text("utf-8").startswith(f"{SOURCES[path.suffix]} {LICENCE}")]


def test_no_file_of_the_package_is_longer_than_600_lines():
    lines = {path: len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert len(lines) > 300 and not [str(path) for path, length in lines.items() if length > 600]


def test_every_source_file_names_its_licence(tmp_path):
    assert unlicensed(ROOT.parent / folder for folder in ("fmtsim", "tests", "benchmarks", "notebooks", "docs")) == []
    (tmp_path / "a.cu").write_text("// A kernel.\n")
    (tmp_path / "b.py").write_text(f'"""A module."""\n# {LICENCE}\n')
    assert sorted(path.name for path in unlicensed([tmp_path])) == ["a.cu", "b.py"]
