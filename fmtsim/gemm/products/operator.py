"""The torch operator of matrix products: one definition as JSON, the data, and the choice of engine."""

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fmtsim import ops
from fmtsim.errors import ArgumentError
from fmtsim.formats.interop import torch_dtype
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.gemm.products.epilogue import finish
from fmtsim.ops import random_key
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, RandomKey
from fmtsim.spec.datapath import Datapath, sum_dtype
from fmtsim.spec.gemm_spec import GemmSpec, gemm_spec_from_json

# Sums that are kept at once where they are rounded to a narrower output afterwards: 24 MB of float32 on a CPU. A GPU
# has room for more, would prepare operands once a piece, and waits for launches.
_SUMS = 6 << 20
_VALUES = 1 << 17  # numbers that are checked at once: they stay in a cache
_ON_GPUS = 1 << 26  # of both

_library = torch.library.Library("fmtsim", "FRAGMENT")
_library.define(
    "gemm(Tensor a, Tensor b, str spec, ScalarType? dtype=None, Tensor? c=None, Tensor? scale_a=None, "
    "Tensor? scale_b=None, Tensor? row=None, Tensor? column=None, Tensor? bias=None, Tensor? result_scale=None, "
    "Tensor? key=None, bool validated=False) -> Tensor"
)


def run_gemm(
    a: Tensor,
    b: Tensor,
    spec: GemmSpec,
    *,
    dtype: torch.dtype | None = None,
    c: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    row: Tensor | None = None,
    column: Tensor | None = None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    random: RandomKey | Tensor | None = None,
    validated: bool = False,
) -> Tensor:
    """Return ``a b^T`` as a GemmSpec defines it: the one way from verbs and layers to the operator.

    Args:
        a: [M, K] or [B, M, K] of any strides: float8, 16-bit, float32 or float64 values of ``spec.a``, int8 for an
            IntegerDatapath.
        b: [N, K] or [B, N, K], likewise.
        spec: Datapath, accumulation order and formats.
        dtype: Of the result; None leaves the reduced sums as they are, before the epilogue.
        c: [M, N] or [B, M, N] in the dtype of the sums, the addend.
        scale_a: float32 [M, ceil(K / g)] or [B, ...]: scales inside the unit, or those of a scaled promotion.
        scale_b: float32 [N, ceil(K / g)] or [B, ...].
        row, column, bias, result_scale: As in ``finish``.
        random: A key, or int64 [2] or [B, 2] with seed and offset, where the unit rounds stochastically.
        validated: Both operands are known to hold values of their formats alone, which saves looking.

    Returns:
        [M, N] or [B, M, N]: ``dtype``, or float32, float64 where the accumulator needs it, int32 for an
        IntegerDatapath. NaN is 0x7FFFFFFF (float64 0x7FFFFFFFFFFFFFFF).

    Raises:
        ArgumentError: An operand holds a number that its format lacks.
    """
    key = torch.tensor([_signed(number) for number in random]) if isinstance(random, RandomKey) else random
    return torch.ops.fmtsim.gemm(  # type: ignore[no-any-return]
        a, b, spec.text, dtype, c, scale_a, scale_b, row, column, bias, result_scale, key, validated
    )


def draw_keys(stochastic: bool, generator: Any, batch: int | None, device: torch.device) -> Tensor | None:
    """Return the keys of stochastic rounding: int64 [2], or [batch, 2], seed and offset; None where nothing is drawn.

    Args:
        stochastic: The unit rounds stochastically.
        generator: An int seed, a RandomKey, a torch.Generator on the CPU or the device, or None for torch's default.
        batch: Products of the call, None for a single one. With a seed, product i has offset i more than the
            first; a torch.Generator is drawn from once for each.
        device: Where the operands are.

    Raises:
        ArgumentError: The generator is none, is on another device, or nothing is drawn.
    """
    if not stochastic:
        if generator is not None:
            raise ArgumentError("generator= is for units that round stochastically; this one does not, leave it out")
        return None
    count = 1 if batch is None else batch
    if generator is None or isinstance(generator, torch.Generator):
        drawn = [_draw(generator, device).cpu() for _ in range(count)]
        keys = torch.stack([torch.cat([draw, draw.new_zeros(1)]) for draw in drawn]) if drawn else _no_keys()
    else:
        seed, offset = _numbers(generator)
        keys = torch.tensor([[_signed(seed), _signed(offset + i)] for i in range(count)]) if count else _no_keys()
    return keys[0] if batch is None else keys


