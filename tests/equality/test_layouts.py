# SPDX-License-Identifier: Apache-2.0
"""What must not depend on how a tensor lies, with every engine: dims, strides, random keys, empty tensors, packing."""

import importlib
import itertools

import pytest
import torch

from fmtsim import torch_engine
from fmtsim.cuda.cast import casts as cuda_casts
from fmtsim.formats.registry import get_format
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.philox import random_integer
from fmtsim.scaling.oracle import quantize_matrix
from fmtsim.spec import engine as protocols
from fmtsim.spec.cast import CastSpec, RandomKey
from tests.equality.engines import CUDA_ENGINES, Engine, check_packed, with_engines
from tests.support.bits import assert_same_bits, bits, same_bits, stored
from tests.support.casts import KEY, as_parts, cast_spec, check_parts, element_formats, words_for
from tests.support.operands import DTYPES, wide_with_specials

NEAREST, STOCHASTIC = Rounding(), Rounding(mode="stochastic")
SAMPLE = ["e4m3", "e5m2fnuz", "e2m1", "fp16", "int8", "int4_half", "nf4", "lns8_g8", "e8m0"]
SCALED_SAMPLE = ["mxfp4", "mxfp8_e4m3_rceil", "nvfp4", "nvfp4_16x16", "e4m3_128x128", "e4m3_channel", "int8_tensor",
                 "uint4_g32_zp", "nf4_g64", "logfmt8"]  # fmt: skip
