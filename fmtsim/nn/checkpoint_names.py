# SPDX-License-Identifier: Apache-2.0
"""The recipe's name beside the delayed scales in the state_dict of a converted model, and its check at loading.

The name is a buffer of the model that was converted, so that every library that saves a state_dict saves it; what
is saved is written anew each time, whatever became of the buffer.
"""

import logging
from typing import Any, Final

import torch
from torch import nn

from fmtsim.scaling.history import DelayedScale
from fmtsim.support.errors import ArgumentError, shown

RECIPE: Final = "_fmtsim_recipe"  # on the root: the recipe's name, None for a config
NAME: Final = "fmtsim_recipe"  # uint8: the name in UTF-8; one zero for a config
_LOG = logging.getLogger("fmtsim")


def attach_name(model: nn.Module) -> None:
    """Let a model check checkpoints that it loads, and name its recipe in those that it saves with delayed scales."""
    if any(isinstance(part, DelayedScale) and part.is_saved for part in model.modules()):
        model.register_buffer(NAME, _encoded(model))
        model.register_state_dict_post_hook(_write)
    model.register_load_state_dict_pre_hook(_check)


def detach_name(model: nn.Module) -> None:
    """Undo ``attach_name``."""
    model._buffers.pop(NAME, None)
    for key in [key for key, hook in model._load_state_dict_pre_hooks.items() if getattr(hook, "hook", None) is _check]:
        del model._load_state_dict_pre_hooks[key]
    for key in [key for key, hook in model._state_dict_hooks.items() if hook is _write]:
        del model._state_dict_hooks[key]


def _encoded(model: nn.Module) -> torch.Tensor:
    name, device = model.__dict__[RECIPE] or "\0", next(model.parameters()).device
    return torch.tensor(list(name.encode()), dtype=torch.uint8, device=device)


def _write(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if prefix + NAME in state:
        state[prefix + NAME] = _encoded(model)


def _check(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuse scales of another recipe before anything is loaded; without scales in it, leave them as they are."""
    own, saved = model._buffers.get(NAME), state.get(prefix + NAME)
    if saved is None:
        if own is not None:
            state[prefix + NAME] = own
            _LOG.info("the checkpoint has no delayed scales; %s goes on with its own", type(model).__name__)
        return
    name, ours = bytes(saved.tolist()).decode(errors="replace"), model.__dict__.get(RECIPE)
    if name != (ours or "\0"):
        theirs = None if name == "\0" else name
        raise ArgumentError(
            f"the checkpoint has delayed scales of recipe {shown(theirs)}, the model runs {shown(ours)}; "
            f"convert the plain model with recipe={shown(theirs)}, or load the weights alone: "
            "{name: t for name, t in checkpoint.items() if 'fmtsim' not in name}"
        )
