# SPDX-License-Identifier: Apache-2.0
"""Explain the products of a converted layer: it runs on fake tensors while the calls to its target are collected.

Each product runs alone on the machine, so that what is asked meanwhile belongs to it.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fmtsim.casts.arguments import check_dense
from fmtsim.formats.interop import dtype_name
from fmtsim.gemm.layers.config import FORMULAS, OPERANDS, PRODUCTS, LinearConfig, operand_product
from fmtsim.gemm.layers.multiply import unit_dtype
from fmtsim.gemm.products.explanation import MmExplanation, explained, factors, runs
from fmtsim.gemm.products.operands import own_dtype
from fmtsim.gemm.products.resolver import recorded_calls
from fmtsim.nn.conversion import PRODUCTS as RAW
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.operations import COUNTS, OperatorMode
from fmtsim.spec.call import GemmCall
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, DtypeError, FmtsimError, shown

_NO_UNIT = "none: float32 in no particular order; convert with target= for a machine"
_GEMM = "fmtsim::gemm"
_FOLLOWS = ("fmtsim::finish", "fmtsim::unrotate")  # operators that finish a target's product
MOST_ROWS = 1 << 26  # torch counts the bytes of attention scores, which are not made here, in 64 bits
Inputs = int | Tensor | Sequence[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LayerExplanation:
    """Explain the three products of a converted layer; ``str()`` gives a text, a notebook shows tables.

    Args:
        name: Of the layer and its type.
        parts: For each product with a weight (attention has several) the three products by name. The one of other
            layers has the name ``""``.
    """

    name: str
    parts: dict[str, dict[str, MmExplanation]]

    @property
    def fprop(self) -> MmExplanation:
        """``y = x w^T``."""
        return self._only("fprop")

    @property
    def dgrad(self) -> MmExplanation:
        """``dx = g w``."""
        return self._only("dgrad")

    @property
    def wgrad(self) -> MmExplanation:
        """``dw = g^T x``."""
        return self._only("wgrad")

    def __getitem__(self, part: str) -> "LayerExplanation":
        """Return one part of a layer with several."""
        if part not in self.parts:
            raise ArgumentError(f"{self.name} has no part {shown(part)}; choose one of {', '.join(self.parts)}")
        return LayerExplanation(name=f"{self.name}, {part}", parts={"": self.parts[part]})

    def _only(self, product: str) -> MmExplanation:
        if len(self.parts) > 1:
            choices = " or ".join(f"[{part!r}]" for part in self.parts)
            raise ArgumentError(f"{self.name} has several products with weights; write {choices} before .{product}")
        return next(iter(self.parts.values()))[product]

    def _products(self) -> list[tuple[str, MmExplanation]]:
        return [
            (f"{part} {product}".lstrip() + f"  {FORMULAS[product]}", explanation)
            for part, products in self.parts.items()
            for product, explanation in products.items()
        ]

    def __str__(self) -> str:
        lines = [self.name]
        for heading, explanation in self._products():
            lines += [heading, *(f"  {line}" for line in str(explanation).splitlines())]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        tables = (f"<h4>{escape(heading)}</h4>{explanation._repr_html_()}" for heading, explanation in self._products())
        return f"<h3>{escape(self.name)}</h3>{''.join(tables)}"


@dataclass(slots=True)
class _Part:
    """The sizes of a product with a weight: rows of x, of w, and columns of both; and how often it is asked for."""

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    times: int = 0

    def sizes(self, product: str) -> tuple[int, int, int]:
        """Return M, N and K of a product."""
        t, n, k = self.rows, self.outputs, self.inputs
        return {"fprop": (t, n, k), "dgrad": (t, k, n), "wgrad": (n, k, t)}[product]  # y = x w^T, dx = g w, dw = g^T x


def explain_layer(module: Any, x: Inputs) -> LayerExplanation:
    """Explain the three products of a converted layer; nothing is multiplied, and nothing changes.

    Args:
        module: A module that ``fmtsim.convert`` changed, with products of its own.
        x: Its input, or its inputs, of which shapes, strides and dtypes count; or the number of rows that its products
            have: tokens of a linear layer, positions of a convolution (those of one image each; of the input of a
            transposed one), tokens of one sequence that attends to itself, as which a single input of attention is
            taken, too.

    Raises:
        ArgumentError: No such module, or no such input; or its machine does not take the product.
        DtypeError, FormatError: Its machine does not take the product.
    """
    explanations: dict[str, dict[str, MmExplanation]] = {}
    for part, product, explanation in layer_products(module, x):
        if isinstance(explanation, FmtsimError):
            raise explanation
        explanations.setdefault(part, {})[product] = explanation
    return LayerExplanation(
        name=f"{module.emulation.name or '(model)'} ({module.original_class.__name__})", parts=explanations
    )


def layer_products(module: Any, x: Inputs) -> Iterator[tuple[str, str, MmExplanation | FmtsimError]]:
    """Yield part, product and explanation of a converted layer's products, or the error that each would end in.

    Arguments are those of ``explain_layer``.

    Raises:
        ArgumentError: No such module, or no such input.
    """
    if not isinstance(module, EmulatedModule) or module.emulation is None:
        raise ArgumentError(
            f"{type(module).__name__} is not a converted layer; convert the model, and pass one of its layers "
            "(fmtsim.report(model) lists them)"
        )
    run = _Run(module, x)  # raises ArgumentError for what is no input
    try:
        parts = run.parts()
    except FmtsimError as error:  # sizes that do not fit
        yield from (("", product, error) for product in PRODUCTS)
        return
    for part, product in itertools.product(parts, PRODUCTS):
        try:
            yield part, product, run.explain(part, parts[part], product)
        except FmtsimError as error:
            yield part, product, error


def model_products(model: nn.Module, rows: int) -> Iterator[tuple[str, str, MmExplanation | str]]:
    """Yield layer (and part), product and explanation of a model's converted layers, or why a product is refused.

    Args:
        model: Any module.
        rows: Number of rows of each layer's products. Layers that are alike are run once.
    """
    by_shape: dict[Any, list[tuple[str, str, MmExplanation | str]]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, EmulatedModule) or module.emulation is None:
            continue
        sizes = tuple((n, p.shape, p.stride(), p.dtype, p.device) for n, p in module.named_parameters())
        like = type(module), module.original_class.extra_repr(module), module.emulation.config, sizes
        if like not in by_shape:
            prefix = f"layer {module.emulation.name!r}: "
            by_shape[like] = [
                (
                    part,
                    product,
                    str(explanation).removeprefix(prefix) if isinstance(explanation, FmtsimError) else explanation,
                )
                for part, product, explanation in layer_products(module, rows)
            ]
        layer = name.replace(f"{RAW}.", "") or "(model)"
        for part, product, explanation in by_shape[like]:
            yield ", ".join(filter(None, (layer, part))), product, explanation


class _Run:
    """Run a layer without numbers: a stand-in for it, with fake tensors on the layer's device."""

    def __init__(self, module: EmulatedModule, x: Inputs) -> None:
        self._module, self._counted = module, type(x) is int
        parameter = next(module.parameters())
        self._device = parameter.device if parameter.device.type == "cuda" else torch.device("cpu")
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)  # shapes, strides and dtypes without numbers
        self._like = _inputs(module, x, parameter.dtype)

    def parts(self) -> dict[str, _Part]:
        """Return the parts of the layer that an input reaches, in their order."""
        stand_in = self._stand_in(lambda part, config: config.on())  # no target, because a target may refuse the sizes
        multiply, by_part = stand_in.gemm, dict[str, _Part]()

        def noted(x: Tensor, w: Tensor, bias: Tensor | None, part: str = "") -> Tensor:
            y = multiply(x, w, bias, part)
            entry = by_part.setdefault(part, _Part(x.numel() // max(x.shape[-1], 1), w.shape[0], w.shape[1], y.dtype))
            entry.times += 1
            return y

        stand_in.__dict__["gemm"] = noted  # found before the method of the class
        self._pass(stand_in, backward=False)  # noted sees each product with a weight
        return by_part

    def explain(self, part: str, sizes: _Part, product: str) -> MmExplanation:
        """Explain one product of a part."""
        how = self._module.emulation
        assert how is not None
        gemm = getattr(how.config, product)
        a, b = (name[0] for name in OPERANDS if operand_product(name) == product)
        rows = [("operands", f"{a} {gemm.a}; {b} {gemm.b}")]
        rows += [("groups", f"{sizes.times}, a product each")] if sizes.times > 1 else []
        if not gemm.emulated:
            asked = f"{factors(*sizes.sizes(product), a, b)} -> {dtype_name(sizes.dtype)}"
            rows = [("call", asked), *rows, ("unit", _NO_UNIT), ("order", "no particular one")]
            return MmExplanation(call=None, machine="", unit=None, plan=None, basis="none", rows=tuple(rows))

        def alone(other: str, config: LinearConfig) -> LinearConfig:
            bare = config.on()  # other products run without the machine
            return replace(bare, **{product: replace(gemm, native=False)}) if other == part else bare

        stand_in = self._stand_in(alone)  # only this product asks the target
        with recorded_calls() as calls, _Steps(how.config.bias_after_rounding) as steps:
            self._pass(stand_in, backward=product != "fprop")
        if not calls:
            raise ArgumentError(
                f"nothing is multiplied for M, N, K = {sizes.sizes(product)}; pass inputs with rows, or their number"
            )
        # products of what a clamp cut off an operand come before the product itself
        m, n, k = sizes.sizes(product)
        # a call of a unit alone has no sizes, on which its order does not depend
        sized = [(call if call.m else replace(call, m=m, n=n, k=k), spec) for call, spec in calls.items()]
        *before, (call, spec) = sized
        explanation = explained(call, spec)
        if (call.m, call.n, call.k) != (m, n, k):
            rows.append(("padded", f"with zeros, from {factors(m, n, k, a, b)}"))
        for rest in (explained(*asked_before) for asked_before in before):
            unit, text = rest.unit or "own datapath", f"what was clamped off {a}, times {b}: {rest.rows[0][1]}"
            rows.append(("first", f"{text}; {unit}, {rest.order}"))
        last = steps.words(a, b, call, gemm.out.format and gemm.out, sizes.dtype)  # what follows the sum
        rows += [("then", last)] if last else []
        if call.target is not None and (gemm.native is not None or self._device.type == "cuda"):
            dtypes = own_dtype(spec.a) or torch.float32, own_dtype(spec.b) or torch.float32
            rows.append(("runs", runs(call, dtypes, self._device, gemm.native, converted=True)))
        return replace(explanation, rows=(explanation.rows[0], *rows[:1], *explanation.rows[1:], *rows[1:]))

    def _stand_in(self, change: Callable[[str, LinearConfig], LinearConfig]) -> EmulatedModule:
        """Return the layer with fake tensors, other configs, and no observer; its hooks are not called."""
        assert self._module.emulation is not None
        stand_in = self._copied(self._module)
        stand_in.emulation = self._module.emulation.changed(change)
        if self._counted:
            # Of a convolution: its positions are counted without the padding.
            stand_in.__dict__["_padded"] = lambda x: x
        return stand_in

    def _copied(self, module: Any) -> Any:
        copied = object.__new__(type(module))  # no __init__, which would make Parameters
        copied.__dict__.update(module.__dict__)
        copied._parameters = {
            n: None if t is None else nn.Parameter(self._fake(t)) for n, t in module._parameters.items()
        }
        copied._buffers = {n: None if t is None else self._fake(t) for n, t in module._buffers.items()}
        copied._modules = {n: None if m is None else self._copied(m) for n, m in module._modules.items()}
        return copied

    def _fake(self, t: Tensor) -> Tensor:
        with self._mode:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=self._device)

    def _pass(self, stand_in: EmulatedModule, *, backward: bool) -> None:
        """Call the layer, and go back from gradients laid out as its output."""
        whole = {id(t): self._fake(t).requires_grad_() for t in self._like}  # attention may get one tensor thrice
        inputs = [whole[id(t)] for t in self._like]
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.set_multithreading_enabled(False),
            self._mode,
        ):
            y = type(stand_in).forward(stand_in, *inputs)  # the class's forward, without hooks or wrappers
            if backward:
                y = y if isinstance(y, Tensor) else y[0]  # attention also returns weights, an LSTM its states
                y.backward(torch.empty_like(y))


