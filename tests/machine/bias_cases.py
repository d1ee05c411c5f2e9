# SPDX-License-Identifier: Apache-2.0
"""Calls of attention whose mask takes a gradient, and trainings of T5, which has such a mask: a position bias."""

import copy
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from tests.machine.cases import BF16, F32, FP16, Case, numbers
from tests.machine.training_cases import Norm


def _bias(kind: str, seed: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return a bias of [batch, heads, queries, keys]: numbers, and the lowest one where a key is hidden."""
    bias, (batch, _, queries, keys) = numbers(seed, shape, "normal", dtype), shape
    hidden = torch.zeros(batch, 1, queries, keys, dtype=torch.bool)
    if kind == "causal":
        hidden |= torch.ones(queries, keys, dtype=torch.bool).triu(1)
    if kind in ("pad", "inf"):
        for i in range(batch):
            hidden[i, ..., keys - (3 + 5 * i) * keys // 16 :] = True
    return bias.masked_fill(hidden, -torch.inf if kind == "inf" else torch.finfo(dtype).min)


BIASED = [
    ((1, 2, 3, 2)[i // 2 % 4], (2, 1, 4)[i % 3], q, (q, q, (64, 50, 130, 24, 300, 7, 128)[i % 7])[i % 3],
     (32, 64, 80, 128, 256, 40, 96, 16)[i % 8], (BF16, FP16)[i // 3 % 2],
     ("add", "causal", "pad", "add", "inf")[i % 5], ("normal", "wide", "normal", "cancelling")[i // 5 % 4],
     ("full", "batch", "heads", "expanded")[i // 7 % 4], (1.0, None, 0.3)[i // 2 % 3])
    for i, q in enumerate((64, 7, 100, 17, 128, 200, 33, 400, 65, 48, 130)[n % 11] for n in range(120))
]  # fmt: skip
# in float32 the kernel runs for a mask without a gradient, too
BIASED += [
    ((1, 2, 3)[i % 3], 2, q, (q, 64, q, 130, 33)[i % 5], (32, 64, 80, 128, 256, 36, 16)[i % 7], F32,
     ("add", "causal", "pad", "inf")[i % 4], ("normal", "wide", "cancelling")[i // 3 % 3],
     ("constant", "full", "batch")[i // 2 % 3], (1.0, None, 0.3)[i // 2 % 3])
    for i, q in enumerate((64, 7, 100, 17, 128, 40)[n % 6] for n in range(40))
]  # fmt: skip


BIASED += [
    (4, 16, 100, 400, 256, BF16, "add", "normal", "full", None),
    (2, 32, 128, 300, 160, FP16, "add", "wide", "full", None),
    (16, 16, 64, 128, 64, BF16, "add", "normal", "full", 1.0),
    (16, 16, 40, 100, 32, FP16, "pad", "normal", "batch", 1.0),
    (8, 2, 33, 33, 64, BF16, "causal", "normal", "batch", 1.0), (2, 2, 1, 50, 64, FP16, "add", "normal", "full", None),
    (3, 2, 200, 600, 192, BF16, "inf", "normal", "full", 1.0), (1, 2, 300, 520, 136, FP16, "pad", "wide", "full", 0.3),
    (1, 2, 60, 60, 8, BF16, "add", "normal", "batch", None), (2, 2, 90, 70, 24, FP16, "causal", "wide", "full", None),
    (2, 2, 140, 150, 104, BF16, "pad", "normal", "expanded", None),
    (2, 3, 256, 256, 120, FP16, "add", "normal", "heads", None),
]  # fmt: skip


def settles(i: int) -> bool:
    """Return True if blocks of keys add to the gradient of q in an order that repeats on a GPU."""
    b, h, q, k, d, dtype, *_ = BIASED[i]
    rows, columns = (64, 64) if d <= 64 else (128, 64 if dtype == F32 or d > 128 else 128)
    blocks, few = -(-k // columns), 128 if dtype == F32 else 256
    return k <= columns or (b * h >= 256 and blocks <= 2) or (blocks <= -(-q // rows) and b * h * blocks <= few)


def biased_call(device: str, i: int, dq: bool | None = None) -> dict[str, torch.Tensor]:
    """Return the output and the gradients of a call of ``BIASED``, that of q where it ``settles`` alone."""
    b, h, q, k, d, dtype, mask, kind, form, scale = BIASED[i]
    shapes = (q, d), (k, d), (k, d), (q, d)
    *inputs, g = (
        numbers(90_000 + 10 * i + n, (b, shape[0], h, shape[1]), kind if n < 2 else "normal", dtype).to(device)
        for n, shape in enumerate(shapes)
    )
    # as of a linear layer: [batch, length, heads, D] in memory
    q16, k16, v16, g16 = (x.transpose(1, 2).detach() for x in (*inputs, g))
    leaves = {"k": k16.requires_grad_(), "v": v16.requires_grad_()}
    if settles(i) if dq is None else dq:
        leaves["q"] = q16.requires_grad_()
    shape = (1 if form in ("batch", "expanded") else b, 1 if form == "heads" else h, q, k)
    bias = _bias(mask, 90_000 + 10 * i + 5, shape, dtype).to(device)
    if form != "constant":
        leaves["bias"] = bias.requires_grad_()
    if form == "expanded":
        bias = bias.expand(b, h, q, k)
    y = functional.scaled_dot_product_attention(q16, k16, v16, attn_mask=bias, scale=scale)
    return {"y": y, **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), g16), strict=True))}


class Attention(nn.Module):
    """T5's: not scaled, with a bias of positions."""

    def __init__(self, width: int, heads: int, d: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, heads * d, bias=False) for _ in range(3))
        self.out, self.norm = nn.Linear(heads * d, width, bias=False), Norm(width)

    def forward(self, x: torch.Tensor, source: torch.Tensor | None, bias: torch.Tensor) -> torch.Tensor:
        """Return x and what it attends to: itself, or a source."""
        h = self.norm(x)
        seen = h if source is None else source
        split = [
            p(y).view(*y.shape[:2], self.heads, -1).transpose(1, 2)
            for p, y in ((self.q, h), (self.k, seen), (self.v, seen))
        ]
        y = functional.scaled_dot_product_attention(*split, attn_mask=bias, scale=1.0)
        return x + self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class T5(nn.Module):
    """A small encoder and decoder of two layers each, whose layers share a bias that is learned."""

    def __init__(self, heads: int, d: int, gated: bool, contiguous: bool, buckets: int, width: int = 64) -> None:
        super().__init__()
        self.gated, self.contiguous, self.buckets = gated, contiguous, buckets
        self.embedding = nn.Embedding(128, width)
        self.tables = nn.ModuleList(nn.Embedding(buckets, heads) for _ in range(2))
        self.attentions = nn.ModuleList(Attention(width, heads, d) for _ in range(6))
        self.norms = nn.ModuleList(Norm(width) for _ in range(6))
        self.up, self.gate = (nn.ModuleList(nn.Linear(width, 96, bias=False) for _ in range(4)) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(96, width, bias=False) for _ in range(4))

    def _feed(self, x: torch.Tensor, i: int) -> torch.Tensor:
        h = self.norms[i](x)
        y = functional.gelu(self.gate[i](h), approximate="tanh") * self.up[i](h) if self.gated else self.up[i](h).relu()
        return x + self.down[i](y)

    def _bias(self, table: nn.Module, length: int, mask: torch.Tensor) -> torch.Tensor:
        places, half = torch.arange(length, device=mask.device), self.buckets // 2
        bias = table((places[None] - places[:, None]).clamp(-half, half - 1) + half).permute(2, 0, 1)[None]
        bias = bias if bool(mask.all()) else torch.where(mask, bias, torch.finfo(bias.dtype).min)
        return bias.contiguous() if self.contiguous else bias

    def forward(self, ids: torch.Tensor, visible: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return logits of [batch, targets, 128]; ``visible`` are the ids that are no padding."""
        x, visible = self.embedding(ids), visible[:, None, None]
        bias = self._bias(self.tables[0], ids.shape[1], visible)
        for i in range(2):
            x = self._feed(self.attentions[i](x, None, bias), i)
        source, y, length = self.norms[4](x), self.embedding(targets), targets.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        bias = self._bias(self.tables[1], length, causal)
        hidden = torch.where(visible, 0.0, torch.finfo(y.dtype).min).to(y.dtype).expand(-1, 1, length, -1)
        for i in range(2, 4):
            y = self.attentions[i + 2](self.attentions[i](y, None, bias), source, hidden.contiguous())
            y = self._feed(y, i)
        return self.norms[5](y) @ self.embedding.weight.t()


TRAININGS = [
    (dtype, *sizes, i % 2 == 1, i % 3 < 2, i % 4 == 2)
    for i, (dtype, *sizes) in enumerate((
        (BF16, 2, 24, 17, 2, 32), (FP16, 2, 40, 33, 2, 64), (BF16, 3, 61, 64, 4, 32), (FP16, 1, 100, 30, 2, 64),
        (BF16, 2, 130, 65, 2, 128), (FP16, 4, 50, 90, 2, 32), (F32, 2, 40, 24, 2, 32), (F32, 1, 64, 50, 2, 64),
    ))
]  # fmt: skip


def t5(i: int) -> T5:
    """Return a model with weights that every machine makes; so many buckets that no gradient is added by atomics."""
    dtype, _, *lengths, heads, d, gated, contiguous, _ = TRAININGS[i]
    model = T5(heads, d, gated, contiguous, 32 if max(lengths) <= 55 else 1024)
    for n, (name, p) in enumerate(model.named_parameters()):
        x = numbers(70_000 + n, tuple(p.shape), "normal", F32)
        p.data = x / 2 if "tables" in name else 1 + x / 8 if p.ndim == 1 else x / 8
    return model.to(dtype)


def t5_training(device: str, i: int, start: T5) -> Iterator[torch.Tensor]:
    """Yield logits, losses, gradients and weights of three steps of AdamW."""
    _, batch, length, labels, *_, padded = TRAININGS[i]
    model = copy.deepcopy(start).to(device)
    ids = (torch.arange(batch * length) * 37 % 127 + 1).view(batch, length).to(device)
    targets = (torch.arange(batch * (labels + 1)) * 11 % 127 + 1).view(batch, -1).to(device)
    visible = torch.ones_like(ids, dtype=torch.bool)
    visible[-1, length - padded * length // 4 :] = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4)
    for _ in range(3):
        logits = model(ids, visible, targets[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        loss.backward()
        yield logits
        yield loss
        yield from (p.grad.clone() for p in model.parameters() if p.grad is not None)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    yield from model.parameters()


def bias_cases() -> Iterator[Case]:
    """Yield the attentions, then the trainings."""
    for i, (b, h, q, k, d, dtype, mask, kind, form, _) in enumerate(BIASED):
        if form == "constant" and not settles(i):
            continue
        name = f"biased attention {b}x{h} {q}x{k} {d} {mask} {kind} {form} {str(dtype)[6:]} {i}"
        yield Case(name, lambda device, i=i: tuple(biased_call(device, i).values()))
    for i, (dtype, *sizes, gated, contiguous, padded) in enumerate(TRAININGS):
        name = f"T5 {'x'.join(map(str, sizes))} {gated} {contiguous} {padded} {str(dtype)[6:]}"
        start = t5(i)
        yield Case(name, lambda device, i=i, start=start: tuple(t5_training(device, i, start)))
