# SPDX-License-Identifier: Apache-2.0
"""Casts of block formats by every engine: the oracle's bits for small matrices, and each other's for large ones."""

import itertools
from functools import cache

import pytest
import torch

from fmtsim import cpu, torch_engine
from fmtsim.cpu.runtime import pool
from fmtsim.formats.block import BlockFormat, LogTileFormat, ScaledFormat, scaled, with_block
from fmtsim.formats.element import CodebookFormat, FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import block_scaling
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.oracle import Quantized, quantize_matrix
from fmtsim.spec.cast import CastSpec, EncodedParts
from tests.equality.engines import CUDA_ENGINES, Engine, check_with_torch, with_engines
from tests.support.bits import assert_same_bits, stored
from tests.support.casts import (
    KEY,
    OUT_FORMATS,
    ROUNDINGS,
    as_parts,
    cast_spec,
    check_parts,
    matrices,
    scaled_formats,
    words_for,
)
from tests.support.operands import DTYPES, normal

OVERFLOWS = ("saturate", "ieee")
NEAREST, STOCHASTIC = Rounding(), Rounding(mode="stochastic")
# One of each kind, for kernels on the host, which are slow: elements, scales, shapes of blocks, offsets.
SAMPLE = ["mxfp4", "mxfp8_e4m3_rceil", "mxfp6_e2m3", "mxint8", "nvfp4", "nvfp4_16x16", "e4m3_1x128", "e4m3_128x128",
          "e5m2_tensor", "int4_g128", "int8_channel", "uint4_g32_zp", "uint8_tensor_zp", "nf4_g64", "lns8_channel",
          "if4_mse", "nvfp4_four_six_mae", "nvfp4_double_scale", "msfp12", "logfmt8"]  # fmt: skip


@pytest.fixture
def own_threads():
    """Give the CPU engine its own number of threads back."""
    yield
    pool.set_num_threads(None)


def small_blocks(name: str) -> ScaledFormat:
    """Give a format blocks that the small matrices fill more than once; whole extents stay whole."""
    fmt = get_format(name)
    outer = fmt.block[0] if fmt.block[0] in (None, 1) else 3
    return with_block(fmt, (outer, fmt.block[1] and 8))


@cache
def scaled_table(
    matrix: str, fmt: ScaledFormat, rounding: Rounding, overflow: str, dtype_name: str, out_name: str
) -> Quantized:
    """Return the oracle's result for one of the named matrices."""
    rows = torch.tensor(matrices()[matrix], dtype=torch.float64).to(DTYPES[dtype_name]).double()
    words = words_for(rounding, rows.numel())
    drawn = None if words is None else words.view(rows.shape).tolist()
    out_format = get_format(OUT_FORMATS[out_name])
    return quantize_matrix(rows.tolist(), fmt, rounding, overflow, dtype_name, out_format, drawn)


def check_scaled(
    engine: Engine, matrix: str, fmt: ScaledFormat, rounding: Rounding, overflow: str, dtype_name: str, out_name: str
) -> None:
    """Compare quantize, encode and decode of one matrix with the oracle."""
    x = torch.tensor(matrices()[matrix], dtype=torch.float64).to(DTYPES[dtype_name])
    words = words_for(rounding, x.numel())
    words = None if words is None else words.view(x.shape)
    result = scaled_table(matrix, fmt, rounding, overflow, dtype_name, out_name)
    parts = as_parts(result, fmt)
    values = stored(torch.tensor(result.values, dtype=torch.float64), DTYPES[out_name])
    spec = CastSpec(format=fmt, rounding=rounding, overflow=overflow)
    what = f"{fmt.name} {matrix} {rounding} {overflow} {dtype_name} to {out_name}"
    check_parts(f"encode {what}", engine.encode(x, spec, words), parts, x)
    out = torch.empty(x.shape, dtype=DTYPES[out_name])
    engine.quantize(x, spec, words, out)
    assert_same_bits(out, values, x, what=f"quantize {what}")
    out = torch.empty(x.shape, dtype=DTYPES[out_name])
    engine.decode(parts, spec, out)
    assert_same_bits(out, values, parts.codes, what=f"decode {what}")


