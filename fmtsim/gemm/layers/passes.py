# SPDX-License-Identifier: Apache-2.0
"""The forward and the backward pass of a layer: operands, products, those on a target too, and operands shared."""

import math
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.casts.arguments import check_together
from fmtsim.casts.ops import Key, fused_engine
from fmtsim.formats.block import FP32
from fmtsim.formats.representable import is_representable
from fmtsim.gemm.layers.config import OPERANDS, PRODUCTS, Gemm
from fmtsim.gemm.layers.keys import OUTPUTS, SCALES, SIGNS, UNITS, Generator, Layer, counts_passes
from fmtsim.gemm.layers.operand import NO_KEYS, has_both, multiplier_apart, quantize_both, quantize_operand, values_of
from fmtsim.gemm.layers.operator import OperandRequest, traced_both, traced_draws, traced_operand
from fmtsim.gemm.layers.product import HALVES, finish, multiply, round_output, unit_dtype, unrotated, wide_dtype
from fmtsim.gemm.layers.route import INT8, Route, element_of
from fmtsim.gemm.layers.watch import Seen, Watchers
from fmtsim.gemm.products.native import FP8_DTYPES, SCALED_MULTIPLE
from fmtsim.gemm.products.operand_scales import Scales
from fmtsim.gemm.products.operands import FLOATS, operand_format
from fmtsim.gemm.products.resolver import run_product
from fmtsim.gemm.units.unit import unit_takes
from fmtsim.scaling.blocks import block_sizes
from fmtsim.spec.call import UNIT_SCALES, Operation
from fmtsim.spec.operand import Keys, Operand, block_of, last_cast
from fmtsim.spec.quantizer import Hadamard, Quantizer, Transform
from fmtsim.support.dispatch import PLAIN_TYPES
from fmtsim.support.errors import ArgumentError, DtypeError
from fmtsim.support.replay.gpu import current_stream
from fmtsim.support.replay.hooks import refuse

_HIGH = Quantizer()


