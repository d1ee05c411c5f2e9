# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a comparison: a file from which it goes on with the same bits, as if it had never stopped."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from fmtsim.formats.tensor_file import StoredTensor, read_tensors, stored_tensor, tensor_content
from fmtsim.lab.training.run import Parts, Run
from fmtsim.support.errors import ArgumentError, DataError
from fmtsim.support.files import write_folder
from fmtsim.support.records import parse_json

_LAYOUT = "training checkpoint 4"
_TENSOR = "$tensor"  # stands in the JSON for a tensor, by its name


class Checkpoint:
    """Write the state of a comparison to a safetensors file after every so many steps, and take it up again.

    The file has runs that are finished and, of the one at work, weights, the optimizer's state, what delayed scaling
    and loss scaling remember, the random generators' states, losses and statistics. It appears whole or not at all.

    Args:
        path: The file; its folder is made if need be.
        settings: What decides the bits (``settings``), as JSON types; a comparison with others is refused.
        every: Steps between files; 0 writes none.

    Attributes:
        runs: Runs that are finished.
        guesses: Warnings of plans that are guesses.
        begun: Runs that are finished, and the one at work.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], every: int) -> None:
        if every < 0:
            raise ArgumentError(f"--checkpoint-every {every} is not allowed; choose 1 or more, or 0 for no checkpoints")
        self.path, self.every = path, every
        self.settings = json.loads(json.dumps(settings))
        self.runs: list[Run] = []
        self.guesses: list[str] = []
        self._pending: dict[str, Any] | None = None
        self._current: Run | None = None

    @property
    def begun(self) -> list[Run]:
        """Runs that are finished, and the one at work."""
        at_work = self._current is not None and all(self._current is not run for run in self.runs)
        return [*self.runs, *([self._current] if at_work and self._current else [])]

    def read(self) -> str:
        """Take up what the file holds; return in words how far that is.

        Raises:
            DataError: The file is missing, corrupt or no checkpoint.
            ArgumentError: It is of other settings; the message has the first one.
        """
        stored, metadata = read_tensors(self.path)
        if metadata.get("fmtsim") != _LAYOUT:
            raise DataError(f"{self.path} is not a checkpoint of this version; delete it, or choose another --out")
        try:
            tensors = {name: part.tensor() for name, part in stored.items()}
            state = _joined(parse_json(metadata["state"], nan=True), tensors)
            other = next(_differences(state["settings"], self.settings), None)
            if other is None:
                return self._take(state)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise self._malformed(error) from error
        raise ArgumentError(
            f"{self.path} is of another training: {other}; pass the same settings, delete it, or choose another --out"
        )

    def _take(self, state: dict[str, Any]) -> str:
        runs, self.guesses, self._pending = state["runs"], state["guesses"], state["current"]
        self.runs = [Run.of_state(run) for run in runs]
        done = [f"{run.label} is finished" for run in self.runs]
        if self._pending is not None:
            done.append(f"{self._pending['run']['label']} goes on after step {len(self._pending['run']['losses'])}")
        return ", ".join(done)

    def restore(self, parts: Parts) -> None:
        """Begin a run, where the file left it if that is in the middle of one."""
        state, self._pending = self._pending, None
        self._current = parts.run
        if state is None:
            return
        try:
            parts.learner.model.load_state_dict(state["model"])
            parts.learner.load_state_dict(state)
            parts.batches.set_state(state["batches"])
            parts.keys.set_state(state["keys"])
            run = Run.of_state(state["run"])
            for field in fields(Run):
                setattr(parts.run, field.name, getattr(run, field.name))
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError, OverflowError) as error:
            raise self._malformed(error) from error

    def save(self, parts: Parts | None = None) -> None:
        """Write the file where it is time: the finished runs and, unless it is between two of them, the one at work.

        Raises:
            DataError: It cannot be written; the file before it is still there.
        """
        if not self.every or (parts is not None and len(parts.run.losses) % self.every):
            return
        state = {
            "settings": self.settings, "runs": [run.state_dict() for run in self.runs],
            "guesses": list(dict.fromkeys(self.guesses)), "current": None if parts is None else _state_of(parts),
        }  # fmt: skip
        tensors: dict[str, StoredTensor] = {}
        metadata = {"fmtsim": _LAYOUT, "state": json.dumps(_split(state, "", tensors))}
        write_folder(self.path.parent, {self.path.name: tensor_content(tensors, metadata)})

    def _malformed(self, error: Exception) -> DataError:
        return DataError(
            f"{self.path}: the checkpoint does not fit ({type(error).__name__}: {error}); delete it, or choose "
            "another --out"
        )


def _state_of(parts: Parts) -> dict[str, Any]:
    return {
        "run": parts.run.state_dict(), "model": parts.learner.model.state_dict(), **parts.learner.state_dict(),
        "batches": parts.batches.get_state(), "keys": parts.keys.get_state(),
    }  # fmt: skip


def _split(value: Any, name: str, tensors: dict[str, StoredTensor]) -> Any:
    """Return nested dicts and lists with names in the place of tensors, which are put aside."""
    if isinstance(value, Tensor):
        tensors[name] = stored_tensor(value)
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {str(key): _split(item, f"{name}/{key}".lstrip("/"), tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_split(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
    return value


def _joined(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _joined(item, tensors) for key, item in value.items()}
    return [_joined(item, tensors) for item in value] if isinstance(value, list) else value


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
    elif before != now:
        yield f"{name} was {before!r} and is {now!r}"
