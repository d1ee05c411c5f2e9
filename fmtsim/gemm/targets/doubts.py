# SPDX-License-Identifier: Apache-2.0
"""Warnings about a call on a target: its order is a guess, or the library drops products at the end of K.

Each warns at the line of the user's code, and not inside ``without_doubts``: of a guess once a process for each target,
then with a count; of dropped products once for each call.
"""

import os
import sys
import sysconfig
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from fmtsim.spec.call import GemmCall
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import FmtsimError, LibraryBugWarning, PlanUnknownWarning

# What decides cuBLASLt's choice is not known: it reads seven attributes of the device (compute capability, shared
# memory, registers, multiprocessors, L2). Answered by an H200's on an H100 they changed no choice of 25,459, yet the
# two cards' own choices differ in 1 % (forward) and 5 % (gradients of weights) of the questions, all by nvjet's parts
# (torch 2.11.0+cu130, cuBLASLt 13.1.0, 2026-11-27). So no rule predicts an H100 PCIe, H100 NVL, GH200 or H20.
_SIBLINGS: Final = {
    **dict.fromkeys(("h100pcie", "h100nvl", "h800"), "h100"), "h20": "h200", "gh200": "h200", "b300": "gb300",
    **dict.fromkeys(("l4", "l40", "rtx4090", "rtx6000ada"), "l40s"), "a800": "a100", "rtx5090": "rtx_blackwell.mma",
    **dict.fromkeys(("a10", "a6000", "rtxa6000", "rtx3090"), "ampere.mma"), "v100": "volta.mma", "t4": "turing.mma",
}  # fmt: skip
"""GPUs without a record, and the target or unit that has their matrix units."""

_silent = ContextVar("silent", default=False)
_warned: set[tuple[type[Warning], str, GemmCall]] = set()
_lock = threading.Lock()
_guesses: Counter[str] = Counter()  # by target, calls whose plans are guesses
_collected: list[list[str]] = []  # of those who collect guesses, the innermost last
# Files that lie between a user's line and a warning: modules, autograd and torch.compile call fmtsim out of torch, and
# models of installed packages call these; Python shows the line of code, which should be the user's.
_INSTALLED = (Path(path) for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_INNER = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[2], Path(torch.__file__).parent, *_INSTALLED))


@contextmanager
def without_doubts() -> Iterator[None]:
    """Silence warnings of guesses and library bugs in this thread; a silenced warning still appears later."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


@contextmanager
def collected_guesses() -> Iterator[list[str]]:
    """Collect what would be said of each call whose plan is a guess, instead of warning."""
    guesses: list[str] = []
    _collected.append(guesses)
    try:
        yield guesses
    finally:
        _collected.pop()


def warn_once(category: type[Warning], target: str, call: GemmCall, text: Callable[[], str]) -> None:
    """Warn of a call on a target, once a process; of guesses, at the first call of a target, the 10th, the 100th ...

    Args:
        category: What the warning is about.
        target: Name of the target.
        call: The facts of the call.
        text: Returns the message; called only if the warning is raised.
    """
    if _silent.get():
        return
    with _lock:
        key = category, target, call
        if key in _warned:
            return
        _warned.add(key)
        guess = category is PlanUnknownWarning
        if guess and _collected:
            _collected[-1].append(text())
            return
        _guesses[target] += guess
        number = _guesses[target]
    if not guess:
        warnings.warn(text(), category, stacklevel=caller_level())
    elif f"{number}".rstrip("0") == "1":
        count = f"{number} calls by now have guessed plans, the last: " if number > 1 else ""
        others = "; guesses of more calls are counted, not named"
        warnings.warn(f"{count}{text()}{others}", category, stacklevel=caller_level())


def caller_level() -> int:
    """Return the stacklevel at which a warning of the calling function names the line of the user's that led to it."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        frame, level = frame.f_back, level + 1
    return level


_STEP, _STEPS, _TILE = 64, 16, 128  # multiples of 64 that are tried; tiles of K are 64 or 128 wide


def products_left_out(k: int, plan: GemmPlan) -> int:
    """Return how many products at the end of each sum of K are never multiplied."""
    return 0 if plan.k_end is None else max(0, k - plan.k_end)


def padded_k(target: Any, call: GemmCall) -> int | None:
    """Return the next K to pad to with zeros so that the target multiplies every product; None where none is known.

    A plan that is a guess counts only where K is whole tiles, which no library is known to drop.
    """
    first = -(-call.k // _STEP) * _STEP
    for k in range(first, first + _STEP * _STEPS, _STEP):
        with without_doubts():
            spec = target.resolve(replace(call, k=k))
        if not products_left_out(k, spec.plan) and (spec.basis != "guess" or k % _TILE == 0):
            return k
    return None


def bug_in_words(target: Any, call: GemmCall, plan: GemmPlan, *, guess: bool) -> str:
    """Return what a target leaves out of a call, and what to do about it."""
    k = padded_k(target, call)
    step = "add the last products by a second call" if k is None else f"pad K with zeros to {k}, where it adds all"
    lost = products_left_out(call.k, plan)
    bug = "a bug of the library, if the guess of its order is right" if guess else "a bug of the library"
    return f"the last {lost} of the {call.k} products of every sum are never multiplied, {bug}; {step}"


def warn_of_bug(target: Any, call: GemmCall, plan: GemmPlan, *, guess: bool) -> None:
    """Warn of products that a library leaves out, once a process for each call.

    Args:
        target: The GPU and its library.
        call: The facts of the call.
        plan: Its accumulation order.
        guess: The order is a guess.
    """
    if products_left_out(call.k, plan):
        what = f"{call.operation} M={call.m} N={call.n} K={call.k} {call.a} x {call.b} -> {call.out}"
        left_out = f"the library of target {target.name} leaves products of {what} out"
        warn_once(
            LibraryBugWarning, target.name, call, lambda: f"{left_out}: {bug_in_words(target, call, plan, guess=guess)}"
        )


def warn_of_native_bug(target: Any, call: GemmCall) -> None:
    """Warn where a library leaves products out of a call that runs natively; what is a guess is not a bug."""
    try:
        with without_doubts():
            spec = target.resolve(call)
    except FmtsimError:  # torch has the call, and the target says nothing of it
        return
    if spec.basis != "guess":
        warn_of_bug(target, call, spec.plan, guess=False)


def sibling_hint(name: str) -> str | None:
    """Return what to take for a GPU that has no record, and how sure it is; None where the name is no such GPU's."""
    sibling = _SIBLINGS.get("".join(letter for letter in name.lower() if letter.isalnum()))
    return sibling and (
        f"no library on a GPU named {name!r} is recorded; {sibling!r} has its matrix units, but accumulation orders "
        "may differ, as 1 to 5 % of an H100's and an H200's do; python -m tools.calibrate --book records those of a GPU"
    )
