# SPDX-License-Identifier: Apache-2.0
"""``fmtsim sweep``: runs go on where they were stopped, and what is counted is what happened."""

import dataclasses
import json
import math
import random
import statistics
from concurrent.futures import BrokenExecutor, Executor

import pytest
import torch
import torch.nn.functional as F

from fmtsim.lab.cli.main import main
from fmtsim.lab.cli.training_commands import _integers
from fmtsim.lab.training import sweep
from fmtsim.lab.training.corpus import TASKS, sample, score, task_corpus
from fmtsim.lab.training.learner import schedule
from fmtsim.lab.training.run import begin, training_steps
from fmtsim.lab.training.sweep import (
    RUNS,
    Point,
    SweepConfig,
    SweepRun,
    points_of,
    read_runs,
    run_sweep,
    scheme_of,
    sharpness,
    train_point,
)
from fmtsim.lab.training.sweep_result import (
    Shape,
    SweepResult,
    byte_entropy,
    interval,
    ranks,
    roc_area,
    spearman,
    spikes,
)
from fmtsim.recipes import get_recipe
from fmtsim.spec.datapath import IntegerDatapath
from fmtsim.support import executors
from fmtsim.support.errors import ArgumentError, DataError, DeviceError
from fmtsim.support.progress import Progress
from tests.support.refusals import refused

CONFIG = SweepConfig(layers=1, heads=2, context=16, batch_size=2)
POINTS = points_of(["fp32", "e8m3"], [1e-3, 1e-2], [16], [4], [0, 1])
SMALL = ["--layers", "1", "--heads", "2", "--context", "16", "--batch-size", "2", "--widths", "16", "--quiet"]


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    return run_sweep(CONFIG, POINTS, corpus, tmp_path_factory.mktemp("sweep"), Progress())


def bits(runs):
    return [(run.point, run.losses, run.validation, run.sharpness) for run in runs]


def made(lr=1e-3, seed=0, losses=(3.0, 2.0), scheme="fp32", stopped=None, **more):
    point = Point(scheme, lr, more.pop("width", 16), len(losses), seed)
    return SweepRun(point=point, parameters=1, tokens=1, losses=losses, validation=2.0, stopped=stopped, **more)


def test_points_are_every_combination_seed_after_seed():
    assert [point.seed for point in POINTS] == [0] * 4 + [1] * 4 and len(set(POINTS)) == 8
    assert points_of(["a", "a"], [1.0], [2], [3], [4]) == [Point("a", 1.0, 2, 3, 4)]


def test_a_run_is_that_of_train_and_sees_the_loss_it_had(corpus, whole):
    train = CONFIG.train_config(POINTS[0])
    parts = begin(train.simulated, train)
    assert [step for step, _ in training_steps(parts, train.simulated, train, corpus)] == [1, 2, 3, 4]
    run = whole[0]
    assert run.losses == tuple(round(loss, 5) for loss in parts.run.losses)
    assert (
        run.tokens == 4 * 2 * 16
        and run.parameters == sum(p.numel() for p in parts.learner.model.blocks.parameters()) + 32
    )
    assert [step for step, _ in run.sharpness] == [1, 2, 3, 4] and run.stopped is None and math.isfinite(run.validation)


def test_sharpness_is_that_of_the_batch(corpus, whole):
    """Of the first step, whose weights are those of the seed."""
    train = CONFIG.train_config(POINTS[0])
    parts = begin(train.simulated, train)
    seen = []
    parts.learner.model.norm.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    weight = parts.learner.model.embedding.weight.detach().clone()
    tokens, targets = sample(corpus.train, 2, 16, torch.Generator().manual_seed(1))
    parts.learner.backward(tokens, targets, 1)
    assert whole[0].sharpness[0] == (
        1,
        float(sharpness(F.linear(seen[0], weight).flatten(0, 1), targets.flatten()).mean()),
    )


def test_a_sweep_goes_on_where_it_was_killed(tmp_path, corpus, whole, monkeypatch):
    run_sweep(CONFIG, POINTS[:3], corpus, tmp_path, Progress())
    with open(tmp_path / RUNS, "a") as file:
        file.write('{"scheme": "fp32", "lr"')  # the last line, cut short
    trained = []
    real = train_point
    monkeypatch.setattr(sweep, "train_point", lambda *given: trained.append(given[1]) or real(*given))
    found = run_sweep(CONFIG, POINTS, corpus, tmp_path, Progress())
    assert trained == POINTS[3:] and bits(found) == bits(whole) and len(read_runs(tmp_path)) == 8
    assert bits(run_sweep(CONFIG, POINTS[::-1], corpus, tmp_path, Progress())) == bits(whole)[::-1]
    assert trained == POINTS[3:]  # nothing was left to do


