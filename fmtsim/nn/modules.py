# SPDX-License-Identifier: Apache-2.0
"""Layers, recurrent ones too, whose products are emulated: the same Parameters and state_dict, another forward."""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fmtsim.casts.arguments import check_dense, check_whole
from fmtsim.gemm.layers.config import OPERANDS, LinearConfig
from fmtsim.gemm.layers.emulated_gemm import run_sized
from fmtsim.gemm.layers.keys import FORWARD, Generator, Layer, State
from fmtsim.gemm.layers.quantize_operand import wide_dtype
from fmtsim.gemm.layers.watch import Observer, Watcher
from fmtsim.gemm.targets.doubts import caller_level
from fmtsim.nn.conversion import STATE, hidden_by, wrap
from fmtsim.nn.unit_scaling import Factors, scaled_product
from fmtsim.recipes.layer_plan import LayerPlan
from fmtsim.scaling.history import DelayedScale, FrozenScale, StoredScale
from fmtsim.scaling.repeats import Calls
from fmtsim.support.errors import ArgumentError, CoverageWarning, FmtsimError


@dataclasses.dataclass(slots=True, kw_only=True)
class Emulation:
    """Hold what a converted module needs beside its Parameters.

    Args:
        name: The module's name in the converted model.
        config: The quantisers of its products.
        recipe: Name of the recipe that says them, None for a config.
        usual: What layers without an exception run under it.
        generator: Source of stochastic rounding's keys; None means torch's default generator.
        observer: Set by ``fmtsim.observe`` while it is active, else None: given the name of a part of the module
            (empty for the module itself), it returns the observer of that part.
        plan: What the module runs at which step of training; None is ``config`` always.
        layers: For each config what runs its products, by part and kind of call (``_kind``).
        products: Those of the config in force.
        draws: States of the generator that calls under activation checkpointing began with.
        stepped: Whether ``fmtsim.nn.set_step`` was called.
        not_run: What ran in place of the module's products, a forward that was set on the instance; empty otherwise.
        factors: What multiplies products and gradients, where a recipe scales the model; None is nothing.
    """

    name: str
    config: LinearConfig
    recipe: str | None = None
    usual: LinearConfig | None = None
    generator: Generator = None
    observer: Callable[[str], Observer | Watcher] | None = None
    plan: LayerPlan | None = None
    layers: list[tuple[LinearConfig, dict[str, Layer]]] = dataclasses.field(default_factory=list)
    products: dict[str, Layer] = dataclasses.field(default_factory=dict)
    draws: Calls[Tensor] = dataclasses.field(default_factory=Calls, compare=False)
    stepped: bool = False
    not_run: str = ""
    factors: Factors | None = None

    @property
    def label(self) -> str:
        """The recipe and its machine; the quantisers behind it where they are an exception, or of no recipe."""
        if self.recipe is None or self.config != self.usual:
            return ": ".join(filter(None, (self.recipe, str(self.config))))
        return " on ".join(filter(None, (self.recipe, " and ".join(self.config.machines))))

    @property
    def runs(self) -> int:
        """How many calls of products of the module ran."""
        return sum(layer.runs for _, products in self.layers for layer in products.values())

    def run(self, config: LinearConfig) -> None:
        """Take a config into force, one of those that ``layers`` has."""
        matching = [layers for layer_config, layers in self.layers if layer_config is config or layer_config == config]
        self.config, self.products = config, matching[0]  # the scales of all configs are in one memory

    def changed(self, change: Callable[[str, LinearConfig], LinearConfig]) -> "Emulation":
        """Return what runs the products in force under other configs, with the same memory and generator.

        Args:
            change: From the name of a part and its config to another one.
        """
        products = {
            kind: Layer(change(kind.split(" ")[0], layer.config), layer.generator, layer.state)
            for kind, layer in self.products.items()
        }
        return Emulation(
            name=self.name, config=self.config, generator=self.generator, products=products, factors=self.factors
        )


class _Memory(nn.ModuleDict):
    """Hold the scales of a layer; torch's parallelize_module, which asks it for a weight, is told what to use."""

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            text = (
                "what a converted layer remembers of its scales has no weight; torch's parallelize_module takes no such"
            )
            raise AttributeError(f"{text} layer: use fmtsim.distributed.parallelize, then convert the model")
        return super().__getattr__(name)


