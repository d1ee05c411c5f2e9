# SPDX-License-Identifier: Apache-2.0
"""Formats whose fields vary in width with the magnitude, as lists of values: HiFloat8, posits and takums."""

from collections.abc import Callable
from decimal import Context, Decimal
from functools import partial

from fmtsim.formats.spec import CodebookFormat
from fmtsim.support.errors import FormatError

_EXP = Context(prec=40)  # float64 has 17 digits


def hif8() -> CodebookFormat:
    """Build HiFloat8: sign, a prefix code that gives the width of the exponent field, exponent, mantissa.

    The exponent is a sign and a magnitude whose leading one is implicit. Codes 1 to 7 are powers of two; the largest
    magnitude is an infinity, which numbers reach from ``1.25 * 2**15`` on.
    """
    magnitudes = [0.0, *(2.0 ** (code - 23) for code in range(1, 8))]
    for code in range(8, 128):
        # 1. the prefix 0001, 001, 01, 10 or 11: an exponent of 0 to 4 bits, and mantissa bits behind it
        width = max(code.bit_length() - 4, 0) if code < 64 else 3 + code // 32 % 2
        mantissa_bits = min(3, 5 - width)
        field, mantissa = (code >> mantissa_bits) % (1 << width), code % (1 << mantissa_bits)
        # 2. the exponent: its sign first, then the bits below the implicit one
        half = 1 << width >> 1
        exponent = (half + field % half) * (-1 if field >= half else 1) if width else 0
        magnitudes.append(2.0**exponent * (1 + mantissa / 2**mantissa_bits))
    return CodebookFormat(
        name="hif8",
        values=(*magnitudes, 0.0, *(-value for value in magnitudes[1:])),
        nan_code=0x80,
        infinities=True,
        aliases=("hifloat8",),
        source="Luo et al., arXiv:2409.16626; its ties go away from zero (rounding='nearest_away')",
    )


def tapered(kind: str, bits: int) -> CodebookFormat:
    """Build a posit (two exponent bits), a takum (logarithmic) or a takum_linear of up to 16 bits.

    Negative codes are two's complements of positive ones, the lowest code is NaN. Rounding to nearest is that of bit
    strings: the code with one bit more between two codes is where it turns. Only zero rounds to zero.

    Raises:
        FormatError: The width is not one of 3 (takums: 6) to 16.
    """
    value, source, least = _TWO_SIDED[kind]
    if not least <= bits <= 16:
        raise FormatError(f"{kind}{bits} is not listed; choose {kind}{least} to {kind}16")
    top = 1 << (bits - 1)
    magnitudes = [value(code, bits) for code in range(1, top)]
    turns = [0.0, *(value(2 * code + 1, bits + 1) for code in range(1, top - 1))]
    return CodebookFormat(
        name=f"{kind}{bits}",
        values=(0.0, *magnitudes, 0.0, *(-magnitude for magnitude in reversed(magnitudes))),
        nan_code=top,
        thresholds=(*(-turn for turn in reversed(turns)), *turns),
        source=source,
    )


def _posit_value(code: int, bits: int) -> float:
    """Return the value of a positive code."""
    # 1. the regime: a run of equal bits behind the sign, ended by another bit
    width = bits - 1
    ones = code >> (width - 1)
    run = width - ((code ^ ((1 << width) - 1)) if ones else code).bit_length()
    # 2. exponent and fraction behind it, zeros where the code has ended
    exponent_and_fraction = 4 * ((code << (run + 1)) % (1 << width)) / (1 << width)
    exponent = 4 * (run - 1 if ones else -run) + int(exponent_and_fraction)
    return 2.0**exponent * (1 + exponent_and_fraction % 1)


def _takum_value(code: int, bits: int, *, linear: bool = False) -> float:
    """Return the value of a positive code."""
    # 1. direction and regime: how many bits the characteristic has, and its least value
    width = bits - 1
    direction, regime = divmod(code >> (width - 4), 8)
    length = regime if direction else 7 - regime
    least = (1 << length) - 1 if direction else 1 - (2 << length)
    # 2. characteristic and mantissa, zeros where the code has ended
    exponent_and_fraction = ((code << 4) % (1 << width)) / (1 << (width - length))
    if linear:
        return 2.0 ** (least + int(exponent_and_fraction)) * (1 + exponent_and_fraction % 1)
    return float(_EXP.exp(Decimal((least + exponent_and_fraction) / 2)))


_TWO_SIDED: dict[str, tuple[Callable[[int, int], float], str, int]] = {  # value of a positive code, source, least width
    "posit": (_posit_value, "Posit Working Group, Standard for Posit Arithmetic (2022)", 3),
    "takum": (_takum_value, "Hunhold, arXiv:2404.18603; logarithmic, values the nearest float64; libtakum 1.0.1", 6),
    "takum_linear": (partial(_takum_value, linear=True), "Hunhold, arXiv:2408.10594; libtakum 1.0.1", 6),
}
