# SPDX-License-Identifier: Apache-2.0
"""bisect: find the first operation whose bits differ between two runs of one model, though its inputs are equal."""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Never, overload

from torch import Tensor, nn

from fmtsim.casts.arguments import refuse_others, spelled
from fmtsim.gemm.layers.config import OPERANDS, PRODUCTS
from fmtsim.lab.analysis.bisect_compiled import CompiledBisection, bisect_compiled
from fmtsim.lab.analysis.bisect_launches import LaunchBisection, bisect_launches
from fmtsim.lab.analysis.compare import Comparison, compare
from fmtsim.lab.analysis.one_step import split_arguments
from fmtsim.lab.analysis.trace import AGAIN, CALL, Level, Operation, TensorBits, Trace
from fmtsim.lab.analysis.tracing import traced_step
from fmtsim.machine.ptx.launching import Launch
from fmtsim.nn.planning import is_inside
from fmtsim.support import table
from fmtsim.support.errors import ArgumentError, shown

Kind = Literal["", "operation", "parameter", "buffer", "input", "code"]
_KINDS = {
    "operation": "its inputs are equal, its output is not", "parameter": "the runs began with another parameter",
    "buffer": "the runs began with another buffer", "input": "the runs were given other inputs",
    "code": "made by code outside of these operations, before this one",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Bisection(table.Result):
    """Say where two runs part; ``print`` shows it, notebooks a table.

    Args:
        kind: ``"operation"``: an operation with equal inputs whose output differs. ``"parameter"``, ``"buffer"`` or
            ``"input"``: what the first run read is not what the second one read. ``"code"``: an operation's input
            differs although all operations before it agree, so that code between them, or the loss, made the
            difference. Empty where no bit differs.
        a, b: The operation in each run; None where no bit differs.
        tensor: Name of its first tensor that differs.
        before: The last operation before it with equal bits, or None.
        comparison: That tensor of both runs (actual is the first run's), None where it was not kept.
        note: Why there is no comparison, or what else has to be known.
        compared: Operations that both runs have.
        different: How many of these have other outputs.
        alone: Operations that one run alone has, of either: those inside layers that are converted in one alone.
        losses: Of both runs, None where there is none or where batches differ in size.
        gradients: How many parameters' gradients differ, and of how many; (0, 0) where batches differ in size.
        worst: The parameter whose gradients differ most, and the relative norm of the difference, or None.
    """

    kind: Kind = ""
    a: Operation | None = None
    b: Operation | None = None
    tensor: str = ""
    before: Operation | None = None
    comparison: Comparison | None = None
    note: str = ""
    compared: int = 0
    different: int = 0
    alone: tuple[int, int] = (0, 0)
    losses: tuple[float, float] | None = None
    gradients: tuple[int, int] = (0, 0)
    worst: tuple[str, float] | None = None

    @property
    def equal(self) -> bool:
        """Whether no bit differs that both runs have."""
        return not self.kind

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "equal": self.equal, "kind": self.kind,
            "a": None if self.a is None else dataclasses.asdict(self.a),
            "b": None if self.b is None else dataclasses.asdict(self.b),
            "tensor": self.tensor, "before": None if self.before is None else str(self.before),
            "comparison": None if self.comparison is None else self.comparison.to_dict(),
            "compared": self.compared, "different": self.different, "alone": list(self.alone), "note": self.note,
            "losses": self.losses and list(self.losses), "gradients": list(self.gradients),
            "worst": self.worst and list(self.worst),
        }  # fmt: skip

    @property
    def inside_modules(self) -> bool:
        """Whether the operation that was found is not code between others: False of a module that calls others, too."""
        a, before = self.a, self.before
        if a is not None and before is not None and is_call(a) and self.kind == "operation":
            return not is_inside(before.layer, a.layer)  # what ended before it is a part of it
        return self.kind != "code"

    def _content(self) -> tuple[table.Facts]:
        alone = [f"{n} in {run} alone" for n, run in zip(self.alone, "ab", strict=True) if n]
        compared = "; ".join([f"{self.compared:,} operations are in both runs", *alone])
        facts: list[tuple[str, str]] = []
        if self.a is None or self.b is None:
            facts.append(("result", "no bit differs" if self.equal else str(self.a)))
        else:
            facts += self._where(self.a, self.b)
        facts.append(("compared", compared))
        if self.note:
            facts.append(("note", self.note))
        # What became of the difference: outputs, loss and gradients.
        if not self.equal:
            facts.append(("grows to", f"{self.different:,} of {self.compared:,} operations have other outputs"))
        if not self.equal and self.losses is not None:
            x, y = self.losses
            relative = "" if x == y or not y or not math.isfinite(x - y) else f", {abs(x - y) / abs(y):.3g} relative"
            facts.append(("loss", f"{x!r} in both" if x == y else f"a {x!r}, b {y!r}{relative}"))
        if not self.equal and self.gradients[1]:
            text = f"{self.gradients[0]:,} of {self.gradients[1]:,} differ"
            if self.worst is not None:
                text += f", most that of {self.worst[0]}: by {self.worst[1]:.3g} of its norm"
            facts.append(("gradients", text))
        return (table.Facts(facts),)

    def _where(self, a: Operation, b: Operation) -> Iterator[tuple[str, str]]:
        # 1. Which operation, and what of it differs.
        yield "first difference", f"{a}, operation {a.index}"
        in_module = ", in code of its own" if not self.inside_modules and self.kind == "operation" else ""
        keys = [[text for name, text in operation.facts if name == "random key"] for operation in (a, b)]
        reason = _KINDS[self.kind] if keys[0] == keys[1] else "its inputs are equal, its random key is not"
        yield "what", f"{self.tensor}: {reason}{in_module}"
        if a.operation != b.operation:
            yield "in b", str(b)
        if self.before is not None:
            yield "last equal", str(self.before)
        # 2. The first values that differ.
        if self.comparison is not None and self.comparison.first is not None:
            c, first = self.comparison, self.comparison.first
            pairs = zip("ab", first.hex, first.values, strict=True)
            values = ", ".join(f"{run} {code} = {value!r}" for run, code, value in pairs)
            yield "values", f"at {list(first.index)}: {values}"
            ulp = "" if c.max_ulp is None else f", at most {c.max_ulp:,} ulp apart (median {c.median_ulp:,})"
            yield "how many", f"{c.mismatches:,} of {c.count:,}{ulp}"
        # 3. Facts of both operations, once where they are equal; the operator's stored arguments are left out.
        facts_b = {name: text for name, text in b.facts if name != CALL}
        for name, text in (fact for fact in a.facts if fact[0] != CALL):
            other = facts_b.pop(name, "")
            yield from [(name, text)] if text == other else [(f"{name}, a", text), (f"{name}, b", other or "none")]
        yield from ((f"{name}, b", text) for name, text in facts_b.items())


