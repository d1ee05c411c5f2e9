# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are read by what their configs, headers and markers say: the methods people have, read or refused."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.formats.packing import swizzled
from fmtsim.formats.tensor_file import StoredTensor, stored_tensor, write_tensors
from fmtsim.ptq.export.catalogue import LAYOUTS
from fmtsim.support.errors import DataError
from tests.support.refusals import refused

F8, U8, I8, I32 = torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32
NF4 = fmtsim.decode(torch.arange(16).byte(), "nf4")


def saved(folder, tensors, config=None, metadata=None, name="model.safetensors", config_name="config.json"):
    folder.mkdir(exist_ok=True)
    write_tensors(folder / name, {key: stored_tensor(t) for key, t in tensors.items()}, metadata or {})
    if config is not None:
        config = {"quantization_config": config} if config_name == "config.json" else config
        (folder / config_name).write_text(json.dumps(config))
    return folder


def by(method, **fields):
    return {"quant_method": method, **fields}


def words(*numbers):
    return torch.tensor([n - (n >> 31 << 32) for n in numbers], dtype=I32)


def zeros(*shape, dtype=U8):
    return torch.zeros(*shape, dtype=dtype)


def text(record):
    return torch.tensor(list(json.dumps(record).encode()), dtype=U8)


ONES = torch.ones(4, 8).to(F8)
PACKED = {"l.qweight": words(*[0x88888888] * 16).view(2, 8), "l.qzeros": words(0x77777777, 0x77777777).view(2, 1),
          "l.scales": torch.ones(2, 8).half()}  # fmt: skip
WORDS = {"l.qweight": words(*[0x88888888] * 16).view(16, 1), "l.qzeros": words(0x77777777).view(1, 1),
         "l.scales": torch.ones(1, 8).half()}  # fmt: skip
