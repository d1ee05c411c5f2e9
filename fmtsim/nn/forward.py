# SPDX-License-Identifier: Apache-2.0
"""A module's forward: change it, run it to look at it, and read the names in its code.

``wrap`` gives one module another forward as an attribute of the instance, ``Substituted`` hands functions other tensors
in place of its Parameters; its class and what it holds stay. Only ``names_in_forward`` reads bytecode.
"""

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from fmtsim.nn.operations import GROUPED_NAMES, ModelMode

# Attributes of an instance that may hold the forward of its class; Accelerate's hooks keep it in the second.
SLOTS: Final = ("forward", "_old_forward")
ATTENTION: Final = "_fmtsim_attention"  # on each module whose attention is quantised: its Attended


class _Wrapped(partial):  # type: ignore[type-arg]
    """A forward with the signature of the one that it calls, which trainers ask for the names of inputs."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_inner(*self.args[:2]))


def is_own(module: nn.Module, forward: Any) -> bool:
    """Return True if a function is the bound forward of a module's class."""
    return isinstance(forward, MethodType) and (forward.__self__, forward.__func__) == (module, type(module).forward)


def change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give a module another class, whose forward runs also where the instance or Accelerate's hook has the old one."""
    for slot in SLOTS:
        if is_own(module, module.__dict__.get(slot)):
            module.__dict__[slot] = MethodType(cls.forward, module)
    module.__class__ = cls  # type: ignore[assignment]


def hidden_by(module: nn.Module) -> str | None:
    """Return the name of the function in an instance that hides its class's forward, None where that runs."""
    forward = module.__dict__.get("_old_forward", module.__dict__.get("forward"))  # which Accelerate's hook calls
    while isinstance(forward, _Wrapped):
        forward = forward.args[1]
    if forward is None or is_own(module, forward):
        return None
    function = forward.func if isinstance(forward, partial) else forward
    return str(getattr(function, "__qualname__", type(function).__name__))


def wrap(module: nn.Module, mark: str, run: Callable[..., Any]) -> None:
    """Call ``run(module, forward, ...)`` where the module's forward is called, until ``unwrap`` of the same mark.

    Args:
        module: Any module.
        mark: Name of the attribute that remembers the new forward.
        run: A function of the module, of the forward that it had, and of the arguments.
    """
    runs = [run]  # emptied by unwrap
    slot = SLOTS["_old_forward" in module.__dict__]  # inside Accelerate's hook, which loads weights
    before = module.__dict__.get(slot)
    before = None if is_own(module, before) else before  # found by the class when it runs, which may change
    module.__dict__[mark] = module.__dict__[slot] = _Wrapped(_run, module, before, runs)


def unwrap(module: nn.Module, mark: str) -> None:
    """Undo ``wrap``; where another forward was put around it since, it stays there and calls the inner forward."""
    wrapped = module.__dict__.pop(mark)
    _, inner, runs = wrapped.args
    runs.clear()
    for slot in SLOTS:
        if module.__dict__.get(slot) is wrapped:
            module.__dict__[slot] = inner or MethodType(type(module).forward, module)
    if is_own(module, module.__dict__.get("forward")):
        del module.__dict__["forward"]


def unwrap_marked(model: nn.Module, mark: str, forward_mark: str, recipe: bool | None) -> int:
    """Undo ``wrap`` in the modules whose attribute ``mark`` holds a rule; return how many that was.

    Args:
        model: The model.
        mark: Name of the attribute of the rule, which says whether a recipe put it there.
        forward_mark: As in ``wrap``.
        recipe: Undo rules of recipes (True), others (False), or all (None).
    """
    marked = [m for m in model.modules() if mark in m.__dict__ and recipe in (None, m.__dict__[mark].recipe)]
    for module in marked:
        del module.__dict__[mark]
        unwrap(module, forward_mark)
    return len(marked)


def wrap_parts(
    model: nn.Module, parts: Iterable[nn.Module], how: Any, marks: tuple[str, str], run_part: Callable[..., Any],
    run: Callable[..., Any],
) -> None:  # fmt: skip
    """Wrap a model and some of its parts until ``unwrap_parts``, and store ``how`` on each.

    Args:
        model: The model, whose forward becomes ``run``.
        parts: Modules inside it, whose forwards become ``run_part``.
        how: The value of the first mark's attribute.
        marks: Names of the attribute for that, and of the one that ``wrap`` takes.
        run_part, run: As in ``wrap``.
    """
    for module, call in (*((part, run_part) for part in parts), (model, run)):
        module.__dict__[marks[0]] = how
        wrap(module, marks[1], call)


def unwrap_parts(model: nn.Module, marks: tuple[str, str]) -> bool:
    """Undo ``wrap_parts``; return True if there was something to undo."""
    parts = [module for module in model.modules() if module.__dict__.pop(marks[0], None) is not None]
    for module in parts:
        unwrap(module, marks[1])
    return bool(parts)


