# SPDX-License-Identifier: Apache-2.0
"""A GPU's random numbers: curand's Philox4x32-10, drawn as PyTorch 2.11's kernels of 132 SMs draw it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy import float32, uint32, uint64

from fmtsim.cpu.runtime.jit import kernel
from fmtsim.cpu.runtime.kernel_numbers import philox
from fmtsim.cpu.runtime.pool import run
from fmtsim.machine import pointwise, sorting
from fmtsim.machine.arrays import NAN_BITS, from_f32, to_f32
from fmtsim.machine.elementwise import computed
from fmtsim.machine.unknown import UnknownOrder

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

    def draw(self, numbers: int, generator: torch.Generator | None = None) -> tuple[int, int]:
        """Return (seed, offset) of a generator, and move on by the numbers that each thread draws."""
        chosen = torch.default_generator if generator is None else generator
        offset = self._offsets.get(chosen.get_state().numpy().tobytes(), 0)
        torch.rand(1, generator=chosen)
        self._offsets[chosen.get_state().numpy().tobytes()] = offset + numbers
        return chosen.initial_seed(), offset

    def on_host(self, function: Callable) -> Any:
        """Return what a function that draws the host's numbers returns; the GPU's state stays."""
        offset = self._offsets.get(torch.get_rng_state().numpy().tobytes(), 0)
        result = function()
        self._offsets[torch.get_rng_state().numpy().tobytes()] = offset
        return result


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


@kernel
def _draw(words, partners, seed, offset, threads, start, stop):
    """Draw a word of 32 bits for each element: thread t has elements t, t + T, t + 2 T and t + 3 T of a draw."""
    key0, key1 = uint32(seed & _LOW), uint32(seed >> _HIGH)
    for thread in range(start, stop):
        draw = uint64(offset // uint64(4))
        for first in range(thread, words.size, _UNROLL * threads):
            drawn = philox(draw, uint32(uint64(thread) & _LOW), uint32(uint64(thread) >> _HIGH), key0, key1)
            draw += uint64(1)
            for i in range(_UNROLL):
                if first + i * threads < words.size:
                    words[first + i * threads] = drawn[i]
                    partners[first + i * threads] = drawn[i ^ 1]


def _words(
    state: Generator, count: int, generator: torch.Generator | None, threads: int | None = None, numbers: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a word for each element, the word that was drawn beside it, and whether it is the second of the two."""
    threads = threads or min(-(-count // _BLOCK), _BLOCKS) * _BLOCK
    seed, offset = state.draw(numbers or ((count - 1) // (threads * _UNROLL) + 1) * _UNROLL, generator)
    words, partners = np.empty(count, np.uint32), np.empty(count, np.uint32)
    run(lambda i, j: _draw(words, partners, uint64(seed % 2**64), uint64(offset), threads, i, j), threads, 1, 64)
    return words, partners, np.arange(count) // threads % 2 == 1


def _put(x: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Write numbers in the order in which a tensor's elements lie in memory."""
    view = x.permute(sorted(range(x.ndim), key=x.stride, reverse=True))
    view.copy_(drawn.reshape(view.shape))
    return x


def _filled(name: str) -> Callable:
    """Return the operator that fills a tensor by a function of ``elementwise.cu`` of two numbers."""

    def fill(
        state: Generator, x: torch.Tensor, p: float = 0.0, q: float = 1.0, *, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        if x.dtype not in NAN_BITS:
            raise UnknownOrder(f"random numbers of {x.dtype}")
        if not x.numel():
            return x
        words, partners, second = _words(state, x.numel(), generator)
        arrays = [words.astype(np.float32)]
        if name == "normal":  # a pair of words gives two numbers
            pair = (words, partners)
            arrays = [np.where(second, *pair[::-1]), np.where(second, *pair), second]
        numbers = computed(name, x.dtype, [a.astype(np.float32) for a in arrays], (p, q))
        return _put(x, from_f32(numbers, x.dtype))

    return fill


uniform_, normal_ = _filled("uniform_between"), _filled("normal")


def exponential_(
    state: Generator, x: torch.Tensor, rate: float = 1.0, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Fill a tensor with exponentially distributed numbers."""
    return _filled("exponential")(state, x, rate, generator=generator)  # type: ignore[no-any-return]


def bernoulli_(
    state: Generator, x: torch.Tensor, p: float | torch.Tensor = 0.5, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Fill a tensor with ones by a probability, or by one of each element."""
    if not x.numel():
        return x
    if not torch.is_tensor(p):
        u = computed("uniform", torch.float32, [_words(state, x.numel(), generator)[0].astype(np.float32)])
        return _put(x, torch.from_numpy(u < float32(p)))
    if p.shape != x.shape or not (p.is_contiguous() and x.is_contiguous()):
        raise UnknownOrder("bernoulli of probabilities that are not contiguous")
    # thread t has elements 4 t to 4 t + 3
    threads = -(-x.numel() // _UNROLL)
    words = _words(state, threads * _UNROLL, generator, threads, 12)[0].reshape(_UNROLL, threads).T.reshape(-1)
    u = computed("uniform", torch.float32, [words[: x.numel()].astype(np.float32)])
    return x.copy_(torch.from_numpy(u <= to_f32(p).reshape(-1)).reshape(x.shape))


def random_(
    state: Generator, x: torch.Tensor, low: int, high: int | None = None, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Fill a tensor with whole numbers from ``low`` up to below ``high``: the rest of a word by how many they are."""
    low, high = (0, low) if high is None else (low, high)
    if not x.numel():
        return x
    if high - low >= 1 << 28:
        raise UnknownOrder("random integers of 2^28 values and more")
    words = _words(state, x.numel(), generator)[0].astype(np.int64)
    return _put(x, torch.from_numpy(words % (high - low) + low))


def multinomial(
    state: Generator, p: torch.Tensor, count: int, replacement: bool = False, *,
    generator: torch.Generator | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the indices of the largest p / q, where q is exponentially distributed."""
    if replacement and count > 1:
        raise UnknownOrder("multinomial of several samples with replacement")
    q = pointwise.divide(p, exponential_(state, torch.empty_like(p), generator=generator))
    if count > 1:
        return sorting.topk(q, count)[1]  # type: ignore[no-any-return]
    # of equal ones the lowest index
    return torch.from_numpy(np.argmax(to_f32(q), -1, keepdims=True))


def _made(fill: Callable, *numbers: float) -> Callable:
    """Return the operator that makes a tensor of a shape, or like another one, and fills it."""

    def make(state: Generator, like: Any, *, generator: Any = None, **options: Any) -> torch.Tensor:
        empty = torch.empty_like if torch.is_tensor(like) else torch.empty
        return fill(state, empty(like, **options), *numbers, generator=generator)  # type: ignore[no-any-return]

    return make


def _randint(state: Generator, *arguments: Any, generator: Any = None, **options: Any) -> torch.Tensor:
    """Return whole numbers: of (high, shape) or (low, high, shape)."""
    *bounds, shape = arguments
    x = torch.empty(shape, **options | {"dtype": options.get("dtype") or torch.int64})
    return random_(state, x, *bounds, generator=generator)


def _normal(state: Generator, mean: Any, std: Any = 1.0, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return normal numbers with a mean and a deviation of each element."""
    like = mean if torch.is_tensor(mean) else std
    drawn = normal_(state, torch.empty_like(like), 0.0, 1.0, generator=generator)
    return pointwise.add(pointwise.multiply(drawn, std), mean)


OPERATORS: dict[str, Callable] = {
    "native_dropout": dropout, "uniform_": uniform_, "normal_": normal_, "exponential_": exponential_,
    "bernoulli_": bernoulli_, "random_": random_, "multinomial": multinomial, "normal": _normal,
    "bernoulli": lambda state, x, p=None, *, generator=None: bernoulli_(
        state, torch.empty_like(x), x if p is None else p, generator=generator
    ),
    **dict.fromkeys(("rand", "rand_like"), _made(uniform_, 0.0, 1.0)),
    **dict.fromkeys(("randn", "randn_like"), _made(normal_, 0.0, 1.0)),
    "randint": _randint,
    "randint_like": lambda state, like, *bounds, **options: _randint(
        state, *bounds, like.shape, **{"dtype": like.dtype} | options
    ),
}  # fmt: skip
"""Operators that draw, each with a ``Generator`` in front of its arguments."""
