# SPDX-License-Identifier: Apache-2.0
"""Kernels of block formats that are specialised by macros, blocks of any size and packed codes: the CPU engine's bits.

Every format and rounding is compared with the oracle in ``tests/equality``.
"""

import dataclasses

import pytest
import torch

import fmtsim
from fmtsim import cpu
from fmtsim.cuda.cast import any_format, block_casts
from fmtsim.cuda.cast.scale_rules import CODES, PACKED, draws_words, fast_macros, output_of
from fmtsim.formats.block import scaled, with_block
from fmtsim.formats.representable import result_dtype
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey
from tests.equality.engines import Engine, check_packed
from tests.support.bits import assert_same_bits
from tests.support.casts import cast_spec, check_parts, slow_but
from tests.support.operands import numbers

KEY = RandomKey(0x1234567890ABCDEF, 5)
SLOW = pytest.mark.slow


def check(x, spec, device, random=None, out_dtype=None):
    """Hold quantize, encode and decode of the device to the CPU engine's bits."""
    dtype = out_dtype or result_dtype(spec.format, x.dtype)
    given = random.to(device) if isinstance(random, torch.Tensor) else random
    wanted, found = torch.empty(x.shape, dtype=dtype), torch.empty(x.shape, dtype=dtype, device=device)
    cpu.quantize(x, spec, random, wanted)
    block_casts.quantize_blocks(x.to(device), spec, given, found)
    assert_same_bits(found, wanted, what=f"values of {spec.format.name} from {x.dtype}")
    coded = block_casts.encode_blocks(x.to(device), spec, given)
    check_parts(f"{spec.format.name} from {x.dtype}", coded, cpu.encode(x, spec, random), x)
    decoded = torch.empty(x.shape, dtype=dtype, device=device)
    any_format.decode(coded, spec, decoded)
    assert_same_bits(decoded, wanted, what=f"decoded {spec.format.name}")


def is_fast(x, spec, random=None):
    output = output_of(result_dtype(spec.format, x.dtype))
    return output is not None and draws_words(spec, random) and fast_macros(spec, x.dtype, output) is not None


# Runs and columns: the kernels that are specialised by macros.


EVEN, RANDOM, F32, B16, F16 = "nearest_even", "stochastic", torch.float32, torch.bfloat16, torch.float16
FAST = slow_but(
    4, ("mxfp4", B16, -1, EVEN), ("mxfp8_e4m3", F32, -2, EVEN), ("nvfp4", F32, -1, EVEN),
    ("e4m3_channel", B16, -1, EVEN), ("mxfp4", B16, -1, RANDOM), ("mxfp4", B16, -2, RANDOM),
    ("mxfp4", F32, -1, EVEN), ("mxfp8_e5m2", F16, -1, EVEN),
    ("mxfp8_e5m2", F16, -2, EVEN), ("mxfp8_e4m3_rceil", B16, -1, EVEN), ("mxfp6_e2m3", B16, -2, EVEN),
    ("mxfp6_e3m2", F32, -1, EVEN), ("mxint8", B16, -1, EVEN), ("mxint8", F32, -2, RANDOM), ("nvfp4", B16, -1, RANDOM),
    ("nvfp4", B16, -2, EVEN), ("e4m3_1x128", B16, -1, EVEN), ("e4m3_1x128", F32, -2, EVEN),
    ("e4m3_1x128_pow2", B16, -2, EVEN), ("int4_g32", F32, -1, EVEN), ("e4m3_tensor", F32, -2, EVEN),
    ("e5m2_tensor", F16, -1, RANDOM), ("int8_tensor", B16, -1, EVEN), ("int8_channel", F32, -1, RANDOM),
)  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "dim", "mode"), FAST)
def test_fast_kernels_have_the_bits_of_the_cpu_engine(name, dtype, dim, mode, device):
    spec, random = cast_spec(name, mode, dim), KEY if mode == "stochastic" else None
    shape = (18, 384) if dim == -1 else (256, 70)
    x = numbers(shape, dtype)
    assert is_fast(x, spec, random)
    check(x, spec, device, random)
    check(numbers(shape, dtype, 1, special=False), spec, device, random)


