# SPDX-License-Identifier: Apache-2.0
"""Convolutions as matrix products with quantised operands: of windows, or, transposed, of positions."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.casts.lanes import define_operator
from fmtsim.gemm.layers.quantize_operand import wide_dtype
from fmtsim.nn.modules import EmulatedModule, register_emulated
from fmtsim.support.errors import ArgumentError

_AXES = {1: "L", 2: "H, W", 3: "D, H, W"}  # the dimensions behind [N, channels, in error messages
Sizes = tuple[int, ...]


class _Convolution(EmulatedModule):
    """What convolutions of one, two and three dimensions have in common."""

    in_channels: int
    out_channels: int
    groups: int
    kernel_size: Sizes
    stride: Sizes
    dilation: Sizes
    padding: Any
    weight: Any
    bias: Any

    @staticmethod
    def why_left(module: Any) -> str | None:
        """Return why a depthwise layer is left: libraries run those on no matrix unit."""
        if module.groups == module.in_channels > 1:
            return "depthwise: a sum for each channel, which libraries run as no matrix product"
        return None

    def batched(self, input: Tensor) -> Tensor:
        """Return the input with a batch dimension; raise ArgumentError where its shape does not fit."""
        dims = len(self.kernel_size)
        x = input if input.dim() == dims + 2 else input.unsqueeze(0)  # torch's layers also take one image without N
        if x.dim() != dims + 2 or x.shape[1] != self.in_channels:
            raise ArgumentError(
                f"{self._kind} input of shape {tuple(input.shape)} does not fit; "
                f"pass [N, {self.in_channels}, {_AXES[dims]}] or [{self.in_channels}, {_AXES[dims]}]"
            )
        return x

    def grouped(self, rows: Tensor, weights: Iterable[Tensor], biases: Iterable[Tensor | None]) -> Tensor:
        """Return ``[N, outputs, L]``: a product for each group of ``[N, L, inputs]``."""
        parts = zip(rows.chunk(self.groups, -1), weights, biases, strict=True)
        outputs = [self.gemm(part, w, bias) for part, w, bias in parts]
        return (outputs[0] if self.groups == 1 else torch.cat(outputs, -1)).transpose(1, 2)

    def check_sizes(self, input: Tensor, sizes: Sequence[int]) -> None:
        """Raise ArgumentError where an output would be empty."""
        if min(sizes) < 1:
            raise ArgumentError(
                f"{self._kind} input of shape {tuple(input.shape)} is too small: kernel_size={self.kernel_size}, "
                f"dilation={self.dilation} and padding={self.padding} leave an output of {tuple(sizes)}; "
                "pass a larger input, or more padding"
            )

    @property
    def _kind(self) -> str:
        return self.original_class.__name__


class EmulatedConv(_Convolution):
    """Apply a convolution as one matrix product a group, with quantised operands.

    The input is unfolded to ``[batch x positions, channels / groups x kernel]``; blocks of x and w run along that inner
    axis and blocks of wgrad along positions, as in a GPU's implicit GEMM. An element that several windows share is
    quantised in each of them; its gradient is the sum of theirs, which have the dtype of the product's operands, in
    float32 (float64 for float64), kernel positions in ascending order, rounded once to the input's dtype.
    """

    _reversed_padding_repeated_twice: list[int]
    padding_mode: Any

    @staticmethod
    def matrices(module: Any) -> Iterator[tuple[int, int]]:
        """Yield the size of a group's weight."""
        yield module.out_channels // module.groups, module.in_channels // module.groups * math.prod(module.kernel_size)

    def input_shapes(self, rows: int) -> tuple[Sizes, ...]:
        """Return the shape of padded inputs of one position each."""
        extents = (d * (k - 1) + 1 for k, d in zip(self.kernel_size, self.dilation, strict=True))  # of one window
        return ((rows, self.in_channels, *extents),)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``[N, out_channels, *positions]`` from ``[N, in_channels, *sizes]``, or both without N."""
        # 1. the padded input, and how many windows fit along each dimension
        x = self._padded(self.batched(input))
        ways = zip(x.shape[2:], self.kernel_size, self.dilation, self.stride, strict=True)
        positions = [(size - d * (k - 1) - 1) // s + 1 for size, k, d, s in ways]
        self.check_sizes(input, positions)
        # 2. one product a group of windows with weights
        y = self.grouped(
            self.windows(x).transpose(1, 2),
            (w.flatten(1) for w in self.weight.chunk(self.groups)),  # [outputs / groups, channels / groups x kernel]
            (None,) * self.groups if self.bias is None else self.bias.chunk(self.groups),
        ).unflatten(2, positions)
        return y if input.dim() == y.dim() else y.squeeze(0)

    def windows(self, x: Tensor) -> Tensor:
        """Return ``[N, channels x kernel, positions]``."""
        return _Windows.apply(x, self.kernel_size, self.stride, self.dilation)  # type: ignore[no-any-return, no-untyped-call]

    def _padded(self, x: Tensor) -> Tensor:
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        padding = self._reversed_padding_repeated_twice  # the last dimension first; "same" and "valid" resolved
        return F.pad(x, padding, mode=mode) if any(padding) else x  # F.pad copies even if there is nothing to pad


class EmulatedConv2d(EmulatedConv, nn.Conv2d):
    """Apply a convolution of images as ``EmulatedConv`` does.

    The gradients of windows are added by ``torch.nn.functional.unfold``: on a CPU in the tensors' dtype.
    """

    original_class = nn.Conv2d

    def windows(self, x: Tensor) -> Tensor:
        """Return ``[N, channels x kernel, positions]``."""
        return F.unfold(x, self.kernel_size, dilation=self.dilation, stride=self.stride)


class EmulatedConvTranspose(_Convolution):
    """Apply a transposed convolution as one matrix product a group, with quantised operands, and a sum of windows.

    The product is ``[batch x input positions, channels / groups]`` by ``[outputs / groups x kernel, channels /
    groups]``, rounded to x's dtype; blocks of x and w run along channels. Windows that overlap are then added in
    float32 (float64 for float64), as in torch's CUDA kernel (col2im), but on every device with kernel positions in
    ascending order; the bias follows, and one rounding.
    """

    output_padding: Sizes
    _output_padding: Any

    @staticmethod
    def matrices(module: Any) -> Iterator[tuple[int, int]]:
        """Yield the size of a group's weight, transposed."""
        yield module.out_channels // module.groups * math.prod(module.kernel_size), module.in_channels // module.groups

    def input_shapes(self, rows: int) -> tuple[Sizes, ...]:
        """Return the shape of inputs of one position each."""
        return ((rows, self.in_channels, *(1 for _ in self.kernel_size)),)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Return ``[N, out_channels, *sizes]`` from ``[N, in_channels, *positions]``, or both without N."""
        # 1. sizes: torch's own function has what output_size= adds behind the last window
        x, dims = self.batched(input), len(self.kernel_size)
        more = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation
        )
        ways = list(zip(x.shape[2:], self.kernel_size, self.stride, self.dilation, more, strict=True))
        if any(extra >= max(s, d) for _, _, s, d, extra in ways):
            raise ArgumentError(
                f"{self._kind} output_padding={tuple(more)} is not smaller than stride={self.stride} or "
                f"dilation={self.dilation}; choose a smaller one"
            )
        sizes = tuple((size - 1) * s + d * (k - 1) + 1 for size, k, s, d, _ in ways)
        # 2. one product a group: each position becomes a window of outputs
        rows = x.flatten(2).transpose(1, 2)  # [N, positions, channels]
        y = self.grouped(rows, (w.flatten(1).t() for w in self.weight.chunk(self.groups)), (None,) * self.groups)
        # 3. overlapping windows are added, what padding= cuts off goes, and the bias follows
        dtype = y.dtype  # the products have this dtype; sums of windows are float32 or float64
        y = _Fold.apply(y, x.shape[2:], sizes, self.kernel_size, self.stride, self.dilation)  # type: ignore[no-untyped-call]
        y = F.pad(y, [n for extra in reversed(more) for n in (0, extra)]) if any(more) else y  # behind the ends
        y = self._padded(y)
        self.check_sizes(input, y.shape[2:])
        if self.bias is not None:
            y = y + self.bias.to(y.dtype).view(-1, *(1,) * dims)
        y = y.to(dtype)  # the one rounding
        return y if input.dim() == y.dim() else y.squeeze(0)

    def _padded(self, y: Tensor) -> Tensor:
        """Return the output without its padding."""
        where = (slice(p, n - p) for n, p in zip(y.shape[2:], self.padding, strict=True))
        return y[(..., *where)]  # type: ignore[index]


class _Windows(torch.autograd.Function):
    """Lay out the windows of ``[N, C, *sizes]`` as ``[N, C x kernel, positions]``, and add their gradients."""

    @staticmethod
    def forward(x: Tensor, kernel: Sizes, stride: Sizes, dilation: Sizes) -> Tensor:
        """Return the windows."""
        return _unfolded(x, kernel, stride, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the sizes."""
        x, *ctx.how = inputs
        ctx.sizes = tuple(x.shape[2:])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the sums."""
        kernel, stride, dilation = ctx.how
        ways = zip(ctx.sizes, kernel, stride, dilation, strict=True)
        positions = tuple((size - d * (k - 1) - 1) // s + 1 for size, k, s, d in ways)
        return _Fold.apply(g, positions, ctx.sizes, *ctx.how).to(g.dtype), None, None, None  # type: ignore[no-untyped-call]


class _Fold(torch.autograd.Function):
    """Add ``[N, C x kernel, positions]`` where windows of ``[N, C, *sizes]`` lie, in a wide dtype."""

    @staticmethod
    def forward(
        columns: Tensor, positions: Sizes, sizes: Sizes, kernel: Sizes, stride: Sizes, dilation: Sizes
    ) -> Tensor:
        """Return the sums."""
        return torch.ops.fmtsim.fold(columns, positions, sizes, kernel, stride, dilation)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the sizes."""
        columns, _, _, *ctx.how = inputs  # kernel, stride, dilation
        ctx.dtype = columns.dtype

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the windows."""
        return _unfolded(g.to(ctx.dtype), *ctx.how), None, None, None, None, None


def _unfolded(x: Tensor, kernel: Sizes, stride: Sizes, dilation: Sizes) -> Tensor:
    dims = len(kernel)
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, d * (k - 1) + 1, s)[..., ::d]  # a window spans d * (k - 1) + 1, and every d-th is a tap
    x = x.permute(0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))  # [N, C, *kernel, *positions]
    return x.contiguous().flatten(2 + dims).flatten(1, 1 + dims)


def _folded(
    columns: Tensor, positions: Sequence[int], sizes: Sequence[int], kernel: Sizes, stride: Sizes, dilation: Sizes
) -> Tensor:
    y = _no_sums(columns, positions, sizes, kernel, stride, dilation).zero_()
    columns = columns.unflatten(-1, positions).unflatten(1, (-1, *kernel))  # [N, C, *kernel, *positions]
    for tap in itertools.product(*map(range, kernel)):  # in ascending order: every device has the same bits
        ways = zip(tap, dilation, stride, positions, strict=True)
        where = tuple(slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, s, n in ways)
        y[(..., *where)].add_(columns[(slice(None), slice(None), *tap)])  # type: ignore[index]
    return y


def _no_sums(
    columns: Tensor, positions: Sequence[int], sizes: Sequence[int], kernel: Sizes, stride: Sizes, dilation: Sizes
) -> Tensor:
    outer = columns.shape[0], columns.shape[1] // math.prod(kernel)
    return columns.new_empty((*outer, *sizes), dtype=wide_dtype(columns.dtype))


define_operator(  # one for torch.compile, which would take seconds for the many steps of a kernel
    "fold(Tensor columns, SymInt[] positions, SymInt[] sizes, int[] kernel, int[] stride, int[] dilation) -> Tensor",
    _folded,
    _no_sums,
)


_class: type[nn.Module]


def _emulated(base: type[_Convolution], original: type[nn.Module]) -> type[EmulatedModule]:
    fields = {"original_class": original, "__doc__": base.__doc__, "__module__": __name__}
    return type(f"Emulated{original.__name__}", (base, original), fields)


register_emulated(EmulatedConv2d)
for _class in (nn.Conv1d, nn.Conv3d):
    register_emulated(_emulated(EmulatedConv, _class))
for _class in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    register_emulated(_emulated(EmulatedConvTranspose, _class))
