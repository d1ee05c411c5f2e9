# SPDX-License-Identifier: Apache-2.0
"""``fmtsim.simulate``: an unchanged model, forward, backward and optimizer, with the bits of a GPU."""

import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import cache
from types import FrameType
from typing import Any, Self
from unittest import mock

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_map

from fmtsim.machine.autocast import gpu_autocast, registered, to_lower
from fmtsim.machine.unknown import Guess, Nondeterministic, UnknownOrder
from fmtsim.support.errors import ArgumentError, CoverageWarning, DtypeError, did_you_mean, shown
from fmtsim.support.records import checked
from fmtsim.support.table import aligned

TARGETS = ("h200", "h100")
RECORDED = "2.11.0+cu130"  # the torch whose bits were recorded
_HOSTS = ("2.11", "2.13")  # versions of torch whose operators are those of the record
_HOST_DROPOUT, _HOST_RMS_NORM = functional.dropout, torch.rms_norm
_HOST_ATTENTION = functional.scaled_dot_product_attention
_NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "quantized", "fmtsim")


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Return functional.dropout by one operator, as on a GPU; on a CPU torch takes three."""
    if training and 0 < p < 1 and not inplace and x.numel():
        return torch.native_dropout(x, p, True)[0]
    with torch._C.DisableTorchFunction():
        return _HOST_DROPOUT(x, p, training, inplace)


def _rms_norm(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Return torch.rms_norm by one operator, as on a GPU; torch's operators remain for mixed dtypes and a nested x."""
    if x.is_nested or (weight is not None and weight.dtype != x.dtype):
        with torch._C.DisableTorchFunction():
            return _HOST_RMS_NORM(x, shape, weight, eps)
    return torch.ops.fmtsim.rms_norm(x, list(shape), weight, eps)[0]


def _softmax(operator: Callable) -> Callable:
    """Return softmax of float16 in float32 by one operator, as on a GPU; on a CPU torch converts first."""

    def call(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if x.dtype == torch.float16 and dtype == torch.float32:
            return operator(x, dim, True)  # type: ignore[no-any-return]
        return operator(x if dtype is None else x.to(dtype), dim, False)  # type: ignore[no-any-return]

    return call


def _takes_efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout: float, causal: bool,
    grouped: bool,
) -> bool:  # fmt: skip
    """Return True if a GPU takes the memory-efficient kernel where the host has no operator like it.

    PyTorch on an H200 asks cuDNN first, which takes no mask with a gradient, then FlashAttention-2, which takes no
    mask, then this kernel; in float32 this kernel alone, for which the host's fused operator stands.
    """
    backends = torch.backends.cuda
    flash, cudnn = backends.flash_sdp_enabled(), backends.cudnn_sdp_enabled()
    others = flash if q.dtype == torch.float32 else cudnn or (flash and mask is None)
    gradient = mask is not None and mask.requires_grad
    if not backends.mem_efficient_sdp_enabled() or (others and not gradient):
        return False
    tensors = [q, k, v] if mask is None else [q, k, v, mask]
    return (
        q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(x.dtype == q.dtype or (x is mask and x.dtype == torch.bool) for x in tensors)
        and all(x.stride(-1) == 1 for x in tensors)
        and (q.ndim, q.shape[:2], q.shape[-1]) == (4, k.shape[:2], v.shape[-1])
        and q.shape[-1] * q.element_size() % 16 == 0
        and not (dropout or grouped or (causal and mask is not None))
        and not torch.are_deterministic_algorithms_enabled()
    )


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask whose rows begin at multiples of 8 elements, as PyTorch gives it to the kernel."""
    if all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    keys = mask.shape[-1]
    return functional.pad(mask, (0, 8 - keys % 8))[..., :keys]


class _Forks(TorchFunctionMode):
    """Take a fork's function, too, where a module imported torch's own by name before the simulation began."""

    def __init__(self, forks: dict[Callable, Callable]) -> None:
        super().__init__()
        self._forks = forks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or what stands for it."""
        return self._forks.get(func, func)(*args, **(kwargs or {}))


