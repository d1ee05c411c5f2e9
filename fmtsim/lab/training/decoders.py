# SPDX-License-Identifier: Apache-2.0
"""Decoder language models: what they share, a GPT with pre-norm blocks, and a Llama."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.gemm.layers.emulated_gemm import EmulatedGEMM
from fmtsim.support.errors import ArgumentError

VOCABULARY = 256  # bytes
MOST = 1 << 31  # of any size; more would not fit into memory


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Give the sizes of a model: tokens of context, features, blocks, attention heads, and how many tokens exist."""

    context: int = 64
    width: int = 128
    layers: int = 2
    heads: int = 4
    vocabulary: int = VOCABULARY

    def __post_init__(self) -> None:
        for name in ("context", "width", "layers", "heads", "vocabulary"):
            check_size(name, getattr(self, name))
        if self.width % self.heads:
            raise ArgumentError(f"--heads {self.heads} does not divide --width {self.width}; choose a divisor")


def check_size(name: str, size: int) -> None:
    """Raise ArgumentError where a size is not positive, or larger than any that memory holds."""
    if not 1 <= size < MOST:
        allowed = "1 or more" if size < 1 else f"1 to {MOST - 1:,}"
        raise ArgumentError(f"--{name.replace('_', '-')} {size} is not allowed; choose {allowed}")


class LanguageModel(nn.Module):
    """Predict the next token. The embedding doubles as output head; subclasses add ``blocks`` and ``norm``.

    ``head`` is that product's own config: None leaves it to ``convert``, or with ``without_head`` in high precision.
    """

    head: LinearConfig | None = None
    residual: ClassVar[tuple[str, ...]]
    """How the names of weights end whose results are added to the residual stream."""

    embedding: nn.Embedding
    blocks: nn.ModuleList
    norm: nn.Module

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config

    def loss(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Return the mean loss in nats per token of embedded inputs ``[batch, time, width]``, or else the logits."""
        for block in self.blocks:
            x = block(x)
        x, w = self.norm(x), self.embedding.weight
        logits = F.linear(x, w) if self.head is None else EmulatedGEMM.apply(x, w, None, self.head)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @staticmethod
    def without_head(module: nn.Module, name: str) -> bool:
        """Leave the output head in high precision, as trainers in 8 bits do: a ``filter_fn`` of ``convert``."""
        return not isinstance(module, LanguageModel | nn.Embedding)

    def _initialise(self, generator: torch.Generator) -> None:
        small = 0.02 / (2 * self.config.layers) ** 0.5  # keeps the sum of the residual branches near unit scale
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = small if name.endswith(self.residual) else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class Attention(nn.Module):
    """Causal self-attention with a packed projection; ``linear`` makes a layer of two widths."""

    def __init__(self, width: int, heads: int, linear: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to itself."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to itself."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(LanguageModel):
    """Learned positions, pre-norm blocks with a packed projection, GELU."""

    residual = ("out.weight", "down.weight")

    def __init__(self, config: GPTConfig, seed: int) -> None:
        """Build the model; equal seeds give equal weights, and no generator of the caller's is touched."""
        super().__init__(config)
        with torch.random.fork_rng(devices=[]):  # modules draw weights on construction; ours replace them
            self.embedding = nn.Embedding(config.vocabulary, config.width)
            self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.position = nn.Parameter(torch.zeros(config.context, config.width))
        self.norm = nn.LayerNorm(config.width)
        self._initialise(torch.Generator().manual_seed(seed))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean loss in nats per token of int64 inputs and targets ``[batch, time]``; else the logits."""
        return self.loss(self.embedding(tokens) + self.position[: tokens.shape[1]], targets)


EPS, BASE = 1e-5, 10000.0
BLOCK = 128  # the largest block of a format or transform, which divides the hidden width where it does the width


class LlamaAttention(nn.Module):
    """Causal self-attention with rotary positions on queries and keys."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, size = config.width, config.width // config.heads
        self.heads = config.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        rates = BASE ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(config.context), rates)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to itself."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in projections)
        y = F.scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _rotated(self, x: Tensor) -> Tensor:
        """Turn both halves of each head's features against each other by the position's angles."""
        first, second = x.chunk(2, -1)
        cosine, sine = (table[: x.shape[-2]].to(x.dtype) for table in (self.cosine, self.sine))
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class GatedMLP(nn.Module):
    """Map x to ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to itself."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    """Attention and a gated feed-forward layer, each behind a norm and around a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        multiple = math.gcd(config.width, BLOCK)
        hidden = -(-8 * config.width // (3 * multiple)) * multiple
        self.input_layernorm = nn.RMSNorm(config.width, eps=EPS)
        self.self_attn = LlamaAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=EPS)
        self.mlp = GatedMLP(config.width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to itself."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Llama(LanguageModel):
    """Rotary positions, RMSNorm, gated feed-forward layers of 8/3 of the width, rounded up as far as blocks want it.

    Raises:
        ArgumentError: Heads have an odd number of features, which no rotation pairs up.
    """

    residual = ("o_proj.weight", "down_proj.weight")

    def __init__(self, config: GPTConfig, seed: int) -> None:
        """Build the model; equal seeds give equal weights, and no generator of the caller's is touched."""
        super().__init__(config)
        if config.width // config.heads % 2:
            raise ArgumentError(
                f"--model llama turns pairs of features, and heads of {config.width // config.heads} are odd; choose "
                "--width and --heads with an even quotient"
            )
        with torch.random.fork_rng(devices=[]):  # modules draw weights on construction; ours replace them
            self.embedding = nn.Embedding(config.vocabulary, config.width)
            self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=EPS)
        self._initialise(torch.Generator().manual_seed(seed))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean loss in nats per token of int64 inputs and targets ``[batch, time]``; else the logits."""
        return self.loss(self.embedding(tokens), targets)
