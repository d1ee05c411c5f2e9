# SPDX-License-Identifier: Apache-2.0
"""The named schemes: how published systems keep their optimizer states."""

from dataclasses import replace
from typing import Any

import torch

from fmtsim.formats.element import ElementFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Block
from fmtsim.optim.rules import ADAMW
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.optimizer import STATE_RULES, Scheme, StateFormat, in_parameter
from fmtsim.support.errors import ArgumentError, did_you_mean, shown
from fmtsim.support.table import Row, markdown

_BNB = "bitsandbytes 95f9af3, csrc/kernels.cu; Dettmers et al., arXiv:2110.02861"
_MSAMP = "Peng et al., FP8-LM, arXiv:2310.18313; Azure/MS-AMP 9746ea8, optim/adamw.py"
_INTEL = "Fishman et al., arXiv:2409.12517, section 5; Anonymous1252022/Megatron-DeepSpeed 20029cf"
_COAT = "Xi et al., COAT, arXiv:2410.19313, section 4; NVlabs/COAT 80ec99f"
_AO = "pytorch/ao 36027d8, torchao/optim"
_SMALL = 4096


def element(name: str) -> ElementFormat:
    """Return an element format by name."""
    fmt = get_format(name)
    assert isinstance(fmt, ElementFormat)  # the names of this file are elements
    return fmt


def scaled_state(
    fmt: str | ElementFormat, rule: str, block: Block = (None, None), least: float = 0.0, **more: Any
) -> StateFormat:
    """Return a state in an element format, its scales by a rule of ``STATE_RULES``."""
    scaling = STATE_RULES[rule]
    scaling = replace(scaling, block=block, eps=least or scaling.eps)
    return StateFormat(format=element(fmt) if isinstance(fmt, str) else fmt, scaling=scaling, **more)


def _blocks(name: str, block: int, **more: Any) -> StateFormat:
    return scaled_state(name, "amax", (1, block), **more)


def _expanded(least_of: str) -> dict[str, Any]:
    fmt = _blocks("e4m3", 128, expand=True, least_of=least_of)
    return {"first": fmt, "second": fmt}


def _bnb(name: str, block: int) -> Scheme:
    return Scheme(
        name=name,
        source=_BNB,
        first=_blocks("bnb_dynamic8", block, keep_sign=True),
        second=_blocks("bnb_dynamic8_unsigned", block),
        minimum=_SMALL,
        decay="after",
        folded=True,
        nonfinite="zero",
    )


def _ao(name: str, first: str, second: str, block: int) -> Scheme:
    states = []
    for fmt in (first, second):
        ties = "even" if fmt == "e4m3" else "up"  # a cast of torch's, and a search of torchao's own
        states.append(_blocks(fmt, block, least=1e-12, ties=ties))
    return Scheme(name=name, source=_AO, first=states[0], second=states[1], minimum=_SMALL, whole_blocks=True)


def _fp8lm(name: str, weights: str, first: str | None = None, second: str | None = None) -> Scheme:
    states = [StateFormat() if fmt is None else scaled_state(fmt, "power_of_two") for fmt in (first, second, weights)]
    return Scheme(name=name, source=_MSAMP, first=states[0], second=states[1], weights=states[2])


def _bf16(rounding: Rounding) -> StateFormat:
    return StateFormat(format=element("bf16"), rounding=rounding)


