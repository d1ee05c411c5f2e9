# SPDX-License-Identifier: Apache-2.0
"""ggml's blocks and HiF4: bytes of the sources' code, recorded; of a slow oracle; values of gguf-py; errors."""

import hashlib

import numba
import numpy as np
import pytest
import torch

import fmtsim
from fmtsim.cpu.cast import ggml as ggml_kernels
from fmtsim.cpu.runtime.simd import LANES, splat
from fmtsim.formats.packed import GGML_FORMATS, HIF4, NEED_MATRIX, PackedFormat
from fmtsim.formats.registry import format_from_json, format_to_json
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec
from fmtsim.support.errors import ArgumentError, CodeError, DtypeError, FmtsimError, FormatError
from fmtsim.torch_engine import ggml_search, packed_blocks
from tests.support import ggml as oracle
from tests.support.bits import assert_same_bits

# By ggml d99724f2, src/ggml-quants.c, gcc 12.2 -O2 -ffp-contract=off -DNDEBUG on x86-64: the first 16 digits of the
# SHA-256 of quantize_row_*_ref(some_blocks(elements, 24)) and of dequantize_row_*(some_bytes(bytes)), NaN canonical.
RECORDED = {
    "q1_0": ("aece13224867c8c0", "e9a5c4095c53e327"),
    "q2_0": ("bfee38a416c5833b", "e7c2cdb8df139898"),
    "q4_0": ("ae14bba37c1c3170", "7b86faa4c77a469d"),
    "q4_1": ("8f700ea6f79b1d6b", "e0fd967762df6c3a"),
    "q5_0": ("590f7413566ec2fa", "b317bc0a6dabdeaf"),
    "q5_1": ("bb8c3f08cbbced90", "298c11f44905af6e"),
    "q8_0": ("1da0a623dcef48f9", "1bdad5e836f74e13"),
    "q2_k": ("c319db9546dd69eb", "f82f17b8a866059b"),
    "q3_k": ("28fb318f2d5792cc", "efa6ad461e7948d0"),
    "q4_k": ("b6f01903da5deacb", "4bf299d739c4cea0"),
    "q5_k": ("c6cb84719a8617c4", "0af2cbe4f457de4f"),
    "q6_k": ("01d34dfe5354b04f", "0ff1184c0c3d693a"),
    "iq4_nl": ("8f5b39781367b81b", "dc4f3360d18197dc"),
    "iq4_xs": ("3b3d2649e9cc087a", "ff9e26338fe7f843"),
    "tq1_0": ("0fd85cd7dd0b5504", "774aacad16f24961"),
    "tq2_0": ("fbb1b85ce80105d7", "20342932e0e86b59"),
    "mxfp4_ggml": ("9efdd2b264d0bb68", "3b2a9d02a05fe059"),
    "nvfp4_ggml": ("baa8b2c0373d9826", "81867b94aac8b272"),
    "iq1_s": ("-", "afc7dd4ee12ada93"),
    "iq1_m": ("-", "dbcc75a1f33373b5"),
    "iq2_xxs": ("-", "4f20854b1a02a2fd"),
    "iq2_xs": ("-", "f2ca3b47cae5518a"),
    "iq2_s": ("-", "eb9f07e77cf9ce20"),
    "iq3_xxs": ("-", "46e3f790dcbfffbc"),
    "iq3_s": ("-", "fda14c5c9f33f31b"),
}  # fmt: skip
ENCODED = ["hif4", *(fmt.name for fmt in GGML_FORMATS if fmt.encoder)]
SEARCHED = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def encoded(name, x):
    return fmtsim.encode(torch.from_numpy(x), name).codes.numpy()


def decoded(name):
    return fmtsim.decode(torch.from_numpy(oracle.some_bytes(fmtsim.get_format(name).bytes)), name)


