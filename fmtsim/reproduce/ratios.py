# SPDX-License-Identifier: Apache-2.0
"""Claims about formats of eight bits: signal-to-noise ratios by distribution, and orders of multiplications."""

from typing import Any

import torch
from torch import Tensor

from fmtsim.formats.block import scaled
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat, IntFormat, LogFormat
from fmtsim.ptq.catalogue import minifloat
from fmtsim.quantize import quantize
from fmtsim.reproduce.claim import Claim, Expected, Measured, Tell, exactly, near, settings
from fmtsim.reproduce.samples import decibels, draw, generator, normal, relative_error, told
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.cast import cast
from fmtsim.spec.scaling import Scaling

_QUALCOMM = "van Baalen et al., FP8 versus INT8, arXiv:2303.17951; Qualcomm FP8-quantization ede19a9"
_FLOATS = ("e2m5", "e3m4", "e4m3", "e5m2")


def clipped(x: Tensor, fmt: FloatFormat | IntFormat, clip: float) -> float:
    """Return the relative squared error of numbers that are scaled so that the format's largest value is ``clip``."""
    factor = float(fmt.max) / clip
    return relative_error(x, quantize(x * factor, fmt).double() / factor)


def best_clip(x: Tensor, fmt: FloatFormat | IntFormat, clips: int) -> float:
    """Return the least error over clips that lie evenly in logarithm up to the largest magnitude."""
    amax = float(x.abs().max())
    least = min(amax, float(x.abs().mean()) * 1.5)
    steps = [least * (amax / least) ** (i / (clips - 1)) for i in range(clips)]
    return min(clipped(x, fmt, clip) for clip in steps)


def table(tell: Tell, *, count: int, clips: int, distributions: tuple[str, ...], seed: int) -> Measured:
    """Measure INT8 and four FP8 formats on distributions, at the clip of least error each, two also unclipped."""
    # The source's quantiser makes every code finite.
    formats: dict[str, Any] = {"int8": get_format("int8")}
    formats |= {name: minifloat(int(name[1]), int(name[3])) for name in _FLOATS}
    numbers: dict[str, float] = {}
    for distribution in told(tell, distributions):
        x = draw(distribution, count, seed)
        found = {name: decibels(best_clip(x, fmt, clips)) for name, fmt in formats.items()}
        numbers |= {f"{distribution} {name}, dB": ratio for name, ratio in found.items()}
        for name in ("int8", "e2m5"):
            whole = clipped(x, formats[name], float(x.abs().max()))
            numbers[f"{distribution} {name}, not clipped, dB"] = decibels(whole)
        for name in ("int8", "e2m5", "e3m4"):
            numbers[f"{distribution}: {name} is best"] = float(found[name] == max(found.values()))
    curves = {
        name: [(float(i), numbers[f"{distribution} {name}, dB"]) for i, distribution in enumerate(distributions)]
        for name in formats
    }
    return Measured(numbers=numbers, curves=curves, axes=("distribution", "signal to noise, dB"), ticks=distributions)


def logarithmic(tell: Tell, *, rows: int, block: int, gammas: tuple[int, ...], seed: int) -> Measured:
    """Measure logarithmic formats beside FP8 on rows of normal numbers."""
    x = normal(rows, block, seed)
    numbers = {f"{name}, dB": decibels(relative_error(x, quantize(x, name))) for name in ("logfmt8", "logfmt10")}
    for name in ("e4m3", "e5m2"):
        rows_of = scaled(get_format(name), (1, block))  # type: ignore[arg-type]
        numbers[f"{name}, dB"] = decibels(relative_error(x, quantize(x, rows_of)))
    curve = []
    for gamma in gammas:
        element = LogFormat(name=f"lns8_g{gamma}", bits=8, gamma=gamma)
        rows_of = scaled(element, (1, block))
        ratio = decibels(relative_error(x, quantize(x, rows_of)))
        numbers[f"lns8, gamma {gamma}, dB"] = ratio
        curve.append((float(gamma), ratio))
    others = ("logfmt10", "logfmt8", "e4m3", "e5m2")
    curves = {"lns8": curve} | {name: [(float(gamma), numbers[f"{name}, dB"]) for gamma in gammas] for name in others}
    axes = ("steps of lns8 in an octave", "signal to noise, dB")
    return Measured(numbers=numbers, curves=curves, axes=axes, logarithmic="x")


