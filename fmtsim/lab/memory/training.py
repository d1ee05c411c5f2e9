# SPDX-License-Identifier: Apache-2.0
"""What a training run needs of memory on each device."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from fmtsim.casts.arguments import check_flags
from fmtsim.formats.registry import get_format
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.lab.memory.estimate import (
    MemoryEstimate,
    MemoryLine,
    Parallel,
    SavedTensor,
    bits_of,
    bits_per_element,
    positive,
)
from fmtsim.lab.memory.sizes import ModelSize, model_size, parameter_count
from fmtsim.lab.memory.states import Precision, Weight, format_name, optimizer_of, weight_lines, weights_of
from fmtsim.recipes.build import SavedActivations
from fmtsim.recipes.recipe import Recipe
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.recipes.system import OptimizerConfig
from fmtsim.spec.optimizer import Scheme
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import checked

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
    # Behind the last block; of the logits the loss keeps their logarithmic softmax.
    of_loss = how.loss, bits_per_element(how.loss)
    head = (
        Site("input of the last norm", size.hidden, "norm"),
        Site("input of the head", size.hidden, readers=("lm_head",)),
        Site("log-softmax of the logits", size.vocabulary, shared=True, kept=of_loss),
    )  # fmt: skip
    # What the backward pass begins with, for a moment: the gradients of the log-softmax and of its input.
    gradients = Site("gradients of the logits", 2 * size.vocabulary, shared=True, kept=of_loss)
    saved_head, saved_gradients = (saved_tensors(sites, configs, how) for sites in (head, (gradients,)))
    lines = [_line("activations", saved_blocks, count), _line("head and loss", [saved_head], count)]
    moments = [_line("gradients of the logits", [saved_gradients], count)]
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


def saved_tensors(sites: Iterable[Site], configs: Configs, how: Keeping) -> tuple[SavedTensor, ...]:
    """Return what is kept of each tensor, those of which nothing is left out."""
    tensors = []
    for site in sites:
        # In which formats a tensor is kept, by name, and the bits of each.
        wide = {how.format: bits_per_element(how.format)}
        formats: dict[str, float] = {}
        if site.kept is not None:
            formats = dict([site.kept])
        else:
            if site.keeper in ("norm", "function") and how.saved is not None:
                formats[f"{how.saved.format.name} in 1x{how.saved.block}"] = (
                    how.saved.format.bits + how.saved.scale.bits / how.saved.block
                )
            elif site.keeper:
                formats |= wide
            for reader in site.readers:
                if reader in configs:
                    formats |= _input_kept(configs[reader], how.early, wide)
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


NOT_COUNTED = (
    "Not counted: other temporary buffers, memory that the allocator cannot use, statistics of norms and of attention, "
    "weights that are gathered for a block, transposed copies, workspaces of libraries"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormats:
    """Name the formats in which training stores its tensors.

    Args:
        weights: None is bfloat16; float32 under autocast and where products take float32; what the optimizer's scheme
            stores them in where it does; with ``Parallel(zero=...)`` that in which a recipe's level gathers them
            (``get_recipe("fp8lm").at_level("O3")``), beside the optimizer's own. Formats below 16 bits are those of
            linear layers, and embeddings, head and vectors are bfloat16.
        master: Format of the copy that the optimizer updates. ``"auto"`` is float32 where weights are narrower and the
            scheme stores none itself; None is no copy.
        gradients: None is what the recipe rounds them to (``fp8lm``), else float32 beside float32 weights, else
            bfloat16.
        activations: Format of activations that no recipe quantises. None is float32 or bfloat16, as of ``weights``.
        loss: Format in which the loss is computed from the logits: transformers and autocast make them float32. One
            number of each logit is saved, and the backward pass begins with two more.

    Raises:
        FormatError: A format is unknown.
    """

    weights: str | None = None
    master: str | None = "auto"
    gradients: str | None = None
    activations: str | None = None
    loss: str = "fp32"

    def __post_init__(self) -> None:
        for name in (self.weights, None if self.master == "auto" else self.master, self.gradients, self.activations):
            format_name(name)
        get_format(self.loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Describe adapters of low rank (LoRA).

    Args:
        rank: 0 is no adapter.
        layers: A regular expression that the names of layers with adapters contain; all linear layers but the head
            where it is empty.
    """

    rank: int = 0
    layers: str = ""

    def __post_init__(self) -> None:
        positive("rank", self.rank, 0)
        if self.layers and not self.rank:
            raise ArgumentError(f"layers={shown(self.layers)} needs a rank; pass rank=16 as well")
        try:
            re.compile(checked("layers", self.layers, str))
        except re.error:
            raise ArgumentError(
                f"layers={shown(self.layers)} is not a regular expression; write 'q_proj|v_proj'"
            ) from None


_DEFAULT_FORMATS, _ONE_DEVICE = StoredFormats(), Parallel()


