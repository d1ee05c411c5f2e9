"""What must not depend on how a tensor lies: dims, strides, random keys, empty tensors, engines; and planted errors."""

import importlib

import pytest
import torch

import fmtsim.torch_engine as torch_engine
from fmtsim.formats.registry import get_format
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.philox import random_integer
from fmtsim.scaling.oracle import quantize_matrix
from fmtsim.spec.cast import CastSpec, RandomKey
from tests.engines.cases import STOCHASTIC, element_formats, scaled_formats
from tests.engines.compare import DTYPES, as_parts, bits, check, check_parts, differing, stored, words_for

NEAREST = Rounding()
KEY = RandomKey(0x0123456789ABCDEF, 0xFEDCBA9876543210)
SAMPLE = ["e4m3", "e5m2fnuz", "e2m1", "fp16", "int8", "int4_half", "nf4", "lns8_g8", "e8m0"]
SCALED_SAMPLE = ["mxfp4", "mxfp8_e4m3_rceil", "nvfp4", "nvfp4_16x16", "e4m3_128x128", "e4m3_channel", "int8_tensor",
                 "uint4_g32_zp", "nf4_g64", "logfmt8"]  # fmt: skip
LAYOUTS = [
    Rounding(mode="stochastic"),
    Rounding(mode="stochastic", random_bits=5, variant="b"),
    Rounding(mode="stochastic", random_bits=8, layout="cvt_rs"),
    Rounding(mode="stochastic", random_bits=13, layout="cvt_rs"),
    Rounding(mode="stochastic", random_bits=16, layout="cvt_rs"),
]


def spec_of(name: str, rounding: Rounding = NEAREST, dim: int = -1, overflow: str | None = None) -> CastSpec:
    fmt = get_format(name)
    return CastSpec(format=fmt, rounding=rounding, overflow=overflow or fmt.default_overflow, dim=dim)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal numbers over many binades, with a few specials where there is room for them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-12, 8, shape, generator=generator))
    if x.numel() > 100:
        flat = x.view(-1)
        flat[3], flat[17], flat[40], flat[41] = 0.0, -0.0, 1e-42, 3e38
    return x.to(dtype)


def quantized(engine, x: torch.Tensor, spec: CastSpec, random=None, dtype: torch.dtype | None = None) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype or torch.float32)
    engine.quantize(x, spec, random, out)
    return out


def words_of(key: RandomKey, rounding: Rounding, x: torch.Tensor) -> torch.Tensor:
    """Return the reference's random integers in the shape of x."""
    return torch.tensor([random_integer(rounding, key, i) for i in range(x.numel())], dtype=torch.int64).view(x.shape)


# Axes.


@pytest.mark.parametrize("name", SCALED_SAMPLE)
@pytest.mark.parametrize("dim", [-1, -2, -3])
def test_blocks_run_along_dim(engine, name, dim):
    fmt = get_format(name)
    x = normal(*{-1: (2, 3, 40), -2: (2, 40, 3), -3: (40, 2, 3)}[dim], seed=dim + 9)
    moved = x.movedim(dim, -1)
    expected = quantize_matrix(moved.reshape(-1, 40).double().tolist(), fmt)
    parts = as_parts(expected, fmt)
    parts = parts._replace(codes=parts.codes.view(moved.shape).movedim(-1, dim))
    values = (
        stored(torch.tensor(expected.values, dtype=torch.float64), torch.float32).view(moved.shape).movedim(-1, dim)
    )
    check_parts(f"{name} dim={dim}", engine.encode(x, spec_of(name, dim=dim), None), parts, x)
    check(f"{name} dim={dim}", quantized(engine, x, spec_of(name, dim=dim)), values, x)
    out = torch.empty_like(x)
    engine.decode(parts, spec_of(name, dim=dim), out)
    check(f"decode {name} dim={dim}", out, values)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "uint4_g32_zp"])
