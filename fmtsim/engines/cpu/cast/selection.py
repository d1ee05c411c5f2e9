# SPDX-License-Identifier: Apache-2.0
"""Which fast kernel casts a block format, if one does: for values, and for codes with scales."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from fmtsim.engines.cpu.cast import blocks, columns, encoding
from fmtsim.engines.cpu.cast.codes import coding_of
from fmtsim.engines.cpu.cast.elements import grid_for
from fmtsim.engines.cpu.cast.grid import Grid, grid_of
from fmtsim.engines.cpu.cast.lookup import table_of
from fmtsim.engines.cpu.cast.words import Words
from fmtsim.formats.block import E8M0, FP32, BlockFormat
from fmtsim.spec.cast import CastSpec

_NO_GRID = grid_of(E8M0, "saturate", "nearest_even")  # stands in for one that a kernel does not look at
_LOWEST_PLACE = -90  # exponent: what a product with a power of two loses below 2**-126 is far below such a last place


class Fast(NamedTuple):
    """A fast kernel: the element's grid, and ``run(x, values, codes, scales, scaling, layout, start, stop)``.

    It casts groups of blocks ``start ... stop - 1`` and returns the first that it cannot take, or stop.
    """

    grid: Grid
    run: Callable[..., int]


def quantizer(spec: CastSpec, words: Words | None = None) -> Fast | None:
    """Return the kernel for the values of a float32 tensor, None where none serves."""
    grids = _grids(spec)
    if grids is None:
        return None
    g, sg = grids
    of = columns if _format(spec).block[1] == 1 else blocks
    if words is not None:
        return Fast(g, lambda x, y, _, __, p, at, *ends: of.quantize_stochastic(x, y, g, p, sg, words, at, *ends))
    if _format(spec).power_of_two:
        return Fast(g, lambda x, y, _, __, p, at, *ends: of.quantize_binary(x, y, g, p, at, *ends))
    return Fast(g, lambda x, y, _, __, p, at, *ends: of.quantize_real(x, y, g, p, sg, at, *ends))


def encoder(spec: CastSpec, words: Words | None = None) -> Fast | None:
    """Return the kernel for the codes and scales of a float32 tensor, None where none serves."""
    grids, coding = _grids(spec), coding_of(_format(spec).element)
    if grids is None or coding is None:
        return _by_table(spec)
    g, sg = grids
    if int(g.min_biased) - 127 + int(g.drop) - 23 < _LOWEST_PLACE:
        return None
    if words is not None:
        return Fast(
            g, lambda x, _, z, s, p, at, *ends: encoding.encode_stochastic(x, z, s, g, coding, p, sg, words, at, *ends)
        )
    return Fast(g, lambda x, _, z, s, p, at, *ends: encoding.encode_nearest(x, z, s, g, coding, p, sg, at, *ends))


def _by_table(spec: CastSpec) -> Fast | None:
    """Return the kernel that looks codes up under real scales."""
    fmt = _format(spec)
    sg = _scale_grid(fmt)
    if sg is None or fmt.power_of_two or fmt.zero_point:
        return None
    table = table_of(fmt.element, spec.rounding, spec.overflow)
    if table is None:
        return None
    return Fast(sg, lambda x, _, z, s, p, at, *ends: encoding.encode_tabled(x, z, s, table, p, sg, at, *ends))


def _format(spec: CastSpec) -> BlockFormat:
    assert isinstance(spec.format, BlockFormat)
    return spec.format


@lru_cache(maxsize=1024)
def _grids(spec: CastSpec) -> tuple[Grid, Grid] | None:
    """Return the grids of element and scale for the kernels that compute, None where they do not serve."""
    fmt = _format(spec)
    if fmt.zero_point or spec.rounding.mode not in ("nearest_even", "stochastic"):
        return None
    grid, scale_grid = grid_for(fmt.element, spec), _scale_grid(fmt)
    if grid is None or grid.by_bits or grid.special or fmt.element.max_exponent < 0 or scale_grid is None:
        return None
    return grid, scale_grid


def _scale_grid(fmt: BlockFormat) -> Grid | None:
    """Return the grid to which the fast kernels round real scales, None where they do not make a format's scales."""
    if fmt.power_of_two or (fmt.scale == FP32 and fmt.arithmetic != "divide"):
        return _NO_GRID
    grid = grid_of(fmt.scale, "saturate", "nearest_even")
    return None if grid is None or grid.by_bits or fmt.arithmetic == "divide" else grid
