# SPDX-License-Identifier: Apache-2.0
"""``fmtsim compare``: two files of tensors, bit for bit."""

import argparse
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fmtsim
from fmtsim.lab.cli.arguments.compare import SUFFIXES
from fmtsim.lab.cli.output import MISMATCH, answer, format_table
from fmtsim.support.errors import ArgumentError, DataError, FmtsimError
from fmtsim.support.files import check_file

if TYPE_CHECKING:
    from fmtsim import Comparison

ALONE = "array"  # the name of what a .npy file holds

Tensors = Mapping[str, Callable[[], Any]]
"""Tensors of a file by name, read when called."""


def run(arguments: argparse.Namespace) -> int:
    """Compare and print; 0 where all bits agree, 1 where some do not or a tensor is missing."""
    if arguments.plot:
        check_file("--plot", Path(arguments.plot))
    actual, expected = load(arguments.actual), load(arguments.expected)
    if len(actual) == len(expected) == 1:  # two tensors, whatever they are called
        (name,) = expected
        actual = {name: next(iter(actual.values()))}
    found: dict[str, Comparison] = {}
    errors: dict[str, str] = {}
    for name in dict.fromkeys((*expected, *actual)):
        if name not in actual or name not in expected:
            errors[name] = f"only in {arguments.expected if name in expected else arguments.actual}"
            continue
        try:
            found[name] = fmtsim.compare(actual[name](), expected[name]())
        except DataError:
            raise
        except FmtsimError as error:
            if len(expected) == 1:
                raise
            errors[name] = str(error)
    equal = not errors and all(c.equal for c in found.values())
    record = {"equal": equal, "errors": errors, "tensors": {name: c.to_dict() for name, c in found.items()}}
    answer(arguments, record, lambda: _text(found, errors))
    if arguments.plot:
        from fmtsim.lab.analysis.comparison import plot_ulps

        plot_ulps(found, arguments.plot)
    return 0 if equal else MISMATCH


def load(text: str) -> Tensors:
    """Return the tensors of a file, or the one that ``FILE:NAME`` names; each is read when it is asked for.

    Raises:
        ArgumentError: there is no such file or tensor, or its suffix is not known.
        DataError: the file cannot be read.
    """
    path, name = Path(text), ""
    if not path.exists() and ":" in text:
        before, _, name = text.rpartition(":")
        path = Path(before)
    if not path.is_file():
        raise ArgumentError(f"{text}: no such file; pass a {', '.join(SUFFIXES)} file, or FILE:NAME for one tensor")
    tensors = _open(path)
    if not name:
        return tensors
    if name not in tensors:
        raise ArgumentError(f"{path} has no tensor {name!r}; it has {', '.join(tensors) or 'none'}")
    return {name: tensors[name]}


def _open(path: Path) -> Tensors:
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    import numpy

    if path.suffix not in SUFFIXES:
        raise ArgumentError(f"{path} is of no known kind; pass a {', '.join(SUFFIXES)} file")

    def reader(name: str) -> Callable[[], Any]:
        return lambda: _reading(path, lambda: content if name == ALONE and path.suffix == ".npy" else content[name])

    if path.suffix == ".npz":  # numpy leaves a file open that is not an archive
        _reading(path, lambda: zipfile.ZipFile(path).close())
    # Pages of a .npy file are read as they are compared; "c" because torch wants memory it may write to.
    content = _reading(path, lambda: numpy.load(path, mmap_mode="c", allow_pickle=False))
    return {name: reader(name) for name in ([ALONE] if path.suffix == ".npy" else content.files)}


def _open_safetensors(path: Path) -> Tensors:
    try:
        from safetensors import safe_open
    except ImportError:
        raise DataError(f"{path} needs safetensors, which is not installed; pip install 'fmtsim[train]'") from None

    def read(name: str) -> Any:
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except Exception as error:  # whatever the library makes of a file that is none, or torch of a dtype it lacks
            raise DataError(f"cannot read {name} of {path}: {error}") from error

    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
    except Exception as error:
        raise DataError(f"cannot read {path}: {error}") from error
    return {name: lambda name=name: read(name) for name in names}  # type: ignore[misc]


def _reading(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # whatever numpy makes of a file that is none
        raise DataError(f"cannot read {path}: {type(error).__name__}: {error}") from error


def _text(found: Mapping[str, "Comparison"], errors: Mapping[str, str]) -> str:
    if len(found) == 1 and not errors:
        return str(next(iter(found.values())))
    rows = [_row(name, c) for name, c in found.items()]
    header = ("tensor", "dtype", "elements", "different", "max ulp", "median", "max relative")
    parts = [format_table(header, rows, left=(0, 1))] if rows else []
    parts += [f"{name}: {message}" for name, message in errors.items()]
    parts += [f"{name}: first difference {c.first}" for name, c in found.items() if not c.equal]
    if not errors and all(c.equal for c in found.values()):
        parts.append("all bits agree")
    return "\n".join(parts)


def _row(name: str, c: "Comparison") -> tuple[str, ...]:
    ulps = ("-", "-") if c.max_ulp is None else (f"{c.max_ulp:,}", f"{c.median_ulp:,}")
    return (name, c.dtype, f"{c.count:,}", f"{c.mismatches:,}", *ulps, f"{c.max_relative:.3g}")
