# SPDX-License-Identifier: Apache-2.0
"""bisect of eager and compiled code: the operations of the graph of torch.compile that begin a difference of bits."""

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from fmtsim.lab.analysis.compare import compare
from fmtsim.lab.analysis.one_step import Batch, unchanged
from fmtsim.support.table import Column, Facts, Result, Rows, table_of


class FusedDifference(NamedTuple):
    """An operation of a compiled graph whose result has other bits than eager code makes of the same stored inputs.

    operation: As Inductor gets it: gelu of 16 bits is erf and products in float32, for example.
    code: The line of the model that made it.
    dtype: Of its result.
    different, elements: How many elements differ, and of how many.
    nan: How many of those that differ are NaN in both.
    rounding: Whether eager roundings in the compiled code (``emulate_precision_casts``) take the difference away.
    """

    operation: str
    code: str
    dtype: str
    different: int
    elements: int
    nan: int
    rounding: bool

    @property
    def why(self) -> str:
        """What is known of the cause."""
        if self.nan == self.different:
            return "both are NaN, with other bits"
        cause = "its inputs or it are not rounded" if self.rounding else "its function or order of sums is another one"
        return f"{cause}; {self.nan:,} are NaN in both" if self.nan else cause


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CompiledBisection(Result):
    """Say where compiled code parts from eager code; ``print`` shows a table.

    Args:
        rows: Operations that begin a difference, in the order of the graph; none where the outputs are equal. Other
            operations give what eager code makes of the inputs that they got.
        different, elements: Of the outputs: how many elements differ, and of how many.
        nan: How many of those that differ are NaN in both.
        faithful: Whether the code that was looked into, which stores all that lies between, has the outputs' bits of
            the compiled model. If not, the rows are of other code.
        random: Whether the model draws random numbers: the compiled model draws others than the eager one, the code
            that was looked into the same.
    """

    rows: tuple[FusedDifference, ...]
    different: int
    elements: int
    nan: int
    faithful: bool
    random: bool

    @property
    def equal(self) -> bool:
        """Whether the outputs have equal bits."""
        return not self.different

    def _content(self) -> tuple[Facts, Rows]:
        nan = f", {self.nan:,} are NaN in both" if self.nan else ""
        facts = [("outputs", f"{self.different:,} of {self.elements:,} elements differ{nan}")]
        if self.random:
            facts.append(("note", "compiled code draws other random numbers; in the rows, both runs draw the same"))
        elif not self.faithful:
            facts.append(("note", "this is of other code: storing what lies between changes bits of the outputs, too"))
        return Facts(facts), table_of(_COLUMNS, self.rows)


_COLUMNS = (
    Column("begins in", "operation"),
    Column("dtype", "dtype"),
    Column("differ", lambda row: f"{row.different:,} of {row.elements:,}", ">"),
    Column("because", "why"),
    Column("code", "code"),
)


def bisect_compiled(model: nn.Module, compiled: Callable[..., Any], batch: Batch) -> CompiledBisection:
    """Compare a model's forward pass with its compiled code, operation by operation of its graphs, without gradients.

    Inductor compiles each graph again with all of its values as outputs; the same graph runs eagerly beside it.
    """
    from torch._dynamo import config

    arguments, options = batch
    begins, outputs = dict[bool, list[FusedDifference]](), dict[bool, list[Tensor]]()
    # dynamo counts compilations per line of code, whatever the model, and beyond its limit runs eager code silently
    limits = config.patch(recompile_limit=1 << 30, accumulated_recompile_limit=1 << 30)
    with torch.no_grad(), limits, unchanged(model) as model_copy:
        states = _generator_states(model)
        eager = _tensors(model_copy(*arguments, **options))
        random = any(_changed(*pair)[0] for pair in zip(states, _generator_states(model), strict=True))
        # compiled code runs on the model itself: statistics of BatchNorm are put back
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        actual = _tensors(compiled(*arguments, **options))
        for buffer, value in buffers:
            buffer.copy_(value)
        counts, elements = list(map(_changed, actual, eager)), sum(x.numel() for x in eager)
        different, nan = sum(count for count, _ in counts), sum(count for _, count in counts)
        if not different:  # another backend than Inductor's may be equal by design
            return CompiledBisection(rows=(), different=0, elements=elements, nan=0, faithful=True, random=random)
        for casts in (False, True):
            begins[casts] = []
            code = torch.compile(copy.deepcopy(model), backend=_backend(begins[casts], casts))
            outputs[casts] = _tensors(code(*arguments, **options))
    cured = {row.operation for row in begins[False]} - {row.operation for row in begins[True]}
    return CompiledBisection(
        rows=tuple(row._replace(rounding=row.operation in cured) for row in begins[False]),
        different=different, elements=elements, nan=nan, random=random,
        faithful=not any(differ for differ, _ in map(_changed, outputs[False], actual)),
    )  # fmt: skip


