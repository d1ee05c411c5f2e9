# SPDX-License-Identifier: Apache-2.0
"""Messages between GPUs of one host that read each other's memory: barriers on the GPUs, no work for their hosts."""

from datetime import timedelta
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fmtsim.distributed.ranks import Ranks

MOST_TENSORS: Final = 1 << 14  # whose largest magnitudes have room
TOPS_BYTES: Final = 4 * MOST_TENSORS
_ALIGNED: Final = 1 << 21


class Peers:
    """Exchange as ``Ranks`` does, through memory that all ranks map (torch.distributed._symmetric_memory).

    Each rank has three regions that never overlap: largest magnitudes, codes, sums. A call writes to one only behind a
    barrier that follows the last reads of the call before, and waits for that call where it ran on another stream.

    Args:
        ranks: The group, all of whose GPUs reach each other.
        device: This rank's GPU.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        group = ranks.group
        assert group is not None
        self.rank, self.size, self._group, self._device = ranks.rank, ranks.size, group, device
        limit: timedelta = group._get_backend(device).options._timeout
        self._timeout_ms = int(limit.total_seconds() * 1000)
        self._stream, self._codes_bytes = torch.cuda.current_stream(device), 0

    def begin(self, stride: int) -> None:
        """Start a reduction of chunks of ``stride`` bytes; the first of a size maps memory, on all ranks."""
        if self.size * stride > self._codes_bytes:
            from torch.distributed import _symmetric_memory as symmetric_memory

            torch.cuda.synchronize(self._device)  # reads of the old memory; the others' end before they arrive, too
            self._codes_bytes = -(-self.size * stride // (self.size * _ALIGNED)) * self.size * _ALIGNED
            total = TOPS_BYTES + self._codes_bytes + self._codes_bytes // self.size
            self._memory = symmetric_memory.empty(total, dtype=torch.uint8, device=self._device)
            self._handle = symmetric_memory.rendezvous(self._memory, self._group.group_name)
        if torch._C._cuda_getCurrentRawStream(self._device.index) != self._stream.cuda_stream:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_stream(self._stream)
            self._stream = stream

    def tops(self, tensors: int) -> Tensor:
        """Return where this rank's largest magnitudes go, zeros float32 [tensors]."""
        return self._memory[: 4 * tensors].view(torch.float32).zero_()

    def codes(self, stride: int) -> Tensor:
        """Return where this rank's codes go, uint8 [ranks, stride]."""
        return self._memory[TOPS_BYTES : TOPS_BYTES + self.size * stride].view(self.size, stride)

    def sums(self, stride: int) -> Tensor:
        """Return where the sums of this rank's chunk go, uint8 [stride]."""
        return self._memory[TOPS_BYTES + self._codes_bytes :][:stride]

    def _meet(self) -> int:
        """Make the stream wait until all ranks' streams are here, and return the address of their memories' table."""
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)
        table: int = self._handle.buffer_ptrs_dev
        return table

    def largest(self, x: Tensor, what: str) -> int:
        """Return the address of the table of memories, which begin with every rank's ``tops``."""
        return self._meet()

    def exchange(self, wires: Tensor, what: str) -> tuple[int, int]:
        """Return where row ``rank`` of every rank's codes is: the table's address, and bytes from its entries on."""
        return self._meet(), TOPS_BYTES + self.rank * wires.shape[1]

    def gather(self, wire: Tensor, what: str) -> tuple[int, int]:
        """Return where every rank's sums are."""
        return self._meet(), TOPS_BYTES + self._codes_bytes


_PEERS: WeakKeyDictionary[dist.ProcessGroup, Peers | None] = WeakKeyDictionary()


def peers_of(ranks: Ranks, device: torch.device) -> Peers | None:
    """Return the Peers of a group of NCCL whose ranks have a GPU each on one host, linked; None for other groups.

    The first call of a group asks all ranks.
    """
    group = ranks.group
    if group is None or device.type != "cuda" or ranks.size == 1:
        return None
    if group not in _PEERS:
        _PEERS[group] = None
        if "cuda:nccl" in dist.get_backend_config(group):
            here, count = device.index, torch.cuda.device_count()
            reaches = all(torch.cuda.can_device_access_peer(here, i) for i in range(count) if i != here)
            boot = Path("/proc/sys/kernel/random/boot_id")
            host = boot.read_text().strip() if boot.exists() else ""
            facts = ranks.gather_objects([host, here, reaches], "the look at the ranks' GPUs")
            hosts, gpus = {fact[0] for fact in facts}, {fact[1] for fact in facts}
            if hosts == {host} and host and len(gpus) == ranks.size and all(fact[2] for fact in facts):
                _PEERS[group] = Peers(ranks, device)
    return _PEERS[group]
