# SPDX-License-Identifier: Apache-2.0
"""The torch operators that a compiler sees of ``quantize_operand``, and how inductor lowers them.

An operator is opaque: a compiler fuses nothing into steps whose roundings matter. Its result's dtypes and shapes
follow from records (``layout_of``). A graph names a quantiser by the digest of its text and a layer by its name. On a
GPU some quantisers are inlined instead, in steps that no compiler can change (``fmtsim.scaling.inlined``).
"""

import hashlib
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from fmtsim.casts.lanes import Key, define_operator, key_tensor, random_key, with_keys
from fmtsim.formats.block import BlockFormat
from fmtsim.gemm.layers.keys import SEEDED, Layer, find_layer
from fmtsim.gemm.layers.quantize_operand import (
    NO_KEYS,
    Memory,
    elements_dtype,
    is_on_gpu,
    keeps_scales,
    quantize_both,
    quantize_operand,
)
from fmtsim.scaling.blocks import block_sizes
from fmtsim.scaling.inlined import covers, inlined
from fmtsim.spec.operand import Keys, Operand, block_of, folds, last_cast
from fmtsim.spec.quantizer import Clamp, Differentiable, Quantizer, StraightThrough
from fmtsim.support.replay.hooks import refuse
from fmtsim.support.replay.programs import repeated

Steps = Callable[..., list[Tensor] | Tensor]
Facts = tuple[tuple[tuple[int, ...], torch.dtype, torch.device] | None, ...]  # of tensors; None where there is none
# By operator: the steps that inductor compiles instead, and the functions that its code calls instead.
_lowered: dict[Any, Any] = {}
_called: dict[Any, str] = {}


def lower(operator: Any, steps: Callable[..., Steps]) -> None:
    """Register the steps that replace an operator in inductor; ``announce`` installs them.

    Args:
        operator: An overload. Its tensors come first.
        steps: Given the arguments behind the tensors, returns a function of the tensors, in operations of torch.
    """
    _lowered[operator] = steps


def call_directly(operator: Any, function: Callable[..., Any]) -> None:
    """Let inductor's code call a function instead of an operator, without dispatch to modes, keys or transforms.

    Args:
        operator: An overload.
        function: Computes the operator; its GPU work is recorded and replayed.
    """
    name = "call_" + operator.name().partition("::")[2].replace(".", "_")
    setattr(torch.ops.fmtsim, name, repeated(function))
    _called[operator] = f"torch.ops.fmtsim.{name}"


def has_known_sizes(t: Tensor) -> bool:
    """Return True if a compiler knows the sizes of a tensor, which steps are made for."""
    return all(isinstance(size, int) for size in t.shape)


def announce() -> None:
    """Install lowerings and calls of the registered operators in inductor, if it is loaded."""
    # fake operators call this: a process that compiles nothing never imports inductor
    inductor = sys.modules.get("torch._inductor.lowering")
    if inductor is None or not hasattr(inductor, "lowerings"):
        return
    for operator, steps in _lowered.items():
        if operator not in inductor.lowerings:
            inductor.register_lowering(operator, type_promotion_kind=None)(partial(_lower, steps))
    for operator, name in _called.items():
        if operator not in inductor.lowerings:
            inductor.make_fallback(operator, inductor.constrain_to_fx_strides, warn=False)
            inductor.lowerings[operator] = partial(_call, inductor.lowerings[operator], operator, name)


def _call(lowering: Callable[..., Any], operator: Any, name: str, *arguments: Any) -> Any:
    """Lower an operator as inductor does, and name the function that its code calls instead."""
    from torch._inductor.virtualized import V

    # the lowering appends one node; only its Python name changes
    before = len(V.graph.operations)
    result = lowering(*arguments)
    operations: list[Any] = V.graph.operations[before:]
    for node in operations:
        if getattr(node, "op_overload", None) is operator and not V.graph.cpp_wrapper:
            node.python_kernel_name = name
    return result


def _lower(steps: Callable[..., Steps], *arguments: Any) -> Any:
    """Lower the steps of an operator."""
    # tensors come first, then the arguments that the steps are made for
    count = next((i for i, x in enumerate(arguments) if x is not None and not _is_box(x)), len(arguments))
    boxes, rest = arguments[:count], arguments[count:]
    for box in boxes:
        if box is not None and box.get_read_names():
            box.realize()  # several steps read it; constants are part of each
    # the graph of steps is cached by shapes, dtypes and devices: tensors have no values here
    facts = tuple(None if x is None else (tuple(map(int, x.get_size())), x.get_dtype(), x.get_device()) for x in boxes)
    return _Inductor(_trace_steps(steps, facts, rest)).run(*(x for x in boxes if x is not None))