BYTES = torch.tensor([[0x46, 0x81], [0x29, 0x64]], dtype=U8)
# transformers 5.23, unpack_weights of BYTES
TERNARY = torch.tensor([[1, 0], [0, -1], [0, -1], [1, 0], [-1, -1], [1, 1], [0, 1], [-1, 0]])
STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [1, 64]}
NESTED = {"nested_blocksize": 256, "nested_offset": 0.5, "nested_dtype": "float32"}
BNB = {
    "l.weight": torch.tensor([[0xF0]] * 32, dtype=U8),
    "l.weight.absmax": torch.tensor([2.0]),
    "l.weight.quant_map": NF4,
}
KEPT = {"l.weight": torch.ones(4, 8)}
READ = {  # name: tensors, config.json, values or their set (by definition, where no source is named)
    "bitnet autobitlinear": ({"l.weight": BYTES, "l.weight_scale": torch.tensor([0.5]).bfloat16()},
                             by("bitnet", linear_class="autobitlinear"), TERNARY * 0.5),
    "bitnet bitlinear": ({"l.weight": BYTES, "l.weight_scale": torch.tensor([0.5]).bfloat16()}, by("bitnet"),
                         TERNARY * 2.0),
    "bitnet online": (KEPT, by("bitnet", quantization_mode="online"), torch.ones(4, 8)),
    "w4afp8": ({"l.weight": torch.full((4, 128), 0x1F, dtype=I8), "l.weight_scale_inv": torch.full((4, 2), 0.5),
                "l.input_scale": torch.ones(1)}, by("w4afp8"), torch.tensor([-0.5, 0.5]).repeat(4, 128)),
    "mistral": ({"l.weight": ONES, "l.qscale_weight": torch.tensor(0.25), "l.qscale_act": torch.tensor(2.0)}, {}, 0.25),
    "comfyui": ({"l.weight": ONES, "l.scale_weight": torch.tensor(0.25), "scaled_fp8": zeros(2).to(F8)}, None, 0.25),
    "fbgemm": ({"l.weight": ONES, "l.weight_scale": torch.full((4, 1), 0.5), "l.input_scale_ub": torch.ones(1)},
               by("fbgemm_fp8"), 0.5),
    "llama 4 gate_up": ({"e.gate_up_proj": torch.ones(2, 3, 4).to(F8), "e.gate_up_proj_scale":
                         torch.arange(8.0).view(2, 1, 4)}, {}, torch.arange(8.0).view(2, 1, 4).expand(2, 3, 4)),
    "llama 4 down": ({"e.down_proj": torch.ones(2, 4, 4).to(F8), "e.down_proj_scale": torch.arange(8.0).view(2, 4, 1)},
                     by("fbgemm_fp8"), torch.arange(8.0).view(2, 1, 4).expand(2, 4, 4)),
    "e4m3fnuz": ({"l.weight": torch.full((4, 8), 240.0).to(torch.float8_e4m3fnuz), "l.weight_scale":
                  torch.ones(1)}, None, 240.0),
    "nf4": (BNB | {"l.weight.quant_state.bitsandbytes__nf4": text(STATE)}, by("bitsandbytes"),
            torch.tensor([2.0, -2.0]).repeat(1, 32).bfloat16()),
    "nf4, scales quantised": (
        BNB | {"l.weight.absmax": torch.tensor([3], dtype=U8), "l.weight.nested_absmax": torch.tensor([6.0]),
               "l.weight.nested_quant_map": torch.arange(256) / 12, "l.weight.quant_state.bitsandbytes__nf4":
               text(STATE | NESTED)}, by("bitsandbytes"), torch.tensor([2.0, -2.0]).repeat(1, 32).bfloat16()),
    "fp4 over rows": ({"l.weight": torch.full((75, 1), 0x3B, dtype=U8), "l.weight.absmax": torch.tensor([1.0, 2, 4]),
                       "l.weight.quant_map": fmtsim.decode(torch.arange(16).byte(), "bnb_fp4"),
                       "l.weight.quant_state.bitsandbytes__fp4": text(STATE | {"shape": [3, 50], "dtype": "float32"})},
                      by("bitsandbytes"),
                      (torch.tensor([1.0, -1.0]).repeat(75) * torch.tensor([1.0, 2, 4]).repeat_interleave(64)[:150])
                      .view(3, 50)),
    "bnb int8": ({"l.weight": torch.full((2, 4), 127, dtype=I8), "l.SCB": torch.tensor([0.5, 1.5]),
                  "l.weight_format": torch.tensor(0, dtype=U8)}, by("bitsandbytes", load_in_8bit=True),
                 torch.tensor([[0.5], [1.5]]).expand(2, 4)),  # int8_vectorwise_dequant of bitsandbytes 0.50.2
    "auto-round awq": (WORDS, by("auto-round", packing_format="auto_round:auto_awq", bits=4), 1.0),
    "auto-round own": (PACKED, by("auto-round", packing_format="auto_round", sym=False), 1.0),
    "awq of transformers 5": (WORDS, by("awq", bits=4, group_size=-1, format="gemm", backend="auto"), 1.0),
    "gptq_v2 by format": (PACKED, by("gptq", bits=4, group_size=8, format="gptq_v2", sym=False), 1.0),
    "quantize_config of 2023": (PACKED, {"bits": 4, "group_size": 8, "sym": True}, 0.0),
    "modelopt awq": ({"l.weight": torch.full((4, 16), 0x22, dtype=U8), "l.weight_scale": torch.ones(4, 2).to(F8),
                      "l.weight_scale_2": torch.tensor(0.5), "l.pre_quant_scale": torch.tensor([1.0, 2.0] * 16)},
                     by("modelopt", quant_algo="NVFP4_AWQ"), torch.tensor([0.5, 1.0]).repeat(4, 16)),
    "ptpc fp8": ({"l.weight": ONES, "l.weight_scale": torch.full((4, 1), 0.5)}, by("ptpc_fp8"), 0.5),
}  # fmt: skip


@pytest.mark.parametrize("method", READ)
def test_a_method_is_read_with_its_sources_own_bits(method, tmp_path):
    tensors, config, expected = READ[method]
    file = "quantize_config.json" if "2023" in method else "config.json"
    checkpoint = fmtsim.open_checkpoint(saved(tmp_path / "m", tensors, config, config_name=file))
    name = next((key for key in checkpoint if checkpoint.layout(key)), "l.weight")
    values = checkpoint.decode(name)
    expected = torch.as_tensor(expected, dtype=values.dtype).expand(values.shape)
    assert torch.equal(values, expected) and checkpoint[name].shape == values.shape
    if method.startswith(("bitnet a", "bitnet b", "nf4")):
        assert values.dtype == torch.bfloat16


