# SPDX-License-Identifier: Apache-2.0
"""The sizes of a transformer, by its name, its ``config.json`` of Hugging Face, or its number of parameters."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from fmtsim.gemm.model_layers import models
from fmtsim.support.errors import ArgumentError, DataError, did_you_mean, shown
from fmtsim.support.records import check_types, located, read_json

Bias = Literal["qkv", "out", "mlp", "head", "norm"]
MOST = {"blocks": 10**4, "heads": 10**5, "kv_heads": 10**5, "head_dim": 10**5}
"""The largest sizes, 10**8 for others; products of them are still numbers of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Give the ranks of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Args:
        queries: Rank of the queries, 0 where they are projected at once.
        values: Rank of keys and values: with ``rotary`` what a cache keeps of a token.
        rotary: Features of the key that carry positions, one for all heads.
        key_dim, value_dim: Features of a head's key without positions, and of its value.
    """

    queries: int
    values: int
    rotary: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        check_types(self)
        for name, least in (("queries", 0), ("values", 1), ("rotary", 0), ("key_dim", 1), ("value_dim", 1)):
            _check_size(self, name, least, MOST["head_dim"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Give the sizes of a transformer whose blocks are attention and a feed-forward layer, each behind a norm.

    Args:
        name: What tables call it.
        blocks: Blocks one after another.
        hidden: Features of a token between blocks.
        intermediate: Width of the feed-forward layer; of one expert where there are experts.
        heads, kv_heads, head_dim: Heads of the attention, those of keys and values, and their width.
        vocabulary: Rows of the embedding, and outputs of the head.
        positions: Rows of a learned embedding of positions, 0 without one.
        gated: The feed-forward layer has a gate: three matrices, not two.
        tied: Head and embedding share their weight.
        biases: Which layers have biases.
        experts, active: Experts of a block that a router chooses from, 0 without, and those of each token.
        shared: Width of a gated layer beside the experts that every token goes through.
        dense: The first blocks, which have no experts, and ``dense_width``, the width of their feed-forward layer.
        latent: Latent attention, whose heads have no projections of their own for keys and values.
        encoder: Every token attends to all: nothing is generated, and no keys and values are cached.
    """

    name: str
    blocks: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int = 0
    gated: bool = True
    tied: bool = False
    biases: tuple[Bias, ...] = ()
    experts: int = 0
    active: int = 0
    shared: int = 0
    dense: int = 0
    dense_width: int = 0
    latent: Latent | None = None
    encoder: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        least = dict.fromkeys(("blocks", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary"), 1)
        for name in (*least, "positions", "experts", "active", "shared", "dense", "dense_width"):
            _check_size(self, name, least.get(name, 0), MOST.get(name, 10**8))
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"ModelSize kv_heads={self.kv_heads} does not divide heads={self.heads}; choose a divisor"
            )
        if bool(self.experts) != bool(self.active) or self.active > self.experts:
            raise ArgumentError(
                f"ModelSize active={self.active} of experts={self.experts} is not possible; choose 1 to {self.experts}"
                if self.experts
                else f"ModelSize active={self.active} needs experts; give experts= as well"
            )
        if self.dense > self.blocks or bool(self.dense) != bool(self.dense_width):
            raise ArgumentError(
                f"ModelSize dense={self.dense}, dense_width={self.dense_width} is not possible; choose up to "
                f"{self.blocks} blocks and their width"
            )

    @property
    def attention(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of a block's projections, by the names of Hugging Face's Llama and DeepSeek-V3."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.latent is None:
            return {"q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q)}
        at, keys = self.latent, self.heads * (self.latent.key_dim + self.latent.rotary)
        queries = {"q_a_proj": (at.queries, h), "q_b_proj": (keys, at.queries)} if at.queries else {"q_proj": (keys, h)}
        return queries | {
            "kv_a_proj_with_mqa": (at.values + at.rotary, h),
            "kv_b_proj": (self.heads * (at.key_dim + at.value_dim), at.values),
            "o_proj": (h, self.heads * at.value_dim),
        }

    @property
    def qkv(self) -> tuple[int, int, int]:
        """Elements of queries, keys and values of a token as attention reads them."""
        if self.latent is None:
            return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim
        key = self.heads * (self.latent.key_dim + self.latent.rotary)
        return key, key, self.heads * self.latent.value_dim

    @property
    def cached(self) -> int:
        """Elements that a cache of keys and values keeps of a token in one block; an encoder has none."""
        if self.encoder:
            return 0
        return sum(self.qkv[1:]) if self.latent is None else self.latent.values + self.latent.rotary


def _check_size(record: Latent | ModelSize, name: str, least: int, most: int) -> None:
    value = getattr(record, name)
    if not least <= value <= most:
        raise ArgumentError(f"{type(record).__name__} {name}={value} is not possible; choose {least} to {most:,}")


NAMES: Final[dict[str, tuple[str, ...]]] = {
    "blocks": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"), "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"), "vocabulary": ("vocab_size",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active": ("num_experts_per_tok", "num_experts_per_token"),
}  # fmt: skip
"""What of a model is called what; the first name that is there counts."""


class Family(NamedTuple):
    """What a configuration does not say because every model of its type has it.

    gated, tied: as of ModelSize; tied where the configuration leaves it out. biases: which layers have some, but those
    that the configuration decides. positions: the name of the number of learned positions, and what is added to it.
    encoder: as of ModelSize, unless the configuration says is_decoder.
    """

    gated: bool = True
    tied: bool = False
    biases: tuple[str, ...] = ()
    positions: tuple[str, int] | None = None
    encoder: bool = False


_ALL = ("qkv", "out", "mlp", "norm")
_BERT = Family(
    gated=False, tied=True, biases=(*_ALL, "head"), positions=("max_position_embeddings", 0), encoder=True
)  # fmt: skip
_LLAMA, _TIED = Family(), Family(tied=True)

# modeling_*.py of transformers 4.57 and 5.
FAMILIES: Final[dict[str, Family]] = {
    **dict.fromkeys(
        ("llama", "mistral", "mixtral", "qwen3", "qwen3_moe", "phi3", "olmo", "olmo2", "olmoe", "granite", "ministral",
         "deepseek_v2", "deepseek_v3", "smollm3"), _LLAMA
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "cohere", "cohere2"), _TIED),
    "qwen2": Family(biases=("qkv",)),
    "qwen2_moe": Family(biases=("qkv",)),
    "gpt_oss": Family(biases=("qkv", "out", "mlp")),
    "gpt2": Family(gated=False, tied=True, biases=_ALL, positions=("n_positions", 0)),
    "gpt_bigcode": Family(gated=False, tied=True, biases=_ALL, positions=("n_positions", 0)),
    "gpt_neo": Family(gated=False, tied=True, biases=("out", "mlp", "norm"), positions=("max_position_embeddings", 0)),
    "gpt_neox": Family(gated=False, biases=_ALL),
    "gptj": Family(gated=False, biases=("mlp", "head", "norm")),
    "opt": Family(gated=False, tied=True, biases=_ALL, positions=("max_position_embeddings", 2)),
    "bloom": Family(gated=False, tied=True, biases=_ALL),
    "falcon": Family(gated=False, tied=True, biases=("norm",)),
    "phi": Family(gated=False, biases=(*_ALL, "head")),
    "starcoder2": Family(gated=False, tied=True, biases=_ALL),
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
}  # fmt: skip
_BIASES = {"attention_bias": ("qkv", "out"), "qkv_bias": ("qkv",), "mlp_bias": ("mlp",)}


def read_config(path: Path) -> dict[str, Any]:
    """Return what a ``config.json`` has.

    Raises:
        DataError: There is no such file, or it holds no JSON object.
    """
    config = read_json(path, DataError, "config.json")
    if not isinstance(config, dict):
        raise DataError(f"{path} holds no JSON object; pass the path of a config.json")
    return config


def size_of_config(config: Mapping[str, Any], where: str) -> ModelSize:
    """Return the sizes that a configuration has.

    Args:
        config: What the file holds; of a model of text and images the part about text counts.
        where: What errors call it.

    Raises:
        ArgumentError: A size is missing or not possible, or the family is not known.
    """
    inner = config.get("text_config")
    config = inner if isinstance(inner, Mapping) else config
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        hint = did_you_mean(kind, FAMILIES) if isinstance(kind, str) else ""
        raise ArgumentError(
            f"{where}: model_type {shown(kind)} is unknown{hint} (known are {', '.join(FAMILIES)}); write a "
            "fmtsim.lab.memory.ModelSize, or pass the number of parameters"
        )
    family = FAMILIES[kind]
    sizes = {name: _number(config, spellings, where) for name, spellings in NAMES.items()}
    for name in ("blocks", "hidden", "heads", "vocabulary"):
        if not sizes[name]:
            raise ArgumentError(f"{where}: {NAMES[name][0]} is missing; pass a whole config.json, or a ModelSize")
    head = _number(config, ("head_dim",), where) or sizes["hidden"] // sizes["heads"]
    biased = dict.fromkeys(family.biases)
    for switch, layers in _BIASES.items():
        if config.get(switch) is True:
            biased |= dict.fromkeys(layers)
        elif config.get(switch) is False:
            biased = {name: None for name in biased if name not in layers}
    if config.get("bias") is True:  # Falcon's name for those of all layers
        biased |= dict.fromkeys(("qkv", "out", "mlp"))
    one_head = config.get("multi_query") is True and not config.get("new_decoder_architecture")
    values: dict[str, Any] = sizes | {
        "name": str(config.get("_name_or_path") or kind), "intermediate": sizes["intermediate"] or 4 * sizes["hidden"],
        "kv_heads": 1 if one_head else sizes["kv_heads"] or sizes["heads"], "head_dim": head,
        "active": sizes["active"] if sizes["experts"] else 0,
        "encoder": family.encoder and config.get("is_decoder") is not True,
        "gated": family.gated, "tied": bool(config.get("tie_word_embeddings", family.tied)),
        "biases": tuple(biased),
        "positions": _number(config, family.positions[:1], where) + family.positions[1] if family.positions else 0,
    }  # fmt: skip
    with located(where):
        names = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        ranks = [_number(config, (name,), where) for name in names]
        fields = zip(("queries", "values", "rotary", "key_dim", "value_dim"), ranks, strict=True)
        return ModelSize(
            **values | _experts(config, sizes, where) | {"latent": Latent(**dict(fields)) if ranks[1] else None}
        )


def _number(config: Mapping[str, Any], names: tuple[str, ...], where: str) -> int:
    """Return the first number that is there, 0 where none is."""
    for name in names:
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise ArgumentError(f"{where}: {name} is {shown(value)}; write a whole number")
        if value is not None:
            return value
    return 0


def _experts(config: Mapping[str, Any], sizes: dict[str, int], where: str) -> dict[str, int]:
    if not sizes["experts"]:
        return {}
    width = _number(config, ("moe_intermediate_size",), where)
    overrides = {"intermediate": width} if width else {}
    shared = _number(config, ("shared_expert_intermediate_size",), where)
    shared = shared or width * _number(config, ("n_shared_experts",), where)
    dense = _number(config, ("first_k_dense_replace",), where)
    return overrides | {"shared": shared, "dense": dense, "dense_width": sizes["intermediate"] if dense else 0}


MOST_PARAMETERS = 10**15  # parameters; more than any model has


def model_size(model: Any) -> ModelSize:
    """Return the sizes of a model.

    Args:
        model: A name of ``fmtsim.gemm.model_layers.list_models()``, the path of a ``config.json`` of Hugging Face or of
            its folder, its contents as a dict, a configuration of transformers, or a ModelSize, which is returned.

    Raises:
        ArgumentError: There is no such model, or its sizes are not known or not those of such a transformer.
        DataError: The file is not a configuration.

    >>> model_size("llama-8b").blocks
    32
    """
    if isinstance(model, ModelSize):
        return model
    if isinstance(model, Mapping):
        return size_of_config(model, "model")
    if callable(getattr(model, "to_dict", None)):
        return size_of_config(model.to_dict(), type(model).__name__)
    if isinstance(model, os.PathLike) or (isinstance(model, str) and (os.sep in model or model.endswith(".json"))):
        path = Path(model).expanduser()
        path = path / "config.json" if path.is_dir() else path
        return size_of_config(read_config(path), str(path))
    if not isinstance(model, str) or model not in models():
        hint = did_you_mean(model, models()) if isinstance(model, str) else ""
        raise ArgumentError(
            f"model={shown(model)} is unknown{hint} (fmtsim.gemm.model_layers.list_models() has the names); or pass "
            "the path of a config.json, or a number of parameters"
        )
    model = models()[model]
    if not model.blocks:
        raise ArgumentError(
            f"model={model.name!r}: its blocks are of several kinds, or their number is not known here; pass its "
            "number of parameters, or the path of its config.json if that is of a family of decoders or of BERT's"
        )
    biases: tuple[Bias, ...] = ("qkv", "out", "mlp", "norm") if "l" in model.style else ()
    biases += ("qkv",) if "q" in model.style else ()
    biases += ("mlp",) if "m" in model.style else ()
    biases += ("head",) if "h" in model.style else ()
    same = ("name", "blocks", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary", "positions",
            "experts", "active")  # fmt: skip
    return ModelSize(
        **{name: getattr(model, name) for name in same},
        gated="g" in model.style, tied="t" in model.style, biases=tuple(dict.fromkeys(biases)),
    )  # fmt: skip


def parameter_count(value: Any) -> int | None:
    """Return a number of parameters that stands in a model's place, None for what is not a number.

    Raises:
        ArgumentError: It is not finite, below 1, or beyond any model.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not isfinite(value) or not 1 <= value <= MOST_PARAMETERS:
        raise ArgumentError(f"model={value} is not a number of parameters; pass 1 to 10**15, such as 7e9")
    return round(value)
