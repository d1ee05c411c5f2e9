# SPDX-License-Identifier: Apache-2.0
"""A model with its batches and loss, from what a command line says of them."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fmtsim.casts.arguments import takes
from fmtsim.lab.training.corpus import Corpus, load_corpus
from fmtsim.lab.training.decoders import VOCABULARY
from fmtsim.lab.training.models import OwnModel, is_function, returned, told
from fmtsim.lab.training.pretrained import load_pretrained, load_tokenizer, load_weights
from fmtsim.ptq.calibrate import call, evaluating
from fmtsim.support.errors import ArgumentError, DataError, shown

BYTES = "bytes"  # instead of a tokenizer
_MOST = 1 << 20  # bytes of a text that a tokenizer reads
_RETURNS = "(model, batches), (model, batches, loss), or a torch.nn.Module"
Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Say which model, on which data."""

    model: str  # ``FILE.py:function``, ``package.module:function``, a folder of Hugging Face or a name in its cache
    checkpoint: str | None = None  # a file of weights
    data: str | None = None  # a text file or folder, for language models
    # a folder or name; ``"bytes"`` takes bytes as tokens. None is the model's own, bytes for functions.
    tokenizer: str | None = None
    count: int = 8  # batches at the most
    held_out: bool = False  # as many again that are for measuring alone
    rows: int = 8  # rows, context: size of a batch of text
    context: int = 128
    dtype: str | None = None  # of the model, by torch's name; None leaves it
    seed: int = 0  # of what a function draws
    device: str = "cpu"  # where it runs
    random_text: bool = False  # a language model without data gets random bytes


