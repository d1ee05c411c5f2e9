# SPDX-License-Identifier: Apache-2.0
"""Find attention in what a module's own code calls, whatever wrote it: torch's function, or a softmax between products.

Code without torch's function (transformers' ``attn_implementation="eager"``) multiplies q by k^T, scales, masks, takes
the softmax of each row, and multiplies that by v. What it does between product and softmax is run again on zeros and
ones, which gives mask and factor, and its result is held to ``factor * s + mask``: what differs is not attention.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtsim.nn.operations import MEANINGS, STACKED, ModelMode
from fmtsim.support.dispatch import without_own_modes

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
            self._see(_of_torch(y, *args, **kwargs))
        elif isinstance(y, Tensor) and y.dim() > 2:
            self._follow(func, args, kwargs, y)
        return y

    def _follow(self, func: Any, args: Any, kwargs: Any, y: Tensor) -> None:
        if func in STACKED:
            a, b = (*args, *kwargs.values())[:2]
            if a in self._weights:
                self._meet(y, *self._weights[a], b)
            elif a.dim() == b.dim():
                self._scores[y] = _Scores(a, b.mT, lambda s: s)
            return
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if MEANINGS.get(func) == "softmax":
            if first in self._scores and kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, y.dim() - 1):
                self._weights[y] = self._scores[first], first.detach().clone()  # type: ignore[index, union-attr]
            return
        if func in _KEPT and first in self._weights:
            self._weights[y] = self._weights[first]  # type: ignore[index]
            return
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
        with without_own_modes(), torch.no_grad():
            linear = _linear(scores, z)
        if linear is not None:
            mask, factor = linear
            self._see(Call(y, scores.q, scores.k, v, {"attn_mask": mask, "scale": factor}))


def _of_torch(
    y: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Call:  # fmt: skip
    mask = None if attn_mask is None else attn_mask.detach()
    return Call(
        y, query, key, value, {"attn_mask": mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    )


def _linear(scores: _Scores, z: Tensor) -> tuple[Tensor | None, float] | None:
    """Return mask and factor of what became of a product before its softmax; None where it is something else."""
    s = (scores.q @ scores.k.mT).double()
    zeros = torch.zeros_like(s)
    mask = scores.change(zeros.clone()).double()
    seen = mask > _HIDDEN
    if mask.shape != s.shape or not bool(seen.any()):
        return None
    factor = float((scores.change(zeros + 1).double() - mask)[seen].median())
    expected, z = (s * factor + mask)[seen], z.double()[seen]
    close = _CLOSE.get(scores.q.dtype, 5e-2)
    if bool((z - expected).abs().amax() > close * (1 + expected.abs().amax())):
        return None
    return (mask.float() if bool((mask != 0).any()) else None), factor
