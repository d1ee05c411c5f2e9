# SPDX-License-Identifier: Apache-2.0
"""What ``fmtsim train`` refuses before it trains: one line on standard error, status 2, and no folder."""

import pytest

from fmtsim.lab.cli.main import main

SMALL = "--steps 3 --batch-size 4 --context 16 --width 32 --layers 1 --heads 2 --quiet"
OPTIONS = [
    ("--format e4m33", "e4m3"),
    ("--baseline nope", "nope"),
    ("--rounding nearst", "nearest_even"),
    ("--format mxfp4 --scaling tensor", "--scaling tensor does not go with mxfp4"),
    ("--data /does/not/exist", "--data /does/not/exist: there is no file or folder /does/not/exist"),
    ("--steps 0", "--steps 0 is not allowed; choose 1 or more"),
    ("--batch-size -1", "--batch-size -1 is not allowed"),
    ("--heads 3", "--heads 3 does not divide --width 32; choose a divisor"),
    ("--lr 0", "--lr 0.0 is not allowed"),
    ("--seed -1", "--seed -1 is not allowed"),
    ("--threads 0", "--threads 0 is not allowed"),
]
RECIPES = [
    ("--recipe te_curent", "--recipe 'te_curent' is unknown; did you mean 'te_current'"),
    ("--recipe coat --format e4m3 --rounding up", "leave --format and --rounding out"),
    ("--recipe quartet2", "layer 'blocks.0.attention.qkv'"),
    ("--recipe absent.json", "--recipe absent.json: there is no file absent.json; pass a file that is there"),
]
MACHINES = [
    ("--plan split=2", "--plan is an accumulation order; pass --target as well"),
    ("--fast-accum", "--fast-accum chooses between a library's kernels; pass a GPU as --target as well"),
    ("--target exact --fast-accum", "--fast-accum chooses between a library's kernels"),
    ("--target hoper", "--target 'hoper' is unknown; did you mean"),
    ("--target h300", "--target 'h300' is unknown; did you mean"),
    ("--target blocks=3", "--target 'blocks=3' is not FIELD=VALUE; fields are block,"),
    ("--target block=0", "block=0 is not possible; choose 1 or more"),
    ("--target hopper.wgmma --format int8", "no unit multiplies e5m2_tensor_amax by int8_tensor_amax: integers"),
    ("--target hopper.wgmma --format mxfp4", "does not take e2m1 x e2m1 with e8m0 scales"),
    ("--target h200 --format mxfp4", "target h200 has no unit for e2m1 x e2m1"),
    ("--target hopper.wgmma --scaling block32", "no unit multiplies e4m3 in blocks of (1, 32) with fp32"),
    ("--target recipe", "--target recipe is the machine that a recipe was made for; pass --recipe as well"),
    ("--recipe te_mxfp8 --target h200", "te_mxfp8: fprop: target h200 has no unit for e4m3 x e4m3 -> fp32 with scaling "
     "'mx'"),
    ("--recipe te_current --target h200 --fast-accum", "--recipe says everything about formats and sums; leave "
     "--fast-accum out"),
]  # fmt: skip
SYSTEMS = [
    ("--level O1", "--level O1 is a recipe's; pass --recipe fp8lm as well"),
    ("--recipe coat --level O1", "--level O1: recipe coat has no levels; pass --recipe fp8lm, or leave"),
    ("--recipe fp8lm --level O4", "recipe fp8lm has no level 'O4'; its levels are O1, O2, O3"),
    ("--recipe fp8lm --ranks 1", "--ranks 1 has no gradients to reduce by fp8lm; pass --ranks 2 or more, or "
     "--reduction fp32"),
    ("--recipe fp8lm --batch-size 3", "--ranks 2 (the default where gradients are reduced by fp8lm) does not divide "
     "--batch-size 3; choose a"),
    ("--ranks 3", "--ranks 3 does not divide --batch-size 4; choose a divisor"),
    ("--ranks 0", "--ranks 0 is not allowed; choose 1 or more"),
    ("--state coatt", "--state 'coatt' is unknown; did you mean 'coat'"),
    ("--reduction msamq", "--reduction 'msamq' is unknown; did you mean 'msamp'"),
]  # fmt: skip
CHECKS = [
    ("--check native", "--check native compares a GPU with its emulation; pass --target, for example h200"),
    ("--check native --target h200", "--check native is not possible: the tensors are on cpu, not on a"),
    ("--check native --target h200 --resume", "--check native has no checkpoints; leave --resume and"),
    ("--check native --target h200 --checkpoint-every 5", "no checkpoints; leave --resume and --checkpoint-every out"),
    ("--minutes 2", "--minutes 2 limits --check native; pass both, and a number above 0"),
    ("--device nowhere", "--device nowhere is not there"),
    ("--fast-backward --target h200", "--fast-backward extends --fast-accum to gradients"),
]


@pytest.mark.parametrize(("words", "message"), [*OPTIONS, *RECIPES, *MACHINES, *SYSTEMS, *CHECKS])
def test_what_is_refused(text, tmp_path, capsys, words, message):
    out = tmp_path / "out"
    assert main(["train", "--data", str(text), "--out", str(out), *SMALL.split(), *words.split()]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1 and printed.out == "" and not out.exists()
