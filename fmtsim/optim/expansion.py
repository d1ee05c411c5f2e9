# SPDX-License-Identifier: Apache-2.0
"""Dynamic range expansion: each group is raised to the power that makes it fill E4M3's range.

Source: Xi et al., COAT, arXiv:2410.19313; NVlabs/COAT 80ec99f. Its kernels take powers and logarithms from a GPU's
library, whose last bits no other machine gives; here both are the sequences of ``fmtsim.rounding.elementary``, so
every device has the same bits. Numbers are float32 unless said otherwise:

1. ``top`` is the largest magnitude of a group, ``low`` the smallest that is not zero; both grow by 1e-30.
2. ``centre = sqrt(top) * sqrt(low)``.
3. ``power = floor(16 * (ln 100352 / (ln top - ln low))) / 16`` in float64, then float32; 1 where top = low.
4. ``z = exp(power * (ln |x| - ln centre))`` in float64, then float32; zero stays zero.
5. ``scale``: step 4 for x = top, divided by 448.
6. The code is that of ``z / scale`` with the sign of x.

Decoding a value q: ``z = |q| * scale``, ``f = exp(ln z / power)`` in float64, then float32; ``f * centre``, q's sign.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.ops import load_engine
from fmtsim.optim.rules import square_root
from fmtsim.rounding.elementary import ln
from fmtsim.support.float64 import float64

FLOOR = 1e-30
STEPS = 16
RANGE = ln(448.0 * 448.0 / 2)
"""The logarithm of the ratio that groups are expanded to, as the code has it (E4M3's own is 448 / 2**-9)."""


def compress(x: Tensor, top_value: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``z / scale`` with x's signs, and scale, power and centre of each group.

    Args:
        x: float32 [groups, elements].
        top_value: The format's largest value.
    """
    magnitude = x.abs()
    top, low = extremes(magnitude)
    centre = square_root(top) * square_root(low)
    power = power_of(top, low)
    scale = _raised(top, power, centre) / torch.full_like(top, top_value)
    z = _raised(magnitude, power, centre) / scale
    return torch.copysign(torch.where(magnitude == 0, 0.0, z), x), scale, power, centre


def extremes(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest and the smallest number but zero of each row, both plus FLOOR; [rows, 1]."""
    top = magnitude.amax(1, keepdim=True)
    low = torch.where(magnitude == 0, torch.inf, magnitude).amin(1, keepdim=True)
    low = torch.where(low == torch.inf, 0.0, low)
    return top + FLOOR, low + FLOOR


def power_of(top: Tensor, low: Tensor) -> Tensor:
    """Return the power of groups with these extremes, float32."""
    distance = _ln(top) - _ln(low)
    safe = torch.where(distance > 0, distance, 1.0)
    power = torch.floor(STEPS * (torch.full_like(safe, RANGE) / safe)) / STEPS
    return torch.where(distance == 0, 1.0, torch.where(top == top, power, math.nan)).to(torch.float32)


def expand(q: Tensor, scale: Tensor, power: Tensor, centre: Tensor) -> Tensor:
    """Undo ``compress`` for values of the format: float32 [groups, elements], and [groups, 1] thrice."""
    z = q.abs() * scale
    factor = _exp(_ln(z) / float64(power)).to(torch.float32)
    return torch.copysign(torch.where(z == 0, 0.0, factor * centre), q)


def _raised(x: Tensor, power: Tensor, centre: Tensor) -> Tensor:
    """Return ``(x / centre) ** power``, step 4."""
    return _exp(float64(power) * (_ln(x) - _ln(centre))).to(torch.float32)


def _ln(x: Tensor) -> Tensor:
    """Return the logarithm in float64; NaN stays NaN, Inf stays Inf, and 0 gives some number."""
    wide = float64(x)
    result: Tensor = _engine(x).ln(torch.where((wide > 0) & (wide < math.inf), wide, 1.0))
    return torch.where(wide < math.inf, result, wide)


def _exp(x: Tensor) -> Tensor:
    result: Tensor = _engine(x).exp(x)
    return result


def _engine(x: Tensor) -> Any:
    """Return an engine with both functions for a device: equal bits, whichever it is."""
    return load_engine("cpu" if x.is_cpu else "torch_engine")
