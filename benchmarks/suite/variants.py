# SPDX-License-Identifier: Apache-2.0
"""The cases of ``python -m benchmarks.suite variants``: what costs lines, beside what would serve in its place."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

import fmtsim
from benchmarks.suite import layers
from benchmarks.suite.timing import Action, Clock, clock_of, in_turns
from fmtsim import cpu, torch_engine
from fmtsim.distributed import arithmetic, collective, get_reduction
from fmtsim.gemm.layers import compile as lowering
from fmtsim.lab.training.run import bounded_threads
from fmtsim.support.replay.programs import Programs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_STEPS = ("fp32", "bnb8", "ao_8bit", "int8_weights", "Madam:lns_madam")
_MISTYPED = "from fmtsim.lab.cli import main, names; {}; main.main(['mm', '8', '8', '8', '--target', 'zzz'])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Name a variant; ``actions`` returns it and what replaces it, with the same bits, on ``DEVICE``."""

    name: str
    actions: Callable[[], tuple[Action, Action]]
    clock: Clock | None = None


def _under(context: Callable[[], Any], action: Action) -> Action:
    def run() -> None:
        with context():
            action()

    return run


@contextmanager
def _torch_casts() -> Iterator[None]:
    """Let torch operations take the place of the CPU's kernels of casts."""
    with ExitStack() as stack:
        for verb in ("quantize", "encode", "decode"):
            stack.enter_context(patch.object(cpu, verb, getattr(torch_engine, verb)))
        yield


def _cast(verb: str, name: str) -> tuple[Action, Action]:
    x = torch.randn(1 << 10, 1 << 12, generator=torch.Generator().manual_seed(0))
    action = fmtsim.encode(x, name).decode if verb == "decode" else partial(getattr(fmtsim, verb), x, name)
    return action, _under(_torch_casts, action)


def _step(name: str) -> tuple[Action, Action]:
    """Return steps of an optimizer on one matrix: casts of states keep their kernels under torch operations."""
    rows = 1 << 12 if DEVICE == "cpu" else 1 << 16
    p = torch.nn.Parameter(torch.randn(rows, 1 << 10, generator=torch.Generator().manual_seed(0)).to(DEVICE) * 0.02)
    p.grad = torch.randn_like(p) * 1e-3
    rule, _, scheme = name.rpartition(":")
    step = _waiting(getattr(fmtsim.optim, rule or "AdamW")([p], lr=1 / 1024, state=scheme).step)
    engine: Any = cpu if DEVICE == "cpu" else fmtsim.cuda
    none: dict[str, Any] = {
        "supports_optimizer": lambda rule, scheme: False,
        "optimizer_steps": lambda rule, steps, *_: steps,
    }
    return step, _under(lambda: patch.multiple(engine, **none), step)


def _waiting(action: Action) -> Action:
    def run() -> None:
        action()
        layers.wait(DEVICE)

    return run


def _model(mode: str, recipe: str) -> layers.Step:
    case = layers.Case(model="llama", mode=mode, recipe=recipe)
    step = layers.Step(case, layers.sizes_of(DEVICE)["llama"], DEVICE)
    step.warm_up()
    return step


def _replay(recipe: str) -> tuple[Action, Action]:
    step = _model("eager", recipe).round
    return step, _under(lambda: patch.object(Programs, "run", _decided), step)


def _decided(programs: Programs, key: Any, tensors: Any, function: Callable[[], Any], alike: int = 0) -> Any:
    """Run a function as ``Programs.run`` does, never from a recording."""
    return function(), None


@contextmanager
def _fallbacks() -> Iterator[None]:
    """Let inductor call operators as any library's: no lowerings, and no direct calls that are replayed."""
    from torch._inductor.lowering import lowerings

    installed = [*lowering._lowered, *lowering._called]
    with ExitStack() as stack:
        for table in (lowering._lowered, lowering._called):
            stack.enter_context(patch.dict(table, clear=True))
        stack.enter_context(patch.dict(lowerings))
        for operator in installed:
            lowerings.pop(operator, None)
        yield


def _compiled(recipe: str) -> tuple[Action, Action]:
    import torch._inductor.config

    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        lowered = _model("default", recipe)
        with _fallbacks():
            return lowered.round, _model("default", recipe).round


def _reduction(megabytes: int) -> tuple[Action, Action]:
    """Return the work that one rank of eight does for a sum over a ring, without messages."""
    from benchmarks.collectives import Alone, normal

    x = normal(megabytes, 0, torch.device(DEVICE))
    ranks: Any = Alone(8)
    batch, ring = arithmetic.Batch(x.unsqueeze(0), (x.numel(),)), replace(get_reduction("msamp"), algorithm="ring")
    reduce: Any = partial(collective.reduce_batch, batch, ring, None, 0, ranks, torch.empty_like(x), scatter=False)
    action = _waiting(reduce)

    def stages(*how: Any) -> collective.Stages:
        return collective.Stages(*how[:5])

    return action, _under(lambda: patch.object(collective, "stages_of", stages), action)


def _mistyped() -> tuple[Action, Action]:
    """Return programs that refuse a target's name: by the list of names, and by the verb, which imports torch."""
    codes = (_MISTYPED.format("0"), _MISTYPED.format("names.check_names = lambda *_: None"))
    first, second = (partial(subprocess.run, [sys.executable, "-c", code], capture_output=True) for code in codes)
    return first, second


def _children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _cases() -> Iterator[Case]:
    for name in _STEPS:
        yield Case(name=f"step {name}", actions=partial(_step, name))
    if DEVICE == "cuda":
        yield Case(name="reduction 100 MB", actions=partial(_reduction, 100))
        for recipe in ("te_current", "te_mxfp8", "te_nvfp4", "quartet"):
            yield Case(name=f"replay {recipe}", actions=partial(_replay, recipe))
        for recipe in ("te_current", "te_mxfp8"):
            yield Case(name=f"lowering {recipe}", actions=partial(_compiled, recipe))
        return
    for verb, name in (("quantize", "logfmt8"), ("quantize", "logfmt10"), ("decode", "logfmt8"), ("decode", "logfmt10"),
                       ("encode", "q4_0"), ("encode", "q4_k"), ("encode", "q6_k")):  # fmt: skip
        yield Case(name=f"{verb} {name}", actions=partial(_cast, verb, name))
    yield Case(name="mistyped name", actions=_mistyped, clock=_children)


CASES = tuple(_cases())


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Hold the median seconds of a variant and of what replaces it, in turns; on a CPU of one thread."""

    case: Case
    seconds: float
    plain_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        ratio = self.seconds / self.plain_seconds
        times = {"seconds": self.seconds, "plain_seconds": self.plain_seconds}
        return {"case": self.case.name, "ratio": ratio, **times}


def measure(case: Case, repeats: int) -> Result:
    """Return the result of one case."""
    clock = case.clock or (clock_of(1) if DEVICE == "cpu" else time.perf_counter)
    with bounded_threads(1):
        seconds, plain_seconds = in_turns(case.actions(), repeats, 1, clock)
    return Result(case=case, seconds=seconds, plain_seconds=plain_seconds)
