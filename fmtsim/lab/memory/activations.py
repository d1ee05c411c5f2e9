# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a block wait for the backward pass, and what each of them takes.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198, section 4,
for a block of GPT; a gated layer, experts and latent attention follow in the same way. A recipe changes what layers
keep of their inputs, and with ``Recipe.activations`` what norms, activation functions and gated products keep.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Final, Literal, NamedTuple

from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.lab.memory.estimate import MemoryLine, SavedTensor, bits_of, bits_per_element
from fmtsim.lab.memory.sizes import ModelSize
from fmtsim.lab.memory.weights import Weight
from fmtsim.recipes.build import SavedActivations

Checkpointing = Literal["none", "selective", "full"]
Attention = Literal["flash", "eager"]
Keeper = Literal["", "norm", "function", "attention", "other"]
MASK: Final = ("bytes", 8.0)  # how an element of a dropout mask is kept, and its bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Say how activations are kept."""

    format: str  # format of what no recipe quantises
    loss: str = "fp32"  # format in which the loss is computed from the logits
    # what the recipe keeps of norms, activation functions and gated products, None for ``format``
    saved: SavedActivations | None = None
    checkpointing: Checkpointing = "none"  # ``"selective"`` runs the core of attention again, ``"full"`` each block
    attention: Attention = "flash"  # whether attention keeps its scores (``"eager"``) or not
    dropout: bool = False  # whether there is dropout, whose masks are kept
    early: bool = False  # layers keep codes of their inputs that the forward pass made for the backward product
    parallel: int = 1  # devices that share out the heads and the features inside feed-forward layers
    sequence: bool = False  # they share out the tokens of everything else
    adapters: int = 0  # ranks of the adapters of a block, added up


class Site(NamedTuple):
    """Describe a tensor: its elements a token, who keeps it, layers that read it, and whether devices share it out."""

    name: str
    elements: float
    keeper: Keeper = ""
    readers: tuple[str, ...] = ()
    shared: bool = False
    kept: tuple[str, float] | None = None  # a format and its bits, where they are not the usual


Configs = Mapping[str, LinearConfig | None]
"""How the layers of a block run that keep their inputs, by name."""
Saved = tuple[SavedTensor, ...]


