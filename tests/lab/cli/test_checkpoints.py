# SPDX-License-Identifier: Apache-2.0
"""fmtsim convert-checkpoint: what they print, and what the folders that they write hold."""

import json

import pytest
import torch

import fmtsim
from fmtsim.formats.tensor_file import stored_tensor, write_tensors
from fmtsim.lab.cli import checkpoints
from fmtsim.lab.cli.main import main


@pytest.fixture
def folder(tmp_path):
    """A checkpoint as gpt-oss and DeepSeek V4 store MXFP4, in two weights, beside a plain one."""
    random = torch.Generator().manual_seed(0)
    draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=random).to(torch.uint8)  # noqa: E731
    tensors = {
        "e.w_blocks": draw(0, 256, 2, 8, 4, 16), "e.w_scales": draw(118, 124, 2, 8, 4),
        "q.weight": draw(0, 256, 64, 64).view(torch.int8),
        "q.scale": draw(118, 124, 64, 4).view(torch.float8_e8m0fnu), "n.weight": torch.randn(4, 64).bfloat16(),
    }  # fmt: skip
    (tmp_path / "m").mkdir()
    write_tensors(tmp_path / "m" / "model.safetensors", {n: stored_tensor(t) for n, t in tensors.items()}, {})
    (tmp_path / "m" / "config.json").write_text('{"hidden_size": 64, "quantization_config": {"quant_method": "fp8"}}')
    return tmp_path / "m"


def two_d(folder):
    """Leave out the stacked weight, which compressed-tensors has no place for."""
    tensors = {name: t for name, t in fmtsim.open_checkpoint(folder).items() if isinstance(t, torch.Tensor)}
    weight = fmtsim.open_checkpoint(folder)["q.weight"]
    tensors |= {"q.weight": weight.codes.view(torch.int8), "q.scale": weight.scales.view(torch.float8_e8m0fnu)}
    write_tensors(folder / "model.safetensors", {n: stored_tensor(t) for n, t in tensors.items()}, {})


def test_check_recode_prints_the_proof_and_the_blocks(folder, capsys):
    assert main(["convert-checkpoint", "mxfp4", "--to", "nvfp4"]) == 1
    assert "255 of 255 scales lose nothing" in capsys.readouterr().out
    assert main(["convert-checkpoint", "mxfp4", "--to", "mxfp8_e4m3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lossless"] is True
    assert main(["convert-checkpoint", str(folder), "--to", "nvfp4"]) == 0
    text = capsys.readouterr().out
    assert "loss: none\nby the rule alone: 320 blocks change, SQNR " in text
    assert main(["convert-checkpoint", str(folder), "--to", "e4m3"]) == 2
    assert "--to e4m3 has no scales; choose e4m3_channel or" in capsys.readouterr().err


def test_a_format_comes_before_a_folder_of_its_name(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mxfp4", "e4m3"):
        (tmp_path / name).symlink_to(folder)
    assert main(["convert-checkpoint", "mxfp4", "--to", "nvfp4"]) == 1
    text = capsys.readouterr().out
    assert "255 of 255 scales" in text and "mxfp4 is the format of this name; ./mxfp4 means the checkpoint" in text
    assert main(["convert-checkpoint", "./mxfp4", "--to", "nvfp4"]) == 0
    assert "loss: none" in capsys.readouterr().out
    assert main(["convert-checkpoint", "e4m3", "--to", "nvfp4"]) == 2
    assert "./e4m3 means the checkpoint: a=e4m3 has no scales" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "fmt", "scales"),
    [
        ("deepseek", "e4m3_8x32", "own"), ("gpt-oss", "mxfp4", "rule"), ("compressed-tensors", "nvfp4", "own"),
        ("compressed-tensors", "mxfp8_e4m3", "own"), ("compressed-tensors", "int8_channel", "rule"),
    ],
)  # fmt: skip
def test_a_converted_checkpoint_holds_what_the_format_has(layout, fmt, scales, folder, capsys):
    if layout == "compressed-tensors":
        two_d(folder)
    out = folder.parent / "new" / "out"
    words = ["convert-checkpoint", str(folder), "--to", fmt, "--out", str(out), "--layout", layout, "--scales", scales]
    assert main(words) == 0
    weights = 1 if layout == "compressed-tensors" else 2
    assert f"{out}: {weights} weights in " in capsys.readouterr().out
    before, after = fmtsim.open_checkpoint(folder), fmtsim.open_checkpoint(out)
    assert set(before) == set(after) and list(out.parent.iterdir()) == [out]
    assert json.loads((out / "config.json").read_text())["hidden_size"] == 64
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(after[name], value)
            continue
        expected = value.decode()
        if scales == "rule" and fmt != "mxfp4":
            expected = fmtsim.quantize(expected, fmt)
        assert torch.equal(after[name].decode(), expected)
        if fmt == "mxfp4":  # the format that it has: codes and scales stay
            assert torch.equal(after[name].codes, value.codes) and torch.equal(after[name].scales, value.scales)


def test_scales_that_lose_nothing_are_the_default_and_the_rule_says_what_it_costs(folder, capsys):
    two_d(folder)
    for number, (words, said) in enumerate((
        ((), "loss: none\nby the rule alone: 256 blocks change, SQNR "),
        (("--scales", "rule"), "1 of them would lose nothing under their own scales (--scales own)"),
    )):  # fmt: skip
        out = folder.parent / f"out{number}"
        assert main(["convert-checkpoint", str(folder), "--to", "nvfp4", "--out", str(out), *words]) == 0
        assert said in capsys.readouterr().out
        before, after = (fmtsim.open_checkpoint(path)["q.weight"].decode() for path in (folder, out))
        assert torch.equal(before, after) is not bool(words)


