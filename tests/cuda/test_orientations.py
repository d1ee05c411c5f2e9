"""Casts for training: both axes from one read, values without the tensor's scale, Hadamard transforms, last steps."""

import math

import pytest
import torch

import fmtsim
from fmtsim import cpu
from fmtsim.analysis.stats import OperandStats
from fmtsim.cuda import blocks, hadamard, orientations, outputs, statistics
from fmtsim.encoded import Encoded
from fmtsim.errors import ArgumentError, DtypeError
from fmtsim.formats.representable import result_dtype
from fmtsim.ops import RandomKey
from fmtsim.scaling.hadamard import hadamard as reference
from tests.cuda.test_blocks import INTEGERS, SLOW, numbers, same, spec_of

KEYS = (RandomKey(5, 1), RandomKey(6, 2))
NANS = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
SIGNS = 0xDEADBEEFCAFE0123456789ABCDEF1357


def along(spec, dim):
    return spec_of(spec.format, spec.rounding, dim, spec.overflow)


def quantised(x, spec, dim, random, dtype):
    out = torch.empty(x.shape, dtype=dtype)
    cpu.quantize(x, along(spec, dim), random, out)
    return out


@pytest.mark.parametrize(
    ("name", "dtype", "mode", "shape"),
    [
        ("mxfp4", torch.bfloat16, "nearest_even", (96, 128)),
        ("nf4_g64", torch.float32, "nearest_even", (20, 12)),
        pytest.param("nvfp4", torch.float32, "nearest_even", (48, 160), marks=SLOW),
        pytest.param("mxfp8_e4m3", torch.bfloat16, "stochastic", (64, 96), marks=SLOW),
        pytest.param("mxint8", torch.float16, "nearest_even", (64, 96), marks=SLOW),
        pytest.param("mxfp4", torch.bfloat16, "nearest_even", (30, 70), marks=SLOW),
    ],
)
def test_both_axes_have_the_bits_of_two_casts(name, dtype, mode, shape, device):
    spec, keys = spec_of(name, mode), KEYS if mode == "stochastic" else (None, None)
    x, result = numbers(shape, dtype), result_dtype(spec.format, dtype)
    rows, columns = (quantised(x, spec, dim, key, result) for dim, key in zip((-1, -2), keys, strict=True))
    for transposed in (False, True):
        both = orientations.quantize_both(x.to(device), spec, result, keys, transposed=transposed)
        assert same(both.rows, rows)
        assert same(both.columns, columns.t().contiguous() if transposed else columns)
        assert both.tensor_scale is None


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("mxfp4", True),
        pytest.param("mxfp4", False, marks=SLOW),
        pytest.param("nvfp4", True, marks=SLOW),
        pytest.param("mxfp8_e4m3", True, marks=SLOW),
        pytest.param("mxfp6_e2m3", True, marks=SLOW),
    ],
)
def test_codes_along_both_axes(name, packed, device):
    spec = spec_of(name)
    for dtype in (torch.bfloat16, torch.float32):
        x = numbers((64, 96), dtype)
        for dim, parts in zip((-1, -2), orientations.encode_both(x.to(device), spec, packed=packed), strict=True):
            wanted = cpu.encode(x, along(spec, dim), None)
            if packed:
                wanted = Encoded.from_parts(wanted, spec.format, x.shape, dim)
            for field in ("codes", "scales", "tensor_scale"):
                assert same(getattr(parts, field), getattr(wanted, field)), (field, dim)


@pytest.mark.parametrize("shape", [(32, 64), (10, 37)])
def test_values_without_the_scale_of_the_tensor(shape, device):
    spec = spec_of("nvfp4")
    assert orientations.holds_bare(spec)
    assert not orientations.holds_bare(spec_of("mxfp4"))
    for dtype in (torch.bfloat16, torch.float32):
        x = numbers(shape, dtype, special=False)
        values, scale = orientations.quantize_bare(x.to(device), spec, None)
        assert values.dtype == torch.bfloat16
        found = (values.double() * scale.double()).float()  # exact, then rounded once
        assert same(found, quantised(x, spec, -1, None, torch.float32))


