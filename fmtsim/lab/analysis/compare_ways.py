# SPDX-License-Identifier: Apache-2.0
"""Which roundings of a function vanish when a compiler fuses its pointwise operations into one kernel.

Eager torch rounds the result of each operation to its dtype. Inductor computes a chain of pointwise operations in
float32 and rounds what it stores; ptxas fuses a product into the sum that follows (one rounding instead of two).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map

from fmtsim.casts.profile_steps import fma
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.table import Column, Facts, Result, Rows, table_of

if TYPE_CHECKING:
    from fmtsim.lab.analysis.compare import Comparison

WAYS: Final = ("torch", "torch.compile")
_NARROW: Final = (torch.bfloat16, torch.float16)
_SUMS: Final = {torch.ops.aten.add.Tensor: 1.0, torch.ops.aten.sub.Tensor: -1.0}
_PRODUCT: Final = torch.ops.aten.mul.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Vanished:
    """A rounding that eager torch does and compiled code does not.

    Args:
        operation: The operation whose result is rounded, as the graph has it.
        what: How it vanishes: kept in float32, or a product fused into a sum.
        alone: Elements of the outputs that change where this rounding alone vanishes.
        put_back: Elements of compiled code that change where this rounding alone is put back.
    """

    operation: str
    what: str
    alone: int
    put_back: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WaysComparison(Result):
    """Say how a function's compiled results differ from eager ones, and which roundings vanished.

    Args:
        outputs: ``compare(compiled, eager)`` of each output.
        vanished: The roundings that vanish, in order of the graph.
        notes: Operations that are not modelled.
    """

    outputs: "tuple[Comparison, ...]"
    vanished: tuple[Vanished, ...]
    notes: tuple[str, ...] = ()

    _derived: ClassVar[tuple[str, ...]] = ("equal",)

    @property
    def equal(self) -> bool:
        """Whether all outputs have equal bits."""
        return all(output.equal for output in self.outputs)

    def _content(self) -> Iterable[Rows | Facts | str]:
        for i, output in enumerate(self.outputs):
            share = (
                f"{output.mismatches:,} of {output.count:,} elements ({output.mismatches / max(output.count, 1):.3g})"
            )
            first = f", first at {output.first}" if output.first else ""
            yield Facts([(f"output {i}", f"{share} differ between eager and compiled code{first}")])
        if self.vanished:
            yield table_of(_COLUMNS, self.vanished)
        yield from self.notes


_COLUMNS = (
    Column("operation", "operation"), Column("its rounding", "what"), Column("vanishes alone", "alone", ">,"),
    Column("put back alone", "put_back", ">,"),
)  # fmt: skip


def compare_ways(
    function: Callable[..., Any], inputs: Sequence[Any], like: Sequence[str],
    compare: "Callable[[Tensor, Tensor], Comparison]",
) -> WaysComparison:  # fmt: skip
    """Compare eager and compiled results of a function of pointwise operations, and name the roundings that vanish.

    Args:
        function: A function of tensors, traced once with these inputs.
        inputs: Its arguments; tensors of float32, bfloat16 or float16.
        like: ``("torch", "torch.compile")``.
        compare: Compares two tensors bit for bit (``fmtsim.compare``).

    Raises:
        ArgumentError: Another pair of ways, or nothing to trace.
    """
    if not isinstance(like, list | tuple) or sorted(map(str, like)) != sorted(WAYS):
        raise ArgumentError(f"like={shown(like)} of a function is not a pair that is known; choose {WAYS}")
    alone: Any = inputs  # one tensor is one argument
    inputs = (alone,) if isinstance(alone, Tensor) else inputs
    if not isinstance(inputs, list | tuple) or not any(isinstance(x, Tensor) for x in inputs):
        raise ArgumentError(f"inputs={shown(inputs)} hold no tensor; pass the function's arguments as a tuple")
    detached = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, tuple(inputs))
    graph = make_fx(function)(*detached)
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    # 1. roundings to 16 bits inside a chain, and products that a sum takes
    kept = [
        node for node in nodes
        if _is_pointwise(node) and node.meta["val"].dtype in _NARROW and any(map(_is_pointwise, node.users))
    ]  # fmt: skip
    fused = {node: product for node in nodes if (product := _fused_product(node, kept)) is not None}
    # 2. all together, then each alone: left out of eager code, and put back into compiled code
    eager, compiled = _run(graph, detached, (), {}), _run(graph, detached, kept, fused)

    def changes(one: list[Tensor], other: list[Tensor]) -> int:
        return sum(compare(a, b).mismatches for a, b in zip(one, other, strict=True))

    vanished = []
    for node in kept:
        alone = _run(graph, detached, (node,), {})
        put_back = _run(graph, detached, [x for x in kept if x is not node], _without(fused, node))
        vanished.append(Vanished(operation=_text(node), what="kept in float32", alone=changes(eager, alone),
                                 put_back=changes(compiled, put_back)))  # fmt: skip
    for node, product in fused.items():
        alone = _run(graph, detached, (product,) if product in kept else (), {node: product})
        put_back = _run(graph, detached, kept, _without(fused, product))
        vanished.append(Vanished(operation=_text(product), what=f"fused into {node.name}: one for both",
                                 alone=changes(eager, alone), put_back=changes(compiled, put_back)))  # fmt: skip
    others = sorted(
        {node.name for node in nodes if not _is_pointwise(node) and isinstance(node.meta.get("val"), Tensor)}
    )
    notes = ["functions such as exp, and divisions, are this machine's here; Triton's differ in last bits"]
    notes += [f"computed alone, with rounded inputs: {', '.join(others)}; Inductor may fuse them"] if others else []
    outputs = tuple(compare(a, b) for a, b in zip(compiled, eager, strict=True))
    return WaysComparison(outputs=outputs, vanished=tuple(vanished), notes=tuple(notes))


def _is_pointwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and torch.Tag.pointwise in tags and isinstance(node.meta.get("val"), Tensor)


def _fused_product(node: Node, kept: Sequence[Node]) -> Node | None:
    """Return the product that a sum of float32 numbers takes in, None where there is none."""
    if node.target not in _SUMS or node.kwargs.get("alpha", 1) != 1 or not node.meta["val"].is_floating_point():
        return None
    products = [x for x in node.args if isinstance(x, Node) and x.target is _PRODUCT and _is_wide(x, kept)]
    return products[0] if products else None


def _is_wide(node: Node, kept: Sequence[Node]) -> bool:
    return node in kept or node.meta["val"].dtype == torch.float32


def _text(node: Node) -> str:
    return f"{node.name} = {node.target}{node.args}"


def _without(fused: dict[Node, Node], product: Node) -> dict[Node, Node]:
    return {node: one for node, one in fused.items() if one is not product}


def _run(graph: GraphModule, inputs: Sequence[Any], unrounded: Sequence[Node], fused: dict[Node, Node]) -> list[Tensor]:
    """Run a graph with some results unrounded and some products fused, and return its output tensors."""
    values: dict[Node, Any] = {}
    flat = iter(tree_flatten(list(inputs))[0])
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(flat)
        elif node.op == "get_attr":
            values[node] = getattr(graph, str(node.target))
        elif node.op == "output":
            results = tree_flatten(tree_map(lambda x: values[x] if isinstance(x, Node) else x, node.args))[0]
            return [result for result in results if isinstance(result, Tensor)]
        else:
            values[node] = _result(node, values, node in unrounded, fused.get(node))
    return []


def _result(node: Node, values: dict[Node, Any], unrounded: bool, product: Node | None) -> Any:
    """Return the result of one operation: of pointwise ones in float32, then rounded to the dtype that it has."""
    args, kwargs = tree_map(lambda x: values[x] if isinstance(x, Node) else x, (node.args, node.kwargs))
    dtype = node.meta["val"].dtype if isinstance(node.meta.get("val"), Tensor) else None
    narrow = [
        x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.dtype in (*_NARROW, torch.float32)
    ]
    if not _is_pointwise(node) or dtype not in (*_NARROW, torch.float32) or not narrow:
        # an operation of its own takes its inputs in the dtypes that the graph has
        stored = tree_map(lambda x: values[x].to(x.meta["val"].dtype) if isinstance(x, Node)
                          and isinstance(values[x], Tensor) else (values[x] if isinstance(x, Node) else x),
                          (node.args, node.kwargs))  # fmt: skip
        return node.target(*stored[0], **stored[1])  # type: ignore[operator]
    if product is not None:
        # a * b + c, c - a * b or a * b - c: the sign goes to what is not alone
        factors: Any = product.args
        a, b = (values[x].float() if isinstance(x, Node) else x for x in factors)
        is_first, sign = node.args[0] is product, _SUMS[node.target]  # type: ignore[index]
        other = args[1 if is_first else 0]
        other = other.float() if isinstance(other, Tensor) else float(other)
        result = fma(a, b, sign * other) if is_first else fma(sign * a, b, other)
    else:
        wide = tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype in _NARROW else x, (args, kwargs))
        if "dtype" in wide[1]:  # a conversion: the rounding below is its own
            wide[1]["dtype"] = torch.float32
        result = node.target(*wide[0], **wide[1])  # type: ignore[operator]
    return result if unrounded or not isinstance(result, Tensor) else result.to(dtype)
