# SPDX-License-Identifier: Apache-2.0
"""trace: record every operation of a step, forward and backward, with hashes of what it read and returned."""

import gc
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import fmtsim
from fmtsim.casts.arguments import check_module
from fmtsim.formats.interop import dtype_name
from fmtsim.gemm.layers.watch import Seen, Watcher, watching
from fmtsim.gemm.products.explanation import explained
from fmtsim.gemm.products.resolver import seen_calls
from fmtsim.gemm.units.unit import describe
from fmtsim.lab.analysis.fingerprint import Fingerprints, has_bits
from fmtsim.lab.analysis.one_step import check_loss, run_step, split_arguments, unchanged
from fmtsim.lab.analysis.trace import (
    AGAIN,
    Direction,
    Level,
    Operation,
    Storages,
    TensorBits,
    Trace,
    stored_call,
    written_by,
)
from fmtsim.machine.simulate import simulate
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.operations import OperatorMode
from fmtsim.spec.call import GemmCall, Operands
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.gemm_spec import GemmSpec, gemm_spec_from_json
from fmtsim.spec.operand import Operand
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, shown

_LEAF = 1 << 62  # sequence numbers above are of nodes that accumulate into a leaf
Named = list[tuple[str, int, tuple[int, ...], torch.dtype]]  # tensors: name, place of the fingerprint, shape and dtype
_next_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class _Call:
    """One call of a module."""

    __slots__ = ("again", "begin", "gradients", "inputs", "layer", "module", "number", "sources")

    def __init__(self, layer: str, module: nn.Module, number: int, again: bool) -> None:
        self.layer, self.module, self.number, self.begin = layer, module, number, 0
        self.again = again  # under activation checkpointing
        self.inputs: Named = []
        self.sources: dict[Any, str] = {}  # the nodes that made the inputs, or the inputs where they are leaves
        self.gradients: Named = []


class _Event(NamedTuple):
    layer: str
    direction: Direction
    operation: str
    call: int
    inputs: Named
    outputs: Named
    facts: Any


