"""The order of a product's sums as device arrays: the schedule of a plan, with blocks of one length."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.gemm.job import PADDING, Order
from fmtsim.errors import DeviceError
from fmtsim.spec.datapath import Arithmetic, Datapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import schedule

CHAIN_END, PART_END = 1, 2


def order_of(k: int, spec: GemmSpec, device: torch.device) -> Order:
    """Return the order of K products on a device; the first call for a K, unit and plan copies it there.

    Raises:
        DeviceError: That copy is needed while a CUDA graph is captured.
        ArgumentError: Promotions of unit and plan disagree.
    """
    return _order(k, spec.datapath, spec.plan, device)


@lru_cache(maxsize=64)
def _order(k: int, unit: Arithmetic, plan: GemmPlan, device: torch.device) -> Order:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise DeviceError(
            f"the order of K={k} products of this unit and plan is not on {device} yet, and a CUDA graph that is being "
            "captured cannot copy it; run the product once before the capture (see fmtsim.cuda.warmup)"
        )
    parts = schedule(k, unit, plan)
    chains = [chain for part in parts for chain in part]
    blocks = [block for chain in chains for block in chain.blocks]
    length = max(map(len, blocks))
    source = np.full((len(blocks), length), PADDING, np.int32)
    for row, block in zip(source, blocks, strict=True):
        row[: len(block)] = block
    lengths = [[len(chain.blocks) for chain in part] for part in parts]
    stops = np.cumsum([sum(counts) for counts in lengths])
    ends = np.zeros(len(blocks), np.uint8)
    ends[np.cumsum([len(chain.blocks) for chain in chains]) - 1] = CHAIN_END
    ends[stops - 1] = PART_END
    starts = np.repeat([chain.start for chain in chains], [len(chain.blocks) for chain in chains])
    ranges = np.stack([np.concatenate([[0], stops[:-1]]), stops], 1).astype(np.int32)
    flat = source.reshape(-1)
    own = unit.promote_every if isinstance(unit, Datapath) else None
    promote = plan.promote_every or own
    size = lengths[0][0]
    even = all(n == size for counts in lengths for n in counts[:-1]) and all(counts[-1] <= size for counts in lengths)
    return Order(
        source=_copied(flat, device),
        block=length,
        contiguous=bool((flat[:k] == np.arange(k)).all()),
        chains=size if promote and even else None,
        even=even or not promote,
        parts=tuple((int(first), int(stop)) for first, stop in ranges),
        part_blocks=_copied(ranges, device),
        ends=_copied(ends, device),
        scale_places=_copied((starts // (promote or 1)).astype(np.int32), device),
    )


def _copied(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
