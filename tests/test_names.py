"""Names that people type: each is taken, or answered with those that it can mean; what is printed is taken back."""

import re

import pytest
import torch

import fmtsim
from fmtsim.cli.main import main
from fmtsim.distributed import REDUCTIONS, get_reduction
from fmtsim.errors import ArgumentError, FormatError
from fmtsim.formats.scaling import SCALE_RULES
from fmtsim.gemm.layers.scalings import SCALINGS
from fmtsim.optim import get_scheme, list_schemes
from fmtsim.rounding.modes import ALIASES, MODES

FROM_ZERO = torch.tensor([1.0625, -1.0625, 1.1875, -3.3])


@pytest.mark.parametrize(("alias", "mode"), ALIASES.items())
def test_a_short_name_is_its_rounding(alias, mode):
    for name in (alias, alias.upper(), f" {mode.upper()}"):
        assert fmtsim.Rounding(mode=name) == fmtsim.Rounding(mode=mode)
        got = fmtsim.quantize(FROM_ZERO, "e4m3", rounding=name, generator=3 if mode == "stochastic" else None)
        assert got.tolist() == fmtsim.quantize(
            FROM_ZERO, "e4m3", rounding=mode, generator=3 if mode == "stochastic" else None
        ).tolist()  # fmt: skip


def test_what_short_names_do():
    """IEEE 754: ties to even and away, toward zero, up and down."""
    ties = {"rne": [1.0, -1.0, 1.25, -3.25], "rna": [1.125, -1.125, 1.25, -3.25], "rtz": [1.0, -1.0, 1.125, -3.25],
            "rtp": [1.125, -1.0, 1.25, -3.25], "rd": [1.0, -1.125, 1.125, -3.5]}  # fmt: skip
    assert {name: fmtsim.quantize(FROM_ZERO, "e4m3", rounding=name).tolist() for name in ties} == ties


def test_rtn_is_read_in_two_ways():
    with pytest.raises(FormatError, match="'rtn': toward negative is 'down', round to nearest 'nearest_even'"):
        fmtsim.quantize(FROM_ZERO, "e4m3", rounding="rtn")


@pytest.mark.parametrize(
    ("name", "format"),
    [("fp8_e4m3", "e4m3"), ("fp8_e5m2", "e5m2"), ("FP8_E4M3FN", "e4m3"), ("fp8_e4m3fnuz", "e4m3fnuz"),
     ("fp6_e3m2", "e3m2"), ("fp4_e2m1", "e2m1"), ("fp8_e3m4", "e3m4")],
)  # fmt: skip
def test_formats_with_their_width_in_front(name, format):
    assert fmtsim.get_format(name) is fmtsim.get_format(format)


@pytest.mark.parametrize("name", ["fp4_e4m3", "fp16_e4m3", "fp8_int8"])
def test_a_width_that_is_not_the_formats_is_unknown(name):
    with pytest.raises(FormatError, match=f"unknown format '{name}'"):
        fmtsim.get_format(name)


@pytest.mark.parametrize(
    ("get", "name", "found"),
    [(fmtsim.get_recipe, "nvfp4", "te_nvfp4"), (fmtsim.get_recipe, "mxfp8", "te_mxfp8"),
     (fmtsim.get_ptq_recipe, "nvfp4", "nvfp4"), (fmtsim.get_ptq_recipe, "mxfp8", "mxfp8")],
)  # fmt: skip
def test_recipes_by_their_format(get, name, found):
    assert get(name).name == found


@pytest.mark.parametrize("name", ["fp8", "int8", "fp4", "FP8"])
@pytest.mark.parametrize("get", [fmtsim.get_recipe, fmtsim.get_ptq_recipe])
def test_a_width_is_answered_with_recipes_of_it(get, name):
    with pytest.raises(ArgumentError, match=f"recipe='{name}' is unknown.*; there are '") as error:
        get(name)
    named = re.findall(r"'(\w+)'", str(error.value).partition("there are")[2])
    assert len(named) > 1 and all(get(each).name for each in named)
    with pytest.raises(FormatError, match="did you mean 'e4m3' or 'e5m2'"):
        fmtsim.get_format("fp8")


def printed() -> list[tuple[str, object]]:
    """Return every name that fmtsim lists, with what has to take it."""
    taken = [(name, fmtsim.get_format) for name in fmtsim.list_formats()]
    taken += [(alias, fmtsim.get_format) for name, _ in taken for alias in fmtsim.get_format(name).aliases]
    pairs = (
        (fmtsim.list_recipes(), fmtsim.get_recipe), (fmtsim.list_ptq_recipes(), fmtsim.get_ptq_recipe),
        (fmtsim.list_targets(), fmtsim.get_target), (fmtsim.list_units(), fmtsim.get_unit),
        ((*MODES, *ALIASES), lambda name: fmtsim.Rounding(mode=name)), (list_schemes(), get_scheme),
        (REDUCTIONS, get_reduction),
        (SCALINGS, lambda name: fmtsim.linear_config(x="e4m3", w="e4m3", g="e5m2", scaling=name)),
        (SCALE_RULES, lambda name: fmtsim.quantize(torch.ones(2, 32), "mxfp8", scale_rule=name)),
    )  # fmt: skip
    taken += [(name, take) for names, take in pairs for name in names]
    taken += [(alias, fmtsim.get_recipe) for name in fmtsim.list_recipes() for alias in fmtsim.get_recipe(name).aliases]
    return taken


def test_every_name_that_is_listed_is_taken():
    refused = []
    for name, take in (names := printed()):
        try:
            take(name)
        except fmtsim.FmtsimError as error:
            refused.append((name, str(error)))
    assert len(names) > 600 and refused == []


def test_names_of_records_and_of_the_command_line_are_taken_back(capsys):
    for name in fmtsim.list_formats():
        record = fmtsim.get_format(name)
        assert fmtsim.get_format(record.name) is record
    assert main(["formats"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [fmtsim.get_format(line.split()[0]).name for line in lines] == fmtsim.list_formats()
    assert main(["cast", "1", "--to", "fp8_e4m3", "--rounding", "RZ", "--json"]) == 0
    assert '"rounding": "toward_zero"' in capsys.readouterr().out


def test_quantizers_take_names():
    ours = fmtsim.Quantizer(format="fp8_e4m3", rounding="sr")
    assert ours == fmtsim.Quantizer(format=fmtsim.get_format("e4m3"), rounding=fmtsim.Rounding(mode="stochastic"))
    assert fmtsim.Quantizer(format=torch.float8_e5m2).format is fmtsim.get_format("e5m2")
