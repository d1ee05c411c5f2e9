# SPDX-License-Identifier: Apache-2.0
"""A BERT sentence encoder in plain PyTorch, and its WordPiece tokens, to run a published checkpoint."""

import importlib
import json
import re
import unicodedata
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, mask):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, inner, heads, eps):
        super().__init__()
        self.attention, self.norm1 = Attention(width, heads), nn.LayerNorm(width, eps)
        self.up, self.down, self.norm2 = nn.Linear(width, inner), nn.Linear(inner, width), nn.LayerNorm(width, eps)

    def forward(self, x, mask):
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class SentenceEncoder(nn.Module):
    """Unit vectors of sentences: the mean of the last layer over the tokens."""

    def __init__(self, config, vocabulary):
        super().__init__()
        width, eps = config["hidden_size"], config["layer_norm_eps"]
        self.words = nn.Embedding(config["vocab_size"], width)
        self.places = nn.Embedding(config["max_position_embeddings"], width)
        self.kinds = nn.Embedding(config["type_vocab_size"], width)
        self.norm = nn.LayerNorm(width, eps)
        sizes = (width, config["intermediate_size"], config["num_attention_heads"], eps)
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(config["num_hidden_layers"]))
        self.vocabulary = vocabulary

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]] + self.kinds.weight[0]
        x = self.norm(x)
        for block in self.blocks:
            x = block(x, mask)
        weight = mask[..., None].to(x.dtype)
        return F.normalize((x * weight).sum(1) / weight.sum(1), dim=-1)

    def tokens(self, sentences):
        rows = [wordpieces(s, self.vocabulary) for s in sentences]
        length = max(map(len, rows))
        ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        return ids, torch.tensor([[i < len(row) for i in range(length)] for row in rows])


def wordpieces(text, vocabulary):
    """Return the ids of a lower-case BERT: words and punctuation, each cut into its longest known pieces."""
    text = unicodedata.normalize("NFD", text.lower())
    text = "".join(c for c in text if unicodedata.category(c) != "Mn")
    spaced = "".join(f" {c} " if unicodedata.category(c)[0] in "PS" else c for c in text)
    ids = [vocabulary["[CLS]"]]
    for word in spaced.split():
        pieces, start = [], 0
        while start < len(word):
            end = next((e for e in range(len(word), start, -1) if _piece(word, start, e) in vocabulary), None)
            if end is None:
                pieces = [vocabulary["[UNK]"]]
                break
            pieces.append(vocabulary[_piece(word, start, end)])
            start = end
        ids += pieces
    return [*ids[:511], vocabulary["[SEP]"]]


def _piece(word, start, end):
    return ("##" if start else "") + word[start:end]


_NAMES = {
    "words": "embeddings.word_embeddings", "places": "embeddings.position_embeddings",
    "kinds": "embeddings.token_type_embeddings", "norm": "embeddings.LayerNorm",
    "attention.query": "attention.self.query", "attention.key": "attention.self.key",
    "attention.value": "attention.self.value", "attention.out": "attention.output.dense",
    "norm1": "attention.output.LayerNorm", "up": "intermediate.dense", "down": "output.dense",
    "norm2": "output.LayerNorm",
}  # fmt: skip


def load_encoder(folder) -> SentenceEncoder:
    """Build the encoder from a folder with config.json, vocab.txt and model.safetensors of a BERT."""
    folder = Path(folder)
    words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    model = SentenceEncoder(json.loads((folder / "config.json").read_text()), {w: i for i, w in enumerate(words)})
    held = load_file(folder / "model.safetensors")
    state = {}
    for name in model.state_dict():
        module, _, kind = name.rpartition(".")
        if module.startswith("blocks."):
            _, place, inner = module.split(".", 2)
            state[name] = held[f"encoder.layer.{place}.{_NAMES[inner]}.{kind}"]
        else:
            state[name] = held[f"{_NAMES[module]}.{kind}"]
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


def stand_in() -> SentenceEncoder:
    """Build a small encoder that nobody trained, with one large channel as trained ones have."""
    torch.manual_seed(0)
    config = dict(hidden_size=64, layer_norm_eps=1e-12, vocab_size=128, max_position_embeddings=512, type_vocab_size=1)
    marks = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *map(chr, range(33, 127)), *(f"##{c}" for c in "abcdefghijklmnopqrst")]
    model = SentenceEncoder(
        config | {"intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2},
        {mark: i for i, mark in enumerate(marks)},
    )
    with torch.no_grad():
        model.norm.weight[5] *= 20
    return model.eval().requires_grad_(False)


def sentences(count):
    """Return English sentences from the documentation of Python's own modules, in a fixed order."""
    found = []
    for name in MODULES:
        text = importlib.import_module(name).__doc__ or ""
        for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text):
            one = " ".join(part.split())
            if 40 < len(one) < 160 and ">>>" not in one and one[0].isupper() and one.endswith("."):
                found.append(one)
    return found[:count]


def agreement(exact, found):
    """Return how well unit vectors stand for others.

    ``cosine`` and ``least`` are the mean and least cosine of a vector with the one it stands for; ``first`` the share
    of sentences with the same nearest neighbour, ``five`` the share of the five nearest that agree, ``rank`` Spearman's
    correlation of all similarities of pairs.
    """
    cosine = (exact * found).sum(1)
    tables = [(v @ v.T).fill_diagonal_(-2) for v in (exact, found)]
    near = [t.topk(5, 1).indices for t in tables]
    upper = torch.ones_like(tables[0]).triu(1).bool()
    ranks = torch.stack([t[upper].argsort().argsort().double() for t in tables])
    return {
        "cosine": float(cosine.mean()),
        "least": float(cosine.min()),
        "first": float((near[0][:, 0] == near[1][:, 0]).double().mean()),
        "five": sum(len(set(a) & set(b)) for a, b in zip(*(n.tolist() for n in near), strict=True)) / near[0].numel(),
        "rank": float(torch.corrcoef(ranks)[0, 1]),
    }


MODULES = (
    "argparse", "json", "statistics", "random", "textwrap", "decimal", "fractions", "heapq", "calendar", "zipfile",
    "logging", "threading", "datetime", "collections", "csv", "string", "ast", "bdb", "codeop", "cmd", "configparser",
    "contextlib", "copy", "difflib", "dis", "doctest", "ftplib", "functools", "getopt", "gettext", "gzip",
    "html.parser", "imaplib", "inspect", "ipaddress", "locale", "mailbox", "mimetypes", "netrc", "optparse", "os",
    "pdb", "pickle", "pickletools", "platform", "plistlib", "poplib", "pprint", "profile", "queue", "sched", "shelve",
    "shlex", "shutil", "smtplib", "socket", "socketserver", "subprocess", "tarfile", "tempfile", "timeit", "tokenize",
    "trace", "types", "unittest", "urllib.parse", "urllib.request", "uuid", "wave", "weakref", "xml.dom", "zipapp",
)  # fmt: skip
