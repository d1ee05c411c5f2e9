# SPDX-License-Identifier: Apache-2.0
"""``fmtsim.identify_cast``: casts of torch, ml_dtypes and numpy, of a plain loop and of fmtsim, and what none gave."""

import math

import ml_dtypes
import numpy
import pytest
import torch

import fmtsim
from fmtsim.lab.cli.main import main
from fmtsim.support.errors import ArgumentError, DtypeError


def normal(*shape, scale=1.0, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def names(identification):
    return [(one.format.name, one.like, one.rounding, one.scale_rule, one.block) for one in identification.explanations]


def test_torch_by_its_float8_tensor():
    x = normal(64, 128, scale=100)
    x[0, :3] = torch.tensor([1e4, math.inf, -0.0])
    found = fmtsim.identify_cast(x, x.to(torch.float8_e5m2))
    assert ("e5m2", "torch", "", "", "") in names(found)
    assert ("e5m2", "", "nearest_even", "", "") in names(found)
    assert all(one.overflow != "saturate" for one in found.explanations)  # infinity came out
    assert {one.compared for one in found.explanations} == {x.numel()}


def test_ml_dtypes_by_its_codes():
    x = normal(64, 128, scale=300)
    codes = torch.from_numpy(x.numpy().astype(ml_dtypes.float8_e4m3fn).view(numpy.uint8))
    found = fmtsim.identify_cast(x, codes)
    assert ("e4m3", "ml_dtypes", "", "", "") in names(found)
    assert not any(one.like == "torch" for one in found.explanations)  # which saturates


def test_numpy_by_its_values_goes_to_float16_at_once():
    x = normal(64, 64).double()
    x[0, 0], x[0, 1] = 1 + 2**-11 + 2**-40, 1 + 3 * 2**-11 - 2**-40  # ties for who goes by float32
    found = fmtsim.identify_cast(x, torch.from_numpy(x.numpy().astype(numpy.float16)))
    assert ("fp16", "numpy", "", "", "") in names(found)
    assert all(one.through != "fp32" for one in found.explanations)


def test_a_plain_loop_of_blocks():
    """Blocks of 32 under the power of two below their largest magnitude over 4, written out."""
    x = normal(16, 96)
    codes, scales = torch.empty(16, 96, dtype=torch.uint8), torch.empty(16, 3, dtype=torch.uint8)
    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for i in range(16):
        for block in range(3):
            numbers = x[i, 32 * block : 32 * block + 32].tolist()
            exponent = math.frexp(max(map(abs, numbers)))[1] - 1 - 2
            scales[i, block] = exponent + 127
            for j, number in enumerate(numbers):
                scaled = abs(number) / 2**exponent
                nearest = min(range(8), key=lambda k: (abs(grid[k] - scaled), k % 2))
                codes[i, 32 * block + j] = nearest | (8 if number < 0 else 0)
    found = fmtsim.identify_cast(x, codes, scale=scales)
    assert ("mxfp4", "", "nearest_even", "floor", "32") in names(found)
    assert ("mxfp4", "torchao", "", "", "32") in names(found)
    # two codes a byte, the low half first and the high half first
    for low, high in ((0, 1), (1, 0)):
        packed = codes[:, low::2] | codes[:, high::2] << 4
        again = fmtsim.identify_cast(x, packed, scale=scales)
        assert ("mxfp4", "", "nearest_even", "floor", "32") in names(again)
        assert any("high half" in note for note in again.notes) == bool(low)


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("mxfp4", {"scale_rule": "even"}), ("nvfp4", {}), ("int8_channel", {}), ("e3m4", {"rounding": "toward_zero"}),
        ("e4m3", {"rounding": "nearest_away", "overflow": "ieee"}),
    ],
)  # fmt: skip
def test_own_casts_are_named(format, options):
    x = normal(32, 256, scale=20)
    x[:, :16] = torch.round(x[:, :16])  # some ties
    y = fmtsim.quantize(x, format, **options)
    found = fmtsim.identify_cast(x, y)
    wanted = {"rounding": "nearest_even"} | options
    assert any(
        one.format.name == format and not one.like
        and all(getattr(one, name) in ("", value) for name, value in wanted.items())
        for one in found.explanations
    )  # fmt: skip
    for one in found.explanations:
        if not one.through:
            again = fmtsim.quantize(x, **one.options)
            assert torch.equal(again, y.to(again.dtype)), one


