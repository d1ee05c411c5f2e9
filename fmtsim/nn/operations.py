# SPDX-License-Identifier: Apache-2.0
"""One table of torch operations and what each means in a model, and the modes that look each call up in it.

A handler is a ``ModelMode`` whose methods are called by the meaning of a function: ``product``, ``attention``,
``activation`` ... (``MEANINGS``). A new product of torch is one row of ``PRODUCTS``.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fmtsim.scaling.repeats import repeat_under, stretch
from fmtsim.support.dispatch import OwnMode

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
        by_name = [kwargs[name] for name in names[len(args) :] if name in kwargs]
        return rule(find, *args, *by_name, **{name: kwargs[name] for name in kwargs if name not in names})

    return called


def linear(find: Find, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Compute ``torch.nn.functional.linear``."""
    multiply = find(weight)  # None where the weight is no Parameter of the model
    if multiply is not None and find(input) is None and weight.dim() == 2:
        return multiply(input, weight, bias)
    y = matmul(find, input, weight.t()) if weight.dim() == 2 else None  # a Parameter may stand on the left
    return y if y is None or bias is None else y + bias


def matmul(find: Find, input: Tensor, other: Tensor) -> Tensor | None:
    """Compute ``torch.matmul``, mm, bmm and mv: matrices of a stack multiply one by one."""
    by_input, by_other = find(input), find(other)  # exactly one of both has to be a Parameter
    if (by_input is None) == (by_other is None) or not input.dim() or not other.dim():
        return None
    x, w = (input, other) if by_input is None else (other, input)
    lead = torch.broadcast_shapes(x.shape[:-2], w.shape[:-2])  # leading dimensions of the result
    if len(lead) > w.dim() - 2 > 0 and x.dim() > 1:
        w = w[(None,) * (len(lead) - w.dim() + 2)]
    if w.dim() > 2 and x.dim() == 1:
        return None
    letters = "abcdefgh"[: len(lead)]
    x = x.expand(*lead, *x.shape[-2:]) if w.dim() > 2 else x
    stacked = letters
    if w.dim() > 2:
        # along dimensions in which w is broadcast one matrix serves all of x
        ones = [i for i, size in enumerate(lead) if w.shape[i] != size or size == 1]
        w, stacked = w.squeeze(ones), "".join(c for i, c in enumerate(letters) if i not in ones)
    of_x = letters if x.dim() > 2 else ""
    first, second = "m" * (input.dim() > 1) + "k", "k" + "n" * (other.dim() > 1)  # a vector has no m or n
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
    fits = beta == alpha == 1 and second.dim() == 2 and input.shape == second.shape[1:]  # input is a bias [N]
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
    multipliers = [find(t) for t in tensors]
    if (multipliers[0] is None) == (multipliers[1] is None):
        return None
    inputs, _, out = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if "->" not in equation or len(names) != 2:
        return None
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]  # letters for what "..." stands for
    missing = [t.dim() - len(name.replace("...", "")) for t, name in zip(tensors, names, strict=True)]
    dots = [spare[:n] if "..." in name else [] for n, name in zip(missing, names, strict=True)]
    if dots[0] and dots[1]:
        return None
    both = "".join(dots[0] or dots[1])
    names = [name.replace("...", "".join(dot_letters)) for name, dot_letters in zip(names, dots, strict=True)]
    x, w = (0, 1) if multipliers[1] is not None else (1, 0)  # positions among the operands
    multiply = multipliers[w]
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
        ends = offs.tolist()  # row numbers at which groups end
        parts = [
            multiply(first[start:end], second[i].t())
            for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
            if end > start
        ]
        y = torch.cat(
            [*parts, first.new_zeros(len(first) - (ends[-1] if ends else 0), second.shape[-1])]
        )  # rows of no group are 0
    return y if y is None or out_dtype is None else y.to(out_dtype)


def contract(multiply: Multiply, x: Tensor, w: Tensor, of_x: str, of_w: str, of_y: str) -> Tensor | None:
    """Sum products of x and w over the dimensions that y lacks, dimensions being named by letters as in einsum.

    Those that all three have are a stack: its matrices multiply one by one.
    """
    stack = [c for c in of_w if c in of_x and c in of_y]  # dimensions of the stack
    inner = [c for c in of_w if c in of_x and c not in of_y]  # K
    rows, columns = [c for c in of_x if c not in of_w], [c for c in of_w if c not in of_x]  # M and N
    y_letters = stack + rows + columns
    if not inner or any(len(set(names)) != len(names) for names in (of_x, of_w, of_y)) or set(y_letters) != set(of_y):
        return None
    sizes = {**dict(zip(of_w, w.shape, strict=True)), **dict(zip(of_x, x.shape, strict=True))}
    x = x.permute([of_x.index(c) for c in stack + rows + inner])
    w = w.permute([of_w.index(c) for c in stack + columns + inner])
    if len(inner) > 1:
        x, w = x.flatten(-len(inner)), w.flatten(-len(inner))  # several K dimensions become one
    if len(columns) != 1:
        w = w.flatten(len(stack), -2) if columns else w.unsqueeze(-2)
    if not stack:
        y = multiply(x, w)
    elif 0 in w.shape:
        return None
    else:
        x, w = x.flatten(0, len(stack) - 1), w.flatten(0, len(stack) - 1)
        y = torch.stack([multiply(x[i], w[i]) for i in range(len(w))])  # one product for each matrix of the stack
    y, order = y.reshape([sizes[c] for c in y_letters]), [y_letters.index(c) for c in of_y]
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