@pytest.mark.slow  # processes import torch
def test_processes_share_the_runs_and_change_no_bit(tmp_path, corpus, whole):
    assert bits(run_sweep(CONFIG, POINTS, corpus, tmp_path, Progress(), workers=2)) == bits(whole)


def test_a_process_that_dies_is_told(tmp_path, corpus, monkeypatch):
    class Broken(Executor):
        def __init__(self, *given):
            pass

        def submit(self, *given):
            raise BrokenExecutor

        def shutdown(self, **given):
            pass

    monkeypatch.setattr(executors, "ProcessPoolExecutor", Broken)
    with pytest.raises(DeviceError, match="a process died, .* pass fewer --workers"):
        run_sweep(CONFIG, POINTS, corpus, tmp_path, Progress(), workers=2)


def test_a_folder_of_another_sweep_is_refused(tmp_path, corpus):
    run_sweep(CONFIG, POINTS[:1], corpus, tmp_path, Progress())
    with pytest.raises(
        ArgumentError, match="holds a sweep of another clip .1.0, not None.; choose another --out, or pass"
    ):
        run_sweep(dataclasses.replace(CONFIG, clip=None), POINTS[:1], corpus, tmp_path, Progress())
    path = tmp_path / sweep.SETTINGS
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"schemes": {"e8m3": {}}}))
    refused("another scheme e8m3", run_sweep, CONFIG, POINTS, corpus, tmp_path, Progress())
    path.write_text("{}")
    with pytest.raises(DataError, match="is not of a sweep .* delete it, or choose another --out"):
        run_sweep(CONFIG, POINTS, corpus, tmp_path, Progress())


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        b"\xff\xfe",
        "[" * 100_000,
        "null",
        ('"width": 16', '"width": "16"'),
        ('"parameters": 1', '"parameters": ""'),
        ('"losses": [', '"losses": [1' + "0" * 400 + ", "),
    ],
    ids=lambda line: str(line)[:30],
)
def test_a_line_that_is_no_run_is_named(tmp_path, line):
    line = made().to_line().strip().replace(*line) if isinstance(line, tuple) else line
    line = line.encode() if isinstance(line, str) else line
    (tmp_path / RUNS).write_bytes(made().to_line().encode() + line + b"\n")
    refused(r"line 2 is no run .* delete the line, or choose another --out", read_runs, tmp_path, error=DataError)


def test_a_line_holds_what_is_not_finite():
    run = made(
        losses=(3.0, math.inf), stopped="the loss became inf", sharpness=((1, math.nan),), tasks={"sums": (1, 2)}
    )
    again = SweepRun.of_line(run.to_line())
    assert again.final_loss == math.inf and again.losses[0] == 3.0 and math.isnan(again.sharpness[0][1])
    assert (again.point, again.tasks, again.stopped) == (run.point, run.tasks, run.stopped)


def test_schemes():
    assert scheme_of("bf16").recipe is get_recipe("amp_bf16") and scheme_of("e8m3").recipe is get_recipe("e8m3")
    assert (scheme_of("e4m3").format, scheme_of("fp32").recipe, scheme_of("fp32").simulated) == ("e4m3", None, False)
    pair = scheme_of("quartet/e5m2").recipe.linear
    assert pair.fprop == get_recipe("quartet").linear.fprop
    assert pair.dgrad.a.format.name == pair.wgrad.b.format.name == "e5m2"
    assert scheme_of("fp32/bf16").recipe.linear.fprop.a.format is None
    refused("scheme 'e4m33x' is neither a recipe nor a format; .* have the names", scheme_of, "e4m33x")
    refused("'fa3' has no linear layers to pair; choose another recipe, or a format", scheme_of, "fa3/bf16")
    refused("did you mean 'e8m3'", scheme_of, "bf16/e8m3x")


