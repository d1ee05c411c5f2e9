# SPDX-License-Identifier: Apache-2.0
"""The command that plants errors: where it plants them, which tests it asks, and that it tells found from missed."""

import ast
import dataclasses
import random
from types import SimpleNamespace

import pytest

from tools.mutants import seen
from tools.mutants.__main__ import age_of_map, draw, equivalents, missing, package_files
from tools.mutants.seen import COMPILED, collected, read_map
from tools.mutants.sites import ROOT, Mutant, mutants_of
from tools.mutants.trial import Trials

PLACES = "fmtsim/formats/floating.py"


def test_mutants_change_one_place_and_still_parse():
    files = [file for file in package_files() if file.endswith(".py")]
    for file in random.Random(1).sample(files, 40):
        found = mutants_of(file)
        assert len({(m.start, m.end, m.new) for m in found}) == len(found)
        for mutant in random.Random(2).sample(found, min(len(found), 10)):
            assert mutant.applied() != (ROOT / file).read_bytes()
            ast.parse(mutant.applied())


def test_mutants_of_kernels_leave_comments_and_strings_alone():
    for mutant in mutants_of("fmtsim/cuda/cast/scale.cuh"):
        text = (ROOT / mutant.file).read_text()
        line = text[text.rfind("\n", 0, mutant.start) + 1 : mutant.start]
        assert "//" not in line and not line.lstrip().startswith("#") and mutant.old != mutant.new


def test_mutants_of_kernels_leave_sizes_of_arrays_and_launches_alone():
    found = {mutant.key.split(": ", 1)[1] for mutant in mutants_of("fmtsim/cuda/optim/optimizer.cu")}
    assert not any("__launch_bounds__(256" in key or "__shared__ u32 shared[8]" in key for key in found)
    assert any("old = prepared(as_float(found[3])" in key for key in found)  # an index is not a size


def test_what_no_test_is_meant_to_see_is_left_out():
    text = (ROOT / PLACES).read_text()
    raises = {node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Raise | ast.Assert)}
    assert not raises & {mutant.line for mutant in mutants_of(PLACES)}
    keys = [mutant.key for mutant in mutants_of("fmtsim/machine/norm.py")]
    keys = [key for key in keys if ", 1, 8 * width) [" in key]
    assert any(key.endswith("is not -> is]") for key in keys)
    assert not any(key.endswith(("8 -> 7]", "8 -> 9]", "1 -> 2]")) for key in keys)  # how threads share rows


def test_samples_repeat_and_reach_every_area():
    first = draw(60, 7, None, None)
    assert first == draw(60, 7, None, None) != draw(60, 8, None, None)
    areas = {mutant.area for mutant in first}
    assert {"formats", "rounding", "scaling", "gemm", "cpu", "cuda", "recipes"} <= areas and len(first) <= 60


def test_equivalent_errors_stand_in_the_tree():
    for key in equivalents():
        file = key.split(":")[0]
        assert any(mutant.key == key for mutant in mutants_of(file)), f"{key} is gone; take it out of equivalent.txt"


def test_the_map_names_tests_that_exist():
    places, seconds = read_map()
    assert len(places) > 2000 and places[f"{PLACES}:require"]
    assert all((ROOT / test).exists() for tests in COMPILED.values() for test in tests)
    files = {test.split("::")[0] for test in seconds}
    missing = [file for file in files if not (ROOT / file).exists()]
    assert len(missing) < len(files) / 20, missing  # a few may have moved since it was recorded


def test_functions_that_the_same_tests_see_share_a_line_of_the_map(tmp_path, monkeypatch):
    places = {("a.py", ""): ["t::2", "t::1"], ("a.py", "f"): ["t::2", "t::1"], ("b.py", "C.g"): ["t::1"]}
    monkeypatch.setattr(seen, "MAP", tmp_path / "seen.txt")
    seen.MAP.write_text(seen._text(places, {"t::1": 0.5, "t::2": 1.0}))
    assert seen.MAP.read_text().splitlines()[-2:] == ["a.py:,f 1 0", "b.py:C.g 0"]
    assert read_map() == ({":".join(place): tests for place, tests in places.items()}, {"t::1": 0.5, "t::2": 1.0})