GROUP = {"targets": ["Linear"], "format": "float-quantized", "weights": {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}}  # fmt: skip
CT = {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}}
FLOAT8 = {"l.weight": ONES, "l.weight_scale": torch.full((4, 1), 0.5)}
X = torch.ones(4)
REFUSED = {  # name: tensors, config.json, message
    "mlx": ({"l.weight": zeros(1, 8, dtype=torch.uint32), "l.scales": X, "l.biases": X},
            {"group_size": 64, "bits": 4, "mode": "affine"},
            r"l.weight, l.scales are MLX's \(mode affine, bits 4\), which is not read; convert it by `mlx_lm.conve"),
    "hqq": ({"l.W_q": zeros(8, 8), "l.scale": X, "l.zero": X}, None, r"l.W_q, l.scale are HQQ's, .* save the values"),
    "quanto": ({"l.weight._data": zeros(4, 4, dtype=I8), "l.weight._scale": X}, None, r"l.weight._scale are Quanto's"),
    "marlin": ({"l.B": zeros(4, 4, dtype=I32), "l.s": X}, by("marlin"), r"l.B, l.s are Marlin's"),
    "aqlm": ({"l.codes": zeros(4, 4, dtype=I8), "l.codebooks": X, "l.scales": X}, by("aqlm"), r"AQLM's"),
    "exl2": ({"l.q_weight": zeros(4, 4, dtype=I32), "l.q_scale": zeros(4, 1, dtype=I32)}, None, r"EXL2's"),
    "exl3": ({"l.trellis": zeros(4, 4, dtype=torch.int16), "l.suh": X}, by("exl3"), r"EXL3's"),
    "quip": ({"l.Qidxs": zeros(4, 4, dtype=torch.int64), "l.SU": X}, None, r"QuIP#'s, .* open the checkpoint that"),
    "vptq": ({"l.indices": zeros(1, 4, dtype=I32), "l.centroids.weight": X}, by("vptq"), r"VPTQ's"),
    "spqr": ({"l.dense_weights": zeros(16, dtype=torch.int64), "l.row_offsets": zeros(5, dtype=I32)}, None, r"SpQR's"),
    "fp_quant": ({"l.qweight": zeros(4, 4), "l.scales": zeros(4, 1)}, by("fp_quant"), r"FP-Quant's"),
    "eetq": ({"l.weight": zeros(4, 4, dtype=I8), "l.weight_scales": X}, by("eetq"), r"EETQ's"),
    "higgs": ({"l.weight": zeros(4, 4, dtype=torch.int16), "l.scales": X, "l.tables": X}, None, r"HIGGS's"),
    "svdquant": ({"l.qweight": zeros(4, 4, dtype=I8), "l.wscales": X, "l.lora_down": X}, None, r"SVDQuant's"),
    "bitmask": ({"l.compressed": X, "l.bitmask": zeros(4, 1)}, CT, r"l.bitmask are sparse bitmask's"),
    "a method without its names": (KEPT, by("sinq"), r"config.json: weights are SINQ's \(quant_method sinq\)"),
    "unknown": ({"l.x": zeros(2, 2, dtype=I32)}, by("mine"),
                r"weights, as l.x \(I32\) are of quant_method 'mine', which is not known; read are auto-round, awq, "),
    "no text": (KEPT, {"quant_method": 3}, r"config.json has 'quant_method': 3; it should be text"),
    "not a dict": (KEPT, 3, r"config.json has 'quantization_config': 3; it should be a dict"),
    "awq gemv": (PACKED, by("awq", version="gemv"),
                 r"config.json has 'version': 'gemv' for layer 'l'; awq is read with 'gemm': quantise again, or"),
    "awq of llm-awq": (PACKED, by("awq", backend="llm-awq"), r"config.json has 'backend': 'llm-awq' for layer 'l'"),
    "gptq marlin": (PACKED, by("gptq", checkpoint_format="marlin"), r"is read with 'gptq' or 'gptq_v2'"),
    "auto-round mx": (PACKED, by("auto-round", packing_format="auto_round:llm_compressor"),
                      r"quant_method 'auto-round:llm_compressor', which is not known"),
    "gptq without a config": (PACKED, None, r"AWQ or GPTQ has such tensors under quant_method awq or auto-round or"),
    "left out": (PACKED, {"quant_method": "gptq", "dynamic": {"-:l": {}}}, r"dynamic leaves 'l' out by '-:l', and th"),
    "no regex": (PACKED, {"quant_method": "gptq", "dynamic": {"(": {}}}, r"dynamic has '\(', which is not a regular"),
    "no rules": (PACKED, {"quant_method": "gptq", "dynamic": {"l": 3}}, r"config.json: its quantisation has 'dynamic'"),
    "transform": (FLOAT8, CT | {"transform_config": {"config_groups": {"R1": {}}}},
                  r"transform_config rotates weights \('R1'\), which is not undone; export the model without"),
    "sparse": (FLOAT8, CT | {"sparsity_config": {"format": "sparse-24"}}, r"'format': 'sparse-24', which is not read"),
    "low rank": (FLOAT8 | {"l.lora_A.weight": X}, by("fp8"),
                 r"layer 'l' is .*FBGEMM's \(quant_method 'fp8'\) but for 'l.lora_A.weight', which its reader does "),
    "a factor": (FLOAT8 | {"l.smooth_scale": X}, None, r"layer 'l' is .* but for 'l.smooth_scale', which"),
    "act-order of awq": (PACKED | {"l.g_idx": zeros(16, dtype=I32)}, by("awq"), r"AWQ's .* for 'l.g_idx'"),
    "stacked": ({"e.w": zeros(2, 8, 8).to(F8), "e.w_scale_inv": torch.ones(2, 1, 1), "e.w_zero": X}, None,
                r"layer 'e.w' is DeepSeek V3's \(quant_method ''\) but for 'e.w_zero'"),
    "spelt otherwise": ({"l.kept": zeros(4, 4), "l.SCALES": X}, None, r"'l.kept' \(U8 .*; 'l' has .SCALES, .kept"),
    "float8 beside a scale": ({"l.w": ONES, "l.wScale": X}, None, r"tensor 'l.w' \(F8_E4M3 \[4, 8\]\) is quantis"),
    "codebook": ({"l.idx": zeros(4, 4, dtype=torch.int16), "l.code_book": X}, None, r"tensor 'l.idx' \(I16"),
    "float8 without its scale": ({"l.weight": ONES}, by("fp8"), r"'l.weight' \(F8_E4M3 \[4, 8\]\) is quantis"),
    "one scale of two": ({"l.weight": zeros(4, 8), "l.weight_scale": ONES}, None,
                         r"they resemble ModelOpt, which has .weight_scale_2 as well"),
    "bytes under real scales": ({"l.weight": zeros(4, 4), "l.weight_scale": X}, None,
                                r"BitNet or ModelOpt has such tensors under quant_method bitnet or modelopt, and"),
    "marker": (FLOAT8 | {"l.comfy_quant": text({"format": "int8_convrot"})}, None,
               r"layer 'l': its marker says format 'int8_convrot'; read are nvfp4, fp8, float8_e4m3fn and float8_e5m2"),
    "marker of no record": (FLOAT8 | {"l.comfy_quant": text([3])}, None, r"'l.comfy_quant' is \[3\]; expected an obj"),
    "no state": (BNB | {"l.weight.quant_state.bitsandbytes__nf4": zeros(4)}, None, r"bitsandbytes__nf4' is not JSON"),
    "state": (BNB | {"l.weight.quant_state.bitsandbytes__nf4": text({})}, None, r"its record has no 'shape'"),
    "no record": ({"l._weight_qdata": zeros(4, 4, dtype=I8), "l._weight_scale": X}, by("torchao"),
                  r"'l.weight': no header has torchao's record of it, which tells its class; save the model again"),
}  # fmt: skip


