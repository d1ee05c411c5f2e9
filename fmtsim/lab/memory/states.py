# SPDX-License-Identifier: Apache-2.0
"""What training keeps of weights: they themselves, copies, gradients and what an optimizer remembers, in bytes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import nn

from fmtsim.formats.registry import get_format
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.lab.memory.estimate import MemoryLine, Parallel, bits_of, bits_per_element
from fmtsim.lab.memory.sizes import ModelSize
from fmtsim.nn.planning import Selector
from fmtsim.optim import rules
from fmtsim.optim.catalogue import describe, get_scheme, list_schemes
from fmtsim.optim.rules import madam
from fmtsim.recipes.recipe import Recipe
from fmtsim.recipes.system import OptimizerConfig
from fmtsim.spec.optimizer import Scheme, StateFormat, in_parameter
from fmtsim.support.errors import ArgumentError, did_you_mean, shown

HEAD = "lm_head"
STEP = (0, 1 << 20)  # of a schedule: the first step, in a run whose fractions lie behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """Describe the weights of one name."""

    name: str  # as in Hugging Face's Llama; of several experts one
    shape: tuple[int, ...]  # of each
    repeat: int = 1  # how many there are
    linear: bool = False  # whether it is the matrix of a linear layer other than the head
    config: LinearConfig | None = None  # how the layer runs under a recipe, None in high precision

    @property
    def layer(self) -> str:
        """The name of its module."""
        return self.name.rpartition(".")[0]

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix of a linear layer, the head's too."""
        return self.linear or self.layer == HEAD

    @property
    def elements(self) -> int:
        """Numbers in all of them."""
        return prod(self.shape) * self.repeat


class _Block(nn.Module):
    def __init__(self, size: ModelSize, number: int) -> None:
        super().__init__()
        biases = size.biases
        self.input_layernorm = _norm(size)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for name, (n, k) in size.attention.items():
            self.self_attn.add_module(name, nn.Linear(k, n, bias=("out" if name == "o_proj" else "qkv") in biases))
        self.post_attention_layernorm = _norm(size)
        if number < size.dense or not size.experts:
            _mlp(self.mlp, size, size.dense_width if size.dense else size.intermediate)
            return
        self.mlp.gate = nn.Linear(size.hidden, size.experts, bias=False)
        expert = nn.Module()
        _mlp(expert, size, size.intermediate)
        self.mlp.experts = nn.ModuleList([expert])
        if size.shared:
            self.mlp.shared_experts = nn.Module()
            _mlp(self.mlp.shared_experts, size, size.shared)