class simulate(TorchDispatchMode):  # noqa: N801, a verb that is used as a context
    """Compute what runs inside as a GPU does: forward, backward and optimizer steps of an eager model on a CPU.

    The switches of ``torch.backends.cuda.matmul``, ``sdpa_kernel`` and ``use_deterministic_algorithms`` act as on the
    GPU, or the operators that they change are unknown. ``torch.autocast`` for ``"cuda"`` or ``"cpu"``, entered inside,
    casts what it casts on a GPU. Refused are compiled code, custom operators (Triton's and CUDA's kernels), and tensors
    on other devices.

    Args:
        target: ``"h200"`` or ``"h100"``, as PyTorch 2.11 with CUDA 13.0 runs there.
        strict: Raise at the first operator whose bits are not known, instead of computing it as the host does, or on a
            torch whose operators were not compared with the record: 2.11 and 2.13 were. One warning names others.

    ``exact``, ``guess``, ``unknown`` and ``nondeterministic`` count operators; ``summary`` is a table of them.

    Raises:
        ArgumentError: An unknown target; with ``strict`` an operator whose bits are not known; what is refused above.

    >>> import torch, fmtsim
    >>> x = torch.linspace(-4, 4, 64)
    >>> with fmtsim.simulate(target="h200", strict=True) as run:
    ...     y = torch.nn.functional.silu(x)
    >>> run.exact["silu"], (y != torch.nn.functional.silu(x)).any().item()
    (1, True)
    """

    supports_higher_order_operators = True  # to refuse them by name

    def __init__(self, *, target: str = "h200", strict: bool = False) -> None:
        super().__init__()
        if not isinstance(target, str) or target not in TARGETS:
            raise ArgumentError(
                f"target={shown(target)} cannot be simulated{did_you_mean(target, TARGETS)}; choose from {TARGETS}"
            )
        strict = checked("strict", strict, bool)
        from fmtsim.machine import operators  # with numba, which takes a second

        self.target, self.strict, self._operators = target, strict, operators
        self._generator = operators.random.Generator()
        self._entered: list[ExitStack] = []
        self.exact: Counter[str] = Counter()
        self.guess: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.nondeterministic: Counter[str] = Counter()
        self._places: dict[str, str] = {}  # where an operator that is not exact ran first
        _check_host(torch.__version__, strict)

    def __enter__(self) -> Self:
        """Begin, and fork as torch does on a GPU: one kernel for dropout and rms_norm, foreach optimizers."""
        if any(isinstance(mode, simulate) for mode in _get_current_dispatch_mode_stack()):
            raise ArgumentError("simulate runs inside another simulate; leave one of them out")
        if torch.is_autocast_enabled("cpu"):
            raise ArgumentError(
                "torch.autocast was entered before simulate, and casts what it does on a CPU; enter it inside"
            )
        optimizers = sys.modules[torch.optim.Optimizer.__module__]
        devices = [*optimizers._get_foreach_kernels_supported_devices(), "cpu"]
        forks = (
            (functional, "dropout", _dropout),
            (torch, "rms_norm", _rms_norm),
            (functional, "scaled_dot_product_attention", self._attention),
            (optimizers, "_get_foreach_kernels_supported_devices", lambda: devices),
        )
        with ExitStack() as stack:
            stack.enter_context(_Forks({getattr(module, name): fork for module, name, fork in forks}))
            for module, name, fork in forks:  # torch.nn's own functions call each other without a function mode
                stack.enter_context(mock.patch.object(module, name, fork))
            stack.enter_context(gpu_autocast())
            aten = torch.ops.aten
            softmax = {"softmax.int": _softmax(aten._softmax), "log_softmax.int": _softmax(aten._log_softmax)}
            if not self._entered:  # a kernel of the math path enters again: torch 2.11 takes no kernel twice
                stack.callback(registered(softmax, "CompositeImplicitAutograd")._destroy)
            super().__enter__()
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *exception: Any) -> None:
        """End."""
        super().__exit__(*exception)
        self._entered.pop().close()

    def _attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Return attention; unknown where the host takes the math path and a GPU one kernel that is not known.

        PyTorch 2.11 gives cuDNN a boolean mask as a bias of -65504: a row that is masked whole attends to every key.
        A mask that takes a gradient goes to the memory-efficient kernel.
        """
        if torch.is_autocast_enabled("cpu"):
            query, key, value, attn_mask = to_lower(query, key, value, attn_mask)
        backends = torch.backends.cuda
        kernels = backends.flash_sdp_enabled, backends.mem_efficient_sdp_enabled, backends.cudnn_sdp_enabled
        if _takes_efficient(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
            bias = attn_mask
            if bias is not None and bias.dtype == torch.bool:
                bias = torch.where(bias, 0.0, -torch.inf).to(query.dtype)
            bias = None if bias is None else _aligned(bias).expand(*query.shape[:3], key.shape[2])
            efficient = torch.ops.aten._scaled_dot_product_efficient_attention
            return efficient(query, key, value, bias, True, 0.0, is_causal, scale=scale)[0]
        learned = None if attn_mask is None or not attn_mask.requires_grad else attn_mask
        reasons = {
            "dropout": dropout_p > 0,
            "values of another head size": query.shape[-1] != value.shape[-1],
            "a mask that takes a gradient": learned is not None and learned.stride(-1) == 1,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is not None and query.ndim == 4 and any(enabled() for enabled in kernels):
            self._note("scaled_dot_product_attention", UnknownOrder(f"attention with {reason}"))
        if attn_mask is not None and attn_mask.dtype == torch.bool and query.element_size() == 2 and query.ndim == 4:
            attn_mask = torch.where(attn_mask, 0.0, -65504.0).to(query.dtype)
        # a nested tensor's attention is a torch function of its own
        with nullcontext() if query.is_nested else torch._C.DisableTorchFunction():
            return _HOST_ATTENTION(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

    @property
    def summary(self) -> str:
        """Operators that are not exact, worst first, with where they ran first; then the exact ones."""
        groups = (
            (self.nondeterministic, f"no bits to reproduce: the {self.target}'s own differ from run to run"),
            (self.unknown, "computed by torch on the host"),
            (self.guess, "by the target's guess"),
        )
        calls = self.exact.total() + sum(counts.total() for counts, _ in groups)
        lines = [f"{self.target}: {self.exact.total()} of {calls} operators exact"]
        for counts, title in groups:
            rows = [(f"{n:,}", f"{what}{self._places[what]}") for what, n in counts.most_common()]
            lines += [f"{title} ({counts.total():,})", *(f"  {row}" for row in aligned(rows))] if rows else []
        same = {str(packet).removeprefix("aten.") for packet in self._operators.SAME}
        exact = [f"{name} {n:,}" for name, n in self.exact.most_common() if name not in same]
        others = sum(self.exact[name] for name in same)
        exact += [f"{others:,} others (views, copies, comparisons ...)"] * bool(others)
        return "\n".join([*lines, f"exact: {', '.join(exact)}"])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute one operator."""
        kwargs = kwargs or {}
        if any(kind not in (torch.Tensor, nn.Parameter) for kind in types):
            if torch._subclasses.FakeTensor in types:
                raise ArgumentError(f"{func}{_place()} has a fake tensor, which has no numbers; pass the tensor itself")
            return NotImplemented  # a subclass says what its operators are, which come back here
        packet = func if isinstance(func, HigherOrderOperator) else func.overloadpacket
        if packet is func or func.namespace not in _NAMESPACES:
            raise ArgumentError(
                f"{packet}{_place()} is not an operator of PyTorch, and its kernel on {self.target} is not known; run "
                "the model without it (eager attention, or the operator's own formula in torch)"
            )
        name = str(packet).removeprefix("aten.")
        if name == "native_dropout":
            self.exact[name] += 1
            return self._operators.random.dropout(self._generator, *args, **kwargs)
        if (
            torch.Tag.nondeterministic_seeded in func.tags and packet not in self._operators.COMPOSED
        ):  # these refuse dropout
            self._note(name, UnknownOrder("random numbers, which a GPU draws otherwise"))
            return func(*args, **kwargs)
        operators = self._operators
        handler: Callable | None = operators.PRODUCTS.get(packet) or operators.KNOWN.get(packet)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if torch.is_tensor(x)]
        if packet not in operators.STABLE and not any(x.is_floating_point() for x in tensors):
            result = func(*args, **kwargs)
            if packet not in operators.SAME and torch.is_tensor(result) and result.is_floating_point():
                self._note(name, UnknownOrder("numbers that it makes of integers"))
            return result
        self._refuse(name, tensors)
        try:
            # fmtsim's own operators have the same bits on all devices
            empty = bool(args) and torch.is_tensor(args[0]) and not args[0].numel()  # no sums, but of nothing
            if packet in operators.SAME or empty or (func.namespace == "fmtsim" and handler is None):
                result = func(*args, **kwargs)
            elif any(x.layout != torch.strided or x.is_nested for x in tensors):
                raise UnknownOrder(f"{name} of sparse or nested tensors")
            elif handler is None or func._schema.is_mutable is not name.endswith("_"):
                raise UnknownOrder(name if handler is None else f"written to {func._overloadname}=")
            else:
                composed, product = packet in operators.COMPOSED, packet in operators.PRODUCTS
                first = (self,) if composed else (self.target,) if product else ()
                result = _called(handler, *first, *args, **kwargs)
        except DtypeError as error:  # of a TypeError behind x @ y torch makes one of its own, which says nothing
            raise ArgumentError(str(error)) from error
        except (UnknownOrder, Nondeterministic, Guess) as reason:
            self._note(name, reason)
            return reason.args[1] if len(reason.args) > 1 else func(*args, **kwargs)
        self.exact[name] += 1
        written = any(returned.alias_info is not None for returned in func._schema.returns)
        dense = lambda x: torch.is_tensor(x) and x.is_cpu and x.layout == torch.strided and not x.is_nested  # noqa: E731
        return result if written else tree_map(lambda x: operators.canonical(x) if dense(x) else x, result)

    def _refuse(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Refuse an operator of compiled code, or on another device."""
        device = next((x.device for x in tensors if x.device.type != "cpu"), None)
        if device is not None and name != "_to_copy":
            raise ArgumentError(
                f"{name}{_place()} has a tensor on {device}; simulate computes on the CPU: move model and batch there"
            )
        if any(frame.f_code.co_name == "compile_wrapper" and "_dynamo" in frame.f_code.co_filename
               for frame in _frames()):  # fmt: skip
            raise ArgumentError(
                f"{name}{_place()} runs in compiled code, whose kernels on {self.target} are the compiler's own; "
                "simulate the model that was given to torch.compile (model._orig_mod)"
            )

    def _note(self, name: str, reason: Exception) -> None:
        """Count an operator that is not exact; with ``strict`` refuse it."""
        detail = name if reason.args[0] == name else f"{name}: {reason.args[0]}"
        kinds = {Nondeterministic: self.nondeterministic, Guess: self.guess}
        counts, place = kinds.get(type(reason), self.unknown), self._places.get(detail) or _place()
        if self.strict:
            next_step = "use what the target has a plan for (fmtsim.explain_mm)" if counts is self.guess else (
                "put another operator in its place")  # fmt: skip
            raise ArgumentError(
                f"{detail}{place}: its bits on {self.target} are not known; {next_step}, or leave strict=False to "
                f"compute it {'by the guess' if counts is self.guess else 'as the host does'}"
            ) from None
        counts[detail] += 1
        self._places[detail] = place


def _called(handler: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return an operator's result.

    Raises:
        UnknownOrder: It takes other arguments.
    """
    try:
        return handler(*args, **kwargs)
    except TypeError:
        try:
            inspect.signature(handler).bind(*args, **kwargs)
        except TypeError as refusal:
            raise UnknownOrder(f"with other arguments ({refusal})") from None
        raise


@cache
def _check_host(version: str, strict: bool) -> None:
    """Warn of a torch whose operators were not compared with the record; with ``strict`` refuse it."""
    if ".".join(version.split(".")[:2]) in _HOSTS:
        return
    text = (
        f"torch {version} may call other operators than torch {RECORDED}, whose bits were recorded; torch "
        f"{' and '.join(_HOSTS)} call the same"
    )
    if strict:
        raise ArgumentError(f"{text}; install one of these, or leave strict=False")
    warnings.warn(text, CoverageWarning, stacklevel=3)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place() -> str:
    """Return `` in MODULE``, the one that runs by its name in the outermost one; in a backward pass its node."""
    modules = [frame.f_locals["self"] for frame in _frames() if frame.f_code is nn.Module._call_impl.__code__]
    if modules:
        name = next((name for name, module in modules[-1].named_modules() if module is modules[0]), "")
        return f" in {name or 'the model'} ({type(modules[0]).__name__})"
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    return "" if node is None else f" in {node.name()}"