def _inputs(module: EmulatedModule, x: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """Return tensors like the inputs of a layer; those that are one tensor stay one."""
    shapes = module.input_shapes(x if type(x) is int and 0 < x <= MOST_ROWS else 1)
    if type(x) is int and 0 < x <= MOST_ROWS:
        like = {shape: torch.empty(shape, dtype=dtype, device="meta") for shape in shapes}  # equal shapes are one input
        return [like[shape] for shape in shapes]
    inputs = [x] * len(shapes) if isinstance(x, Tensor) else list(x) if isinstance(x, list | tuple) else []
    if len(inputs) != len(shapes) or not all(isinstance(t, Tensor) for t in inputs):
        several = "tensor" if len(shapes) == 1 else f"{len(shapes)} tensors"
        raise ArgumentError(
            f"x={shown(x)} is not an input of a layer; pass the {several} it is called with, or the number of rows of "
            f"its products, from 1 to {MOST_ROWS}"
        )
    for t in inputs:
        check_dense("x", t)
        if not t.dtype.is_floating_point or t.is_quantized:
            raise DtypeError(f"x has dtype {t.dtype}; pass what the layer takes, for example a {dtype} tensor")
    return inputs


class _Steps(OperatorMode):
    """Record the operators that finish a target's product: scales, bias, rotation."""

    def __init__(self, bias_follows: bool) -> None:
        super().__init__()
        self._last, self._done, self._bias_follows = "", dict[str, tuple[Any, ...]](), bias_follows

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Note scales, biases and rotations of the machine's last product."""
        name = func._schema.name
        if name in (_GEMM, "fmtsim::multiply_groups") or func.overloadpacket in COUNTS:
            self._last = name  # a finish or unrotate that follows belongs to it
        elif name in _FOLLOWS and self._last == _GEMM:
            adds_bias = self._bias_follows and name == "fmtsim::finish" and args[4] is not None
            self._done["bias" if adds_bias else name] = args
        return func(*args, **kwargs)

    def words(self, a: str, b: str, call: GemmCall, out: Quantizer | None, dtype: torch.dtype) -> str:
        """Return what is done to a product before it is a layer's result, empty where nothing is."""
        finished = self._done.get("fmtsim::finish")
        _, columns, rows, rest, bias, out_dtype = finished or (None, None, None, None, None, call.out)
        steps = [f"times the scales of {name}" for name, scale in ((b, columns), (a, rows)) if scale is not None]
        steps += ["plus the first"] * (rest is not None) + ["plus the bias"] * (bias is not None)
        steps = [f"{', '.join(steps)}, one rounding each"] if steps else []
        if out is not None and unit_dtype(out) != out_dtype:
            steps.append(f"rounded to {out}")
        if (undone := self._done.get("fmtsim::unrotate")) is not None:
            steps.append("the rotation undone" if undone[3] is None else "times the slope of the rounding")
        steps += [f"to {dtype_name(dtype)}"] if steps or out_dtype != dtype else []
        return "; ".join([*steps, *["plus the bias, rounded again"] * ("bias" in self._done)])