Counted = list[tuple[Tensor, Tensor, int]]  # both operands and the multiply-adds of each product of an operator


def _count_matrix(first: int) -> Callable[[Any, Any], Counted]:
    """Return the count of ``[.., M, K] [.., K, N]``, of which ``first`` is the position among the arguments."""
    return lambda args, out: [(args[first], args[first + 1], args[first].numel() * args[first + 1].shape[-1])]


def _count_vector(first: int) -> Callable[[Any, Any], Counted]:
    return lambda args, out: [(args[first], args[first + 1], args[first].numel())]


def _count_grouped(args: Any, out: Any) -> Counted:
    a, b = args[:2]
    rows = a.numel() // a.shape[0] if a.dim() == 3 and b.dim() == 2 else a.numel()
    return [(a, b, rows * b.shape[-1])]


def _count_convolution(args: Any, out: Any) -> Counted:
    x, w, transposed = args[0], args[1], args[6]  # the operator's arguments: input, weight, transposed
    return [(x, w, (x if transposed else out).numel() * math.prod(w.shape[1:]))]


def _count_trilinear(args: Any, out: Any) -> Counted:
    x, w = args[:2]  # F.bilinear: w is [outputs, features, features]
    return [(x, w, out.numel() * math.prod(w.shape[1:]))]


def _count_recurrent(args: Any, out: Any) -> Counted:
    x = args[0]
    weights = [t for t in tree_iter(args[1:]) if isinstance(t, Tensor) and t.dim() == 2]  # of all layers and directions
    return [(x, w, x.numel() // x.shape[-1] * w.numel()) for w in weights]


def _count_attention(args: Any, out: Any) -> Counted:
    q, k, v = args[:3]
    rows = q[..., 0].numel() * k.shape[-2]  # one score for each pair; masks hide none of the work
    return [(q, k, rows * q.shape[-1]), (q, v, rows * v.shape[-1])]


class Product(NamedTuple):
    """Describe a product of torch: a row of ``PRODUCTS``.

    Attributes:
        functions: The functions that models call.
        rule: Computes it as products ``x w^T`` of one matrix of a model; None where fmtsim does not emulate it.
        operators: Operators of torch that it ends in, where no other row has them.
        counts: From an operator's arguments and its result to the operands and multiply-adds of each product.
    """

    functions: tuple[Any, ...] = ()
    rule: Callable[..., Tensor | None] | None = None
    operators: tuple[Any, ...] = ()
    counts: Callable[[Any, Any], Counted] | None = None


_aten = torch.ops.aten
ATTENTIONS: Final = frozenset(
    {getattr(_aten, f"_scaled_dot_product_{name}_attention") for name in ("flash", "efficient", "cudnn")}
    | {_aten._scaled_dot_product_flash_attention_for_cpu, _aten._scaled_dot_product_fused_attention_overrideable}
)
_two = partial(named, matmul)
PRODUCTS: Final = (
    Product((F.linear,), named(linear, "input", "weight", "bias")),
    Product((torch.matmul, Tensor.matmul, Tensor.__matmul__), _two("input", "other")),
    Product((Tensor.__rmatmul__,), reflected),
    Product((torch.mm, Tensor.mm), _two("input", "mat2"), (_aten.mm,), _count_matrix(0)),
    Product((torch.bmm, Tensor.bmm), _two("input", "mat2"), (_aten.bmm,), _count_matrix(0)),
    Product((torch.mv, Tensor.mv), _two("input", "vec"), (_aten.mv,), _count_vector(0)),
    Product(
        (torch.addmm, Tensor.addmm), named(with_sum, "input", "mat1", "mat2"), (_aten.addmm, _aten._addmm_activation),
        _count_matrix(1),
    ),
    Product(
        (torch.baddbmm, Tensor.baddbmm), named(with_sum, "input", "batch1", "batch2"), (_aten.baddbmm,),
        _count_matrix(1),
    ),
    Product((torch.einsum,), einsum),
    Product(
        (torch._grouped_mm,), named(grouped, "input", "mat2", "offs", "bias", "out_dtype"), (_aten._grouped_mm,),
        _count_grouped,
    ),
    Product((torch.addmv,), None, (_aten.addmv,), _count_vector(1)),
    Product((torch.addbmm,), None, (_aten.addbmm,), _count_matrix(1)),
    Product((torch.tensordot, torch.inner, torch.linalg.multi_dot, torch.chain_matmul)),
    Product((F.bilinear,), None, (_aten._trilinear,), _count_trilinear),
    Product(
        (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), None,
        (_aten.convolution,), _count_convolution,
    ),
    Product((), None, (_aten.dot,), _count_vector(0)),
    Product((), None, (_aten._int_mm, _aten._scaled_mm), _count_matrix(0)),
    Product((), None, tuple(ATTENTIONS), _count_attention),
    Product((), None, (_aten.mkldnn_rnn_layer, _aten._cudnn_rnn, _aten.miopen_rnn), _count_recurrent),
)  # fmt: skip
RULES: Final = {func: row.rule for row in PRODUCTS for func in row.functions if row.rule is not None}
COUNTS: Final = {operator: row.counts for row in PRODUCTS for operator in row.operators if row.counts is not None}
STACKED: Final = frozenset(func for func in RULES if func.__name__ in ("matmul", "__matmul__", "bmm"))
GROUPED_NAMES: Final = frozenset({"grouped_mm", "_grouped_mm"})  # bytecode has names only
PRODUCT_NAMES: Final = frozenset(func.__name__ for row in PRODUCTS for func in row.functions)
EMULATED_NAMES: Final = frozenset(func.__name__ for func in RULES) | GROUPED_NAMES
LOOK_UPS: Final = frozenset({_aten.embedding, _aten._embedding_bag, _aten._embedding_bag_forward_only})
_VIEW_NAMES: Final = (
    *("t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "adjoint", "squeeze", "unsqueeze", "flatten"),
    *("view", "view_as", "reshape", "reshape_as", "unflatten", "expand", "expand_as", "select", "narrow", "chunk"),
    *("split", "tensor_split", "unbind", "index_select", "contiguous", "clone", "detach", "cpu", "cuda", "to"),
    *("type", "type_as", "float", "double", "half", "bfloat16", "__getitem__"),
)
ACTIVATIONS: Final = {F.gelu: "gelu", F.silu: "silu", F.relu: "relu", torch.relu: "relu", Tensor.relu: "relu"}
# What a function means: the name of the method of a ``ModelMode`` that runs in its place; of all others "other".
MEANINGS: Final[dict[Any, str]] = {
    **{getattr(at, name): "view" for at in (Tensor, torch) for name in _VIEW_NAMES if callable(getattr(at, name, 0))},
    **{getattr(Tensor, name).__get__: "view" for name in ("T", "mT", "H", "mH", "data")},
    **{func: "product" if row.rule else "other_product" for row in PRODUCTS for func in row.functions},
    **dict.fromkeys(ACTIVATIONS, "activation"),
    F.scaled_dot_product_attention: "attention", F.multi_head_attention_forward: "multi_head",
    F.embedding: "embedding", F.dropout: "dropout", F.cross_entropy: "cross_entropy",
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), "softmax"),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.add_), "add"),
    **dict.fromkeys((torch.mul, Tensor.mul), "multiply"),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__), "divide"),
}  # fmt: skip


