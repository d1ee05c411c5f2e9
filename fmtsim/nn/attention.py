# SPDX-License-Identifier: Apache-2.0
"""MultiheadAttention whose projections are emulated; scores, softmax and weighted sums stay in high precision."""

import threading
from collections.abc import Iterator
from types import FunctionType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.nn.modules import EmulatedModule, register_emulated
from fmtsim.support.dispatch import OwnMode
from fmtsim.support.errors import ArgumentError


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
        for inputs in sorted({module.embed_dim, module.kdim, module.vdim}):
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
        parts = ["q_proj", "k_proj", "v_proj"]
        if self._qkv_same_embed_dim and key is value:  # a packed weight, of which one product may take several parts
            parts = ["in_proj"] if query is key else ["q_proj", "kv_proj"]
        with _Projections(self, [*parts, "out_proj"]):
            return nn.MultiheadAttention.forward(
                self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )


register_emulated(EmulatedMultiheadAttention)


class _Projections(OwnMode):
    """Run torch's multi_head_attention_forward with a module's own products; its fused kernel is not taken then."""

    def __init__(self, module: EmulatedMultiheadAttention, parts: list[str]) -> None:
        super().__init__()
        self._module, self._parts = module, parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the one function."""
        if func is not F.multi_head_attention_forward:
            return func(*args, **(kwargs or {}))
        running().append((self._module, iter(self._parts)))
        try:
            return _MULTI_HEAD(*args, **(kwargs or {}))
        finally:
            running().pop()


class _Stack(threading.local):
    def __init__(self) -> None:
        self.calls: list[Any] = []


_stack, _traced = _Stack(), list[Any]()


def running() -> list[Any]:
    """Return whom the functions that replace torch's belong to, in the order of this thread's calls."""
    return _traced if torch.compiler.is_compiling() else _stack.calls  # the compiler follows no thread's own data


def _project(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    module, parts = running()[-1]
    return module.gemm(x, w, bias, next(parts))  # type: ignore[no-any-return]


def rebuilt(function: Any, **names: Any) -> Any:
    """Return a function of torch that finds other functions under these names."""
    made = FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def multi_head(**names: Any) -> Any:
    """Return torch's multi_head_attention_forward with other functions under these names, and hooked no more."""
    return rebuilt(F.multi_head_attention_forward, has_torch_function=lambda tensors: False, **names)


_PACKED = ("_in_projection_packed", "_in_projection")
_MULTI_HEAD: Final = multi_head(
    linear=_project, **{name: rebuilt(getattr(F, name), linear=_project) for name in _PACKED}
)


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
