# SPDX-License-Identifier: Apache-2.0
"""Names that options take, of catalogues that are read when somebody asks: for ``one_of`` and for completion."""

from collections.abc import Callable, Iterable

Names = Callable[[], Iterable[str]]


def formats() -> Iterable[str]:
    """Return the listed formats."""
    from fmtsim.formats.registry import list_formats

    return list_formats()


def roundings() -> Iterable[str]:
    """Return the rounding modes and their short names."""
    from fmtsim.rounding.modes import ALIASES, MODES

    return *MODES, *ALIASES


def overflows() -> Iterable[str]:
    """Return the overflow rules."""
    from fmtsim.formats.spec import OVERFLOWS

    return OVERFLOWS


def scale_rules() -> Iterable[str]:
    """Return the scale rules of blocks."""
    from fmtsim.formats.scaling import SCALE_RULES

    return SCALE_RULES


def models() -> Iterable[str]:
    """Return the models whose layers are known."""
    from fmtsim.gemm.models import list_models

    return list_models()


def targets() -> Iterable[str]:
    """Return the targets."""
    from fmtsim.gemm.targets.target import list_targets

    return list_targets()


def units() -> Iterable[str]:
    """Return the matrix units."""
    import fmtsim

    return fmtsim.list_units()


def recipes() -> Iterable[str]:
    """Return the recipes."""
    from fmtsim.recipes.registry import list_recipes

    return list_recipes()


def converters() -> Iterable[str]:
    """Return the recipes, and the other software that ``fmtsim bench layers`` runs beside them."""
    from fmtsim.lab.bench.models import PEERS

    return *recipes(), *PEERS


def optimizers() -> Iterable[str]:
    """Return the optimizers that recipes name."""
    from fmtsim.recipes.system import OPTIMIZERS

    return OPTIMIZERS


def optimizers_and_states() -> Iterable[str]:
    """Return the optimizers whose memory is known, and the schemes of optimizer states."""
    from fmtsim.lab.memory.states import RULES

    return *RULES, *states()


def states() -> Iterable[str]:
    """Return the schemes of optimizer states."""
    from fmtsim.optim.catalogue import list_schemes

    return list_schemes()


def reductions() -> Iterable[str]:
    """Return the reductions of gradients."""
    from fmtsim.distributed.reduction import REDUCTIONS

    return REDUCTIONS


def schemes() -> Iterable[str]:
    """Return the schemes of post-training quantisation."""
    from fmtsim.ptq.catalogue import list_ptq_recipes

    return list_ptq_recipes()


def claims() -> Iterable[str]:
    """Return the claims that ``fmtsim reproduce`` runs."""
    from fmtsim.lab.reproduce import get_claims

    return [claim.name for claim in get_claims()]
