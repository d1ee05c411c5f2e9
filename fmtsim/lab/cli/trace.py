# SPDX-License-Identifier: Apache-2.0
"""``fmtsim trace``: record a step of a model in a file."""

import argparse

from fmtsim.lab.analysis.tracing import trace
from fmtsim.lab.cli.model_options import file_given, formats_given, load_model, machine_given
from fmtsim.lab.cli.options import target_given
from fmtsim.lab.cli.output import answer
from fmtsim.lab.training.own_code import told
from fmtsim.nn import convert
from fmtsim.support.errors import ArgumentError


def run(arguments: argparse.Namespace) -> int:
    """Trace and print what was recorded."""
    formats, out = formats_given(arguments), file_given(arguments, "out", ".safetensors")
    if target_given(arguments) and not formats:
        raise ArgumentError(f"--{target_given(arguments)[0]} needs --recipe or --format, which convert the model")
    loaded = load_model(arguments, count=1, random_text=True)
    model, (batch, loss) = loaded.model, loaded.samples[0]
    if formats:
        convert(model, generator=arguments.seed, **formats, **machine_given(arguments))
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
