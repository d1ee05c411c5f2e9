# SPDX-License-Identifier: Apache-2.0
"""What a quantised linear layer is: a quantiser for each operand of each of its three products, and what multiplies."""

from __future__ import annotations  # help shows the names of types

from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import EllipsisType
from typing import Any, Final, Literal, NamedTuple, Never

import torch

from fmtsim.casts.arguments import refuse_others, spelled
from fmtsim.casts.profile import get_profile
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat, PackedFormat, ScaledFormat, scaled
from fmtsim.formats.element import ElementFormat, FloatFormat, IntFormat, LogFormat, Overflow
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import SCALINGS, ScalingName, block_text
from fmtsim.gemm.products.operand_scales import check_unit_scales, product_kind
from fmtsim.gemm.products.resolver import call_name, check_target, gemm_call, resolve
from fmtsim.gemm.targets.target import get_target
from fmtsim.gemm.units.unit import is_unit, machine_name, takes_logarithms
from fmtsim.rounding.modes import Rounding, RoundingName, get_rounding
from fmtsim.scaling.hadamard_matrix import base_of
from fmtsim.spec.call import OperandFormat, ScaleKind, scale_kind
from fmtsim.spec.datapath import Arithmetic
from fmtsim.spec.operand import last_cast
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.quantizer import Hadamard, Quantizer, Sparsity
from fmtsim.support.errors import ArgumentError, FormatError, shown
from fmtsim.support.records import check_types, lists_fields, located

INT8: Any = get_format("int8_full")
_HINT = "pass target=Datapath(...), a unit of your own, which takes the values, or leave target= out"


class Route(NamedTuple):
    """Say what a target multiplies for two quantised operands.

    Attributes:
        how: ``"elements"``: elements with their scales, as libraries take them, and tensors in high precision.
            ``"integers"``: elements, whose exact sums are scaled afterwards. ``"values"``: numbers in the tensors'
            dtype. ``"values_fp32"``: the same in float32, for a declared datapath.
        formats: Of the elements; None for tensors in high precision, whose dtype says it.
        kind: Of the scales that go with elements.
        multiplies: The rule of an operand's scales has a multiplier, which units do not take with the scales.
    """

    how: Literal["elements", "integers", "values", "values_fp32"]
    formats: tuple[OperandFormat | None, OperandFormat | None] = (None, None)
    kind: ScaleKind = "none"
    multiplies: bool = False


@lru_cache(maxsize=4096)
def find_route(
    a: Quantizer, b: Quantizer, transposed: tuple[bool, bool] = (False, False), *, dequantized: bool = False,
    declared: bool = False, logarithms: bool = False,
) -> Route:  # fmt: skip
    """Return what a target multiplies of two operands.

    Args:
        a, b: Their quantisers.
        transposed: Whether each is the transpose of its quantiser's result.
        dequantized: As in Gemm.
        declared: The target is a Datapath of the caller, which takes any values.
        logarithms: The target multiplies logarithms.

    Raises:
        FormatError: No unit multiplies elements or blocks of that kind, or not together.
    """
    last = last_cast(a), last_cast(b)
    high = [q.format is None for q in last]
    # 1. tensors in high precision, whose dtype says their format
    if all(high):
        return Route("elements")
    # 2. logarithms, which units of their own add
    elements = [element_format(q.format) for q in last]
    bare = all(q.scaling is None and element is q.format for q, element in zip(last, elements, strict=True))
    if logarithms and not dequantized and all(isinstance(element, LogFormat) for element in elements):
        kinds = [_kind(q, is_transposed) for q, is_transposed in zip((a, b), transposed, strict=True)]
        return Route("elements", (elements[0], elements[1]), product_kind(*kinds))  # type: ignore[arg-type]
    # 3. values: fake quantisation, or one operand in high precision
    if dequantized or (any(high) and not (declared and bare)):
        return Route("values")
    # 4. a declared datapath takes every number that float32 holds
    if declared and not all(isinstance(element, FloatFormat | IntFormat) for element in elements):
        return Route("values_fp32")
    kinds = [quantizer_scale_kind(q, is_transposed) for q, is_transposed in zip((a, b), transposed, strict=True)]
    kind = product_kind(*kinds)
    # 5. integers, whose exact sums are scaled afterwards, or elements with scales that the unit takes
    if all(isinstance(element, IntFormat) for element in elements):
        return Route("integers", (elements[0], elements[1]), kind)  # type: ignore[arg-type]
    if any(isinstance(element, IntFormat) for element in elements):
        names = " by ".join(q.format.name for q in last)  # type: ignore[union-attr]
        raise FormatError(f"no unit multiplies {names}: integers and floating point; {_HINT}")
    multiplies = any(q.scaling is not None and q.scaling.multiplier != 1 for q in last)
    return Route("elements", (elements[0], elements[1]), kind, multiplies)  # type: ignore[arg-type]