class Recorder(Watcher):
    """Collect events; hashes are computed at once and read at the end."""

    def __init__(self, model: nn.Module, tensors: bool | Collection[int | str]) -> None:
        self._model, self._wanted, self.stores_all = model, tensors, tensors is True
        self._names = {module: name for name, module in model.named_modules()}
        self._prints = Fingerprints()
        self._events: list[_Event] = []
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._counts: dict[tuple[str, str, str], int] = {}
        self._calls: list[_Call] = []
        self._spans: list[tuple[range, _Call]] = []  # sequence numbers of a call's nodes, inner calls first
        self._owners: dict[int, _Call] = {}  # what was looked up of them
        self._outside: dict[Any, list[tuple[Any, int, Any]]] = {}
        self._quantizers: dict[int, tuple[Quantizer, str]] = {}
        self._hooks: list[Any] = []
        self._active = False
        self._loss: Tensor | None = None
        self._fresh: set[nn.Parameter] = set()  # that had no gradient before the first call

    def start(self) -> None:
        """Put hooks on all modules."""
        for module in self._names:
            self._hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._after, with_kwargs=True, always_call=True))
        self._active = True

    def stop(self) -> None:
        """Take the hooks off; graphs made meanwhile may still run backward and are no longer seen."""
        self._active = False
        for hook in self._hooks:
            hook.remove()
        self._spans.clear()
        self._owners.clear()
        self._outside.clear()

    def finish(self, loss: Tensor | None, level: Level) -> Callable[[], Trace]:
        """Return what makes the trace, of what is there now: the model is not looked at again."""
        # 1. Operations that made gradients, by parameter: "gradient of weight (1 of 2)" of layer "0" is of "0.weight".
        places: dict[nn.Parameter | None, list[int]] = {}
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for event in self._events:
            if event.direction == "backward":
                name = f"{event.layer}.{event.operation.removeprefix('gradient of ')}".lstrip(".")
                places.setdefault(parameters.get(name.split(" (")[0]), []).append(event.outputs[0][1])
        # 2. A gradient that one operation made all of is known; one that was there before, or is a sum, is read.
        gradients = []
        for name, p in self._model.named_parameters():
            makers = places.get(p, [])
            if len(makers) == 1 and p in self._fresh and p.grad is not None:
                gradients.append((name, makers[0], tuple(p.grad.shape), p.grad.dtype))
            else:
                gradients += self.read([(name, p.grad)])
        # 3. The loss, the device and the parameters as they are now.
        loss = self._loss if loss is None else loss
        modes = (mode.target for mode in _get_current_dispatch_mode_stack() if isinstance(mode, simulate))
        if (target := next(modes, None)) is not None:
            device = f"simulated {target}"
        else:
            where = next((p.device for p in self._model.parameters()), torch.device("cpu"))
            device = torch.cuda.get_device_name(where) if where.type == "cuda" else str(where)
        versions = [("fmtsim", fmtsim.__version__), ("torch", torch.__version__)]
        if target is None and where.type == "cuda":
            versions += [("cuda", str(torch.version.cuda)), ("cudnn", str(torch.backends.cudnn.version()))]
        about = {
            "level": level, "model": type(self._model).__name__, "device": device, "versions": tuple(versions),
            "parameters": tuple(
                (name, "x".join(map(str, p.shape)), _name_of(p.dtype)) for name, p in self._model.named_parameters()
            ),
        }  # fmt: skip
        return partial(self._trace, gradients, None if loss is None else loss.detach().clone(), about)

    def _trace(self, gradients: Named, loss: Tensor | None, about: dict[str, Any]) -> Trace:
        fingerprints, known_bits = self._prints.finish(), dict[Any, TensorBits]()

        def bits(tensors: Named) -> tuple[TensorBits, ...]:
            for tensor in tensors:
                if tensor not in known_bits:  # most tensors are an output and then an input
                    name, place, shape, dtype = tensor
                    code, parts, amax = fingerprints[place]
                    special: Literal["", "inf", "nan"] = ""
                    if amax is not None and not math.isfinite(amax):  # JSON has no such numbers
                        special, amax = "nan" if math.isnan(amax) else "inf", None
                    known_bits[tensor] = TensorBits(
                        name=name, shape=shape, dtype=_name_of(dtype), hash=code, parts=parts, amax=amax,
                        special=special,
                    )  # fmt: skip
            return tuple([known_bits[tensor] for tensor in tensors])

        operations = tuple(
            Operation(
                index=index, layer=event.layer, direction=event.direction, operation=event.operation, call=event.call,
                inputs=bits(event.inputs), outputs=bits(event.outputs), facts=tuple(event.facts()),
            )
            for index, event in enumerate(self._events)
        )  # fmt: skip
        trace = Trace(
            operations=operations, batch=self._prints.batch, gradients=bits(gradients), recorded=len(operations),
            loss="" if loss is None else float(loss.double().reshape(())).hex(), **about,
        )  # fmt: skip
        trace.tensors.update(self._kept)
        return trace

    def record(
        self, layer: str, direction: Direction, operation: str, inputs: Named, outputs: Sequence[tuple[str, Any]],
        facts: Callable[[], Any] = tuple, call: int | None = None, stored: dict[str, Tensor] | None = None,
    ) -> int:  # fmt: skip
        """Add an event, and return its index; ``call`` counts itself where it is None."""
        key = (layer, direction, operation)
        if call is None:
            call = self._counts[key] = self._counts.get(key, -1) + 1
        wanted = self._wanted
        index = len(self._events)
        if wanted is True or (wanted and (index in wanted or layer in wanted)):  # type: ignore[operator]
            with torch._C._DisableTorchDispatch():  # copies are no operations of the model
                self._kept[index] = {name: x.detach().clone() for name, x in outputs if has_bits(x)} | (stored or {})
        self._events.append(_Event(layer, direction, operation, call, inputs, self.read(outputs), facts))
        return index

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Read tensors anew that an operator changed: their versions count it once the operator has returned."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            if dense := [x for x in tensors if has_bits(x)]:
                self._prints.forget(*dense)

    def read(self, tensors: Iterable[tuple[str, Any]]) -> Named:
        """Take the fingerprints of those that are tensors with bits, unseen by modes of torch."""
        add, named_tensors = self._prints.add, []
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            for name, x in tensors:
                if (fingerprint := add(x)) is not None:
                    place, kind = fingerprint
                    named_tensors.append((name, place, kind.shape, kind.dtype))
        return named_tensors

    # Modules.

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._active:
            return
        # 1. A call inside a backward pass is one that activation checkpointing repeats. A first call begins a step.
        layer, again = self._names[module], torch._C._current_autograd_node() is not None
        if not self._calls and not again:
            self._prints.forget()  # optimizers' kernels may have written to parameters
            self._spans.clear()
            self._owners.clear()
            self._outside.clear()
        key = (layer, "again" if again else "forward", "")
        self._counts[key] = number = self._counts.get(key, -1) + 1
        call = _Call(layer, module, number, again)
        self._calls.append(call)
        # 2. Read what the module is given, its parameters and its buffers. The first size of the model's first input
        #    is that of the batch.
        inputs = list(name_arguments(args, kwargs))
        if module is self._model and not self._events:
            self._prints.batch = next((x.shape[0] for _, x in inputs if x.dim()), 0)
            self._fresh = {p for p in module.parameters() if p.grad is None}
        buffers = ((f"buffer {name}", x) for name, x in module._buffers.items())
        call.inputs = self.read((*inputs, *module._parameters.items(), *buffers))
        # 3. Remember where gradients of the inputs go, and the number of the first node that the call makes.
        if torch.is_grad_enabled():
            call.sources = {x if x.grad_fn is None else (x.grad_fn, x.output_nr): n for n, x in inputs}
        call.begin = _next_number()

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._active or not self._calls:
            return
        call = self._calls.pop()
        if output is None:  # or an error ended it
            return
        outputs = [pair for pair in name_tensors("output", output) if has_bits(pair[1])]
        kind = (module.original_class if isinstance(module, EmulatedModule) else type(module)).__name__
        kind = f"{AGAIN}{kind}" if call.again else kind
        facts: Callable[[], Any] = tuple
        if isinstance(module, EmulatedModule) and (how := module.emulation) is not None:
            recipe, config = how.recipe, how.config  # of now: a schedule may change them
            facts = lambda: [("runs", ": ".join(filter(None, (recipe, str(config)))))]  # noqa: E731
        self.record(call.layer, "forward", kind, call.inputs, outputs, facts, call.number)
        if module is self._model:
            self._loss = next((y.detach() for _, y in outputs if y.numel() == 1 and y.requires_grad), self._loss)
        if torch.is_grad_enabled():
            # Watch the nodes through which gradients enter and leave a module.
            self._spans.append((range(call.begin, _next_number()), call))
            seen: set[Any] = set()
            leaving: dict[str, list[tuple[Any, int]]] = {}
            for name, y in outputs:
                node = y.grad_fn
                if node is None or not call.begin <= node._sequence_nr() < _LEAF:
                    continue  # the output is an input as it was
                node.register_prehook(partial(self._comes, call, name, y.output_nr))
                if node in seen:
                    continue
                self._outside[node] = edges = self._edges(call, node, seen, leaving)
                for inner, index, target in edges:
                    # Of a leaf the node accumulates into its gradient, so the leaf itself is what was read.
                    source = target[0].variable if target[0]._sequence_nr() >= _LEAF else target
                    leaving.setdefault(call.sources.get(source, "what it read"), []).append((inner, index))
            for name, edge in leaving.items():
                for number, (node, index) in enumerate(edge, 1):
                    part = "" if len(edge) == 1 else f" ({number} of {len(edge)})"
                    node.register_hook(partial(self._leaves, call, index, f"gradient of {name}{part}"))

    def _edges(
        self, call: _Call, first: Any, seen: set[Any], leaving: dict[str, list[tuple[Any, int]]]
    ) -> list[tuple[Any, int, Any]]:
        """Return the edges by which gradients leave a module; those to its own parameters go to ``leaving``."""
        parameter_names = {p: name for name, p in call.module._parameters.items() if p is not None}
        edges_found, todo = [], [first]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            # Nodes of an inner call are not walked again: its edges to the outside stand in for them.
            outside = self._outside.get(node)
            edges = [(node, i, to) for i, to in enumerate(node.next_functions)] if outside is None else outside
            for inner, index, target in edges:
                if target[0] is None:
                    continue
                # An edge leads to a parameter of the module, to a node that the call made, or out of it.
                number = target[0]._sequence_nr()
                if number >= _LEAF and target[0].variable in parameter_names:
                    leaving.setdefault(parameter_names[target[0].variable], []).append((inner, index))
                elif call.begin <= number < _LEAF:
                    todo.append(target[0])
                elif number < _LEAF or target[0].variable in call.sources:
                    edges_found.append((inner, index, target))
        return edges_found

    def _comes(self, call: _Call, name: str, index: int, gradients: Any) -> None:
        if self._active and has_bits(gradients[index]):
            label = f"gradient of {name}"
            # A second backward pass through one graph replaces what the first one brought.
            call.gradients = [gradient for gradient in call.gradients if gradient[0] != label]
            call.gradients += self.read([(label, gradients[index])])

    def _leaves(self, call: _Call, index: int, operation: str, gradients: Any, _: Any) -> None:
        if self._active and has_bits(gradients[index]):
            outputs = [("output", gradients[index])]
            self.record(call.layer, "backward", operation, list(call.gradients), outputs, call=call.number)

    # Operands and products of converted layers.

    def where(self) -> tuple[str, Direction]:
        """Return the module that runs now, and the pass."""
        if self._calls:
            return self._calls[-1].layer, "forward"
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return "", "forward"
        while self._spans:  # those of inner calls last, which stay
            numbers, call = self._spans.pop()
            self._owners.update(dict.fromkeys(numbers, call))
        owner = self._owners.get(node._sequence_nr())
        return "" if owner is None else owner.layer, "backward"

    def operand(self, seen: Seen) -> None:
        """See an operand."""
        if not self._active:
            return
        inputs = self.read([("input", seen.original)])
        outputs = _operand_tensors("output", seen.quantized)
        quantizer = seen.quantized.quantizer
        _, text = self._quantizers.get(id(quantizer)) or (None, str(quantizer))
        self._quantizers[id(quantizer)] = quantizer, text  # kept, so that no other takes its identity
        facts = [("quantizer", text)]
        for key in seen.keys[:3]:
            if key is not None:
                seed, offset = key if isinstance(key, RandomKey) else key.tolist()  # type: ignore[union-attr]
                facts.append(("random key", f"seed {seed}, offset {offset}"))
        self.record(*self.where(), seen.name, inputs, outputs, lambda: facts)

    def product(self, name: str, a: Operand, b: Operand, bias: Tensor | None, run: Callable[[], Tensor]) -> Tensor:
        """Run a product and see it."""
        if not self._active:
            return run()
        inputs = self.read((*_operand_tensors("a", a), *_operand_tensors("b", b), ("bias", bias)))
        with seen_calls() as calls:
            y = run()
        (m, n), k = y.shape[:2], a.elements.shape[1]

        def facts() -> list[tuple[str, str]]:
            # Calls of a matrix unit alone have no sizes.
            sized = ((call if call.m else replace(call, m=m, n=n, k=k), spec) for call, spec in calls.items())
            return [row for call, spec in sized for row in _explain(call, spec)] or [("unit", "torch's own product")]

        self.record(*self.where(), name, inputs, [("output", y)], facts)
        return y


