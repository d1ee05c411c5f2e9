# SPDX-License-Identifier: Apache-2.0
"""One deterministic step of a copy of a model, forward and backward: what comparisons of machines run."""

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from fmtsim.casts.arguments import takes
from fmtsim.support.errors import ArgumentError, shown

# One of the two settings that torch accepts as deterministic, and on Hopper the workspace that it takes by default:
# the library's choices stay what they are without it.
WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextlib.contextmanager
def deterministic(device: str) -> Iterator[None]:
    """Let torch take deterministic algorithms alone, attention its plain one, and no TF32; then restore all of it.

    On the CPU nothing is changed. The settings belong to the process: other threads see them too.
    """
    if torch.device(device).type != "cuda":
        yield
        return
    name, value = WORKSPACE
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill, precision = memory.fill_uninitialized_memory, torch.backends.cuda.matmul.fp32_precision
    unset = name not in os.environ
    os.environ.setdefault(name, value)
    try:
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False  # nothing here reads what it did not write
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision
        memory.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        if unset:
            os.environ.pop(name, None)


_LOSSES = ("output['loss']", "output.loss")
Batch = tuple[tuple[Any, ...], dict[str, Any]]


class Step(NamedTuple):
    """Results of a step by name, the loss among the outputs where there is one, and the gradients."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    loss: Tensor | None


def check_loss(loss: Any) -> None:
    """Refuse a loss that is not a function of the model's output."""
    if loss is not None and not takes(loss, None):
        raise ArgumentError(f"loss={shown(loss)} is not a function of the model's output; write loss=lambda y: ...")


def split_arguments(batch: Any) -> Batch:
    """Return positional arguments and keywords: of a tensor, a list or tuple of arguments, or a dict of keywords."""
    if isinstance(batch, dict) or (hasattr(batch, "keys") and hasattr(batch, "items")):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, list | tuple) else (batch,)), {}


@contextlib.contextmanager
def unchanged(model: nn.Module, change: Callable[[nn.Module], None] = lambda model_copy: None) -> Iterator[nn.Module]:
    """Give a copy of a model that may run; torch's generators are afterwards as they were."""
    model_copy = copy.deepcopy(model)
    change(model_copy)
    devices = {t.device for t in model.parameters() if t.device.type == "cuda"}
    with torch.random.fork_rng(devices):
        yield model_copy


def run_step(model: nn.Module, batch: Batch, loss: Any = None) -> Step:
    """Run a model forward and backward; its parameters' gradients are those of this step.

    Args:
        loss: A function of the output that gives a number to differentiate. None differentiates an output of one
            number or one that is called loss, and else the sum of the outputs' elements, each times a random number of
            its own, from a fixed seed.
    """
    # 1. Forward, on leaves of this step's own.
    leaf = lambda t: t.detach().clone().requires_grad_(t.requires_grad)  # noqa: E731
    arguments, options = pytree.tree_map_only(Tensor, leaf, batch)
    y = model(*arguments, **options)
    outputs = dict(_tensors("output", y))
    if not outputs:
        raise ArgumentError(f"the model returned {shown(y)}, which holds no tensor; let it return some, or a dict")
    if loss is not None:
        x = loss(y)
        if not isinstance(x, Tensor) or x.numel() != 1 or not x.requires_grad:
            raise ArgumentError(f"loss= returned {shown(x)}; return one number that depends on the model's parameters")
        outputs["loss"] = x
    # 2. Backward: from the loss, else the only output of one number, else random gradients of all outputs.
    names = [name for name in ("loss", *_LOSSES) if name in outputs and outputs[name].numel() == 1]
    sources = [y for y in ([outputs[names[0]]] if names else outputs.values()) if y.requires_grad]
    number = None
    if len(sources) == 1 and sources[0].numel() == 1:
        torch.autograd.backward(sources, [torch.ones_like(sources[0])])
        number = sources[0].detach()
    elif sources:
        generator = torch.Generator().manual_seed(0)
        with torch._C._DisableTorchDispatch():  # a CPU draws them for every device
            seeds = [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in sources]
        torch.autograd.backward(sources, seeds)
    # 3. Gradients of the batch and of the parameters by name.
    leaves = {
        **dict(_tensors("batch", arguments)), **dict(_tensors("batch", options)), **dict(model.named_parameters()),
    }  # fmt: skip
    gradients = {name: t.grad for name, t in leaves.items() if t.grad is not None}
    return Step({name: t.detach() for name, t in outputs.items()}, gradients, number)


def _tensors(name: str, x: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a tuple, list or dict with the names of their places."""
    leaves, _ = pytree.tree_flatten_with_path(x)
    yield from ((f"{name}{pytree.keystr(path)}", leaf) for path, leaf in leaves if isinstance(leaf, Tensor))