@pytest.mark.parametrize("name", ENCODED[1:])
def test_bytes_are_those_of_ggmls_reference_functions(name):
    x = oracle.some_blocks(fmtsim.get_format(name).elements, 24)
    codes = encoded(name, x)
    if name == "iq4_nl":  # where all is zero ggml leaves the codes of the block before, under a scale of 0
        codes = codes[np.abs(x).max(1) >= oracle.LEAST]
    assert digest(codes) == RECORDED[name][0]


@pytest.mark.parametrize("name", list(RECORDED))
def test_values_are_those_of_ggml(name):
    if not fmtsim.get_format(name).fields:
        pytest.importorskip("gguf")
    assert digest(decoded(name).numpy()) == RECORDED[name][1]


def test_every_format_is_recorded():
    assert list(RECORDED) == fmtsim.list_formats("ggml")


@numba.njit
def tried_codes(x, codes, inverse, least, most):
    ends = splat(inverse), splat(np.float32(0)), splat(least), splat(most)
    ggml_kernels._try_codes(x, codes, *ends, np.float32(15))


@pytest.mark.parametrize("inverse", [3.0, 2.0**22, 1e9, np.inf])
def test_kernels_round_numbers_far_beyond_the_codes_as_nearest_int(inverse):
    x = torch.randn(4 * LANES, generator=torch.Generator().manual_seed(0))
    codes, ends = torch.empty_like(x), (np.float32(inverse), np.float32(x.min()), np.float32(x.max()))
    tried_codes(x.numpy(), codes.numpy(), *ends)
    wrapped = ggml_search.nearest_wrapped(x * inverse)
    assert torch.equal(codes.int(), wrapped.clamp(0, 15))
    clamped = (x * inverse).round().clamp(0, 15)
    assert torch.equal(codes, clamped) == (inverse == 3)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq1_0", "tq2_0", "mxfp4_ggml"])
def test_bytes_are_those_of_gguf_py(name):
    gguf, fmt = pytest.importorskip("gguf"), fmtsim.get_format(name)
    x = oracle.some_blocks(fmt.elements, 8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType[fmt.type])
    assert np.array_equal(encoded(name, x), expected)


def test_bytes_of_hif4_are_those_of_the_oracle():
    x = oracle.some_blocks(64, 8)
    assert np.array_equal(encoded("hif4", x), oracle.encode(x))


@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q2_k", "q4_k", "q5_k", "q6_k"])
def test_kernels_have_the_bytes_of_torch_operations(name):
    fmt = fmtsim.get_format(name)
    spec = CastSpec(format=fmt, rounding=Rounding(), overflow="saturate")
    for x in (torch.from_numpy(oracle.some_blocks(fmt.elements, count)) for count in (1, 9, 24)):
        x = torch.cat([x, -x.abs(), x.abs() + 1, -x[:, :1].expand_as(x)])[: 4 * len(x) - 1]
        assert torch.equal(fmtsim.encode(x, name).codes, packed_blocks.encode(x, spec).codes)


@pytest.mark.parametrize("name", SEARCHED)
def test_another_rounding_is_seen(name, monkeypatch):
    monkeypatch.setattr(ggml_search, "nearest", lambda x, low, high: x.floor().clamp(low, high))
    spec = CastSpec(format=fmtsim.get_format(name), rounding=Rounding(), overflow="saturate")
    x = oracle.some_blocks(spec.format.elements, 24)
    assert digest(packed_blocks.encode(torch.from_numpy(x), spec).codes.numpy()) != RECORDED[name][0]


@pytest.mark.parametrize("name", [name for name in RECORDED if name not in ("q1_0", "q2_0")])
def test_values_are_those_of_gguf_py(name):
    gguf = pytest.importorskip("gguf")
    fmt = fmtsim.get_format(name)
    kind = gguf.GGMLQuantizationType[fmt.type]
    assert gguf.GGML_QUANT_SIZES[kind] == (fmt.elements, fmt.bytes)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(oracle.some_bytes(fmt.bytes), kind).copy())
    assert_same_bits(decoded(name), torch.where(expected.isnan(), torch.nan, expected))


