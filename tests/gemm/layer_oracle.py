# SPDX-License-Identifier: Apache-2.0
"""The products of a quantised layer, spelled out in calls of the public library."""

import torch

import fmtsim
from fmtsim.formats.block import BlockFormat
from fmtsim.gemm.layers.config import quantizer_scale_kind
from fmtsim.spec.quantizer import Quantizer

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_RECIPES = {"tensor": "TensorWise", "row": "RowWise", "mx": "BlockWise1x32", "nvfp4": ["BlockWise1x16", "TensorWise"]}


def layer(x, w, bias, g, config, out_dtype=None):
    """Return y, dx and dw of x [T, K], w [N, K] and g [T, N], results of machines in ``out_dtype``."""
    y = product(x, w, config.fprop, out_dtype or x.dtype, bias)
    dx = product(g, w.mT, config.dgrad, out_dtype or x.dtype)
    return y, dx, product(g.mT, x.mT, config.wgrad, out_dtype or w.dtype)


def product(a, b, gemm, out_dtype, bias=None, generator=None):
    """Return ``a b^T`` of views a [M, K] and b [N, K] of the originals."""
    kinds = {quantizer_scale_kind(q) for q in (gemm.a, gemm.b) if q.format is not None}
    machine = {"target": gemm.target, "plan": gemm.plan, "accumulate": gemm.accumulate}
    narrow = gemm.library is not None and any(q.format.bits <= 8 for q in (gemm.a, gemm.b) if q.format)
    if kinds <= {"none"} and not narrow:
        return _plain(a, b, bias, gemm, out_dtype, machine | {"generator": generator})
    (a_codes, a_scales, a_format), (b_codes, b_scales, b_format) = _encoded(a, gemm.a), _encoded(b, gemm.b)
    options = machine | _recipes(gemm, kinds) | {"formats": (a_format, b_format), "generator": generator}
    rows, columns = (s[1] if isinstance(s, list) else torch.ones(()) for s in (a_scales, b_scales))
    if rows.dim() or columns.dim():  # scales of rows above those of blocks follow a product without them
        one = torch.ones(())
        y = fmtsim.scaled_mm(
            a_codes, b_codes.mT, [a_scales[0], one], [b_scales[0], one], None, None, torch.float32, **options
        )
        columns = columns.reshape(1, -1)
        y = y * rows * columns if rows.dim() and columns.numel() > 1 else y * (rows * columns)
        return (y if bias is None else y + bias).to(out_dtype)
    return fmtsim.scaled_mm(
        a_codes, b_codes.mT, a_scales, _turned(b_scales, b.shape), bias, None, out_dtype, gemm.fast_accum, **options
    )


def _plain(a, b, bias, gemm, out_dtype, options):
    xs, ys = _rounded(a, gemm.a), _rounded(b, gemm.b)
    names = [None if q.format is None or q.format.name in _DTYPES else q.format.name for q in (gemm.a, gemm.b)]
    if gemm.target is not None and names == ["tf32", "tf32"]:
        options, names = options | {"allow": "tf32"}, [None, None]
    options |= {"out_dtype": out_dtype, "formats": (names[0], names[1])}
    if bias is not None:
        return fmtsim.linear(xs, ys, bias, **options)
    return fmtsim.mm(xs, ys.mT, **options)


def _rounded(t, quantizer):
    fmt = quantizer.format
    if fmt is None:
        return t
    wide = torch.float64 if fmt.name == "fp64" else torch.float32
    q = fmtsim.quantize(t, fmt, rounding=quantizer.rounding, overflow=quantizer.overflow, out_dtype=wide)
    return q.to(_DTYPES[fmt.name]) if fmt.name in _DTYPES else q


def _encoded(t, quantizer):
    """Return codes [rows, K], scales, and the codes' format where their dtype does not say it."""
    fmt = quantizer.format
    q = fmtsim.encode(t.contiguous(), fmt, rounding=quantizer.rounding, overflow=quantizer.overflow, pad=True)
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    codes = q.unpacked()
    dtype = _DTYPES.get(element.name)
    codes = codes.view(dtype) if dtype is not None else codes
    return codes, _scales(q, t.shape[0]), None if dtype is not None else element


def _scales(q, rows):
    if not isinstance(q.format, BlockFormat):
        return torch.ones(())
    kind, outer = quantizer_scale_kind(Quantizer(format=q.format)), q.format.block[0] or 1
    if kind == "mx":
        return q.scales.view(torch.float8_e8m0fnu)
    if kind == "nvfp4":
        return [q.scales.repeat_interleave(outer, 0)[:rows].view(torch.float8_e4m3fn), q.tensor_scale]
    scales = q.parts().scales
    return scales.reshape(()) if kind == "tensor" else scales


def _turned(scales, shape):
    """Give float32 scales of b the shape in which torch takes them."""
    if isinstance(scales, list) or scales.dtype != torch.float32 or scales.dim() == 0:
        return scales
    return scales.mT


def _recipes(gemm, kinds):
    kind = "row" if "row" in kinds else next(iter(kinds - {"none"}), "tensor")
    if kind == "block_128":
        names = ["BlockWise128x128" if q.format.block[0] == 128 else "BlockWise1x128" for q in (gemm.a, gemm.b)]
    else:
        names = [_RECIPES[kind]] * 2
    plain = {"swizzles": "NO_SWIZZLE"} if kind in ("mx", "nvfp4") else {}
    return {"scale_recipes": (names[0], names[1]), **plain}
