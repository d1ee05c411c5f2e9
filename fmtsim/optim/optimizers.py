# SPDX-License-Identifier: Apache-2.0
"""The optimizers: one a rule, each a drop-in for its namesake of ``torch.optim``."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fmtsim.casts.arguments import check_flags
from fmtsim.formats.element import LogFormat
from fmtsim.optim import rules
from fmtsim.optim.base import Params, QuantizedOptimizer
from fmtsim.optim.rules import BASES, madam
from fmtsim.spec.optimizer import Scheme
from fmtsim.support.errors import ArgumentError, shown


class AdamW(QuantizedOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101).

    The arithmetic of a step is written in ``fmtsim.optim.rules``, how states are kept in ``fmtsim.spec.optimizer``.

    Args:
        params: Parameters or groups: float32, bfloat16 or float16.
        lr: Learning rate: a number, or a tensor of one element; a captured step reads it at each replay where it is a
            float32 or float64 tensor on the parameters' device.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: As torch has it: each step multiplies weights by ``1 - lr * weight_decay``.
        state: A scheme (``fmtsim.optim.list_schemes()``): by name, or a ``Scheme`` of your own.
        seed: Of stochastic rounding.
        capturable: Count steps on the device, so that ``torch.cuda.graph`` can capture a step, as torch's optimizers
            have it. One step has to be done before the capture.

    Raises:
        ArgumentError: A hyperparameter or a name is not allowed.
        DtypeError: A parameter's dtype is not.

    Example:
        >>> import torch, fmtsim
        >>> layer = torch.nn.Linear(256, 64)
        >>> optimizer = fmtsim.optim.AdamW(layer.parameters(), lr=1e-3, state="bnb8")
        >>> layer(torch.ones(1, 256)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[layer.weight]["first"].dtype
        torch.uint8
    """

    _rule = rules.ADAMW

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state: str | Scheme = "bnb8",
        seed: int = 0,
        capturable: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": capturable}
        super().__init__(params, defaults, self._rule, state, seed)


class Adam(AdamW):
    """Adam whose weight decay is part of the gradient (Kingma and Ba, arXiv:1412.6980); arguments as of AdamW."""

    _rule = rules.ADAM

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        state: str | Scheme = "bnb8",
        seed: int = 0,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, state=state, seed=seed, capturable=capturable)


class Lion(QuantizedOptimizer):
    """The sign of an interpolated momentum (Chen et al., arXiv:2302.06675); arguments as of AdamW."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        state: str | Scheme = "bnb8",
        seed: int = 0,
        capturable: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "capturable": capturable}
        super().__init__(params, defaults, rules.LION, state, seed)


class SGD(QuantizedOptimizer):
    """Stochastic gradient descent with momentum, without dampening.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        momentum: Decay of the momentum; 0 keeps one all the same.
        weight_decay: Times the weight, added to the gradient.
        nesterov: Look ahead by one step of momentum.
        state: A scheme, as of AdamW.
        seed: Of stochastic rounding.
        capturable: As of AdamW.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        state: str | Scheme = "bnb8",
        seed: int = 0,
        capturable: bool = False,
    ) -> None:
        check_flags(nesterov=nesterov)
        rule = rules.NESTEROV if nesterov else rules.SGD
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "capturable": capturable}
        super().__init__(params, defaults, rule, state, seed)


class Madam(QuantizedOptimizer):
    """Multiplicative updates (Zhao et al., LNS-Madam, arXiv:2106.13914): weights change by factors, never their signs.

    Args:
        params: Parameters or groups. A weight of zero stays zero, but for logarithmic formats, which have none.
        lr: Octaves a unit of the normalised gradient (of base 2). With weights kept in a logarithmic format and
            ``lr * gamma`` an integer, each update is an integer.
        beta: Decay of the second moment.
        bound: Largest normalised gradient.
        weight_decay: Needs ``base="e"``.
        base: 2 or ``"e"``, of the factors.
        round_update: Round normalised gradients to integers.
        state: A scheme; ``"lns_madam"`` keeps weights as 16-bit logarithms.
        seed: Of stochastic rounding.
        capturable: As of AdamW.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1 / 128,
        beta: float = 0.999,
        bound: float = 10.0,
        weight_decay: float = 0.0,
        *,
        base: int | str = 2,
        round_update: bool = True,
        state: str | Scheme = "lns_madam",
        seed: int = 0,
        capturable: bool = False,
    ) -> None:
        if not isinstance(base, int | str) or base not in BASES:
            raise ArgumentError(f"base={shown(base)} is not allowed; choose 2 or 'e'")
        check_flags(round_update=round_update)
        self._base = base
        defaults = {"lr": lr, "beta": beta, "bound": bound, "weight_decay": weight_decay, "capturable": capturable}
        super().__init__(params, defaults, madam(base, round_update), state, seed)

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raise ArgumentError for hyperparameters that are not allowed."""
        super().check_group(group)
        if group["weight_decay"] and self._base == 2:
            raise ArgumentError(f"weight_decay={group['weight_decay']!r} needs base='e'; base 2 has updates alone")
        weights = self.scheme.weights
        if self._base != 2 and weights is not None and isinstance(weights.format, LogFormat):
            raise ArgumentError(
                f"base={self._base!r} with {self.scheme.name!r}: weights kept as logarithms move in powers of two; "
                "choose base=2"
            )
