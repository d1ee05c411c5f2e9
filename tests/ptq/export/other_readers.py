# SPDX-License-Identifier: Apache-2.0
"""Read exports with the libraries that they are for; run by a Python that has them, without fmtsim.

``python other_readers.py FILE...`` writes ``FILE.values`` beside each, by ``torch.save``: every tensor by its name,
weights dequantised.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open


def tensors_of(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def by_compressed_tensors(path):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    tensors, _ = tensors_of(path / "model.safetensors")
    config = QuantizationConfig(**json.loads((path / "config.json").read_text())["quantization_config"])
    for group in config.config_groups.values():
        compressor = BaseCompressor.get_value_from_registry(group.format)
        assert compressor.can_compress(torch.nn.Linear, group), (path, group)
        for layer in group.targets:
            own = {n.removeprefix(f"{layer}."): tensors.pop(n) for n in list(tensors) if n.startswith(f"{layer}.")}
            found = compressor.decompress(own, group)
            tensors[f"{layer}.weight"] = found["weight"]
            tensors |= {f"{layer}.bias": own["bias"]} if "bias" in own else {}
    return tensors


def by_torchao(path):
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    found, left = unflatten_tensor_state_dict(*tensors_of(path))
    assert not left, left
    if (given := path.with_suffix(".inputs")).exists():  # run the layers, too
        x, sizes = torch.load(given)
        layers = [torch.nn.Linear(*sizes[:2]), torch.nn.ReLU(), torch.nn.Linear(*sizes[1:], bias=False)]
        model = torch.nn.Sequential(*layers)
        model.load_state_dict(found, assign=True)
        torch.save(model(x), path.with_suffix(".outputs"))
    return {name: t.dequantize() if hasattr(t, "qdata") else t for name, t in found.items()}


def by_gguf(path):
    import gguf

    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        found[tensor.name] = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
    return found


if __name__ == "__main__":
    for name in sys.argv[1:]:
        place = Path(name)
        reader = by_compressed_tensors if place.is_dir() else by_gguf if place.suffix == ".gguf" else by_torchao
        torch.save(reader(place), f"{name}.values")
