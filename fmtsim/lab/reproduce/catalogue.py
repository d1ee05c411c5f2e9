# SPDX-License-Identifier: Apache-2.0
"""The list of claims."""

from collections.abc import Sequence

from fmtsim.lab.reproduce import (
    accumulation,
    adder_tree,
    alignment,
    attention,
    blocks,
    estimators,
    gpts,
    laws,
    multipliers,
    optimizers,
    outliers,
    qat,
    quantised,
    ratios,
    searched,
    sequences,
    served,
    speeds,
    sweeps,
    training,
    widths,
    wire,
)
from fmtsim.lab.reproduce.claim import Claim
from fmtsim.support.errors import ArgumentError, did_you_mean, shown

_MODULES = (
    blocks, ratios, estimators, outliers, alignment, attention, accumulation, adder_tree, sequences, training,
    widths, gpts, wire, quantised, multipliers, served, searched, optimizers, qat, speeds, sweeps, laws,
)  # fmt: skip
CLAIMS: tuple[Claim, ...] = tuple(claim for module in _MODULES for claim in module.CLAIMS)


def get_claims(names: Sequence[str] = ()) -> tuple[Claim, ...]:
    """Return the claims of these names, in the order of the list; all of them where none is given.

    Raises:
        ArgumentError: There is no claim of a name.
    """
    known = {claim.name: claim for claim in CLAIMS}
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ArgumentError(f"unknown claim {shown(name)}{hint} (fmtsim reproduce --list shows all)")
    return tuple(claim for claim in CLAIMS if not names or claim.name in names)
