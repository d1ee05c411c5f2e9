"""What subcommands refuse before they work: devices that are not there, outputs that could not be written."""

from pathlib import Path

from fmtsim.errors import ArgumentError

MOST_THREADS = 1024  # beyond, torch's thread library may bring the process down instead of saying no


def check_device(name: str) -> None:
    """Refuse a device that is not there, or that holds no numbers (meta)."""
    import torch

    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        said = str(error).splitlines()[0]
        raise ArgumentError(f"--device {name} is not there: {said}; choose cpu, or look at fmtsim info") from None


def check_threads(count: int) -> None:
    """Refuse a number of CPU threads that no machine has."""
    if not 1 <= count <= MOST_THREADS:
        allowed = "1 or more" if count < 1 else f"1 to {MOST_THREADS}"
        raise ArgumentError(f"--threads {count} is not allowed; choose {allowed}")


def check_file(option: str, path: Path) -> None:
    """Refuse a file to write that is a folder, or whose folder does not exist, before minutes of work are lost."""
    if path.is_dir():
        raise ArgumentError(f"{option} {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ArgumentError(f"{option} {path}: there is no folder {path.parent}; create it, or choose another")