def multiply_on_machine(
    operation: Operation, a: Operand, b: Operand, bias: Tensor | None, gemm: Gemm, route: Route, dtype: torch.dtype,
    layer_dtype: torch.dtype, generator: Generator, *, traced: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``a b^T + bias`` as a target or a unit computes it: the bits of fmtsim.mm, linear, scaled_mm or int_mm.

    Args:
        operation: ``"mm"`` or ``"linear"``: which function of torch this is where the operands have no scales.
        a: [M, K].
        b: [N, K].
        bias: [N]. Where the library does not add it in such a call it is added to the float32 result.
        gemm: The product.
        route: What the target multiplies.
        dtype: Of the result.
        layer_dtype: That of the layer's tensors.
        generator: Random words of a unit that rounds stochastically.
        traced: The tensors are a compiler's, without values: call operators.

    Returns:
        [M, N]: the output format's own dtype where the unit writes that, else ``dtype``, or float32 where the library
        has no such output; ``round_output`` does the rest.

    Raises:
        ArgumentError, DtypeError, FormatError: These operands are not multiplied together there.
    """
    if a.elements.is_cuda:
        refuse()
    if 0 in (*a.elements.shape, b.elements.shape[0]):  # nothing is multiplied, and empty operands have no scales
        y = a.elements.new_zeros(a.elements.shape[0], b.elements.shape[0], dtype=wide_dtype(layer_dtype))
        return finish(y, None, None, None, bias, y.dtype if gemm.out.format is not None else dtype, traced)
    rest = None if a.rest is None else _rest_on_machine(a.rest, b, gemm)
    after = route.how == "integers" or (route.how == "values" and _scaled_after(a, b, gemm, layer_dtype))
    columns, rows = (b.row_scales(), a.row_scales()) if after else (None, None)
    if route.how == "integers":
        y = _multiply_integers(a.elements, b.elements, gemm)
    else:
        if route.how != "elements":
            wide = torch.float32 if route.how == "numbers" else layer_dtype
            a, b = (Operand((x.elements if after else values_of(x, wide_dtype(wide))).to(wide), _HIGH) for x in (a, b))
        if columns is rows is rest is None:
            return _multiply_elements(operation, a, b, bias, gemm, route, dtype, generator, not traced)
        y = _multiply_elements("mm", a, b, None, gemm, route, wide_dtype(layer_dtype), generator, not traced)
    y = y if y.dtype == torch.float64 else y.float()
    return finish(y, columns, rows, rest, bias, y.dtype if gemm.out.format is not None else dtype, traced)


def _scaled_after(a: Operand, b: Operand, gemm: Gemm, dtype: torch.dtype) -> bool:
    """Return True if sums are scaled instead of values: rows have one scale at most, and a dtype holds the elements."""
    if gemm.dequantized or not (a.scales_rows and b.scales_rows):
        return False
    elements = [element_of(last_cast(x.quantizer).format) for x in (a, b)]
    return all(fmt is None or is_representable(fmt, dtype) for fmt in elements)


def _rest_on_machine(rest: Tensor, b: Operand, gemm: Gemm) -> Tensor:
    """Return what ``Clamp`` cut off the first operand, times the second, in float32.

    A unit that takes no float32 leaves it to a chain of float32 multiply-adds.
    """
    target = gemm.target if gemm.library is not None or unit_takes(gemm.target, "fp32") else "fp32_fma"
    values = values_of(b, torch.float32)
    return run_product(
        "mm", rest, values, (FP32, FP32), torch.float32, target=target, library=gemm.library is not None,
        native=gemm.native, accumulate="fp32", quantized=True,
    )  # fmt: skip


def _multiply_integers(a: Tensor, b: Tensor, gemm: Gemm) -> Tensor:
    """Return the exact product of integer elements [M, K] and [N, K]: int32 [M, N]."""
    rows, columns = a.shape[0], b.shape[0]
    a, b = a.to(torch.int8), b.to(torch.int8)
    if gemm.library is not None:  # libraries take such sizes alone; zeros add nothing
        a, b = _padded(a, max(rows, 17), 8), _padded(b, -(-columns // 8) * 8, 8)
    y = run_product(
        "int_mm", a, b, (INT8, INT8), torch.int32, target=gemm.target, library=gemm.library is not None,
        plan=gemm.plan, accumulate="int32", native=gemm.native, quantized=True,
    )  # fmt: skip
    return y[:rows, :columns]


def _padded(x: Tensor, rows: int, multiple: int) -> Tensor:
    """Pad a matrix with zeros to ``rows`` rows and to a multiple of ``multiple`` columns."""
    if x.shape[0] == rows and not x.shape[1] % multiple:
        return x
    padded = x.new_zeros(rows, -(-x.shape[1] // multiple) * multiple)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded


def _multiply_elements(
    operation: Operation, a: Operand, b: Operand, bias: Tensor | None, gemm: Gemm, route: Route, dtype: torch.dtype,
    generator: Generator, bare: bool,
) -> Tensor:  # fmt: skip
    """Return the product of elements and their scales; ``bare`` as in ``run_product``."""
    first = route.formats[0] or operand_format("operand", a.elements)
    second = route.formats[1] or operand_format("operand", b.elements)
    kind = route.kind if a.scale is not None or b.scale is not None else "none"
    if route.multiplies and kind in UNIT_SCALES:
        a, b = multiplier_apart(a), multiplier_apart(b)
    scaled, elements_dtype = kind != "none" or min(first.bits, second.bits) <= 8, a.elements.dtype
    operation, y_dtype, adds = _library_call("scaled_mm" if scaled else operation, elements_dtype, bias, gemm, dtype)
    # scales as products take them
    kind = "tensor" if scaled and kind == "none" else kind
    if kind == "none" or a.scale is b.scale is None:
        scales = Scales(kind)
    elif kind in ("tensor", "row"):
        one = torch.ones((), device=a.elements.device)
        row, column = (one if x.scale is None else x.scale for x in (a, b))
        if kind == "row":
            row, column = (s.reshape(-1).expand(x.elements.shape[0]) for s, x in ((row, a), (column, b)))
        scales = Scales(kind, row, column)
    else:
        rows_per_scale = a.block[0], b.block[0]
        kind = "row_block_128" if kind == "block_128" and rows_per_scale == (1, 1) else kind
        scales = Scales(kind, a.tensor_scale, b.tensor_scale, a.scale, b.scale, rows_per_scale)
    # sizes that the library takes; zeros add nothing
    sums = gemm.accumulate
    lhs, rhs, columns = a.elements, b.elements, b.elements.shape[0]
    if gemm.library is not None:
        sums = sums or ("fp64" if elements_dtype == torch.float64 else "fp32")
        if scaled and (columns % SCALED_MULTIPLE or rhs.shape[1] % SCALED_MULTIPLE):
            rows = -(-columns // SCALED_MULTIPLE) * SCALED_MULTIPLE
            lhs, rhs = _padded(lhs, lhs.shape[0], SCALED_MULTIPLE), _padded(rhs, rows, SCALED_MULTIPLE)
            scales, bias = (
                scales.padded(columns, rows),
                None if bias is None else _padded(bias[None], 1, SCALED_MULTIPLE)[0],
            )
    y = run_product(
        operation, lhs, rhs, (first, second), y_dtype, scales, bias=bias, adds_bias=adds,
        target=gemm.target, library=gemm.library is not None, plan=gemm.plan, accumulate=sums,
        fast_accum=gemm.fast_accum, native=gemm.native, generator=generator,
        layouts=("row", "row") if scaled else None, quantized=True, bare=bare,
    )  # fmt: skip
    return y if y.shape[1] == columns else y[:, :columns].contiguous()


def _library_call(
    operation: Operation, elements_dtype: torch.dtype, bias: Tensor | None, gemm: Gemm, dtype: torch.dtype
) -> tuple[Operation, torch.dtype, bool]:
    """Return the function of a library, the dtype of its result, and whether it adds the bias.

    A unit alone gives every dtype and adds every bias.
    """
    wide = torch.float64 if torch.float64 in (elements_dtype, dtype) else torch.float32
    out_dtype = dtype if gemm.out.format is None else unit_dtype(gemm.out) or wide
    if gemm.library is None:
        return operation, out_dtype, bias is not None
    wide = torch.float64 if elements_dtype == torch.float64 else torch.float32
    library_dtypes = (torch.float32, *HALVES, *FP8_DTYPES) if operation == "scaled_mm" else (elements_dtype, wide)
    out_dtype = out_dtype if out_dtype in library_dtypes else wide
    if bias is None:
        return operation if operation == "scaled_mm" or out_dtype == elements_dtype else "mm", out_dtype, False
    if operation == "scaled_mm":
        adds = bias.dtype in HALVES and out_dtype in (bias.dtype, *FP8_DTYPES)
    else:
        adds = out_dtype == bias.dtype == elements_dtype
    if adds:
        return operation, out_dtype, True
    return operation if operation == "scaled_mm" else "mm", wide, False


Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype | None]  # of x, w and bias
Saved = tuple[Tensor | None, ...]  # elements, scale, tensor_scale and slope of an operand of the forward pass


class Pass:
    """Quantise and multiply in one pass, forward or backward, of a layer.

    Args:
        layer: Its definition, random keys and states.
        watchers: Observers of the pass.
        t: A tensor of the pass.
        dtype: Of its operands before they are quantised.
        sizes: M, N and K of its products.
        backward: Which pass.
        traced: The tensors are a compiler's, without values: call operators.
    """

    def __init__(
        self, layer: Layer, watchers: Watchers, t: Tensor, dtype: torch.dtype, sizes: tuple[int, ...], *,
        backward: bool = False, traced: bool = False,
    ) -> None:  # fmt: skip
        self._layer, self._config = layer, layer.config
        self._backward, self._traced, self._dtype = backward, traced, dtype
        self.counted = traced and counts_passes(layer, t, sizes)
        self._signs: Key = None
        self._drawn: dict[str, Operand] = {}
        self._narrow: set[str] = set()  # operands whose tensors are float32 in place of bfloat16
        self._watchers = () if traced else watchers

    def cast(self, t: Tensor, *uses: tuple[str, int]) -> Tensor:
        """Return a matrix in the dtype of the pass; as it is where kernels round it as they read, or nothing casts it.

        Args:
            t: [M, N].
            uses: Names of the operands that it becomes, and the dimensions that their products sum over.
        """
        if t.dtype == self._dtype or all(name in self._layer.uncast for name, _ in uses):
            return t
        watched, dtypes, layer = self._traced or self._watchers, (t.dtype, self._dtype), self._layer
        engine = None if watched or dtypes != (torch.float32, torch.bfloat16) else fused_engine(t)
        if engine is None or not all(
            name not in layer.untouched and engine.narrows(t, layer.quantizers[name], dim, name in layer.folded)
            for name, dim in uses
        ):
            return t.to(self._dtype)
        self._narrow.update(name for name, _ in uses)
        return t

    def operand(self, name: str, t: Tensor, dim: int, factor: Tensor | None = None) -> Operand:
        """Quantise a tensor, times a factor (float32, 0-d) where there is one, whose products sum over ``dim``."""
        layer = self._layer
        quantizer, folded = layer.quantizers[name], name in layer.folded
        if name in layer.untouched and factor is None:
            operand, keys = Operand(t if dim == -1 else t.mT, quantizer), NO_KEYS
        elif self._traced:
            return self._drawn.get(name) or self._traced_operand(name, t, dim, factor)
        else:
            keys = self._keys(name, quantizer, t) if name in layer.random else NO_KEYS
            how = {"dim": dim, "folded": folded, "factor": factor, "narrow": name in self._narrow}
            operand = quantize_operand(t, quantizer, keys, layer.state.get(name), **how)  # type: ignore[arg-type]
        for watcher in self._watchers:
            watcher.operand(Seen(name, t, operand, keys, dim, factor))
        return operand

    def show(self, name: str, t: Tensor, operand: Operand) -> None:
        """Show watchers an operand that another layer quantised from the same tensor."""
        for watcher in self._watchers:
            watcher.operand(Seen(name, t, operand, NO_KEYS, -1, None))

    def gradient_operands(self, g: Tensor) -> tuple[Operand, Operand] | None:
        """Return the gradient quantised for both its products from one read; None where that has no kernel."""
        dgrad, wgrad = self._config.dgrad, self._config.wgrad
        quantizer = dgrad.a
        if quantizer != wgrad.a or dgrad.emulated or wgrad.emulated or not has_both(g, quantizer):
            return None
        if dgrad.b.is_stochastic or wgrad.b.is_stochastic or (self.counted and quantizer.is_stochastic):
            return None  # the operands draw in their order
        uses = OPERANDS.index("g_d"), OPERANDS.index("g_w")
        keys = [self._key(use, g) if quantizer.is_stochastic else None for use in uses]
        both = (traced_both if self._traced else quantize_both)(g, quantizer, *keys)
        for watcher in self._watchers:
            for name, operand, key, dim in zip(("g_d", "g_w"), both, keys, (-1, 0), strict=True):
                watcher.operand(Seen(name, g, operand, Keys(key), dim))  # type: ignore[arg-type]
        return both

    def draw(self, *requests: OperandRequest) -> None:
        """Quantise the operands with counted keys as one node of the graph, for ``operand`` to return."""
        drawn = [request for request in requests if self.counted and request.name in self._layer.random]
        if drawn:
            self._drawn = dict(zip([request.name for request in drawn], traced_draws(self._layer, drawn), strict=True))

    def draw_gradients(
        self, g: Tensor, w: Tensor | None, x: Tensor | None, saved: tuple[Saved, Saved], needs: tuple[bool, bool]
    ) -> None:
        """Call ``draw`` for the operands of a backward pass; ``needs``: whether x and w need gradients."""
        requests: list[OperandRequest | Operand] = []
        if needs[0]:
            requests += [OperandRequest("g_d", g, -1), self._second("w_d", w, saved[1])]
        elif self._layer.quantizers["g_w"].source == "forward":
            requests += [OperandRequest("g_d", g, -1)]
        if needs[1]:
            requests += [OperandRequest("g_w", g, 0), self._second("x_w", x, saved[0])]
        self.draw(*(request for request in requests if isinstance(request, OperandRequest)))

    def _second(self, name: str, original: Tensor | None, saved: Saved) -> Operand | OperandRequest:
        """Return the second operand of a backward product, or the request to quantise it; sums run over its rows."""
        quantizer = self._layer.quantizers[name]
        if quantizer.source == "original":
            assert original is not None
            return OperandRequest(name, original, 0)
        before = self._config.fprop.b if name == "w_d" else self._config.fprop.a
        elements, scale, tensor_scale, _ = saved
        assert elements is not None
        forward = Operand(elements, before, scale, tensor_scale, block_sizes(block_of(before), elements.shape))
        if quantizer.source == "forward":
            return forward.transposed()
        factor = tensor_scale if scale is None else scale
        blocks = scale is not None and tensor_scale is None and quantizer.scaling is not None
        whole = blocks and not any(n % size for n, size in zip(elements.shape, forward.block, strict=True))
        if elements.dtype == torch.bfloat16 and (scale is None or whole):
            return OperandRequest(name, elements, 0, factor)
        return OperandRequest(name, values_of(forward, torch.float32), 0)

    def product(
        self, name: str, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, *, watched: bool = False
    ) -> Tensor:  # fmt: skip
        """Return ``a b^T + bias`` of a product of the layer, rounded as it says."""
        if self._watchers and not watched:
            run = partial(self.product, name, a, b, bias, dtype, watched=True)
            for watcher in self._watchers:
                run = partial(watcher.product, name, a, b, bias, run)  # type: ignore[arg-type]
            return run()
        gemm, layer = getattr(self._config, name), self._layer
        rounds, index = gemm.out.format is not None, PRODUCTS.index(name)
        if gemm.target is None:
            wide = wide_dtype(dtype)
            y = multiply(a, b, bias, wide if rounds else dtype, wide, traced=self._traced)
        else:
            y = multiply_on_machine(
                "mm" if index else "linear", a, b, bias, gemm, layer.routes[name], dtype, self._dtype,
                layer.streams[UNITS + index], traced=self._traced,
            )  # fmt: skip
            rounds = rounds or y.dtype != dtype
        return round_output(y, gemm.out, dtype, layer.streams[OUTPUTS + index]) if rounds else y

    def gradient(self, name: str, grad: Operand, original: Tensor | None, saved: tuple[Saved, Saved]) -> Tensor:
        """Return a backward product: the gradient of a tensor that was rotated and rounded in the forward pass.

        Args:
            name: Of the product, ``"dgrad"`` or ``"wgrad"``.
            grad: The incoming gradient, quantised.
            original: The other tensor, [rows, columns], where its quantiser takes that.
            saved: What the forward pass saved of this tensor and of the other one.
        """
        gemm, fprop, of_x, dtype = getattr(self._config, name), self._config.fprop, name == "dgrad", self._dtype
        second = self._second("w_d" if of_x else "x_w", original, saved[1])
        other = self.operand(*second) if isinstance(second, OperandRequest) else second
        first, before = gemm.a, fprop.a if of_x else fprop.b
        was_rotated, slope = saved[0][0] is not None, saved[0][3]
        outer, inner = self._layer.rotations[name]
        inner = inner if was_rotated else []
        if not outer and not inner and slope is None:
            return self.product(name, grad, other, None, dtype)
        scales: tuple[Tensor | None, Tensor | None] = None, None
        bare = grad.scale is other.scale is grad.rest is gemm.out.format is None
        if inner and bare and not (self._watchers or gemm.emulated):
            scales = other.row_scales(), grad.row_scales()  # part of the step that follows
            grad, other = (operand._replace(tensor_scale=None) for operand in (grad, other))
        y = self.product(name, grad, other, None, wide_dtype(dtype))
        signs = self._sign_key(outer, y)
        return unrotated(
            y, first, before, slope, signs, dtype, was_rotated=was_rotated, traced=self._traced, scales=scales
        )

    def _key(self, use: int, t: Tensor) -> Key:
        return self._layer.key(use, t, traced=self._traced)

    def _keys(self, name: str, quantizer: Quantizer, t: Tensor) -> Keys:
        """Return the keys of an operand, the signs of its rotations first."""
        index, scaling = OPERANDS.index(name), quantizer.scaling
        signs = self._sign_key(quantizer.transforms, t)
        rounds = "stochastic" in (quantizer.rounding.mode, last_cast(quantizer).rounding.mode)
        elements = self._key(index, t) if rounds else None
        scales = scaling is not None and scaling.scale_rounding == "stochastic"
        return Keys(elements, self._key(SCALES + index, t) if scales else None, signs)  # type: ignore[arg-type]

    def _sign_key(self, transforms: Iterable[Transform], t: Tensor) -> Key:
        """Return the key of this pass's random signs, the same for all operands; None where no transform has any."""
        if not any(isinstance(transform, Hadamard) and transform.signs == "random" for transform in transforms):
            return None
        if self._signs is None:
            self._signs = self._key(SIGNS + self._backward, t)
        return self._signs

    def _traced_operand(self, name: str, t: Tensor, dim: int, factor: Tensor | None) -> Operand:
        layer = self._layer
        quantizer, folded = layer.quantizers[name], name in layer.folded
        keys = self._keys(name, quantizer, t) if name in layer.random else NO_KEYS
        source = (layer.name, name) if name in layer.state else ("", "")
        return traced_operand(t, quantizer, keys[:3], source, dim=dim, folded=folded, factor=factor)


def forward_pass(
    x: Tensor, w: Tensor, bias: Tensor | None, x_q: Operand | None, layer: Layer, watchers: Watchers,
    dtypes: Dtypes, *, traced: bool, shares: bool,
) -> tuple[Tensor, Operand | None, tuple[Tensor | None, ...]]:  # fmt: skip
    """Return y, the quantised x if layers share it (``x_q`` if a layer did so before), and the saved tensors.

    The last of these is w in the dtype of autocast, where the backward pass quantises that again and no kernel rounds w
    as it reads.
    """
    # 1. dtypes, those under autocast, and shapes fit
    dtype, w_dtype, bias_dtype = dtypes
    for name, t_dtype in (("x", dtype), ("w", w_dtype), ("bias", bias_dtype)):
        if t_dtype is not None and t_dtype not in FLOATS:
            raise DtypeError(f"EmulatedGEMM: {name} has dtype {t_dtype}; pass float16, bfloat16, float32 or float64")
    plain = not traced and w.device == x.device  # x and w
    if not plain or (bias is not None and not (type(bias) in PLAIN_TYPES and bias.device == x.device)):
        check_together(x=x, w=w, bias=bias)
    other = w_dtype if w_dtype != dtype else bias_dtype
    if other is not None and other != dtype:
        raise DtypeError(
            f"EmulatedGEMM: x has dtype {dtype}, w or bias {other}; cast them to one dtype, or use torch.autocast"
        )
    if x.dim() < 1 or w.dim() != 2 or x.shape[-1] != w.shape[1]:
        raise ArgumentError(
            f"EmulatedGEMM: x of shape {tuple(x.shape)} does not fit w of shape {tuple(w.shape)}; "
            "x is [..., K], w is [N, K]"
        )
    if bias is not None and bias.shape != w.shape[:1]:
        raise ArgumentError(
            f"EmulatedGEMM: bias of shape {tuple(bias.shape)} does not fit w of shape {tuple(w.shape)}; bias is [N]"
        )
    # 2. operands in the dtype of the pass, quantised
    source, later = w, (layer.config.wgrad.b, layer.config.dgrad.b)
    run = Pass(layer, watchers, w, dtype, (math.prod(x.shape[:-1]), *w.shape), traced=traced)
    again = later[1].source == "original" and not layer.uncast  # the backward pass takes what this one casts
    w = run.cast(w, ("w_f", -1), *([("w_d", 0)] if again else []))
    bias = None if bias is None else bias.to(dtypes[2])
    if x_q is None:
        rows = run.cast(as_matrix(x), ("x_f", -1))
        if traced:
            run.draw(OperandRequest("x_f", rows, -1), OperandRequest("w_f", w, -1))
        x_q = run.operand("x_f", rows, -1)
    elif watchers:
        run.show("x_f", as_matrix(x.to(dtype)), x_q)
    w_q = run.operand("w_f", w, -1)
    # 3. the product; a bias that follows its rounding rounds again, in an operator, where no compiler fuses the two
    follows = bias is not None and layer.config.bias_after_rounding
    y = run.product("fprop", x_q, w_q, None if follows else bias, dtype)
    if follows:
        y = finish(y, None, None, None, bias, dtype, traced)
    if x.dim() != 2 or y._is_view():  # a model may not write into a view
        y = torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], w.shape[0]))
    cast = w if again and not (w is source or traced) else None
    # 4. what the backward products need of both operands
    saved: list[Tensor | None] = []
    for operand, quantizer in zip((x_q, w_q), later, strict=True):
        original = quantizer.source == "original"
        saved += [None] * 3 if original else [operand.elements, operand.scale, operand.tensor_scale]
        saved.append(operand.slope)
    return y, x_q if shares else None, (*saved, cast)