@pytest.mark.parametrize(
    "name", slow_but(2, "mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "e4m3_1x128")
)
def test_every_bfloat16_below_a_largest_one(name, device):
    spec = cast_spec(name)
    run = spec.format.block[1]
    for power, top in ((0, 1.9921875), (0, 1.3671875), (-110, 1.0), (90, 1.6328125), (-124, 1.1171875)):
        largest = torch.tensor(top * 2.0**power).to(torch.bfloat16).view(torch.int16).item()
        below = torch.arange(largest + 1, dtype=torch.int32)
        both = torch.cat([below, below - 32768])
        both = torch.cat([both, both.new_zeros(-both.numel() % (32 * (run - 1)))]).view(-1, run - 1)
        x = torch.cat([torch.full((both.shape[0], 1), largest), both], 1).to(torch.int16).view(torch.bfloat16)
        check_packed(Engine("cuda", device), x, spec, None)
        if result_dtype(spec.format, x.dtype) == torch.bfloat16:
            check(x, spec, device)


@SLOW
@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("element", ["e2m1", "e5m2", "e4m3fnuz", "int4_full", "int8_f6"])
def test_power_of_two_rules(element, rule, device):
    fmt = scaled(fmtsim.get_format(element), (1, 64), rule)
    check(numbers((16, 256), torch.bfloat16), cast_spec(fmt), device)


@SLOW
@pytest.mark.parametrize("arithmetic", ["divide", "reciprocal", "encode"])
@pytest.mark.parametrize("scale", ["fp32", "e4m3", "bf16", "fp16", "ue5m3"])
def test_real_rules(arithmetic, scale, device):
    fmt = scaled(fmtsim.get_format("e2m3"), (1, 16))
    scaling = dataclasses.replace(fmt.scaling, arithmetic=arithmetic, scale=fmtsim.get_format(scale))
    fmt = dataclasses.replace(fmt, scaling=scaling)
    check(numbers((16, 64), torch.float32), cast_spec(fmt), device)
    check(numbers((64, 16), torch.bfloat16), cast_spec(fmt, dim=-2), device)


@SLOW
@pytest.mark.parametrize("run", [16, 32, 64, 96, 128, 256, 512, 1024, 2048])
def test_lengths_of_blocks(run, device):
    fmt = scaled(fmtsim.get_format("e4m3"), (1, run), "floor")
    for dtype in (torch.float32, torch.bfloat16):
        check(numbers((6, 2 * run), dtype), cast_spec(fmt), device)
    check(numbers((2 * run, 6), torch.bfloat16), cast_spec(fmt, dim=-2), device)


@pytest.mark.parametrize("block", [(1, 24), (3, 5), (None, 7), (4, None), (128, 128), (None, None), (1, 1)])
def test_blocks_of_any_size_and_short_ones(block, device):
    for rule in ("floor", "amax"):
        fmt = scaled(fmtsim.get_format("e3m2"), block, rule)
        for shape, dim in (((13, 37), -1), ((5, 6, 7), -2), ((5, 6, 7), -3), ((41,), -1), ((1, 3), -2)):
            check(numbers(shape, torch.float32), cast_spec(fmt, dim=dim), device)
    zero_points = with_block(fmtsim.get_format("uint4_g32_zp"), block)
    check(numbers((13, 37), torch.float32), cast_spec(zero_points), device)


@pytest.mark.parametrize(
    ("name", "dtype", "dim"),
    slow_but(
        2, ("mxfp4", B16, -1), ("int4_g32", F32, -2), ("mxfp4", F32, -1), ("nvfp4", B16, -1), ("nvfp4", F32, -2),
        ("mxfp6_e2m3", B16, -1), ("mxfp6_e3m2", F32, -1), ("mxfp8_e4m3", B16, -1), ("mxfp8_e4m3", B16, -2),
        ("e4m3_1x128", B16, -1), ("uint4_g32_zp", F32, -1), ("nf4_g64", F32, -2),
    ),
)  # fmt: skip
def test_packed_codes_are_those_of_encoded(name, dtype, dim, device):
    spec = cast_spec(name, dim=dim)
    x = numbers((128, 256) if dim == -1 else (256, 64), dtype)
    check_packed(Engine("cuda", device), x, spec, None)
    check_packed(Engine("cuda", device), numbers((3, 48) if dim == -1 else (96, 6), dtype, 1), spec, None)


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_but(
        2, ("mxfp4", F32), ("mxfp8_e4m3", B16), ("mxfp4", B16), ("mxfp6_e2m3", F32), ("mxfp6_e3m2", B16),
        ("nvfp4", F32), ("int4_g32", B16), ("mxint8", B16),
    ),
)  # fmt: skip
def test_packed_codes_of_stochastic_rounding(name, dtype, device):
    """Blocks of all sizes of numbers, next to where float32 ends on both sides, and a whole tile."""
    spec, key = cast_spec(name, "stochastic"), RandomKey(0x123456789ABCDEF, 0xFEDCBA9876543210)
    x = numbers((44, 256), torch.float32, 5, special=False)
    powers = torch.cat([torch.linspace(-149, -90, 30), torch.linspace(100, 127, 14)]).round().double()
    sized = (x.double() / x.abs().max() * 2.0 ** powers[:, None]).to(dtype)
    assert is_fast(x, spec, key)
    for part in (sized, numbers((4, 2048), dtype, 6), numbers((3, 96), dtype, 7)):
        check_packed(Engine("cuda", device), part, spec, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "nvfp4", "mxint8", "uint4_g32_zp"])
