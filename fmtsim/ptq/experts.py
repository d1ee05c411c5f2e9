# SPDX-License-Identifier: Apache-2.0
"""Stacked experts as the matrices that checkpoints of their models store: one for each expert and projection."""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_WEIGHT = ".weight"


class ExpertMatrix(NamedTuple):
    """A matrix of a stack: the module that has the stack, the stack's name, and the view [outputs, inputs] of it."""

    owner: Any
    stack: str
    w: Tensor


def expert_matrices(model: nn.Module) -> tuple[dict[str, ExpertMatrix], dict[str, str]]:
    """Return the matrices of stacked experts by the names of their layers in files, and new names of other tensors.

    Both are those of transformers' own way back from a model to its checkpoint, which is asked with one number for each
    row of a stack. Stacks that it keeps (gpt-oss), and all of other packages, are in neither.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return {}, {}
    try:
        from transformers.core_model_loading import revert_weight_conversion  # type: ignore[import-not-found]
    except ImportError:  # version 4, whose experts are layers
        return {}, {}
    matrices: dict[str, ExpertMatrix] = {}
    stacks = {name: p.detach() for name, p in model.named_parameters() if p.dim() == 3 and p.is_contiguous()}
    for name, stack in stacks.items():
        labels = torch.arange(stack.shape[0] * stack.shape[1]).view(*stack.shape[:2], 1)
        parts: dict[str, Any] = revert_weight_conversion(model, {name: labels})  # type: ignore[no-untyped-call]
        for part, rows in parts.items():
            # a matrix of an expert is a run of rows; anything else is no matrix that one can name
            first, count = int(rows.flatten()[0]), rows.numel()
            if part.endswith(_WEIGHT) and torch.equal(rows, torch.arange(first, first + count)[:, None]):
                view = stack.flatten(0, 1)[first : first + count]
                matrices[part.removesuffix(_WEIGHT)] = ExpertMatrix(
                    model.get_submodule(name.rpartition(".")[0]), name, view
                )
    if not matrices:
        return {}, {}
    others = {name: torch.zeros(1) for name in model.state_dict() if name not in stacks}
    names = {name: next(iter(revert_weight_conversion(model, {name: t}))) for name, t in others.items()}  # type: ignore[no-untyped-call]
    return matrices, {name: new for name, new in names.items() if new != name}
