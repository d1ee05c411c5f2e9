"""Where the engines keep what they have compiled."""

import errno
import os
import tempfile
import warnings
from pathlib import Path


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
    except OSError as error:
        warnings.warn(
            f"fmtsim cannot write its kernel cache {folder} ({error.strerror}); kernels are compiled anew in every "
            "process. Set FMTSIM_CACHE_DIR to a folder that can be written.",
            stacklevel=3,
        )
        return None
    return folder
