"""How the codes of a format become values on the device: a table of all, and shifts of bits where those do."""

import math
import struct
from functools import lru_cache

import torch
from torch import Tensor

from fmtsim.cuda.runtime.program import Defines
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.spec import CodebookFormat, ElementFormat, FloatFormat

CODES_OF_VECTOR = (4, 8)  # by output: as many as fill 16 bytes with results


@lru_cache(maxsize=256)
def decoder_of(fmt: BlockFormat, device: torch.device) -> tuple[Tensor, bytes | None]:
    """Return the values of all byte codes of a format's elements, and a ``Decoder`` where bits make most of them.

    The values are float32 [256]; codes that do not exist are NaN.
    """
    values = _values(fmt.element, fmt.bits)
    table = torch.tensor([*values, *[math.nan] * (256 - len(values))], dtype=torch.float32)
    return table.to(device), _decoder(fmt.element, values)


def decode_macros(output: int, table: bool) -> Defines:
    """Return the macros of the kernel of byte codes."""
    return (("INPUT", "0"), ("OUTPUT", str(output)), ("TABLE", str(int(table))))


def _values(element: ElementFormat, bits: int) -> list[float]:
    if isinstance(element, CodebookFormat):
        return [element.value(code) + 0.0 for code in range(len(element.values))]
    return [element.value(code) for code in range(1 << bits)]


def _decoder(element: ElementFormat, values: list[float]) -> bytes | None:
    """Return the ``Decoder`` of block_decode.cu, None where fewer than most codes are a moved float32."""
    if not isinstance(element, FloatFormat) or not element.signed or not 2 <= element.bits <= 8:
        return None
    bits, mantissa = element.bits, element.mantissa_bits
    sign, power = 1 << (bits - 1), 126 + element.min_exponent
    if not 0 <= power <= 127 or mantissa + 1 > bits - 1:
        return None
    plain = 0
    while plain < sign and all(
        _same(_moved(plain, mantissa, power, negative), values[plain + sign * negative]) for negative in (0, 1)
    ):
        plain += 1
    if 2 * plain < sign:
        return None
    down = 8 - (bits - 1 - mantissa)
    kept = 1 << 31 | (sign - 1) << (23 - mantissa)
    every = 0x01010101
    words = (every * (sign - 1), every * (sign - plain), every * sign, every * (256 - 2 * sign), 8 - bits, down, kept)
    return struct.pack("<7If", *words, 2.0**power)


def _moved(magnitude: int, mantissa: int, power: int, negative: int) -> float:
    """Return what the kernel makes of a code: its bits as a float32's, times a power of two."""
    (value,) = struct.unpack("<f", struct.pack("<I", magnitude << (23 - mantissa) | negative << 31))
    return math.ldexp(value, power)


def _same(a: float, b: float) -> bool:
    return a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
