# SPDX-License-Identifier: Apache-2.0
"""Scripts that complete command lines, run by the shells themselves where there are any."""

import re
import shutil
import subprocess

import pytest

import fmtsim
from fmtsim.lab.cli import machine, names
from fmtsim.lab.cli.main import BAD_INPUT, COMMANDS, main

CASES = [  # words, the last one of which is completed; in bash, = is a word of its own
    (["ex"], ["explain"]),
    (["nonsense", ""], []),
    (["mm", "--targ"], ["--target"]),
    (["mm", "--target", "h1"], ["h100", "h100.batch_invariant", "h100.sglang", "h100.triton_persistent"]),
    (["mm", "1", "2", "3", "--target", "hopper"], ["hopper.mma", "hopper.wgmma"]),
    (["train", "--recipe", "te_n"], ["te_nvfp4", "te_nvfp4_all"]),
    (["vectors", "mxint"], ["mxint8"]),
    (["cast", "1", "--rounding", "to"], ["to_odd", "toward_zero"]),
    (["memory", "--optimizer", "l"], ["lion", "lns_madam"]),
    (["memory", "--model", "gpt2-m"], ["gpt2-medium"]),
    (["compare", ""], []),  # a file, which the shell completes
    (["mm", "--seed", "-"], []),
]


@pytest.fixture(scope="module")
def commands():
    return {name: list(machine._arguments_of(name)) for name in COMMANDS}


def run_bash(script: str, words: list[str]) -> list[str]:
    asked = """
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
        _fmtsim fmtsim "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"; printf '%s\\n' "${COMPREPLY[@]}"
    """
    command = ["bash", "-u", "-c", script + asked, "bash", "fmtsim", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return sorted(filter(None, done.stdout.splitlines()))


@pytest.mark.parametrize(("words", "expected"), CASES)
def test_bash(words, expected, commands):
    assert run_bash(machine.bash(commands), words) == expected


@pytest.mark.parametrize("words", [["train", "--format", "=", "mxint"], ["train", "--format", "mxint"]])
def test_bash_completes_behind_an_equals_sign(words, commands):
    assert run_bash(machine.bash(commands), words) == ["mxint8"]
    assert len(run_bash(machine.bash(commands), ["train", "--format", "="])) == len(fmtsim.list_formats())


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(("words", "expected"), [case for case in CASES if case[1]])
def test_fish(words, expected, commands, tmp_path):
    line = f"complete -C 'fmtsim {' '.join(words)}'"
    done = subprocess.run(["fish", "-c", f"{machine.fish(commands)}\n{line}"], capture_output=True, text=True,
                          check=True, env={"HOME": str(tmp_path)}, cwd=tmp_path)  # fmt: skip
    assert sorted(row.partition("\t")[0] for row in done.stdout.splitlines()) == expected


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_takes_the_script(commands):
    subprocess.run(["zsh", "-f", "-n", "-c", machine.zsh(commands)], check=True)


def test_every_shell_has_every_command_and_option(commands, capsys):
    for shell in machine.SHELLS:
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        for command, arguments in commands.items():
            assert re.search(rf"\b{command}\b", script)
            for name in (name for argument in arguments for name in argument.names if name.startswith("--")):
                assert f"-l {name[2:]} " in f"{script} " if shell == "fish" else name in script
    assert "--plant-error" not in script  # which is for tests


def test_words_need_no_quotes(commands):
    for arguments in commands.values():
        for argument in arguments:
            assert all(re.fullmatch(r"[\w.+/-]+", word) for word in argument.words), argument


def test_names_belong_to_arguments(commands):
    """Each list of names is some argument's, so that none is left behind."""
    offered = {argument.words for arguments in commands.values() for argument in arguments}
    catalogues = [x for x in vars(names).values() if isinstance(x, names.Catalogue)]
    assert len(catalogues) == 16 and all(tuple(catalogue()) in offered for catalogue in catalogues)


def test_texts_of_fish_are_quoted():
    assert machine._quoted(r"it's a \ b") == r"'it\'s a \\ b'"


def test_an_unknown_shell_is_refused(capsys):
    assert main(["completion", "tcsh"]) == BAD_INPUT
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
