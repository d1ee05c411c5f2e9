# SPDX-License-Identifier: Apache-2.0
"""Encoded tensors in memory and in files, and every way in which a file can be wrong."""

import dataclasses
import math
import os
import pickle
import re

import pytest
import safetensors
import torch

from fmtsim.casts import ops
from fmtsim.casts.encoded import Encoded
from fmtsim.casts.quantize import encode
from fmtsim.formats.block import BlockFormat, LogTileFormat, PackedFormat
from fmtsim.formats.element import CodebookFormat
from fmtsim.formats.registry import get_format, list_formats
from fmtsim.formats.representable import codes_of_scales, scales_of_codes
from fmtsim.formats.scaling import block_scaling
from fmtsim.spec.cast import EncodedParts, block_bytes, level_shape
from fmtsim.support.errors import ArgumentError, CodeError, DtypeError, FormatError
from tests.support.refusals import refused

ONE_OF_EACH = [name for name in list_formats() if "p3109" not in name and name not in list_formats("int")]
ONE_OF_EACH += ["p3109_k5p2se", "int3", "int8", "uint5", "int16_half", "e5m6", "lns12_g128"]
SHAPES = [((4, 32), -1), ((3, 21), -1), ((5, 3, 8), 1), ((7,), 0), ((), -1), ((0, 4), -1), ((4, 0), -1)]


