# SPDX-License-Identifier: Apache-2.0
"""The places of a converted model where operands are rounded, which can be switched one at a time."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from fmtsim.gemm.layers.config import OPERANDS, PRODUCTS, Gemm, LinearConfig, product_of
from fmtsim.gemm.layers.keys import FORWARD, Layer
from fmtsim.gemm.layers.linear import run_layer
from fmtsim.gemm.layers.watch import watching
from fmtsim.nn.attention import Attended
from fmtsim.nn.flash import Inputs
from fmtsim.nn.forward import ATTENTION
from fmtsim.nn.modules import EmulatedModule, Emulation
from fmtsim.nn.raw_matmuls import ParameterProduct
from fmtsim.nn.sdpa import AttentionCall, run_attention
from fmtsim.recipes.attention import BACKWARD, AttentionConfig
from fmtsim.spec.quantizer import Clamp, Hadamard, Quantizer, Sparsity

_MADE_OF = {"w_d": "w_f", "x_w": "x_f", "g_w": "g_d"}  # what an operand with source "forward" is, or is made of
_REUSED = ("forward", "requantised")
ALL: Final = "all of the forward pass"  # in place of an operand's name


class Site:
    """One product of a model, forward and backward, with the operands that it rounds.

    Nothing is rounded until ``install`` says what; the arithmetic is float32 (float64 for float64 tensors), on no
    machine, and every stochastic rounding has a key of its own that is the same in each call.

    Attributes:
        name: As in statistics: the module's name, and the part's where it has several products.
        module: The module's name.
        formats: What each operand that is rounded becomes, in words.
        forward: Operands that change the result, in their order.
        backward: Operands that change gradients alone.
        local: Those of them that change the gradient of the weight and nothing else.
        seed: Of its random numbers.
        expected: Whether a batch that does not run it is worth a note: Parameters may never be multiplied with.
    """

    def __init__(self, name: str, module: str, quantizers: Mapping[str, Quantizer], forward: Any, seed: int) -> None:
        self.name, self.module, self.seed = name or "(model)", module, seed
        self.formats = {operand: str(quantizer) for operand, quantizer in quantizers.items()}
        self.forward = tuple(operand for operand in quantizers if operand in forward)
        self.backward = tuple(operand for operand in quantizers if operand not in forward)
        self.local: tuple[str, ...] = ()
        self.expected = True

    def install(self, operand: str | None) -> None:
        """Round one operand in the model from now on, none (None), or ``ALL``."""
        raise NotImplementedError

    def run(self, operand: str | None, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return the product of some inputs with one operand rounded, or none."""
        raise NotImplementedError

    def differs(self, operand: str) -> tuple[int, ...]:
        """Return which of the inputs' gradients an operand of the backward pass changes."""
        raise NotImplementedError

    @torch.no_grad()
    def errors(self, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return what rounding each operand of the forward pass alone adds to the result."""
        if not self.forward:
            return {}
        plain = self.run(None, inputs)
        return {operand: (self.run(operand, inputs) - plain).to(inputs[0].dtype) for operand in self.forward}

    def gradient_errors(
        self, inputs: tuple[Tensor, ...], g: Tensor, operands: tuple[str, ...]
    ) -> dict[str, dict[int, Tensor]]:
        """Return what rounding operands of the backward pass alone adds to the gradients, by place of the input."""
        errors: dict[str, dict[int, Tensor]] = {}
        for operand in operands:
            places = self.differs(operand)
            rounded, plain = (self._gradients(which, inputs, g, places) for which in (operand, None))
            errors[operand] = {i: a - b for i, a, b in zip(places, rounded, plain, strict=True)}
        return errors

    @torch.enable_grad()
    def _gradients(
        self, operand: str | None, inputs: tuple[Tensor, ...], g: Tensor, places: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        leaves = list(inputs)
        for i in places:
            leaves[i] = _wide(inputs[i]).detach().requires_grad_()
        y = self.run(operand, tuple(leaves))
        return torch.autograd.grad(y, [leaves[i] for i in places], g.to(y.dtype))


class LinearSite(Site):
    """A product of a layer with a weight."""

    def __init__(self, how: Emulation, module: str, part: str, seed: int, *, fresh: bool) -> None:
        self._how, self._part = how, part
        kinds = [kind for kind in how.products if kind.split(" ")[0] == part]
        original = how.products[next(kind for kind in kinds if kind.endswith("frozen"))]
        config = _without_history(how.config) if fresh else how.config
        rounds = [name for name in OPERANDS if _rounds(config, name)]
        quantizers = {name: _quantizer(config, name) for name in rounds}
        super().__init__(".".join(filter(None, (module, part))), module, quantizers, FORWARD, seed)
        self.local = tuple(name for name in self.backward if product_of(name) == "wgrad")
        self._kinds, self._layers = kinds, dict[str | None, Layer]()
        for operand in (None, ALL, *quantizers):
            on = {operand} if operand != ALL else set(self.forward)
            layer = Layer(switched(config, on), seed, {} if fresh else original.state)
            layer.sized, layer.rows = original.sized, original.rows  # so that calls are padded alike
            self._layers[operand] = layer

    @property
    def plain(self) -> Layer:
        """What runs where nothing is rounded."""
        return self._layers[None]

    def install(self, operand: str | None) -> None:
        """Round one operand in the model from now on, none (None), or ``ALL``."""
        layer = self._layers[operand]
        self._how.products = {**self._how.products, **dict.fromkeys(self._kinds, layer)}
        self._how.config = layer.config

    def run(self, operand: str | None, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return ``x w^T``."""
        x, w = map(_wide, inputs)
        with watching(None):
            return run_layer(x, w, None, self._layers[operand])

    def differs(self, operand: str) -> tuple[int, ...]:
        """Return 0 for x, 1 for w."""
        return (1,) if operand in self.local else (0,)


class AttentionSite(Site):
    """The products of an attention without weights. An operand that the forward pass made has no row of its own."""

    def __init__(self, attended: Attended, seed: int) -> None:
        self._attended, config = attended, attended.call.config
        quantizers = {name: q for name, q in config.operands.items() if q.format is not None or q.then is not None}
        super().__init__(attended.name, attended.name, quantizers, "qkvp", seed)
        on: dict[str | None, tuple[str, ...]] = {None: (), ALL: self.forward, **{name: (name,) for name in quantizers}}
        self._calls = {operand: AttentionCall(_attention(config, names), seed) for operand, names in on.items()}
        self.plain = AttentionCall(self._calls[None].config, seed)

    def install(self, operand: str | None) -> None:
        """Round one operand in the model from now on, none (None), or ``ALL``."""
        self._attended.call = self.plain if operand is None else self._calls[operand]

    def run(self, operand: str | None, inputs: tuple[Any, ...]) -> Tensor:
        """Return the attention of q, k and v, followed by mask, hides and factor."""
        q, k, v, *more = inputs
        with watching(None):
            return run_attention(Inputs(_wide(q), _wide(k), _wide(v), *more), self._calls[operand])

    def differs(self, operand: str) -> tuple[int, ...]:
        """Return the places of q, k and v."""
        return (0, 1, 2)


def sites_of(model: nn.Module, seed: int, *, fresh: bool) -> list[Site]:
    """Return the places of a converted model where operands are rounded, in the order of its modules.

    Args:
        model: Converted; none of its operands is rounded from now on.
        seed: Of stochastic roundings.
        fresh: The model was converted just now: delayed scales have no history and become those of the tensor itself.
    """
    sites: list[Site] = []
    for module in model.modules():
        how = module.emulation if isinstance(module, EmulatedModule) else None
        parts = dict.fromkeys(kind.split(" ")[0] for kind in how.products) if how is not None else {}
        for part in parts:
            assert how is not None
            sites.append(LinearSite(how, how.name, part, seed + len(sites), fresh=fresh))
            sites[-1].expected = len(parts) == 1 and not isinstance(module, ParameterProduct)
        if ATTENTION in module.__dict__:
            sites.append(AttentionSite(module.__dict__[ATTENTION], seed + len(sites)))
    for site in sites:
        site.install(None)
    return [site for site in sites if site.formats]


def switched(config: LinearConfig, operands: Collection[Any]) -> LinearConfig:
    """Return a layer that rounds some operands alone, in float32 on no machine; rotations stay.

    An operand that is made of one of another product brings the quantiser of that.
    """
    reused = (name for name in operands if name in _MADE_OF and config.operands[name].source in _REUSED)
    on = {*operands, *(_MADE_OF[name] for name in reused)}
    gemms: dict[str, Any] = {}
    for product in PRODUCTS:
        gemm, names = getattr(config, product), [name for name in OPERANDS if product_of(name) == product]
        makers = [config.operands.get(_MADE_OF.get(name, "")) for name in names]
        pairs = zip(names, (gemm.a, gemm.b), makers, strict=True)
        a, b = (q if name in on else _high(q, first) for name, q, first in pairs)
        gemms[product] = Gemm(a=a, b=b)
    return replace(config, **gemms)


def _high(q: Quantizer, made: Quantizer | None = None) -> Quantizer:
    """Return a quantiser that rotates as another does, or as what it is made of does, and rounds nothing."""
    reused = q.source in _REUSED and (made is None or bool(_turns(made)))
    if q.source == "forward":
        return q if reused else Quantizer()
    return Quantizer(transforms=_turns(q), source=q.source if reused else "original")


def _turns(q: Quantizer) -> tuple[Hadamard, ...]:
    return tuple(replace(turn, rounded=None) for turn in q.transforms if isinstance(turn, Hadamard))


def _rounds(config: LinearConfig, operand: str) -> bool:
    """Return True if an operand is rounded or otherwise changed from high precision."""
    q = _quantizer(config, operand)
    return q.format is not None or q.then is not None or any(isinstance(t, Clamp | Sparsity) for t in q.transforms)


def _quantizer(config: LinearConfig, operand: str) -> Quantizer:
    """Return what rounds an operand: the quantiser of the forward pass where that made it."""
    q = config.operands[operand]
    derived = q.source == "forward" or (q.source == "requantised" and q.format is None)
    return _quantizer(config, _MADE_OF[operand]) if derived else q


def _without_history(config: LinearConfig) -> LinearConfig:
    """Return a layer whose scales are those of the tensors themselves."""

    def now(q: Quantizer) -> Quantizer:
        if q.scaling is None or q.scaling.history is None:
            return q
        return replace(q, scaling=replace(q.scaling, history=None, empty="one"))

    gemms = {name: getattr(config, name) for name in PRODUCTS}
    return replace(config, **{name: replace(gemm, a=now(gemm.a), b=now(gemm.b)) for name, gemm in gemms.items()})


def _attention(config: AttentionConfig, operands: Collection[str]) -> AttentionConfig:
    """Return attention that rounds some operands alone, in float32 on no machine; rotations stay."""
    qs: Any = {name: (q if name in operands else _high(q)) for name, q in config.operands.items()}
    names = {name: [operand for operand in qs if operand.startswith(f"{name}.")] for name in BACKWARD}
    gemms: Any = {name: Gemm(a=qs[a], b=qs[b]) for name, (a, b) in names.items()}
    return replace(config, target=None, q=qs["q"], k=qs["k"], v=qs["v"], p=qs["p"], **gemms)


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()
