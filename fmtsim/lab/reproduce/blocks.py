# SPDX-License-Identifier: Apache-2.0
"""Claims about the errors of block formats."""

from typing import Any

from fmtsim.casts.quantize import quantize
from fmtsim.formats.block import with_block
from fmtsim.formats.registry import get_format
from fmtsim.lab.reproduce.claim import Claim, Expected, Measured, Tell
from fmtsim.lab.reproduce.samples import normal, relative_error

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


CLAIMS = (
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
        name="mxfp8",
        says="rounding MXFP8's scales up instead of down lowers the error, because nothing saturates",
        source="Mishra et al., arXiv:2506.08027; Transformer Engine d0067d0, MXFP8BlockScaling",
        measure=errors,
        settings=_samples(
            formats=(("rceil, %", "mxfp8_e4m3", "rceil"), ("floor, %", "mxfp8_e4m3", "floor")), better="rceil, %"
        ),
        expected=(Expected(name="least of the others over it", low=1.0),),
        recorded="shown in part",
        bounds="source",
        notes="normal numbers; the paper compares trainings",
    ),
)
