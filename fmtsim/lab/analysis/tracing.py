# SPDX-License-Identifier: Apache-2.0
"""trace: record every operation of a step, forward and backward, with hashes of what it read and returned."""

import gc
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from types import TracebackType
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import fmtsim
from fmtsim.casts.arguments import check_module
from fmtsim.casts.ops import Key
from fmtsim.formats.interop import dtype_name
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.gemm.layers.watch import Seen, Watcher, watching
from fmtsim.gemm.products.explanation import explained
from fmtsim.gemm.products.resolver import seen_calls
from fmtsim.gemm.units.unit import describe
from fmtsim.lab.analysis.fingerprint import Fingerprint, Fingerprints, has_bits
from fmtsim.lab.analysis.one_step import batch_of, check_loss, run_step, unchanged
from fmtsim.lab.analysis.trace import AGAIN, Direction, Level, Operation, TensorBits, Trace, stored_call
from fmtsim.machine.simulate import simulate
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.operations import OperatorMode
from fmtsim.spec.call import GemmCall
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
        gradients = []
        for name, p, place in self._gradients():
            if place is not None and p.grad is not None:
                gradients.append((name, place, tuple(p.grad.shape), p.grad.dtype))
            else:
                gradients += self.read([(name, p.grad)])
        loss = self._loss if loss is None else loss
        about = {
            "level": level, "model": type(self._model).__name__, "device": _device(self._model),
            "parameters": tuple(
                (name, "x".join(map(str, p.shape)), _name_of(p.dtype)) for name, p in self._model.named_parameters()
            ),
        }  # fmt: skip
        return partial(self._trace, gradients, None if loss is None else loss.detach().clone(), about)

    def _trace(self, gradients: Named, loss: Tensor | None, about: dict[str, Any]) -> Trace:
        prints, tensor_bits = self._prints.finish(), dict[Any, TensorBits]()

        def bits(each: Named) -> tuple[TensorBits, ...]:
            for one in each:
                if one not in tensor_bits:
                    name, place, shape, dtype = one
                    tensor_bits[one] = _bits(name, shape, dtype, prints[place])
            return tuple([tensor_bits[one] for one in each])

        operations = tuple(
            Operation(
                index=index, layer=one.layer, direction=one.direction, operation=one.operation, call=one.call,
                inputs=bits(one.inputs), outputs=bits(one.outputs), facts=tuple(one.facts()),
            )
            for index, one in enumerate(self._events)
        )  # fmt: skip
        trace = Trace(
            operations=operations, batch=self._prints.batch, versions=_versions(), gradients=bits(gradients),
            loss="" if loss is None else float(loss.double().reshape(())).hex(), **about,
        )  # fmt: skip
        trace.tensors.update(self._kept)
        return trace

    def _gradients(self) -> Iterator[tuple[str, nn.Parameter, int | None]]:
        """Yield parameters with the places of their gradients' fingerprints where one operation made all of it."""
        places: dict[nn.Parameter | None, list[int]] = {}
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for one in self._events:
            if one.direction == "backward":
                name = f"{one.layer}.{one.operation.removeprefix('gradient of ')}".lstrip(".")
                places.setdefault(parameters.get(name.split(" (")[0]), []).append(one.outputs[0][1])
        for name, p in self._model.named_parameters():
            makers = places.get(p, [])
            yield name, p, makers[0] if len(makers) == 1 and p in self._fresh else None

    def record(
        self, layer: str, direction: Direction, operation: str, inputs: Named, outputs: Sequence[tuple[str, Any]],
        facts: Callable[[], Any] = tuple, call: int | None = None, stored: dict[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Add an event; ``call`` counts itself where it is None."""
        key = (layer, direction, operation)
        if call is None:
            call = self._counts[key] = self._counts.get(key, -1) + 1
        wanted = self._wanted
        index = len(self._events)
        if wanted is True or (wanted and (index in wanted or layer in wanted)):  # type: ignore[operator]
            with torch._C._DisableTorchDispatch():
                self._kept[index] = {name: x.detach().clone() for name, x in outputs if has_bits(x)} | (stored or {})
        self._events.append(_Event(layer, direction, operation, call, inputs, self.read(outputs), facts))

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
        inputs = list(inputs_of(args, kwargs))
        if module is self._model and not self._events:
            self._prints.batch = next((x.shape[0] for _, x in inputs if x.dim()), 0)
            self._fresh = {p for p in module.parameters() if p.grad is None}
        buffers = ((f"buffer {name}", x) for name, x in module._buffers.items())
        call.inputs = self.read((*inputs, *module._parameters.items(), *buffers))
        if torch.is_grad_enabled():
            call.sources = {x if x.grad_fn is None else (x.grad_fn, x.output_nr): n for n, x in inputs}
        call.begin = _next_number()

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._active or not self._calls:
            return
        call = self._calls.pop()
        if output is None:  # or an error ended it
            return
        outputs = [named_output for named_output in named("output", output) if has_bits(named_output[1])]
        kind = f"{AGAIN}{_kind(module)}" if call.again else _kind(module)
        how = module.emulation if isinstance(module, EmulatedModule) else None
        facts = tuple if how is None else partial(_facts_of, how.recipe, how.config)
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
                    continue
                node.register_prehook(partial(self._comes, call, name, y.output_nr))
                if node in seen:
                    continue
                self._outside[node] = edges = self._edges(call, node, seen, leaving)
                for inner, index, target in edges:
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
            outside = self._outside.get(node)
            edges = [(node, i, to) for i, to in enumerate(node.next_functions)] if outside is None else outside
            for inner, index, target in edges:
                if target[0] is None:
                    continue
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
            named = f"gradient of {name}"
            call.gradients = [gradient for gradient in call.gradients if gradient[0] != named]
            call.gradients += self.read([(named, gradients[index])])

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
        outputs = _parts("output", seen.quantized)
        quantizer = seen.quantized.quantizer
        _, text = self._quantizers.get(id(quantizer)) or (None, str(quantizer))
        self._quantizers[id(quantizer)] = quantizer, text  # kept, so that no other takes its identity
        facts = [("quantizer", text)]
        facts += [("random key", _key(key)) for key in seen.keys[:3] if key is not None]
        self.record(*self.where(), seen.name, inputs, outputs, lambda: facts)

    def product(self, name: str, a: Operand, b: Operand, bias: Tensor | None, run: Callable[[], Tensor]) -> Tensor:
        """Run a product and see it."""
        if not self._active:
            return run()
        inputs = self.read((*_parts("a", a), *_parts("b", b), ("bias", bias)))
        with seen_calls() as calls:
            y = run()
        sizes = y.shape[0], y.shape[1], a.elements.shape[1]
        self.record(*self.where(), name, inputs, [("output", y)], partial(_product_facts, calls, sizes))
        return y


def inputs_of(args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among a function's arguments with names."""
    if len(args) == 1:
        yield from named("input", args[0])
    else:
        for index, x in enumerate(args):
            yield from named(f"input {index}", x)
    for key, x in kwargs.items():
        yield from named(key, x)


def named(name: str, x: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in tuples, lists and dicts with names."""
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, list | tuple):
        for index, item in enumerate(x):
            yield from named(f"{name} {index}", item)
    elif isinstance(x, dict):
        for key, item in x.items():
            yield from named(f"{name} {key}", item)


def _parts(name: str, x: Operand) -> tuple[tuple[str, Tensor | None], ...]:
    others = (("scale of the tensor", x.tensor_scale), ("scale", x.scale), ("rest", x.rest))
    return *((f"{name}, {label}", t) for label, t in others), (name, x.elements)


def _bits(name: str, shape: tuple[int, ...], dtype: torch.dtype, found: Fingerprint) -> TensorBits:
    amax, special = found.amax, ""
    if amax is not None and not math.isfinite(amax):
        special = "nan" if math.isnan(amax) else "inf"
        amax = None
    return TensorBits(
        name=name, shape=shape, dtype=_name_of(dtype), hash=found.hash, parts=found.parts, amax=amax,
        special=special,  # type: ignore[arg-type]
    )  # fmt: skip


def _kind(module: nn.Module) -> str:
    return (module.original_class if isinstance(module, EmulatedModule) else type(module)).__name__


def _facts_of(recipe: str | None, config: LinearConfig) -> list[tuple[str, str]]:
    return [("runs", ": ".join(filter(None, (recipe, str(config)))))]


def _product_facts(calls: dict[GemmCall, GemmSpec], sizes: tuple[int, int, int]) -> list[tuple[str, str]]:
    m, n, k = sizes  # which calls of a unit alone do not have
    sized = ((call if call.m else replace(call, m=m, n=n, k=k), spec) for call, spec in calls.items())
    return [row for call, spec in sized for row in _explained(call, spec)] or [("unit", "torch's own product")]


@lru_cache(maxsize=1024)
def _explained(call: GemmCall, spec: GemmSpec) -> tuple[tuple[str, str], ...]:
    return explained(call, spec).rows


def _key(key: Key) -> str:
    seed, offset = key if isinstance(key, RandomKey) else key.tolist()  # type: ignore[union-attr]
    return f"seed {seed}, offset {offset}"


_name_of = lru_cache(maxsize=64)(dtype_name)


def _device(model: nn.Module) -> str:
    simulated = [mode.target for mode in _get_current_dispatch_mode_stack() if isinstance(mode, simulate)]
    if simulated:
        return f"simulated {simulated[0]}"
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


@lru_cache(maxsize=1)
def _versions() -> tuple[tuple[str, str], ...]:
    return ("fmtsim", fmtsim.__version__), ("torch", torch.__version__)


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
            step = run_step(model_copy, batch_of(batch), loss)
            recording.loss = step.loss
    return recording.trace, step.gradients


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
                raise ArgumentError(
                    f"{what} is compiled, and compiled code shows no operations; trace the model that was given to "
                    "torch.compile (model._orig_mod)"
                )
        self.model = model
        self.loss: Tensor | None = None
        self._tensors, self._level = tensors, level
        self._stack = ExitStack()
        self._finish: Callable[[], Trace] | None = None

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
        self._recorder = recorder

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        if func.is_view or name in _NOTHING:
            return func(*args, **kwargs)
        inputs = self._recorder.read(inputs_of(args, kwargs))
        stored, facts = ({}, tuple) if not self._recorder.stores_all else stored_call(func, args, kwargs)
        y = func(*args, **kwargs)
        outputs = [output for output in named("output", y) if has_bits(output[1])]
        if outputs:
            facts = partial(_gemm_facts, args[1]) if name == "fmtsim::gemm" else facts
            self._recorder.record(*self._recorder.where(), name, inputs, outputs, facts, stored=stored)
        return y


def _gemm_facts(text: str) -> list[tuple[str, str]]:
    spec = gemm_spec_from_json(text)
    return [("datapath", describe(spec.datapath)), ("plan", str(spec.plan))]
