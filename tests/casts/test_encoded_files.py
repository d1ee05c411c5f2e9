# SPDX-License-Identifier: Apache-2.0
"""Files of encoded tensors, and every way in which one can be wrong."""

import json
import re
import zlib

import pytest
import torch

import fmtsim
from fmtsim.casts import ops
from fmtsim.casts.encoded import Encoded
from fmtsim.formats.element import CodebookFormat, FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.tensor_file import StoredTensor, tensor_content
from fmtsim.spec.cast import EncodedParts, block_counts
from fmtsim.support.errors import CodeError, DataError, FormatError
from tests.support.refusals import refused

THREE = CodebookFormat(name="three", values=(-1.0, 0.0, 1.0))


def make(name, shape=(4, 32)):
    """Return a tensor of a block format, its codes counting up and its scales powers of two."""
    fmt = get_format(name)
    codes = torch.arange(shape[0] * shape[1]).remainder(1 << fmt.bits).to(ops.code_dtype(fmt.bits)).reshape(shape)
    scales = 2.0 ** torch.arange(-2, -2 + shape[0]).reshape(-1, 1)
    grid = block_counts(fmt, torch.Size(shape), -1)
    tensor_scale = torch.tensor(0.75) if fmt.tensor_scale else None
    parts = EncodedParts(codes, scales.expand(grid).contiguous(), tensor_scale)
    return Encoded.from_parts(parts, fmt, shape)


@pytest.fixture
def saved(tmp_path):
    """Return the path of a small file."""
    path = tmp_path / "x.safetensors"
    make("nvfp4", (2, 16)).save(path)
    return path