class Sample(NamedTuple):
    """A batch, and what makes a loss of the model's output; None: the output says it itself, if at all."""

    batch: Any
    loss: Loss | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Hold a model with what it runs on."""

    name: str  # what it was called
    model: nn.Module  # on its device, with the names of layers that the user knows
    samples: list[Sample]  # batches with their losses
    held_out: list[Sample]  # those to measure on; ``samples`` themselves where there are no others
    data: str  # where batches come from, in words
    unit: str = ""  # of the loss: nats per token or per byte of text, "" for a loss of the user's own
    # what of the output the softmax is taken of, None where that is not known
    logits: Callable[[Any], Tensor] | None = None

    def loss(self, sample: Sample, output: Any) -> Tensor:
        """Return the loss of a batch's output.

        Raises:
            ArgumentError: There is none, or it is not a number.
        """
        loss = self._loss(sample, output)
        if _is_number(loss):
            return loss.reshape(())  # type: ignore[no-any-return]
        what = "its model returned" if sample.loss is None else "its loss returned"
        said = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
        raise ArgumentError(
            f"--model {self.name}: {what} {said}, which is not a loss; return (model, batches, loss), where loss is "
            "a function of the model's output, or of output and batch, that gives one number"
        )

    def measured(self) -> float | None:
        """Return the mean loss of the held-out batches, in evaluation mode; None where nothing says what it is."""
        losses = []
        with evaluating(self.model), torch.no_grad():
            for i, sample in enumerate(self.held_out):
                output = call(self.model, sample.batch, i, kind="batch")
                if sample.loss is None and not _is_number(self._loss(sample, output)):
                    return None
                losses.append(self.loss(sample, output).item())
        return sum(losses) / len(losses)

    def _loss(self, sample: Sample, output: Any) -> Any:
        if sample.loss is None:
            return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        with told(self.name):
            return sample.loss(output)


def _is_number(found: Any) -> bool:
    return isinstance(found, Tensor) and found.numel() == 1 and found.is_floating_point()


def load(asked: Asked) -> Loaded:
    """Return a model with its batches.

    Raises:
        ArgumentError: The model, its weights or its batches are not there or do not fit; the message says which.
        DataError: A file of weights or text that cannot be used.
        FmtsimError: A package is missing.
    """
    if is_function(asked.model):
        value = returned(asked.model, asked.seed, {})
    else:
        value = load_pretrained(asked.model, weights=asked.checkpoint is None)
    parts = value if isinstance(value, tuple) else (value,)
    model, batches, loss = (*parts, None, None)[:3]
    alone = len(parts) == 1
    if not isinstance(model, nn.Module) or len(parts) > 3 or (loss is not None and not callable(loss)):
        raise ArgumentError(f"--model {asked.model} returned {shown(value)}; return {_RETURNS}")
    if not alone and asked.data is not None:
        raise ArgumentError(
            f"--model {asked.model} returns batches of its own; leave --data out, or return the model alone"
        )
    dtype = None if asked.dtype is None else getattr(torch, asked.dtype)
    with told(asked.model):
        model.to(dtype=dtype)
    if asked.checkpoint is not None:
        load_weights(model, asked.checkpoint)
    model.to(asked.device)
    if alone:
        return _of_text(asked, model)
    return _of_batches(asked, model, batches, loss, dtype)


def _of_batches(asked: Asked, model: nn.Module, given: Any, loss: Any, dtype: torch.dtype | None) -> Loaded:
    """Return a model with the batches that its function returned: one, or an iterable of them."""
    if isinstance(given, Tensor | tuple | Mapping):
        given = [given]
    if not isinstance(given, Iterable) or isinstance(given, str | bytes):
        raise ArgumentError(
            f"--model {asked.model} returned {shown(given)} as batches; return one batch, which is a tensor, a tuple "
            "of arguments or a dict of keywords, or an iterable of batches"
        )
    with told(asked.model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(asked.seed)  # of loaders that shuffle
        batches = list(itertools.islice(given, asked.count * (1 + asked.held_out)))
    if not batches:
        raise ArgumentError(f"--model {asked.model} returned no batches; return one or more")

    def moved(t: Tensor) -> Tensor:
        return t.to(asked.device, dtype if t.is_floating_point() else None)

    batches = [tree_map_only(Tensor, moved, dict(b) if isinstance(b, Mapping) else b) for b in batches]
    samples = [Sample(batch, _bound(loss, batch)) for batch in batches]
    half = (len(samples) + 1) // 2
    seen, rest = (samples[:half], samples[half:]) if asked.held_out else (samples, [])
    words = f"{_counted(len(seen))} of {asked.model}"
    return Loaded(name=asked.model, model=model, samples=seen, held_out=rest or seen, data=words)


def _counted(batches: int) -> str:
    return "1 batch" if batches == 1 else f"{batches} batches"


def _bound(loss: Any, batch: Any) -> Loss | None:
    if loss is None:
        return None
    return lambda output: loss(output) if takes(loss, output) else loss(output, batch)


def _of_text(asked: Asked, model: nn.Module) -> Loaded:
    """Return a language model with windows of a text."""
    if asked.data is None and not asked.random_text:
        raise ArgumentError(
            f"--data is missing: --model {asked.model} comes without batches; pass a text file for a language model, "
            "or a function that returns (model, batches)"
        )
    where = asked.tokenizer or (BYTES if is_function(asked.model) else asked.model)
    tokenizer = None
    if where != BYTES and asked.data is not None:
        tokenizer = load_tokenizer(where, "--model" if asked.tokenizer is None else "--tokenizer")
    reader = OwnModel(model, asked.model)  # which says what of the output is the loss; the model runs by itself
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(most, int) and asked.context > most:
        raise ArgumentError(f"--context {asked.context} is beyond the {most} positions of {asked.model}; choose less")
    corpus = _random(asked) if asked.data is None else load_corpus(asked.data, asked.context)

    def samples(part: Tensor) -> list[Sample]:
        windows = _windows(_tokens(part, tokenizer), asked).to(asked.device)
        return [_sample(reader, window, tokenizer is None) for window in windows]

    seen = samples(corpus.train)
    unit = "byte" if tokenizer is None else "token"
    words = f"{_counted(asked.count)} of {asked.rows} x {asked.context} {unit}s of {corpus.name}"
    return Loaded(
        name=asked.model, model=model, samples=seen, data=words, unit=f"nats per {unit}",
        held_out=samples(corpus.validation) if asked.held_out else seen,
        logits=None if reader.takes_targets else lambda output: getattr(output, "logits", output),
    )  # fmt: skip


def _sample(reader: OwnModel, tokens: Tensor, is_bytes: bool) -> Sample:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def loss(output: Any) -> Tensor:
        logits = getattr(output, "logits", output)
        if not reader.takes_targets and isinstance(logits, Tensor):
            output = logits.float()  # a loss in 16 bits hides small changes
        return reader.loss_of(output, targets, VOCABULARY if is_bytes else 0)

    return Sample((inputs, targets) if reader.takes_targets else (inputs,), loss)


def _random(asked: Asked) -> Corpus:
    """Return as many random bytes as there are windows, the same on every machine."""
    count = asked.count * asked.rows * (asked.context + 1)
    source = torch.Generator().manual_seed(asked.seed)
    tokens = torch.randint(0, VOCABULARY, (count,), generator=source).to(torch.uint8)
    return Corpus(name="random bytes", train=tokens, validation=tokens, files=0, truncated=False)


def _tokens(part: Tensor, tokenizer: Any) -> Tensor:
    if tokenizer is None:
        return part.long()
    text = part[:_MOST].numpy().tobytes().decode("utf-8", errors="replace")
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)


def _windows(tokens: Tensor, asked: Asked) -> Tensor:
    places = tokens.numel() - asked.context
    if places < 1:
        raise DataError(
            f"--data {asked.data}: {tokens.numel()} tokens in a part of the text, at least {asked.context + 1} are "
            "needed; pass more text or a smaller --context"
        )
    starts = torch.linspace(0, places - 1, asked.count * asked.rows, dtype=torch.float64).round().long()
    windows = tokens[starts[:, None] + torch.arange(asked.context + 1)]
    return windows.view(asked.count, asked.rows, asked.context + 1)
