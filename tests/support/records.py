# SPDX-License-Identifier: Apache-2.0
"""Digests of what catalogues hold and of the defaults of public names: a change is meant, or it is an error.

``records.txt`` has them, a record on a line, and ``names.json`` of the command line the names of catalogues; who means
to change one writes the files anew::

    python -m tests.support.records
"""

import dataclasses
import hashlib
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

from fmtsim.distributed import REDUCTIONS
from fmtsim.formats.scaling import SCALINGS
from fmtsim.gemm.targets import cublaslt, cuda_cores
from fmtsim.gemm.targets.target import list_targets
from fmtsim.gemm.units.catalogue import units
from fmtsim.lab.bench.models import PEERS
from fmtsim.lab.cli import names as cli_names
from fmtsim.lab.memory.states import RULES
from fmtsim.lab.reproduce.run import CLAIMS
from fmtsim.machine.simulate import TARGETS
from fmtsim.optim import get_scheme, list_schemes
from fmtsim.recipes.catalogue import RECIPES
from fmtsim.recipes.ptq_catalogue import RECIPES as PTQ_RECIPES
from fmtsim.recipes.registry import _WIDTHS as WIDTHS
from fmtsim.recipes.system import OPTIMIZERS

FILE = Path(__file__).with_name("records.txt")
ROOMS = ("distributed", "lab.search", "nn", "nn.unit_scaling", "optim", "ptq", "recipes")
MODULES = ("fmtsim", *(f"fmtsim.{room}" for room in ROOMS))


def defaults_of(module: str) -> dict[str, dict[str, Any]]:
    """Return the defaults of the arguments of a module's public functions and classes, torch's own aside."""
    found, place = {}, importlib.import_module(module)
    public_names = [
        name for name, what in vars(place).items() if name[0] != "_" and getattr(what, "__module__", "") == module
    ]
    for name in getattr(place, "__all__", public_names):
        public = getattr(place, name)
        code = getattr(public, "__init__", None) if inspect.isclass(public) else public
        if inspect.isfunction(code) and code.__globals__["__name__"].startswith("fmtsim"):
            parameters = inspect.signature(code).parameters.values()
            found[name] = {one.name: one.default for one in parameters if one.default is not one.empty}
    return {name: defaults for name, defaults in found.items() if defaults}


CATALOGUES: dict[str, dict[str, Any]] = {
    "recipe": {recipe.name: recipe for recipe in RECIPES},
    "ptq": {recipe.name: recipe for recipe in PTQ_RECIPES},
    "state": {name: get_scheme(name) for name in list_schemes()},
    "reduction": REDUCTIONS,
    "scaling": SCALINGS,
    "library": {
        **{f"gemv_{name}": lanes for name, lanes in cuda_cores.GEMV.items()},
        **{f"gemv_float32_{name}": lanes for name, lanes in cuda_cores.GEMV_FLOAT32.items()},
        "stages": cublaslt.STAGES,
        "gemm_sn": cuda_cores.GEMM_SN,
        "tiles": cublaslt.TILES,
    },
    "claim": {claim.name: (claim.settings, claim.expected) for claim in CLAIMS},
    **{module: defaults_of(module) for module in MODULES},
}


NAMES_FILE = Path(cli_names.__file__).with_name("names.json")


def recorded_names() -> str:
    """Return the text of ``names.json``."""
    lists = {
        "targets": list_targets(), "units": [unit.name for unit in units()], "simulated": TARGETS, "peers": PEERS,
        "recipes": [recipe.name for recipe in RECIPES], "schemes": [recipe.name for recipe in PTQ_RECIPES],
        "recipe_aliases": [alias for recipe in RECIPES for alias in recipe.aliases],
        "scheme_aliases": [alias for recipe in PTQ_RECIPES for alias in recipe.aliases], "widths": WIDTHS,
        "optimizers": OPTIMIZERS, "rules": RULES, "states": list_schemes(), "reductions": REDUCTIONS,
        "claims": [claim.name for claim in CLAIMS],
    }  # fmt: skip
    lines = [f"{json.dumps(key)}: {json.dumps(sorted(values))}" for key, values in lists.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def fields_of(value: Any) -> Any:
    """Return a record's fields by name, those that only describe it aside, down to plain values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value) if field.name not in ("source", "notes"))
        return type(value).__name__, {name: fields_of(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {name: fields_of(one) for name, one in value.items()}
    return list(map(fields_of, value)) if isinstance(value, tuple) else value


def digests(catalogue: str) -> list[str]:
    """Return a line for each record of a catalogue: its name, its own and a digest."""
    texts = {name: repr(fields_of(record)) for name, record in CATALOGUES[catalogue].items()}
    return [f"{catalogue} {name} {hashlib.sha256(text.encode()).hexdigest()[:12]}" for name, text in texts.items()]


def changed(*catalogues: str) -> list[str]:
    """Return the lines in which catalogues and their recordings differ."""
    recorded = {line for line in FILE.read_text().splitlines() if line.split(" ")[0] in catalogues}
    return sorted(recorded ^ {line for catalogue in catalogues for line in digests(catalogue)})


if __name__ == "__main__":
    NAMES_FILE.write_text(recorded_names())
    FILE.write_text("".join(f"{line}\n" for catalogue in CATALOGUES for line in digests(catalogue)))
