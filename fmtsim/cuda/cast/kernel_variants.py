# SPDX-License-Identifier: Apache-2.0
"""A representative of every kernel of casts in every specialisation that common calls take, for warming up."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

import torch

from fmtsim.cuda.cast import casts, scaled_operands, tables, warp_hadamard
from fmtsim.cuda.cast.any_format import decode_macros
from fmtsim.cuda.cast.layout import matrix_layout
from fmtsim.cuda.cast.parameters import BITS, FIXED, FLUSHING, HALVES, MAGIC, NARROW, POWERS, Grid
from fmtsim.cuda.cast.rotated import kernel_macros, plan_of
from fmtsim.cuda.cast.scale_rules import (
    BFLOAT16,
    CODES,
    FLOAT32,
    PACKED,
    amax_macros,
    column_macros,
    fast_macros,
    rule_of,
    run_macros,
    vector_width,
)
from fmtsim.cuda.cast.scaled_operands import BOTH, GROUPED, NARROWED
from fmtsim.cuda.runtime import Defines
from fmtsim.formats.block import E8M0, BlockFormat
from fmtsim.formats.element import FloatFormat, IntFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import History, Scaling, TensorScale
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec
from fmtsim.spec.quantizer import ClipMask, Hadamard, Quantizer

Variants = Iterator[tuple[str, str, Defines]]

_BLOCKS = ("mxfp8_e4m3", "mxfp4", "nvfp4", "mxint8", "e4m3_1x128", "e4m3_tensor", "int8_channel", "mxfp8_e5m2_rceil")
_STOCHASTIC = Rounding(mode="stochastic")
_QUEST = Scaling(
    block=(1, 32), statistic="std", factor=0.5, offset=1e-8, arithmetic="divide", power_of_two="floor",
    scale=E8M0,
)  # fmt: skip


def variants() -> Variants:
    """Yield file, kernel and macros of every kind of kernel."""
    yield from _elements()
    yield from _blocks()
    yield from _scaled()
    yield from _rotated()


def _elements() -> Variants:
    """The commonest grid in all dtypes, the others in one."""
    grids = [(method, special, False, True, 0) for method in (MAGIC, BITS, FLUSHING) for special in (False, True)]
    grids += [(HALVES, False, True, False, 0), (FIXED, False, True, False, 0), (FIXED, False, False, False, 1)]
    grids += [(MAGIC, special, special, not special, random) for special in (False, True) for random in (1, 2)]
    grids += [(BITS, False, False, True, random) for random in (1, 2)] + [(POWERS, False, True, False, 0)]
    for method, special, asymmetric, keeps, random in grids:
        grid = Grid(bytes(112), method, special, asymmetric, method in (HALVES, FIXED), True, keeps, random, 3)
        common = method == MAGIC and not asymmetric and not special and random < 2
        for dtype in NARROW if common else NARROW[1:2]:
            for out in {dtype, torch.float32}:
                yield "quantize.cu", "quantize", casts.quantize_macros(grid, dtype, out)
        for code, slot in ((4, 4), (6, 6), (8, 8), (7, 8), (13, 16), (5, 5)) if common else ((4, 4),):
            yield "encode.cu", "encode", casts.encode_macros(grid, torch.bfloat16, True, code, slot)
    for name in ("block_extremes", "cast", "encode_rows", "decode"):
        yield "any_format.cu", name, ()
    for dtype in NARROW:
        yield "decode.cu", "decode", decode_macros(dtype, False, True)
        for narrow in (0, 4, 8) if dtype == torch.float32 else (0,):
            yield "table.cu", "convert", tables.convert_macros(0, dtype, torch.float32, 32, True, narrow)
        yield "table.cu", "convert", tables.convert_macros(0, dtype, torch.uint8, 4, True, 4)
    for entry, result in ((8, 4), (8, 8), (8, 32), (16, 16)):
        out = {32: torch.float32, 16: torch.bfloat16}.get(result, torch.uint8)
        yield "table.cu", "convert", tables.convert_macros(entry, torch.bfloat16, out, result, True, 0)


def _blocks() -> Variants:
    for dtype in NARROW[:2]:
        yield "decode.cu", "decode", decode_macros(dtype, True, True)
    for dtype in NARROW:
        for name in ("amax_of_tensor", "amax_of_runs"):
            yield "statistic.cu", name, amax_macros(dtype)
    for place, name in enumerate(_BLOCKS):
        for rounding in (Rounding(), _STOCHASTIC) if place < 3 else (Rounding(),):
            fmt = get_format(name)
            assert isinstance(fmt, BlockFormat)
            spec = CastSpec(format=fmt, rounding=rounding, overflow="saturate")
            for dtype, output in product((torch.bfloat16, torch.float32), (FLOAT32, BFLOAT16, CODES, PACKED)):
                without_tensor_scale = output == BFLOAT16 and fmt.tensor_scale
                fast = fast_macros(spec, dtype, output, without_tensor_scale)
                if fast is None or (output == BFLOAT16 and dtype == torch.float32 and not without_tensor_scale):
                    continue
                run, vector = fmt.block[1] or 4096, vector_width(dtype, output, fmt.bits)
                yield "block_rows.cu", "cast_runs", run_macros(fast, dtype, vector, run)
                if run not in (16, 32, 128):
                    continue
                packed = output == PACKED and fmt.bits == 4
                yield "block_columns.cu", "cast_columns", column_macros(fast, run, vector, packed, False)
                if run <= 32 and output == BFLOAT16:
                    yield "block_columns.cu", "cast_columns", column_macros(fast, run, vector, packed, True)


def _scaled() -> Variants:
    """Those of common recipes, in two dtypes."""
    yield "statistic.cu", "advance", ()
    power = Scaling(power_of_two="ceil")
    delayed = replace(power, history=History())
    for name in ("amaxes_of_parts", "amaxes_of_columns"):
        yield "statistic.cu", name, scaled_operands.input_macros(torch.bfloat16, narrow=True)
    for dtype in NARROW[:2]:
        for name in ("fold_elements", "fold_sums", "fold_last", "amaxes_of_parts", "amaxes_of_columns"):
            yield "statistic.cu", name, scaled_operands.input_macros(dtype)
        yield from _of_rule("e4m3", Scaling(), dtype, transposes=False)
        yield from _of_rule("e4m3", delayed, dtype, transposes=False)
        yield from _of_rule("e5m2", delayed, dtype, _STOCHASTIC, transposes=False)
        for block in ((1, None), (1, 128), (128, 128)):
            yield from _of_rule("e4m3", replace(power, block=block), dtype)
        yield from _of_rule("e4m3", Scaling(block=(1, None)), dtype, transposes=False, columns=1 << 16)
        yield from _of_rule("int8", Scaling(block=(1, None)), dtype)
        quest = replace(_QUEST, offset=0.0)
        yield from _of_rule("e2m1", quest, dtype, Rounding(mode="nearest_toward_zero"), transposes=False)
        yield from _of_rule("e2m1", replace(power, block=(1, 32)), dtype, _STOCHASTIC)


def _of_rule(
    name: str, scaling: Scaling, dtype: torch.dtype, rounding: Rounding | None = None, transposes: bool = True,
    columns: int = 256,
) -> Variants:  # fmt: skip
    """Yield what casts a matrix under a quantiser, and what casts its transpose."""
    element, rounding = get_format(name), rounding or Rounding()
    assert isinstance(element, FloatFormat | IntFormat)
    quantizer = Quantizer(format=element, scaling=scaling, rounding=rounding)
    rule = rule_of(replace(quantizer, gradient=ClipMask()) if scaling.statistic == "std" else quantizer)
    assert rule is not None
    x, delayed = torch.empty(256, columns, dtype=dtype, device="meta"), scaling.history is not None
    for matrix in (x, x.mT) if transposes else (x,):
        stochastic = rounding.mode == "stochastic"
        layout = matrix_layout(matrix, scaling.block, statistic=scaling.statistic, stochastic=stochastic)
        assert layout is not None
        for fold in {False, rule.folds and not delayed and scaling.block != (1, None)}:
            yield scaled_operands.variant(layout, rule, dtype, fold, scaling, delayed, delayed)
            if dtype == torch.float32 and not (fold or delayed or stochastic) and scaling.statistic == "amax":
                yield scaled_operands.variant(layout, rule, torch.bfloat16, fold, scaling, False, False, NARROWED)
            if layout.run == 128 and matrix is not x:
                for what in (GROUPED, BOTH) if dtype == torch.float32 else (BOTH,):
                    yield scaled_operands.variant(layout, rule, dtype, fold, scaling, delayed, delayed, what)


def _rotated() -> Variants:
    for dtype in NARROW:
        for size in (16, 128):
            yield "hadamard.cu", "hadamard", warp_hadamard.transform_macros(dtype, torch.float32, size)
        yield "hadamard.cu", "hadamard", warp_hadamard.transform_macros(torch.float32, dtype, 32)
    for place, (quantizer, transposed) in enumerate(rotated_quantizers()):
        plan = plan_of(quantizer)
        assert plan is not None
        if plan.two_level:
            yield "rotated.cu", "rotated_amax", kernel_macros(plan, transposed)
        yield "rotated.cu", "cast_rotated", kernel_macros(plan, transposed)
        if place in (0, 6):
            yield "rotated.cu", "cast_rotated", kernel_macros(plan, transposed, narrow=True)
        if place == 2:
            yield "rotated.cu", "cast_rotated", kernel_macros(plan, transposed, counts=True)


@lru_cache(maxsize=1)
def rotated_quantizers() -> tuple[tuple[Quantizer, bool], ...]:
    """Return quantisers that need every kernel of rotated operands, and whether each is for a transposed view."""
    nvfp4, mxfp4, e2m1, bf16, e4m3 = map(get_format, ("nvfp4", "mxfp4", "e2m1", "bf16", "e4m3"))
    sixteen, rotation = (Hadamard(size=16, rounded=bf16),), (Hadamard(size=32, signs="random"),)  # type: ignore[arg-type]
    forward = Quantizer(
        format=e2m1, scaling=_QUEST, rounding=Rounding(mode="nearest_toward_zero"), transforms=(Hadamard(size=32),),
        gradient=ClipMask(),
    )  # fmt: skip
    power = Scaling(block=(1, 32), arithmetic="divide", power_of_two="floor", top=4.0, multiplier=4 / 3)
    largest = Quantizer(format=e2m1, scaling=power, rounding=_STOCHASTIC, transforms=rotation)
    x, g = Quantizer(format=nvfp4, transforms=sixteen), Quantizer(format=nvfp4, rounding=_STOCHASTIC)
    micro = Quantizer(format=mxfp4, rounding=_STOCHASTIC)
    assert isinstance(e4m3, FloatFormat)
    eden = Scaling(
        block=(1, 16), scale=e4m3, scale_rounding="stochastic", eden=128, tensor=TensorScale(order="quartet2")
    )
    long = (Hadamard(size=128, signs="random"),)
    corrected = Quantizer(format=e2m1, scaling=eden, rounding=Rounding(mode="nearest_away"), transforms=long)
    two_scales = Quantizer(format=e2m1, scaling=replace(eden, scale_rounding="nearest_even", eden=None))
    return (
        (x, False), (x, True), (g, False), (replace(g, transforms=sixteen), True), (micro, False),
        (replace(micro, transforms=rotation), True), (Quantizer(format=mxfp4, transforms=rotation), True),
        (forward, False), (largest, False), (largest, True), (corrected, False), (corrected, True), (two_scales, False),
    )  # fmt: skip
