# SPDX-License-Identifier: Apache-2.0
"""The report in the browser, as a file: its numbers, its size, and that names stay text (tests/lab/browser clicks)."""

import base64
import hashlib
import math
import re
from html.parser import HTMLParser

import pytest
import torch

import fmtsim
from fmtsim.lab.analysis.measure import _limits, _smallest
from fmtsim.lab.analysis.observation import Observation
from fmtsim.lab.analysis.observe import observe
from fmtsim.lab.analysis.page import write_page
from fmtsim.lab.analysis.page.page import format_choices, number, observation_data
from fmtsim.lab.analysis.stats import OperandStats
from tests.support.refusals import refused
from tests.support.reports import UNKIND, data_of, made_observation, made_report


class Elements(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found, self.links = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append(tag)
        self.links += [
            value for name, value in attributes if name in ("src", "href", "action", "data") or name[:2] == "on"
        ]


def test_figures_of_each_step_are_in_the_file(tmp_path):
    torch.manual_seed(0)
    model = fmtsim.convert(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)), format="e4m3")
    with observe(model, every=2) as seen:
        for _ in range(5):
            model(torch.randn(5, 6)).sum().backward()
    seen.save_report(tmp_path / "a.html", title="five steps", notes=["a note"])
    data = data_of((tmp_path / "a.html").read_text())
    found = data["observation"]
    assert (data["title"], data["notes"], data["curves"], data["coverage"]) == ("five steps", ["a note"], [], None)
    assert (found["layers"], found["steps"], found["forwards"]) == (["0", "1"], [1, 3, 5], 5)
    place = 0
    for layer in found["layers"]:
        for operand in found["operands"]:
            s = seen[layer].get(operand)
            history = [seen.history[step][layer].get(operand) for step in (1, 3, 5)]
            for metric, column in found["history"].items():
                assert [number(getattr(sample, metric)) if sample else None for sample in history] == (
                    column * 3 if len(column) == 1 else column[3 * place : 3 * place + 3]
                )
                assert found["totals"][metric][place] == (number(getattr(s, metric)) if s else None)
            assert found["formats"][place] == (s.format if s else None)
            histogram = found["histograms"][place]
            if s:
                first, *counts = histogram["scaled"]
                exponents = s.to_dict()["scaled_exponents"]
                assert {first + i: n for i, n in enumerate(counts) if n} == exponents
                assert histogram["nonzero"] == s.nonzero and histogram["window"] == list(s.window)
            place += 1


def test_a_figure_that_never_changes_is_in_the_file_once():
    model = fmtsim.convert(torch.nn.Linear(6, 8), format="e4m3")
    with observe(model) as seen:
        for _ in range(2):
            model(torch.ones(5, 6))
    history = observation_data(seen)["history"]
    assert history["nonfinite"] == [0] and history["elements"] == [30, 30, 48, 48]


def test_what_of_a_model_is_not_seen_is_said_first(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    with observe(model, format="e4m3") as seen:
        model[0](torch.ones(2, 8))
    seen.save_report(tmp_path / "a.html", notes=["mine"])
    assert data_of((tmp_path / "a.html").read_text())["notes"] == ["mine", *seen.notes] and seen.notes
    refused("notes='mine' is not allowed", seen.save_report, tmp_path / "b.html", notes="mine")


def test_what_is_not_finite_keeps_its_name():
    data = data_of(
        write_page(None, title="t", curves={"a": [1.23456789, math.nan], "b": [math.inf, -math.inf], "c": []})
    )
    assert [curve["losses"] for curve in data["curves"]] == [[1.23457, "nan"], ["inf", "-inf"], []]
    zeros, exact = torch.zeros(4), torch.ones(4)
    e4m3 = fmtsim.get_format("e4m3")
    stats = {"l": {"x_f": OperandStats().add(zeros, zeros, e4m3), "w_f": OperandStats().add(exact, exact, e4m3)}}
    totals = data_of(write_page(None, title="t", observation=Observation(stats)))["observation"]["totals"]
    assert totals["sqnr_db"] == ["nan", "inf"] and totals["underflow_percent"] == ["nan", 0]


def test_no_name_becomes_markup():
    page = made_report()
    elements = Elements(page)
    assert elements.found.count("script") == 2 and "img" not in elements.found
    assert set(elements.links) == {"#main"}
    assert page.count("</script>") == 2 and "<!--" not in page
    data = data_of(page)
    assert data["title"] == data["notes"][0] == data["curves"][1]["label"] == data["observation"]["layers"][0] == UNKIND
    planted = page.replace("\\u003c", "<")  # what json.dumps alone would write
    assert "img" in Elements(planted).found


def test_the_page_loads_nothing_and_runs_its_own_script_alone():
    page = made_report()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; ") and f"script-src 'sha256-{digest}';" in policy
    outside = set(re.findall(r"https?://[^\"' ]+", page))
    assert outside == {"http://www.w3.org/2000/svg"}  # a name, which no browser loads
    assert "url(" not in page and "@import" not in page


def test_a_long_run_of_a_large_model_is_below_3_mb():
    page = made_report(made_observation(layers=40, steps=60, elements=200))
    observation = data_of(page)["observation"]
    assert len(observation["history"]["amax"]) == 40 * 8 * 60
    assert len(page.encode()) < 3e6


def test_equal_runs_give_equal_files():
    assert made_report() == made_report()


def test_offered_formats_lose_what_statistics_count():
    choices = {name: limits for name, *limits in format_choices()}
    assert {"e4m3", "e5m2", "e2m1", "fp16", "bf16", "int8", "int4"} <= set(choices)
    for name, (least, most, limit) in choices.items():
        fmt = fmtsim.get_format(name)
        assert (least, most, limit) == (_smallest(fmt), fmt.max, _limits(fmt)[1])
        edges = torch.tensor([least / 2, math.nextafter(least / 2, 1.0)], dtype=torch.float64)
        assert (fmtsim.quantize(edges, name) == 0).tolist() == [True, False]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"title": 3}, "title=3 is not allowed"),
        ({"curves": [1.0, 2.0]},
         r"curves=\[1.0, 2.0\] is not allowed; pass a dict of the losses of each step by label"),
        ({"curves": {"a": [10**400]}}, "pass a dict of the losses of each step by label"),
        ({"curves": {"a": ["low"]}}, "pass a dict of the losses of each step by label"),
        ({"observation": {}}, r"observation=\{\} is not one; pass what fmtsim.observe returned"),
        ({"coverage": 0.9}, r"coverage=0.9 is not one; pass fmtsim.report\(model, batch\).coverage"),
        ({"attribution": []}, r"attribution=\[\] is not one; pass what fmtsim.attribute returned"),
        ({"configuration": "lr=1"}, "configuration='lr=1' is not allowed; pass a dict, nested as JSON is"),
        ({"notes": "stopped"}, "notes='stopped' is not allowed"),
    ],
)  # fmt: skip
def test_what_is_no_report_is_refused_before_anything_is_written(tmp_path, given, message):
    refused(message, write_page, tmp_path / "a.html", **{"title": "t", **given})
    assert list(tmp_path.iterdir()) == []
