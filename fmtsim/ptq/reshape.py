# SPDX-License-Identifier: Apache-2.0
"""Changes of a model that leave its function alone and make it easier to quantise: SmoothQuant, AWQ, equalisation."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fmtsim.nn.modules import EmulatedLinear, EmulatedTransposed
from fmtsim.ptq.calibrate import Slot
from fmtsim.ptq.weight_grid import nearest, output_error
from fmtsim.recipes.ptq_methods import Awq, Equalise, Rotate, Smooth
from fmtsim.scaling.hadamard import hadamard, sign_bits
from fmtsim.scaling.hadamard_matrix import hadamard_matrix, random_signs
from fmtsim.spec.operand import block_of
from fmtsim.support.errors import ArgumentError

# In a block: the norm, the layers that it feeds, and the layer that adds to the residual stream.
_HALVES = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj"),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
)


def rotation(size: int, seed: int | None, device: torch.device) -> Tensor:
    """Return ``diag(s) H / sqrt(size)``, float64, H = ``hadamard_matrix(size)``, s random signs; None is none."""
    h = hadamard_matrix(size).double() / math.sqrt(size)
    if seed is not None:
        h[sign_bits(random_signs(size, seed), size)] *= -1
    return h.to(device)


@torch.no_grad()
def rotate(model: Any, settings: Rotate) -> None:
    """Fold weights of RMS norms into the layers behind, and rotate all weights of the residual stream, in place.

    With R orthogonal, ``norm(x R) = norm(x) R`` once the norm has no weight of its own: embeddings and outputs that are
    added to the stream become ``W R``, layers that read it ``W R`` along their inputs. Computed in float64 and rounded
    once to a weight's dtype: up to that the model's function is the same. ``attach`` comes before.

    Raises:
        ArgumentError: The model is not built as Llama is, or a size has no Hadamard matrix.
    """
    decoder, blocks = _parts(model)
    embedding, head = decoder.embed_tokens, model.lm_head
    r = rotation(embedding.weight.shape[1], settings.seed, embedding.weight.device)
    _multiply(embedding, r)
    for block in blocks:
        for norm, readers, writer in _HALVES:
            _fold(block.get_submodule(norm), [block.get_submodule(name) for name in readers])
            for name in readers:
                _multiply(block.get_submodule(name), r)
            _multiply(block.get_submodule(writer), r, outputs=True)
        value, out, down = (block.get_submodule(n) for n in ("self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"))
        if settings.heads:  # the same rotation of each head's values, undone by the next layer
            h = rotation(block.self_attn.head_dim, None, r.device)
            _multiply(value, torch.block_diag(*[h] * (value.weight.shape[0] // len(h))), outputs=True)
            _multiply(out, torch.block_diag(*[h] * (out.weight.shape[1] // len(h))))
        if settings.online:
            _multiply(down, rotation(down.weight.shape[1], None, r.device))
    _fold(decoder.norm, [head])
    _multiply(head, r)


def attach(model: Any, settings: Rotate) -> bool:
    """Give the head a weight of its own and ``down_proj`` its online transform; return True if the head was tied."""
    decoder, blocks = _parts(model)
    tied = model.lm_head.weight is decoder.embed_tokens.weight
    if tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    for block in blocks if settings.online else ():
        block.mlp.down_proj.register_forward_pre_hook(transform_input)
    return tied


def detach(model: Any, tied: bool) -> None:
    """Undo ``attach``; weights are put back by the caller."""
    if tied:
        model.lm_head.weight = _parts(model)[0].embed_tokens.weight
        model.config.tie_word_embeddings = True
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is transform_input]:
            del module._forward_pre_hooks[key]


def transform_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Transform the first argument of a layer along its channels, in float32."""
    return (hadamard(args[0], args[0].shape[-1]).to(args[0].dtype), *args[1:])


