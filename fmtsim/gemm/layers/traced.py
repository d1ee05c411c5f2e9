"""Operands as torch operators: what torch.compile sees of a layer beside its matrix products.

Each is one node that is never looked into, so that nothing is fused into steps whose roundings count. A quantiser goes
by the digest of its text, a layer by its name.
"""

import hashlib
import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fmtsim.gemm.layers.layer import find_layer
from fmtsim.gemm.layers.operand import Draws
from fmtsim.gemm.layers.prepare import draws_of, prepare, unrotated
from fmtsim.gemm.layers.streams import FORWARD, SIGNS, stream_of
from fmtsim.gemm.products.operator import draw_keys
from fmtsim.ops import random_key
from fmtsim.scaling.history import DelayedScale
from fmtsim.scaling.statistics import block_sizes
from fmtsim.spec.operand import Operand, block_of
from fmtsim.spec.quantizer import Quantizer
from fmtsim.spec.transform import Hadamard

_FIELDS = ("elements", "scale", "tensor_scale", "slope", "rest")
_quantizers: dict[str, Quantizer] = {}

_SEEDED: Any = (torch.Tag.nondeterministic_seeded,)
_HOST_DRAWS: Any = (*_SEEDED, *filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))  # newer torch has it
_library = torch.library.Library("fmtsim", "FRAGMENT")
_library.define(
    "operand(Tensor x, bool turned, str quantizer, bool folded, str layer, str name, Tensor? factor, "
    "Tensor? count) -> Tensor[]"
)
_library.define(
    "random_operand(Tensor x, bool turned, str quantizer, bool folded, str layer, str name, "
    "Tensor? factor, Tensor? signs) -> Tensor[]",
    tags=_HOST_DRAWS,
)
_library.define(
    "unrotate(Tensor y, str first, str before, bool turned, Tensor? slope, Tensor? signs, ScalarType dtype) -> Tensor"
)
_library.define("draw_key(Tensor like, str layer, int stream) -> Tensor", tags=_HOST_DRAWS)
_library.define("count_pass(Tensor like, str layer) -> Tensor", tags=_SEEDED)


def traced_operand(
    x: Tensor,
    dim: int,
    quantizer: Quantizer,
    folded: bool,
    layer: str,
    name: str,
    factor: Tensor | None,
    *,
    signs: Tensor | None = None,
    count: Tensor | None = None,
) -> Operand:
    """Return ``prepare`` of a matrix whose products sum over ``dim``, 0 or -1, as one node of a graph.

    With ``count`` the node depends on its arguments alone. Without, one that rounds at random draws on the host, and no
    CUDA graph may hold it.
    """
    random = count is None and (quantizer.is_stochastic or quantizer.has_random_signs)
    remembers = quantizer.scaling is not None and quantizer.scaling.history is not None
    own, turned = (layer, name) if random or remembers or count is not None else ("", ""), dim == 0
    run = torch.ops.fmtsim.random_operand if random else torch.ops.fmtsim.operand
    found = run(x, turned, key_of(quantizer), folded, *own, factor, signs if random else count)
    parts = dict(zip(_layout(quantizer, x.dtype, x.device.type, turned, folded), found, strict=True))
    shape = torch.Size(x.shape[::-1]) if turned else x.shape
    return Operand(quantizer=quantizer, block=block_sizes(block_of(quantizer), shape), **parts)


