# SPDX-License-Identifier: Apache-2.0
"""The sizes of a transformer, from which its memory follows."""

from dataclasses import dataclass
from typing import Literal

from fmtsim.support.errors import ArgumentError
from fmtsim.support.records import check_types

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
        """Elements that a cache of keys and values keeps of a token in one block."""
        return sum(self.qkv[1:]) if self.latent is None else self.latent.values + self.latent.rotary


def _check_size(record: Latent | ModelSize, name: str, least: int, most: int) -> None:
    value = getattr(record, name)
    if not least <= value <= most:
        raise ArgumentError(f"{type(record).__name__} {name}={value} is not possible; choose {least} to {most:,}")
