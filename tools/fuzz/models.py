# SPDX-License-Identifier: Apache-2.0
"""Targets that take records, models, optimizers, names, and gradients of ranks (a group of this process alone)."""

import contextlib
import functools
import inspect
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fmtsim
from fmtsim import distributed
from tools.fuzz import tensors
from tools.fuzz.calls import (
    RECIPES,
    UNITS,
    Values,
    accepted,
    backward,
    either,
    junk_of,
    maybe,
    net,
    passed,
    silent,
    target,
)  # fmt: skip


@functools.cache
def _records() -> tuple[tuple[Any, Values], ...]:
    e4m3, nvfp4 = fmtsim.get_format("e4m3"), fmtsim.get_format("nvfp4")
    quantizer = fmtsim.Quantizer(format=e4m3)
    gemm = fmtsim.Gemm(a=quantizer, b=quantizer)
    datapath = fmtsim.get_unit("hopper.wgmma").modes[0].datapath
    records = [e4m3, nvfp4, nvfp4.scaling, nvfp4.scaling.tensor, quantizer, gemm, datapath, fmtsim.GemmPlan()]
    records += [fmtsim.get_format(name) for name in ("int8", "nf4", "lns8_g8", "logfmt8")]
    recipe, unit = fmtsim.get_recipe("te_delayed"), fmtsim.get_unit("volta.mma")
    records += [recipe, recipe.linear, fmtsim.get_recipe("int4_gptq"), fmtsim.Rounding(), unit, unit.modes[0]]
    records += [fmtsim.get_unit("int8").modes[0].datapath, fmtsim.distributed.get_reduction("fp8lm")]
    records += [fmtsim.optim.get_scheme("ao_8bit")]
    fields_of = lambda record: [name for name, field in record.__dataclass_fields__.items() if field.init]  # noqa: E731
    return tuple((type(record), {name: getattr(record, name) for name in fields_of(record)}) for record in records)


@target("records", 160)
def _record(r: Random) -> tuple[Any, list[Any], Values]:
    cls, fields = r.choice(_records())
    return silent(cls), [], fields | {r.choice(list(fields)): tensors.junk(r) for _ in range(r.randint(1, 2))}


