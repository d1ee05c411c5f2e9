# SPDX-License-Identifier: Apache-2.0
"""Words between the CPUs of ranks whose process group reaches devices only: notes in the group's store."""

from collections.abc import Iterable
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

_ROUNDS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class AbsentError(RuntimeError):
    """Ranks that left no note in time.

    Attributes:
        ranks: Which, counted within the group; empty where the store itself did not answer.
    """

    def __init__(self, ranks: tuple[int, ...], text: str) -> None:
        super().__init__(text)
        self.ranks = ranks


def exchange(group: dist.ProcessGroup, note: str) -> list[str]:
    """Return the notes of all ranks of a group; all have to call this, in the same order.

    It waits for no device, and no longer than the group's timeout. A rank takes a note away one round later, when all
    have left another and so have read it.

    Raises:
        AbsentError: A rank left none in time, or the store is gone.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    round_ = _ROUNDS[group] = _ROUNDS.get(group, 0) + 1
    store = dist.distributed_c10d._get_process_group_store(group)
    keys = [f"fmtsim/{round_}/{other}" for other in range(size)]
    limit = timeout_of(group)
    try:
        store.set(keys[rank], note)
        try:
            store.wait(keys, limit)
        except RuntimeError as error:
            absent = tuple(other for other in range(size) if not store.check([keys[other]]))
            text = f"no note of {named(absent)} after {limit.total_seconds():g} s ({error})"
            raise AbsentError(absent, text) from error
        notes = [store.get(key).decode() for key in keys]
        store.delete_key(f"fmtsim/{round_ - 1}/{rank}")
    except AbsentError:
        raise
    except RuntimeError as error:
        raise AbsentError((), str(error)) from error
    return notes


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long a group waits."""
    device = group._device_types[0]
    limit: timedelta = group._get_backend(torch.device(device)).options._timeout
    return limit


def named(ranks: Iterable[int]) -> str:
    """Return ranks in words."""
    return " and ".join(f"rank {rank}" for rank in sorted(ranks)) or "a rank"
