# SPDX-License-Identifier: Apache-2.0
"""Claims about the errors of block formats."""

from typing import Any

from fmtsim.formats.block import with_block
from fmtsim.formats.registry import get_format
from fmtsim.quantize import quantize
from fmtsim.reproduce.claim import Claim, Measured, Tell, near
from fmtsim.reproduce.samples import normal, relative_error

_MX = "OCP Microscaling Formats v1.0, section 6.3"
_NVIDIA = "NVIDIA, arXiv:2509.25149, section 2"


def errors(
    tell: Tell, *, formats: tuple[tuple[str, str, str | None], ...], shape: tuple[int, int], seed: int
) -> Measured:
    """Measure the relative squared error of formats on normal numbers, in units of 1 %.

    ``formats`` has a label, a format and a scale rule (None: the format's own) each.
    """
    x = normal(*shape, seed)
    numbers = {}
    for label, name, rule in formats:
        fmt: Any = get_format(name) if rule is None else with_block(get_format(name), None, rule)  # type: ignore[arg-type]
        numbers[label] = 100 * relative_error(x, quantize(x, fmt))
    return Measured(numbers=numbers)


def _samples(**more: Any) -> tuple[tuple[str, Any], ...]:
    return tuple({**more, "shape": (512, 2048), "seed": 0}.items())


CLAIMS = (
    Claim(
        name="nvfp4",
        says="blocks of 16 with E4M3 scales err by two thirds of what MXFP4 errs on normal numbers",
        source=_NVIDIA,
        measure=errors,
        settings=_samples(formats=(("1x16, %", "nvfp4", None), ("16x16, %", "nvfp4_16x16", None))),
        expected=(near("1x16, %", 0.905, 0.01), near("16x16, %", 1.239, 0.01)),
    ),
    Claim(
        name="mxfp4",
        says="which way MXFP4 rounds its scales moves the error from 1.25 % to 2.1 %",
        source=f"{_MX}; {_NVIDIA}",
        measure=errors,
        settings=_samples(formats=tuple((f"{rule}, %", "mxfp4", rule) for rule in ("floor", "rceil", "even", "ceil"))),
        expected=(
            near("floor, %", 1.32, 0.01),
            near("rceil, %", 1.33, 0.01),
            near("even, %", 1.25, 0.01),
            near("ceil, %", 2.08, 0.01),
        ),
    ),
    Claim(
        name="mxfp8",
        says="rounding MXFP8's scales up instead of down lowers the error, because nothing saturates",
        source="Mishra et al., arXiv:2506.08027; Transformer Engine d0067d0, MXFP8BlockScaling",
        measure=errors,
        settings=_samples(formats=(("rceil, %", "mxfp8_e4m3", "rceil"), ("floor, %", "mxfp8_e4m3", "floor"))),
        expected=(near("rceil, %", 0.0705, 0.01), near("floor, %", 0.0862, 0.01)),
    ),
)
