# SPDX-License-Identifier: Apache-2.0
"""``fmtsim train``: schemes, files, determinism, and nothing half-written whatever happens."""

import io
import json
import math
import re
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fmtsim.formats.scaling import SCALINGS
from fmtsim.gemm.layers.config import linear_config
from fmtsim.lab.cli.main import main
from fmtsim.lab.cli.training_commands import summary
from fmtsim.lab.training import learner
from fmtsim.lab.training import run as training_run
from fmtsim.lab.training.artifacts import TRY, make_record, parts_of, write_artifacts
from fmtsim.lab.training.decoders import GPT, check_size
from fmtsim.lab.training.learner import schedule
from fmtsim.lab.training.run import Run, compare_schemes, observed_steps, train
from fmtsim.lab.training.schemes import Scheme
from fmtsim.recipes import OptimizerConfig, Rule
from fmtsim.recipes.serialization import load_rules, save_rules
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.gemm_spec import record_from_dict
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, DataError, FormatError
from fmtsim.support.files import check_folder
from fmtsim.support.progress import Lines, Progress
from tests.support.faults import largest_file
from tests.support.refusals import refused
from tests.support.reports import data_of
from tests.support.trainings import FP32, tiny, training

SMALL = ["--steps", "3", "--batch-size", "2", "--context", "16", "--width", "16", "--layers", "1", "--heads", "2"]
FILES = ["layers.txt", "record.json", "report.html"]
MODEL = tiny()


def config(scheme=None, **changes):
    return training(scheme or Scheme(format="e4m3"), MODEL, **changes)


def test_a_run_leaves_all_files_and_a_summary(tmp_path, text, capsys):
    out = tmp_path / "deep" / "run"
    assert main(["train", *SMALL, "--data", str(text), "--out", str(out), "--quiet"]) == 0
    assert sorted(p.name for p in out.iterdir()) == FILES
    assert [p.name for p in out.parent.iterdir()] == ["run"]
    page = data_of((out / "report.html").read_text())
    assert page["title"].endswith("text.txt: e4m3/e5m2, scaled by tensor against fp32")
    assert [len(curve["losses"]) for curve in page["curves"]] == [3, 3] and page["unit"] == "nats per byte"
    assert page["observation"]["steps"] == [1, 2, 3] and page["observation"]["forwards"] == 3
    assert page["coverage"]["text"].startswith("42.8 %") and ["config.steps", "3"] in page["configuration"]
    record = json.loads((out / "record.json").read_text())
    assert len(record["simulated"]["losses"]) == len(record["baseline"]["losses"]) == 3
    assert list(record["simulated"]["history"]) == ["1", "2", "3"] and record["baseline"]["layers"] is None
    assert set(record["simulated"]["layers"]["blocks.0.up"]) == {"x_f", "w_f", "g_d", "w_d", "g_w", "x_w"}
    assert record["config"]["simulated"]["format"] == "e4m3" and record["corpus"]["bytes"] == text.stat().st_size
    table = (out / "layers.txt").read_text()
    total = "4 of 5 modules with a weight matrix converted; 4 without one not shown"
    assert "blocks.0.attention.qkv  g_w" in table
    assert f"{total}\nx e4m3_tensor_amax, w e4m3_tensor_amax, g e5m2_tensor_amax: " in table
    printed = capsys.readouterr()
    assert printed.err == ""
    for words in ("baseline", "e4m3/e5m2, scaled by tensor", "gap", "hardest hit", "w_f", str(out / "report.html")):
        assert words in printed.out


