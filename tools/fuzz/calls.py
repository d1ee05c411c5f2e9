# SPDX-License-Identifier: Apache-2.0
"""Calls of verbs, drawn from seeds: a result has the bits of the same call on plain copies of its tensors."""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import fmtsim
from fmtsim.gemm.targets.target import list_targets
from fmtsim.support.errors import FmtsimError, shown
from tools.fuzz import tensors
from tools.fuzz.target import Target

Values = dict[str, Any]


class Call:
    """A call of a verb, drawn from a seed by ``draw(Random)``: the same seed gives the same call."""

    def __init__(self, draw: Callable[[Random], tuple[Any, list[Any], Values]], seed: int) -> None:
        self.draw, self.seed = draw, seed

    @functools.cached_property
    def drawn(self) -> tuple[Any, list[Any], Values]:
        """The function, its arguments and its keywords."""
        compile_products()
        with torch.random.fork_rng([]), warnings.catch_warnings(action="ignore"):
            return self.draw(Random(self.seed))

    def __repr__(self) -> str:
        function, arguments, keywords = self.drawn
        words = [_shown(value) for value in arguments]
        words += [f"{name}={_shown(value)}" for name, value in keywords.items()]
        return f"seed {self.seed}: {getattr(function, '__name__', function)}({', '.join(words)})"

    def run(self) -> Any:
        """Call, then call again on plain copies, and compare the bits."""
        function, arguments, keywords = self.drawn
        # A GPU's library adds in an order of the layout: there only tensors that are contiguous anyway are copied.
        layout_counts = any(isinstance(value, str) and value in list_targets() for value in keywords.values())
        copy = _copied_if_contiguous if layout_counts else tensors.plain
        copies, plain = [copy(value) for value in arguments], {name: copy(value) for name, value in keywords.items()}
        torch.manual_seed(0)
        result = tensors.bits(function(*arguments, **keywords))
        with contextlib.suppress(FmtsimError):  # what is refused may depend on the kind of tensor, not on its numbers
            torch.manual_seed(0)
            again = tensors.bits(function(*copies, **plain))
            assert result == again, "other bits than on plain copies"


def _copied_if_contiguous(value: Any) -> Any:
    strided = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested
    return tensors.plain(value) if not strided or value.is_contiguous() else value


@functools.cache
def compile_products() -> None:
    """Have the kernels of products compiled, which takes longer than a call may."""
    for name in UNITS:
        for x in (torch.ones(2, 2, dtype=torch.float16), torch.ones(40, 40, dtype=torch.float16)):
            fmtsim.mm(x, x, target=name)


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return shown(value)
    kind = type(value).__name__ if type(value) is not Tensor else ""
    strides = "" if value.layout != torch.strided or value.is_nested else f" strides {value.stride()}"
    lazy = " negated" if value.layout == torch.strided and value.is_neg() else ""
    size = "nested" if value.is_nested else tuple(value.shape)
    return f"<{kind}{value.dtype} {size}{strides} on {value.device} {value.layout}{lazy} grad {value.requires_grad}>"


def target(name: str, count: int) -> Callable[[Callable[[Random], Any]], Callable[[Random], Any]]:
    """Register what draws a call as a fuzz target, with the seeds in failed.txt of calls that were defects once."""

    def register(draw: Callable[[Random], Any]) -> Callable[[Random], Any]:
        seeds = st.uuids(version=4).map(lambda drawn: Call(draw, drawn.int >> 64))
        once = tuple(Call(draw, int(seed)) for seed in FAILED.get(name, ()))
        TARGETS.append(Target(f"verb.{name}", seeds, Call.run, once, count=count))
        return draw

    return register


TARGETS: list[Target] = []
_LINES = (line.split() for line in Path(__file__).with_name("failed.txt").read_text().splitlines() if line[0] != "#")
FAILED = {name: seeds for name, *seeds in _LINES}
FORMATS = (
    "e4m3", "e5m2", "e2m1", "e3m2", "fp16", "bf16", "fp32", "fp64", "tf32", "int8", "int4", "uint4", "int8_half", "nf4",
    "lns8_g8", "e8m0", "mxfp4", "mxfp8_e4m3", "nvfp4", "e4m3_1x128", "e4m3_128x128", "int8_channel", "int4_g32",
    "uint4_g32_zp", "logfmt8", "e4m3_tensor", "p3109_k5p2se", torch.float8_e5m2, torch.bfloat16,
)  # fmt: skip
ROUNDINGS = ("nearest_even", "nearest_away", "nearest_toward_zero", "toward_zero", "up", "down", "to_odd")
UNITS = ("hopper.wgmma", "volta.mma", "blackwell.tcgen05", "exact", "fp32_fma", "cdna3.mfma", "ampere.mma")
RECIPES = ("te_current", "te_block", "te_mxfp8", "te_nvfp4", "te_delayed", "mxfp4", "int8_mixed")


def maybe(r: Random, values: Values, wrong: float = 0.04, **choices: Any) -> Values:
    """Add some keywords of a verb, a few of them wrong; a choice is a tuple of values or a function of the draw."""
    for name, choice in choices.items():
        kind = r.random()
        if kind < wrong:
            values[name] = tensors.junk(r)
        elif kind < 0.25:
            values[name] = choice(r) if callable(choice) else r.choice(choice)
    return values


def either(r: Random, value: Any, wrong: float = 0.03) -> Any:
    """Return a value, or a wrong one in its place."""
    return tensors.junk(r) if r.random() < wrong else value


def accepted(function: Callable[..., Any], options: Values) -> Values:
    """Return the keywords that a function takes."""
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}


def backward(y: Any) -> Any:
    """Return a result behind its backward pass, where it has one."""
    if isinstance(y, Tensor) and y.requires_grad and y.numel():
        y.sum().backward()
    return y


def net(r: Random, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width, bias=r.random() < 0.5))


def junk_of(r: Random, function: Callable[..., Any], usual: Values) -> Values:
    """Return good keywords of a function with one or two wrong ones."""
    names = [
        name for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD) and name != "self"
    ]  # fmt: skip
    return usual | {r.choice(names): tensors.junk(r) for _ in range(r.randint(1, 2))}


def silent(function: Callable[..., Any]) -> Callable[..., None]:
    """Return a function that calls another one, shows the result as text, and returns nothing to compare."""

    def run(*arguments: Any, **keywords: Any) -> None:
        result = function(*arguments, **keywords)
        str(result), repr(result)

    run.__name__ = getattr(function, "__name__", "run")
    return run


class Passed(FmtsimError):
    """What a function that was passed raised itself, which reaches the caller."""


def passed(value: Any) -> Any:
    """Return a function whose own errors are known as such; other values as they are."""
    if not callable(value):
        return value

    @functools.wraps(value)
    def function(*arguments: Any) -> Any:
        try:
            return value(*arguments)
        except Exception as error:
            raise Passed(f"a function that was passed raised {error!r}") from error

    return function