def training_memory(
    model: Any, recipe: str | Path | Recipe | None = None, *, optimizer: str | Scheme | OptimizerConfig | None = None,
    formats: StoredFormats = _DEFAULT_FORMATS, batch: int = 1, tokens: int = 0, checkpointing: Checkpointing = "none",
    attention: Attention = "flash", dropout: bool = False, quantize_early: bool = False,
    parallel: Parallel = _ONE_DEVICE, lora: int | Lora = 0,
) -> MemoryEstimate:  # fmt: skip
    """Estimate the memory that training needs on each device, by arithmetic, before it runs.

    It is the memory of a real run, in which codes are kept as codes. fmtsim's own simulation keeps values in ordinary
    dtypes and needs more. What is not counted is among the notes of the result.

    Args:
        model: A name of ``fmtsim.gemm.model_layers.list_models()``, the path of a ``config.json`` of Hugging Face, a
            configuration, a ``fmtsim.lab.memory.ModelSize``, or a number of parameters, of which activations are
            unknown.
        recipe: A recipe, which decides what layers keep of their inputs and weights; None runs in high precision.
        optimizer: A rule with float32 states (``"adamw"``, ``"lion"``), AdamW under a scheme of
            ``fmtsim.optim.list_schemes()`` (``"bnb8"``), or both (``"lion:bnb8"``). None is the recipe's, else AdamW.
        formats: A ``fmtsim.lab.memory.StoredFormats`` for weights, master weights, gradients, activations and loss
            that differ from what is usual under the recipe and the optimizer.
        batch: Sequences of each device in one forward pass.
        tokens: Of each sequence; 0 leaves activations out.
        checkpointing: ``"selective"`` runs the core of attention again in the backward pass, ``"full"`` each block. Of
            what is there for a moment, a block that runs again or the gradients of the logits, the larger is counted.
        attention: ``"flash"`` keeps no scores, ``"eager"`` does.
        dropout: Count the masks of dropout behind attention and feed-forward layers, and on scores.
        quantize_early: Layers that quantise the original tensor for the backward product do so in the forward pass,
            and keep those codes, as Transformer Engine does; else they keep the original, as torchao does.
        parallel: A ``fmtsim.lab.memory.Parallel``: devices, ZeRO stage, tensor and sequence parallelism.
        lora: Rank of adapters on all linear layers but the head, or a ``fmtsim.lab.memory.Lora``; all other weights are
            frozen. 0 trains all.

    Returns:
        A ``MemoryEstimate``: lines for each kind of tensor with bytes and formula, ``total``, notes. Deterministic.

    Raises:
        ArgumentError: A name is unknown, sizes do not fit each other, or a number of parameters comes with what needs
            the sizes of a model.
        FormatError: A format is unknown.
        DataError: The file is not a configuration.

    Sources: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3; Korthikanti et al., arXiv:2205.05198, section 4; the
    records of ``fmtsim.optim`` and of the recipe.

    >>> import fmtsim
    >>> from fmtsim.lab.memory import Parallel
    >>> fmtsim.lab.training_memory(7.5e9, parallel=Parallel(devices=64, zero=3)).gigabytes  # ZeRO, figure 1: 1.9 GB
    1.875
    """
    for name, value, record in (("formats", formats, StoredFormats), ("parallel", parallel, Parallel)):
        if not isinstance(value, record):
            raise ArgumentError(
                f"{name}={shown(value)} is not a {record.__name__}; pass fmtsim.lab.memory.{record.__name__}(...)"
            )
    check_flags(dropout=dropout, quantize_early=quantize_early)
    scheme = None if recipe is None else get_recipe(recipe, kind="training")
    # The sizes of a model, None where only the number of its parameters is known, and its weights.
    count = parameter_count(model)
    size = None if count is not None else model_size(model)
    if size is not None:
        all_weights = weights_of(size, scheme)
    else:
        config = None if scheme is None else scheme.linear
        all_weights = (Weight(name="weights", shape=(count or 0,), linear=True, config=config),)
    lora = lora if isinstance(lora, Lora) else Lora(rank=positive("lora", lora, 0))
    _check(size, scheme, positive("tokens", tokens, 0), lora.rank)
    adapters = _adapters(all_weights, lora)
    if formats.weights is None and scheme is not None and parallel.zero:
        formats = replace(formats, weights=scheme.gathered)
    # The formats that training stores: the given ones, and for the others what is usual under a recipe.
    chosen = optimizer_of(optimizer if optimizer is not None or scheme is None else scheme.optimizer)
    wide = scheme is not None and (scheme.autocast is not None or _in_float32(scheme))
    by_optimizer = chosen.weights is not None and formats.weights is None  # the optimizer stores the weights itself
    stored = format_name(formats.weights) or ("fp32" if wide else "bf16")
    copy = format_name(None if formats.master == "auto" else formats.master)
    if formats.master == "auto" and chosen.scheme.weights is None and bits_per_element(stored) < 32:
        copy = "fp32"
    usual = _rounded(scheme) or ("fp32" if stored == "fp32" else "bf16")
    precision = Precision(
        weights=None if by_optimizer else stored,
        master=copy,
        optimizer=chosen,
        gradients=format_name(formats.gradients) or usual,
    )
    lines = list(weight_lines(all_weights, adapters, precision, parallel, early=quantize_early))
    saved: tuple[SavedTensor, ...] = ()
    if size is not None and tokens:
        keeping = Keeping(
            format=format_name(formats.activations) or ("fp32" if _in_float32(scheme) else "bf16"),
            loss=get_format(formats.loss).name,
            saved=None if scheme is None else scheme.activations, dropout=dropout, early=quantize_early,
            checkpointing=checked("checkpointing", checkpointing, Checkpointing), parallel=parallel.tensor_parallel,
            attention=checked("attention", attention, Attention), sequence=parallel.sequence_parallel,
        )  # fmt: skip
        more, saved = activation_lines(size, all_weights, adapters, positive("batch", batch), tokens, keeping)
        lines += more
    count = sum(weight.elements for weight in all_weights)
    what = [f"{size.name if size else 'a model'}: {count:,} parameters", f"{precision.optimizer}"]
    what += [f"recipe {scheme.name}"] if scheme else []
    what += [f"{parallel.devices} devices"] if parallel.devices > 1 else []
    what += [f"{batch} x {tokens} tokens" + " on each" * (parallel.devices > 1)] if saved else []
    notes = _notes(scheme, all_weights, size, tokens, early=quantize_early)
    return MemoryEstimate(
        what=", ".join(what), parameters=count, lines=tuple(lines), saved=saved, notes=tuple(notes)
    )  # fmt: skip


