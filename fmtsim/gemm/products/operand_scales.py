# SPDX-License-Identifier: Apache-2.0
"""Scales of operands: check them, read torch's layouts and swizzles, and convert them for engines and epilogues."""

from typing import Any

import torch
from torch import Tensor

from fmtsim.casts import ops
from fmtsim.casts.arguments import check_dense
from fmtsim.casts.lanes import define_operator
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.packing import unswizzled
from fmtsim.gemm.products.operands import inner_length
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.call import SCALE_KINDS, UNIT_SCALES, Operands, ScaleKind
from fmtsim.spec.cast import CastSpec, EncodedParts
from fmtsim.spec.datapath import Arithmetic, Datapath
from fmtsim.spec.gemm_spec import gemm_spec_from_json
from fmtsim.support.dispatch import constant_in_graphs, is_readable
from fmtsim.support.errors import ArgumentError, DtypeError, FormatError, shown
from fmtsim.support.replay.gpu import captures

_BLOCK = 128
_FORMATS = {SCALE_KINDS[kind].dtype: SCALE_KINDS[kind].unit_scale for kind in UNIT_SCALES}
_RECIPES = tuple(dict.fromkeys(name for extent in SCALE_KINDS.values() for name in extent.recipes))
_KINDS: dict[tuple[str, str], ScaleKind] = {
    ("TensorWise", "TensorWise"): "tensor",
    ("RowWise", "RowWise"): "row",
    ("BlockWise1x32", "BlockWise1x32"): "mx",
    ("BlockWise1x16", "BlockWise1x16"): "nvfp4",
    ("BlockWise1x128", "BlockWise1x128"): "row_block_128",
    ("BlockWise1x128", "BlockWise128x128"): "block_128",
    ("BlockWise128x128", "BlockWise1x128"): "block_128",
}
_SWIZZLES = ("NO_SWIZZLE", "SWIZZLE_32_4_4")


def padded_scales(operands: Operands, n: int, rows: int) -> Operands:
    """Return operands with b's scales for b padded with zero rows from n to ``rows``: the last scale is repeated."""

    def repeated(scales: Tensor) -> Tensor:
        return torch.cat([scales, scales[-1:].expand(rows - n, *scales.shape[1:])])

    # one scale for all needs no copy, nor do blocks that span several rows
    column, scale_b = operands.column, operands.scale_b
    if column is not None and column.numel() > 1:
        column = repeated(column)
    if scale_b is not None and operands.rows_per_scale[1] == 1:
        scale_b = repeated(scale_b)
    return operands._replace(column=column, scale_b=scale_b)


def product_kind(a: ScaleKind, b: ScaleKind) -> ScaleKind:
    """Return the kind of scales of a product; raise FormatError where no unit takes the two together."""
    # a missing scale is 1, and a scale of the tensor serves every row
    if a == b or {a, b} <= {"none", "tensor", "row"}:
        return a if a == b else "row" if "row" in (a, b) else "tensor"
    names = ("no scales" if kind == "none" else f"{kind} scales" for kind in (a, b))
    raise FormatError(f"no unit multiplies an operand with {' by one with '.join(names)}; give both the same")


def check_unit_scales(path: Arithmetic, kind: ScaleKind) -> None:
    """Raise FormatError where operands have block scales that the unit does not multiply with."""
    extent = SCALE_KINDS.get(kind)
    if extent is None or extent.unit_scale is None:
        return
    # the unit's own scales: their format and how many products share one
    name, every = extent.unit_scale, extent.block
    scale, block = (path.scale, path.scale_block) if isinstance(path, Datapath) else (None, 0)
    if scale is not None and (scale.name, block) == (name, every):
        return
    unit_has = "has no scales of its own" if scale is None else f"has {scale.name} scales every {block}"
    raise FormatError(
        f"the operands have {name} scales every {every} products, the unit {unit_has}; choose another unit "
        "(fmtsim.list_units()), or Datapath(scale=, scale_block=)"
    )