class EmulatedModule(nn.Module):
    """Mark a module whose products go through EmulatedGEMM, and remember which class it was.

    ``fmtsim.convert`` gives an existing module such a class and ``fmtsim.revert`` gives the old one back; the object,
    its Parameters, buffers, hooks and flags are never copied or replaced.
    """

    original_class: ClassVar[type[nn.Module]] = nn.Module
    parts: ClassVar[tuple[str, ...]] = ("",)  # names of its products
    emulation: Emulation | None = None

    @staticmethod
    def matrices(module: Any) -> Iterator[tuple[int, int]]:
        """Yield rows and columns of each matrix that a layer of the original class multiplies with."""
        yield from ()

    @staticmethod
    def why_left(module: Any) -> str | None:
        """Return why a layer of the original class stays as it is, None where it is converted."""
        return None

    def input_shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of inputs whose products have so many rows of x."""
        return ((rows, next(iter(self.matrices(self)))[1]),)

    def gemm(self, x: Tensor, w: Tensor, bias: Tensor | None, part: str = "") -> Tensor:
        """Return ``x w^T + bias`` under this module's quantisers; raise ArgumentError where it has none.

        ``part`` names the product in statistics where a module has several.
        """
        how = self.emulation
        if how is None:
            raise ArgumentError(
                f"{type(self).__name__} has no LinearConfig; "
                f"make it from {self.original_class.__name__} with fmtsim.convert"
            )
        # 1. tensors that products take
        if how.observer is not None and torch.compiler.is_compiling():
            raise ArgumentError(
                "fmtsim.observe does not see into compiled code; observe the model that was given to torch.compile"
            )
        compiled = torch.compiler.is_dynamo_compiling()
        if compiled or type(x) is not Tensor or x.is_nested or x.layout is not torch.strided:
            check_whole(f"x of layer {how.name!r}", type(x))
            check_dense("x", x)
        # 2. what runs this part now: with its random draws of the first call under activation checkpointing
        learns, observer = torch.is_grad_enabled(), None if how.observer is None else how.observer(part)
        layer = how.products[part if learns and not compiled else _kind(part, learns, compiled)]
        if not compiled and isinstance(layer.generator, torch.Generator):
            drawn = how.draws.generator(layer.generator)
            layer = layer if drawn is layer.generator else Layer(layer.config, drawn, layer.state)
        # 3. its product, times the factors of a recipe that scales the model
        try:
            if how.factors is None:
                return run_sized(x, w, bias, layer, observer)
            return scaled_product(partial(run_sized, layer=layer, observer=observer), x, w, bias, how.factors(x, w))
        except FmtsimError as error:
            raise type(error)(f"layer {how.name!r}: {error}") from error

    def emulate(self, name: str, plan: LayerPlan, generator: Generator, total_steps: int | None) -> None:
        """Take the quantisers of a plan; ``total_steps`` is the length of the run, where a schedule needs it."""
        first = plan.at(0, total_steps) or LinearConfig()  # high precision without a rule or a default
        scheduled = plan if plan.scheduled else None  # without a schedule the config of step 0 is all
        self.emulation = Emulation(name=name, config=first, usual=plan.default, generator=generator, plan=scheduled)
        self.remember()

    def remember(self) -> None:
        """Make what remembers the scales of this module, delayed or stored, where one of its configs has such."""
        how = self.emulation
        assert how is not None
        configs = (how.config,) if how.plan is None else (how.config, *how.plan.configs, LinearConfig())
        memory = _Memory()
        for part in self.parts:
            for config in configs:
                for name, quantizer in config.operands.items():
                    if quantizer.source == "stored":  # ptq fills it, and calls only read it
                        memory[_state_key(part, name)] = StoredScale()
                    elif quantizer.scaling is not None and quantizer.scaling.history is not None:
                        memory[_state_key(part, name)] = DelayedScale(quantizer)
        if len(memory):  # else the state_dict stays that of the original class
            device = next(self.parameters()).device
            hook = self.__dict__.get("_hf_hook")  # Accelerate's loads offloaded weights where it computes
            if device.type == "meta" and getattr(hook, "execution_device", None) is not None:
                device = torch.device(hook.execution_device)  # type: ignore[union-attr]
            moves = next(memory.buffers()).device != device
            self.add_module(STATE, memory.to(device) if moves else memory)
        for config in configs:
            products = {
                _kind(part, learns, compiled): Layer(config, how.generator, self._state(part, learns, compiled))
                for part in self.parts
                for learns, compiled in itertools.product((True, False), repeat=2)
            }
            how.layers.append((config, products))
        how.run(how.config)

    def _state(self, part: str, learns: bool, compiled: bool) -> State:
        """Return what delayed scaling remembers of a part of this module, by operand.

        Without gradients (``learns`` is False) it is looked at and not changed, and a forward pass that activation
        checkpointing runs again gets the scales of its first run, as in Transformer Engine.
        """
        memory = self._modules.get(STATE)
        if memory is None:
            return {}
        keys = {name: _state_key(part, name) for name in OPERANDS}
        state: dict[str, DelayedScale | FrozenScale | StoredScale] = {}
        for name, scale in ((name, memory[key]) for name, key in keys.items() if key in memory):  # type: ignore[index, operator]
            if isinstance(scale, StoredScale):
                state[name] = scale
                continue
            assert isinstance(scale, DelayedScale)
            assert scale.scaling.history is not None
            if not learns or scale.scaling.history.fixed:
                state[name] = scale.frozen()
            else:  # activation checkpointing may run the forward pass again
                state[name] = scale.learning(compiled=compiled) if name in FORWARD else scale
        return state

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; around a forward, which hides the class's, put the check that the layer's products run."""
        super().__setattr__(name, value)
        if name == "forward" and self.emulation is not None and hidden_by(self) is not None:
            self.emulation.not_run = ""
            wrap(self, "check", _check_run)

    @property
    def not_run(self) -> str:
        """What ran in place of the module's products, by the last call; empty where they did or none was made."""
        return self.emulation.not_run if self.emulation is not None and "forward" in self.__dict__ else ""

    def extra_repr(self) -> str:
        """Show recipe and formats after the layer's own description."""
        return ", ".join(filter(None, (super().extra_repr(), self._runs)))

    def __repr__(self) -> str:
        """Show them, too, where the original class writes the whole line itself."""
        description = super().__repr__()
        return description if self._runs in description else f"{description}: {self._runs}"

    @property
    def _runs(self) -> str:
        how = self.emulation
        return "" if how is None else how.label + ("" if how.factors is None else f", {how.factors}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the original class, because classes made for user subclasses have no importable name."""
        return _rebuild, (self.original_class,), self.__getstate__()  # type: ignore[attr-defined]  # object's, Python 3.11


def _check_run(_: None, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a forward that was set after convert, and tell once if no product of the layer ran in it."""
    how = module.__dict__.get("emulation")
    if how is None or how.not_run or torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    before, y = how.runs, forward(*args, **kwargs)  # runs counts calls of the layer's products
    if how.runs == before:
        how.not_run = f"a forward that was set on the instance after convert, {hidden_by(module)}, ran in its place"
        text = f"layer {how.name!r} ran, and was not emulated: {how.not_run}; call the converted layer's forward in it"
        warnings.warn(text, CoverageWarning, stacklevel=caller_level())
    return y


def _kind(part: str, learns: bool, compiled: bool) -> str:
    """Return a part's key in ``Emulation.products``: part, without gradients, compiled."""
    return " ".join([part, *([] if learns else ["frozen"]), *(["compiled"] if compiled else [])])


def _state_key(part: str, operand: str) -> str:
    return f"{part}_{operand}" if part else operand


class EmulatedLinear(EmulatedModule, nn.Linear):
    """Apply ``y = x w^T + bias`` with quantised operands in all three products."""

    original_class = nn.Linear

    @staticmethod
    def matrices(module: nn.Linear) -> Iterator[tuple[int, int]]:
        """Yield the size of the weight."""
        yield module.out_features, module.in_features

    def forward(self, input: Tensor) -> Tensor:
        """Return ``[..., out_features]`` from ``[..., in_features]``."""
        return self.gemm(input, self.weight, self.bias)


class EmulatedTransposed(EmulatedModule):
    """Apply ``y = x w + bias``, w being stored as ``[inputs, outputs]``: GPT-2's Conv1D in transformers."""

    weight: nn.Parameter
    bias: nn.Parameter

    @staticmethod
    def matrices(module: Any) -> Iterator[tuple[int, int]]:
        """Yield the size of the weight's transpose."""
        yield module.weight.shape[1], module.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., outputs]`` from ``[..., inputs]``."""
        return self.gemm(x, self.weight.t(), self.bias)


class EmulatedBilinear(EmulatedModule, nn.Bilinear):
    """Apply ``y_o = x1 A_o x2 + bias``: one product of x2 with quantised operands, then a sum with x1.

    The product is x2 by the weight as ``[outputs x in1, in2]``, rounded to x2's dtype; blocks run along in2. The sum
    over in1 and the bias are float32 (float64 for float64), in torch's own order, and rounded once.
    """

    original_class = nn.Bilinear

    @staticmethod
    def matrices(module: nn.Bilinear) -> Iterator[tuple[int, int]]:
        """Yield the size of the weight as a matrix."""
        yield module.out_features * module.in1_features, module.in2_features

    def input_shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of both inputs."""
        return (rows, self.in1_features), (rows, self.in2_features)

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """Return ``[..., out_features]`` from ``[..., in1_features]`` and ``[..., in2_features]``."""
        shapes, sizes = (tuple(input1.shape), tuple(input2.shape)), (self.in1_features, self.in2_features)
        if (shapes[0][-1:], shapes[1][-1:]) != (sizes[:1], sizes[1:]) or shapes[0][:-1] != shapes[1][:-1]:
            raise ArgumentError(
                f"Bilinear inputs of shapes {shapes[0]} and {shapes[1]} do not fit; "
                f"pass [..., {sizes[0]}] and [..., {sizes[1]}] with the same leading dimensions"
            )
        columns = self.gemm(input2, self.weight.flatten(0, 1), None)  # [..., outputs x in1]
        wide = wide_dtype(columns.dtype)
        y = (columns.unflatten(-1, self.weight.shape[:2]).to(wide) * input1.unsqueeze(-2).to(wide)).sum(-1)
        return (y if self.bias is None else y + self.bias.to(wide)).to(columns.dtype)


_EMULATED: dict[type[nn.Module], type[EmulatedModule]] = {nn.Linear: EmulatedLinear, nn.Bilinear: EmulatedBilinear}
# Classes of packages that may be absent, by module and name, and how to emulate them.
_FOREIGN: dict[tuple[str, str], type[EmulatedModule]] = {("transformers.pytorch_utils", "Conv1D"): EmulatedTransposed}


def register_emulated(cls: type[EmulatedModule]) -> None:
    """Make ``convert`` use a class for its ``original_class`` and for subclasses that keep the original forward."""
    _EMULATED[cls.original_class] = cls


def emulated_types() -> tuple[type[nn.Module], ...]:
    """Return the module types that have an emulated counterpart."""
    return tuple(_EMULATED)


def emulated_class(original: type[nn.Module]) -> type[EmulatedModule] | None:
    """Return the class that emulates another, None where there is none or the forward is the user's own."""
    return _emulated_class(original)  # type: ignore[arg-type]  # mypy takes nn.Module's __hash__ for its metaclass's


@lru_cache(maxsize=256)
def _emulated_class(original: type[nn.Module]) -> type[EmulatedModule] | None:
    for base, emulated in _EMULATED.items():
        if original is base:
            return emulated
        if issubclass(original, base) and _same_forward(original, base):  # a subclass with the original forward
            return type(f"Emulated{original.__name__}", (emulated, original), {"original_class": original})
    for base in original.__mro__:
        foreign = _FOREIGN.get((base.__module__, base.__qualname__))
        if foreign is not None and _same_forward(original, base):
            return type(f"Emulated{original.__name__}", (foreign, original), {"original_class": original})
    return None


def _same_forward(original: type[nn.Module], base: type[nn.Module]) -> bool:
    names = ("forward", "_conv_forward")  # convolutions multiply in _conv_forward
    return all(getattr(original, name, None) is getattr(base, name, None) for name in names)


def _rebuild(original: type[nn.Module]) -> nn.Module:
    cls = emulated_class(original)
    if cls is None:
        raise ArgumentError(
            f"{original.__name__} has no emulated counterpart any more; revert the model before saving it whole"
        )
    return cls.__new__(cls)


States = tuple[Tensor, ...]


class EmulatedRecurrent(EmulatedModule, nn.RNNBase):
    """Apply a recurrent layer by its steps: one product with all inputs, and one with the state in every step.

    Gates stand in torch's order and are made by torch's operations, so that in float32, without quantisers, outputs
    and states have the bits of torch's own loop on a CPU; oneDNN's and cuDNN's fused calls round elsewhere. The
    gradient of a state's weight is a sum of one product a step, in the order that autograd adds them.
    """

    @property
    def parts(self) -> tuple[str, ...]:  # type: ignore[override]  # they depend on the number of layers
        """Names of the products: ``ih_l0`` with the inputs, ``hh_l0`` with the state, ``hr_l0`` the projection."""
        kinds = ("ih", "hh", "hr") if self.proj_size else ("ih", "hh")
        return tuple(f"{kind}{suffix}" for suffix in _suffixes(self) for kind in kinds)

    @staticmethod
    def matrices(module: Any) -> Iterator[tuple[int, int]]:
        """Yield the size of each weight."""
        for part in EmulatedRecurrent.parts.fget(module):  # type: ignore[attr-defined]  # of the original class, too
            yield tuple(getattr(module, f"weight_{part}").shape)

    def input_shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """Return the shape of a batch of so many sequences of one step."""
        return ((rows, 1, self.input_size) if self.batch_first else (1, rows, self.input_size),)

    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        """Return outputs and last states, shaped as those of the original class."""
        if isinstance(input, PackedSequence):
            raise ArgumentError(
                f"layer {self.emulation.name if self.emulation else ''!r}: an emulated {self.original_class.__name__} "
                "takes no packed sequences; pass padded ones (torch.nn.utils.rnn.pad_packed_sequence)"
            )
        dim, alone = (0 if self.batch_first else 1), input.dim() == 2  # one sequence without a batch dimension
        x = input.unsqueeze(dim) if alone else input
        several = self.mode == "LSTM"
        states = hx if several or hx is None else (hx,)  # an LSTM has a cell beside its state
        if states is None:
            widths = (self.proj_size or self.hidden_size, self.hidden_size)[: 1 + several]
            states = tuple(x.new_zeros(len(_suffixes(self)), x.shape[dim], width) for width in widths)
        elif alone:
            states = tuple(state.unsqueeze(1) for state in states)
        self.check_forward_args(x, states if several else states[0], None)  # type: ignore[arg-type]  # LSTM's own
        steps = x.transpose(0, 1) if self.batch_first else x  # [steps, batch, features]
        last: list[States] = []
        for layer, suffixes in enumerate(zip(*[iter(_suffixes(self))] * (1 + self.bidirectional), strict=True)):
            outputs = []
            for suffix in suffixes:
                y, final = self._run(steps, tuple(state[len(last)] for state in states), suffix)
                outputs.append(y)
                last.append(final)
            steps = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
            if self.dropout and self.training and layer < self.num_layers - 1:
                steps = F.dropout(steps, self.dropout, True)
        y = steps.transpose(0, 1) if self.batch_first else steps
        finals = [torch.stack(parts) for parts in zip(*last, strict=True)]
        if alone:
            y, finals = y.squeeze(dim), [state.squeeze(1) for state in finals]
        return y, tuple(finals) if several else finals[0]

    def _run(self, steps: Tensor, state: States, suffix: str) -> tuple[Tensor, States]:
        """Run one direction of a layer; return its outputs and last state."""
        names = ("weight_ih", "weight_hh", "weight_hr", "bias_ih", "bias_hh")
        w_ih, w_hh, w_hr, b_ih, b_hh = (getattr(self, f"{name}{suffix}", None) for name in names)
        # 1. the inputs of all steps in one product
        inputs = self.gemm(steps, w_ih, b_ih, f"ih{suffix}").unbind(0)  # type: ignore[arg-type]
        back = suffix.endswith("_reverse")  # the reverse direction begins at the last step
        outputs = []
        for gates in reversed(inputs) if back else inputs:
            # 2. the state's product, then the gates
            hidden = self.gemm(state[0], w_hh, b_hh, f"hh{suffix}")  # type: ignore[arg-type]
            state = _STEPS[self.mode](gates, hidden, *state)
            if self.proj_size:
                state = self.gemm(state[0], w_hr, None, f"hr{suffix}"), state[1]  # type: ignore[arg-type]
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if back else outputs), state