def forward_of(module: nn.Module, mark: str) -> Callable[..., Any]:
    """Return the forward that a wrapped module had."""
    return _inner(*module.__dict__[mark].args[:2])


def _inner(module: nn.Module, instance_forward: Callable[..., Any] | None) -> Callable[..., Any]:
    return partial(type(module).forward, module) if instance_forward is None else instance_forward


def _run(module: nn.Module, instance_forward: Any, runs: list[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
    forward = _inner(module, instance_forward)
    if not runs:  # reverted
        return forward(*args, **kwargs)
    return runs[0](module, forward, *args, **kwargs)


class Substituted(ModelMode):
    """Hand functions other tensors in place of a module's own Parameters.

    Args:
        module: The module.
        change: From a Parameter to what stands for it.
    """

    def __init__(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._stands_for = {p: change(p) for p in module.parameters(recurse=False)}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call the function."""
        return func(*map(self._of, args), **{name: self._of(value) for name, value in kwargs.items()})

    def _of(self, value: Any) -> Any:
        return self._stands_for.get(value, value) if isinstance(value, nn.Parameter) else value


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run something without gradients, by operators that can be counted; then put buffers and random states back."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    generators = [getattr(m.__dict__.get("emulation"), "generator", None) for m in model.modules()]
    generators += [m.__dict__[ATTENTION].call.generator for m in model.modules() if ATTENTION in m.__dict__]
    states = [(g, g.get_state()) for g in {id(g): g for g in generators if isinstance(g, torch.Generator)}.values()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    fast = torch.backends.mha.get_fastpath_enabled()
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for generator, state in states:
                generator.set_state(state)
            for buffer, value in buffers:
                buffer.resize_(value.shape).copy_(value)


@contextmanager
def running_modules() -> Iterator[list[nn.Module]]:
    """Yield a list of the modules whose forward is running, the innermost last."""
    stack: list[nn.Module] = []

    def leave(*_: Any) -> None:
        if stack:
            stack.pop()

    before = hooks.register_module_forward_pre_hook(lambda module, _: stack.append(module))
    after = hooks.register_module_forward_hook(leave, always_call=True)
    try:
        yield stack
    finally:
        before.remove()
        after.remove()


def names_in_forward(cls: type[nn.Module]) -> frozenset[str]:
    """Return all names in the code of a class's forward and in the functions that it names, outside of torch.

    ``convert`` has to say which Parameters a model may multiply with (rules name them, reports list them) before the
    model has run; a ``ModelMode`` sees a product only when it runs. A batch as an argument of ``convert`` would make
    this reading of bytecode unnecessary. The operator ``@`` counts as the name ``matmul``, and so does a call through a
    table of functions, such as the experts of transformers, which also counts as ``grouped_mm`` where the table's
    functions are not known.
    """
    return _names(cls)  # type: ignore[arg-type]  # mypy takes nn.Module's __hash__ for its metaclass's


@lru_cache(maxsize=1024)
def _names(cls: type[nn.Module]) -> frozenset[str]:
    return _reached(cls, [vars(base).get("forward") for base in cls.__mro__ if base is not nn.Module])


def forward_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names in the code of a module's forward itself; none where the forward is not a Python function."""
    code = getattr(type(module).forward, "__code__", None)
    return () if code is None else code.co_names


def is_of_torch(value: Any) -> bool:
    """Return True if a value is defined by torch or Python."""
    return str(getattr(value, "__module__", "torch")).split(".")[0] in ("torch", "None", "builtins")


def _reached(cls: type[nn.Module], todo: list[Any]) -> frozenset[str]:
    """Return all names in the code of functions and in those that they name; ``cls`` has the methods."""
    names, seen = set[str](), set[CodeType]()
    while todo:
        function: Any = todo.pop()
        function = function.fget if isinstance(function, property) else function
        if isinstance(function, Mapping):  # a table of functions, to which others may be added
            held = [value for value in function.values() if callable(value) and not is_of_torch(value)]
            are_functions = all(isinstance(value, FunctionType) for value in held)
            names.update(("matmul",) if held else ())
            names.update(GROUPED_NAMES & _reached(cls, held) if are_functions else GROUPED_NAMES)
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        todo += [cell.cell_contents for cell in function.__closure__ or () if not _empty(cell)]
        todo.append(getattr(function, "__wrapped__", None))
        for code in _codes(function.__code__):
            names.update(code.co_names)
            names.update("matmul" for step in dis.get_instructions(code) if step.argrepr in ("@", "@="))
            called = [getattr(cls, name, function.__globals__.get(name)) for name in code.co_names]
            todo += [used for used in called if isinstance(used, property | Mapping) or not is_of_torch(used)]
    return frozenset(names)


def _empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
