# SPDX-License-Identifier: Apache-2.0
"""The entry of the command line: usage, errors in one line, limits of memory and threads, narrow terminals."""

import json
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import numpy
import pytest
import torch

import fmtsim
from fmtsim.lab.cli import main as front
from fmtsim.lab.cli import names
from fmtsim.lab.cli.main import BAD_INPUT, COMMANDS, build_parser, main
from fmtsim.lab.cli.options import MOST_THREADS, check_threads
from fmtsim.lab.cli.output import print_text
from fmtsim.recipes import recipe_registry
from fmtsim.support.errors import ArgumentError, CoverageWarning
from tests.support.names import NAMES_FILE, recorded_names
from tests.support.refusals import refused


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


ANSWERS = """
import contextlib, io, json, sys
from fmtsim.lab.cli.main import main
for words in json.load(sys.stdin):
    status, said = None, io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        status = main(words)
    print(json.dumps([status, said.getvalue(), sorted({"torch", "numpy", "numba"} & set(sys.modules))]))
"""


def answers(commands, folder):
    """Return status, standard error and loaded libraries of commands, one after the other in a new process."""
    done = subprocess.run([sys.executable, "-c", ANSWERS], input=json.dumps(commands), cwd=folder, capture_output=True,
                          text=True, check=True)  # fmt: skip
    return list(zip(commands, map(json.loads, done.stdout.splitlines()), strict=True))


def test_words_that_need_no_torch_do_not_wait_for_it(tmp_path):
    commands = [[], ["--help"], ["--version"], ["formats"], ["nonsense"], ["formats", "e4m3", "--codes"],
                ["mm", "--nonsense"], *([command, "--help"] for command in COMMANDS)]  # fmt: skip
    for words, (_, _, loaded) in answers(commands, tmp_path):
        assert loaded == [], words


TYPOS = [
    ("train --recipe F8_E4M3", "--recipe 'F8_E4M3' is unknown; it is a format, for --format where"),
    ("train --recipe te_curent", "--recipe 'te_curent' is unknown; did you mean 'te_current'?; fmtsim train --rec"),
    ("train --target h20", "--target 'h20' is unknown; did you mean 'h200' or 'h100' or 'b200'?; choose a GPU"),
    ("train --format e4m3x", "unknown format 'e4m3x'; did you mean 'e4m3' or 'ue4m3' or 'e4m3fn'? (fmtsim formats"),
    ("ptq --scheme nvfp4_statc --model gpt2", "--scheme 'nvfp4_statc' is unknown; did you mean 'nvfp4_static'"),
    ("ptq --scheme int8_static", "--model is missing; fmtsim ptq --help shows what is allowed"),
    ("mm 8 8 8 --target hopper.wgma", "--target 'hopper.wgma' is unknown; did you mean 'hopper.wgmma'"),
    ("sweep --schemes bf16,te_curent", "--schemes 'te_curent' is unknown; did you mean 'te_current'?; fmtsim for"),
    ("observe --model plain.py:build --recipe coatt", "--recipe 'coatt' is unknown; did you mean 'coat'"),
    ("trace --model gpt2 --simulate h20", "--simulate 'h20' is unknown; did you mean 'h200' or 'h100'?; choose"),
    ("compare missing.pt other.pt", "missing.pt: no such file; pass a .npy, .npz, .pt, .safetensors file, or FILE"),
    ("compare plain.py plain.py", "plain.py is of no known kind; pass a .npy, .npz, .pt, .safetensors file"),
    ("bisect a.st b.st", "a.st is not there; pass a file that fmtsim trace --out wrote, or a model as FILE.py"),
    ("bisect a.txt b.txt", "a.txt is not there; pass a file that fmtsim trace --out wrote, or a model as FILE.py"),
    ("bisect plain.py plain.py", "plain.py is not a trace; pass a file that fmtsim trace --out wrote, or a model"),
    ("bisect plan.py:build plain.py:build", "plan.py:build: there is no file plan.py; did you mean 'plain.py'?; "),
    ("audit trace.safetensors", "trace.safetensors: there is no file trace.safetensors; pass a file that fmtsim t"),
    ("audit plain.py", "plain.py is not a trace; pass a file that fmtsim trace --level aten --tensors all wrote"),
    ("identify a.npy b.npy y.npy", "a.npy: no such file; pass a .npy, .npz, .pt, .safetensors file, or FILE:NAME"),
    ("identify plain.py b y", "plain.py is of no known kind; pass a .npy, .npz, .pt, .safetensors file"),
    ("report runs/a runs/b", "runs/a: there is no file or folder runs/a; pass two or more folders that fmtsim tr"),
    ("observe --model plan.py:build", "--model plan.py:build: there is no file plan.py; did you mean 'plain.py'?;"),
    ("train --recipe my.json", "--recipe my.json: there is no file my.json; pass a file that is there"),
    ("observe --model plain.py:build --rules r.json", "--rules r.json: there is no file r.json; pass JSON that at"),
    ("ptq --scheme int8_static --model gpt2 --data words.txt", "--data words.txt: there is no file or folder word"),
    ("trace --model gpt2 --checkpoint w.pt", "--checkpoint w.pt: there is no file w.pt; pass weights in .safetens"),
    ("train --rounding stocastic", "--rounding 'stocastic' is unknown; did you mean 'stochastic'?; choose one of"),
    ("cast 1 --to e4m3 --overflow satrate", "--overflow 'satrate' is unknown; did you mean 'saturate'?; choose on"),
    ("explain 1 --format mxfp8 --scale-rule flor", "--scale-rule 'flor' is unknown; did you mean 'floor'?; choose"),
    ("invariance --target h200 --model gpt3", "--model 'gpt3' is unknown; did you mean 'gpt2' or 'gpt3-175b'"),
    ("doctor --gemm --target h200 --shapes s.txt", "--shapes s.txt: there is no file s.txt; pass a text file with"),
    ("memory --params 7Z", "argument --params: '7Z' is no number of parameters; write 7e9, 7B, 350M"),
    ("cast 1 --to e4m3 --random-bits 40", "--random-bits 40 belongs to --rounding stochastic, not to nearest_even"),
    ("cast 1 --to e4m3 --rounding sr --random-bits 40", "--random-bits 40 is not allowed; choose 1 to 32, or leav"),
    ("explain 1 --format e4m3 --random-bits 8", "--random-bits 8 belongs to --rounding stochastic, not to nearest"),
    ("mm 8 8 8", "fmtsim mm needs --target; try --target h200, or --target hopper.wgmma for a unit alone"),
    ("mm 8 8 8 --target h200 --out y.txt", "--out y.txt does not end in .npy or .safetensors; choose another name"),
    ("memory", "fmtsim memory needs a model; pass either --model llama-8b, a config.json, or --params 7B"),
]  # fmt: skip


