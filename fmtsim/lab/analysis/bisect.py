# SPDX-License-Identifier: Apache-2.0
"""bisect: find the first operation whose bits differ between two runs of one model, though what it read is equal."""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from fmtsim.lab.analysis.bisection import Bisection, Kind, is_call
from fmtsim.lab.analysis.compare import compare
from fmtsim.lab.analysis.trace import Level, Operation, TensorBits, Trace
from fmtsim.lab.analysis.tracing import traced_step
from fmtsim.support.errors import ArgumentError, shown

Run = Trace | str | os.PathLike[str] | tuple[Any, ...]
"""A trace, the file of one, or ``(model, batch)`` or ``(model, batch, loss)`` as ``trace`` takes them."""


def bisect(run_a: Run, run_b: Run) -> Bisection:
    """Find the first operation whose output bits differ between two runs of one model while its inputs are equal.

    Runs may differ in recipe, target or unit, in whether products run natively, in device, machine, versions, and in
    how many members the batch has: members that both have are then compared, forward alone, because losses are means
    over other batches. What both runs have is paired by layer, pass and operation: inside a layer that is converted in
    one run alone, that run's operands and products are left out.

    Args:
        run_a, run_b: Each a ``Trace``, the path of a saved one, or ``(model, batch)`` or ``(model, batch, loss)``,
            which runs on a copy of the model. Such runs begin with torch's generators as they are, run again to get
            the values of the operation that was found (both, or it says that a run does not repeat itself), and where
            the difference comes from code between modules once more with all of torch's operators.

    Raises:
        ArgumentError: The runs are of different models or inputs, or recorded at different levels; it names the first
            thing that differs.
        DataError: A file is not a trace, damaged, or of another version.

    >>> import torch, fmtsim
    >>> layer, x = nn.Linear(64, 8).bfloat16(), torch.linspace(-3, 3, 256, dtype=torch.bfloat16).view(4, 64)
    >>> plain = fmtsim.trace(layer, x)
    >>> found = bisect(plain, (fmtsim.convert(layer, format="e4m3", unit="hopper.wgmma"), x))
    >>> str(found.a), found.kind, found.alone
    ('(model) forward: Linear', 'operation', (0, 6))
    """
    runs = _read("run_a", run_a), _read("run_b", run_b)
    found = _found(runs, "modules")
    if found.inside_modules or any(run.step is None for run in runs):
        return found
    with contextlib.suppress(ArgumentError):  # operators that do not pair
        closer = _found(runs, "aten")
        if closer.kind != "operation":
            return found
        counts = ("compared", "different", "alone", "losses", "gradients", "worst")
        return dataclasses.replace(closer, **{name: getattr(found, name) for name in counts})
    return found


def assert_same_bits(model_a: nn.Module, model_b: nn.Module, batch: Any, loss: Any = None) -> None:
    """Fail where two models have not the same bits in a step, forward and backward; the message is the ``Bisection``.

    Args:
        model_a, model_b: Two configurations of one model; copies run.
        batch, loss: As in ``fmtsim.trace``.

    Raises:
        AssertionError: Some bit differs.
        ArgumentError: As ``fmtsim.bisect``.

    >>> import torch
    >>> layer = nn.Linear(4, 2)
    >>> assert_same_bits(layer, layer, torch.ones(1, 4))
    """
    found = bisect((model_a, batch, loss), (model_b, batch, loss))
    if not found.equal:
        raise AssertionError(f"the models' bits differ\n{found}")


class _Traced(NamedTuple):
    trace: Trace
    gradients: dict[str, Tensor]


class _Side(NamedTuple):
    """A run: its trace, or its model and how that is run."""

    trace: Trace | None
    model: nn.Module | None
    step: Callable[..., _Traced] | None

    def at(self, level: Level, **keep: Any) -> _Traced:
        if self.trace is not None:
            return _Traced(self.trace, {})
        assert self.step is not None
        return self.step(level=level, **keep)


