# SPDX-License-Identifier: Apache-2.0
"""``fmtsim.simulate``: an unchanged model, forward, backward and optimizer, with the bits of a GPU."""

import sys
from collections import Counter
from contextlib import ExitStack
from typing import Any, Self
from unittest import mock

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from fmtsim.machine.unknown import Guess, Nondeterministic, UnknownOrder
from fmtsim.support.errors import ArgumentError, did_you_mean

TARGETS = ("h200", "h100")
_HOST_DROPOUT = functional.dropout
_NO_DROPOUT = ("_scaled_dot_product_flash_attention_for_cpu",)  # tagged as random, and refused where it drops


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Return functional.dropout by one operator, as on a GPU; on a CPU torch takes three."""
    if training and 0 < p < 1 and not inplace and x.numel():
        return torch.native_dropout(x, p, True)[0]
    return _HOST_DROPOUT(x, p, training, inplace)


class simulate(TorchDispatchMode):  # noqa: N801, a verb that is used as a context
    """Compute what runs inside as a GPU does: forward, backward and optimizer steps of an eager model on a CPU.

    Args:
        target: ``"h200"`` or ``"h100"``, as PyTorch 2.11 with CUDA 13.0 runs there.
        strict: Raise at the first operator whose bits are not known, instead of computing it as the host does.

    ``exact``, ``unknown`` and ``nondeterministic`` count operators; ``summary`` is a table of them.

    Raises:
        ArgumentError: An unknown target; with ``strict`` an operator whose bits are not known.

    >>> import torch, fmtsim
    >>> x = torch.linspace(-4, 4, 64)
    >>> with fmtsim.simulate(target="h200", strict=True) as run:
    ...     y = torch.nn.functional.silu(x)
    >>> run.exact["silu"], (y != torch.nn.functional.silu(x)).any().item()
    (1, True)
    """

    def __init__(self, *, target: str = "h200", strict: bool = False) -> None:
        super().__init__()
        if target not in TARGETS:
            raise ArgumentError(
                f"target={target!r} cannot be simulated{did_you_mean(target, TARGETS)}; choose from {TARGETS}"
            )
        from fmtsim.machine import operators  # with numba, which takes a second

        self.target, self.strict, self._operators = target, strict, operators
        self._generator = operators.random.Generator()
        self._entered: list[ExitStack] = []
        self.exact: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.nondeterministic: Counter[str] = Counter()

    def __enter__(self) -> Self:
        """Begin, and take the ways that torch takes on a GPU: one kernel for dropout, foreach optimizers."""
        optimizers = sys.modules[torch.optim.Optimizer.__module__]
        devices = [*optimizers._get_foreach_kernels_supported_devices(), "cpu"]
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(functional, "dropout", _dropout))
            stack.enter_context(
                mock.patch.object(optimizers, "_get_foreach_kernels_supported_devices", lambda: devices)
            )
            super().__enter__()
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *exception: Any) -> None:
        """End."""
        super().__exit__(*exception)
        self._entered.pop().close()

    @property
    def summary(self) -> str:
        """What was computed how, a line for each operator."""
        lines = [f"{self.target}: {self.exact.total()} operators exact"]
        for title, counts in (
            ("computed by torch on the host", self.unknown),
            ("no bits to reproduce", self.nondeterministic),
        ):
            lines += [f"  {title}: {what} ({count})" for what, count in counts.most_common()]
        return "\n".join(lines)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute one operator."""
        kwargs = kwargs or {}
        packet = func.overloadpacket
        name = str(packet).removeprefix("aten.")
        if name == "native_dropout":
            self.exact[name] += 1
            return self._operators.random.dropout(self._generator, *args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and name not in _NO_DROPOUT:
            self._note(name, UnknownOrder("random numbers, which a GPU draws otherwise"))
            return func(*args, **kwargs)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if torch.is_tensor(x)]
        operators = self._operators
        if packet not in operators.STABLE and not any(x.is_floating_point() for x in tensors):
            return func(*args, **kwargs)
        handler = operators.PRODUCTS.get(packet) or operators.KNOWN.get(packet)
        try:
            if handler is not None:
                target = (self.target,) if packet in operators.PRODUCTS else ()
                result = handler(*target, *args, **kwargs)
            elif packet in operators.SAME:
                result = func(*args, **kwargs)
            else:
                raise UnknownOrder(name)
        except (UnknownOrder, Nondeterministic, Guess) as reason:
            self._note(name, reason)
            return reason.args[1] if isinstance(reason, Guess) else func(*args, **kwargs)
        self.exact[name] += 1
        written = any(returned.alias_info is not None for returned in func._schema.returns)
        return result if written else tree_map(lambda x: operators.canonical(x) if torch.is_tensor(x) else x, result)

    def _note(self, name: str, reason: Exception) -> None:
        """Count an operator that is not exact; with ``strict`` refuse it."""
        counts = self.nondeterministic if isinstance(reason, Nondeterministic) else self.unknown
        detail = name if reason.args[0] == name else f"{name}: {reason.args[0]}"
        if self.strict:
            raise ArgumentError(
                f"{detail}: its bits on {self.target} are not known; leave strict=False to compute it as the host does"
            ) from None
        counts[detail] += 1
