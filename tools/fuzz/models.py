# SPDX-License-Identifier: Apache-2.0
"""Targets that take records, models, optimizers and names."""

import contextlib
import functools
import inspect
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import fmtsim
from tools.fuzz import tensors
from tools.fuzz.calls import RECIPES, UNITS, Values, either, junk_of, maybe, passed, target


@functools.cache
def _records() -> tuple[tuple[Any, Values], ...]:
    e4m3, nvfp4 = fmtsim.get_format("e4m3"), fmtsim.get_format("nvfp4")
    quantizer = fmtsim.Quantizer(format=e4m3)
    gemm = fmtsim.Gemm(a=quantizer, b=quantizer)
    datapath = fmtsim.get_unit("hopper.wgmma").modes[0].datapath
    records = [e4m3, nvfp4, nvfp4.scaling, nvfp4.scaling.tensor, quantizer, gemm, datapath, fmtsim.GemmPlan()]
    records += [fmtsim.get_format(name) for name in ("int8", "nf4", "lns8_g8", "logfmt8")]
    records += [
        fmtsim.get_recipe("te_delayed"),
        fmtsim.get_recipe("te_delayed").linear,
        fmtsim.get_ptq_recipe("int4_gptq"),
    ]
    records += [fmtsim.Rounding(), fmtsim.get_unit("volta.mma"), fmtsim.get_unit("volta.mma").modes[0]]
    records += [fmtsim.get_unit("int8").modes[0].datapath, fmtsim.distributed.get_reduction("fp8lm")]
    records += [fmtsim.optim.get_scheme("ao_8bit")]
    return tuple(
        (
            type(record),
            {name: getattr(record, name) for name, field in record.__dataclass_fields__.items() if field.init},
        )
        for record in records
    )


@target("records", 160, failed=(6320070982582618411,))
def _record(r: Random) -> tuple[Any, list[Any], Values]:
    cls, fields = r.choice(_records())

    def record(**fields: Any) -> None:
        str(cls(**fields)), repr(cls(**fields))

    record.__name__ = cls.__name__
    return record, [], fields | {r.choice(list(fields)): tensors.junk(r) for _ in range(r.randint(1, 2))}


def _net(r: Random) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64, bias=r.random() < 0.5))


