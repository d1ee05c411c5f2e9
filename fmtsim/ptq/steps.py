# SPDX-License-Identifier: Apache-2.0
"""The steps of a quantisation, in their order: calibration, ranges, weights, measurement, installation."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fmtsim.formats.block import BlockFormat
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.gemm.layers.emulated_gemm import run_layer
from fmtsim.gemm.layers.keys import Layer
from fmtsim.gemm.layers.quantize_operand import quantize_operand
from fmtsim.nn.conversion import STATE
from fmtsim.nn.convolutions import EmulatedConvTranspose
from fmtsim.nn.coverage import numbered
from fmtsim.nn.modules import EmulatedBilinear, EmulatedModule
from fmtsim.ptq.calibrate import (
    Part,
    Products,
    Slot,
    call,
    choose_top,
    collect,
    evaluating,
    limit,
    quantised_input,
    static_scale,
)
from fmtsim.ptq.reshape import smooth
from fmtsim.ptq.weight_grid import clip, gptq, grid_of, hqq, learned_rounding, nearest
from fmtsim.recipes.ptq import PtqRecipe, is_static
from fmtsim.recipes.ptq_methods import Awq, Clip, Gptq, Hqq, LearnedRounding, Smooth
from fmtsim.scaling.history import DelayedScale, RememberedScale, StoredScale
from fmtsim.support.errors import ArgumentError
from fmtsim.support.progress import Progress
from fmtsim.support.records import located

# Which thirds of an attention module's packed weight its projections multiply with.
_THIRDS = {"in_proj": (0, 3), "q_proj": (0, 1), "k_proj": (1, 2), "kv_proj": (1, 3), "v_proj": (2, 3)}
_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")  # the outermost numbered module, such as model.layers.3
ROOM = 1 + 2.0**-20  # the largest value times its scale may fall short of what the scale was made of by roundings


def stages(
    model: nn.Module, recipe: PtqRecipe, configs: Mapping[str, LinearConfig], batches: list[Any], show: Progress
) -> Iterator[Products]:
    """Yield the products that are quantised together, stage by stage in the order in which the model runs them.

    The caller installs each stage before it asks for the next, so that the next sees quantised predecessors. Without
    ``recipe.sequential`` all products are one stage. Modules that share a weight are in the stage of the first of them.
    """
    if recipe.sequential is None:
        yield Products(model, configs)
        return
    order, owners, names = Products(model, configs), dict[int, str](), dict[str, str]()
    labels = {module: name for name, module in order.modules.items()}
    previous: list[Any] = [None, None]  # an input, held so that no other takes its place, and its stage

    # 1. Run the model once: a module joins its block, or in "layer" the module before it that has the same input.
    def see(part: Part, slot: Slot, x: Tensor) -> None:
        module = labels[part.module]
        same = previous[0] is not None and previous[0].data_ptr() == x.data_ptr()
        stage = (_BLOCK.match(module) or [module])[0] if recipe.sequential == "block" else module
        stage = previous[1] if same and recipe.sequential == "layer" else stage
        stage = names.setdefault(module, owners.setdefault(slot.w.data_ptr(), stage))
        previous[:] = [x, stage]

    show.stage("order", len(batches))
    order.run(batches, see, show.step)
    order.check()
    for module in order.unreached:  # joins the others of its block, or is a stage of its own at the end
        names[module] = (_BLOCK.match(module) or [module])[0] if recipe.sequential == "block" else module
    # 2. Yield the stages in the order of their first products.
    done: set[str] = set()
    for stage in dict.fromkeys(names.values()):
        members = {name for name in names if names[name] == stage}
        yield Products(model, configs, members, done)
        done |= members


def collected(
    products: Products, recipe: PtqRecipe, batches: list[Any], show: Progress, ranges: Sequence[Part] = ()
) -> Products:
    """Return products after a run that gave them their statistics; ``ranges`` has the parts of earlier stages."""

    def see(part: Part, slot: Slot, x: Tensor) -> None:
        collect(part, x, recipe.calibration)
        if not isinstance(recipe.weights, Hqq | None) and slot.quantizer.format is not None:
            _correlate(slot, x)

    # 1. The data; where there is none, all that is needed is which matrices there are.
    show.stage("calibration", len(batches))
    if batches:
        products.run(batches, see, show.step)
        if recipe.sequential is None:  # a stage may have layers alone that no data reaches
            products.check()
    reached = list(products.parts.values())
    # 2. Modules that no data reached have no statistics: their weights are rounded to nearest by their own ranges.
    products.run_alone(lambda part, slot, x: None)
    for part in reached:
        choose_top(part, recipe.calibration)
    # 3. Their static inputs get the widest range of layers whose names differ in numbers alone, else of all reached.
    ranged = [part for part in (*ranges, *reached) if part.top is not None]
    for part in products.parts.values():
        if recipe.calibration is not None and part.top is None and is_static(part.x):
            alike = [other for other in ranged if numbered(other.name) == numbered(part.name)]
            part.top = max((other.top or 0.0 for other in alike or ranged), default=0.0)
    return products


def _correlate(slot: Slot, x: Tensor) -> None:
    """Add an input [rows, K] to a slot's Hessian."""
    gram = (x.double().mT @ x.double()).cpu()
    slot.hessian = gram if slot.hessian is None else slot.hessian + gram
    slot.rows += x.shape[0]