def _trained(model: Any, recipe: Any, x: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    converted = fmtsim.convert(model, recipe, **options)
    y = backward(converted(x))
    str(fmtsim.report(converted, tokens=16))
    return y


@target("convert", 24)
def _convert(r: Random) -> tuple[Any, list[Any], Values]:
    model = either(r, net(r, 64), 0.05)
    x = either(r, tensors.tensor(r, dtypes=(torch.float32,), of=(*r.choice(((3,), (2, 3), (0,), ())), 64)), 0.05)
    options = maybe(
        r, {}, filter_fn=(lambda module, name: True, lambda module: True, lambda module, name: name == "0"),
        target=(*UNITS, "h200"), seed=(1,), total_steps=(10,), wrong=0.05,
    )  # fmt: skip
    options = accepted(fmtsim.convert, options)
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
    model = fmtsim.convert(net(r, 64), "te_delayed") if r.random() < 0.8 else net(r, 64)
    verb = r.choice(
        (fmtsim.report, fmtsim.revert, fmtsim.state, fmtsim.observe, fmtsim.nn.set_step,
         fmtsim.load_state, fmtsim.nn.share_scales, fmtsim.ptq)
    )  # fmt: skip
    extra = len([p for p in inspect.signature(verb).parameters.values() if p.default is p.empty and p.kind < 2]) - 1
    arguments = [either(r, model, 0.3), *(tensors.junk(r) for _ in range(extra))]
    if verb is fmtsim.load_state and r.random() < 0.7:
        state = fmtsim.state(fmtsim.convert(net(r, 64), "te_delayed"))
        if r.random() < 0.7:
            state[r.choice(list(state))] = tensors.junk(r)
        arguments[1] = state
    return silent(verb), arguments, {}


@target("optim", 60)
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


@target("lists", 48)
def _lists(r: Random) -> tuple[Any, list[Any], Values]:
    verb = r.choice(
        (fmtsim.get_format, fmtsim.list_formats, fmtsim.register_format, fmtsim.get_unit, fmtsim.register_unit,
         fmtsim.get_target, fmtsim.get_recipe, fmtsim.register_recipe, fmtsim.linear_config,
         fmtsim.optim.get_scheme, fmtsim.distributed.get_reduction, fmtsim.set_num_threads, fmtsim.Encoded.load)
    )  # fmt: skip
    parameters = inspect.signature(verb).parameters
    names = [name for name, p in parameters.items() if p.kind in (1, 3)]
    chosen = [name for name in names if parameters[name].default is inspect.Parameter.empty or r.random() < 0.3]
    return verb, [], {name: tensors.junk(r) for name in chosen}


WIRES = ("e4m3", "e5m2", "int8", "bf16", "e2m1", "nf4", "logfmt8", "mxfp8_e4m3", "nvfp4", "int4_g32", "e4m3_128x128")


def _alone() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _floats(r: Random, *of: int) -> Tensor:
    return tensors.tensor(r, dtypes=tensors.FLOATS, of=of or None)


def _reduction(r: Random) -> Any:
    return either(r, r.choice(list(distributed.REDUCTIONS)), 0.1)


@target("simulate", 40)
def _simulate(r: Random) -> tuple[Any, list[Any], Values]:
    size = tensors.shape(r)
    lists = either(r, [tensors.tensor(r, dtypes=(torch.float32,), of=size) for _ in range(r.randint(0, 4))], 0.05)
    return distributed.simulate, [lists, _reduction(r)], maybe(r, {}, mu=(None, 1.0), call=(0, 1, 7))


@target("all_reduce", 40)
def _all_reduce(r: Random) -> tuple[Any, list[Any], Values]:
    _alone()
    dtype = (r.choice(tensors.FLOATS),)
    several = [tensors.tensor(r, dtypes=dtype) for _ in range(r.randint(0, 3))]
    values = either(r, r.choice((several, tensors.tensor(r, dtypes=dtype))), 0.05)
    return distributed.all_reduce, [values, _reduction(r)], maybe(r, {}, mu=(None, 1.0), call=(0, 3), group=(None,))


@target("reduce_scatter", 40)
def _reduce_scatter(r: Random) -> tuple[Any, list[Any], Values]:
    _alone()
    x = either(r, _floats(r), 0.05)
    count = x.numel() if isinstance(x, Tensor) and not x.is_nested else 4
    options = maybe(r, {}, sizes=((count,), (1, count - 1), (0, count), [count, 0], (2,)), mu=(None, 0.5), call=(1,))
    return distributed.reduce_scatter, [x, _reduction(r)], options


@target("all_gather", 40)
def _all_gather(r: Random) -> tuple[Any, list[Any], Values]:
    _alone()
    x = either(r, _floats(r), 0.05)
    count = x.numel() if isinstance(x, Tensor) and not x.is_nested else 4
    sizes = ((count,), (1, count - 1), (0, count), [count])
    options = maybe(r, {}, scaling=(None, None, None, fmtsim.Scaling()), sizes=sizes, group=(None,))
    return distributed.all_gather, [x, either(r, r.choice(WIRES))], options


@target("dispatch", 40)
def _dispatch(r: Random) -> tuple[Any, list[Any], Values]:
    _alone()
    rows, width = r.choice((0, 1, 3, 8)), r.choice((0, 1, 32, 33, 128))
    counts = r.choice(([rows], (rows,), torch.tensor([rows]), [rows + 1], [0, rows], [-1], [True], []))
    operands = [either(r, _floats(r, rows, width), 0.05), either(r, counts, 0.1)]
    return distributed.dispatch, operands, maybe(r, {}, format=WIRES, group=(None,))


@target("ranks", 32)
def _ranks(r: Random) -> tuple[Any, list[Any], Values]:
    """Verbs of reductions that take no gradient."""
    _alone()
    state = distributed.ReductionState("fp8lm")
    verb = r.choice(
        (distributed.whole_tensors, distributed.ReductionState, distributed.hook_fsdp, distributed.fp8_hook,
         state.load_state_dict, distributed.get_reduction)
    )  # fmt: skip
    good: Values = {}
    if verb == state.load_state_dict:
        good = {"state": either(r, {**state.state_dict(), r.choice(("mu", "steps", "calls")): tensors.junk(r)}, 0.1)}
    elif verb is distributed.whole_tensors:
        good = {"sizes": [4, 10, 5], "ranks": r.choice((1, 2, 7))}
    elif verb is distributed.hook_fsdp:
        good = {"model": torch.nn.Linear(2, 2), "state": r.choice((None, state))}

    run = silent(verb)
    if verb == state.load_state_dict and r.random() < 0.8:
        return run, [], good
    wrong = junk_of(r, verb, good)
    needed = {name: tensors.junk(r) for name, p in inspect.signature(verb).parameters.items() if p.default is p.empty}
    return run, [], needed | wrong
