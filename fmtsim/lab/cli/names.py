# SPDX-License-Identifier: Apache-2.0
"""Names that options take, for ``one_of``, for completion, and to answer typos before torch is imported.

``names.json`` has the names of catalogues that import torch; ``python -m tests.support.names`` writes it.
"""

import argparse
import glob
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


@cache
def _recorded() -> dict[str, list[str]]:
    return json.loads(pkgutil.get_data(__package__, "names.json") or b"")  # type: ignore[no-any-return]


def _names_at(place: str) -> list[str]:
    """Return the names at ``module:attribute``, which a function there returns, or else a kind's in ``names.json``."""
    module, colon, attribute = place.partition(":")
    if not colon:
        return _recorded()[place]
    names = getattr(importlib.import_module(f"fmtsim.{module}"), attribute)
    return list(names() if callable(names) else names)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Names that an option takes: calling it returns them.

    kinds: Kinds of names in ``names.json``, or ``module:attribute`` of a module that imports no torch.
    listed: Where a user finds the names, as errors say it; all names where it is empty.
    aliases: Kinds of other names for the same, which completion leaves out.
    others: Words, and kinds of them, that are no typos; the command itself takes or refuses them.
    metavar: What help calls a name.
    """

    kinds: tuple[str, ...]
    listed: str = ""
    aliases: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    metavar: str = "NAME"

    def __call__(self) -> list[str]:
        """Return the names."""
        return [name for kind in self.kinds for name in _names_at(kind)]

    def check(self, option: str, word: str) -> None:
        """Refuse a word that is no name, no record and no file that is there."""
        names = [*self(), *(name for kind in self.aliases for name in _names_at(kind))]
        others = {name for kind in self.others for name in _recorded().get(kind, (kind,))}
        spelled = "formats" in self.others and _format_error(word) is None
        if spelled or word.strip().lower() in {*names, *others}:
            return
        functions.check(option, word)
        if not re.search(r"[={:,/]|\.json$", word):
            listed = self.listed or f"choose one of {', '.join(self())}"
            format = option == "--recipe" and _format_error(word) is None
            near = "; it is a format, for --format where there is one" if format else did_you_mean(word, names)
            raise ArgumentError(f"{option} {shown(word)} is unknown{near}; {listed}")
        if word.endswith(".json"):
            files.check(option, word)


@dataclass(frozen=True, slots=True)
class Files:
    """Files that a command reads: ``check`` refuses one that is not there, and completion is the shell's.

    hint: How errors go on.
    folders: Take folders, too.
    functions: Look for the file of ``FILE.py:function``; other words are no files.
    metavar: What help calls a file.
    """

    hint: str
    folders: bool = False
    functions: bool = False
    metavar: str = "FILE"

    def __call__(self) -> tuple[str, ...]:
        """Return no names."""
        return ()

    def check(self, option: str, word: str) -> None:
        """Refuse a file that is not there, and name those of its folder that are close."""
        path = Path(word.rpartition(":")[0] if self.functions else word).expanduser()
        if (self.functions and path.suffix != ".py") or path.is_file() or (self.folders and path.is_dir()):
            return
        what = "file or folder" if self.folders else "file"
        place = f"{option} {word}".strip()
        raise ArgumentError(f"{place}: there is no {what} {path}{close_files(path)}; {self.hint}")


def close_files(path: Path) -> str:
    """Return how an error goes on after a file that is not there: files beside it with its suffix and close names."""
    return did_you_mean(path.name, sorted(beside.name for beside in path.parent.glob(f"*{glob.escape(path.suffix)}")))


files = Files("pass a file that is there")
functions = Files("pass FILE.py:function", functions=True, metavar="NAME")
rules = Files("pass JSON that attribute --out or search --out wrote")
texts = Files("pass a text file or a folder of text files", folders=True, metavar="PATH")
runs = Files("pass two or more folders that fmtsim train --out wrote", folders=True, metavar="DIR")
traces = Files("pass a file that fmtsim trace --level aten --tensors all wrote", metavar="TRACE")
checkpoints = Files("pass weights in .safetensors, .pt, .pth or .bin")
shapes = Files("pass a text file with a line 'outputs inputs [bias]' for each layer")
formats = Catalogue(("formats.registry:list_formats",), metavar="FORMAT")
roundings = Catalogue(("rounding.modes:MODES", "rounding.modes:ALIASES"), others=("all",), metavar="MODE")
overflows = Catalogue(("formats.element:OVERFLOWS",), metavar="RULE")
scale_rules = Catalogue(("formats.scaling:SCALE_RULES",), metavar="RULE")
profiles = Catalogue(("profiles",), "docs/profiles.md has the names", metavar="LIBRARY")
models = Catalogue(("gemm.model_layers:list_models",), "fmtsim memory --model list has the names", others=("list",))
_ANY = ("recipes", "recipe_aliases", "schemes", "scheme_aliases", "widths", "list")
_RECIPES = "fmtsim train --recipe list has the names; a file ends in .json"
_GPU = "choose a GPU with its library, such as h200, a plan file (.json)"
targets = Catalogue(("targets",), _GPU, others=("units",))
_UNIT = f"{_GPU}, a unit such as hopper.wgmma, or fields as --help shows"
targets_and_units = Catalogue(("targets", "units", "datapaths"), _UNIT, others=("recipe",), metavar="TARGET")
simulated = Catalogue(("simulated",), "choose h200 or h100", metavar="GPU")
recipes = Catalogue(("recipes",), _RECIPES, ("recipe_aliases",), _ANY)
_BOTH = "fmtsim formats and fmtsim train --recipe list have the names"
recipes_and_formats = Catalogue(("recipes",), _BOTH, ("recipe_aliases",), (*_ANY, "formats"))
_SCHEMES = "fmtsim ptq --scheme list has the names; a file ends in .json"
schemes = Catalogue(("schemes",), _SCHEMES, ("scheme_aliases",), _ANY)
optimizers = Catalogue(("optimizers",), "choose adamw or madam")
states = Catalogue(("states",), "docs/optim.md has the names")
optimizers_and_states = Catalogue(("rules", "states"), "choose a rule or a scheme of states, as in --help")
reductions = Catalogue(("reductions",), "docs/distributed.md has the names")


def check_names(actions: Iterable[argparse.Action], arguments: argparse.Namespace) -> None:
    """Refuse unknown names and files that are not there, before torch is imported.

    A model's function may register formats and recipes; names beside such a function are read after it was called.
    """
    registers = _may_register(vars(arguments))
    for action in actions:
        value, names = getattr(arguments, action.dest, None), getattr(action, "names", None)
        if isinstance(value, str) and action.metavar == "LIST" and value != action.default:
            value = [word.strip() for word in value.split(",")]
        for word in value if isinstance(value, list) else [value]:
            option = (action.option_strings or [""])[-1]
            if not isinstance(word, str | Path) or word in ("", action.default):
                continue
            if isinstance(names, Files) or (isinstance(names, Catalogue) and names is not formats and not registers):
                names.check(option, str(word))
            elif names is formats and not registers and word != "none" and (error := _format_error(str(word))):
                raise error


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
