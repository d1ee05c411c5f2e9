# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim sweep``."""

import argparse

from fmtsim.lab.cli.options import add_device, add_json, count, flag, option

DEFAULTS = {
    "schemes": "bf16,e8m5,e8m4,e8m3,e7m7,e6m7,e5m7",
    "lr": "2e-3,4e-3,8e-3,1.6e-2",
    "widths": "64",
    "steps": "200",
    "seeds": "0..3",
}
SIZES = {
    "layers": ("transformer blocks", 2),
    "heads": ("attention heads per block", 4),
    "context": ("bytes the model sees at once", 32),
    "batch_size": ("windows of text per step", 8),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    what = parser.add_argument_group("runs: every combination of these lists, such as 1,2,4 or 0..3")
    schemes = "recipes and formats; A/B computes forward as A and gradients as B"
    option(what, "--schemes", schemes, DEFAULTS["schemes"], "LIST")
    option(what, "--lr", "peak learning rates", DEFAULTS["lr"], "LIST")
    option(what, "--widths", "widths of the hidden state", DEFAULTS["widths"], "LIST")
    option(what, "--steps", "optimizer steps", DEFAULTS["steps"], "LIST")
    option(what, "--seeds", "of weights, batches and stochastic rounding", DEFAULTS["seeds"], "LIST")
    how = parser.add_argument_group("model and training")
    option(how, "--model", "gpt, llama, or FILE.py:function that returns a torch.nn.Module", "gpt", "NAME")
    for name, (text, default) in SIZES.items():
        option(how, f"--{name.replace('_', '-')}", text, default)
    option(how, "--clip", "norm at which gradients are clipped; 0: not at all", 1.0)
    option(how, "--final-rate", "share of the peak learning rate that is left at the end", 0.1)
    option(how, "--data", "a text file or a folder of them; by default Python's own sources", metavar="PATH")
    flag(how, "--tasks", "train on sums, copies and brackets instead, and count right answers")
    option(
        how,
        "--failed",
        "last loss from which a run has failed (default: halfway from bytes' entropy to the best)",
        type=float,
    )
    add_device(how)
    count(how, "--workers", "processes that share the runs, a CPU thread each (default: one a core)")
    law = "fit Quartet's scaling law to widths, steps and schemes; this scheme is the baseline, such as bf16"
    option(how, "--law", law, metavar="SCHEME")
    output = parser.add_argument_group("output")
    out = "folder for the runs and pictures; the same command goes on where it was stopped"
    option(output, "--out", out, "fmtsim-sweep", "DIR")
    flag(output, "--quiet", "show no progress")
    add_json(parser)
