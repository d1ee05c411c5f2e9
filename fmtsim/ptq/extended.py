# SPDX-License-Identifier: Apache-2.0
"""Operators beside products that a recipe quantises: inputs of normalisation and softmax modules, embeddings."""

from typing import Any

import torch
from torch import Tensor, nn

from fmtsim.nn.modules import EmulatedModule
from fmtsim.ptq.grid import nearest
from fmtsim.spec.quantizer import Quantizer

_QUANTIZER = "_fmtsim_ptq_input"  # of a module whose input is rounded


def extend(model: nn.Module, quantizer: Quantizer, *, weights: bool = True) -> tuple[str, ...]:
    """Round the inputs of normalisation and softmax modules at every call, and embeddings once; return their names.

    Normalisations are modules with "norm" in the name of their class. An embedding that shares its weight with a
    quantised layer has that layer's. ``weights=False`` leaves embeddings as they are: they were loaded.
    """
    contract(model)  # an earlier quantisation, reverted
    taken = {id(p) for module in model.modules() if isinstance(module, EmulatedModule) for p in module.parameters()}
    names = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module.weight) not in taken:
            if weights:
                with torch.no_grad():
                    module.weight.copy_(nearest(module.weight, quantizer))
        elif isinstance(module, nn.Softmax | nn.LogSoftmax) or "norm" in type(module).__name__.lower():
            module.__dict__[_QUANTIZER] = quantizer
            module.register_forward_pre_hook(_round_input)
        else:
            continue
        names.append(name)
    return tuple(names)


def _round_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Round the first argument of a module, as a matrix of rows along its last axis."""
    if not (args and isinstance(args[0], Tensor) and args[0].is_floating_point()):
        return args
    x = args[0]
    rounded = nearest(x.reshape(-1, x.shape[-1] if x.dim() else 1), module.__dict__[_QUANTIZER])
    return (rounded.to(x.dtype).reshape(x.shape), *args[1:])


def contract(model: nn.Module) -> None:
    """Let inputs be as they are again; embeddings are put back by the caller."""
    for module in model.modules():
        if module.__dict__.pop(_QUANTIZER, None) is not None:
            for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _round_input]:
                del module._forward_pre_hooks[key]
