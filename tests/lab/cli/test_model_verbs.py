# SPDX-License-Identifier: Apache-2.0
"""fmtsim observe, attribute, ptq and search: of a plain module and of a Llama, and what is wrong with the words."""

import dataclasses
import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

import fmtsim
from fmtsim.lab.cli import model_commands as model_commands
from fmtsim.lab.cli.main import main
from fmtsim.lab.search import Policy
from fmtsim.recipes.serialization import load_rules
from tests.support.models import hugging_face
from tests.support.reports import data_of

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8))
    with torch.no_grad():
        model[2].weight.mul_(2**-6)
        model[2].weight[0, 0] = 2**12
    return model, [torch.randn(16, 32) for _ in range(6)], lambda y: y.square().mean()

def silent():
    return build()[:2]

def frozen():
    model, batches, loss = build()
    return model.requires_grad_(False), batches, loss

def blows():
    model, batches, loss = build()
    batches[2][0, 0] = float("inf")
    return model, batches, loss

def constant():
    model, batches, loss = build()
    return model, batches, lambda y: torch.ones(())

def language():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 256))

def converted():
    import fmtsim
    model, batches, loss = build()
    return fmtsim.convert(model, format="e4m3"), batches, loss
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return the folder of a Llama with a tokenizer of words."""
    place = tmp_path_factory.mktemp("llama")
    hugging_face("llama").save_pretrained(place)
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(("?", "the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog"))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?").save_pretrained(place)
    return place


@pytest.fixture
def run(capsys):
    """Run words without progress, and return status and what was printed; --json is read."""

    def command(words):
        status = main([*words.split(), *([] if " list" in words or words.startswith("trace") else ["--quiet"])])
        captured = capsys.readouterr()
        if status == 0 and "--json" in words:
            return status, json.loads(captured.out)
        return status, captured.out + captured.err

    return command


def built():
    """Return what ``models.py:build`` does."""
    names: dict = {}
    exec(MODELS, names)
    return names["build"]()


def test_observe_is_the_function(run, tmp_path):
    status, found = run("observe --model models.py:build --format e4m3 --every 2 --steps 5 --by sqnr --worst 2 --json")
    model, batches, loss = built()
    with fmtsim.observe(model, format="e4m3", every=2) as seen:
        losses = [loss(model(batch)) for batch in batches[:5]]
        for one in losses:
            one.backward()
    assert status == 0 and found["losses"] == [float(one.detach()) for one in losses]
    assert found["layers"].keys() == seen.layers.keys() == {"0", "2", "4"} and list(found["history"]) == ["1", "3", "5"]
    assert [one["operand"] for one in found["worst"]] == [one.operand for one in seen.worst(2, "sqnr")]
    assert found["worst"][0]["layer"] == seen.worst(1, "sqnr")[0].layer


def test_observe_prints_what_loses_most_and_writes_a_page(run, tmp_path):
    status, text = run("observe --model models:build --recipe te_current --worst 3 --report page.html")
    assert status == 0 and text.splitlines()[2].split()[:2] == ["2", "w_f"] and len(text.splitlines()) == 8
    assert "6 batches of models:build; 6 steps, 6 of them observed; mean loss " in text and "wrote page.html" in text
    page = (tmp_path / "page.html").read_text()
    data = data_of(page)
    assert data["title"] == "What te_current loses of models:build"
    assert data["observation"]["steps"] == [1, 2, 3, 4, 5, 6]  # as those of the losses
    assert data["notes"] == text.splitlines()[5:7] and len(data["curves"][0]["losses"]) == 6


def test_observe_trains_only_when_asked(run):
    words = (
        "observe --model models.py:language --data text.txt --format e4m3 --batch-size 2 --context 16 --steps 4 --json"
    )
    still, learns = (run(words + more)[1] for more in ("", " --lr 0.1"))
    assert still["losses"][0] == learns["losses"][0] and learns["losses"][-1] < still["losses"][-1] - 0.5
    assert still["data"] == "4 batches of 2 x 16 bytes of text.txt" and still["loss_unit"] == "nats per byte"


def test_observe_trains_by_adamw_in_high_precision(run):
    found = run("observe --model models.py:build --format e2m1 --lr 0.01 --json")[1]
    model, batches, loss = built()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for batch in batches:
        optimizer.zero_grad()
        one = loss(model(batch))
        one.backward()
        optimizer.step()
        losses.append(one.item())
    assert found["losses"] == losses


def test_observe_of_models_that_are_used_or_converted(run):
    assert "g_d" in run("observe --model models.py:frozen --format e4m3 --json")[1]["layers"]["2"]
    assert run("observe --model models.py:converted --json")[1]["worst"][0]["layer"] == "2"


def test_a_loss_that_is_no_number_is_told(run):
    status, text = run("observe --model models.py:blows --format e4m3")
    assert status == 0 and "\nthe loss became nan at step 3\n" in text


def test_an_interrupt_leaves_the_report_of_the_steps_before_it(heard, run, monkeypatch, tmp_path):
    before, calls = model_commands.call, []

    def call(*arguments, **named):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return before(*arguments, **named)

    monkeypatch.setattr(model_commands, "call", call)
    status, text = run("observe --model models.py:build --format e4m3 --report page.html")
    assert status == 130 and text == "\nfmtsim: interrupted; after 2 of 6 steps; page.html has them\n"
    assert "Interrupted after 2 of 6 steps" in (tmp_path / "page.html").read_text()


def test_attribute_names_the_layer_and_its_rules_are_taken_back(run, tmp_path):
    words = "attribute --model models.py:build --recipe te_current --share 0.4 --out rules.json --report page.html"
    status, text = run(words)
    assert status == 0 and "\nkeep 2 in high precision: 100 % of the loss" in text
    assert "wrote rules.json and page.html" in text and '"attribution"' in (tmp_path / "page.html").read_text()
    assert [rule.name for rule in load_rules("rules.json")] == ["^2$"]
    exact = run("attribute --model models.py:build --recipe te_current --exact --json")[1]
    assert (
        exact["exact"] is True and exact["rules"] == [{"name": "^2$"}] and exact["data"] == "1 batch of models.py:build"
    )
    model = fmtsim.convert(built()[0], "te_current", rules="rules.json")
    assert [row.name for row in fmtsim.report(model).converted] == ["0", "4"]
    found = run("observe --model models.py:build --recipe te_current --rules rules.json --json")[1]
    assert found["layers"].keys() == {"0", "4"}
    ruled, plain = (run(f"observe --model models.py:build --format e4m3 {rules} --json")[1]["layers"]
                    for rules in ("--rules rules.json", ""))  # fmt: skip
    assert ruled == {layer: plain[layer] for layer in ("0", "4")}
    assert "Linear" in run("trace --model models.py:build --recipe te_current --rules rules.json")[1]


def test_attribute_of_a_llama_knows_its_logits(run, llama):
    words = f"attribute --model {llama} --data text.txt --recipe te_current --by kl --context 12 --batch-size 4 --json"
    status, found = run(words)
    assert status == 0 and found["rounded_kl"] > 0 and found["data"] == "1 batch of 4 x 12 tokens of text.txt"
    layers = {row["layer"] for row in found["rows"]}
    assert "model.layers.0.mlp.down_proj" in layers and "lm_head" in layers  # the names of the user's own model


def test_attribute_of_a_model_of_bytes_knows_its_logits(run):
    words = "attribute --model models.py:language --data text.txt --format e4m3 --context 12 --batch-size 4 --json"
    found = run(words)[1]
    assert found["rounded_kl"] > 0 and found["notes"] == []


def test_ptq_calibrates_on_the_first_half(run):
    report = run("ptq --model models.py:build --scheme int8_static --json")[1]["report"]
    first = torch.stack(built()[1][:3]).abs().max().item()
    assert report["rows"][0]["x_limit"] == pytest.approx(first, rel=1e-6)  # a scale times 127


def test_ptq_measures_and_writes_what_load_state_takes(run, llama, tmp_path):
    words = (
        f"ptq --model {llama} --data text.txt --scheme int8_static --context 12 --batch-size 4 --batches 2 --out out"
    )
    status, text = run(words)
    assert status == 0 and "calibrated on 2 batches of 4 x 12 tokens of text.txt" in text
    assert "loss on 2 batches that were not calibrated on: " in text and "nats per token" in text
    assert "\nperplexity per token: " in text and "wrote out/model.pt, out/report.json, out/scheme.json" in text
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert 0 < abs(report["loss"]["quantised"] - report["loss"]["exact"]) < 0.1
    model = fmtsim.load_state(hugging_face("llama"), torch.load("out/model.pt", weights_only=True))
    tokens = torch.arange(8)[None]
    plain, quantised = hugging_face("llama")(tokens).logits, model(tokens).logits
    assert not torch.equal(plain, quantised)
    saved = fmtsim.get_recipe("out/scheme.json")
    assert [rule.name for rule in saved.rules] == ["^lm_head$"]
    assert dataclasses.replace(saved, rules=()) == fmtsim.get_recipe("int8_static")


def test_ptq_without_a_loss_and_on_a_machine(run):
    found = run("ptq --model models.py:silent --scheme w4a4 --json")[1]
    assert 0 < found["output_noise"] < 1 and "loss" not in found and found["data"] == "3 batches of models.py:silent"
    status, text = run("ptq --model models.py:silent --scheme e4m3_token --target h200")
    assert status == 0 and "by e4m3_token on h200" in text and "outputs relative to their squares, on 3 batches" in text
    assert "w4a4" in run("ptq --scheme list")[1]
    for layout, scheme, name in (
        ("compressed-tensors", "int4_g32", ""), ("torchao", "int4_g32", "/model.safetensors"),
        ("gguf", "q4_0", "/model.gguf"),
    ):  # fmt: skip
        status, text = run(f"ptq --model models.py:silent --scheme {scheme} --out {layout} --export {layout}")
        values, state = fmtsim.read_export(f"{layout}{name}"), torch.load(f"{layout}/model.pt")["tensors"]
        assert status == 0 and f"{layout}/model.pt" in text and values
        assert all(torch.equal(values[name], state[name]) for name in values)


def test_ptq_of_one_batch_says_that_it_measured_there(run, tmp_path):
    with (tmp_path / "models.py").open("a") as file:
        file.write("def one():\n    return build()[0], torch.ones(4, 32)\n")
    assert "on the batch of the calibration" in run("ptq --model models.py:one --scheme w4a4")[1]


def test_search_writes_what_ptq_and_rules_take(run, tmp_path):
    words = "search --model models.py:build --bits 6 --samples 5 --schemes w4a4,int8_token --out s.json --plot s.png"
    status, text = run(words)
    assert status == 0 and "6 batches of models.py:build\nwrote s.json and s.png" in text
    found = run("search --model models.py:build --bits 6 --schemes w4a4,int8_token --json")[1]
    assert found["cost"] <= found["budget"] and set(found["formats"]) == {"0", "2", "4"}
    assert "by searched" in run("ptq --model models.py:build --scheme s.json")[1]
    layers = run("observe --model models.py:build --recipe te_current --rules s.json --json")[1]["layers"]
    assert {layer: seen["w_f"]["format"][:4] for layer, seen in layers.items()} == {
        layer: {"w4a4": "int4", "int8_token": "int8"}[scheme] for layer, scheme in found["formats"].items()
    }


def test_search_takes_attributions(run):
    words = "search --model models.py:build --bits 6 --schemes w4a4,int8_token --json"
    found = run(f"{words} --sensitivity")[1]
    model, batches, loss = built()
    for name in ("w4a4", "int8_token"):
        rows = fmtsim.attribute(model, batches[0], loss, fmtsim.get_recipe(name).linear, generator=0).rows
        for layer in ("0", "2", "4"):
            assert found["losses"][layer][name] == sum(row.loss for row in rows if row.module == layer)
    assert found["losses"] != run(words)[1]["losses"]


def test_search_trains_a_model_and_keeps_its_weights(run, tmp_path):
    words = "search --model models.py:build --bits 5 --while-training 12 --lr 1e-2 --weights w.pt --out s.json --json"
    found = run(words)[1]
    model, batches, loss = built()
    policy = Policy(steps=9, rate=0.05, penalty=1.0, entropy=0.0, sharpen=0.1, seed=0)
    own = fmtsim.lab.search.search_while_training(
        model, lambda step: loss(model(batches[step % 6])), torch.optim.AdamW(model.parameters(), lr=1e-2), bits=5,
        policy=policy, warmup=3,
    )  # fmt: skip
    assert (found["formats"], found["loss"], found["chances"]) == (own.formats, own.loss, own.chances)
    assert found["files"] == ["s.json", "w.pt"]
    saved, again = torch.load("w.pt"), model.state_dict()
    assert all(torch.equal(saved[name], again[name]) for name in ("0.weight", "2.bias"))
    status, text = run("ptq --model models.py:build --checkpoint w.pt --scheme s.json")
    assert status == 0 and "by searched" in text


def test_the_examples_of_the_page_run(run, llama, tmp_path):
    page = (Path(fmtsim.__file__).parents[1] / "docs" / "howto" / "cli.md").read_text(encoding="utf-8")
    (tmp_path / "model.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    (tmp_path / "llama").symlink_to(llama)
    said = {}
    for line in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[0].splitlines():
        words, _, note = line.removeprefix("fmtsim ").partition("#")
        small = " --context 12 --batch-size 2 --steps 4" if "--steps" in words else ""
        small = " --context 12 --batch-size 2" if "int4_g32" in words else small
        status, text = run(words.strip() + small)
        assert status == 0, text
        said[note.strip()] = text
    first = said["first 2 w_f: 100 % underflow"].splitlines()[2].split()
    assert first[:2] == ["2", "w_f"] and float(first[3]) > 99
    assert re.search(r"\nkeep \d in high precision: \d+ % of the loss", said["layers to keep in high precision"])
    assert "perplexity" in said["perplexity before and after"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("observe --model models.py:build", "--recipe or --format is missing; pass one, such as"),
        ("observe --model models.py:build --format e4m3 --recipe te_current", "--recipe and --format are both given"),
        ("observe --model models.py:build --rules models.py", "--rules are exceptions of --recipe or --format; pass"),
        ("observe --model models.py:build --format e4m3 --rules models.py", "models.py is not a valid file of rules: "),
        ("observe --model models.py:build --format e4m3 --steps 0", "--steps 0 is not possible; choose 1 or more"),
        ("observe --model models.py:build --format e4m3 --lr -1", "--lr -1 is not possible; choose a finite number"),
        ("observe --model models.py:build --format e4m3 --report r.htm", "--report r.htm does not end in .html"),
        ("observe --model models.py:build --format e4", "unknown format 'e4'"),
        ("observe --model models.py:silent --format e4m3",
         "its model returned a tensor [16, 8], which is not a loss; ret"),
        ("observe --model models.py:constant --format e4m3", "its loss depends on no parameter"),
        ("observe --model models.py:language --format e4m3",
         "--data is missing: --model models.py:language comes with"),
        ("observe --model models.py:build --format e4m3 --data text.txt", "returns batches of its own; leave --data o"),
        ("observe --model models.py:build --format e4m3 --batch-size 0", "--batch-size 0 is not possible"),
        ("observe --model models.py:build --format e4m3 --seed -1",
         "--seed -1 is not possible; choose 0 to 2814749767"),
        ("attribute --model models.py:build --format e4m3 --seed 99999999999999999999",
         "--seed 99999999999999999999 is"),
        ("ptq --model models.py:build --scheme w4a4 --batches 9999999999", "--batches 9999999999 is not possible; cho"),
        ("observe --model models.py:converted --format e4m3", "is converted already"),
        ("observe --model models.py:build --format e4m3 --device cuda:99", "--device cuda:99 is not there"),
        ("attribute --model models.py:silent --format e4m3",
         "returned a tensor [16, 8], which is not a loss; return (model"),
        ("attribute --model models.py:build --recipe te_current --share 2", "--share 2.0 is not a part of the cost"),
        ("attribute --model models.py:build --recipe te_current --by kl", "the model's logits are not known"),
        ("ptq --scheme int8_static", "--model is missing"),
        ("ptq --scheme q4_0 --model models.py:build --export gguf", "--export gguf without --out; name the folder"),
        ("ptq --scheme int8 --model models.py:build", "there are 'int8_token', 'int8_static', 'int8_smooth'"),
        ("ptq --scheme w4a4 --model models.py:build --out models.py", "--out models.py is a file; choose a folder"),
        ("search --model models.py:build", "pass exactly one of --bits (of both operands) and --budget"),
        ("search --model models.py:build --bits 6 --schemes w4a5",
         "'w4a5' is unknown; did you mean 'w4a8' or 'w4a4' or"),
        ("search --model models.py:build --bits 1", "no assignment meets a budget of"),
        ("search --model models.py:build --bits 6 --while-training 0", "--while-training 0 is not possible; choose 1"),
        ("search --model models.py:build --bits 6 --weights w.pt",
         "--weights are those of a search while training; pass --while-training STEPS as well"),
        ("search --model models.py:build --bits 6 --sensitivity --while-training 9",
         "--sensitivity is of a search without training; leave it or --while-training out"),
        ("search --model models.py:build --bits 6 --executor dask://a:1 --while-training 9",
         "--executor is of a search without training; leave it or --while-training out"),
        ("search --model models.py:build --bits 6 --samples 9 --while-training 9",
         "--samples is of a search without training; leave it or --while-training out"),
        ("search --model models.py:build --bits 6 --lr 0 --while-training 9",
         "--lr 0.0 is not a learning rate; choose a number above 0"),
    ],
)  # fmt: skip
def test_words_that_are_wrong(run, words, said):
    status, text = run(words)
    assert status == 2 and said in text and text.count("\n") == 1