def test_every_code_under_strange_scales(name, dtype, device):
    spec = cast_spec(name)
    generator = torch.Generator().manual_seed(3)
    parts = cpu.encode(numbers((24, 384), torch.float32), spec, None)
    scales = parts.scales.clone()
    scales.view(-1)[::7] = float("nan")
    if not spec.format.zero_point:
        scales.view(-1)[3::11] = float("inf")
    codes = torch.randint(0, 1 << spec.format.bits, parts.codes.shape, generator=generator).to(torch.uint8)
    parts = parts._replace(codes=codes, scales=scales)
    wanted, found = torch.empty(codes.shape, dtype=dtype), torch.empty(codes.shape, dtype=dtype, device=device)
    cpu.decode(parts, spec, wanted)
    any_format.decode(parts._make(None if part is None else part.to(device) for part in parts), spec, found)
    assert_same_bits(found, wanted)


def test_what_is_covered(device):
    assert block_casts.covers_blocks(cast_spec("mxfp4"), torch.float32, torch.bfloat16)
    assert not block_casts.covers_blocks(cast_spec("mxfp4"), torch.int32)
    assert not block_casts.covers_blocks(cast_spec("e4m3"), torch.float32)
    wide = dataclasses.replace(fmtsim.get_format("uint8_tensor_zp"), element=fmtsim.get_format("uint16"))
    assert block_casts.covers_blocks(cast_spec(wide), torch.float32)
    assert fast_macros(cast_spec("mxfp4", overflow="ieee"), torch.float32, 0) is None
    assert fast_macros(cast_spec("nf4_g64"), torch.float32, CODES) is None
    assert fast_macros(cast_spec("int8_channel"), torch.float32, PACKED) is not None


@pytest.mark.parametrize("planted", ["scale", "element", "block"])
def test_planted_errors_are_caught(planted, emulated, monkeypatch):
    spec = cast_spec("mxfp4")
    x = numbers((4, 64), torch.bfloat16, special=False)
    wrong = {
        "scale": dataclasses.replace(spec, format=with_block(spec.format, None, "ceil")),
        "element": dataclasses.replace(spec, rounding=Rounding(mode="nearest_away")),
        "block": dataclasses.replace(spec, format=with_block(spec.format, (1, 64))),
    }[planted]
    real = block_casts.quantize_blocks
    monkeypatch.setattr(block_casts, "quantize_blocks", lambda x, _, random, out: real(x, wrong, random, out))
    x[0, 0] = 1.25 * x[0, :32].abs().max().log2().floor().exp2() / 4  # a tie under every scale
    with pytest.raises(AssertionError, match="values of mxfp4"):
        check(x, spec, torch.device("cpu"))


@pytest.mark.parametrize(("mode", "dtype"), [(RANDOM, F32), (EVEN, B16)])
def test_planted_errors_in_packed_codes_are_caught(mode, dtype, emulated, monkeypatch):
    """Another key, or another rule of scales."""
    spec, x, random = cast_spec("mxfp4", mode), numbers((4, 64), dtype, special=False), KEY if mode == RANDOM else None
    check_packed(Engine("cuda", torch.device("cpu")), x, spec, random)
    real, wrong = block_casts.encode_blocks, spec
    if mode == EVEN:
        wrong = dataclasses.replace(spec, format=with_block(spec.format, None, "ceil"))
    key = RandomKey(8) if mode == RANDOM else None
    monkeypatch.setattr(block_casts, "encode_blocks", lambda x, spec, _, packed: real(x, wrong, key, packed))
    with pytest.raises(AssertionError, match="codes of mxfp4, packed"):
        check_packed(Engine("cuda", torch.device("cpu")), x, spec, random)