def _read(name: str, run: Any) -> _Side:
    if isinstance(run, Trace):
        return _Side(run, None, None)
    if isinstance(run, str | os.PathLike):
        return _Side(Trace.load(run), None, None)
    if isinstance(run, tuple | list) and len(run) in (2, 3) and isinstance(run[0], nn.Module):
        model, batch, loss = (*run, None)[:3]

        def step(**how: Any) -> _Traced:
            return _Traced(*traced_step(model, batch, loss, **how))

        return _Side(None, model, step)
    raise ArgumentError(
        f"{name}={shown(run)} is not a run; pass a Trace, the path of one, (model, batch) or (model, batch, loss)"
    )


def _found(runs: tuple[_Side, _Side], level: Level) -> Bisection:
    a, b = (run.at(level) for run in runs)
    _check(a.trace, b.trace)
    found = _first(a.trace, b.trace)
    one, other = found.a, found.b
    if one is None or other is None:
        return found
    if a.gradients and b.gradients and a.trace.batch == b.trace.batch:
        found = dataclasses.replace(found, worst=_worst(a.gradients, b.gradients))
    first = _kept("a", runs[0], a.trace, one, level, found.tensor)
    return _with_values(found, [first, _kept("b", runs[1], b.trace, other, level, found.tensor)])


def _kept(label: str, run: _Side, done: Trace, one: Operation, level: Level, name: str) -> Tensor | str:
    """Return an operation's tensor, or why there is none."""
    own = {} if run.model is None else dict(run.model.named_parameters())
    if (parameter := own.get(f"{one.layer}.{name}".lstrip("."))) is not None:
        return parameter.detach()
    again = done if run.step is None else run.at(level, tensors=[one.index]).trace
    x = again.tensors.get(one.index, {}).get(name)
    if run.step is not None and (len(again.operations) <= one.index or again.operations[one.index] != one):
        return "a run gives other bits when it is repeated, so that this difference need not be one of the two runs"
    if x is None and not any(out.name == name for out in one.outputs):
        return ""
    return f"trace {label} again with tensors=[{one.index}] to see the values" if x is None else x


def _with_values(found: Bisection, kept: list[Tensor | str]) -> Bisection:
    texts = [x for x in kept if isinstance(x, str)]
    if texts:
        return dataclasses.replace(found, note="; ".join(dict.fromkeys(filter(None, texts))))
    x, y = kept
    assert isinstance(x, Tensor) and isinstance(y, Tensor)
    if x.dtype != y.dtype:
        return dataclasses.replace(found, note=f"a has {x.dtype}, b {y.dtype}")
    rows = min(len(x), len(y)) if x.dim() else 0
    x, y = (x[:rows], y[:rows]) if x.shape != y.shape else (x, y)
    return dataclasses.replace(found, comparison=compare(x, y))


def _worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[str, float] | None:
    """Return which gradient differs most, relative to its norm; NaN and Inf count as more than anything."""
    pairs = ((name, x.float(), b[name].to(x.device).float()) for name, x in a.items() if name in b)
    each = [(name, float((x - y).norm() / y.norm())) for name, x, y in pairs if not x.equal(y)]
    found = [(name, math.inf if math.isnan(x) else x) for name, x in each]
    return max(found, key=lambda one: one[1], default=None)


def _check(a: Trace, b: Trace) -> None:
    """Refuse traces of different models, inputs or levels."""
    if a.level != b.level:
        raise ArgumentError(f"run_a was traced at level {a.level!r}, run_b at {b.level!r}; trace both at one level")
    for x, y in itertools.zip_longest(a.parameters, b.parameters):
        if x != y:
            texts = ("no further parameter" if one is None else f"{one[0]} {one[1]} {one[2]}" for one in (x, y))
            raise ArgumentError(
                f"the runs are of different models: run_a has {' and run_b '.join(texts)}; pass runs of one model, "
                "whose parameters have one shape and dtype"
            )


def _check_shapes(a: Operation, b: Operation, batches: tuple[int, int]) -> None:
    """Refuse modules that were called with tensors of different shapes, but for the batch's size."""
    if not is_call(a) or batches[0] != batches[1]:
        return
    others = {x.name: x for x in b.inputs}
    for x in a.inputs:
        if x.name in others and x.shape != others[x.name].shape:
            raise ArgumentError(
                f"the runs' inputs differ in shape: {x.name} of {a} is {_shape(x)} in run_a and "
                f"{_shape(others[x.name])} in run_b; pass inputs of one shape, or batches of different size"
            )