def test_weights_that_are_not_quantised_are_named_by_a_pattern(folder, capsys):
    out = folder.parent / "out"
    two_d(folder)
    assert (
        main(["convert-checkpoint", str(folder), "--to", "mxfp4", "--out", str(out), "--weights", "^n[.]", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["weights"] == 2
    plain = fmtsim.open_checkpoint(folder)["n.weight"]
    assert torch.equal(fmtsim.open_checkpoint(out)["n.weight"].decode(), fmtsim.quantize(plain.float(), "mxfp4"))


def test_what_cannot_be_converted_leaves_no_folder(folder, capsys):
    (folder.parent / "plain").mkdir()
    write_tensors(folder.parent / "plain" / "model.safetensors", {"a": stored_tensor(torch.ones(2))}, {})
    for source, fmt, more, message in (
        (folder, "nvfp4", (), r"--layout compressed-tensors has no place for 'e.w' of shape (2, 8, 128) in nvfp4"),
        (folder, "e4m3", (), "--to e4m3 has no scales; choose e4m3_channel or"),
        (folder, "mxfp4", ("--weights", "("), "--weights ( is not a regular expression"),
        (folder.parent / "plain", "nvfp4", (), "has no quantised weight; name weights by --weights"),
        (folder.parent / "no", "nvfp4", (), "cannot read"),
    ):
        words = ["convert-checkpoint", str(source), "--to", fmt, "--out", str(folder.parent / "out"), *more]
        assert main(words) == 2
        assert message in capsys.readouterr().err
        assert sorted(path.name for path in folder.parent.iterdir()) == ["m", "plain"]
    for option in ("--weights", "--ignore"):
        assert main(["convert-checkpoint", str(folder), "--to", "mxfp4", option, "a"]) == 2
        assert "choose what is written; pass --out DIR, or leave them out" in capsys.readouterr().err
    assert main(["convert-checkpoint", str(folder), "--to", "mxfp4", "--out", str(folder)]) == 2
    assert f"--out {folder} is there already; name a folder that does not exist yet" in capsys.readouterr().err


@pytest.fixture
def blocks(tmp_path):
    """A checkpoint as DeepSeek V3 stores E4M3: one block under a scale that is no power of two, and a matrix of 40."""
    tensors = {"l.weight": torch.ones(128, 128), "m.weight": torch.ones(8, 40)}
    tensors["l.weight"][0, 0] = 448
    tensors = {name: w.to(torch.float8_e4m3fn) for name, w in tensors.items()}
    tensors |= {"l.weight_scale_inv": torch.tensor([[0.75]]), "m.weight_scale_inv": torch.tensor([[0.5]])}
    (tmp_path / "d").mkdir()
    write_tensors(tmp_path / "d" / "model.safetensors", {n: stored_tensor(t) for n, t in tensors.items()}, {})
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "d" / "config.json").write_text(json.dumps({"quantization_config": method}))
    return tmp_path / "d"


@pytest.mark.parametrize("words", ["e4m3_128x128_pow2", "e4m3_128x128_pow2 --layout deepseek", "mxfp8_e4m3"])
def test_scales_that_are_carried_over_go_up_and_saturate_nothing(words, blocks, capsys):
    out = blocks.parent / "out"
    words = f"convert-checkpoint {blocks} --out {out} --scales own --ignore ^m[.] --to {words}"
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    assert "loss: 1 blocks change, SQNR " in text and "largest relative error 0.0476" in text  # 336 becomes 320
    assert text.endswith("\nread back: all 2 tensors have the bits that were meant\n")
    after = fmtsim.open_checkpoint(out)
    assert after["l.weight"].decode()[0, :2].tolist() == [320, 0.75]  # 336 is a tie of 320 and 352, the scale is 1
    assert torch.equal(after["m.weight"].float(), torch.full((8, 40), 0.5))


def test_a_weight_without_a_common_multiple_says_that_it_has_new_scales(blocks, capsys):
    out = blocks.parent / "out"
    words = ["convert-checkpoint", str(blocks), "--to", "nvfp4", "--out", str(out), "--scales", "own"]
    assert main(words) == 2
    assert "'m': blocks of (1, 16) do not divide 8 x 40; leave the layer out with --ignore" in capsys.readouterr().err
    assert main([*words, "--ignore", "("]) == 2
    assert "--ignore ( is not a regular expression" in capsys.readouterr().err and not out.exists()
    assert main([*words, "--ignore", "^m[.]"]) == 0
    said = "--scales rule, as own cannot be carried over: l.weight (nvfp4 has no multiple of their elements"
    assert said in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["quantization_config"]["ignore"] == ["m"]


def test_a_planted_error_in_what_is_written_is_seen(folder, capsys, monkeypatch):
    two_d(folder)
    store = checkpoints.stored_tensor
    monkeypatch.setattr(checkpoints, "stored_tensor", lambda t: store(t ^ 1 if t.dtype == torch.uint8 else t))
    assert main(["convert-checkpoint", str(folder), "--to", "nvfp4", "--out", str(folder.parent / "out")]) == 2
    said = "what was written does not read back as it was meant: q.weight; the files are gone"
    assert said in capsys.readouterr().err
    assert [path.name for path in folder.parent.iterdir()] == ["m"]
