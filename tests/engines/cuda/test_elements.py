# SPDX-License-Identifier: Apache-2.0
"""Casts of element formats by the CUDA kernels: every bit is that of the CPU engine, on the host and on a GPU."""

import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch

import fmtsim
from fmtsim.casts.encoded import Encoded
from fmtsim.engines.cuda import runtime
from fmtsim.engines.cuda.cast import casts, parameters, tables
from fmtsim.engines.cuda.cast.tables import layout_of
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import result_dtype
from fmtsim.formats.scaling import block_scaling
from fmtsim.formats.spec import ElementFormat, FloatFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.philox import random_integer
from fmtsim.spec.cast import CastSpec, RandomKey
from tests.support.bits import assert_same_bits, bits, same_bits
from tests.support.casts import KEY, ROUNDINGS, adversarial, cast_spec, element_formats, matrices, words_for
from tests.support.operands import DTYPES, wide_with_specials

cpu = importlib.import_module("fmtsim.engines.cpu")

NEAREST = Rounding()
STOCHASTIC = Rounding(mode="stochastic")
LAYOUTS = [
    STOCHASTIC,
    Rounding(mode="stochastic", random_bits=5, variant="b"),
    Rounding(mode="stochastic", random_bits=32, variant="b"),
    Rounding(mode="stochastic", random_bits=8, layout="cvt_rs"),
    Rounding(mode="stochastic", random_bits=13, layout="cvt_rs"),
]
# One of each kind: how it rounds, where it ends, what it lacks. Kernels are compiled on the host too: a few by default.
SAMPLE = ["e4m3", "e8m0", "fp64", "int8", "int4_half", "nf4", "lns8_g8"]
MORE = ["e5m2", "e4m3fnuz", "e2m1", "bf16", "fp32", "p3109_k4p1ue", "ue5m3", "int4_full", "uint4"]
EVERY = [name for name in element_formats() if name != "lns16_g2048"]


def quantized(engine, x, spec, random=None, dtype=None) -> torch.Tensor:
    out = torch.full(x.shape, 123.0, dtype=dtype or x.dtype, device=x.device)
    engine.quantize(x, spec, random, out)
    return out


def check_cast(what: str, x: torch.Tensor, spec: CastSpec, random, device, out_dtypes) -> None:
    """Hold quantize, encode and decode on a device to the CPU engine."""
    there = x.to(device)
    sent = random.to(device) if isinstance(random, torch.Tensor) else random
    for dtype in out_dtypes:
        if casts.supports("quantize", spec, there, torch.empty(0, dtype=dtype, device=device)):
            got = quantized(casts, there, spec, sent, dtype).cpu()
            assert_same_bits(got, quantized(cpu, x, spec, random, dtype), x, what=f"{what} to {dtype}")
    expected = cpu.encode(x, spec, random)
    assert_same_bits(casts.encode(there, spec, sent).codes.cpu(), expected.codes, x, what=f"encode {what}")


def check_codes(x, spec, random, device, what, packed=False):
    """Hold codes, or packed ones, to those of the CPU engine."""
    expected = cpu.encode(x, spec, random)
    got = casts.encode(x.to(device), spec, random).codes.cpu()
    assert_same_bits(got, expected.codes, what=f"encode {what}")
    if packed:
        got = casts.encode_packed(x.to(device), spec, random).codes.cpu()
        assert_same_bits(got, Encoded.from_parts(expected, spec.format, x.shape).codes, what=f"packed {what}")


def check_format(name: str | ElementFormat, device, dtypes, roundings) -> None:
    points = torch.tensor(adversarial(get_format(name)), dtype=torch.float64)
    for dtype, (i, rounding), overflow in itertools.product(dtypes, enumerate(roundings), ("saturate", "ieee")):
        x = points.to(dtype)
        words = words_for(rounding, x.numel())
        spec = cast_spec(name, rounding, overflow=overflow)
        for random in (None,) if words is None else (words, KEY):
            outs = (dtype,) if i % 3 else (dtype, torch.float32, torch.float64)
            check_cast(f"{name} {dtype} {rounding} {overflow}", x, spec, random, device, outs)


def test_values_beyond_float32(device):
    """The largest value, which Inf saturates to, may lie above float32's; results are float64 then."""
    high = FloatFormat(name="high", exponent_bits=5, mantissa_bits=2, bias=-110)
    check_format(high, device, [torch.float32], [NEAREST])
    check_format("e8m7_finite", device, [torch.float32, torch.bfloat16], [NEAREST, STOCHASTIC, Rounding(mode="up")])
    x = torch.tensor(matrices()["with_inf"])
    for rule in ("floor", "rceil", "amax"):
        fmt = BlockFormat(name=f"high_{rule}", element=high, scaling=block_scaling((2, 8), rule))
        check_cast(fmt.name, x, cast_spec(fmt), None, device, (torch.float32, torch.float64))


@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_casts_equal_the_cpu_engine(device, name):
    """Dtypes and a third of the roundings take their turn; the slow test below walks through all."""
    turn = [*SAMPLE, *MORE].index(name)
    dtypes = [torch.float32] if name in SAMPLE[1:] else [torch.float32, list(DTYPES.values())[1 + turn % 3]]
    roundings = [NEAREST, STOCHASTIC, *ROUNDINGS[1 + turn % 3 : -1 : 3]]
    check_format(name, device, dtypes, roundings)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_cast_equals_the_cpu_engine(device, name):
    check_format(name, device, DTYPES.values(), [*ROUNDINGS, *LAYOUTS[1:]])


