# SPDX-License-Identifier: Apache-2.0
"""``fmtsim bisect``: the first operation whose bits differ between two runs of one model."""

import argparse
import os
from typing import Any

from fmtsim.lab.analysis.bisect import bisect
from fmtsim.lab.cli.model_options import load_model
from fmtsim.lab.cli.output import MISMATCH, answer
from fmtsim.support.errors import ArgumentError, FmtsimError


def run(arguments: argparse.Namespace) -> int:
    """Bisect and print; 0 where all bits agree, 1 where some do not."""
    texts = arguments.a, arguments.b
    models = [not (text.endswith(".safetensors") or os.path.isfile(text)) for text in texts]
    runs = [_run_of(text, arguments) if model else text for text, model in zip(texts, models, strict=True)]
    try:
        found = bisect(*runs)
    except FmtsimError:
        raise
    except Exception as error:
        if not any(models) or isinstance(error, MemoryError):
            raise
        raise ArgumentError(f"{' against '.join(texts)}: {type(error).__name__}: {error}") from error
    answer(arguments, found.to_dict(), lambda: str(found))
    return 0 if found.equal else MISMATCH


def _run_of(name: str, arguments: argparse.Namespace) -> tuple[Any, ...]:
    loaded = load_model(arguments, model=name, count=1, random_text=True)
    return loaded.model, *loaded.samples[0]