def name_arguments(args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among a function's arguments with names."""
    if len(args) == 1:
        yield from name_tensors("input", args[0])
    else:
        for index, x in enumerate(args):
            yield from name_tensors(f"input {index}", x)
    for key, x in kwargs.items():
        yield from name_tensors(key, x)


def name_tensors(name: str, x: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in tuples, lists and dicts with names."""
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, list | tuple):
        for index, item in enumerate(x):
            yield from name_tensors(f"{name} {index}", item)
    elif isinstance(x, dict):
        for key, item in x.items():
            yield from name_tensors(f"{name} {key}", item)


def _operand_tensors(name: str, x: Operand) -> tuple[tuple[str, Tensor | None], ...]:
    others = (("scale of the tensor", x.tensor_scale), ("scale", x.scale), ("rest", x.rest))
    return *((f"{name}, {label}", t) for label, t in others), (name, x.elements)


@lru_cache(maxsize=1024)
def _explain(call: GemmCall, spec: GemmSpec) -> tuple[tuple[str, str], ...]:
    return explained(call, spec).rows


_name_of = lru_cache(maxsize=64)(dtype_name)


_NOTHING = ("aten::detach", "aten::alias", "aten::_unsafe_view", "prim::device")


Tensors = bool | Collection[int | str]


@overload
def trace(
    model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None = None, *, tensors: Tensors = False,
    level: Level = "modules",
) -> Trace: ...  # fmt: skip


@overload
def trace(model: nn.Module, *, tensors: Tensors = False, level: Level = "modules") -> "Tracing": ...


def trace(
    model: nn.Module, batch: Any = None, loss: Callable[[Any], Tensor] | None = None, *, tensors: Tensors = False,
    level: Level = "modules",
) -> "Trace | Tracing":  # fmt: skip
    """Record every operation of a model, forward and backward, with hashes of the bits of its tensors.

    ``trace(model, batch)`` runs one step of a copy of the model and returns its ``Trace``: the model, its gradients,
    scale histories and generators stay as they are, and so do torch's. ``with trace(model) as run: ...`` records your
    own steps of the model itself; ``run.trace`` is the ``Trace`` once the block is left. Several calls of the model
    follow each other in one trace. Inside the block, backward passes run in the calling thread and Python's garbage
    collector is off.

    Modules are operations, and in converted layers each operand (``x_f``) and product (``fprop``) with its unit,
    accumulation order and random keys. Hashes are computed on each tensor's device, are equal on all devices, and
    distinguish -0 from +0 and NaN payloads; two different tensors have one hash with a probability below 2**-32.
    Recording changes no bit at level ``"modules"``.

    Args:
        model: Any model in eager mode, converted or not.
        batch: What the model is called with: one tensor, a tuple of arguments, or a dict of keywords. Without a batch,
            the result is a context manager.
        loss: A function of the output that gives a number to differentiate. None differentiates an output of one
            number or one that is called loss, and else the sum of the outputs' elements, each times a random number of
            its own, from a fixed seed. In a ``with`` block, set ``run.loss`` instead where the model returns no loss.
        tensors: Operations whose outputs are stored as well: True stores all, a collection those of operations by index
            and of layers by name. At level ``"aten"``, True stores operators' arguments, too, for ``fmtsim audit``.
        level: ``"modules"``, or ``"aten"`` for every operator that torch runs, which costs several times a step;
            layers then take the route that compilers take, whose random keys on a GPU are others.

    Raises:
        ArgumentError: The model is compiled, ``level`` or ``tensors`` is not allowed, ``loss`` comes without a batch or
            does not return a number.

    >>> from fmtsim.nn import convert
    >>> layer = convert(nn.Linear(32, 16).bfloat16(), format="e4m3", target="hopper.wgmma")
    >>> step = trace(layer, torch.ones(4, 32, dtype=torch.bfloat16))
    >>> [operation.operation for operation in step.operations][:4]
    ['x_f', 'w_f', 'fprop', 'Linear']
    >>> with trace(layer) as run:
    ...     layer(torch.ones(4, 32, dtype=torch.bfloat16)).sum().backward()
    >>> len(run.trace.gradients)
    2
    """
    if batch is not None:
        return traced_step(model, batch, loss, tensors=tensors, level=level)[0]
    if loss is not None:
        raise ArgumentError(
            "trace got loss without a batch; pass trace(model, batch, loss), or set run.loss in the with"
        )
    return Tracing(model, tensors=tensors, level=level)


def traced_step(model: nn.Module, batch: Any, loss: Any = None, **options: Any) -> tuple[Trace, dict[str, Tensor]]:
    """Return the ``Trace`` of one step, and the gradients by name."""
    check_loss(loss)
    recording = Tracing(model, **options)
    with unchanged(model) as model_copy:
        recording.model = model_copy
        with recording:
            step = run_step(model_copy, split_arguments(batch), loss)
            recording.loss = step.loss
    return recording.trace, step.gradients


_COMPILED = (
    "and compiled code shows no operations; trace the model that was given to torch.compile (model._orig_mod). What "
    "compiling changes: fmtsim.bisect(model, torch.compile(model), batch) names what begins a difference, "
    "and torch._inductor.config.emulate_precision_casts = True keeps eager roundings (docs/howto/compiled.md)"
)


class Tracing:
    """The context manager that ``fmtsim.trace`` returns without a batch.

    Attributes:
        model: The model, which is not copied.
        loss: The number that was differentiated: set it where the model's output is not that number.
    """

    def __init__(self, model: nn.Module, *, tensors: Tensors = False, level: Level = "modules") -> None:
        check_module("trace", model)
        if level not in ("modules", "aten"):
            raise ArgumentError(f"level={shown(level)} is unknown; choose 'modules' or 'aten'")
        names = isinstance(tensors, Collection) and not isinstance(tensors, str)
        if not isinstance(tensors, bool) and not (names and {type(name) for name in tensors} <= {int, str}):
            raise ArgumentError(
                f"tensors={shown(tensors)} is not allowed; pass True, or a list of operations' indices and layers"
            )
        for name, module in model.named_modules():
            if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
                what = f"layer {name!r}" if name else f"the model, {type(model).__name__},"
                raise ArgumentError(f"{what} is compiled, {_COMPILED}")
        self.model = model
        self.loss: Tensor | None = None
        self._tensors, self._level = tensors, level
        self._stack = ExitStack()
        self._finish: Callable[[], Trace] | None = None

    def __repr__(self) -> str:
        return f"<tracing of {type(self.model).__name__}; its .trace is the Trace, behind the block>"

    def __enter__(self) -> "Tracing":
        self._recorder = Recorder(self.model, self._tensors)
        stack, recorder = self._stack, self._recorder
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(watching(recorder))
        stack.callback(recorder.stop)
        if gc.isenabled():  # each collection would visit all tensors of the trace
            stack.callback(gc.enable)
            gc.disable()
        recorder.start()
        if self._level == "aten":
            stack.enter_context(_Operators(recorder))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
        if hasattr(error, "real_stack") or (kind and kind.__module__.startswith("torch._dynamo")):  # it met the hooks
            raise ArgumentError(f"the model runs inside torch.compile, {_COMPILED}") from None
        self._finish = self._recorder.finish(self.loss, self._level)

    @cached_property
    def trace(self) -> Trace:
        """The ``Trace`` of the block, computed when it is first asked for."""
        if self._finish is None:
            raise AttributeError("a trace is complete once its `with` is left; ask for it behind the block")
        return self._finish()


class _Operators(OperatorMode):
    """See every operator of torch, but for views."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder, self._storages = recorder, Storages()

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        if func.is_view or name in _NOTHING:
            return func(*args, **kwargs)
        if name == "fmtsim::gemm":
            # Its first argument is the list of operands, whose tensors are named by their roles.
            arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            roles = dict(zip(Operands._fields, arguments.pop("operands"), strict=False))
            inputs = self._recorder.read(name_arguments((), roles | arguments))
        else:
            inputs = self._recorder.read(name_arguments(args, kwargs))
        stores_all, writes = self._recorder.stores_all, list[Any]()
        stored, facts = stored_call(func, args, kwargs, self._storages, writes) if stores_all else ({}, tuple)
        y = func(*args, **kwargs)
        changed = written_by(func, args, kwargs)
        self._recorder.forget(x for _, x in changed)
        outputs = [pair for pair in name_tensors("output", y) if has_bits(pair[1])]
        if outputs:
            if name == "fmtsim::gemm":
                spec = gemm_spec_from_json(args[1])
                facts = lambda: [("datapath", describe(spec.datapath)), ("plan", str(spec.plan))]  # noqa: E731
            index = self._recorder.record(*self._recorder.where(), name, inputs, outputs, facts, stored=stored)
            if stores_all:
                writes += self._storages.write(index, [*changed, *outputs])
        elif stores_all:
            self._storages.forget(x for _, x in changed)
        return y