def assert_flips_are_noticed(path, positions):
    good = path.read_bytes()
    for position in positions(len(good)):
        bad = bytearray(good)
        bad[position // 8] ^= 1 << position % 8
        path.write_bytes(bad)
        refused("x.safetensors: ", Encoded.load, path, error=(DataError, CodeError))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8", "nvfp4", "int8_1x16_floor"])
def test_a_file_has_as_many_bytes_as_its_codes(name, tmp_path):
    encoded = make(name)
    encoded.save(tmp_path / "x.safetensors")
    assert torch.equal(Encoded.load(tmp_path / "x.safetensors").codes, encoded.codes)
    content = (tmp_path / "x.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    start, end = header["codes"]["data_offsets"]
    assert end - start == 4 * 32 * encoded.format.bits // 8


def test_flipped_bits_are_noticed(saved):
    assert_flips_are_noticed(saved, lambda size: range(0, 8 * size, 25))


@pytest.mark.slow
def test_every_flipped_bit_is_noticed(saved):
    assert_flips_are_noticed(saved, lambda size: range(8 * size))


def test_truncations_are_noticed(saved):
    good = saved.read_bytes()
    for length in [*range(12), *range(12, len(good), 7), len(good) - 1]:
        saved.write_bytes(good[:length])
        refused("truncated or corrupt|empty or truncated", Encoded.load, saved, error=DataError)
    saved.write_bytes(good + b"\0")
    refused("bytes of tensors, the header says", Encoded.load, saved, error=DataError)


def rewrite(path, edit, seal=True):
    """Change the header and the bytes of a file, its checksum made right again."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, payload = json.loads(content[8 : 8 + length]), content[8 + length :]
    payload = edit(header, payload) or payload
    if seal:
        metadata = header["__metadata__"]
        metadata.pop("crc32", None)
        table = {name: entry for name, entry in header.items() if name != "__metadata__"}
        start = zlib.crc32(json.dumps([table, metadata], sort_keys=True).encode())
        metadata["crc32"] = f"{zlib.crc32(payload, start):08x}"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)


def set_metadata(key, value):
    return lambda header, payload: header["__metadata__"].__setitem__(key, value)


def set_entry(name, key, value):
    return lambda header, payload: header[name].__setitem__(key, value)


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (set_metadata("fmtsim", "2"), DataError, "layout '2'; this version of fmtsim reads layout '1'"),
        (lambda header, _: header["__metadata__"].pop("fmtsim") and None, DataError,
         "layout None; this version of fmtsim reads layout '1'"),
        (set_metadata("format", "nvfp4"), DataError,
         "the metadata is not that of an encoded tensor: not the JSON of a format: "),
        (set_metadata("format", '{"kind": "posit"}'), DataError,
         "the metadata is not that of an encoded tensor: kind='posit' is not a kind of format; "),
        (lambda header, _: header["__metadata__"].pop("shape") and None, DataError,
         "the metadata is not that of an encoded tensor: 'shape'"),
        (set_metadata("shape", "[2, -16]"), DataError, "shape '[2, -16]' in the metadata; expected a list of sizes"),
        (set_metadata("shape", f"[{1 << 63}]"), DataError, f"shape '[{1 << 63}]' in the metadata; expected a list of"),
        (set_metadata("dim", "0"), DataError, "dim 0 in the metadata; expected -2 to -1"),
        (set_metadata("dim", "x"), DataError, "the metadata is not that of an encoded tensor: invalid literal"),
        (set_metadata("shape", "[2, 32]"), CodeError,
         "tensor 'codes' is F4 [2, 16]; nvfp4 of shape (2, 32), dim -1 expects F4 [2, 32]"),
        (set_metadata("dim", "-2"), CodeError, "tensor 'codes' is F4 [2, 16]; nvfp4 of shape (2, 16), dim -2 expects "
         "F4 [16, 2]"),
        (set_entry("codes", "dtype", "F8_E5M2"), DataError, "tensor 'codes' has 16 bytes; F8_E5M2 [2, 16] takes 32"),
        (set_entry("codes", "dtype", "F3"), DataError, "tensor 'codes' has dtype 'F3'; expected one of F64, "),
        (set_entry("scales", "dtype", "U8"), CodeError,
         "tensor 'scales' is U8 [2, 1]; nvfp4 of shape (2, 16), dim -1 expects F8_E4M3 [2, 1]"),
        (set_entry("scales", "shape", "[2]"), DataError, "the header's entry for 'scales' is malformed; it is corrupt"),
        (set_entry("scales", "data_offsets", [0, 1, 2]), DataError, "the header's entry for 'scales' is malformed; it"),
        (set_entry("scales", "data_offsets", [0, True]), DataError, "the header's entry for 'scales' is malformed; it"),
        (lambda header, _: header.__setitem__("more", dict(header["codes"])), DataError,
         "tensors of the header share bytes or leave some out; it is corrupt"),
        (lambda header, _: header.pop("scales") and None, DataError,
         "tensors of the header share bytes or leave some out; it is corrupt"),
        (lambda header, _: header.__setitem__("more", header["codes"] | {"shape": [0], "data_offsets": [0, 0]}),
         CodeError, "nvfp4 has tensors codes, scales, tensor_scale; found codes, more, scales, tensor_scale"),
        (lambda header, _: header["__metadata__"].__setitem__("shape", "[" * 99999), DataError,
         "the metadata is not that of an encoded tensor: more than 64 objects or lists inside each other"),
        (set_metadata("shape", "[4294967296, 4294967296]"), DataError, "shape '[4294967296, 4294967296]' in the"),
        (set_metadata("dim", "-" + "9" * 300), DataError, "dim -99999"),
        (set_entry("codes", "shape", [(1 << 63) - 1, 9]), DataError, "tensor 'codes' has 16 bytes; F4 "),
        (set_entry("scales", "shape", [1 << 63]), DataError, "the header's entry for 'scales' is malformed; it is c"),
        (set_metadata("format", '{"kind": "int", "name": {}, "bits": 4}'), DataError,
         "the metadata is not that of an encoded tensor: IntFormat name={} is not allowed; pass text"),
    ],
)  # fmt: skip
def test_files_whose_words_are_wrong(saved, edit, error, message):
    rewrite(saved, edit)
    refused(f"^{re.escape(f'{saved}: {message}')}", Encoded.load, saved, error=error)


def test_scale_codes_that_no_scale_has(saved):
    def negative(header, payload):
        start = header["scales"]["data_offsets"][0]
        return payload[:start] + b"\x81" + payload[start + 1 :]

    rewrite(saved, negative)
    with pytest.raises(
        CodeError, match=f"^{re.escape(str(saved))}: code 129 is not that of a scale in e4m3; expected 0 to 126$"
    ):
        Encoded.load(saved)


def test_a_single_number_has_one_dimension_as_far_as_files_go(tmp_path):
    path = tmp_path / "x"
    Encoded.from_parts(EncodedParts(torch.tensor(1, dtype=torch.uint8)), THREE, ()).save(path)
    assert Encoded.load(path).shape == ()
    rewrite(path, set_metadata("dim", "-2"))
    refused("dim -2 in the metadata; expected -1 to -1", Encoded.load, path, error=DataError)


def test_codes_in_a_file_beyond_a_codebook(tmp_path):
    path = tmp_path / "x"
    Encoded.from_parts(EncodedParts(torch.tensor([0, 2], dtype=torch.uint8)), THREE, (2,)).save(path)
    rewrite(path, lambda header, payload: b"\x0c")
    refused(f"^{re.escape(str(path))}: code 3 is outside three .0 to 2.$", Encoded.load, path, error=CodeError)


@pytest.mark.parametrize("length", range(1, 9))
def test_tensors_begin_at_multiples_of_eight_bytes(length):
    content = tensor_content({"x" * length: StoredTensor("U8", (1,), b"a")}, {})
    size = int.from_bytes(content[:8], "little")
    assert size % 8 == 0 and content[8 + size :] == b"a" and len(content[8:-1].rstrip()) > size - 8


def test_files_of_others(tmp_path, saved):
    from safetensors.torch import save_file

    path = tmp_path / "other"
    save_file({"codes": torch.zeros(2)}, path)
    with pytest.raises(DataError, match="other: the header has no metadata; expected a file that Encoded.save wrote$"):
        Encoded.load(path)
    save_file({"codes": torch.zeros(2)}, path, metadata={"format": "pt"})
    with pytest.raises(DataError, match="other: the metadata has no 'crc32'; expected a file that Encoded.save wrote$"):
        Encoded.load(path)
    path.write_bytes((1000).to_bytes(8, "little") + b'{"codes":')
    refused(
        "other: a header of 1000 bytes is announced, 9 follow; it is truncated", Encoded.load, path, error=DataError
    )
    for content, message in (
        (b"not a file of safetensors", "neither safetensors, GGUF nor .*: it begins with b'not a fi'; pass"),
        (b"\x89PNG\r\n\x1a\n" + bytes(9), "a PNG image, not safetensors; pass"),
        (b'{"a": [1, 2, 3]}', "JSON text, not"),
        (b"\x89HDF\r\n\x1a\n" + bytes(9), "an HDF5 file, not safetensors; pass"), (b"\x1f\x8b" * 9, "a gzip file, not"),
        (b"\x93NUMPY\x01\0" + bytes(9), "a file of numpy.save, not safetensors; load it by torch.load or numpy.load"),
        (b"version https://git-lfs", "a Git LFS pointer, not safetensors; fetch what it points to by git lfs pull"),
    ):  # fmt: skip
        path.write_bytes(content)
        for read in (Encoded.load, fmtsim.open_checkpoint):
            refused(f"other is {message}", read, path, error=DataError)
    path.write_bytes(b"GGUF\3\0\0\0" + bytes(9))
    refused("other is a GGUF file, not safetensors; open it by fmtsim.open_checkpoint", Encoded.load, path,
            error=DataError)  # fmt: skip
    for legacy, kind in (
        (False, "a zip file, as torch.save or numpy.savez writes"),
        (True, "a pickle, as torch.save wrote"),
    ):
        torch.save({"codes": torch.zeros(2)}, path, _use_new_zipfile_serialization=not legacy)
        for read in (Encoded.load, fmtsim.open_checkpoint):
            refused(f"other is {kind}, not .* by safetensors.torch.save_file", read, path, error=DataError)
    path.write_bytes((2).to_bytes(8, "little") + b"[]")
    refused("other: the header is a list, expected a JSON object; it is corrupt$", Encoded.load, path, error=DataError)
    path.write_bytes((2).to_bytes(8, "little") + b"{,")
    refused("other: the header is not JSON .*; it is corrupt$", Encoded.load, path, error=DataError)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="other: 0 bytes are too few for a safetensors file; it is empty or truncated$"):
        Encoded.load(path)
    path.write_bytes(bytes(7))
    refused("other: 7 bytes are too few for a safetensors file", Encoded.load, path, error=DataError)
    path.write_bytes(bytes(8))
    refused("other: the header is not JSON", Encoded.load, path, error=DataError)
    refused("^cannot read .*missing: No such file or directory$", Encoded.load, tmp_path / "missing", error=DataError)
    rewrite(saved, set_metadata("dim", "-2"), seal=False)
    with pytest.raises(
        DataError, match="the checksum is [0-9a-f]{8}, the file says [0-9a-f]{8}; it is corrupt, write it again$"
    ):
        Encoded.load(saved)


def test_a_format_that_is_not_registered_travels_with_its_file(tmp_path):
    fmt = FloatFormat(name="e3m1b9", exponent_bits=3, mantissa_bits=1, bias=9, nan="none", infinities=False)
    codes = torch.arange(10, dtype=torch.uint8).reshape(2, 5)
    Encoded.from_parts(EncodedParts(codes), fmt, (2, 5)).save(tmp_path / "x")
    assert Encoded.load(tmp_path / "x").format == fmt
    with pytest.raises(FormatError):
        get_format("e3m1b9")


@pytest.mark.parametrize("path", [None, 1, True, b"x", ["x"], 10**5000, "a\0b", "\ud800", "/dev/zero", "/"], ids=type)
def test_what_is_no_file_is_refused(path):
    refused("is not a path; pass a str or a pathlib.Path|cannot read", Encoded.load, path, error=DataError)
