# SPDX-License-Identifier: Apache-2.0
"""Where the engines keep what they have compiled: files that are whole or not there at all."""

import errno
import hashlib
import os
import tempfile
import warnings
from pathlib import Path

from fmtsim.support.errors import DataError
from fmtsim.support.files import remove_stale, write_file

_DIGEST = 32  # bytes of SHA-256, over the name and the content of a file, before the content
_said: set[str] = set()


def kernel_folder(name: str) -> Path | None:
    """Return a folder of compiled kernels, made if need be; None (with one warning) where none can be written.

    ``FMTSIM_CACHE_DIR`` names its parent; otherwise ``fmtsim`` in ``XDG_CACHE_HOME`` or ``~/.cache`` is that.
    """
    chosen = os.environ.get("FMTSIM_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # an unknown home leaves its "~"
    folder = Path(chosen or f"{base}/fmtsim") / name
    try:
        if not chosen and base.startswith("~"):
            raise OSError(errno.ENOENT, "no home folder")
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        remove_stale(folder)
    except OSError as error:
        _warn_unwritable(folder, error)
        return None
    return folder


def save(path: Path, content: bytes) -> None:
    """Write a file of the cache, which appears whole or not at all; one warning says where there is no room."""
    try:
        write_file(path, _digest(path, content) + content)
    except DataError as error:
        _warn_unwritable(path.parent, error.__cause__)


def load(path: Path) -> bytes | None:
    """Return the content of a file of the cache; None where there is none, or (with one warning) a damaged one.

    A file that has another's name, which is made of what its kernel was compiled from, is damaged too.
    """
    try:
        stored = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        warn_damaged(path, f"cannot be read ({error.strerror})")
        return None
    content = stored[_DIGEST:]
    if _digest(path, content) != stored[:_DIGEST]:
        warn_damaged(path, "is truncated, was changed or is another kernel's")
        return None
    return content


def _digest(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\0" + content).digest()


def _warn_unwritable(folder: Path, error: BaseException | None) -> None:
    """Say once that kernels are not kept in a folder."""
    _warn_once(
        f"fmtsim cannot write its kernel cache {folder}",
        f" ({getattr(error, 'strerror', None) or error}); kernels are compiled anew in every process. "
        "Set FMTSIM_CACHE_DIR to a folder that can be written.",
    )


def warn_damaged(path: Path, how: str) -> None:
    """Warn once that a file of the cache is of no use, and that its kernel is compiled again."""
    _warn_once(
        f"fmtsim found a damaged file in its kernel cache {path.parent}",
        f": {path.name} {how}; its kernel is compiled again. If this comes back, delete the folder.",
    )


def _warn_once(what: str, more: str) -> None:
    if what not in _said:
        _said.add(what)
        warnings.warn(what + more, stacklevel=4)
