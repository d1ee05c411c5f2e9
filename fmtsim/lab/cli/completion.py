# SPDX-License-Identifier: Apache-2.0
"""``fmtsim completion``: a script by which a shell completes commands, options and names.

Names are read once, when the script is made, so that completing runs nothing.
"""

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fmtsim.lab.cli.main import COMMANDS, build_parser
from fmtsim.lab.cli.options import offered


class Argument(NamedTuple):
    """What a shell has to know of an argument: option strings, none of a positional one, and what may follow."""

    names: Sequence[str]
    takes_value: bool
    words: tuple[str, ...]
    help: str


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    commands = {name: list(_arguments(name)) for name in COMMANDS}
    print(SHELLS[arguments.shell](commands))
    return 0


def _arguments(command: str) -> Iterator[Argument]:
    """Yield the arguments of a command, as its parser declares them."""
    subparsers = next(a for a in build_parser(command)._actions if isinstance(a, argparse._SubParsersAction))
    for action in subparsers.choices[command]._actions:
        if action.help != argparse.SUPPRESS:
            yield Argument(action.option_strings, action.nargs != 0, offered(action), action.help or "")


def bash(commands: dict[str, list[Argument]]) -> str:
    """Return a script for bash."""
    values, first = [], []
    for command, arguments in commands.items():
        options = " ".join(name for argument in arguments for name in argument.names)
        given = " ".join(word for argument in arguments if not argument.names for word in argument.words)
        first.append(f"        {command}) options={shlex.quote(options)} words={shlex.quote(given)} ;;")
        for argument in arguments:
            if argument.names and argument.takes_value:
                pattern = "|".join(f"'{command} {name}'" for name in argument.names)
                values.append(f"        {pattern}) options='' words={shlex.quote(' '.join(argument.words))} ;;")
    return _BASH.format(commands=" ".join(commands), first="\n".join(first), values="\n".join(values))


def zsh(commands: dict[str, list[Argument]]) -> str:
    """Return a script for zsh, which takes those of bash."""
    return f"autoload -U +X bashcompinit && bashcompinit\n{bash(commands)}"


def fish(commands: dict[str, list[Argument]]) -> str:
    """Return a script for fish, which shows what each word means."""
    lines = ["complete -c fmtsim -n __fish_use_subcommand -l help -s h -d 'show help'"]
    for command, arguments in commands.items():
        lines.append(f"complete -c fmtsim -f -n __fish_use_subcommand -a {command} -d {_quoted(COMMANDS[command])}")
        for argument in arguments:
            line = f"complete -c fmtsim -n '__fish_seen_subcommand_from {command}'"
            for name in argument.names:
                line += f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}"
            if argument.takes_value and argument.names:
                line += " -x" if argument.words else " -r"
            if argument.words:
                line += f" -a {_quoted(' '.join(argument.words))}"
            if argument.names or argument.words:
                lines.append(f"{line} -d {_quoted(argument.help)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Return a text between single quotes of fish."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS: dict[str, Callable[[dict[str, list[Argument]]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}

# Bash takes --option=value for three words.
_BASH = """\
_fmtsim() {{
    local current=$2 before=${{COMP_WORDS[COMP_CWORD-1]}} options= words=
    if [[ $current == = ]]; then current=
    elif [[ $before == = ]]; then before=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    case ${{COMP_WORDS[1]}} in
{first}
    esac
    case "${{COMP_WORDS[1]}} $before" in
{values}
    esac
    if ((COMP_CWORD == 1)); then options='--help --version' words='{commands}'; fi
    if [[ $current == -* ]]; then words=$options; fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o bashdefault -o default -F _fmtsim fmtsim"""