@pytest.mark.parametrize("method", REFUSED)
def test_a_method_that_is_not_read_is_refused_by_name_on_opening(method, tmp_path):
    tensors, config, message = REFUSED[method]
    place = saved(tmp_path / "m", tensors, config)
    refused(rf"{place}/.*{message}", fmtsim.open_checkpoint, place, error=DataError)


def test_every_record_says_what_it_was_compared_with():
    described = [layout for layout in LAYOUTS if layout.holds]
    assert {layout.name for layout in LAYOUTS} == {layout.name for layout in described} | {"ModelOpt or Quark",
            "ModelOpt, Quark or FBGEMM"} and all(layout.source for layout in described)  # fmt: skip
    assert all(layout.methods for layout in LAYOUTS) and len({layout.name for layout in described}) >= 24


POSITIONS = torch.arange(6).view(1, 6)
ORDINARY = {
    "bert": {"e.position_ids": POSITIONS, "e.token_type_ids": POSITIONS, "e.w.weight": X},
    "swin": {"a.logit_scale": X, "a.relative_position_index": POSITIONS, "a.relative_coords_table": X},
    "clip": {"logit_scale": torch.tensor(4.6), "position_ids": POSITIONS, "layer_scale_parameter": X, "l.gamma": X},
    "resnet": {"n.weight": X, "n.num_batches_tracked": torch.tensor(3), "n.scale": X},
    "gate": {"gate.weight": X.bfloat16(), "gate.tid2eid": POSITIONS, "gate.e_score_correction_bias": X, "inv_freq": X},
    "gpt2": {"a.bias": zeros(1, 1, 4, 4), "a.masked_bias": torch.tensor(-1e9), "a.c_attn.weight": X},
    "float8 without scales": {"l.weight": ONES, "l.bias": X},
    "quantised when it runs": {"l.weight": X, "l.weight_scale": X, "table.token_ids": POSITIONS, "table.scale": X},
}  # fmt: skip


@pytest.mark.parametrize("model", ORDINARY)
@pytest.mark.parametrize("config", [None, {"quant_method": "fp8", "weight_block_size": [128, 128]}])
def test_ordinary_integers_and_factors_are_tensors(model, config, tmp_path):
    tensors = ORDINARY[model]
    config = None if model.startswith("float8") else config
    checkpoint = fmtsim.open_checkpoint(saved(tmp_path / "m", tensors, config))
    assert set(checkpoint) == set(tensors) and all(torch.equal(checkpoint[name], t) for name, t in tensors.items())