class Transformer(nn.Module):
    """The modules of a transformer without numbers, in which rules find layers; one expert stands for all."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(size.vocabulary, size.hidden)
            if size.positions:
                self.embed_positions = nn.Embedding(size.positions, size.hidden)
            self.layers = nn.ModuleList(_Block(size, number) for number in range(size.blocks))
            self.norm = _norm(size)
            self.lm_head = nn.Linear(size.hidden, size.vocabulary, bias="head" in size.biases)
        if size.tied:
            self.lm_head.weight = self.embed_tokens.weight


def weights_of(size: ModelSize, recipe: Recipe | None = None) -> tuple[Weight, ...]:
    """Return the weights of a model and how their layers run under a recipe at its first step.

    A weight that head and embedding share is the head's.

    Raises:
        ArgumentError: A rule of the recipe fits no layer.
    """
    model = Transformer(size)
    selector = None if recipe is None else Selector(model)
    if selector is not None and recipe is not None:
        selector.check(recipe)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    weights = []
    for name, parameter in model.named_parameters():
        name = f"{HEAD}.weight" if parameter is model.lm_head.weight else name
        layer, _, kind = name.rpartition(".")
        matrix = kind == "weight" and layer in linear
        config = None
        if matrix and selector is not None and recipe is not None:
            config = selector.plan(layer, recipe).at(*STEP)
        repeat = size.experts if ".experts." in name else 1
        shape = tuple(parameter.shape)
        weights.append(Weight(name=name, shape=shape, repeat=repeat, linear=matrix and layer != HEAD, config=config))
    return tuple(weights)


def _norm(size: ModelSize) -> nn.Module:
    return nn.LayerNorm(size.hidden) if "norm" in size.biases else nn.RMSNorm(size.hidden)


def _mlp(module: nn.Module, size: ModelSize, width: int) -> None:
    bias = "mlp" in size.biases
    for name in ("gate_proj", "up_proj") if size.gated else ("up_proj",):
        module.add_module(name, nn.Linear(size.hidden, width, bias=bias))
    module.add_module("down_proj", nn.Linear(width, size.hidden, bias=bias))


RULES = {rule.name: rule for rule in (rules.ADAMW, rules.ADAM, rules.LION, rules.SGD)} | {"madam": madam(2, True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Give an update rule's states and how a scheme keeps them."""

    rule: str  # its name
    slots: tuple[str, ...]  # the states that it has, of ``"first"`` and ``"second"``
    scheme: Scheme  # how they are kept

    def formats(self, weight: Weight) -> dict[str, StateFormat]:
        """Return how each state of a weight is kept."""
        return self.scheme.formats(weight.shape, self.slots)

    def state_bytes(self, weights: Iterable[Weight], slot: str) -> int:
        """Return the bytes of one state, or of weights that the optimizer keeps packed (slot ``"weights"``)."""
        formats = ((w, self.formats(w).get(slot)) for w in weights)
        return sum(fmt.bytes_of(w.shape) * w.repeat for w, fmt in formats if fmt is not None)

    def __str__(self) -> str:
        return self.rule if self.scheme.name == "fp32" else f"{self.rule} with states of {self.scheme.name}"

    def kept(self, slot: str) -> str:
        """Return the format of a state in a few words."""
        return describe(getattr(self.scheme, slot)).replace("float32", "fp32")

    @property
    def weights(self) -> StateFormat | None:
        """How it keeps the weights themselves, None where a bfloat16 parameter or a master copy does."""
        fmt = self.scheme.weights
        return None if fmt is None or in_parameter(fmt, torch.bfloat16) else fmt