def drawn_key(generator: Any, device: torch.device) -> RandomKey:
    """Return one key as numbers; arguments as in ``draw_keys``. Not for code that a compiler traces."""
    if generator is None or isinstance(generator, torch.Generator):
        return RandomKey(int(_draw(generator, device)))
    return RandomKey(*map(_signed, _numbers(generator)))


def _draw(generator: torch.Generator | None, device: torch.device) -> Tensor:
    where = torch.device("cpu") if generator is None else generator.device
    if where.type not in ("cpu", device.type):
        raise ArgumentError(
            f"generator is on {where}, a on {device}; pass one on the CPU or on {device}, or an int seed"
        )
    return torch.randint(-(1 << 63), (1 << 63) - 1, (1,), generator=generator, device=where)


def _numbers(generator: Any) -> tuple[int, int]:
    seed, offset = generator if isinstance(generator, RandomKey) else (generator, 0)
    numbers = type(seed) is int and type(offset) is int
    if not numbers or not all(-(1 << 63) <= x < 1 << 64 for x in (seed, offset)):
        raise ArgumentError(f"generator={generator!r} is not a seed; pass an int of 64 bits or a torch.Generator")
    return seed, offset


def _no_keys() -> Tensor:
    return torch.empty(0, 2, dtype=torch.int64)


def _signed(number: int) -> int:
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >= 1 << 63 else number


def gemm_engine(spec: GemmSpec, a: Tensor, b: Tensor) -> ModuleType:
    """Return the engine of a product: kernels for the device where they cover it, else torch operations."""
    if a.is_cpu or a.is_cuda:
        engine = importlib.import_module("fmtsim.cpu" if a.is_cpu else "fmtsim.cuda")
        if (a.is_cpu or engine.serves(a.get_device())) and engine.supports_gemm(spec, a, b):
            return engine
    return importlib.import_module("fmtsim.torch_engine")


def _gemm(  # type: ignore[no-untyped-def]
    a, b, spec, dtype=None, c=None, scale_a=None, scale_b=None, row=None, column=None, bias=None, result_scale=None,
    key=None, validated=False,
):  # fmt: skip
    """Compute a product."""
    definition = gemm_spec_from_json(spec)
    a, b = a.detach(), b.detach()
    if not validated:
        _require_values(("a", a, definition.a), ("b", b, definition.b))
    shared = {"row": row, "column": column, "bias": bias, "result_scale": result_scale}
    dtype = dtype or sum_dtype(definition.datapath)
    if a.dim() == 2:
        out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
        _product(a, b, definition, c, scale_a, scale_b, shared, key, out)
        return out
    out = torch.empty(a.shape[0], a.shape[1], b.shape[1], dtype=dtype, device=a.device)
    for i in range(a.shape[0]):
        own_c, own_scale_a, own_scale_b, own_key = (None if t is None else t[i] for t in (c, scale_a, scale_b, key))
        _product(a[i], b[i], definition, own_c, own_scale_a, own_scale_b, shared, own_key, out[i])
    return out