_SCHEMES = (
    Scheme(name="fp32", source="float32 states: what the others are compared with"),
    _bnb("bnb8", 256),
    _bnb("bnb8_2048", 2048),
    _fp8lm("fp8lm", "fp16", "e4m3", "fp16"),
    _fp8lm("fp8lm_o1", "fp16"),
    _fp8lm("fp8lm_v8", "fp16", "e4m3", "e4m3"),
    _fp8lm("fp8lm_w8", "e4m3", "e4m3", "fp16"),
    Scheme(
        name="intel_2t",
        source=_INTEL,
        first=scaled_state("e4m3_ieee", "reciprocal"),
        second=scaled_state("e5m2", "reciprocal"),
        weights=scaled_state("fp16", "reciprocal"),
    ),
    Scheme(name="coat", source=f"{_COAT}: as its kernel", **_expanded("lanes")),
    Scheme(
        name="coat_fixed",
        source=f"{_COAT}: as its kernel's comments intend, zeros hiding no other magnitude",
        **_expanded("numbers"),
    ),
    Scheme(
        name="coat_plain",
        source=f"{_COAT}: without expansion, for comparison",
        first=_blocks("e4m3", 128),
        second=_blocks("e4m3", 128),
    ),
    _ao("ao_8bit", "bnb_dynamic8", "bnb_dynamic8_unsigned", 256),
    _ao("ao_4bit", "dynamic4", "linear4_unsigned", 128),
    _ao("ao_fp8", "e4m3", "e4m3", 256),
    Scheme(
        name="deepseek_v3",
        source="DeepSeek-V3, arXiv:2412.19437, section 3.3.3: moments in bfloat16",
        first=_bf16(Rounding()),
        second=_bf16(Rounding()),
    ),
    Scheme(
        name="bf16_sr",
        source=f"{_AO}: bf16_stochastic_round, 16 random bits below the last place; moments in float32",
        weights=_bf16(Rounding(mode="stochastic", random_bits=16)),
    ),
    Scheme(
        name="int8_weights",
        source=f"{_AO}, prototype/quantized_training/int8.py; gpu-mode/lectures 7cb40f6, lecture 30",
        weights=scaled_state("int8_full", "inverse", (1, None), rounding=Rounding(mode="stochastic")),
        matrices=True,
    ),
    Scheme(
        name="lns_madam",
        source="Zhao et al., LNS-Madam, arXiv:2106.13914; jiaweizzhao/lns-madam-optimizer 42eba0a",
        weights=scaled_state("lns16_g2048", "fixed"),
    ),
)
_BY_NAME = {scheme.name: scheme for scheme in _SCHEMES}


def get_scheme(scheme: str | Scheme) -> Scheme:
    """Return the scheme of a name, or the record itself.

    Raises:
        ArgumentError: There is no scheme of that name.
    """
    if isinstance(scheme, Scheme):
        return scheme
    if not isinstance(scheme, str) or scheme not in _BY_NAME:
        hint = did_you_mean(scheme, _BY_NAME)
        raise ArgumentError(f"state={shown(scheme)} is unknown{hint} (choose one of {', '.join(_BY_NAME)})")
    return _BY_NAME[scheme]


def list_schemes() -> list[str]:
    """Return the names of all schemes."""
    return list(_BY_NAME)


SHAPE = (1024, 1024)
"""The matrix whose bytes a parameter are given; a bfloat16 one where a scheme keeps weights in bfloat16."""

_SCALES = {
    "amax": "amax",
    "inverse": "amax, by reciprocal",
    "reciprocal": "top / amax",
    "power_of_two": "power of two",
    "fixed": "fixed at first",
}


def describe(fmt: StateFormat) -> str:
    """Return a state format in a few words."""
    if fmt.format is None:
        return "float32"
    words = [fmt.format.name]
    if fmt.rule is not None:
        outer, inner = fmt.block
        where = "a tensor" if outer is None else "a row" if inner is None else f"{inner}"
        words.append(f"{where}: {_SCALES[fmt.rule]}")
    words += ["expanded"] * fmt.expand + ["SR"] * fmt.stochastic + ["ties up"] * (fmt.ties == "up")
    return ", ".join(words)


def bytes_per_parameter(scheme: Scheme) -> float:
    """Return the bytes that AdamW's states take for each element of a large matrix."""
    count = SHAPE[0] * SHAPE[1]
    formats = scheme.formats(SHAPE, ADAMW.slots)
    apart = [fmt for slot, fmt in formats.items() if slot != "weights" or not in_parameter(fmt, torch.bfloat16)]
    return sum(fmt.bytes_of(SHAPE) for fmt in apart) / count


def scheme_table() -> str:
    """Return the table."""
    rows: list[Row] = [("scheme", "first moment", "second moment", "weights", "bytes", "source")]
    for scheme in map(get_scheme, list_schemes()):
        states = [describe(fmt) if fmt else "" for fmt in (scheme.first, scheme.second, scheme.weights)]
        rows.append((f"`{scheme.name}`", *states, f"{bytes_per_parameter(scheme):.3f}", scheme.source))
    return markdown(rows, left=(0, 1, 2, 3, 5))