def test_integers_of_13_bits_train(tmp_path, text, capsys):
    words = ["train", *SMALL, "--target", "integers,accumulator_bits=13,saturate=true", "--format", "int8"]
    assert main([*words, "--grad-format", "int8", "--data", str(text), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "on int13 accumulators that saturate every 32 products" in printed
    # rows of products: what is hit hardest is what has the lowest SQNR of all
    layers = json.loads((tmp_path / "run" / "record.json").read_text())["simulated"]["layers"]
    rows = {(layer, name): s["sqnr_db"] for layer, stats in layers.items() for name, s in stats.items()}
    layer, name = min(rows, key=lambda row: rows[row] if rows[row] is not None else 1e9)
    assert f"hardest hit: {name} of {layer}, " in printed


def test_json_and_lines(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert main(["train", *SMALL, "--data", str(text), "--out", str(out), "--json", "--format", "mxfp4"]) == 0
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert record["simulated"]["label"] == "mxfp4" and len(record["files"]) == 3
    assert "fp32: 3/3  loss" in printed.err and "mxfp4: 3/3  loss" in printed.err


def test_runs_from_one_seed_are_equal_bit_for_bit(corpus):
    state = torch.get_rng_state()
    scheme = Scheme(format="e4m3", rounding="stochastic", grad_rounding="stochastic")
    first, second = (compare_schemes(config(scheme), corpus, Progress()) for _ in range(2))
    other = compare_schemes(config(scheme, seed=1), corpus, Progress())
    for a, b, c in zip(first, second, other, strict=True):
        assert a.losses == b.losses != c.losses
        assert a.validation == b.validation
    assert first[0].losses[0] != first[1].losses[0]
    assert torch.equal(state, torch.get_rng_state())


def test_both_runs_see_the_same_weights_and_batches(corpus):
    scheme = Scheme(format="fp32", grad_format="fp32")
    base, same = compare_schemes(config(scheme), corpus, Progress())
    assert base.losses == same.losses


def test_too_small_a_format_is_visible_and_explained(corpus):
    # Weights start with a standard deviation of 0.02; e2m1 without a scale has nothing between 0 and 0.25.
    run = train(Scheme(format="e2m1", scaling="none"), config(), corpus, Progress())
    assert run.stats["blocks.0.up"]["w_f"].underflow_percent == 100.0
    scaled = train(Scheme(format="e4m3"), config(), corpus, Progress())
    assert scaled.stats["blocks.0.up"]["w_f"].underflow_percent < 1.0
    assert scaled.stats["blocks.0.up"]["w_f"].sqnr_db > 25.0


def test_a_unit_that_a_rule_gives_one_product_is_a_part_of_the_gap(tmp_path, text, corpus):
    """``train --rules``: the run is trained again with exact products; the steps between the losses add up."""
    config = linear_config(x="e4m3", w="e4m3", g="e5m2", scaling="tensor")
    unit = replace(config.fprop, target=Datapath(block=8, fraction_bits=2, accumulator="e8m1"))
    save_rules([Rule(name="^blocks.0.up$", use=replace(config, fprop=unit))], tmp_path / "unit.json")
    arguments = ["--rules", str(tmp_path / "unit.json"), "--data", str(text), "--out", str(tmp_path / "o"), "--quiet"]
    assert main(["train", *SMALL, *arguments]) == 0
    record = json.loads((tmp_path / "o" / "record.json").read_text())
    plain, exact = record["simulated"]["losses"], record["simulated"]["parts"]["arithmetic"]
    assert record["simulated"]["label"] == "e4m3/e5m2, scaled by tensor, 1 rule" and len(exact) == 3 and plain != exact
    assert list(record["simulated"]["parts"]) == ["arithmetic", "operands"]
    assert sum(step.size for step in parts_of(record).values()) == pytest.approx(record["gap"]["final_loss"])
    assert "on blocks of 8, F=2" in record["ran"]["simulated"]["exceptions"][0]
    stages = Scheme(format="e4m3", target="h200", optimizer=OptimizerConfig(state="coat")).simpler(FP32)
    assert list(stages) == ["arithmetic", "optimizer", "operands"] and stages["operands"] is FP32
    assert stages["arithmetic"].target is None and stages["optimizer"].states == FP32.states
    for one, parts in ((Scheme(format="fp32", target="h200"), ["arithmetic"]), (Scheme(format="e4m3"), ["operands"])):
        assert list(one.simpler(FP32)) == parts
    # bf16 in float32 products is what a bf16 baseline is
    bf16 = Scheme(format="bf16", grad_format="bf16")
    assert list(Scheme(format="bf16", target="h200").simpler(bf16)) == ["arithmetic"]


def test_the_layers_that_a_verdict_names_have_rules(tmp_path, corpus):
    base, simulated = compare_schemes(config(steps=40), corpus, Progress())
    simulated.losses = [loss + 1.0 for loss in base.losses]
    row = {"layer": "blocks.0.up", "operand": "w_f", "format": "e4m3", "loss": 0.5, "kl": 0.4, "gradient_noise": None}
    simulated.costs = {"rows": [row]}
    record = make_record(config(steps=40), corpus, base, simulated)
    paths = write_artifacts(tmp_path, record, base, simulated)
    assert tmp_path / "rules.json" in paths and load_rules(tmp_path / "rules.json") == (Rule(name="^blocks\\.0\\.up$"),)
    assert "blocks.0.up in high precision: fmtsim train --rules fmtsim-train/rules.json" in dict(record["verdict"])[TRY]


def test_the_model_learns(corpus):
    base, simulated = compare_schemes(config(steps=40), corpus, Progress())
    assert base.losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert base.final_loss < 3.2 and simulated.final_loss == pytest.approx(base.final_loss, abs=0.1)


def test_the_model_is_causal_and_leaves_generators_alone():
    state = torch.get_rng_state()
    model = GPT(MODEL, 0)
    assert torch.equal(state, torch.get_rng_state())
    captured = []
    model.norm.register_forward_hook(lambda m, i, o: captured.append(o))
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 10] ^= 1
    for t in (tokens, changed):
        model(t, t)
    same = (captured[0] == captured[1]).all(-1)[0].tolist()
    assert same[:10] == [True] * 10 and not same[10]


def test_a_loss_that_is_not_finite_ends_the_run_and_is_still_drawn(tmp_path, corpus, monkeypatch):
    original = learner.backward
    losses = iter([None, math.nan])
    monkeypatch.setattr(learner, "backward", lambda *a: next(losses, None) or original(*a))
    shown = io.StringIO()
    run = train(Scheme(format="e4m3"), config(), corpus, Lines(shown))
    assert run.stopped == "the loss became nan at step 2" and len(run.losses) == 2
    line = (
        "x e4m3_tensor_amax, w e4m3_tensor_amax, g e5m2_tensor_amax: "
        "42.8 % of weight multiply-adds simulated (forward and backward)"
    )
    line += "; attention products, 6.6 % of all at 16 tokens, stay in float32 (Recipe(attention=...) and fmtsim.nn."
    line += "convert_attention quantise them); left: embedding 57.1 % (the recipe leaves it in high precision: head)"
    assert shown.getvalue() == f"{line}\n{run.label}: stopped, {run.stopped}\n" and run.report.summary == line
    assert math.isnan(run.final_loss) and math.isnan(run.validation) and list(run.stats.history) == [1]
    base = Run(label="fp32", losses=[3.0, 2.0, 1.0], validation=1.0)
    assert base.skipped == base.nonfinite == 0 and base.loss_scale == 1
    record = make_record(config(), corpus, base, run)
    assert "e4m3/e5m2, scaled by tensor: stopped, the loss became nan at step 2" in summary(record, base, run)
    assert record["simulated"]["losses"][1] is None and record["gap"]["final_loss"] is None
    assert [p.name for p in write_artifacts(tmp_path / "o", record, base, run)] == FILES
    page = data_of((tmp_path / "o" / "report.html").read_text())
    assert page["curves"][1]["losses"][1:] == ["nan"] and page["observation"]["steps"] == [1]
    assert page["notes"][0] == f"{run.label}: stopped, the loss became nan at step 2"


def test_a_failure_while_writing_leaves_nothing(tmp_path, corpus):
    base, simulated = compare_schemes(config(), corpus, Progress())
    record = make_record(config(), corpus, base, simulated)
    with pytest.raises(DataError, match="new/report.html: File too large"), largest_file(1000):
        write_artifacts(tmp_path / "new", record, base, simulated)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_run_is_replaced_and_other_files_are_kept(tmp_path, corpus):
    out = tmp_path / "run"
    base, simulated = compare_schemes(config(), corpus, Progress())
    record = make_record(config(), corpus, base, simulated)
    write_artifacts(out, record, base, simulated)
    (out / "notes.txt").write_text("mine")
    (out / "report.html").write_text("old")
    plain = Run(label="fp32", losses=[1.0], guesses=["of one", "of two"], stopped="why", nonfinite=3, skipped=2)
    write_artifacts(out, record, base, plain)
    assert sorted(p.name for p in out.iterdir()) == sorted([*FILES, "notes.txt"])
    page = data_of((out / "report.html").read_text())
    assert page["observation"] is None and page["notes"] == [
        "fp32: stopped, why", "Steps with gradients that were not finite: 3, skipped: 2",
        "Products whose accumulation order was guessed: 2. The first: of one",
    ]  # fmt: skip
    assert (out.stat().st_mode & 0o777) == 0o755 and [p.name for p in tmp_path.iterdir()] == ["run"]


def test_tables_say_what_an_operand_is(corpus):
    base, simulated = compare_schemes(config(), corpus, Progress())
    record = make_record(config(), corpus, base, simulated)
    record["corpus"] |= {"bytes": 26_000, "files": 1}
    lines = summary(record, base, simulated).splitlines()
    assert lines[0].endswith(", 26,000 bytes in 1 file")
    assert any(line.startswith("g_d      gradients, input gradient") for line in lines)
    assert "where bits were lost in 3 observed steps, all layers together (each: report.html)" in lines


def test_an_output_that_cannot_be_written_fails_before_training(tmp_path):
    file = tmp_path / "file"
    file.touch()
    refused(r"file is a file; choose a folder", check_folder, file)
    refused(r"file is not a folder one can write to", check_folder, file / "inside")


def test_interrupting_leaves_a_report_of_what_there_is(tmp_path, text):
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "fmtsim", "train", *SMALL, "--steps", "1000", "--checkpoint-every", "0", "--data",
        str(text), "--out", str(out),
    ]  # fmt: skip
    # Jobs in the background of a shell ignore the signal, and so would what they start.
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    try:
        assert process.stderr.readline() == "loading torch, compiling kernels\n"
        assert process.stderr.readline().startswith("fp32: ")
    finally:
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    (steps,) = re.findall(
        rf"fmtsim: interrupted; {out}/report.html shows what there is, after step (\d+) of 1000 of ", error
    )
    assert [path.name for path in out.iterdir()] == ["report.html"]
    page = data_of((out / "report.html").read_text())
    said = (
        f"Interrupted after step {steps} of 1000 of the baseline run: this is what there is, without held-out losses."
    )
    assert page["notes"] == [said] and page["observation"] is None
    assert [len(curve["losses"]) for curve in page["curves"]] == [int(steps)]


def test_interrupting_before_the_first_step_writes_nothing(tmp_path, text, capsys, monkeypatch):
    monkeypatch.setattr(training_run, "rehearse", lambda config: _interrupt())
    assert main(["train", *SMALL, "--data", str(text), "--out", str(tmp_path / "out"), "--quiet"]) == 130
    assert capsys.readouterr().err == f"\nfmtsim: interrupted; nothing was written to {tmp_path / 'out'}\n"
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_simulation_shows_its_operands(tmp_path, text, capsys, monkeypatch):
    schedule = learner.Learner.set_rate
    stops = iter([None] * 5)
    monkeypatch.setattr(
        learner.Learner, "set_rate", lambda *a: schedule(*a) if next(stops, 1) is None else _interrupt()
    )
    out = tmp_path / "out"
    assert main(["train", *SMALL, "--data", str(text), "--out", str(out), "--quiet", "--target", "h200"]) == 130
    assert f"after step 2 of 3 of the simulated run; a checkpoint is in {out}" in capsys.readouterr().err
    page = data_of((out / "report.html").read_text())
    assert [len(curve["losses"]) for curve in page["curves"]] == [3, 2] and page["observation"]["steps"] == [1, 2]
    ran = dict(map(tuple, page["configuration"]))
    assert (ran["ran.simulated.target"], ran["ran.simulated.scaling"]) == ("h200", "tensor")
    assert ran["ran.command"].startswith("fmtsim train ") and ran["ran.simulated.formats"].startswith(
        "x e4m3_tensor_am"
    )
    assert page["verdict"][0][1].endswith(
        "over the last tenth of 2 steps, from one seed; too few steps to tell that from chance"
    )


def _interrupt():
    raise KeyboardInterrupt


def test_schedule_and_observed_steps():
    for steps, warm in ((600, 60), (60, 20), (10, 5), (1, 1)):
        rates = [schedule(step, steps) for step in range(1, steps + 1)]
        assert rates[0] == 1 / warm and max(rates) == rates[warm - 1] == 1.0
        assert rates[-1] == (pytest.approx(0.1) if steps > 1 else 1.0)
    assert [schedule(step, 1000) for step in (325, 550)] == pytest.approx([0.55 + 0.45 * 0.5**0.5, 0.55])
    assert observed_steps(100) == {1, *range(20, 101, 20)} and len(observed_steps(10**5)) == 61
    assert observed_steps(600) == {1, *range(20, 601, 20)} and observed_steps(12) == {1, 3, 6, 9, 12}
    assert observed_steps(1) == {1} and observed_steps(3) == {1, 2, 3}


def test_sizes_and_seeds_end_where_memory_and_generators_do():
    for size in (1, (1 << 31) - 1):
        check_size("width", size)
    for size in (0, 1 << 31):
        refused(f"--width {size} is not allowed; choose 1", check_size, "width", size)
    assert config(Scheme(format="fp32"), seed=(1 << 63) - 1).seed == (1 << 63) - 1
    refused(f"--seed {1 << 63} is not allowed", config, Scheme(format="fp32"), seed=1 << 63)


def blocks(**options):
    operands = Scheme(**options).linear_config().operands
    return {name: getattr(q.format, "block", None) for name, q in operands.items()}


def test_defaults_follow_the_width_of_the_format():
    assert set(blocks(format="e4m3").values()) == {(None, None)}
    assert set(blocks(format="bf16").values()) == {None}
    assert set(blocks(format="mxfp8_e4m3").values()) == {(1, 32)}
    assert [Scheme(format=f).gradient for f in ("e4m3", "e2m1", "bf16", "nvfp4")] == ["e5m2", "e5m2", "bf16", "nvfp4"]


def test_tiles_are_square_for_weights_alone():
    assert blocks(format="e4m3", scaling="tile128") == {
        "x_f": (1, 128), "x_w": (1, 128), "g_d": (1, 128), "g_w": (1, 128), "w_f": (128, 128), "w_d": (128, 128),
    }  # fmt: skip


def test_mx_scales_are_powers_of_two():
    fmt = Scheme(format="e2m1", scaling="mx").linear_config().fprop.a.format
    assert fmt.power_of_two and fmt.scale.name == "e8m0" and fmt.block == (1, 32)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_scaling_builds(scaling):
    config = Scheme(format="e4m3", grad_format="e5m2", scaling=scaling, grad_rounding="stochastic").linear_config()
    assert config.wgrad.a.rounding.mode == "stochastic" and config.wgrad.b.rounding.mode == "nearest_even"


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({"format": "fp32"}, "fp32"),
        ({"format": "e4m3"}, "e4m3/e5m2, scaled by tensor"),
        ({"format": "bf16"}, "bf16, unscaled"),
        ({"format": "mxfp4", "grad_rounding": "stochastic"}, "mxfp4, g SR"),
        ({"format": "e2m1", "scaling": "none", "rounding": "up", "grad_rounding": "up"}, "e2m1/e5m2, unscaled, up"),
        ({"format": "e4m3", "target": "hopper.wgmma"}, "e4m3/e5m2, scaled by tensor, on hopper.wgmma"),
        ({"format": "fp32", "target": "h200"}, "fp32, unscaled, on h200"),
        ({"format": "e4m3", "target": "h200", "fast_accum": True},
         "e4m3/e5m2, scaled by tensor, on h200, fast accumulation"),
        ({"format": "bf16", "target": Datapath(block=32, fraction_bits=10), "plan": GemmPlan(promote_every=64)},
         "bf16, unscaled, on blocks of 32, F=10, toward_zero to fp32, own plan"),
    ],
)  # fmt: skip
def test_labels(options, label):
    assert Scheme(**options).label == label


