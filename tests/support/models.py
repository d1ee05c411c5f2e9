# SPDX-License-Identifier: Apache-2.0
"""Small models that several test files convert, and everything that a model holds."""

import warnings

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.lab.training.decoders import GPT, GPTConfig
from tests.support.operands import normal


def gpt(seed: int = 0, context: int = 32, width: int = 64, layers: int = 2) -> GPT:
    """Return a model with two heads a block."""
    return GPT(GPTConfig(context=context, width=width, layers=layers, heads=2), seed)


class GatedMLP(nn.Module):
    """What Hugging Face's Llama, Qwen and Mistral have."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.down_proj, self.act_fn = nn.Linear(64, 32, bias=False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A feed-forward block with its norm and a residual, whose steps are traced."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU()
        self.down, self.factor = nn.Linear(2 * width, width), 1.0

    def forward(self, x):
        return x * self.factor + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    """Six blocks of two layers, and a head; 128 features, so that every recipe fits."""

    def __init__(self, width=128, blocks=6):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(blocks)
        )
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def net(seed: int = 0, **sizes: int) -> Net:
    """Return a model of random weights."""
    torch.manual_seed(seed)
    return Net(**sizes)


def step(model: nn.Module, seed: int, rows: int = 128) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the output and the gradients of a step on a batch of 128 features."""
    for p in model.parameters():
        p.grad = None
    y = model(normal(rows, 128, seed=seed))
    (y**2).mean().backward()
    return y.detach(), [p.grad.clone() for p in model.parameters()]


def without_scales(state: dict) -> dict:
    """Return the weights of a state dict, without delayed scales."""
    return {name: t for name, t in state.items() if "fmtsim" not in name}


def gated() -> nn.Sequential:
    """Return two gated layers and a normalisation between them."""
    torch.manual_seed(0)
    return nn.Sequential(GatedMLP(), nn.LayerNorm(32), GatedMLP())


def snapshot(model: nn.Module) -> dict:
    """Return everything that each module holds, its class, and the identity of what it holds."""
    return {
        name: (type(m), {key: dict(value) if isinstance(value, dict) else value for key, value in vars(m).items()},
               {key: id(value) for key, value in vars(m).items()})
        for name, m in model.named_modules()
    }  # fmt: skip


def both(module, *inputs, **options):
    """Return results and gradients of the module as torch has it, and emulated without quantisers.

    Gradients of results are whole numbers.
    """
    results = []
    for change in (lambda m: m, lambda m: fmtsim.convert(m, recipe=LinearConfig())):
        change(module)
        leaves = [t.detach().clone().requires_grad_() for t in dict.fromkeys(inputs)]
        unique = dict(zip(dict.fromkeys(inputs), leaves, strict=True))
        y = module(*(unique[t] for t in inputs), **options)
        outputs = [t for t in (y if isinstance(y, tuple) else (y,)) if t is not None]
        weights = [torch.linspace(-8, 8, t.numel()).round().to(t.dtype).view_as(t) for t in outputs]
        loss = sum((t * w).sum() for t, w in zip(outputs, weights, strict=True))
        gradients = torch.autograd.grad(loss, [*leaves, *module.parameters()])
        results.append([*outputs, *gradients])
    fmtsim.revert(module)
    return results


def hugging_face(kind: str, layers: int = 2, **how):
    """Return a tiny model of random weights from a config, without a download."""
    sizes = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "num_hidden_layers": layers,
             "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that it imports
        hf = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
        torch.manual_seed(0)
        config = {
            "llama": lambda: hf.LlamaConfig(**sizes, num_key_value_heads=1),
            "gpt2": lambda: hf.GPT2Config(n_embd=64, n_head=2, n_layer=layers, vocab_size=256, attn_pdrop=0.0),
            "bert": lambda: hf.BertConfig(**sizes, attention_probs_dropout_prob=0.0),
        }[kind]()
        cls = {"llama": hf.LlamaForCausalLM, "gpt2": hf.GPT2LMHeadModel, "bert": hf.BertForMaskedLM}[kind]
        return cls._from_config(config, **({"attn_implementation": "sdpa"} | how)).eval()


class Written(nn.Module):
    """Multiply in one way with ``w``."""

    def __init__(self, how, w):
        super().__init__()
        self.how, self.w = how, nn.Parameter(w)

    def forward(self, x):
        return self.how(x, self.w)


def train(model, x, calls=2):
    """Return output and gradients of the last of a few passes."""
    for _ in range(calls):
        x = x.detach().requires_grad_()
        model.zero_grad()
        y = model(x)
        (y * normal(*y.shape, seed=9)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


class NormedMLP(nn.Module):
    """A norm and a gated layer around a residual, as in Llama, with weights large enough to show rounding."""

    def __init__(self, norm=nn.RMSNorm):
        super().__init__()
        self.norm, self.mlp = norm(32), GatedMLP()
        for p in self.parameters():
            nn.init.normal_(p, std=0.3)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class FalconLinear(nn.Linear):
    """As in transformers: a linear layer with a forward of its own."""

    def forward(self, input):
        hidden = input @ self.weight.T
        return hidden if self.bias is None else hidden + self.bias


class Experts(nn.Module):
    """Three gated layers as stacks of matrices, each of which gets every third row."""

    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(3, 64, 16) / 4)
        self.down = nn.Parameter(torch.randn(3, 16, 32) / 4)

    def forward(self, x):
        y, chosen = torch.zeros_like(x), torch.arange(len(x)) % 3
        for e in range(3):
            rows = torch.where(chosen == e)[0]
            gate, up = nn.functional.linear(x[rows], self.gate_up[e]).chunk(2, -1)
            y = y.index_add(0, rows, nn.functional.linear(nn.functional.silu(gate) * up, self.down[e]))
        return y


# One of each, with the shape of an input without its batch: strides, dilations, paddings and groups of all kinds.
CONVOLUTIONS = {
    "Conv1d": (lambda: nn.Conv1d(6, 8, 3, stride=2, padding=1, dilation=2, groups=2), (6, 11)),
    "Conv2d": (lambda: nn.Conv2d(6, 4, (2, 3), stride=(1, 2), padding=1, dilation=(2, 1), groups=2), (6, 5, 6)),
    "Conv3d": (lambda: nn.Conv3d(4, 6, (2, 3, 2), stride=(1, 2, 1), padding=(1, 1, 0), groups=2), (4, 3, 5, 4)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(6, 8, 4, 2, padding=1, output_padding=1, groups=2), (6, 5)),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=(1, 2), output_padding=(1, 0), dilation=(1, 2)),
        (4, 4, 3),
    ),
    "ConvTranspose3d": (
        lambda: nn.ConvTranspose3d(4, 6, (2, 3, 2), stride=(2, 1, 2), padding=(0, 1, 1), groups=2, bias=False),
        (4, 3, 2, 3),
    ),
}


def convolution(name, dtype=torch.float32):
    """Return a convolution of random weights, and a batch of two for it."""
    torch.manual_seed(0)
    make, shape = CONVOLUTIONS[name]
    return make().to(dtype), normal(2, *shape, seed=3, dtype=dtype)


class MatrixLayers(nn.Module):
    """A stack of matrices as layers."""

    def __init__(self, w):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 32, bias=False) for _ in w)
        for layer, matrix in zip(self.layers, w, strict=True):
            layer.weight.data = matrix.clone()

    def forward(self, x):
        return torch.stack([layer(rows) for layer, rows in zip(self.layers, x, strict=True)])
