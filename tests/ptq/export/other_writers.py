# SPDX-License-Identifier: Apache-2.0
"""Write checkpoints with compressed-tensors' own compressors; run by a Python that has it, without fmtsim.

``python other_writers.py FOLDER`` writes a checkpoint into ``FOLDER/CASE`` for each case and seed, in two shards, and
what the library decompresses it to beside it, ``FOLDER/CASE.values``.
"""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

GROUP, CHANNEL, TENSOR = {"strategy": "group", "group_size": 32}, {"strategy": "channel"}, {"strategy": "tensor"}
INT, FLOAT = {"type": "int"}, {"type": "float"}
MX = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
CASES = {
    "kimi_k2": ("pack-quantized", {"num_bits": 4, **INT, **GROUP}),
    "pack_channel": ("pack-quantized", {"num_bits": 4, **INT, **CHANNEL}),
    "pack_zero_points": ("pack-quantized", {"num_bits": 4, **INT, **GROUP, "symmetric": False}),
    "pack3_zero_points": ("pack-quantized", {"num_bits": 3, **INT, **GROUP, "symmetric": False}),
    "pack8_zero_points": ("pack-quantized", {"num_bits": 8, **INT, **CHANNEL, "symmetric": False}),
    "pack5": ("pack-quantized", {"num_bits": 5, **INT, **CHANNEL}),
    "int8_channel": ("int-quantized", {"num_bits": 8, **INT, **CHANNEL}),
    "int8_tensor": ("int-quantized", {"num_bits": 8, **INT, **TENSOR}),
    "float8_channel": ("float-quantized", {"num_bits": 8, **FLOAT, **CHANNEL}),
    "float8_tensor": ("float-quantized", {"num_bits": 8, **FLOAT, **TENSOR}),
    "float8_blocks": ("float-quantized", {"num_bits": 8, **FLOAT, "strategy": "block", "block_structure": [128, 128]}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, **FLOAT, "strategy": "tensor_group", "group_size": 16,
                                       "scale_dtype": torch.float8_e4m3fn}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, **FLOAT, **MX}),
    "mxfp6": ("mxfp6-pack-quantized", {"num_bits": 6, **FLOAT, **MX}),
    "mxfp8": ("mxfp8-quantized", {"num_bits": 8, **FLOAT, **MX}),
}  # fmt: skip


def scales(w, args, layout):
    """Return scales of the blocks of a weight, and compressed-tensors' global scale of NVFP4."""
    rows, columns = w.shape
    largest = {4: 6.0, 6: 7.5, 8: 448.0}[args.num_bits] if args.type == "float" else 2 ** (args.num_bits - 1) - 0.5
    size = {"tensor": (rows, columns), "channel": (1, columns), "block": args.block_structure}
    height, width = size.get(args.strategy, (1, args.group_size))
    padded = torch.nn.functional.pad(w.float().abs(), (0, -columns % width, 0, -rows % height))
    blocks = padded.reshape(-(-rows // height), height, -(-columns // width), width)
    scale = blocks.amax((1, 3)) / largest
    if layout.startswith("nvfp4"):
        second = (448 * 6 / w.float().abs().max()).reshape(1)
        return (scale * second).to(torch.float8_e4m3fn).float(), second
    if layout.startswith("mx"):
        return torch.exp2(torch.ceil(torch.log2(scale))), None
    return scale.reshape(1) if args.strategy == "tensor" else scale, None


def write(folder, layout, options, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(200, 384, generator=generator).bfloat16()
    args = QuantizationArgs(**options)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    scale, second = scales(w, args, layout)
    exact = layout.startswith(("nvfp4", "mx"))
    state = {"weight": w, "weight_scale": scale if exact else scale.to(dtype)}
    state |= {} if second is None else {"weight_global_scale": second}
    if not args.symmetric:
        top = 2 ** (args.num_bits - 1)
        state["weight_zero_point"] = torch.randint(-top, top, scale.shape, generator=generator, dtype=torch.int8)
    compressor = BaseCompressor.get_value_from_registry(layout)
    compressed = compressor.compress(state, scheme)
    values = compressor.decompress(dict(compressed), scheme)["weight"]
    folder.mkdir()
    names, index = sorted(compressed), {}
    for number, part in enumerate((names[::2], names[1::2])):
        shard = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({f"layers.0.proj.{n}": compressed[n].detach().contiguous() for n in part}, folder / shard)
        index |= {f"layers.0.proj.{n}": shard for n in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    group = json.loads(scheme.model_dump_json())
    quantization = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    torch.save(values, folder.with_suffix(".values"))


if __name__ == "__main__":
    for case, (layout, options) in CASES.items():
        for seed, dtype in ((0, torch.float32), (1, torch.bfloat16)):
            write(Path(sys.argv[1]) / f"{case}_{seed}", layout, options, seed, dtype)
