"""Matrix products of emulated units: the verb ``gemm`` of the engine (docs/matmul.md)."""

from torch import Tensor

from fmtsim.gemm.serialization import GemmSpec
from fmtsim.ops import RandomKey


def supports_gemm(spec: GemmSpec, a: Tensor, b: Tensor) -> bool:
    """Say whether the kernels cover a product on this device; the torch engine takes the rest."""
    return False


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    spec: GemmSpec,
    random: RandomKey | None,
    out: Tensor,
) -> None:
    """Write the reduced sums of ``a b^T`` to out [M, N], before the epilogue."""
    raise NotImplementedError