def test_typos_are_answered_before_torch_is_imported(tmp_path):
    (tmp_path / "plain.py").write_text("import torch\n\ndef build():\n    raise SystemExit('called')\n")
    found = answers([words.split() for words, _ in TYPOS], tmp_path)
    for (words, (status, error, loaded)), (_, said) in zip(found, TYPOS, strict=True):
        assert (status, loaded) == (BAD_INPUT, []) and error.startswith(f"fmtsim: error: {said}"), (words, error)


def test_errors_name_options_instead_of_keywords(capsys):
    assert main(["explain", "1", "2", "--format", "mxfp4", "--block-size", "0"]) == BAD_INPUT
    assert capsys.readouterr().err == "fmtsim: error: --block-size 0 is not possible; choose 1 or more\n"
    assert main(["explain", "1", "--format", "e4m3", "--scale-rule", "amax"]) == BAD_INPUT
    assert "--scale-rule amax needs a block; pass --block-size or a block format" in capsys.readouterr().err
    actions = build_parser("mm").actions
    said = "pass target=Unit(...), plan=GemmPlan(...), slow=True or pad=True; recipe.target='x'; out_dtype='float32'"
    options = (
        "pass --target block=32,fraction_bits=10, --plan FIELD=VALUE,..., --slow or pad=True; recipe.target='x'; "
        "--out-dtype float32"
    )
    assert front._in_options(said, actions) == options and front._in_options(said, ()) == said
    said = "choose 0 or more, or None for all (fmtsim.list_formats() has all names)"
    assert front._in_options(said, ()) == "choose 0 or more, or leave it out for all (fmtsim formats has all names)"


def test_a_librarys_cast_says_how_it_rounds(capsys):
    assert main(["explain", "1", "--format", "e4m3", "--like", "torch", "--rounding", "up"]) == BAD_INPUT
    assert "leave --rounding out" in capsys.readouterr().err


def test_the_names_that_typos_are_compared_with_are_those_of_the_catalogues():
    assert NAMES_FILE.read_text() == recorded_names(), "run python -m tests.support.names"
    assert set(names.targets_and_units()) == {*fmtsim.list_targets(), *fmtsim.list_units(), "integers", "logarithms"}
    assert set(names.recipes()) == set(fmtsim.list_recipes(kind="training"))
    assert set(names.schemes()) == set(fmtsim.list_recipes(kind="ptq"))


