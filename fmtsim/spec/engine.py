# SPDX-License-Identifier: Apache-2.0
"""The engine protocol: what the packages that compute export, and the only calls into them from outside.

Every engine casts and multiplies. A KernelEngine says which calls its kernels cover; the torch engine computes the
others. A FusedEngine also quantises whole operands of layers and finishes their products. A method that may return None
returns it for a call that the engine does not cover. ``fmtsim.casts.ops`` chooses the engine of a call.
"""

from collections.abc import Callable, Sequence
from ctypes import CDLL
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fmtsim.formats.block import BlockFormat
from fmtsim.formats.scaling import Scaling, Statistic
from fmtsim.spec.cast import CastSpec, EncodedParts, Random, RandomKey
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.operand import Keys, Operand
from fmtsim.spec.optimizer import Counter, ParameterStep, Scheme
from fmtsim.spec.quantizer import Quantizer, Transform


class Casts(Protocol):
    """The casts of an engine."""

    def quantize(self, x: Tensor, spec: CastSpec, random: Random, out: Tensor) -> None:
        """Write the values that x rounds to into out, of x's shape."""

    def encode(self, x: Tensor, spec: CastSpec, random: Random) -> EncodedParts:
        """Return the codes of x, with the scales that a block format needs."""

    def decode(self, parts: EncodedParts, spec: CastSpec, out: Tensor) -> None:
        """Write the values of codes into out."""


class Engine(Casts, Protocol):
    """Casts and products: ``fmtsim.torch_engine``, and every other engine where it covers them."""

    def gemm(
        self, a: Tensor, b: Tensor, c: Tensor | None, scale_a: Tensor | None, scale_b: Tensor | None, spec: GemmSpec,
        random: RandomKey | None, out: Tensor,
    ) -> None:  # fmt: skip
        """Write the reduced sums of ``a b^T`` to out [M, N], before the epilogue; K has ended where the plan says."""


class Functions(Protocol):
    """Elementary functions of float64."""

    def exp(self, x: Tensor) -> Tensor:
        """Return the exponential, the same bits on every device."""

    def ln(self, x: Tensor) -> Tensor:
        """Return the natural logarithm, likewise."""


class TorchEngine(Engine, Functions, Protocol):
    """``fmtsim.torch_engine``: all casts and products on every device."""


class KernelEngine(Engine, Protocol):
    """An engine whose kernels cover some calls: ``fmtsim.cpu`` and ``fmtsim.cuda``."""

    def supports(self, verb: str, spec: CastSpec, *tensors: Tensor) -> bool:
        """Return True if kernels cover a verb on these tensors: input and output of quantize, else the input alone."""

    def supports_gemm(self, spec: GemmSpec, a: Tensor, b: Tensor) -> bool:
        """Return True if kernels cover a product."""

    def supports_optimizer(self, rule: str, scheme: Scheme) -> bool:
        """Return True if kernels cover an optimizer's rule and the states of a scheme."""

    def optimizer_steps(
        self, rule: str, steps: Sequence[ParameterStep], scheme: Scheme, counter: Counter
    ) -> Sequence[ParameterStep]:
        """Do the steps that kernels cover; return the others."""


