# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other programs: their own dequantisation in every bit, lazily, and errors that name what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fmtsim
from fmtsim.casts.encoded import Encoded
from fmtsim.formats.tensor_file import TensorPlace, stored_tensor, write_tensors
from fmtsim.ptq.export.layouts import Reordered
from fmtsim.support.errors import ArgumentError, DataError
from tests.support.bits import assert_same_bits
from tests.support.refusals import refused

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
WRITERS = Path(__file__).with_name("other_writers.py")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def integers(low, high, *shape, seed=0, dtype=torch.uint8):
    return torch.randint(low, high, shape, generator=seeded(seed)).to(dtype)


def saved(folder, tensors, config=None, name="model.safetensors"):
    """Write tensors as a checkpoint's file, with a config.json."""
    folder.mkdir(exist_ok=True)
    write_tensors(folder / name, {key: stored_tensor(t) for key, t in tensors.items()}, {})
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def same(found, expected):
    """Every bit is equal; torch widens a float8 NaN to one of another payload."""
    assert_same_bits(found, torch.where(expected.isnan(), torch.nan, expected))


def nibbles(packed):
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()


def spread(scale, height, width, shape):
    return scale.repeat_interleave(height, -2).repeat_interleave(width, -1)[..., : shape[-2], : shape[-1]]


def test_a_float8_weight_without_scales_is_told_so(tmp_path):
    tensors = {"l.weight": torch.ones(4, 32).to(torch.float8_e4m3fn), "l.bias": torch.ones(4), "norm": torch.ones(4)}
    checkpoint = fmtsim.open_checkpoint(saved(tmp_path / "m", tensors))
    assert "m': 1 tensors of F8_E4M3 without scales, 2 other tensors)" in repr(checkpoint)
    with pytest.raises(ArgumentError, match="1 tensors of F8_E4M3 without scales, .* has no quantised weights"):
        fmtsim.lab.check_recode(tmp_path / "m", "nvfp4")


# Values, by what each source's own code computes


def test_gpt_oss_has_the_values_of_transformers_for_all_codes_and_scales(tmp_path):
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 1, 16).expand(1, 16, 255, 16)
    scales = torch.arange(255, dtype=torch.uint8).expand(1, 16, 255)
    bias = torch.ones(1, 16, dtype=torch.bfloat16)
    tensors = {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales, "e.down_proj_bias": bias}
    checkpoint = fmtsim.open_checkpoint(saved(tmp_path / "m", tensors, {"quant_method": "mxfp4"}))
    assert set(checkpoint) == {"e.down_proj", "e.down_proj_bias"} and len(checkpoint) == 2
    assert torch.equal(checkpoint["e.down_proj_bias"], bias) and checkpoint.layout("e.down_proj_bias") == ""
    assert "1 weights of gpt-oss, 1 other tensors" in repr(checkpoint) and "e.down_proj" in checkpoint
    weight = checkpoint["e.down_proj"]
    assert weight.format == fmtsim.get_format("mxfp4") and weight.shape == (1, 16, 255 * 32)
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    expected = mxfp4._convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    same(checkpoint.decode("e.down_proj"), expected)
    original = saved(tmp_path / "o", {"mlp1_weight.blocks": blocks[:, :4], "mlp1_weight.scales": scales[:, :4]})
    same(fmtsim.open_checkpoint(original).decode("mlp1_weight"), expected[:, :4])


@pytest.mark.parametrize("shape", [(256, 384), (300, 1000), (129, 128), (64, 64), (1, 130)])
def test_deepseek_v3_has_the_values_of_transformers_with_ragged_edges(shape, tmp_path):
    w = integers(0, 256, *shape).view(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=seeded(1)) * 2.0**-12
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    checkpoint = fmtsim.open_checkpoint(saved(tmp_path, {"l.weight": w, "l.weight_scale_inv": scale}, config))
    assert checkpoint.layout("l.weight") == "DeepSeek V3"
    found = checkpoint.decode("l.weight")
    same(found, w.float() * spread(scale, 128, 128, shape))  # DeepSeek-V3 9b4e978, inference/kernel.py
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    same(found, fp8._dequantize_fp8_weight(w, scale, [128, 128], torch.float32))