def _first(a: Trace, b: Trace) -> Bisection:
    """Pair the operations of two traces and find the first that differs."""
    others, batches = {_key(one): one for one in b.operations}, (a.batch, b.batch)
    pairs = []
    for one in a.operations:
        other = others.pop(_key(one), None)
        if other is not None:
            _check_shapes(one, other, batches)
            pairs.append((one, other))
        elif is_call(one):
            raise ArgumentError(f"the runs are of different models: {one} is in run_a alone; pass runs of one model")
    alone = len(a.operations) - len(pairs), len(others)
    extra = next((one for one in others.values() if is_call(one)), None)
    if extra is not None:
        raise ArgumentError(f"the runs are of different models: {extra} is in run_b alone; pass runs of one model")
    if a.batch != b.batch:
        pairs = [pair for pair in pairs if pair[0].direction == "forward"]
    different = [bool(_differing(x.outputs, y.outputs, batches)) for x, y in pairs]
    found = Bisection(compared=len(pairs), different=sum(different), alone=alone)
    if a.batch == b.batch:
        grown = _differing(a.gradients, b.gradients, batches)
        losses = (float.fromhex(a.loss), float.fromhex(b.loss)) if a.loss and b.loss else None
        found = dataclasses.replace(found, losses=losses, gradients=(len(grown), len(a.gradients)))
    return _judged(found, pairs, (a, b))


def _key(one: Operation) -> tuple[str, str, str, int]:
    """Return what tells an operation from others of its run; modules are known by their names, not their classes."""
    return one.layer, one.direction, "" if is_call(one) else one.operation, one.call


def _judged(found: Bisection, pairs: list[tuple[Operation, Operation]], traces: tuple[Trace, Trace]) -> Bisection:
    batches, before = (traces[0].batch, traces[1].batch), None
    for x, y in pairs:
        read, made = _differing(x.inputs, y.inputs, batches), _differing(x.outputs, y.outputs, batches)
        if read and not is_call(x):  # of a layer that was itself given something else?
            calls = (pair for pair in pairs if pair[0].layer == x.layer and is_call(pair[0]))
            call = next((pair for pair in calls if _differing(pair[0].inputs, pair[1].inputs, batches)), None)
            if call is not None and x.direction == "forward":
                (x, y), read = call, _differing(call[0].inputs, call[1].inputs, batches)
        if read or made:
            kind = _kind(x, read[0], traces[0]) if read else "operation"
            return dataclasses.replace(found, kind=kind, a=x, b=y, tensor=(read or made)[0], before=before)
        before = x
    return found


def _kind(one: Operation, name: str, trace: Trace) -> Kind:
    """Say what an operation read that differs: a parameter, a buffer, what the model was given, or what code made."""
    if any(f"{one.layer}.{name}".lstrip(".") == parameter for parameter, _, _ in trace.parameters):
        return "parameter"
    if name.startswith("buffer "):
        return "buffer"
    (read,) = (x.hash for x in one.inputs if x.name == name)
    given = [each for each in trace.operations if not each.layer and is_call(each)]
    return "input" if any(x.hash == read for each in given for x in each.inputs) else "code"


def _differing(a: tuple[TensorBits, ...], b: tuple[TensorBits, ...], batches: tuple[int, int]) -> list[str]:
    """Return the names of tensors of two operations whose bits differ."""
    others = {x.name: x for x in b}
    return [x.name for x in a if x.name in others and not _same(x, others[x.name], batches)]


def _same(a: TensorBits, b: TensorBits, batches: tuple[int, int]) -> bool:
    if a.shape == b.shape and (batches[0] == batches[1] or a.shape):
        return a.dtype == b.dtype and a.hash == b.hash
    if batches[0] == batches[1]:
        return False
    x, y = (each.parts or (each.hash,) * (batch == 1) for each, batch in zip((a, b), batches, strict=True))
    shared = min(len(x), len(y))
    alike = a.shape[1:] == b.shape[1:] and a.shape[:1] and a.shape[0] * batches[1] == b.shape[0] * batches[0]
    return not alike or (a.dtype == b.dtype and x[:shared] == y[:shared])


def _shape(x: TensorBits) -> str:
    return "x".join(map(str, x.shape)) or "()"
