# SPDX-License-Identifier: Apache-2.0
"""The one way to write files: each appears whole or not at all, and what cannot be written is named."""

import contextlib
import os
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from fmtsim.support.errors import ArgumentError, DataError, shown

Content = bytes | str | Path
StrPath = str | os.PathLike[str]
TEMPORARY = ".fmtsim-"
"""How the names of temporary files begin; a killed process may leave one."""
_DAY = 86400.0  # seconds


def write_file(path: StrPath, content: Content) -> None:
    """Write a file, as ``write_files`` does; ArgumentError refuses what is not a path."""
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"{shown(path)} is not a path to write to; pass a str or a pathlib.Path")
    write_files({path: content})


def write_files(contents: Mapping[StrPath, Content | None]) -> None:
    """Write files by path, text as UTF-8, all of them or none; None removes a file.

    Bytes go to temporary files in the same folders, as what a Path names should be already. When all are on the disk
    they take the files' names, in the order of the mapping: readers find an old file or a new one. A pipe or a device
    (``/dev/stdout``) is written to.

    Raises:
        DataError: A file cannot be written; it is named, and all files are as they were.
    """
    staged: dict[StrPath, Path] = {}
    try:
        # 1. a temporary file beside the one that a path, or a link, leads to, or a file that is written
        for path, content in contents.items():
            data = content.encode() if isinstance(content, str) else content
            if isinstance(data, Path):
                if not os.path.islink(path) and (os.path.isfile(path) or not os.path.exists(path)):
                    staged[path] = data
                    continue
                data = data.read_bytes()  # a link may lead to another disk
            if data is None:
                continue
            if os.path.exists(path) and not os.path.isfile(path):
                Path(path).write_bytes(data)  # a device has no name to take; a folder fails here
                continue
            temporary = Path(os.path.realpath(path)).with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
            with open(temporary, "xb") as file:
                staged[path] = temporary
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        # 2. all in their places
        for path, content in contents.items():
            if path in staged:
                os.replace(staged[path], os.path.realpath(path))
            elif content is None:
                Path(path).unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot write {os.fspath(path)}: {getattr(error, 'strerror', None) or error}; "
            "name a file in a folder that exists, can be written to and has room"
        ) from error
    finally:
        for temporary in staged.values():
            with contextlib.suppress(OSError):
                temporary.unlink()


def remove_stale(folder: Path) -> None:
    """Remove temporary files that a killed process left more than a day ago; no write takes as long."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.startswith(TEMPORARY) and entry.is_file() and time.time() - entry.stat().st_mtime > _DAY:
                os.unlink(entry)


def write_folder(folder: Path, contents: Mapping[str, Content | None]) -> list[Path]:
    """Write files by name to a folder, as ``write_files`` does, and return their paths; the folder is made if need be.

    Raises:
        DataError: As ``write_files``; folders that were made are gone again.
    """
    new_folders = [place for place in (folder, *folder.parents) if not os.path.exists(place)]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot make the folder {folder}: {error.strerror}; choose another") from error
        remove_stale(folder)
        write_files({folder / name: content for name, content in contents.items()})
    except BaseException:
        for place in new_folders:
            with contextlib.suppress(OSError):
                place.rmdir()
        raise
    return [folder / name for name in sorted(contents) if contents[name] is not None]


def check_folder(folder: Path, option: str = "--out") -> None:
    """Refuse a folder that is a file, or that cannot be written to or made, by making one for a moment."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ArgumentError(f"{option} {folder} is a file; choose a folder, which may not exist yet")
    _try(option, folder, next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p)))


def check_file(option: str, path: Path) -> None:
    """Refuse a file to write that is a folder, or whose folder does not exist or cannot be written to."""
    if os.path.isdir(path):
        raise ArgumentError(f"{option} {path} is a folder; name a file in it")
    if not os.path.isdir(path.parent):
        raise ArgumentError(f"{option} {path}: there is no folder {path.parent}; create it, or choose another")
    if not os.path.exists(path) or os.path.isfile(path):
        _try(option, path, path.parent)


def _try(option: str, path: Path, folder: Path) -> None:
    try:
        os.rmdir(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder))
    except OSError:  # permissions do not say it all: there are read-only disks and /proc
        raise ArgumentError(f"{option} {path}: {folder} is not a folder one can write to; choose another") from None