def backward_pass(
    ctx: Any, g: Tensor, x: Tensor | None, w: Tensor | None, saved: tuple[Saved, Saved], *, traced: bool
) -> list[Tensor | None]:
    """Return the gradients of x, w and the bias: ``g w`` and ``g^T x`` of quantised operands, and the sum of g."""
    wgrad = ctx.layer.config.wgrad
    needs_x, needs_w = ctx.needs_input_grad[:2]
    rows = as_matrix(g)
    run = Pass(ctx.layer, ctx.watchers, rows, g.dtype, (*rows.shape, ctx.x_shape[-1]), backward=True, traced=traced)
    x = None if x is None else run.cast(as_matrix(x), ("x_w", 0))
    w = None if w is None else run.cast(w, ("w_d", 0))
    if run.counted:
        run.draw_gradients(rows, w, x, saved, (needs_x, needs_w))
    both = run.gradient_operands(rows) if needs_x and needs_w else None
    first = both[0] if both is not None else None
    if first is None and (needs_x or wgrad.a.source == "forward"):
        first = run.operand("g_d", rows, -1)
    dx = dw = dbias = None
    if needs_x:
        assert first is not None
        dx = run.gradient("dgrad", first, w, saved).reshape(ctx.x_shape)
    if needs_w:
        if both is not None:
            grad = both[1]
        elif first is not None and wgrad.a.source == "forward":
            grad = first.transposed()
        else:
            grad = run.operand("g_w", rows, 0)
        dw = run.gradient("wgrad", grad, x, saved[::-1])
    if ctx.needs_input_grad[2]:
        dbias = rows.sum(0, dtype=wide_dtype(g.dtype)).to(g.dtype)
    return [dx, dw, dbias]


