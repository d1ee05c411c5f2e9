# SPDX-License-Identifier: Apache-2.0
"""Names that people type: each is taken, or answered with those that it can mean; what is printed is taken back."""

import ast
import dataclasses
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

import fmtsim
from fmtsim.distributed import REDUCTIONS, get_reduction
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat, with_block
from fmtsim.formats.scaling import SCALE_RULES, SCALINGS
from fmtsim.gemm.model_layers import find_models, list_models
from fmtsim.lab.cli.main import main
from fmtsim.optim import get_scheme, list_schemes
from fmtsim.rounding.modes import ALIASES, MODES
from fmtsim.support.errors import ArgumentError, FmtsimError, FormatError
from tests.support.refusals import refused

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
    refused(f"unknown format '{name}'", fmtsim.get_format, name, error=FormatError)


@pytest.mark.parametrize(
    ("get", "name", "found"),
    [(fmtsim.get_recipe, "nvfp4", "te_nvfp4"), (fmtsim.get_recipe, "mxfp8", "te_mxfp8"),
     (fmtsim.get_recipe, "w8a8", "int8_static")],
)  # fmt: skip
def test_recipes_by_their_format(get, name, found):
    assert get(name).name == found


@pytest.mark.parametrize("name", ["fp8", "int8", "fp4", "FP8"])
@pytest.mark.parametrize("kind", [None, "training", "ptq"])
def test_a_width_is_answered_with_recipes_of_it(kind, name):
    with pytest.raises(ArgumentError, match=f"recipe='{name}' is unknown.*; there are '") as error:
        fmtsim.get_recipe(name, kind=kind)
    named = re.findall(r"'(\w+)'", str(error.value).partition("there are")[2].partition(" (")[0])
    assert len(named) > 1 and all(fmtsim.get_recipe(each, kind=kind).name for each in named)
    refused("did you mean 'e4m3' or 'e5m2'", fmtsim.get_format, "fp8", error=FormatError)


def printed() -> list[tuple[str, object]]:
    """Return every name that fmtsim lists, with what has to take it."""
    taken = [(name, fmtsim.get_format) for name in fmtsim.list_formats()]
    taken += [(alias, fmtsim.get_format) for name, _ in taken for alias in fmtsim.get_format(name).aliases]
    pairs = (
        (fmtsim.list_recipes(), fmtsim.get_recipe), (fmtsim.list_targets(), fmtsim.get_target),
        (fmtsim.list_units(), fmtsim.get_unit),
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


def does(record: object) -> object:
    """Return what a format does: its fields, those of its parts included, but for names and sources."""
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        return record
    fields = (field.name for field in dataclasses.fields(record) if field.name not in ("name", "aliases", "source"))
    return type(record).__name__, {name: does(getattr(record, name)) for name in fields}


def formats_in(value: object) -> Iterator[Format]:
    """Yield every format that a record holds, at any depth."""
    if isinstance(value, Format):
        yield value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from formats_in(part)


SOME = [
    *fmtsim.list_formats("block"),
    *[n for n in fmtsim.list_formats()[::4] if n not in fmtsim.list_formats("packed")],
]


def mistaken(formats: set[Format]) -> list[str]:
    """Return the formats whose name is refused, or means another one."""
    found = []
    for fmt in formats:
        try:
            same = does(fmtsim.get_format(fmt.name)) == does(fmt)
        except FmtsimError:
            same = False
        found += [] if same else [repr(fmt)]
    return sorted(found)


def test_formats_in_catalogues_are_found_by_their_names():
    """Tables, reports and explanations print the names of formats that recipes, states and units hold."""
    lists = ((fmtsim.list_formats(), fmtsim.get_format), (fmtsim.list_recipes(), fmtsim.get_recipe),
             (fmtsim.list_units(), fmtsim.get_unit),
             (list_schemes(), get_scheme), (REDUCTIONS, get_reduction))  # fmt: skip
    found = set(formats_in([get(name) for names, get in lists for name in names]))
    assert len(found) > 250 and mistaken(found) == []


def test_formats_that_verbs_make_are_found_by_their_names():
    """Other blocks and scale rules make another name, which get_format reads."""
    found, refused = set(), 0
    blocks = (None, (4, 24), (None, None), (1, None), (None, 1))
    for name, block, rule in itertools.product(SOME, blocks, (None, *SCALE_RULES)):
        try:
            found.add(with_block(fmtsim.get_format(name), block, rule))
        except FmtsimError:
            refused += 1
    again = with_block(with_block(fmtsim.get_format("mxfp4"), 16, "even"), 48)
    assert len(found) > 1500 and refused < 1200 and mistaken({*found, again}) == []
    assert mistaken({dataclasses.replace(again, name="e2m1"), dataclasses.replace(again, name="e2m1_0x2")}) == [
        "BlockFormat('e2m1': e2m1 in blocks of 1x48, scale e8m0 by even)",
        "BlockFormat('e2m1_0x2': e2m1 in blocks of 1x48, scale e8m0 by even)",
    ]


def test_formats_of_configs_are_found_by_their_names():
    elements = [name for name in SOME if not isinstance(fmtsim.get_format(name), BlockFormat | LogTileFormat)]
    configs = [fmtsim.linear_config(x=name, w=name, g=name, scaling=scaling)
               for name, scaling in itertools.product(elements, (None, *SCALINGS))]  # fmt: skip
    assert mistaken(set(formats_in(configs))) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [("e4m3_tensor_amax", ("e4m3", (None, None), None)), ("E4M3_1x64", ("e4m3", 64, None)),
     ("int6_channel_amax", ("int6", (1, None), "amax")), ("mxfp4_allx16_even", ("mxfp4", (None, 16), "even")),
     ("logfmt8_2x64", ("logfmt8", (2, 64), None)), ("fp8_e4m3", ("e4m3", None, None))],
)  # fmt: skip
def test_names_with_blocks(name, expected):
    base, block, rule = expected
    assert fmtsim.get_format(name) == with_block(fmtsim.get_format(base), block, rule)


