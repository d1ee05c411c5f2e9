# SPDX-License-Identifier: Apache-2.0
"""The claim about LNS-Madam's datapath: sums of logarithmic products need a table of few constants.

Products add logarithms; each becomes a shift and a constant of a table, and what the table does not resolve becomes the
linear ``1 + f`` of Mitchell. Terms that share a constant are added as integers, and multiplied with it once.
"""

import math

import torch
from torch import Tensor

from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import LogFormat
from fmtsim.quantize import decode, encode
from fmtsim.reproduce.claim import Claim, Expected, Measured, Tell, settings
from fmtsim.reproduce.samples import normal, relative_error, told


def constants(entries: int, fraction_bits: int) -> list[int]:
    """Return the table: ``2^(i / entries)`` as integers of ``2^-fraction_bits``, to nearest."""
    return [round(2.0 ** (i / entries) * (1 << fraction_bits)) for i in range(entries)]


def adder_tree(a: Tensor, b: Tensor, fmt: LogFormat, entries: int, fraction_bits: int) -> Tensor:
    """Return ``a b^T`` of codes as integers in units of ``2^-fraction_bits / gamma``; exact, in any order.

    1. The exponent of a product is ``k = k_a + k_b``, its sign that of both.
    2. ``k = q gamma + r``: a shift by q, and a remainder r, whose upper part i chooses a constant.
    3. For the lower part l of r the term is ``(gamma + l) 2^q``: Mitchell's ``1 + l / gamma``.
    4. Terms of one i are added, and the sum is multiplied with the constant.

    Args:
        a: [M, K] codes of the format, uint8.
        b: [N, K], likewise.
        fmt: The format.
        entries: Constants in the table, a power of two up to gamma.
        fraction_bits: Of a constant.
    """
    top = fmt.max_code
    left, right = a.long()[:, None], b.long()[None]
    k = (left & top) + (right & top)
    sign = 1 - 2 * ((left > top) ^ (right > top)).long()
    q, r = k // fmt.gamma, k % fmt.gamma
    share = fmt.gamma // entries  # of remainders that have one constant
    terms = sign * ((fmt.gamma + r % share) << q)
    bins = [torch.where(r // share == i, terms, 0).sum(-1) for i in range(entries)]
    return torch.stack([c * each for c, each in zip(constants(entries, fraction_bits), bins, strict=True)]).sum(0)


def products(
    tell: Tell, *, format: str, tables: tuple[int, ...], fraction_bits: int, shape: tuple[int, int], seed: int
) -> Measured:
    """Multiply two normal matrices as logarithms, by tables of several sizes."""
    fmt = get_format(format)
    assert isinstance(fmt, LogFormat)
    x, w = normal(*shape, seed), normal(*shape, seed + 1)
    a, b = (encode(t * (fmt.max / t.abs().max()), fmt).codes for t in (x, w))
    left, right = (decode(codes, fmt, out_dtype=torch.float64) for codes in (a, b))
    exact, plain = left @ right.T, x.double() @ w.double().T
    back = (x.abs().max().double() / fmt.max) * (w.abs().max().double() / fmt.max)
    numbers = {"error of the format, %": 100 * math.sqrt(relative_error(plain, exact * back))}
    unit = fmt.gamma << fraction_bits
    for entries in told(tell, tables):
        found = adder_tree(a, b, fmt, entries, fraction_bits).double() / unit
        numbers[f"error of {entries} constants, %"] = 100 * math.sqrt(relative_error(exact, found))
    error = numbers["error of the format, %"]
    for entries in tables:
        numbers[f"error of {entries} constants over the format's"] = numbers[f"error of {entries} constants, %"] / error
    return Measured(numbers=numbers)


CLAIMS = (
    Claim(
        name="lns_adder_tree",
        says="products of 8-bit logarithms, summed as integers by a table of eight or four constants, lose less than "
        "the format does",
        source="Zhao et al., LNS-Madam, arXiv:2106.13914: conversion by a table and Mitchell's line, partial sums",
        measure=products,
        settings=settings(format="lns8_g8", tables=(8, 4, 2, 1), fraction_bits=8, shape=(64, 512), seed=0),
        expected=(
            Expected(name="error of the format, %"),
            *(Expected(name=f"error of {entries} constants, %") for entries in (8, 4, 2, 1)),
            Expected(name="error of 8 constants over the format's", high=0.1),
            Expected(name="error of 4 constants over the format's", high=1.0),
        ),
        recorded="shown in part",
        bounds="after",
        seeds=3,
        notes="errors of a product of normal matrices, of its norm; sums are exact here. The paper gives "
        "accuracies of trained networks and energies of a circuit, which were not tried",
    ),
)
