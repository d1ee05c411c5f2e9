# SPDX-License-Identifier: Apache-2.0
"""Sharpness of a loss at the logits: how much it can rise when each logit moves a little."""

import torch
from torch import Tensor

from fmtsim.support.errors import ArgumentError, DtypeError, shown


def sharpness(logits: Tensor, targets: Tensor, eps: float = 5e-4) -> Tensor:
    """Return the largest relative rise of the cross entropy in a box around the logits, in percent.

    ``max (L(z + d) - L(z)) / (1 + L(z)) * 100`` over ``|d_i| <= eps (|z_i| + 1)``. The cross entropy is convex and
    rises with every logit but the target's, so the maximum is where these are at the top and the target's at the
    bottom: no search is needed.

    Args:
        logits: ``[..., classes]``, float32 or float64.
        targets: int64 ``[...]``, the class of each.
        eps: Half the relative width of the box.

    Returns:
        float64 ``[...]``. NaN logits give NaN.

    Source: Lee et al., To FP8 and Back Again, arXiv:2405.18710; the box is Keskar et al.'s, arXiv:1609.04836.

    Raises:
        ArgumentError: Shapes that do not fit, or an eps that is not above zero.
        DtypeError: Logits that are not floating point.

    >>> float(sharpness(torch.tensor([2.0, 0.0]), torch.tensor(0), eps=0.1)).__round__(3)
    5.056
    """
    if not logits.is_floating_point():
        raise DtypeError(f"logits have dtype {logits.dtype}; pass float32 or float64")
    if logits.dim() < 1 or targets.shape != logits.shape[:-1]:
        raise ArgumentError(
            f"targets of shape {tuple(targets.shape)} do not fit logits of shape {tuple(logits.shape)}; "
            "pass one class for each row of logits"
        )
    if not eps > 0:
        raise ArgumentError(f"eps={shown(eps)} is not a width of a box; pass a number above 0, such as 5e-4")
    z = logits.detach().double()
    room = eps * (z.abs() + 1)
    away = torch.full_like(z, 1.0).scatter(-1, targets.unsqueeze(-1), -1.0)
    before, after = _loss(z, targets), _loss(z + away * room, targets)
    return (after - before) / (1 + before) * 100


def _loss(z: Tensor, targets: Tensor) -> Tensor:
    return z.logsumexp(-1) - z.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
