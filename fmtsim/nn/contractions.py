# SPDX-License-Identifier: Apache-2.0
"""torch's products of a tensor with a matrix, as ``x w^T``: linear, matmul and its kin, einsum, grouped products.

Each function takes ``find``, which returns what multiplies by a tensor, or None if that is not a matrix of a model.
Its other arguments are those of torch's function. It returns that function's result, or None where it is not a
product ``x w^T`` of a tensor with one matrix, or with one of a stack for each of its rows.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Multiply = Callable[..., Tensor]  # x [..., K], w [N, K] and a bias [N] to x w^T + bias
Find = Callable[[Any], Multiply | None]


def named(rule: Callable[..., Tensor | None], *names: str) -> Callable[..., Tensor | None]:
    """Return a function that takes arguments by torch's names, too; with others, such as out=, it returns None."""
    allowed = {*names, *inspect.signature(rule).parameters}

    def called(find: Find, *args: Any, **kwargs: Any) -> Tensor | None:
        if len(args) > len(names) or not allowed.issuperset(kwargs):
            return None
        if not kwargs:
            return rule(find, *args)
        given = [kwargs[name] for name in names[len(args) :] if name in kwargs]
        return rule(find, *args, *given, **{name: kwargs[name] for name in kwargs if name not in names})

    return called


