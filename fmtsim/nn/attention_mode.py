# SPDX-License-Identifier: Apache-2.0
"""Give models quantised attention where they call torch's scaled_dot_product_attention, and take it away again."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from fmtsim.gemm.layers.keys import Generator
from fmtsim.gemm.products.resolver import target_or_unit
from fmtsim.nn.attention import multi_head, running
from fmtsim.nn.attention_call import AttentionCall, call_of
from fmtsim.nn.sdpa import attend
from fmtsim.recipes.attention import AttentionConfig
from fmtsim.support.dispatch import OwnMode
from fmtsim.support.errors import ArgumentError, FmtsimError

Model = TypeVar("Model", bound=nn.Module)
Filter = Callable[[nn.Module, str], bool]

ATTENTION: Final = "_fmtsim_attention"  # on each module: its Attended
_FUNCTION: Final = "scaled_dot_product_attention"
_NAME = re.compile(r"attention|attn", re.IGNORECASE)


@dataclass(slots=True, kw_only=True)
class Attended:
    """Say what runs in place of a module's scaled_dot_product_attention.

    Args:
        name: The module's name in the converted model.
        call: Quantisers and random numbers.
        recipe: Whether a recipe put it there, which ``revert`` takes away with the recipe.
        strict: Whether the module has to call the function.
        forward: A forward that the instance had of its own, or None.
    """

    name: str
    call: AttentionCall
    recipe: bool
    strict: bool
    forward: Any = None


class QuantisedAttention(OwnMode):
    """Run every ``torch.nn.functional.scaled_dot_product_attention`` inside a ``with`` as ``quantised_attention``.

    Args:
        config: Quantisers, blocks, offset and unit; or an AttentionCall, which has its generator.
        generator: As in ``quantised_attention``; an int fixes the draws of every call alike.

    >>> from fmtsim.recipes import flash_attention_3
    >>> q = torch.eye(32)[None]
    >>> with QuantisedAttention(flash_attention_3(unit=None), generator=0):
    ...     y = F.scaled_dot_product_attention(q, q, q)
    >>> torch.equal(y, F.scaled_dot_product_attention(q, q, q))
    False
    """

    def __init__(self, config: AttentionConfig | AttentionCall, generator: Generator = None) -> None:
        super().__init__()
        self._call = config if isinstance(config, AttentionCall) else call_of(config, generator)
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the one function."""
        kwargs = {} if kwargs is None else kwargs
        if func is F.scaled_dot_product_attention:
            self.used = True
            return attend(self._call, *args, **kwargs)
        if func is F.multi_head_attention_forward:  # torch runs it as a whole, without asking about what it calls
            return self._multi_head(args, kwargs)
        if func is torch.Tensor.unflatten:  # torch.compile cannot trace this method under a mode
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)

    def _multi_head(self, args: Any, kwargs: Any) -> Any:
        self.used = self.used or not kwargs.get("need_weights", True)
        running().append(self._call)
        try:
            return _MULTI_HEAD(*args, **kwargs)
        finally:
            running().pop()


def _replaced(*args: Any, **kwargs: Any) -> torch.Tensor:
    return attend(running()[-1], *args, **kwargs)


_MULTI_HEAD: Final = multi_head(**{_FUNCTION: _replaced})


def convert_attention(
    model: Model, config: AttentionConfig, *, target: Any = None, unit: Any = None, datapath: Any = None,
    filter_fn: Filter | None = None, generator: Generator = None,
) -> Model:  # fmt: skip
    """Quantise the attention of a model, in place, wherever its modules call torch's scaled_dot_product_attention.

    Modules keep their classes, Parameters, hooks and state_dict; only their instance's forward changes, which runs the
    old one with ``QuantisedAttention`` switched on, also where activation checkpointing runs it again. It goes with
    ``fmtsim.convert``, in any order; a recipe with ``attention`` does it there.

    Args:
        model: Any module.
        config: Quantisers, blocks, offset and units, such as ``flash_attention_3()``.
        target: A machine, by name or plan file, whose units multiply in all six products (``AttentionConfig.on``).
        unit: A matrix unit that does. None of the three leaves the units to the config.
        datapath: The arithmetic of a unit as a record, likewise.
        filter_fn: ``filter_fn(module, name)`` says which modules; None takes those whose class has "attention" or
            "attn" in its name, or whose forward names the function, and which hold none of that kind. These have to
            call it: Hugging Face's need ``attn_implementation="sdpa"``, and nn.MultiheadAttention
            ``need_weights=False``.
        generator: Keys of random signs: None draws from torch's default generator, an int makes one torch.Generator
            for the whole model, a torch.Generator is used as it is.

    Raises:
        ArgumentError, FormatError: No module is chosen, one is converted already, or the machine does not multiply an
            operand. The model is then unchanged. Later, a module that runs without calling the function.
    """
    AttentionCall(config)  # refuses what is not a config
    if any(each is not None for each in (target, unit, datapath)):
        config = config.on(target=target, unit=target_or_unit("convert_attention", target, unit, datapath))
    if filter_fn is None:
        chosen = attentions(model)
    else:
        chosen = [(name, module) for name, module in model.named_modules() if filter_fn(module, name)]
    if not chosen:
        raise ArgumentError(
            f"convert_attention found no attention in {type(model).__name__}; "
            "pass filter_fn= to name the modules that call scaled_dot_product_attention"
        )
    check_attentions(chosen)
    keys = torch.Generator().manual_seed(generator) if isinstance(generator, int) else generator
    attach(chosen, config, keys, recipe=False, strict=filter_fn is None)
    return model


