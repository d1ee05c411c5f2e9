# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim train``."""

import argparse

from fmtsim.gemm.layers.scalings import SCALINGS
from fmtsim.lab.cli import names
from fmtsim.lab.cli.options import add_device, add_json, add_target, count, flag, one_of, option

SIZES = {
    "steps": "optimizer steps of each run",
    "batch_size": "windows of text per step",
    "context": "bytes the model sees at once",
    "width": "width of the hidden state",
    "layers": "transformer blocks",
    "heads": "attention heads per block",
}
EVERY = 100
DEFAULTS = {"steps": 600, "batch_size": 16, "context": 64, "width": 128, "layers": 2, "heads": 4, "lr": 4e-3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    _add_scheme(parser.add_argument_group("what is simulated"))
    _add_target(parser.add_argument_group("simulated arithmetic (default: float32 in no particular order)"))
    _add_system(parser.add_argument_group("optimizer and ranks (default: those of the recipe)"))
    how = parser.add_argument_group("model and training")
    model = "gpt, llama, or FILE.py:function that returns a torch.nn.Module; see docs/recipes.md"
    option(how, "--model", model, "gpt", "NAME")
    for name, text in SIZES.items():
        option(how, f"--{name.replace('_', '-')}", text, DEFAULTS[name])
    option(how, "--lr", "peak learning rate", DEFAULTS["lr"], None)
    option(how, "--seed", "of weights, batches and stochastic rounding", 0)
    data = "a text file or a folder of them; by default Python's own sources"
    option(how, "--data", data, metavar="PATH")
    add_device(how)
    count(how, "--threads", "CPU threads (default: torch's choice)")
    output = parser.add_argument_group("output")
    option(output, "--out", "folder for the HTML report (report.html), record and table", "fmtsim-train", "DIR")
    every = f"write a checkpoint to DIR after every N steps; 0: none (default {EVERY})"
    count(output, "--checkpoint-every", every)
    flag(output, "--resume", "resume from the checkpoint in DIR with the same bits; start anew if there is none")
    flag(output, "--quiet", "show no progress")
    add_json(parser)


def _add_scheme(group: argparse._ArgumentGroup) -> None:
    recipe = (
        "a published scheme, such as te_nvfp4, or a JSON file, instead of formats, rounding and scaling; 'list' prints "
        "all names, and --target recipe is the GPU that it was designed for"
    )
    option(group, "--recipe", recipe, metavar="NAME", known=names.recipes)
    option(group, "--format", "format of activations and weights (default e4m3)", metavar="NAME", known=names.formats)
    gradients = "of gradients; by default e5m2 beside element formats of 8 bits and fewer, else as --format"
    option(group, "--grad-format", gradients, metavar="NAME", known=names.formats)
    option(
        group, "--rounding", "of activations and weights (default nearest_even)", metavar="MODE", known=names.roundings
    )
    option(group, "--grad-rounding", "of gradients, such as stochastic (default nearest_even)", metavar="MODE",
           known=names.roundings)  # fmt: skip
    option(group, "--baseline", "fp32 (nothing quantised), bf16, fp16 or any format", "fp32", "NAME", names.formats)
    scaling = (
        "what shares a scale; by default tensor for element formats of 8 bits and fewer, none for wider ones; "
        "block formats have blocks of their own"
    )
    option(group, "--scaling", scaling, choices=SCALINGS)


def _add_system(group: argparse._ArgumentGroup) -> None:
    option(group, "--level", "of a recipe that has levels, such as O1, O2 or O3 of fp8lm", metavar="NAME")
    rule = "optimizer, such as madam (default adamw)"
    option(group, "--optimizer", rule, metavar="NAME", known=names.optimizers, type=one_of(names.optimizers))
    state = "format of its states, such as coat or bnb8 (docs/optim.md); fp32 switches a recipe's scheme off"
    option(group, "--state", state, metavar="NAME", known=names.states)
    reduction = "of the gradients of all ranks, such as msamp (docs/distributed.md); fp32 switches a recipe's off"
    option(group, "--reduction", reduction, metavar="NAME", known=names.reductions)
    ranks = "simulated ranks that share the windows of a step (default 2 with a low-precision reduction, else 1)"
    count(group, "--ranks", ranks)


def _add_target(group: argparse._ArgumentGroup) -> None:
    add_target(group)
    dtype = "dtype of operations other than linear layers, under torch.autocast (default: the recipe's, else none)"
    option(group, "--autocast", dtype, choices=("bfloat16", "float16"))
    fast = "use_fast_accum=True for a target's forward products; gradients promote their accumulators"
    flag(group, "--fast-accum", fast)
    flag(group, "--fast-backward", "use_fast_accum=True for gradients as well")
    check = (
        "native: instead of the comparison with a baseline, train with the device's own products and with emulated "
        "ones in lockstep, and stop at the first bit of a loss, gradient or weight that differs (exit code 1)"
    )
    option(group, "--check", check, choices=("native",))
    minutes = "with --check: start no step after this many minutes, and write the findings"
    option(group, "--minutes", minutes, type=float)
