# SPDX-License-Identifier: Apache-2.0
"""fmtsim vectors: bits against the oracles, groups that hold what their names say, planted errors."""

import hashlib
import itertools
import json
import math
from functools import cache

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

import fmtsim
from fmtsim.formats.packed import PackedFormat
from fmtsim.formats.registry import get_format
from fmtsim.lab.cli.main import main
from fmtsim.lab.verify.vectors import make_vectors, read_vectors, unpacked
from fmtsim.rounding.modes import get_rounding
from fmtsim.rounding.oracle import decode_value, encode_value
from fmtsim.scaling.oracle import quantize_matrix
from tests.support.bits import assert_same_bits

PLAIN = {"rounding": "nearest_even", "overflow": None, "random_bits": None, "generator": 0}


@cache
def made(name: str, **options):
    vectors, _ = make_vectors(get_format(name), PLAIN | options)
    return vectors


def group(vectors, name: str) -> torch.Tensor:
    first, last = vectors.groups[name]
    return vectors.tensors["input"][first : last + 1]


def f32(x: float) -> float:
    return float(numpy.float32(x))


def trio(x: float) -> set[float]:
    single = numpy.float32(x)
    return {float(y) for y in (numpy.nextafter(single, -numpy.inf), single, numpy.nextafter(single, numpy.inf))}


@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away", "up", "to_odd"])
@pytest.mark.parametrize("name", ["e4m3", "e2m1", "e5m2", "bf16", "int8", "nf4", "lns8_g8", "hif8"])
def test_codes_and_values_of_elements_are_the_oracle_s(name, rounding):
    fmt, vectors = get_format(name), made(name, rounding=rounding)
    codes = [
        encode_value(x, fmt, get_rounding(rounding), fmt.default_overflow) for x in vectors.tensors["input"].tolist()
    ]
    mask = (1 << fmt.bits) - 1
    assert [code & mask for code in unpacked(vectors, vectors.tensors["codes"]).tolist()] == codes
    values = torch.tensor([decode_value(code, fmt) for code in codes], dtype=torch.float64)
    assert_same_bits(vectors.tensors["decoded"], values.to(vectors.tensors["decoded"].dtype))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "e4m3_1x128", "mxfp8_e4m3_rceil", "int8_tensor", "uint4_g32_zp"])
def test_codes_and_scales_of_blocks_are_the_oracle_s(name):
    fmt, vectors = get_format(name), made(name)
    scales = vectors.tensors["scales"]
    if scales.dtype == torch.uint8:
        scales = torch.tensor([decode_value(code, fmt.scale) for code in scales.flatten().tolist()]).view(scales.shape)
    codes, x = unpacked(vectors, vectors.tensors["codes"]), vectors.tensors["input"]
    cases = sorted({*range(0, len(x), 1000), *itertools.chain(*vectors.groups.values())})
    for case in cases:
        how = get_rounding("nearest_even")
        expected = quantize_matrix(
            x[case].double().tolist(), fmt, how, fmt.default_overflow, "float32", get_format("fp32"), None
        )
        assert codes[case].tolist() == expected.codes
        assert_same_bits(scales[case].float(), torch.tensor(expected.scales, dtype=torch.float32))
        assert_same_bits(vectors.tensors["decoded"][case], torch.tensor(expected.values, dtype=torch.float32))
        if fmt.tensor_scale:
            assert vectors.tensors["tensor_scale"][case].item() == expected.tensor_scale


def values_of(name: str) -> list[float]:
    fmt = get_format(name)
    return sorted({v for code in range(1 << fmt.bits) if math.isfinite(v := decode_value(code, fmt))})


