"""Which products a model's linear layers call: layer shapes as data, and the calls that follow from them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fmtsim.errors import ArgumentError, DataError, did_you_mean
from fmtsim.spec.call import GemmCall, Layout

Shape = tuple[int, int, bool]
"""Outputs, inputs and whether there is a bias, of one linear layer."""

DTYPES = ("bf16", "fp16", "tf32", "fp8_fast", "fp8_slow")
PASSES = ("forward", "dgrad", "wgrad")
FP8_STEP = 16  # torch._scaled_mm takes K and N that are multiples of it
OUTPUTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Name the shapes of a model's linear layers, each once, and where they come from."""

    layers: tuple[Shape, ...]
    source: str


def _gpt2(d: int) -> tuple[Shape, ...]:
    return ((3 * d, d, True), (d, d, True), (4 * d, d, True), (d, 4 * d, True), (50257, d, False))


def _llama(d: int, kv: int, hidden: int) -> tuple[Shape, ...]:
    layers = ((d, d), (kv, d), (hidden, d), (d, hidden), (128256, d))
    return tuple((n, k, False) for n, k in layers)


def _bert(d: int) -> tuple[Shape, ...]:
    return ((d, d, True), (4 * d, d, True), (d, 4 * d, True), (30522, d, True))


_HF = "config.json of {} at huggingface.co"
MODELS = {
    "gpt2": Model(layers=_gpt2(768), source=_HF.format("openai-community/gpt2")),
    "gpt2-medium": Model(layers=_gpt2(1024), source=_HF.format("openai-community/gpt2-medium")),
    "gpt2-large": Model(layers=_gpt2(1280), source=_HF.format("openai-community/gpt2-large")),
    "gpt2-xl": Model(layers=_gpt2(1600), source=_HF.format("openai-community/gpt2-xl")),
    "llama-1b": Model(layers=_llama(2048, 512, 8192), source=_HF.format("meta-llama/Llama-3.2-1B")),
    "llama-3b": Model(layers=_llama(3072, 1024, 8192), source=_HF.format("meta-llama/Llama-3.2-3B")),
    "llama-8b": Model(layers=_llama(4096, 1024, 14336), source=_HF.format("meta-llama/Llama-3.1-8B")),
    "llama-70b": Model(layers=_llama(8192, 1024, 28672), source=_HF.format("meta-llama/Llama-3.1-70B")),
    "bert-base": Model(layers=_bert(768), source=_HF.format("google-bert/bert-base-uncased")),
    "bert-large": Model(layers=_bert(1024), source=_HF.format("google-bert/bert-large-uncased")),
    "vit-l": Model(
        layers=((3072, 1024, True), (1024, 1024, True), (4096, 1024, True), (1024, 4096, True), (1000, 1024, True)),
        source="An Image is Worth 16x16 Words, arXiv:2010.11929, table 1; heads of 1000 classes",
    ),
}


def list_models() -> list[str]:
    """Return the names of the models whose shapes are known."""
    return list(MODELS)


def layer_shapes(names: Iterable[str]) -> list[Shape]:
    """Return the shapes of some models' linear layers, each once, in order.

    Raises:
        ArgumentError: A name is unknown; the message has names that are close.
    """
    shapes: dict[Shape, None] = {}
    for name in names:
        if name not in MODELS:
            hint = did_you_mean(name, MODELS)
            raise ArgumentError(f"unknown model {name!r}{hint} (choose one of {', '.join(MODELS)}, or pass --shapes)")
        shapes |= dict.fromkeys(MODELS[name].layers)
    return list(shapes)


