# SPDX-License-Identifier: Apache-2.0
"""State of a converted model: its converted modules, the recipe's name, and delayed scales.

The recipe's name is a buffer of the model that was converted, so that every library that saves a state_dict saves it
beside the delayed scales; it is written anew at each saving, and checked at loading.
"""

import hashlib
import logging
import os
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from fmtsim.casts.arguments import check_module
from fmtsim.nn.conversion import NAME, STATE, conversion, root
from fmtsim.nn.modules import EmulatedModule
from fmtsim.nn.swaps import swap_details
from fmtsim.scaling.history import DelayedScale
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import check_items

_LOG = logging.getLogger("fmtsim")
_FSDP1: Final = "_fsdp_wrapped_module"  # what torch's FullyShardedDataParallel calls the module in it


def is_converted(model: nn.Module) -> bool:
    """Return True if ``convert`` changed something in a model."""
    changes = (change for module in model.modules() for change in conversion(module).changes.values())
    return any(isinstance(m, EmulatedModule) for m in model.modules()) or any(change.recipe for change in changes)


def converted_root(model: nn.Module, verb: str) -> nn.Module:
    """Return the module that ``convert`` was given: a converted model, or the one within it.

    Raises:
        ArgumentError: Several parts of the model were converted, each by itself.
    """
    roots: dict[str, nn.Module] = {}  # keys are prefixes of the names inside
    for name, module in model.named_modules():
        if conversion(module).root is not None and not any(f"{name}.".startswith(root) for root in roots):
            roots[f"{name}." if name else ""] = module
    if len(roots) > 1:
        named = ", ".join(root.removesuffix(".") for root in list(roots)[:3])
        raise ArgumentError(
            f"{verb} found {len(roots)} parts of {type(model).__name__} that were converted one by one ({named}); "
            f"convert {type(model).__name__} in one call, whose rules= say what differs"
        )
    return next(iter(roots.values()), model)


def converted_modules(model: nn.Module, verb: str) -> list[tuple[str, EmulatedModule]]:
    """Return the modules with emulated products by name; raise ArgumentError where ``convert`` changed nothing."""
    check_module(verb, model)
    if not is_converted(model):
        raise ArgumentError(f"{verb} found no converted module in {type(model).__name__}; convert it first")
    return [(name, module) for name, module in model.named_modules() if isinstance(module, EmulatedModule)]


def converted_state(model: nn.Module) -> dict[str, Any]:
    """Return the recipe's name and the scales that a converted model keeps, by layer and operand, on the CPU.

    Raises:
        ArgumentError: The model is not converted.

    >>> from fmtsim.nn.convert import convert
    >>> model = convert(nn.Sequential(nn.Linear(64, 64)), recipe="te_delayed")
    >>> model(torch.ones(32, 64)).sum().backward()
    >>> converted_state(model)["recipe"]
    'te_delayed'
    """
    modules = _unwrapped(model, "state")
    layers = {
        name: {
            operand: {field: tensor.detach().cpu().clone() for field, tensor in memory.named_buffers()}
            for operand, memory in module._modules[STATE].named_children()  # type: ignore[union-attr]
        }
        for name, module in modules
        if STATE in module._modules
    }
    return {"recipe": root(getattr(model, _FSDP1, model)).recipe, "layers": layers}


def _unwrapped(model: nn.Module, verb: str) -> list[tuple[str, EmulatedModule]]:
    """Return the converted layers under the names that they have without the wrappers of FSDP1."""
    return [(name.replace(f"{_FSDP1}.", ""), module) for name, module in converted_modules(model, verb)]


def _is_state(value: Any, depth: int = 3) -> bool:
    """Return True if a value holds tensors by layer, operand and field."""
    if not depth:
        return isinstance(value, torch.Tensor)
    return isinstance(value, dict) and all(_is_state(part, depth - 1) for part in value.values())


