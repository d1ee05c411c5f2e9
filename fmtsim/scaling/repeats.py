# SPDX-License-Identifier: Apache-2.0
"""Calls that activation checkpointing makes twice: the second gets what the first one used.

torch's non-reentrant checkpoint runs a stretch of the forward pass again when the backward pass needs it. Meanwhile it
switches on saved-tensor hooks of its own, of which the topmost tells a first run (it belongs to a frame, an object that
lives as long as the graph) from a second one (which names the frame). These are internals (torch/utils/checkpoint.py of
torch 2.11 and 2.13); tests compare results with those of runs without checkpointing. A saved-tensor hook of a user
inside a stretch hides them: its calls then count twice.

The reentrant checkpoint runs the first time without gradients, when nothing learns, and the second time as usual; it
draws twice from a user's generator.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

T = TypeVar("T")


class _Place(NamedTuple):
    """Where in a checkpointed stretch a call is.

    Attributes:
        frame: The stretch, or None.
        run: What stands for one more run of it, or None in a first one.
    """

    frame: Any = None
    run: Any = None


class Calls(Generic[T]):
    """Remember what each call under activation checkpointing used, for as long as its graph lives.

    Copies and pickles remember nothing.
    """

    def __init__(self) -> None:
        self._results: WeakKeyDictionary[Any, list[T]] = WeakKeyDictionary()  # by frame, in the order of the calls
        self._done: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by run: calls repeated so far
        self._last: T | None = None

    def __reduce__(self) -> Any:
        return Calls, ()

    def run(self, make: Callable[[], T], *, compiled: bool = False) -> T:
        """Return what ``make`` returns in a first call, and in a repeated one what it returned then.

        Args:
            make: What a call uses; it may change a state.
            compiled: The call is in a compiled program, where hooks say nothing: whatever runs in a backward pass is
                a repetition of the last call.
        """
        place = _Place() if compiled else _place()
        earlier = self._earlier(place, compiled)
        if earlier is not None:
            return earlier
        result = make()
        if place.frame is not None and place.run is None:
            self._results.setdefault(place.frame, []).append(result)
        if place.frame is not None or compiled:
            self._last = result
        return result

    @staticmethod
    def checkpointed() -> bool:
        """Return True if this call of eager code is in a checkpointed stretch."""
        return _place() != _Place()

    @staticmethod
    def in_backward() -> bool:
        """Return True if a backward pass is running."""
        return torch._C._current_graph_task_id() != -1

    def generator(self: "Calls[Tensor]", first: torch.Generator, *, compiled: bool = False) -> torch.Generator:
        """Return the generator of a call, which in a repeated one draws what it drew in the first.

        Args:
            first: The generator of first calls; a repeated one gets a copy as it was then.
            compiled: See ``run``.
        """
        place = _Place() if compiled else _place()
        if place.frame is None and not compiled:
            return first
        state = self._earlier(place, compiled)
        if state is None:
            self.run(first.get_state, compiled=compiled)
            return first
        again = torch.Generator(first.device)
        again.set_state(state)
        return again

    def _earlier(self, place: _Place, compiled: bool) -> T | None:
        """Return what a repeated call used, None for a first one."""
        if place.run is None:
            backward = self.in_backward()
            nested = place.frame is not None and bool(self._results)  # a checkpoint within one that is run again
            return self._last if backward and (compiled or nested) else None
        results, number = self._results.get(place.frame, []), self._done.get(place.run, 0)
        self._done[place.run] = number + 1
        return results[number] if number < len(results) else self._last


def stretch() -> Any:
    """Return the checkpointed stretch that eager code is in, or None."""
    return None if torch.compiler.is_compiling() else _place().frame


def repeat_under(key: Any, context: Callable[[], AbstractContextManager[Any]], begun_in: Any) -> None:
    """Let the checkpointed stretch that this call is in, if any, run again under a context; once for each key.

    ``begun_in`` is the ``stretch`` in which the context began: where it is this one, to run it again begins it anyway.
    """
    place = _place()
    if place.frame is None or place.frame is begun_in or place.run is not None:
        return
    contexts = place.frame.__dict__.setdefault("fmtsim_contexts", set())
    if key in contexts:
        return
    contexts.add(key)
    again = place.frame.recompute_fn

    def under(*args: Any) -> None:
        with context():
            again(*args)

    place.frame.recompute_fn = under


def _place() -> _Place:
    """Return where the current call is, by the topmost saved-tensor hooks."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if not hooks:
        return _Place()
    pack = inspect.unwrap(hooks[0])
    # the variables that the hook has from around it
    names, closure = getattr(getattr(pack, "__code__", None), "co_freevars", ()), getattr(pack, "__closure__", None)
    cells = {name: cell.cell_contents for name, cell in zip(names, closure or (), strict=False)}
    owner = getattr(pack, "__qualname__", "").split(".")[0]
    if owner == "_checkpoint_hook":
        return _Place(cells.get("frame"))
    if owner == "_recomputation_hook" and "target_frame_ref" in cells:
        return _Place(cells["target_frame_ref"](), hooks[0])
    return _Place()