def test_deepseek_v4_has_the_values_of_transformers(tmp_path):
    dense = integers(0, 256, 256, 384).view(torch.float8_e4m3fn)
    dense_scale = integers(100, 140, 2, 3).view(torch.float8_e8m0fnu)
    expert = integers(0, 256, 64, 128, seed=2).view(torch.int8)
    expert_scale = integers(1, 250, 64, 8, seed=3).view(torch.float8_e8m0fnu)
    norm = torch.ones(3)
    tensors = {"attn.wq.weight": dense, "attn.wq.scale": dense_scale, "w1.weight": expert, "w1.scale": expert_scale,
               "hc.scale": norm, "hc.weight": norm}  # fmt: skip
    config = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    checkpoint = fmtsim.open_checkpoint(saved(tmp_path, tensors, config))
    assert (checkpoint["attn.wq.weight"].format.block, checkpoint["w1.weight"].format.name) == ((128, 128), "mxfp4")
    assert torch.equal(checkpoint["hc.scale"], norm) and set(checkpoint) == set(tensors) - {"attn.wq.scale", "w1.scale"}
    values = E2M1[nibbles(expert.view(torch.uint8))] * spread(expert_scale.float(), 1, 32, (64, 256))
    same(checkpoint.decode("w1.weight"), values)
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    own = fp8.Fp8Dequantize(None)._dequantize_one
    same(checkpoint.decode("attn.wq.weight"), own(dense, dense_scale, torch.float32))
    same(checkpoint.decode("w1.weight"), own(expert, expert_scale, torch.float32))


def test_compressed_tensors_own_files_have_its_values(tmp_path):
    python = os.environ.get("FMTSIM_READERS_PYTHON", sys.executable)
    imports = "import compressed_tensors, safetensors"
    if subprocess.run([python, "-W", "ignore", "-c", imports], capture_output=True).returncode:
        pytest.skip(f"{python} lacks compressed-tensors; FMTSIM_READERS_PYTHON names one that has it")
    subprocess.run([python, "-W", "ignore", WRITERS, tmp_path], check=True, capture_output=True)
    folders = [path for path in sorted(tmp_path.iterdir()) if path.is_dir()]
    assert len(folders) == 30
    for folder in folders:
        checkpoint = fmtsim.open_checkpoint(folder)
        assert list(checkpoint) == ["layers.0.proj.weight"] and "compressed-tensors" in repr(checkpoint)
        assert isinstance(checkpoint["layers.0.proj.weight"], Encoded)
        expected = torch.load(folder.with_suffix(".values"))
        same(checkpoint.decode("layers.0.proj.weight"), expected)


def packed_words(codes, bits):
    """Return a stream of bits along the last dimension, in words of 32: AutoGPTQ's and Quark's order."""
    stream = (codes[..., None].long() >> torch.arange(bits)) & 1
    words = stream.flatten(-2).unflatten(-1, (-1, 32))
    return (words << torch.arange(32)).sum(-1).to(torch.int32)


AWQ = [0, 2, 4, 6, 1, 3, 5, 7]  # column of each nibble: AutoAWQ 88e4c76, awq/modules/linear/gemm.py


def awq_words(codes):
    return packed_words(codes.unflatten(-1, (-1, 8))[..., AWQ].flatten(-2), 4)