@pytest.mark.parametrize("name", ["e4m3", "e2m1", "e5m2", "int8", "ue4m3"])
def test_groups_of_elements_hold_what_their_names_say(name):
    vectors, values, fmt = made(name), values_of(name), get_format(name)
    assert set(group(vectors, "values").tolist()) == set(values)
    ties = set().union(*(trio((low + high) / 2) for low, high in itertools.pairwise(values)))
    assert set(group(vectors, "ties").tolist()) == ties
    beyond = group(vectors, "overflow").tolist()
    assert {fmt.max, fmt.max + (values[-1] - values[-2]) / 2, f32(3.4028234663852886e38), math.inf} <= set(beyond)
    assert min(abs(x) for x in beyond) == min(trio(fmt.max))
    smallest = min(v for v in values if v > 0)
    assert set(group(vectors, "underflow").tolist()) == set().union(
        *(trio(sign * part * smallest) for sign in (1, -1) for part in (0.25, 0.5, 0.75, 1.0))
    )
    if name != "int8":
        low = [v for v in values if 0 < abs(v) <= fmt.min_normal]
        assert set(group(vectors, "subnormals").tolist()) == set().union(*map(trio, low))
    specials = group(vectors, "specials").tolist()
    assert any(map(math.isnan, specials)) and {math.inf, -math.inf, 2.0**-149} <= set(specials)
    assert {math.copysign(1, x) for x in specials if x == 0} == {1.0, -1.0}


def test_wide_formats_have_ties_where_float32_has_room():
    values = group(made("bf16"), "ties")
    bits = values.view(torch.int32) & 0xFFFF
    assert set(bits.tolist()) == {0x7FFF, 0x8000, 0x8001} and len(values) > 100
    assert "ties" not in made("fp32").groups and "ties" not in made("fp64").groups


@pytest.mark.parametrize(("name", "switch"), [("mxfp4", 1.75), ("mxfp8_e4m3", 1.9375), ("e4m3_1x128", 1.75)])
def test_scale_boundaries_are_at_every_power_of_two_and_switch(name, switch):
    vectors = made(name)
    amaxes = {x.abs().max().item() for part in ("scale_boundaries", "tiny") for x in group(vectors, part)}
    top = math.frexp(get_format(name).element.max)[0] * 2
    for exponent in range(-126, 128):
        for significand in (1.0, top, switch):
            assert trio(significand * 2.0**exponent) <= amaxes
    assert {2.0**k for k in range(-149, -126)} <= amaxes
    assert all(x.abs().max() < 2.0**-126 for x in group(vectors, "tiny"))


def test_scales_of_mxfp4_change_at_powers_of_two_alone():
    vectors = made("mxfp4")
    for case in range(vectors.groups["scale_boundaries"][1] + 1):
        exponent = math.frexp(vectors.tensors["input"][case].abs().max().item())[1] - 1
        assert vectors.tensors["scales"][case].item() == max(exponent - 2 + 127, 0)


def test_ties_of_blocks_are_under_a_scale_of_one():
    for name, one in (("mxfp4", 127), ("nvfp4", 0x38), ("mxfp8_e4m3", 127)):
        vectors = made(name)
        for part in ("ties", "subnormals"):
            first, last = vectors.groups[part]
            assert set(vectors.tensors["scales"][first : last + 1, 0, 0].tolist()) == {one}
    found = set(group(made("nvfp4"), "ties")[:, 0, :16].flatten().tolist())
    assert {s * (a + b) / 2 for a, b in itertools.pairwise([0, 0.5, 1, 1.5, 2, 3, 4, 6]) for s in (1, -1)} <= found


def test_scale_ties_of_nvfp4_lie_half_way_between_two_scales():
    amaxes = [x[0, :16].abs().max().item() for x in group(made("nvfp4"), "scale_ties")]
    values = [v for v in values_of("e4m3") if v >= 0]
    for low, high in itertools.pairwise(values):
        assert trio(6 * (low + high) / 2) <= set(amaxes)


def test_blocks_of_zeros_nan_and_infinity():
    vectors = made("mxfp4")
    plus, minus, mixed, numbers = group(vectors, "zeros")
    assert not plus.signbit().any() and minus.signbit().all() and not mixed.any() and mixed.signbit().sum() == 16
    assert (numbers.signbit() & (numbers == 0)).any() and numbers.any()
    cases = group(vectors, "nonfinite").flatten(1)
    assert [int(x.isnan().sum()) for x in cases] == [1, 1, 32, 0, 0, 0, 0, 0, 0]
    assert [int(x.isinf().sum()) for x in cases] == [0, 0, 0, 1, 1, 32, 1, 1, 32]
    assert [int((x == 0).sum()) for x in cases][1::3] == [31] * 3