@pytest.mark.parametrize("size", [16, pytest.param(32, marks=SLOW), pytest.param(64, marks=SLOW), 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=SLOW)])
def test_transforms_have_the_bits_of_their_definition(size, dtype, device):
    x = numbers((6, 384), dtype)
    turned = torch.randn(size, generator=torch.Generator().manual_seed(1))
    for signs in (None, SIGNS & ((1 << size) - 1), turned):
        on_device = signs.to(device) if isinstance(signs, torch.Tensor) else signs
        assert same(hadamard.hadamard(x.to(device), size, on_device), reference(x, size, signs))


@pytest.mark.parametrize(
    ("name", "dtype", "size", "mode"),
    [
        ("mxfp4", torch.bfloat16, 16, "nearest_even"),
        pytest.param("nvfp4", torch.bfloat16, 16, "nearest_even", marks=SLOW),
        pytest.param("nvfp4", torch.float32, 128, "stochastic", marks=SLOW),
        pytest.param("mxfp8_e4m3", torch.float32, 32, "nearest_even", marks=SLOW),
        pytest.param("int4_g128", torch.float16, 64, "nearest_even", marks=SLOW),
        ("nf4_g64", torch.float32, 16, "nearest_even"),
    ],
)
def test_transforms_fused_with_casts(name, dtype, size, mode, device):
    spec, key = spec_of(name, mode), KEYS[0] if mode == "stochastic" else None
    x, signs = numbers((8, 256), dtype), SIGNS & ((1 << size) - 1)
    y = reference(x, size, signs)
    wanted = quantised(y, spec, -1, key, torch.float32)
    found = torch.empty(x.shape, device=device)
    hadamard.quantize_hadamard(x.to(device), size, signs, spec, key, found)
    assert same(found, wanted)
    for packed in (False, True):
        parts = hadamard.encode_hadamard(x.to(device), size, signs, spec, key, packed)
        codes = cpu.encode(y, spec, key)
        codes = Encoded.from_parts(codes, spec.format, x.shape) if packed else codes
        for field in ("codes", "scales", "tensor_scale"):
            assert same(getattr(parts, field), getattr(codes, field)), (field, packed)


def test_the_definition_is_the_matrix():
    x = torch.randn(3, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float()
    for size in (16, 32, 64, 128):
        matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])
        exact = x.double().reshape(-1, size) @ matrix.double() / math.sqrt(size)
        assert torch.allclose(
            reference(x, size).double().reshape(-1, size), exact, atol=1e-5
        )  # float32 sums of N(0, 1)
        twice = reference(reference(x, size), size)
        assert torch.allclose(twice, x, atol=1e-5)


