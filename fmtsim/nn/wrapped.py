# SPDX-License-Identifier: Apache-2.0
"""Give one module another forward, as an attribute of the instance, or other tensors in place of its Parameters.

Its class and what it holds stay.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from fmtsim.support.dispatch import OwnMode


class _Wrapped(partial):  # type: ignore[type-arg]
    """A forward with the signature of the one that it calls, which trainers ask for the names of inputs."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(forward_of(*self.args[:2]))


def wrap(module: nn.Module, mark: str, run: Callable[..., Any]) -> None:
    """Call ``run(module, forward, ...)`` where the module's forward is called, until ``unwrap`` of the same mark.

    Args:
        module: Any module.
        mark: Name of the attribute that remembers a forward which the instance had of its own, or None.
        run: A function of the module, of the forward that it had, and of the arguments.
    """
    module.__dict__[mark] = module.__dict__.get("forward")
    module.__dict__["forward"] = _Wrapped(_run, module, mark, run)


def unwrap(module: nn.Module, mark: str) -> None:
    """Undo ``wrap``; where another forward was put around it since, that one goes on calling ``run``."""
    forward = module.__dict__["forward"]
    if not (isinstance(forward, _Wrapped) and forward.args[1] == mark):
        return
    own = module.__dict__.pop(mark)
    del module.__dict__["forward"]
    if own is not None:
        module.__dict__["forward"] = own


def wrap_parts(
    model: nn.Module, parts: Iterable[nn.Module], how: Any, marks: tuple[str, str], run_part: Callable[..., Any],
    run: Callable[..., Any],
) -> None:  # fmt: skip
    """Wrap a model and some of its parts until ``unwrap_parts``, and write on each how.

    Args:
        model: The model, whose forward becomes ``run``.
        parts: Modules inside it, whose forwards become ``run_part``.
        how: What the first mark holds on each.
        marks: Names of the attribute for that, and of the one that ``wrap`` takes.
        run_part, run: As in ``wrap``.
    """
    for module, call in (*((part, run_part) for part in parts), (model, run)):
        module.__dict__[marks[0]] = how
        wrap(module, marks[1], call)


def unwrap_parts(model: nn.Module, marks: tuple[str, str]) -> bool:
    """Undo ``wrap_parts``; say whether there was something to undo."""
    found = [module for module in model.modules() if module.__dict__.pop(marks[0], None) is not None]
    for module in found:
        unwrap(module, marks[1])
    return bool(found)


def forward_of(module: nn.Module, mark: str) -> Callable[..., Any]:
    """Return the forward that a wrapped module had."""
    own = module.__dict__[mark]
    return partial(type(module).forward, module) if own is None else own


def _run(module: nn.Module, mark: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(module, forward_of(module, mark), *args, **kwargs)


class Substituted(OwnMode):
    """Hand functions other tensors in place of a module's own Parameters.

    Args:
        module: The module.
        change: From a Parameter to what stands for it.
    """

    def __init__(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._own = {p: change(p) for p in module.parameters(recurse=False)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        kwargs = {} if kwargs is None else {name: self._of(value) for name, value in kwargs.items()}
        return func(*map(self._of, args), **kwargs)

    def _of(self, value: Any) -> Any:
        return self._own.get(value, value) if isinstance(value, nn.Parameter) else value
