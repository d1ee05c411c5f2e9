# SPDX-License-Identifier: Apache-2.0
"""The state of a run in a trainer's checkpoint: read, checked, and gathered from all processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from fmtsim.lab.analysis.observation import Observation
from fmtsim.support.errors import DataError, first_line

FILE: Final = "fmtsim_state.pt"
"""The file beside those of a checkpoint, where a trainer keeps no states of others itself."""
_KEYS: Final = {"recipe_states", "observed", "first", "losses", "observation", "loss_scales"}


def read_state(path: Path) -> dict[str, Any] | None:
    """Return the state in a file, or None where there is no file.

    Raises:
        DataError: The file is damaged or holds something else.
    """
    if not path.exists():
        return None
    try:
        return checked_state(torch.load(path, map_location="cpu", weights_only=True), "it")
    except Exception as e:  # of damaged bytes torch's reader raises anything
        raise DataError(
            f"{path} cannot be read: {first_line(e)}; go on from another checkpoint, or remove this file: "
            "the weights' own files have delayed scales, too, but for those of PEFT"
        ) from e


def checked_state(state: Any, what: str) -> dict[str, Any]:
    """Return a state, checked as far as that it is one.

    Raises:
        DataError: It is none.
    """
    try:
        if not isinstance(state, Mapping) or set(state) != _KEYS or not state["recipe_states"]:
            raise ValueError
        Observation.of_state(state["observation"])
        return dict(state)
    except Exception as e:
        raise DataError(f"{what} holds something else than the state of a run") from e


def gathered(own: dict[str, Any] | None) -> list[Any]:
    """Return what ``recipe_state`` is on each process, or one of them where nothing is remembered; all have to call."""
    ranks = _ranks()
    if own is None or not own["layers"] or ranks == 1:
        return [own]
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, own)
    return found


def of_this_process(states: list[Any]) -> tuple[Any, str]:
    """Return what ``gathered`` has of this process, and a note where that is another's."""
    ranks = _ranks()
    if len(states) == ranks:
        return states[dist.get_rank() if ranks > 1 else 0], ""
    note = f"{len(states)} processes saved delayed scales; {ranks} went on, with those of the first"
    return states[0], note if len(states) > 1 else ""


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