def test_errors_of_transforms():
    x = torch.zeros(4, 64)
    with pytest.raises(ArgumentError, match="size=24 does not divide"):
        reference(x, 24)
    with pytest.raises(ArgumentError, match="size=128 does not divide"):
        reference(x, 128)
    with pytest.raises(ArgumentError, match=r"signs have shape \(8,\)"):
        reference(x, 16, torch.ones(8))
    with pytest.raises(ArgumentError, match="is not a mask of 16 bits"):
        reference(x, 16, 1 << 16)
    with pytest.raises(DtypeError, match="torch.int32"):
        reference(x.int(), 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_last_steps_of_products(dtype, device):
    generator = torch.Generator().manual_seed(2)
    for columns in (16, 7):
        y = torch.randn(5, columns, generator=generator) * torch.exp2(torch.arange(5.0) * 9 - 20)[:, None]
        y[0, 0], y[1, 1], y[2, 2], y[3, 3] = math.nan, math.inf, 1e38, -0.0
        a, b, bias = torch.tensor(0.37), torch.tensor(-1.7), torch.randn(columns, generator=generator)
        for scales in ((a, b), (a, None), (None, b)):
            factor = a * b if None not in scales else next(s for s in scales if s is not None)
            for added in (None, bias):
                wanted = y * factor if added is None else y * factor + added
                found = outputs.scale_output(
                    y.to(device),
                    tuple(None if s is None else s.to(device) for s in scales),
                    None if added is None else added.to(device),
                    dtype,
                )
                bits = wanted.to(dtype).view(INTEGERS[dtype.itemsize])
                assert same(found.view(bits.dtype), bits.masked_fill(wanted.isnan(), NANS[dtype]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_of_rows_and_columns(dtype, device):
    """Columns first, then rows, then the bias; NaN becomes the canonical one."""
    generator = torch.Generator().manual_seed(3)
    for m, n in ((5, 16), (1, 4), (9, 1028)):
        y = torch.randn(m, n, generator=generator) * torch.exp2(torch.arange(float(m)) * 9 - 20)[:, None]
        y[0, 0], y[0, 1], y[0, 2], y[0, 3] = math.nan, math.inf, 1e38, -0.0
        bias = torch.randn(n, generator=generator)
        many = [torch.randn(size, 1, generator=generator) for size in (n, m)]
        ones = [torch.randn(1, 1, generator=generator) for _ in range(2)]
        for columns, rows, added in (
            (many[0], many[1], bias), (many[0], ones[1], None), (ones[0], None, bias), (None, many[1], None),
            (None, None, bias),
        ):  # fmt: skip
            wanted = y if columns is None else y * columns.mT
            wanted = wanted if rows is None else wanted * rows
            wanted = wanted if added is None else wanted + added
            assert outputs.covers(y.to(device), dtype)
            given = (None if t is None else t.to(device) for t in (columns, rows, added))
            found = outputs.finish_sums(y.to(device), *given, dtype)
            bits = wanted.to(dtype).view(INTEGERS[dtype.itemsize])
            assert same(found.view(bits.dtype), bits.masked_fill(wanted.isnan(), NANS[dtype]))


def test_planted_errors_are_caught(emulated, monkeypatch):
    real = blocks.quantize_blocks
    monkeypatch.setattr(orientations.blocks, "quantize_blocks", lambda x, s, r, out: real(x, along(s, -1), r, out))
    with pytest.raises(AssertionError):
        test_both_axes_have_the_bits_of_two_casts(
            "nf4_g64", torch.float32, "nearest_even", (64, 64), torch.device("cpu")
        )


@pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")
def test_a_linear_layer_multiplies_on_bfloat16_units():
    generator = torch.Generator("cuda").manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        x, w, g = (
            torch.randn(size, device="cuda", generator=generator).to(dtype) for size in ((96, 160), (64, 160), (96, 64))
        )
        for name in ("mxfp4", "nvfp4", "mxfp8", "e4m3"):
            config = fmtsim.linear_config(x=name, w=name, g=name)
            leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
            y = fmtsim.EmulatedGEMM.apply(*leaves, None, config)
            dx, dw = torch.autograd.grad(y, leaves, g)
            q = {
                (t, dim): fmtsim.quantize(t, name, dim=dim, pad=True, out_dtype=torch.float32).double()
                for t in (x, w, g)
                for dim in (-1, 0)
            }
            for found, wanted in (
                (y, q[x, -1] @ q[w, -1].t()),
                (dx, q[g, -1] @ q[w, 0]),
                (dw, q[g, 0].t() @ q[x, 0]),
            ):
                # float32 sums of the unit, one rounding to the dtype
                scale = wanted.abs().max()
                assert found.dtype == dtype
                assert (found.double() - wanted).abs().max() <= scale * (
                    2.0**-8 if dtype == torch.bfloat16 else 2.0**-18
                )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("mxfp4", torch.bfloat16),
        pytest.param("nvfp4", torch.float32, marks=SLOW),
        pytest.param("mxint8", torch.float32, marks=SLOW),
        pytest.param("e4m3_tensor", torch.bfloat16, marks=SLOW),
    ],
)
def test_counts_are_those_of_the_statistics(name, dtype, device):
    spec = spec_of(name)
    for special in (False, True):
        x = numbers((18, 384), dtype, special=special)
        x = torch.where(x.abs() > 1e30, 1.0, x) if name == "nvfp4" else x  # the definition divides in float32
        out = torch.empty(x.shape, dtype=result_dtype(spec.format, dtype), device=device)
        counts = statistics.quantize_counted(x.to(device), spec, None, out)
        values = quantised(x, spec, -1, None, out.dtype)
        assert same(out, values)
        wanted = OperandStats().add(x, values, spec.format)
        assert counts is not None
        assert [int(n) for n in counts[:4]] == [
            wanted.nonzero, wanted.underflowed, wanted.saturated, wanted.nonfinite,
        ]  # fmt: skip
        assert float(counts.amax) == wanted.amax
    assert statistics.quantize_counted(x.to(device), spec_of("nf4_g64"), None, out) is None