def _parts(model: Any) -> tuple[Any, list[Any]]:
    """Return the decoder and its blocks, if the model is built as transformers' Llama is."""
    decoder = getattr(model, "model", None)
    names = [name for half in _HALVES for name in (half[0], *half[1], half[2])]
    missing = [] if hasattr(model, "lm_head") else ["lm_head"]
    missing += [name for name in ("embed_tokens", "layers", "norm") if not hasattr(decoder, name)]
    blocks = list(getattr(decoder, "layers", ()))
    for i, block in enumerate(blocks):
        modules = dict(block.named_modules())
        missing += [f"layers.{i}.{name}" for name in names if name not in modules]
        more = [name for name in modules if "norm" in name and "." not in name and name not in names]
        if more and not missing:
            raise ArgumentError(
                f"Rotate: layers.{i}.{more[0]} is a norm that no layer behind can absorb; leave rotate= out"
            )
    if missing or not blocks:
        raise ArgumentError(
            f"Rotate: {type(model).__name__} has no {(missing or ['layers'])[0]}; pass a decoder that is built as "
            "transformers' Llama, Mistral and Qwen are, or leave rotate= out"
        )
    return decoder, blocks


def _fold(norm: Any, layers: list[Any]) -> None:
    """Multiply a norm's weight into the layers behind; the norm then multiplies by one."""
    if getattr(norm, "bias", None) is not None or isinstance(norm, nn.LayerNorm):
        raise ArgumentError(
            f"Rotate: {type(norm).__name__} subtracts a mean or adds a bias; pass a model with RMS norms"
        )
    weight = norm.weight.clone()
    norm.weight.zero_()
    one = torch.ones(1, len(weight), dtype=weight.dtype, device=weight.device)
    offset = round(float(norm(one).float().mean()))  # 1 where the norm multiplies by 1 + weight, as Gemma's
    norm.weight.fill_(1 - offset)
    for layer in layers:
        layer.weight.copy_(layer.weight.double() * (weight.double() + offset))


def _multiply(module: Any, r: Tensor, *, outputs: bool = False) -> None:
    """Rotate a weight along its inputs, or along its outputs with its bias."""
    w = module.weight.double()
    module.weight.copy_((w.mT @ r).mT if outputs else w @ r)
    if outputs and module.bias is not None:
        module.bias.copy_(module.bias.double() @ r)


DIVISOR = "ptq_divisor"  # the buffer of a layer whose inputs are divided
_HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Dropout)


def smooth(slot: Slot, settings: Smooth | Awq) -> bool:
    """Divide the input channels of a layer and multiply the columns of its weight; return True if that was done.

    The divisor is a buffer of the layer, and a hook divides its input: any graph will do, while the source folds the
    division into the normalisation before. Up to float32's rounding the two are the same. Only layers that multiply
    their input itself are smoothed, linear ones; a channel or column of zeros keeps the divisor 1.
    """
    part, module = slot.parts[0], slot.parts[0].module
    if not isinstance(module, EmulatedLinear | EmulatedTransposed) or part.part:
        return False
    assert part.channels is not None
    if isinstance(settings, Awq):
        if slot.quantizer.format is None:
            return False
        # AWQ's factor of every input channel, float32 [K] on the CPU
        assert slot.hessian is not None and slot.parts[0].magnitudes is not None
        w, mean = slot.w.float().cpu(), (slot.parts[0].magnitudes / slot.rows).float()
        # 1. The mean magnitude of a column, each element relative to the largest of its group.
        width = block_of(slot.quantizer)[1] or w.shape[1]
        groups = torch.nn.functional.pad(w.abs(), (0, -w.shape[1] % width)).unflatten(1, (-1, width))
        relative = (groups / (groups.amax(-1, keepdim=True) + 1e-6)).flatten(1)[:, : w.shape[1]].mean(0)
        # 2. The factors of each exponent, and the error of the outputs when the weight is rounded under them.
        best, least = torch.ones_like(mean), float("inf")
        for i in range(settings.steps):
            r = i / settings.steps
            s = mean.pow(r) / (relative.pow(1 - r) + 1e-4) if settings.duo else mean.pow(r)
            s = s.clamp(min=1e-4)
            s = s / (s.max() * s.min()).sqrt()
            s = torch.where(torch.isfinite(s), s, 1.0)
            error = float(output_error(w, nearest(w * s, slot.quantizer) / s, slot.hessian).sum())
            if error < least:
                best, least = s, error
        divisor = best.to(slot.w)
    else:
        divisor = smoothing(part.channels, slot.w.abs().amax(0), settings.alpha).to(slot.w.dtype)
    slot.w.mul_(divisor)
    module.register_buffer(DIVISOR, divisor)
    module.register_forward_pre_hook(divide_input)
    return True