def unit_scale_format(*scales: Tensor | None) -> str | None:
    """Return the name of the format that scales inside a unit are given in, None where their dtypes do not say it."""
    named = {_FORMATS[t.dtype] for t in scales if t is not None and t.dtype in _FORMATS}
    if len(named) > 1:
        raise DtypeError("scale_a and scale_b have different dtypes; a unit takes one format of scales")
    return next(iter(named), None)


def unit_scales(
    scale_a: Tensor | None, scale_b: Tensor | None, a: Tensor, b: Tensor, spec: str
) -> tuple[Tensor | None, Tensor | None]:
    """Return scales inside a unit as float32 [..., rows, ceil(K / g)], None where the call has none.

    ``spec`` is the product's definition as text.

    Raises:
        ArgumentError: The unit has no scales, or their shapes or values do not fit.
    """
    # None: scales of the epilogue or of the promotion, no unit looks at them
    block = _scale_block(spec)
    if block is None:
        if scale_a is not None or scale_b is not None:
            raise ArgumentError("the unit has no scales of its own; leave scale_a and scale_b out, or call scaled_mm")
        return None, None
    values: list[Tensor | None] = []
    for name, scale, x in (("scale_a", scale_a, a), ("scale_b", scale_b, b)):
        blocks = -(-inner_length(x) // block)
        if scale is None:
            values.append(None)
            continue
        if scale.shape[-2:] != (x.shape[-2], blocks):
            raise ArgumentError(
                f"{name} has shape {tuple(scale.shape)}; pass [..., {x.shape[-2]}, {blocks}], a scale for every "
                f"{block} products"
            )
        # codes in torch's dtypes of scales, else floats on the format's grid
        if scale.dtype in _FORMATS:
            _require_own(scale.dtype, name, spec)
            scale = scale.view(torch.uint8)
        values.append((_unit_values if is_readable(scale) else torch.ops.fmtsim.unit_scales)(scale, name, spec))
    return values[0], values[1]


@constant_in_graphs
def _scale_block(spec: str) -> int | None:
    """Return how many products share a scale inside the unit of a product, None where it has none."""
    path = gemm_spec_from_json(spec).datapath
    return path.scale_block if isinstance(path, Datapath) and path.scale is not None else None


@constant_in_graphs
def _require_own(dtype: torch.dtype, name: str, spec: str) -> None:
    """Refuse scales whose dtype is that of another format than the unit's."""
    scale_fmt = _scale_format(spec)
    if _FORMATS[dtype] != scale_fmt.name:
        raise DtypeError(f"{name} has dtype {dtype}; the unit's scales are {scale_fmt.name}")


def _scale_format(spec: str) -> FloatFormat:
    path = gemm_spec_from_json(spec).datapath
    assert isinstance(path, Datapath) and path.scale is not None
    return path.scale


def _unit_values(scale: Tensor, name: str, spec: str) -> Tensor:
    """Return scales inside a unit as float32 without their sign, which units ignore."""
    fmt = _scale_format(spec)
    rule = CastSpec(format=fmt, rounding=Rounding(), overflow="saturate")
    # codes of fewer bits than a byte: the bits above are no part of them
    if scale.dtype == torch.uint8:
        parts = EncodedParts(scale & ((1 << fmt.bits) - 1))  # in the format now: nothing to check
        return ops.decode(parts, rule, torch.float32, validated=True)
    if scale.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise DtypeError(f"{name} has dtype {scale.dtype}; pass {fmt.name} codes as torch.uint8, or floats")
    wide = scale.abs().to(torch.float32)
    # floats must be values of the format: nothing is rounded in silence
    rounded = ops.quantize(wide, rule, torch.float32, None, None)
    lost = (rounded != wide) & ~wide.isnan()
    if bool(lost.any()):
        raise ArgumentError(
            f"{name} holds {wide[lost][0].item():g}, which is not a value of {fmt.name}; round it first"
        )
    return rounded


define_operator(
    "unit_scales(Tensor scale, str name, str spec) -> Tensor",
    _unit_values,
    lambda scale, name, spec: torch.empty_like(scale, dtype=torch.float32),
)


def recipe_names(name: str, recipe: Any) -> tuple[str, ...] | None:
    """Return the names of one or several members of torch.nn.functional.ScalingType, given so or by name."""
    return _enum_names(name, recipe, _RECIPES, "ScalingType")


def swizzle_names(name: str, swizzle: Any) -> tuple[str, ...] | None:
    """Return the names of one or several members of torch.nn.functional.SwizzleType, given so or by name."""
    return _enum_names(name, swizzle, _SWIZZLES, "SwizzleType")


def _enum_names(name: str, value: Any, allowed: tuple[str, ...], kind: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    # members of torch's enumeration, or their names
    members = value if isinstance(value, list | tuple) else [value]
    names = tuple(member if isinstance(member, str) else getattr(member, "name", shown(member)) for member in members)
    wrong = [member for member in names if member not in allowed]
    if wrong or not names:
        raise ArgumentError(f"{name}={shown(value)} is not a {kind}; choose one of {', '.join(allowed)}")
    return names


def check_scales(**scales: Any) -> None:
    """Refuse scales that are neither tensors nor lists of tensors."""
    for name, scale in scales.items():
        if isinstance(scale, list | tuple) and not scale:
            raise ArgumentError(f"{name}={scale} has no scales; pass a tensor, or a list that begins with one")
        for level in scale if isinstance(scale, list | tuple) else [scale]:
            if not isinstance(level, Tensor):
                raise DtypeError(
                    f"{name} is {type(level).__name__}, not a tensor; pass scales, and recipes as scale_recipes="
                )
            check_dense(name, level)


def read_scales(
    scale_a: Any, scale_b: Any, sizes: tuple[int, int, int],
    recipes: tuple[tuple[str, ...] | None, tuple[str, ...] | None],
    swizzles: tuple[tuple[str, ...] | None, tuple[str, ...] | None],
) -> tuple[ScaleKind, dict[str, Any]]:  # fmt: skip
    """Return the kind of a scaled_mm's scales, and the fields of Operands that they are.

    The kind follows from ``recipes`` or, as in torch, from dtypes and shapes.

    Args:
        scale_a, scale_b: Tensors, or lists of block scales and tensor scale.
        sizes: M, N and K.
        recipes: Names of scaling types, or None.
        swizzles: Names of swizzles of block scales, None for cuBLAS's own.

    Raises:
        ArgumentError: Shapes that fit no kind, numbers that are negative, NaN or Inf.
        DtypeError: Scales of another dtype.
    """
    # 1. the kind of scales
    lists = [list(s) if isinstance(s, list | tuple) else [s] for s in (scale_a, scale_b)]
    if (recipes[0] is None) != (recipes[1] is None):
        raise ArgumentError("scale_recipes of a and b belong together; pass both or none")
    named = recipes[0] is not None
    kinds: Any = recipes if named else _inferred(lists[0][0], lists[1][0], sizes)
    firsts = kinds[0][0], kinds[1][0]
    kind = _KINDS.get(firsts)
    if kind is None:
        raise ArgumentError(
            f"scaling {firsts[0]} x {firsts[1]} does not exist; torch has TensorWise, RowWise, BlockWise1x16 and 1x32 "
            "for both operands, and 1x128 with 1x128 or 128x128"
        )
    # 2. the scales of that kind
    m, n, k = sizes
    if kind == "tensor":
        return kind, {"row": _single("scale_a", lists[0][0]), "column": _single("scale_b", lists[1][0])}
    if kind == "row":
        row, column = _vector("scale_a", lists[0][0], (m, 1)), _vector("scale_b", lists[1][0], (1, n))
        return kind, {"row": row, "column": column}
    if kind in UNIT_SCALES:
        # scales inside a unit: MX (E8M0 every 32) or NVFP4 (E4M3 every 16, and a scale of the tensor).
        extent, recipe = SCALE_KINDS[kind], kinds[0][0]
        blocks, codes, alpha = -(-sizes[2] // (extent.block or 1)), [], []
        for i, (name, rows) in enumerate((("scale_a", sizes[0]), ("scale_b", sizes[1]))):
            block_scales, extra = lists[i][0], lists[i][1:]
            if block_scales.dtype != extent.dtype:
                raise DtypeError(f"{name} has dtype {block_scales.dtype}; {recipe} scales are {extent.dtype}")
            codes.append(_codes(name, block_scales, rows, blocks, (swizzles[i] or ("SWIZZLE_32_4_4",))[0]))
            if extra and kinds[i][1:] not in ((), ("TensorWise",)):
                raise ArgumentError(f"{name} comes with {kinds[i][1:]}; the second scale is TensorWise")
            if len(extra) > (kind == "nvfp4"):
                raise ArgumentError(f"{name} is a list of {len(extra) + 1}; {recipe} takes fewer scales")
            alpha += [_single(name, extra[0])] if extra else []
        if len(alpha) == 1:
            raise ArgumentError("scale_a and scale_b belong together; pass a tensor scale for both or for none")
        scales = {"scale_a": codes[0], "scale_b": codes[1]}
        return kind, {**scales, "row": alpha[0], "column": alpha[1]} if alpha else scales
    # 3. large blocks: 1x128, or 128x128, of which one scale serves 128 rows
    tall = [name == "BlockWise128x128" for name in firsts]
    a, b = (
        _large_blocks(name, levels[0], rows, k, recipe, large if named else name == "scale_b")
        for name, levels, rows, recipe, large in zip(("scale_a", "scale_b"), lists, (m, n), firsts, tall, strict=True)
    )
    rows_per_scale = _BLOCK if tall[0] else 1, _BLOCK if tall[1] else 1
    return kind, {"scale_a": a, "scale_b": b, "rows_per_scale": rows_per_scale}


def _inferred(a: Tensor, b: Tensor, sizes: tuple[int, int, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the kinds of scales that torch._scaled_mm sees in their dtypes and shapes."""
    m, n, k = sizes
    kb, nb, mb = -(-k // _BLOCK), -(-n // _BLOCK), -(-m // _BLOCK)
    named = unit_scale_format(a, b)
    if named is not None and a.dtype == b.dtype:
        kind = "BlockWise1x32" if named == "e8m0" else "BlockWise1x16"
        return (kind,), (kind,)
    # by dtype for MX and NVFP4, else by shape
    shapes = tuple(a.shape), tuple(b.shape)
    # torch tries the simpler kinds first, which decides where shapes coincide.
    fitting = [
        (((m, 1), (1, n)), ("RowWise", "RowWise")),
        (((m, kb), (kb, nb)), ("BlockWise1x128", "BlockWise128x128")),
        (((m, kb), (kb, n)), ("BlockWise1x128", "BlockWise1x128")),
        (((mb, kb), (kb, n)), ("BlockWise128x128", "BlockWise1x128")),
    ]
    if a.numel() == b.numel() == 1:
        return ("TensorWise",), ("TensorWise",)
    kinds = next((kinds for expected, kinds in fitting if expected == shapes), None)
    if kinds is None:
        allowed = ", ".join(f"{x} and {y}" for (x, y), _ in fitting)
        raise ArgumentError(
            f"scale_a of shape {shapes[0]} and scale_b of shape {shapes[1]} fit no kind of scaling; pass one element "
            f"each, {allowed}, or scale_recipes="
        )
    return (kinds[0],), (kinds[1],)


def _finite(name: str, scale: Tensor) -> Tensor:
    if scale.dtype != torch.float32:
        raise DtypeError(f"{name} has dtype {scale.dtype}; pass torch.float32")
    if captures(scale.device):
        return scale.detach()  # reading the values would synchronise, which a CUDA graph cannot capture
    if not is_readable(scale):
        checked: Tensor = torch.ops.fmtsim.finite_scales(scale.detach(), name)
        return checked
    _require_finite(scale, name)
    return scale.detach()


def _require_finite(scale: Tensor, name: str) -> None:
    # a negative or infinite scale has no meaning in any library
    wrong = ~scale.isfinite() | (scale < 0)
    if bool(wrong.any()):
        raise ArgumentError(f"{name} holds {scale[wrong][0].item():g}; scales are finite and not negative")


def _finite_scales(scale, name):  # type: ignore[no-untyped-def]
    _require_finite(scale, name)
    return scale.clone()


define_operator(
    "finite_scales(Tensor scale, str name) -> Tensor", _finite_scales, lambda scale, name: torch.empty_like(scale)
)


def _single(name: str, scale: Tensor) -> Tensor:
    if scale.numel() != 1:
        raise ArgumentError(f"{name} has shape {tuple(scale.shape)}; a tensor-wise scale has one element")
    return _finite(name, scale).reshape(())


def _vector(name: str, scale: Tensor, shape: tuple[int, int]) -> Tensor:
    if tuple(scale.shape) != shape:
        raise ArgumentError(f"{name} has shape {tuple(scale.shape)}; row-wise scales have shape {shape}")
    return _finite(name, scale)


def _large_blocks(name: str, scale: Tensor, rows: int, k: int, recipe: str, k_first: bool) -> Tensor:
    """Return float32 [row blocks, ceil(K / 128)] from scales of 1x128 or 128x128 blocks.

    Args:
        k_first: Which order is meant where shapes leave both open. ``torch._scaled_mm`` takes b's scales with K first;
            ``torch.nn.functional.scaled_mm`` takes 128x128 scales so, K padded to a multiple of 4.
    """
    kb = -(-k // _BLOCK)
    # rows of scales, and both orders of the two dimensions that torch's functions take
    groups = rows if recipe == "BlockWise1x128" else -(-rows // _BLOCK)
    orders: dict[tuple[int, ...], Tensor] = {(groups, kb): scale}
    if scale.dim() == 2:
        first: dict[tuple[int, ...], Tensor] = {(-(-kb // 4) * 4, groups): scale[:kb].mT, (kb, groups): scale.mT}
        orders = {**orders, **first} if k_first else {**first, **orders}
    blocks = orders.get(tuple(scale.shape))
    if blocks is None:
        raise ArgumentError(
            f"{name} has shape {tuple(scale.shape)}; {recipe} scales have shape {(groups, kb)} or {(kb, groups)}"
        )
    return _finite(name, blocks)


def _codes(name: str, scale: Tensor, rows: int, blocks: int, swizzle: str) -> Tensor:
    """Return codes [rows, blocks] as uint8."""
    codes = scale.view(torch.uint8)
    if swizzle == "NO_SWIZZLE":
        if tuple(codes.shape) != (rows, blocks):
            raise ArgumentError(f"{name} has shape {tuple(codes.shape)}; without swizzle pass {(rows, blocks)}")
        return codes
    # cuBLAS's tiles of 128 rows by 4 scales, whole ones
    padded = -(-rows // 128) * 128 * -(-blocks // 4) * 4
    if codes.numel() != padded:
        raise ArgumentError(
            f"{name} has {codes.numel()} elements; pass {padded}: [{rows}, {blocks}] padded to [128, 4] and "
            "swizzled as cuBLAS takes them (scales in plain order: swizzles='NO_SWIZZLE')"
        )
    return unswizzled(codes.contiguous(), rows, blocks)
