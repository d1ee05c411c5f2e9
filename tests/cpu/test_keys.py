# SPDX-License-Identifier: Apache-2.0
"""Keys of the kernel cache: what an edit changes, and what it does not."""

import json
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numba
import numpy as np
import pytest
from numba import typeof

import fmtsim.cpu
from fmtsim.cpu.cast.elements import nearest_saturating
from fmtsim.cpu.gemm.operand_reads import are_neighbours
from fmtsim.cpu.runtime import kernel_cache as keys
from fmtsim.cpu.runtime.jit import device, kernel

# Each edit is planted in a process of its own, forked before kernels are imported.
SCRIPT = """
import importlib.machinery, json, os, sys
import numba, torch, fmtsim

loader, original = importlib.machinery.SourceFileLoader, importlib.machinery.SourceFileLoader.get_data

def keys_with(file, old, new):
    def get_data(self, path):
        if path.endswith(".pyc") and os.path.basename(path).split(".")[0] in file:
            raise OSError("compile the source")
        text = original(self, path)
        if file and path.endswith(file):
            assert old.encode() in text, (file, old)
            text = text.replace(old.encode(), new.encode())
        return text

    loader.get_data = get_data
    sys.modules.pop("fmtsim." + file.removesuffix(".py").replace("/", "."), None)
    loader.get_source = lambda self, name: get_data(self, self.path).decode()
    import fmtsim.cpu.cast.logarithmic, fmtsim.cpu.cast.scaled_blocks
    assert all(getattr(fmtsim.cpu, name) for name in fmtsim.cpu.__all__)  # loads every module
    from fmtsim.cpu.runtime import kernel_cache as keys
    from fmtsim.cpu.runtime.kernel_cache import KernelCache

    keys.inspect.getsource = lambda module: module.__loader__.get_source(module.__name__)
    return {name: keys.reached(value.py_func)
            for module in list(sys.modules.values()) if module.__name__.startswith("fmtsim.cpu.")
            for name, value in vars(module).items() if isinstance(getattr(value, "_cache", None), KernelCache)}

for edit in json.loads(sys.argv[1]):
    sys.stdout.flush()
    if os.fork() == 0:
        print(json.dumps(keys_with(*edit)), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
BLOCKS = {
    "quantize_binary", "quantize_real", "quantize_stochastic", "encode_nearest", "encode_tabled", "encode_stochastic",
}  # fmt: skip
STOCHASTIC = {"stochastic_saturating", "stochastic_special", "stochastic_linear"}
SCALARS = {"nearest_saturating", "nearest_special", "nearest_linear", "nearest_flushed", *STOCHASTIC}
LOOKUPS = {"code_by_table", "round_by_table"}
ROUNDED = {"round_panels", "block_scaled_panels"}
ALL = {*BLOCKS, *SCALARS, *ROUNDED, "convert_rows", "multiply_add", "_ln"}
# file, text, what takes its place, kernels whose keys must change, kernels whose keys must stay
EDITS = [
    ("cpu/cast/elements.py", "(bits & g.sign)", "(bits | g.sign)", {*SCALARS, "directed_flat"}, {*LOOKUPS, *ROUNDED}),
    # an overload, an intrinsic
    ("cpu/gemm/ieee_chains.py", "if acc.dtype == types.float32", "if acc.dtype == types.float64", {"multiply_add"},
     {"convert_rows", "pack_rows"}),
    ("cpu/runtime/simd.py", "align=1", "align=4", {"truncate_panels", "multiply_add", "_floats"}, {"_exp", "_ln"}),
    # not what runs outside kernels, nor moved lines
    ("cpu/gemm/ieee_chains.py", "scratch(\"rows\", height * k", "scratch(\"rows\",\n k * height", set(), ALL),
]  # fmt: skip
MORE_EDITS = [
    # through four functions
    ("cpu/runtime/kernel_numbers.py", "0x9E3779B9", "0x9E3779BB",
     {*STOCHASTIC, "quantize_stochastic", "truncate_panels", *ROUNDED},
     {"quantize_binary", "nearest_special", "pack_rows", "_exp"}),
    # a constant
    ("cpu/cast/scaled_kernels.py", "AMAX = range(5)", "AMAX = range(1, 6)", BLOCKS - {"quantize_real"},
     {*SCALARS, *ROUNDED}),
    # a function that kernels share with the host, and an overload that they reach through others
    ("cpu/gemm/operand_layouts.py", "return block if", "return 2 * block if",
     {"truncate_panels", "pack_rows", "two_stage"},
     {*SCALARS, "convert_rows"}),
    ("cpu/runtime/kernel_numbers.py", "float32(2.0**112)", "float32(2.0**111)",
     {"pack_rows", "round_panels", "convert_rows"},
     {*SCALARS, "two_stage"}),
    ("rounding/elementary.py", "SQRT_HALF = ", "SQRT_HALF = 1 + ", {"_ln"}, {*SCALARS, "_exp", "truncate_panels"}),
    # an option
    ("cpu/runtime/jit.py", "forceinline=True", "forceinline=False", {*SCALARS, *BLOCKS}, set()),
]  # fmt: skip


@pytest.mark.parametrize("edits", [EDITS, pytest.param(MORE_EDITS, marks=pytest.mark.slow)], ids=["some", "more"])
def test_an_edit_changes_the_keys_of_the_kernels_that_reach_it(edits):
    command = [sys.executable, "-c", SCRIPT, json.dumps([("", "", ""), *(edit[:3] for edit in edits)])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    before, *after = map(json.loads, done.stdout.splitlines())
    assert len(before) == len(set(before.values())) >= 35
    for (file, old, _, changed, same), found in zip(edits, after, strict=True):
        differ = {name for name in before if before[name] != found[name]}
        assert changed <= differ, (file, old, changed - differ)
        assert not same & differ, (file, old, same & differ)


def test_helpers_of_kernels_are_not_called_from_python():
    with pytest.raises(KeyError, match="are_neighbours is compiled for kernels, and only they call it"):
        are_neighbours(np.zeros((1, 1), np.float32), np.zeros(1, np.int32))


def test_overloads_are_those_that_keys_find():
    files = [path for path in Path(fmtsim.cpu.__file__).parent.rglob("*.py") if path.name != "jit.py"]
    assert not [
        path for path in files if re.search(r"extending import.*overload|extending\.overload", path.read_text())
    ]


def test_keys_go_by_types_fields_and_machine():
    def key(*arguments, machine=("x86_64",)):
        return keys.key_of(nearest_saturating.py_func, tuple(map(typeof, arguments)), machine)

    narrow, wide = np.zeros(4, np.float32), np.zeros(4, np.float64)
    grids = [namedtuple("Grid", fields)(1, (2,)) for fields in ("low high", "high low")]
    nested = [((grid, 1),) for grid in grids]
    found = [key(narrow, 1), key(wide, 1), key(narrow, 1, machine=("arm",)), *map(key, grids), *map(key, nested)]
    assert len(set(found)) == len(found)
    assert found[0] == key(narrow + 1, 2)


def test_keys_go_by_modules_and_names(monkeypatch):
    """The same code in a module that has moved is another kernel: machine code is loaded by its module's name."""
    before = keys.key_of(triple, (), ())
    for attribute in ("__module__", "__qualname__"):
        with monkeypatch.context() as patch:
            patch.setattr(triple, attribute, "elsewhere")
            assert keys.key_of(triple, (), ()) != before