def smooth_inputs(
    model: nn.Module, settings: Smooth | Awq, configs: Mapping[str, LinearConfig], batches: list[Any], show: Progress
) -> set[str]:
    """Smooth the layers of a model, and return their names."""
    products, fed = Products(model, configs), set()
    outputs: list[Tensor] = []

    def see(part: Part, slot: Slot, x: Tensor) -> None:
        collect(part, x, None)
        if isinstance(settings, Awq) and slot.quantizer.format is not None:
            _correlate(slot, x)
            sums = x.abs().sum(0, dtype=torch.float64).cpu()
            part.magnitudes = sums if part.magnitudes is None else part.magnitudes + sums
        if settings.after == "any" or any(x.data_ptr() == y.data_ptr() for y in outputs):
            fed.add(part)

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs[:] = [*outputs[-3:], output] if isinstance(output, Tensor) else outputs  # alive: their place is theirs

    hooks = [m.register_forward_hook(keep) for m in model.modules() if "norm" in type(m).__name__.lower()]
    try:
        show.stage("channels", len(batches))
        products.run(batches, see, show.step)
    finally:
        for hook in hooks:
            hook.remove()
    shared = [slot for slot in products.slots.values() if len(slot.parts) > 1 and not fed.isdisjoint(slot.parts)]
    if shared:
        both = " and ".join(part.name for part in shared[0].parts[:2])
        raise ArgumentError(
            f"SmoothQuant and AWQ: {both} share a weight, which cannot follow both their inputs; "
            "leave one out with filter_fn= or a Rule(name=...)"
        )
    slots = [slot for slot in products.slots.values() if slot.parts[0] in fed]
    names = {slot.parts[0].name for slot in slots if smooth(slot, settings)}
    if not names:
        raise ArgumentError(
            "SmoothQuant and AWQ: no linear layer has its input from a normalisation module; pass after='any'"
        )
    return names


def round_weights(products: Products, recipe: PtqRecipe, show: Progress) -> None:
    """Round every weight by its quantiser and the recipe's method."""
    slots, method = list(products.slots.values()), recipe.weights
    if recipe.fused:
        # fused layers get the largest magnitude among them, where one quantiser of them all has a scale of the tensor
        groups: dict[Any, list[Slot]] = {}
        for slot in slots:
            parent, _, last = slot.name.rpartition(".")
            fmt, scaling = slot.quantizer.format, slot.quantizer.scaling
            s = scaling if scaling is not None else fmt.scaling if isinstance(fmt, BlockFormat) else None
            fused = next((group for group in _FUSED if last in group.split()), None)
            if fused is None or s is None or s.statistic != "amax" or s.candidates != (1.0,):
                continue
            if s.block == (None, None) or (s.tensor is not None and s.block[0] == 1):
                groups.setdefault((parent, fused, slot.quantizer), []).append(slot)
        for group in groups.values():
            amax = max(float(slot.w.abs().max()) for slot in group)
            for slot in group:
                slot.shared_amax = amax
    show.stage("weights", len(slots))
    for i, slot in enumerate(slots):
        try:
            slot.quantised = _rounded(slot, method).to(device=slot.w.device, dtype=torch.float32)
        except ArgumentError as error:
            raise ArgumentError(f"layer {slot.name!r}: {error}") from None
        show.step(i + 1)


# Last names of layers that vLLM runs as one product, under one scale of the tensor; the last are DeepSeek's.
_FUSED = ("q_proj k_proj v_proj", "gate_proj up_proj", "w1 w3", "query key value", "q_a_proj kv_a_proj_with_mqa")


