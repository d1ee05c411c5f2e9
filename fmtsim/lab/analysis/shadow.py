# SPDX-License-Identifier: Apache-2.0
"""Cast the operands of a model's products beside it: the model computes as it does, and its bits stay.

A shadow is a second model over the same Parameters, which ``convert`` was given. Each layer of the first one that the
shadow has converted runs as ever; then the shadow's runs on copies that share its numbers, and when the gradient of the
first one's output comes, it goes back through the shadow's.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fmtsim.formats.block import Format
from fmtsim.gemm.layers.config import LinearConfig, linear_config
from fmtsim.nn.conversion import Change, Conversion, conversion, record, settings, unwrap, wrap
from fmtsim.nn.convert import convert, set_step
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.multihead_attention import Attended, QuantisedAttention, attentions
from fmtsim.nn.operations import MEANINGS, RULES, STACKED, ModelMode
from fmtsim.nn.raw_matmuls import RawMatmuls
from fmtsim.nn.report import report
from fmtsim.nn.sdpa import AttentionCall, attend
from fmtsim.nn.state import is_converted
from fmtsim.recipes.attention_config import AttentionConfig, attention_like
from fmtsim.recipes.recipe import Recipe, Rule
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.support.dispatch import without_own_modes
from fmtsim.support.errors import ArgumentError, FmtsimError

_KEPT: Final = (F.dropout, torch.dropout, Tensor.to, Tensor.type_as, Tensor.float, Tensor.bfloat16, Tensor.half)
# What scores go through that is run again: it draws no random numbers, and writes to nothing but the scores.
_PURE: Final = frozenset({
    "add", "sub", "mul", "div", "true_divide", "masked_fill", "where", "to", "float", "double", "type_as", "contiguous",
    "__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__", "__div__",
})  # fmt: skip
_IN_PLACE: Final = frozenset({
    "add_", "sub_", "mul_", "div_", "masked_fill_", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__",
})  # fmt: skip
_CLOSE: Final = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2}  # of roundings between; else bfloat16
_HIDDEN: Final = -1e30  # what is added to scores that do not count, at most


class Call(NamedTuple):
    """Attention as a model computed it."""

    y: Tensor  # the result
    q: Tensor  # q, k, v: what torch's function would be given
    k: Tensor
    v: Tensor
    options: dict[str, Any]  # its other arguments, but for dropout


class _Scores(NamedTuple):
    q: Tensor
    k: Tensor
    change: Callable[[Tensor], Tensor]  # from the product to what it is now


class AttentionCalls(ModelMode):
    """Pass each attention call inside a ``with`` to ``see``, once it has run."""

    def __init__(self, see: Callable[[Call], None]) -> None:
        super().__init__()
        self._see = see
        self._scores: dict[Tensor, _Scores] = {}
        self._weights: dict[Tensor, tuple[_Scores, Tensor]] = {}  # and what the softmax is of

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of the model, and look whether it is part of attention."""
        y = func(*args, **kwargs)
        if MEANINGS.get(func) == "attention":
            self._see(_torch_call(y, *args, **kwargs))
        elif isinstance(y, Tensor) and y.dim() > 2:
            self._follow(func, args, kwargs, y)
        return y

    def _follow(self, func: Any, args: Any, kwargs: Any, y: Tensor) -> None:
        # 1. A product of matrices: of softmax weights with v, or perhaps of q with k.
        if func in STACKED:
            a, b = (*args, *kwargs.values())[:2]
            if a in self._weights:
                self._meet(y, *self._weights[a], b)
            elif a.dim() == b.dim():
                self._scores[y] = _Scores(a, b.mT, lambda s: s)
            return
        # 2. A softmax over keys, and what leaves its weights what they are.
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if MEANINGS.get(func) == "softmax":
            if first in self._scores and kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, y.dim() - 1):
                self._weights[y] = self._scores[first], first.detach().clone()  # type: ignore[index, union-attr]
            return
        if func in _KEPT and first in self._weights:
            self._weights[y] = self._weights[first]  # type: ignore[index]
            return
        # 3. What is done to scores between, which is repeated to find the factor and the mask.
        places = [i for i, t in enumerate(args) if isinstance(t, Tensor) and t in self._scores]
        name = func.__name__
        runs_again = name in _PURE or (name in _IN_PLACE and places == [0])
        if len(places) == 1 and runs_again and "out" not in kwargs and y.shape == args[places[0]].shape:
            place = places[0]
            before = self._scores[args[place]]

            def change(s: Tensor) -> Tensor:
                arguments = list(args)
                arguments[place] = before.change(s)
                return func(*arguments, **kwargs)  # type: ignore[no-any-return]

            self._scores[y] = before._replace(change=change)

    def _meet(self, y: Tensor, scores: _Scores, z: Tensor, v: Tensor) -> None:
        """See attention where z is a product's scores times a factor plus a mask; all else is not attention."""
        with without_own_modes(), torch.no_grad():
            # What became of zeros is the mask, and of ones the mask plus the factor.
            s = (scores.q @ scores.k.mT).double()
            zeros = torch.zeros_like(s)
            mask = scores.change(zeros.clone()).double()
            seen = mask > _HIDDEN
            if mask.shape != s.shape or not bool(seen.any()):
                return
            factor = float((scores.change(zeros + 1).double() - mask)[seen].median())
            expected, z = (s * factor + mask)[seen], z.double()[seen]
            close = _CLOSE.get(scores.q.dtype, 5e-2)
            if bool((z - expected).abs().amax() > close * (1 + expected.abs().amax())):
                return
            added = mask.float() if bool((mask != 0).any()) else None
        self._see(Call(y, scores.q, scores.k, v, {"attn_mask": added, "scale": factor}))


