# SPDX-License-Identifier: Apache-2.0
"""trace: record every operation of a step, forward and backward, with hashes of what it read and returned."""

import gc
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import cached_property, partial
from types import TracebackType
from typing import Any, overload

import torch
from torch import Tensor, nn

from fmtsim.casts.arguments import check_module
from fmtsim.gemm.layers.watch import watching
from fmtsim.gemm.units.unit import describe
from fmtsim.lab.analysis.fingerprint import has_bits
from fmtsim.lab.analysis.one_step import batch_of, check_loss, run_step, unchanged
from fmtsim.lab.analysis.recorder import Recorder, inputs_of, named
from fmtsim.lab.analysis.stored_call import stored_call
from fmtsim.lab.analysis.trace import Level, Trace
from fmtsim.nn.operations import OperatorMode
from fmtsim.spec.gemm_spec import gemm_spec_from_json
from fmtsim.support.errors import ArgumentError, shown

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
        _refuse_compiled(model)
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


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            what = f"layer {name!r}" if name else f"the model, {type(model).__name__},"
            raise ArgumentError(
                f"{what} is compiled, and compiled code shows no operations; trace the model that was given to "
                "torch.compile (model._orig_mod)"
            )


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
            facts = partial(_gemm_facts, args[2]) if name == "fmtsim::gemm" else facts
            self._recorder.record(*self._recorder.where(), name, inputs, outputs, facts, stored=stored)
        return y


def _gemm_facts(text: str) -> list[tuple[str, str]]:
    spec = gemm_spec_from_json(text)
    return [("datapath", describe(spec.datapath)), ("plan", str(spec.plan))]