def _trained(model: Any, recipe: Any, x: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    converted = fmtsim.convert(model, recipe, **options)
    y = converted(x)
    if isinstance(y, Tensor) and y.requires_grad and y.numel():
        y.sum().backward()
    str(fmtsim.report(converted, tokens=16))
    return y


@target("convert", 24, failed=(12197491323643380526, 7176390565075237793, 7701471196422413632, 2616203623287572904))
def _convert(r: Random) -> tuple[Any, list[Any], Values]:
    model = either(r, _net(r), 0.05)
    x = either(r, tensors.tensor(r, dtypes=(torch.float32,), of=(*r.choice(((3,), (2, 3), (0,), ())), 64)), 0.05)
    options = maybe(
        r, {}, filter_fn=(lambda module, name: True, lambda module: True, lambda module, name: name == "0"),
        target=(*UNITS, "h200"), seed=(1,), total_steps=(10,), wrong=0.05,
    )  # fmt: skip
    parameters = inspect.signature(fmtsim.convert).parameters
    options = {name: value for name, value in options.items() if name in parameters}
    if "filter_fn" in options:
        options["filter_fn"] = passed(options["filter_fn"])
    return _trained, [model, passed(either(r, r.choice(RECIPES), 0.1)), x], options


@target("layers", 32)
def _layers(r: Random) -> tuple[Any, list[Any], Values]:
    """Layers to explain, and what they are called with."""
    layer = r.choice((nn.Linear(64, 64), nn.Conv2d(4, 8, 3), nn.MultiheadAttention(64, 4)))
    fmtsim.convert(layer, format=r.choice(("e4m3", "bf16")), target=r.choice((None, "h200")))
    x = either(r, tensors.tensor(r, of=(*r.choice(((3,), (2, 3), (0,), (), (2, 4, 5))), 64)), 0.4)

    first = r.random() < 0.5

    def explained(x: Any) -> None:
        str(fmtsim.report(layer, tokens=x) if type(x) is not Tensor and first else fmtsim.explain_mm(layer, x))

    return explained, [passed([x, x, x] if r.random() < 0.3 else x)], {}


@target("models", 48)
def _models(r: Random) -> tuple[Any, list[Any], Values]:
    """Verbs that take a model, or a state."""
    model = fmtsim.convert(_net(r), "te_delayed") if r.random() < 0.8 else _net(r)
    verb = r.choice(
        (fmtsim.report, fmtsim.revert, fmtsim.recipe_state, fmtsim.observe, fmtsim.nn.set_step,
         fmtsim.load_recipe_state, fmtsim.nn.share_scales, fmtsim.ptq_state, fmtsim.load_ptq,
         fmtsim.ptq_report, fmtsim.ptq)
    )  # fmt: skip
    extra = len([p for p in inspect.signature(verb).parameters.values() if p.default is p.empty and p.kind < 2]) - 1
    arguments = [either(r, model, 0.3), *(tensors.junk(r) for _ in range(extra))]
    if verb is fmtsim.load_recipe_state and r.random() < 0.7:
        state = fmtsim.recipe_state(fmtsim.convert(_net(r), "te_delayed"))
        if r.random() < 0.7:
            state[r.choice(list(state))] = tensors.junk(r)
        arguments[1] = state

    def run(*arguments: Any) -> None:
        verb(*arguments)

    run.__name__ = verb.__name__
    return run, arguments, {}


@target("optim", 60, failed=(5967740723652819025, 7456155837302684848, 9507376488933642206, 13344685260146688598))
def _optim(r: Random) -> tuple[Any, list[Any], Values]:
    cls = r.choice((fmtsim.optim.AdamW, fmtsim.optim.SGD, fmtsim.optim.Lion, fmtsim.optim.Madam, fmtsim.optim.Adam))
    count = r.randint(1, 2)
    like = [tensors.numbers(r, tensors.shape(r), r.choice(tensors.FLOATS[:3])) for _ in range(count)]
    params = [either(r, nn.Parameter(x), 0.03) for x in like]
    grads = [either(r, tensors.tensor(r, dtypes=(x.dtype,), of=tuple(x.shape)), 0.03) for x in like]
    options = junk_of(r, cls, {}) if r.random() < 0.4 else {}
    options.pop("params", None)
    params = either(r, params, 0.03)

    def step(params: Any, grads: Any, **options: Any) -> None:
        optimizer = cls(params, **options)
        for p, g in zip(params, grads, strict=False):
            with contextlib.suppress(RuntimeError, TypeError, AttributeError):  # torch's own, of the assignment
                p.grad = g
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())

    step.__name__ = cls.__name__
    return step, [params, grads], options


@target("lists", 48, failed=(12907709263244304841,))
def _lists(r: Random) -> tuple[Any, list[Any], Values]:
    """Verbs that take names and records."""
    verb = r.choice(
        (fmtsim.get_format, fmtsim.list_formats, fmtsim.register_format, fmtsim.get_unit, fmtsim.register_unit,
         fmtsim.get_target, fmtsim.get_recipe, fmtsim.register_recipe, fmtsim.get_ptq_recipe, fmtsim.linear_config,
         fmtsim.optim.get_scheme, fmtsim.distributed.get_reduction, fmtsim.set_num_threads, fmtsim.Encoded.load)
    )  # fmt: skip
    parameters = inspect.signature(verb).parameters
    names = [name for name, p in parameters.items() if p.kind in (1, 3)]
    chosen = [name for name in names if parameters[name].default is inspect.Parameter.empty or r.random() < 0.3]
    return verb, [], {name: tensors.junk(r) for name in chosen}
