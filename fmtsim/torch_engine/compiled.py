# SPDX-License-Identifier: Apache-2.0
"""Casts that torch.compile makes one kernel of, for GPUs without kernels of our own: the same steps, the same bits.

The steps of ``elements`` are integer operations, which no compiler rounds otherwise. They are traced once for each cast
and pair of dtypes, with the number of elements left open, and compiled when a large tensor comes first.
"""

import warnings
from functools import cache, lru_cache
from typing import Any

import torch

from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.spec.cast import CastSpec, Random, RandomKey
from fmtsim.support.replay.gpu import captures
from fmtsim.torch_engine import elements
from fmtsim.torch_engine.floats import BIT_DTYPES
from fmtsim.torch_engine.philox import cut, in_order, lanes, pieces_of, sharing

LEAST = 1 << 18
"""Elements from which a cast is compiled; below, the launches of torch operations take about as long."""


def cast(x: torch.Tensor, spec: CastSpec, random: Random, out: torch.Tensor) -> bool:
    """Cast x into out by a compiled kernel, codes where out holds integers; return False where there is none."""
    if not (x.is_contiguous() and out.is_contiguous()) or not compiles_casts(x.device.type) or x.numel() < LEAST:
        return False
    stochastic = spec.rounding.mode == "stochastic"
    if not isinstance(spec.format, FloatFormat | IntFormat) or isinstance(random, RandomKey) != stochastic:
        return False
    if torch.float64 in (x.dtype, out.dtype) or captures(x.device):
        return False
    run = compiled(spec, x.dtype, out.dtype, x.device)
    if run is None:
        return False
    words: list[torch.Tensor] = []
    if isinstance(random, RandomKey):
        draw, words = drawn(x.device), _lanes(spec, x.numel(), x.device)
        if draw is None:
            return False
        draw(torch.tensor(pieces_of(random)).to(x.device), *words)
    # arguments that share memory would be a program of their own
    source = x.view(-1) if x.data_ptr() != out.data_ptr() else x.view(-1).clone()
    run(source, out.view(-1).view(BIT_DTYPES.get(out.dtype, out.dtype)), *words)
    return True


def _lanes(spec: CastSpec, count: int, device: torch.device) -> list[torch.Tensor]:
    """Return room for the words of a cast of so many elements: four tensors, each of one of a counter's words."""
    groups = -(-count // (64 * sharing(spec.rounding)))
    return [torch.empty(16 * groups, dtype=torch.int32, device=device) for _ in range(4)]


@lru_cache(maxsize=256)
def compiled(spec: CastSpec, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device) -> Any:
    """Return a function of flat x, the bits of out and the words of a key, None where none can be made."""
    dtypes = dtype, BIT_DTYPES.get(out_dtype, out_dtype)
    x, out = (torch.empty(650, dtype=of, device=device) for of in dtypes)
    words = _lanes(spec, 650, device) if spec.rounding.mode == "stochastic" else []
    return _program(f"casts to {spec.format.name}", device, _steps(spec, out_dtype), x, out, *words)


@cache
def drawn(device: torch.device) -> Any:
    """Return a function of a key's pieces and four int32 tensors that writes words there, None where none can be made.

    It is a kernel of its own: in a cast's, each element would compute all four words of its counter.
    """
    room = [torch.empty(176, dtype=torch.int32, device=device) for _ in range(4)]
    return _program("random words", device, _draw, torch.zeros(4, dtype=torch.int64, device=device), *room)


def _program(what: str, device: torch.device, steps: Any, *like: torch.Tensor) -> Any:
    """Return a compiled function of tensors like these, of any sizes; None, and a warning, where none can be made."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch imports says of itself
            from torch.fx.experimental.proxy_tensor import make_fx  # late: it imports much

            graph = make_fx(steps, tracing_mode="symbolic")(*like)
            run = torch.compile(graph, dynamic=True, fullgraph=True)
            run(*like)
    except Exception as error:  # of a compiler, its cache, its driver
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        warnings.warn(
            f"{what} on {device} are one torch operation after another, which is slow: torch.compile says {reason}",
            stacklevel=2,
        )
        return None
    return run


def _draw(key: torch.Tensor, *room: torch.Tensor) -> None:
    counter = torch.arange(room[0].numel(), dtype=torch.int64, device=key.device)
    for lane, words in zip(room, lanes(counter, key.unbind(0)), strict=True):
        lane.copy_(words)


def _steps(spec: CastSpec, dtype: torch.dtype) -> Any:
    """Return the steps of a cast; they write bits, since compilers widen 16-bit floats, and NaN may come back other."""
    fmt, rounding = spec.format, spec.rounding
    assert isinstance(fmt, FloatFormat | IntFormat)

    def steps(x: torch.Tensor, out: torch.Tensor, *drawn_words: torch.Tensor) -> None:
        count, words = x.numel(), None
        if drawn_words:
            words = cut(in_order(drawn_words, -(-count // sharing(rounding))), rounding, count)
        codes = elements.encode(x, fmt, rounding, spec.overflow, words)
        out.copy_(elements.value_bits(codes, fmt, dtype) if dtype.is_floating_point else codes)

    return steps


@cache
def compiles_casts(kind: str) -> bool:
    """Return True if torch.compile makes casts for a type of device: by Triton, on GPUs of NVIDIA, AMD and Intel."""
    if kind not in ("cuda", "xpu"):
        return False
    from torch.utils._triton import has_triton

    return bool(has_triton())