def is_call(one: Operation) -> bool:
    """Return True if an operation is a module's call, which both runs of a model have."""
    inside = one.operation in (*OPERANDS, *PRODUCTS) or "::" in one.operation or one.operation.startswith(AGAIN)
    return one.direction == "forward" and not inside


# A trace, its file, (model, batch) or (model, batch, loss)
Run = Trace | str | os.PathLike[str] | tuple[Any, ...]


@overload
def bisect(run_a: partial[Launch], run_b: partial[Launch]) -> LaunchBisection: ...
@overload
def bisect(run_a: Run, run_b: Run) -> Bisection: ...
@overload
def bisect(
    run_a: Run | nn.Module, run_b: Run | nn.Module, batch: Any = None, loss: Any = None
) -> Bisection | CompiledBisection: ...
@spelled
def bisect(
    run_a: Any, run_b: Any, batch: Any = None, loss: Any = None, *more: Never, **others: Never
) -> Bisection | LaunchBisection | CompiledBisection:
    """Find the first operation whose output bits differ between two runs of one model while its inputs are equal.

    Runs may differ in recipe, target or unit, in whether products run natively, in device, machine, versions, and in
    how many members the batch has: members that both have are then compared, forward alone, because losses are means
    over other batches. What both runs have is paired by layer, pass and operation: inside a layer that is converted in
    one run alone, that run's operands and products are left out.

    Args:
        run_a, run_b: Each a ``Trace``, the path of a saved one, or ``(model, batch)`` or ``(model, batch, loss)``,
            which runs on a copy of the model; or a model, with ``batch``. Such runs begin with torch's generators as
            they are, run again to get the values of the operation that was found (both, or it says that a run does not
            repeat itself), and where the difference comes from code between modules with all of torch's operators.
            Or both are launches of one kernel that have not run, ``functools.partial(fmtsim.launch, ...)``: they run on
            copies of their tensors, and a ``LaunchBisection`` names the first source line whose values differ.
            Or a model and ``torch.compile(model)``: a ``CompiledBisection`` of the forward pass names the operations of
            its graphs that begin a difference.
        batch, loss: Of runs that are models.

    Raises:
        ArgumentError: The runs are of different models, kernels or inputs, or recorded at different levels; it names
            the first thing that differs.
        DataError: A file is not a trace, damaged, or of another version.

    >>> import torch, fmtsim
    >>> layer, x = nn.Linear(64, 8).bfloat16(), torch.linspace(-3, 3, 256, dtype=torch.bfloat16).view(4, 64)
    >>> plain = fmtsim.trace(layer, x)
    >>> found = bisect(plain, (fmtsim.convert(layer, format="e4m3", target="hopper.wgmma"), x))
    >>> str(found.a), found.kind, found.alone
    ('(model) forward: Linear', 'operation', (0, 6))
    """
    refuse_others(bisect, more, others)
    if isinstance(run_a, partial | Launch) or isinstance(run_b, partial | Launch):
        return bisect_launches(run_a, run_b)
    for model, compiled in ((run_a, run_b), (run_b, run_a)):
        eager = getattr(compiled, "_orig_mod", None)  # what torch.compile was given
        if isinstance(eager, nn.Module) and isinstance(model, nn.Module) and not hasattr(model, "_orig_mod"):
            _check_compiled(model, eager)
            if batch is not None:
                return bisect_compiled(eager, compiled, split_arguments(batch))
    runs = _read("run_a", run_a, batch, loss), _read("run_b", run_b, batch, loss)
    result = _find(runs, "modules")
    if result.inside_modules or any(run.step is None for run in runs):
        return result
    # Code between modules made the difference: run again with all of torch's operators to see which.
    with contextlib.suppress(ArgumentError):  # operators that do not pair
        closer = _find(runs, "aten")
        if closer.kind != "operation":
            return result
        counts = ("compared", "different", "alone", "losses", "gradients", "worst")
        return dataclasses.replace(closer, **{name: getattr(result, name) for name in counts})
    return result


