"""``fmtsim trace``: record a step of a model in a file."""

import argparse
from pathlib import Path

from fmtsim.analysis.tracing import trace
from fmtsim.cli.options import check_device, read_target, target_given
from fmtsim.cli.output import answer
from fmtsim.errors import ArgumentError
from fmtsim.files import check_file
from fmtsim.nn import convert
from fmtsim.training.models import run_of, told


def run(arguments: argparse.Namespace) -> int:
    """Trace and print what was recorded."""
    check_device(arguments.device)
    out = None if arguments.out is None else Path(arguments.out).expanduser()
    if out is not None and out.suffix != ".safetensors":
        raise ArgumentError(f"--out {out} does not end in .safetensors; choose another name")
    if out is not None:
        check_file("--out", out)
    if target_given(arguments) and arguments.recipe is None and arguments.format is None:
        raise ArgumentError(f"--{target_given(arguments)[0]} needs --recipe or --format, which convert the model")
    model, batch, loss = run_of(arguments.model, arguments.seed, arguments.device)
    if arguments.recipe is not None or arguments.format is not None:
        machine = {name: value for name, value in read_target(arguments).items() if value is not None}
        convert(model, recipe=arguments.recipe, format=arguments.format, generator=arguments.seed, **machine)
    with told(arguments.model):
        found = trace(model, batch, loss, tensors=_tensors(arguments.tensors), level=arguments.level)
    if out is not None:
        found.save(out)
    answer(arguments, found.to_dict(), lambda: str(found) if out is None else f"{found.summary}; wrote {out}")
    return 0


def _tensors(text: str | None) -> bool | list[int | str]:
    if text is None or text == "all":
        return text is not None
    words = [word.strip() for word in text.split(",") if word.strip()]
    return [int(word) if word.isascii() and word.isdecimal() else word for word in words]
