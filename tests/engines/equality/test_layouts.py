# SPDX-License-Identifier: Apache-2.0
"""What must not depend on how a tensor lies: dims, strides, random keys, empty tensors, engines; the protocol."""

import importlib

import pytest
import torch

import fmtsim.engines.torch_engine as torch_engine
from fmtsim.formats.registry import get_format
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.philox import random_integer
from fmtsim.scaling.oracle import quantize_matrix
from fmtsim.spec import engine
from fmtsim.spec.cast import CastSpec, RandomKey
from tests.support.bits import assert_same_bits, bits, same_bits, stored
from tests.support.casts import STOCHASTIC, as_parts, cast_spec, check_parts, element_formats, scaled_formats, words_for
from tests.support.operands import DTYPES, wide_with_specials

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
    x = wide_with_specials(*{-1: (2, 3, 40), -2: (2, 40, 3), -3: (40, 2, 3)}[dim], seed=dim + 9)
    moved = x.movedim(dim, -1)
    expected = quantize_matrix(moved.reshape(-1, 40).double().tolist(), fmt)
    parts = as_parts(expected, fmt)
    parts = parts._replace(codes=parts.codes.view(moved.shape).movedim(-1, dim))
    values = (
        stored(torch.tensor(expected.values, dtype=torch.float64), torch.float32).view(moved.shape).movedim(-1, dim)
    )
    check_parts(f"{name} dim={dim}", engine.encode(x, cast_spec(name, dim=dim), None), parts, x)
    assert_same_bits(quantized(engine, x, cast_spec(name, dim=dim)), values, x, what=f"{name} dim={dim}")
    out = torch.empty_like(x)
    engine.decode(parts, cast_spec(name, dim=dim), out)
    assert_same_bits(out, values, what=f"decode {name} dim={dim}")


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "uint4_g32_zp"])
def test_words_follow_the_tensor_not_the_matrix(engine, name):
    """A word belongs to a place in the tensor's own order, whatever axis the blocks run along."""
    rounding = STOCHASTIC[0]
    x = wide_with_specials(40, 3, seed=4)
    words = words_for(rounding, x.numel()).view(x.shape)
    expected = quantize_matrix(x.T.double().tolist(), get_format(name), rounding, words=words.T.tolist())
    values = stored(torch.tensor(expected.values, dtype=torch.float64), torch.float32).T
    assert_same_bits(quantized(engine, x, cast_spec(name, rounding, dim=-2), words), values.contiguous(), x, what=name)


# Random words.


@pytest.mark.parametrize("rounding", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["e4m3", "e2m1", "int8", "nf4", "bf16"])
def test_a_key_stands_for_its_words(engine, name, rounding):
    x = wide_with_specials(3, 67)
    words = words_of(KEY, rounding, x)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        spec, typed = cast_spec(name, rounding), x.to(dtype)
        assert_same_bits(
            quantized(engine, typed, spec, KEY), quantized(engine, typed, spec, words), typed, words, what=name
        )
        assert_same_bits(
            engine.encode(typed, spec, KEY).codes, engine.encode(typed, spec, words).codes, typed, words, what=name
        )


@pytest.mark.parametrize("name", SCALED_SAMPLE)
@pytest.mark.parametrize("dim", [-1, -2])
def test_a_key_stands_for_its_words_in_blocks(engine, name, dim):
    rounding, x = LAYOUTS[0], wide_with_specials(37, 67)
    spec, words = cast_spec(name, rounding, dim=dim), words_of(KEY, rounding, x)
    assert_same_bits(quantized(engine, x, spec, KEY), quantized(engine, x, spec, words), x, what=name)
    check_parts(name, engine.encode(x, spec, KEY), engine.encode(x, spec, words), x)


def test_keys_differ(engine):
    x, spec = wide_with_specials(1000), cast_spec("e2m1", LAYOUTS[0])
    first = quantized(engine, x, spec, RandomKey(1, 0))
    assert_same_bits(first, quantized(engine, x, spec, RandomKey(1, 0)))
    for key in (RandomKey(2, 0), RandomKey(1, 1), RandomKey(1 + (1 << 32), 0), RandomKey(1, 1 << 32)):
        assert not same_bits(first, quantized(engine, x, spec, key))


# Strides, shapes, dtypes.