@pytest.mark.parametrize("group", [64, 256])
def test_awq_has_autoawqs_values(group, tmp_path):
    codes, zeros = integers(0, 16, 256, 48), integers(0, 16, 256 // group, 48, seed=1)
    scales = torch.rand(256 // group, 48, generator=seeded(2)).half()
    tensors = {"l.qweight": awq_words(codes), "l.qzeros": awq_words(zeros), "l.scales": scales}
    config = {"quant_method": "awq", "bits": 4, "group_size": group if group < 256 else -1, "version": "gemm"}
    checkpoint = fmtsim.open_checkpoint(saved(tmp_path, tensors, config))
    points, factors = (t.repeat_interleave(group, 0) for t in (zeros.char(), scales))
    expected = (codes.char() - points) * factors  # packing_utils.dequantize_gemm: float16
    same(checkpoint.decode("l.weight"), expected.t())
    assert checkpoint["l.weight"].shape == (48, 256) and checkpoint["l.weight"].offsets is not None


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_has_autogptqs_values(bits, version, act_order, tmp_path):
    top, less = 2**bits, int(version == "gptq")
    codes, zeros = integers(0, top, 128, 64), integers(less, top, 4, 64, seed=1)
    scales = torch.rand(4, 64, generator=seeded(2)).half()
    index = torch.arange(128) // 32
    index = index[torch.randperm(128, generator=seeded(3))] if act_order else index
    words = packed_words(codes.t(), bits).t()
    tensors = {"l.qweight": words, "l.qzeros": packed_words(zeros.int() - less, bits), "l.scales": scales,
               "l.g_idx": index.int()}  # fmt: skip
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": version}
    checkpoint = fmtsim.open_checkpoint(saved(tmp_path, tensors, config))
    expected = scales[index] * (codes.short() - zeros.short()[index])  # AutoGPTQ 9f7d370, qlinear_cuda.py, forward
    same(checkpoint.decode("l.weight"), expected.t())
    assert isinstance(checkpoint["l.weight"], Reordered if act_order else Encoded)
    assert checkpoint["l.weight"].shape == (64, 128)


def test_modelopt_has_its_own_order_of_nvfp4s_scales(tmp_path):
    packed, scale = integers(0, 256, 64, 128), integers(1, 126, 64, 16, seed=1).view(torch.float8_e4m3fn)
    second = torch.tensor(0.00123)
    tensors = {"l.weight": packed, "l.weight_scale": scale, "l.weight_scale_2": second, "l.input_scale": second}
    folder = saved(tmp_path, tensors)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}')
    checkpoint = fmtsim.open_checkpoint(folder)
    codes = E2M1[nibbles(packed)].reshape(64, 16, 16)
    own = codes * (scale.float() * second)[..., None]  # Model-Optimizer a2fbac7, nvfp4_tensor.py, dequantize
    same(checkpoint.decode("l.weight"), own.flatten(1))
    once = (codes.double() * scale.double()[..., None] * second.double()).float().flatten(1)
    same(checkpoint["l.weight"].decode(), once)
    assert 0 < int((once != own.flatten(1)).sum()) < once.numel() / 4  # two orders, two roundings
    assert torch.equal(checkpoint["l.input_scale"], second)


def test_modelopts_int4_shares_bytes_between_rows(tmp_path):
    codes, scale = integers(-8, 8, 32, 256, dtype=torch.int8), torch.rand(32, 2, generator=seeded(1))
    packed = (codes[::2] & 15) | codes[1::2] << 4  # Model-Optimizer a2fbac7, quant_utils.py, pack_int4_in_uint8
    folder = saved(tmp_path, {"l.weight": packed.view(torch.uint8), "l.weight_scale": scale})
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W4A16_AWQ", "group_size": 128}}')
    expected = codes.float() * scale.repeat_interleave(128, 1)
    same(fmtsim.open_checkpoint(folder).decode("l.weight") + 0.0, expected + 0.0)


@pytest.mark.parametrize("scale", [torch.tensor(0.3), torch.rand(8), torch.rand(8, 1), torch.rand(2, 3)])
def test_float8_and_int8_have_a_scale_a_tensor_a_row_or_a_block(scale, tmp_path):
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        w = integers(0, 120, 8, 48).view(dtype)
        checkpoint = fmtsim.open_checkpoint(saved(tmp_path, {"l.weight": w, "l.weight_scale": scale}))
        grid = scale.reshape(-1, scale.shape[-1] if scale.dim() > 1 else 1)
        factors = spread(grid, 8 // grid.shape[0], 48 // grid.shape[1], (8, 48))
        same(checkpoint.decode("l.weight"), w.float() * factors)


@pytest.mark.parametrize("kind", ["int4", "uint4"])
@pytest.mark.parametrize("method", ["reorder", "order"])
def test_quarks_integers_have_its_values(kind, method, tmp_path):
    low = -8 if kind == "int4" else 0
    codes = integers(low, low + 16, 64, 256, dtype=torch.int8)
    zeros = integers(0, 16, 64, 2, seed=1) if kind == "uint4" else torch.zeros(64, 2, dtype=torch.uint8)
    scale = torch.rand(64, 2, generator=seeded(2))
    words = awq_words if method == "reorder" else lambda codes: packed_words(codes, 4)
    tensors = {"l.weight": words(codes.t() & 15), "l.weight_scale": scale.t(), "l.weight_zero_point": words(zeros.t())}
    spec = {"dtype": kind, "qscheme": "per_group", "group_size": 128}
    config = {"quant_method": "quark", "global_quant_config": {"weight": spec}, "export": {"pack_method": method}}
    checkpoint = fmtsim.open_checkpoint(saved(tmp_path, tensors, config))
    expected = (codes.float() - zeros.float().repeat_interleave(128, 1)) * scale.repeat_interleave(128, 1)
    same(checkpoint.decode("l.weight") + 0.0, expected + 0.0)


def test_stacked_experts_and_weights_that_are_not_quantised(tmp_path):
    w, scale = integers(0, 256, 4, 256, 128).view(torch.float8_e4m3fn), torch.rand(4, 2, 1)
    plain = torch.randn(4, 8).bfloat16()
    tensors = {"e.down_proj": w, "e.down_proj_scale_inv": scale, "l.weight": plain, "l.weight_scale": torch.ones(4)}
    checkpoint = fmtsim.open_checkpoint(saved(tmp_path, tensors))
    same(checkpoint.decode("e.down_proj"), w.float() * spread(scale, 128, 128, w.shape))
    assert torch.equal(checkpoint["l.weight"], plain)  # as models that quantise when they run have it


# Laziness


def test_opening_reads_headers_and_a_weight_its_own_tensors(tmp_path, monkeypatch):
    blocks, scales = integers(0, 256, 2, 8, 4, 16), integers(100, 130, 2, 8, 4)
    names = [f"{i}.{name}" for i in range(3) for name in ("w_blocks", "w_scales")]
    tensors = {name: blocks if name.endswith("blocks") else scales for name in names}
    folder = saved(tmp_path, tensors)
    reads = []
    read = TensorPlace.read
    monkeypatch.setattr(TensorPlace, "read", lambda place: reads.append(place.size) or read(place))
    checkpoint = fmtsim.open_checkpoint(folder)
    assert reads == []
    checkpoint["1.w"]
    assert sorted(reads) == [scales.numel(), blocks.numel()]


# Bad input


def two(scale=(2, 3), **config):
    tensors = {"l.weight": torch.zeros(256, 300, dtype=torch.float8_e4m3fn), "l.weight_scale_inv": torch.ones(*scale)}
    return tensors, config


def gptq(**parts):
    shapes = {"qweight": (16, 64), "qzeros": (4, 8), "scales": (4, 64), "g_idx": (128,)}
    tensors = {f"l.{n}": torch.zeros(s, dtype=torch.float16 if n == "scales" else torch.int32)
               for n, s in shapes.items()}  # fmt: skip
    return tensors | {f"l.{n}": t for n, t in parts.items()}, {"quant_method": "gptq", "bits": 4, "group_size": 32}


Z = torch.zeros
BAD = [
    (two((3, 3), weight_block_size=[128, 128]),
     r"model.safetensors: tensor 'l.weight_scale_inv' of shape \(3, 3\) is not a scale for each block of 128 x 128 of "
     r"a weight of 256 x 300; there are 2 x 3 blocks"),
    (two(weight_block_size=[64, 64]), r"block of 64 x 64 of a weight of 256 x 300; there are 4 x 5 blocks"),
    (two(weight_block_size=[0, 64]), r"config.json has 'weight_block_size': \[0, 64\]; it should be two whole numbers"),
    (({"l.weight": Z(256, 300, dtype=torch.int8), "l.weight_scale": Z(7, 3)}, None),
     r"'l.weight_scale' of shape \(7, 3\) is not a scale for each block of 0 x 100 of a weight of 256 x 300"),
    (({"l.weight": Z(2, 21, dtype=torch.uint8), "l.weight_scale": Z(2, 2, dtype=torch.uint8)}, None),
     r"'l.weight_scale' of shape \(2, 2\) is not a scale for each block of 1 x 32 of a weight of 2 x 42"),
    (({"l.weight_packed": Z(2, 16, dtype=torch.uint8), "l.weight_scale": Z(2, 1, dtype=torch.uint8)},
      {"quant_method": "compressed-tensors", "config_groups": {"a": {
          "targets": ["l"], "format": "mxfp6-pack-quantized",
          "weights": {"strategy": "channel", "num_bits": 6, "type": "float", "symmetric": True, "dynamic": False}}}}),
     r"tensor 'l.weight_packed' has rows of 16 bytes, no 6-bit codes"),
    (({"e.w": Z(3, 130, 128, dtype=torch.float8_e4m3fn), "e.w_scale_inv": Z(3, 2, 1)}, None),
     r"'e.w_scale_inv' of shape \(3, 2, 1\) is not a scale for each block of 128 x 128 of a weight of 3 x 130 x 128"),
    (({"w_blocks": Z(2, 4, 8, dtype=torch.uint8), "w_scales": Z(2, 4, dtype=torch.uint8)}, None),
     r"tensor 'w_blocks' has blocks of 8 bytes; MXFP4's have 16"),
    (({"w_blocks": Z(2, 4, 16, dtype=torch.uint8), "w_scales": Z(2, 5, dtype=torch.uint8)}, None),
     r"tensor 'w_scales' of shape \(2, 5\) is not a scale for each block of 'w_blocks', of which there are \(2, 4\)"),
    (({"w_blocks": Z(2, 4, 16, dtype=torch.uint8), "w_scales": Z(2, 4)}, None),
     r"tensor 'w_scales' is torch.float32 of shape \(2, 4\); expected torch.uint8, 1-d or 2-d or 3-d"),
    (({"l.weight": Z(4, 16, dtype=torch.uint8), "l.weight_scale": Z(4, 3, dtype=torch.float8_e4m3fn),
       "l.weight_scale_2": Z(2)}, None), r"tensor 'l.weight_scale_2' of shape \(2,\) is not one number"),
    (gptq(qweight=Z(16, 60, dtype=torch.int32)),
     r"'l.qweight' of shape \(16, 60\) has neither AWQ's nor GPTQ's words of 4 bits for 64 outputs, whose scales are"),
    (gptq(qzeros=Z(4, 7, dtype=torch.int32)), r"'l.qzeros' of shape \(4, 7\) is not 4 groups of 64 zero points of 4"),
    (gptq(g_idx=Z(120, dtype=torch.int32)), r"'l.g_idx' of 120 numbers from 0 to 0 is not the group, 0 to 3, of each"),
    (gptq(g_idx=torch.arange(128, dtype=torch.int32) // 64), r"'l.g_idx' has groups of 0 to 64 inputs; expected 32"),
    (gptq(scales=Z(8, 64).half(), qzeros=Z(8, 8, dtype=torch.int32)),
     r"'l.g_idx' has groups of 0 to 128 inputs; expected 16|is not a scale for each block of 1 x 32"),
    (({"l.weight": Z(64, 8, dtype=torch.int32), "l.weight_scale": Z(2, 64)}, {"quant_method": "quark"}),
     r"'l.weight' is torch.int32, and .*config.json does not say what it packs \(global_quant_config.weight.dtype is "),
]  # fmt: skip


@pytest.mark.parametrize(("checkpoint", "message"), BAD)
def test_tensors_that_do_not_fit_each_other_are_named_with_both_sizes(checkpoint, message, tmp_path):
    opened = fmtsim.open_checkpoint(saved(tmp_path, *checkpoint))
    refused(rf"{tmp_path}/.*{message}", lambda: [opened[name] for name in opened], error=DataError)


UNKNOWN = [
    ({"l.weight": Z(8, 8, dtype=torch.uint8), "l.weight.absmax": Z(4), "l.weight.quant_map": Z(16)},
     r"tensor 'l.weight' \(U8 \[8, 8\]\) is quantised in a way that is not known; 'l' has .weight, .weight.absmax, "
     r".weight.quant_map; they resemble bitsandbytes, which has "
     r".weight.quant_state.bitsandbytes__nf4 as well"),
    ({"l.weight": Z(4, 16, dtype=torch.uint8), "l.weight_scale": Z(4, 2), "l.weight_scale_2": Z(1)},
     r"'l' has .weight, .weight_scale, .weight_scale_2; BitNet or ModelOpt has such tensors under quant_method bitnet "
     r"or modelopt, and .* says 'none'"),
    ({"l.qweight": Z(8, 8, dtype=torch.int32), "l.scales": Z(4, 8)},
     r"tensor 'l.qweight' .*; 'l' has .qweight, .scales; they resemble AWQ or GPTQ, which has .qzeros as well"),
    ({"l.weight_packed": Z(8, 8, dtype=torch.uint8)},
     r"'l' has .weight_packed; they resemble compressed-tensors, which has .weight_scale as well"),
    ({"w_blocks": Z(8, 8, dtype=torch.uint8)}, r"'w' has _blocks; they resemble gpt-oss, which has _scales as well"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "message"), UNKNOWN)
def test_an_unknown_layout_is_told_what_it_resembles(tensors, message, tmp_path):
    refused(rf"model.safetensors: .*{message}", fmtsim.open_checkpoint, saved(tmp_path, tensors), error=DataError)


def test_numbers_whose_names_end_like_those_of_scales_are_tensors(tmp_path):
    tensors = {"attn.logit_scales": torch.ones(3), "x_scale_inv": torch.ones(1), "bert.blocks": torch.ones(2)}
    assert dict(fmtsim.open_checkpoint(saved(tmp_path, tensors)).items()).keys() == tensors.keys()


def test_truncated_and_missing_files_are_named(tmp_path):
    folder = saved(tmp_path / "m", {"l.weight": torch.zeros(64, 64), "b": torch.zeros(3)})
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for size, message in (
        (0, "0 bytes are too few for a safetensors file"), (100, "a header of [0-9]+ bytes is announced, 92 follow"),
        (len(content) - 5, "bytes of tensors, the header says 16396; it is truncated"),
    ):  # fmt: skip
        file.write_bytes(content[:size])
        refused(rf"{file}: .*{message}", fmtsim.open_checkpoint, folder, error=DataError)
    file.write_bytes(content)
    opened = fmtsim.open_checkpoint(file)
    file.write_bytes(content[:-2000])  # after it was opened
    refused(rf"{file}: [0-9]+ bytes at [0-9]+, where [0-9]+ belong; it was truncated",
            lambda: [opened[name] for name in opened], error=DataError)  # fmt: skip
    file.unlink()
    refused(rf"cannot read {file}: No such file", fmtsim.open_checkpoint, folder, error=DataError)
    refused(r"cannot read .*: No such file", opened.__getitem__, "l.weight", error=DataError)
    refused(r"path=3 is not a path; pass a checkpoint, a folder or a file", fmtsim.open_checkpoint, 3, error=DataError)


def test_a_wrong_index_or_config_is_named(tmp_path):
    folder = saved(tmp_path / "m", {"a": torch.zeros(2)}, name="x.safetensors")
    assert list(fmtsim.open_checkpoint(folder)) == ["a"]
    index = folder / "model.safetensors.index.json"
    for text, message in (
        ('{"weight_map": {"a": "../x"}}', r"'weight_map' is {'a': '../x'}; it should be names of files by tensors"),
        ("[]", r"'weight_map' is None; it should be"),
        ('{"weight_map": {"b": "x.safetensors"}}', r"tensor 'b' is not in x.safetensors, as 'weight_map' says"),
        ("{", r"is not a valid model.safetensors.index.json"),
    ):
        index.write_text(text)
        refused(rf"{index}.*{message}", fmtsim.open_checkpoint, folder, error=DataError)
    index.write_text('{"weight_map": {"a": "x.safetensors"}}')
    assert torch.equal(fmtsim.open_checkpoint(folder)["a"], torch.zeros(2))
    (folder / "config.json").write_text("[]")
    refused(r"config.json is \[\]; expected an object", fmtsim.open_checkpoint, folder, error=DataError)


def test_a_gguf_file_is_read_tensor_by_tensor(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "none")
    w = torch.randn(4, 64, generator=seeded()).numpy()
    blocks = gguf.quants.quantize(w, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("w", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("b", w[0])
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    checkpoint = fmtsim.open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.layout("w") == "GGUF Q8_0" and checkpoint.layout("b") == ""
    same(checkpoint.decode("w"), torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)))
    assert torch.equal(checkpoint["b"], torch.from_numpy(w[0]))


def test_a_group_may_name_the_class_of_layers_or_a_pattern(tmp_path):
    weights = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}
    w = torch.ones(8, 64).to(torch.float8_e4m3fn)
    groups = {
        "a": {"targets": ["Linear"], "format": "float-quantized", "weights": weights | {"strategy": "tensor"}},
        "b": {"targets": ["re:.*[.]k$"], "format": "float-quantized", "weights": weights | {"strategy": "channel"}},
        "c": {"targets": ["m.v"], "weights": weights | {"strategy": "group", "group_size": 32}},
    }
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    tensors = {f"m.{n}.weight": w for n in "qkv"}
    tensors |= {f"m.{n}.weight_scale": torch.ones(*shape) for n, shape in (("q", (1,)), ("k", (8, 1)), ("v", (8, 2)))}
    checkpoint = fmtsim.open_checkpoint(saved(tmp_path, tensors, config))
    blocks = {n: checkpoint[f"m.{n}.weight"].format.block for n in "qkv"}
    assert blocks == {"q": (None, None), "k": (1, None), "v": (1, 32)}
    groups["b"]["targets"] = ["re:("]
    checkpoint = fmtsim.open_checkpoint(saved(tmp_path, tensors, config))
    message = r"config.json: target 're:\(' is not a regular expression: "
    refused(message, checkpoint.__getitem__, "m.k.weight", error=DataError)
