# SPDX-License-Identifier: Apache-2.0
"""Whether a call needs torch's dispatcher at all: without it a verb costs a small fraction of the host's time.

The dispatcher, and the operators behind it, serve autograd, ``torch.compile``, vmap, fake and functional tensors and
modes of users. A plain tensor under none of them goes to its engine directly. What is asked here is semi-public: where
torch lacks any of it, every call takes the dispatcher.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode


def _states() -> tuple[frozenset[int], frozenset[int]]:
    """Return the dispatch keys of plain tensors and those of a thread without modes; with and without inference."""
    keys = torch._C.DispatchKey
    none = torch._C.DispatchKeySet.from_raw_repr(0)
    tensors = set()
    for device in ("CPU", "CUDA"):
        bare = none.add(getattr(keys, device)).add(getattr(keys, f"Autocast{device}"))
        tensors |= {bare.raw_repr(), bare.add(keys.ADInplaceOrView).add(getattr(keys, f"Autograd{device}")).raw_repr()}
    bare = none.add(keys.BackendSelect)
    return frozenset(tensors), frozenset({bare.raw_repr(), bare.add(keys.ADInplaceOrView).raw_repr()})


try:
    _tensors, _threads = _states()
    _keys_of: Callable[[torch.Tensor], torch._C.DispatchKeySet] = torch._C._dispatch_keys
    _keys_of_thread: Callable[[], torch._C.DispatchKeySet] = torch._C._dispatch_tls_local_include_set
    _function_modes: Callable[[], int] = torch._C._len_torch_function_stack
    _level = forward_ad._current_level
except AttributeError:
    _tensors = frozenset()

_NOTHING = nullcontext()
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)

Function = TypeVar("Function", bound=Callable[..., Any])


# Before, torch.compile gives such a function constants of Python and tensors alone: formats and plans go by their ids.
_TAKES_OBJECTS = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 13)
_OBJECT = "fmtsim.object"
_CONSTANTS = (bool, int, float, str, bytes, list, dict, set, frozenset, type, torch.dtype, torch.device, torch.Tensor)


def constant_in_graphs(function: Function) -> Function:
    """Let torch.compile call a function while it traces, and take the result for a constant of the graph.

    torch.compiler.assume_constant_result sets the same attribute, but asking for it imports all of torch._dynamo.
    """
    if _TAKES_OBJECTS:
        function._dynamo_marked_constant = True  # type: ignore[attr-defined]
        return function

    def on_constants(*arguments: Any, **named: Any) -> Any:
        return function(*map(_object_of, arguments), **{name: _object_of(x) for name, x in named.items()})

    on_constants._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            return function(*arguments, **named)
        return on_constants(*map(_constant_of, arguments), **{name: _constant_of(x) for name, x in named.items()})

    return call  # type: ignore[return-value]


def _constant_of(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_constant_of, x))
    return x if x is None or isinstance(x, _CONSTANTS) else (_OBJECT, id(x))


def _object_of(x: Any) -> Any:
    if not isinstance(x, tuple):
        return x
    if x[:1] == (_OBJECT,):
        return ctypes.cast(x[1], ctypes.py_object).value  # which the graph's guards keep
    return tuple(map(_object_of, x))


def is_recorded() -> bool:
    """Return True if a compiler traces the running code (torch.compile, export, make_fx)."""
    return torch.compiler.is_compiling() or proxy_tensor.get_proxy_mode() is not None


def autocasts(kind: str) -> bool:
    """Return True if autocast is on for a type of device; some, such as meta, do not have it."""
    return (kind in ("cpu", "cuda") or _has_autocast(kind)) and torch.is_autocast_enabled(kind)


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the dtype that autocast gives products on a type of device, None where it is off."""
    return torch.get_autocast_dtype(kind) if autocasts(kind) else None


_has_autocast = constant_in_graphs(lambda kind: torch.amp.is_autocast_available(kind))


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast, which some devices, such as meta, do not have in the first place."""
    kind = device.type
    return _WithoutAutocast(kind) if autocasts(kind) else _NOTHING


class _WithoutAutocast:
    """Switch autocast off inside; ``torch.autocast(enabled=False)`` does, too, in ten times the time."""

    __slots__ = ("_kind",)

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self._kind, False)

    def __exit__(self, *error: object) -> None:
        torch.set_autocast_enabled(self._kind, True)


class OwnMode(TorchFunctionMode):
    """Look at the functions that a model calls, and not at those that fmtsim calls in their place."""


@contextmanager
def without_own_modes() -> Iterator[None]:
    """Take this thread's ``OwnMode`` off; other torch function modes stay."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())][::-1]
    others = [mode for mode in modes if not isinstance(mode, OwnMode)]
    for mode in others:
        torch._C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        for _ in others:
            torch._C._pop_torch_function_stack()
        for mode in modes:
            torch._C._push_on_torch_function_stack(mode)


def is_plain(x: torch.Tensor) -> bool:
    """Return True if only the engine has to see an operation on x: no gradient, subclass, transform or mode.

    Not for code that torch.compile traces: ask ``torch.compiler.is_compiling()`` first.
    """
    return is_bare(x) and not (x.requires_grad and torch.is_grad_enabled())


def is_direct(*tensors: torch.Tensor) -> bool:
    """Return True if a call may go around the dispatcher: ``is_plain`` for code that compilers may trace."""
    if torch.compiler.is_compiling() or not is_bare(*tensors):  # dynamo cannot trace what is_bare asks
        return False
    if torch.is_grad_enabled():
        for x in tensors:
            if x.requires_grad:
                return False
    return True


def is_readable(x: torch.Tensor) -> bool:
    """Return True if a verb can read elements: x is not on meta or fake, and no compiler, export or vmap traces it."""
    return not (
        torch.compiler.is_compiling()
        or x.is_meta
        or isinstance(x, torch._subclasses.FakeTensor)
        or torch._C._functorch.is_batchedtensor(x)
    )


def is_dense(x: torch.Tensor) -> bool:
    """Return True if x is a plain strided tensor of the CPU or a GPU with storage; False where torch cannot tell."""
    return type(x) in PLAIN_TYPES and len(_tensors) > 0 and _keys_of(x).raw_repr() in _tensors


def is_bare(*tensors: torch.Tensor) -> bool:
    """Return True if tensors are plain but for a gradient that they may want."""
    if not _tensors:
        return False
    for x in tensors:
        if not (type(x) in PLAIN_TYPES and _keys_of(x).raw_repr() in _tensors):
            return False
    return _keys_of_thread().raw_repr() in _threads and _function_modes() == 0 and forward_ad._current_level < 0
