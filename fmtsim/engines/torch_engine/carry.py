# SPDX-License-Identifier: Apache-2.0
"""The one decision of every rounding: does the magnitude move up to the next candidate?"""

from collections.abc import Callable
from typing import Any

import torch

from fmtsim.rounding.modes import RULES, Mode, Rounding

NEAREST = Rounding()

DEEPEST = 61
"""Most bits below the last place that ``round_off`` takes; ``jam`` folds deeper ones into the lowest."""


def jam(significand: torch.Tensor, excess: torch.Tensor) -> torch.Tensor:
    """Shift right by ``excess`` bits and keep in the lowest bit whether any bit that left was set.

    No decision of ``round_off`` changes as long as the lowest bit stays below the last random bit and below the half.
    """
    excess = excess.clamp(0, 62)
    kept = significand >> excess
    return kept | ((kept << excess) != significand).to(significand.dtype)


def round_off(
    significand: torch.Tensor,
    shift: torch.Tensor,
    negative: torch.Tensor,
    rounding: Rounding,
    words: torch.Tensor | None,
    parity: torch.Tensor | None = None,
) -> torch.Tensor:
    """Divide non-negative integers by ``2**shift`` and round the quotient to an integer.

    Args:
        significand: The magnitudes, int32 or int64; ``significand + 2**shift`` must not overflow.
        shift: Bits to drop, same dtype, broadcastable, at most 30 (int32) or ``DEEPEST`` (int64, and int32 of
            stochastic rounding, whose numbers are below 2**30).
        negative: Where the number is negative: up and down look at it.
        rounding: The mode.
        words: The random integers w of stochastic rounding, int64, else None.
        parity: Added to the quotient before asking whether its code is odd.
    """
    if rounding.mode == "stochastic":
        assert words is not None
        near = shift.clamp(max=30) if significand.dtype == torch.int32 else shift
        quotient = significand >> near
        rest = (significand - (quotient << near)).to(torch.int64)
        return quotient + _moves_up(rest, shift.to(torch.int64), rounding, words).to(quotient.dtype)
    if rounding.mode == "toward_zero":
        return significand >> shift
    below = (1 << shift) - 1  # all dropped bits set: adding it moves every inexact number up, and no exact one

    def odd() -> torch.Tensor:
        quotient = significand >> shift
        return (quotient if parity is None else quotient + parity) & 1

    if rounding.mode == "nearest_even":
        bias = torch.minimum((below >> 1) + odd(), below)  # the minimum keeps shift 0 exact
    else:  # what moves a magnitude never, above the half, from the half on, always
        addends = (lambda: 0, lambda: below >> 1, lambda: (below + 1) >> 1, lambda: below)
        bias = by_threshold(rounding.mode, lambda threshold: addends[threshold](), lambda: odd() == 1, negative)
    return (significand + bias) >> shift


def by_threshold(
    mode: Mode, of: Callable[[int], Any], odd: Callable[[], torch.Tensor], negative: torch.Tensor | None
) -> Any:
    """Return for each element ``of(t)``, where t is the threshold from which on a mode moves its magnitude.

    Args:
        mode: A deterministic mode.
        of: What is wanted for a threshold of ``Rule.threshold``: a tensor, or a number for all elements.
        odd: Returns where the candidate is odd; called only for modes that look at it.
        negative: Where numbers are negative; None will do for modes that do not look at it.
    """
    rule = RULES[mode]

    def by_sign(odd: bool) -> Any:
        plus, minus = rule.threshold(odd, False), rule.threshold(odd, True)
        return of(plus) if plus == minus else torch.where(negative, of(minus), of(plus))  # type: ignore[arg-type]

    return torch.where(odd(), by_sign(True), by_sign(False)) if rule.looks_at_parity else by_sign(False)


def _moves_up(rest: torch.Tensor, shift: torch.Tensor, rounding: Rounding, words: torch.Tensor) -> torch.Tensor:
    """Decide stochastic rounding for ``d = rest / 2**shift``, as int64 zeros and ones."""
    bits = rounding.bits + (rounding.variant == "b")
    dropped = (shift - bits).clamp(min=0)
    fraction = (rest >> dropped) << (bits - shift).clamp(min=0)  # floor(d * 2**bits)
    if rounding.variant == "b":
        words = 2 * words + 1
    elif rounding.variant == "c":
        tail = rest & ((1 << dropped) - 1)
        half = (1 << dropped) >> 1  # 0 where nothing was dropped, and then so is the tail
        up = (tail > half) | ((tail == half) & (dropped > 0) & ((fraction & 1) == 1))
        fraction = fraction + up.to(fraction.dtype)
    return (fraction + words >= (1 << bits)).to(rest.dtype)
