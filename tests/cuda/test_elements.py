# SPDX-License-Identifier: Apache-2.0
"""What is special to the CUDA kernels of element formats: alignment, pairs, tables, fast paths; on the host and a GPU.

Every format and rounding is compared with the oracle in ``tests/equality``.
"""

import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch

import fmtsim
from fmtsim.casts.encoded import Encoded
from fmtsim.cuda import runtime
from fmtsim.cuda.cast import casts, parameters, tables
from fmtsim.cuda.cast.tables import layout_of
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import result_dtype
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.philox import random_integer
from fmtsim.spec.cast import CastSpec
from tests.equality.engines import Engine, check_packed, check_with_torch
from tests.support.bits import assert_same_bits, bits, same_bits
from tests.support.casts import KEY, adversarial, cast_spec
from tests.support.operands import wide_with_specials

cpu = importlib.import_module("fmtsim.cpu")

NEAREST = Rounding()
STOCHASTIC = Rounding(mode="stochastic")


def quantized(engine, x, spec, random=None, dtype=None) -> torch.Tensor:
    out = torch.full(x.shape, 123.0, dtype=dtype or x.dtype, device=x.device)
    engine.quantize(x, spec, random, out)
    return out


def check_cast(x: torch.Tensor, spec: CastSpec, random, device, *out_dtypes) -> None:
    """Hold quantize and encode on a device to torch operations."""
    check_with_torch(Engine("cuda", device), x, spec, random, *out_dtypes)


@pytest.mark.parametrize(
    ("bits_used", "variant"),
    [(32, "a"), (5, "b"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((20, "a"), (20, "b"), (32, "b")))],
)
def test_stochastic_rounding_by_bit_addition(device, bits_used, variant):
    """Formats with the exponents of float32, from its subnormals to beyond their largest numbers."""
    points = torch.arange(4600, dtype=torch.int64).mul(0x9E3779B1).to(torch.int32)
    points[:64] = torch.arange(64, dtype=torch.int32).mul(0x1FFF7)
    points[64:128] = 0x7F800000 - torch.arange(64, dtype=torch.int32).mul(0x1003)
    x = points.view(torch.float32)
    rounding = Rounding(mode="stochastic", random_bits=bits_used, variant=variant)
    served = bits_used < 32 or variant == "a"
    for name, overflow in itertools.product(("bf16", "e8m1"), ("saturate", "ieee")):
        spec = cast_spec(name, rounding, overflow=overflow)
        fast = casts.fast_grid(spec, KEY)
        assert (fast is not None and fast.method == parameters.BITS) == served
        outs = (torch.float32, torch.bfloat16) if name == "bf16" and variant == "a" else (torch.float32,)
        check_cast(x, spec, KEY, device, *outs)
        check_cast(x[2:1100], spec, KEY, device, outs[0])


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 63, 64, 65, 127, 1000, 4099])
def test_every_size(device, count):
    for dtype, random in itertools.product((torch.float32, torch.bfloat16), (None, KEY)):
        x = wide_with_specials(count, seed=count, dtype=dtype)
        spec = cast_spec("e4m3", NEAREST if random is None else STOCHASTIC)
        check_cast(x, spec, random, device, dtype, torch.float32)


@pytest.mark.parametrize("shift", range(5))
def test_misaligned_views_from_16_to_32_bits(device, shift):
    base = wide_with_specials(900, seed=shift, dtype=torch.bfloat16)
    out = torch.zeros(910, dtype=torch.float32, device=device)
    for start in range(9):
        x, spec = base[start:], cast_spec("fp16")
        out.zero_()
        casts.quantize(base.to(device)[start:], spec, None, out[shift : shift + x.numel()])
        assert_same_bits(
            out[shift : shift + x.numel()].cpu(), quantized(cpu, x, spec, dtype=out.dtype), x, what=f"{start} {shift}"
        )
        assert not out[:shift].any() and not out[shift + x.numel() :].any(), "elements beside the view were written"


