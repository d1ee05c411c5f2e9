# SPDX-License-Identifier: Apache-2.0
"""The corpus: what is read, in which order, and what bad paths are told."""

import os

import pytest
import torch

from fmtsim.lab.training import corpus as module
from fmtsim.lab.training.corpus import load_corpus, sample
from fmtsim.support.errors import DataError
from tests.support.refusals import refused


def text_of(corpus):
    return bytes(torch.cat([corpus.train, corpus.validation]).tolist())


def test_a_file_is_split_into_training_and_held_out_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(1, 101)) * 3)
    corpus = load_corpus(path, 8)
    assert text_of(corpus) == path.read_bytes()
    assert (corpus.train.numel(), corpus.validation.numel(), corpus.files, corpus.truncated) == (270, 30, 1, False)
    assert corpus.name == str(path) and corpus.bytes == 300
    assert load_corpus(path, 28).bytes == 300  # a tenth holds a window of 28 bytes, the next and one more, no less
    refused("300 bytes of text, at least 310 are needed for context 29", load_corpus, path, 29, error=DataError)


def test_a_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {
        "b.txt": "B" * 50,
        "a.md": "A" * 50,
        "sub/c.py": "C" * 50,
        ".hidden": "H",
        ".git/x": "G",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    corpus = load_corpus(tmp_path, 8)
    assert text_of(corpus) == b"\n".join(letter * 50 for letter in (b"A", b"B", b"C"))
    assert corpus.files == 3


def test_the_default_is_the_standard_library():
    corpus = load_corpus(None, 128)
    assert corpus.bytes > 1_000_000 and corpus.files > 50
    assert b"import " in text_of(corpus)[:5000]


def test_large_corpora_are_cut_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    (tmp_path / "a.txt").write_bytes(b"a" * 700)
    (tmp_path / "b.txt").write_bytes(b"b" * 700)
    for path, name in ((tmp_path, "both"), (tmp_path / "a.txt", "one")):
        corpus = load_corpus(path, 8)
        assert (corpus.bytes, corpus.truncated) == ((1001, True) if name == "both" else (700, False))


def test_windows_are_text_and_the_bytes_that_follow():
    data = torch.arange(256, dtype=torch.uint8)
    inputs, targets = sample(data, 50, 16, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (50, 16) and inputs.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)
    last = sample(data[:18], 200, 16, torch.Generator().manual_seed(0))[1][:, -1]
    assert set(last.tolist()) == {16, 17}


def empty_folder(path):
    path.mkdir()
    return path


def binary_folder(path):
    path.mkdir()
    (path / "x.bin").write_bytes(b"\0\1")
    (path / "empty.txt").touch()
    return path


def written(path, data):
    path.write_bytes(data)
    return path


def fifo(path):
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p, r"no such file or folder; pass --data with a text file .* or leave it out"),
        (lambda p: written(p, b""), r"the file is empty; pass --data"),
        (lambda p: written(p, b"text\0text" * 99), r"holds NUL bytes and is not text"),
        (lambda p: written(p, b"short"), r"5 bytes of text, at least 660 are needed for context 64; .*--context"),
        (empty_folder, r"the folder holds no files"),
        (binary_folder, r"the folder holds 2 files, all empty or binary"),
        (fifo, r"neither a file nor a folder"),
    ],
)
def test_bad_paths_are_named_with_a_next_step(tmp_path, make, message):
    path = make(tmp_path / "corpus")
    with pytest.raises(DataError, match=message) as caught:
        load_corpus(path, 64)
    assert str(path) in str(caught.value)


def test_an_unreadable_file_says_why(tmp_path, monkeypatch):
    path = written(tmp_path / "secret.txt", b"x" * 100)

    def refuse(self, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)
    refused(r"secret\.txt: Permission denied; check its permissions", load_corpus, path, 4, error=DataError)


def test_a_missing_standard_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    refused(r"sources are not at .*; pass --data", load_corpus, None, 4, error=DataError)
