# SPDX-License-Identifier: Apache-2.0
"""The front door of the command line: help, errors, pipes."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from fmtsim.lab.cli import main as front
from fmtsim.lab.cli.main import BAD_INPUT, COMMANDS, build_parser, main
from fmtsim.support.errors import CoverageWarning


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command}" in text


def test_no_words_list_the_commands(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command}" in text for command in COMMANDS)


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], ["formats"], ["table", "e4m3"], ["nonsense"],
                                   ["mm", "--nonsense"], *([command, "--help"] for command in COMMANDS)])  # fmt: skip
def test_words_that_need_no_torch_do_not_wait_for_it(words):
    code = (
        "import contextlib, sys; from fmtsim.lab.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        "print(sorted({'torch', 'numpy', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["casst", "1"], "unknown command 'casst'; did you mean 'cast'?; fmtsim --help shows what there is"),
        (["quantise"], "unknown command 'quantise'; fmtsim --help shows what there is"),
        (["table", "e4m3", "--colums", "3"], "unrecognized arguments: --colums 3; did you mean '--columns' or "
         "'--code'?; fmtsim table --help shows what is allowed"),
        (["table", "e4m3", "--colums=3"], "unrecognized arguments: --colums=3; did you mean '--columns' or '--code'?; "
         "fmtsim table --help shows what is allowed"),
    ],
)  # fmt: skip
def test_a_mistyped_word_is_answered_with_those_that_are_close(words, said, capsys):
    assert main(words) == BAD_INPUT
    assert capsys.readouterr().err == f"fmtsim: error: {said}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert ("--json" in capsys.readouterr().out) == (command != "completion")


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("fmtsim ")


@pytest.mark.parametrize("words", [["--nonsense"], ["nonsense"], ["cast", "1"], ["table", "e4m3", "--nonsense"]])
def test_wrong_usage_exits_with_2(words, capsys):
    assert main(words) == BAD_INPUT
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("fmtsim: error: ") and "--help shows what" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mm", "x", "2", "2", "--unit", "exact"], "argument M: invalid int value: 'x'; fmtsim mm --help shows"),
        (["mm", "2", "2", "2", "--unit", "exact", "--seed", "9" * 30], "--seed 9999"),
        (["compare", "a\0b", "c"], "a\0b: no such file"),
        (["table", "a\nb\n"], r"unknown format 'a\nb\n'"),
    ],
)
def test_nonsense_is_one_line(words, said, capsys):
    assert main(words) == BAD_INPUT
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith(f"fmtsim: error: {said}")


def test_the_parser_loads_one_group_of_commands_and_no_torch():
    code = (
        "import sys; import fmtsim.lab.cli.main as m; m.build_parser('formats'); "
        "print(*[n for n in m.ARGUMENTS if f'fmtsim.lab.cli.arguments.{n}' in sys.modules], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["numbers", "False"]
    assert build_parser().prog == "fmtsim"


def test_a_full_disk_below_the_output_is_one_line():
    command = f"{sys.executable} -m fmtsim table fp16 --all > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (BAD_INPUT, "fmtsim: error: No space left on device\n")


def test_closed_streams_are_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["table", "e2m1"]) == 0
    assert main(["table", "e2m"]) == BAD_INPUT
    sys.stdout.close()
    sys.stderr.close()


def test_a_closed_pipe_is_quiet():
    command = f"{sys.executable} -m fmtsim table fp16 --all | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("name")
    assert done.stderr == ""
    assert done.returncode == front.BROKEN_PIPE


@pytest.mark.filterwarnings("always")
def test_a_warning_is_one_line_once(monkeypatch, capsys):
    def run(arguments):
        for said in ("so", "so", "and so"):
            warnings.warn(said, CoverageWarning, stacklevel=1)
        warnings.warn("another's", UserWarning, stacklevel=1)
        return 0

    monkeypatch.setattr("fmtsim.lab.cli.machine.run_info", run)
    show = warnings.showwarning
    with pytest.warns(UserWarning, match="another's"):
        assert main(["info"]) == 0
    assert capsys.readouterr().err.splitlines() == ["fmtsim: warning: so", "fmtsim: warning: and so"]
    assert warnings.showwarning is show


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("fmtsim.lab.cli.machine.run_info", interrupted)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "\nfmtsim: interrupted\n"


def test_a_file_that_cannot_be_read_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("fmtsim.lab.cli.machine.run_info", lambda arguments: Path("/nonexistent/file").read_text())
    assert main(["info"]) == BAD_INPUT
    assert capsys.readouterr().err == "fmtsim: error: /nonexistent/file: No such file or directory\n"


def test_module_and_script_are_the_same():
    done = subprocess.run(
        [sys.executable, "-m", "fmtsim", "formats", "e4m3", "--json"], capture_output=True, check=True
    )
    assert json.loads(done.stdout)[0]["name"] == "e4m3"


@pytest.mark.parametrize("number", ["-1e-5", "-.5", "-inf", "-0x1p-3", "-2"])
def test_negative_numbers_are_not_options(number, capsys):
    assert main(["cast", number, "--to", "e4m3", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["bits"].startswith("1 ")