def _torch_call(
    y: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Call:  # fmt: skip
    mask = None if attn_mask is None else attn_mask.detach()
    options = {"attn_mask": mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return Call(y, query, key, value, options)


_NOT_SEEN: Final = {
    "replace": "what the recipe puts in the place of gated layers",
    "activations": "the cast of activations that the recipe keeps",
}  # fmt: skip
_Copies = dict[Tensor, Tensor]
_Parts = list[tuple[nn.Module, nn.Module]]


class Shadow:
    """Hold what a recipe or format would make of a model that is not converted.

    Args:
        model: The model; it is changed between ``attach`` and ``detach`` alone.
        recipe, format, rules: As in ``convert``.

    Attributes:
        model: The shadow.
        notes: What of the model, or of the recipe, is not seen, in words.
        inside: How many layers of the model run at the moment that the shadow has, too.

    Raises:
        ArgumentError: The model is converted already, or ``convert`` refuses it.
    """

    def __init__(
        self, model: nn.Module, recipe: str | Path | Recipe | LinearConfig | None, format: str | Format | None,
        rules: Sequence[Rule] | str | Path = (),
    ) -> None:  # fmt: skip
        if is_converted(model):
            raise ArgumentError(
                f"{type(model).__name__} is converted already, and recipe= and format= are for models that are not; "
                "observe(model) alone shows what its own formats lose, fmtsim.revert(model) takes them away first"
            )
        recipe, attention, self.notes = _products_alone(recipe, format)
        self._copies: dict[nn.Module, nn.Module] = {}
        self.model = _copy_modules(model, self._copies)
        # 1. Give copies of modules that run attention a quantised one.
        chosen = [] if attention is None else [(n, m) for n, m in attentions(model) if settings(m, "attention") is None]
        keys = torch.Generator().manual_seed(0)
        for name, module in chosen:
            assert attention is not None
            call = AttentionCall(attention, keys)
            change = Change(settings=Attended(name=name, call=call, strict=False))
            record(self._copies[module]).changes["attention"] = change
        self._attending = [m for _, m in chosen if not isinstance(m, nn.MultiheadAttention)]
        # 2. Convert the copy. The filter takes everything: convert has nothing to warn of. The generator is the
        #    shadow's own, so that the model draws the numbers that it would have drawn.
        try:
            if not chosen or not isinstance(recipe, Recipe) or recipe.linear is not None or recipe.rules or rules:
                convert(
                    self.model, recipe, format=format, rules=rules, generator=0, filter_fn=lambda module, name: True
                )  # fmt: skip
        except ArgumentError as error:
            seen = f"; {'; '.join(self.notes)}" if self.notes else ""
            raise ArgumentError(
                f"{error}{seen}; what fmtsim.convert does to a copy of the model, observe(copy) shows"
            ) from error
        if any(isinstance(m, EmulatedModule) for m in self.model.modules()):
            self.notes.append(report(self.model).summary)
        # 3. Pairs of a module and its copy that run beside each other.
        self._pairs: _Parts = []
        for module, copy in self._copies.items():
            kinds = {"products", "attention"} if isinstance(copy, nn.MultiheadAttention) else {"products"}
            converted = isinstance(copy, EmulatedModule) and copy.emulation is not None
            if converted or not kinds.isdisjoint(conversion(copy).changes):
                self._pairs.append((module, copy))
        self._scheduled = any(isinstance(m, EmulatedModule) and m.emulation.plan for m in self.model.modules())  # type: ignore[union-attr]
        self.inside = 0

    def attach(self) -> None:
        """Run the shadow beside the model from now on, as far as its layers have observers."""
        for module in (*(module for module, _ in self._pairs), *self._attending):
            if conversion(module).changes.keys() & {"observed", "observed attention"}:
                raise ArgumentError(f"{type(module).__name__} is observed already; leave the outer observe first")
        for module, copy in self._pairs:
            writer = settings(copy, "products") is not None and not isinstance(copy, EmulatedModule)
            wrap(module, "observed", self._write if writer else self._layer(module, copy), copy, recipe=False)
        for module in self._attending:
            attended = settings(self._copies[module], "attention")
            wrap(module, "observed attention", self._attend, attended, recipe=False)

    def detach(self) -> None:
        """Leave the model alone again."""
        for module in self._attending:
            unwrap(module, "observed attention")
        for module, _ in self._pairs:
            unwrap(module, "observed")

    def begin(self, step: int) -> None:
        """Tell a recipe with a schedule the step."""
        if self._scheduled:
            set_step(self.model, step)

    def _layer(self, module: nn.Module, copy: nn.Module) -> Callable[..., Any]:
        parts = [(part, self._copies[part]) for part in module.modules()]

        def run(copy: nn.Module, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
            self.inside += 1  # products that the layer's own forward writes are not those of a writer around it
            try:
                y = forward(*args, **kwargs)
            finally:
                self.inside -= 1
            if _has_observer(copy):
                params = [p for part, _ in parts for p in part._parameters.values() if p is not None]
                run_beside(
                    y, lambda copies: _call(copy, parts, copies, args, kwargs), [*_tensors(args, kwargs), *params]
                )
            return y

        return run

    def _write(self, copy: nn.Module, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a module with the casts of the products that it writes beside it."""
        with _Beside(copy, self):
            return forward(*args, **kwargs)

    def _attend(self, how: Attended, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a module with the casts of its attention beside it."""

        def see(call: Call) -> None:
            def cast(copies: _Copies) -> Tensor:
                return attend(how.call, copies[call.q], copies[call.k], copies[call.v], **call.options)

            try:
                run_beside(call.y, cast, [call.q, call.k, call.v])
            except FmtsimError as error:  # the model itself runs on
                note = f"not seen: attention of {how.name or '(model)'}: {error}"
                self.notes += [note] if note not in self.notes else []

        with nullcontext() if how.call.observer is None else AttentionCalls(see):
            return forward(*args, **kwargs)


class _Beside(RawMatmuls):
    """Cast the operands of products with Parameters that a model writes itself, and leave the products to torch."""

    def __init__(self, copy: nn.Module, shadow: Shadow) -> None:
        super().__init__(copy, settings(copy, "products"))
        self._shadow = shadow

    def product(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        y: Tensor = func(*args, **kwargs)
        by = {} if self._shadow.inside else {t: self.find(t) for t in _tensors(args, kwargs)}
        if not any(multiply is not None and _has_observer(multiply.args[0]) for multiply in by.values()):  # type: ignore[attr-defined]
            return y

        def cast(copies: _Copies) -> Tensor | None:
            products: dict[Any, Any] = {copies[t]: multiply for t, multiply in by.items()}
            find = lambda t: products.get(t) or products.get(getattr(t, "_base", None))  # noqa: E731
            return RULES[func](find, *_substitute(args, copies), **_substitute(kwargs, copies))

        if run_beside(y, cast, list(by)) is None:
            self.note(func, args, kwargs)
        return y


def run_beside(y: Any, run: Callable[[_Copies], Any], tensors: list[Tensor]) -> Any:
    """Run a function on copies of tensors, and go back through it when the gradient of y, or of its first part, comes.

    Args:
        y: What the model made of the tensors.
        run: The same with casts, from copies by tensor: they share numbers, not gradients.
        tensors: What the model's products read.
    """
    copies = {t: t.detach().requires_grad_(t.requires_grad) for t in tensors}
    # Activation checkpointing counts what is saved for backward, so these tensors are kept aside.
    with without_own_modes(), saved_tensors_hooks(lambda t: t, lambda t: t):
        result = _first_part(run(copies))
    out, leaves = _first_part(y), [copy for copy in copies.values() if copy.requires_grad]
    if result is not None and result.requires_grad and out.requires_grad:

        def back(g: Tensor) -> None:
            torch.autograd.grad(result, leaves, g.to(result.dtype), retain_graph=True, allow_unused=True)

        call_with_gradient(out, back)
    return result


def call_with_gradient(y: Tensor, function: Callable[[Tensor], None]) -> None:
    """Call a function with the gradient of y as it is now, whatever the model then writes into y in place.

    A layer's output is a view of its product where that is one of matrices. Written to in place, a view loses its hooks
    and the tensor that it is of does not.
    """
    base = y._base
    if base is None or base.numel() != y.numel() or not base.is_contiguous():
        y.register_hook(function)
        return
    size, stride, offset = y.size(), y.stride(), y.storage_offset() - base.storage_offset()

    def as_y(g: Tensor) -> None:
        g = g.contiguous()
        function(g.as_strided(size, stride, g.storage_offset() + offset))

    base.register_hook(as_y)


def _products_alone(recipe: Any, format: Any) -> tuple[Any, AttentionConfig | None, list[str]]:
    """Return a recipe without what is not a product with weights, its attention, and in words what else that was."""
    if recipe is None:
        return None, attention_like(linear_config(x=format, w=format, g=format, scaling=None)), []
    if isinstance(recipe, LinearConfig):
        return recipe, None, []
    named = get_recipe(recipe, kind="training")
    if any(replacement.kind == "operations" for replacement in named.replace):
        raise ArgumentError(
            f"recipe {named.name!r} scales the whole model and divides its weights, so its operands are not those of "
            "this model; fmtsim.convert a copy.deepcopy of it and observe that"
        )
    parts = {name: getattr(named, name) for name in _NOT_SEEN}
    notes = [f"not seen: {words}" for name, words in _NOT_SEEN.items() if parts[name]]
    return dataclasses.replace(named, attention=None, replace=(), activations=None), named.attention, notes


def _copy_modules(module: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a module that has the same Parameters, buffers and attributes, in containers of its own."""
    if module not in copies:
        module_copy = copies[module] = object.__new__(type(module))
        # Not by its own __setattr__: that of compiled modules writes to the model.
        module_copy.__dict__.update(
            {k: v.copy() if isinstance(v, dict | Conversion) else v for k, v in module.__dict__.items()}
        )
        modules = {n: None if m is None else _copy_modules(m, copies) for n, m in module._modules.items()}
        module_copy.__dict__.update(_modules=modules, training=False)  # no dropout: it would draw numbers
    return copies[module]


def _has_observer(copy: nn.Module) -> bool:
    how = copy.emulation if isinstance(copy, EmulatedModule) else settings(copy, "attention").call
    return how is not None and how.observer is not None


def _call(copy: nn.Module, parts: _Parts, copies: _Copies, args: Any, kwargs: Any) -> Any:
    """Call the forward of a shadow's layer with copies in the place of the model's tensors."""
    before = [shadow._parameters for _, shadow in parts]
    try:
        for part, shadow in parts:
            shadow._parameters = {n: None if p is None else copies[p] for n, p in part._parameters.items()}  # type: ignore[misc]
        args, kwargs, how = _substitute(args, copies), _substitute(kwargs, copies), settings(copy, "attention")
        if how is None or how is settings(parts[0][0], "attention"):  # of a model that has it, it is seen there
            return type(copy).forward(copy, *args, **kwargs)
        arguments_bound = inspect.signature(nn.MultiheadAttention.forward).bind(copy, *args, **kwargs).arguments
        arguments_bound["need_weights"] = False  # those are what torch's function does not return
        with QuantisedAttention(how.call):
            return type(copy).forward(**arguments_bound)
    finally:
        for (_, shadow), parameters in zip(parts, before, strict=True):
            shadow._parameters = parameters


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    return [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]


def _substitute(values: Any, copies: _Copies) -> Any:
    if isinstance(values, dict):
        return {name: _substitute(value, copies) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_substitute(value, copies) for value in values)
    return copies.get(values, values) if isinstance(values, Tensor) else values


def _first_part(y: Any) -> Any:
    return y[0] if isinstance(y, list | tuple) else y
