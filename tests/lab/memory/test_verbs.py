# SPDX-License-Identifier: Apache-2.0
"""What the two verbs and ``fmtsim memory`` take, show and refuse."""

import json

import pytest

import fmtsim
from fmtsim import lab
from fmtsim.lab.cli.main import main
from fmtsim.lab.memory import Latent, Lora, ModelSize, Parallel, StoredFormats, model_size
from fmtsim.support.errors import ArgumentError, DataError, FormatError
from tests.support.refusals import refused

ONE = {"name": "one", "blocks": 2, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2, "head_dim": 16,
       "vocabulary": 512}  # fmt: skip
SIZE = ModelSize(**ONE)


def test_an_estimate_is_a_table_with_its_formulas():
    found = lab.training_memory(SIZE, "coat", tokens=32, batch=2, parallel=Parallel(devices=2, zero=2))
    lines = str(found).splitlines()
    assert (
        lines[0].startswith("one: 139,584 parameters") and "recipe coat, 2 devices, 2 x 32 tokens on each" in lines[0]
    )
    assert [line.split("  ")[0] for line in lines[3:13]] == [
        "weights", "quantised weights", "master weights", "gradients", "first moment", "second moment", "activations",
        "head and loss", "gradients of the logits", "total",
    ]  # fmt: skip
    assert "temporary buffers" in lines[-1] and "ordinary dtypes" in lines[-2]
    assert "<table>" in found._repr_html_() and "quantised weights" in found._repr_html_()
    assert found.total == sum(line.bytes for line in found.lines) == found.to_dict()["total"]
    assert "x 2 bytes / 2 (ZeRO 2)" in found.formulas() and "64 tokens x 2 x " in found.formulas()
    assert sum(each.bytes for each in found.saved) * 2 * 64 == found["activations"]
    assert found["KV cache"] == 0


def test_what_recipes_keep():
    """Weights are float32 under autocast and where products take them whole; two uses of one original are kept once."""
    size = ModelSize(**ONE | {"blocks": 7})
    recipes = {name: lab.training_memory(size, name, tokens=32) for name in fmtsim.list_recipes(kind="training")}
    plain = lab.training_memory(size, tokens=32)
    for name in ("amp_bf16", "fp32", "tf32"):
        assert recipes[name]["weights"] == 2 * plain["weights"] and recipes[name]["master weights"] == 0
    assert recipes["fp32"]["activations"] == 2 * plain["activations"] == 2 * recipes["amp_bf16"]["activations"]
    assert recipes["amp_bf16"]["quantised weights"] == 0  # made anew for each product
    assert recipes["te_delayed"]["scale histories"] == 4 * 1024 * 3 * (7 * 7 + 1)
    assert recipes["te_mxfp8"]["activations"] == plain["activations"] > recipes["te_current"]["activations"]
    assert recipes["coat"]["first moment"] < plain["first moment"] / 3
    assert recipes["deepseek_v3"]["first moment"] == plain["first moment"] / 2
    early = lab.training_memory(size, "te_mxfp8", tokens=32, quantize_early=True)
    matrices = 7 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 512 * 64
    assert early["activations"] < plain["activations"] and early["quantised weights"] == 2 * matrices * 8.25 / 8
    assert recipes["te_current"]["quantised weights"] == matrices
    notes = [any("quantize_early=True" in note for note in found.notes) for found in (recipes["te_mxfp8"], early)]
    assert notes == [True, False]
    assert not any("quantize_early=True" in note for note in recipes["amp_bf16"].notes)
    kept = {each.name: each.kept for each in recipes["deepseek_v3"].saved}
    assert kept["output of attention"] == "bf16, e5m6" and kept["input of the last layer"] == "e4m3"  # section 3.5.2
    assert any("replaces" in note for note in recipes["intel_2t"].notes)
    assert len(recipes) == len(fmtsim.list_recipes(kind="training"))


