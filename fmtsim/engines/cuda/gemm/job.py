# SPDX-License-Identifier: Apache-2.0
"""One product as every path sees it: operands, definition, and the accumulation order as device arrays."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.engines.cuda import runtime
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import Arithmetic, Datapath, sum_dtype
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.schedule import adds_in_order, combination, schedule
from fmtsim.support.errors import DeviceError
from fmtsim.support.replay.gpu import captures

TILE: Final = 128  # rows and columns of the tiles that marks stand for
PADDING: Final = -1  # a k position of ``AccumulationOrder.source`` without a product
CHAIN_END, PART_END = 1, 2


class Gpu(NamedTuple):
    """What fast paths ask of a device: its compute capability, and the bytes of shared memory that a block may take."""

    capability: tuple[int, int]
    shared: int


def gpu_of(x: Tensor) -> Gpu:
    """Return the GPU that a tensor is on."""
    index = runtime.device_index(x)
    return Gpu(runtime.capability(index), runtime.shared_limit(index))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AccumulationOrder:
    """Say which products are added when, with blocks of one length.

    Args:
        source: int32 [blocks * block] on the device: which k stands at a position, or PADDING. A padded one is not a
            term: a product of zeros may stand in for it where that changes nothing. Padding is at the end of a block,
            and every block has a product.
        block: k positions of a block.
        contiguous: ``source`` is 0, 1, ..., K - 1 and then padding.
        parts: First block of each part, or lane of a part, and the block behind its last, on the host.
        part_blocks: The same as int32 [parts, 2] on the device.
        ends: uint8 [blocks] on the device: 0, 1 behind the last block of a chain, 2 behind the last of a part.
        scale_places: int32 [blocks] on the device: the group along K (``k // promote_every``) of the scales that belong
            to a block's chain under ``scaled_promotion``.
        combination: int32 [steps, 2] on the device where the parts are lanes, or folded: a Postfix that adds them. Else
            None.
    """

    source: Tensor
    block: int
    contiguous: bool
    parts: tuple[tuple[int, int], ...]
    part_blocks: Tensor
    ends: Tensor
    scale_places: Tensor
    combination: Tensor | None = None

    @property
    def blocks(self) -> int:
        """Blocks of all parts."""
        return self.source.numel() // self.block


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Job:
    """One product, as the paths see it.

    Args:
        a, b: [M, K] and [N, K] of any strides and of a dtype in which the formats' values lie: float8, 16-bit,
            float32, float64, or 8-bit integers for an IntegerDatapath.
        c: [M, N] in the dtype of the sums, of any strides, or None.
        scale_a, scale_b: float32 [M or N, groups] of any strides: scales inside the unit where it has some, else those
            of a scaled promotion; or None, which stands for ones.
        spec: Datapath, accumulation order, formats.
        random: Seed and offset where the unit rounds stochastically.
        out: [M, N] in the dtype of the sums.
        order: The schedule of ``spec`` for K.
        gpu: What the operands are on.
    """

    a: Tensor
    b: Tensor
    c: Tensor | None
    scale_a: Tensor | None
    scale_b: Tensor | None
    spec: GemmSpec
    random: RandomKey | None
    out: Tensor
    order: AccumulationOrder
    gpu: Gpu

    @property
    def shape(self) -> tuple[int, int, int]:
        """M, N and K."""
        return self.a.shape[0], self.b.shape[0], self.a.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the sums: float32, float64 or int32."""
        return sum_dtype(self.spec.datapath)

    @property
    def promotes(self) -> bool:
        """Whether chains are added to an outer sum."""
        return promotes(self.spec.datapath, self.spec.plan)


def promotes(datapath: Arithmetic, plan: GemmPlan) -> bool:
    """Say whether the unit or the plan adds chains to an outer sum."""
    own = isinstance(datapath, Datapath) and datapath.promote_every is not None
    return own or plan.promote_every is not None


def accumulation_order(k: int, spec: GemmSpec, device: torch.device) -> AccumulationOrder:
    """Return the order of K products on a device; the first call for a K, unit and plan copies it there.

    Raises:
        DeviceError: That copy is needed while a CUDA graph is captured.
        ArgumentError: Promotions of unit and plan disagree.
    """
    return _order(k, spec.datapath, spec.plan, device)


@lru_cache(maxsize=64)
def _order(k: int, unit: Arithmetic, plan: GemmPlan, device: torch.device) -> AccumulationOrder:
    if captures(device):
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
    stops = np.cumsum([sum(len(chain.blocks) for chain in part) for part in parts])
    ends = np.zeros(len(blocks), np.uint8)
    ends[np.cumsum([len(chain.blocks) for chain in chains]) - 1] = CHAIN_END
    ends[stops - 1] = PART_END
    starts = np.repeat([chain.start for chain in chains], [len(chain.blocks) for chain in chains])
    ranges = np.stack([np.concatenate([[0], stops[:-1]]), stops], 1).astype(np.int32)
    flat = source.reshape(-1)
    own = unit.promote_every if isinstance(unit, Datapath) else None
    promote = plan.promote_every or own
    steps = None if adds_in_order(plan) else np.array(combination(k, plan), np.int32)
    return AccumulationOrder(
        source=_copied(flat, device),
        block=length,
        contiguous=bool((flat[:k] == np.arange(k)).all()),
        parts=tuple((int(first), int(stop)) for first, stop in ranges),
        part_blocks=_copied(ranges, device),
        ends=_copied(ends, device),
        scale_places=_copied((starts // (promote or 1)).astype(np.int32), device),
        combination=None if steps is None else _copied(steps, device),
    )


def _copied(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
