# SPDX-License-Identifier: Apache-2.0
"""Attention in models: nn.MultiheadAttention with emulated projections, and quantised scaled dot product attention.

``convert`` emulates the projections of nn.MultiheadAttention; its scores, softmax and weighted sums stay in high
precision. ``convert_attention``, or a recipe with ``attention``, replaces torch's scaled_dot_product_attention
wherever a model calls it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.gemm.layers.keys import Generator
from fmtsim.gemm.products.resolver import check_target
from fmtsim.nn.conversion import settings, unwrap_all, wrap
from fmtsim.nn.forward import forward_names
from fmtsim.nn.modules import EmulatedModule, register_emulated
from fmtsim.nn.operations import ModelMode
from fmtsim.nn.sdpa import AttentionCall, attend, attention_call
from fmtsim.recipes.attention_config import AttentionConfig
from fmtsim.support.errors import ArgumentError, FmtsimError

Model = TypeVar("Model", bound=nn.Module)
Filter = Callable[[nn.Module, str], bool]

_FUNCTION: Final = "scaled_dot_product_attention"
_NAME = re.compile(r"attention|attn", re.IGNORECASE)  # in the names of classes


@dataclass(slots=True, kw_only=True)
class Attended:
    """Hold the call that replaces a module's scaled_dot_product_attention.

    Args:
        name: The module's name in the converted model.
        call: Quantisers and random numbers.
        strict: Whether the module has to call the function.
    """

    name: str
    call: AttentionCall
    strict: bool


class EmulatedMultiheadAttention(EmulatedModule, nn.MultiheadAttention):
    """Apply multi-head attention with quantised in- and out-projections.

    Where query, key and value are one tensor the in-projection is one product with the packed weight, where key and
    value are one tensor they share one, else there are three. Arguments, masks and results are those of
    ``torch.nn.MultiheadAttention``; its fused inference kernel is never taken, because that would skip the emulation.
    """

    original_class = nn.MultiheadAttention
    parts = ("in_proj", "q_proj", "k_proj", "v_proj", "kv_proj", "out_proj")

    @staticmethod
    def matrices(module: nn.MultiheadAttention) -> Iterator[tuple[int, int]]:
        """Yield the size of one projection from each width of input."""
        for inputs in sorted({module.embed_dim, module.kdim, module.vdim}):  # key and value may have other widths
            yield module.embed_dim, inputs

    def input_shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of query, key and value of one sequence."""
        return (rows, self.embed_dim), (rows, self.kdim), (rows, self.vdim)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output and, if asked for, the weights, shaped as in torch.nn.MultiheadAttention."""
        _check(self, query, key, value, attn_mask, is_causal)
        if query.dim() == 2:  # torch would lose sight of tensors that are one
            dim = 0 if self.batch_first else 1
            q = query.unsqueeze(dim)
            k = q if key is query else key.unsqueeze(dim)
            v = k if value is key else value.unsqueeze(dim)
            padding = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
            y, weights = self.forward(q, k, v, padding, need_weights, attn_mask, average_attn_weights, is_causal)
            return y.squeeze(dim), None if weights is None else weights.squeeze(0)
        parts = ["q_proj", "k_proj", "v_proj"]  # in the order in which torch multiplies
        if self._qkv_same_embed_dim and key is value:  # a packed weight, of which one product may take several parts
            parts = ["in_proj"] if query is key else ["q_proj", "kv_proj"]
        with _Projections(self, [*parts, "out_proj"]):
            return nn.MultiheadAttention.forward(
                self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )


register_emulated(EmulatedMultiheadAttention)


# A mode, because torch's multi_head_attention_forward multiplies with the weights itself.
class _Projections(ModelMode):
    """Give the linear products of torch's multi_head_attention_forward to a module's parts, in order.

    torch then does not take its fused inference kernel.
    """

    def __init__(self, module: EmulatedMultiheadAttention, parts: list[str]) -> None:
        super().__init__()
        self._module, self._parts = module, parts

    multi_head = ModelMode.opened_multi_head

    def product(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace a projection."""
        if func is not F.linear:  # bmm and baddbmm: scores and weighted sums
            return func(*args, **kwargs)
        x, w, bias = (*args, None)[:3]
        return self._module.gemm(x, w, bias, self._parts.pop(0))  # each part has scales of its own


