# SPDX-License-Identifier: Apache-2.0
"""The names of catalogues that the command line answers typos with before torch is imported: ``names.json``.

Write the file anew after a change of a catalogue::

    python -m tests.support.names
"""

import json
from pathlib import Path

from fmtsim.casts.profile import list_profiles
from fmtsim.distributed import REDUCTIONS
from fmtsim.gemm.targets.target import list_targets
from fmtsim.gemm.units.catalogue import units
from fmtsim.lab.cli import names as cli_names
from fmtsim.lab.memory.states import RULES
from fmtsim.machine.simulate import TARGETS
from fmtsim.optim import list_schemes
from fmtsim.recipes.catalogue import RECIPES
from fmtsim.recipes.ptq_catalogue import RECIPES as PTQ_RECIPES
from fmtsim.recipes.recipe_registry import _WIDTHS as WIDTHS
from fmtsim.recipes.system import OPTIMIZERS
from fmtsim.spec.gemm_spec import DATAPATHS

NAMES_FILE = Path(cli_names.__file__).with_name("names.json")


def recorded_names() -> str:
    """Return the text of ``names.json``."""
    lists = {
        "targets": list_targets(), "units": [unit.name for unit in units()], "datapaths": DATAPATHS,
        "simulated": TARGETS, "recipes": [recipe.name for recipe in RECIPES],
        "schemes": [recipe.name for recipe in PTQ_RECIPES],
        "recipe_aliases": [alias for recipe in RECIPES for alias in recipe.aliases],
        "scheme_aliases": [alias for recipe in PTQ_RECIPES for alias in recipe.aliases], "widths": WIDTHS,
        "optimizers": OPTIMIZERS, "rules": RULES, "states": list_schemes(), "reductions": REDUCTIONS,
        "profiles": list_profiles(),
    }  # fmt: skip
    lines = [f"{json.dumps(key)}: {json.dumps(sorted(values))}" for key, values in lists.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    NAMES_FILE.write_text(recorded_names())