def revert_attention(model: Model) -> Model:
    """Take quantised attention out of a model again, in place; raise ArgumentError where there is none."""
    if not detach(model):
        raise ArgumentError(f"{type(model).__name__} has no converted attention; call convert_attention first")
    return model


def attentions(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that call torch's function, as their class's name or its forward says."""
    found = {name: module for name, module in model.named_modules() if _attends(module)}
    return [
        (name, module)
        for name, module in found.items()
        if not any(part is not module and _attends(part) for part in module.modules())
    ]


def check_attentions(chosen: list[tuple[str, nn.Module]]) -> None:
    """Refuse modules that are converted already, or that run attention of another kind.

    Raises:
        ArgumentError: There is one.
    """
    for name, module in chosen:
        if ATTENTION in module.__dict__:
            raise ArgumentError(f"the attention of {name!r} is converted already; call revert_attention(model) first")
        check_kind_of_attention(name, module)


def check_kind_of_attention(name: str, module: nn.Module) -> None:
    """Raise ArgumentError for a module of Hugging Face whose attention does not call torch's function."""
    runs = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")
    if isinstance(runs, str) and runs != "sdpa" and _attends(module):
        raise ArgumentError(
            f"the attention of {name!r} runs attn_implementation={runs!r}, which does not call "
            f"{_FUNCTION}; build the model with attn_implementation='sdpa'"
        )


def attach(
    chosen: list[tuple[str, nn.Module]], config: AttentionConfig, generator: Generator, *, recipe: bool, strict: bool
) -> None:
    """Give modules quantised attention."""
    for name, module in chosen:
        own = module.__dict__.get("forward")
        module.__dict__[ATTENTION] = Attended(
            name=name, call=AttentionCall(config, generator), recipe=recipe, strict=strict, forward=own
        )
        module.__dict__["forward"] = partial(_attended, module)


def detach(model: nn.Module, *, recipe: bool | None = None) -> int:
    """Take quantised attention out again, of recipes, of others or all (None); return how many modules had it."""
    found = [module for module in model.modules() if ATTENTION in module.__dict__]
    found = [module for module in found if recipe in (None, module.__dict__[ATTENTION].recipe)]
    for module in found:
        own = module.__dict__.pop(ATTENTION).forward
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own
    return len(found)


def _attended(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward with its attention quantised."""
    how: Attended = module.__dict__[ATTENTION]
    mode = QuantisedAttention(how.call)
    with mode:
        if torch.compiler.is_compiling():  # the compiler names the line itself
            y = _own(module, how)(*args, **kwargs)
        else:
            try:
                y = _own(module, how)(*args, **kwargs)
            except FmtsimError as error:
                raise _named(error, how.name) from error
    if how.strict and not mode.used:
        raise ArgumentError(
            f"layer {how.name!r} ran without calling {_FUNCTION}, so nothing was quantised; call nn.MultiheadAttention "
            "with need_weights=False, build Hugging Face models with attn_implementation='sdpa' and without "
            "output_attentions, or take its attention out with fmtsim.nn.revert_attention"
        )
    return y


def _own(module: nn.Module, how: Attended) -> Any:
    return partial(type(module).forward, module) if how.forward is None else how.forward


def _named(error: FmtsimError, name: str) -> FmtsimError:
    """Return an error that names a layer, unless it names one."""
    text = str(error)
    return error if text.startswith("layer ") else type(error)(f"layer {name!r}: {text}")


def _attends(module: nn.Module) -> bool:
    if _NAME.search(type(module).__name__) is not None:
        return True
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and _FUNCTION in code.co_names