def test_words_follow_the_tensor_not_the_matrix(engine, name):
    """A word belongs to a place in the tensor's own order, whatever axis the blocks run along."""
    rounding = STOCHASTIC[0]
    x = normal(40, 3, seed=4)
    words = words_for(rounding, x.numel()).view(x.shape)
    expected = quantize_matrix(x.T.double().tolist(), get_format(name), rounding, words=words.T.tolist())
    values = stored(torch.tensor(expected.values, dtype=torch.float64), torch.float32).T
    check(name, quantized(engine, x, spec_of(name, rounding, dim=-2), words), values.contiguous(), x)


# Random words.


@pytest.mark.parametrize("rounding", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["e4m3", "e2m1", "int8", "nf4", "bf16"])
def test_a_key_stands_for_its_words(engine, name, rounding):
    x = normal(3, 67)
    words = words_of(KEY, rounding, x)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        spec, typed = spec_of(name, rounding), x.to(dtype)
        check(name, quantized(engine, typed, spec, KEY), quantized(engine, typed, spec, words), typed, words)
        check(name, engine.encode(typed, spec, KEY).codes, engine.encode(typed, spec, words).codes, typed, words)


@pytest.mark.parametrize("name", SCALED_SAMPLE)
@pytest.mark.parametrize("dim", [-1, -2])
def test_a_key_stands_for_its_words_in_blocks(engine, name, dim):
    rounding, x = LAYOUTS[0], normal(37, 67)
    spec, words = spec_of(name, rounding, dim=dim), words_of(KEY, rounding, x)
    check(name, quantized(engine, x, spec, KEY), quantized(engine, x, spec, words), x)
    check_parts(name, engine.encode(x, spec, KEY), engine.encode(x, spec, words), x)


def test_keys_differ(engine):
    x, spec = normal(1000), spec_of("e2m1", LAYOUTS[0])
    first = quantized(engine, x, spec, RandomKey(1, 0))
    assert not differing(first, quantized(engine, x, spec, RandomKey(1, 0)))
    for key in (RandomKey(2, 0), RandomKey(1, 1), RandomKey(1 + (1 << 32), 0), RandomKey(1, 1 << 32)):
        assert differing(first, quantized(engine, x, spec, key))


# Strides, shapes, dtypes.


@pytest.mark.parametrize("name", [*SAMPLE, *SCALED_SAMPLE])
def test_strides_do_not_matter(engine, name):
    base = normal(24, 35, 4, seed=2)
    for view in (base.transpose(0, 1), base[::2, ::3], base.permute(2, 0, 1), base[:1].expand(3, 35, 4), base[3]):
        for random in (None, KEY):
            spec = spec_of(name, LAYOUTS[0] if random else NEAREST, dim=-2)
            solid = view.contiguous()
            check(name, quantized(engine, view, spec, random), quantized(engine, solid, spec, random), solid)
            check_parts(name, engine.encode(view, spec, random), engine.encode(solid, spec, random), solid)


@pytest.mark.parametrize("name", [*SAMPLE, *SCALED_SAMPLE])
def test_output_of_any_strides_and_in_place(engine, name):
    x = normal(12, 40, seed=3)
    expected = quantized(engine, x, spec_of(name))
    turned = torch.empty(40, 12).T
    engine.quantize(x, spec_of(name), None, turned)
    check(name, turned.contiguous(), expected, x)
    same = x.clone()
    engine.quantize(same, spec_of(name), None, same)
    check(name, same, expected, x)


@pytest.mark.parametrize("name", [*SAMPLE, *SCALED_SAMPLE])
def test_empty_tensors_and_scalars(engine, name):
    for shape in ((0,), (3, 0), (0, 5)):
        x = torch.empty(shape)
        assert quantized(engine, x, spec_of(name)).shape == shape
        parts = engine.encode(x, spec_of(name), None)
        assert parts.codes.shape == shape
        engine.decode(parts, spec_of(name), torch.empty(shape))
    one = torch.tensor([1.3])
    scalar = quantized(engine, torch.tensor(1.3), spec_of(name))
    check(name, scalar.view(1), quantized(engine, one, spec_of(name)), one)
    codes = engine.encode(torch.tensor(1.3), spec_of(name), None).codes
    check(name, codes.view(1), engine.encode(one, spec_of(name), None).codes, one)


