# SPDX-License-Identifier: Apache-2.0
"""One record on a module says what fmtsim changed there, and undoes it.

``wrap`` is the one way to give a module another forward, ``change_class`` the one way to give it another class, and
``Conversion.undo`` takes back what ``convert`` did. A module that is pickled or copied takes its record along. Calls
inside a user's forward are seen by a torch mode that the wrapped forward opens (``fmtsim.nn.operations.ModelMode``).
"""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, Final, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

ATTRIBUTE: Final = "_fmtsim"  # the attribute of a module that holds its Conversion
STATE: Final = "fmtsim_state"  # the submodule in which delayed scaling remembers
PRODUCTS: Final = "fmtsim_products"  # the submodule with what multiplies a module's own Parameters, by their names
NAME: Final = "fmtsim_recipe"  # the buffer with the recipe's name, uint8: in UTF-8; one zero for a config
# Attributes of an instance that may hold the forward of its class; Accelerate's hooks keep it in the second.
SLOTS: Final = ("forward", "_old_forward")

# What a change makes the module do; behind the semicolon, the settings of the change.
Kind = Literal[
    "products",  # emulate the products that its own code writes; a list of owners and names of Parameters
    "attention",  # quantise its attention; an Attended
    "swiglu",  # smooth its gated product; a Smoothing
    "scaled",  # scale operations, on the root and on each norm; a ScaledModel
    "saving",  # save activations in low precision, on the root and on each norm; a Saving
    "check",  # tell whether a forward that was set after convert runs the layer's products; None
    "input",  # round its input, as a PTQ recipe says; a Quantizer
    "observed",  # run the same module of a shadow beside it; that module
    "observed attention",  # run a shadow's attention beside the module's; the shadow's Attended
]


class Wrapped(partial):  # type: ignore[type-arg]
    """A forward with the signature of the one that it calls, which trainers ask for the names of inputs."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(inner_forward(self.args[2]))

    @property
    def __func__(self) -> Callable[..., Any]:  # what compressed-tensors wraps when it opens a model at its first call
        return lambda _, *args, **kwargs: self(*args, **kwargs)


@dataclass(eq=False, kw_only=True)
class Change:
    """Describe one change of a module: another forward, or a hook.

    Args:
        settings: What ``run`` or the hook reads; see ``Kind``.
        recipe: Whether ``revert`` undoes it. What ``convert_attention``, ``convert_swiglu`` or ``observe`` did stays.
        run: Called as ``run(settings, module, forward, ...)`` in place of the module's forward; None once it is undone.
        forward: The function in the module's ``__dict__`` that calls ``run``.
        hook: A hook of torch, for changes without another forward.
    """

    settings: Any = None
    recipe: bool = True
    run: Callable[..., Any] | None = None
    forward: Wrapped | None = None
    hook: RemovableHandle | None = None


@dataclass(eq=False, kw_only=True)
class Root:
    """Hold what ``convert`` decided, on the module that it was given.

    Args:
        recipe: The recipe's name, None for a config.
        reasons: Why each other module was left alone, by name.
        notes: What a recipe exchanged, and what of it was not done.
        total_steps: Optimizer steps of the run, where a recipe needs them.
        quantised: What ``ptq`` did, a ``fmtsim.ptq.ptq_state.Quantised``.
        hooks: Hooks on the module, by what they are for.
        forwards: Training forwards under a schedule, while they are counted.
    """

    recipe: str | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    total_steps: int | None = None
    quantised: Any = None
    hooks: dict[str, RemovableHandle] = field(default_factory=dict)
    forwards: int = 0


@dataclass(eq=False, kw_only=True)
class Conversion:
    """List what fmtsim changed on one module.

    The class that a converted layer had is not here: its emulated class has it as ``original_class``, by which such a
    layer is pickled.

    Args:
        changes: By kind, in the order in which they were made: the last one has the outermost forward.
        attributes: Values of the attributes that ``convert`` switched off.
        root: What ``convert`` decided; None on modules that it was not given.
    """

    changes: dict[Kind, Change] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    root: Root | None = None

    def copy(self) -> "Conversion":
        """Return a record for a copy of the module, which has the changes of the module so far."""
        return dataclasses.replace(self, changes=self.changes.copy(), attributes=self.attributes.copy())

    def undo(self, module: nn.Module) -> None:
        """Undo what ``convert`` did to the module that has this record."""
        # 1. Forwards, the outermost first. Those of other verbs stay.
        for kind in [kind for kind, change in self.changes.items() if change.recipe][::-1]:
            unwrap(module, kind)
        # 2. The class. A ParameterProduct has no original one: it leaves with the submodule PRODUCTS of its owner.
        original = vars(type(module)).get("original_class") if hasattr(module, "emulation") else None
        if original is not None:
            module.__dict__.pop("emulation", None)
            change_class(module, original)
        # 3. What convert added to the state_dict.
        for name in (STATE, PRODUCTS):
            module._modules.pop(name, None)
        module._buffers.pop(NAME, None)
        # 4. Attributes that switched inference kernels off, and hooks of the root.
        module.__dict__.update(self.attributes)
        for hook in () if self.root is None else self.root.hooks.values():
            hook.remove()
        # 5. The record, unless changes of other verbs are left in it.
        self.attributes, self.root = {}, None
        if not self.changes:
            module.__dict__.pop(ATTRIBUTE, None)


def conversion(module: nn.Module) -> Conversion:
    """Return the record of a module for reading; of an unchanged module an empty one, which is not kept."""
    return module.__dict__.get(ATTRIBUTE) or Conversion()


def record(module: nn.Module) -> Conversion:
    """Return the record of a module for writing."""
    return module.__dict__.setdefault(ATTRIBUTE, Conversion())  # type: ignore[no-any-return]


def root(model: nn.Module) -> Root:
    """Return what ``convert`` decided for a model, empty if ``convert`` was not given this module."""
    return conversion(model).root or Root()


def settings(module: nn.Module, kind: Kind) -> Any:
    """Return the settings of a module's change of one kind, None where the module has no such change."""
    change = conversion(module).changes.get(kind)
    return None if change is None else change.settings


