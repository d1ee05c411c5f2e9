# SPDX-License-Identifier: Apache-2.0
"""Names that options take, for ``one_of``, for completion, and to answer typos before torch is imported.

``names.json`` has the names of catalogues that import torch; ``python -m tests.support.records`` writes it.
"""

import argparse
import importlib
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fmtsim.support.errors import ArgumentError, FormatError, did_you_mean, shown

Names = Callable[[], Iterable[str]]


def _names_of(*places: str) -> Names:
    """Return a function that reads the names at ``module:attribute``; a function there is called."""

    def read() -> Iterable[str]:
        names: list[str] = []
        for module, _, attribute in (place.partition(":") for place in places):
            value = getattr(importlib.import_module(f"fmtsim.{module}"), attribute)
            names += value() if callable(value) else value
        return names

    return read


@cache
def _recorded() -> dict[str, list[str]]:
    return json.loads(pkgutil.get_data(__package__, "names.json") or b"")  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Names of catalogues in ``names.json``: calling it returns them.

    kinds: Whose names these are.
    listed: Where a user finds them, as errors say it.
    aliases: Kinds of other names for the same, which completion leaves out.
    others: Words, and kinds of them, that are no typos; the command itself takes or refuses them.
    """

    kinds: tuple[str, ...]
    listed: str
    aliases: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def __call__(self) -> list[str]:
        """Return the names."""
        return [name for kind in self.kinds for name in _recorded()[kind]]

    def check(self, option: str, word: str) -> None:
        """Refuse a word that is no name, no file and no record."""
        close = [*self(), *(name for kind in self.aliases for name in _recorded()[kind])]
        known = {*close, *(name for kind in self.others for name in _recorded().get(kind, (kind,)))}
        spelled = "formats" in self.others and _format_error(word) is None
        if not spelled and word.strip().lower() not in known and not re.search(r"[={:,/]|\.json$", word):
            raise ArgumentError(f"{option} {shown(word)} is unknown{did_you_mean(word, close)}; {self.listed}")


formats = _names_of("formats.registry:list_formats")
roundings = _names_of("rounding.modes:MODES", "rounding.modes:ALIASES")
overflows = _names_of("formats.spec:OVERFLOWS")
scale_rules = _names_of("formats.scaling:SCALE_RULES")
models = _names_of("gemm.models:list_models")
_ANY = ("recipes", "recipe_aliases", "schemes", "scheme_aliases", "widths", "list")
_RECIPES = "fmtsim train --recipe list has the names; a file ends in .json"
_GPU = "choose a GPU with its library, such as h200, a plan file (.json)"
targets = Recorded(("targets",), _GPU, others=("units",))
targets_and_units = Recorded(
    ("targets", "units"),
    f"{_GPU}, a unit such as hopper.wgmma, or fields as --help shows",
    others=("logarithms", "recipe"),
)
simulated = Recorded(("simulated",), "choose h200 or h100")
recipes = Recorded(("recipes",), _RECIPES, ("recipe_aliases",), _ANY)
converters = Recorded(("recipes", "peers"), _RECIPES, ("recipe_aliases",), _ANY)
recipes_and_formats = Recorded(
    ("recipes",),
    "fmtsim formats and fmtsim train --recipe list have the names",
    ("recipe_aliases",),
    (*_ANY, "formats"),
)
schemes = Recorded(
    ("schemes",), "fmtsim ptq --scheme list has the names; a file ends in .json", ("scheme_aliases",), _ANY
)
optimizers = Recorded(("optimizers",), "choose adamw or madam")
states = Recorded(("states",), "docs/optim.md has the names")
optimizers_and_states = Recorded(("rules", "states"), "choose a rule or a scheme of states, as in --help")
reductions = Recorded(("reductions",), "docs/distributed.md has the names")
claims = Recorded(("claims",), "fmtsim reproduce --list has the names")


def check_names(actions: Iterable[argparse.Action], arguments: argparse.Namespace) -> None:
    """Refuse unknown names and files that are not there, before torch is imported.

    A model's function may register formats and recipes; names beside such a function are read after it was called.
    """
    if _may_register(vars(arguments)):
        return
    for action in actions:
        value, known = getattr(arguments, action.dest, None), getattr(action, "known", None)
        if isinstance(value, str) and action.metavar == "LIST" and value != action.default:
            value = [word.strip() for word in value.split(",")]
        for word in value if isinstance(value, list) else [value]:
            option = (action.option_strings or [action.dest])[-1]
            if not isinstance(word, str) or word in ("", action.default):
                continue
            if isinstance(known, Recorded):
                known.check(option, word)
            elif known is formats and word != "none" and (error := _format_error(word)):
                raise FormatError(str(error).replace("fmtsim.list_formats()", "fmtsim formats"))


def _format_error(word: str) -> FormatError | None:
    from fmtsim.formats.registry import get_format

    try:
        get_format(word)
    except FormatError as error:
        return error
    return None


_PLAIN = {*sys.stdlib_module_names, "fmtsim", "numpy", "torch", "torchvision", "transformers"} - {"importlib", "runpy"}


def _may_register(values: dict[str, Any]) -> bool:
    """Return True if a model is a function whose file registers something, or imports modules that may do so."""
    for name in ("model", "models", "a", "b"):
        for text in values[name] if isinstance(values.get(name), list) else [values.get(name)]:
            path, colon, _ = str(text or "").rpartition(":")
            if colon and not path.endswith(".py"):
                return True  # package.module:function
            if colon and Path(path).is_file():
                code = Path(path).read_text(encoding="utf-8", errors="replace")
                if "register" in code or {*re.findall(r"^\s*(?:from|import)\s+(\w*)", code, re.MULTILINE)} - _PLAIN:
                    return True
    return False
