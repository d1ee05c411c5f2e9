# SPDX-License-Identifier: Apache-2.0
"""Causal language models of Hugging Face, from a folder or from the cache of transformers; nothing is downloaded."""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from fmtsim.lab.training.own_code import FORMS
from fmtsim.support.errors import ArgumentError, FmtsimError, first_line


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
            found = "a file" if Path(name).is_file() else "no folder and not in the cache of transformers"
            found = _first(error) if Path(name).is_dir() else found
            raise ArgumentError(
                f"{where} is neither a function nor a local Hugging Face model ({found}); pass {FORMS}, a folder "
                "with config.json, or the name of a model that transformers has downloaded before"
            ) from None
        made = transformers.AutoModelForCausalLM
        try:
            if weights:
                model, info = made.from_pretrained(
                    name, local_files_only=True, dtype="auto", output_loading_info=True
                )  # fmt: skip
                absent = sorted(info["missing_keys"])
            else:
                model, absent = made.from_config(config), []
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
        raise ArgumentError(f"{where}: its files lack {absent[0]!r}{_more(absent)}; they are of another model")
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


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


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