def as_matrix(t: Tensor) -> Tensor:
    """Return a tensor as a matrix of its last dimension, which may be empty."""
    if t.dim() == 2:
        return t
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


class _SharedInput(NamedTuple):
    """The quantised input of the last layer, cached for the next layer until a backward pass begins.

    The projections of attention, or a gate beside its product, read one activation. The backward pass of each needs the
    same elements.
    """

    x: "weakref.ref[Tensor]"
    version: int
    stream: int
    dtype: torch.dtype
    quantizer: Quantizer
    folded: bool
    operand: Operand


_last: _SharedInput | None = None


def shared(x: Tensor, dtype: torch.dtype, layer: Layer) -> Operand | None:
    """Return the last layer's operand if its input, dtype and quantiser were the same, else None."""
    last = _last
    if last is None or last.x() is not x or last.version != x._version or last.dtype != dtype:
        return None
    same = last.quantizer is layer.quantizers["x_f"] and last.folded == ("x_f" in layer.folded)
    same = same and last.stream == _stream(x)  # another stream would not wait for the elements
    return last.operand if same else None


def share(x: Tensor, dtype: torch.dtype, layer: Layer, operand: Operand) -> None:
    """Keep a layer's quantised input for ``shared``."""
    global _last
    quantizer, folded = layer.quantizers["x_f"], "x_f" in layer.folded
    _last = _SharedInput(weakref.ref(x), x._version, _stream(x), dtype, quantizer, folded, operand)


def _stream(x: Tensor) -> int:
    """Return the stream on which kernels of a GPU that read a tensor are started."""
    return current_stream(x.get_device()) if x.is_cuda else 0


def forget() -> None:
    """Release the operand that ``share`` keeps."""
    global _last
    _last = None
