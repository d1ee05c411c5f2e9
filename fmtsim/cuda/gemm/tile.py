"""Which fused units the tiled kernel takes (general_tile.cu), and how it is specialised for them."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from fmtsim.cuda.gemm.unit import MODES, range_of
from fmtsim.cuda.runtime.program import Defines
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.gemm_spec import GemmSpec

TILE_WIDTH: Final = 64
TILE_BYTES: Final = 47616 + 256 * 16 * 8  # operands, and the running sums of 256 threads

_EXACT = 8  # of the macro TERM
_REACH = 400  # exponents of operands, scales and sums lie within, so that no step leaves the normal doubles
_BLOCKS = (1, 2, 4, 8, 16, 32)


@lru_cache(maxsize=1024)
def tile_defines(spec: GemmSpec, k: int, block: int) -> Defines | None:
    """Return the macros of the tiled kernel for a unit, None where doubles do not hold its terms or sums.

    ``block`` is the length of blocks in the order of K products.
    """
    unit = spec.datapath
    if not isinstance(unit, Datapath) or unit.group > 1 or unit.signed_zero or not _in_reach(spec, unit):
        return None
    narrow = False
    if unit.fraction_bits is None:
        if not _exact(spec, unit, block):
            return None
        term = _EXACT
    else:
        bits = unit.fraction_bits + 3 + 2 * (unit.scale is not None) + (block + 1).bit_length()
        if bits > 51:
            return None
        narrow, term = bits <= 31, MODES.index(unit.term_rounding)
    rounding = MODES.index(unit.rounding.mode)
    promotes = unit.promote_every is not None or spec.plan.promote_every is not None
    return _defines(term, block if block in _BLOCKS else 0, narrow, rounding, promotes)


def _in_reach(spec: GemmSpec, unit: Datapath) -> bool:
    a, b, scale, acc = (range_of(fmt) for fmt in (spec.a, spec.b, unit.scale, unit.accumulator))
    lowest = min(a.lsb, b.lsb) + scale.lsb, acc.lsb
    given = 0 if unit.operand is None else abs(unit.operand.min_exponent)
    highest = max(a.top, b.top) + scale.top, acc.top, abs(unit.min_exponent or 0), given
    # Numbers pushed from zero by 2^-50 of themselves move by less than the last place of a product of 48 bits.
    fits = a.bits + b.bits + 2 * scale.bits <= 48 and unit.accumulator.mantissa_bits < 48
    return fits and min(lowest) >= -_REACH and max(highest) <= _REACH


def _exact(spec: GemmSpec, unit: Datapath, count: int) -> bool:
    """Say whether float64 holds the sum of a block's products, and sums with a sticky last bit round rightly."""
    a, b, scale = (range_of(fmt) for fmt in (spec.a, spec.b, unit.scale))
    span = a.top + b.top + 2 * scale.top - a.lsb - b.lsb - 2 * scale.lsb + count.bit_length()
    drawn = unit.rounding.bits + 1 if unit.rounding.mode == "stochastic" else 0
    return (count == 1 or span <= 53) and unit.accumulator.mantissa_bits + drawn <= 49


def _defines(term: int, block: int, narrow: bool, rounding: int, promotes: bool) -> Defines:
    values = {"TERM": term, "BLOCK": block, "NARROW": int(narrow), "ROUND": rounding, "PROMOTES": int(promotes)}
    return tuple((name, str(value)) for name, value in values.items())


def tile_variants() -> Iterator[Defines]:
    """Yield every kind of specialisation: each value of each macro, beside common ones of the others."""
    even, zero = MODES.index("nearest_even"), MODES.index("toward_zero")
    for term in (even, MODES.index("nearest_away"), zero, MODES.index("down"), _EXACT):
        yield _defines(term, 16, False, even, False)
        yield _defines(term, 0, term != _EXACT, zero, True)
    for block, rounding in zip(_BLOCKS, range(len(MODES) - len(_BLOCKS), len(MODES)), strict=True):
        yield _defines(zero, block, True, rounding, False)
    yield _defines(even, 16, False, MODES.index("nearest_away"), False)
