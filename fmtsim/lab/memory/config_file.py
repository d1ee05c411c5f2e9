# SPDX-License-Identifier: Apache-2.0
"""The sizes that a ``config.json`` of Hugging Face has, under the names that its families give them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from fmtsim.lab.memory.sizes import Latent, ModelSize
from fmtsim.support.errors import ArgumentError, DataError, did_you_mean, shown
from fmtsim.support.records import located, read_json

NAMES: Final[dict[str, tuple[str, ...]]] = {
    "blocks": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "vocabulary": ("vocab_size",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active": ("num_experts_per_tok", "num_experts_per_token"),
}
"""What of a model is called what; the first name that is there counts."""


class Family(NamedTuple):
    """What a configuration does not say because every model of its type has it.

    gated, tied: as of ModelSize; tied where the configuration leaves it out. biases: which layers have some, but those
    that the configuration decides. positions: the name of the number of learned positions, and what is added to it.
    """

    gated: bool = True
    tied: bool = False
    biases: tuple[str, ...] = ()
    positions: tuple[str, int] | None = None


_ALL = ("qkv", "out", "mlp", "norm")
_BERT = Family(gated=False, tied=True, biases=(*_ALL, "head"), positions=("max_position_embeddings", 0))
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
    found = read_json(path, DataError, "config.json")
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object; pass the path of a config.json")
    return found


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
    found: dict[str, Any] = sizes | {
        "name": str(config.get("_name_or_path") or kind),
        "intermediate": sizes["intermediate"] or 4 * sizes["hidden"],
        "kv_heads": _kv_heads(config, sizes),
        "head_dim": head,
        "active": sizes["active"] if sizes["experts"] else 0,
        "gated": family.gated,
        "tied": bool(config.get("tie_word_embeddings", family.tied)),
        "biases": _biases(config, family),
        "positions": _number(config, family.positions[:1], where) + family.positions[1] if family.positions else 0,
    }
    with located(where):
        return ModelSize(**found | _experts(config, sizes, where) | {"latent": _latent(config, where)})


def _number(config: Mapping[str, Any], names: tuple[str, ...], where: str) -> int:
    """Return the first number that is there, 0 where none is."""
    for name in names:
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise ArgumentError(f"{where}: {name} is {shown(value)}; write a whole number")
        if value is not None:
            return value
    return 0


def _kv_heads(config: Mapping[str, Any], sizes: dict[str, int]) -> int:
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    return sizes["kv_heads"] or sizes["heads"]


def _biases(config: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    found = dict.fromkeys(family.biases)
    for switch, layers in _BIASES.items():
        if config.get(switch) is True:
            found |= dict.fromkeys(layers)
        elif config.get(switch) is False:
            found = {name: None for name in found if name not in layers}
    if config.get("bias") is True:  # Falcon's name for those of all layers
        found |= dict.fromkeys(("qkv", "out", "mlp"))
    return tuple(found)


def _experts(config: Mapping[str, Any], sizes: dict[str, int], where: str) -> dict[str, int]:
    if not sizes["experts"]:
        return {}
    width = _number(config, ("moe_intermediate_size",), where)
    found = {"intermediate": width} if width else {}
    shared = _number(config, ("shared_expert_intermediate_size",), where)
    shared = shared or width * _number(config, ("n_shared_experts",), where)
    dense = _number(config, ("first_k_dense_replace",), where)
    return found | {"shared": shared, "dense": dense, "dense_width": sizes["intermediate"] if dense else 0}


def _latent(config: Mapping[str, Any], where: str) -> Latent | None:
    names = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    ranks = [_number(config, (name,), where) for name in names]
    fields = zip(("queries", "values", "rotary", "key_dim", "value_dim"), ranks, strict=True)
    return Latent(**dict(fields)) if ranks[1] else None