def test_tags_without_a_dtype_are_refused_and_those_of_torch_are_read(tmp_path):
    write_tensors(tmp_path / "a.safetensors", {"x": StoredTensor("F6_E3M2", (4,), b"000")}, {})
    refused(r"a.safetensors: tensor 'x' is F6_E3M2; expected one of", fmtsim.open_checkpoint, tmp_path, error=DataError)
    numbers = {f"{i}": torch.tensor([7, 9]).to(t) for i, t in enumerate((torch.uint16, torch.uint32, torch.uint64))}
    opened = fmtsim.open_checkpoint(saved(tmp_path / "m", numbers))
    assert all(opened[name].dtype == t.dtype and opened[name].tolist() == [7, 9] for name, t in numbers.items())


# GPTQ: which zero point is stored


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2", None])
def test_symmetric_zero_points_say_their_version(bits, form, tmp_path):
    def opened(point, symmetric, name):
        stream = sum(point << bits * i for i in range(32))  # 32 points, `bits` words
        row = words(*(stream >> 32 * i & 0xFFFFFFFF for i in range(bits)))
        middle = sum((1 << bits - 1) << bits * i for i in range(32))
        codes = words(*(middle >> 32 * i & 0xFFFFFFFF for i in range(bits)))
        zeros, qweight = row.view(1, -1), codes.view(-1, 1).repeat(1, 32)
        tensors = {"l.qweight": qweight, "l.qzeros": zeros, "l.scales": torch.ones(1, 32)}
        folder = saved(tmp_path / name, tensors, by("gptq", bits=bits, checkpoint_format=form, sym=symmetric))
        return lambda: fmtsim.open_checkpoint(folder).decode("l.weight").unique().tolist()

    middle, later = 1 << bits - 1, form == "gptq_v2"
    assert opened(middle, True, "a")() == opened(middle - 1, True, "b")() == [0]
    assert opened(middle, False, "c")() == [-(not later)] and opened(middle - 1, False, "d")() == [int(later)]
    both = rf"version 1 \(gptq\) stores {middle - 1}, version 2 \(gptq_v2\) {middle}; set 'sym' to false and"
    refused(rf"l.qzeros' has zero points of 0 to 0, .* of {bits} symm.*{both}", opened(0, True, "e"), error=DataError)
    refused(both, opened(middle - 1 if later else middle, None, "f"), error=DataError)


@pytest.mark.parametrize("rules", [
    by("gptq", dynamic={"+:.*[.]down$": {"bits": 8, "group_size": 64}, "l.down": {"bits": 2}}),
    by("auto-round", extra_config={"l.up": {"bits": 2}, "l.down": {"bits": 8, "group_size": 64}}),
    by("auto-round", extra_config={r".*\.down": {"bits": 8, "group_size": 64}}),
])  # fmt: skip
def test_rules_of_layers_change_bits_and_groups(rules, tmp_path):
    tensors = {"l.down.qweight": words(*[0x80808080] * 64 * 8).view(64, 8), "l.down.scales": torch.ones(4, 8),
               "l.down.qzeros": words(*[0x7F7F7F7F] * 8).view(4, 2)}  # fmt: skip
    opened = fmtsim.open_checkpoint(
        saved(tmp_path / "m", tensors, rules | {"bits": 4, "group_size": 128, "sym": False})
    )
    assert opened["l.down.weight"].shape == (8, 256) and opened.decode("l.down.weight").unique().tolist() == [0]


def test_one_row_of_words_is_read(tmp_path):
    tensors = {"l.qweight": words(*[0x88888888] * 8).view(1, 8), "l.qzeros": words(0x77777777).view(1, 1),
               "l.scales": torch.ones(1, 8)}  # fmt: skip
    opened = fmtsim.open_checkpoint(saved(tmp_path, tensors, by("gptq", bits=4, group_size=8)))
    assert opened.decode("l.weight").tolist() == torch.zeros(8, 8).tolist()


# compressed-tensors


def packed(**more):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 4, "dynamic": False}
    group = {"targets": ["Linear"], "format": "pack-quantized", "weights": weights | more}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": group}}