# A mode, not a hook or a wrapped forward: only a mode of torch sees the calls inside a forward whose code is a user's.
class ModelMode(OwnMode):
    """Run a method in place of each torch function that a model calls: the one of its meaning (``MEANINGS``).

    A method gets the function and its arguments, and returns the result; those that a subclass does not define call
    the function. What a method calls itself is not seen. Several modes nest: the innermost is asked first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._begun_in = stretch()

    def repeat(self, *arguments: Any) -> None:
        """Let a checkpointed stretch that began inside this mode run again under one of these arguments."""
        if not torch.compiler.is_compiling():
            repeat_under((type(self), arguments[0]), partial(type(self), *arguments), self._begun_in)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look a function up."""
        if func is Tensor.unflatten:  # torch.compile cannot trace this method under a mode
            func = torch.unflatten
        return self.run(func, args, {} if kwargs is None else kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call the method that a function means."""
        return getattr(self, MEANINGS.get(func, "other"))(func, *args, **kwargs)

    def other(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that this mode leaves alone."""
        return func(*args, **kwargs)

    product = other_product = view = attention = multi_head = activation = add = multiply = divide = other
    embedding = dropout = cross_entropy = softmax = other

    def opened_multi_head(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run F.multi_head_attention_forward so that this mode sees what it calls; torch would run it as a whole."""
        with self:
            return _MULTI_HEAD(*args, **kwargs)


# A copy of torch's function that asks no mode about the whole call: the mode then sees the calls inside.
_forward = F.multi_head_attention_forward
_MULTI_HEAD: Final = FunctionType(
    _forward.__code__, {**_forward.__globals__, "has_torch_function": lambda tensors: False}, _forward.__name__,
    _forward.__defaults__, _forward.__closure__,
)  # fmt: skip


# A mode of the dispatcher: functions of torch that are written in C++ reach their products only there.
class OperatorMode(TorchDispatchMode):
    """Run ``operator`` in place of each operator that torch comes down to, below autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``operator``."""
        return self.operator(func, args, kwargs or {})

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and return its result."""
        raise NotImplementedError