# Engine against engine.


# LogFMT tiles have torch ops alone: the kernels leave them to that engine.
LEFT_OUT = ("p3109", "lns16", "logfmt")
LARGE = [name for name in (*element_formats(16, 4), *scaled_formats()) if not any(part in name for part in LEFT_OUT)]


@pytest.mark.parametrize("name", LARGE)
def test_engines_agree_on_larger_tensors(name):
    """100 000 elements; dtype, rounding, random bits and dim take their turn along the formats."""
    cpu = importlib.import_module("fmtsim.cpu")
    turn = LARGE.index(name)
    x = normal(250, 400, seed=turn, dtype=list(DTYPES.values())[turn % 4])
    for spec, random in (
        (spec_of(name, dim=-1 - turn % 2), None),
        (spec_of(name, LAYOUTS[turn % 5], dim=-1 - turn // 2 % 2, overflow="ieee"), KEY),
    ):
        check(name, quantized(cpu, x, spec, random), quantized(torch_engine, x, spec, random), x)
        ours, theirs = cpu.encode(x, spec, random), torch_engine.encode(x, spec, random)
        check_parts(name, ours, theirs, x)
        outs = [torch.empty(x.shape, dtype=torch.float64) for _ in range(2)]
        cpu.decode(ours, spec, outs[0])
        torch_engine.decode(theirs, spec, outs[1])
        check(f"decode {name}", *outs)


# Errors planted on purpose.


def test_one_flipped_bit_is_noticed():
    for dtype in DTYPES.values():
        good = normal(200).to(dtype)
        assert differing(good, good.clone()) == []
        bad = good.clone()
        bits(bad).view(-1)[77] ^= 1
        assert differing(bad, good) == [77]
        with pytest.raises(AssertionError, match="1 differ"):
            check("planted", bad, good, good)


def test_zeros_and_nans_are_told_apart_by_their_bits():
    assert differing(torch.tensor([0.0, -0.0]), torch.tensor([0.0, 0.0])) == [1]
    strange = torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32)
    assert differing(strange, torch.full((2,), torch.nan)) == [0, 1]
    assert bits(stored(torch.full((64,), torch.nan, dtype=torch.float64), torch.bfloat16)).unique().tolist() == [0x7FC0]


def test_another_shape_dtype_or_a_missing_part_is_noticed():
    x = normal(4)
    for other in (x.view(2, 2), x.double()):
        with pytest.raises(AssertionError):
            check("planted", other, x)
    with pytest.raises(AssertionError, match="expected None"):
        check("planted", x, None)


@pytest.mark.parametrize("field", ["codes", "scales", "tensor_scale"])
def test_one_wrong_part_is_noticed(field):
    x = normal(4, 32)
    parts = torch_engine.encode(x, spec_of("nvfp4"), None)
    wrong = getattr(parts, field).clone()
    bits(wrong).view(-1)[-1] ^= 1
    with pytest.raises(AssertionError, match=field):
        check_parts("planted", parts._replace(**{field: wrong}), parts, x)


def test_a_shifted_word_is_noticed():
    """An engine that took its neighbour's word would differ from the reference."""
    rounding, x = LAYOUTS[0], normal(300)
    words = words_of(KEY, rounding, x)
    spec = spec_of("e2m1", rounding)
    assert differing(quantized(torch_engine, x, spec, words.roll(1)), quantized(torch_engine, x, spec, words))


def test_a_wrong_tie_rule_of_an_engine_is_noticed():
    x = torch.tensor([0.25, 0.75, 2.5, 5.0])
    wrong = quantized(torch_engine, x, spec_of("e2m1", Rounding(mode="nearest_away")))
    assert differing(wrong, quantized(torch_engine, x, spec_of("e2m1"))) == [0, 2, 3]
