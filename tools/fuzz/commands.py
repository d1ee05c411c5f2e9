# SPDX-License-Identifier: Apache-2.0
"""The target of command lines: any words after any command, in this process, without the long jobs."""

import contextlib
import io
import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

from fmtsim.lab.cli.main import COMMANDS, build_parser, main
from fmtsim.support.errors import ArgumentError
from tools.fuzz.corrupt import TEXTS, corrupted

LONG = (  # what takes minutes, or starts processes: reached, it is a result
    "fmtsim.lab.cli.training.compare_schemes", "fmtsim.lab.cli.training.check_native",
    "fmtsim.lab.cli.studies._run_all",
    "fmtsim.lab.verify.workers.run", "fmtsim.lab.cli.benchmarks._results", "fmtsim.lab.cli.benchmarks._overheads",
    "fmtsim.lab.bench.layers.Bench",
    "fmtsim.lab.cli.products.exact_sums", "fmtsim.lab.cli.machine._on_cpu",
)  # fmt: skip
PLAIN = """e4m3 bf16 nvfp4 mxfp8_e4m3 int8 int24 fp64 logfmt8 nf4 1 2 3 -1 0 16 33 1.5 inf nan 1e-320 0x1p3 = , a=b --
    - * block=32,fraction_bits=10 block=0 block=x rounding=stochastic promote_every=128 split=2 h100 chain exact
    hopper.wgmma te_nvfp4 list cuda:99 cpu meta good.npy bad.npy bad.npz bad.safetensors bad.json bad.json:a absent.npy
    folder casts gemm gpu layers gpt2 1,2,512 9..1 --json --help -V nearest_even stochastic all ieee saturate amax
    e4m3* ["""
WORDS = [
    *(text for text in TEXTS if "/" not in text), "9" * 30, "9" * 5000, str(1 << 63), str(1 << 40), *PLAIN.split(),
]  # fmt: skip
FILES = ("bad.npy", "bad.npz", "bad.safetensors", "bad.json")
OPTIONS = {
    command: [action.option_strings for action in build_parser(command)._actions[-1].choices[command]._actions]  # type: ignore[index]
    for command in COMMANDS
}


class LongJob(BaseException):
    """Say that the words were accepted and a long job would begin."""


def make_words(rng: random.Random) -> list[str]:
    """Return words of a command line."""
    command = rng.choice(list(COMMANDS))
    words = [command]
    options = [names[-1] for names in OPTIONS[command] if names]
    for _ in range(rng.randrange(6)):
        word = rng.choice(WORDS)
        words += [rng.choice(options), word] if rng.random() < 0.6 else [word]
    if rng.random() < 0.5:  # words that are complete, with one exchanged
        words = [*rng.choice(GOOD)]
        words[rng.randrange(len(words))] = rng.choice(WORDS)
        words += [rng.choice(options), rng.choice(WORDS)] if rng.random() < 0.4 else []
    return [word for word in words if word != "--plant-error"]


GOOD = [
    line.split()
    for line in """formats
    formats --kind float --json
    table e4m3 --code 17
    table nvfp4 --columns 2
    cast 0.1 --to e4m3 --rounding all
    cast 1 2 --to bf16 --seed 3 --json
    explain 1 2 3 --format nvfp4 --block-size 2 --json
    explain 0.3 --format int11_half --rounding stochastic --random-bits 8
    info
    mm 2 3 16 --target hopper.wgmma --dtype e4m3 --seed 2
    mm 2 3 16 --target h200 --dtype bf16 --out out.npy
    mm 2 3 16 --target block=32,fraction_bits=10 --plan promote_every=32 --dtype e5m2
    compare good.npy bad.npy
    compare bad.npz good.npz --json
    compare bad.safetensors good.npy
    verify --format e4m3 --workers 1
    verify gemm --vectors folder
    bench --only e4m3* --against bad.json
    bench layers --recipes te_current --width 8 --device cpu
    train --format e4m3 --steps 2 --out run --data text
    train --recipe bad.json
    train --target bad.json --lr 0.1 --layers 1 --width 8 --heads 2
    calibrate --shapes bad.json --tokens 1,2 --dtypes bf16
    invariance --shapes bad.json --target h200 --sizes 1..9 --dtypes bf16
    trace --model text --format e4m3 --target hopper.wgmma --tensors 1,2 --out run.safetensors
    bisect bad.safetensors good.safetensors
    observe --model bad.json:a --format e4m3 --steps 2 --report run.html --rules bad.json
    attribute --model folder --data text --recipe te_current --tokenizer bytes --share 0.3
    ptq --model absent.npy --scheme bad.json --checkpoint bad.safetensors --out run --batches 1
    search --model folder --data text --bits 6 --schemes w4a4,bad.json --out s.json
    doctor --gemm --model gpt2 --target bad.json --tokens 1,2
    reproduce --list --only x""".splitlines()
]


def prepare(room: Path, good: dict[str, bytes]) -> None:
    """Make the files that words name."""
    (room / "folder").mkdir(exist_ok=True)
    (room / "text").write_text("some words to train on, again and again\n" * 50)
    for suffix, content in good.items():
        (room / f"good{suffix}").write_bytes(content)


def caller(room: Path, good: dict[str, bytes]) -> Any:
    """Return what runs words in a folder, with files that are corrupt."""
    prepare(room, good)

    def call(words: list[str]) -> None:
        rng = random.Random(str(words))
        for name in FILES:
            (room / name).write_bytes(corrupted(rng, good[Path(name).suffix]))
        out, err = io.StringIO(), io.StringIO()
        before = os.getcwd()
        os.chdir(room)
        try:
            with contextlib.ExitStack() as stack:
                for place in LONG:
                    stack.enter_context(mock.patch(place, side_effect=LongJob))
                stack.enter_context(contextlib.redirect_stdout(out))
                stack.enter_context(contextlib.redirect_stderr(err))
                status = main(words)
        except LongJob:
            return
        except SystemExit as stop:  # --help and --version
            assert not stop.code, f"status {stop.code}"
            return
        finally:
            os.chdir(before)
        said = err.getvalue()
        assert status in (0, 1, 2), f"status {status}"
        if status == 2:
            assert said.count("\n") == 1 and said.startswith("fmtsim: error: "), f"not one line: {said!r}"
            raise ArgumentError(said)

    return call
