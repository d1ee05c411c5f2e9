# SPDX-License-Identifier: Apache-2.0
"""Rotate the residual stream of a decoder by a Hadamard matrix that its weights absorb (QuaRot, SpinQuant)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fmtsim.recipes.ptq_methods import Rotate
from fmtsim.scaling.hadamard import hadamard, sign_bits
from fmtsim.scaling.hadamard_matrix import hadamard_matrix, random_signs
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