def _product(a, b, spec, c, scale_a, scale_b, shared, key, out):  # type: ignore[no-untyped-def]
    """Write one product into out, a group of rows at a time where its sums take another dtype than out."""
    m, n = out.shape
    if not out.numel():
        return
    path = spec.datapath
    if isinstance(path, Datapath) and path.scale is not None and scale_a is None and scale_b is None:
        groups = -(-a.shape[-1] // path.scale_block)  # a unit with scales of its own, and a call without: ones
        scale_a, scale_b = (torch.ones(rows, groups, device=a.device) for rows in (m, n))
    random = random_key(key)
    engine, wide = gemm_engine(spec, a, b), sum_dtype(spec.datapath)
    step = m if out.dtype == wide or random is not None else min(m, max(64, _at_once(out, _SUMS) // n))
    for start in range(0, m, step):
        rows = slice(start, min(start + step, m))
        part = out[rows]
        sums = part if out.dtype == wide else torch.empty(part.shape, dtype=wide, device=out.device)
        own_c, own_scale = (None if t is None else t[rows] for t in (c, scale_a))
        begins = _bias_in_place(spec, own_c, shared["bias"], sums)
        engine.gemm(a[rows], b, begins, own_scale, scale_b, spec, random, sums)
        if wide != torch.int32:
            row = shared["row"]
            row = row if row is None or row.numel() == 1 else row.reshape(-1)[rows]
            rules = {"rule": spec.plan.epilogue, "bias_after_rounding": spec.plan.bias_after_rounding}
            bias = None if begins is not own_c else shared["bias"]
            finish(sums, out.dtype, **rules, **{**shared, "row": row, "bias": bias}, out=part)


def _bias_in_place(spec: GemmSpec, c: Tensor | None, bias: Tensor | None, sums: Tensor) -> Tensor | None:
    """Return the addend of a product: c, or the bias where the output begins with it (``GemmPlan.reduce``)."""
    if spec.plan.reduce != "in_place" or bias is None:
        return c
    if c is not None:
        raise ArgumentError("parts that are added in place begin with c or with a bias, and both are given; pass one")
    return bias.reshape(1, -1).to(sums.dtype).expand_as(sums)


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _at_once(x: Tensor, few: int) -> int:
    """Return how many numbers are worked on at once: ``few``, or many on a GPU."""
    return _ON_GPUS if _is_on_gpu(x) else few


def _require_values(*operands: tuple[str, Tensor, FloatFormat | IntFormat]) -> None:
    """Refuse numbers that an operand's format lacks.

    A tensor in the format's own dtype cannot hold any; neither can one of 8 bits in another dtype, which verbs make of
    a narrower format's codes and never take. A GPU is asked once for all; nobody asks it while a graph is captured,
    which cannot wait for an answer.
    """
    loose = [(name, x, fmt) for name, x, fmt in operands if _may_lack(x, fmt)]
    if not loose:
        return
    if _is_on_gpu(loose[0][1]):
        if torch.cuda.is_current_stream_capturing():
            return
        kept = [(rounded == piece).all() for _, x, fmt in loose for piece, rounded in _pieces(x, fmt)]
        if bool(torch.stack(kept).all()):
            return
    for name, x, fmt in loose:
        _require_each(name, x, fmt)


def _may_lack(x: Tensor, fmt: FloatFormat | IntFormat) -> bool:
    wide = x.dtype.is_floating_point and x.dtype.itemsize > 1
    return wide and torch_dtype(fmt) != x.dtype and x.numel() > 0


def _pieces(x: Tensor, fmt: FloatFormat | IntFormat) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield an operand by groups of rows, each with what it becomes in a format."""
    spec = CastSpec(format=fmt, rounding=Rounding(), overflow="ieee")
    rows = x.reshape(-1, x.shape[-1])
    step = min(max(1, _at_once(x, _VALUES) // rows.shape[1]), rows.shape[0])
    wide = torch.promote_types(x.dtype, torch.float32)  # in which kernels are fast
    buffer = torch.empty(step * rows.shape[1], dtype=wide, device=x.device)
    for start in range(0, rows.shape[0], step):
        piece = rows[start : start + step].to(wide)
        rounded = buffer[: piece.numel()].view(piece.shape)
        ops.engine_for("quantize", spec, piece, rounded).quantize(piece, spec, None, rounded)
        yield piece, rounded


def _require_each(name: str, x: Tensor, fmt: FloatFormat | IntFormat) -> None:
    for piece, rounded in _pieces(x, fmt):
        if torch.equal(rounded, piece):  # five times as fast as what follows; False where there is a NaN
            continue
        lost = (rounded != piece) & ~(rounded.isnan() & piece.isnan())
        if bool(lost.any()):
            value = piece[lost][0].item()
            raise ArgumentError(
                f"{name} holds {value:g}, which is not a value of {fmt.name}; round it first with "
                f"fmtsim.quantize({name}, {fmt.name!r}), or leave {name}_format out"
            )


def _gemm_shape(  # type: ignore[no-untyped-def]
    a, b, spec, dtype=None, c=None, scale_a=None, scale_b=None, row=None, column=None, bias=None, result_scale=None,
    key=None, validated=False,
):  # fmt: skip
    dtype = dtype or sum_dtype(gemm_spec_from_json(spec).datapath)
    return torch.empty((*a.shape[:-1], b.shape[-2]), dtype=dtype, device=a.device)


_library.impl("gemm", _gemm, "CompositeExplicitAutograd")
torch.library.register_fake("fmtsim::gemm", _gemm_shape, lib=_library)
