# SPDX-License-Identifier: Apache-2.0
"""Numbers into codes and back, with torch operations: the definition that every engine's bits are held to.

Parts of a stored state are tensors by name: ``"codes"`` (float32 itself, uint8, or int16 for 16-bit codes; 4-bit codes
two a byte, the even element in the low half), ``"scale"`` float32 [blocks], and of expanded groups ``"power"`` and
``"centre"``.

Dynamic range expansion (COAT) raises each group to the power that makes it fill E4M3's range. Source: Xi et al., COAT,
arXiv:2410.19313; NVlabs/COAT 80ec99f. Its kernels take powers and logarithms from a GPU's library, whose last bits no
other machine gives; here both are the sequences of ``fmtsim.rounding.elementary``, so every device has the same bits.
The steps stand at the lines of ``compress`` and ``expand``; numbers are float32 unless said otherwise.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.ops import decode as decode_elements
from fmtsim.casts.ops import encode as encode_elements
from fmtsim.casts.ops import load_engine
from fmtsim.formats.element import CodebookFormat, ElementFormat
from fmtsim.formats.packing import code_dtype, pack, unpack
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling
from fmtsim.optim.rules import square_root
from fmtsim.rounding.codebooks import codebook_thresholds
from fmtsim.rounding.elementary import ln
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, EncodedParts, RandomKey
from fmtsim.spec.optimizer import StateFormat
from fmtsim.support.float64 import float64

FLOOR = 1e-30
STEPS = 16
RANGE = ln(448.0 * 448.0 / 2)
"""The logarithm of the ratio that groups are expanded to, as the code has it (E4M3's own is 448 / 2**-9)."""


def compress(x: Tensor, top_value: float, *, lanes: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``z / scale`` with x's signs, and scale, power and centre of each group.

    Args:
        x: float32 [groups, elements].
        top_value: The format's largest value.
        lanes: The smallest magnitude is what COAT's kernel finds (``StateFormat.least_of``).
    """
    # 1. The largest magnitude of a group and the smallest that is not zero, both plus 1e-30.
    magnitude = x.abs()
    top, low = extremes(magnitude)
    low = _least_of_lanes(magnitude) + FLOOR if lanes else low
    # 2. The geometric mean of both.
    centre = square_root(top) * square_root(low)
    # 3. power = floor(16 * (ln 100352 / (ln top - ln low))) / 16; 1 where top = low.
    distance = _ln(top) - _ln(low)
    safe = torch.where(distance > 0, distance, 1.0)
    power = torch.floor(STEPS * (torch.full_like(safe, RANGE) / safe)) / STEPS
    power = torch.where(distance == 0, 1.0, torch.where(top == top, power, math.nan)).to(torch.float32)
    # 4. scale = (top / centre) ** power / 448, so that the largest element becomes the format's largest value.
    scale = _raised(top, power, centre) / torch.full_like(top, top_value)
    # 5. z / scale with z = (|x| / centre) ** power and the sign of x; zero stays zero.
    z = _raised(magnitude, power, centre) / scale
    return torch.copysign(torch.where(magnitude == 0, 0.0, z), x), scale, power, centre


def extremes(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest and the smallest number but zero of each row, both plus FLOOR; [rows, 1]."""
    top = magnitude.amax(1, keepdim=True)
    low = torch.where(magnitude == 0, torch.inf, magnitude).amin(1, keepdim=True)
    low = torch.where(low == torch.inf, 0.0, low)
    return top + FLOOR, low + FLOOR


def _least_of_lanes(magnitude: Tensor) -> Tensor:
    """Return what the reductions of COAT's kernel leave in lane 0 (fp8_adamw_expand_cuda_kernel.cu); [rows, 1].

    A lane takes the smaller number of its own and another lane's unless the other's is zero; its own zero stays.
    """
    low = magnitude.view(len(magnitude), 4, 32)
    for half in (16, 8, 4, 2, 1):  # 1. of the 32 lanes of each warp
        low = _lesser(low[..., :half], low[..., half : 2 * half])
    low = low.squeeze(-1).clamp(max=1e9)  # 2. of the four warps, beside lanes of 1e9
    return _lesser(*_lesser(low[:, :2], low[:, 2:]).split(1, 1))


def _lesser(magnitude: Tensor, compared: Tensor) -> Tensor:
    return torch.where(compared > 0, torch.minimum(magnitude, compared), magnitude)


def expand(q: Tensor, scale: Tensor, power: Tensor, centre: Tensor) -> Tensor:
    """Undo ``compress`` for values of the format: float32 [groups, elements], and [groups, 1] thrice."""
    # 1. Undo the scale, 2. the power: exp(ln z / power) in float64, then float32, 3. the centre, with q's sign.
    z = q.abs() * scale
    factor = _exp(_ln(z) / float64(power)).to(torch.float32)
    return torch.copysign(torch.where(z == 0, 0.0, factor * centre), q)


def _raised(x: Tensor, power: Tensor, centre: Tensor) -> Tensor:
    """Return ``(x / centre) ** power``: exp(power * (ln x - ln centre)) in float64, then float32."""
    return _exp(float64(power) * (_ln(x) - _ln(centre))).to(torch.float32)


def _ln(x: Tensor) -> Tensor:
    """Return the logarithm in float64; NaN stays NaN, Inf stays Inf, and 0 gives some number."""
    wide = float64(x)
    result: Tensor = _engine(x).ln(torch.where((wide > 0) & (wide < math.inf), wide, 1.0))
    return torch.where(wide < math.inf, result, wide)


def _exp(x: Tensor) -> Tensor:
    result: Tensor = _engine(x).exp(x)
    return result


def _engine(x: Tensor) -> Any:
    """Return an engine with both functions for a device: equal bits, whichever it is."""
    return load_engine("cpu" if x.is_cpu else "torch_engine")


Parts = dict[str, Tensor]
_BF16, _FP16 = get_format("bf16"), get_format("fp16")
EXPONENTS = (-126, 126)
"""Powers of two that scales may be: both they and their reciprocals are normal."""


def encode(x: Tensor, fmt: StateFormat, previous: Mapping[str, Tensor], key: RandomKey | None) -> Parts:
    """Return the parts of float32 numbers.

    Args:
        x: float32, contiguous, of its parameter's shape.
        fmt: How they are kept.
        previous: The parts until now, whose scale some rules keep; empty at first.
        key: Of the random words of stochastic rounding.
    """
    if fmt.format is None:
        return {"codes": x.reshape(-1)}
    scaled = rows = _rows(x, fmt)
    parts: Parts = {}
    if fmt.expand:
        scaled, *groups = compress(rows, float(fmt.format.max), lanes=fmt.least_of == "lanes")
        parts |= dict(zip(("scale", "power", "centre"), (part.reshape(-1) for part in groups), strict=True))
    elif fmt.scaling is not None:
        scale = _scale(rows, fmt, fmt.scaling, previous.get("scale"))
        scaled = _scaled(rows, scale, fmt.scaling)
        parts["scale"] = scale.reshape(-1)
    # Codes of the scaled numbers y, flat; NaN takes code 0 of a codebook.
    y = scaled.reshape(-1)[: x.numel()]
    if isinstance(fmt.format, CodebookFormat):
        bounds = _thresholds(fmt.format, fmt.ties, y.device)
        codes = torch.searchsorted(bounds, torch.where(y == y, y, -math.inf), right=True)
        if fmt.keep_sign:
            zero = fmt.format.values.index(0.0)
            codes = codes - ((codes == zero) & torch.signbit(x.reshape(-1))).to(codes.dtype)
    else:
        spec = CastSpec(format=fmt.format, rounding=fmt.rounding, overflow="saturate")
        codes = encode_elements(y, spec, key if fmt.stochastic else None).codes
    return {"codes": packed(codes, fmt.format)} | parts


def decode(parts: Mapping[str, Tensor], fmt: StateFormat, shape: tuple[int, ...]) -> Tensor:
    """Return the float32 numbers of stored parts, in the parameter's shape."""
    if fmt.format is None:
        return parts["codes"].view(shape)
    count = math.prod(shape)
    codes = parts["codes"]
    codes = codes if fmt.format in (_BF16, _FP16) else unpacked(codes, fmt.format, count)
    q = _rows(element_values(codes, fmt.format).view(shape), fmt)
    if fmt.expand:
        q = expand(q, *(parts[name].view(-1, 1) for name in ("scale", "power", "centre")))
    elif fmt.scaling is not None:
        scale = parts["scale"].view(-1, 1)
        if fmt.scaling.power_of_two is not None:  # its reciprocal is exact, and a product is quicker than a quotient
            scale = torch.ones_like(scale) / scale
        divides = fmt.scaling.arithmetic == "decode_divides" and fmt.scaling.power_of_two is None
        q = q / scale if divides else q * scale
    return q.reshape(-1)[:count].view(shape)


def packed(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Return flat codes as they are stored: whole bytes, or int16."""
    if fmt.bits <= 8:
        return pack(codes, fmt.bits)
    return codes.to(torch.int16)  # keeps the low 16 bits


def unpacked(stored: Tensor, fmt: ElementFormat, count: int) -> Tensor:
    """Return flat codes as non-negative integers."""
    if fmt.bits < 8:
        return unpack(stored, fmt.bits, count)
    return stored if fmt.bits == 8 else stored.to(torch.int32) & 0xFFFF


def element_values(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the float32 values of unpacked codes."""
    if fmt.bits <= 8:
        return _values(fmt, codes.device)[codes.to(torch.int64)]
    if fmt == _BF16:  # the leading bits of a float32
        return (codes.to(torch.int32) << 16).view(torch.float32)
    if fmt == _FP16:  # widening is exact on every device, and the one NaN that encode stores becomes the canonical one
        return codes.to(torch.int16).view(torch.float16).to(torch.float32)
    return _decoded(codes.to(code_dtype(fmt.bits)), fmt)


@lru_cache(maxsize=64)
def _values(fmt: ElementFormat, device: torch.device) -> Tensor:
    if isinstance(fmt, CodebookFormat):
        return torch.tensor(fmt.values, dtype=torch.float32, device=device)
    return _decoded(torch.arange(1 << fmt.bits, dtype=torch.uint8, device=device), fmt)


def _decoded(codes: Tensor, fmt: ElementFormat) -> Tensor:
    cast = CastSpec(format=fmt, rounding=Rounding(), overflow="saturate")
    return decode_elements(EncodedParts(codes), cast, torch.float32, validated=True)


@lru_cache(maxsize=64)
def _thresholds(fmt: CodebookFormat, ties: str, device: torch.device) -> Tensor:
    return torch.tensor(codebook_thresholds(fmt, ties), device=device)


def _rows(x: Tensor, fmt: StateFormat) -> Tensor:
    """Return numbers as [blocks, block], the last block filled with zeros."""
    block = fmt.block_of(tuple(x.shape))
    flat = x.reshape(-1)
    if flat.numel() % block:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % block))
    return flat.view(-1, block)


def _scale(rows: Tensor, fmt: StateFormat, scaling: Scaling, previous: Tensor | None) -> Tensor:
    """Return the scale of each row as its rule says, float32 [rows, 1]."""
    assert fmt.format is not None
    top = float(fmt.format.max)
    if scaling.history is not None:  # fixed at first
        if previous is not None:
            return previous.view(-1, 1)
        squares = rows.detach().cpu().to(torch.float64).square().sum()  # on the CPU: the same bits for every device
        rms = math.sqrt(float(squares) / max(rows.numel(), 1))
        return torch.tensor([[scaling.multiplier * rms / top or 1.0]], dtype=torch.float32, device=rows.device)
    amax = rows.abs().amax(-1, keepdim=True)
    amax = amax.clamp(min=fmt.least) if fmt.least else amax
    if scaling.arithmetic != "decode_divides":
        return amax / torch.full_like(amax, top)
    if scaling.power_of_two is None:
        return torch.where(amax == 0, 1.0, torch.full_like(amax, top) / amax)
    previous_scale = torch.ones_like(amax) if previous is None else previous.view(-1, 1)
    usable = (amax > 0) & (amax < math.inf)
    return torch.where(usable, power_of_two(torch.where(usable, amax, 1.0), top), previous_scale)


def power_of_two(amax: Tensor, top: float) -> Tensor:
    """Return the largest power of two s with ``s * amax <= top`` of positive numbers, within EXPONENTS; float32."""
    # amax = fraction * 2^exponent with fraction in [0.5, 1), and top likewise.
    fraction, exponent = torch.frexp(amax)
    top_fraction, top_exponent = math.frexp(top)
    # 2^(top_exponent - exponent), halved where amax has the larger fraction; the exponent goes to bits 23 to 30.
    power = top_exponent - exponent.to(torch.int32) - (fraction > top_fraction).to(torch.int32)
    return ((power.clamp(*EXPONENTS) + 127) << 23).view(torch.float32)


def _scaled(rows: Tensor, scale: Tensor, scaling: Scaling) -> Tensor:
    if scaling.arithmetic == "divide":
        return rows / torch.where(scale == 0, 1.0, scale)
    if scaling.arithmetic == "reciprocal":
        scale = torch.ones_like(scale) / scale.clamp(min=scaling.eps)
    return rows * scale