def phases(tell: Tell, *, shape: tuple[int, int], decades: float, seed: int) -> Measured:
    """Measure E4M3 under scales that are exact, powers of two, and powers of 16, on rows of very different size."""
    size = torch.rand(shape[0], 1, generator=generator(seed)) * 2 * decades - decades
    x = normal(*shape, seed + 1) * 10.0**size
    steps = tuple(16.0**power for power in range(-8, 9))
    rules: dict[str, dict[str, Any]] = {
        "exact": {},
        "power of two": {"power_of_two": "ceil"},
        "16^k": {"allowed": steps},
    }
    numbers = {}
    for name, rule in rules.items():
        scaling = Scaling(block=(1, None), top=120.0, arithmetic="divide", **rule)
        made = cast(x, _element("e4m3_ieee"), scaling, Rounding(), "saturate")
        q = made.values((1, shape[1]))
        each = (q.double() - x.double()).square().sum(1) / x.double().square().sum(1)
        numbers[f"{name}, dB"] = decibels(float(each.mean()))
    return Measured(numbers=numbers)


def orders(tell: Tell, *, shape: tuple[int, int], blocks: int, seed: int) -> Measured:
    """Count the codes of E4M3 that depend on how a block's scale meets its elements, for bfloat16 inputs.

    Scales of NVFP4 are of as many ``blocks`` in as many tensors, float32 and bfloat16.
    """
    x = normal(*shape, seed).bfloat16().float()
    codes = {}
    for arithmetic in ("encode", "reciprocal", "divide"):
        scaling = Scaling(block=(1, 128), arithmetic=arithmetic)  # type: ignore[arg-type]
        codes[arithmetic] = cast(x, _element("e4m3"), scaling, Rounding(), "saturate").elements

    def differing(one: str, other: str) -> float:
        return float((codes[one] != codes[other]).double().mean())

    level = torch.rand(blocks, blocks, generator=generator(seed), dtype=torch.float64) ** (1 / 16)
    largest = (torch.erfinv(level) * 2**0.5).float()  # of 16 normal numbers, drawn from its distribution
    return Measured(
        numbers={
            "x (448/a) or x (1/(a/448))": differing("encode", "reciprocal"),
            "x (1/(a/448)) or x / (a/448)": differing("reciprocal", "divide"),
            "NVFP4 scales, a (S/6) or (a/6) S": _block_scales_differ(largest),
            "the same, bfloat16": _block_scales_differ(largest.bfloat16().float()),
        }
    )


def _block_scales_differ(largest: Tensor) -> float:
    """Return the part of E4M3 scales that two orders of float32 products make different; each row is a tensor."""
    tensor, sixth = torch.tensor(2688.0) / largest.amax(1, keepdim=True), torch.tensor(1 / 6)
    first, second = (quantize(t, "e4m3") for t in (largest * (tensor * sixth), (largest * sixth) * tensor))
    return float((first != second).double().mean())


def _element(name: str) -> Any:
    return get_format(name)


_PUBLISHED = {  # signal to noise in dB at the best clip: int8, e2m5, e3m4, e4m3, e5m2
    "uniform": (48.1, 44.4, 38.2, 31.9, 26.3),
    "gauss": (40.7, 42.7, 37.6, 31.6, 25.6),
    "laplace": (35.3, 39.6, 37.5, 31.6, 25.6),
    "t5": (31.0, 35.7, 37.5, 31.5, 25.6),
}
_NOT_CLIPPED = {"uniform": (48.1, 44.4), "gauss": (39.2, 42.5), "laplace": (33.4, 38.9)}  # int8, e2m5
_WINNERS = (("uniform", "int8"), ("gauss", "e2m5"), ("laplace", "e2m5"), ("t5", "e3m4"), ("t3", "e3m4"))


