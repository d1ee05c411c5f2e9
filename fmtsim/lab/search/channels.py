# SPDX-License-Identifier: Apache-2.0
"""Fewer channels between the layers of an nn.Sequential: the first ones of shared weights, and nothing of the rest."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fmtsim.support.errors import ArgumentError, shown

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
# What treats channels alike and each by itself, so that a network of fewer is the same function of those.
_BETWEEN = (
    *_NORMS, nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Tanh, nn.Sigmoid,
    nn.Dropout, nn.Dropout2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Flatten,
)  # fmt: skip
_INPUTS, _OUTPUTS = ("in_channels", "in_features"), ("out_channels", "out_features", "num_features")


@dataclass(slots=True, kw_only=True)
class Link:
    """Hold the channels between two layers.

    Args:
        name: Of the layer that makes them.
        maker, reader: The layers.
        norms: Batch normalisation between them.
        channels: How many there are.
    """

    name: str
    maker: Any
    reader: Any = None
    norms: list[Any] = field(default_factory=list)

    @property
    def channels(self) -> int:
        """How many channels there are."""
        return int(self.maker.weight.shape[0])


def links_of(model: nn.Module) -> list[Link]:
    """Return what lies between each layer of a sequence and the next.

    Raises:
        ArgumentError: A module that is no nn.Sequential, or one in it through which channels cannot be followed.
    """
    if not isinstance(model, nn.Sequential):
        raise ArgumentError(
            f"widths= follow channels through an nn.Sequential, and the model is a {type(model).__name__}; "
            "leave widths= out"
        )
    links: list[Link] = []
    for name, module in _leaves(model, ""):
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1):
            if links:
                links[-1].reader = module
            links.append(Link(name=name, maker=module))
        elif links and isinstance(module, _NORMS):
            links[-1].norms.append(module)
        elif not isinstance(module, _BETWEEN):
            groups = " in groups" if isinstance(module, nn.Conv2d) else ""
            raise ArgumentError(
                f"widths= cannot follow channels through {name!r}, a {type(module).__name__}{groups}; use "
                "linear layers, convolutions without groups, batch normalisation, pooling and activations, or leave "
                "widths= out"
            )
    weights = [link.maker.weight for link in links]
    if len({id(w) for w in weights}) < len(weights):
        raise ArgumentError("widths= need a weight for each layer, and two layers share one; leave widths= out")
    return links[:-1]


def _leaves(model: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_children():
        if isinstance(module, nn.Sequential):
            yield from _leaves(module, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", module


def check_widths(widths: Any) -> tuple[float, ...]:
    """Return widths as a tuple; raise ArgumentError where one is none."""
    good = isinstance(widths, Sequence) and not isinstance(widths, str) and len(widths) > 0
    if not good or not all(type(w) in (int, float) and 0 < w <= 1 for w in widths) or len(set(widths)) < len(widths):
        raise ArgumentError(
            f"widths={shown(widths)} are not allowed; pass different fractions of the channels, above 0 and at most 1, "
            "such as (0.5, 1.0)"
        )
    return tuple(widths)


def counted(link: Link, width: float) -> int:
    """Return how many channels a width is."""
    return max(1, round(width * link.channels))


@contextmanager
def narrowed(links: Sequence[Link], counts: Sequence[int]) -> Iterator[None]:
    """Let a model run with the first so many channels of each link; gradients reach the shared Parameters."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module, tensors, sizes in _parts(links, counts):
            for place in (module._parameters, module._buffers):
                mine = {name: t for name, t in tensors.items() if place.get(name) is not None}
                before.append((place, {name: place[name] for name in mine}))
                place.update(mine)
            before.append((vars(module), {name: getattr(module, name) for name in sizes}))
            vars(module).update(sizes)
        yield
    finally:
        for place, values in reversed(before):
            place.update(values)


@torch.no_grad()
def narrow(links: Sequence[Link], counts: Sequence[int]) -> None:
    """Take the other channels away for good. Parameters stay the same objects, in new shapes and without gradients."""
    for module, tensors, sizes in list(_parts(links, counts)):
        for name, t in tensors.items():
            parameter = getattr(module, name)
            parameter.data, parameter.grad = t.detach().clone(), None
        vars(module).update(sizes)


def _parts(links: Sequence[Link], counts: Sequence[int]) -> Iterator[tuple[Any, dict[str, Tensor], dict[str, int]]]:
    rows = {link.maker: n for link, n in zip(links, counts, strict=True)}
    columns = {}
    for link, n in zip(links, counts, strict=True):
        columns[link.reader] = link.reader.weight.shape[1] // link.channels * n  # flattened: positions of a channel
        for norm in link.norms:
            rows[norm] = n
    for module in dict.fromkeys([*rows, *columns]):
        height, width = rows.get(module), columns.get(module)
        names = ("weight", "bias", "running_mean", "running_var")
        tensors = {name: t[:height] for name in names if (t := getattr(module, name, None)) is not None}
        if width is not None:
            tensors["weight"] = tensors["weight"][:, :width]
        sizes = {**dict.fromkeys(_INPUTS, width), **dict.fromkeys(_OUTPUTS, height)}
        yield module, tensors, {name: n for name, n in sizes.items() if n is not None and hasattr(module, name)}