def test_words_that_are_no_typos(tmp_path, monkeypatch):
    """The command itself takes or refuses them; TYPOS has words that are refused before."""
    monkeypatch.chdir(tmp_path)
    for name in ("here.py", "here.json", "text"):
        Path(name).touch()
    for catalogue, words in (
        (names.recipes, (" TE_Current", "here.py:build", "package.module:build", "here.json")),
        (names.recipes_and_formats, ("e4m3", "e4m3,te_current")), (names.targets_and_units, ("block=32", "logarithms")),
        (names.roundings, ("all",)), (names.functions, ("text",)), (names.files, ("text",)), (names.texts, (".",)),
    ):  # fmt: skip
        for word in words:
            catalogue.check("--option", word)
    refused("--option 'e4m3' is unknown", names.recipes.check, "--option", "e4m3")
    refused("did you mean 'integers'", names.targets_and_units.check, "--option", "integer")
    refused("--option 'logarithms' is unknown; choose a GPU", names.targets.check, "--option", "logarithms")
    refused("^--option .: there is no file .; pass a file", names.files.check, "--option", ".")
    refused("did you mean 'here.json'", names.recipes.check, "--option", "gone.json")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("identify a.npy b.pt y.npz:y", ""),
        ("identify a.npy b.pt y.npz:y --bias b.pt --scale-a a.npy --scale-b a.npy --refine a.npy b.pt b.pt", ""),
        ("identify a.npy gone.pt y.npz:y", "gone.pt: no such file; did you mean 'b.pt'"),
        ("identify a.npy b.pt gone.npz:y", "gone.npz:y: no such file"),
        ("identify a.npy b.pt b.pt --bias c.npy", "c.npy: no such file"),
        ("identify a.npy b.pt b.pt --scale-a c.npy --scale-b a.npy", "c.npy: no such file"),
        ("identify a.npy b.pt b.pt --scale-a a.npy --scale-b c.npy", "c.npy: no such file"),
        ("identify a.npy b.pt b.pt --scale-a a.npy", "--scale-a and --scale-b belong together"),
        ("identify a.npy b.pt b.pt --scale-b a.npy", "--scale-a and --scale-b belong together"),
        ("identify a.npy b.pt b.pt --refine a.npy b.pt c.npy", "c.npy: no such file"),
        ("identify a.npy b.pt b.pt --refine a.npy b.pt b.pt --refine c.npy b.pt b.pt", "c.npy: no such file"),
        ("identify a.npy b.pt b.pt --probe p.pt", ""),
        ("identify a.npy b.pt b.pt --probe none/p.pt", "--probe "),
        ("mm 1 1 2147483647 --target h200", ""),
        ("mm 1 1 2147483648 --target h200", "K = 2147483648 is not possible; choose 1 to 2,147,483,647"),
        ("mm 0 1 1 --target h200", "M = 0 is not possible; choose 1 or more"),
        ("mm 1 0 1 --target h200", "N = 0 is not possible; choose 1 or more"),
        ("mm 1 1 1 --target h200 --seed 4611686018427387903", ""),
        ("mm 1 1 1 --target h200 --seed 4611686018427387904", "--seed 4611686018427387904 is not allowed"),
        ("mm 1 1 1 --target h200 --seed -1", "--seed -1 is not allowed; choose 0 to 2**62 - 1"),
        ("mm 1 1 1 --target h200 --out y.npy", ""),
        ("mm 1 1 1 --target h200 --out none/y.npy", "--out "),
        ("mm 1 1 1 --target h200 --slow", ""),
        ("mm 1 1 1 --target h200 --slow --plan split=2", "--slow and --plan both give an accumulation order"),
        ("vectors --check here", "--check compares a kernel's results; pass --decode FILE"),
        ("vectors --check here --decode a.npy", ""),
        ("vectors --check here --encode c.npy", "c.npy: no such file"),
        ("vectors --check here --decode a.npy --encode c.npy", "c.npy: no such file"),
        ("vectors mxfp4 --out here --block-size 0", "--block-size 0 is not possible; choose 1 or more"),
        ("vectors mxfp4 --out here --random-bits 8", "--random-bits 8 belongs to --rounding stochastic"),
        ("explain 1 --format mxfp4 --block-size 1", ""),
    ],
)
def test_what_a_command_refuses_before_it_runs(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.npy", "b.pt", "y.npz"):
        Path(name).touch()
    command = words.split()[0]
    arguments = build_parser(command).parse_args(words.split())
    if not said:
        return front._call("check", command, arguments)
    with pytest.raises(ArgumentError) as error:
        front._call("check", command, arguments)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("header", ["", "import mine\n"])
def test_names_that_a_file_may_register_are_no_typos(header, tmp_path, monkeypatch, capsys):
    """The file is called, and what it registered is taken; where it registers nothing, the name is unknown."""
    register = (
        "import dataclasses, fmtsim\nrecipe = dataclasses.replace(fmtsim.get_recipe('te_current'), name='my_own')\n"
        "fmtsim.register_recipe(recipe)\n"
    )
    build = (
        "import torch\n\ndef build():\n    model = torch.nn.Sequential(torch.nn.Linear(16, 16))\n"
        "    return model, [torch.ones(2, 16)], lambda y: y.sum()\n"
    )
    (tmp_path / "mine.py").write_text(register if header else "")
    (tmp_path / "model.py").write_text((header or register) + build)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipe_registry, "_registered", dict(recipe_registry._registered))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert main(["observe", "--model", "model.py:build", "--recipe", "my_own", "--steps", "1", "--quiet"]) == 0
    assert "unknown" not in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "mine", raising=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["casst", "1"], "unknown command 'casst'; did you mean 'cast'?; fmtsim --help shows what there is"),
        (["quantise"], "unknown command 'quantise'; fmtsim --help shows what there is"),
        (["formats", "e4m3", "--colums", "3"], "unrecognized arguments: --colums 3; did you mean '--columns' or "
         "'--codes' or '--code'?; fmtsim formats --help shows what is allowed"),
        (["formats", "e4m3", "--colums=3"], "unrecognized arguments: --colums=3; did you mean '--columns' or "
         "'--codes' or '--code'?; fmtsim formats --help shows what is allowed"),
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
    assert ("--json" in capsys.readouterr().out) == (command not in ("completion", "report"))


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("fmtsim ")