def _is_box(x: Any) -> bool:
    return hasattr(x, "get_size")


@lru_cache(maxsize=4096)
def _trace_steps(steps: Callable[..., Steps], facts: Facts, rest: tuple[Any, ...]) -> fx.GraphModule:
    """Return the steps for tensors of some shapes, dtypes and devices, in operations that inductor has lowerings of."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    run = steps(*rest)

    def call(*tensors: Tensor) -> Any:
        # an absent tensor is None in the steps, and no input of the graph
        remaining = iter(tensors)
        return run(*(None if fact is None else next(remaining) for fact in facts))

    with torch.no_grad(), FakeTensorMode():
        empty = [torch.empty(f[0], dtype=f[1], device=f[2]) for f in facts if f is not None]
        graph = make_fx(call, decomposition_table=select_decomp_table())(*empty)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


class _Inductor(fx.Interpreter):
    """Run a graph by inductor's lowerings; what is computed for a larger tensor to read is computed once."""

    def run_node(self, n: fx.Node) -> Any:
        """Return inductor's tensor for a node."""
        result = super().run_node(n)
        # a scale that is read by every element of its block would be computed for each of them
        if _is_box(result) and any(_is_larger(user, n) for user in n.users) and result.get_read_names():
            result.realize()
        return result

    def call_function(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the lowering of an operation."""
        return sys.modules["torch._inductor.lowering"].lowerings[target](*args, **kwargs)


def _is_larger(user: fx.Node, node: fx.Node) -> bool:
    one, other = user.meta.get("val"), node.meta.get("val")
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.numel() > max(1, other.numel())


_LARGE: Final = 1 << 22  # elements; below, a launch of its own takes longer
_quantizers: dict[str, Quantizer] = {}

Part = tuple[torch.dtype, bool]  # dtype of an operand's tensor, and whether its transpose is contiguous


@lru_cache(maxsize=4096)
def operand_layout(quantizer: Quantizer, dtype: torch.dtype, on_gpu: bool, dim: int, folded: bool) -> dict[str, Part]:
    """Return the tensors of ``quantize_operand``'s result for a dtype, by their fields in Operand.

    ``tensor_scale`` is missing where it is only the rule's ``multiplier``, a constant.
    """
    # 1. elements: blocks down columns are cast as the tensor lies, and the result is a transposed view
    last, transposed = last_cast(quantizer), dim == 0 and (on_gpu or not quantizer.transforms)
    fmt, scaling = last.format, last.scaling
    keeps, folds_here = keeps_scales(last, folded, on_gpu), _folds_here(last, on_gpu, folded)
    layout = {"elements": (elements_dtype(quantizer, dtype, on_gpu, folded), transposed)}
    # 2. scales, unless they are multiplied into the elements; that of the tensor
    if (scaling is not None or keeps) and not folds_here:
        layout["scale"] = (torch.float32, transposed)
    two_level = fmt.tensor_scale if keeps and isinstance(fmt, BlockFormat) else scaling and scaling.tensor
    if two_level:
        layout["tensor_scale"] = (torch.float32, False)
    # 3. what the backward pass multiplies the gradient with, and what Clamp cut off
    if not isinstance(quantizer.gradient, StraightThrough):
        smooth = isinstance(quantizer.gradient, Differentiable)
        layout["slope"] = (torch.float32 if smooth else torch.bool, transposed)
    if any(isinstance(transform, Clamp) and transform.compensate for transform in quantizer.transforms):
        layout["rest"] = (torch.float32, transposed)
    return layout


def _folds_here(last: Quantizer, on_gpu: bool, folded: bool) -> bool:
    return on_gpu and folded and folds(last)


def traced_operand(
    t: Tensor, quantizer: Quantizer, keys: tuple[Key, Key, Key], source: tuple[str, str], *, dim: int, folded: bool,
    factor: Tensor | None,
) -> Operand:  # fmt: skip
    """Do what ``quantize_operand`` does as one node of a graph.

    Args:
        keys: Of elements, scales and signs.
        source: The layer's name and the operand's, where scales are remembered; else empty.
        t, quantizer, dim, folded, factor: As there.
    """
    key_tensors = [key_tensor(key) for key in keys]
    if key_tensors == [None] * 3 and not t.is_contiguous() and t.mT.is_contiguous():
        t, dim = t.mT, -1 - dim  # elements lie as the tensor does, on which a library's accumulation order depends
        factor = factor if factor is None or not factor.dim() else factor.mT
    # steps that inductor may fuse into kernels of its own, with the same bits
    if folded and factor is None and key_tensors == [None] * 3 and not any(source) and _fuses(t, quantizer, dim):
        return _fused(t, quantizer, dim)
    # else one opaque node: random keys lie on the CPU, which a CUDA graph cannot hold
    run = with_keys(torch.ops.fmtsim.quantize_operand, *key_tensors)
    return _make_operand(
        t, quantizer, dim, folded, run(t, dim, quantizer_digest(quantizer), folded, *source, factor, *key_tensors)
    )


class OperandRequest(NamedTuple):
    """An operand to quantise: its name, its tensor, the dimension that products sum over, a factor of the tensor."""

    name: str
    t: Tensor
    dim: int
    factor: Tensor | None = None


def traced_draws(layer: Layer, requests: Sequence[OperandRequest]) -> list[Operand]:
    """Quantise the operands of a pass whose keys the device counts, as one node of a graph."""
    with _disable_current_modes():
        layer.counter(requests[0].t.device)  # made here, outside of the memory of CUDA graphs
    # one node draws all keys of the pass in their order, whatever order a compiler gives to others
    names, tensors, dims, factors = (list(field) for field in zip(*requests, strict=True))
    texts = [quantizer_digest(layer.quantizers[name]) for name in names]
    parts, operands = iter(torch.ops.fmtsim.draw_operands(layer.name, tensors, factors, dims, names, texts)), []
    for name, t, dim, _ in requests:
        quantizer, folded = layer.quantizers[name], name in layer.folded
        layout = operand_layout(quantizer, t.dtype, is_on_gpu(t), dim, folded)
        operands.append(_make_operand(t, quantizer, dim, folded, [next(parts) for _ in layout]))
    return operands


def _make_operand(t: Tensor, quantizer: Quantizer, dim: int, folded: bool, tensors: list[Tensor]) -> Operand:
    """Return the operand of an operator's tensors; block sizes and a multiplier follow from the quantiser."""
    parts = dict(zip(operand_layout(quantizer, t.dtype, is_on_gpu(t), dim, folded), tensors, strict=True))
    last = last_cast(quantizer)
    # a rule's multiplier is a constant: no tensor of the operator's result
    times = 1.0 if last.scaling is None else last.scaling.multiplier
    if times != 1 and "tensor_scale" not in parts and _folds_here(last, is_on_gpu(t), folded):
        parts["tensor_scale"] = torch.full((), times, dtype=torch.float32, device=t.device)
    sizes = block_sizes(block_of(quantizer), t.shape if dim == -1 else t.shape[::-1])
    return Operand(quantizer=quantizer, block=sizes, **parts)


def traced_both(t: Tensor, quantizer: Quantizer, across: Key, down: Key) -> tuple[Operand, Operand]:
    """Do what ``quantize_both`` does as one node of a graph."""
    # two nodes that inductor fuses into one read of t
    if across is down is None and _fuses(t, quantizer, -1) and _fuses(t, quantizer, 0):
        return _fused(t, quantizer, -1), _fused(t, quantizer, 0)
    keys = key_tensor(across), key_tensor(down)
    # one node: elements of both, then the scale of the tensor, or the scales of both
    rows, columns, *scales = with_keys(torch.ops.fmtsim.quantize_both, *keys)(t, quantizer_digest(quantizer), *keys)
    if len(scales) < 2:
        one, other = (Operand(x, quantizer, tensor_scale=scales[0] if scales else None) for x in (rows, columns))
        return one, other
    one, other = (
        Operand(x, quantizer, scale, block=block_sizes(block_of(quantizer), x.shape))
        for x, scale in zip((rows, columns), scales, strict=True)
    )
    return one, other


def _fuses(t: Tensor, quantizer: Quantizer, dim: int) -> bool:
    """Return True if a compiler for a GPU may fuse the steps of an operand into its kernels.

    Of large matrices those whose blocks run down columns are called: inductor reads such blocks at a third of the
    memory's speed.
    """
    if not (is_on_gpu(t) and has_known_sizes(t) and covers(t, quantizer, dim)):
        return False
    return dim == -1 or block_of(quantizer)[1] is None or t.numel() < _LARGE


def _fused(t: Tensor, quantizer: Quantizer, dim: int) -> Operand:
    return _make_operand(t, quantizer, dim, True, torch.ops.fmtsim.fused_operand(t, dim, quantizer_digest(quantizer)))


@lru_cache(maxsize=4096)
def quantizer_digest(quantizer: Quantizer) -> str:
    """Return the text by which an operator finds a quantiser: the same in every process."""
    text = hashlib.sha256(f"{quantizer!r} {_steps()}".encode()).hexdigest()[:24]
    _quantizers[text] = quantizer
    return text


@lru_cache(maxsize=1)
def _steps() -> str:
    """Return the steps of fused operands as text: a compiler keeps its code by the texts of calls."""
    return inspect.getsource(sys.modules[inlined.__module__])


def find_quantizer(text: str) -> Quantizer:
    """Return the quantiser of a text."""
    return _quantizers[text]


class _Call(NamedTuple):
    """The quantiser of a text, and the layout of its operands in a call.

    Attributes:
        quantizer: The quantiser.
        layout: The tensors of its operands: their names in Operand, and whether they are transposed.
        copied: Names of those that are a layer's own: compiled code may write there.
    """

    quantizer: Quantizer
    layout: tuple[tuple[str, bool], ...]
    copied: tuple[str, ...]


@lru_cache(maxsize=4096)
def _resolve_call(text: str, dtype: torch.dtype, on_gpu: bool, dim: int, folded: bool) -> _Call:
    """Return the quantiser and the layout of a text, so that no call hashes a quantiser."""
    q = _quantizers[text]
    # a stored scale is the layer's own tensor: compiled code may write to what it gets
    layout, copied = operand_layout(q, dtype, on_gpu, dim, folded), ("scale", "tensor_scale") * (q.source == "stored")
    transposed = tuple((name, part[1]) for name, part in layout.items())
    return _Call(q, transposed, tuple(name for name in copied if name in layout))


def _operand(t, dim, quantizer, folded, layer, name, factor, elements, scales, signs):  # type: ignore[no-untyped-def]
    keys = NO_KEYS
    if elements is not None or scales is not None or signs is not None:
        keys = Keys(random_key(elements), random_key(scales), random_key(signs))
    state = find_layer(layer).state.get(name) if layer else None
    return _tensors(t, dim, quantizer, folded, keys, state, factor)


def _draws(layer, tensors, factors, dims, names, quantizers):  # type: ignore[no-untyped-def]
    named_layer, parts = find_layer(layer), []
    # the device counts passes: a replayed CUDA graph draws new words each time
    named_layer.counter(tensors[0].device).add_(1)
    for t, factor, dim, name, text in zip(tensors, factors, dims, names, quantizers, strict=True):
        keys, state = named_layer.counted_keys(name, t.device), named_layer.state.get(name)
        parts += _tensors(t, dim, text, name in named_layer.folded, keys, state, factor)
    return parts


def _tensors(
    t: Tensor, dim: int, text: str, folded: bool, keys: Keys, state: Memory, factor: Tensor | None
) -> list[Tensor]:
    """Quantise, and return the operand's tensors in the layout that the compiler knows (``layout_of``)."""
    if state is not None:
        refuse()
    # what the fake operator promised, looked up by text: no quantiser is hashed here
    call = _resolve_call(text, t.dtype, is_on_gpu(t), dim, folded)
    operand = quantize_operand(t, call.quantizer, keys, state, dim=dim, folded=folded, factor=factor)
    return [_in_layout(getattr(operand, part), transposed, part in call.copied, t) for part, transposed in call.layout]


def _in_layout(x: Tensor, transposed: bool, copied: bool, t: Tensor) -> Tensor:
    """Return a tensor in the layout that the fake operator promises, never the operator's input itself."""
    if transposed:
        whole = x if x.stride() == (1, x.shape[0]) else x.mT.contiguous().mT
    else:
        whole = x if x.is_contiguous() else x.contiguous()
    return whole.clone() if copied or whole.data_ptr() == t.data_ptr() else whole


def _fake_operand(t, dim, quantizer, folded, *_):  # type: ignore[no-untyped-def]
    announce()
    q = _quantizers[quantizer]
    rows, columns = t.shape if dim == -1 else t.shape[::-1]
    outer, inner = block_of(q)
    # None is the whole axis, which has one block
    blocks = (1 if outer is None else -(-rows // outer), 1 if inner is None else -(-columns // inner))
    fmt = last_cast(q).format
    level = (rows, 1) if isinstance(fmt, BlockFormat) and fmt.scaling.level_block == (1, None) else ()
    parts = []
    for field, part in operand_layout(q, t.dtype, is_on_gpu(t), dim, folded).items():
        shape = {"scale": blocks, "tensor_scale": level}.get(field, (rows, columns))
        x = t.new_empty(shape[::-1] if part[1] else shape, dtype=part[0])
        parts.append(x.mT if part[1] else x)
    return parts


def _fake_draws(layer, tensors, factors, dims, names, quantizers):  # type: ignore[no-untyped-def]
    folded = find_layer(layer).folded
    operands = zip(tensors, dims, quantizers, names, strict=True)
    return [x for t, dim, text, name in operands for x in _fake_operand(t, dim, text, name in folded)]


def _fused_operand(t, dim, quantizer):  # type: ignore[no-untyped-def]
    return _tensors(t, dim, quantizer, True, NO_KEYS, None, None)


def _fake_fused(t, dim, quantizer):  # type: ignore[no-untyped-def]
    return _fake_operand(t, dim, quantizer, True)


def _fused_steps(dim, quantizer):  # type: ignore[no-untyped-def]
    def run(t: Tensor) -> list[Tensor]:
        operand = inlined(t, _quantizers[quantizer], dim)
        return [part for part in (operand.elements, operand.scale, operand.tensor_scale) if part is not None]

    return run


def _both(t, quantizer, across, down):  # type: ignore[no-untyped-def]
    rows, columns = quantize_both(t, _quantizers[quantizer], random_key(across), random_key(down))
    scales = [] if rows.tensor_scale is None else [rows.tensor_scale]
    if rows.scale is not None and columns.scale is not None:
        scales = [rows.scale.contiguous(), columns.scale.mT.contiguous().mT]
    return [rows.elements.contiguous(), columns.elements.mT.contiguous().mT, *scales]


def _fake_both(t, quantizer, across, down):  # type: ignore[no-untyped-def]
    q, scales = _quantizers[quantizer], []
    if q.scaling is None:
        scales = [t.new_empty((), dtype=torch.float32)] if q.format.tensor_scale else []  # type: ignore[union-attr]
    elif not folds(q):
        (rows, columns), run = t.shape, q.scaling.block[1]
        assert run is not None
        # scales that bfloat16 elements do not take in lie beside them, those of columns transposed
        sizes = (rows, -(-columns // run)), (-(-rows // run), columns)
        of_rows, of_columns = (t.new_empty(size, dtype=torch.float32) for size in sizes)
        scales = [of_rows, of_columns.mT]
    return [t.new_empty(t.shape, dtype=torch.bfloat16), t.new_empty(t.shape, dtype=torch.bfloat16).mT, *scales]


define_operator(
    "quantize_both(Tensor t, str quantizer, Tensor? across, Tensor? down) -> Tensor[]", _both, _fake_both, keyed=True
)
define_operator(
    "quantize_operand(Tensor t, int dim, str quantizer, bool folded, str layer, str name, Tensor? factor, "
    "Tensor? elements, Tensor? scales, Tensor? signs) -> Tensor[]",
    _operand,
    _fake_operand,
    keyed=True,
)
define_operator(
    "draw_operands(str layer, Tensor[] tensors, Tensor?[] factors, int[] dims, str[] names, str[] quantizers) "
    "-> Tensor[]",
    _draws,
    _fake_draws,
    tags=SEEDED,
)
define_operator("fused_operand(Tensor t, int dim, str quantizer) -> Tensor[]", _fused_operand, _fake_fused)
lower(torch.ops.fmtsim.fused_operand.default, _fused_steps)
call_directly(torch.ops.fmtsim.quantize_operand.default, _operand)
call_directly(torch.ops.fmtsim.draw_operands.default, _draws)
call_directly(torch.ops.fmtsim.quantize_both.default, _both)
