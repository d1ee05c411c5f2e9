# SPDX-License-Identifier: Apache-2.0
"""Targets that take layers' operands, models with data, and what shows results as text and pictures."""

import contextlib
import functools
import inspect
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import fmtsim
from fmtsim import nn as layers
from tools.fuzz import tensors
from tools.fuzz.calls import FORMATS, ROUNDINGS, UNITS, Values, either, junk_of, maybe, passed, target
from tools.fuzz.target import ROOM

PTQ = ("int8_static", "e4m3_static", "w4a4", "minifloat_e3m2", "int4_gptq")


def backward(y: Any) -> Any:
    """Return a result behind its backward pass, where it has one."""
    if isinstance(y, Tensor) and y.requires_grad and y.numel():
        y.sum().backward()
    return y


@functools.cache
def _configs() -> tuple[Any, ...]:
    configs: list[Any] = [
        fmtsim.get_recipe(name).linear for name in ("te_current", "te_mxfp8", "te_nvfp4", "deepseek_v3")
    ]
    for unit in (None, "hopper.wgmma", "exact"):
        with contextlib.suppress(fmtsim.FmtsimError):
            configs.append(fmtsim.linear_config(x="e4m3", w="e4m3", g="e5m2", target=unit))
    return (*(config for config in configs if config is not None), fmtsim.LinearConfig())


def _gemm(x: Any, w: Any, bias: Any, config: Any, **options: Any) -> Any:
    y = backward(fmtsim.EmulatedGEMM.apply(x, w, bias, config, **options))
    return y if config.fprop.emulated else None  # else sums have no order of their own


@target(
    "EmulatedGEMM",
    60,
    failed=(6180868888681925059, 1589233365729624109, 3795907010355610378, 7234065643537124485, 10951890733180669310),
)
def _emulated(r: Random) -> tuple[Any, list[Any], Values]:
    (m, n, k), dtype = (r.choice((0, 1, 3, 16, 32, 33, 128)) for _ in range(3)), (r.choice(tensors.FLOATS),)
    lead = r.choice(((m,), (), (2, m), (0, m)))
    x, w = tensors.tensor(r, dtypes=dtype, of=(*lead, k)), tensors.tensor(r, dtypes=dtype, of=(n, k))
    bias = r.choice((None, tensors.tensor(r, dtypes=dtype, of=(n,))))
    operands = [either(r, value, 0.03) for value in (x, w, bias, r.choice(_configs()))]
    options = maybe(r, {}, generator=(1, fmtsim.RandomKey(1, 2)), observer=(None,), state=(None,))
    return _gemm, operands, {name: passed(value) for name, value in options.items()}


@target("linear_config", 60)
def _config(r: Random) -> tuple[Any, list[Any], Values]:
    good = {name: either(r, r.choice(FORMATS), 0.05) for name in ("x", "w", "g")}
    options = maybe(
        r, good, rounding=ROUNDINGS, grad_rounding=("stochastic",), target=(*UNITS, "h200"),
        native=(None, False), wrong=0.05,
    )  # fmt: skip
    parameters = inspect.signature(fmtsim.linear_config).parameters

    def linear_config(**options: Any) -> None:
        str(fmtsim.linear_config(**options))

    return linear_config, [], {name: value for name, value in options.items() if name in parameters}


def _run(cls: Any, arguments: list[Any], options: Values, x: Any) -> None:
    backward(cls(*arguments, **options)(x))


@target("layers", 48)
def _layers(r: Random) -> tuple[Any, list[Any], Values]:
    """Layers that fmtsim has of its own."""
    cls = r.choice((layers.SmoothSwiGLU, layers.UnitLinear, layers.UnitReadout, layers.MuLinear, layers.MuReadout,
                    layers.MuResidual))  # fmt: skip
    sizes: list[Any] = [32, r.choice((1, 16, 64))]
    options: Values = {}
    if cls is layers.MuResidual:
        sizes = [nn.Linear(32, 32), 32]
        maybe(r, options, tau=(0.1, 0, 1))
    if cls is layers.SmoothSwiGLU:
        maybe(r, options, per=("token", "channel"), power_of_two=(True,), delayed=(True,), bias=(True,))
    x = either(r, tensors.tensor(r, dtypes=(torch.float32,), of=(*r.choice(((3,), (2, 3), (0,), ())), 32)), 0.05)
    return _run, [cls, sizes, options, x], {}


