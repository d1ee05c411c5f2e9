# SPDX-License-Identifier: Apache-2.0
"""Targets that take tensors: casts, products, layers, models with data, and what explains and draws them."""

import contextlib
import functools
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import fmtsim
from fmtsim import nn as layers
from tools.fuzz import tensors
from tools.fuzz.calls import (
    FORMATS,
    ROUNDINGS,
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
from tools.fuzz.target import ROOM


def _cast(r: Random, x: Any) -> Values:
    like = x.shape if isinstance(x, Tensor) and not x.is_nested else (2,)
    options = maybe(
        r, {}, rounding=ROUNDINGS, overflow=("saturate", "ieee", None), dim=(-2, -1, 0, 1), pad=(True, True, False),
        block_size=(1, 2, 8, 16, 32, (2, 8), (None, None), (1, None), 1 << 40), scale_rule=("floor", "ceil", "amax"),
    )  # fmt: skip
    if r.random() < 0.2:
        options["rounding"] = "stochastic"
        options["generator"] = r.choice((3, fmtsim.RandomKey(1, 2), (1 << 64) - 1, tensors.junk(r)))
        options = maybe(r, options, random_bits=(1, 8, 32))
        if r.random() < 0.3 and isinstance(x, Tensor):
            del options["generator"]
            words = torch.randint(0, 1 << r.choice((1, 8, 31)), like, generator=torch.Generator().manual_seed(1))
            options["random_words"] = tensors.layout(r, words)
    return options


@target("quantize", 200)
def _quantize(r: Random) -> tuple[Any, list[Any], Values]:
    x = either(r, tensors.tensor(r))
    options = _cast(r, x)
    maybe(r, options, out_dtype=tensors.FLOATS)
    if r.random() < 0.2 and isinstance(x, Tensor) and not x.is_nested:
        options["out"] = tensors.tensor(r, of=tuple(x.shape))
    return fmtsim.quantize, [x, either(r, r.choice(FORMATS))], options


@target("quantize_", 120)
def _quantize_in_place(r: Random) -> tuple[Any, list[Any], Values]:
    x = either(r, tensors.tensor(r))
    return fmtsim.quantize_, [x, either(r, r.choice(FORMATS))], _cast(r, x)


def _encoded(x: Any, format: Any, **options: Any) -> Any:
    q = fmtsim.encode(x, format, **options)
    q.unpacked(), q.nbytes, repr(q)
    return [q.codes, q.scales, q.offsets, q.decode()]


@target("encode", 120)
def _encode(r: Random) -> tuple[Any, list[Any], Values]:
    x = either(r, tensors.tensor(r))
    return _encoded, [x, either(r, r.choice(FORMATS))], _cast(r, x)


@target("decode", 120)
def _decode(r: Random) -> tuple[Any, list[Any], Values]:
    integers = tuple(dtype for dtype in tensors.OTHERS if not dtype.is_complex)
    codes = either(r, tensors.tensor(r, dtypes=integers))
    return fmtsim.decode, [codes, either(r, r.choice((*FORMATS, None)))], maybe(r, {}, out_dtype=tensors.FLOATS)


@target("Encoded", 80)
def _make(r: Random) -> tuple[Any, list[Any], Values]:
    q = fmtsim.encode(tensors.numbers(r, (4, 32), torch.float32), r.choice(FORMATS), pad=True)
    names = ("format", "shape", "dim", "codes", "scales", "tensor_scale", "offsets")
    fields = {name: either(r, getattr(q, name), 0.1) for name in names}
    for name in ("codes", "scales"):
        if isinstance(fields[name], Tensor) and r.random() < 0.4:
            fields[name] = tensors.layout(r, tensors.numbers(r, tuple(fields[name].shape), fields[name].dtype))

    def make(**fields: Any) -> Any:
        return fmtsim.Encoded(**fields).decode()

    return make, [], fields


@target("compare", 80)
def _compare(r: Random) -> tuple[Any, list[Any], Values]:
    x = either(r, tensors.tensor(r, dtypes=(*tensors.FLOATS, *tensors.OTHERS)))
    same = r.random() < 0.3 or not isinstance(x, Tensor) or x.is_nested
    other = x if same else tensors.tensor(r, dtypes=(x.dtype,), of=x.shape)

    def compare(actual: Any, expected: Any) -> Any:
        text = str(fmtsim.compare(actual, expected))
        return torch.tensor(list(text.encode()))

    return compare, [x, either(r, other)], {}


def _machine(r: Random, options: Values) -> Values:
    kind = r.random()
    if kind < 0.75:
        options["target"] = either(r, r.choice(UNITS))
    elif kind < 0.9:
        options["target"] = either(r, r.choice(("h200", "a100", "chain")))
    elif kind < 0.96:
        unit = fmtsim.get_unit("hopper.wgmma")
        options["target"] = either(r, unit.modes[0].datapath, 0.3)
    return maybe(
        r, options, accumulate=("fp32", "fp16"), native=(False, None), strict=(False,),
        out_dtype=(torch.float32, torch.bfloat16, torch.float8_e4m3fn), plan=(None, fmtsim.GemmPlan(k_tile=16)),
        allow=("tf32", "fp16_accumulation", None), wrong=0.02,
    )  # fmt: skip


def _operands(r: Random, first: tuple[int, ...], second: tuple[int, ...], dtypes: Any = None) -> list[Any]:
    dtype = (r.choice(dtypes or tensors.FLOATS),)
    return [either(r, tensors.tensor(r, dtypes=dtype, of=sizes), 0.02) for sizes in (first, second)]


def _sizes(r: Random) -> tuple[int, int, int]:
    return tuple(r.choice((0, 1, 2, 3, 8, 16, 17, 33)) for _ in range(3))  # type: ignore[return-value]


@target("mm", 120)
def _mm(r: Random) -> tuple[Any, list[Any], Values]:
    m, n, k = _sizes(r)
    options = _machine(r, {})
    if r.random() < 0.1:
        maybe(r, options, formats=("e4m3", "e2m1", ("int8", "e4m3"), ("e2m1", None)))
    return fmtsim.mm, _operands(r, (m, k), (k, n)), options


@target("bmm", 48)
def _bmm(r: Random) -> tuple[Any, list[Any], Values]:
    (m, n, k), count = _sizes(r), r.choice((0, 1, 2, 3))
    return fmtsim.bmm, _operands(r, (count, m, k), (count, k, n)), _machine(r, {})


@target("linear", 60)
def _linear(r: Random) -> tuple[Any, list[Any], Values]:
    m, n, k = _sizes(r)
    lead = r.choice(((m,), (), (2, m), (0, m), (1,) * 6))
    operands = _operands(r, (*lead, k), (n, k))
    if r.random() < 0.3:
        dtype = operands[0].dtype if isinstance(operands[0], Tensor) else torch.float32
        operands.append(either(r, tensors.tensor(r, dtypes=(dtype,), of=(n,)), 0.1))
    return fmtsim.linear, operands, _machine(r, {})


@target("int_mm", 40)
def _int_mm(r: Random) -> tuple[Any, list[Any], Values]:
    m, n, k = _sizes(r)
    options = maybe(r, {}, target=("int8", "int8.satfinite", "h200"), native=(False, None))
    return fmtsim.int_mm, _operands(r, (m, k), (k, n), (torch.int8,)), options


@target("scaled_mm", 100)
def _scaled_mm(r: Random) -> tuple[Any, list[Any], Values]:
    m, n, k = r.choice((16, 32, 128)), r.choice((16, 32, 128)), r.choice((32, 128, 256))
    dtype = (torch.float8_e4m3fn,)
    a, b = tensors.tensor(r, dtypes=dtype, of=(m, k)), tensors.tensor(r, dtypes=dtype, of=(n, k))
    with contextlib.suppress(RuntimeError, NotImplementedError):
        b = b.t()
    shapes = r.choice((((), ()), ((m, 1), (1, n)), ((m, -(-k // 128)), (-(-k // 128), -(-n // 128)))))
    scales = [tensors.layout(r, tensors.numbers(r, size, torch.float32).abs().nan_to_num(1, 1, 1)) for size in shapes]
    unit = "hopper.wgmma"
    if r.random() < 0.2:
        counts = [-(-size // 128) * 128 * -(-(k // 32) // 4) * 4 for size in (m, n)]
        scales = [torch.full((count,), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu) for count in counts]
        unit = "blackwell.tcgen05.mxf8f6f4"
    options = _machine(r, {"out_dtype": r.choice((torch.bfloat16, torch.float32, torch.float8_e4m3fn))})
    options.pop("allow", None)
    if isinstance(options.get("target"), str) and options["target"] in UNITS:
        options["target"] = unit
    maybe(r, options, bias=lambda r: tensors.tensor(r, dtypes=(torch.bfloat16,), of=(n,)), use_fast_accum=(True, False),
          scale_result=lambda r: torch.tensor(2.0), scale_recipes=("TensorWise", "RowWise"),
          swizzles=("NO_SWIZZLE",))  # fmt: skip
    return fmtsim.scaled_mm, [either(r, value, 0.02) for value in (a, b, *scales)], options


@target("mma", 48)
def _mma(r: Random) -> tuple[Any, list[Any], Values]:
    m, n, k = _sizes(r)
    operands = _operands(r, (m, k), (n, k), (torch.float16, torch.bfloat16))
    maybe(r, options := {"target": either(r, r.choice(UNITS))}, accumulate=("fp32", "fp16"),
          c=lambda r: tensors.tensor(r, dtypes=(torch.float32,), of=(m, n)), generator=(None,))  # fmt: skip
    return fmtsim.mma, operands, options


@target("explain", 60)
def _explain(r: Random) -> tuple[Any, list[Any], Values]:
    x = r.choice((0.1, -3e5, float("nan"), float("inf"), 5e-324, 7, [1.0, 2.0], tensors.tensor(r), tensors.junk(r)))
    options = _cast(r, x)
    return silent(fmtsim.explain), [x, either(r, r.choice(FORMATS))], accepted(fmtsim.explain, options)


@target("explain_mm", 32)
def _explain_mm(r: Random) -> tuple[Any, list[Any], Values]:
    m, n, k = _sizes(r)
    options = accepted(fmtsim.explain_mm, _machine(r, {}))
    return silent(fmtsim.explain_mm), _operands(r, (m, k), (k, n)), options


PTQ = ("int8_static", "e4m3_static", "w4a4", "minifloat_e3m2", "int4_gptq")


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


@target("EmulatedGEMM", 60)
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
    return silent(fmtsim.linear_config), [], accepted(fmtsim.linear_config, options)


def _run(cls: Any, arguments: list[Any], options: Values, x: Any) -> None:
    backward(cls(*arguments, **options)(x))


@target("layers", 48)
def _layers(r: Random) -> tuple[Any, list[Any], Values]:
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


@target("smooth_swiglu", 32)
def _smooth(r: Random) -> tuple[Any, list[Any], Values]:
    size = tensors.shape(r)
    u, v = (either(r, tensors.tensor(r, dtypes=tensors.FLOATS[:1], of=size), 0.05) for _ in range(2))
    options = maybe(r, {}, per=("token", "channel"), power_of_two=(True, False), scale=(None,))
    return silent(layers.smooth_swiglu), [u, v], options  # torch's silu differs in its last bit by strides


def _attended(*arguments: Any, **options: Any) -> None:
    backward(layers.quantised_attention(*arguments, **options))


@target("attention", 40)
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


def _data(r: Random) -> Any:
    return either(r, [tensors.tensor(r, dtypes=(torch.float32,), of=(4, 32)) for _ in range(r.randint(0, 2))], 0.1)


def _searched(*arguments: Any, **options: Any) -> None:
    result = fmtsim.search(*arguments, progress=False, **options)
    assert str(result) and result.front() and result.uniform()
    fmtsim.ptq(arguments[0], result.recipe(), arguments[1], progress=False)


@target("search", 20)
def _search(r: Random) -> tuple[Any, list[Any], Values]:
    options = maybe(
        r, {"bits": either(r, r.choice((4, 8, 8.5, 16, 2)), 0.1)}, budget=(None, 1e6), formats=(PTQ[1:3],),
        filter_fn=(lambda module, name: True,), loss=(lambda output, reference: 1.0,), wrong=0.06,
    )  # fmt: skip
    options = {name: passed(value) for name, value in options.items()}
    return _searched, [either(r, net(r, 32), 0.05), _data(r)], options


def _quantised(model: Any, recipe: Any, data: Any, x: Any, **options: Any) -> Any:
    model_q = fmtsim.ptq(model, recipe, data, progress=False, **options)
    assert str(fmtsim.report(model_q)) and fmtsim.state(model_q)
    return model_q(x)


@target("ptq", 24)
def _ptq(r: Random) -> tuple[Any, list[Any], Values]:
    x = tensors.tensor(r, dtypes=(torch.float32,), of=(3, 32))
    options = maybe(r, {}, filter_fn=(lambda module, name: True, lambda module, name: name == "0"), wrong=0.05)
    options = {name: passed(value) for name, value in options.items()}
    return _quantised, [either(r, net(r, 32), 0.05), either(r, r.choice(PTQ), 0.05), _data(r), x], options


@target("plots", 10)
def _plots(r: Random) -> tuple[Any, list[Any], Values]:
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