def quantizer_scale_kind(quantizer: Quantizer, transposed: bool = False) -> ScaleKind:
    """Return the kind of a quantiser's scales, or of the scales of the transposed matrix.

    Raises:
        FormatError: No unit multiplies its elements (codebooks, logarithms, zero points) or takes such scales.
    """
    fmt = last_cast(quantizer).format
    element = element_format(fmt)
    # integers that int8 holds, without zero points
    fits_int8 = (
        isinstance(element, IntFormat) and element.bits <= 8 and element.signed and element.eps == 1
        and not element.half_offset and not (isinstance(fmt, BlockFormat) and fmt.zero_point)
    )  # fmt: skip
    if fmt is not None and not isinstance(element, FloatFormat) and not fits_int8:
        raise FormatError(f"no unit multiplies {fmt.name}; {_HINT}")
    return _kind(quantizer, transposed)


def _kind(quantizer: Quantizer, transposed: bool) -> ScaleKind:
    last = last_cast(quantizer)
    fmt = last.format
    if fmt is None:
        return "none"
    element = element_format(fmt)
    scaling = last.scaling or (fmt.scaling if isinstance(fmt, BlockFormat) else None)
    if scaling is None:
        return "none"
    # the block of the operand as the product sees it, sums along its second size
    outer, inner = scaling.block[::-1] if transposed else scaling.block
    kind = scale_kind(outer, inner, "e8m0" if scaling.power_of_two else scaling.scale.name)
    if kind is None or (not isinstance(element, FloatFormat) and kind not in ("tensor", "row")):
        raise FormatError(
            f"no unit multiplies {element.name} in blocks of {(outer, inner)} with {scaling.scale.name} scales; units "  # type: ignore[union-attr]
            "and libraries take one scale a tensor or row, and for floating point E8M0 for 1x32 (MX), E4M3 for 1x16 or "
            f"16x16 (NVFP4) and float32 for 1x128 or 128x128; {_HINT}"
        )
    # scales of the tensor or of rows multiply sums; others, and elements of two formats, have no place behind a unit
    if isinstance(fmt, BlockFormat) and (fmt.alternative or fmt.scaling.level_block not in ((None, None), (1, None))):
        level = block_text(fmt.scaling.level_block)
        why = "blocks of two element formats" if fmt.alternative else f"float32 scales of {level} inside the sums"
        raise FormatError(
            f"no unit multiplies {fmt.name}, which has {why}; choose a format with one scale a tensor or row above "
            "those of blocks, such as nvfp4 or nvfp4_row, pass Gemm(dequantized=True), which multiplies values, or "
            "leave target= out"
        )
    return kind


