"""What runs a layer's products beside its tensors, under a name that operators of torch.compile can carry."""

import itertools
import uuid
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fmtsim.errors import ArgumentError
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.gemm.layers.streams import Generator
from fmtsim.gemm.products.operator import drawn_key
from fmtsim.scaling.history import DelayedScale, FrozenScale

State = Mapping[str, DelayedScale | FrozenScale]

_layers: WeakValueDictionary[str, "Layer"] = WeakValueDictionary()
_numbers = itertools.count()
# Compiled graphs are kept on disk by what they call: names of one process must mean nothing to the next.
_HOST: Final = torch.device("cpu")
_PROCESS = uuid.uuid4().hex[:12]


class Layer:
    """Keep a layer's definition, and what it draws from and remembers in.

    An operator takes tensors, numbers and text. It gets the name, and finds this object by it for as long as that
    lives. What a layer draws and remembers is as invisible to the compiler as a print would be.

    Args:
        config: The quantisers, and who multiplies.
        generator: Where random numbers come from.
        state: What delayed scaling remembers, by operand.

    Attributes:
        name: By which ``find_layer`` finds it.
        sized: Whether its operands are rotated or corrected in groups, which sizes have to fit.
    """

    def __init__(self, config: LinearConfig, generator: Generator = None, state: State | None = None) -> None:
        self.config, self.generator, self.state = config, generator, state or {}
        self.name = f"{_PROCESS}.{next(_numbers)}"
        self.sized = any(q.transforms or (q.scaling and q.scaling.eden) for q in config.operands.values())
        self._counters: dict[torch.device, Tensor] = {}
        _layers[self.name] = self

    @cached_property
    def seed(self) -> int:
        """The seed of all keys that are made on a GPU, drawn when it is first asked for; an int is its own."""
        return self.generator if isinstance(self.generator, int) else drawn_key(self.generator, _HOST).seed

    def counter(self, device: torch.device) -> Tensor:
        """Return the number of passes over the layer that keys were counted for on a device: int64, 0-d."""
        if device not in self._counters:
            self._counters[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._counters[device]

    def __reduce__(self) -> Any:
        return Layer, (self.config, self.generator, self.state)  # a copy has a name of its own


def find_layer(name: str) -> Layer:
    """Return the layer of a name.

    Raises:
        ArgumentError: It is gone.
    """
    layer = _layers.get(name)
    if layer is None:
        raise ArgumentError(f"{name} was compiled for a model that is gone; compile the converted model again")
    return layer
