# SPDX-License-Identifier: Apache-2.0
"""observe: collect statistics of every operand of a converted model while it runs."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Never, overload

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from fmtsim.casts.arguments import check_input, check_module, check_readable, refuse_others, spelled
from fmtsim.casts.quantize import quantize
from fmtsim.formats.block import Format
from fmtsim.formats.registry import get_format
from fmtsim.formats.representable import FLOAT8_DTYPES
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.gemm.layers.keys import Layer
from fmtsim.gemm.layers.multiply import layer_product, multiply
from fmtsim.gemm.layers.quantize_operand import quantize_operand
from fmtsim.gemm.layers.watch import Seen, Watcher
from fmtsim.gemm.units.unit import machine_name
from fmtsim.lab.analysis.measure import measure
from fmtsim.lab.analysis.observation import Layers, Observation, StepCounts
from fmtsim.lab.analysis.shadow import Shadow
from fmtsim.lab.analysis.stats import OperandStats, TensorStats
from fmtsim.nn.conversion import all_settings
from fmtsim.nn.modules import EmulatedModule, Emulation
from fmtsim.nn.sdpa import AttentionCall
from fmtsim.recipes.recipe import Recipe, Rule
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import Datapath, IntegerDatapath
from fmtsim.spec.operand import Keys, Operand, block_of, last_cast
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.table import some

_FP64: Any = get_format("fp64")
_UNREAD = 1024  # operands whose counts stay on their devices, some 20 KB each: a step waits for no device
_CORNER = 32  # rows and columns of a product that runs again without one of its losses


class ModelObservation(Observation):
    """The statistics of a model, which collects them while it runs inside the ``with``; ``fmtsim.observe`` makes it."""

    def __init__(
        self, model: nn.Module, *, recipe: str | Path | Recipe | LinearConfig | None = None,
        format: str | Format | None = None, rules: Sequence[Rule] | str | Path = (), every: int = 1,
    ) -> None:  # fmt: skip
        check_module("observe", model)
        check_observation("observe", every, recipe, format, rules)
        super().__init__(every=every)
        model = getattr(model, "_orig_mod", model)  # of what torch.compile returned
        self._model = model
        plain = recipe is not None or format is not None
        self._shadow = Shadow(model, recipe, format, rules) if plain else None
        model = model if self._shadow is None else self._shadow.model
        self._modules = [module for module in model.modules() if isinstance(module, EmulatedModule)]
        self._attention = all_settings(model, "attention")
        self.active = False
        self._stance: Any = None  # of compilers, before the with
        self._hooks: list[RemovableHandle] = []
        self._unread: list[tuple[int, str, str, Format | None, Tensor]] = []
        self.products: list[tuple[int, str, str, OperandStats]] = []  # that are seen and not counted yet
        if not self._modules and not self._attention:
            raise ArgumentError(
                f"observe found no converted layer in {type(model).__name__}; call fmtsim.convert first, "
                "or pass recipe= or format= to see what that would do to this model"
            )

    @property
    def layers(self) -> Layers:
        """Layer -> operand -> statistics over all observed steps."""
        self._read()
        return super().layers

    @property
    def counts(self) -> StepCounts:
        """Step -> layer -> operand -> what ``history`` has the figures of."""
        self._read()
        return super().counts

    def __enter__(self) -> "ModelObservation":
        for name, place in self._places():
            if place.observer is not None:
                raise ArgumentError(f"layer {name!r} is observed already; leave the outer observe first")
        # Compiled code does not ask its layers whether they are observed.
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            self._stance = torch.compiler.set_stance("force_eager")
        if self._shadow is not None:
            self._shadow.attach()
        self._hooks.append(self._model.register_forward_pre_hook(self._begin, prepend=True))
        self.active = True
        self._watch(max(1, self.steps))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.active = False  # graphs made inside may still run backward; they are no longer counted
        while self._hooks:
            self._hooks.pop().remove()
        self._watch(None)
        if self._shadow is not None:
            self._shadow.detach()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
        if kind is None and self.steps and not self.layers:
            raise ArgumentError(
                f"observe saw {self.steps} calls of the model and no product in them: it was compiled inside the with, "
                "or no layer that is observed ran; compile before the with, where compiled models run eagerly"
            )

    def _begin(self, *_: Any) -> None:
        if len(self._unread) > _UNREAD:
            self._read()
        if self._shadow is not None:
            self._shadow.begin(self.steps)
        skipped = self.steps % self.every != 0  # the first of every so many calls is observed
        self.steps += 1
        self._watch(None if skipped else self.steps)

    def _watch(self, step: int | None) -> None:
        """Observe layers from now on, as parts of a step; None stops it."""
        for name, place in self._places():
            place.observer = None if step is None else partial(_Layer, self, step, name, place)

    def _places(self) -> Iterator[tuple[str, Emulation | AttentionCall]]:
        """Yield what is observed, by name; a module that was reverted meanwhile is none."""
        for module in self._modules:
            if module.emulation is not None:
                yield module.emulation.name, module.emulation
        for attended in self._attention:
            yield attended.name, attended.call

    @property
    def notes(self) -> list[str]:
        """What of a model that is not converted is simulated and what is not seen, in words."""
        if self._shadow is None:
            return []
        # A layer was not called if none of its products was seen.
        names = {how.name: {_join(how.name, part) for part in m.parts} for m in self._modules if (how := m.emulation)}
        absent = [layer or "(model)" for layer, parts in names.items() if parts.isdisjoint(self.layers)]
        unseen = [attended.name or "(model)" for attended in self._attention if attended.name not in self.layers]
        notes = [f"not called: {some(absent)}"] if absent else []
        notes += [f"no attention seen, not called or of another kind: {some(unseen)}"] if unseen else []
        return [*self._shadow.notes, *notes]

    @_disable_current_modes()
    def see(self, step: int, layer: str, seen: Seen) -> None:
        """Count an operand of a layer in a step."""
        if self.active:
            fmt, (x, q, dim) = seen.quantized.quantizer.format, seen.rounded()
            self._unread.append((step, layer, seen.name, fmt, measure(x, q, fmt, dim, seen.scales())))

    @_disable_current_modes()
    def _read(self) -> None:
        """Take what was counted from its devices, each asked once."""
        # 1. Copy what lies on each device at once.
        unread, self._unread = self._unread, []
        numbers: dict[int, Tensor] = {}
        for device in {measured.device for *_, measured in unread}:
            places = [i for i, (*_, measured) in enumerate(unread) if measured.device == device]
            numbers |= zip(places, torch.stack([unread[i][-1] for i in places]).cpu(), strict=True)
        # 2. Add it up in the order in which it was seen.
        for i, (step, layer, operand, fmt, _) in enumerate(unread):
            self.count(step, layer, operand, OperandStats().read(numbers[i], fmt))
        while self.products:
            self.count(*self.products.pop(0))


class _Layer(Watcher):
    """Let an observation see the operands of a layer in a step, and the products that a machine multiplies."""

    def __init__(
        self, observation: ModelObservation, step: int, module: str, place: Emulation | AttentionCall, part: str
    ) -> None:
        self._observation, self._step, self._name, self._place = observation, step, _join(module, part), place

    def operand(self, seen: Seen) -> None:
        self._observation.see(self._step, self._name, seen)

    def product(self, name: str, a: Operand, b: Operand, bias: Tensor | None, run: Callable[[], Tensor]) -> Tensor:
        y, config = run(), self._place.config
        if isinstance(config, LinearConfig) and self._observation.active and getattr(config, name).machine:
            self._count(name, a, b, bias, y, config)
        return y

    @_disable_current_modes()
    def _count(
        self, name: str, a: Operand, b: Operand, bias: Tensor | None, y: Tensor, config: LinearConfig
    ) -> None:  # fmt: skip
        # 1. against the exact product of the same operands, float64
        exact = multiply(a, b, bias, torch.float64, torch.float64)
        seen = _seen_product(exact, y, getattr(config, name).machine)
        # 2. without one loss alone, which a Datapath that runs again can leave out, on a corner of the result
        a, b = a.head(_CORNER), b.head(_CORNER)
        place = slice(len(a.elements)), slice(len(b.elements))
        corner, bias = exact[place], None if bias is None else bias[place[1]]
        results: dict[str, Tensor] = {}
        for loss, layer in _layers_without(config, name, y.dtype).items():
            dtype = torch.float32 if loss == "output" else y.dtype
            results[loss] = layer_product(layer, name, a, b, bias, dtype, y.dtype)
            seen.without[loss] = _noise_without(seen, corner, y[place], results[loss])
        if seen.without.pop("nothing", None) is not None and len(corner):
            # 3. an integer accumulator wraps or saturates: results that its width changes, of all as of the corner
            changed = (results["nothing"] != results["accumulator"]).double().mean()
            seen.saturated = round(changed.item() * seen.elements)
        self._observation.products.append((self._step, self._name, name, seen))

    @_disable_current_modes()
    def attention_product(self, name: str, a: Any, b: Any, y: Tensor, run: Callable[[Any, Any, Any], Tensor]) -> None:
        if self._observation.active:
            config: Any = self._place.config
            unit, exact = config.products[name].target, a.values().double() @ b.values().double().mT
            seen = _seen_product(exact, y, f"on {machine_name(unit)}")
            a, b = a.head(_CORNER), b.head(_CORNER)
            place = slice(1), slice(_CORNER), slice(_CORNER)
            for loss, path in _paths_without(unit).items():
                seen.without[loss] = _noise_without(seen, exact[place], y[place], run(a, b, path))
            self._observation.products.append((self._step, self._name, name, seen))


def _seen_product(exact: Tensor, y: Tensor, machine: str) -> OperandStats:
    """Return statistics of a product against its exact sums; what became infinite or NaN on a machine is saturated."""
    seen = OperandStats().add(exact, y, None)
    seen.format = machine.replace(", ", "; ")
    seen.saturated = int((exact.isfinite() & ~y.isfinite()).sum())
    return seen


def _noise_without(seen: OperandStats, exact: Tensor, y: Tensor, again: Tensor) -> float:
    """Return the noise of a product that ran again without one loss: of the whole result as much as of a corner."""
    finite = exact.isfinite()
    noise, without = ((one.double() - exact)[finite].square().sum() for one in (y, again))
    share = seen.noise / noise if 0 < noise < math.inf else 1.0
    return (without * share).nan_to_num(math.inf, math.inf).item()


def _paths_without(target: Any) -> dict[str, Datapath]:
    """Return a Datapath without the loss of its alignment, and without that of its accumulator."""
    paths: dict[str, Datapath] = {}
    if isinstance(target, Datapath):
        if target.fraction_bits is not None:
            paths["alignment"] = replace(target, fraction_bits=None)
        paths["accumulator"] = replace(target, accumulator=_FP64, promotion=None)
    return paths


@lru_cache(maxsize=256)
def _layers_without(config: LinearConfig, name: str, dtype: torch.dtype) -> dict[str, Layer]:
    """Return layers whose Datapath lacks one loss: of alignment, the accumulator, the output; of integers nothing."""
    gemm = getattr(config, name)
    changes: dict[str, dict[str, Any]] = {loss: {"target": path} for loss, path in _paths_without(gemm.target).items()}
    if isinstance(gemm.target, Datapath):
        if gemm.out.format is not None or dtype.itemsize < 4:
            changes["output"] = {"out": Quantizer()}
    elif isinstance(gemm.target, IntegerDatapath):
        changes |= {"nothing": {}, "accumulator": {"target": replace(gemm.target, accumulator_bits=64)}}
    # a generator of its own: the model's random numbers stay as they are
    return {loss: Layer(replace(config, **{name: replace(gemm, **change)}), 0) for loss, change in changes.items()}


@overload
def observe(model: Tensor, format: str | Format | Quantizer | torch.dtype) -> TensorStats: ...
@overload
def observe(
    model: nn.Module, format: str | Format | Quantizer | None = None, *,
    recipe: str | Path | Recipe | LinearConfig | None = None, rules: Sequence[Rule] | str | Path = (), every: int = 1,
) -> ModelObservation: ...  # fmt: skip
@spelled
def observe(
    model: Any, format: Any = None, *more: Never, recipe: str | Path | Recipe | LinearConfig | None = None,
    rules: Sequence[Rule] | str | Path = (), every: int = 1, **others: Never,
) -> ModelObservation | TensorStats:  # fmt: skip
    """Collect statistics of every operand of a model's products: ``with observe(model) as stats: ...``.

    A product that a target multiplies has a row too (``fprop dgrad wgrad``, of attention ``s`` = q k^T, ``o`` = p v and
    ``dv dp dq dk``): its result against the exact product of
    the same quantised operands. A ``Datapath`` or ``IntegerDatapath`` runs up to three times more: ``bits_lost`` says
    how many bits better that result is where alignment, accumulator or output alone lose nothing. Under an
    ``IntegerDatapath`` ``saturated`` is how many results wrapped or saturated, estimated from 32 rows and columns.

    ``observe(x, format)`` returns those of a tensor, rounded to nearest as ``fmtsim.quantize`` does: underflow,
    saturation, SQNR, MSE, cosine, exponents and ``plot()``. A last block that is not whole is padded with zeros.

    Forward and backward inside the ``with`` are counted; outside it a model pays nothing. Under activation
    checkpointing the recomputed forward counts again. What torch.compile made runs eagerly inside the ``with``, also in
    steps that are not observed. Elements of any float dtype; NaN and infinities are counted
    apart (``nonfinite``). Outputs, gradients and random numbers of the model keep their bits.

    Args:
        model: A converted model; or one that is not, with ``recipe`` or ``format``. Or a tensor of floats, with a
            format, whose name says what scales there are (``"e4m3"``: none, ``"e4m3_tensor_amax"``, ``"nvfp4"``), or a
            Quantizer.
        recipe: What ``fmtsim.convert`` takes. The model computes as it does, and the operands of its products (those
            that ``convert`` would find, with the gradients that come) are cast beside it: memory and time of a
            step about double. Random rounding draws from a generator of its own. The table's foot says what of the
            model, or of the recipe, is not seen.
        format: Likewise: a format of activations, weights and gradients, scaled as ``fmtsim.convert`` does, and of
            attention's operands, which ``convert`` leaves alone.
        rules: Exceptions for layers, beside ``recipe`` or ``format``, or a file of them: as ``fmtsim.convert`` takes
            them.
        every: Observe the first of so many calls of the model; the others pay nothing.

    Raises:
        ArgumentError: No layer is converted and neither recipe nor format given, or one is given and the model is
            converted; both are given; there are rules alone, or one that fits no layer; the model is observed already;
            ``every`` is not a number from 1. At the end of the ``with``: the model was called, and no layer ran in
            eager code. A tensor comes without a format, or with other arguments.
        DtypeError: A tensor is not of floats.
        FormatError: No such recipe or format.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    >>> with observe(model, format="mxfp8_e4m3") as stats:
    ...     model(torch.ones(32, 64)).sum().backward()
    >>> stats["2"]["g_d"].amax
    1.0
    >>> observe(torch.tensor([1.0, 0.3, 1e-5]), "e4m3").underflow_percent
    33.333333333333336
    """
    refuse_others(observe, more, others)
    if isinstance(model, Tensor):
        if format is None or recipe is not None or rules or every != 1:
            raise ArgumentError("observe of a tensor takes a format and nothing else; call observe(x, 'e4m3')")
        check_input(model, float8=True)
        check_readable("x", model)
        # Round as quantize does; sums and the cosine are of the elements that are finite before and after.
        x = model.detach().float() if model.dtype in FLOAT8_DTYPES else model.detach()
        fmt = last_cast(format).format if isinstance(format, Quantizer) else get_format(format)
        q = quantize(x, format, pad=True, out_dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
        scaled = isinstance(format, Quantizer) and format.scaling is not None
        seen = OperandStats().read(measure(x, q, fmt, scales=_scales_of(x, format) if scaled else None), fmt)
        seen.format = str(format) if scaled else seen.format
        finite = x.isfinite() & q.isfinite()
        a, b = x[finite].double(), q[finite].double()
        cosine = (a @ b / (torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))).item()
        return TensorStats(**{field.name: getattr(seen, field.name) for field in fields(seen)}, cosine=cosine)
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"observe takes a torch.nn.Module or a tensor, not {type(model).__name__}; pass the model itself, or "
            "observe(torch.as_tensor(x), 'e4m3')"
        )
    return ModelObservation(model, recipe=recipe, format=format, rules=rules, every=every)


def _scales_of(x: Tensor, quantizer: Quantizer) -> Tensor | None:
    """Return what each element of a tensor, whose blocks lie along its last axis, is divided by."""
    keys = Keys(RandomKey(0), RandomKey(0))  # of elements, which are not looked at
    matrix = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    columns, inner = matrix.shape[1], block_of(quantizer)[1] or 1
    whole = nn.functional.pad(matrix, (0, -columns % inner))
    scales = Seen("x", whole, quantize_operand(whole, quantizer, keys), keys).scales()
    return scales if scales is None or scales.numel() == 1 else scales[:, :columns].reshape(x.shape)


def check_observation(who: str, every: int, recipe: Any, format: Any, rules: Any) -> None:
    """Refuse an ``every`` that is not a number from 1, a recipe beside a format, and rules beside neither."""
    if type(every) is not int or every < 1:
        raise ArgumentError(f"every={shown(every)} is not a number of steps; pass 1 to observe all, 10 for every tenth")
    if recipe is not None and format is not None:
        raise ArgumentError(f"{who} got recipe and format; pass one of them")
    if rules and recipe is None and format is None:
        raise ArgumentError(f"{who} got rules, which are exceptions of recipe= or format=; pass one of these as well")


def _join(layer: str, part: str) -> str:
    return ".".join(filter(None, (layer, part)))
