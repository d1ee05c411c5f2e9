# SPDX-License-Identifier: Apache-2.0
"""Products that ptxas fuses into sums."""

from typing import NamedTuple


class Fusion(NamedTuple):
    """A product that a sum takes without a rounding."""

    product: int  # instruction of the body
    operand: int  # of the sum, 0 or 1
    negates_product: bool = False
    negates_addend: bool = False


def contracted(function):  # type: ignore[no-untyped-def]
    """Interim: nothing is fused."""
    return {}
