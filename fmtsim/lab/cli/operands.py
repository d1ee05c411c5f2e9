# SPDX-License-Identifier: Apache-2.0
"""Random operands of a product, in any format."""

from typing import Any, NamedTuple

import torch

from fmtsim.casts.quantize import encode, quantize
from fmtsim.formats.block import BlockFormat, LogTileFormat
from fmtsim.formats.interop import codes_to_tensor, torch_dtype
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.support.errors import ArgumentError


class Operands(NamedTuple):
    """Two matrices, a [M, K] and b [K, N], and the formats that their dtypes do not say."""

    a: torch.Tensor
    b: torch.Tensor
    a_format: Any
    b_format: Any
    tf32: bool


def make_operands(sizes: tuple[int, int, int], formats: tuple[str, str], kind: str, seed: int) -> Operands:
    """Return random operands; the columns of b have K contiguous, as FP8 kernels want it.

    Args:
        sizes: M, N and K.
        formats: Of a and of b, by name: floating-point formats or int8 (whose codes are all equally likely).
        kind: One of ``DATA`` (the arguments of ``fmtsim mm``); numbers beyond a format's range saturate.
        seed: Of both.

    Raises:
        ArgumentError: a format is a block format, or of integers other than int8.
        FormatError: a format is unknown.
    """
    names = [get_format(name).name for name in formats]
    m, n, k = sizes
    a, a_format = _matrix(m, k, names[0], kind, 2 * seed)
    b, b_format = _matrix(n, k, names[1], kind, 2 * seed + 1)
    return Operands(a, b.t(), a_format, b_format, names == ["tf32", "tf32"])


def _matrix(rows: int, columns: int, name: str, kind: str, seed: int) -> tuple[torch.Tensor, str | None]:
    """Return a matrix on a format, and the format's name where torch has no dtype for it."""
    fmt = get_format(name)
    generator = torch.Generator().manual_seed(seed)
    if name == "int8":
        return torch.randint(-128, 128, (rows, columns), generator=generator).to(torch.int8), None
    if isinstance(fmt, BlockFormat | LogTileFormat) or not isinstance(fmt, FloatFormat):
        raise ArgumentError(f"{name} is neither a floating-point format nor int8; choose e4m3, bf16 or another eXmY")
    x = _numbers(rows, columns, kind, generator)
    dtype = torch_dtype(fmt)
    if dtype is None or name == "e2m1":
        return quantize(x, fmt, overflow="saturate", out_dtype=torch.float32), None if name == "tf32" else name
    return codes_to_tensor(encode(x, fmt, overflow="saturate").unpacked(), fmt), None


def _numbers(rows: int, columns: int, kind: str, generator: torch.Generator) -> torch.Tensor:
    if kind == "uniform":
        return torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    if kind == "wide":
        return x * torch.exp2(torch.randint(-8, 9, (rows, columns), generator=generator).double())
    if kind == "cancel":
        pairs = columns // 2 * 2
        bend = torch.randint(-1, 2, (rows, pairs // 2), generator=generator) / 16
        x[:, 1:pairs:2] = -x[:, 0:pairs:2] * (1 + bend)
    return x