def test_keys_go_by_the_modules_of_functions_that_a_kernel_calls(monkeypatch):
    """A kept kernel names them: after a move it could not be loaded."""
    called = numba.njit(triple)
    before = keys._described(called)
    monkeypatch.setattr(triple, "__module__", "elsewhere")
    assert keys._described(called) != before


def triple(x):
    return 3 * x


TABLE = np.arange(3)


def test_values_that_are_compiled_in():
    def made(number):
        inner = device(lambda x: x + number)
        return lambda x: inner(x)

    assert keys.reached(made(1)) == keys.reached(made(1)) != keys.reached(made(2))
    assert keys.reached(made(1)) != keys.reached(made(True)) and keys.reached(made(0.0)) != keys.reached(made(-0.0))
    assert keys.reached(made(TABLE)) == keys.reached(made(TABLE.copy())) != keys.reached(made(TABLE + 1))
    assert keys.reached(made(TABLE)) != keys.reached(made(TABLE.astype(np.int32)))
    assert keys.reached(made((1, np.float32))) != keys.reached(made((1, np.float64)))
    assert keys.reached(lambda x, y=1: x) != keys.reached(lambda x, y=2: x)
    assert keys.reached(lambda x, *, y=1: x) != keys.reached(lambda x, *, y=2: x)
    with pytest.raises(TypeError, match=r"no rule says what a kernel takes from \{1: 2\}; add one"):
        keys.reached(made({1: 2}))


def test_kernels_without_rules_do_not_exist():
    """Every kernel of the engine has a key, and another than the function around it."""
    assert keys.reached(nearest_saturating.py_func) != keys.reached(kernel(lambda x, y, g: None).py_func)
