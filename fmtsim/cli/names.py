# SPDX-License-Identifier: Apache-2.0
"""Names that options take, of catalogues that are read when somebody asks."""

from collections.abc import Iterable


def optimizers() -> Iterable[str]:
    """Return the optimizers that recipes name."""
    from fmtsim.recipes.system import OPTIMIZERS

    return OPTIMIZERS
