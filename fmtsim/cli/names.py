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


def optimizers() -> Iterable[str]:
    """Return the optimizers that recipes name."""
    from fmtsim.recipes.system import OPTIMIZERS

    return OPTIMIZERS


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
    from fmtsim.ptq.registry import list_ptq_recipes

    return list_ptq_recipes()


def claims() -> Iterable[str]:
    """Return the claims that ``fmtsim reproduce`` runs."""
    from fmtsim.reproduce import get_claims

    return [claim.name for claim in get_claims()]


BY_DESTINATION: dict[str, Names] = {
    "format": formats, "formats": formats, "grad_format": formats, "baseline": formats, "dtype": formats,
    "b_dtype": formats, "rounding": roundings, "grad_rounding": roundings, "overflow": overflows,
    "scale_rule": scale_rules, "models": models, "target": targets, "base": targets, "check": targets, "unit": units,
    "recipe": recipes, "optimizer": optimizers, "state": states, "reduction": reductions, "claims": claims,
    "scheme": schemes, "weights": formats, "master": formats, "gradients": formats, "activations": formats,
    "kv_format": formats,
}  # fmt: skip
"""What completion offers for an argument, by the attribute that holds it; an argument's own choices come first."""