def traced_unrotate(
    y: Tensor, first: Quantizer, before: Quantizer, turned: bool, slope: Tensor | None, signs: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return ``unrotated`` as one node of a graph."""
    run = torch.ops.fmtsim.unrotate
    return run(y, key_of(first), key_of(before), turned, slope, signs, dtype)  # type: ignore[no-any-return]


def traced_key(like: Tensor, layer: str, stream: int) -> Tensor:
    """Return a key, int64 [seed, offset] on the CPU, drawn when the graph runs.

    It hangs on a tensor of its pass: what hangs on nothing a compiler may draw once forwards and again backwards, and
    rotations with two kinds of signs would not cancel.
    """
    return torch.ops.fmtsim.draw_key(like, layer, stream)  # type: ignore[no-any-return]


def traced_count(like: Tensor, layer: str) -> Tensor:
    """Return the number of a pass over a layer, int64, 0-d, on the GPU of a tensor of that pass."""
    with _disable_current_modes():
        find_layer(layer).counter(like.device)  # made here, outside of the memory of CUDA graphs
    return torch.ops.fmtsim.count_pass(like, layer)  # type: ignore[no-any-return]


@lru_cache(maxsize=4096)
def key_of(quantizer: Quantizer) -> str:
    """Return the text by which an operator finds a quantiser: the same in every process."""
    key = hashlib.sha256(repr(quantizer).encode()).hexdigest()[:24]
    _quantizers[key] = quantizer
    return key


def _operand(
    x: Tensor, turned: bool, quantizer: str, folded: bool, layer: str, name: str, factor: Tensor | None,
    count: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    found = find_layer(layer) if layer else None
    draws = Draws()
    if found is not None and count is not None:
        signs = stream_of(found.seed, SIGNS + (name not in FORWARD))
        draws = draws_of(found.seed, name, signs)._replace(passes=count)
    return _prepared(x, turned, quantizer, folded, draws, None if found is None else found.state.get(name), factor)


def _random_operand(
    x: Tensor, turned: bool, quantizer: str, folded: bool, layer: str, name: str, factor: Tensor | None,
    signs: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    found = find_layer(layer)
    return _prepared(
        x, turned, quantizer, folded, draws_of(found.generator, name, random_key(signs)), found.state.get(name), factor
    )


def _prepared(
    x: Tensor, turned: bool, key: str, folded: bool, draws: Draws, state: Any, factor: Tensor | None
) -> list[Tensor]:
    quantizer, t = _quantizers[key], x.mT if turned else x
    made = prepare(t, quantizer, draws, state, folded=folded, factor=factor)
    layout = _layout(quantizer, x.dtype, x.device.type, turned, folded)
    return [_own(getattr(made, field), laid, t) for field, laid in layout.items()]


def _own(part: Tensor, laid: "_Part", x: Tensor) -> Tensor:
    """Return a part in the layout that the compiler was told, and never the operand itself."""
    whole = part.mT.contiguous().mT if laid.turned else part.contiguous()
    return whole.clone() if whole.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else whole


def _fake_operand(
    x: Tensor, turned: bool, quantizer: str, folded: bool, layer: str, name: str, factor: Tensor | None,
    random: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    q = _quantizers[quantizer]
    rows, columns = x.shape[::-1] if turned else x.shape
    outer, inner = block_of(q)
    blocks = (1 if outer is None else -(-rows // outer), 1 if inner is None else -(-columns // inner))
    made = []
    for field, laid in _layout(q, x.dtype, x.device.type, turned, folded).items():
        shape = {"scale": blocks, "tensor_scale": ()}.get(field, (rows, columns))
        part = x.new_empty(shape[::-1] if laid.turned else shape, dtype=laid.dtype)
        made.append(part.mT if laid.turned else part)
    return made


class _Part(NamedTuple):
    """How a part of an operand lies in memory: a matrix, or (``turned``) the transpose of one."""

    dtype: torch.dtype
    turned: bool


@lru_cache(maxsize=4096)
def _layout(quantizer: Quantizer, dtype: torch.dtype, device: str, turned: bool, folded: bool) -> dict[str, _Part]:
    """Return the parts that an operand has, from a small trial."""
    sizes = [t.size or 1 for t in quantizer.transforms if isinstance(t, Hadamard)]
    group = 1 if quantizer.scaling is None else quantizer.scaling.eden or 1
    side = math.lcm(128, group, *sizes)
    delayed = quantizer.scaling is not None and quantizer.scaling.history is not None
    with _disable_current_modes(), torch.no_grad():  # the compiler asks, and its tensors hold no numbers
        x = torch.ones(side, 2 * side, dtype=dtype, device=device)
        memory = DelayedScale(quantizer).to(device) if delayed else None
        made = prepare(x.mT if turned else x, quantizer, Draws(0, 0, 0), memory, folded=folded)
    parts = {field: getattr(made, field) for field in _FIELDS if getattr(made, field) is not None}
    return {field: _Part(part.dtype, part.dim() == 2 and not part.is_contiguous()) for field, part in parts.items()}


def _unrotate(
    y: Tensor, first: str, before: str, turned: bool, slope: Tensor | None, signs: Tensor | None, dtype: torch.dtype
) -> Tensor:
    done = unrotated(y, _quantizers[first], _quantizers[before], turned, slope, random_key(signs), dtype)
    return (done.clone() if done is y else done).contiguous()


def _count_pass(like: Tensor, layer: str) -> Tensor:
    return find_layer(layer).counter(like.device).add_(1).clone()


def _draw_key(like: Tensor, layer: str, stream: int) -> Tensor:
    key = draw_keys(True, stream_of(find_layer(layer).generator, stream), None, torch.device("cpu"))
    assert key is not None  # random words were asked for
    return key


_library.impl("operand", _operand, "CompositeExplicitAutograd")
_library.impl("random_operand", _random_operand, "CompositeExplicitAutograd")
_library.impl("count_pass", _count_pass, "CompositeExplicitAutograd")
_library.impl("unrotate", _unrotate, "CompositeExplicitAutograd")
_library.impl("draw_key", _draw_key, "CompositeExplicitAutograd")
torch.library.register_fake("fmtsim::operand", _fake_operand, lib=_library)
torch.library.register_fake("fmtsim::random_operand", _fake_operand, lib=_library)
torch.library.register_fake(
    "fmtsim::count_pass", lambda like, layer: like.new_empty((), dtype=torch.int64), lib=_library
)
torch.library.register_fake(
    "fmtsim::unrotate",
    lambda y, first, before, turned, slope, signs, dtype: y.new_empty(y.shape, dtype=dtype),
    lib=_library,
)
torch.library.register_fake(
    "fmtsim::draw_key", lambda like, layer, stream: torch.empty(2, dtype=torch.int64, device="cpu"), lib=_library
)
