"""What the door of matrix products hands to every path: operands, definition, and the order as device arrays."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import Arithmetic, Datapath, sum_dtype
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan

TILE: Final = 128  # rows and columns of the tiles that marks stand for
PADDING: Final = -1  # a place of ``Order.source`` without a product


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Order:
    """Say which products are added when, with blocks of one length.

    Args:
        source: int32 [blocks * block] on the device: which k stands at a place, or PADDING. A padded place is not a
            term: a product of zeros may stand in for it where that changes nothing. Padding is at the end of a block,
            and every block has a product.
        block: Places of a block.
        contiguous: ``source`` is 0, 1, ..., K - 1 and then padding.
        chains: Blocks of a chain where chains are promoted and every chain but the last of its part has that many; None
            where each part is one chain, and where chains are uneven (``even`` tells the two apart).
        even: False where chains have different lengths, so that only ``ends`` says where they end.
        parts: First block of each part and the block behind its last, on the host.
        part_blocks: The same as int32 [parts, 2] on the device.
        ends: uint8 [blocks] on the device: 0, 1 behind the last block of a chain, 2 behind the last of a part.
        scale_places: int32 [blocks] on the device: the group along K (``k // promote_every``) of the scales that belong
            to a block's chain under ``scaled_promotion``.
    """

    source: Tensor
    block: int
    contiguous: bool
    chains: int | None
    even: bool
    parts: tuple[tuple[int, int], ...]
    part_blocks: Tensor
    ends: Tensor
    scale_places: Tensor

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
        spec: Unit, order of sums, formats.
        random: Seed and offset where the unit rounds stochastically.
        out: [M, N] in the dtype of the sums.
        order: The schedule of ``spec`` for K.
    """

    a: Tensor
    b: Tensor
    c: Tensor | None
    scale_a: Tensor | None
    scale_b: Tensor | None
    spec: GemmSpec
    random: RandomKey | None
    out: Tensor
    order: Order

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