def test_the_machine_reaches_every_product():
    unit, plan = Datapath(block=8), GemmPlan(promote_every=64)
    scheme = Scheme(format="e4m3", target=unit, plan=plan)
    config = scheme.linear_config().on(**scheme.machine)
    assert all(gemm.target == unit and gemm.plan == plan for gemm in (config.fprop, config.dgrad, config.wgrad))
    assert Scheme(format="fp32", target="h200").simulated and not Scheme(format="fp32").simulated


def test_records_hold_plain_types():
    scheme = Scheme(format="e4m3", target=Datapath(block=8, accumulator="bf16"), plan=GemmPlan(promote_every=64))
    fields = json.loads(json.dumps(scheme.to_dict()))
    assert record_from_dict(fields["target"]) == scheme.target and record_from_dict(fields["plan"]) == scheme.plan
    assert fields["optimizer"] == {"rule": "adamw", "state": "fp32"} and fields["reduction"] == "fp32"
    given = {"target": scheme.target, "plan": scheme.plan, "optimizer": None, "reduction": None, "rules": ()}
    assert Scheme(**{**fields, **given}) == scheme


def test_contradictions_are_named():
    with pytest.raises(FormatError, match=r"scaling='tensor' does not go with mxfp4, which has blocks of its own"):
        Scheme(format="mxfp4", scaling="tensor").linear_config()
    with pytest.raises(ArgumentError, match=r"scaling='block64' is unknown; choose one of none, tensor"):
        Scheme(format="e4m3", scaling="block64").linear_config()
    with pytest.raises(FormatError, match=r"no unit multiplies e4m3 in blocks of \(1, 32\) with fp32"):
        Scheme(format="e4m3", scaling="block32").linear_config().on(target="hopper.wgmma")
