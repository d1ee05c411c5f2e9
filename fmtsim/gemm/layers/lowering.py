# SPDX-License-Identifier: Apache-2.0
"""How torch.compile's inductor compiles operators of layers: fused into its kernels, or called as functions.

A fused operator (``lower``) stands for a few dozen ordinary operations (``fmtsim.scaling.inlined``). Inductor inserts
these when it lowers the graph, because a traced graph of a model would hold tens of thousands of them. Any other
operator (``call``) is called as a Python function, which saves the time of torch's dispatcher. Other compilers, and
versions of inductor without these hooks, run the operators themselves.
"""

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from fmtsim.support.replay.programs import repeated

Steps = Callable[..., list[Tensor] | Tensor]
Facts = tuple[tuple[tuple[int, ...], torch.dtype, torch.device] | None, ...]  # of tensors; None where there is none
_lowered: dict[Any, Any] = {}
_called: dict[Any, str] = {}


def lower(operator: Any, steps: Callable[..., Steps]) -> None:
    """Register the steps that replace an operator in inductor; ``announce`` installs them.

    Args:
        operator: An overload. Its tensors come first.
        steps: Given the arguments behind the tensors, returns a function of the tensors, in operations of torch.
    """
    _lowered[operator] = steps


def call(operator: Any, function: Callable[..., Any]) -> None:
    """Let inductor's code call a function instead of an operator, without dispatch to modes, keys or transforms.

    Args:
        operator: An overload.
        function: Computes the operator; its GPU work is recorded and replayed.
    """
    name = "call_" + operator.name().partition("::")[2].replace(".", "_")
    setattr(torch.ops.fmtsim, name, repeated(function))
    _called[operator] = f"torch.ops.fmtsim.{name}"


def has_known_sizes(t: Tensor) -> bool:
    """Return True if a compiler knows the sizes of a tensor, which steps are made for."""
    return all(isinstance(size, int) for size in t.shape)


def announce() -> None:
    """Install lowerings and calls of the registered operators in inductor, if it is loaded."""
    inductor = sys.modules.get("torch._inductor.lowering")
    if inductor is None or not hasattr(inductor, "lowerings"):
        return
    for operator, steps in _lowered.items():
        if operator not in inductor.lowerings:
            inductor.register_lowering(operator, type_promotion_kind=None)(partial(_lower, steps))
    for operator, name in _called.items():
        if operator not in inductor.lowerings:
            inductor.make_fallback(operator, inductor.constrain_to_fx_strides, warn=False)
            inductor.lowerings[operator] = partial(_call, inductor.lowerings[operator], operator, name)


def _call(lowering: Callable[..., Any], operator: Any, name: str, *arguments: Any) -> Any:
    """Lower an operator as inductor does, and name the function that its code calls instead."""
    from torch._inductor.virtualized import V

    before = len(V.graph.operations)
    result = lowering(*arguments)
    operations: list[Any] = V.graph.operations[before:]
    for node in operations:
        if getattr(node, "op_overload", None) is operator and not V.graph.cpp_wrapper:
            node.python_kernel_name = name
    return result


def _lower(steps: Callable[..., Steps], *arguments: Any) -> Any:
    """Lower the steps of an operator."""
    count = next((i for i, x in enumerate(arguments) if x is not None and not _is_box(x)), len(arguments))
    boxes, rest = arguments[:count], arguments[count:]
    for box in boxes:
        if box is not None and box.get_read_names():
            box.realize()  # several steps read it; constants are part of each
    facts = tuple(None if x is None else (tuple(map(int, x.get_size())), x.get_dtype(), x.get_device()) for x in boxes)
    return _Inductor(_graph_of(steps, facts, rest)).run(*(x for x in boxes if x is not None))


def _is_box(x: Any) -> bool:
    return hasattr(x, "get_size")


@lru_cache(maxsize=4096)
def _graph_of(steps: Callable[..., Steps], facts: Facts, rest: tuple[Any, ...]) -> fx.GraphModule:
    """Return the steps for tensors of some shapes, dtypes and devices, in operations that inductor has lowerings of."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    run = steps(*rest)

    def call(*tensors: Tensor) -> Any:
        remaining = iter(tensors)
        return run(*(None if fact is None else next(remaining) for fact in facts))

    with torch.no_grad(), FakeTensorMode():
        empty = [torch.empty(f[0], dtype=f[1], device=f[2]) for f in facts if f is not None]
        graph = make_fx(call, decomposition_table=select_decomp_table())(*empty)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


class _Inductor(fx.Interpreter):
    """Run a graph by inductor's lowerings; what is computed for a larger tensor to read is computed once."""

    def run_node(self, n: fx.Node) -> Any:
        """Return inductor's tensor for a node."""
        result = super().run_node(n)
        if _is_box(result) and any(_is_larger(user, n) for user in n.users) and result.get_read_names():
            result.realize()
        return result

    def call_function(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the lowering of an operation."""
        return sys.modules["torch._inductor.lowering"].lowerings[target](*args, **kwargs)


def _is_larger(user: fx.Node, node: fx.Node) -> bool:
    one, other = user.meta.get("val"), node.meta.get("val")
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.numel() > max(1, other.numel())
