# SPDX-License-Identifier: Apache-2.0
"""Packages that load their modules when one of their names is first used."""

import importlib
from types import ModuleType
from typing import Any


class LazyEngine(ModuleType):
    """The package of an engine, whose ``MODULES`` say which module defines each name of the protocol.

    A module is loaded when one of its names is first used: a cast needs no kernels of products.
    """

    def __getattr__(self, name: str) -> Any:
        """Load a name of the protocol, which is an attribute of the package from then on."""
        for module, names in vars(self)["MODULES"].items():
            if name in names:
                value = getattr(importlib.import_module(f"{self.__name__}.{module}"), name)
                setattr(self, name, value)
                return value
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep ``gemm`` a function: importing the module of that name would put the module in its place."""
        if not (isinstance(value, ModuleType) and name in vars(self)["__all__"]):
            super().__setattr__(name, value)