def test_hif4_has_the_values_of_its_source():
    """HiFloat4 6d937b6, hif4_gpu/quant_cy: the digests are of quant_hifx(x, QType("hifx4"), -1) with torch 2.13."""
    x = torch.from_numpy(oracle.some_blocks(64, 24))
    assert digest(fmtsim.quantize(x, "hif4").numpy()) == "6f8968d28249ba07"
    x[::2, 5], x[::3, 40] = torch.nan, -torch.inf
    values = fmtsim.quantize(x, "hif4")
    assert digest(values.where(~values.isnan(), torch.nan).numpy()) == "f7dd8c2081054cdd"
    assert values[::2].isnan().all() and values[3, 40] == -344064.0  # the largest value
    zeros = fmtsim.quantize(torch.tensor([-0.0, -1e-30, 1.0] + [0.0] * 61), "hif4")
    assert_same_bits(zeros[:3], torch.tensor([0.0, -0.0, 0.9375]))
    assert fmtsim.quantize(x.bfloat16(), "HiFloat4").dtype == torch.bfloat16


def test_hif4_decodes_every_byte_as_the_oracle_does():
    blocks = oracle.some_bytes(36)
    blocks[:, 0] = np.arange(256)
    expected = torch.from_numpy(np.stack([oracle.decode_hif4(block) for block in blocks]))
    assert_same_bits(fmtsim.decode(torch.from_numpy(blocks), "hif4"), expected)
    assert expected[255].isnan().all() and expected[:255].isfinite().all()


@pytest.mark.parametrize("name", ENCODED)
def test_verbs_agree_in_every_layout(name):
    fmt = fmtsim.get_format(name)
    x = torch.from_numpy(oracle.some_blocks(fmt.elements, 1)).reshape(2, -1, fmt.elements)
    y = fmtsim.decode(fmtsim.encode(x, name))
    assert y.shape == x.shape and y.dtype == torch.float32
    assert_same_bits(fmtsim.quantize(x, name), y)
    assert_same_bits(fmtsim.quantize(x.movedim(-1, 0), name, dim=0).movedim(0, -1), y)
    assert_same_bits(fmtsim.encode(x.movedim(-1, 1), name, dim=1).decode().movedim(1, -1), y)
    assert_same_bits(fmtsim.quantize(x.double(), name), y.double())
    y_bf16 = y.bfloat16().masked_fill(y.isnan(), torch.nan)  # of torch NaN is all ones
    assert_same_bits(fmtsim.quantize(x, name, out_dtype=torch.bfloat16), y_bf16)
    assert_same_bits(torch.from_numpy(fmtsim.quantize(x.numpy(), name)), y)
    short = x[..., : fmt.elements - 5]
    padded = torch.nn.functional.pad(short, (0, 5))
    assert_same_bits(fmtsim.quantize(short, name, pad=True), fmtsim.quantize(padded, name)[..., :-5])
    assert_same_bits(fmtsim.encode(short, name, pad=True).decode(), fmtsim.quantize(padded, name)[..., :-5])
    assert fmtsim.quantize(x[:0], name).shape == fmtsim.encode(x[:0], name).decode().shape == (0, *x.shape[1:])
    assert fmtsim.encode(torch.tensor(1.0), name).decode().shape == ()


def test_files_and_records_keep_everything(tmp_path):
    x = torch.from_numpy(oracle.some_blocks(256, 1))
    for name in ENCODED:
        q = fmtsim.encode(x, name)
        q.save(tmp_path / "q.safetensors")
        q_read = fmtsim.Encoded.load(tmp_path / "q.safetensors")
        assert q_read.format == q.format and torch.equal(q_read.codes, q.codes)
        assert_same_bits(q_read.decode(), q.decode())
        assert q.bits_per_element == fmtsim.get_format(name).bits_per_element
    for fmt in (*GGML_FORMATS, HIF4):
        assert format_from_json(format_to_json(fmt)) == fmt