def _within(name: str, published: float, decibel: float) -> Expected:
    return Expected(
        name=name, low=published - decibel, high=published + decibel, published=published, origin="emulation"
    )


CLAIMS = (
    Claim(
        name="int8_fp8",
        says="INT8 is best for uniform numbers, E2M5 for normal ones, more exponent bits only pay with outliers",
        source=_QUALCOMM,
        measure=table,
        settings=settings(count=200_000, clips=24, distributions=(*_PUBLISHED, "t3"), seed=0),
        expected=(
            *(exactly(f"{distribution}: {name} is best", 1.0, "paper") for distribution, name in _WINNERS),
            *(
                _within(f"{distribution} {name}, dB", published, 1.0)
                for distribution, row in _PUBLISHED.items()
                for name, published in zip(("int8", *_FLOATS), row, strict=True)
            ),
            *(
                _within(f"{distribution} {name}, not clipped, dB", published, 1.0)
                for distribution, row in _NOT_CLIPPED.items()
                for name, published in zip(("int8", "e2m5"), row, strict=True)
            ),
        ),
        notes="the tails of t5 and t3 depend on the sample: a few numbers decide INT8's clip",
    ),
    Claim(
        name="logarithmic",
        says="LogFMT of 8 bits beats E4M3 and E5M2, of 10 bits it comes near bfloat16; LNS8 is as good as E4M3",
        source="DeepSeek, Insights into DeepSeek-V3, arXiv:2505.09343; Zhao et al., arXiv:2106.13914",
        measure=logarithmic,
        settings=settings(rows=4096, block=128, gammas=(1, 2, 4, 8, 16, 32), seed=0),
        expected=(
            _within("logfmt8, dB", 37.0, 0.2),
            _within("logfmt10, dB", 49.1, 0.2),
            _within("e4m3, dB", 31.8, 0.2),
            _within("e5m2, dB", 25.8, 0.2),
            *(
                _within(f"lns8, gamma {gamma}, dB", ratio, 0.2)
                for gamma, ratio in zip((1, 2, 4, 8, 16, 32), (13.9, 20.2, 26.3, 32.3, 38.3, 27.7), strict=True)
            ),
        ),
    ),
    Claim(
        name="gaudi",
        says="scales of powers of two, or of 16, cost FP8 nothing: its error does not depend on where a scale lies",
        source="Intel Neural Compressor 9b47d09, FP8 on Gaudi",
        measure=phases,
        settings=settings(shape=(1024, 1024), decades=3.0, seed=0),
        expected=tuple(_within(f"{name}, dB", 31.5, 0.2) for name in ("exact", "power of two", "16^k")),
    ),
    Claim(
        name="orders",
        says="how a scale meets its elements decides some E4M3 codes: in ten thousand bfloat16 inputs, 2 to 5",
        source="Transformer Engine d0067d0 (448/a), DeepGEMM 54e2261 (1/(a/448)), DeepSeek-V3 9b4e978 (x / (a/448))",
        measure=orders,
        settings=settings(shape=(8192, 1024), blocks=4096, seed=0),
        expected=(
            near("x (448/a) or x (1/(a/448))", 1.9e-4, 0.15),
            near("x (1/(a/448)) or x / (a/448)", 5.1e-4, 0.15),
            near("NVFP4 scales, a (S/6) or (a/6) S", 1e-6, 0.9),
            Expected(name="the same, bfloat16", low=1e-4, high=2e-3),
        ),
        notes="in one tensor of bfloat16 numbers an emulation found no such scale; whether a tensor has exact ties "
        "depends on its largest number, so there are 4096 tensors",
    ),
)
