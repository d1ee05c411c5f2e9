# SPDX-License-Identifier: Apache-2.0
"""Models from functions, packages, folders of Hugging Face and files of weights, with their batches."""

import shutil
import sys

import pytest
import torch

from fmtsim.lab.training.loading import Asked, load
from fmtsim.support.errors import ArgumentError, DataError, FmtsimError
from tests.support.models import hugging_face
from tests.support.refusals import refused

FILE = """
import sys
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

def tensor(): return model(), torch.ones(2, 8)
def several(): return model(), [torch.full((2, 8), float(i)) for i in range(5)]
def keywords(): return model(), {"input": torch.ones(2, 8)}
def endless(): return model(), (torch.ones(2, 8) for _ in iter(int, 1))
def pairs(): return model(), [(torch.ones(2, 8),)], lambda y, batch: (y.sum() - batch[0].sum())
def shuffled():
    data = torch.utils.data.TensorDataset(torch.arange(80.).view(10, 8))
    return model(), torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
def none(): return model(), []
def text(): return model(), "batches"
def four(): return model(), [], None, None
def needs(width, *, depth): return model()
def leaves(): sys.exit(3)
def stops(): return model(), (1 / 0 for _ in range(3))
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 4), nn.Linear(4, 16, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, x): return self.head(self.embed(x))
def tied(): return Tied(), torch.arange(4)
def numbers(): return 5
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(FILE)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "part.py").write_text("from own import several\n")
    (tmp_path / "package" / "needs_more.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "text.txt").write_text("0123456789" * 40)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(name, **more):
    return load(Asked(model=name, **more))


def batches(found):
    return [sample.batch for sample in found]


def test_what_a_batch_is():
    assert torch.equal(batches(loaded("own.py:tensor").samples)[0], torch.ones(2, 8))
    assert list(batches(loaded("own.py:keywords").samples)[0]) == ["input"]
    assert len(loaded("own.py:endless", count=3).samples) == 3
    pairs = loaded("own.py:pairs")
    assert float(pairs.loss(pairs.samples[0], torch.zeros(3))) == -16


def test_a_package_of_this_folder():
    found = loaded("package.part:several")
    assert found.data == "5 batches of package.part:several" and len(found.samples) == 5


def test_batches_to_measure_on_are_others():
    found = loaded("own.py:several", count=4, held_out=True)
    assert [float(b[0, 0]) for b in batches(found.samples)] == [0, 1, 2]
    assert [float(b[0, 0]) for b in batches(found.held_out)] == [3, 4]
    alone = loaded("own.py:tensor", held_out=True)
    assert alone.held_out is alone.samples


def test_a_seed_decides_and_no_generator_moves():
    state = torch.get_rng_state()
    one, same, other = (batches(loaded("own.py:shuffled", seed=seed).samples) for seed in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, same, strict=True))
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(one, other, strict=True))


def test_dtype_is_that_of_model_and_batches():
    found = loaded("own.py:tensor", dtype="bfloat16")
    assert found.model[0].weight.dtype == found.samples[0].batch.dtype == torch.bfloat16


def test_windows_of_a_text_are_spread_and_held_out_ones_lie_in_the_last_tenth(tmp_path):
    (tmp_path / "text.txt").write_bytes(bytes(range(1, 201)))
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\ndef model(): return nn.Sequential(nn.Embedding(256, 4), nn.Linear(4, 256))"
    )
    found = loaded("own.py:model", data="text.txt", count=2, rows=2, context=4, held_out=True)
    starts = [row[0].item() for sample in found.samples for row in sample.batch[0]]
    assert starts == [1, 59, 118, 176] and found.unit == "nats per byte"
    assert [row[0].item() for sample in found.held_out for row in sample.batch[0]] == [181, 186, 191, 196]
    sample = found.samples[0]
    logits = torch.zeros(2, 4, 256).scatter_(2, (sample.batch[0] + 1)[..., None], 50.0)
    assert float(found.loss(sample, logits)) == 0.0  # the byte that follows


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_come_from_a_file(tmp_path, suffix):
    source = loaded("own.py:tensor", seed=3).model
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        torch.save({"state_dict": source.state_dict(), "step": 3}, path)
    else:
        pytest.importorskip("safetensors.torch").save_file(source.state_dict(), path)
    found = loaded("own.py:tensor", checkpoint=str(path)).model
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), source.parameters(), strict=True))


def test_a_tied_weight_need_be_there_once(tmp_path):
    torch.save({"embed.weight": torch.ones(16, 4)}, "tied.pt")
    assert float(loaded("own.py:tied", checkpoint="tied.pt").model.head.weight.detach().sum()) == 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s | {"3.weight": torch.ones(1)}, "it has '3.weight', which the model has not; did you mean"),
        (lambda s: s | {"2.weight": torch.ones(4, 9)}, "it has '2.weight' of [4, 9], the model of [4, 8]; name the"),
        (lambda s: {"0.weight": s["0.weight"]}, "it lacks '0.bias' and 2 more; name the model that it was saved from"),
        (lambda s: s | {"0.bias": torch.ones(8).double()},
         "'0.bias' is float64 and the model's float32, which would r"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_told_by_the_first_key(change, said):
    torch.save(change(dict(loaded("own.py:tensor").model.state_dict())), "weights.pt")
    with pytest.raises(ArgumentError) as caught:
        loaded("own.py:tensor", checkpoint="weights.pt")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("absent.pt", None, "--checkpoint absent.pt: there is no such file; pass one that ends in .safetensors, .pt"),
        ("own.py", None, "--checkpoint own.py does not end in .safetensors, .pt, .pth, .bin; pass a file of weights"),
        ("bad.safetensors", b"nothing of the kind", "--checkpoint bad.safetensors cannot be read: "),
        ("bad.pt", b"nothing of the kind", "--checkpoint bad.pt cannot be read: "),
        ("other.pt", {"step": 3}, "--checkpoint other.pt holds no tensors by name; save model.state_dict()"),
    ],
)
def test_files_that_hold_no_weights(tmp_path, name, content, said):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, name)
    with pytest.raises(FmtsimError) as caught:
        loaded("own.py:tensor", checkpoint=name)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own.py:modle", "--model own.py:modle: own.py has no function 'modle'; write one that returns a module"),
        ("absent.py:model", "--model absent.py:model: there is no file absent.py; pass FILE.py:function"),
        ("abs.ent:model", "--model abs.ent:model: there is no module abs, installed or in "),
        ("package.none:model", "--model package.none:model: there is no module package.none, installed or in "),
        ("package.needs_more:x", "package.needs_more:x (line 1): ModuleNotFoundError: No module named 'not_installed_"),
        ("own.py:needs", "own.py:needs: needs needs arguments that it does not get (width, depth); give them defaults"),
        ("own.py:leaves", "--model own.py:leaves (line 21): SystemExit: 3"),
        ("own.py:stops", "--model own.py:stops (line 22): ZeroDivisionError: division by zero"),
        ("own.py:numbers", "returned 5; return (model, batches), (model, batches, loss), or a torch.nn.Module"),
        ("own.py:four", "return (model, batches), (model, batches, loss), or a torch.nn.Module"),
        ("own.py:none", "--model own.py:none returned no batches; return one or more"),
        ("own.py:text", "returned 'batches' as batches; return one batch, which is a tensor, a tuple of arguments or"),
        ("own.py:model", "--data is missing: --model own.py:model comes without batches; pass a text file"),
        ("own.py", "--model own.py is neither a function nor a local Hugging Face model (a file); pass FILE.py:fun"),
        ("nowhere", "nowhere is neither a function nor a local Hugging Face model (no folder and not in the cache"),
        ("package", "--model package is neither a function nor a local Hugging Face model (Unrecognized model in"),
    ],
)
def test_models_that_are_none(name, said):
    with pytest.raises(ArgumentError) as caught:
        loaded(name)
    assert said in str(caught.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return folders of a Llama and of a BERT, neither with a tokenizer."""
    places = {kind: tmp_path_factory.mktemp(kind) for kind in ("llama", "bert")}
    for kind, place in places.items():
        hugging_face(kind, layers=1).save_pretrained(place)
    return places


