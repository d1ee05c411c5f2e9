"""``fmtsim bisect``: the first operation whose bits differ between two runs of one model."""

import argparse
from typing import Any

from fmtsim.analysis.bisect import bisect
from fmtsim.cli.options import check_device
from fmtsim.cli.output import MISMATCH, answer
from fmtsim.errors import ArgumentError, FmtsimError
from fmtsim.training.models import run_of


def run(arguments: argparse.Namespace) -> int:
    """Bisect and print; 0 where all bits agree, 1 where some do not."""
    check_device(arguments.device)
    texts = arguments.a, arguments.b
    models = [".py:" in text for text in texts]
    runs: list[Any] = [
        run_of(text, arguments.seed, arguments.device) if model else text
        for text, model in zip(texts, models, strict=True)
    ]
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
