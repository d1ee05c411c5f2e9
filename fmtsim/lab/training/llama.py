# SPDX-License-Identifier: Apache-2.0
"""A Llama: RMSNorm, rotary positions, gated feed-forward layers with SiLU, tied input and output embeddings.

Layers have the names of Hugging Face's Llama, which recipes know: Smooth-SwiGLU takes the place of ``GatedMLP``.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.lab.training.gpt import GPTConfig, LanguageModel
from fmtsim.support.errors import ArgumentError

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

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats per token of int64 inputs and targets, both ``[batch, time]``."""
        return self.loss(self.embedding(tokens), targets)