def smoothing(x: Tensor, w: Tensor, alpha: float) -> Tensor:
    """Return ``x**alpha / w**(1 - alpha)``, 1 where either is zero; computed in float64."""
    s = x.double().pow(alpha) / w.double().pow(1 - alpha)
    return torch.where((x > 0) & (w > 0) & torch.isfinite(s) & (s > 0), s, 1.0)


def divide_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Divide the first argument of a layer by its buffer."""
    divisor = getattr(module, DIVISOR)
    return (args[0] / divisor.to(args[0].dtype), *args[1:])


def equalise(model: nn.Module, settings: Equalise) -> list[str]:
    """Give the outputs of one layer and the inputs of the next the same ranges, in place; return the pairs' names.

    With r1 and r2 the largest magnitudes of row i of the first weight and of column i of the second, row and bias i
    are divided, and the column is multiplied, by ``sqrt(r1 / r2)``.

    Raises:
        ArgumentError: A pair names no linear layers or convolutions, or ones whose channels do not match; or there is
            no pair.
    """
    pairs = _named(model, settings.pairs) if settings.pairs else _found(model)
    if not pairs:
        raise ArgumentError(
            f"{type(model).__name__} has no layers to equalise: no nn.Sequential holds two with ReLU between them; "
            "name them in Equalise(pairs=(('fc1', 'fc2'),))"
        )
    for _, first, second in pairs * settings.rounds:
        with torch.no_grad():
            into = second.weight if second.weight.dim() == 2 else second.weight.flatten(2)
            r1 = first.weight.abs().flatten(1).amax(1)
            r2 = into.abs().amax(0) if into.dim() == 2 else into.abs().amax((0, 2))
            s = torch.where((r1 > 0) & (r2 > 0), (r1.double() / r2.double()).sqrt(), 1.0).to(r1.dtype)
            first.weight.div_(s.reshape(-1, *(1,) * (first.weight.dim() - 1)))
            if first.bias is not None:
                first.bias.div_(s)
            second.weight.mul_(s.reshape(1, -1, *(1,) * (second.weight.dim() - 2)))
    return [name for name, _, _ in pairs]


def _named(model: nn.Module, names: tuple[tuple[str, str], ...]) -> list[tuple[str, Any, Any]]:
    modules, pairs = dict(model.named_modules()), []
    for one, two in names:
        for name in (one, two):
            if not isinstance(modules.get(name), nn.Linear | nn.Conv2d):
                raise ArgumentError(f"Equalise pairs: {name!r} is not a linear layer or convolution of the model")
        if not _fit(modules[one], modules[two]):
            raise ArgumentError(f"Equalise pairs: the outputs of {one!r} are not the inputs of {two!r}; exchange them?")
        pairs.append((f"{one} > {two}", modules[one], modules[two]))
    return pairs


def _found(model: nn.Module) -> list[tuple[str, Any, Any]]:
    pairs = []
    for name, sequence in model.named_modules():
        before: tuple[str, Any] | None = None
        for i, module in enumerate(sequence if isinstance(sequence, nn.Sequential) else ()):
            label = f"{name}.{i}" if name else str(i)
            if isinstance(module, nn.Linear | nn.Conv2d):
                if before is not None and _fit(before[1], module):
                    pairs.append((f"{before[0]} > {label}", before[1], module))
                before = (label, module)
            elif not isinstance(module, _HOMOGENEOUS):
                before = None
    return pairs


def _fit(first: Any, second: Any) -> bool:
    kind = isinstance(first, nn.Linear) == isinstance(second, nn.Linear)
    return kind and first.weight.shape[0] == second.weight.shape[1] and getattr(second, "groups", 1) == 1


def stored(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return the Parameters and buffers of a model with copies, to put them back after a failure."""
    return [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]


def unsmooth(modules: Mapping[str, nn.Module]) -> None:
    """Take divisors and their hooks away; weights are put back by the caller."""
    for module in modules.values():
        module._buffers.pop(DIVISOR, None)
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is divide_input:
                del module._forward_pre_hooks[key]
