# SPDX-License-Identifier: Apache-2.0
"""Calls of convolutions, and trainings of a small vision model and a small speech model, as ``cases.py`` has others."""

import copy
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from tests.machine.cases import BF16, F32, FP16, KINDS, Case, numbers

# output channels, patch, pixels of a side, batch
PATCHES = (
    (64, 16, 64, 1), (128, 16, 64, 2), (96, 16, 96, 3), (32, 8, 32, 4), (192, 8, 64, 1), (448, 8, 32, 2),
    (48, 4, 32, 5), (128, 4, 28, 1), (256, 7, 28, 3), (64, 14, 56, 2), (512, 14, 56, 1), (512, 16, 64, 1),
    (32, 2, 30, 2), (192, 16, 224, 1), (768, 16, 64, 4), (64, 32, 224, 1), (112, 32, 64, 3), (1024, 16, 224, 1),
    (64, 16, 160, 32), (128, 4, 64, 16), (512, 8, 64, 1), (320, 16, 128, 2), (576, 4, 28, 8), (16, 16, 112, 6),
)  # fmt: skip
# channels, output channels, length, batch; stride 2 where they are equal
LINES = (
    (80, 64, 100, 2), (64, 64, 100, 2), (80, 128, 200, 1), (128, 128, 256, 3), (80, 384, 128, 1), (384, 384, 128, 1),
    (80, 16, 60, 1), (16, 16, 60, 2), (80, 96, 200, 3), (96, 96, 100, 8), (80, 256, 400, 1), (256, 256, 64, 6),
    (128, 64, 64, 3), (80, 80, 128, 3), (192, 192, 512, 2), (80, 320, 64, 6), (512, 512, 60, 2), (64, 64, 1000, 6),
)  # fmt: skip
UNKNOWN = (12, 30, 31)  # cuDNN's choice is not known: patches of 2 x 2, fewer than 64 channels of conv1d


def convolution_cases() -> Iterator[Case]:
    """Yield results and gradients of patch embeddings and of three taps: the input's where a model has it."""
    forms = [((n, 3, side, side), (k, 3, patch, patch), {"stride": patch}) for k, patch, side, n in PATCHES]
    forms += [((n, c, length), (k, c, 3), {"stride": 1 + (c == k), "padding": 1}) for c, k, length, n in LINES]
    for i, (shape, weight_shape, how) in enumerate(forms):
        if i in UNKNOWN:
            continue
        kind, dtype = KINDS[i % 5], (BF16, FP16)[i // 2 % 2]

        def call(device, i=i, shape=shape, weight_shape=weight_shape, how=how, kind=kind, dtype=dtype):  # type: ignore[no-untyped-def]
            x = numbers(8000 + i, shape, kind, dtype).to(device)
            w = (numbers(8100 + i, weight_shape, "normal", F32) / 16).to(dtype).to(device).requires_grad_()
            bias = numbers(8200 + i, weight_shape[:1], "normal", dtype).to(device).requires_grad_()
            leaves = [w, bias] if how["stride"] != 2 or x.ndim == 4 else [w, bias, x.requires_grad_()]
            y = (functional.conv2d if x.ndim == 4 else functional.conv1d)(x, w, bias, **how)
            return y, *torch.autograd.grad(y, leaves, numbers(8300 + i, tuple(y.shape), "normal", dtype).to(device))

        yield Case(f"convolution {shape} {weight_shape} {kind} {str(dtype)[6:]} {i}", call)


class Encoder(nn.Module):
    """A transformer of patches of images, or of spectra by Whisper's two convolutions."""

    def __init__(self, width: int, tokens: int, patch: int) -> None:
        super().__init__()
        if patch:
            self.embedding: nn.Module = nn.Conv2d(3, width, patch, patch)
        else:
            convolutions = nn.Conv1d(80, width, 3, 1, 1), nn.GELU(), nn.Conv1d(width, width, 3, 2, 1), nn.GELU()
            self.embedding = nn.Sequential(*convolutions)
        self.token, self.position = (nn.Parameter(torch.zeros(1, n, width)) for n in (1, tokens + 1))
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of the first token."""
        x = self.embedding(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.position
        return self.head(self.layers(x)[:, 0])


def encoder_cases() -> Iterator[Case]:
    """Yield three steps of AdamW of encoders of images and of spectra."""
    shapes = ((64, 16, (2, 3, 64, 64)), (192, 16, (1, 3, 224, 224)), (64, 0, (2, 80, 100)), (128, 0, (3, 80, 256)))
    for i, (width, patch, shape) in enumerate(shapes):
        for dtype in (BF16, FP16):
            start = Encoder(width, (shape[2] // patch) ** 2 if patch else shape[2] // 2, patch)
            for j, p in enumerate(start.parameters()):
                p.data = numbers(j, tuple(p.shape), "normal", F32) / 16
            start = start.to(dtype)

            def call(device, i=i, start=start, shape=shape, dtype=dtype):  # type: ignore[no-untyped-def]
                model, x = copy.deepcopy(start).to(device), numbers(8400 + i, shape, "normal", dtype).to(device)
                optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
                seen: list[torch.Tensor] = []
                for _ in range(3):
                    logits = model(x)
                    loss = functional.cross_entropy(logits, torch.arange(len(x), device=device) * 5 % 16)
                    loss.backward()
                    seen += [logits, loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
                    optimizer.step()
                    optimizer.zero_grad()
                return *seen, *model.parameters()

            yield Case(f"encoder {width} {patch} {shape} {str(dtype)[6:]}", call)
