# SPDX-License-Identifier: Apache-2.0
"""A model with its batches and loss, from what a command line says of them."""

import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fmtsim.casts.arguments import takes
from fmtsim.formats.interop import dtype_name
from fmtsim.lab.training.corpus import Corpus, load_corpus
from fmtsim.lab.training.decoders import VOCABULARY
from fmtsim.lab.training.training_models import FORMS, OwnModel, is_function, returned, told
from fmtsim.ptq.calibrate import call, evaluating
from fmtsim.support.errors import ArgumentError, DataError, FmtsimError, did_you_mean, first_line, shown


def load_pretrained(name: str, *, weights: bool = True) -> nn.Module:
    """Return a causal language model in evaluation mode and its own dtype, without a cache of keys and values.

    Args:
        name: A folder with config.json, or the name of a model in the user's cache.
        weights: False leaves the weights as they are initialised, for a checkpoint that comes later.

    Raises:
        ArgumentError: There is no such model here, it is another kind of model, or its file lacks a weight.
        FmtsimError: transformers is not installed.
    """
    transformers, where = _transformers(name), f"--model {name}"
    with _quiet(transformers):
        try:
            config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        except Exception as error:  # of files transformers raises anything
            place = "a file" if Path(name).is_file() else "no folder and not in the cache of transformers"
            place = _reason(error) if Path(name).is_dir() else place
            raise ArgumentError(
                f"{where} is neither a function nor a local Hugging Face model ({place}); pass {FORMS}, a folder "
                "with config.json, or the name of a model that transformers has downloaded before"
            ) from None
        model_class = transformers.AutoModelForCausalLM
        try:
            if weights:
                model, info = model_class.from_pretrained(
                    name, local_files_only=True, dtype="auto", output_loading_info=True
                )  # fmt: skip
                absent = sorted(info["missing_keys"])
            else:
                model, absent = model_class.from_config(config), []
        except Exception as error:
            raise ArgumentError(
                f"{where}: {_reason(error)}; models that are not causal language models come from {FORMS}"
            ) from None
    meant = config.architectures or [type(model).__name__]
    if type(model).__name__ not in meant:
        raise ArgumentError(
            f"{where} is a {meant[0]} and not a causal language model; load it in a function, {FORMS}, that returns it "
            "with batches"
        )
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise ArgumentError(f"{where}: its files lack {absent[0]!r}{more}; they are of another model")
    model.config.use_cache = False
    return model.eval()  # type: ignore[no-any-return]


def load_tokenizer(name: str, option: str) -> Any:
    """Return the tokenizer of a folder or of a model in the user's cache.

    Raises:
        ArgumentError: There is none.
        FmtsimError: transformers is not installed.
    """
    transformers, tokenizer, cause = _transformers(name), None, None
    with _quiet(transformers):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, local_files_only=True)
        except Exception as error:
            cause = error
    # of a folder without a tokenizer transformers 5 may make one that knows special tokens alone
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ArgumentError(
            f"{option} {name} has no tokenizer that transformers can read; pass --tokenizer with a folder that has "
            "one, or --tokenizer bytes for a model of bytes"
        ) from cause
    return tokenizer


def _transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise FmtsimError(
            f'--model {name} is not a function; other models need transformers: pip install "fmtsim[transformers]", '
            f"or pass {FORMS}"
        ) from None


def _reason(error: Exception) -> str:
    return first_line(error).rstrip(".")


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep bars and warnings of transformers off the terminal."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_WITHIN = ("state_dict", "model", "model_state_dict")  # under which others keep the weights beside other things


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load every parameter and buffer of a model from a file, in place.

    Weights that share memory (a head tied to an embedding) need be there once.

    Raises:
        ArgumentError: The suffix is unknown, or a key is missing, too many, of another shape, or of a dtype that the
            model's does not hold; the message names the first.
        DataError: The file cannot be read, or holds no tensors by name.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ArgumentError(f"--checkpoint {path}: there is no such file; pass one that ends in {', '.join(SUFFIXES)}")
    if path.suffix not in SUFFIXES:
        raise ArgumentError(f"--checkpoint {path} does not end in {', '.join(SUFFIXES)}; pass a file of weights")
    if path.suffix == ".safetensors":
        try:
            read = importlib.import_module("safetensors.torch").load_file
        except ImportError:
            raise FmtsimError(f"--checkpoint {path} needs safetensors; pip install 'fmtsim[train]'") from None
    else:
        read = partial(torch.load, map_location="cpu", weights_only=True)
    try:
        state = read(path)
        if path.suffix != ".safetensors" and isinstance(state, Mapping):  # weights may lie beside other things
            state = next((state[name] for name in _WITHIN if isinstance(state.get(name), Mapping)), state)
    except Exception as error:  # of damaged bytes readers raise anything
        raise DataError(f"--checkpoint {path} cannot be read: {first_line(error)}; save the weights again") from None
    if not isinstance(state, Mapping) or not state or not all(isinstance(t, Tensor) for t in state.values()):
        raise DataError(f"--checkpoint {path} holds no tensors by name; save model.state_dict()")
    tensors, parameters = state, model.state_dict(keep_vars=True)
    for name, t in tensors.items():
        if name not in parameters:
            raise _differs(path, model, f"has {name!r}, which the model has not{did_you_mean(name, parameters)}")
        mine = parameters[name]
        if t.shape != mine.shape:
            raise _differs(path, model, f"has {name!r} of {list(t.shape)}, the model of {list(mine.shape)}")
        if torch.promote_types(t.dtype, mine.dtype) != mine.dtype:
            raise ArgumentError(
                f"--checkpoint {path}: {name!r} is {_dtype(t)} and the model's {_dtype(mine)}, which would round it; "
                f"pass --dtype {_dtype(t)}"
            )
    there = {parameters[name].data_ptr() for name in tensors}
    absent = [name for name, t in parameters.items() if name not in tensors and t.numel() and t.data_ptr() not in there]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise _differs(path, model, f"lacks {absent[0]!r}{more}")
    model.load_state_dict(tensors, strict=False)


