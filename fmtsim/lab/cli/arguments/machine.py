# SPDX-License-Identifier: Apache-2.0
"""Arguments of the commands about this machine."""

import argparse

from fmtsim.lab.cli import names
from fmtsim.lab.cli.options import add_json, add_layers, add_tokens, flag, option


def declare_info(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)


PLACES = {
    "bash": "~/.local/share/bash-completion/completions/fmtsim",
    "zsh": "a file that ~/.zshrc sources behind compinit",
    "fish": "~/.config/fish/completions/fmtsim.fish",
}


def declare_completion(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    places = "; ".join(f"{place} ({shell})" for shell, place in PLACES.items())
    parser.add_argument("shell", choices=PLACES, help=f"print the script for this shell; save it as {places}")


def declare_doctor(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    dropped = "look for terms that the target's library omits, and for accumulation orders that are guesses"
    flag(parser, "--gemm", dropped)
    what = parser.add_argument_group("with --gemm: which products (default: the layers of gpt2)")
    add_layers(what, "bf16")
    add_tokens(what)
    named = "a GPU with its library, such as h200, or a plan file; leave it out for a converted model"
    option(what, "--target", named, metavar="NAME", names=names.targets)
    add_json(parser)


def declare_warmup(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    device = "cpu, cuda or cuda:1 (default: the CPU, and the current GPU where kernels run on it)"
    option(parser, "--device", device, metavar="DEVICE")
    flag(parser, "--quiet", "show no progress")
    add_json(parser)
