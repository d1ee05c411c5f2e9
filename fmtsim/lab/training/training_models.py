# SPDX-License-Identifier: Apache-2.0
"""The models of ``fmtsim train``: its own by name, and those that a function FILE.py:function of the user returns."""

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.lab.training.decoders import GPT, VOCABULARY, LanguageModel, Llama
from fmtsim.lab.training.schemes import TrainConfig
from fmtsim.support.errors import ArgumentError, FmtsimError, did_you_mean, shown

FORMS = "FILE.py:function or package.module:function"


def is_function(name: str) -> bool:
    """Return True if a name has the form ``FILE.py:function``."""
    return ":" in name


def returned(name: str, seed: int, offered: Mapping[str, Any]) -> Any:
    """Return what a function returns.

    Args:
        name: ``FILE.py:function``, or ``package.module:function``, where the package may lie in the current folder.
        seed: Of what it draws from torch's generator, which is afterwards as it was.
        offered: Arguments by name; it gets those that it takes.

    Raises:
        ArgumentError: There is no such function, it needs other arguments, or it raises: the message has the line.
    """
    place, _, word = name.rpartition(":")
    function = getattr(_module(name), word, None)
    if not callable(function):
        raise ArgumentError(f"--model {name}: {place} has no function {word!r}; write one that returns a module")
    with torch.random.fork_rng(devices=[]), told(name):
        torch.manual_seed(seed)
        taken = inspect.signature(function).parameters.values()
        needed = [one.name for one in taken if one.default is one.empty and one.kind not in (2, 4)]  # * and **
        absent = [one for one in needed if one not in offered]
        if absent:
            raise ArgumentError(
                f"--model {name}: {word} needs arguments that it does not get ({', '.join(absent)}); give them defaults"
            )
        everything = any(one.kind is one.VAR_KEYWORD for one in taken)
        names = {one.name for one in taken}
        return function(**{key: value for key, value in offered.items() if everything or key in names})


def source_of(name: str) -> Path | None:
    """Return the file that a function is looked for in, None where its module has none."""
    place = name.rpartition(":")[0]
    if not place.endswith(".py"):
        with _found_in(Path.cwd()), contextlib.suppress(Exception):  # of packages around it, which this imports
            spec = importlib.util.find_spec(place)
            return None if spec is None or spec.origin is None else Path(spec.origin)
        return None
    path = Path(place).expanduser()
    if not path.is_file():
        raise ArgumentError(f"--model {name}: there is no file {path}; pass FILE.py:function")
    return path.resolve()


@contextlib.contextmanager
def told(name: str, hint: str = "") -> Iterator[None]:
    """Turn what a user's code raises into one line, with the place in its file and what to try."""
    try:
        yield
    except FmtsimError:
        raise
    except (Exception, SystemExit) as error:
        file = str(source_of(name)) if is_function(name) else ""
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f" (line {lines[-1]})" if lines else ""
        raise ArgumentError(f"--model {name}{where}: {type(error).__name__}: {error}{hint}") from error


def _module(name: str) -> ModuleType:
    """Return the module of a function's file or package; what it imports may lie beside it, or in this folder."""
    place = name.rpartition(":")[0]
    file = source_of(name) if place.endswith(".py") else None
    if file is not None:
        return _loaded(file, name)
    with _found_in(Path.cwd()), told(name):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # of what it imports
            raise ArgumentError(
                f"--model {name}: there is no module {error.name}, installed or in {Path.cwd()}; pass {FORMS}"
            ) from None


@lru_cache(maxsize=8)
def _loaded(file: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fmtsim_model_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with _found_in(file.parent), told(name):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _found_in(folder: Path) -> Iterator[None]:
    """Let imports inside find what lies in a folder."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


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

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean loss in nats per token, or without targets the logits."""
        with told(self.where):
            out = self.model(inputs, targets) if self.takes_targets else self.model(inputs)
        return self.loss_of(out, targets) if targets is not None else getattr(out, "logits", out)  # type: ignore[no-any-return]

    def loss_of(self, out: Any, targets: Tensor, vocabulary: int = VOCABULARY) -> Tensor:
        """Return the mean loss in nats per token, of what the model returned for the inputs before these targets."""
        if self.takes_targets:
            items = [out.loss] if isinstance(getattr(out, "loss", None), Tensor) else out
            several = items if isinstance(items, list | tuple) else [items]
            losses = [x for x in several if isinstance(x, Tensor) and not x.dim() and x.is_floating_point()]
            if len(losses) != 1:
                raise ArgumentError(
                    f"--model {self.where}: its forward(inputs, targets) returned {_what(out)}; return the mean loss, "
                    "a tensor without dimensions"
                )
            return losses[0]
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


def _what(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def build_model(config: TrainConfig, *, layers: int | None = None) -> nn.Module:
    """Return the model of a config with weights that depend on its seed alone, on its device.

    Args:
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
    model = returned(architecture, seed, sizes)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"--model {architecture} returned {shown(model)}; return a torch.nn.Module")
    if not any(p.requires_grad for p in model.parameters()):
        raise ArgumentError(f"--model {architecture} returned a {type(model).__name__} without parameters to train")
    return OwnModel(model, architecture)