def test_tests_that_the_map_lacks_are_counted(tmp_path, monkeypatch):
    all_ = collected()
    assert "tests/tools/test_mutants.py::test_tests_that_the_map_lacks_are_counted" not in all_
    assert "tests/rounding/test_oracle.py::test_facts" in all_  # behind a decorator of many lines
    assert "tests/rounding/test_oracle.py::test_ml_dtypes_agrees_on_all_of_float16" not in all_  # exhaustive
    assert not any(test.startswith("tests/casts/test_large.py") for test in all_)  # slow as a whole
    monkeypatch.setattr(seen, "MAP", tmp_path / "seen.txt")
    for lacking, warns in ((len(all_) // 20 - 1, False), (len(all_) // 20 + 1, True)):
        seen.MAP.write_text(seen._text({}, dict.fromkeys(all_[lacking:], 0.1)))
        warning = f"seen.txt lacks {lacking} of {len(all_)} tests; renew it by python -m tools.mutants --record new"
        assert missing() == all_[:lacking] and age_of_map().startswith(warning) == bool(age_of_map()) == warns


def test_a_run_of_new_tests_leaves_the_others_out(tmp_path, monkeypatch):
    (tmp_path / "only.txt").write_text("tests/a.py::test_b\ntests/a.py::test_c")
    items = [SimpleNamespace(nodeid=f"tests/a.py::test_{name}") for name in ("a", "b[1]", "b[2]", "d")]
    seen.pytest_collection_modifyitems(items)
    assert len(items) == 4
    monkeypatch.setenv("FMTSIM_ONLY", str(tmp_path / "only.txt"))
    seen.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["tests/a.py::test_b[1]", "tests/a.py::test_b[2]"]


def test_new_tests_take_half_of_the_places_of_a_function(tmp_path, monkeypatch):
    monkeypatch.setattr(seen, "MAP", tmp_path / "seen.txt")
    old = {"a.py:f": [f"t::{i}" for i in range(8)], "a.py:g": ["t::0"], "a.py:gone": []}
    lines = {("a.py", "f"): {f"u::{i}": 9 - i for i in range(6)}, ("a.py", "h"): {"u::0": 1}}
    new_seconds, old_seconds = (dict.fromkeys((f"{file}::{i}" for i in range(8)), 0.5 + (file == "u")) for file in "ut")
    seen._write(lines, new_seconds, old, old_seconds)
    places, seconds = read_map()
    assert places["a.py:f"] == [*(f"u::{i}" for i in range(4)), *(f"t::{i}" for i in range(4))]
    assert places["a.py:g"] == ["t::0"] and places["a.py:h"] == ["u::0"] and "a.py:gone" not in places
    assert seconds["t::0"] == 0.5 and seconds["u::6"] == 1.5  # also one that is among the first of no function


@pytest.mark.slow
def test_planted_errors_are_found_and_changes_without_effect_survive():
    errors = [m for m in mutants_of("fmtsim/formats/packing.py") if m.function == "_pack_bytes"][:1]
    text = (ROOT / errors[0].file).read_bytes()
    at = text.index(b"import torch")
    same = dataclasses.replace(errors[0], start=at, end=at + 12, old="import torch", new="import torch ")
    verdicts = [outcome.verdict for outcome in Trials(jobs=1, limit=20).run([*errors, same])]
    assert verdicts == ["found", "survived"]


def test_files_beside_the_rooms_have_tests():
    trials = Trials(jobs=1)
    for file in ("fmtsim/casts/ops.py", "fmtsim/casts/quantize.py", "fmtsim/support/progress.py"):
        assert all(trials.tests_of(mutant) for mutant in mutants_of(file))


@pytest.mark.parametrize("file", ["studies/claims/accumulation.py", "fmtsim/gemm/targets/cublaslt.py"])
def test_catalogues_have_the_tests_of_their_records(file):
    mutant = next(mutant for mutant in mutants_of(file) if not mutant.function)
    assert set(seen.RECORDED) <= set(Trials().tests_of(mutant)) & set(collected())


def test_a_test_that_takes_all_seconds_comes_behind_shorter_ones():
    trials = Trials()
    mutant = next(m for m in mutants_of("fmtsim/cuda/cast/any_format.cu") if m.function == "place_of")
    longest = max(trials._seen[f"{mutant.file}:"], key=trials._seconds.__getitem__)
    assert trials._seconds[longest] > 60 and trials.tests_of(mutant)[0] != longest
    assert any("test_blocks" in test for test in trials.tests_of(mutant))


def test_fuzzing_comes_last():
    """It takes long, and any result for right: the tests of what is right come before it."""
    mutant = next(mutant for mutant in mutants_of("fmtsim/optim/checkpoint.py") if mutant.function == "_same")
    tests = Trials().tests_of(mutant)
    assert tests[0].startswith("tests/optim/") and not any("test_fuzz" in test for test in tests[:-1])


def test_a_function_that_the_map_does_not_know_has_the_tests_of_its_room():
    nowhere = Mutant("fmtsim/cuda/cast/nothing.cu", "nothing", 1, 0, 1, "a", "b")
    tests = Trials(jobs=1).tests_of(nowhere)
    assert tests and all(test.startswith("tests/cuda/") for test in tests)
