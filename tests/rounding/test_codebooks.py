# SPDX-License-Identifier: Apache-2.0
"""Where the rounding of a codebook turns, and the tables that kernels look codes up in."""

import re

import numpy as np
import pytest

from fmtsim.formats.catalogue import dynamic_values
from fmtsim.formats.element import CodebookFormat
from fmtsim.formats.registry import get_format
from fmtsim.rounding.codebooks import BUCKETS, KEY_SHIFT, LOWEST_KEY, NO_THRESHOLD, codebook_thresholds, table_of
from fmtsim.support.errors import ArgumentError

F32 = np.float32
BOOKS = [get_format(name) for name in ("bnb_dynamic8", "bnb_dynamic8_unsigned", "nf4")]
UP, DOWN = F32(np.inf), F32(-np.inf)
LAST = 0.5 + 0xFFFF * 2.0**-24  # of the numbers that share a bucket; thresholds lie there and at the first one
EDGES = CodebookFormat(name="edges", values=(-LAST - 0.125, -LAST + 0.125, 0.0, LAST - 0.125, LAST + 0.125, 0.875, 1.0))


@pytest.mark.parametrize("fmt", BOOKS, ids=lambda fmt: fmt.name)
def test_thresholds_with_ties_to_even_codes(fmt):
    """Half-way is fl(fl(a + b) / 2): an odd code below gives it away, an even one keeps it."""
    values, turning = np.array(fmt.values, F32), codebook_thresholds(fmt, "even")
    assert turning.dtype == F32 and len(turning) == len(values) - 1
    for code, (a, b, least) in enumerate(zip(values, values[1:], turning, strict=False)):
        middle = F32(F32(a + b) / F32(2))
        assert least == (middle if code % 2 else np.nextafter(middle, UP)), code


@pytest.mark.parametrize("fmt", BOOKS, ids=lambda fmt: fmt.name)
def test_thresholds_with_ties_up(fmt):
    """The least x with fl(x - a) >= fl(fl(b - a) / 2)."""
    values, turning = np.array(fmt.values, F32), codebook_thresholds(fmt, "up")
    for a, b, least in zip(values, values[1:], turning, strict=False):
        half = F32(F32(b - a) / F32(2))
        assert F32(least - a) >= half > F32(np.nextafter(least, DOWN) - a)


def looked_up(table, y):
    """Follow the docstring of Table."""
    bits = np.array(y, F32).view(np.uint32).astype(np.int64)
    negative, magnitude = bits >> 31, bits & 0x7FFFFFFF
    bucket = np.clip((magnitude >> KEY_SHIFT) - LOWEST_KEY, 0, BUCKETS - 1)
    offset = magnitude & (NO_THRESHOLD - 1)
    word = table.words[bucket + BUCKETS * negative].astype(np.int64)
    return (word >> 17) + (np.where(negative == 1, NO_THRESHOLD - 1 - offset, offset) >= (word & 0x1FFFF))


@pytest.mark.parametrize("ties", ["even", "up"])
@pytest.mark.parametrize("fmt", [*BOOKS[:2], EDGES], ids=lambda fmt: fmt.name)
def test_tables_give_the_code_of_every_threshold_and_its_neighbours(fmt, ties):
    table, turning = table_of(fmt, ties), codebook_thresholds(fmt, ties)
    drawn = np.random.default_rng(0).uniform(-1, 1, 4000).astype(F32)
    edges = (np.arange(BUCKETS, dtype=np.uint32) + np.uint32(LOWEST_KEY)) << np.uint32(KEY_SHIFT)
    edges = np.concatenate([edges.view(F32), (edges - np.uint32(1)).view(F32)])
    points = [
        turning, np.nextafter(turning, UP), np.nextafter(turning, DOWN), drawn, drawn * F32(2.0**-12), edges, -edges,
    ]  # fmt: skip
    points += [np.array([0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30], F32), np.array(fmt.values, F32)]
    y = np.concatenate(points)
    y = y[(np.abs(y) <= 1)]
    assert looked_up(table, y).tolist() == np.searchsorted(turning, y, side="right").tolist()
    assert table.values.tolist() == list(fmt.values) and table.words.shape == (2 * BUCKETS,)


def test_books_that_kernels_do_not_take():
    many = CodebookFormat(name="many", values=tuple(k / 256 for k in range(257)))
    large = CodebookFormat(name="large", values=(0.0, 1.5))
    close = CodebookFormat(name="close", values=(0.0, 0.5, 0.501, 0.502, 1.0))
    tiny = CodebookFormat(name="tiny", values=(0.0, 2.0**-25, 1.0))
    for fmt, message in (
        (many, "many has 257 values up to 1; kernels take 256 up to 1"),
        (large, "large has 2 values up to 1.5; kernels take 256 up to 1"),
        (close, "close has values closer than kernels tell apart; its state has no fast path"),
        (tiny, "tiny has values closer than kernels tell apart; its state has no fast path"),
    ):
        with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
            table_of(fmt, "even")
    most = CodebookFormat(name="most", values=tuple(k / 255 for k in range(256)))
    assert len(table_of(most, "even").values) == 256


def test_dynamic_maps_of_fewer_decades():
    assert len(dynamic_values(signed=True, decades=3)) == 2 + 2 * 7 and dynamic_values(signed=False, decades=1)[-1] == 1
