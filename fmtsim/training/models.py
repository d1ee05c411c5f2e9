"""The models of ``fmtsim train``: its own by name, and those that a function in a file returns."""

import contextlib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fmtsim.errors import ArgumentError, FmtsimError, did_you_mean, shown
from fmtsim.training.config import TrainConfig
from fmtsim.training.gpt import GPT, VOCABULARY, LanguageModel
from fmtsim.training.llama import Llama

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
        if self.takes_targets:
            return self._loss(out)
        logits = getattr(out, "logits", out)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != targets.shape:
            raise ArgumentError(
                f"--model {self.where}: its forward returned {_what(logits)} for inputs {list(inputs.shape)}; return "
                "logits [batch, time, vocabulary], or write forward(self, inputs, targets) that returns the loss"
            )
        if logits.shape[-1] < VOCABULARY:
            raise ArgumentError(
                f"--model {self.where}: its logits are of {logits.shape[-1]} tokens, and bytes are {VOCABULARY}; take "
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
    """Return the module that a function in a file returns, ``FILE.py:function``, as it is.

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
    """Return the SHA-256 of a model's file, None for models of this package."""
    return None if architecture in MODELS else hashlib.sha256(_split(architecture)[0].read_bytes()).hexdigest()


def _split(architecture: str) -> tuple[Path, str]:
    name, colon, function = architecture.rpartition(":")
    if not colon or not name.endswith(".py"):
        hint = did_you_mean(architecture, MODELS)
        raise ArgumentError(
            f"--model {architecture} is unknown{hint}; choose {' or '.join(MODELS)}, or FILE.py:function that returns "
            "a torch.nn.Module"
        )
    path = Path(name).expanduser()
    if not path.is_file():
        raise ArgumentError(f"--model {architecture}: there is no file {path}; pass FILE.py:function")
    return path, function


def run_of(architecture: str, seed: int, device: str) -> tuple[nn.Module, Any, Any]:
    """Return model, batch and loss that a function in a file returns, ``FILE.py:function``, on a device.

    It returns ``(model, batch)`` or ``(model, batch, loss)``, or a model that ``fmtsim train`` takes, whose batch is
    then 2 x 64 random bytes and the byte that follows each.

    Raises:
        ArgumentError: There is no such function, or it returns something else; the message says why.
    """
    value = _returned(architecture, {}, seed)
    if isinstance(value, nn.Module):
        tokens = torch.randint(0, VOCABULARY, (2, 65), generator=torch.Generator().manual_seed(seed))
        value = _checked(architecture, value), (tokens[:, :-1], tokens[:, 1:])
    if not isinstance(value, tuple) or len(value) not in (2, 3) or not isinstance(value[0], nn.Module):
        raise ArgumentError(
            f"--model {architecture} returned {shown(value)}; return (model, batch), (model, batch, loss), or a "
            "torch.nn.Module"
        )
    model, batch, loss = (*value, None)[:3]
    return model.to(device), tree_map_only(Tensor, lambda x: x.to(device), batch), loss


def _own(architecture: str, sizes: dict[str, int], seed: int) -> OwnModel:
    return _checked(architecture, _returned(architecture, sizes, seed))


def _returned(architecture: str, sizes: dict[str, int], seed: int) -> Any:
    path, name = _split(architecture)
    function = getattr(_loaded(str(path.resolve()), architecture), name, None)
    if not callable(function):
        raise ArgumentError(f"--model {architecture}: {path} has no function {name!r}; write one that returns a module")
    with torch.random.fork_rng(devices=[]), told(architecture):
        torch.manual_seed(seed)
        taken = inspect.signature(function).parameters.values()
        everything = any(one.kind is one.VAR_KEYWORD for one in taken)
        names = {one.name for one in taken}
        return function(**{key: size for key, size in sizes.items() if everything or key in names})


def _checked(architecture: str, model: Any) -> OwnModel:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"--model {architecture} returned {shown(model)}; return a torch.nn.Module")
    if not any(p.requires_grad for p in model.parameters()):
        raise ArgumentError(f"--model {architecture} returned a {type(model).__name__} without parameters to train")
    return OwnModel(model, architecture)


@lru_cache(maxsize=8)
def _loaded(path: str, architecture: str) -> Any:
    """Return the module of a file; what it imports may lie beside it."""
    spec = importlib.util.spec_from_file_location(f"fmtsim_model_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).parent))
    try:
        with told(architecture):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(Path(path).parent))
    return module


@contextlib.contextmanager
def told(architecture: str) -> Iterator[None]:
    """Turn what a user's code raises into one line, with the place in its file."""
    try:
        yield
    except FmtsimError:
        raise
    except Exception as error:
        file = str(_split(architecture)[0].resolve())
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f" (line {lines[-1]})" if lines else ""
        raise ArgumentError(f"--model {architecture}{where}: {type(error).__name__}: {error}") from error