class CPUEngine(KernelEngine, Functions, Protocol):
    """``fmtsim.cpu``: kernels, and the elementary functions.

    Attributes:
        cache_folder: Where compiled kernels are kept, or None.
        get_num_threads, set_num_threads: The bound of the engine's threads.
    """

    cache_folder: Callable[[], Path | None]
    get_num_threads: Callable[[], int]
    set_num_threads: Callable[[int], None]

    def gemm_batch(
        self, a: Tensor, b: Tensor, spec: GemmSpec, keys: Tensor | None, out: Tensor, c: Tensor | None = None
    ) -> list[int]:
        """Write the products of a batch that are small and that kernels take at once; return the numbers of the others.

        a: [products, M, K]; b: [products, N, K]; keys: int64 [products, 2], seed and offset of each, or None; out and
        the addends c: [products, M, N]. Each has the bits that ``gemm`` gives it.
        """

    def look_up(self, codes: Tensor, values: Tensor, out: Tensor) -> None:
        """Write the values of integer codes to out; all are contiguous and have one dimension."""

    def weighted_sums(self, words: Tensor, multipliers: Tensor, masks: tuple[int, int] = (0, 0)) -> tuple[Tensor, int]:
        """Return ``sum(word * multiplier)`` of each run of a row's words, as long as ``multipliers``, and a largest.

        That is the largest of all words under the first mask, and of their upper halves under the second.
        """

    def block_amax(self, x: Tensor, block: tuple[int, int]) -> Tensor:
        """Return the largest finite magnitude of each block of a float32 matrix."""

    def block_means(self, x: Tensor, block: tuple[int, int], kind: Statistic) -> Tensor | None:
        """Return another statistic of each block of a float32 matrix."""

    def times_blocks(
        self, x: Tensor, s: Tensor, block: tuple[int, int], *, divides: bool = False,
        tensor_scale: Tensor | None = None, buffer: str | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the elements of a float32 or float8 matrix times the numbers of their blocks, or divided by them.

        ``buffer`` names memory of this thread for the result, which the next call by its name reuses.
        """

    def widened(self, x: Tensor, buffer: str | None = None) -> Tensor:
        """Return float8 as float32."""

    def memory(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in memory of this thread, which the next call by its name reuses."""

    def round_blocks(
        self, x: Tensor, factor: Tensor, block: tuple[int, int], spec: CastSpec, random: Random, out: Tensor, *,
        divides: bool = False, scaled: Tensor | None = None,
    ) -> bool:  # fmt: skip
        """Cast a float32 matrix times its blocks' numbers, or divided by them; return False if no kernel covers it."""

    def finish_(self, y: Tensor, columns: Tensor | None, rows: Tensor | None, bias: Tensor | None) -> bool:
        """Make y ``(y * columns^T) * rows + bias``, one rounding a step; return False if no kernel covers it."""

    def hadamard(self, x: Tensor, size: int, dim: int, flips: Tensor | None, inverse: bool) -> Tensor | None:
        """Return the transform of every group of a matrix by Sylvester's matrix."""

    def count_cast(
        self, x: Tensor, q: Tensor, scales: Tensor, block: tuple[int, int], limits: tuple[float, float]
    ) -> tuple[Tensor, Tensor]:
        """Return figures and exponents of a contiguous float32 matrix that was cast to q, with scales of its blocks."""


class FusedEngine(KernelEngine, Protocol):
    """An engine of GPUs that it ``serves``, with kernels for whole operands of layers, and its library's own products.

    Attributes:
        available, why_unavailable, warmup: What ``fmtsim.cuda`` offers users.
        NativeCall, NativeScales, run_native: What is asked of the library, its scales, and how
            (fmtsim/cuda/torch_calls.py).
        cublaslt, cublaslt_version, other_gpu, other_settings, other_versions: The library, and what differs from the
            machine of a target (fmtsim/cuda/torch_calls.py).
        OptimizerBatch: A group of parameters whose steps are launched together (fmtsim/cuda/optim/fused_steps.py).
        ReductionStages: What a rank computes in a reduction (fmtsim/cuda/cast/reduction_stages.py).
    """

    available: Callable[..., bool]
    why_unavailable: Callable[..., str | None]
    warmup: Callable[..., Any]
    NativeCall: Callable[..., Any]
    NativeScales: Callable[..., Any]
    run_native: Callable[..., Tensor]
    cublaslt: Callable[[], CDLL | None]
    cublaslt_version: Callable[[], str | None]
    other_gpu: Callable[[str, frozenset[str], int], str | None]
    other_settings: Callable[..., str | None]
    other_versions: Callable[[str], list[str]]
    OptimizerBatch: Callable[..., Any]
    ReductionStages: Callable[..., Any]

    def serves(self, index: int) -> bool:
        """Return True if the engine runs on a GPU; otherwise one warning says why not."""

    def quantize_contiguous(self, x: Tensor, spec: CastSpec, out: Tensor, random: Random = None) -> bool:
        """Do what ``quantize`` does by one lookup and one launch; return False if the call needs more than that."""

    def covers_hadamard(self, size: int, dim: int) -> bool:
        """Return True if a kernel transforms groups of ``size`` neighbours along ``dim``, a negative number."""

    def hadamard(self, x: Tensor, size: int, flips: Tensor | None, inverse: bool) -> Tensor:
        """Return the transform of every group along the last dimension, float32."""

    def encode_packed(self, x: Tensor, spec: CastSpec, random: Random) -> EncodedParts:
        """Return codes and scales as an encoded tensor keeps them."""

    def covers_reduction(self, spec: CastSpec, scaling: Scaling | None, x: Tensor, ranks: int, out: Tensor) -> bool:
        """Return True if ``ReductionStages`` covers the reduction of x over ``ranks`` into out."""

    def quantize_operand(
        self, t: Tensor, quantizer: Quantizer, keys: Keys, state: Any = None, dim: int = -1, folded: bool = False,
        factor: Tensor | None = None, narrow: bool = False,
    ) -> Operand | None:  # fmt: skip
        """Quantise a matrix whose products sum over ``dim``."""

    def narrows(self, t: Tensor, quantizer: Quantizer, dim: int, folded: bool) -> bool:
        """Return True if ``quantize_operand`` takes a float32 matrix as what it becomes in bfloat16."""

    def quantize_both(
        self, x: Tensor, quantizer: Quantizer, keys: tuple[RandomKey | None, RandomKey | None]
    ) -> tuple[Operand, Operand] | None:
        """Quantise a matrix for sums over its last and over its first dimension, from one read."""

    def has_both(self, x: Tensor, quantizer: Quantizer) -> bool:
        """Return True if ``quantize_both`` covers a matrix and a quantiser with a scale rule; reads no data."""

    def counts_keys(self, quantizer: Quantizer) -> bool:
        """Return True if kernels add a counter on the device to the keys of a quantiser."""

    def count_cast(
        self, x: Tensor, q: Tensor, fmt: BlockFormat | None, block: tuple[int, int], limits: tuple[float, float]
    ) -> Tensor | None:
        """Return what ``lab.analysis.measure`` does of contiguous matrices, blocks under the scales of a format."""

    def fingerprint(self, x: Tensor, width: int, members: int, address: int) -> Callable[[int, int, int], None] | None:
        """Return the launch that adds a contiguous tensor's fingerprint to numbers on its device."""

    def covers_groups(self, a: Operand, b: Operand) -> bool:
        """Return True if ``multiply_groups`` covers two operands; reads no data."""

    def multiply_groups(self, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Return ``a b^T + bias`` of operands whose groups along the sum have scales."""

    def finish(
        self, y: Tensor, columns: Tensor | None, rows: Tensor | None, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """Return ``(y * columns^T) * rows + bias`` in another dtype, one rounding a step."""

    def unrotate(
        self, y: Tensor, transforms: tuple[Transform, ...], slope: Tensor | None, dtype: torch.dtype,
        scales: tuple[Tensor | None, Tensor | None],
    ) -> Tensor | None:  # fmt: skip
        """Return y, times scales and a mask where there are any, rotated back along its last axis."""