def all_settings(model: nn.Module, kind: Kind) -> list[Any]:
    """Return the settings of all changes of one kind in a model, in the order of its modules."""
    return [change.settings for m in model.modules() if (change := conversion(m).changes.get(kind)) is not None]


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
    while isinstance(forward, Wrapped):
        forward = forward.args[1]
    if forward is None or is_own(module, forward):
        return None
    function = forward.func if isinstance(forward, partial) else forward
    return str(getattr(function, "__qualname__", type(function).__name__))


def wrap(module: nn.Module, kind: Kind, run: Callable[..., Any], settings: Any = None, *, recipe: bool = True) -> None:
    """Call ``run(settings, module, forward, ...)`` where the module's forward is called, until ``unwrap`` of that kind.

    Args:
        module: Any module.
        kind: What the change is.
        run: A function of the settings, the module, the forward that it had, and the arguments.
        settings, recipe: See ``Change``.
    """
    change = Change(settings=settings, recipe=recipe, run=run)
    slot = SLOTS["_old_forward" in module.__dict__]  # inside Accelerate's hook, which loads weights
    before = module.__dict__.get(slot)
    before = None if is_own(module, before) else before  # looked up at each call: the class may change
    change.forward = module.__dict__[slot] = Wrapped(_run, module, before, change)
    changes = record(module).changes
    changes.pop(kind, None)  # a second change of the kind is the outermost one again
    changes[kind] = change


def unwrap(module: nn.Module, kind: Kind) -> None:
    """Undo a change; where another forward was put around its own since, that one stays and calls the inner forward."""
    left = record(module)
    change = left.changes.pop(kind)
    change.run = None  # its forward may stay inside another one, and then only passes calls on
    inner = None if change.forward is None else change.forward.args[1]
    for slot in SLOTS:
        if change.forward is not None and module.__dict__.get(slot) is change.forward:
            module.__dict__[slot] = inner or MethodType(type(module).forward, module)
    if is_own(module, module.__dict__.get("forward")):
        del module.__dict__["forward"]  # the class's own forward runs without it
    if change.hook is not None:
        change.hook.remove()
    if not left.changes and not left.attributes and left.root is None:
        del module.__dict__[ATTRIBUTE]


def unwrap_all(model: nn.Module, kind: Kind) -> int:
    """Undo all changes of a kind in a model; return how many there were."""
    changed = [module for module in model.modules() if kind in conversion(module).changes]
    for module in changed:
        unwrap(module, kind)
    return len(changed)


def inner_forward(change: Change) -> Callable[..., Any]:
    """Return the forward that a module had before a change."""
    assert change.forward is not None
    module, instance_forward, _ = change.forward.args
    return partial(type(module).forward, module) if instance_forward is None else instance_forward


def _run(module: nn.Module, instance_forward: Any, change: Change, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(module).forward, module) if instance_forward is None else instance_forward
    if change.run is None:  # undone
        return forward(*args, **kwargs)
    return change.run(change.settings, module, forward, *args, **kwargs)