def widened(w: Tensor, amax: float | None) -> Tensor:
    """Return a weight with one more row that holds a magnitude, so that a scale of the tensor covers it."""
    if amax is None:
        return w
    row = w.new_zeros(1, w.shape[1])
    row[0, 0] = amax
    return torch.cat([w, row])


def _rounded(slot: Slot, method: Gptq | LearnedRounding | Clip | Hqq | None) -> Tensor:
    w, rows, amax = slot.w.cpu(), len(slot.w), slot.shared_amax
    if isinstance(method, Hqq) and slot.quantizer.format is not None:
        return hqq(w, slot.quantizer, method)
    if slot.hessian is None or (isinstance(method, Clip) and any(word in slot.name for word in method.skip)):
        return nearest(widened(slot.w, amax), slot.quantizer)[:rows]
    if isinstance(method, Clip):
        slot.clipped = clip(w, slot.hessian, slot.quantizer, method).to(slot.w.device)
        return nearest(widened(slot.clipped, amax), slot.quantizer)[:rows]
    grid = grid_of(widened(w, amax), slot.quantizer)
    grid = replace(grid, scale=grid.scale[:rows])
    if isinstance(method, Gptq):
        return gptq(w, slot.hessian, grid, method)
    assert isinstance(method, LearnedRounding)
    return learned_rounding(w, slot.hessian, grid, method)


def serving_layer(recipe: PtqRecipe, part: Part, slot: Slot) -> Layer:
    """Return what runs a product of the quantised model, given the slot's rounded weight."""
    gemm = recipe.served(part.x, slot.quantizer)
    state: dict[str, Any] = {}
    if part.top is not None:
        state["x_f"] = static_scale(part.x, part.top).to(slot.w.device).frozen()
    if gemm.b.source == "stored":
        state["w_f"] = StoredScale(*scales_of(slot))
    return Layer(LinearConfig(fprop=gemm), None, state)


def scales_of(slot: Slot) -> tuple[Tensor | None, Tensor | None]:
    """Return the scales of blocks and of the tensor that a weight is rounded with, before it is overwritten."""
    w = slot.w if slot.clipped is None else slot.clipped
    operand = quantize_operand(widened(w, slot.shared_amax), slot.quantizer)
    if operand.has_row_level:  # stored weights have one scale of the tensor
        return None, None
    scale = None if operand.scale is None else operand.scale[: -1 if len(operand.scale) > len(w) else None]
    return tuple(None if s is None else s.clone() for s in (scale, operand.tensor_scale))  # type: ignore[return-value]


def measure(products: Products, recipe: PtqRecipe, batches: list[Any], show: Progress) -> None:
    """Measure what quantisation costs the outputs of every product, inputs being those of the model as it was."""
    layers: dict[tuple[Part, Slot], Layer] = {}

    def output(part: Part, slot: Slot, x: Tensor) -> Tensor:
        assert slot.quantised is not None
        if not recipe.machine:
            return quantised_input(part, x).to(x.dtype) @ slot.quantised.to(x.dtype).mT
        if (part, slot) not in layers:
            layers[part, slot] = serving_layer(recipe, part, slot)
        with located(f"layer {part.name!r}"):
            return run_layer(x, slot.quantised.to(x.dtype), None, layers[part, slot])

    def see(part: Part, slot: Slot, x: Tensor) -> None:
        top = limit(part)
        if top is not None:
            part.clipped += float((x.abs() > top * ROOM).sum()) / (part.rows * x.shape[1])
        y = x @ slot.w.mT
        d = y - output(part, slot, x)
        slot.signal += float(y.square().sum(dtype=torch.float64))
        slot.noise += float(d.square().sum(dtype=torch.float64))
        off = d.sum(0, dtype=torch.float64)
        slot.error = off if slot.error is None else slot.error + off
        slot.seen += x.shape[0]

    show.stage("measurement", len(batches))
    products.run(batches, see, show.step)