def test_tiles_have_their_amax_in_the_last_row_and_ggml_its_bytes():
    tiles = group(made("e4m3_128x128"), "scale_boundaries")
    assert tiles.shape[1:] == (128, 128) and (tiles[:, -1].abs().amax(-1) == tiles.abs().amax((1, 2))).all()
    blocks = made("q8_0")
    assert blocks.tensors["codes"].shape[1:] == (1, 34) and "nonfinite" not in blocks.groups


# sha256 of vectors.txt, written by `fmtsim vectors NAME`
RECORDED = {
    "e4m3": "24b46f14e898dbc3", "nvfp4": "8404ae91919b4c51",
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_files_are_reproducible(name, tmp_path, capsys):
    for folder in ("a", "b"):
        assert main(["vectors", name, "--out", str(tmp_path / folder)]) == 0
    capsys.readouterr()
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["README.md", "vectors.safetensors", "vectors.txt"]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    digest = hashlib.sha256((tmp_path / "a" / "vectors.txt").read_bytes()).hexdigest()
    assert digest[:16] == RECORDED[name]


def test_stochastic_rounding_follows_its_seed():
    one, two, other = (made("e2m1", rounding="stochastic", generator=seed, random_bits=8) for seed in (1, 1, 2))
    assert torch.equal(one.tensors["codes"], two.tensors["codes"])
    assert not torch.equal(one.tensors["codes"], other.tensors["codes"])


@pytest.fixture
def folder(request, tmp_path, capsys):
    name, *more = request.param.split()
    assert main(["vectors", name, "--out", str(tmp_path / "v"), *more]) == 0
    capsys.readouterr()
    return tmp_path / "v"


@pytest.mark.parametrize(
    "folder",
    ["e4m3", "e2m1 --rounding up", "nvfp4", "e4m3_128x128", "q4_0", "int8_channel", "logfmt8",
     "e4m3 --block-size 16 --scale-rule rceil", "e2m1 --rounding stochastic --random-bits 4 --seed 3"],
    indirect=True,
)  # fmt: skip
def test_a_planted_error_is_found_and_named(folder, tmp_path, capsys):
    files, vectors = load_file(folder / "vectors.safetensors"), read_vectors(folder)
    numpy.save(tmp_path / "codes.npy", files["codes"].numpy())
    numpy.save(tmp_path / "values.npy", files["decoded"].numpy())
    right = [
        "vectors", "--check", str(folder), "--encode", str(tmp_path / "codes.npy"), "--decode",
        str(tmp_path / "values.npy"),
    ]  # fmt: skip
    assert main(right) == 0
    assert capsys.readouterr().out.count(" match") == 2
    # one code, of the last case but one of the first group; one an element where the format has such
    codes = unpacked(vectors, files["codes"]).clone()
    name, (_, last) = next(iter(vectors.groups.items()))
    index = (last - 1, *([0, 3] if codes.dim() == 3 else []))
    codes[index] ^= 1
    save_file({"codes": codes.contiguous()}, tmp_path / "mine.safetensors")
    words = ["vectors", "--check", str(folder), "--encode", str(tmp_path / "mine.safetensors")]
    assert main([*words, "--json"]) == 1
    (part,) = json.loads(capsys.readouterr().out)["parts"]
    assert (part["part"], part["mismatches"], part["compared"]) == ("codes", 1, codes.numel())
    (first,) = part["first"]
    assert (first["group"], first["index"]) == (name, list(index))
    assert int(first["expected"], 16) ^ int(first["actual"], 16) == 1
    packed = isinstance(vectors.format, PackedFormat)
    assert ("does not follow" in first["rule"]) if packed else (": " in first["rule"] and "input" in first)
    assert main(words) == 1
    assert f"{name} {list(index)}: " in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["nvfp4"], indirect=True)
