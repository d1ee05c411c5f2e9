# SPDX-License-Identifier: Apache-2.0
"""Lines that a type checker has to judge: mypy, which the default check runs, finds an ignore without an error."""

import torch

import fmtsim


def right(x: torch.Tensor) -> None:
    """Pass what is allowed."""
    fmtsim.quantize(x, "e4m3", rounding="stochastic", overflow="saturate")
    fmtsim.encode(x, "e4m3", rounding="rne")
    fmtsim.linear_config(x="e4m3", w=None, g="e5m2", grad_rounding="sr", scaling="tensor")
    fmtsim.list_formats("block")
    fmtsim.Quantizer(format="e4m3", rounding="rne")
    fmtsim.Quantizer(format=torch.float8_e5m2, rounding=fmtsim.Rounding(mode="sr"))
    fmtsim.convert(torch.nn.Linear(4, 4), recipe=fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3", scaling="channel"))
    fmtsim.observe(torch.nn.Linear(4, 4)).worst(3, by="sqnr")


def wrong(x: torch.Tensor) -> None:
    """Mistype roundings, an overflow rule and a family of formats."""
    fmtsim.quantize(x, "e4m3", rounding="stochstic")  # type: ignore[arg-type]
    fmtsim.encode(x, "e4m3", rounding="rtn")  # type: ignore[arg-type]
    fmtsim.quantize(x, "e4m3", overflow="saturated")  # type: ignore[arg-type]
    fmtsim.linear_config(x="e4m3", w=None, g=None, rounding="nearst")  # type: ignore[arg-type]
    fmtsim.list_formats("blocks")  # type: ignore[arg-type]
    fmtsim.quantize(x, "mxfp8", scale_rule="flor")  # type: ignore[arg-type]
    fmtsim.Quantizer(format="e4m3", rounding="nearst")  # type: ignore[arg-type]
    fmtsim.Quantizer(formt="e4m3")  # type: ignore[call-arg]
    fmtsim.Rounding(mode="stochastc")  # type: ignore[arg-type]
    fmtsim.linear_config(x="e4m3", w=None, g=None, scaling="tensors")  # type: ignore[arg-type]
    fmtsim.convert(torch.nn.Linear(4, 4), recipe=fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3", scaling="block16"))  # type: ignore[arg-type]
    fmtsim.Scaling(exponent_rule="flor")  # type: ignore[arg-type]