def make_parts(fmt, shape, dim=-1, seed=0):
    """Return random parts of a format, as an engine would."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(fmt, PackedFormat):
        size = block_bytes(fmt, shape, dim)
        return EncodedParts(torch.randint(0, 256, size, dtype=torch.uint8, generator=generator))
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    limit = len(element.values) if isinstance(element, CodebookFormat) else 1 << min(fmt.bits, 62)
    codes = torch.randint(0, limit, shape, generator=generator).to(ops.code_dtype(fmt.bits))
    if not isinstance(fmt, BlockFormat | LogTileFormat):
        return ops.EncodedParts(codes)
    dim = dim - len(shape) if dim >= 0 else dim
    grid = ops.block_counts(fmt, torch.Size(shape), dim)
    if isinstance(fmt, LogTileFormat):
        return ops.EncodedParts(
            codes, torch.rand(grid, generator=generator), None, -torch.rand(grid, generator=generator)
        )
    scales = torch.rand(grid, generator=generator)
    if fmt.scale.bits <= 8:
        rows = torch.randint(0, fmt.scale.max_code + 1, grid, generator=generator)
        scales = scales_of_codes(rows.to(torch.uint8), fmt.scale)
    offsets = torch.randint(0, 16, grid, generator=generator, dtype=torch.int32) if fmt.zero_point else None
    second = torch.full(level_shape(fmt, torch.Size(shape), dim), 0.75) if fmt.tensor_scale else None
    return ops.EncodedParts(codes, scales, second, offsets)


def make(name, shape=(4, 32), dim=-1):
    fmt = get_format(name)
    return Encoded.from_parts(make_parts(fmt, shape, dim), fmt, shape, dim)


def assert_same_parts(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(-7), b.nan_to_num(-7))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_parts_and_files_round_trip(name, tmp_path):
    fmt = get_format(name)
    for number, (shape, dim) in enumerate(SHAPES):
        parts = make_parts(fmt, shape, dim, seed=number)
        encoded = Encoded.from_parts(parts, fmt, shape, dim)
        assert_same_parts(encoded.parts(), parts)
        assert torch.equal(encoded.unpacked(), parts.codes)
        path = tmp_path / f"{number}.safetensors"
        encoded.save(path)
        loaded = Encoded.load(str(path))
        assert (loaded.format, loaded.shape, loaded.dim) == (fmt, torch.Size(shape), encoded.dim)
        assert loaded.dim < 0
        assert_same_parts(loaded.parts(), parts)
        with open(path, "rb") as file:
            assert {tensor for tensor, _ in safetensors.deserialize(file.read())} >= {"codes"}
    assert sorted(os.listdir(tmp_path)) == [f"{number}.safetensors" for number in range(len(SHAPES))]


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("bf16", {"codes": ("BF16", [4, 32])}),
        ("tf32", {"codes": ("U8", [4, 76])}),
        ("e4m3", {"codes": ("F8_E4M3", [4, 32])}),
        ("e4m3_ieee", {"codes": ("U8", [4, 32])}),
        ("int8", {"codes": ("I8", [4, 32])}),
        ("mxfp8_e5m2", {"codes": ("F8_E5M2", [4, 32]), "scales": ("F8_E8M0", [4, 1])}),
        ("mxfp6_e2m3", {"codes": ("F6_E2M3", [4, 32]), "scales": ("F8_E8M0", [4, 1])}),
        ("mxfp6_e3m2", {"codes": ("F6_E3M2", [4, 32]), "scales": ("F8_E8M0", [4, 1])}),
        ("mxfp4", {"codes": ("F4", [4, 32]), "scales": ("F8_E8M0", [4, 1])}),
        ("nvfp4", {"codes": ("F4", [4, 32]), "scales": ("F8_E4M3", [4, 2]), "tensor_scale": ("F32", [])}),
        ("uint4_g32_zp", {"codes": ("U8", [4, 16]), "scales": ("F32", [4, 1]), "offsets": ("I32", [4, 1])}),
        ("logfmt10", {"codes": ("U8", [4, 40]), "scales": ("F32", [4, 1]), "offsets": ("F32", [4, 1])}),
        ("lns16_g2048", {"codes": ("U16", [4, 32])}),
    ],
)
def test_tags_that_other_readers_see(name, tags, tmp_path):
    make(name).save(tmp_path / "x.safetensors")
    with open(tmp_path / "x.safetensors", "rb") as file:
        found = {tensor: (entry["dtype"], entry["shape"]) for tensor, entry in safetensors.deserialize(file.read())}
    assert found == tags


def test_rows_that_end_inside_a_byte_are_stored_as_bytes(tmp_path):
    make("mxfp4", (4, 31)).save(tmp_path / "x.safetensors")
    with open(tmp_path / "x.safetensors", "rb") as file:
        found = dict(safetensors.deserialize(file.read()))
    assert (found["codes"]["dtype"], found["codes"]["shape"]) == ("U8", [4, 16])


def test_torch_reads_float8_files(tmp_path):
    from safetensors.torch import load_file

    encoded = make("e4m3_tensor")
    encoded.save(tmp_path / "x.safetensors")
    tensors = load_file(tmp_path / "x.safetensors")
    assert tensors["codes"].dtype == torch.float8_e4m3fn
    assert torch.equal(tensors["codes"].view(torch.uint8), encoded.codes)


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("nvfp4", 64 + 8 + 4), ("mxfp4", 64 + 4), ("e4m3_1x128", 128 + 16), ("tf32", 304), ("int4", 64)],
)
def test_sizes(name, nbytes):
    encoded = make(name)
    assert encoded.nbytes == nbytes and encoded.bits_per_element == 8 * nbytes / 128
    assert make("e4m3", (0, 4)).bits_per_element == 0.0


def test_repr():
    assert repr(make("nvfp4")) == "Encoded(nvfp4, shape (4, 32), dim -1, 76 bytes, 4.75 bits an element, cpu)"
    facts = [
        fact.replace("</td></tr>", "").split("</th><td style='text-align:left'>") for fact in _facts(make("nvfp4"))
    ]
    assert facts == [
        ["format", "nvfp4"], ["shape", "(4, 32)"], ["blocks along dim", "-1"],
        ["size", "76 bytes, 4.75 bits an element"], ["device", "cpu"], ["codes", "torch.uint8 (4, 16)"],
        ["scales", "torch.uint8 (4, 2)"], ["tensor_scale", "torch.float32 ()"],
    ]  # fmt: skip


def _facts(encoded):
    return encoded._repr_html_().removesuffix("</table>").split("<tr><th style='text-align:left'>")[1:]


def test_packing_runs_along_dim():
    fmt = get_format("int4")
    codes = torch.arange(8, dtype=torch.uint8).reshape(4, 2)
    encoded = Encoded.from_parts(ops.EncodedParts(codes), fmt, (4, 2), dim=0)
    assert encoded.codes.tolist() == [[0x20, 0x64], [0x31, 0x75]] and encoded.dim == -2
    assert torch.equal(encoded.unpacked(), codes)


@pytest.mark.parametrize("name", ["e4m3", "e2m3", "mxfp4", "nvfp4", "int4_g32", "nf4", "fp32"])
def test_tensors_without_numbers_tell_their_size(name):
    """What a model takes in a format is asked on meta; codes and scales that are not there cannot be wrong."""
    x = torch.zeros(4, 64)
    found, expected = encode(x.to("meta"), name), encode(x, name)
    assert found.nbytes == expected.nbytes and found.codes.shape == expected.codes.shape
    decoded = found.decode()
    assert decoded.is_meta and decoded.shape == x.shape


def test_frozen_and_moved():
    encoded = make("nvfp4")
    with pytest.raises(dataclasses.FrozenInstanceError):
        encoded.dim = 0
    moved = encoded.to("meta")
    assert moved.device.type == "meta" and moved.scales.device.type == "meta" and moved.nbytes == encoded.nbytes
    assert_same_parts(pickle.loads(pickle.dumps(encoded)).parts(), encoded.parts())


def test_nan_scales_survive(tmp_path):
    for name in ("mxfp4", "e4m3_1x128", "nvfp4"):
        fmt = get_format(name)
        parts = make_parts(fmt, (4, 32))
        parts.scales[1, 0] = math.nan
        Encoded.from_parts(parts, fmt, (4, 32)).save(tmp_path / "x")
        assert_same_parts(Encoded.load(tmp_path / "x").parts(), parts)


@pytest.mark.parametrize("scale", ["e8m0", "e4m3", "ue4m3", "ue5m3", "e5m2", "e2m1", "e3m3"])
def test_scales_and_their_codes(scale):
    fmt = get_format(scale)
    codes = torch.arange(fmt.max_code + 1).to(torch.uint8)
    scales = scales_of_codes(codes, fmt)
    assert scales.tolist() == [fmt.value(code) for code in range(fmt.max_code + 1)]
    assert torch.equal(codes_of_scales(scales, fmt), codes)
    with pytest.raises(CodeError, match=f"^scale 1.01 is not a value of {scale}; pass scales of that format$"):
        codes_of_scales(torch.tensor([1.0, 1.01]), fmt)
    refused(f"^scale -1 is not a value of {scale}", codes_of_scales, torch.tensor([-1.0]), fmt, error=CodeError)
    refused(f"^scale inf is not a value of {scale}", codes_of_scales, torch.tensor([math.inf]), fmt, error=CodeError)
    if fmt.has_nan:
        nan = torch.tensor([math.nan])
        assert codes_of_scales(nan, fmt).tolist() == [fmt.nan_code]
        assert scales_of_codes(codes_of_scales(nan, fmt), fmt).isnan().all()
    else:
        with pytest.raises(CodeError, match=f"^scale nan is not a value of {scale}"):
            codes_of_scales(torch.tensor([math.nan]), fmt)
    if scale == "e4m3":
        with pytest.raises(CodeError, match="^code 129 is not that of a scale in e4m3; expected 0 to 126$"):
            scales_of_codes(torch.tensor([1, 129], dtype=torch.uint8), fmt)


def test_sixteen_bit_scales(tmp_path):
    fmt = BlockFormat(name="b", element=get_format("int8"), scaling=block_scaling((1, 16), scale=get_format("bf16")))
    parts = ops.EncodedParts(torch.zeros(2, 16, dtype=torch.uint8), torch.tensor([[0.5], [3.0]]))
    encoded = Encoded.from_parts(parts, fmt, (2, 16))
    assert encoded.scales.dtype == torch.bfloat16
    encoded.save(tmp_path / "x")
    assert_same_parts(Encoded.load(tmp_path / "x").parts(), parts)
    with pytest.raises(CodeError, match="^scale 1.001 is not a value of bf16; pass scales of that format$"):
        Encoded.from_parts(parts._replace(scales=torch.tensor([[0.5], [1.001]])), fmt, (2, 16))


THREE = CodebookFormat(name="three", values=(-1.0, 0.0, 1.0))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("e4m3", dict(codes=torch.zeros(4, 31, dtype=torch.uint8)),
         "codes of e4m3 have shape (4, 31); expected (4, 32)"),
        ("e2m1", dict(codes=torch.full((4, 32), 16)), "code 16 does not fit 4 bits; expected 0 to 15"),
        ("mxfp4", dict(scales=None), "mxfp4: scales expected some, found none"),
        ("mxfp4", dict(scales=torch.ones(4, 2)), "mxfp4: scales is torch.uint8 [4, 2]; expected torch.uint8 [4, 1]"),
        ("mxfp4", dict(scales=torch.full((4, 1), 3.0)), "scale 3 is not a value of e8m0; pass scales of that format"),
        ("e4m3", dict(scales=torch.ones(4, 1)), "e4m3: scales expected none, found some"),
        ("nvfp4", dict(tensor_scale=None), "nvfp4: tensor_scale expected some, found none"),
        ("nvfp4", dict(tensor_scale=torch.ones(1)),
         "nvfp4: tensor_scale is torch.float32 [1]; expected torch.float32 []"),
        ("logfmt8", dict(offsets=torch.ones(4, 1, dtype=torch.int32)),
         "logfmt8: offsets is torch.int32 [4, 1]; expected torch.float32 [4, 1]"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(name, change, message):
    fmt = get_format(name)
    with pytest.raises(CodeError, match=f"^{re.escape(message)}$"):
        Encoded.from_parts(make_parts(fmt, (4, 32))._replace(**change), fmt, (4, 32))


def test_codes_beyond_a_codebook():
    codes = torch.tensor([0, 3], dtype=torch.uint8)
    with pytest.raises(CodeError, match=r"^code 3 is outside three \(0 to 2\)$"):
        Encoded.from_parts(ops.EncodedParts(codes), THREE, (2,))


def test_dim_out_of_range():
    with pytest.raises(ArgumentError, match="^dim=2 is out of range for 2 dimensions; choose -2 to 1$"):
        Encoded.from_parts(make_parts(get_format("e4m3"), (4, 32)), get_format("e4m3"), (4, 32), dim=2)


@pytest.mark.parametrize("name", ["e4m3", "bf16", "int4", "nf4", "lns8_g8", "e8m0", "fp64", "p3109_k5p2se"])
def test_decode_of_elements(name):
    encoded = make(name, (3, 7), 0)
    dtype = torch.float64 if name == "fp64" else torch.float32
    values = [encoded.format.value(int(code) % (1 << 64)) for code in encoded.unpacked().flatten()]
    decoded = encoded.decode()
    assert decoded.dtype == dtype and decoded.shape == (3, 7)
    assert torch.equal(decoded.nan_to_num(-7), torch.tensor(values, dtype=dtype).reshape(3, 7).nan_to_num(-7))
    assert encoded.decode(torch.float64).dtype == torch.float64
    out = torch.empty(7, 3, dtype=dtype).mT
    assert encoded.decode(out=out) is out and torch.equal(out.nan_to_num(-7), decoded.nan_to_num(-7))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(out_dtype=torch.int8), DtypeError,
         "out_dtype=torch.int8 is not allowed; choose torch.float16, bfloat16, float32, float64 or a float8 dtype"),
        (dict(out=torch.zeros(4, 32, dtype=torch.int32)), DtypeError,
         "out_dtype=torch.int32 is not allowed; choose torch.float16, bfloat16, float32, float64 or a float8 dtype"),
        (dict(out=torch.zeros(4)), ArgumentError, "out has shape (4,); pass a tensor of shape (4, 32)"),
        (dict(out=torch.zeros(4, 32, device="meta")), ArgumentError,
         "codes is on cpu, out on meta; move them to one device, for example out.to(codes.device)"),
        (dict(out=torch.zeros(4, 32), out_dtype=torch.float16), DtypeError,
         "out has dtype torch.float32 but out_dtype=torch.float16; leave out_dtype out"),
    ],
)  # fmt: skip
def test_errors_of_decode(arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        make("e4m3").decode(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(format="nvfp4"), FormatError, "format='nvfp4' is not a format record; pass fmtsim.get_format(name)"),
        (dict(shape=(4, -1)), ArgumentError, "shape=(4, -1) is not a shape; pass a tuple of sizes"),
        (dict(shape=[4, 32]), ArgumentError, "shape=[4, 32] is not a shape; pass a tuple of sizes"),
        (dict(shape=(4, 64)), CodeError, "nvfp4: codes is torch.uint8 [4, 16]; expected torch.uint8 [4, 32]"),
        (dict(dim=0), ArgumentError, "dim=0 is not a dimension; choose -2 to -1"),
        (dict(dim=True), ArgumentError, "dim=True is not a dimension; choose -2 to -1"),
        (dict(codes=None), CodeError, "nvfp4: codes expected some, found none"),
        (dict(codes=[0]), DtypeError, "codes is list, not a tensor; pass torch.tensor(codes)"),
        (dict(codes=torch.zeros(4, 16)), CodeError, "nvfp4: codes is torch.float32 [4, 16]; expected torch.uint8"),
        (dict(codes=torch.zeros(4, 16, dtype=torch.uint8).to_sparse()), ArgumentError, "codes has layout torch.sparse"),
        (dict(scales=None), CodeError, "nvfp4: scales expected some, found none"),
        (dict(scales=torch.full((4, 2), 0x80, dtype=torch.uint8)), CodeError,
         "code 128 is not that of a scale in e4m3; expected 0 to 126"),
        (dict(tensor_scale=torch.ones(1)), CodeError, "nvfp4: tensor_scale is torch.float32 [1]; expected"),
        (dict(tensor_scale=torch.ones((), device="meta")), ArgumentError,
         "codes is on cpu, tensor_scale on meta; move them to one device"),
        (dict(offsets=torch.ones(4, 2)), CodeError, "nvfp4: offsets expected none, found some"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit(change, error, message):
    good = make("nvfp4")
    names = ("format", "shape", "dim", "codes", "scales", "tensor_scale", "offsets")
    refused(f"^{re.escape(message)}", Encoded, **{name: getattr(good, name) for name in names} | change, error=error)


def test_codes_that_a_codebook_lacks():
    fields = dict(format=THREE, shape=(3,), dim=-1)
    with pytest.raises(CodeError, match=r"^code 3 is outside three \(0 to 2\)$"):
        Encoded(codes=torch.tensor([0b00_11_01_00], dtype=torch.uint8), **fields)
    assert Encoded(codes=torch.tensor([0b10_01_00], dtype=torch.uint8), **fields).decode().tolist() == [-1.0, 0.0, 1.0]


def test_scales_that_want_a_gradient_are_taken():
    good = make("int4_g32")
    scales = torch.nn.Parameter(good.scales)
    wanting = Encoded(format=good.format, shape=good.shape, dim=-1, codes=good.codes, scales=scales)
    assert torch.equal(wanting.decode(), good.decode()) and not wanting.decode().requires_grad
