# SPDX-License-Identifier: Apache-2.0
"""Trainings of small language models, GPT-2's and Llama's layers, of which every bit is recorded."""

import copy
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from tests.machine.cases import BF16, F32, FP16, Case, numbers


class Norm(nn.Module):
    """RMSNorm as transformers writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x scaled in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """A layer of a transformer: GPT-2's or Llama's."""

    def __init__(self, width: int, heads: int, key_heads: int, llama: bool) -> None:
        super().__init__()
        self.heads, self.key_heads, self.llama, self.d = heads, key_heads, llama, width // heads
        norm = Norm if llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.q = nn.Linear(width, width, bias=not llama)
        self.k, self.v = (nn.Linear(width, key_heads * self.d, bias=not llama) for _ in range(2))
        self.out = nn.Linear(width, width, bias=not llama)
        self.up, self.down = nn.Linear(width, 2 * width, bias=not llama), nn.Linear(2 * width, width, bias=not llama)
        self.gate = nn.Linear(width, 2 * width, bias=False) if llama else None

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        h = self.norm1(x)
        split = [p(h).view(*h.shape[:2], -1, self.d).transpose(1, 2) for p in (self.q, self.k, self.v)]
        if self.llama:
            for n in (0, 1):
                a, b = split[n].chunk(2, -1)
                split[n] = split[n] * cos + torch.cat((-b, a), -1) * sin
            split[1:] = [t.repeat_interleave(self.heads // self.key_heads, 1) for t in split[1:]]
        y = functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        h = self.norm2(x)
        if self.gate is None:
            return x + self.down(functional.gelu(self.up(h), approximate="tanh"))
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """A small language model."""

    def __init__(self, width: int, heads: int, key_heads: int, llama: bool, tokens: int = 512) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(tokens, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, heads, key_heads, llama) for _ in range(2))
        self.norm, self.head = (Norm if llama else nn.LayerNorm)(width), nn.Linear(width, tokens, bias=False)
        self.llama, d = llama, width // heads
        self.register_buffer("frequencies", torch.tensor([10000.0 ** (-2 * i / d) for i in range(d // 2)]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embedding(ids)
        places = torch.arange(ids.shape[1], device=ids.device)
        if not self.llama:
            x = x + self.position(places)
        angle = places[:, None].float() * self.frequencies
        angles = torch.cat((angle, angle), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def initial(llama: bool) -> Model:
    """Return a small GPT or Llama with weights that every machine makes alike."""
    model = Model(128, 4, 2 if llama else 4, llama)
    for i, p in enumerate(model.parameters()):
        if p.ndim == 2 or not llama:
            p.data = numbers(i, tuple(p.shape), "normal", F32) / 16
    return model


def trained(
    start: Model, batch: int, length: int, device: str, autocast: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    """Return logits, losses, gradients of three steps and the weights after them; float16 under autocast is scaled."""
    model = copy.deepcopy(start).to(device)
    ids = (torch.arange(batch * (length + 1)) * 37 % 511).view(batch, -1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=autocast is None)
    scaler = torch.amp.GradScaler("cuda", enabled=autocast == FP16)
    seen: list[torch.Tensor] = []
    for _ in range(3):
        with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
            logits = model(ids[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        seen += [logits, loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return *seen, *model.parameters()


def training_cases(dtypes: tuple[torch.dtype, ...] = (BF16, FP16)) -> Iterator[Case]:
    """Yield three steps of AdamW of a small GPT and a small Llama: logits, losses, gradients and weights."""
    for llama in (False, True):
        for dtype in dtypes:
            for batch, length in ((2, 64), (1, 130)):
                start = initial(llama)
                frequencies = start.frequencies
                start = start.to(dtype)
                start.frequencies = frequencies

                def call(device, start=start, batch=batch, length=length):  # type: ignore[no-untyped-def]
                    return trained(start, batch, length, device)

                yield Case(f"{'llama' if llama else 'gpt'} {batch}x{length} {str(dtype)[6:]}", call)