def assert_same_bits(a: Any, b: Any, batch: Any = None, loss: Any = None) -> None:
    """Fail where two tensors, or a step of two models, have not the same bits; the message shows the first difference.

    Of tensors it is the ``Comparison``: how many differ, the first index with both codes, distances in ulp; -0 is not
    +0, and a NaN has its own bits. Of models it is the ``Bisection`` of a step, forward and backward.

    Args:
        a, b: Two tensors or arrays, or two configurations of one model, of which copies run.
        batch, loss: Of models, as in ``fmtsim.trace``.

    Raises:
        AssertionError: Some bit differs.
        ArgumentError: As ``fmtsim.compare`` or ``fmtsim.bisect``.

    >>> import torch
    >>> layer = nn.Linear(4, 2)
    >>> assert_same_bits(layer, layer, torch.ones(1, 4))
    >>> assert_same_bits(layer.weight, layer.weight.clone())
    """
    models = isinstance(a, nn.Module) and isinstance(b, nn.Module)
    result = bisect(a, b, batch, loss) if models else compare(a, b)
    if not result.equal:
        raise AssertionError(f"the {'models' if models else 'tensors'}' bits differ\n{result}")


def _check_compiled(model: nn.Module, eager: nn.Module) -> None:
    """Refuse a model that is not the one that torch.compile was given, and say whether their weights differ."""
    if model is eager:
        return
    ours, theirs = dict(model.named_parameters()), dict(eager.named_parameters())
    both = [(name, ours[name], theirs[name].to(ours[name].device)) for name in ours if name in theirs]
    names = [
        *sorted(ours.keys() ^ theirs.keys()),
        *(name for name, x, y in both if x.dtype != y.dtype or not x.equal(y)),
    ]
    what = f"with other weights: {names[0]} differs" if names else "with equal weights"
    raise ArgumentError(
        f"torch.compile was given another {type(eager).__name__} than the model beside it, {what}; compile that very "
        "model, so that the two share their weights: model = ...; bisect(model, torch.compile(model), batch)"
    )


class _Run(NamedTuple):
    """A run: its trace, or its model and how that is run."""

    trace: Trace | None
    model: nn.Module | None
    step: Callable[..., tuple[Trace, dict[str, Tensor]]] | None

    def at(self, level: Level, **keep: Any) -> tuple[Trace, dict[str, Tensor]]:
        """Return a trace, and the gradients by name, of which a file has none."""
        if self.trace is not None:
            return self.trace, {}
        assert self.step is not None
        return self.step(level=level, **keep)


