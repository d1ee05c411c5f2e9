# SPDX-License-Identifier: Apache-2.0
"""Claims about the errors of formats: block formats, and signal-to-noise ratios of eight bits by distribution."""

from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.quantize import quantize
from fmtsim.formats.block import scaled, with_block
from fmtsim.formats.element import FloatFormat, IntFormat, LogFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling
from fmtsim.recipes.ptq_catalogue import minifloat
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.scaled_cast import cast
from studies.claims.claim import Claim, Expected, Measured, Tell, settings
from studies.claims.experiment import decibels, draw, generator, normal, relative_error, told

_MX = "OCP Microscaling Formats v1.0, section 6.3"
_NVIDIA = "NVIDIA, arXiv:2509.25149, section 2"


def errors(
    tell: Tell, *, formats: tuple[tuple[str, str, str | None], ...], better: str, shape: tuple[int, int], seed: int
) -> Measured:
    """Measure the relative squared error of formats on normal numbers, in units of 1 %.

    ``formats`` has a label, a format and a scale rule (None: the format's own) each; ``better`` is the label of the one
    that errs less than all others of its claim.
    """
    x = normal(*shape, seed)
    numbers = {}
    for label, name, rule in formats:
        fmt: Any = get_format(name) if rule is None else with_block(get_format(name), None, rule)  # type: ignore[arg-type]
        numbers[label] = 100 * relative_error(x, quantize(x, fmt))
    others = min(value for label, value in numbers.items() if label != better)
    return Measured(numbers=numbers | {"least of the others over it": others / numbers[better]})


def _samples(**more: Any) -> tuple[tuple[str, Any], ...]:
    return tuple({**more, "shape": (512, 2048), "seed": 0}.items())


CLAIMS: tuple[Claim, ...] = (
    Claim(
        name="nvfp4",
        says="blocks of 16 with E4M3 scales err less than MXFP4's blocks of 32, whichever way it rounds scales",
        source=f"{_NVIDIA}; {_MX}",
        measure=errors,
        settings=_samples(
            formats=(
                ("1x16, %", "nvfp4", None),
                *((f"MXFP4 {rule}, %", "mxfp4", rule) for rule in ("floor", "rceil", "even", "ceil")),
            ),
            better="1x16, %",
        ),
        expected=(Expected(name="1x16, %"), Expected(name="least of the others over it", low=1.0)),
        recorded="shown in part",
        bounds="source",
        notes="normal numbers; the report gives no figure for them",
    ),
    Claim(
        name="mxfp8", recorded="shown in part", bounds="source",
        says="rounding MXFP8's scales up instead of down lowers the error, because nothing saturates",
        source="Mishra et al., arXiv:2506.08027; Transformer Engine d0067d0, MXFP8BlockScaling",
        measure=errors,
        settings=_samples(
            formats=(("rceil, %", "mxfp8_e4m3", "rceil"), ("floor, %", "mxfp8_e4m3", "floor")), better="rceil, %",
        ),
        expected=(Expected(name="least of the others over it", low=1.0),),
        notes="normal numbers; the paper compares trainings",
    ),
)  # fmt: skip


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
        ratios = {name: decibels(best_clip(x, fmt, clips)) for name, fmt in formats.items()}
        numbers |= {f"{distribution} {name}, dB": ratio for name, ratio in ratios.items()}
        for name in ("int8", "e2m5"):
            whole = clipped(x, formats[name], float(x.abs().max()))
            numbers[f"{distribution} {name}, not clipped, dB"] = decibels(whole)
        for name in ("int8", "e2m5", "e3m4"):
            numbers[f"{distribution}: {name} is best"] = float(ratios[name] == max(ratios.values()))
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
    numbers |= {
        f"logfmt8 over {name}, dB": numbers["logfmt8, dB"] - numbers[f"{name}, dB"] for name in ("e4m3", "e5m2")
    }
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
        "exact": {}, "power of two": {"power_of_two": "ceil"}, "16^k": {"allowed": steps},
    }  # fmt: skip
    numbers = {}
    for name, rule in rules.items():
        scaling = Scaling(block=(1, None), top=120.0, arithmetic="divide", **rule)
        result = cast(x, _element("e4m3_ieee"), scaling, Rounding(), "saturate")
        q = result.values((1, shape[1]))
        errors = (q.double() - x.double()).square().sum(1) / x.double().square().sum(1)
        numbers[f"{name}, dB"] = decibels(float(errors.mean()))
        numbers[f"{name}, dB lost"] = numbers["exact, dB"] - numbers[f"{name}, dB"]
    return Measured(numbers=numbers)


def _element(name: str) -> Any:
    return get_format(name)


_WINNERS = (("uniform", "int8"), ("gauss", "e2m5"), ("laplace", "e2m5"), ("t5", "e3m4"), ("t3", "e3m4"))

CLAIMS += (
    Claim(
        name="int8_fp8", recorded="shown in part", bounds="source", seeds=5,
        says="INT8 is best for uniform numbers, E2M5 for normal ones, more exponent bits only pay with outliers",
        source=_QUALCOMM,
        measure=table,
        settings=settings(
            count=200_000, clips=24, distributions=tuple(distribution for distribution, _ in _WINNERS), seed=0,
        ),
        expected=tuple(Expected(name=f"{distribution}: {name} is best", low=1.0) for distribution, name in _WINNERS),
        notes="the order by distribution, not the paper's networks; a few numbers in the tails of t5 and t3 decide "
        "INT8's clip",
    ),
    Claim(
        name="logarithmic", recorded="shown in part", bounds="source",
        says="LogFMT of 8 bits beats E4M3 and E5M2",
        source="DeepSeek, Insights into DeepSeek-V3, arXiv:2505.09343",
        measure=logarithmic, settings=settings(rows=4096, block=128, gammas=(1, 2, 4, 8, 16, 32), seed=0),
        expected=tuple(Expected(name=f"logfmt8 over {name}, dB", low=0.0) for name in ("e4m3", "e5m2")),
        notes="errors on normal numbers; the paper compares trainings",
    ),
    Claim(
        name="gaudi", recorded="shown in part", bounds="after",
        says="scales of powers of two, or of 16, cost FP8 nothing: its error does not depend on where a scale lies",
        source="Intel Neural Compressor 9b47d09, FP8 on Gaudi",
        measure=phases, settings=settings(shape=(1024, 1024), decades=3.0, seed=0),
        expected=tuple(Expected(name=f"{name}, dB lost", high=0.1) for name in ("power of two", "16^k")),
        notes="errors on normal numbers; the source's figure is less than 1 % of a model's accuracy",
    ),
)  # fmt: skip