def test_act_order_of_compressed_tensors_is_applied(tmp_path):
    tensors = {"l.weight_packed": words(0x99999999).view(1, 1), "l.weight_scale": torch.tensor([[1.0, 10.0]]),
               "l.weight_shape": torch.tensor([1, 8]), "l.weight_g_idx": words(*[0, 1] * 4)}  # fmt: skip
    opened = fmtsim.open_checkpoint(saved(tmp_path / "m", tensors, packed()))
    assert opened.decode("l.weight").tolist() == [[1, 10] * 4]  # compressed-tensors 0.12.2, dequantize(..., g_idx=)
    tensors["l.weight_g_idx"] = torch.full((8,), -1, dtype=I32)
    opened = fmtsim.open_checkpoint(saved(tmp_path / "n", tensors, packed()))
    assert opened.decode("l.weight").tolist() == [[1] * 4 + [10] * 4]


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("version", ["0.12.2", "0.17.0", "0.18.0", "0.20.1", None])
def test_both_packings_of_odd_widths_are_read_by_the_version(bits, version, tmp_path):
    for columns in (16, 30, 100, 128):
        codes = torch.randint(0, 1 << bits, (columns,), generator=torch.Generator().manual_seed(columns)).tolist()
        each, total = 32 // bits, sum(c << bits * i for i, c in enumerate(codes))
        old = [sum(c << bits * i for i, c in enumerate(codes[k : k + each])) for k in range(0, columns, each)]
        new = [total >> 32 * i & 0xFFFFFFFF for i in range(-(-columns * bits // 32))]
        for writer, stream in (("old", old), ("new", new)):
            if version is not None and (writer == "old") != (version < "0.18"):
                continue
            tensors = {"l.weight_packed": words(*stream).view(1, -1), "l.weight_scale": torch.ones(1, 1),
                       "l.weight_shape": torch.tensor([1, columns])}  # fmt: skip
            config = packed(num_bits=bits, strategy="channel") | ({"version": version} if version else {})
            opened = fmtsim.open_checkpoint(saved(tmp_path / "m", tensors, config))
            if version is None and len(old) == len(new):
                message = r"words are those of two packings of \d bits, .*; write 'version' into"
                refused(message, opened.decode, "l.weight", error=DataError)
            else:
                assert opened.decode("l.weight")[0].tolist() == [c - (1 << bits - 1) for c in codes]


def test_groups_that_say_nothing_of_weights_stop_nothing(tmp_path):
    other = {"targets": ["LlamaAttention"], "format": None, "input_activations": {"num_bits": 8}}
    naive = {"targets": ["Linear"], "format": "naive-quantized", "weights": GROUP["weights"]}
    for number, config in enumerate((
        CT | {"config_groups": {"a": GROUP, "b": other | {"weights": None}, "c": other}},
        CT | {"config_groups": {"a": naive}, "sparsity_config": {}, "transform_config": {}},
    )):  # fmt: skip
        opened = fmtsim.open_checkpoint(saved(tmp_path / f"{number}", FLOAT8, config))
        assert opened.decode("l.weight").unique().tolist() == [0.5]
    for number, config in enumerate(
        ({"kv_cache_scheme": {}}, {"format": "dense", "config_groups": {"a": GROUP | {"format": None}}})
    ):
        opened = fmtsim.open_checkpoint(saved(tmp_path / f"p{number}", KEPT, by("compressed-tensors") | config))
        assert list(opened) == ["l.weight"] and opened.layout("l.weight") == ""


def test_points_beside_symmetric_codes_are_zeros(tmp_path):
    for name, config in (("a", CT), ("b", by("fp8"))):
        points = {"l.weight_zero_point": torch.zeros(4, 1, dtype=I8)}
        assert fmtsim.open_checkpoint(saved(tmp_path / name, FLOAT8 | points, config)).decode("l.weight")[0, 0] == 0.5
        opened = fmtsim.open_checkpoint(
            saved(tmp_path / name, FLOAT8 | {"l.weight_zero_point": torch.ones(4, 1)}, config)
        )
        refused(
            r"zero_point' has numbers other than 0, and its codes are symmetric",
            opened.decode,
            "l.weight",
            error=DataError,
        )


# NVFP4 in cuBLAS's tiles


@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (64, 128), (48, 80)])
def test_scales_in_tiles_and_halves_of_bytes_are_those_of_the_writer(rows, columns, tmp_path):
    random = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=random).byte()
    scale = torch.randint(1, 126, (rows, columns // 16), generator=random).byte()
    flat = {"l.weight": codes, "l.weight_scale": scale.view(F8), "l.weight_scale_2": torch.tensor(0.5)}
    config = by("modelopt", quant_algo="NVFP4")
    expected = fmtsim.open_checkpoint(saved(tmp_path / "flat", flat, config)).decode("l.weight")
    # Model-Optimizer 0.47, swizzle_nvfp4_scales, whose output fmtsim.formats.packing.swizzled was held to
    tiles = flat | {"l.weight_scale": swizzled(scale).view(-(-rows // 128) * 128, -1).view(F8)}
    entry = json.dumps({"format_version": "1.0", "layers": {"l": {"format": "nvfp4"}}})
    header = {"_quantization_metadata": entry, "quantization_config": json.dumps({"quant_algo": "NVFP4"})}
    for number, (tensors, metadata) in enumerate(((tiles, header), (flat, header if rows % 128 else {}))):
        folder = saved(tmp_path / f"{number}", tensors, None, metadata)
        assert torch.equal(fmtsim.open_checkpoint(folder / "model.safetensors").decode("l.weight"), expected)
    # comfy-kitchen 0.2.40, dequantize_nvfp4: hi_first
    marked = tiles | {"l.weight": codes >> 4 | codes << 4, "l.comfy_quant": text({"format": "nvfp4"})}
    assert torch.equal(fmtsim.open_checkpoint(saved(tmp_path / "marked", marked)).decode("l.weight"), expected)
    alone = fmtsim.open_checkpoint(saved(tmp_path / "alone", tiles, None, {"_quantization_metadata": entry}))
    refused(
        r"layer 'l' is nvfp4 by the header, which does not say who packed it", alone.decode, "l.weight", error=DataError
    )
    if rows % 128:
        opened = fmtsim.open_checkpoint(saved(tmp_path / "rows", flat | {"l.comfy_quant": marked["l.comfy_quant"]}))
        refused(r"weight_scale' of shape .* is not tiles of 128 x 4 for", opened.decode, "l.weight", error=DataError)


def test_factors_of_columns_are_recoded_with_the_values_and_checked(tmp_path):
    tensors, config, _ = READ["modelopt awq"]
    folder = saved(tmp_path / "m", tensors, config)
    values = fmtsim.open_checkpoint(folder)["l.weight"].decode()
    (row,) = fmtsim.lab.check_recode(folder, "mxfp4").weights
    assert row.carried is None and row.sqnr_db == pytest.approx(
        fmtsim.compare(fmtsim.quantize(values, "mxfp4"), values).sqnr_db
    )
    wrong = tensors | {"l.pre_quant_scale": torch.ones(3)}
    opened = fmtsim.open_checkpoint(saved(folder, wrong, config))
    refused(r"'l.pre_quant_scale' has 3 factors for 32 columns", opened.decode, "l.weight", error=DataError)


@pytest.mark.parametrize(("tensors", "config", "message"), [
    ({"l.weight": torch.full((2, 2), 255, dtype=U8), "l.weight_scale": X[:1]}, by("bitnet"), r"has codes 3"),
    (BNB | {"l.weight.absmax": X, "l.weight.quant_state.bitsandbytes__nf4": text(STATE)}, None,
     r"layer 'l' has 32 bytes and 4 scales, which are no \(1, 64\) in blocks of 64"),
    (BNB | {"l.weight.quant_map": NF4 + 1, "l.weight.quant_state.bitsandbytes__nf4": text(STATE)}, None,
     r"'l.weight.quant_map' is not the codebook of nf4"),
    (READ["nf4, scales quantised"][0] | {"l.weight.nested_absmax": torch.ones(2)}, None,
     r"layer 'l' has 2 scales for 1 in blocks of 256"),
    ({"l.weight": zeros(2, 4, dtype=I8), "l.SCB": X[:2], "l.weight_format": torch.tensor(1, dtype=U8)}, None,
     r"'l.weight_format' is not 0 \(rows\); save it by a later bitsandbytes"),
])  # fmt: skip
def test_tensors_of_a_method_that_do_not_fit_are_named(tensors, config, message, tmp_path):
    opened = fmtsim.open_checkpoint(saved(tmp_path / "m", tensors, config))
    refused(message, opened.decode, "l.weight", error=DataError)


# Folders, parts and files without a suffix


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", ["int8_token", "int4_g32", "e4m3_token", "nvfp4_weights", "mxfp4_weights"])
def test_folders_of_torchao_are_read_as_its_files_and_in_its_dtype(scheme, dtype, tmp_path):
    torch.manual_seed(0)
    model = fmtsim.ptq(nn.Sequential(nn.Linear(64, 32)).to(dtype), scheme)
    (folder := tmp_path / "m").mkdir()
    fmtsim.export(model, folder / "model.safetensors", "torchao")
    (folder / "config.json").write_text(json.dumps({"quantization_config": by("torchao")}))
    expected = fmtsim.open_checkpoint(folder / "model.safetensors").decode("0.weight")
    same = torch.equal(expected, model[0].weight)
    assert expected.dtype == dtype and (same or (scheme, dtype) == ("nvfp4_weights", torch.float32))  # two roundings
    assert torch.equal(fmtsim.open_checkpoint(folder).decode("0.weight"), expected)
    assert set(fmtsim.read_export(folder)) == {"0.weight", "0.bias"}
    # two shards, whose headers have the whole record each, as save_pretrained of transformers 5.23 writes them
    tensors, metadata = fmtsim.formats.tensor_file.read_tensors(folder / "model.safetensors")
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        write_tensors(folder / f"model-0000{number + 1}-of-00002.safetensors", {n: tensors[n] for n in part}, metadata)
    (folder / "model.safetensors").unlink()
    one, two = sorted(folder.glob("*.safetensors"))
    for place in (folder, one, two):
        assert torch.equal(fmtsim.open_checkpoint(place).decode("0.weight"), expected)
    two.rename(folder / "x")
    for place in (folder, one):
        message = (
            r"model-00001-of-00002.safetensors is a part of 2, and model-00002-of-00002.safetensors is not beside it"
        )
        refused(message, fmtsim.open_checkpoint, place, error=DataError)
    one.rename(folder / "model.safetensors")
    refused(
        r"model.safetensors: the header lists|'0._weight_|'0.weight'", fmtsim.open_checkpoint, folder, error=DataError
    )


def test_a_name_in_two_files_is_refused(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        saved(tmp_path / "m", KEPT, name=name)
    message = r"a.safetensors and b.safetensors both have 'l.weight'; pass one file"
    refused(message, fmtsim.open_checkpoint, tmp_path / "m", error=DataError)


def ggml(path, tensors, **split):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in split.items():
        writer.add_key_value(f"split.{key}", value, gguf.GGUFValueType.UINT16)
    for name, t in tensors.items():
        kind = gguf.GGMLQuantizationType.NVFP4 if t.dtype == np.uint8 else None
        writer.add_tensor(name, t, raw_dtype=kind)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()


def test_parts_of_gguf_files_are_the_whole_or_an_error(tmp_path):
    one, parts = np.ones((4, 32), np.float32), [tmp_path / f"m-0000{i + 1}-of-00002.gguf" for i in range(2)]
    ggml(parts[0], {"a": one, "b": one}, **{"no": 0, "count": 2, "tensors.count": 3})
    ggml(parts[1], {"c": one}, **{"no": 1, "count": 2, "tensors.count": 3})
    for place in (tmp_path, *parts):
        assert list(fmtsim.open_checkpoint(place)) == ["a", "b", "c"]
    assert set(fmtsim.read_export(parts[0])) == set(fmtsim.read_export(tmp_path)) == {"a", "b", "c"}
    ggml(parts[1], {}, **{"no": 1, "count": 2, "tensors.count": 3})
    refused(
        r"and its parts have 2 tensors, split.tensors.count says 3", fmtsim.open_checkpoint, tmp_path, error=DataError
    )
    parts[1].unlink()
    refused(r"is a part of 2, and m-00002-of-00002.gguf is not", fmtsim.open_checkpoint, parts[0], error=DataError)
    alone = parts[0].rename(tmp_path / "alone")
    refused(r"alone: it is part 1 of 2 \(split.no, split.count\); call", fmtsim.open_checkpoint, alone, error=DataError)


def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path):
    for name in ("sha256-0a1b", "m.GGUF"):
        ggml(tmp_path / name, {"a": np.ones((4, 32), np.float32), "x.input_scale": np.ones(1, np.float32)})
        assert (
            set(fmtsim.open_checkpoint(tmp_path / name))
            == set(fmtsim.read_export(tmp_path / name))
            == {"a", "x.input_scale"}
        )
    refused(r"has m.GGUF, sha256-0a1b; pass one of these files", fmtsim.open_checkpoint, tmp_path, error=DataError)


def test_a_scale_of_a_gguf_file_belongs_to_its_weight(tmp_path):
    codes = fmtsim.encode(torch.ones(4, 64), "nvfp4_ggml").codes.numpy()
    f32 = lambda *values: np.array(values, np.float32)  # noqa: E731
    weights = {"up.weight": codes[:2], "exps.weight": codes.reshape(2, 2, -1), "p.weight": np.ones((2, 2), np.float32)}
    scales = {"up.scale": f32(0.5), "exps.scale": f32(0.5, 2), "p.scale": f32(3), "bad.scale": f32(1, 1, 1)}
    ggml(tmp_path / "m", weights | scales | {"bad.weight": codes})
    opened = fmtsim.open_checkpoint(tmp_path / "m")
    assert set(opened) == {"up.weight", "exps.weight", "p.weight", "bad.weight"}
    assert opened.decode("up.weight").unique().tolist() == [1.03125 * 0.5]  # the blocks hold 1.03125
    assert opened["exps.weight"].decode()[:, 0, 0].tolist() == [1.03125 * 0.5, 1.03125 * 2]
    assert opened.decode("p.weight").tolist() == [[3, 3], [3, 3]]
    message = r"the scale of 'bad.weight' is torch.float32 \[3\]; expected float32, one number or 1"
    refused(message, opened.decode, "bad.weight", error=DataError)
