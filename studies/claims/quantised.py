# SPDX-License-Identifier: Apache-2.0
"""Claims about trained models that are quantised: coverage under outliers, and memory."""

import copy
from collections.abc import Sequence
from itertools import product
from math import ceil

import torch
from torch import Tensor, nn

from fmtsim.lab.memory import StoredFormats, bits_per_element, serving_memory, training_memory
from fmtsim.lab.memory.estimate import GB
from fmtsim.ptq import ptq
from studies.claims.claim import Claim, Expected, Measured, Tell, exactly, near, settings
from studies.claims.experiment import generator, last_loss, told

_SHEN = "Shen et al., Efficient Post-training Quantization with FP8 Formats, arXiv:2309.14592, abstract"
_NEMOTRON = "Nemotron-4 340B technical report, arXiv:2406.11704"
_SIZES = (7, 70, 340)


def coverage(
    tell: Tell, *, recipes: tuple[str, ...], outliers: tuple[float, ...], workloads: int, width: int, classes: int,
    loss: float,
    seed: int,
) -> Measured:  # fmt: skip
    """Quantise trained classifiers whose inputs have a channel of outliers; a workload passes where accuracy stays.

    ``loss`` is the part of its accuracy on other inputs that a workload may lose. One channel is ``outliers`` times as
    large as it was in training, and its weights as much smaller: a function that a normalisation's gains make.
    """
    passed: dict[str, list[list[bool]]] = {name: [] for name in recipes}
    for times, place in told(tell, list(product(outliers, range(workloads)))):
        model, data, test, labels = _workload(width, classes, times, seed + place)
        accuracy = _accuracy(model, test, labels)
        for name in recipes:
            quantised = ptq(copy.deepcopy(model), name, [data], progress=False)
            if place == 0:
                passed[name].append([])
            passed[name][-1].append(_accuracy(quantised, test, labels) >= (1 - loss) * accuracy)
    numbers = {f"{name}, workloads %": 100 * _share(sum(results, [])) for name, results in passed.items()}
    first, second = recipes[:2]
    numbers["E4M3 - INT8, points"] = numbers[f"{first}, workloads %"] - numbers[f"{second}, workloads %"]
    numbers[f"{second} without outliers, %"] = 100 * _share(passed[second][0])
    curves = {
        name: [(times, 100 * _share(rows)) for times, rows in zip(outliers, results, strict=True)]
        for name, results in passed.items()
    }
    return Measured(numbers=numbers, curves=curves, axes=("outliers, times", "workloads, %"), logarithmic="x")


def _accuracy(model: nn.Module, x: Tensor, labels: Tensor) -> float:
    return float((model(x).argmax(1) == labels).double().mean())


def _workload(width: int, classes: int, times: float, seed: int) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """Return a classifier that learned the answers of a random network, inputs to calibrate, others, and answers."""
    source = generator(seed)

    def network() -> list[nn.Linear]:
        layers = [nn.Linear(width, width, bias=False), nn.Linear(width, classes, bias=False)]
        for layer in layers:
            layer.weight.data = torch.randn(layer.weight.shape, generator=source) / width**0.5
        return layers

    teacher, layers = network(), network()
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(6144, width, generator=source)
    with torch.no_grad():
        labels = teacher[1](teacher[0](x).relu()).argmax(1)

    def loss_of(step: int) -> Tensor:
        picked = slice(256 * (step % 8), 256 * (step % 8) + 256)  # of the first 2048
        return nn.functional.cross_entropy(model(x[picked]), labels[picked])

    last_loss(100, 1, loss_of, optimizer)
    model.requires_grad_(False)
    layers[0].weight[:, seed % width] /= times
    x[:, seed % width] *= times
    return model, x[:256], x[2048:], labels[2048:]


def _share(rows: Sequence[bool]) -> float:
    return sum(rows) / len(rows)


