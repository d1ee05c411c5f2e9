# SPDX-License-Identifier: Apache-2.0
"""Names that options take, for ``one_of`` and for completion: a catalogue is imported when its names are asked for."""

import importlib
from collections.abc import Callable, Iterable

Names = Callable[[], Iterable[str]]


def _names_of(*places: str, **options: str) -> Names:
    """Return a function that reads the names at ``module:attribute``; a function there is called with the options."""

    def read() -> Iterable[str]:
        names: list[str] = []
        for module, _, attribute in (place.partition(":") for place in places):
            value = getattr(importlib.import_module(f"fmtsim.{module}"), attribute)
            names += [getattr(name, "name", name) for name in (value(**options) if callable(value) else value)]
        return names

    return read


formats = _names_of("formats.registry:list_formats")
roundings = _names_of("rounding.modes:MODES", "rounding.modes:ALIASES")
overflows = _names_of("formats.spec:OVERFLOWS")
scale_rules = _names_of("formats.scaling:SCALE_RULES")
models = _names_of("gemm.models:list_models")
targets = _names_of("gemm.targets.target:list_targets")
targets_and_units = _names_of("gemm.targets.target:list_targets", "gemm.units.unit:list_units")
recipes = _names_of("recipes.registry:list_recipes", kind="training")
converters = _names_of("recipes.registry:list_recipes", "lab.bench.models:PEERS", kind="training")
optimizers = _names_of("recipes.system:OPTIMIZERS")
states = _names_of("optim.catalogue:list_schemes")
optimizers_and_states = _names_of("lab.memory.states:RULES", "optim.catalogue:list_schemes")
reductions = _names_of("distributed.reduction:REDUCTIONS")
schemes = _names_of("recipes.registry:list_recipes", kind="ptq")
claims = _names_of("lab.reproduce.run:CLAIMS")