def test_what_is_there_at_once():
    """The loss is in float32; devices in parallel share out the logits; a block runs again when they are gone."""
    plain, full = (lab.training_memory(SIZE, tokens=8, checkpointing=name) for name in ("none", "full"))
    assert plain["head and loss"] == full["head and loss"] == 8 * (2 * 64 + 2 * 64 + 4 * 512)
    assert plain["gradients of the logits"] == full["gradients of the logits"] == 8 * 2 * 4 * 512
    assert full["recomputed block"] == plain["recomputed block"] == 0
    few = ModelSize(**ONE | {"vocabulary": 64})
    plain, full = (lab.training_memory(few, tokens=8, checkpointing=name) for name in ("none", "full"))
    assert full["recomputed block"] + full["activations"] / 2 == plain["activations"] / 2 > 8 * 2 * 4 * 64
    assert plain["gradients of the logits"] == 8 * 2 * 4 * 64 and full["gradients of the logits"] == 0
    formulas = lab.training_memory("llama-8b", tokens=8192).formulas()
    assert "gradients of the logits  8,192 tokens x 1,026,048 bytes" in formulas
    split = lab.training_memory(SIZE, tokens=8, parallel=Parallel(devices=2, tensor_parallel=2))
    assert split["head and loss"] == 8 * (2 * 64 + 2 * 64 + 4 * 256)
    assert split["gradients of the logits"] == 8 * 2 * 4 * 256
    assert split["weights"] == lab.training_memory(SIZE)["weights"] / 2
    half = lab.training_memory(SIZE, tokens=8, formats=StoredFormats(loss="bf16"))
    assert half["head and loss"] == 8 * (2 * 64 + 2 * 64 + 2 * 512) and half["gradients of the logits"] == 8 * 4 * 512
    plain = lab.training_memory(SIZE, tokens=8)
    several = lab.training_memory(SIZE, tokens=8, batch=3)
    assert several["activations"] == 3 * plain["activations"]


def test_a_block_that_a_rule_leaves_in_high_precision_keeps_more():
    names = ("te_nvfp4", "te_nvfp4_all")
    size = ModelSize(**ONE | {"blocks": 20})
    some, every = (lab.training_memory(size, name, tokens=8, quantize_early=True)["activations"] for name in names)
    assert some > every
    head = lab.training_memory(SIZE, "deepseek_v3", tokens=8)["head and loss"]
    assert head == lab.training_memory(SIZE, tokens=8)["head and loss"]
    assert head > lab.training_memory(SIZE, "te_current", tokens=8)["head and loss"]


def test_experts_and_latent_attention():
    experts = ModelSize(**ONE | {"experts": 8, "active": 2, "shared": 64, "dense": 1, "dense_width": 256})
    dense = lab.training_memory(SIZE, tokens=8)
    found = lab.training_memory(experts, tokens=8)
    router, expert, shared = 64 * 8, 3 * 64 * 128, 3 * 64 * 64
    change = router + 8 * expert + shared - expert + (3 * 64 * 256 - expert)  # the second block, and the first
    assert found.parameters == dense.parameters + change
    histories = lab.training_memory(experts, "te_delayed")["scale histories"]
    assert histories == 4 * 1024 * 3 * (7 + 1 + 4 + 1 + 8 * 3 + 3)  # blocks, head, router, experts and shared
    assert {each.name for each in found.saved} >= {"input of the router", "outputs of experts"}
    inputs = {each.name: each.elements for each in found.saved}
    assert inputs["experts' input of the last layer"] == 2 * 128 and inputs["shared input of the last layer"] == 64
    latent = Latent(queries=24, values=20, rotary=8, key_dim=12, value_dim=20)
    small = ModelSize(**ONE | {"latent": latent})
    assert small.cached == 28 and small.qkv == (80, 80, 80) and small.attention["o_proj"] == (64, 80)
    kept = {each.name: each.elements for each in lab.training_memory(small, tokens=8).saved}
    assert kept["latent vectors, for their norms"] == 44 and kept["queries, keys and values"] == 240
    each = lab.serving_memory(small, context=5, devices=2, kv_format="int8_channel")["KV cache"]
    assert each == 2 * 5 * 28 * (8 + 32 / 20) / 8  # whole on each device; a float32 scale for 20
    whole = ModelSize(**ONE | {"latent": Latent(queries=0, values=16, rotary=8, key_dim=12, value_dim=20)})
    assert "q_proj" in whole.attention and "q_a_proj" not in whole.attention