@pytest.mark.parametrize(
    "words", [["--nonsense"], ["nonsense"], ["cast", "1"], ["formats", "e4m3", "--codes", "--nonsense"]]
)
def test_wrong_usage_exits_with_2(words, capsys):
    assert main(words) == BAD_INPUT
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("fmtsim: error: ") and "--help shows what" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mm", "x", "2", "2", "--target", "exact"], "argument M: invalid int value: 'x'; fmtsim mm --help shows"),
        (["mm", "2", "2", "2", "--target", "exact", "--seed", "9" * 30], "--seed 9999"),
        (["compare", "a\0b", "c"], "a\0b: no such file"),
        (["formats", "a\nb\n", "--codes"], r"unknown format 'a\nb\n'"),
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
    command = f"{sys.executable} -m fmtsim formats fp16 --codes --all > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (BAD_INPUT, "fmtsim: error: No space left on device\n")


def test_closed_streams_are_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["formats", "e2m1", "--codes"]) == 0
    assert main(["formats", "e2m", "--codes"]) == BAD_INPUT
    sys.stdout.close()
    sys.stderr.close()


def test_a_closed_pipe_is_quiet():
    command = f"{sys.executable} -m fmtsim formats fp16 --codes --all | head -n 1"
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


UNIT = ["--target", "hopper.wgmma"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mm", "1000000", "1000000", "1000000", *UNIT], "not enough memory for this (tried to allocate 8000000000000"),
        (["mm", "2000000000", "9", "2000000000", *UNIT], "there is not enough memory for this (Storage size"),
        (["mm", "4", "20000000000", "4", *UNIT], "N = 20000000000 is not possible; choose 1 to 2,147,483,647"),
        (["mm", "4", "4", "4", *UNIT, "--seed", "-1"], "--seed -1 is not allowed; choose 0 to 2**62 - 1"),
        (["mm", "4", "4", "4", *UNIT, "--seed", "9" * 30], "is not allowed; choose 0 to 2**62 - 1"),
        (["mm", "4", "4", "4", *UNIT, "--device", "meta"], "--device meta is not there: Cannot copy out of meta"),
        (["train", "--device", "meta"], "--device meta is not there"),
        (["train", "--steps", "9" * 25], "is not allowed; choose 1 to 2,147,483,647"),
        (["train", "--width", "9" * 25], "is not allowed; choose 1 to 2,147,483,647"),
        (["explain", "1", "--format", "e4m3", "--block-size", "9" * 30], "is not a block; choose an int of 1 or more"),
    ],
)  # fmt: skip
def test_impossible_input_is_one_line(words, message, capsys):
    assert main(words) == BAD_INPUT
    printed = capsys.readouterr()
    said = printed.err.removeprefix("loading torch, compiling kernels\n")  # train says at once what takes its time
    assert message in said and len(said.splitlines()) == 1 and printed.out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError("Unable to allocate 8 TiB"), BAD_INPUT),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has ..."), BAD_INPUT),
        (RuntimeError("a defect"), None),
    ],
)
def test_want_of_memory_is_no_traceback_and_a_defect_is(error, code, monkeypatch, capsys):
    def failing(arguments):
        raise error

    monkeypatch.setattr("fmtsim.lab.cli.machine.run_info", failing)
    if code is None:
        refused("a defect", main, ["info"], error=RuntimeError)
    else:
        assert main(["info"]) == code
        assert "there is not enough memory for this" in capsys.readouterr().err


