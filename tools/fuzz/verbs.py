# SPDX-License-Identifier: Apache-2.0
"""Targets that take tensors: casts, products, and what explains them."""

import contextlib
import inspect
from random import Random
from typing import Any

import torch
from torch import Tensor

import fmtsim
from tools.fuzz import tensors
from tools.fuzz.calls import FORMATS, ROUNDINGS, UNITS, Values, either, maybe, target


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


@target("quantize", 200, failed=(14465058508991381728,))
def _quantize(r: Random) -> tuple[Any, list[Any], Values]:
    x = either(r, tensors.tensor(r))
    options = _cast(r, x)
    maybe(r, options, out_dtype=tensors.FLOATS)
    if r.random() < 0.2 and isinstance(x, Tensor) and not x.is_nested:
        options["out"] = tensors.tensor(r, of=tuple(x.shape))
    return fmtsim.quantize, [x, either(r, r.choice(FORMATS))], options


@target("quantize_", 120, failed=(11091338831743096163,))
def _quantize_in_place(r: Random) -> tuple[Any, list[Any], Values]:
    x = either(r, tensors.tensor(r))
    return fmtsim.quantize_, [x, either(r, r.choice(FORMATS))], _cast(r, x)


def _encoded(x: Any, format: Any, **options: Any) -> Any:
    q = fmtsim.encode(x, format, **options)
    q.unpacked(), q.nbytes, repr(q)
    return [q.codes, q.scales, q.offsets, q.decode()]


@target("encode", 120, failed=(6279556592387848185, 2628797528795137409))
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
        r, options, accumulate=("fp32", "fp16"), allow_tf32=(True, False), native=(False, None), strict=(False,),
        out_dtype=(torch.float32, torch.bfloat16, torch.float8_e4m3fn), plan=(None, fmtsim.GemmPlan(k_tile=16)),
        allow_fp16_accumulation=(True, False), wrong=0.02,
    )  # fmt: skip


def _operands(r: Random, first: tuple[int, ...], second: tuple[int, ...], dtypes: Any = None) -> list[Any]:
    dtype = (r.choice(dtypes or tensors.FLOATS),)
    return [either(r, tensors.tensor(r, dtypes=dtype, of=sizes), 0.02) for sizes in (first, second)]


def _sizes(r: Random) -> tuple[int, int, int]:
    return tuple(r.choice((0, 1, 2, 3, 8, 16, 17, 33)) for _ in range(3))  # type: ignore[return-value]


@target("mm", 120, failed=(7392823749086367272,))
def _mm(r: Random) -> tuple[Any, list[Any], Values]:
    m, n, k = _sizes(r)
    options = _machine(r, {})
    if r.random() < 0.1:
        maybe(r, options, a_format=("e4m3", "e2m1", "int8"), b_format=("e4m3", "e2m1"))
    return fmtsim.mm, _operands(r, (m, k), (k, n)), options


@target("bmm", 48)
def _bmm(r: Random) -> tuple[Any, list[Any], Values]:
    (m, n, k), count = _sizes(r), r.choice((0, 1, 2, 3))
    return fmtsim.bmm, _operands(r, (count, m, k), (count, k, n)), _machine(r, {})


@target("linear", 60, failed=(536551417588828234,))
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


@target("scaled_mm", 100, failed=(5381471994509439047, 9471303600779183701))
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
        rows = [
            torch.full((-(-size // 128) * 128 * -(-(k // 32) // 4) * 4,), 127, dtype=torch.uint8) for size in (m, n)
        ]
        scales, unit = [row.view(torch.float8_e8m0fnu) for row in rows], "blackwell.tcgen05.mxf8f6f4"
    options = _machine(r, {"out_dtype": r.choice((torch.bfloat16, torch.float32, torch.float8_e4m3fn))})
    for name in ("allow_tf32", "allow_fp16_accumulation"):
        options.pop(name, None)
    if isinstance(options.get("target"), str) and options["target"] in UNITS:
        options["target"] = unit
    maybe(r, options, bias=lambda r: tensors.tensor(r, dtypes=(torch.bfloat16,), of=(n,)), use_fast_accum=(True, False),
          scale_result=lambda r: torch.tensor(2.0), scale_recipe_a=("TensorWise", "RowWise"),
          scale_recipe_b=("TensorWise", "RowWise"), swizzle_a=("NO_SWIZZLE",))  # fmt: skip
    return fmtsim.scaled_mm, [either(r, value, 0.02) for value in (a, b, *scales)], options


@target("mma", 48, failed=(13141249563587936203, 18421199851013097781))
def _mma(r: Random) -> tuple[Any, list[Any], Values]:
    m, n, k = _sizes(r)
    operands = _operands(r, (m, k), (n, k), (torch.float16, torch.bfloat16))
    maybe(r, options := {"target": either(r, r.choice(UNITS))}, accumulate=("fp32", "fp16"),
          c=lambda r: tensors.tensor(r, dtypes=(torch.float32,), of=(m, n)), generator=(None,))  # fmt: skip
    return fmtsim.mma, operands, options


@target("explain", 60, failed=(17784353442611218000, 10910207247614510596, 979473696259143546))
def _explain(r: Random) -> tuple[Any, list[Any], Values]:
    x = r.choice((0.1, -3e5, float("nan"), float("inf"), 5e-324, 7, [1.0, 2.0], tensors.tensor(r), tensors.junk(r)))
    options = _cast(r, x)
    parameters = inspect.signature(fmtsim.explain).parameters
    options = {name: value for name, value in options.items() if name in parameters}

    def explain(*arguments: Any, **options: Any) -> None:
        str(fmtsim.explain(*arguments, **options))

    return explain, [x, either(r, r.choice(FORMATS))], options


@target("explain_mm", 32)
def _explain_mm(r: Random) -> tuple[Any, list[Any], Values]:
    m, n, k = _sizes(r)

    def explain_mm(*arguments: Any, **options: Any) -> None:
        str(fmtsim.explain_mm(*arguments, **options))

    parameters = inspect.signature(fmtsim.explain_mm).parameters
    options = {name: value for name, value in _machine(r, {}).items() if name in parameters}
    return explain_mm, _operands(r, (m, k), (k, n)), options
