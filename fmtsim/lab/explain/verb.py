# SPDX-License-Identifier: Apache-2.0
"""The verb ``explain``: run the oracle, tell its story, and check the engine against it."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from fmtsim.casts import arrays
from fmtsim.casts.arguments import check_dense, drawn_key
from fmtsim.casts.quantize import encode, quantize
from fmtsim.formats.block import Block, BlockFormat, Format, LogTileFormat, PackedFormat, with_block
from fmtsim.formats.interop import dtype_name
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import FLOAT_DTYPES, result_dtype
from fmtsim.formats.scaling import ScaleRule
from fmtsim.formats.spec import OVERFLOWS, ElementFormat, Overflow
from fmtsim.lab.explain.element import decide
from fmtsim.lab.explain.records import Element, Explanation, Scale
from fmtsim.lab.explain.scale import tell_scales
from fmtsim.rounding.modes import Rounding, RoundingName, get_rounding
from fmtsim.rounding.philox import random_integer
from fmtsim.scaling.oracle import quantize_matrix
from fmtsim.spec.cast import RandomKey
from fmtsim.support.dispatch import is_readable
from fmtsim.support.errors import ArgumentError, DtypeError, FormatError, shown

LIMIT = 65536
"""Most numbers that one call explains: the oracle takes tens of microseconds for each."""


def explain(
    x: "float | Sequence[float] | torch.Tensor | numpy.ndarray[Any, Any]",
    format: str | Format | torch.dtype,
    *,
    rounding: RoundingName | Rounding = "nearest_even",
    overflow: Overflow | None = None,
    generator: int | RandomKey = 0,
    random_bits: int | None = None,
    block_size: int | Block | None = None,
    scale_rule: ScaleRule | None = None,
) -> Explanation:
    """Say how numbers get their bits: scale, neighbours, exact distances, and the rule that decided.

    Args:
        x: A number, a sequence, or a tensor or array of at most one dimension; consecutive numbers share the blocks
            of a block format, the last of which may be short. Python numbers are float64, tensors and arrays keep
            their dtype, float8 ones count as float32.
        format: Name, record or torch dtype of the format.
        rounding: Name of a mode or a ``Rounding``.
        overflow: ``"saturate"``, ``"ieee"``, or None for the format's default.
        generator: Seed of stochastic rounding, as in ``quantize``.
        random_bits: Random bits of stochastic rounding.
        block_size: Elements that share a scale, as in ``quantize``.
        scale_rule: How scales are made, as in ``quantize``.

    Returns:
        A record; ``print`` shows it as text, ``to_dict`` gives it as plain types. NaN and infinities are explained
        like other numbers. The bits are those of ``quantize`` for a tensor of these numbers.

    Raises:
        FormatError: Unknown format, rounding, overflow or scale rule.
        DtypeError: x is not made of floating-point numbers.
        ArgumentError: x has more than one dimension, or more than 65536 numbers.

    >>> e = explain(957.0, "mxfp8_e4m3").elements[0]
    >>> e.bits, e.value, e.decision.rule
    ('0 1111 110', 896.0, 'saturated')
    """
    tensor = _as_tensor(x)
    fmt = with_block(get_format(format), block_size, scale_rule)
    if isinstance(fmt, PackedFormat):
        raise FormatError(
            f"explain does not follow blocks of {fmt.name}; fmtsim.quantize(x, {fmt.name!r}) rounds to it"
        )
    if overflow is not None and (not isinstance(overflow, str) or overflow not in OVERFLOWS):
        allowed = "choose 'saturate', 'ieee' or None for the format's default"
        raise FormatError(f"unknown overflow {shown(overflow)}; {allowed}")
    how, rule = get_rounding(rounding, random_bits), overflow or fmt.default_overflow
    if generator is None or isinstance(generator, torch.Generator):
        raise ArgumentError("explain draws from no generator; pass generator= an int, the seed that quantize was given")
    key = drawn_key(generator, torch.device("cpu"))
    assert isinstance(key, RandomKey)
    stochastic = how.mode == "stochastic"
    words = [random_integer(how, key, i) if stochastic else None for i in range(tensor.numel())]
    numbers = tensor.to(torch.float64).tolist()
    if isinstance(fmt, BlockFormat | LogTileFormat):
        scales, elements = _blocks(numbers, tensor.dtype, fmt, how, rule, words)
    else:
        scales, elements = (), tuple(
            _alone(number, fmt, how, rule, word) for number, word in zip(numbers, words, strict=True)
        )  # fmt: skip
    options = {"rounding": how, "overflow": rule, "generator": key if stochastic else None}
    agrees = _engine_agrees(tensor, fmt, elements, options)
    return Explanation(format=fmt, rounding=how, overflow=rule, scales=scales, elements=elements, engine_agrees=agrees)


def _as_tensor(x: Any) -> torch.Tensor:
    """Return the numbers as a tensor of one dimension."""
    x = arrays.floats_of(x)
    if isinstance(x, torch.Tensor):
        check_dense("x", x)
        if not is_readable(x):
            what = "on the meta device" if x.is_meta else f"a {type(x).__name__}"
            raise ArgumentError(f"x is {what} and holds no numbers; pass a tensor of the CPU or a GPU")
        tensor = x.detach().cpu()
    else:
        try:
            tensor = torch.tensor(x, dtype=torch.float64)
        except OverflowError:
            raise ArgumentError(f"x={shown(x)} has an integer beyond float64; pass numbers up to 1.797e308") from None
        except (TypeError, ValueError, RuntimeError, RecursionError):
            argument = f"x={shown(x)}"
            raise DtypeError(f"{argument} is not a number or a sequence of numbers; pass floats or a tensor") from None
    if tensor.dtype not in FLOAT_DTYPES:
        raise DtypeError(f"x has dtype {tensor.dtype}; choose float16, bfloat16, float32 or float64 (x.float())")
    if tensor.dim() > 1:
        raise ArgumentError(f"x has shape {tuple(tensor.shape)}; pass a number or one row, such as x[0]")
    if tensor.numel() > LIMIT:
        raise ArgumentError(f"x has {tensor.numel()} numbers; pass at most {LIMIT}, the oracle is slow")
    return tensor.reshape(-1)


def _blocks(
    numbers: list[float], dtype: torch.dtype, fmt: BlockFormat | LogTileFormat, how: Rounding, overflow: Overflow,
    words: list[int | None],
) -> tuple[tuple[Scale, ...], tuple[Element, ...]]:  # fmt: skip
    """Quantise one row by the oracle and tell how each scale and element came about."""
    if not numbers:
        return (), ()
    out_format = get_format(result_dtype(fmt, dtype))
    result = quantize_matrix(
        [numbers], fmt, how, overflow, dtype_name(dtype),  # type: ignore[arg-type]
        out_format, [words] if how.mode == "stochastic" else None,  # type: ignore[arg-type, list-item]
    )  # fmt: skip
    tiles = tell_scales(numbers, result, fmt, wide=dtype == torch.float64)
    width = fmt.block[1] or len(numbers)
    stored = fmt.element if isinstance(fmt, BlockFormat) else fmt
    elements = []
    for index, (number, code, value) in enumerate(zip(numbers, result.codes[0], result.values[0], strict=True)):
        block = index // width
        decision = tiles[block].decide(number, code, how, overflow, words[index])
        if math.isnan(value) and not math.isnan(decision.value):
            reason = f"{stored.name} has no NaN, so one NaN makes its whole block NaN"
            decision = dataclasses.replace(decision, below=None, above=None, rule="nan", reason=reason)
        elements.append(Element(input=number, block=block, decision=decision, code=code, value=value, format=stored))
    return tuple(tile.scale for tile in tiles), tuple(elements)


def _alone(number: float, fmt: ElementFormat, how: Rounding, overflow: Overflow, word: int | None) -> Element:
    decision = decide(number, fmt, how, overflow, word)
    return Element(input=number, block=0, decision=decision, code=decision.code, value=decision.value, format=fmt)


def _engine_agrees(tensor: torch.Tensor, fmt: Format, elements: tuple[Element, ...], options: dict[str, Any]) -> bool:
    """Compare the bits of the verbs with those of the oracle."""
    mask = (1 << fmt.bits) - 1
    codes = [code & mask for code in encode(tensor, fmt, pad=True, **options).unpacked().tolist()]
    values = quantize(tensor, fmt, pad=True, **options).to(torch.float64)
    expected = torch.tensor([element.value for element in elements], dtype=torch.float64)
    same_values = torch.equal(values.view(torch.int64), expected.view(torch.int64))
    return same_values and codes == [element.code for element in elements]
