# SPDX-License-Identifier: Apache-2.0
"""Dropout with a GPU's random numbers: curand's Philox4x32-10, drawn as PyTorch 2.11's kernels of 132 SMs draw it."""

import numpy as np
import torch
from numpy import float32, uint32, uint64

from fmtsim.cpu.runtime.jit import kernel
from fmtsim.cpu.runtime.kernel_numbers import philox
from fmtsim.cpu.runtime.pool import run

_LOW, _HIGH = uint64(0xFFFFFFFF), uint64(32)
_BLOCK, _BLOCKS, _UNROLL = 256, 132 * (2048 // 256), 4  # threads; blocks at most; numbers of one draw


@kernel
def _keep(mask, seed, offset, probability, threads, vector, start, stop):
    """Draw the mask of elements: thread t has vectors t, t + T ... of V elements, or single ones, 4 T apart."""
    words = (uint32(0), uint32(0), uint32(0), uint32(0))
    key0, key1 = uint32(seed & _LOW), uint32(seed >> _HIGH)
    for thread in range(start, stop):
        draw = uint64(offset // uint64(4))
        first = thread * vector
        while first < mask.size:
            # a vector of 8 takes two draws, of 4 one, single elements one for four of them
            for i in range(max(vector, _UNROLL)):
                if i % _UNROLL == 0:
                    words = philox(draw, uint32(uint64(thread) & _LOW), uint32(uint64(thread) >> _HIGH), key0, key1)
                    draw += uint64(1)
                # a uniform number in (0, 1]
                u = float32(words[i % _UNROLL]) * float32(2.0**-32) + float32(2.0**-33)
                at = first + i * (threads if vector == 1 else 1)
                if at < mask.size:
                    mask[at] = u < probability
            first += threads * max(vector, _UNROLL)


class Generator:
    """The state of a GPU's default generator: the seed of torch.manual_seed, and how many numbers were drawn since.

    The host's generator stands for it: a draw moves both, so that a seed that is set anew, and states that are saved
    and set again (activation checkpointing), are seen.
    """

    def __init__(self) -> None:
        self._offsets: dict[bytes, int] = {}

    def draw(self, numbers: int) -> tuple[int, int]:
        """Return (seed, offset), and move on by the numbers that each thread draws."""
        offset = self._offsets.get(torch.get_rng_state().numpy().tobytes(), 0)
        torch.rand(1)
        self._offsets[torch.get_rng_state().numpy().tobytes()] = offset + numbers
        return torch.initial_seed(), offset


def dropout(
    generator: Generator, x: torch.Tensor, probability: float, training: bool | None = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x mask / (1 - p), mask) of native_dropout."""
    if training is False or x.numel() == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if probability == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    count, keep = x.numel(), float32(1 - probability)
    blocks = min(-(-count // _BLOCK), _BLOCKS)
    threads = blocks * _BLOCK
    seed, offset = generator.draw(((count - 1) // (threads * _UNROLL) + 1) * _UNROLL)
    flat = np.empty(count, np.bool_)
    vector = 1  # adjacent elements that a thread takes at once
    if x.is_contiguous() or x.transpose(0, -1).is_contiguous():
        vector = 16 // x.element_size()
        while vector > 1 and (x.numel() % vector or x.storage_offset() % vector):
            vector //= 2
    run(lambda i, j: _keep(flat, uint64(seed % 2**64), uint64(offset), keep, threads, vector, i, j), threads, 1, 64)
    # in the order in which the elements lie in memory, or in which they are counted
    mask, drawn = torch.empty_like(x, dtype=torch.bool), torch.from_numpy(flat)
    if vector > 1:
        mask.as_strided((count,), (1,)).copy_(drawn)
    else:
        mask.copy_(drawn.reshape(x.shape))
    return dropout_backward(x, mask, float(float32(1.0) / keep)), mask


def dropout_backward(g: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Return g mask scale, rounded once: 0 g is a zero with g's sign, or NaN."""
    return ((g.float() * mask) * float(float32(scale))).to(g.dtype)