def test_exponents_are_removed_as_mantissas_are():
    """What the range of fewer exponents does not hold becomes its largest number, what is below it zero."""
    linear = get_recipe("e5m7").linear
    assert linear.fprop.a.rounding.mode == "toward_zero" and linear.wgrad.b.format.name == "e5m7"
    from fmtsim import quantize

    assert quantize(torch.tensor([1e30, 1e-9]), "e5m7", rounding="toward_zero").tolist() == [65280.0, 0.0]


def test_the_schedule_ends_where_it_is_told():
    assert schedule(100, 100) == pytest.approx(0.1) and schedule(100, 100, 1.0) == 1.0 and schedule(60, 100, 1.0) == 1.0


def test_gradients_are_clipped_unless_told_otherwise(corpus):
    norms = {}
    for clip in (1.0, 1e-3, None):
        train = dataclasses.replace(CONFIG, clip=clip).train_config(POINTS[0])
        parts = begin(train.simulated, train)
        next(training_steps(parts, train.simulated, train, corpus))
        parts.learner.backward(torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long), 2)
        parts.learner.unscale()
        norms[clip] = float(torch.stack([p.grad.norm() for p in parts.learner.model.parameters()]).norm())
    assert norms[1e-3] == pytest.approx(1e-3, rel=1e-3)  # torch adds 1e-6 to the norm that it divides by
    assert norms[1.0] == pytest.approx(1.0, rel=1e-3) and norms[None] > 1.01


def test_what_fails():
    result = SweepResult(
        runs=(made(losses=(1.0, 2.0)), made(losses=(1.0, 3.0)), made(stopped="inf")), entropy=9.0, limit=3.0
    )
    assert [result.failed(run) for run in result.runs] == [False, True, True]
    halfway = SweepResult(runs=(*result.runs, made(losses=(1.0, 2.49), width=32)), entropy=3.0)
    assert halfway.limits == {Shape(16, 2): 2.5, Shape(32, 2): 2.745}
    assert [halfway.failed(run) for run in halfway.runs] == [False, True, True, False]
    nothing = SweepResult(runs=(made(losses=(3.0, 3.0)),), entropy=3.0)
    assert nothing.failed(nothing.runs[0])
    assert byte_entropy(torch.tensor([1, 1, 2, 2], dtype=torch.uint8)) == pytest.approx(math.log(2))