def _differs(path: Path, model: nn.Module, what: str) -> ArgumentError:
    return ArgumentError(
        f"--checkpoint {path} does not fit {type(model).__name__}: it {what}; name the model that it was saved from"
    )


def _dtype(t: Tensor) -> str:
    return dtype_name(t.dtype)


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
        return _load_text(asked, model)
    # A model with the batches that its function returned: one, or an iterable of them.
    if isinstance(batches, Tensor | tuple | Mapping):
        batches = [batches]
    if not isinstance(batches, Iterable) or isinstance(batches, str | bytes):
        raise ArgumentError(
            f"--model {asked.model} returned {shown(batches)} as batches; return one batch, which is a tensor, a tuple "
            "of arguments or a dict of keywords, or an iterable of batches"
        )
    with told(asked.model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(asked.seed)  # of loaders that shuffle
        batches = list(itertools.islice(batches, asked.count * (1 + asked.held_out)))
    if not batches:
        raise ArgumentError(f"--model {asked.model} returned no batches; return one or more")

    samples = []
    for batch in batches:
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        batch = tree_map_only(Tensor, lambda t: t.to(asked.device, dtype if t.is_floating_point() else None), batch)
        bind = lambda output, batch=batch: loss(output) if takes(loss, output) else loss(output, batch)  # noqa: E731
        samples.append(Sample(batch, None if loss is None else bind))
    half = (len(samples) + 1) // 2
    seen, rest = (samples[:half], samples[half:]) if asked.held_out else (samples, [])
    words = f"{_count_batches(len(seen))} of {asked.model}"
    return Loaded(name=asked.model, model=model, samples=seen, held_out=rest or seen, data=words)


def _count_batches(batches: int) -> str:
    return "1 batch" if batches == 1 else f"{batches} batches"


def _load_text(asked: Asked, model: nn.Module) -> Loaded:
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
    if asked.data is not None:
        corpus = load_corpus(asked.data, asked.context)
    else:  # as many random bytes as there are windows, the same on every machine
        source, size = torch.Generator().manual_seed(asked.seed), asked.count * asked.rows * (asked.context + 1)
        noise = torch.randint(0, VOCABULARY, (size,), generator=source).to(torch.uint8)
        corpus = Corpus(name="random bytes", train=noise, validation=noise, files=0, truncated=False)

    def samples(part: Tensor) -> list[Sample]:
        tokens = part.long()
        if tokenizer is not None:
            text = part[:_MOST].numpy().tobytes().decode("utf-8", errors="replace")
            numbers = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            tokens = torch.tensor(numbers, dtype=torch.int64)
        places = tokens.numel() - asked.context
        if places < 1:
            raise DataError(
                f"--data {asked.data}: {tokens.numel()} tokens in a part of the text, at least {asked.context + 1} are "
                "needed; pass more text or a smaller --context"
            )
        starts = torch.linspace(0, places - 1, asked.count * asked.rows, dtype=torch.float64).round().long()
        windows = tokens[starts[:, None] + torch.arange(asked.context + 1)]
        windows = windows.view(asked.count, asked.rows, asked.context + 1).to(asked.device)
        return [_sample(reader, window, tokenizer is None) for window in windows]

    seen = samples(corpus.train)
    unit = "byte" if tokenizer is None else "token"
    words = f"{_count_batches(asked.count)} of {asked.rows} x {asked.context} {unit}s of {corpus.name}"
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