ON_CUDA = ["e4m3", "mxfp4", "nvfp4", "int8_tensor", "uint4_g32_zp"]
LAYOUTS = [
    STOCHASTIC,
    Rounding(mode="stochastic", random_bits=5, variant="b"),
    Rounding(mode="stochastic", random_bits=32, variant="b"),
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


# Dims.


@pytest.mark.parametrize("dim", [-1, -2, -3])
@with_engines(SCALED_SAMPLE)
def test_blocks_run_along_dim(engine, fmt, dim):
    x = wide_with_specials(*{-1: (2, 3, 40), -2: (2, 40, 3), -3: (40, 2, 3)}[dim], seed=dim + 9)
    moved, spec, what = x.movedim(dim, -1), cast_spec(fmt, dim=dim), f"{fmt} dim={dim}"
    expected = quantize_matrix(moved.reshape(-1, 40).double().tolist(), get_format(fmt))
    parts = as_parts(expected, get_format(fmt))
    parts = parts._replace(codes=parts.codes.view(moved.shape).movedim(-1, dim))
    values = stored(torch.tensor(expected.values, dtype=torch.float64), torch.float32)
    values = values.view(moved.shape).movedim(-1, dim)
    check_parts(what, engine.encode(x, spec, None), parts, x)
    assert_same_bits(quantized(engine, x, spec), values, x, what=what)
    out = torch.empty_like(x)
    engine.decode(parts, spec, out)
    assert_same_bits(out, values, what=f"decode {what}")


@with_engines(["mxfp4", "nvfp4", "uint4_g32_zp"])
def test_words_follow_the_tensor_not_the_matrix(engine, fmt):
    """A word belongs to a place in the tensor's own order, whatever axis the blocks run along."""
    rounding = Rounding(mode="stochastic", random_bits=3)
    x = wide_with_specials(40, 3, seed=4)
    words = words_for(rounding, x.numel()).view(x.shape)
    expected = quantize_matrix(x.T.double().tolist(), get_format(fmt), rounding, words=words.T.tolist())
    values = stored(torch.tensor(expected.values, dtype=torch.float64), torch.float32).T
    assert_same_bits(quantized(engine, x, cast_spec(fmt, rounding, dim=-2), words), values.contiguous(), x, what=fmt)


# Random words.


def check_key(engine: Engine, x: torch.Tensor, spec: CastSpec, key: RandomKey, words: torch.Tensor) -> None:
    """Compare what an engine draws of a key with the words of the reference."""
    assert_same_bits(quantized(engine, x, spec, key), quantized(engine, x, spec, words), x, what=str(spec))
    check_parts(str(spec), engine.encode(x, spec, key), engine.encode(x, spec, words), x)


@pytest.mark.parametrize("rounding", LAYOUTS, ids=str)
@with_engines(["e4m3", "e2m1", "int8", "nf4", "bf16", "e5m6"], on_cuda=["e4m3", "int8", "e5m6"])
def test_a_key_stands_for_its_words(engine, fmt, rounding):
    x = wide_with_specials(3, 167, seed=3)
    words = words_of(KEY, rounding, x)
    for dtype in (torch.float32,) if engine.name in CUDA_ENGINES else (torch.float32, torch.float64, torch.bfloat16):
        check_key(engine, x.to(dtype), cast_spec(fmt, rounding), KEY, words)


@pytest.mark.parametrize("dim", [-1, -2])
@with_engines(SCALED_SAMPLE)
def test_a_key_stands_for_its_words_in_blocks(engine, fmt, dim):
    x = wide_with_specials(37, 67)
    for rounding in LAYOUTS if fmt in ("mxfp4", "nvfp4", "uint4_g32_zp") else LAYOUTS[:1]:
        check_key(engine, x, cast_spec(fmt, rounding, dim=dim), KEY, words_of(KEY, rounding, x))


def test_seeds_and_offsets_have_64_bits(engine):
    x, spec = wide_with_specials(1000, seed=4), cast_spec("e2m1", STOCHASTIC)
    first = quantized(engine, x, spec, RandomKey(1, 0))
    assert_same_bits(first, quantized(engine, x, spec, RandomKey(1, 0)))
    for key in (RandomKey(2, 0), RandomKey(1, 1), RandomKey(1 + (1 << 32), 0), RandomKey(1, 1 << 32),
                RandomKey(-1, -1), RandomKey((1 << 64) - 1, 0), RandomKey(1 << 32, 1 << 63)):  # fmt: skip
        assert not same_bits(first, quantized(engine, x, spec, key))
        check_key(engine, x[:200], spec, key, words_of(key, STOCHASTIC, x[:200]))


# Strides, shapes, dtypes.


@with_engines([*SAMPLE, *SCALED_SAMPLE], on_cuda=ON_CUDA)
def test_strides_do_not_matter(engine, fmt):
    """Of the input, of the output, and of both where a tensor is cast in place."""
    base = wide_with_specials(24, 35, 4, seed=2)
    views = [base.transpose(0, 1), base[::2, ::3], base.permute(2, 0, 1), base[:1].expand(3, 35, 4), base[3]]
    for view, random in itertools.product(views, (None, KEY)):
        spec = cast_spec(fmt, STOCHASTIC if random else NEAREST, dim=-2)
        solid = view.contiguous()
        expected = quantized(engine, solid, spec, random)
        assert_same_bits(quantized(engine, view, spec, random), expected, solid, what=fmt)
        check_parts(fmt, engine.encode(view, spec, random), engine.encode(solid, spec, random), solid)
        for out in (torch.empty(*view.shape, 2)[..., 1], torch.empty_like(view.mT).mT):
            engine.quantize(view, spec, random, out)
            assert_same_bits(out.contiguous(), expected, solid, what=fmt)
        same = torch.empty_like(view.mT).mT.copy_(view)
        engine.quantize(same, spec, random, same)
        assert_same_bits(same.contiguous(), expected, solid, what=f"{fmt} in place")


@with_engines([*SAMPLE, *SCALED_SAMPLE], on_cuda=ON_CUDA)
def test_empty_tensors_and_scalars(engine, fmt):
    spec = cast_spec(fmt)
    for shape in ((0,), (3, 0), (0, 5)):
        x = torch.empty(shape)
        assert quantized(engine, x, spec).shape == shape
        parts = engine.encode(x, spec, None)
        assert parts.codes.shape == shape
        engine.decode(parts, spec, torch.empty(shape))
    one, scalar = torch.tensor([1.3]), torch.tensor(1.3)
    assert_same_bits(quantized(engine, scalar, spec).view(1), quantized(engine, one, spec), one, what=fmt)
    codes = engine.encode(scalar, spec, None).codes
    assert_same_bits(codes.view(1), engine.encode(one, spec, None).codes, one, what=fmt)


LARGE = [name for name in element_formats(16, 4) if not any(part in name for part in ("p3109", "lns16"))]


@pytest.mark.parametrize("name", LARGE)
def test_the_cpu_agrees_with_torch_operations_on_larger_tensors(name):
    """Dtype, rounding and random bits take their turn along the formats."""
    turn = LARGE.index(name)
    x = wide_with_specials(250, 400, seed=turn, dtype=list(DTYPES.values())[turn % 4])
    for spec, random in ((cast_spec(name), None), (cast_spec(name, LAYOUTS[turn % 6], overflow="ieee"), KEY)):
        ours, theirs = Engine("cpu"), Engine("torch")
        assert_same_bits(quantized(ours, x, spec, random), quantized(theirs, x, spec, random), x, what=name)
        parts = ours.encode(x, spec, random)
        check_parts(name, parts, theirs.encode(x, spec, random), x)
        out, expected = (torch.empty(x.shape, dtype=torch.float64) for _ in range(2))
        ours.decode(parts, spec, out)
        theirs.decode(parts, spec, expected)
        assert_same_bits(out, expected, what=f"decode {name}")


# Packed codes of the CUDA kernels: the bytes of encoded tensors.

CUDA = pytest.mark.parametrize("engine", CUDA_ENGINES, indirect=True)
WIDTHS = ["e2m1", "e2m3", "int5", "fp16", "nf4"]
MORE_WIDTHS = ["e4m3", "int13", "tf32", "fp32", "int7_half", "uint1"]


@with_engines([*WIDTHS, *MORE_WIDTHS], on_cuda=WIDTHS, engines=CUDA_ENGINES)
def test_packed_codes_are_those_of_encoded_tensors(engine, fmt):
    for shape, random in itertools.product(((3, 67), (1,), (5, 64), (), (2, 3, 70), (4, 0)), (None, KEY)):
        for dim in (-1, -2) if len(shape) > 1 else (-1,):
            x = wide_with_specials(*shape, seed=5)
            spec = cast_spec(fmt, STOCHASTIC if random else NEAREST, dim=dim)
            if cuda_casts.supports("encode_packed", spec, engine.moved(x)):
                check_packed(engine, x, spec, random)
            else:
                assert random is not None and dim != -1, "only random words along another axis are left to others"


@CUDA
@pytest.mark.parametrize(("fmt", "dtype"), [
    *itertools.product(("e2m1", "e2m3"), (torch.float32, torch.bfloat16)), ("fp16", torch.bfloat16),
    *(pytest.param(*case, marks=pytest.mark.slow)
      for case in itertools.product(("e5m6", "int4"), (torch.float32, torch.bfloat16))),
])  # fmt: skip
def test_packed_codes_of_whole_tiles(engine, fmt, dtype):
    """More elements than a warp takes, NaN in a few of its runs."""
    x = wide_with_specials(5000, seed=8, dtype=dtype)
    for part, random in itertools.product((x[:2048], x[2048:].clone()), (None, KEY)):
        check_packed(engine, part, cast_spec(fmt, STOCHASTIC if random else NEAREST), random)


# Errors planted on purpose, and the protocol.


@pytest.mark.parametrize("field", ["codes", "scales", "tensor_scale"])
def test_one_wrong_part_is_noticed(field):
    x = wide_with_specials(4, 32)
    parts = torch_engine.encode(x, cast_spec("nvfp4"), None)
    wrong = getattr(parts, field).clone()
    bits(wrong).view(-1)[-1] ^= 1
    with pytest.raises(AssertionError, match=field):
        check_parts("planted", parts._replace(**{field: wrong}), parts, x)


def members(protocol):
    """Return the names of a protocol's methods and attributes, inherited ones too."""
    classes = [vars(cls) for cls in protocol.__mro__ if cls.__module__ == protocols.__name__]
    names = {name for members in classes for name in (*members, *members.get("__annotations__", ()))}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize(
    ("name", "protocol"),
    [("torch_engine", protocols.TorchEngine), ("cpu", protocols.CPUEngine), ("cuda", protocols.FusedEngine)],
)
def test_an_engine_exports_its_protocol(name, protocol):
    module = importlib.import_module(f"fmtsim.{name}")
    assert set(module.__all__) == members(protocol)
    assert all(hasattr(module, exported) for exported in module.__all__)