def optimizer_of(optimizer: str | Scheme | OptimizerConfig | None) -> Optimizer:
    """Return an optimizer: a rule (states in float32), a scheme (AdamW's states, Madam's of ``lns_madam``), or both.

    Args:
        optimizer: ``"adamw"``, ``"bnb8"``, ``"lion:bnb8"``, a Scheme or a recipe's record; None is ``"adamw"``.

    Raises:
        ArgumentError: There is no such rule or scheme.
    """
    if isinstance(optimizer, OptimizerConfig):
        return optimizer_of(f"{optimizer.rule}:{optimizer.state}")
    if isinstance(optimizer, Scheme):
        return Optimizer(rule="adamw", slots=rules.ADAMW.slots, scheme=optimizer)
    if optimizer is None:
        return optimizer_of("adamw")
    if not isinstance(optimizer, str):
        raise ArgumentError(f"optimizer={shown(optimizer)} is not an optimizer; pass a name such as 'adamw' or 'bnb8'")
    first, colon, second = optimizer.partition(":")
    rule, state = (first, second) if colon else (first, "fp32") if first in RULES else ("adamw", first)
    rule = "madam" if optimizer == "lns_madam" else rule
    if rule not in RULES or state not in list_schemes():
        names = [*RULES, *list_schemes()]
        hint = did_you_mean(state if rule in RULES else rule, names)
        raise ArgumentError(
            f"optimizer={shown(optimizer)} is unknown{hint} (choose a rule: {', '.join(RULES)}; a scheme: "
            f"{', '.join(list_schemes())}; or both as 'lion:bnb8')"
        )
    return Optimizer(rule=rule, slots=RULES[rule].slots, scheme=get_scheme(state))


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Give the formats of what training keeps."""

    weights: str | None  # of the weights; None is as the optimizer keeps them
    master: str | None  # of the copy that it updates, None without one
    gradients: str  # of the gradients
    optimizer: Optimizer  # the optimizer


def weight_lines(
    weights: tuple[Weight, ...], adapters: tuple[Weight, ...], formats: Precision, at: Parallel, *, early: bool
) -> Iterator[MemoryLine]:
    """Yield weights, copies, gradients and states of one device.

    Args:
        adapters: Those that are trained instead of them, if any.
        early: Copies for the backward product are made in the forward pass, too.
    """
    trained, optimizer = adapters or weights, formats.optimizer

    def line(name: str, kept: str, total: int, stage: int, of: tuple[Weight, ...] = trained) -> MemoryLine:
        formula = per_element(sum(w.elements for w in of), total) + at.words(stage)
        return MemoryLine(name=name, kept=kept, bytes=at.share(total, stage), formula=formula)

    if formats.weights is None:
        plain = [w for w in weights if "weights" not in optimizer.formats(w)]
        total = optimizer.state_bytes(weights, "weights") + stored_bytes(plain, "bf16")
        yield line("weights", optimizer.kept("weights"), total, 3, weights)
    else:
        yield line("weights", formats.weights, stored_bytes(weights, formats.weights), 3, weights)
    yield from _copies(weights, formats, at, early)
    if adapters:
        yield line("adapters", "bf16", stored_bytes(adapters, "bf16"), 3)
    if formats.weights is not None and optimizer.weights is not None:
        yield line("master weights", optimizer.kept("weights"), optimizer.state_bytes(trained, "weights"), 1)
    elif formats.master is not None:
        yield line("master weights", formats.master, stored_bytes(trained, formats.master), 1)
    yield line("gradients", formats.gradients, stored_bytes(trained, formats.gradients), 2)
    for slot in optimizer.slots:
        yield line(f"{slot} moment", optimizer.kept(slot), optimizer.state_bytes(trained, slot), 1)
    # The largest magnitudes that delayed scales remember, of all operands.
    numbers = 0
    for weight in weights:
        operands = {} if weight.config is None else weight.config.operands
        rules = {(name[0], q) for name, q in operands.items()}
        histories = [q.scaling.history for _, q in rules if q.scaling is not None and q.scaling.history is not None]
        numbers += sum(history.length for history in histories) * weight.repeat
    if numbers:
        yield MemoryLine(
            name="scale histories", kept="fp32", bytes=4 * numbers, formula=per_element(numbers, 4 * numbers)
        )


def _copies(weights: tuple[Weight, ...], formats: Precision, at: Parallel, early: bool) -> Iterator[MemoryLine]:
    """Yield the line of quantised weights that wait for the backward pass, if there are any."""
    stored = 16.0 if formats.weights is None else bits_per_element(formats.weights)
    copies = [(w, copy_bits(w, stored, early=early)) for w in weights if w.matrix]
    quantised = [(w, bits) for w, bits in copies if bits]
    total = sum(ceil(w.elements * sum(bits) / 8) for w, bits in quantised)
    if total:
        elements = sum(w.elements for w, _ in quantised)
        names = dict.fromkeys(q.format.name for w, _ in quantised if w.config is not None
                             for q in (w.config.fprop.b, w.config.dgrad.b)[: 1 + early] if q.format)  # fmt: skip
        formula = per_element(elements, total) + at.words(3)
        yield MemoryLine(name="quantised weights", kept=", ".join(names), bytes=at.share(total, 3), formula=formula)


def format_name(fmt: str | None) -> str | None:
    """Return the name of a format, None for None.

    Raises:
        FormatError: There is no such format.
    """
    return None if fmt is None else get_format(fmt).name


def per_element(elements: int, total: float) -> str:
    """Return a total as elements times bytes."""
    return f"{elements:,} x {total / elements:.6g} bytes"


def stored_bytes(weights: Iterable[Weight], fmt: str) -> int:
    """Return the bytes of weights in a format; one below 16 bits is that of linear layers, others are in bfloat16."""
    narrow = bits_per_element(fmt) < 16

    def bits(weight: Weight) -> float:
        wide = narrow and not weight.linear
        return bits_per_element("bf16") if wide else bits_per_element(fmt, weight.shape[-1])

    return sum(ceil(weight.elements * bits(weight) / 8) for weight in weights)


def copy_bits(weight: Weight, stored: float, *, early: bool) -> list[float]:
    """Return the bits of an element of each quantised copy of a layer's weights that waits for the backward pass.

    Args:
        stored: Bits of the weights themselves; copies in as many are none.
        early: Copies for the backward product are made in the forward pass, too.
    """
    if weight.config is None:
        return []
    forward, backward = weight.config.fprop.b, weight.config.dgrad.b
    copies = [bits_of(forward)] if early or backward.source != "original" else []
    copies += [bits_of(backward)] if early and backward.source == "original" else []
    return [bits for bits in copies if bits is not None and bits < stored]
