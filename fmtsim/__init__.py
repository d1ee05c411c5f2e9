# SPDX-License-Identifier: Apache-2.0
"""A numerics laboratory for PyTorch: number formats, tensor-core arithmetic and low-precision training, bit for bit.

The public names, and where each comes from, are in ``__init__.pyi``. A name is imported when it is first asked for, so
that ``import fmtsim`` takes milliseconds and ``fmtsim --help`` needs no torch. A verb registers the operators that it
calls; before ``torch.export.load`` reads a program that names some, ``from fmtsim import mma, nn`` registers all.
"""

import ast
import importlib
import pkgutil
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from fmtsim.support import interrupts as interrupts  # first: what a command imports takes seconds

__version__ = "0.1.0"


def _homes() -> dict[str, str]:
    """Return the module of each public name, by the imports of the stub beside this file."""
    imports = ast.parse(pkgutil.get_data("fmtsim", "__init__.pyi") or b"").body
    return {name.name: node.module or "" for node in imports if isinstance(node, ast.ImportFrom) for name in node.names}


_HOMES = _homes()

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name, or a part of the package, when it is first asked for."""
    package, home = sys.modules[__name__], _HOMES.get(name)
    if home is not None and home != "fmtsim":
        module = importlib.import_module(home)
        value = getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{home}.{name}")
        setattr(package, name, value)
        return value
    if not name.startswith("_") and find_spec(f"fmtsim.{name}"):
        return importlib.import_module(f"fmtsim.{name}")
    raise AttributeError(f"module 'fmtsim' has no attribute {name!r}", name=name, obj=package)


def __dir__() -> list[str]:
    return sorted({*_HOMES, *(name for name in globals() if name.startswith("__"))})


class _Package(ModuleType):
    """The package, where a function is not hidden by the submodule of its name."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets submodules here: `fmtsim.ptq` is the function also after its package has loaded.
        if isinstance(value, ModuleType) and _HOMES.get(name) == f"fmtsim.{name}":
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (
            "fmtsim",
        )  # cloudpickle, of functions that name the package, knows ModuleType alone


sys.modules[__name__].__class__ = _Package