def _read(name: str, run: Any, batch: Any, loss: Any) -> _Run:
    if isinstance(run, nn.Module):
        if batch is None:
            raise ArgumentError(f"{name} is a model without a batch; call bisect(model_a, model_b, batch)")
        run = (run, batch, loss)
    if isinstance(run, Trace):
        return _Run(run, None, None)
    if isinstance(run, str | os.PathLike):
        return _Run(Trace.load(run), None, None)
    if isinstance(run, tuple | list) and len(run) in (2, 3) and isinstance(run[0], nn.Module):
        return _Run(None, run[0], partial(traced_step, *run))
    raise ArgumentError(
        f"{name}={shown(run)} is not a run; pass a Trace, the path of one, (model, batch) or (model, batch, loss)"
    )


def _find(runs: tuple[_Run, _Run], level: Level) -> Bisection:
    (a, gradients_a), (b, gradients_b) = (run.at(level) for run in runs)
    # 1. Refuse traces of different models, inputs or levels.
    if a.level != b.level:
        raise ArgumentError(f"run_a was traced at level {a.level!r}, run_b at {b.level!r}; trace both at one level")
    for x, y in itertools.zip_longest(a.parameters, b.parameters):
        if x != y:
            texts = ("no further parameter" if p is None else f"{p[0]} {p[1]} {p[2]}" for p in (x, y))
            raise ArgumentError(
                f"the runs are of different models: run_a has {' and run_b '.join(texts)}; pass runs of one model, "
                "whose parameters have one shape and dtype"
            )
    result = _first(a, b)
    one, other = result.a, result.b
    if one is None or other is None:
        return result
    # 2. Which gradient differs most, relative to its norm; NaN and Inf count as more than anything.
    if gradients_a and gradients_b and a.batch == b.batch:
        errors = []
        for name, gradient in gradients_a.items():
            if name in gradients_b:
                g_a, g_b = gradient.float(), gradients_b[name].to(gradient.device).float()
                error = None if g_a.equal(g_b) else float((g_a - g_b).norm() / g_b.norm())
                errors += [] if error is None else [(name, math.inf if math.isnan(error) else error)]
        result = dataclasses.replace(result, worst=max(errors, key=lambda pair: pair[1], default=None))
    # 3. The values of the tensor that was found.
    first = _value("a", runs[0], a, one, level, result.tensor)
    return _with_values(result, [first, _value("b", runs[1], b, other, level, result.tensor)])


def _value(label: str, run: _Run, trace: Trace, found: Operation, level: Level, name: str) -> Tensor | str:
    """Return an operation's tensor, or why there is none."""
    # 1. A parameter is there; any other tensor is in a trace, or a run is repeated to keep it.
    parameters = {} if run.model is None else dict(run.model.named_parameters())
    if (parameter := parameters.get(f"{found.layer}.{name}".lstrip("."))) is not None:
        return parameter.detach()
    again = trace if run.step is None else run.at(level, tensors=[found.index])[0]
    x = again.tensors.get(found.index, {}).get(name)
    # 2. Only a run that repeats itself shows the values of the first time.
    if run.step is not None and (len(again.operations) <= found.index or again.operations[found.index] != found):
        return "a run gives other bits when it is repeated, so that this difference need not be one of the two runs"
    if x is None and not any(out.name == name for out in found.outputs):
        return ""  # an input, which traces do not keep
    return f"trace {label} again with tensors=[{found.index}] to see the values" if x is None else x


def _with_values(found: Bisection, values: list[Tensor | str]) -> Bisection:
    texts = [x for x in values if isinstance(x, str)]
    if texts:
        return dataclasses.replace(found, note="; ".join(dict.fromkeys(filter(None, texts))))
    x, y = values
    assert isinstance(x, Tensor) and isinstance(y, Tensor)
    if x.dtype != y.dtype:
        return dataclasses.replace(found, note=f"a has {x.dtype}, b {y.dtype}")
    # Batches of different size: the members that both have.
    rows = min(len(x), len(y)) if x.dim() else 0
    x, y = (x[:rows], y[:rows]) if x.shape != y.shape else (x, y)
    return dataclasses.replace(found, comparison=compare(x, y))


