# SPDX-License-Identifier: Apache-2.0
"""The weights of a model one by one, without their numbers: shapes, how often each is there, and what a recipe does."""

from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.lab.memory.sizes import ModelSize
from fmtsim.nn.planning import Selector
from fmtsim.recipes.spec import Recipe

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