def test_gradients_pass_and_compiled_graphs_have_the_bits():
    x = torch.from_numpy(oracle.some_blocks(256, 1)).requires_grad_()
    fmtsim.quantize(x, "q4_k").sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    x = x.detach()
    graph = torch.compile(
        lambda x: fmtsim.decode(fmtsim.encode(x, "q6_k")) + fmtsim.quantize(x, "q4_0"), backend="eager"
    )
    assert_same_bits(graph(x), fmtsim.quantize(x, "q6_k") + fmtsim.quantize(x, "q4_0"))
    shapes = fmtsim.quantize(x.to("meta"), "q4_k"), fmtsim.encode(x.to("meta"), "q4_k").decode()
    assert all(t.is_meta and t.shape == x.shape for t in shapes)


BAD = [
    (lambda: fmtsim.encode(torch.zeros(2, 100), "q4_k"), ArgumentError,
     r"q4_k: block_size=256 does not divide 100 \(dim=-1\); choose 100, or pass pad=True"),
    (lambda: fmtsim.decode(torch.zeros(2, 100, dtype=torch.uint8), "q4_k"), CodeError,
     r"q4_k: 100 bytes \(dim=-1\) are not whole blocks of 144 bytes \(256 elements\)"),
    (lambda: fmtsim.decode(torch.zeros(2, 144), "q4_k"), DtypeError, r"codes have dtype torch.float32"),
    (lambda: fmtsim.decode(torch.full((144,), 300), "q4_k"), CodeError, r"code 300 is outside q4_k; its codes"),
    (lambda: fmtsim.quantize(torch.full((32,), torch.nan), "q8_0"), ArgumentError,
     r"x holds NaN or Inf \(as float32\), which q8_0 does not encode; remove them first"),
    (lambda: fmtsim.quantize(torch.full((32,), 1e300, dtype=torch.float64), "q8_0"), ArgumentError, r"NaN or Inf"),
    (lambda: fmtsim.quantize(torch.ones(32), "q8_0", "up"), FormatError,
     r"q8_0 is rounded as its source does; leave rounding= and overflow= out"),
    (lambda: fmtsim.quantize(torch.ones(32), "q8_0", overflow="ieee"), FormatError, r"q8_0 is rounded as its source"),
    (lambda: fmtsim.quantize(torch.ones(32), "q8_0", block_size=16), FormatError,
     r"q8_0 has blocks and scales of its source; leave block_size= and scale_rule= out"),
    (lambda: fmtsim.encode(torch.ones(256), "iq2_xxs"), FormatError,
     r"iq2_xxs can be decoded, not encoded: ggml encodes iq1_s, iq2_xxs, iq2_xs under an importance matrix, which "
     r"fmtsim does not take; choose q2_k, q3_k or iq4_xs"),
    (lambda: fmtsim.encode(torch.ones(256), "iq3_s"), FormatError,
     r"iq3_s can be decoded, not encoded: its codebook search is not part of fmtsim; choose"),
    (lambda: PackedFormat(name="x", elements=0, bytes=3), FormatError,
     "format 'x': elements=0, bytes=3; a block has 1 or more"),
    (lambda: PackedFormat(name="x", elements=32, bytes=3, fields=(("d", 16, 1, 1, 2),)), FormatError,
     r"format 'x': fields have 2 bytes, not bytes=3; choose 2"),
    (lambda: fmtsim.explain(1.0, "q4_0"), FormatError,
     r"explain does not follow blocks of q4_0; fmtsim.quantize with this format gives"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    for name in NEED_MATRIX:
        with pytest.raises(FmtsimError, match=rf"decoding {name} needs the package gguf; pip install 'fmtsim\[gguf\]'"):
            decoded(name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_nan_is_canonical_in_every_dtype_and_layout(dtype):
    x = torch.full((64, 128), torch.nan)
    for out in (torch.empty(64, 128, dtype=dtype), torch.empty(128, 64, dtype=dtype).mT):
        assert_same_bits(fmtsim.quantize(x, "hif4", out=out), torch.full((64, 128), torch.nan, dtype=dtype))
    assert_same_bits(fmtsim.encode(x, "hif4").decode(out_dtype=dtype), torch.full((64, 128), torch.nan, dtype=dtype))
