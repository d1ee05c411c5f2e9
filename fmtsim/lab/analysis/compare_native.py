# SPDX-License-Identifier: Apache-2.0
"""A GPU's own matrix unit against its emulation: a product or a converted model runs both ways, bits are compared."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from fmtsim.gemm.layers.config import PRODUCTS, LinearConfig
from fmtsim.gemm.products.native import why_not_native
from fmtsim.lab.analysis.compare import Comparison, Difference, compare
from fmtsim.lab.analysis.one_step import Batch, check_loss, deterministic, run_step, unchanged
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.state import converted_modules
from fmtsim.support import table
from fmtsim.support.errors import ArgumentError, shown

_SHOWN = 20  # tensors that differ, in a text


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelComparison(table.Result):
    """Hold what ``compare_native`` found of a model; ``print`` shows the tensors that differ, notebooks a table."""

    # comparisons by name, native against emulated: ``"output"`` (and what is in it), ``"loss"`` where there is one,
    # ``"gradient of batch[0]"``, ``"gradient of 0.weight"``
    tensors: dict[str, Comparison]

    @property
    def equal(self) -> bool:
        """Whether no bit differs."""
        return self.first is None

    @property
    def first(self) -> tuple[str, Difference] | None:
        """The first tensor that differs, and its first difference; None where no bit does."""
        return next(((name, c.first) for name, c in self.tensors.items() if c.first is not None), None)

    def _content(self) -> Iterator[table.Rows | str]:
        total = f"{len(self.tensors)} tensors, {sum(c.count for c in self.tensors.values()):,} numbers: "
        rows = [(name, c) for name, c in self.tensors.items() if not c.equal]
        yield table.table_of(_COLUMNS, rows[:_SHOWN])
        if len(rows) > _SHOWN:
            yield f"... and {len(rows) - _SHOWN} more"
        yield f"{total}{len(rows)} tensors differ" if rows else f"{total}no bit differs"


_COLUMNS = (
    table.Column("tensor", lambda item: item[0]),
    table.Column("different", lambda item: f"{item[1].mismatches:,} of {item[1].count:,}"),
    table.Column("largest ulp", lambda item: str(item[1].max_ulp)),
    table.Column("SQNR dB", lambda item: item[1].sqnr_db, ".4g"),
    table.Column("first difference (actual is native)", lambda item: str(item[1].first)),
)


@overload
def compare_native(verb: nn.Module, *arguments: Any, loss: Any = None, **options: Any) -> ModelComparison: ...
@overload
def compare_native(
    verb: Callable[..., Tensor], *arguments: Any, emulate_on: torch.device | str | None = None, **options: Any
) -> Comparison: ...
def compare_native(
    verb: Any, *arguments: Any, emulate_on: torch.device | str | None = None, loss: Any = None, **options: Any
) -> Comparison | ModelComparison:
    """Run a product, or a converted model forward and backward, natively and emulated, and compare the bits.

    A model runs on copies: its weights, gradients and scales' memory stay as they are, and so do its generators and
    torch's. Both runs begin with the same of all these, under torch's deterministic algorithms, and differ in who
    multiplies in its converted layers; every product of these runs natively, or an error says which cannot.

    Args:
        verb: ``fmtsim.mm``, ``bmm``, ``linear``, ``scaled_mm`` or ``int_mm``; or a model converted with a target.
        arguments: Its tensors, on the GPU that the target describes; a model's batch.
        emulate_on: Device of a verb's emulation, such as ``"cpu"``; None emulates on the GPU.
        loss: A function of a model's output that gives a number to differentiate. None differentiates an output of one
            number or one that is called loss, and else the sum of the outputs' elements, each times a random number of
            its own, from a fixed seed.
        options: Its keywords, ``target=`` of a verb among them; not ``native``.

    Returns:
        ``fmtsim.compare(native, emulated)``; for a model a comparison of each output, and of the gradient of each input
        and parameter that requires one, by name.

    Raises:
        ArgumentError: The tensors are not on the target's GPU, or torch does not have the call; it says why. No layer
            of the model is converted, or none has a target.

    >>> import torch, fmtsim
    >>> a = torch.ones(16, 16, dtype=torch.bfloat16)
    >>> compare_native(fmtsim.mm, a, a, target="h200")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fmtsim.support.errors.ArgumentError: native=True is not possible: the tensors are on cpu, not on a CUDA GPU; ...
    """
    if isinstance(verb, nn.Module):
        if emulate_on is not None:
            raise ArgumentError("compare_native emulates a model on its own GPU; leave emulate_on= out")
        batch = (arguments, options)
        # 1. Where a model's products run natively; raise ArgumentError where they do not.
        device = None
        for name, module in converted_modules(verb, "compare_native"):
            if module.emulation is None:
                continue
            targets = [getattr(module.emulation.config, product).target for product in PRODUCTS]
            for target in dict.fromkeys(target for target in targets if target is not None):
                device = next(module.parameters()).device
                reason = why_not_native(target, device)
                if reason is not None:
                    raise ArgumentError(f"layer {name!r}: native=True is not possible: {reason}")
        if device is None:
            raise ArgumentError(
                "compare_native compares a GPU with its emulation, and no layer of the model has a target; "
                "convert it with target=, for example target='h200'"
            )
        check_loss(loss)
        # 2. A step of a copy whose targets multiply natively, and one of a copy whose targets are emulated.
        with deterministic(str(device)):
            sides = [_run_side(verb, batch, loss, native=native) for native in (True, False)]
        names = list(sides[0])  # outputs first, then gradients
        return ModelComparison(tensors={name: compare(sides[0][name], sides[1].pop(name)) for name in names})
    if not callable(verb):
        raise ArgumentError(f"compare_native got {shown(verb)}; pass a product such as fmtsim.mm, or a converted model")
    native = verb(*arguments, native=True, **options)
    if emulate_on is not None:
        arguments = tuple(_move(x, emulate_on) for x in arguments)
        options = {name: _move(x, emulate_on) for name, x in options.items()}
    return compare(native, verb(*arguments, native=False, **options))


def _move(x: Any, device: torch.device | str) -> Any:
    if isinstance(x, Tensor):
        return x.to(device)
    return type(x)(_move(member, device) for member in x) if type(x) in (list, tuple) else x


def _run_side(model: nn.Module, batch: Batch, loss: Any, *, native: bool) -> dict[str, Tensor]:
    """Return outputs and gradients by name of a copy of a model whose targets multiply natively or are emulated."""

    def set_native(_: Any, config: LinearConfig) -> LinearConfig:
        gemms = {
            name: getattr(config, name) for name in PRODUCTS
        }  # products without a target are torch's on both sides
        return replace(config, **{name: replace(g, native=native) for name, g in gemms.items() if g.target is not None})

    def change(model_copy: nn.Module) -> None:
        for module in model_copy.modules():
            if isinstance(module, EmulatedModule) and module.emulation is not None:
                module.emulation = module.emulation.changed(set_native)

    with unchanged(model, change) as model_copy:
        step = run_step(model_copy, batch, loss)
    return step.outputs | {f"gradient of {name}": t for name, t in step.gradients.items()}
