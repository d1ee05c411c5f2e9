# SPDX-License-Identifier: Apache-2.0
"""What a training run needs of memory on each device."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fmtsim.casts.arguments import check_flags
from fmtsim.formats.registry import get_format
from fmtsim.lab.memory.activations import Attention, Checkpointing, Keeping, activation_lines
from fmtsim.lab.memory.estimate import Devices, MemoryEstimate, SavedTensor, Zero, bits_of, bits_per_element, positive
from fmtsim.lab.memory.sizes import ModelSize, model_size, parameter_count
from fmtsim.lab.memory.states import Precision, checked_format, optimizer_of, weight_lines
from fmtsim.lab.memory.weights import Weight, weights_of
from fmtsim.recipes.registry import get_recipe
from fmtsim.recipes.spec import Recipe
from fmtsim.recipes.system import OptimizerConfig
from fmtsim.spec.optimizer import Scheme
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import checked

NOT_COUNTED = (
    "Not counted: other temporary buffers, memory that the allocator cannot use, statistics of norms and of attention, "
    "weights that are gathered for a block, transposed copies, workspaces of libraries"
)


def training_memory(
    model: Any,
    recipe: str | Path | Recipe | None = None,
    *,
    optimizer: str | Scheme | OptimizerConfig | None = None,
    weights: str | None = None,
    master: str | None = "auto",
    gradients: str | None = None,
    activations: str | None = None,
    loss_format: str = "fp32",
    batch: int = 1,
    tokens: int = 0,
    checkpointing: Checkpointing = "none",
    attention: Attention = "flash",
    dropout: bool = False,
    quantize_early: bool = False,
    devices: int = 1,
    zero: Zero = 0,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    lora: int = 0,
    lora_layers: str = "",
) -> MemoryEstimate:
    """Estimate the memory that training needs on each device, by arithmetic, before it runs.

    It is the memory of a real run, in which codes are kept as codes. fmtsim's own simulation keeps values in ordinary
    dtypes and needs more. What is not counted is among the notes of the result.

    Args:
        model: A name of ``fmtsim.lab.calibration.list_models()``, the path of a ``config.json`` of Hugging Face, a
            configuration, a ``fmtsim.lab.memory.ModelSize``, or a number of parameters, of which activations are
            unknown.
        recipe: A recipe, which decides what layers keep of their inputs and weights; None runs in high precision.
        optimizer: A rule with float32 states (``"adamw"``, ``"lion"``), AdamW under a scheme of
            ``fmtsim.optim.list_schemes()`` (``"bnb8"``), or both (``"lion:bnb8"``). None is the recipe's, else AdamW.
        weights: Format of the weights. None is bfloat16; float32 under autocast and where products take float32; what
            the optimizer's scheme keeps them in where it does; with ``zero`` that in which a recipe's level gathers
            them (``get_recipe("fp8lm").at_level("O3")``), beside the optimizer's own. Formats below 16 bits are those
            of linear layers, and embeddings, head and vectors are bfloat16.
        master: Format of the copy that the optimizer updates. ``"auto"`` is float32 where weights are narrower and the
            scheme keeps none of its own; None is not a copy.
        gradients: Format of the gradients. None is what the recipe rounds them to (``fp8lm``), else float32 beside
            float32 weights, else bfloat16.
        activations: Format of what no recipe quantises. None is float32 or bfloat16, as of ``weights``.
        loss_format: Format in which the loss is computed from the logits: transformers and autocast make them float32.
            One number of each logit is saved, and the backward pass begins with two more.
        batch: Sequences of each device in one forward pass.
        tokens: Of each sequence; 0 leaves activations out.
        checkpointing: ``"selective"`` runs the core of attention again in the backward pass, ``"full"`` each block. Of
            what is there for a moment, a block that runs again or the gradients of the logits, the larger is counted.
        attention: ``"flash"`` keeps no scores, ``"eager"`` does.
        dropout: Count the masks of dropout behind attention and feed-forward layers, and on scores.
        quantize_early: Layers that quantise the original tensor for the backward product do so in the forward pass,
            and keep those codes, as Transformer Engine does; else they keep the original, as torchao does.
        devices: All of them; those that are not tensor parallel are data parallel.
        zero: What data-parallel devices share out (ZeRO): 1 optimizer states and master weights, 2 gradients as well,
            3 weights as well, as FSDP does.
        tensor_parallel: Devices that share out each layer.
        sequence_parallel: They share out what lies between the layers as well.
        lora: Rank of adapters; all weights but theirs are frozen. 0 trains all.
        lora_layers: A regular expression that the names of layers with adapters contain; all linear layers but the
            head where it is empty.

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
    >>> fmtsim.training_memory(7.5e9, devices=64, zero=3).gigabytes  # ZeRO, figure 1: 1.9 GB
    1.875
    """
    at = Devices(count=devices, zero=zero, parallel=tensor_parallel, sequence=sequence_parallel)
    check_flags(dropout=dropout, quantize_early=quantize_early)
    scheme = None if recipe is None else get_recipe(recipe)
    size, all_weights = _model(model, scheme)
    _check(size, scheme, positive("tokens", tokens, 0), positive("lora", lora, 0))
    adapters = _adapters(all_weights, lora, lora_layers)
    if weights is None and scheme is not None and at.zero:
        weights = scheme.gathered
    formats = _precision(scheme, optimizer, weights, master, gradients)
    lines = list(weight_lines(all_weights, adapters, formats, at, early=quantize_early))
    saved: tuple[SavedTensor, ...] = ()
    if size is not None and tokens:
        keeping = Keeping(
            format=checked_format("activations", activations) or ("fp32" if _in_float32(scheme) else "bf16"),
            loss=get_format(loss_format).name,
            saved=None if scheme is None else scheme.activations, dropout=dropout, early=quantize_early,
            checkpointing=checked("checkpointing", checkpointing, Checkpointing), parallel=tensor_parallel,
            attention=checked("attention", attention, Attention), sequence=sequence_parallel,
        )  # fmt: skip
        more, saved = activation_lines(size, all_weights, adapters, positive("batch", batch), tokens, keeping)
        lines += more
    count = sum(weight.elements for weight in all_weights)
    what = [f"{size.name if size else 'a model'}: {count:,} parameters", f"{formats.optimizer}"]
    what += [f"recipe {scheme.name}"] if scheme else []
    what += [f"{devices} devices"] if devices > 1 else []
    what += [f"{batch} x {tokens} tokens" + " on each" * (devices > 1)] if saved else []
    notes = _notes(scheme, all_weights, size, tokens, early=quantize_early)
    return MemoryEstimate(
        what=", ".join(what), parameters=count, lines=tuple(lines), saved=saved, notes=tuple(notes)
    )  # fmt: skip


def _model(model: Any, recipe: Recipe | None) -> tuple[ModelSize | None, tuple[Weight, ...]]:
    """Return the sizes of a model, None where only the number of its parameters is known, and its weights."""
    count = parameter_count(model)
    if count is not None:
        config = None if recipe is None else recipe.linear
        return None, (Weight(name="weights", shape=(count,), linear=True, config=config),)
    size = model_size(model)
    return size, weights_of(size, recipe)


def _check(size: ModelSize | None, recipe: Recipe | None, tokens: int, lora: int) -> None:
    for name, given in (("tokens", tokens), ("lora", lora)):
        if size is None and given:
            raise ArgumentError(
                f"{name}={given} needs the sizes of a model, not a number of parameters alone; pass a name such as "
                "'llama-8b', or a config.json"
            )
    if lora and recipe is not None:
        raise ArgumentError(
            f"lora={lora} with recipe={recipe.name!r} is not estimated; leave one out, and pass weights='nf4_g64' for "
            "quantised weights (QLoRA)"
        )


def _adapters(weights: tuple[Weight, ...], rank: int, layers: str) -> tuple[Weight, ...]:
    """Return the matrices of adapters (Hu et al., LoRA, arXiv:2106.09685): rank x inputs, outputs x rank."""
    if not rank:
        if layers:
            raise ArgumentError(f"lora_layers={shown(layers)} needs a rank; pass lora=16 as well")
        return ()
    try:
        pattern = re.compile(checked("lora_layers", layers, str))
    except re.error:
        raise ArgumentError(f"lora_layers={shown(layers)} is not a regular expression; write 'q_proj|v_proj'") from None
    found: list[Weight] = []
    for weight in weights:
        if weight.linear and pattern.search(weight.layer):
            n, k = weight.shape
            for name, shape in (("lora_A", (rank, k)), ("lora_B", (n, rank))):
                found.append(Weight(name=f"{weight.layer}.{name}", shape=shape, repeat=weight.repeat, linear=True))
    if not found:
        some = ", ".join(dict.fromkeys(w.layer.rpartition(".")[2] for w in weights if w.linear))
        raise ArgumentError(f"lora_layers={shown(layers)} fits no linear layer; they are called {some}")
    return tuple(found)


def _precision(
    recipe: Recipe | None, optimizer: Any, weights: str | None, master: str | None, gradients: str | None
) -> Precision:
    """Return the formats that training keeps, where they are not given by what is usual under a recipe."""
    chosen = optimizer_of(optimizer if optimizer is not None or recipe is None else recipe.optimizer)
    wide = recipe is not None and (recipe.autocast is not None or _in_float32(recipe))
    own = chosen.weights is not None and weights is None  # the optimizer keeps the weights themselves
    stored = checked_format("weights", weights) or ("fp32" if wide else "bf16")
    copy = checked_format("master", None if master == "auto" else master)
    if master == "auto" and chosen.scheme.weights is None and bits_per_element(stored) < 32:
        copy = "fp32"
    usual = _rounded(recipe) or ("fp32" if stored == "fp32" else "bf16")
    return Precision(
        weights=None if own else stored, master=copy, optimizer=chosen,
        gradients=checked_format("gradients", gradients) or usual,
    )  # fmt: skip


def _rounded(recipe: Recipe | None) -> str | None:
    """Return the format below 16 bits to which layers of a recipe round the gradients of weights, None without one."""
    out = None if recipe is None or recipe.linear is None else recipe.linear.wgrad.out.format
    return None if out is None or bits_per_element(out) >= 16 else out.name


def _in_float32(recipe: Recipe | None) -> bool:
    """Say whether layers of a recipe take float32 weights as they are, or in more than 16 bits."""
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