def read_shapes(path: str | Path) -> list[Shape]:
    """Read layer shapes from a text file: a line for each, ``outputs inputs [bias]``; # starts a comment.

    Raises:
        DataError: The file has no shape, or a line is none.
    """
    shapes: dict[Shape, None] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{path} is not text; write a line for each linear layer: outputs inputs [bias]") from None
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(",", " ").replace("x", " ").split()
        if not words:
            continue
        sizes, rest = words[:2], words[2:]
        if len(sizes) < 2 or not all(word.isdecimal() and int(word) for word in sizes) or rest not in ([], ["bias"]):
            raise DataError(f"{path}, line {number}: {line.strip()!r} is no shape; write 'outputs inputs' and 'bias'")
        shapes[int(sizes[0]), int(sizes[1]), bool(rest)] = None
    if not shapes:
        raise DataError(f"{path} has no shapes; write a line for each linear layer: outputs inputs [bias]")
    return list(shapes)


def parse_tokens(text: str) -> list[int]:
    """Read numbers of tokens: ``"1,77,512"`` and ``"1..8192"``, the powers of two in that range.

    Raises:
        ArgumentError: The text is no such list.
    """
    tokens: dict[int, None] = {}
    for word in text.split(","):
        low, dots, high = word.strip().partition("..")
        ends = [low, high] if dots else [low]
        if not all(end.isdecimal() and int(end) > 0 for end in ends) or int(ends[-1]) < int(ends[0]):
            raise ArgumentError(
                f"--tokens {text.strip()!r} is not possible; write counts such as 1,77,512 or a range 1..8192"
            )
        if dots:
            tokens |= dict.fromkeys(x for x in (1 << i for i in range(63)) if int(low) <= x <= int(high))
            tokens |= dict.fromkeys((int(low), int(high)))
        else:
            tokens[int(low)] = None
    return sorted(tokens)


def check_dtypes(dtypes: Iterable[str]) -> None:
    """Raise ArgumentError where a name is none of ``DTYPES``."""
    wrong = next((name for name in dtypes if name not in DTYPES), None)
    if wrong is not None:
        raise ArgumentError(f"dtypes {wrong!r} is not possible; choose from {', '.join(DTYPES)}")


def model_calls(
    shapes: Iterable[Shape],
    tokens: Iterable[int],
    dtypes: Sequence[str] = DTYPES,
    passes: Sequence[str] = PASSES,
) -> list[GemmCall]:
    """Return the calls of linear layers in training, each once, those with equal K together.

    Args:
        shapes: Layers.
        tokens: Rows of the layers' input.
        dtypes: Of ``DTYPES``; FP8 calls that torch._scaled_mm refuses (K or N no multiple of 16) are left out.
        passes: Of ``PASSES``.
    """
    check_dtypes(dtypes)
    tokens = list(tokens)
    calls: dict[GemmCall, None] = {}
    for n, k, bias in shapes:
        for m in tokens:
            for which in passes:
                for dtype in dtypes:
                    call = layer_call(which, m, n, k, bias, dtype)
                    if call is not None:
                        calls[call] = None
    return sorted(calls, key=lambda call: (call.a, call.fast_accum, call.k))


def layer_call(which: str, tokens: int, n: int, k: int, bias: bool, dtype: str) -> GemmCall | None:
    """Return what torch calls for ``y = x w^T``, ``dx = g w`` or ``dw = g^T x`` with row-major x, w and g.

    None where torch._scaled_mm refuses the sizes.
    """
    sizes = {"forward": (tokens, n, k), "dgrad": (tokens, k, n), "wgrad": (n, k, tokens)}[which]
    facts: dict[str, Any] = dict(zip("mnk", sizes, strict=True))
    if dtype.startswith("fp8"):
        if sizes[1] % FP8_STEP or sizes[2] % FP8_STEP:
            return None
        fast = dtype == "fp8_fast"
        return GemmCall(operation="scaled_mm", a="e4m3", b="e4m3", out=torch.bfloat16, scaling="tensor",
                        fast_accum=fast, **facts)  # fmt: skip
    out = OUTPUTS[dtype]
    if which == "forward":
        return GemmCall(operation="linear", a=dtype, b=dtype, out=out, bias=bias, **facts)
    layout: Layout = "row" if which == "dgrad" else "column"
    return GemmCall(operation="mm", a=dtype, b=dtype, out=out, a_layout=layout, b_layout="column", **facts)