def scaled_cases(number: int, others: int) -> list[tuple[str, Rounding, str, str, str]]:
    """Return matrix, rounding, overflow, dtype and output dtype, each taking its turn along the formats.

    Every matrix is rounded to nearest even and, ``others`` times, in another way.
    """
    names, count = list(DTYPES), len(ROUNDINGS) - 1
    cases = []
    for i, matrix in enumerate(matrices()):
        turn = i + number
        dtype = names[turn // 2 % 4] if matrix != "deep" else "float64"
        cases.append((matrix, NEAREST, OVERFLOWS[turn % 2], dtype, names[turn // 3 % 4]))
        more = [(matrix, ROUNDINGS[1 + turn % count], OVERFLOWS[turn % 2], "float32", "float32")]
        other = ROUNDINGS[1 + (turn + 5) % count]
        more.append((matrix, other, OVERFLOWS[1 - turn % 2], names[1 + turn % 3], "float64"))
        cases += more if others == 2 else [more[(i + number // 2) % 2]]
    return cases


@pytest.mark.parametrize("others", [1, pytest.param(2, marks=pytest.mark.slow)])
@with_engines(scaled_formats())
def test_scaled_formats_equal_the_oracle(engine, fmt, others):
    for case in scaled_cases(scaled_formats().index(fmt), others):
        check_scaled(engine, case[0], small_blocks(fmt), *case[1:])


@pytest.mark.exhaustive
@with_engines(scaled_formats())
def test_scaled_formats_equal_the_oracle_in_every_way(engine, fmt):
    for matrix, rounding, overflow in itertools.product(matrices(), ROUNDINGS, OVERFLOWS):
        for dtype, out in itertools.product(DTYPES, DTYPES):
            check_scaled(engine, matrix, small_blocks(fmt), rounding, overflow, dtype, out)


BEYOND_FLOAT32 = [
    get_format("e8m7_finite"),
    FloatFormat(name="e4m3_bias", exponent_bits=4, mantissa_bits=3, bias=-115, nan="top", infinities=False),
    CodebookFormat(name="book", values=(-1e39, -0.1, 0.0, 0.1, 1 / 3, 1e39)),
]


@pytest.mark.parametrize("element", BEYOND_FLOAT32, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("rule", ["floor", "rceil", "divide", "reciprocal", "encode"])
def test_elements_beyond_float32_in_blocks(engine, element, rule):
    how = {"arithmetic": rule} if rule in ("divide", "reciprocal", "encode") else {"scale_rule": rule}
    fmt = BlockFormat(name=f"{rule}_{element.name}", element=element, scaling=block_scaling((2, 8), **how))
    for matrix, rounding in itertools.product(("huge", "with_inf"), (NEAREST, STOCHASTIC)):
        for overflow, out in itertools.product(OVERFLOWS, ("float32", "float64")):
            check_scaled(engine, matrix, fmt, rounding, overflow, "float32", out)


VARIANTS = [
    *(BlockFormat(name=f"{rule}_{element}", element=get_format(element), scaling=block_scaling((2, 8), rule))
      for element in ("e4m3", "e5m2", "e2m1", "e3m2", "int8_f6", "int4")
      for rule in ("floor", "ceil", "even", "rceil")),
    *(BlockFormat(name=f"{arithmetic}_{element}_{scale}", element=get_format(element),
                  scaling=block_scaling((2, 8), scale=get_format(scale), arithmetic=arithmetic))
      for element in ("e4m3", "e2m1", "int8", "nf4") for scale in ("fp32", "bf16", "fp16", "e4m3", "e5m2", "ue4m3")
      for arithmetic in ("divide", "reciprocal", "encode")),
]  # fmt: skip


@with_engines(VARIANTS)
def test_scale_rules_equal_the_oracle(engine, fmt):
    """Every scale rule and arithmetic, with scale formats that underflow and saturate; half of the matrices in turn."""
    number = VARIANTS.index(fmt)
    for i, matrix in list(enumerate(matrices()))[number % 2 :: 2]:
        dtype = "float64" if matrix == "deep" or (i + number) % 3 == 0 else "float32"
        check_scaled(engine, matrix, fmt, NEAREST, OVERFLOWS[(i + number) % 2], dtype, "float32")


@with_engines(scaled_formats(), on_cuda=SAMPLE)
def test_catalogued_blocks_equal_the_oracle(engine, fmt):
    """Blocks of the size in the catalogue, with short last ones along both axes."""
    fmt = get_format(fmt)
    columns = (fmt.block[1] or 8) * 5 // 4
    x = normal(min(fmt.block[0] or 3, 16) + 1, columns, seed=5)
    expected = quantize_matrix(x.double().tolist(), fmt)
    spec = cast_spec(fmt)
    check_parts(fmt.name, engine.encode(x, spec, None), as_parts(expected, fmt), x)
    out = torch.empty_like(x)
    engine.quantize(x, spec, None, out)
    assert_same_bits(out, stored(torch.tensor(expected.values, dtype=torch.float64), torch.float32), x, what=fmt.name)


# Large matrices: kernels against torch operations.


def blocks_of_numbers(rows: int, columns: int) -> torch.Tensor:
    """Return blocks of every magnitude, with ties, zeros and, in some blocks, NaN and Inf."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-6, 7, (rows, -(-columns // 8)), generator=generator).repeat_interleave(8, 1)[:, :columns]
    x[0] = (x[0] * 4).round() / 8
    x[1] = x[1].bfloat16().float()
    x[2, : columns // 2] *= 2.0 ** torch.randint(-140, 115, (columns // 2,), generator=generator)
    x[3, : columns // 2] = torch.where(x[3, : columns // 2] < 0, 0.0, -0.0)
    for place, value in ((5, torch.nan), (columns // 2, torch.inf), (columns - 1, -torch.inf)):
        x[4, place] = value
    return x


def check_large(engine: Engine, x: torch.Tensor, spec: CastSpec, out_dtype: torch.dtype) -> None:
    """Compare parts, values and decoded values with those of torch operations."""
    random = KEY if spec.rounding.mode == "stochastic" else None
    for threads in (1, 2) if engine.name == "cpu" else (None,):
        pool.set_num_threads(threads)
        check_with_torch(engine, x, spec, random, out_dtype, in_place=True)
    parts = torch_engine.encode(x, spec, random)
    out, values = (torch.empty(x.shape, dtype=out_dtype) for _ in range(2))
    engine.decode(parts, spec, out)
    torch_engine.decode(parts, spec, values)
    assert_same_bits(out, values, what=f"decode {spec}")


LARGE_ROUNDINGS = [NEAREST, STOCHASTIC, Rounding(mode="stochastic", random_bits=13, layout="cvt_rs"),
                   Rounding(mode="up")]  # fmt: skip
MORE = [
    scaled(get_format(name), block, *rule)
    for name, block, *rule in (
        ("nf4", (1, 64)), ("bnb_dynamic8", (1, 256)), ("lns8_g8", (1, None)), ("e4m3", (2, 24)), ("e5m2", (None, None)),
        ("int8", (None, None)), ("e2m1", (3, 7), "rceil"), ("e3m2", (1, 48), "ceil"), ("e2m3", (1, None), "even"),
        ("fp16", (1, 128)),
    )
]  # fmt: skip
BLOCK_FORMATS = [name for name in scaled_formats() if isinstance(get_format(name), BlockFormat)]


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
@with_engines([*BLOCK_FORMATS, *MORE], on_cuda=SAMPLE, engines=("cpu", *CUDA_ENGINES))
def test_large_matrices_have_the_bits_of_torch_operations(engine, fmt, half, own_threads):
    """Every format along both dims, with dtypes in turn; matrices of few rows on the host, where kernels are slow.

    Each format has every second pair of rounding and overflow, and its neighbours in the list have the others.
    """
    index, fmt = [*BLOCK_FORMATS, *MORE].index(fmt), get_format(fmt)
    for number, (overflow, rounding) in enumerate(itertools.product(OVERFLOWS, LARGE_ROUNDINGS)):
        if (index + number + number // len(LARGE_ROUNDINGS)) % 2 != half:
            continue
        turn = number + len(fmt.name)
        if engine.name in CUDA_ENGINES:
            dtype = list(DTYPES.values())[turn % 4]
            x = blocks_of_numbers(9, 150).to(dtype)
            spec = cast_spec(fmt, rounding, -1 - turn % 2, overflow)
            check_large(engine, x, spec, torch.float32)
            continue
        spec = cast_spec(fmt, rounding, overflow=overflow)
        check_large(engine, blocks_of_numbers(7, 2304 + 13), spec, torch.float32)
        finite = blocks_of_numbers(5, 96).nan_to_num(0.0, 0.0, 0.0)  # one scale for a tensor, without NaN and Inf
        check_large(engine, finite.to(list(DTYPES.values())[turn % 4]), spec, torch.float64)
        for x in (torch.zeros(0, 32), torch.zeros(3, 0), torch.tensor(-1.5), torch.full((5,), -0.0)):
            check_large(engine, x, spec, torch.float32)
        check_large(engine, blocks_of_numbers(6, 130).t(), cast_spec(fmt, rounding, -2, overflow), torch.float32)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int8_channel"])
def test_threads_and_views_of_the_cpu(name, own_threads):
    x = blocks_of_numbers(40, 4128)
    views = ((x, -1), (x[::2, 1:], -1), (x.view(4, 10, 4128), -3), (x.bfloat16(), -1))
    for (view, dim), rounding in itertools.product(views, LARGE_ROUNDINGS):
        check_large(Engine("cpu"), view, cast_spec(name, rounding, dim, "saturate"), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mxint8", "mxfp8_e5m2", "nvfp4", "int8_channel", "e4m3_tensor"])
def test_values_are_rounded_once_more_to_16_bits(name, dtype):
    """Results in a dtype that does not hold them."""
    for mode, scale in itertools.product(("nearest_even", "stochastic"), (1.0, 1e-39, 1e-6, 3e4, 1e38)):
        x = torch.randn(64, 96, generator=torch.Generator().manual_seed(3)) * scale
        x[3, 5], x[40, 7], x[20, 9], x[5] = torch.inf, -0.0, torch.nan, 0
        spec = cast_spec(name, mode)
        assert cpu.supports("quantize", spec, x, x.to(dtype))
        check_large(Engine("cpu"), x, spec, dtype)


def test_products_that_float32_would_round_to_the_middle():
    """A product lies beside the middle of two bfloat16 numbers; float32 rounds it there, and then it goes to even."""
    codes = torch.arange(1, 128, dtype=torch.int8)
    middle = 1 + (2 * torch.arange(127, dtype=torch.float64) + 1) / 256
    parts, spec = EncodedParts(codes.view(-1, 1), (middle / codes).float().view(-1, 1)), cast_spec("int8_channel")
    once, expected = (torch.empty(127, 1, dtype=torch.bfloat16) for _ in range(2))
    wide = torch.empty(127, 1)
    cpu.decode(parts, spec, once)
    torch_engine.decode(parts, spec, expected)
    cpu.decode(parts, spec, wide)
    assert_same_bits(once, expected)
    assert not torch.equal(once, wide.bfloat16())


# LogFMT tiles.


def tiles_of_numbers(*shape: int) -> list[torch.Tensor]:
    """Return numbers of all sizes, special ones among them, and tiles of zeros, of one magnitude and of NaN."""
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator) * torch.exp(8 * torch.randn(shape, generator=generator))
    special = x.clone()
    for start, value in enumerate((0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan)):
        special.view(-1)[start :: 7 + 9 * start] = value
    near = 1 + 1e-6 * torch.rand(shape, generator=generator)
    alike = [torch.full(shape, value) for value in (0.0, 3.0, torch.nan, -1e-45)]
    return [x, special, x * 1e-42, near, *alike]


TILES = list(itertools.product(((1, 128), (3, 5), (None, None)), (3, 8, 11)))


@pytest.mark.parametrize(("block", "bits"), TILES)
def test_logarithmic_tiles_have_the_bits_of_torch_operations(block, bits, monkeypatch, own_threads):
    """Roundings take their turn: each meets every block and every width."""
    monkeypatch.setattr(pool, "_GRAIN", 64)
    row, column = divmod(TILES.index((block, bits)), 3)
    rounding = [NEAREST, STOCHASTIC, Rounding(mode="stochastic", random_bits=8)][(row + column) % 3]
    fmt = LogTileFormat(name="tile", bits=bits, block=block)
    for shape, dim in (((4, 150), -1), ((7,), -1), ((2, 3, 20), -2)):
        spec = CastSpec(format=fmt, rounding=rounding, overflow="saturate", dim=dim)
        for x, dtype in itertools.product(tiles_of_numbers(*shape), (torch.float32, torch.bfloat16)):
            assert cpu.supports("quantize", spec, x.to(dtype), x)
            check_large(Engine("cpu"), x.to(dtype), spec, torch.float16 if dtype == torch.float32 else torch.float64)


def test_a_process_that_flushes_subnormals():
    spec = CastSpec(format=LogTileFormat(name="tile", bits=8), rounding=NEAREST, overflow="saturate")
    x = torch.arange(1, 129).to(torch.int32).view(torch.float32)  # subnormal numbers
    expected, values = cpu.encode(x, spec, None), torch.empty(128)
    cpu.decode(expected, spec, values)
    assert torch.set_flush_denormal(True)
    try:
        flushed, flushed_values = cpu.encode(x, spec, None), torch.empty(128)
        cpu.decode(flushed, spec, flushed_values)
    finally:
        torch.set_flush_denormal(False)
    for one, other in zip((*flushed, flushed_values), (*expected, values), strict=True):
        assert_same_bits(one, other)
