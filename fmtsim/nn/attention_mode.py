"""Give models quantised attention where they call torch's scaled_dot_product_attention, and take it away again."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fmtsim.errors import ArgumentError
from fmtsim.gemm.streams import Generator
from fmtsim.nn.sdpa import quantised_attention
from fmtsim.recipes.spec import AttentionConfig

Model = TypeVar("Model", bound=nn.Module)
Filter = Callable[[nn.Module, str], bool]

HANDLES = "_fmtsim_attention"  # on each module: the hooks that switch the mode on and off
_NAME = re.compile(r"attention|attn", re.IGNORECASE)


class QuantisedAttention(TorchFunctionMode):
    """Run every ``torch.nn.functional.scaled_dot_product_attention`` inside a ``with`` as ``quantised_attention``.

    Args:
        config: Quantisers, blocks, offset and unit.
        generator: As in ``quantised_attention``; an int fixes the draws of every call alike.

    >>> from fmtsim.nn.sdpa import flash_attention_3
    >>> q = torch.eye(32)[None]
    >>> with QuantisedAttention(flash_attention_3(unit=None), generator=0):
    ...     y = F.scaled_dot_product_attention(q, q, q)
    >>> torch.equal(y, F.scaled_dot_product_attention(q, q, q))
    False
    """

    def __init__(self, config: AttentionConfig, generator: Generator = None) -> None:
        super().__init__()
        self._config, self._generator = config, generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the one function."""
        kwargs = {} if kwargs is None else kwargs
        if func is F.scaled_dot_product_attention:
            return quantised_attention(*args, **kwargs, config=self._config, generator=self._generator)
        return func(*args, **kwargs)


def convert_attention(
    model: Model, config: AttentionConfig, *, filter_fn: Filter | None = None, generator: Generator = None
) -> Model:
    """Quantise the attention of a model, in place, wherever its modules call torch's scaled_dot_product_attention.

    Modules keep their classes, Parameters and state_dict; two hooks on each switch ``QuantisedAttention`` on while its
    forward runs, also where activation checkpointing runs it again. It goes with ``fmtsim.convert``, in any order.
    Models that multiply scores themselves are not changed: Hugging Face's need ``attn_implementation="sdpa"``, and
    nn.MultiheadAttention ``need_weights=False``.

    Args:
        model: Any module.
        config: Quantisers, blocks, offset and unit, such as ``flash_attention_3()``.
        filter_fn: ``filter_fn(module, name)`` says which modules; None takes those whose class has "attention" or
            "attn" in its name and which hold none of that kind.
        generator: Keys of random signs: None draws from torch's default generator, an int makes one torch.Generator
            for the whole model, a torch.Generator is used as it is.

    Raises:
        ArgumentError: No module is chosen, or one is converted already. The model is then unchanged.
    """
    chosen = [(name, module) for name, module in model.named_modules() if _wanted(module, name, filter_fn)]
    if not chosen:
        raise ArgumentError(
            f"convert_attention found no attention in {type(model).__name__}; "
            "pass filter_fn= to name the modules that call scaled_dot_product_attention"
        )
    for name, module in chosen:
        if HANDLES in module.__dict__:
            raise ArgumentError(f"the attention of {name!r} is converted already; call revert_attention(model) first")
    keys = torch.Generator().manual_seed(generator) if isinstance(generator, int) else generator
    for _, module in chosen:
        module.__dict__[HANDLES] = _hooked(module, config, keys)
    return model


def revert_attention(model: Model) -> Model:
    """Take quantised attention out of a model again, in place; raise ArgumentError where there is none."""
    converted = [module for module in model.modules() if HANDLES in module.__dict__]
    if not converted:
        raise ArgumentError(f"{type(model).__name__} has no converted attention; call convert_attention first")
    for module in converted:
        for handle in module.__dict__.pop(HANDLES):
            handle.remove()
    return model


def _hooked(module: nn.Module, config: AttentionConfig, generator: Generator) -> tuple[Any, Any]:
    active: list[QuantisedAttention] = []  # a stack: a module may call itself

    def enter(*_: Any) -> None:
        active.append(QuantisedAttention(config, generator))
        active[-1].__enter__()

    def leave(*_: Any) -> None:
        if active:
            active.pop().__exit__(None, None, None)

    first = module.register_forward_pre_hook(enter)
    return first, module.register_forward_hook(leave, always_call=True)


def _wanted(module: nn.Module, name: str, filter_fn: Filter | None) -> bool:
    if filter_fn is not None:
        return filter_fn(module, name)
    inner = (part for part in module.modules() if part is not module)
    return _named(module) and not any(map(_named, inner))


def _named(module: nn.Module) -> bool:
    return _NAME.search(type(module).__name__) is not None
