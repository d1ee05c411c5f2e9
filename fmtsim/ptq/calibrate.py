# SPDX-License-Identifier: Apache-2.0
"""Run calibration data through a model in high precision, and find the clip of each static scale."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fmtsim.casts.arguments import check_module
from fmtsim.formats.block import ScaledFormat
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.gemm.layers.keys import Layer
from fmtsim.gemm.layers.quantize_operand import quantize_operand
from fmtsim.nn.modules import EmulatedModule
from fmtsim.recipes.ptq import fixed, is_static
from fmtsim.recipes.ptq_methods import Calibration
from fmtsim.scaling.history import DelayedScale
from fmtsim.scaling.levels import tensor_factor
from fmtsim.scaling.scaled_cast import scales
from fmtsim.scaling.scales import reciprocal
from fmtsim.spec.operand import Keys
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError
from fmtsim.support.table import some

Tell = Callable[[int], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """Hold the calibration statistics of the input of one product of a module.

    Args:
        name: The module's name, and the part's where it has several.
        module: The module.
        part: Name of the product inside the module, "" for the module itself.
        x: Quantiser of the input.
        rows: Rows seen.
        amax: Largest magnitude.
        channels: Largest magnitude by channel, float32 [K].
        magnitudes: Sum of magnitudes by channel, float64 [K] on the CPU; None where no method needs it.
        samples: Magnitudes that were kept, one tensor a batch.
        top: Largest magnitude that the static scale covers; None where the scale is dynamic.
        clipped: Share of the elements beyond it.
    """

    name: str
    module: EmulatedModule
    part: str
    x: Quantizer
    rows: int = 0
    amax: float = 0.0
    channels: Tensor | None = None
    magnitudes: Tensor | None = None
    samples: list[Tensor] = field(default_factory=list)
    top: float | None = None
    clipped: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """Hold one weight matrix: a view of a Parameter, its quantised values, and the noise that they add.

    Args:
        name: As in Part; modules that share a Parameter share its slot, under the first one's name.
        parts: Whose product it enters.
        w: [N, K], a view of the Parameter.
        quantizer: What it is rounded by.
        hessian: Sum of ``x^T x`` over all rows, float64 [K, K]; None where no method needs it.
        rows: Rows in it.
        clipped: The weight that its scales are made of, where a method clips it; None is w.
        shared_amax: Largest magnitude of the layers that share a scale of the tensor; None where w's own counts.
        quantised: float32 [N, K], or None before.
        error: Mean of ``y - y_q`` over the rows seen, float64 [N].
        signal, noise: Sums of squares of y and of ``y - y_q``, in high precision and quantised, for the same inputs.
        seen: Rows in the three above.
    """

    name: str
    parts: list[Part]
    w: Tensor
    quantizer: Quantizer
    hessian: Tensor | None = None
    rows: int = 0
    clipped: Tensor | None = None
    shared_amax: float | None = None
    quantised: Tensor | None = None
    error: Tensor | None = None
    signal: float = 0.0
    noise: float = 0.0
    seen: int = 0


See = Callable[[Part, Slot, Tensor], None]


class Products:
    """Find the products of a converted model by running it.

    Args:
        model: Converted.
        configs: The quantisers of each converted module, by its name.
        names: The modules whose products count; None is all of them.
        done: Modules that run as they are converted, because they are quantised already.

    Attributes:
        modules: The converted modules whose products count, by name.
        parts: Inputs of products, by module and part.
        slots: Matrices that are multiplied with.
    """

    def __init__(
        self, model: nn.Module, configs: Mapping[str, LinearConfig], names: Container[str] | None = None,
        done: Container[str] = (),
    ) -> None:  # fmt: skip
        self.model, self.configs = model, configs
        self.parts: dict[tuple[str, str], Part] = {}
        self.slots: dict[Any, Slot] = {}
        converted = {name: m for name, m in model.named_modules() if isinstance(m, EmulatedModule)}
        self.modules = {name: m for name, m in converted.items() if names is None or name in names}
        self._plain = {name: m for name, m in converted.items() if name not in done}

    def run(self, batches: list[Any], see: See, tell: Tell = lambda done: None) -> None:
        """Run batches through the model in high precision, gradients and dropout off, and show every product.

        Raises:
            ArgumentError: The model does not take a batch, or an input holds NaN or Inf.
        """
        with evaluating(self.model), _plain(self._plain, lambda name: self._watch(name, see)), torch.no_grad():
            for i, batch in enumerate(batches):
                call(self.model, batch, i)
                tell(i + 1)

    def run_alone(self, see: See) -> None:
        """Run each module that no data reached by itself on a row of zeros, and show its products."""
        modules = {name: self.modules[name] for name in self.unreached}
        with evaluating(self.model), _plain(modules, lambda name: self._watch(name, see)), torch.no_grad():
            for module in modules.values():
                like, shapes = next(module.parameters()), module.input_shapes(1)
                zeros = {shape: like.new_zeros(shape) for shape in shapes}  # one tensor where shapes are the same
                type(module).forward(module, *(zeros[shape] for shape in shapes))

    @property
    def unreached(self) -> list[str]:
        """Names of the modules that calibration has not run yet."""
        ran = {part.module for part in self.parts.values()}
        return [name for name, module in self.modules.items() if module not in ran]

    def check(self) -> None:
        """Raise ArgumentError where calibration ran no module at all."""
        if self.modules and len(self.unreached) == len(self.modules):
            raise ArgumentError(
                f"calibration never ran {some([name or '(model)' for name in self.modules])}; pass calibration data "
                "that reaches a layer"
            )

    def _watch(self, name: str, see: See) -> Callable[[str], Callable[..., None]] | None:
        if name not in self.modules:
            return None

        def observer(part: str) -> Callable[..., None]:
            inputs: list[Tensor] = []

            def record(operand: str, t: Tensor, q: Tensor, quantizer: Quantizer, dim: int) -> None:
                if operand == "x_f":
                    inputs.append(t)
                    return
                x = inputs.pop()
                if not bool(torch.isfinite(x).all()):
                    raise ArgumentError("the calibration data gives it NaN or Inf; look for them in the batch")
                module, label = self.modules[name], ".".join(filter(None, (name, part))) or "(model)"
                fresh = Part(name=label, module=module, part=part, x=self.configs[name].fprop.a)
                calibrated = self.parts.setdefault((name, part), fresh)
                see(calibrated, self._slot(calibrated, name, t), x)

            return record

        return observer

    def _slot(self, part: Part, name: str, w: Tensor) -> Slot:
        if w.untyped_storage().data_ptr() not in {p.untyped_storage().data_ptr() for p in part.module.parameters()}:
            raise ArgumentError(
                "it multiplies with a copy of its weight, which cannot be rounded in place; quantise outside of "
                "torch.autocast, or leave the layer out with filter_fn= or a Rule(name=...)"
            )
        key = (w.data_ptr(), tuple(w.shape), w.stride())
        if key not in self.slots:
            groups = sum(slot.parts[0] is part for slot in self.slots.values())
            label = f"{part.name} group {groups}" if groups else part.name
            weight = w.detach()
            self.slots[key] = Slot(name=label, parts=[], w=weight, quantizer=self.configs[name].fprop.b)
        slot = self.slots[key]
        if part not in slot.parts:
            slot.parts.append(part)
        return slot


@contextmanager
def _plain(modules: Mapping[str, EmulatedModule], watch: Callable[[str], Any]) -> Iterator[None]:
    """Run modules in high precision while the inputs of those that are watched are recorded."""
    before = []
    for name, module in modules.items():
        how = module.emulation
        assert how is not None
        if how.observer is not None:
            raise ArgumentError(f"layer {name!r} is observed; leave fmtsim.observe before ptq")
        before.append((how, how.config, how.products))
        high = Layer(LinearConfig(), how.generator)
        how.config, how.products = LinearConfig(), dict.fromkeys(how.products, high)
        how.observer = watch(name)
    try:
        yield
    finally:
        for how, config, products in before:
            how.config, how.products, how.observer = config, products, None


@contextmanager
def row_major(model: nn.Module) -> Iterator[None]:
    """Lay weights of convolutions out row by row, so that they are matrices in place, and back as they were."""
    moved = [(p, p.stride()) for p in model.parameters() if p.dim() > 2 and not p.is_contiguous()]
    for p, _ in moved:
        p.data = p.data.contiguous()
    try:
        yield
    finally:
        for p, stride in moved:
            p.data = torch.empty_strided(p.shape, stride, dtype=p.dtype, device=p.device).copy_(p.data)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation, and each of its modules back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def call(model: nn.Module, batch: Any, index: int = 0, *, kind: str = "calibration batch") -> Any:
    """Return the output of a model for a batch: a tensor, a tuple or list of arguments, or a dict of keywords.

    The model gets copies of the tensors, because the batch runs again, and some models change their inputs.

    Raises:
        ArgumentError: The model does not take it.
    """
    try:
        if isinstance(batch, Mapping):
            return model(**{name: _copied(value) for name, value in batch.items()})
        return model(*map(_copied, batch)) if isinstance(batch, tuple | list) else model(_copied(batch))
    except Exception as error:  # whatever a model raises
        hint = ""
        if isinstance(batch, tuple | list) and isinstance(error, TypeError):
            hint = "; a batch of several is passed as several arguments: [x for x, label in data] leaves labels out"
        elif not isinstance(batch, Tensor | Mapping | tuple | list):
            hint = "; a batch is a tensor, a tuple of arguments or a dict of keywords"
        where = f"{kind} {index} ({_described(batch)}) does not run through {type(model).__name__}"
        raise ArgumentError(f"{where}: {str(error) or type(error).__name__}{hint}") from error


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(map(_copied, value))
    return {name: _copied(v) for name, v in value.items()} if type(value) is dict else value


def check_model(verb: str, model: Any) -> None:
    """Raise ArgumentError for what is not a module, is compiled, or has weights that are not there or not numbers."""
    check_module(verb, model)
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            what = f"module {name!r}" if name else "the model"
            raise ArgumentError(f"{what} is compiled, which hides its layers; quantise it first, then torch.compile it")
    check_loaded(model)
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ArgumentError(f"parameter {name!r} has no shape yet; run one batch through the model first")
        if p.is_floating_point() and not bool(torch.isfinite(p).all()):
            raise ArgumentError(f"parameter {name!r} holds NaN or Inf; load sound weights first")


def check_loaded(model: nn.Module) -> None:
    """Raise ArgumentError where a Parameter is on the meta device: not loaded yet, or offloaded by Accelerate."""
    empty = next((name for name, p in model.named_parameters() if p.is_meta), None)
    why = "; load the trained weights first"
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        why = ", because Accelerate offloads it; load the model without offload (device_map='cpu'), or call "
        why += "accelerate.hooks.remove_hook_from_module(model, recurse=True)"
    if empty is not None:
        raise ArgumentError(f"parameter {empty!r} is on the meta device{why}")


def batches_of(data: Any) -> list[Any]:
    """Return calibration data as a list of batches; raise ArgumentError where it is empty or no iterable of them."""
    if isinstance(data, Tensor):
        raise ArgumentError(
            f"calibration data is one tensor {tuple(data.shape)}; pass an iterable of batches, for example [tensor]"
        )
    if not isinstance(data, Iterable) or isinstance(data, Mapping | str | bytes) or not getattr(data, "shape", True):
        raise ArgumentError(f"calibration data is {type(data).__name__}; pass an iterable of batches")
    batches = list(data)
    if not batches or any(isinstance(b, Tensor) and b.numel() == 0 for b in batches):
        what = "empty" if not batches else "a tensor without elements in a batch"
        raise ArgumentError(f"calibration data is {what}; pass at least one batch of real inputs")
    return batches


def _described(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"{batch.dtype} {'nested' if batch.is_nested else tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return ", ".join(f"{name}: {_described(value)}" for name, value in batch.items())
    return ", ".join(map(_described, batch)) if isinstance(batch, tuple | list) else type(batch).__name__


def collect(part: Part, x: Tensor, calibration: Calibration | None) -> None:
    """Add an input [rows, K] to a part's statistics."""
    magnitudes = x.detach().abs().float()
    tops = magnitudes.amax(0)
    part.rows += x.shape[0]
    part.channels = tops if part.channels is None else torch.maximum(part.channels, tops)
    part.amax = max(part.amax, float(tops.max()))
    if calibration is not None and calibration.rule != "absmax":
        stride = max(1, magnitudes.numel() // calibration.samples)
        part.samples.append(magnitudes.flatten()[::stride].clone())


def choose_top(part: Part, calibration: Calibration | None) -> None:
    """Decide what the static scale of a part covers; a dynamic one is left alone."""
    if calibration is None or not is_static(part.x):
        return
    part.top = part.amax
    if calibration.rule == "percentile":
        part.top = percentile(torch.cat(part.samples), calibration.percentile)
    elif calibration.rule == "mse":
        part.top = least_error(torch.cat(part.samples), part.amax, part.x, calibration.steps)


def percentile(magnitudes: Tensor, percent: float) -> float:
    """Return the smallest of the numbers that ``percent`` % of them do not exceed; above zero where any is."""
    count = magnitudes.numel()
    place = max(1, min(count, -int(-percent * count // 100)))  # rounded up, counted from 1
    magnitude = float(magnitudes.kthvalue(place).values)
    return magnitude if magnitude > 0 else float(magnitudes.max())


def least_error(magnitudes: Tensor, amax: float, quantizer: Quantizer, steps: int) -> float:
    """Return the clip ``amax * i / steps`` of least squared error of these magnitudes; the largest in a tie."""
    if amax == 0:
        return 0.0
    x = magnitudes.reshape(1, -1)
    best, least = amax, float("inf")
    for i in range(steps, 0, -1):
        top = amax * i / steps
        error = float((static_values(x, quantizer, top).double() - x.double()).square().sum())
        if error < least:
            best, least = top, error
    return best


def static_scale(quantizer: Quantizer, top: float) -> DelayedScale:
    """Return the scale that a quantiser's rule makes of a largest magnitude, as one that stays.

    The rule is that of ``fmtsim.scaling.scales``: its targets, powers of two and allowed sets included.
    """
    element, scaling = quantizer.format, quantizer.scaling
    assert scaling is not None and element is not None and not isinstance(element, ScaledFormat)
    delayed = DelayedScale(fixed(quantizer))
    if scaling.tensor is not None:
        factor = tensor_factor(torch.tensor(top, dtype=torch.float32), scaling, float(element.max))
    else:
        computed = scales(torch.full((1, 1), top, dtype=torch.float32), scaling, float(element.max))
        factor = reciprocal(computed.scale) if computed.divides else computed.factor
    delayed.factor.copy_(factor.reshape(()))
    delayed.amaxes[0] = top
    return delayed


def static_values(x: Tensor, quantizer: Quantizer, top: float) -> Tensor:
    """Return a matrix under the static scale that covers ``top``, as the quantised model has it; float32."""
    scale = static_scale(quantizer, top).to(x.device).frozen()
    return quantize_operand(x, fixed(quantizer), Keys(), scale).values(torch.float32)


def quantised_input(part: Part, x: Tensor) -> Tensor:
    """Return an input as the quantised model multiplies with it; float32, or float64 for a float64 model."""
    if part.x.format is None:
        return x
    if part.top is not None:
        return static_values(x, part.x, part.top)
    return quantize_operand(x, part.x, Keys()).values(torch.float64 if x.dtype == torch.float64 else torch.float32)


def limit(part: Part) -> float | None:
    """Return the largest magnitude that the static scale represents, None where the scale is dynamic."""
    if part.top is None:
        return None
    scale = static_scale(part.x, part.top).scales().scale
    assert part.x.format is not None and part.x.scaling is not None
    block_max = 1.0 if part.x.scaling.tensor is None else float(part.x.scaling.scale.max)
    return float(scale) * block_max * float(part.x.format.max)  # type: ignore[union-attr]  # element formats have one
