# SPDX-License-Identifier: Apache-2.0
"""Codes of HiFloat8, posits and takums from their definitions, as strings of bits and exact fractions: slow, alone."""

import math
from decimal import Context, Decimal
from fractions import Fraction
from functools import cache

_LONG = Context(prec=60)
_PREFIXES = {"11": 4, "10": 3, "01": 2, "001": 1, "0001": 0}  # of HiFloat8: bits of the exponent field


@cache
def decode(name: str, bits: int, code: int) -> float:
    """Return the value of a code of ``"hif8"``, ``"posit"``, ``"takum"`` or ``"takum_linear"``."""
    top = 1 << (bits - 1)
    if code in (0, top):
        return math.nan if code else 0.0
    if name == "hif8":
        magnitude = _hif8_magnitude(f"{code % top:07b}")
    else:
        text = f"{(2 * top - code if code > top else code):0{bits - 1}b}" + "0" * 300  # fields that it lacks are 0
        magnitude = _posit_magnitude(text) if name == "posit" else _takum_magnitude(text, name == "takum_linear")
    return -magnitude if code > top else magnitude


def _hif8_magnitude(text: str) -> float:
    if text == "1101111":
        return math.inf
    if text.startswith("0000"):
        return float(Fraction(2) ** (int(text, 2) - 23))
    prefix = next(prefix for prefix in _PREFIXES if text.startswith(prefix))
    width, text = _PREFIXES[prefix], text[len(prefix) :]
    field, mantissa = text[:width], text[width:]
    exponent = int("1" + field[1:], 2) * (-1) ** int(field[0]) if field else 0  # its leading one is implicit
    return float(Fraction(2) ** exponent * (1 + Fraction(int(mantissa, 2), 1 << len(mantissa))))


def _posit_magnitude(text: str) -> float:
    run = len(text) - len(text.lstrip(text[0]))
    if "1" not in text[run:]:  # the regime reaches the end of the code, or ends with it
        run = len(text.rstrip("0")) if text[0] == "1" else run
    regime = run - 1 if text[0] == "1" else -run
    exponent, fraction = int(text[run + 1 : run + 3], 2), text[run + 3 :]
    return float(Fraction(16) ** regime * 2**exponent * (1 + Fraction(int(fraction, 2), 1 << len(fraction))))


def _takum_magnitude(text: str, linear: bool) -> float:
    regime = int(text[1:4], 2) if text[0] == "1" else 7 - int(text[1:4], 2)
    characteristic = int("0" + text[4 : 4 + regime], 2)
    characteristic += 2**regime - 1 if text[0] == "1" else 1 - 2 ** (regime + 1)
    mantissa = Fraction(int(text[4 + regime :], 2), 1 << len(text[4 + regime :]))
    if linear:
        return float(Fraction(2) ** characteristic * (1 + mantissa))
    half = (characteristic + mantissa) / 2
    return float(_LONG.exp(_LONG.divide(Decimal(half.numerator), Decimal(half.denominator))))


def encode(name: str, bits: int, x: float) -> int:
    """Return the code to which the sources round x: HiFloat8 with ties away, the others to even strings of bits."""
    top = 1 << (bits - 1)
    if x != x:
        return top
    if name == "hif8":
        magnitude = _hif8_rounded(abs(x))
        code = _hif8_codes()[magnitude]
        return code + top if x < 0 and code else code
    if x in (0, math.inf, -math.inf):
        return top if x else 0
    text = _posit_string(Fraction(abs(x))) if name == "posit" else _takum_string(abs(x), name == "takum_linear")
    # the string is rounded as an integer, which neither becomes zero nor runs into NaN's
    text = text.ljust(bits, "0")
    code, rest = int(text[: bits - 1], 2), text[bits - 1 :]
    code += rest[0] == "1" and ("1" in rest[1:] or code % 2 == 1)
    code = min(max(code, 1), top - 1)
    return 2 * top - code if x < 0 else code


@cache
def _hif8_codes() -> dict[float, int]:
    return {decode("hif8", 8, code): code for code in range(128)}


def _hif8_rounded(x: float) -> float:
    if x >= 1.25 * 2**15 or x < 2.0**-23:
        return math.inf if x > 1 else 0.0
    exponent = max(math.frexp(x)[1] - 1, -22)
    mantissa_bits = next((places for last, places in ((3, 3), (7, 2), (15, 1)) if abs(exponent) <= last), 0)
    step = Fraction(2) ** (exponent - mantissa_bits)
    return float(math.floor(Fraction(x) / step + Fraction(1, 2)) * step)


def _digits(fraction: Fraction) -> str:
    """Return the binary places of a dyadic fraction below 1."""
    places = fraction.denominator.bit_length() - 1
    return f"{fraction.numerator:0{places}b}" if places else ""


def _posit_string(x: Fraction) -> str:
    exponent = math.frexp(float(x))[1] - 1
    regime, rest = divmod(exponent, 4)
    run = "1" * (regime + 1) + "0" if regime >= 0 else "0" * -regime + "1"
    return run + f"{rest:02b}" + _digits(x / Fraction(2) ** exponent - 1)


def _takum_string(x: float, linear: bool) -> str:
    if linear:
        characteristic = math.frexp(x)[1] - 1
        digits = _digits(Fraction(x) / Fraction(2) ** characteristic - 1)
    else:
        logarithm = Fraction(_LONG.multiply(_LONG.ln(Decimal(x)), Decimal(2)))
        characteristic = math.floor(logarithm)
        digits = f"{math.floor((logarithm - characteristic) * 2**100):0100b}"
    if characteristic > 254 or characteristic < -255:
        return "1" * 300 if characteristic > 0 else "0" * 300
    if characteristic >= 0:
        regime = (characteristic + 1).bit_length() - 1
        head, offset = f"1{regime:03b}", characteristic + 1 - 2**regime
    else:
        regime = (-characteristic).bit_length() - 1
        head, offset = f"0{7 - regime:03b}", characteristic + 2 ** (regime + 1) - 1
    return head + (f"{offset:0{regime}b}" if regime else "") + digits
