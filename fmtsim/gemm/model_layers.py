# SPDX-License-Identifier: Apache-2.0
"""Linear layers of known models: their sizes, and sizes as text."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fmtsim.support.errors import ArgumentError, DataError, did_you_mean

Shape = tuple[int, int, bool]
"""Outputs, inputs and whether there is a bias, of one linear layer."""

DTYPES = ("bf16", "fp16", "tf32", "fp8_fast", "fp8_slow")
PASSES = ("forward", "dgrad", "wgrad")
MOST_OF_A_RANGE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Give the widths of a published model, a line of ``configurations.csv``.

    Args:
        name: Name here.
        source: Repository at huggingface.co that has its config.json, or the paper.
        blocks: Blocks one after another, all of this kind; 0 where there are several kinds, as in an encoder with a
            decoder, or where the number is not known here.
        hidden, intermediate: Widths of the layers and of the MLP, or of one expert's.
        heads, kv_heads, head_dim: Heads of the attention, those of keys and values, and their width.
        vocabulary: Outputs of the head.
        positions: Rows of a learned embedding of positions, 0 without one.
        experts: Experts that a router chooses from, 0 without one.
        active: Of those, the experts of each token; 0 also where ``blocks`` is 0.
        style: Letters. ``g``: a gated MLP; ``f``: one layer for queries, keys and values; ``u``: one for gate and up;
            ``a``: latent attention, whose projections are in ``more``; biases of all layers but the head (``l``), of
            queries, keys and values (``q``), of the MLP (``m``) and of the head (``h``); ``t``: head and embedding
            share their weight, known where ``blocks`` is.
        more: Outputs and inputs of other layers, ``"1536x7168 576x7168"``.
    """

    name: str
    source: str
    blocks: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    experts: int
    active: int
    style: str
    more: str

    @property
    def layers(self) -> tuple[Shape, ...]:
        """Shapes of the linear layers, each once."""
        h, q, kv, has = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.style.__contains__
        qkv = () if has("a") else (q + 2 * kv,) if has("f") else (q, kv)  # keys and values have one shape
        mlp = has("l") or has("m")
        shapes = [
            *((n, h, has("l") or has("q")) for n in qkv),
            (h, q, has("l")),  # output of the attention
            (self.intermediate * (2 if has("u") else 1), h, mlp),  # up, and gate in the same layer (u) or shape
            (h, self.intermediate, mlp),  # down
            *([(self.experts, h, False)] if self.experts else []),  # router
            *((int(n), int(k), False) for n, _, k in (pair.partition("x") for pair in self.more.split())),
            (self.vocabulary, h, has("h")),  # head
        ]
        return tuple(dict.fromkeys(shapes))


@cache
def models() -> dict[str, Model]:
    """Return the published models whose widths are known, by name."""
    with open(Path(__file__).with_name("configurations.csv"), encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    numbers = [name for name, kind in Model.__annotations__.items() if kind is int]
    return {row["name"]: Model(**row | {name: int(row[name]) for name in numbers}) for row in rows}  # type: ignore[arg-type]


def list_models() -> list[str]:
    """Return the names of the models whose shapes are known."""
    return list(models())


def find_models(names: Iterable[str]) -> list[Model]:
    """Return some models.

    Raises:
        ArgumentError: A name is unknown; the message has names that are close.
    """
    by_name = models()
    for name in names:
        if name not in by_name:
            hint = did_you_mean(name, by_name)
            raise ArgumentError(f"unknown model {name!r}{hint} (fmtsim.gemm.model_layers.list_models() has all "
                                f"{len(by_name)})")  # fmt: skip
    return [by_name[name] for name in names]


def layer_shapes(names: Iterable[str]) -> list[Shape]:
    """Return the shapes of some models' linear layers, each once, in order.

    Raises:
        ArgumentError: A name is unknown; the message has names that are close.
    """
    return list(dict.fromkeys(shape for model in find_models(list(names)) for shape in model.layers))


def read_shapes(path: str | Path) -> list[Shape]:
    """Read layer shapes from a text file: a line for each, ``outputs inputs [bias]``; # starts a comment.

    Raises:
        DataError: The file has no shape, or a line is not a shape.
    """
    shapes: dict[Shape, None] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except ValueError:  # no UTF-8, or no path
        raise DataError(f"{path} is not text; write a line for each linear layer: outputs inputs [bias]") from None
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(",", " ").replace("x", " ").split()
        if not words:
            continue
        sizes, rest = words[:2], words[2:]
        if len(sizes) < 2 or not all(map(_is_count, sizes)) or rest not in ([], ["bias"]):
            raise DataError(f"{path}, line {number}: {line.strip()!r} is not a shape; write 'outputs inputs [bias]'")
        shapes[int(sizes[0]), int(sizes[1]), bool(rest)] = None
    if not shapes:
        raise DataError(f"{path} has no shapes; write a line for each linear layer: outputs inputs [bias]")
    return list(shapes)


def _is_count(word: str) -> bool:
    return word.isdecimal() and len(word) < 20 and int(word) > 0


def parse_tokens(text: str, option: str = "--tokens", *, every: bool = False) -> list[int]:
    """Read numbers of tokens: ``"1,77,512"`` and ``"1..8192"``, the powers of two in that range, or all of it.

    Args:
        text: The list.
        option: What errors call it.
        every: A range means all of its numbers.

    Raises:
        ArgumentError: The text is no such list.
    """
    tokens: dict[int, None] = {}
    for word in text.split(","):
        low, dots, high = word.strip().partition("..")
        ends = [low, high] if dots else [low]  # of a range, or a count alone
        if not all(map(_is_count, ends)) or int(ends[-1]) < int(ends[0]):
            raise ArgumentError(
                f"{option} {text.strip()!r} is not possible; write counts such as 1,77,512 or a range 1..8192"
            )
        if dots and every:
            if int(high) - int(low) >= MOST_OF_A_RANGE:
                raise ArgumentError(f"{option} {text.strip()!r} is too long a range; choose {MOST_OF_A_RANGE} or less")
            tokens |= dict.fromkeys(range(int(low), int(high) + 1))
        elif dots:
            tokens |= dict.fromkeys(x for x in (1 << i for i in range(63)) if int(low) <= x <= int(high))
            tokens |= dict.fromkeys((int(low), int(high)))  # also ends that are no powers of two
        else:
            tokens[int(low)] = None
    return sorted(tokens)