def element_format(fmt: Format | None) -> ElementFormat | LogTileFormat | PackedFormat | None:
    """Return the format of the elements of a format."""
    return fmt.element if isinstance(fmt, BlockFormat) else fmt


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """Describe one matrix product: the quantisers of its two operands, in order, and the machine that multiplies.

    Args:
        a: Quantiser of the first operand.
        b: Quantiser of the second operand.
        out: Rounding of the product, bias included (but see LinearConfig.bias_after_rounding); without a format the
            dtype of the tensor it becomes.
        target: What multiplies: a GPU with its library, whose call this product is, a matrix unit alone or a datapath,
            as in ``fmtsim.mm``. Without one the product of the quantised values is float32 (float64 for float64
            tensors), scales multiplied in, in no particular order; on a GPU its bfloat16 units multiply where bfloat16
            holds both operands.
        plan: Order of sums instead of the target's, or of the unit's single chain.
        accumulate: Format in which the unit sums, where it has several.
        fast_accum: use_fast_accum of a target's FP8 products; nothing else looks at it.
        dequantized: A machine multiplies the values of both operands, rounded to the tensors' dtype, as code does that
            quantises and dequantises (fake quantisation). Where one operand is in high precision the other is
            multiplied in the tensors' dtype in any case: its elements, whose sums are scaled afterwards, or its values
            where scales lie between products.
        native: Whether a target runs natively: None lets the GPU do it itself where the tensors are on the
            GPU that the target describes, True insists on that, False emulates.

    Attributes:
        library: The target, if it is a GPU with its library; else None.

    Raises:
        ArgumentError: A target that does not take the operands; a plan without a target.
        FormatError: Formats that no unit multiplies (together).
    """

    a: Quantizer = Quantizer()
    b: Quantizer = Quantizer()
    out: Quantizer = Quantizer()
    target: Any = None
    plan: GemmPlan | None = None
    accumulate: str | None = None
    fast_accum: bool = False
    dequantized: bool = False
    native: bool | None = None
    library: Any = field(init=False, compare=False, repr=False, default=None)

    def __post_init__(self) -> None:
        for name in ("a", "b", "out"):
            if not isinstance(getattr(self, name), Quantizer):
                raise ArgumentError(
                    f"Gemm {name}={shown(getattr(self, name))} is not a Quantizer; pass Quantizer(format=...)"
                )
        check_types(self)
        for quantizer in (self.a, self.b, self.out):  # a library that has no such cast
            if quantizer.like and quantizer.format is not None:
                profile, fmt = get_profile(quantizer.like, quantizer.format)
                if self.target is not None and profile.block is not None:
                    raise ArgumentError(
                        f"Gemm target={shown(self.target)}: values of {fmt.name} like {profile.like} have scales of "
                        "their own, which no unit takes; leave target= out"
                    )
        if self.target is not None:
            target = check_target("Gemm", self.target, self.plan, self.accumulate)
            object.__setattr__(self, "target", target)
            object.__setattr__(self, "library", None if is_unit(target) else target)
        if self.native and self.library is None:
            raise ArgumentError("Gemm native=True runs products on the GPU that target= names; pass target= as well")
        # here, not in the middle of a step; LinearConfig checks operands that come from the forward pass
        if self.emulated and "forward" not in (self.a.source, self.b.source):  # LinearConfig checks those
            self.check_route(self.route(self.a, self.b))  # here, not in the middle of a step
        if not self.emulated and (self.plan is not None or self.accumulate is not None):
            raise ArgumentError("Gemm plan= and accumulate= belong to a target; pass target= as well")

    def route(self, a: Quantizer, b: Quantizer, transposed: tuple[bool, bool] = (False, False)) -> Route:
        """Return what the target multiplies of two operands; arguments and errors are those of ``find_route``."""
        return find_route(
            a, b, transposed, dequantized=self.dequantized, declared=isinstance(self.target, Arithmetic),
            logarithms=self.library is None and takes_logarithms(self.target),
        )  # fmt: skip

    def check_route(self, route: Route) -> None:
        """Raise ArgumentError or FormatError where the target does not multiply a route's operands."""
        # values have the format of their dtype, which the call will be asked with
        a, b = (INT8, INT8) if route.how == "integers" else route.formats
        if a is None or b is None:
            return
        if self.library is not None:
            # a library: does its target list the pair of formats, sums and scales?
            sums = self.accumulate or ("int32" if route.how == "integers" else "fp64" if a.name == "fp64" else "fp32")
            names = call_name(a), call_name(b)
            get_target(self.library).takes(*names, sums, route.kind if route.how == "elements" else "none")
            return
        # a unit or datapath: resolve a call without sizes, which raises where there is no such mode
        spec = resolve(gemm_call(
            "mm", (a, b), (0, 0, 0), torch.float32, target=self.target, accumulate=self.accumulate, scaling=route.kind
        ))  # fmt: skip
        if route.how == "elements":
            check_unit_scales(spec.datapath, route.kind)

    @property
    def emulated(self) -> bool:
        """Whether a machine multiplies, instead of float32 in no particular order."""
        return self.target is not None

    @property
    def machine_name(self) -> str:
        """Name of the target, empty without one."""
        return "" if self.target is None else machine_name(self.target)

    @property
    def machine(self) -> str:
        """What multiplies and rounds, in a few words; empty where that is float32 in no particular order."""
        out = "" if self.out.format is None else f"rounded to {self.out}"
        if not self.emulated:
            return out
        sums = f"sums in {self.accumulate}" if self.accumulate else ""
        fast = "fast accumulation" if self.fast_accum and self.library is not None else ""
        return ", ".join(filter(None, (f"on {self.machine_name}", sums, fast, "own plan" if self.plan else "", out)))


