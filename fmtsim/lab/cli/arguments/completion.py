# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim completion``."""

import argparse

PLACES = {
    "bash": "~/.local/share/bash-completion/completions/fmtsim",
    "zsh": "a file that ~/.zshrc sources behind compinit",
    "fish": "~/.config/fish/completions/fmtsim.fish",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    places = "; ".join(f"{place} ({shell})" for shell, place in PLACES.items())
    parser.add_argument("shell", choices=PLACES, help=f"print the script for this shell; save it as {places}")