def memory(tell: Tell) -> Measured:
    """Work out the bytes of models of 7, 70 and 340 billion parameters: served, trained, and their caches."""
    numbers: dict[str, float] = {}
    for size in _SIZES:
        for fmt in ("bf16", "e4m3", "mxfp8_e4m3", "nvfp4", "mxfp4"):
            numbers[f"{size}B weights, {fmt}, GB"] = serving_memory(size * 1e9, weights=fmt).gigabytes
        numbers[f"{size}B training, mixed, GB"] = training_memory(size * 1e9).gigabytes
        fp8_lm = training_memory(size * 1e9, optimizer="fp8lm", formats=StoredFormats(gradients="e4m3"))
        numbers[f"{size}B training, fp8_lm, GB"] = round(fp8_lm.gigabytes, 6)  # without scales of whole tensors
    numbers["340B in bf16 fits 8 x 80 GB"] = float(numbers["340B weights, bf16, GB"] <= 640)
    numbers["340B in e4m3 fits 8 x 80 GB"] = float(numbers["340B weights, e4m3, GB"] <= 640)
    numbers["70B training, mixed, devices of 80 GB"] = float(ceil(numbers["70B training, mixed, GB"] / 80))
    numbers["bytes a parameter, mixed / fp8_lm"] = (
        numbers["70B training, mixed, GB"] / numbers["70B training, fp8_lm, GB"]
    )
    numbers["bits, nvfp4"], numbers["bits, mxfp4"] = bits_per_element("nvfp4"), bits_per_element("mxfp4")
    one = serving_memory("nemotron4-340b", weights="e4m3", kv_format="e4m3", context=4096, devices=8)
    room = 80 * GB - one["weights"]  # of each device
    numbers["340B in e4m3 on 8 x 80 GB, requests of 4096 tokens"] = float(room // one["KV cache"])
    numbers["340B cache of 4096 tokens, e4m3, GB"] = 8 * one["KV cache"] / GB
    for fmt in ("bf16", "e4m3"):
        cache = serving_memory("llama-70b", kv_format=fmt, context=131072)["KV cache"]
        numbers[f"70B cache of 131072 tokens, {fmt}, GB"] = cache / GB
    return Measured(numbers=numbers)


# Nemotron-4 340B: 341,025,638,400 parameters in a byte each, embedding and head (256000 x 18432) in two; a device has
# one of eight heads of keys and values.
_SERVED = 341_025_638_400 + 2 * 256_000 * 18_432
_WEIGHTS = {"bf16": 2.0, "e4m3": 1.0, "mxfp8_e4m3": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16, "mxfp4": 0.5 + 1 / 32}

CLAIMS = (
    Claim(
        name="coverage", recorded="shown in part", bounds="before", seeds=5, slow=True,
        says="calibrated E4M3 keeps more workloads than INT8, which loses those with outliers",
        source=f"{_SHEN}: 92.64 % of workloads against 65.87 %",
        measure=coverage,
        settings=settings(
            recipes=("e4m3_static", "int8_static"), outliers=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0), workloads=6,
            width=64, classes=4, loss=0.01, seed=0,
        ),
        expected=(
            near("e4m3_static, workloads %", 92.64, 0.07, "paper", part=(80.0, 100.0)),
            Expected(name="int8_static, workloads %", published=65.87, origin="paper"),
            near("E4M3 - INT8, points", 26.77, 0.5, "paper", part=(1.0, 100.0)),
        ),
        notes="48 classifiers of two layers that learned a random network's answers, and may lose 1 % of their "
        "accuracy; the source has 75 networks, and theirs are the outliers that decide INT8's share. Bounds: two "
        "standard errors of 48",
    ),
    Claim(
        name="memory", recorded="shown", bounds="source",
        says="340 billion parameters fit 8 x 80 GB in FP8, not in BF16; FP8-LM trains in 6 bytes each, not 16",
        source=f"{_NEMOTRON}, FP8 deployment on one DGX H100; FP8-LM, arXiv:2310.18313, section 2.2",
        measure=memory,
        expected=(
            *(
                exactly(f"{size}B weights, {fmt}, GB", size * each)
                for size in _SIZES
                for fmt, each in _WEIGHTS.items()
            ),
            *(exactly(f"{size}B training, mixed, GB", size * 16.0) for size in _SIZES),
            *(exactly(f"{size}B training, fp8_lm, GB", size * 6.0) for size in _SIZES),
            exactly("340B in bf16 fits 8 x 80 GB", 0.0),
            exactly("340B in e4m3 fits 8 x 80 GB", 1.0),
            exactly("340B cache of 4096 tokens, e4m3, GB", 96 * 2 * 8 * 192 * 4096 / GB),
            exactly("340B in e4m3 on 8 x 80 GB, requests of 4096 tokens",
                    (80 * GB - _SERVED / 8) // (96 * 2 * 192 * 4096)),
            exactly("70B training, mixed, devices of 80 GB", 14.0),
            Expected(name="bytes a parameter, mixed / fp8_lm", low=2.6, high=2.7, published=2.6, origin="paper"),
            exactly("bits, nvfp4", 4.5),
            exactly("bits, mxfp4", 4.25),
            exactly("70B cache of 131072 tokens, bf16, GB", 42.949672960),
            exactly("70B cache of 131072 tokens, e4m3, GB", 21.474836480),
        ),
        notes="arithmetic; activations, workspace and scales of whole tensors are not counted. FP8-LM cuts 16 / 6 to "
        "2.6",
    ),
)  # fmt: skip
