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
    assert same.notes == ("the result is x itself: nothing was rounded here; pass what was cast",)


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
    assert main(["identify-cast", files[0], files[0]]) == 1