def _tensors(output: Any) -> list[Tensor]:
    return [x for x in tree_leaves(output) if isinstance(x, Tensor)]


def _generator_states(model: nn.Module) -> list[Tensor]:
    """Return the states of the generators that a model draws from."""
    devices = {t.device for t in model.parameters() if t.device.type == "cuda"}
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _changed(x: Tensor, y: Tensor) -> tuple[int, int]:
    """Return how many elements have other bits, and how many of them are NaN in both."""
    if not x.is_floating_point():
        return int((x != y).sum()), 0
    result = compare(x, y)
    return result.mismatches, result.nan_payloads


def _backend(begins: list[FusedDifference], casts: bool) -> Any:
    """Return a backend of torch.compile that lists where Inductor's code parts from the graph that it compiles."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    def compile_graph(graph: GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
        # 1. all values of the graph are outputs: kernels still hand them on unrounded
        plain, (end,) = copy.deepcopy(graph), graph.graph.find_nodes(op="output")
        nodes = [n for n in graph.graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor)]
        results = len(end.args[0])  # type: ignore[arg-type]
        end.args = ((*end.args[0], *nodes),)  # type: ignore[misc]
        graph.recompile()
        # dropout calls torch's own generator, as eager code does
        with config.patch(emulate_precision_casts=casts, fallback_random=True):
            code = compile_fx_inner(graph, inputs)

        def run(inputs: list[Any]) -> Any:
            devices = {x.device for x in inputs if isinstance(x, Tensor) and x.device.type == "cuda"}
            with torch.random.fork_rng(devices):
                outputs = code(list(inputs))  # type: ignore[operator]
            # 2. an operation begins a difference where eager code makes another result of the inputs that it got
            stored = dict(zip((node.name for node in nodes), outputs[results:], strict=True))
            _Replay(plain, stored, begins).run(*inputs)
            return outputs[:results]

        run._boxed_call = True  # type: ignore[attr-defined]  # takes its inputs as one list
        return run

    return aot_autograd(
        fw_compiler=compile_graph, inference_compiler=compile_graph, decompositions=select_decomp_table()
    )


def _row(node: Node, y: Tensor, different: int, nan: int) -> FusedDifference:
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    code = next((line for line in reversed(lines) if line and set(line) - set("^~ ")), "")
    # the result of an operation that has several is named by the operation
    of = node.args[0].target if node.target is operator.getitem else node.target  # type: ignore[union-attr]
    name = f"{node.name}: {of}"
    return FusedDifference(name, code, str(y.dtype).removeprefix("torch."), different, y.numel(), nan, False)


class _Replay(Interpreter):
    """Run a graph operation by operation on the values that compiled code stored, and list where it gives others."""

    def __init__(self, graph: GraphModule, stored: dict[str, Tensor], begins: list[FusedDifference]) -> None:
        super().__init__(graph)
        self._stored, self._begins = stored, begins

    def run_node(self, n: Node) -> Any:
        x = super().run_node(n)
        if n.name not in self._stored:  # an operation of several results, which getitem takes apart
            return x
        y = self._stored[n.name]
        different, nan = _changed(y, x)
        if not different:
            return x
        self._begins.append(_row(n, y, different, nan))
        return torch.empty_like(x).copy_(y)  # with eager strides, which views of the graph were made for