def _first(a: Trace, b: Trace) -> Bisection:
    """Pair the operations of two traces and find the first that differs."""
    batches = a.batch, b.batch

    def key(one: Operation) -> tuple[str, str, str, int]:
        # Modules are known by their names, not their classes: a converted layer has another class.
        return one.layer, one.direction, "" if is_call(one) else one.operation, one.call

    # 1. Pair the operations; a call of a module is in both runs.
    unpaired = {key(one): one for one in b.operations}
    pairs = []
    for one in a.operations:
        other = unpaired.pop(key(one), None)
        if other is not None:
            inputs = {bits.name: bits for bits in other.inputs} if is_call(one) and a.batch == b.batch else {}
            for bits in one.inputs:  # of modules, which have one shape in batches of one size
                if bits.name in inputs and bits.shape != inputs[bits.name].shape:
                    first, second = ("x".join(map(str, x.shape)) or "()" for x in (bits, inputs[bits.name]))
                    raise ArgumentError(
                        f"the runs' inputs differ in shape: {bits.name} of {one} is {first} in run_a and {second} in "
                        "run_b; pass inputs of one shape, or batches of different size"
                    )
            pairs.append((one, other))
        elif is_call(one):
            raise ArgumentError(f"the runs are of different models: {one} is in run_a alone; pass runs of one model")
    alone = len(a.operations) - len(pairs), len(unpaired)
    extra = next((one for one in unpaired.values() if is_call(one)), None)
    if extra is not None:
        raise ArgumentError(f"the runs are of different models: {extra} is in run_b alone; pass runs of one model")
    # 2. Count what differs; gradients of other batches are means over other members.
    if a.batch != b.batch:
        pairs = [pair for pair in pairs if pair[0].direction == "forward"]
    different = [bool(_differences(x.outputs, y.outputs, batches)) for x, y in pairs]
    result = Bisection(compared=len(pairs), different=sum(different), alone=alone)
    if a.batch == b.batch:
        gradients = _differences(a.gradients, b.gradients, batches)
        losses = (float.fromhex(a.loss), float.fromhex(b.loss)) if a.loss and b.loss else None
        result = dataclasses.replace(result, losses=losses, gradients=(len(gradients), len(a.gradients)))
    # 3. Find the first operation that read or wrote other bits.
    before = None
    for x, y in pairs:
        read, written = _differences(x.inputs, y.inputs, batches), _differences(x.outputs, y.outputs, batches)
        if read and not is_call(x):  # of a layer that was itself given something else?
            calls = (pair for pair in pairs if pair[0].layer == x.layer and is_call(pair[0]))
            call = next((pair for pair in calls if _differences(pair[0].inputs, pair[1].inputs, batches)), None)
            if call is not None and x.direction == "forward":
                (x, y), read = call, _differences(call[0].inputs, call[1].inputs, batches)
        if read or written:
            kind = _input_kind(x, read[0], a) if read else "operation"
            return dataclasses.replace(result, kind=kind, a=x, b=y, tensor=(read or written)[0], before=before)
        before = x
    return result


def _input_kind(one: Operation, name: str, trace: Trace) -> Kind:
    """Return whether a parameter, a buffer, what the model was given, or what code made is the input that differs."""
    if any(f"{one.layer}.{name}".lstrip(".") == parameter for parameter, _, _ in trace.parameters):
        return "parameter"
    if name.startswith("buffer "):
        return "buffer"
    (read,) = (x.hash for x in one.inputs if x.name == name)
    calls = [operation for operation in trace.operations if not operation.layer and is_call(operation)]
    return "input" if any(x.hash == read for operation in calls for x in operation.inputs) else "code"


def _differences(a: tuple[TensorBits, ...], b: tuple[TensorBits, ...], batches: tuple[int, int]) -> list[str]:
    """Return the names of tensors that differ; of batches of different size the members that both have count."""
    others, names = {x.name: x for x in b}, []
    for x in a:
        y = others.get(x.name)
        if y is None:
            continue
        if x.shape == y.shape and (batches[0] == batches[1] or x.shape):
            same = x.dtype == y.dtype and x.hash == y.hash
        elif batches[0] == batches[1]:
            same = False
        else:
            # Tensors without a dimension of the batch are sums over its members, which say nothing.
            alike = x.shape[1:] == y.shape[1:] and x.shape[:1] and x.shape[0] * batches[1] == y.shape[0] * batches[0]
            parts = [bits.parts or (bits.hash,) * (n == 1) for bits, n in zip((x, y), batches, strict=True)]
            shared = min(map(len, parts))
            same = not alike or (x.dtype == y.dtype and parts[0][:shared] == parts[1][:shared])
        if not same:
            names.append(x.name)
    return names
