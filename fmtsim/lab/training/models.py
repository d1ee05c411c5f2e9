# SPDX-License-Identifier: Apache-2.0
"""The models of ``fmtsim train``: its own by name, and those that a function of the user's returns."""

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.lab.training.config import TrainConfig
from fmtsim.lab.training.gpt import GPT, VOCABULARY, LanguageModel
from fmtsim.lab.training.llama import Llama
from fmtsim.lab.training.own_code import FORMS, is_function, returned, source_of, told
from fmtsim.support.errors import ArgumentError, did_you_mean, shown

MODELS: Final[dict[str, Callable[..., LanguageModel]]] = {"gpt": GPT, "llama": Llama}
TITLES: Final = {"gpt": "GPT", "llama": "Llama"}


class OwnModel(nn.Module):
    """Give a model of the user's the loss of inputs and targets, int64 ``[batch, time]``.

    A model whose forward has a second argument without a default, or named ``targets``, is called with both and
    returns the loss (alone, as ``.loss``, or among others as the one number). Any other is called with the inputs and
    returns logits ``[batch, time, vocabulary]``, alone or as ``.logits``, whose cross entropy is the loss.
    """

    def __init__(self, model: nn.Module, where: str) -> None:
        super().__init__()
        self.model, self.where = model, where
        rest = [one for one in list(inspect.signature(model.forward).parameters.values())[1:] if one.kind < 2]
        self.takes_targets = bool(rest) and (rest[0].default is rest[0].empty or rest[0].name == "targets")

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats per token."""
        with told(self.where):
            out = self.model(inputs, targets) if self.takes_targets else self.model(inputs)
        return self.loss_of(out, targets)

    def loss_of(self, out: Any, targets: Tensor, vocabulary: int = VOCABULARY) -> Tensor:
        """Return the mean loss in nats per token, of what the model returned for the inputs before these targets."""
        if self.takes_targets:
            return self._loss(out)
        logits = getattr(out, "logits", out)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != targets.shape:
            raise ArgumentError(
                f"--model {self.where}: its forward returned {_what(logits)} for inputs {list(targets.shape)}; return "
                "logits [batch, time, vocabulary], or write forward(self, inputs, targets) that returns the loss"
            )
        if logits.shape[-1] < vocabulary:
            raise ArgumentError(
                f"--model {self.where}: its logits are of {logits.shape[-1]} tokens, and bytes are {vocabulary}; take "
                "the argument vocabulary"
            )
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _loss(self, out: Any) -> Tensor:
        given = [out.loss] if isinstance(getattr(out, "loss", None), Tensor) else out
        several = given if isinstance(given, list | tuple) else [given]
        found = [x for x in several if isinstance(x, Tensor) and not x.dim() and x.is_floating_point()]
        if len(found) != 1:
            raise ArgumentError(
                f"--model {self.where}: its forward(inputs, targets) returned {_what(out)}; return the mean loss, a "
                "tensor without dimensions"
            )
        return found[0]


def _what(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def build_model(config: TrainConfig, *, layers: int | None = None) -> nn.Module:
    """Return the model of a config with weights that depend on its seed alone, on its device.

    Args:
        config: The comparison.
        layers: Blocks instead of the config's own; models from files have their own number.

    Raises:
        ArgumentError: There is no such model, or its function does not return one; the message says why.
    """
    sizes = asdict(config.model) | ({} if layers is None else {"layers": layers})
    if config.architecture in MODELS:
        return MODELS[config.architecture](type(config.model)(**sizes), config.seed).to(config.device)
    return _own(config.architecture, sizes, config.seed).to(config.device)


def module_of(architecture: str) -> nn.Module:
    """Return the module that a function returns, ``FILE.py:function`` or ``package.module:function``, as it is.

    Raises:
        ArgumentError: There is no such function, or it does not return a module; the message says why.
    """
    return _own(architecture, {}, 0).model


def without_head(model: nn.Module) -> Callable[[nn.Module, str], bool] | None:
    """Return ``convert``'s ``filter_fn``: this package's models leave their head out, others leave it to the recipe."""
    return LanguageModel.without_head if isinstance(model, LanguageModel) else None


@contextlib.contextmanager
def repeatable(model: nn.Module, seed: int, step: int) -> Iterator[None]:
    """Let what a model of the user's draws (dropout) depend on seed and step; generators are then as they were."""
    if not isinstance(model, OwnModel):
        yield
        return
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed((seed << 32 ^ step) & (1 << 63) - 1)
        yield


def source_digest(architecture: str) -> str | None:
    """Return the SHA-256 of a model's file, None for models of this package.

    Raises:
        ArgumentError: It is neither one of this package nor a function's name, or the function's file is not there.
    """
    if architecture in MODELS:
        return None
    _check_name(architecture)
    file = source_of(architecture)
    return hashlib.sha256(b"" if file is None else file.read_bytes()).hexdigest()


def _check_name(architecture: str) -> None:
    if not is_function(architecture):
        hint = did_you_mean(architecture, MODELS)
        raise ArgumentError(
            f"--model {architecture} is unknown{hint}; choose {' or '.join(MODELS)}, or {FORMS} that returns a "
            "torch.nn.Module"
        )


def _own(architecture: str, sizes: dict[str, int], seed: int) -> OwnModel:
    _check_name(architecture)
    return _checked(architecture, returned(architecture, seed, sizes))


def _checked(architecture: str, model: Any) -> OwnModel:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"--model {architecture} returned {shown(model)}; return a torch.nn.Module")
    if not any(p.requires_grad for p in model.parameters()):
        raise ArgumentError(f"--model {architecture} returned a {type(model).__name__} without parameters to train")
    return OwnModel(model, architecture)