def test_intervals_of_wilson():
    """Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for count, total, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611),
                                    (1, 29, 0.0061, 0.1718)):  # fmt: skip
        assert [round(end, 4) for end in interval(count, total)] == [low, high]
    assert interval(20, 20)[1] == 1.0
    refused("3 of 2 is no share; pass 0 to total", interval, 3, 2)


def test_ranks_and_areas():
    assert ranks([3.0, 1.0, 3.0, math.inf]) == [2.5, 1.0, 2.5, 4.0]
    assert roc_area([1, 2, 3, 4], [False, False, True, True]) == 1.0
    assert roc_area([4, 2, 3, 1], [False, False, True, True]) == 0.25
    assert roc_area([1, 1], [False, True]) == 0.5 and math.isnan(roc_area([1, 2], [True, True]))
    draw = random.Random(0)
    x, y = [draw.random() for _ in range(20)], [draw.random() for _ in range(20)]
    order = 1 - 6 * sum((a - b) ** 2 for a, b in zip(ranks(x), ranks(y), strict=True)) / (20 * 399)
    assert spearman(x, y) == pytest.approx(order) and math.isnan(spearman([1.0, 1.0], [1.0, 2.0]))
    pairs = [
        (a > b) + 0.5 * (a == b)
        for a, p in zip(x, y, strict=True)
        if p > 0.5
        for b, q in zip(x, y, strict=True)
        if q <= 0.5
    ]
    assert roc_area(x, [p > 0.5 for p in y]) == pytest.approx(statistics.fmean(pairs))


def test_spikes_are_counted_once():
    flat = [2.0 + 0.01 * (i % 2) for i in range(60)]
    assert spikes(flat) == 0
    assert spikes([*flat[:30], 3.0, 3.1, *flat[:30], 9.0]) == 2


def test_predictors_know_no_more_than_the_first_part():
    """Of ten steps the third counts; runs that had stopped by then do not."""
    looks = lambda early: tuple((step, early if step == 3 else 9.9) for step in range(1, 11))  # noqa: E731
    runs = [made(lr=0.1 * i, losses=(*[5.0 - i] * 9, 1.0 + i), sharpness=looks(float(i)), seed=i) for i in range(1, 5)]
    late = made(losses=(1.0, 1.0), stopped="inf", sharpness=((1, 99.0), (2, 99.0)), seed=9)
    late = dataclasses.replace(late, point=late.point._replace(steps=10))
    found = SweepResult(runs=(*runs, late), entropy=9.0, limit=3.5).predictors()
    assert [(one.name, one.runs, one.failed, one.area) for one in found] == [
        ("sharpness", 4, 2, 1.0), ("training loss", 4, 2, 0.0), ("learning rate", 4, 2, 1.0)
    ]  # fmt: skip
    assert found[0].correlation == pytest.approx(1) and found[1].correlation == pytest.approx(-1)


def test_the_table_has_the_best_rate_of_each_shape(tmp_path):
    runs = [made(lr, seed, (3.0, 10 * lr + seed), width=width, tasks={"sums": (1, 4)})
            for lr in (0.1, 0.2) for seed in (0, 1) for width in (16, 32)]  # fmt: skip
    result = SweepResult(runs=(*runs, made(0.3, stopped="inf", scheme="e8m3")), entropy=9.0, limit=2.5)
    assert result.best()["fp32", Shape(16, 2)][0] == 0.1
    (first, *_, last) = result.to_dict()["groups"]
    assert (first["best_lr"], first["runs"], first["failed"], first["tasks"]) == (0.1, 4, 1, {"sums": 0.25})
    assert (last["scheme"], last["failed"], last["interval"][1]) == ("e8m3", 1, 1.0)
    assert (
        "fp32    16     2      2.500       1 of 4  5 to 70 %      0       0.1      1.500     2.000     25.0 %"
        in str(result)
    )
    figure = result.plot(tmp_path / "map.png")
    words = [text.get_text() for panel in figure.axes for text in panel.texts]
    colours = {text.get_text(): text.get_color() for panel in figure.axes for text in panel.texts}
    assert colours["-\n1/1 failed"] == "white" and colours["1.500"] == "black"  # on the two ends of the scale
    assert "-\n1/1 failed" in words and "1.500" in words and (tmp_path / "map.png").stat().st_size > 5000


def test_tasks_hold_questions_out():
    corpus = task_corpus(seed=1, lines=3000)
    train, held = ({line.split("=")[0] for line in bytes(part.tolist()).decode().split()} for part in
                   (corpus.train, corpus.validation))  # fmt: skip
    assert corpus.tasks and not train & held and len(held) > 200
    for line in bytes(corpus.train.tolist()).decode().split()[:200]:
        question, answer = line.split("=")
        if question[0].isdigit():
            assert int(answer) == sum(map(int, question.split("+")))
        elif question[0].isalpha():
            assert answer == question
        else:
            assert [("([{<".index(a), ")]}>".index(b)) for a, b in zip(question, reversed(answer), strict=True)]
    assert torch.equal(task_corpus(1, 50).train, task_corpus(1, 50).train)


def test_answers_are_right_as_a_whole():
    text = b"9\n12+7=19\nabc=abc\n(<=>)\nxy="
    targets = torch.tensor(list(text))
    context = len(text)
    assert score([(targets, targets)], context) == dict.fromkeys(TASKS, (1, 1))
    wrong = targets.clone()
    wrong[text.index(b"19\n") + 2] = 0  # the end of the line
    assert score([(wrong, targets)], context)["sums"] == (0, 1)
    wrong[: text.index(b"=")] = 0  # what the question has is not asked
    assert score([(wrong, targets)], context)["copies"] == (1, 1)


def test_the_command(tmp_path, text, capsys):
    words = ["sweep", *SMALL, "--schemes", "fp32,e8m3", "--lr", "1e-2,1e2", "--steps", "30", "--seeds", "0..1",
             "--clip", "0", "--workers", "1", "--data", str(text), "--out", str(tmp_path / "s")]  # fmt: skip
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "of 4" in out and "what is known after 30 % of the steps" in out
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["heatmap.png", RUNS, "sweep.json"]
    before = (tmp_path / "s" / RUNS).read_bytes()
    assert main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["runs"] == 8 and (tmp_path / "s" / RUNS).read_bytes() == before
    assert [group["failed"] >= 2 for group in record["groups"]] == [True, True]  # every run at a rate of 100


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "3..0"], "--seeds 3..0 has no numbers, or too many; write the smaller one first"),
        (["--widths", "x"], "--widths 'x' is neither a number nor a range; write 3, or 0..3 for 0, 1, 2 and 3"),
        (["--schemes", ","], "--schemes ',' is empty; write a list, such as a,b,c"),
        (["--steps", "0"], "--steps 0 is not allowed; choose 1 or more"),
        (["--lr", "0"], "--lr 0.0 is not allowed; choose a number above 0"),
        (["--clip", "-1"], "--clip -1.0 is not a norm; choose a number above 0, or 0 for no clipping"),
        (["--final-rate", "2"], "--final-rate 2.0 is not a share; choose 0 to 1"),
        (["--workers", "0"], "--workers 0 is not allowed; choose 1 or more"),
        (["--seeds", "0..99999", "--lr", "1,2"], "runs; choose at most 100,000, in several sweeps if need be"),
        (["--tasks", "--data", __file__], "--tasks is a text of its own; leave --data "),
        (["--schemes", "e9x"], "--schemes 'e9x' is unknown"),
    ],
)  # fmt: skip
def test_mistakes(words, said, capsys, tmp_path):
    assert main(["sweep", *SMALL, "--out", str(tmp_path / "s"), *words]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "s").exists()


def test_ctrl_c_says_what_is_done(tmp_path, text, monkeypatch, capsys):
    real, count = train_point, iter(range(9))

    def interrupted(*given):
        if next(count) == 2:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(sweep, "train_point", interrupted)
    words = ["sweep", *SMALL, "--schemes", "fp32", "--steps", "2", "--workers", "1", "--data", str(text)]
    assert main([*words, "--out", str(tmp_path)]) == 130
    assert f"2 of 16 runs are in {tmp_path}; the same command goes on" in capsys.readouterr().err


def test_lists_of_numbers():
    assert _integers("1, 4..6,9", "--seeds") == [1, 4, 5, 6, 9]


def test_a_field_of_a_datapath_is_swept(tmp_path, capsys, corpus):
    words = ["sweep", "--schemes", "e4m3", "--target", "block=16,fraction_bits=8", "--over", "fraction_bits=2,8..9"]
    words += ["--lr", "1e-3", "--steps", "3", "--seeds", "0", *SMALL, "--workers", "1", "--out", str(tmp_path)]
    assert main(words) == main(words) == 0  # the second finds all runs
    runs = {run.point.scheme: run for run in read_runs(tmp_path)}
    assert list(runs) == [f"e4m3@fraction_bits={bits}" for bits in (2, 8, 9)]
    name = "blocks.0.attention.qkv fprop"
    few, more, most = (run.products[name] for run in runs.values())
    assert few < more - 20 < most - 20  # six bits are 36 dB
    assert all(len(run.products) == 12 for run in runs.values())
    assert len({run.losses for run in runs.values()}) == 3
    assert (tmp_path / "over.png").stat().st_size > 10_000
    result = SweepResult(runs=tuple(read_runs(tmp_path)), entropy=byte_entropy(corpus.train))
    line, image = result.plot_over().axes[:2]
    assert [text.get_text() for text in line.get_xticklabels()] == ["2", "8", "9"]
    assert image.get_yticklabels()[0].get_text() == name
    assert list(line.get_lines()[0].get_ydata()) == [run.final_loss for run in runs.values()]
    assert image.get_images()[0].get_array()[0].tolist() == [few, more, most]
    integers = SweepConfig(target=IntegerDatapath(saturate=True), layers=1, heads=2, context=16, batch_size=2)
    narrow, wide = (train_point(integers, Point(f"int8@accumulator_bits={bits}", 1e-3, 16, 2, 0), corpus)
                    for bits in (12, 32))  # fmt: skip
    assert narrow.products[name] < 20 < 100 < wide.products[name]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--over", "accumulator=e8m3"), "is not possible; write FIELD=LIST, and pass --target"),
        (("--target", "h200", "--over", "block=3"), "write FIELD=LIST, and pass --target block=32"),
        (("--target", "block=8", "--over", "blck=3"), "signed_zero; did you mean 'block"),
        (("--target", "block=8", "--over", "block=0"), "block=0 is not possible"),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_swept(words, message, tmp_path, capsys):
    assert main(["sweep", *words, *SMALL, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_picture_over_a_field_needs_one():
    with pytest.raises(ArgumentError, match="no run is of a field of a datapath; pass --target and --over"):
        SweepResult(runs=(), entropy=3.0).plot_over()