def test_every_profile_names_itself():
    x = normal(8, 256, scale=3)
    missing = []
    for like in fmtsim.list_profiles():
        from fmtsim.casts.profile import library_profiles

        for profile in library_profiles(like.partition("/")[0]):
            dtype = {"fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16}.get(profile.inputs[0])
            if profile.like != like or dtype is None:
                continue
            numbers, name = x.to(dtype), profile.formats[0]
            y = fmtsim.quantize(numbers, name, like=like)
            if torch.equal(y, numbers):
                continue
            found = fmtsim.identify_cast(numbers, y, format=name)
            if (like, name) not in {(one.like, one.format.name) for one in found.explanations}:
                missing.append((like, name))
    assert missing == []


def test_a_probe_tells_groups_apart_and_refine_keeps_what_fits():
    x = normal(16, 64)
    found = fmtsim.identify_cast(x, fmtsim.quantize(x, "e4m3", like="torch"))
    assert len(found.groups) > 1  # ties and overflow did not occur
    probe = found.probe()
    refined = found.refine(probe, fmtsim.quantize(probe, "e4m3", like="torch"))
    assert len(refined.groups) == 1 and any(one.like == "torch" for one in refined.explanations)
    assert all(one.rounding in ("", "nearest_even") for one in refined.explanations)


def test_the_nearest_explanation_and_the_element_that_rules_it_out():
    x = normal(16, 64)
    y = fmtsim.quantize(x, "mxfp4")
    y[3, 7] *= 2
    found = fmtsim.identify_cast(x, y)
    assert not found.groups and found.nearest.explanation.format.name == "mxfp4"
    assert found.nearest.mismatches == 1 and found.nearest.first.index == (3, 7)
    assert found.nearest.first.hex[0] in str(found) and found.nearest.first.hex[1] in str(found)
    assert found.to_dict()["nearest"]["first"]["index"] == [3, 7]


def test_stochastic_rounding_is_said():
    x = normal(16, 64)
    found = fmtsim.identify_cast(x, fmtsim.quantize(x, "e4m3", "stochastic", generator=0))
    assert not found.groups and any("stochastic" in note for note in found.notes)
    same = fmtsim.identify_cast(x, x)
    assert same.notes[0] == "the result is x itself: nothing was rounded here; pass what was cast"


@pytest.mark.parametrize("rows", [128, 512])
def test_blocks_of_several_rows_stay_whole_in_samples(rows):
    """Tiles of 128 x 128 by their largest magnitude over 448, written out: values, and codes with a scale a tile."""
    x = normal(rows, 256, scale=3)
    tiles = x.reshape(rows // 128, 128, 2, 128)
    scales = tiles.abs().amax((1, 3), keepdim=True) / 448
    codes = (tiles / scales).to(torch.float8_e4m3fn)
    for result, scale in (
        ((codes.float() * scales).reshape(x.shape), None),
        (codes.reshape(x.shape), scales[:, 0, :, 0]),
    ):
        found = fmtsim.identify_cast(x, result, scale=scale)
        assert ("e4m3, amax, divide", "", "nearest_even", "", "128x128") in names(found)
        assert {one.compared for one in found.explanations} == {x.numel()}


@pytest.mark.parametrize("block", [16, 64, 128])
def test_powers_of_two_of_other_blocks(block):
    x = normal(16, 256)
    blocks = x.reshape(16, -1, block)
    scales = torch.exp2(torch.frexp(blocks.abs().amax(-1, keepdim=True))[1] - 9.0)  # of e4m3, whose exponent ends at 8
    y = ((blocks / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales).reshape(x.shape)
    found = fmtsim.identify_cast(x, y)
    assert ("e4m3, power of two", "", "nearest_even", "floor", str(block)) in names(found)
    for one in found.explanations:
        assert torch.equal(fmtsim.quantize(x, **one.options), y), one


def test_scales_in_float16_and_formats_between_16_bits_and_x():
    x = normal(32, 128)
    blocks = x.reshape(32, 4, 32)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half().float()
    y = ((blocks / scales).round().clamp(-127, 127) * scales).reshape(x.shape)  # with -0
    found = fmtsim.identify_cast(x, y)
    assert ("int8, amax, divide, fp16", "", "nearest_even", "", "32") in names(found)
    assert found.notes[0] == "without the sign of -0, which codes of integers do not have"
    assert names(fmtsim.identify_cast(x, y + 0.0)) == names(found)
    tf32 = (x.view(torch.int32) & -8192).view(torch.float32)
    assert ("tf32", "", "toward_zero", "", "") in names(fmtsim.identify_cast(x, tf32))


def test_a_library_goes_by_the_blocks_of_the_format():
    x = normal(8, 256)
    found = fmtsim.identify_cast(x, fmtsim.quantize(x, "int4_g128", like="torchao"))
    assert ("int4_g128", "torchao", "", "", "128") in names(found)


def test_bytes_of_a_packed_format_are_read_as_values():
    x = normal(8, 64)
    assert "q4_0" in {one.format.name for one in fmtsim.identify_cast(x, fmtsim.encode(x, "q4_0")).explanations}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_without_readable_real_numbers_are_refused():
    x = normal(4, 8)
    for name, bad, error, text in (
        ("x", x.to("meta"), ArgumentError, "meta"), ("result", x.to_sparse(), ArgumentError, "pass a dense tensor"),
        ("result", x.to(torch.complex64), DtypeError, "result has dtype torch.complex64; pass real numbers"),
        ("result", torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), DtypeError, r"int_repr\(\)"),
        ("dim", 7, ArgumentError, r"dim=7 is not a dimension of x of shape \(4, 8\); choose -2 to 1"),
        ("scale", 1.0, DtypeError, "scale is float; pass a torch.Tensor"),
        ("scale", torch.ones(0), ArgumentError, "scale has 0 numbers for 32 elements; pass one a block"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            fmtsim.identify_cast(**{"x": x, "result": x.half()} | {name: bad})


def test_bad_input_is_refused():
    x = normal(4, 4)
    with pytest.raises(ArgumentError, match=r"result has shape \(4, 3\), x \(4, 4\)"):
        fmtsim.identify_cast(x, x[:, :3])
    with pytest.raises(DtypeError, match=r"x has dtype torch.int64; pass what was cast"):
        fmtsim.identify_cast(x.long(), x)
    with pytest.raises(ArgumentError, match=r"nothing was cast"):
        fmtsim.identify_cast(x[:0], x[:0])
    with pytest.raises(DtypeError, match=r"result is ndarray; pass a torch.Tensor"):
        fmtsim.identify_cast(x, x.numpy())


def test_command(tmp_path, capsys):
    x = normal(16, 64)
    torch.save(x, tmp_path / "x.pt")
    torch.save(x.to(torch.float8_e4m3fn), tmp_path / "y.pt")
    files = [str(tmp_path / name) for name in ("x.pt", "y.pt")]
    assert main(["identify-cast", *files, "--probe", str(tmp_path / "p.pt")]) == 0
    assert "e4m3" in capsys.readouterr().out
    probe = torch.load(tmp_path / "p.pt")["x"]
    torch.save(probe.to(torch.float8_e4m3fn), tmp_path / "q.pt")
    assert main(["identify-cast", *files, "--refine", str(tmp_path / "p.pt"), str(tmp_path / "q.pt")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:3] == ["1", "e4m3", "torch"] for line in lines)
    assert not any(line.startswith("2 ") for line in lines)  # one group is left
    torch.save(x * 1.5, tmp_path / "z.pt")
    assert main(["identify-cast", files[0], str(tmp_path / "z.pt")]) == 1


@pytest.mark.parametrize(("top", "least"), [(8.0, -8), (127.5, -128), (128.0, -128)])
def test_integers_scaled_beyond_their_largest_are_named(top: float, least: int) -> None:
    """Their scale is amax over 8, 127.5 or 128, half a step or a step beyond; 7.5 is what compressed-tensors does."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(4))
    scale = x.unflatten(1, (-1, 64)).abs().amax(2, keepdim=True) / top
    result = (x.unflatten(1, (-1, 64)) / scale).round().clamp(least, -least - 1) * scale
    names = {one.format.name for one in fmtsim.identify_cast(x, result.flatten(1)).explanations}
    assert names == {f"int{4 if top == 8 else 8}_full, amax to {top:g}"}


@pytest.mark.parametrize("value", [math.nan, 0.0])
def test_a_result_of_one_value_is_told_as_such(value):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    (note,) = fmtsim.identify_cast(x, torch.full_like(x, value)).notes
    assert note.startswith(f"every result is {value}, which no explanation gives: it was not written")