def test_wrong_scales_and_values_are_named(folder, tmp_path, capsys):
    files = load_file(folder / "vectors.safetensors")
    mine = {"codes": files["codes"], "scales": files["scales"].clone(), "tensor_scale": files["tensor_scale"].clone()}
    mine["scales"][7, 0, 0] += 1
    mine["tensor_scale"][9] *= 2
    save_file(mine, tmp_path / "mine.safetensors")
    values = files["decoded"].clone()
    values[3, 0, 2] = -0.0 if values[3, 0, 2] == 0 else 0.5
    values[values.isnan()] = -math.nan
    numpy.save(tmp_path / "values.npy", values.numpy())
    words = ["--encode", str(tmp_path / "mine.safetensors"), "--decode", str(tmp_path / "values.npy")]
    assert main(["vectors", "--check", str(folder), *words, "--json"]) == 1
    parts = {part["part"]: part for part in json.loads(capsys.readouterr().out)["parts"]}
    assert {name: part["mismatches"] for name, part in parts.items()} == {
        "codes": 0, "scales": 1, "tensor_scale": 1, "decoded": 1,
    }  # fmt: skip
    assert parts["scales"]["first"][0]["index"] == [7, 0, 0] and "amax" in parts["scales"]["first"][0]["rule"]
    assert parts["tensor_scale"]["first"][0]["index"] == [9] and "tensor" in parts["tensor_scale"]["first"][0]["rule"]
    assert parts["decoded"]["first"][0]["index"] == [3, 0, 2]


@pytest.mark.parametrize("folder", ["e2m1"], indirect=True)
def test_nonsense_gets_our_errors(folder, tmp_path, capsys):
    def refused(*words: str) -> str:
        assert main(list(words)) == 2
        text = capsys.readouterr().err
        assert text.startswith("fmtsim: error: ") and text.count("\n") == 1
        return text

    check = ["vectors", "--check", str(folder)]
    numpy.save(tmp_path / "short.npy", numpy.zeros(3, numpy.uint8))
    numpy.save(tmp_path / "floats.npy", numpy.zeros(len(read_vectors(folder).tensors["input"]), numpy.float32))
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "two.safetensors")
    assert "did you mean 'e4m3'" in refused("vectors", "e4m4x", "--out", str(tmp_path / "n"))
    assert "choose q2_k" in refused("vectors", "iq3_s", "--out", str(tmp_path / "n"))
    assert "--random-bits 3 belongs to" in refused(
        "vectors", "e2m1", "--out", str(tmp_path / "n"), "--random-bits", "3"
    )
    assert "is a file; choose a folder" in refused("vectors", "e2m1", "--out", str(tmp_path / "short.npy"))
    assert "pass --decode FILE, --encode FILE, or both" in refused(*check)
    assert "no such file" in refused(*check, "--encode", str(tmp_path / "none.npy"))
    assert "codes is uint8 [3]; pass uint8 [" in refused(*check, "--encode", str(tmp_path / "short.npy"))
    assert "codes is float32 [" in refused(*check, "--encode", str(tmp_path / "floats.npy"))
    assert "decoded is uint8 [3]; pass float32 [" in refused(*check, "--decode", str(tmp_path / "short.npy"))
    assert "holds a, b; name a tensor codes" in refused(*check, "--encode", str(tmp_path / "two.safetensors"))
    save_file({"scales": torch.zeros(1)}, tmp_path / "scales.safetensors")
    assert "vectors of e2m1 have no scales; pass input" in refused(
        *check, "--encode", str(tmp_path / "scales.safetensors")
    )
    short = str(tmp_path / "short.npy")
    assert "cannot read" in refused("vectors", "--check", str(tmp_path / "absent"), "--encode", short)
    data = bytearray((folder / "vectors.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "vectors.safetensors").write_bytes(data)
    assert "it is corrupt, write it again" in refused(*check, "--encode", short)
    fmtsim.encode(torch.ones(4), "e2m1").save(folder / "vectors.safetensors")
    assert "holds no vectors" in refused(*check, "--encode", short)


def test_vectors_at_the_prompt_are_counts_and_names():
    text = repr(fmtsim.vectors("e2m1"))
    assert text.startswith("Vectors(e2m1, {'generator': 0}: 15 values, 42 ties, ") and text.endswith("codes, decoded)")