def test_threads_that_no_machine_has():
    """Torch's thread library takes the process down where it cannot start as many."""
    check_threads(1)
    check_threads(MOST_THREADS)
    for count in (0, -4, MOST_THREADS + 1, 1 << 70):
        refused(rf"--threads {count} is not allowed; choose 1", check_threads, count)


def test_what_was_found_is_printed_although_it_cannot_be_kept(tmp_path, capsys):
    numpy.savez(tmp_path / "a.npz", x=numpy.zeros(3, numpy.float32))
    numpy.savez(tmp_path / "b.npz", y=numpy.zeros(3, numpy.float32), z=numpy.zeros(1))
    a, b = str(tmp_path / "a.npz"), str(tmp_path / "b.npz")
    assert main(["compare", a, b, "--plot", str(tmp_path / "p.png")]) == BAD_INPUT
    printed = capsys.readouterr()
    assert "x: only in" in printed.out and "plot_ulps got no pair" in printed.err
    out = str(tmp_path / "y.npy")
    assert main(["mm", "4", "4", "4", *UNIT, "--out-dtype", "bfloat16", "--out", out]) == BAD_INPUT
    printed = capsys.readouterr()
    assert "first outputs:" in printed.out and "cannot hold bfloat16" in printed.err


def test_shapes_that_are_no_text(tmp_path, capsys):
    (tmp_path / "shapes").write_bytes(b"\x93NUMPY")
    assert main(["invariance", "--target", "h200", "--shapes", str(tmp_path / "shapes")]) == BAD_INPUT
    assert "shapes is not text; write a line for each linear layer" in capsys.readouterr().err


WIDE_COMMANDS = (
    "formats", "formats e4m3 --codes", "formats fp16 --codes", "cast 0.1 -3e-5 --to e4m3 --to bf16 --rounding all",
    "explain 957 1 --format mxfp8_e4m3", "explain 0.1 --format nvfp4", "info", "doctor",
    "train --recipe list", "mm 16 16 64 --target h200", "invariance --target h200 --sizes 1..4",
    "doctor --gemm --target h200 --tokens 8",
)  # fmt: skip


@pytest.fixture
def printed(monkeypatch, capsys):
    """Run a command with standard output on a terminal of some columns, or on none."""

    def run(command: str, columns: int | None) -> list[str]:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: columns is not None)
        monkeypatch.setenv("COLUMNS", str(columns or 60))
        assert main(shlex.split(command)) == 0
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize("command", WIDE_COMMANDS)
def test_lines_fit_and_lose_no_word(command, printed):
    whole = [line for line in printed(command, None) if "products/s" not in line]  # seconds differ
    words = {word for line in whole for word in line.split() if word.strip("-|")}
    for columns in (60, 80, 120):
        lines = printed(command, columns)
        assert max(map(len, lines)) <= columns
        found = {word.rstrip(":;") for line in lines for word in line.split()}
        assert {word for word in words - found if word.rstrip(":;") not in found and len(word) <= 20} == set()


def test_output_into_a_pipe_is_whole(printed):
    assert max(map(len, printed("formats", None))) > 120
    assert printed("formats e4m3 --codes", None)[12].count("|") == 3


def test_codes_stand_side_by_side_where_there_is_room(printed):
    assert [printed("formats e4m3 --codes", columns)[-5].count("|") for columns in (60, 80, 120, 200)] == [0, 1, 2, 3]
    assert printed("formats e2m1 --codes --columns 2", 200)[-1].count("|") == 1


def test_long_lines_go_on_below_their_text(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    heading = "source  a rule that says much more than one line of 40 has room for"
    plain = "  a line that begins with two spaces, and goes on for long"
    print_text(lambda: f"{heading}\n\n{plain}")
    assert capsys.readouterr().out.splitlines() == [
        "source  a rule that says much more than",
        "        one line of 40 has room for",
        "",
        "  a line that begins with two spaces,",
        "  and goes on for long",
    ]
    monkeypatch.setenv("COLUMNS", "8")  # narrower than anything is laid out for
    print_text(lambda: "a" * 20)
    assert capsys.readouterr().out == "a" * 20 + "\n"
