# SPDX-License-Identifier: Apache-2.0
"""The models of ``fmtsim bench layers``: Hugging Face's Llama, the GPT of ``fmtsim train``, and layers alone."""

from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from fmtsim.lab.training.gpt import GPT, GPTConfig, LanguageModel
from fmtsim.lab.training.llama import LlamaBlock
from fmtsim.support.errors import FmtsimError

HEAD = 64  # features of an attention head


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
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

    def to_dict(self) -> dict[str, int]:
        """Return plain JSON types."""
        return asdict(self)


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
    """Say whether a module is none of the output head's: a ``filter_fn`` of ``convert``."""
    return LanguageModel.without_head(module, name) and name != "lm_head"