def linear(find: Find, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Compute ``torch.nn.functional.linear``."""
    multiply = find(weight)
    if multiply is not None and find(input) is None and weight.dim() == 2:
        return multiply(input, weight, bias)
    y = matmul(find, input, weight.t()) if weight.dim() == 2 else None
    return y if y is None or bias is None else y + bias


def matmul(find: Find, input: Tensor, other: Tensor) -> Tensor | None:
    """Compute ``torch.matmul``, mm, bmm and mv: matrices of a stack multiply one by one."""
    by_input, by_other = find(input), find(other)
    if (by_input is None) == (by_other is None) or not input.dim() or not other.dim():
        return None
    x, w = (input, other) if by_input is None else (other, input)
    lead = torch.broadcast_shapes(x.shape[:-2], w.shape[:-2])
    if len(lead) > w.dim() - 2 > 0 and x.dim() > 1:
        w = w[(None,) * (len(lead) - w.dim() + 2)]
    if w.dim() > 2 and x.dim() == 1:
        return None
    letters = "abcdefgh"[: len(lead)]
    x = x.expand(*lead, *x.shape[-2:]) if w.dim() > 2 else x
    stacked = letters
    if w.dim() > 2:
        ones = [i for i, size in enumerate(lead) if w.shape[i] != size or size == 1]
        w, stacked = w.squeeze(ones), "".join(c for i, c in enumerate(letters) if i not in ones)
    of_x = letters if x.dim() > 2 else ""
    first, second = "m" * (input.dim() > 1) + "k", "k" + "n" * (other.dim() > 1)
    lead_out = letters + first[:-1] + second[1:]
    if by_other is not None:
        return contract(by_other, x, w, of_x + first, (stacked if w.dim() > 2 else "") + second, lead_out)
    assert by_input is not None
    return contract(by_input, x, w, of_x + second, (stacked if w.dim() > 2 else "") + first, lead_out)


def reflected(find: Find, other: Tensor, input: Tensor) -> Tensor | None:
    """Compute ``Tensor.__rmatmul__``."""
    return matmul(find, input, other)


def with_sum(
    find: Find, input: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor | None:
    """Compute ``torch.addmm`` and ``baddbmm``; a row that is added as it is counts as the bias."""
    multiply = find(second)
    fits = beta == alpha == 1 and second.dim() == 2 and input.shape == second.shape[1:]
    if multiply is not None and find(first) is None and fits:
        return multiply(first, second.t(), input)
    y = matmul(find, first, second)
    if y is None:
        return None
    return (y if alpha == 1 else alpha * y) + (input if beta == 1 else beta * input)


def einsum(find: Find, equation: Any, *operands: Any) -> Tensor | None:
    """Compute ``torch.einsum`` of two tensors."""
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else list(operands)
    if not isinstance(equation, str) or len(tensors) != 2 or not all(isinstance(t, Tensor) for t in tensors):
        return None
    found = [find(t) for t in tensors]
    if (found[0] is None) == (found[1] is None):
        return None
    inputs, _, out = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if "->" not in equation or len(names) != 2:
        return None
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    missing = [t.dim() - len(name.replace("...", "")) for t, name in zip(tensors, names, strict=True)]
    dots = [spare[:n] if "..." in name else [] for n, name in zip(missing, names, strict=True)]
    if dots[0] and dots[1]:
        return None
    both = "".join(dots[0] or dots[1])
    names = [name.replace("...", "".join(own)) for name, own in zip(names, dots, strict=True)]
    x, w = (0, 1) if found[1] is not None else (1, 0)
    multiply = found[w]
    assert multiply is not None
    return contract(multiply, tensors[x], tensors[w], names[x], names[w], out.replace("...", both))


def grouped(
    find: Find, first: Tensor, second: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | None:  # fmt: skip
    """Compute ``torch.nn.functional.grouped_mm`` of rows with a stack of matrices; rows of no group become 0."""
    multiply = find(second)
    if multiply is None or find(first) is not None or bias is not None or second.dim() != 3:
        return None
    if offs is None:
        y = matmul(find, first, second)
    elif first.dim() != 2:
        return None
    else:
        ends = offs.tolist()
        parts = [
            multiply(first[start:end], second[i].t())
            for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
            if end > start
        ]
        y = torch.cat([*parts, first.new_zeros(len(first) - (ends[-1] if ends else 0), second.shape[-1])])
    return y if y is None or out_dtype is None else y.to(out_dtype)


def contract(multiply: Multiply, x: Tensor, w: Tensor, of_x: str, of_w: str, of_y: str) -> Tensor | None:
    """Sum products of x and w over the dimensions that y lacks, dimensions being named by letters as in einsum.

    Those that all three have are a stack: its matrices multiply one by one.
    """
    stack = [c for c in of_w if c in of_x and c in of_y]
    inner = [c for c in of_w if c in of_x and c not in of_y]
    rows, columns = [c for c in of_x if c not in of_w], [c for c in of_w if c not in of_x]
    made = stack + rows + columns
    if not inner or any(len(set(names)) != len(names) for names in (of_x, of_w, of_y)) or set(made) != set(of_y):
        return None
    sizes = {**dict(zip(of_w, w.shape, strict=True)), **dict(zip(of_x, x.shape, strict=True))}
    x = x.permute([of_x.index(c) for c in stack + rows + inner])
    w = w.permute([of_w.index(c) for c in stack + columns + inner])
    if len(inner) > 1:
        x, w = x.flatten(-len(inner)), w.flatten(-len(inner))
    if len(columns) != 1:
        w = w.flatten(len(stack), -2) if columns else w.unsqueeze(-2)
    if not stack:
        y = multiply(x, w)
    elif 0 in w.shape:
        return None
    else:
        x, w = x.flatten(0, len(stack) - 1), w.flatten(0, len(stack) - 1)
        y = torch.stack([multiply(x[i], w[i]) for i in range(len(w))])
    y, order = y.reshape([sizes[c] for c in made]), [made.index(c) for c in of_y]
    if torch.compiler.is_dynamo_compiling() and order != sorted(order):
        return _Permuted.apply(y, order)  # type: ignore[no-any-return, no-untyped-call]
    return y.permute(order)


class _Permuted(torch.autograd.Function):
    """Permute dimensions in compiled code; the gradient is laid out anew.

    Torch's compilers are mistaken about how some gradients lie (that of softplus, in torch 2.13), and a layer takes
    its gradient for a matrix.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: list[int]) -> Tensor:
        """Return a view."""
        ctx.order = order
        return y.permute(order)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the gradient in the dimensions of y."""
        order = ctx.order
        return g.permute([order.index(i) for i in range(len(order))]).clone(memory_format=torch.contiguous_format), None
