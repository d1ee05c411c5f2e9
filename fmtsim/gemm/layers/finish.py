"""Scales and a bias behind a sum, one rounding a step."""

import torch
from torch import Tensor

from fmtsim.dispatch import is_bare
from fmtsim.ops import load_engine

_library = torch.library.Library("fmtsim", "FRAGMENT")
_library.define(
    "finish_sums(Tensor y, Tensor? columns, Tensor? rows, Tensor? rest, Tensor? bias, ScalarType dtype) -> Tensor"
)


def finish_sums(
    y: Tensor, columns: Tensor | None, rows: Tensor | None, rest: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return ``((y * columns) * rows + rest) + bias`` in a dtype; what is None is left out."""
    if columns is rows is rest is bias is None:
        return y.to(dtype)
    run = _finish_sums if is_bare(y) else torch.ops.fmtsim.finish_sums  # no compiler may fuse these steps
    return run(y, columns, rows, rest, bias, dtype)  # type: ignore[no-any-return]


def _finish_sums(y, columns, rows, rest, bias, dtype):  # type: ignore[no-untyped-def]
    made = load_engine("cuda").finish(y, columns, rows, bias, dtype) if y.is_cuda and rest is None else None
    if made is not None:
        return made
    y = y if columns is None else y * columns.mT
    y = y if rows is None else y * rows
    y = y if rest is None else y + rest
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(dtype, copy=True)


_library.impl("finish_sums", _finish_sums, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fmtsim::finish_sums",
    lambda y, columns, rows, rest, bias, dtype: y.new_empty(y.shape, dtype=dtype),
    lib=_library,
)