@target("smooth_swiglu", 32, failed=(16184104198041257083,))
def _smooth(r: Random) -> tuple[Any, list[Any], Values]:
    size = tensors.shape(r)
    u, v = (either(r, tensors.tensor(r, dtypes=tensors.FLOATS[:1], of=size), 0.05) for _ in range(2))
    options = maybe(r, {}, per=("token", "channel"), power_of_two=(True, False), scale=(None,))

    def smooth_swiglu(*arguments: Any, **options: Any) -> None:  # torch's silu differs in its last bit by strides
        layers.smooth_swiglu(*arguments, **options)

    return smooth_swiglu, [u, v], options


def _attended(*arguments: Any, **options: Any) -> None:
    backward(layers.quantised_attention(*arguments, **options))


@target(
    "attention",
    40,
    failed=(
        50059811721791158,
        1622506795092101137,
        2034632436156875054,
        2921808611941958188,
        5011507161750523884,
        3972385604783851841,
        10720252882714053615,
        510466653875814787,
        1324049522456152859,
        16254690029661801769,
    ),
)
def _attention(r: Random) -> tuple[Any, list[Any], Values]:
    lead, (rows, keys) = r.choice(((), (2,), (1, 2))), (r.choice((0, 1, 5, 33)) for _ in range(2))
    dtype, width = (r.choice(tensors.FLOATS),), r.choice((0, 1, 16, 32))
    of = ((*lead, rows, width), (*lead, keys, width), (*lead, keys, r.choice((width, 8))))
    operands = [either(r, tensors.tensor(r, dtypes=dtype, of=size), 0.02) for size in of]
    config = layers.flash_attention_3(target=r.choice((None, "hopper.wgmma")))
    options = maybe(
        r, {"config": either(r, config, 0.04), "generator": 1}, dropout_p=(0.0, 0.1), is_causal=(True, False),
        scale=(0.5, None), enable_gqa=(False, True),
        attn_mask=lambda r: tensors.tensor(r, dtypes=(torch.bool, torch.float32), of=(rows, keys)),
    )  # fmt: skip
    return _attended, operands, options


def _net(r: Random) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32, bias=r.random() < 0.5))


def _data(r: Random) -> Any:
    return either(r, [tensors.tensor(r, dtypes=(torch.float32,), of=(4, 32)) for _ in range(r.randint(0, 2))], 0.1)


def _searched(*arguments: Any, **options: Any) -> None:
    result = fmtsim.search(*arguments, progress=False, **options)
    assert str(result) and result.front() and result.uniform()
    fmtsim.ptq(arguments[0], result.recipe(), arguments[1], progress=False)


@target("search", 20, failed=(16550909685367522495, 1622506795092101137, 10265391261379807853))
def _search(r: Random) -> tuple[Any, list[Any], Values]:
    options = maybe(
        r, {"bits": either(r, r.choice((4, 8, 8.5, 16, 2)), 0.1)}, budget=(None, 1e6), formats=(PTQ[1:3],),
        filter_fn=(lambda module, name: True,), loss_fn=(lambda output, reference: 1.0,), wrong=0.06,
    )  # fmt: skip
    options = {name: passed(value) for name, value in options.items()}
    return _searched, [either(r, _net(r), 0.05), _data(r)], options


def _quantised(model: Any, recipe: Any, data: Any, x: Any, **options: Any) -> Any:
    model_q = fmtsim.ptq(model, recipe, data, progress=False, **options)
    assert str(fmtsim.ptq_report(model_q)) and fmtsim.ptq_state(model_q)
    return model_q(x)


@target("ptq", 24, failed=(1134534162210246645,))
def _ptq(r: Random) -> tuple[Any, list[Any], Values]:
    x = tensors.tensor(r, dtypes=(torch.float32,), of=(3, 32))
    options = maybe(r, {}, filter_fn=(lambda module, name: True, lambda module, name: name == "0"), wrong=0.05)
    options = {name: passed(value) for name, value in options.items()}
    return _quantised, [either(r, _net(r), 0.05), either(r, r.choice(PTQ), 0.05), _data(r), x], options


@target("plots", 10, failed=(13364825902545719227, 16722836675114058304))
def _plots(r: Random) -> tuple[Any, list[Any], Values]:
    """What draws pictures."""
    x = tensors.numbers(r, (64,), torch.float32)
    comparison = fmtsim.compare(x, x + r.choice((0.0, 1e-7, 3.0)))
    path = r.choice((None, ROOM / "plot.png", ROOM, ROOM / "absent" / "x.png"))
    options: Values = {"path": path, "title": r.choice(("", "a title", "$x", "\n", "$\\frac$"))}
    if r.random() < 0.4:
        options = junk_of(r, comparison.plot, options)

    def plot(**options: Any) -> None:
        with contextlib.chdir(ROOM):  # any text is a path
            comparison.plot(**options)

    return plot, [], options
