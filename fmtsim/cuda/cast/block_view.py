"""Tensors as the kernels of block formats see them: three axes, the blocks' inner one in the middle."""

from typing import NamedTuple

from torch import Tensor

from fmtsim.formats.block import BlockFormat


class View(NamedTuple):
    """A tensor as [leading, inner, trailing], ``inner`` the blocks' inner axis, and the strides of the three."""

    sizes: tuple[int, int, int]
    strides: tuple[int, int, int]

    @property
    def dense(self) -> bool:
        """Whether memory holds the three axes in order and without gaps."""
        _, inner, trailing = self.sizes
        wanted = (inner * trailing, trailing, 1)
        return all(
            size == 1 or stride == want for size, stride, want in zip(self.sizes, self.strides, wanted, strict=True)
        )


def view_of(t: Tensor, dim: int) -> View | None:
    """Return a tensor as [leading, inner, trailing], None where its strides do not allow it."""
    if t.dim() == 0:
        return View((1, 1, 1), (1, 1, 1))
    axis = t.dim() + dim
    leading, trailing = _merged(t.shape[:axis], t.stride()[:axis]), _merged(t.shape[axis + 1 :], t.stride()[axis + 1 :])
    if leading is None or trailing is None:
        return None
    sizes = (leading[0], t.shape[axis], trailing[0])
    return View(sizes, (leading[1], t.stride(axis), trailing[1]))


def _merged(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int] | None:
    """Return neighbouring dimensions as one size and one stride."""
    size, stride = 1, 1
    for extent, step in zip(reversed(sizes), reversed(strides), strict=True):
        if extent == 1:
            continue
        if size == 1:
            size, stride = extent, step
        elif step == size * stride:
            size *= extent
        else:
            return None
    return size, stride


def viewed(t: Tensor, dim: int) -> Tensor:
    """Return the tensor, or a contiguous copy where its strides do not fit three axes."""
    return t if view_of(t, dim) is not None else t.contiguous()


def extent(fmt: BlockFormat, sizes: tuple[int, int, int]) -> tuple[int, int]:
    """Return the rows and columns of a block in a matrix of these sizes."""
    return fmt.block[0] or max(sizes[0] * sizes[2], 1), fmt.block[1] or max(sizes[1], 1)


def turned(view: View) -> View:
    """Swap the leading and the trailing axis where the trailing one has one element: rows keep their order."""
    (leading, inner, trailing), (first, middle, last) = view
    if trailing == 1:
        return View((1, inner, leading), (last, middle, first))
    return view


def aligned(*tensors: Tensor) -> bool:
    """Say whether all begin at an address that takes 16 bytes at once."""
    return all(t.data_ptr() % 16 == 0 for t in tensors)
