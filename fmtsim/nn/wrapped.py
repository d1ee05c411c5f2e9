"""Give one module another forward, as an attribute of the instance: its class and what it holds stay."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


def wrap(module: nn.Module, mark: str, run: Callable[..., Any]) -> None:
    """Call ``run(module, forward, ...)`` where the module's forward is called, until ``unwrap`` of the same mark.

    Args:
        module: Any module.
        mark: Name of the attribute that remembers a forward which the instance had of its own, or None.
        run: A function of the module, of the forward that it had, and of the arguments.
    """
    module.__dict__[mark] = module.__dict__.get("forward")
    module.__dict__["forward"] = partial(_run, module, mark, run)


def unwrap(module: nn.Module, mark: str) -> None:
    """Undo ``wrap``; where another forward was put around it since, that one goes on calling ``run``."""
    forward = module.__dict__["forward"]
    if not (isinstance(forward, partial) and forward.func is _run and forward.args[1] == mark):
        return
    own = module.__dict__.pop(mark)
    del module.__dict__["forward"]
    if own is not None:
        module.__dict__["forward"] = own


def forward_of(module: nn.Module, mark: str) -> Callable[..., Any]:
    """Return the forward that a wrapped module had."""
    own = module.__dict__[mark]
    return partial(type(module).forward, module) if own is None else own


def _run(module: nn.Module, mark: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(module, forward_of(module, mark), *args, **kwargs)