def activation_lines(
    size: ModelSize, weights: tuple[Weight, ...], adapters: tuple[Weight, ...], batch: int, tokens: int, how: Keeping
) -> tuple[list[MemoryLine], Saved]:
    """Return what waits for the backward pass on one device, and the tensors of the last block.

    Where there are adapters, they alone are trained, and other layers keep no input.
    """
    configs: dict[str, LinearConfig | None] = {w.layer: w.config for w in adapters or weights if w.matrix}
    how = replace(how, adapters=sum(w.shape[0] for w in adapters if w.name.endswith("lora_A")) // size.blocks)
    blocks: list[Saved] = []
    for number in range(size.blocks):
        path = f"layers.{number}."
        of_block = {name.removeprefix(path): config for name, config in configs.items() if name.startswith(path)}
        blocks.append(saved_tensors(block_sites(size, number, tokens, how), of_block, how))
    count, full = batch * tokens, how.checkpointing == "full"
    saved_blocks = [block[:1] if full else block for block in blocks]
    head, gradients = (saved_tensors(sites(size, how), configs, how) for sites in (head_sites, loss_gradient_sites))
    lines = [_line("activations", saved_blocks, count), _line("head and loss", [head], count)]
    moments = [_line("gradients of the logits", [gradients], count)]
    if full:
        largest = max(blocks, key=lambda block: sum(tensor.bytes for tensor in block))
        moments.append(_line("recomputed block", [largest[1:]], count))
    lines.append(max(moments, key=lambda line: line.bytes))  # these are gone before a block runs again
    return lines, blocks[-1]


def _line(name: str, blocks: list[Saved], tokens: int) -> MemoryLine:
    sums = [sum(item.bytes for item in block) for block in blocks]
    numbers = {item: f"{item:,.10g}" for item in sums}
    terms = [f"{sums.count(item)} x {number}" if len(blocks) > 1 else number for item, number in numbers.items()]
    text = terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"
    formats = dict.fromkeys(part for block in blocks for item in block for part in item.kept.split(", "))
    formula = f"{tokens:,} tokens x {text} bytes"
    return MemoryLine(name=name, kept=", ".join(formats), bytes=ceil(tokens * sum(sums)), formula=formula)


def saved_tensors(sites: Iterator[Site], configs: Configs, how: Keeping) -> tuple[SavedTensor, ...]:
    """Return what is kept of each tensor, those of which nothing is left out."""
    tensors = []
    for site in sites:
        formats = _kept(site, configs, how)
        elements = site.elements / (how.parallel if site.shared or how.sequence else 1)
        if formats and elements:
            tensors.append(
                SavedTensor(
                    name=site.name, elements=elements, kept=", ".join(formats),
                    bytes=elements * sum(formats.values()) / 8,
                ),
            )  # fmt: skip
    return tuple(tensors)


def block_sites(size: ModelSize, number: int, tokens: int, how: Keeping) -> Iterator[Site]:
    """Yield the tensors of a block, counted from 0; the first of them is its input."""
    yield Site("input of the first norm", size.hidden, "norm")
    yield from _attention_sites(size, tokens, how)
    if how.adapters:
        yield Site("inner products of adapters", how.adapters, "other")
    if how.dropout:
        yield Site("masks of dropout", 2 * size.hidden, kept=MASK)
    yield Site("input of the second norm", size.hidden, "norm")
    if number < size.dense or not size.experts:
        yield from _mlp_sites(size, size.dense_width if size.dense else size.intermediate)
        return
    readers = ("mlp.gate", *(f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj") if size.shared))
    yield Site("input of the router", size.hidden, readers=readers)
    if size.shared:
        yield from _mlp_sites(size, size.shared, "mlp.shared_experts.", "shared ", own_input=False)
    yield from _mlp_sites(size, size.intermediate, "mlp.experts.0.", "experts' ", size.active)
    yield Site("outputs of experts", size.hidden * size.active, "other")


def head_sites(size: ModelSize, how: Keeping) -> Iterator[Site]:
    """Yield the tensors behind the last block; of the logits the loss keeps their logarithmic softmax."""
    yield Site("input of the last norm", size.hidden, "norm")
    yield Site("input of the head", size.hidden, readers=("lm_head",))
    yield Site("log-softmax of the logits", size.vocabulary, shared=True, kept=_of_loss(how))


def loss_gradient_sites(size: ModelSize, how: Keeping) -> Iterator[Site]:
    """Yield what the backward pass begins with, for a moment: the gradients of the log-softmax and of its input."""
    yield Site("gradients of the logits", 2 * size.vocabulary, shared=True, kept=_of_loss(how))


def _of_loss(how: Keeping) -> tuple[str, float]:
    return how.loss, bits_per_element(how.loss)


def _attention_sites(size: ModelSize, tokens: int, how: Keeping) -> Iterator[Site]:
    at, names = size.latent, [f"self_attn.{name}" for name in size.attention]
    readers = tuple(name for name in names if not name.endswith(("o_proj", "_b_proj")))
    yield Site("input of the projections", size.hidden, readers=readers)
    if at is not None:
        yield Site("latent vectors, for their norms", at.queries + at.values, "norm")
        yield Site("latent queries", at.queries, readers=("self_attn.q_b_proj",))
        yield Site("latent keys and values", at.values, readers=("self_attn.kv_b_proj",))
    yield Site("queries, keys and values", sum(size.qkv), "attention", shared=True)
    scores = size.heads * tokens
    if how.attention == "eager" and how.checkpointing != "selective":
        yield Site("softmax of the scores", scores, "attention", shared=True)
        if how.dropout:
            yield Site("softmax behind dropout", scores, "attention", shared=True)
            yield Site("mask of that dropout", scores, shared=True, kept=MASK)
    outputs = size.attention["o_proj"][1]
    keeper: Keeper = "attention" if how.attention == "flash" else ""
    yield Site("output of attention", outputs, keeper, ("self_attn.o_proj",), shared=True)


def _mlp_sites(
    size: ModelSize, width: int, path: str = "mlp.", what: str = "", times: int = 1, *, own_input: bool = True
) -> Iterator[Site]:
    """Yield the tensors of a feed-forward layer, each ``times`` a token."""
    readers = ("gate_proj", "up_proj") if size.gated else ("up_proj",)
    if own_input:
        yield Site(f"{what}input of the feed-forward layer", size.hidden * times, "",
                   tuple(path + name for name in readers))  # fmt: skip
    yield Site(f"{what}input of the activation function", width * times, "function", shared=True)
    if size.gated:
        yield Site(f"{what}factors of the gated product", 2 * width * times, "function", shared=True)
    yield Site(f"{what}input of the last layer", width * times, "", (f"{path}down_proj",), shared=True)


def _kept(site: Site, configs: Configs, how: Keeping) -> dict[str, float]:
    """Return in which formats a tensor is kept, by name, and the bits of each."""
    wide = {how.format: bits_per_element(how.format)}
    formats: dict[str, float] = {}
    if site.kept is not None:
        return dict([site.kept])
    if site.keeper in ("norm", "function") and how.saved is not None:
        formats[f"{how.saved.format.name} in 1x{how.saved.block}"] = (
            how.saved.format.bits + how.saved.scale.bits / how.saved.block
        )
    elif site.keeper:
        formats |= wide
    for reader in site.readers:
        if reader in configs:
            formats |= _input_kept(configs[reader], how.early, wide)
    return formats


def _input_kept(config: LinearConfig | None, early: bool, wide: dict[str, float]) -> dict[str, float]:
    """Return what a layer keeps of its input for the gradient of its weight."""
    if config is None:
        return wide
    x, back = config.fprop.a, config.wgrad.b
    if back.source == "original" and back.then is None and not early:  # it is quantised in the backward pass
        return wide
    operand = back if back.source == "original" or back.then is not None else x
    bits = bits_of(operand)
    if bits is None or operand.format is None or bits >= max(wide.values()):
        return wide
    return {operand.format.name: bits}