@torch.no_grad()
def install(products: Products, correct_bias: bool) -> set[str]:
    """Store the quantised weights, biases and scales in the model; return the layers whose bias was corrected."""
    corrected: set[str] = set()
    for slot in products.slots.values():
        assert slot.quantised is not None
        for part in slot.parts:
            memory = _memory(part.module).get(f"{part.part}_w_f" if part.part else "w_f")
            if isinstance(memory, StoredScale):
                for name, scale in zip(("scale", "tensor_scale"), scales_of(slot), strict=True):
                    if scale is not None:
                        setattr(memory, name, scale)
        slot.w.copy_(slot.quantised)
        if correct_bias and bias_corrects(slot) and slot.error is not None:  # none was measured where no data went
            # the mean error of a layer's outputs is added to its bias; layers without one get one
            owner: Any = slot.parts[0].module
            if owner.bias is None:
                outputs = getattr(owner, "out_features", None) or owner.out_channels
                bias = torch.zeros(outputs, dtype=slot.w.dtype, device=slot.w.device)
                owner.bias = nn.Parameter(bias, requires_grad=False)
            moved, dims = slot.w.storage_offset() - owner.weight.storage_offset(), owner.weight.dim()
            row = moved // owner.weight.stride(0) if dims > 2 else 0
            owner.bias[row : row + slot.w.shape[0]] += (slot.error / slot.seen).to(owner.bias.dtype)
            corrected.add(slot.name)
    for part in products.parts.values():
        if part.top is not None:
            _keep(_memory(part.module)[f"{part.part}_x_f" if part.part else "x_f"], part)  # type: ignore[arg-type]
    for module in products.modules.values():
        # 1. Projections that calibration did not run get the widest scale of those that it did: an attention module
        # multiplies by one packed weight or by several, as its caller passes one tensor or more.
        parts = [p for p in products.parts.values() if p.module is module and p.top is not None]
        projections = [part for part in parts if part.part.endswith("_proj") and part.part != "out_proj"]
        if projections:
            widest = max(projections, key=lambda part: part.top or 0.0)
            for name, memory in _memory(module).items():
                if isinstance(memory, DelayedScale) and not int(memory.calls) and name != "out_proj_x_f":
                    _keep(memory, widest)
        # 2. Projections of a packed weight that calibration did not run get the stored scales of those that it did: a
        # part of a weight has the scales of its rows, or that of the tensor; the whole those of its parts, where these
        # have scales of rows alone.
        stored = {name.removesuffix("_w_f"): m for name, m in _memory(module).items() if isinstance(m, StoredScale)}
        thirds = {name: stored[name] for name in _THIRDS if name in stored and stored[name].scale.numel()}
        for name in [name for name in _THIRDS if name in stored and name not in thirds]:
            first, last = _THIRDS[name]
            pieces: list[tuple[Tensor, Tensor]] = []
            place = first
            for other, whole in thirds.items():
                start, end = _THIRDS[other]
                rows = 0 if whole.scale.shape[0] == 1 else whole.scale.shape[0] // (end - start)
                if start <= place and last <= end and not pieces:
                    scale = whole.scale[(first - start) * rows : (last - start) * rows] if rows else whole.scale
                    pieces, place = [(scale, whole.tensor_scale)], last
                elif start == place and end <= last and rows and not whole.tensor_scale.numel():
                    pieces, place = [*pieces, (whole.scale, whole.tensor_scale)], end
            if place == last:
                stored[name].scale = torch.cat([scale for scale, _ in pieces])
                stored[name].tensor_scale = pieces[0][1].clone()
    return corrected


def _memory(module: EmulatedModule) -> dict[str, RememberedScale]:
    memory = module._modules.get(STATE)
    return {} if memory is None else dict(memory.named_children())  # type: ignore[arg-type]


def _keep(memory: DelayedScale, part: Part) -> None:
    assert part.top is not None
    scale = static_scale(part.x, part.top)
    memory.factor.copy_(scale.factor)
    memory.amaxes.copy_(scale.amaxes)
    memory.calls.fill_(1)


def bias_corrects(slot: Slot) -> bool:
    """Return True if what is added to a bias moves the outputs of one product, and no others."""
    part = slot.parts[0]
    sums = isinstance(part.module, EmulatedConvTranspose | EmulatedBilinear)  # of products are their outputs
    return not (part.part or len(slot.parts) > 1 or sums) and hasattr(part.module, "bias")


def measure_batch_norm(model: nn.Module, batches: list[Any], show: Progress) -> int:
    """Measure the statistics of batch normalisation in the quantised model; return how many layers there are."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    if not layers:
        return 0
    momenta = [layer.momentum for layer in layers]
    show.stage("batch norm", len(batches))
    with evaluating(model), torch.no_grad():
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum, layer.training = None, True  # None is the mean of all batches
        for i, batch in enumerate(batches):
            call(model, batch, i)
            show.step(i + 1)
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum, layer.training = momentum, False
    return len(layers)