@pytest.mark.parametrize("start", range(1, 9))
def test_misaligned_views(device, start):
    """Addresses that are not those of whole vectors, the output's like the input's or another; in place too."""
    for dtype, random in itertools.product((torch.bfloat16,) if start % 4 else (torch.float32,), (None, KEY)):
        base = wide_with_specials(400, seed=start, dtype=dtype)
        spec = cast_spec("e4m3", NEAREST if random is None else STOCHASTIC)
        expected = quantized(cpu, base[start:], spec, random)
        view = base.to(device)[start:]
        for shift in (start, 0):
            out = torch.zeros(400, dtype=dtype, device=device)
            casts.quantize(view, spec, random, out[shift : shift + view.numel()])
            assert_same_bits(out[shift : shift + view.numel()].cpu(), expected, base[start:], what=f"{start} {shift}")
            untouched = torch.cat([out[:shift], out[shift + view.numel() :]])
            assert not untouched.any(), "elements beside the view were written"
        expected_codes = cpu.encode(base[start:], spec, random).codes
        assert_same_bits(casts.encode(view, spec, random).codes.cpu(), expected_codes, what="encode")
        casts.quantize(view, spec, random, view)
        assert_same_bits(view.cpu(), expected, base[start:], what="in place")


@pytest.mark.parametrize("name", ["e8m0", "ue5m3", "uint4", "e4m3", "p3109_k8p1ue"])
def test_pairs_of_16_bits(device, name):
    """Every pattern beside another one: two are clamped at a time, with and without signs."""
    for dtype, random in itertools.product((torch.bfloat16, torch.float16), (None, KEY)):
        x = torch.arange(1 << 16, dtype=torch.int32).mul(40503).to(torch.int16).view(dtype)
        spec = cast_spec(name, NEAREST if random is None else STOCHASTIC, overflow="saturate")
        for values in (x, torch.where(x == x, x, torch.ones_like(x))):
            check_cast(values, spec, random, device, dtype)


# Tables.

NO_GRIDS = ["nf4", "bnb_fp4", "bnb_dynamic8", "lns8_g8", "p3109_k8p1ue"]


@pytest.mark.parametrize("name", NO_GRIDS)
def test_tables_equal_the_general_kernel(device, monkeypatch, name):
    """Values and codes by table, at and next to every point where the result changes, and a stride through the rest."""
    monkeypatch.setattr(tables, "RANGES_WORTH", 1)
    monkeypatch.setattr(runtime, "multiprocessors", lambda index: 1)  # so that threads go on to another run
    patterns = torch.arange(1 << 13).mul((1 << 19) + 331).to(torch.int32)
    near = torch.tensor(adversarial(get_format(name)), dtype=torch.float64).float().view(torch.int32)
    x = torch.cat([near - 1, near, near + 1, patterns]).view(torch.float32)
    for mode in ("nearest_even", "nearest_away", "up") if name != "bnb_dynamic8" else ("nearest_even",):
        spec = cast_spec(name, Rounding(mode=mode), overflow="saturate")
        assert layout_of(spec) is not None
        check_cast(x, spec, None, device, torch.float32)
        check_cast(x.half(), spec, None, device, torch.float32)
        check_packed(Engine("cuda", device), x, spec, None)


@pytest.mark.parametrize("name", ["nf4", "lns8_g8", "p3109_k8p1ue"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_patterns_equal_the_cpu_engine(device, monkeypatch, name, dtype):
    """Values and codes of every pattern of a 16-bit dtype, the last element beyond the last whole vector."""
    monkeypatch.setattr(tables, "PATTERNS_WORTH", 1)
    monkeypatch.setattr(runtime, "multiprocessors", lambda index: 1)  # so that threads go on to another run
    served = []
    monkeypatch.setattr(tables, "_range_table", lambda *_: served.append("ranges"))
    x = torch.cat([torch.arange(1 << 16, dtype=torch.int32).to(torch.int16), torch.tensor([17], dtype=torch.int16)])
    x = x.view(dtype)
    for mode in {"nf4": ("nearest_even", "to_odd"), "lns8_g8": ("nearest_even",)}.get(name, ("nearest_away",)):
        spec = cast_spec(name, Rounding(mode=mode), overflow="saturate")
        check_cast(x, spec, None, device, result_dtype(spec.format, dtype), torch.float32)
        check_packed(Engine("cuda", device), x, spec, None)
    assert not served, "other tables were asked"


def test_formats_without_a_table():
    for name, mode in (("e4m3", "stochastic"), ("nf4", "to_odd"), ("lns16_g2048", "nearest_even"), ("int8", "up")):
        assert layout_of(cast_spec(name, Rounding(mode=mode), overflow="saturate")) is None


# Errors planted on purpose, on the way that asks for its parameters at every call.

LONG_WAY = SimpleNamespace(quantize=casts.quantize_elements)


FIELDS = ("highest", "lowest", "over_above", "over_value", "nan_value", "zero", "shift", "least_magic", "sign", "drop",
          "half", "keep")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "key", "place"),
    [("e4m3", None, place) for place in ("highest", "shift", "least_magic", "nan_value")]
    + [("bf16", KEY, place) for place in ("drop", "half", "keep")],
)
def test_a_wrong_parameter_is_noticed(device, monkeypatch, name, key, place):
    """A kernel with one bit of one parameter flipped gives other bits than the CPU engine."""
    spec = cast_spec(name, STOCHASTIC if key else NEAREST, overflow="saturate" if key is None else None)
    right = parameters.grid_of(spec.format, spec.rounding, spec.overflow)
    wrong, field = bytearray(right.parameters), 4 * FIELDS.index(place)
    wrong[field + (place == "half" if key else 2)] ^= 1 if key else 0x80  # 0x80: the lowest bit of the exponent
    x = wide_with_specials(5000, seed=11) if key else torch.tensor(adversarial(get_format(name)))
    expected = quantized(cpu, x, spec, key)
    assert_same_bits(quantized(LONG_WAY, x.to(device), spec, key).cpu(), expected)
    monkeypatch.setattr(casts, "fast_grid", lambda spec, random: right._replace(parameters=bytes(wrong)))
    assert not same_bits(quantized(LONG_WAY, x.to(device), spec, key).cpu(), expected)