@pytest.mark.parametrize("rounding", LAYOUTS, ids=str)
def test_a_key_gives_the_words_of_the_definition(device, rounding):
    x = wide_with_specials(3, 167, seed=3)
    for name in ("e4m3", "int8", "e5m6"):  # e5m6: codes of 12 bits in slots of 16
        check_cast(f"{name} {rounding}", x, cast_spec(name, rounding), KEY, device, (torch.float32,))


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
        check_cast(f"{name} {rounding} {overflow}", x, spec, KEY, device, outs)
        check_cast(f"{name} {rounding} {overflow}, part", x[2:1100], spec, KEY, device, outs[:1])


def test_huge_offsets_and_negative_seeds_are_64_bits(device):
    x = wide_with_specials(200, seed=4)
    for key in (RandomKey(-1, -1), RandomKey((1 << 64) - 1, 0), RandomKey(1 << 32, 1 << 63)):
        check_cast(str(key), x, cast_spec("e2m1", STOCHASTIC), key, device, (torch.float32,))


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 63, 64, 65, 127, 1000, 4099])
def test_every_size(device, count):
    for dtype, random in itertools.product((torch.float32, torch.bfloat16), (None, KEY)):
        x = wide_with_specials(count, seed=count, dtype=dtype)
        spec = cast_spec("e4m3", NEAREST if random is None else STOCHASTIC)
        check_cast(f"{count} {dtype}", x, spec, random, device, (dtype, torch.float32))


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


def test_strides(device):
    base = wide_with_specials(24, 35, 4, seed=2)
    views = {"transposed": lambda t: t.transpose(0, 1), "every other": lambda t: t[::2, ::3],
             "permuted": lambda t: t.permute(2, 0, 1), "expanded": lambda t: t[:1].expand(3, 35, 4)}  # fmt: skip
    for (what, view), random in itertools.product(views.items(), (None, KEY)):
        spec = cast_spec("e4m3", NEAREST if random is None else STOCHASTIC)
        x = view(base.to(device))
        expected = quantized(cpu, view(base).contiguous(), spec, random)
        assert_same_bits(quantized(casts, x, spec, random).cpu(), expected, what=what)
        like = torch.empty_like(x)
        casts.quantize(x, spec, random, like)
        assert_same_bits(like.cpu().contiguous(), expected, what=f"{what}, like x")
        expected_codes = cpu.encode(view(base), spec, random).codes
        assert_same_bits(casts.encode(x, spec, random).codes.cpu(), expected_codes, what=f"encode {what}")


@pytest.mark.parametrize("name", ["e8m0", "ue5m3", "uint4", "e4m3", "p3109_k8p1ue"])
def test_pairs_of_16_bits(device, name):
    """Every pattern beside another one: two are clamped at a time, with and without signs."""
    for dtype, random in itertools.product((torch.bfloat16, torch.float16), (None, KEY)):
        x = torch.arange(1 << 16, dtype=torch.int32).mul(40503).to(torch.int16).view(dtype)
        spec = cast_spec(name, NEAREST if random is None else STOCHASTIC, overflow="saturate")
        for values in (x, torch.where(x == x, x, torch.ones_like(x))):
            check_cast(f"{name} {dtype}", values, spec, random, device, (dtype,))


# Codes.


@pytest.mark.parametrize("name", ["e4m3", "e2m1", "fp16", "int8_full", "nf4", "lns8_g8", "e8m0", "fp64", "int13"])
def test_decode_equals_the_cpu_engine(device, name):
    fmt = get_format(name)
    count = len(fmt.values) if hasattr(fmt, "values") else 1 << min(fmt.bits, 12)
    codes = (torch.arange(3 * count) * 7919 % count).to(code_dtype(fmt.bits))
    codes = codes if fmt.bits < 13 else codes * ((1 << (fmt.bits - 12)) + 3) % (1 << min(fmt.bits, 62))
    spec = cast_spec(name)
    fallback = importlib.import_module("fmtsim.engines.torch_engine") if fmt.bits > 16 else cpu
    for dtype in DTYPES.values():
        there = torch.empty(codes.shape, dtype=dtype, device=device)
        if not casts.supports("decode", spec, there):
            continue
        here = torch.empty(codes.shape, dtype=dtype)
        casts.decode(fmtsim.spec.cast.EncodedParts(codes.to(device)), spec, there)
        fallback.decode(fmtsim.spec.cast.EncodedParts(codes), spec, here)
        assert_same_bits(there.cpu(), here, codes, what=f"{name} {dtype}")


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
        check_cast(f"{name} {mode}", x, spec, None, device, (torch.float32,))
        expected = quantized(cpu, x.half(), spec, None, torch.float32)
        got = quantized(casts, x.half().to(device), spec, None, torch.float32).cpu()
        assert_same_bits(got, expected, x, what=f"{name} half")
        check_codes(x, spec, None, device, name, packed=True)


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
        for out in (result_dtype(spec.format, dtype), torch.float32):
            got = quantized(casts, x.to(device), spec, None, out).cpu()
            assert_same_bits(got, quantized(cpu, x, spec, None, out), x, what=f"{name} {mode}")
        check_codes(x, spec, None, device, name, packed=True)
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
