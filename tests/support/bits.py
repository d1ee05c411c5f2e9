# SPDX-License-Identifier: Apache-2.0
"""Compare numbers and tensors bit by bit: -0 differs from 0, NaN equals the NaN of the same bits."""

import math

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def identical(x: float, y: float) -> bool:
    """Return whether two floats are the same number, zeros of different sign told apart, NaN equal to NaN."""
    return (x != x and y != y) or (x == y and math.copysign(1.0, x) == math.copysign(1.0, y))


def bits(t: torch.Tensor) -> torch.Tensor:
    """Return the bits of a floating-point tensor as integers, other tensors as they are."""
    return t.detach().contiguous().view(INTEGERS[t.element_size()]) if t.dtype.is_floating_point else t


def stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Put float64 values into a dtype with canonical NaN: torch's own conversion to bfloat16 makes NaN 0xFFFF."""
    result = values.to(dtype)
    codes = bits(result)
    nan = {2: 0x7FC0 if dtype == torch.bfloat16 else 0x7E00, 4: 0x7FC00000, 8: 0x7FF8 << 48}[dtype.itemsize]
    return torch.where(values.isnan(), nan, codes).to(codes.dtype).view(dtype)


def same_bits(a, b) -> bool:
    """Return whether two tensors or numpy arrays agree in shape, dtype and every bit; None equals None."""
    if a is None or b is None:
        return a is b
    a, b = (t if isinstance(t, torch.Tensor) else torch.as_tensor(t) for t in (a, b))
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(bits(a).cpu(), bits(b).cpu())


def all_same_bits(first, second) -> bool:
    """Return whether two lists hold as many tensors, and of the same bits."""
    return len(first) == len(second) and all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def differing(got: torch.Tensor, expected: torch.Tensor) -> list[int]:
    """Return the row-major indices where two tensors of one shape and dtype differ in a bit."""
    kinds = (got.shape, got.dtype), (expected.shape, expected.dtype)
    assert kinds[0] == kinds[1], kinds
    return torch.nonzero(bits(got).reshape(-1) != bits(expected).reshape(-1)).reshape(-1).tolist()


def assert_identical(got: float, expected: float) -> None:
    """Fail unless two floats are the same number."""
    assert identical(got, expected), (got, expected)


def assert_same_bits(got: torch.Tensor | None, expected: torch.Tensor | None, *inputs: torch.Tensor, what="") -> None:
    """Fail unless two tensors agree in shape, dtype and every bit; show the first differences beside their inputs."""
    if same_bits(got, expected):
        return
    assert got is not None and expected is not None, f"{what}: got {got}, expected {expected}"
    got, expected = got.detach().cpu(), expected.detach().cpu()
    off = differing(got, expected)
    shown = [t.detach().cpu().reshape(-1) for t in inputs if t.numel() == got.numel()]
    width = 2 * got.element_size()
    lines = []
    for i in off[:6]:
        hexes = (f"{int(bits(t).reshape(-1)[i]) & (1 << 4 * width) - 1:#0{width + 2}x}" for t in (got, expected))
        numbers = [repr(t.reshape(-1)[i].item()) for t in (*shown, got, expected)]
        lines.append(f"[{i}] {', '.join(numbers)} = {' and '.join(hexes)}")
    listed = "\n  ".join(lines)
    raise AssertionError(f"{what}: {len(off)} of {got.numel()} differ (inputs, got, expected):\n  {listed}")