FORMULAS: Final = {"fprop": "y = x w^T", "dgrad": "dx = g w", "wgrad": "dw = g^T x"}
PRODUCTS: Final = tuple(FORMULAS)
_NO_MACHINE = dict.fromkeys(("target", "plan", "accumulate", "native"))


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig:
    """Describe a linear layer ``y = x w^T`` with x [T, K], w [N, K] and the incoming gradient g [T, N].

    Args:
        fprop: ``y = x w^T``: a is x, b is w, blocks along K.
        dgrad: ``dx = g w``: a is g, b is w, blocks along N.
        wgrad: ``dw = g^T x``: a is g, b is x, blocks along T.
        casts_weight: Under autocast, cast w before it is quantised, as torch casts it for its own layers; False
            quantises it in its own dtype (Transformer Engine, torchao's Float8Linear). One that no quantiser changes is
            cast in any case.
        bias_after_rounding: Add the bias to the product that was rounded to the dtype of y, which rounds again
            (torchao's Float8Linear and MXFP8Linear, DeepSeek-V3's ``linear``); False rounds their sum once.

    Operands are quantised from the high-precision original unless their quantisers say otherwise.
    """

    fprop: Gemm = Gemm()
    dgrad: Gemm = Gemm()
    wgrad: Gemm = Gemm()
    casts_weight: bool = True
    bias_after_rounding: bool = False

    def __post_init__(self) -> None:
        for name in PRODUCTS:
            if not isinstance(getattr(self, name), Gemm):
                raise ArgumentError(
                    f"LinearConfig {name}={shown(getattr(self, name))} is not a Gemm; pass Gemm(a=..., b=...)"
                )
        for name in ("casts_weight", "bias_after_rounding"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(
                    f"LinearConfig {name}={shown(getattr(self, name))} is not a bool; pass True or False"
                )
        for name in ("dgrad", "wgrad"):
            gemm = getattr(self, name)
            if gemm.emulated and "forward" in (gemm.a.source, gemm.b.source):
                route = self.route(name)
                with located(name):
                    gemm.check_route(route)

    @property
    def operands(self) -> dict[str, Quantizer]:
        """The six quantisers under the names that statistics use: tensor, then f, d or w for its product."""
        return {
            "x_f": self.fprop.a,
            "w_f": self.fprop.b,
            "g_d": self.dgrad.a,
            "w_d": self.dgrad.b,
            "g_w": self.wgrad.a,
            "x_w": self.wgrad.b,
        }

    def route(self, name: str) -> Route:
        """Return what the target of a product multiplies.

        Raises:
            FormatError: No unit multiplies its operands.
        """
        gemm, forward = getattr(self, name), {"dgrad": self.fprop.b, "wgrad": self.fprop.a}
        # an operand of source "forward" is the transpose of the one that the forward pass quantised
        transposed = gemm.a.source == "forward", gemm.b.source == "forward"
        # of the gradient only wgrad has such a one: that of dgrad
        a = self.dgrad.a if transposed[0] else gemm.a
        b = forward[name] if transposed[1] else gemm.b
        with located(name):
            return gemm.route(a, b, transposed)  # type: ignore[no-any-return]

    def on(self, **machine: Any) -> LinearConfig:
        """Return the same layer on another machine, or on none.

        Args:
            machine: ``target``, ``plan``, ``accumulate`` and ``native`` of Gemm; what is left out is None.

        Raises:
            ArgumentError, FormatError: The machine does not multiply a product's operands; the message names it.
        """
        products = {}
        for name in PRODUCTS:
            with located(name):
                products[name] = replace(getattr(self, name), **{**_NO_MACHINE, **machine})
        return replace(self, **products)

    @property
    def machines(self) -> tuple[str, ...]:
        """Names of what multiplies in the products that are emulated."""
        gemms = [getattr(self, product) for product in PRODUCTS]
        return tuple(dict.fromkeys(gemm.machine_name for gemm in gemms if gemm.emulated))

    def __str__(self) -> str:
        shown: dict[str, str] = {}
        # another rounding of activations or weights does not reach all operands: those that it leaves out say so
        other = any(q.rounding.mode != "nearest_even" for name, q in self.operands.items() if name[0] != "g")
        for tensor in "xwg":  # the two uses of a tensor under one name where they agree
            uses = {name: q.text(" nearest_even" * other) for name, q in self.operands.items() if name[0] == tensor}
            shown |= uses if len(set(uses.values())) > 1 else {tensor: next(iter(uses.values()))}
        # machines likewise: one text where all three products agree
        machines = {name: getattr(self, name).machine for name in PRODUCTS}
        texts = {name: f"{name} {text}" for name, text in machines.items() if text}
        if len(set(machines.values())) == 1:
            texts = {name: text for name, text in machines.items() if text and name == "fprop"}
        return ", ".join([*(f"{name} {text}" for name, text in shown.items()), *texts.values()])


OPERANDS = tuple(LinearConfig().operands)


def operand_product(operand: str) -> str:
    """Return the product that an operand enters: ``"fprop"`` for ``"x_f"``."""
    return next(name for name in PRODUCTS if name[0] == operand[2])


def size_fault(config: LinearConfig, tokens: int | None, outputs: int, inputs: int) -> str | None:
    """Return what does not fit a layer ``[outputs, inputs]`` with so many rows of x, or None where all does.

    Args:
        config: The layer.
        tokens: Rows of x; None looks at what does not depend on them alone.
        outputs: Rows of w.
        inputs: Columns of w.
    """
    # the axis that each product sums over, by the last letter of its operands, and the other axis of each
    inner = {"f": inputs, "d": outputs, "w": tokens}
    outer = {"x_f": tokens, "w_f": outputs, "g_d": tokens, "w_d": inputs, "g_w": outputs, "x_w": inputs}
    for name, quantizer in config.operands.items():
        fault = _fault(quantizer, inner[name[2]], outer[name])
        if fault is not None:
            return f"{operand_product(name)} {name}: {fault}"
    return None


def _fault(quantizer: Quantizer, inner: int | None, outer: int | None) -> str | None:
    """Return what does not fit an operand of so many columns and rows, None for sizes that are not known."""
    for transform in quantizer.transforms:
        if isinstance(transform, Sparsity):
            # 2:4 sparsity cuts the inner axis into groups of 4, tiles both
            uneven = [n for n in (inner, outer if transform.tiles else None) if n is not None and n % 4]
            if uneven:
                return f"2:4 sparsity needs groups of 4, which do not divide {uneven[0]}"
        # a rotation cuts its axis into groups of one size, or takes the whole axis if a matrix of that order exists
        length = inner if not isinstance(transform, Hadamard) or transform.axis == "inner" else outer
        if not isinstance(transform, Hadamard) or length is None:
            continue
        if transform.size is not None and length % transform.size:
            return f"Hadamard size={transform.size} does not divide {length}"
        if transform.size is None and length:  # an empty axis has nothing to rotate
            try:
                base_of(length)
            except ArgumentError as error:
                return f"a Hadamard matrix of the whole axis does not fit: {error}"
    # EDEN's correction has one factor for each group of the inner axis
    group = None if quantizer.scaling is None else quantizer.scaling.eden
    if group is not None and inner is not None and inner % group:
        return f"Scaling eden={group} does not divide {inner}"
    return None


def usual_scaling(fmt: Format) -> ScalingName | None:
    """Return ``"tensor"`` for element formats of 8 bits and fewer, ``"none"`` for wider, None for those with blocks."""
    if isinstance(fmt, ScaledFormat):
        return None
    return "tensor" if fmt.bits <= 8 else "none"


@spelled
def linear_config(
    x: str | Format | Quantizer | None,
    *more: Never,
    w: str | Format | Quantizer | EllipsisType | None = ...,
    g: str | Format | Quantizer | EllipsisType | None = ...,
    scaling: ScalingName | None = "none",
    rounding: RoundingName | Rounding = "nearest_even",
    grad_rounding: RoundingName | Rounding = "nearest_even",
    overflow: Overflow | None = None,
    target: Any = None,
    fast_accum: bool = False,
    native: bool | None = None,
    **others: Never,
) -> LinearConfig:
    """Build the common case: one format each for activations, weights and gradients, in every product they enter.

    ``rounding`` does not reach gradients, which ``grad_rounding`` rounds, nor operands that are Quantizers: those say
    all about themselves.

    Args:
        x: Format of the activations (x_f, x_w), a name, a record or a Quantizer; None leaves them in high precision.
        w: Format of the weights (w_f, w_d); x's where it is left out.
        g: Format of the incoming gradients (g_d, g_w); x's where it is left out.
        scaling: What shares a scale in element formats: ``"none"``, ``"tensor"``, ``"channel"`` (a row of the operand),
            ``"block32"``, ``"tile128"`` (1x128, weights 128x128) or ``"mx"`` (blocks of 32, powers of two). None is
            ``"tensor"`` for those of 8 bits and fewer, which lose most numbers without, and ``"none"`` for wider ones.
        rounding: Rounding of activations and weights.
        grad_rounding: Rounding of gradients, often ``"stochastic"``.
        overflow: Overflow rule of all operands; None means each format's own.
        target: What multiplies, as in ``Gemm``.
        fast_accum: use_fast_accum of the forward product on a GPU with its library; gradients promote their sums, as
            trainers do.
        native: Whether a target runs natively, as in ``Gemm``.

    Raises:
        FormatError: a format, rounding or overflow rule is unknown, or a scaling is given beside blocks of a format.
        ArgumentError: the machine or the scaling is unknown.

    >>> print(linear_config(x="e4m3", w="e4m3", g="e5m2", grad_rounding="stochastic").wgrad.a)
    e5m2 stochastic
    """
    refuse_others(linear_config, more, others)
    forward, backward = get_rounding(rounding), get_rounding(grad_rounding)
    if scaling is not None and (not isinstance(scaling, str) or scaling not in SCALINGS):
        raise ArgumentError(f"scaling={shown(scaling)} is unknown; choose one of {', '.join(SCALINGS)}")
    w, g = (x if name is ... else name for name in (w, g))
    xs, ws, gs = (
        fmt if isinstance(fmt, Quantizer)
        else Quantizer(_format(fmt, scaling, weight=fmt_of == "w"), rounding=mode, overflow=overflow)
        for fmt_of, fmt, mode in (("x", x, forward), ("w", w, forward), ("g", g, backward))
    )  # fmt: skip
    # the common case: one quantiser for each tensor in both of its products
    machine: dict[str, Any] = {"target": target, "native": native}
    fprop, dgrad, wgrad = (Gemm(a=a, b=b, **machine) for a, b in ((xs, ws), (gs, ws), (gs, xs)))
    return LinearConfig(fprop=replace(fprop, fast_accum=fast_accum), dgrad=dgrad, wgrad=wgrad)


def _format(name: str | Format | None, scaling: ScalingName | None, *, weight: bool = False) -> Format | None:
    if name is None:
        return None
    fmt = get_format(name)
    if scaling == "none":
        return fmt
    if isinstance(fmt, ScaledFormat):
        if scaling is not None:
            raise FormatError(
                f"scaling={scaling!r} does not go with {fmt.name}, which has blocks of its own; "
                "leave it out, or name an element format"
            )
        return fmt
    scaling = scaling or usual_scaling(fmt) or "none"
    blocks = SCALINGS[scaling]
    if blocks is None:
        return fmt
    # tile128 has other blocks for weights than for data
    of_data, of_weight, rule = blocks
    return scaled(fmt, of_weight if weight else of_data, rule)
