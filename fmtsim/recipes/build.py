# SPDX-License-Identifier: Apache-2.0
"""Short forms that the catalogue is written in."""

from typing import Any

from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.layers.config import Gemm, LinearConfig
from fmtsim.rounding.modes import Rounding, RoundingName
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.quantizer import Quantizer


def scale_format(name: str) -> FloatFormat:
    """Return a format that scales are stored in."""
    fmt = get_format(name)
    assert isinstance(fmt, FloatFormat)
    return fmt


BF16, E4M3, E8M0 = (scale_format(name) for name in ("bf16", "e4m3", "e8m0"))
FORWARD = Quantizer(source="forward")  # the codes of the forward pass, or of the gradient's first use
HIGH = Quantizer()
HOPPER, BLACKWELL = "h200", "b200"  # machines that recipes were made for
# Declared, not measured: float32 multiply-adds one after another, for what no catalogued unit multiplies.
CHAIN = Datapath(block=1, fraction_bits=None, rounding=Rounding(), signed_zero=True)
STOCHASTIC = Rounding(mode="stochastic")


def cast(
    name: str | None, scaling: Scaling | None = None, rounding: RoundingName | Rounding = "nearest_even", **fields: Any
) -> Quantizer:
    """Return the quantiser of a format by its name."""
    mode = Rounding(mode=rounding) if isinstance(rounding, str) else rounding  # type: ignore[arg-type]
    return Quantizer(format=None if name is None else get_format(name), scaling=scaling, rounding=mode, **fields)


def layer(
    x: Quantizer,
    w: Quantizer,
    g: Quantizer,
    *,
    w_back: Quantizer | None = None,
    g_back: Quantizer | None = None,
    x_back: Quantizer | None = None,
    fast: bool = False,
    dequantized: bool = False,
) -> LinearConfig:
    """Return a layer with operands x and w forward, g and w_back for dx, g_back and x_back for dw (None: as before).

    ``fast`` is use_fast_accum of the forward product on a machine, ``dequantized`` as in Gemm.
    """
    return LinearConfig(
        fprop=Gemm(a=x, b=w, fast_accum=fast, dequantized=dequantized),
        dgrad=Gemm(a=g, b=w if w_back is None else w_back, dequantized=dequantized),
        wgrad=Gemm(a=g if g_back is None else g_back, b=x if x_back is None else x_back, dequantized=dequantized),
    )