def test_a_llama_from_a_folder(saved):
    found = loaded(str(saved["llama"]), data="text.txt", tokenizer="bytes", context=16, count=2, rows=2)
    (tokens,) = found.samples[0].batch
    output = found.model(tokens)
    assert tokens.shape == (2, 16) and output.past_key_values is None and not found.model.training
    after = torch.cat([tokens, (tokens[:, -1:] - 47) % 10 + 48], 1)  # digits one after the other
    theirs, mine = found.model(after, labels=after).loss, found.loss(found.samples[0], output)
    assert abs((mine - theirs).item()) < 1e-5 and found.logits(output) is output.logits  # sums of other shapes


def test_a_folder_without_weights_and_a_file_of_them(saved, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((saved["llama"] / "config.json").read_bytes())
    how = {"data": "text.txt", "tokenizer": "bytes", "context": 16}
    found = loaded("bare", checkpoint=str(saved["llama"] / "model.safetensors"), **how)
    source = loaded(str(saved["llama"]), **how)
    assert all(torch.equal(a, b) for a, b in zip(found.model.parameters(), source.model.parameters(), strict=True))


def test_folders_that_do_not_do(saved, tmp_path):
    how = {"data": "text.txt", "context": 16}
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    # what AutoTokenizer makes of a Qwen3 folder without a tokenizer, transformers 5.17 and 5.23
    alone = tokenizers.Tokenizer(tokenizers.models.BPE())
    folder = shutil.copytree(saved["llama"], tmp_path / "llama with a tokenizer of special tokens alone")
    transformers.PreTrainedTokenizerFast(tokenizer_object=alone, eos_token="<|endoftext|>").save_pretrained(folder)
    for name, more, said in (
        (
            saved["llama"],
            {},
            "has no tokenizer that transformers can read; pass --tokenizer with a folder that has one",
        ),
        (folder, {}, "has no tokenizer that transformers can read; pass"),
        (saved["llama"], {"tokenizer": "own.py"}, "--tokenizer own.py has no tokenizer that"),
        (saved["bert"], {"tokenizer": "bytes"}, "is a BertForMaskedLM and not a causal language model; load it in a"),
        (saved["llama"], {"tokenizer": "bytes", "context": 4000}, "--context 4000 is beyond the 2048 positions"),
    ):
        with pytest.raises(ArgumentError) as caught:
            loaded(str(name), **how | more)
        assert said in str(caught.value)
    safetensors = pytest.importorskip("safetensors.torch")
    (tmp_path / "less").mkdir()
    (tmp_path / "less" / "config.json").write_bytes((saved["llama"] / "config.json").read_bytes())
    weights = safetensors.load_file(saved["llama"] / "model.safetensors")
    del weights["lm_head.weight"]
    safetensors.save_file(weights, tmp_path / "less" / "model.safetensors", metadata={"format": "pt"})
    refused("its files lack 'lm_head.weight'; they are of another model", loaded, "less", tokenizer="bytes", **how)


def test_transformers_may_be_absent(monkeypatch, saved):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        FmtsimError, match=r'function; other models need transformers: pip install "fmtsim\[transformers\]"'
    ):
        loaded(str(saved["llama"]), data="text.txt")


def test_a_text_with_too_few_tokens(saved, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "word": 1}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?").save_pretrained("words")
    (tmp_path / "text.txt").write_text("word " * 100)
    how = {"data": "text.txt", "tokenizer": "words", "count": 1, "rows": 1}
    tokens = loaded(str(saved["llama"]), context=16, **how).samples[0].batch[0]
    assert tokens.unique().tolist() == [1]
    with pytest.raises(DataError, match="10 tokens in a part of the text, at least 17 are needed; pass more text or"):
        loaded(str(saved["llama"]), context=16, held_out=True, **how)