@pytest.mark.parametrize("name", [*SAMPLE, *SCALED_SAMPLE])
def test_strides_do_not_matter(engine, name):
    base = wide_with_specials(24, 35, 4, seed=2)
    for view in (base.transpose(0, 1), base[::2, ::3], base.permute(2, 0, 1), base[:1].expand(3, 35, 4), base[3]):
        for random in (None, KEY):
            spec = cast_spec(name, LAYOUTS[0] if random else NEAREST, dim=-2)
            solid = view.contiguous()
            assert_same_bits(
                quantized(engine, view, spec, random), quantized(engine, solid, spec, random), solid, what=name
            )
            check_parts(name, engine.encode(view, spec, random), engine.encode(solid, spec, random), solid)


@pytest.mark.parametrize("name", [*SAMPLE, *SCALED_SAMPLE])
def test_output_of_any_strides_and_in_place(engine, name):
    x = wide_with_specials(12, 40, seed=3)
    expected = quantized(engine, x, cast_spec(name))
    turned = torch.empty(40, 12).T
    engine.quantize(x, cast_spec(name), None, turned)
    assert_same_bits(turned.contiguous(), expected, x, what=name)
    same = x.clone()
    engine.quantize(same, cast_spec(name), None, same)
    assert_same_bits(same, expected, x, what=name)


@pytest.mark.parametrize("name", [*SAMPLE, *SCALED_SAMPLE])
def test_empty_tensors_and_scalars(engine, name):
    for shape in ((0,), (3, 0), (0, 5)):
        x = torch.empty(shape)
        assert quantized(engine, x, cast_spec(name)).shape == shape
        parts = engine.encode(x, cast_spec(name), None)
        assert parts.codes.shape == shape
        engine.decode(parts, cast_spec(name), torch.empty(shape))
    one = torch.tensor([1.3])
    scalar = quantized(engine, torch.tensor(1.3), cast_spec(name))
    assert_same_bits(scalar.view(1), quantized(engine, one, cast_spec(name)), one, what=name)
    codes = engine.encode(torch.tensor(1.3), cast_spec(name), None).codes
    assert_same_bits(codes.view(1), engine.encode(one, cast_spec(name), None).codes, one, what=name)


# LogFMT tiles have torch ops alone: the kernels leave them to that engine.
LEFT_OUT = ("p3109", "lns16", "logfmt")
LARGE = [name for name in (*element_formats(16, 4), *scaled_formats()) if not any(part in name for part in LEFT_OUT)]


@pytest.mark.parametrize("name", LARGE)
def test_engines_agree_on_larger_tensors(name):
    """100 000 elements; dtype, rounding, random bits and dim take their turn along the formats."""
    cpu = importlib.import_module("fmtsim.engines.cpu")
    turn = LARGE.index(name)
    x = wide_with_specials(250, 400, seed=turn, dtype=list(DTYPES.values())[turn % 4])
    for spec, random in (
        (cast_spec(name, dim=-1 - turn % 2), None),
        (cast_spec(name, LAYOUTS[turn % 5], dim=-1 - turn // 2 % 2, overflow="ieee"), KEY),
    ):
        assert_same_bits(quantized(cpu, x, spec, random), quantized(torch_engine, x, spec, random), x, what=name)
        ours, theirs = cpu.encode(x, spec, random), torch_engine.encode(x, spec, random)
        check_parts(name, ours, theirs, x)
        outs = [torch.empty(x.shape, dtype=torch.float64) for _ in range(2)]
        cpu.decode(ours, spec, outs[0])
        torch_engine.decode(theirs, spec, outs[1])
        assert_same_bits(*outs, what=f"decode {name}")


# Errors planted on purpose.


@pytest.mark.parametrize("field", ["codes", "scales", "tensor_scale"])
def test_one_wrong_part_is_noticed(field):
    x = wide_with_specials(4, 32)
    parts = torch_engine.encode(x, cast_spec("nvfp4"), None)
    wrong = getattr(parts, field).clone()
    bits(wrong).view(-1)[-1] ^= 1
    with pytest.raises(AssertionError, match=field):
        check_parts("planted", parts._replace(**{field: wrong}), parts, x)


def names(protocol):
    """Names of a protocol's methods and attributes, inherited ones too."""
    own = [vars(cls) for cls in protocol.__mro__ if cls.__module__ == engine.__name__]
    found = {name for members in own for name in (*members, *members.get("__annotations__", ()))}
    return {name for name in found if not name.startswith("_")}


@pytest.mark.parametrize(
    ("name", "protocol"),
    [("torch_engine", engine.TorchEngine), ("cpu", engine.CPUEngine), ("cuda", engine.FusedEngine)],
)
def test_an_engine_exports_its_protocol(name, protocol):
    module = importlib.import_module(f"fmtsim.engines.{name}")
    assert set(module.__all__) == names(protocol)
    assert all(hasattr(module, exported) for exported in module.__all__)