def test_fast_and_general_kernels_give_the_same_bits(device, monkeypatch):
    low = torch.arange(0, 1 << 25, 16411, dtype=torch.int32).view(torch.float32)  # beyond the smallest normal numbers
    lowest = torch.tensor([2.0**-127, 2.0**-128, 1.5 * 2.0**-127])
    x = torch.cat([wide_with_specials(3000, seed=9), low, lowest]).to(device)
    specs = {name: cast_spec(name) for name in ("e4m3", "tf32", "e8m0", "int8", "int8_half", "p3109_k8p1ue")}
    fast = {name: (quantized(casts, x, spec), casts.encode(x, spec, None).codes) for name, spec in specs.items()}
    monkeypatch.setattr(casts, "fast_grid", lambda spec, random: None)
    for name, (values, codes) in fast.items():
        assert_same_bits(quantized(LONG_WAY, x, cast_spec(name)).cpu(), values.cpu(), what=name)
        assert_same_bits(casts.encode(x, cast_spec(name), None).codes.cpu(), codes.cpu(), what=name)


# On a GPU alone: sizes that a host does not reach.


@pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "int8", "bf16", "tf32", "e8m0"])
def test_a_stride_through_all_float32_patterns(name):
    patterns = (torch.arange(1 << 24, dtype=torch.int64) * 256 + 77).to(torch.int32).view(torch.float32)
    for overflow in ("saturate", "ieee"):
        spec = cast_spec(name, overflow=overflow)
        got = quantized(casts, patterns.cuda(), spec).cpu()
        assert torch.equal(bits(got), bits(quantized(cpu, patterns, spec)))


@pytest.mark.slow
@pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")
def test_more_than_two_to_the_31_elements():
    """The last elements of a long tensor are cast as if they were alone, with the words of their places."""
    count = (1 << 31) + 4099
    x = torch.arange(count, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    start = (count - 5000) // 64 * 64
    tail = x[start:].cpu()
    places = [random_integer(STOCHASTIC, KEY, start + i) for i in range(tail.numel())]
    for rounding, random, words in ((NEAREST, None, None), (STOCHASTIC, KEY, torch.tensor(places))):
        spec = cast_spec("e4m3", rounding)
        assert_same_bits(
            quantized(casts, x, spec, random)[start:].cpu(), quantized(cpu, tail, spec, words), tail, what="values"
        )
        codes = casts.encode(x, spec, random).codes
        assert_same_bits(codes[start:].cpu(), cpu.encode(tail, spec, words).codes, tail, what="codes")
        del codes
        packed = casts.encode_packed(x, cast_spec("e2m1", rounding), random).codes
        expected = Encoded.from_parts(
            cpu.encode(tail, cast_spec("e2m1", rounding), words), get_format("e2m1"), tail.shape
        )
        assert_same_bits(packed[start // 2 :].cpu(), expected.codes, what="packed")
