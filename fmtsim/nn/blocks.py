# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model are its blocks, in order: the stacks of layers that rules count."""

from torch import nn

from fmtsim.nn.modules import emulated_class
from fmtsim.nn.raw_matmuls import own_parameters


def find_blocks(model: nn.Module) -> list[str]:
    """Return the names of a model's blocks, in the model's order; none where it has no stack of them.

    A stack is an ``nn.ModuleList`` or ``nn.Sequential`` whose elements all hold convertible layers. Where stacks are
    nested, one whose elements are of one class has the blocks and the stacks inside them are parts of a block; one
    of different classes around such a stack is not one. Several stacks follow each other: the stages of a ResNet, or
    an encoder and a decoder; those whose elements are layers themselves count only where there are no others.
    """
    stacks = {name: list(module) for name, module in model.named_modules() if _is_stack(module)}
    even = {name for name, blocks in stacks.items() if len({type(block) for block in blocks}) == 1}
    outer = {name for name in even if not any(_inside(name, other) for other in even)}
    if not outer:  # no stack of equals: whatever is outermost
        outer = {name for name in stacks if not any(_inside(name, other) for other in stacks)}
    outer = {name for name in outer if emulated_class(type(stacks[name][0])) is None} or outer
    return [f"{name}.{i}" if name else str(i) for name in stacks if name in outer for i in range(len(stacks[name]))]


def block_of(layer: str, blocks: dict[str, int]) -> int | None:
    """Return the number of the block that a layer belongs to, None for one outside; blocks are numbered by name."""
    parts = layer.split(".")
    names = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return next((blocks[name] for name in names if name in blocks), None)


def _is_stack(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential) or not len(module):
        return False
    return all(any(emulated_class(type(part)) or own_parameters(part) for part in block.modules()) for block in module)


def _inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))