@pytest.mark.parametrize("name", ["e4m3_0x4", "e4m3_1x4_flor", "e4m33_1x4", "_1x4", "e4m3_1x", "zz_1x4_floor"])
def test_blocks_of_nothing_are_unknown(name):
    refused(f"unknown format '{name}'|e4m33: mantissa_bits=33", fmtsim.get_format, name, error=FormatError)


# A list in an error's text, with a wrong word in front: what takes its names.
LISTS: dict[str, Callable[[str], object]] = {
    "unit": fmtsim.get_unit, "target": fmtsim.get_target, "recipe": fmtsim.get_recipe, "scheme": get_scheme,
    "ptq recipe": partial(fmtsim.get_recipe, kind="ptq"), "reduction": get_reduction, "format": fmtsim.get_format,
    "rounding": lambda name: fmtsim.Rounding(mode=name), "kind": fmtsim.list_formats,
    "model": lambda name: find_models([name]),
    "scaling": lambda name: fmtsim.linear_config(x="e4m3", w="e4m3", g="e5m2", scaling=name),
    "scale rule": lambda name: fmtsim.quantize(torch.ones(2, 32), "mxfp8", scale_rule=name),
    "overflow": lambda name: fmtsim.quantize(FROM_ZERO, "e4m3", overflow=name),
}  # fmt: skip
WRONG = {
    "unit": "hopper.wgm", "target": "h2x", "recipe": "te_nvp4", "ptq recipe": "w4a", "scheme": "bnb", "format": "e4m3q",
    "reduction": "fp8l", "rounding": "stochstic", "kind": "blocks", "model": list_models()[0][:-1],
    "scaling": "tensors", "scale rule": "flor", "overflow": "saturated",
}  # fmt: skip
_LISTED = re.compile(r"(?:choose(?: one of)?|did you mean|there are) (.*?)(?:\(|\)|; |\?|$)")


@pytest.mark.parametrize("what", LISTS)
def test_names_that_errors_offer_are_taken(what):
    """Every word of "did you mean" and of "choose one of" is a name."""
    with pytest.raises(FmtsimError) as error:
        LISTS[what](WRONG[what])
    offered = [word.strip("' ") for text in _LISTED.findall(str(error.value)) for word in re.split(",| or ", text)]
    names = [word for word in offered if re.fullmatch(r"[\w.+-]+", word) and word != "None"]
    assert names, str(error.value)
    for name in names:
        LISTS[what](name)


def test_names_in_reports_are_taken_back():
    """A layer's name and type narrow a rule; formats of an observation are found."""
    model = fmtsim.convert(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32)),
                           recipe=fmtsim.linear_config(x="int6", w="int6", g="int6", scaling="channel"))  # fmt: skip
    report = fmtsim.report(model)
    for name, kind in [(name, row.type) for row in report.rows for name in row.name.split(",")]:
        recipe = fmtsim.Recipe(name="one", linear=fmtsim.LinearConfig(), rules=(fmtsim.Rule(name=name, kind=kind),))
        fmtsim.convert(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32)), recipe)
    with fmtsim.observe(model) as stats:
        model(torch.ones(4, 32)).sum().backward()
    seen = stats.worst(99)
    assert {fmtsim.get_format(loss.stats.format).name for loss in seen} == {"int6_channel_amax"}
    assert all(stats[loss.layer][loss.operand] is loss.stats for loss in seen)


def test_names_on_the_command_line_are_taken_back(capsys):
    """What ``--list`` and ``list`` print is what ``--only`` and ``--recipe`` take."""
    assert main(["formats", "e4m3_1x64_amax", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "e4m3_1x64_amax"
    assert main(["train", "--recipe", "list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line and line[0] != "-"]
    known = set(fmtsim.list_recipes(kind="training"))
    assert known <= set(names)


@pytest.mark.parametrize("record", [fmtsim.Quantizer, fmtsim.Rounding])
def test_type_checkers_see_the_fields_of_records_that_take_names(record):
    """What only type checkers read has the same arguments, in the same order, as the record."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(record)))
    (written,) = (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == "__init__")
    arguments = [*written.args.args[1:], *written.args.kwonlyargs]
    assert [one.arg for one in arguments] == [field.name for field in dataclasses.fields(record)]
