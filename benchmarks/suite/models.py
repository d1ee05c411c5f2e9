# SPDX-License-Identifier: Apache-2.0
"""The models of ``python -m benchmarks.suite layers``, and other software that converts them, where it is installed."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import cpp_extension

from fmtsim.lab.training.decoders import GPT, GPTConfig, LanguageModel, LlamaBlock
from fmtsim.support.errors import FmtsimError
from fmtsim.support.table import Record

HEAD = 64  # features of an attention head


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes(Record):
    """Give the size of a model, and the batch of a step."""

    width: int
    layers: int
    batch_size: int
    context: int
    vocabulary: int

    @property
    def heads(self) -> int:
        """Attention heads of 64 features."""
        return self.width // HEAD

    def resized(self, **given: int | None) -> "Sizes":
        """Return the sizes with those that are given."""
        return replace(self, **{name: size for name, size in given.items() if size is not None})


GPU_SIZES = {
    "llama": Sizes(width=1024, layers=8, batch_size=8, context=1024, vocabulary=32000),
    "gpt": Sizes(width=768, layers=12, batch_size=8, context=1024, vocabulary=50304),
    "layer": Sizes(width=1024, layers=8, batch_size=8, context=1024, vocabulary=1),
}
CPU_SIZES = {
    "llama": Sizes(width=256, layers=2, batch_size=2, context=128, vocabulary=1024),
    "gpt": Sizes(width=256, layers=2, batch_size=2, context=128, vocabulary=1024),
    "layer": Sizes(width=1024, layers=8, batch_size=1, context=256, vocabulary=1),
}


def llama(sizes: Sizes) -> nn.Module:
    """Return the Llama of transformers with random weights."""
    try:
        import transformers
    except ImportError:
        raise FmtsimError(
            "transformers is not installed; pip install 'fmtsim[transformers]', or pass --only 'gpt*' for a model that "
            "needs none"
        ) from None
    with torch.device("meta"):
        inner = LlamaBlock(GPTConfig(width=sizes.width, heads=sizes.heads)).mlp.up_proj.out_features
    config = transformers.LlamaConfig(
        hidden_size=sizes.width, intermediate_size=inner, num_hidden_layers=sizes.layers, use_cache=False,
        num_attention_heads=sizes.heads, vocab_size=sizes.vocabulary, max_position_embeddings=sizes.context,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def gpt(sizes: Sizes) -> nn.Module:
    """Return the GPT of ``fmtsim train``."""
    names = ("context", "width", "layers", "heads", "vocabulary")
    return GPT(GPTConfig(**{name: getattr(sizes, name) for name in names}), seed=0)


def layers(sizes: Sizes) -> nn.Module:
    """Return equal linear layers behind each other, without biases."""
    return nn.Sequential(*(nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(sizes.layers)))


def batch_of(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Return what a model takes for its loss on tokens ``[batch, time + 1]``."""
    if isinstance(model, LanguageModel):
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, :-1]}


def without_head(module: nn.Module, name: str) -> bool:
    """Return False for the output head: a ``filter_fn`` of ``convert``."""
    return LanguageModel.without_head(module, name) and name != "lm_head"


Filter = Callable[[nn.Module, str], bool]

_MXFP4 = {
    "scale_bits": 8, "block_size": 32, "w_elem_format": "fp4_e2m1", "a_elem_format": "fp4_e2m1", "bfloat": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Say which module it needs, how that is installed, and how it converts the linear layers that a filter chooses."""

    module: str
    install: str
    apply: Callable[[Any, nn.Module, Filter], None]

    @property
    def installed(self) -> bool:
        """Whether the module is there."""
        return importlib.util.find_spec(self.module) is not None

    def convert(self, model: nn.Module, chosen: Filter) -> None:
        """Convert a model in place.

        Raises:
            FmtsimError: It is not installed.
        """
        if not self.installed:
            raise FmtsimError(f"{self.module} is not installed; {self.install}, or leave it out")
        self.apply(importlib.import_module(self.module), model, chosen)


def installed() -> list[str]:
    """Return the names of the peers that are there."""
    return [name for name, peer in PEERS.items() if peer.installed]


def _torchao_float8(torchao: Any, model: nn.Module, chosen: Filter) -> None:
    """Convert by torchao's float8 training with a scale for each tensor; emulated where no unit multiplies float8."""
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig(emulate=next(model.parameters()).device.type != "cuda")
    float8.convert_to_float8_training(model, module_filter_fn=chosen, config=config)


def _microxcaling_mxfp4(mx: Any, model: nn.Module, chosen: Filter) -> None:
    """Exchange linear layers for microxcaling's with MXFP4 in all three products, keeping their parameters.

    Its kernels are compiled where there is nvcc; else it runs torch operations.
    """
    kernels = next(model.parameters()).device.type == "cuda" and cpp_extension.CUDA_HOME is not None
    specs = mx.finalize_mx_specs({**_MXFP4, "custom_cuda": kernels})
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and chosen(module, name):
            layer = mx.Linear(module.in_features, module.out_features, module.bias is not None, mx_specs=specs)
            layer.weight, layer.bias = module.weight, module.bias
            model.set_submodule(name, layer)


PEERS = {
    "torchao_float8": Peer(module="torchao", install="pip install torchao", apply=_torchao_float8),
    "microxcaling_mxfp4": Peer(
        module="mx", install="clone github.com/microsoft/microxcaling and add it to PYTHONPATH",
        apply=_microxcaling_mxfp4,
    ),
}  # fmt: skip
