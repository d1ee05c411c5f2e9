# SPDX-License-Identifier: Apache-2.0
"""The errors that fmtsim raises; each one says what was given, what is allowed and what to do next."""

import difflib
import reprlib
from collections.abc import Iterable


class FmtsimError(Exception):
    """Base class of every error that fmtsim raises on purpose."""


class FormatError(FmtsimError, ValueError):
    """Report a format, rounding mode or scale rule that is unknown or contradicts itself."""


class ArgumentError(FmtsimError, ValueError):
    """Report an argument whose value does not fit the other arguments."""


class DtypeError(FmtsimError, TypeError):
    """Report a tensor whose dtype the verb does not take."""


class CodeError(FmtsimError, ValueError):
    """Report codes that lie outside their format, or a file whose codes cannot be trusted."""


class DataError(FmtsimError, ValueError):
    """Report data on disk that is missing, empty, truncated or corrupt."""


class DeviceError(FmtsimError, RuntimeError):
    """Report a GPU that cannot run a kernel, or a kernel that cannot be compiled for it."""


class CollectiveError(FmtsimError, RuntimeError):
    """Report ranks that do not answer in a collective."""


class PlanUnknownWarning(UserWarning):
    """Say that the accumulation order of a call is a guess: nothing recorded or tested stands behind it."""


class LibraryBugWarning(UserWarning):
    """Say that a GPU's library leaves products out of every sum of a call, and so does its emulation."""


class CoverageWarning(UserWarning):
    """Say that less of a model is simulated than one would think, or that its schedule stands still."""


class NativeWarning(UserWarning):
    """Say that a GPU's own product is not what its target was recorded with, or that it was emulated instead."""


class KernelWarning(UserWarning):
    """Say that a kernel gave other bits than the general one when it was tried, and is not used."""


def shown(value: object) -> str:
    """Return a value as errors show it: its repr, cut short; what cannot be shown, by its type.

    >>> shown("x" * 1000), shown(10**5000)
    ("'xxxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxxxx'", 'int')
    """
    try:
        return _repr.repr(value)
    except Exception:  # of a huge int, or of an object that fails as it is shown
        return type(value).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of what an error of others says, or its type where it says nothing.

    >>> first_line(ValueError("out of range\\nCUDA kernel errors ...")), first_line(KeyboardInterrupt())
    ('out of range', 'KeyboardInterrupt')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 62


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return how an error goes on after an unknown name: up to three names that are close, nothing where none is.

    >>> did_you_mean("E4M4", ["e4m3", "nvfp4"])
    "; did you mean 'e4m3'?"
    """
    word = name if isinstance(name, str) else shown(name)
    close = difflib.get_close_matches(word[:100].strip().lower(), known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


_OTHERS = {
    "saturate": ("overflow='saturate' or 'ieee'",), "seed": ("generator=",), "axis": ("dim=",),
    "dtype": ("out_dtype=",), "grad_format": ("g=",), "grad": ("g=",), "fmt": ("format=",),
    "unit": ("target=",), "format": ("x=",),
    "block_size": ("block=", "scaling=Scaling(block=)"), "block": ("scaling=Scaling(block=)", "block_size="),
    "scale": ("scaling=Scaling(scale=)",), "scale_rule": ("scaling=Scaling(exponent_rule=)",),
    "accumulator_bits": ("accumulator=, or IntegerDatapath(accumulator_bits=)",),
    "overflow": ("saturate=True or False", "recipe=linear_config(x, overflow=)"),
    **{name: (f"recipe=linear_config(x, {name}=)",) for name in ("rounding", "grad_rounding", "scaling")},
}  # fmt: skip


def keyword_error(what: str, name: str, names: Iterable[str]) -> TypeError:
    """Return the error of a keyword that a verb or record lacks: what says the same here, close names, all names."""
    names = [*names]
    other = next((words for words in _OTHERS.get(name, ()) if words.partition("=")[0] in names), None)
    hint = f"; write {other}" if other else did_you_mean(name, names)
    return TypeError(f"{what}() got an unexpected keyword argument {name!r}{hint} (it takes {', '.join(names)})")


def position_error(what: str, value: object, first: Iterable[str], keywords: Iterable[str]) -> TypeError:
    """Return the error of one argument by position too many: a word is meant as the target of a verb that has one."""
    keywords = [*keywords]
    meant = f"target={shown(value)}" if isinstance(value, str) and "target" in keywords else "= ".join([*keywords, ""])
    step = f"write {meant.strip()}" if meant else f"leave {shown(value)} out"
    return TypeError(f"{what}() takes {', '.join(first) or 'nothing'} by position; {step}")