def _check(size: ModelSize | None, recipe: Recipe | None, tokens: int, lora: int) -> None:
    for name, value in (("tokens", tokens), ("lora", lora)):
        if size is None and value:
            raise ArgumentError(
                f"{name}={value} needs the sizes of a model, not a number of parameters alone; pass a name such as "
                "'llama-8b', or a config.json"
            )
    if lora and recipe is not None:
        raise ArgumentError(
            f"lora={lora} with recipe={recipe.name!r} is not estimated; leave one out, and pass weights='nf4_g64' for "
            "quantised weights (QLoRA)"
        )


def _adapters(weights: tuple[Weight, ...], lora: Lora) -> tuple[Weight, ...]:
    """Return the matrices of adapters (Hu et al., LoRA, arXiv:2106.09685): rank x inputs, outputs x rank."""
    if not lora.rank:
        return ()
    adapters: list[Weight] = []
    for weight in weights:
        if weight.linear and re.search(lora.layers, weight.layer):
            n, k = weight.shape
            for name, shape in (("lora_A", (lora.rank, k)), ("lora_B", (n, lora.rank))):
                adapters.append(Weight(name=f"{weight.layer}.{name}", shape=shape, repeat=weight.repeat, linear=True))
    if not adapters:
        names = ", ".join(dict.fromkeys(w.layer.rpartition(".")[2] for w in weights if w.linear))
        raise ArgumentError(f"layers={shown(lora.layers)} fits no linear layer; they are called {names}")
    return tuple(adapters)


def _rounded(recipe: Recipe | None) -> str | None:
    """Return the format below 16 bits to which layers of a recipe round the gradients of weights, None without one."""
    out = None if recipe is None or recipe.linear is None else recipe.linear.wgrad.out.format
    return None if out is None or bits_per_element(out) >= 16 else out.name


def _in_float32(recipe: Recipe | None) -> bool:
    """Return True if layers of a recipe take float32 weights as they are, or in more than 16 bits."""
    if recipe is None or recipe.linear is None or recipe.autocast is not None:
        return False
    bits = bits_of(recipe.linear.fprop.b)
    return bits is None or bits > 16


def _notes(
    recipe: Recipe | None, weights: tuple[Weight, ...], size: ModelSize | None, tokens: int, *, early: bool
) -> Iterator[str]:
    yield "This is a real run's, which keeps codes as codes; fmtsim's simulation keeps values in ordinary dtypes"
    yield NOT_COUNTED
    if size is None or not tokens:
        yield f"Activations are not counted: give {'a model with its sizes, and ' if size is None else ''}tokens"
    inputs = [w.config.wgrad.b for w in weights if w.config is not None]
    again = any(q.source == "original" and (bits_of(q) or 16) < 16 for q in inputs)
    if again and tokens and not early:
        yield (
            "Layers keep their input as it is and quantise it in the backward pass; with quantize_early=True they keep "
            "codes, as Transformer Engine does"
        )
    if recipe is not None and recipe.replace:
        yield "Modules that the recipe replaces are counted as those of the model"