def test_encoders_cache_nothing():
    config = {"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
              "vocab_size": 512, "max_position_embeddings": 128}  # fmt: skip
    encoder, decoder = lab.serving_memory(config, context=8), config | {"is_decoder": True}
    assert encoder["KV cache"] == 0 and lab.serving_memory(decoder, context=8)["KV cache"] == 2 * 2 * 64 * 2 * 8
    assert lab.serving_memory(ModelSize(**ONE | {"encoder": True}), context=8)["KV cache"] == 0


def test_a_tied_head_runs_as_the_recipe_says():
    tied = lab.training_memory(ModelSize(**ONE | {"tied": True}), "te_current", tokens=8)
    assert tied["head and loss"] == lab.training_memory(SIZE, "te_current", tokens=8)["head and loss"]
    assert tied.parameters == lab.training_memory(SIZE).parameters - 512 * 64
    embedding = lab.serving_memory(SIZE, weights="mxfp4")["weights"]
    matrices = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
    assert embedding == matrices * 4.25 / 8 + 2 * (2 * 512 * 64 + 5 * 64)  # embedding, head and norms in bfloat16


def test_optimizers_by_rule_scheme_and_both():
    kept = {name: lab.training_memory(10**6, optimizer=name) for name in ("lion", "lion:bnb8", "bnb8", "lns_madam")}
    assert kept["lion"]["second moment"] == 0 and kept["lion"]["first moment"] == 4 * 10**6
    assert kept["lion:bnb8"]["first moment"] == kept["bnb8"]["second moment"] == 10**6 + 4 * -(-(10**6) // 256)
    assert kept["lns_madam"]["weights"] == 2 * 10**6 + 4 and kept["lns_madam"]["first moment"] == 0
    assert kept["lns_madam"]["master weights"] == 0
    beside = lab.training_memory(10**6, optimizer="fp8lm", formats=StoredFormats(weights="bf16"))
    assert beside["weights"] == 2 * 10**6 and beside["master weights"] == 2 * 10**6 + 4
    assert lab.training_memory(10**6, optimizer="bf16_sr")["master weights"] == 0
    own = fmtsim.optim.Scheme(name="mine", first=fmtsim.optim.StateFormat(format=fmtsim.get_format("bf16")))
    assert lab.training_memory(10**6, optimizer=own)["first moment"] == 2 * 10**6


REFUSED = [
    (lambda: lab.training_memory("llama8b"), r"model='llama8b' is unknown; did you mean 'llama-8b'"),
    (lambda: lab.training_memory(None), r"model=None is unknown \(fmtsim.gemm.model_layers.list_models\(\)"),
    (lambda: lab.training_memory("t5-small"), r"'t5-small': its blocks are of several kinds.*pass its number"),
    (lambda: lab.training_memory(0.5), r"model=0.5 is not a number of parameters; pass 1 to 10\*\*15"),
    (lambda: lab.training_memory(float("nan")), r"model=nan is not a number of parameters"),
    (lambda: lab.training_memory(1e9, tokens=8), r"tokens=8 needs the sizes of a model.*'llama-8b'"),
    (lambda: lab.training_memory(1e9, lora=8), r"lora=8 needs the sizes of a model"),
    (lambda: lab.serving_memory(1e9, context=8), r"context=8 needs the sizes of a model"),
    (lambda: lab.training_memory(SIZE, tokens=-1), r"tokens=-1 is not possible; choose a whole number from 0"),
    (lambda: lab.training_memory(SIZE, tokens=8, batch=0), r"batch=0 is not possible; choose a whole number from 1"),
    (lambda: lab.serving_memory(SIZE, requests=0), r"requests=0 is not possible"),
    (lambda: Parallel(devices=6, tensor_parallel=4), r"tensor_parallel=4 does not divide devices=6"),
    (lambda: Parallel(zero=4), r"zero=4 is not allowed; choose 0, 1, 2, 3"),
    (lambda: lab.training_memory(SIZE, tokens=8, checkpointing="some"), r"checkpointing='some' is not allowed"),
    (lambda: lab.training_memory(SIZE, tokens=8, attention="slow"), r"attention='slow' is not allowed"),
    (lambda: lab.training_memory(SIZE, dropout=0.1), r"dropout=0.1 is not a flag"),
    (lambda: lab.training_memory(SIZE, optimizer="bnb9"), r"optimizer='bnb9' is unknown; did you mean 'bnb8'\?"),
    (lambda: lab.training_memory(SIZE, optimizer=8), r"optimizer=8 is not an optimizer; pass a name such as"),
    (lambda: lab.training_memory(SIZE, lora=8, recipe="coat"), r"lora=8 with recipe='coat' is not estimated"),
    (lambda: Lora(layers="q"), r"layers='q' needs a rank; pass rank=16 as well"),
    (lambda: Lora(rank=-1), r"rank=-1 is not possible; choose a whole number from 0"),
    (lambda: lab.training_memory(SIZE, parallel=4), r"parallel=4 is not a Parallel; pass fmtsim.lab"),
    (lambda: lab.training_memory(SIZE, formats="e4m3"), r"formats='e4m3' is not a StoredFormats; pass fmtsim.lab"),
    (lambda: lab.training_memory(SIZE, lora=Lora(rank=8, layers="zz")), r"fits no linear layer; they are called q_"),
    (lambda: Lora(rank=8, layers="("), r"'\(' is not a regular expression; write 'q_proj"),
    (lambda: Lora(rank=8, layers=8), r"layers=8 is not allowed"),
    (lambda: lab.training_memory(SIZE)["weight"], r"no line 'weight'; choose one of weights, "),
    (lambda: ModelSize(**ONE | {"heads": 5}), r"kv_heads=2 does not divide heads=5; choose a divisor"),
    (lambda: ModelSize(**ONE | {"hidden": 0}), r"hidden=0 is not possible; choose 1 to 100,000,000"),
    (lambda: ModelSize(**ONE | {"gated": "yes"}), r"gated='yes' is not allowed"),
    (lambda: ModelSize(**ONE | {"blocks": 10**9}), r"blocks=1000000000 is not possible; choose 1 to 10,000"),
    (lambda: Latent(queries=0, values=0, rotary=8, key_dim=12, value_dim=20), r"Latent values=0 is not possible"),
    (lambda: ModelSize(**ONE | {"experts": 4, "active": 5}), r"active=5 of experts=4 is not possible; choose 1 to 4"),
    (lambda: ModelSize(**ONE | {"active": 5}), r"active=5 needs experts; give experts= as well"),
    (lambda: ModelSize(**ONE | {"dense": 3}), r"dense=3, dense_width=0 is not possible; choose up to 2 blocks"),
    (lambda: model_size({"model_type": "lama"}), r"'lama' is unknown; did you mean 'llama' or 'olmo'\?.*ModelSize"),
    (lambda: model_size({"model_type": "llama"}), r"num_hidden_layers is missing; pass a whole config.json"),
    (lambda: model_size({"model_type": "llama", "num_hidden_layers": 2.5}), r"num_hidden_layers is 2.5; write a whole"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_refused(call, message):
    refused(message, call)


def test_formats_and_files_that_are_not_there(tmp_path):
    for name in ("weights", "master", "gradients", "activations", "loss"):
        refused("'e4m33x'", StoredFormats, **{name: "e4m33x"}, error=FormatError)
    refused("'e4m33x'", lab.serving_memory, SIZE, kv_format="e4m33x", error=FormatError)
    path = tmp_path / "config.json"
    refused(r"cannot read .*config.json: No such file or directory", model_size, path, error=DataError)
    for text, why in (
        ("{", "is not a valid config.json: "),
        ("[1]", "holds no JSON object"),
        ("[" * 10**5, "inside each other"),
    ):
        path.write_text(text)
        refused(why, model_size, str(path), error=DataError)
    nested = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 3,
              "num_key_value_heads": 2, "vocab_size": 8}  # fmt: skip
    path.write_text(json.dumps({"model_type": "some_pictures", "text_config": nested}))
    with pytest.raises(ArgumentError, match=r"config.json: ModelSize kv_heads=2 does not divide heads=3"):
        model_size(tmp_path)  # its folder


def run(capsys, *words):
    status = main(["memory", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


SAID = [
    ("--params 7e9 --lora 16", "--lora 16 needs the sizes of a model, not a number of parameters alone"),
    ("--model gpt2 --lora 8 --recipe coat", "--lora 8 with --recipe 'coat' is not estimated; leave one out, and pass "
     "--weights 'nf4_g64' for quantised weights (QLoRA)"),
    ("--model gpt2 --lora-layers q_proj", "--lora-layers 'q_proj' needs a rank; pass --lora 16 as well"),
    ("--model gpt2 --devices 3 --tensor-parallel 2", "--tensor-parallel 2 does not divide --devices 3"),
    ("--model nix", "--model 'nix' is unknown"),
    ("--params 0", "--params 0.0 is not a number of parameters"),
    ("--params 7e9 --optimizer bnb9", "--optimizer 'bnb9' is unknown; did you mean 'bnb8'?"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), SAID)
def test_the_command_line_speaks_of_options(words, message, capsys):
    status, text, said = run(capsys, *words.split())
    assert (status, text) == (2, "") and said.startswith(f"fmtsim: error: {message}")


def test_the_command_line(capsys):
    status, text, _ = run(capsys, "--params", "7.5e9", "--devices", "64", "--zero", "3", "--formulas")
    assert status == 0 and "1.875" in text and "7,500,000,000 x 4 bytes / 64 (ZeRO 3)" in text
    status, text, _ = run(
        capsys, "--model", "gpt2", "--recipe", "coat", "--tokens", "64", "--loss-format", "bf16", "--json"
    )
    expected = lab.training_memory("gpt2", "coat", tokens=64, formats=StoredFormats(loss="bf16"))
    assert json.loads(text) == json.loads(json.dumps(expected.to_dict()))
    status, text, _ = run(capsys, "--params", "65e9", "--master", "none", "--json")
    assert json.loads(text)["total"] == 780 * 10**9
    words = (
        "--model", "gpt2", "--serve", "--context", "8", "--kv-format", "e4m3", "--weights", "int8_channel", "--json",
    )  # fmt: skip
    expected = lab.serving_memory("gpt2", context=8, kv_format="e4m3", weights="int8_channel")
    assert json.loads(run(capsys, *words)[1]) == json.loads(json.dumps(expected.to_dict()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "fmtsim memory needs a model; pass either --model llama-8b, a config.json, or --params 7B"),
        (("--model", "gpt2", "--params", "7e9"), "pass either --model"),
        (("--params", "many"), "'many' is no number of parameters; write 7e9, 7B, 350M"),
        (("--model", "gpt2", "--context", "8"), "--context is about serving; add --serve, or leave it out"),
        (("--model", "gpt2", "--serve", "--lora-layers", "q"), "--lora-layers is about training; leave it or --serve"),
        (("--model", "gpt2", "--serve", "--dropout"), "--dropout is about training"),
        (("--model", "gpt2", "--tokens", "8", "--activations", "e4m33x"), "'e4m33x'"),
    ],
)
def test_the_command_line_says_what_is_wrong(capsys, words, message):
    status, _, error = run(capsys, *words)
    assert status == 2 and message in error and error.count("\n") == 1


@pytest.mark.parametrize(("params", "count", "total"), [
    ("7B", 7 * 10**9, "112.000"), ("350m", 350 * 10**6, "5.600"), ("1.5T", 15 * 10**11, "24,000.000"),
    ("7e9", 7 * 10**9, "112.000"), ("400k", 400_000, "6.400"), ("12k", 12_000, "192.000"),
])  # fmt: skip
def test_parameters_by_their_suffix_and_units_by_size(params, count, total, capsys):
    assert main(["memory", "--params", params]) == 0
    text = capsys.readouterr().out
    unit = "KB" if count < 60_000 else "MB" if count < 6_000_000 else "GB"
    assert f" {count:,} parameters" in text and f" {unit}  share" in text
    assert next(line for line in text.splitlines() if line.startswith("total")).split() == ["total", total]
