# SPDX-License-Identifier: Apache-2.0
"""Causal language models of Hugging Face, from a folder or the cache of transformers, and weights of a file."""

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmtsim.formats.interop import dtype_name
from fmtsim.lab.training.models import FORMS
from fmtsim.support.errors import ArgumentError, DataError, FmtsimError, did_you_mean, first_line


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
            place = _first(error) if Path(name).is_dir() else place
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
                f"{where}: {_first(error)}; models that are not causal language models come from {FORMS}"
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
    transformers = _transformers(name)
    with _quiet(transformers):
        try:
            return transformers.AutoTokenizer.from_pretrained(name, local_files_only=True)
        except Exception as error:
            raise ArgumentError(
                f"{option} {name} has no tokenizer that transformers can read; pass --tokenizer with a folder that has "
                "one, or --tokenizer bytes for a model of bytes"
            ) from error


def _transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise FmtsimError(
            f'--model {name} is not a function; other models need transformers: pip install "fmtsim[transformers]", '
            f"or pass {FORMS}"
        ) from None


def _first(error: Exception) -> str:
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
    tensors, parameters = _read(path), model.state_dict(keep_vars=True)
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


def _read(path: Path) -> Mapping[str, Tensor]:
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
        read = _unpickled
    try:
        state = read(path)
    except Exception as error:  # of damaged bytes readers raise anything
        raise DataError(f"--checkpoint {path} cannot be read: {first_line(error)}; save the weights again") from None
    if not isinstance(state, Mapping) or not state or not all(isinstance(t, Tensor) for t in state.values()):
        raise DataError(f"--checkpoint {path} holds no tensors by name; save model.state_dict()")
    return state


def _unpickled(path: Path) -> Any:
    state = torch.load(path, map_location="cpu", weights_only=True)
    within = [state[name] for name in _WITHIN if isinstance(state, Mapping) and isinstance(state.get(name), Mapping)]
    return within[0] if within else state


def _dtype(t: Tensor) -> str:
    return dtype_name(t.dtype)