@torch.no_grad()
def load_converted_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Put what ``converted_state`` returned into a model converted with the same recipe; all of it or nothing.

    Raises:
        ArgumentError: The state is of another recipe, or of other layers, operands or lengths of history.

    >>> from fmtsim.nn.convert import convert
    >>> one, other = (convert(nn.Sequential(nn.Linear(64, 64)), recipe="te_delayed") for _ in range(2))
    >>> one(torch.ones(32, 64)).sum().backward()
    >>> load_converted_state(other, converted_state(one))
    """
    if not isinstance(state, dict) or set(state) != {"recipe", "layers"}:
        step = "; read the file by torch.load" if isinstance(state, str | os.PathLike) else ""
        raise ArgumentError(f"load_state takes what fmtsim.state returned, not {type(state).__name__}{step}")
    modules = dict(_unwrapped(model, "load_state"))
    recipe = root(getattr(model, _FSDP1, model)).recipe
    check_items(state, {"recipe": str | None, "layers": dict[str, dict[str, dict[str, torch.Tensor]]]}, "the state")
    if state["recipe"] != recipe:
        raise ArgumentError(
            f"the state is of recipe {shown(state['recipe'])}, the model runs {shown(recipe)}; "
            f"convert the plain model with recipe={shown(state['recipe'])} first"
        )
    if not _is_state(state["layers"]):
        raise ArgumentError("the state's layers are not what fmtsim.state returned: tensors by layer and operand")
    having = {name for name, module in modules.items() if STATE in module._modules}  # the layers with delayed scales
    for name in sorted(having ^ set(state["layers"])):  # only the model or only the state has these layers
        where = "state" if name in having else "model"
        raise ArgumentError(f"layer {shown(name)} has delayed scales, but the {where} has none of it; convert alike")
    pairs = []
    for name, operands in state["layers"].items():
        memory = dict(modules[name]._modules[STATE].named_buffers())  # type: ignore[union-attr]
        saved = {
            f"{operand}.{field}": tensor for operand, fields in operands.items() for field, tensor in fields.items()
        }
        for key in sorted(set(memory) | set(saved)):
            shapes = [tuple(tensors[key].shape) if key in tensors else None for tensors in (memory, saved)]
            if shapes[0] not in (shapes[1], (0,)) or None in shapes:  # a stored scale has no shape before it is known
                raise ArgumentError(
                    f"layer {shown(name)}: {key} is {shapes[1]} in the state and {shapes[0]} in the model; "
                    "the recipe was another one when the state was saved"
                )
        pairs += [(memory[key], saved[key]) for key in memory]  # written once all of them are known to fit
    for tensor, value in pairs:
        tensor.resize_(value.shape).copy_(value)


def share_scales(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Make delayed scales follow the amax over all ranks, after checking that the ranks agree on the recipe.

    Call it on every rank of the group, after convert. From then on each product of a layer with delayed scales reduces
    one number an operand over the group, so all ranks have to run the same layers in the same order.

    Args:
        model: A converted model.
        group: The ranks; None is the default group of torch.distributed.

    Raises:
        ArgumentError: The model is not converted, there is no group, or ranks run different recipes.
        CollectiveError: A rank does not answer.

    >>> from fmtsim.nn.convert import convert
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # by torchrun: without arguments
    >>> model = convert(nn.Sequential(nn.Linear(64, 64)), recipe="te_delayed")
    >>> share_scales(model)
    >>> model(torch.ones(32, 64)).sum().backward()  # takes part in the amax of all ranks
    >>> dist.destroy_process_group()
    """
    from fmtsim.distributed.ranks import Ranks

    if not dist.is_initialized():
        raise ArgumentError("share_scales needs ranks; call torch.distributed.init_process_group first")
    modules = converted_modules(model, "share_scales")
    group = dist.group.WORLD if group is None else group
    assert group is not None
    swaps = {name: _digest(swap_details(module)) for name, module in model.named_modules() if swap_details(module)}
    runs = {name: _digest((module.emulation.config, module.emulation.plan)) for name, module in modules}  # type: ignore[union-attr]
    layers = {name: digest + swaps.pop(name, "") for name, digest in runs.items()} | swaps  # what runs, and when
    facts = (root(model).recipe, layers)  # what ranks have to agree on
    everyone, what = Ranks(group), "the comparison of recipes"
    everyone.present(what)  # a rank that left is named, instead of waited for
    ranks = everyone.gather_objects(facts, what)
    for rank, (recipe, theirs) in enumerate(ranks):
        names = [name for name in {**ranks[0][1], **theirs} if ranks[0][1].get(name) != theirs.get(name)]
        if names or recipe != ranks[0][0]:
            where = f"layer {names[0]!r}" if names else "the model"
            raise ArgumentError(
                f"ranks disagree: {where} runs recipe {shown(ranks[0][0])} on rank 0 and {shown(recipe)} on rank {rank}"
                f"{' as another config' if recipe == ranks[0][0] else ''}; convert with one recipe on all ranks"
            )
    for _, module in modules:
        for memory in module._modules[STATE].children() if STATE in module._modules else ():  # type: ignore[union-attr]
            if isinstance(memory, DelayedScale):
                memory.group = group  # reduces one amax an operand over these ranks from now on


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def attach_name(model: nn.Module) -> None:
    """Make a model check the recipe of checkpoints that it loads, and save the name of its own with delayed scales."""
    hooks = root(model).hooks
    if any(isinstance(part, DelayedScale) and part.is_saved for part in model.modules()):
        model.register_buffer(NAME, _encoded(model))
        hooks["save"] = model.register_state_dict_post_hook(_write)
    hooks["load"] = model.register_load_state_dict_pre_hook(_check)


def _encoded(model: nn.Module) -> torch.Tensor:
    name, device = root(model).recipe or "\0", next(model.parameters()).device
    return torch.tensor(list(name.encode()), dtype=torch.uint8, device=device)


def _write(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if prefix + NAME in state:
        state[prefix + NAME] = _encoded(model)


def _check(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuse scales of another recipe before anything is loaded; without scales in it, leave them as they are."""
    buffer, saved = model._buffers.get(NAME), state.get(prefix + NAME)
    if saved is None:
        if buffer is not None:
            state[prefix + NAME] = buffer  # so that strict loading does not miss it
            _LOG.info("the checkpoint has no delayed scales; %s goes on with its own", type(model).__name__)
        return
    name, ours = bytes(saved.tolist()).decode(errors="replace"), root(model).recipe  # UTF-8, or one zero for a config
    if name != (ours or "\0"):
        theirs = None if name == "\0" else name
        raise ArgumentError(
            f"the checkpoint has delayed scales of recipe {shown(theirs)}, the model runs {shown(ours)}; "
            f"convert the plain model with recipe={shown(theirs)}, or load the weights alone: "
            "{name: t for name, t in checkpoint.items() if 'fmtsim' not in name}"
        )