def _check(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> None:
    if query.is_nested or key.is_nested or value.is_nested:
        raise ArgumentError(
            "an emulated MultiheadAttention takes no nested tensors; pass padded tensors with key_padding_mask"
        )
    if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
        raise ArgumentError(
            f"MultiheadAttention: query, key and value have {query.dim()}, {key.dim()} and {value.dim()} dimensions; "
            "all need 3, or 2 without a batch"
        )
    sizes = (query.shape[-1], key.shape[-1], value.shape[-1])
    if sizes != (module.embed_dim, module.kdim, module.vdim):
        raise ArgumentError(
            f"MultiheadAttention: query, key and value have {sizes} features; "
            f"expected {(module.embed_dim, module.kdim, module.vdim)}"
        )
    if is_causal and attn_mask is None:
        raise ArgumentError("MultiheadAttention: is_causal=True is a hint about attn_mask; pass attn_mask too")


# A mode, because models call the function inside their own forwards.
class QuantisedAttention(ModelMode):
    """Run every ``torch.nn.functional.scaled_dot_product_attention`` inside a ``with`` as ``quantised_attention``.

    Args:
        config: Quantisers, blocks, offset and unit; or an AttentionCall, which has its generator.
        generator: As in ``quantised_attention``; an int fixes the draws of every call alike.

    >>> from fmtsim.recipes import flash_attention_3
    >>> q = torch.eye(32)[None]
    >>> with QuantisedAttention(flash_attention_3(target=None), generator=0):
    ...     y = F.scaled_dot_product_attention(q, q, q)
    >>> torch.equal(y, F.scaled_dot_product_attention(q, q, q))
    False
    """

    def __init__(self, config: AttentionConfig | AttentionCall, generator: Generator = None) -> None:
        super().__init__()
        self._call = config if isinstance(config, AttentionCall) else attention_call(config, generator)
        self.used = False  # convert_attention refuses modules that never call the function

    multi_head = ModelMode.opened_multi_head  # calls torch's function where no weights are asked for

    def attention(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace torch's function."""
        self.used = True
        return attend(self._call, *args, **kwargs)


def convert_attention(
    model: Model, config: AttentionConfig, *, target: Any = None,
    filter_fn: Filter | None = None, generator: Generator = None,
) -> Model:  # fmt: skip
    """Quantise the attention of a model, in place, wherever its modules call torch's scaled_dot_product_attention.

    Modules keep their classes, Parameters, hooks and state_dict; only their instance's forward changes, which runs the
    old one with ``QuantisedAttention`` switched on, also where activation checkpointing runs it again. It goes with
    ``fmtsim.convert``, in any order; a recipe with ``attention`` does it there.

    Args:
        model: Any module.
        config: Quantisers, blocks, offset and units, such as ``flash_attention_3()``.
        target: What multiplies in all six products (``AttentionConfig.on``); None leaves that to the config.
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
    if target is not None:
        config = config.on(check_target("convert_attention", target))  # the target of all six products
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
    if not unwrap_all(model, "attention"):
        raise ArgumentError(f"{type(model).__name__} has no converted attention; call convert_attention first")
    return model


def attentions(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that call torch's function, as their class's name or its forward says."""
    modules = {name: module for name, module in model.named_modules() if attends(module)}
    return [
        (name, module)
        for name, module in modules.items()
        if not any(part is not module and attends(part) for part in module.modules())
    ]


def check_attentions(chosen: list[tuple[str, nn.Module]]) -> None:
    """Refuse modules that are converted already, or that run attention of another kind.

    Raises:
        ArgumentError: There is one.
    """
    for name, module in chosen:
        if settings(module, "attention") is not None:
            raise ArgumentError(f"the attention of {name!r} is converted already; call revert_attention(model) first")
        check_kind_of_attention(name, module)


def check_kind_of_attention(name: str, module: nn.Module) -> None:
    """Raise ArgumentError for a module of Hugging Face whose attention does not call torch's function."""
    runs = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")  # a field of transformers' configs
    if isinstance(runs, str) and runs != "sdpa" and attends(module):
        raise ArgumentError(
            f"the attention of {name!r} runs attn_implementation={runs!r}, which does not call "
            f"{_FUNCTION}; build the model with attn_implementation='sdpa'"
        )


def attach(
    chosen: list[tuple[str, nn.Module]], config: AttentionConfig, generator: Generator, *, recipe: bool, strict: bool
) -> None:
    """Give modules quantised attention."""
    for name, module in chosen:
        call = AttentionCall(config, generator)  # each module has its own observer and random states
        wrap(module, "attention", _attended, Attended(name=name, call=call, strict=strict), recipe=recipe)


def _attended(how: Attended, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward with its attention quantised."""
    mode = QuantisedAttention(how.call)
    with mode:
        if torch.compiler.is_compiling():  # the compiler names the line itself
            y = forward(*args, **kwargs)
        else:
            try:
                y = forward(*args, **kwargs)
            except FmtsimError as error:
                text = str(error)
                if text.startswith("layer "):  # a layer inside has named itself
                    raise
                raise type(error)(f"layer {how.name!r}: {text}") from error
    if how.strict and not mode.used:
        raise ArgumentError(
            f"layer {how.name!r} ran without calling {_FUNCTION}, so nothing was quantised; call nn.MultiheadAttention "
            "with need_weights=False, build Hugging Face models with attn_implementation='sdpa' and without "
            "output_attentions, or take its attention out with fmtsim.nn.revert_attention"
        )
    return y


def attends(module: nn.Module) -> bool:
    """Return True if a module's class is named like attention, or its forward names torch's function."""
    if _NAME.search(type(module).__name__) is not None:
        return True
    return _FUNCTION in forward_names(module)
