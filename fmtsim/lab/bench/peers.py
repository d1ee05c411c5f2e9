# SPDX-License-Identifier: Apache-2.0
"""Other software that converts a model for training in few bits, where it is installed."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils import cpp_extension

from fmtsim.support.errors import FmtsimError

Filter = Callable[[nn.Module, str], bool]

_MXFP4 = {
    "scale_bits": 8, "block_size": 32, "w_elem_format": "fp4_e2m1", "a_elem_format": "fp4_e2m1", "bfloat": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Say which module it needs, how that is installed, and how it converts the linear layers that a filter chooses."""

    module: str
    install: str
    apply: Callable[[Any, nn.Module, Filter], None]

    @property
    def installed(self) -> bool:
        """Whether the module is there."""
        return importlib.util.find_spec(self.module) is not None

    def convert(self, model: nn.Module, chosen: Filter) -> None:
        """Convert a model in place.

        Raises:
            FmtsimError: It is not installed.
        """
        if not self.installed:
            raise FmtsimError(f"{self.module} is not installed; {self.install}, or leave it out")
        self.apply(importlib.import_module(self.module), model, chosen)


def installed() -> list[str]:
    """Return the names of the peers that are there."""
    return [name for name, peer in PEERS.items() if peer.installed]


def _torchao_float8(torchao: Any, model: nn.Module, chosen: Filter) -> None:
    """Convert by torchao's float8 training with a scale for each tensor; emulated where no unit multiplies float8."""
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig(emulate=next(model.parameters()).device.type != "cuda")
    float8.convert_to_float8_training(model, module_filter_fn=chosen, config=config)


def _microxcaling_mxfp4(mx: Any, model: nn.Module, chosen: Filter) -> None:
    """Exchange linear layers for microxcaling's with MXFP4 in all three products, keeping their parameters.

    Its kernels are compiled where there is nvcc; else it runs torch operations.
    """
    kernels = next(model.parameters()).device.type == "cuda" and cpp_extension.CUDA_HOME is not None
    specs = mx.finalize_mx_specs({**_MXFP4, "custom_cuda": kernels})
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and chosen(module, name):
            own = mx.Linear(module.in_features, module.out_features, module.bias is not None, mx_specs=specs)
            own.weight, own.bias = module.weight, module.bias
            model.set_submodule(name, own)


PEERS = {
    "torchao_float8": Peer(module="torchao", install="pip install torchao", apply=_torchao_float8),
    "microxcaling_mxfp4": Peer(
        module="mx", install="clone github.com/microsoft/microxcaling and add it to PYTHONPATH",
        apply=_microxcaling_mxfp4,
    ),
}  # fmt: skip
