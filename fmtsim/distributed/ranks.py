# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks: agreement before a collective, bytes during it, and errors that name the rank."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fmtsim.distributed.arithmetic import require_ranks
from fmtsim.support.errors import ArgumentError, CollectiveError, first_line, shown


class Ranks:
    """Send and receive within a process group; every failure becomes a CollectiveError that names the other rank.

    Args:
        group: The ranks; None is the default group of torch.distributed.

    Attributes:
        size: Number of ranks.
        rank: This one, counted within the group.

    Raises:
        ArgumentError: torch.distributed has no process group yet, or this process is not part of the given one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError("a collective needs ranks; call torch.distributed.init_process_group first")
        given_group: Any = group  # torch says with a number that this process is in no group
        if not isinstance(given_group, dist.ProcessGroup | None | int) or (
            isinstance(given_group, int) and given_group != dist.GroupMember.NON_GROUP_MEMBER
        ):
            raise ArgumentError(f"group={shown(group)} is not a process group; pass what dist.new_group returned")
        self.group = dist.group.WORLD if group is None else group
        if not isinstance(self.group, dist.ProcessGroup):
            raise ArgumentError("this process is not part of the group; call the collective on the group's ranks only")
        self.rank, self.size = self.group.rank(), self.group.size()
        require_ranks(self.size)

    def exchange(self, wires: Tensor, what: str) -> Tensor:
        """Send row r of a matrix to rank r, and return the rows that the ranks sent here, in their order."""
        if self._by_messages(wires):
            return self._swap(wires, what)
        received = torch.empty_like(wires)
        with self.answering(what):
            dist.all_to_all_single(received, wires, group=self.group)
        return received

    def gather(self, wire: Tensor, what: str) -> Tensor:
        """Return the bytes [n] of all ranks as [ranks, n]."""
        if self._by_messages(wire):
            return self._swap(wire.expand(self.size, -1), what)
        gathered = wire.new_empty(self.size, len(wire))
        if not len(wire):
            return gathered
        verb = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name from torch 2.13 on
        with self.answering(what):
            verb(gathered.view(-1), wire, group=self.group)
        return gathered

    def largest(self, x: Tensor, what: str) -> Tensor:
        """Return the elementwise maximum over the ranks."""
        return self._reduce(x, dist.ReduceOp.MAX, what)

    def total(self, x: Tensor, what: str) -> Tensor:
        """Return the elementwise sum over the ranks, for whole numbers."""
        return self._reduce(x, dist.ReduceOp.SUM, what)

    def agree(self, facts: tuple[Any, ...], device: torch.device, settings: str = "") -> None:
        """Make sure that all ranks call the same collective on the same shapes, dtypes and record.

        The ranks compare a fingerprint of the facts and settings between their CPUs: on the CPU before every
        collective, on other devices, which could do other work meanwhile, only before the group's first one with these
        facts, whatever the settings of later ones are.

        Raises:
            ArgumentError: They do not, or the group carries nothing between such devices.
            CollectiveError: A rank does not answer.
        """
        carried = dist.get_backend_config(self.group)
        if f"{device.type}:" not in carried:
            raise ArgumentError(
                f"the tensors are on {device}, but the process group carries {carried}; "
                "move them, or pass another group"
            )
        hashable = tuple(tuple(fact) if isinstance(fact, list) else fact for fact in facts)
        assert self.group is not None
        agreed = _AGREED.setdefault(self.group, set())
        if self.size == 1 or (device.type != "cpu" and hashable in agreed):
            return
        facts = (*facts, settings)
        print_ = int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7], "little")
        prints = self._prints(print_)
        if any(other != print_ for other in prints):
            texts = self.gather_objects([[repr(fact), str(fact)] for fact in facts], "the comparison of arguments")
            other = next(rank for rank, value in enumerate(prints) if value != prints[0])
            pairs = zip(texts[0], texts[other], strict=False)
            mine, its = next((pair for pair in pairs if pair[0] != pair[1]), (texts[0][0], texts[other][0]))
            first, second = (mine[1], its[1]) if mine[1] != its[1] else (mine[0], its[0])
            raise ArgumentError(
                f"ranks disagree: rank 0 has {first}, rank {other} has {second}; "
                "call the same collective with equal shapes, dtypes and records on all ranks"
            )
        agreed.add(hashable)

    def present(self, what: str) -> None:
        """Make sure that every rank answers; CollectiveError names the one that does not."""
        self._prints(0, what)

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """Return the small object of every rank, of lists, numbers and strings; it travels between CPUs."""
        if not self._on_cpus:
            return self._notes(value, what)
        gathered: list[Any] = [None] * self.size
        with self.answering(what):
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    @property
    def _on_cpus(self) -> bool:
        """Whether the group carries messages between CPUs."""
        return "cpu:" in dist.get_backend_config(self.group)

    def _notes(self, value: Any, what: str) -> list[Any]:
        """Return the small object of every rank, by way of the group's store: NCCL would have to wait for the device,
        and ends the process where a rank is gone.
        """
        assert self.group is not None
        try:
            return [json.loads(note) for note in exchange(self.group, json.dumps(value))]
        except AbsentError as error:
            raise self.broken(what, named(error.ranks), error) from error

    def _prints(self, own_print: int, what: str = "the comparison of arguments") -> list[int]:
        """Return every rank's fingerprint."""
        if not self._on_cpus:
            return self._notes(own_print, what)
        prints: list[int] = self._swap(torch.tensor([own_print]).repeat(self.size, 1), what)[:, 0].tolist()
        return prints

    @staticmethod
    def _by_messages(x: Tensor) -> bool:
        """Whether each rank gets a message of its own, which names one that is gone; a device has one call for all."""
        return x.device.type == "cpu"

    def _swap(self, rows: Tensor, what: str) -> Tensor:
        """Exchange rows between CPUs, each in a message of its own, so that a rank that is gone has a name."""
        received = rows.clone(memory_format=torch.contiguous_format)
        if not rows.numel():
            return received
        peers = [rank for rank in range(self.size) if rank != self.rank]
        silent: list[tuple[int, RuntimeError]] = []
        sends = [(rank, self._start(dist.isend, rows[rank], rank, silent)) for rank in peers]
        receives = [(rank, self._start(dist.irecv, received[rank], rank, silent)) for rank in peers]
        for rank, work in receives + sends:
            try:
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                silent.append((rank, error))
        if silent:
            raise self.broken(what, named({rank for rank, _ in silent}), silent[0][1]) from silent[0][1]
        return received

    def _start(self, verb: Any, x: Tensor, rank: int, silent: list[tuple[int, RuntimeError]]) -> Any:
        try:
            assert self.group is not None
            return verb(x, dist.get_global_rank(self.group, rank), self.group)
        except RuntimeError as error:
            silent.append((rank, error))
            return None

    def _reduce(self, x: Tensor, op: Any, what: str) -> Tensor:
        reduced = x.clone()
        if self.size > 1:
            with self.answering(what):
                dist.all_reduce(reduced, op, group=self.group)
        return reduced

    @contextmanager
    def answering(self, what: str) -> Iterator[None]:
        """Raise CollectiveError where torch says that ranks do not answer."""
        try:
            yield
        except RuntimeError as error:
            raise self.broken(what, "a rank", error) from error

    def broken(self, what: str, who: str, error: RuntimeError) -> CollectiveError:
        """Return the error of a collective that a rank did not answer."""
        return CollectiveError(
            f"rank {self.rank} of {self.size}: {who} did not answer in {what}; such a rank has ended, hangs, "
            "or called something else. Nothing was written; restart the ranks from a checkpoint. "
            f"torch says: {first_line(error)}"
        )


_ROUNDS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_AGREED: WeakKeyDictionary[dist.ProcessGroup, set[tuple[Any, ...]]] = WeakKeyDictionary()


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
    # how long the group waits
    limit: timedelta = group._get_backend(torch.device(group._device_types[0])).options._timeout
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


def named(ranks: Iterable[int]) -> str:
    """Return ranks in words."""
    return " and ".join(f"rank {rank}" for rank in sorted(ranks)) or "a rank"