def _suffixes(module: nn.RNNBase) -> list[str]:
    """Return how the names of the weights end, in the order of torch's states: by layer, then direction."""
    ways = ("", "_reverse") if module.bidirectional else ("",)
    return [f"_l{layer}{way}" for layer in range(module.num_layers) for way in ways]


def _lstm(inputs: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> States:
    """Return state and cell from gates in the order input, forget, cell, output."""
    i, f, g, o = (hidden + inputs).chunk(4, 1)  # torch's kernel adds both products before it splits them
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(inputs: Tensor, hidden: Tensor, h: Tensor) -> States:
    """Return the state from gates in the order reset, update, new; the reset gate meets the product with the state."""
    width = 2 * h.shape[1]
    # views of one sum, as torch has them: its vector code treats the ends of rows as those of its own rows
    r, z = (gate.sigmoid() for gate in (hidden[:, :width] + inputs[:, :width]).chunk(2, 1))  # reset, update
    n = (inputs[:, width:] + hidden[:, width:] * r).tanh()
    return ((h - n) * z + n,)


_STEPS: dict[str, Callable[..., States]] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN_TANH": lambda inputs, hidden, h: ((hidden + inputs).tanh(),),
    "RNN_RELU": lambda inputs, hidden, h: ((hidden + inputs).relu(),),
}

for _cls in (nn.LSTM, nn.GRU, nn.RNN):
    _name = f"Emulated{_cls.__name__}"
    register_emulated(type(_name, (EmulatedRecurrent, _cls), {"original_class": _cls, "__module__": __name__}))
