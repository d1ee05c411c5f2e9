# SPDX-License-Identifier: Apache-2.0
"""The report in a browser: every control is used, nothing is said on the console, and its counts are Python's.

Needs playwright and Chromium (``pip install playwright``; a Chromium on the PATH, or ``playwright install chromium``).
``SHOTS=folder python -m pytest tests/lab/browser`` leaves screenshots to look at.
"""

import csv
import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch

import fmtsim
from fmtsim.lab.analysis.measure import _limits
from fmtsim.lab.analysis.observation import Observation
from fmtsim.lab.analysis.page import write_page
from fmtsim.lab.analysis.page.page import format_choices
from fmtsim.lab.analysis.stats import OperandStats
from fmtsim.support.errors import FormatError
from tests.support.reports import OPERANDS, UNKIND, made_observation, made_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
SHOTS = os.environ.get("SHOTS")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        try:
            found = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {error}")
        yield found
        found.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Return what opens a report; whatever it says, asks for or shows unasked fails the test."""
    said, contexts = [], []

    def open_page(content, width=1400, scheme="light"):
        file = tmp_path / "report.html"
        file.write_text(content, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("request", lambda request: request.url.startswith(("file:", "blob:")) or said.append(request.url))
        page.goto(f"file://{file}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def drawn(page, canvas="#heat"):
    return page.evaluate(f"document.querySelector('{canvas}').toDataURL()")


SAVED = {
    ".save": "loss-chart.svg", ".save-png": "loss-chart.png", "#loss-csv": "loss.csv", "#heat-save": "heatmap.png",
    "#heat-csv": "bits.csv", "#save-json": "report.json",
}  # fmt: skip


def saved(page, place):
    with page.expect_download() as download:
        page.click(place)
    return download.value


def test_every_control_can_be_used(opened):
    page = opened(made_report())
    assert page.title() == page.inner_text("h1") == UNKIND
    for name in page.query_selector_all("select:visible"):
        before = page.content() + drawn(page)
        for value in name.eval_on_selector_all("option", "all => all.map((o) => o.value)")[::-1]:
            name.select_option(value)
        assert name.get_attribute("id") in (
            "heat-metric", "heat-operand", "heat-sort", "exp-layer", "exp-values", "exp-format",
        )  # fmt: skip
        name.select_option(index=1)
        assert page.content() + drawn(page) != before, name.get_attribute("id")
    page.select_option("#heat-metric", "underflow_percent")
    for box in page.query_selector_all("input[type=checkbox]:visible"):
        before = page.content() + drawn(page)
        box.click()
        assert page.content() + drawn(page) != before, box.get_attribute("id")
    for place, text in (
        ("#heat-filter", "up"),
        ("#exp-own", "e2m3"),
        ("#exp-shift", "-7"),
        ("#configuration-filter", "part3"),
    ):
        before = page.content() + drawn(page)
        page.fill(place, text)
        assert page.content() + drawn(page) != before, place
    page.fill("#heat-filter", "")
    page.eval_on_selector("#loss-reach", "slider => { slider.value = 0; slider.dispatchEvent(new Event('input')); }")
    assert page.inner_text("#loss-reach-text") == "none"
    for button in page.query_selector_all("#loss-legend button"):
        button.click()
        assert button.get_attribute("aria-pressed") == "false"
    for button in page.query_selector_all("th button, .more, td button"):
        if button.is_visible() and button.is_enabled():
            button.click()
    for place, name in SAVED.items():
        file = saved(page, place)
        assert file.suggested_filename == name and Path(file.path()).stat().st_size > 1000
    for link in page.query_selector_all("nav a"):
        link.click()
    for theme, dark in (("light", False), ("dark", True), ("system", False)):
        page.click("#theme")
        assert theme in page.inner_text("#theme")
        assert page.evaluate("document.documentElement.classList.contains('dark')") is dark
    page.emulate_media(media="print")
    assert page.is_hidden("#heat-metric") and page.is_visible("#heat")


@pytest.mark.parametrize("x", [torch.ones(8), torch.zeros(8)], ids=["nothing lost", "zeros"])
def test_a_run_that_lost_nothing_is_drawn(x, opened):
    stats = OperandStats().add(x, x, fmtsim.get_format("e4m3"))
    page = opened(write_page(None, title="t", observation=Observation({"a": {"x_f": stats}, "b": {"x_f": stats}})))
    for metric in ("underflow_percent", "saturation_percent", "sqnr_db", "amax"):
        page.select_option("#heat-metric", metric)
        page.eval_on_selector("#heat-log", "box => { box.checked = !box.disabled; box.onchange?.(); drawHeat(); }")
        assert page.evaluate("Number.isNaN(scale($('heat-metric').value, true).share(0.5))") is False
        assert page.text_content("#heat-scale").count("nan") == 0


def test_the_heatmap_is_read_with_the_keyboard(opened):
    page = opened(made_report())
    page.select_option("#heat-metric", "underflow_percent")
    page.focus("#heat")
    page.wait_for_timeout(600)  # scrolling there hides what a pointer shows
    for key in ("Home", "PageUp", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    said = page.text_content("#heat-said")
    assert said.startswith("model.layers.0.up · step 10, ") and "SQNR: " in said and page.is_visible("#tip")
    page.keyboard.press("Enter")
    assert page.inner_text("#details-title") == "model.layers.0.up, step 10"
    assert page.input_value("#exp-layer") == "2"
    rows = page.query_selector_all("#details-table tbody tr")
    sample = made_observation().history[10]["model.layers.0.up"]["x_f"]
    assert len(rows) == len(OPERANDS) and f"{sample.sqnr_db:.1f} dB" in rows[0].inner_text()
    page.keyboard.press("End")
    page.keyboard.press(" ")
    assert page.inner_text("#details-title") == "model.layers.0.up, all observed steps"
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")


def test_a_click_shows_a_cell_and_sorting_moves_rows(opened):
    page = opened(made_report())
    area = page.evaluate("heat.area")
    page.select_option("#heat-sort", "worst")
    page.select_option("#heat-metric", "amax")
    page.select_option("#heat-operand", label="x_f (activations, forward)")
    layers = page.evaluate("heat.cells.map((i) => seen.layers[i])")
    stats = made_observation().layers
    assert layers != list(stats) and layers == sorted(stats, key=lambda name: -stats[name]["x_f"].amax)
    page.click("#heat", position={"x": area["left"] + 3.5 * area["wide"], "y": area["top"] + area["high"] / 2})
    assert page.inner_text("#details-title") == f"{layers[0]}, step 30"
    page.hover("#loss-chart svg")
    assert page.inner_text("#tip b").startswith("step ")
    assert "NaN at step 401" in page.text_content("#loss-chart")


def test_formats_spelled_out_are_those_of_get_format(opened):
    page = opened(made_report())
    found = page.evaluate(
        "Array.from({length: 8}, (_, e) => Array.from({length: 24}, (_, m) => spelled(`E${e + 1}M${m}`)))"
    )
    for e, row in enumerate(found, 1):
        for m, got in enumerate(row):
            try:
                fmt = fmtsim.get_format(f"e{e}m{m}")
            except FormatError:
                assert isinstance(got, str)
                continue
            if fmt.name == "e8m0":
                assert "without sign and zero" in got
            else:
                assert (float(got["least"]), float(got["most"])) == (fmt.min_subnormal, fmt.max), fmt.name
                assert float(got["limit"]) == _limits(fmt)[1]
    for text in ("e0m3", "e9m3", "e4m24", "e4", "fp8", "e1m0x"):
        page.fill("#exp-own", text)
        assert page.get_attribute("#exp-own", "aria-invalid") == "true" and page.inner_text("#exp-own-said")


def test_counts_in_the_page_are_those_of_casts(opened):
    """Underflow of floating-point formats is exact, saturation between the two bounds."""
    x = torch.randn(4000, generator=torch.Generator().manual_seed(1)).exp() ** 4
    stats = OperandStats().add(x, x, None)
    page = opened(write_page(None, title="t", observation=Observation({"l": {"x_f": stats}})))
    page.select_option("#exp-values", "plain")
    exact = 0
    for name, *_ in format_choices():
        for shift in (0, -5):
            fmt = fmtsim.get_format(name)
            want = OperandStats().add(x * 2.0**shift, fmtsim.quantize(x * 2.0**shift, fmt), fmt)
            under, over = page.evaluate(
                "([name, shift]) => { const h = histogram(0, 0, 'plain'), f = fromChoices(name);"
                "return [beyond(h.bins, f.least / 2, false, shift),"
                " beyond(h.bins, f.limit, true, shift, h.largest)]; }",
                [name, shift],
            )
            assert under == [want.underflowed] * 2, name
            assert over[0] <= want.saturated <= over[1], name
            exact += over[0] == over[1]
    assert exact > 10
    page.select_option("#exp-format", "e2m1")
    e2m1 = OperandStats().add(x, fmtsim.quantize(x, "e2m1"), fmtsim.get_format("e2m1"))
    assert f"e2m1 without a scale: underflow {e2m1.underflow_percent:.3g} %" in page.inner_text("#exp-panels")


def test_another_format_has_a_scale_of_its_own_unless_one_was_chosen(opened):
    x = torch.randn(4000, generator=torch.Generator().manual_seed(1)) * 100
    stats = OperandStats().add(x, fmtsim.quantize(x, "e4m3"), fmtsim.get_format("e4m3"))
    page = opened(write_page(None, title="t", observation=Observation({"l": {"x_f": stats}})))
    said = lambda: page.inner_text("#exp-panels p").split("\n")[0]  # noqa: E731
    for own, name in (("", "e2m1"), ("e2m0", "")):
        page.fill("#exp-own", own) if own else page.select_option("#exp-format", name)
        assert f"{own or name} under a scale of its own: " in said() and ", saturation 0 " in said()
    page.fill("#exp-own", "foo")
    assert said() == "" and "spells no format" in page.inner_text("#exp-own-said")
    page.fill("#exp-own", "")
    assert page.input_value("#exp-values") == "scaled"
    page.select_option("#exp-values", "scaled")
    page.select_option("#exp-format", "e2m1")
    assert "e2m1 under scales of e4m3: " in said() and ", saturation 0 " not in said()
    groups = page.eval_on_selector_all("#exp-format optgroup", "all => all.map((g) => [g.label, g.children.length])")
    assert groups[0] == ["common", 12] and sum(count for _, count in groups) == len(format_choices())


def test_equal_lines_are_one_and_numbers_come_first_on_a_phone(opened):
    observation = made_observation()
    for counts in observation.counts.values():
        for operands in counts.values():
            operands["x_w"] = operands["x_f"]
    rows = [("run", "simulated", "gap", "verdict"), ("a", "h200", "+0.1", "yes")]
    page = opened(made_report(observation, verdict=[*rows, ("What to try", "b")]), width=390)
    assert "x_f = x_w" in page.inner_text("#details-chart").split("\n")
    for place in ("#details-table", "#worst-table"):
        heads = page.eval_on_selector_all(f"{place} th", "all => all.map((t) => t.innerText.replace(/ .$/, ''))")
        right = page.eval_on_selector(f"{place} th:nth-child(4)", "t => t.getBoundingClientRect().right")
        assert heads[-1] == "format" and "underflow" in heads[:3] and right < 390
    assert (
        page.inner_text("#verdict-table td:nth-child(3)") == "+0.1" and page.inner_text("#verdict dt") == "What to try"
    )


def test_smoothing_keeps_constants_and_ends_at_nan(opened):
    page = opened(made_report())
    line = [float(i) for i in range(400)]
    found = page.evaluate(
        "line => [smoothed([1, 3, 8, 1], 1), smoothed(Array(50).fill(2), 7), smoothed([1, Infinity, 1], 0),"
        " smoothed(line, 10)]",
        line,
    )
    assert found[:3] == [[1.0, 4.0, 4.0, 4.5], [2.0] * 50, [1.0, None, None]]
    assert found[3][:390] == line[:390]  # a straight line does not lag


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (1400, "dark"), (390, "light"), (390, "dark")])
def test_a_large_report_fits(opened, width, scheme):
    page = opened(made_report(made_observation(layers=40, steps=60, elements=200)), width, scheme)
    # It opens fast because thousands of figures are drawn on canvases, and are not elements.
    assert page.evaluate("document.querySelectorAll('*').length") < 2000
    assert page.evaluate("document.documentElement.scrollWidth") == width
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/{scheme}-{width}.png", full_page=True)


@pytest.mark.parametrize(
    "parts", [{}, {"curves": {"a": []}}, {"curves": {"a": [2.0]}}, {"curves": {"a": [float("nan")]}}]
)
def test_little_is_shown_as_little(opened, parts):
    page = opened(write_page(None, title="little", **parts))
    assert "Not in this report: " in page.inner_text("#absent") and page.is_hidden("#configuration")


def test_without_history_totals_are_shown(opened):
    observation = made_observation()
    observation.counts.clear()
    page = opened(made_report(observation))
    assert page.evaluate("seen.steps.length") == 0
    page.focus("#heat")
    page.keyboard.press("ArrowDown")
    assert "all observed steps" in page.text_content("#heat-said")


def test_a_run_that_ended_early_is_compared_at_its_own_steps(opened):
    steps = [5.0 - i / 100 for i in range(200)]
    page = opened(
        write_page(None, title="t", curves={"whole": steps, "half": [x + 1 for x in steps[:100]], "none": []})
    )
    assert [said for said in page.inner_text("#tiles").splitlines() if "to the first" in said] == [
        "+1.0000 to the first after 100 steps"
    ]


def test_a_gradient_of_zeros_did_not_lose_nothing(opened):
    zeros = OperandStats().add(torch.zeros(4), torch.zeros(4), fmtsim.get_format("e4m3"))
    page = opened(write_page(None, title="t", observation=Observation({"layer": {"g_d": zeros}}, steps=1)))
    assert page.inner_text("#details-table tbody tr").split("\t")[2:4] == ["all zero", "0 %"]


def test_losses_are_zoomed_by_fields_and_pointer(opened):
    steps = [5.0 - i / 100 for i in range(200)]
    page = opened(write_page(None, title="t", curves={"a": steps, "b": [x + 0.5 for x in steps]}))
    page.fill("#loss-to", "20")
    page.keyboard.press("Tab")
    assert page.evaluate("[zoom.from, zoom.to]") == [1, 20] and page.is_enabled("#loss-all")
    drawn = page.evaluate("$('loss-chart').series.map((s) => s.points.length)")
    assert drawn == page.evaluate("$('gap-chart').series.map((s) => s.points.length)") * 2 == [20, 20]
    page.click("#loss-all")
    assert page.evaluate("[zoom.from, zoom.to]") == [1, 200] and page.is_disabled("#loss-all")
    box = page.query_selector("#loss-chart svg").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 120)
    page.mouse.up()
    first, last = page.evaluate("[zoom.from, zoom.to]")
    assert 40 < first < 70 < last < 130 and page.input_value("#loss-from") == str(first)
    page.fill("#loss-from", "-3")
    page.fill("#loss-to", "9999")
    page.keyboard.press("Tab")
    assert page.evaluate("[zoom.from, zoom.to]") == [1, 200]


def test_equal_curves_are_one_and_gaps_go_with_their_curves(opened):
    base = [5.0 - i / 100 for i in range(50)]
    curves = {"a0": base, "b0": list(base), "a": [x + 1 for x in base], "b": [x + 2 for x in base], "a again": base}
    page = opened(write_page(None, title="t", curves=curves, against={"a": "a0", "b": "b0"}))
    buttons = page.query_selector_all("#loss-legend button")
    assert [button.inner_text() for button in buttons] == ["a0 = b0 = a again", "a", "b"]
    gaps = lambda: page.evaluate("$('gap-chart').hidden ? [] : $('gap-chart').series.map((s) => s.label)")  # noqa: E731
    assert gaps() == ["a", "b"] and page.evaluate("$('gap-chart').series[1].points[7]") == [8, 2]
    buttons[1].click()
    assert gaps() == ["b"]
    buttons[0].click()
    assert gaps() == [] and page.is_hidden("#gap-chart")
    page = opened(write_page(None, title="t", curves={"a": base, "b": list(base)}))
    assert page.is_hidden("#gap-chart") and len(page.query_selector_all("#loss-legend button")) == 1


def test_a_filter_that_matches_nothing_says_so(opened):
    page = opened(made_report())
    page.fill("#heat-filter", "no such layer")
    assert page.inner_text("#heat-shown") == "No layer has “no such layer” in its name; there are 6"
    page.fill("#configuration-filter", "nothing like it")
    assert page.inner_text("#configuration-table").startswith("No setting has “nothing like it” in its name or value")
    for place in ("#heat-save", "#heat-csv"):
        assert saved(page, place)
    page.fill("#heat-filter", "")
    assert page.inner_text("#heat-shown").startswith("underflow of the worst operand; 6 of 6 layers")


def test_colours_span_what_there_is(opened):
    page = opened(made_report())
    shares = page.evaluate("[...seen.history.underflow_percent, ...seen.totals.underflow_percent].filter((v) => v > 0)")
    low, high = page.evaluate("(({ low, high }) => [low, high])(scale('underflow_percent', true))")
    assert (low, high) == (min(shares), max(shares)) and low > 0.001
    assert page.evaluate("scale('underflow_percent', true).share(0)") == 0


def test_files_have_all_numbers_and_pictures_are_twice_as_large(opened):
    observation = made_observation()
    page = opened(made_report(observation, verdict=[("Gap", "1. one; 2. two; three")]))
    assert page.inner_text("#verdict-list").split("\n") == ["Gap", "1. one", "2. two; three"]
    rows = list(csv.DictReader(Path(saved(page, "#heat-csv").path()).read_text().splitlines()))
    assert {row["layer"] for row in rows} == set(observation.layers) and len(rows) == 6 * 8 * (12 + 1)
    row = next(r for r in rows if (r["layer"], r["operand"], r["step"]) == ("model.layers.0.up", "x_f", "10"))
    sample = observation.history[10]["model.layers.0.up"]["x_f"]
    assert float(row["sqnr_db"]) == pytest.approx(sample.sqnr_db, rel=1e-3) and row["format"] == "e4m3"
    losses = list(csv.reader(Path(saved(page, "#loss-csv").path()).read_text().splitlines()))
    assert losses[0] == ["step", "bf16", UNKIND] and len(losses) == 601
    assert losses[401][2] == "nan" and losses[600][2] == ""
    assert json.loads(Path(saved(page, "#save-json").path()).read_text())["title"] == UNKIND
    for place, element in (("#heat-save", "#heat"), (".save-png", "#loss-chart svg")):
        picture = Path(saved(page, place).path()).read_bytes()
        width, height = struct.unpack(">II", picture[16:24])
        box = page.query_selector(element).bounding_box()
        assert width >= 2 * box["width"] - 1 and height > 2 * box["height"] + 80  # a title, and colours or names
    if SHOTS:
        saved(page, "#heat-save").save_as(f"{SHOTS}/heatmap.png")
