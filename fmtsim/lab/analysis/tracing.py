# SPDX-License-Identifier: Apache-2.0
"""trace: record every operation of a step, forward and backward, with hashes of what it read and returned."""

import gc
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import cached_property, partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from fmtsim.casts.arguments import check_module
from fmtsim.gemm.layers.watch import watching
from fmtsim.gemm.units.unit import describe
from fmtsim.lab.analysis.fingerprint import has_bits
from fmtsim.lab.analysis.one_step import batch_of, check_loss, run_step, unchanged
from fmtsim.lab.analysis.recorder import Recorder, inputs_of, named
from fmtsim.lab.analysis.trace import Level, Trace
from fmtsim.nn.operations import OperatorMode
from fmtsim.spec.gemm_spec import gemm_spec_from_json
from fmtsim.support.errors import ArgumentError, shown

_NOTHING = ("aten::detach", "aten::alias", "aten::_unsafe_view", "prim::device")


def trace(
    model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None = None, *,
    tensors: bool | Collection[int | str] = False, level: Level = "modules",
) -> Trace:  # fmt: skip
    """Record one step, forward and backward, of a copy of a model: all operations and hashes of their tensors' bits.

    The model, its gradients, scales' memory and generators stay as they are; so do torch's. Modules are operations, and
    in converted layers each operand (``x_f``) and product (``fprop``) with its unit, accumulation order and random
    keys. Hashes are computed where tensors lie, are equal on all devices, and tell -0 from +0 and NaN payloads apart;
    two tensors that differ have equal ones with a probability below 2**-32. Recording changes no bit at level
    ``"modules"``.

    Args:
        model: Any model in eager mode, converted or not.
        batch: What it is called with: one tensor, a tuple of arguments, or a dict of keywords.
        loss: A function of the output that gives a number to differentiate. None differentiates an output of one
            number or one that is called loss, and else the sum of the outputs' elements, each times a random number of
            its own, from a fixed seed.
        tensors: Which operations' outputs are kept, too: True keeps all, a collection those of operations by index and
            of layers by name.
        level: ``"modules"``, or ``"aten"`` for every operator that torch runs, which costs several times a step;
            layers then take the route that compilers take, whose random keys on a GPU are others.

    Raises:
        ArgumentError: The model is compiled, ``level`` is unknown, or the loss is not a number.

    >>> from fmtsim.nn import convert
    >>> layer = convert(nn.Linear(32, 16).bfloat16(), format="e4m3", unit="hopper.wgmma")
    >>> found = trace(layer, torch.ones(4, 32, dtype=torch.bfloat16))
    >>> [one.operation for one in found.operations][:4]
    ['x_f', 'w_f', 'fprop', 'Linear']
    """
    return traced_step(model, batch, loss, tensors=tensors, level=level)[0]


def traced_step(model: nn.Module, batch: Any, loss: Any = None, **how: Any) -> tuple[Trace, dict[str, Tensor]]:
    """Return what ``trace`` does, and the gradients by name."""
    check_loss(loss)
    recording = tracing(model, **how)
    with unchanged(model) as made:
        recording.model = made
        with recording:
            step = run_step(made, batch_of(batch), loss)
            recording.loss = step.loss
    return recording.trace, step.gradients


class tracing:  # noqa: N801  # a context manager, which reads like a verb
    """Record what a model does inside a ``with``, forward and backward, for steps of one's own.

    ``with fmtsim.tracing(model) as run: ...`` and then ``run.trace``. Several calls of the model follow each other in
    one trace. Backward passes run in the calling thread meanwhile, and Python's garbage collector is off.

    Args:
        model: The model, which is not copied.
        tensors, level: As in ``trace``.

    Attributes:
        model: The model.
        loss: The number that was differentiated: by itself that of the model's output, where it is one.

    Raises:
        ArgumentError: The model is compiled, or ``level`` or ``tensors`` is not allowed.
    """

    def __init__(
        self, model: nn.Module, *, tensors: bool | Collection[int | str] = False, level: Level = "modules"
    ) -> None:
        check_module("trace", model)
        if level not in ("modules", "aten"):
            raise ArgumentError(f"level={shown(level)} is unknown; choose 'modules' or 'aten'")
        if not isinstance(tensors, bool) and (
            isinstance(tensors, str) or not isinstance(tensors, Collection) or not all(map(_is_name, tensors))
        ):
            raise ArgumentError(
                f"tensors={shown(tensors)} is not allowed; pass True, or a list of operations' indices and layers"
            )
        _refuse_compiled(model)
        self.model = model
        self.loss: Tensor | None = None
        self._tensors, self._level = tensors, level
        self._stack = ExitStack()
        self._made: Callable[[], Trace] | None = None

    def __enter__(self) -> "tracing":
        self._recorder = Recorder(self.model, self._tensors)
        stack, recorder = self._stack, self._recorder
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(watching(recorder))
        stack.callback(recorder.stop)
        if gc.isenabled():  # it would look again and again at what a trace holds until its end
            stack.callback(gc.enable)
            gc.disable()
        recorder.start()
        if self._level == "aten":
            stack.enter_context(_Operators(recorder))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
        self._made = self._recorder.finish(self.loss, self._level)

    @cached_property
    def trace(self) -> Trace:
        """What was recorded, once the ``with`` is left; made when it is first asked for."""
        if self._made is None:
            raise AttributeError("a trace is there once its `with` is left; ask for it behind the block")
        return self._made()


def _is_name(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            what = f"layer {name!r}" if name else f"the model, {type(model).__name__},"
            raise ArgumentError(
                f"{what} is compiled, and compiled code shows no operations; trace the model that was given to "
                "torch.compile (model._orig_mod)"
            )


class _Operators(OperatorMode):
    """See every operator of torch, but for views and what hashes run."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and record it."""
        name = func._schema.name
        if self._recorder.busy or func.is_view or name in _NOTHING:
            return func(*args, **kwargs)
        inputs = self._recorder.read(inputs_of(args, kwargs))
        y = func(*args, **kwargs)
        outputs = [each for each in named("output", y) if has_bits(each[1])]
        if outputs:
            facts = partial(_gemm_facts, args[2]) if name == "fmtsim::gemm" else tuple
            self._recorder.record(*self._recorder.where(), name, inputs, outputs, facts)
        return y


def _gemm_facts(text: str) -> list[tuple[str, str]]:
    spec = gemm_spec_from_json(text)
    return [("datapath", describe(spec.datapath)), ("plan", str(spec.plan))]
