# SPDX-License-Identifier: Apache-2.0
"""``fmtsim.simulate``: an unchanged model, forward, backward and optimizer, with the bits of a GPU."""

import inspect
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from fmtsim.casts.arguments import check_whole
from fmtsim.machine.patches import draws_on_host, patched
from fmtsim.machine.unknown import BySource, Guess, Nondeterministic, UnknownOrder
from fmtsim.support.errors import ArgumentError, CoverageWarning, DtypeError, did_you_mean, shown
from fmtsim.support.records import checked
from fmtsim.support.table import aligned

if TYPE_CHECKING:
    from fmtsim.machine.ptx.inductor import Graph
    from fmtsim.machine.ptx.launching import Launch

TARGETS = ("h200", "h100")
RECORDED = "2.11.0+cu130"  # the torch whose bits were recorded
_HOSTS = ("2.11", "2.13")  # versions of torch whose operators are those of the record
_PLAIN = {torch.Tensor, nn.Parameter}
_NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "quantized", "fmtsim")


class simulate(TorchDispatchMode):  # noqa: N801, a verb that is used as a context
    """Compute what runs inside as a GPU does: forward, backward and optimizer steps of an eager model on a CPU.

    The switches of ``torch.backends.cuda.matmul``, ``sdpa_kernel`` and ``use_deterministic_algorithms`` act as on the
    GPU, or the operators that they change are unknown. ``torch.autocast`` for ``"cuda"`` or ``"cpu"``, entered inside,
    casts what it casts on a GPU. Triton's kernels run as ``fmtsim.launch`` runs them, in ``kernel[grid](...)``,
    autograd functions, ``triton_op`` and custom operators of Python; code that imports Triton sees its tensors on
    ``cuda:0``, and ``device="cuda"`` makes tensors here. Compiled code runs by ``compile`` and ``compiled=``. Refused
    are other compiled code, custom operators of C++, and tensors on other devices.

    Args:
        target: ``"h200"`` or ``"h100"``, as PyTorch 2.11 with CUDA 13.0 runs there.
        strict: Raise at the first operator whose bits are not known, instead of computing it as the host does, or on a
            torch whose operators were not compared with the record: 2.11 and 2.13 were. One warning names others. An
            order that was read in PyTorch's or the vendor's source is accepted without a recording.
        compiled: A folder of ``TORCHINDUCTOR_CACHE_DIR`` that a GPU wrote: ``graphs`` are its graphs by name, each a
            function that computes inside what torch.compile's code computes there.

    ``exact``, ``by_source`` (known from source, not recorded), ``guess``, ``unknown`` and ``nondeterministic`` count
    operators; ``summary`` is a table of them.

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
    _should_skip_dynamo = classmethod(lambda cls: False)  # this would import the compiler, which takes 70 MB

    def __init__(
        self, target: str = "h200", *, strict: bool = False, compiled: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__()
        if not isinstance(target, str) or target not in TARGETS:
            raise ArgumentError(
                f"target={shown(target)} cannot be simulated{did_you_mean(target, TARGETS)}; choose from {TARGETS}"
            )
        strict = checked("strict", strict, bool)
        from fmtsim.machine import operators  # with numba, which takes a second

        self.target, self.strict, self._operators = target, strict, operators
        self._generator = operators.random.Generator()
        self._entered: list[tuple[ExitStack, FrameType | None]] = []  # with the frame that entered
        self.exact: Counter[str] = Counter()
        self.by_source: Counter[str] = Counter()
        self.guess: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.nondeterministic: Counter[str] = Counter()
        self._places: dict[str, str] = {}  # where an operator that is not exact ran first
        _check_host(torch.__version__, strict)
        self.replays = 0  # graphs that are running: compiled code whose kernels are known
        self.graphs: dict[str, Graph] = {}
        if compiled is not None:
            from fmtsim.machine.ptx import inductor

            self.graphs = inductor.graphs(compiled, self)

    def __enter__(self) -> Self:
        """Begin, and fork as torch does on a GPU: one kernel for dropout and rms_norm, foreach optimizers."""
        if any(isinstance(mode, simulate) for mode in _get_current_dispatch_mode_stack()):
            raise ArgumentError("simulate runs inside another simulate; leave one of them out")
        if torch.is_autocast_enabled("cpu"):
            raise ArgumentError(
                "torch.autocast was entered before simulate, and casts what it does on a CPU; enter it inside"
            )
        outermost = None if _in_compiled_code(None) else sys._getframe(1)
        with ExitStack() as stack:
            stack.enter_context(patched(self))
            super().__enter__()
            self._entered.append((stack.pop_all(), outermost))
        return self

    def __exit__(self, *exception: Any) -> None:
        """End."""
        super().__exit__(*exception)
        self._entered.pop()[0].close()

    def __repr__(self) -> str:
        return self.summary

    @property
    def summary(self) -> str:
        """Operators that are not exact, worst first, with where they ran first; then the exact ones."""
        groups = (
            (self.nondeterministic, f"no bits to reproduce: the {self.target}'s own differ from run to run"),
            (self.unknown, "computed by torch on the host"),
            (self.guess, "by the target's guess"),
            (self.by_source, "by source, not recorded"),
        )
        calls = self.exact.total() + sum(counts.total() for counts, _ in groups)
        lines = [f"{self.target}: {self.exact.total()} of {calls} operators exact"]
        for counts, title in groups:
            rows = [(f"{n:,}", f"{what}{self._places[what]}") for what, n in counts.most_common()]
            lines += [f"{title} ({counts.total():,})", *(f"  {row}" for row in aligned(rows))] if rows else []
        evidence = self._operators.EVIDENCE.items()
        same = {str(packet).removeprefix("aten.") for packet, basis in evidence if basis == "reasoned"}
        exact = [f"{name} {n:,}" for name, n in self.exact.most_common() if name not in same]
        others = sum(self.exact[name] for name in same)
        exact += [f"{others:,} reasoned (views, copies, comparisons ...)"] * bool(others)
        return "\n".join([*lines, f"exact: {', '.join(exact)}"])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute one operator."""
        kwargs = kwargs or {}
        if not _PLAIN.issuperset(types):
            if torch._subclasses.FakeTensor in types:
                raise ArgumentError(f"{func}{_place()} has a fake tensor, which has no numbers; pass the tensor itself")
            if (known := _operator(func)) is not None and known.kind == "product":
                check_whole(f"an operand of {func}{_place()}", *types)
            return NotImplemented  # a subclass says what its operators are, which come back here
        operator = _operator(func)
        if operator is None and str(func) == "triton_kernel_wrapper_mutation":
            return func(*args, **kwargs)  # a kernel under wrap_triton: it launches, outside of this mode
        if operator is None and (definition := OPDEFS.get(getattr(func, "_name", ""))) is not None:
            kernels = definition._backend_fns  # of Python: it calls operators, and launches kernels
            with self:
                return kernels.get("cuda", kernels.get(None, definition._init_fn))(*args, **kwargs)
        if operator is None:
            packet = func if isinstance(func, HigherOrderOperator) else func.overloadpacket
            raise ArgumentError(
                f"{packet}{_place()} is not an operator of PyTorch, and its kernel on {self.target} is not known; run "
                "the model without it (eager attention, or the operator's own formula in torch)"
            )
        with torch._C.DisableTorchFunction():  # handlers ask tensors for their sizes a thousand times
            return self._compute(operator, func, types, args, kwargs)

    def _compute(self, operator: "_Operator", func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operator of PyTorch."""
        name, handler, kind = operator.name, operator.handler, operator.kind
        out = kwargs.get("out")
        if torch.is_tensor(out) and operator.plain is not None and out.is_contiguous():
            named = {key: value for key, value in kwargs.items() if key != "out"}
            result = self.__torch_dispatch__(operator.plain, types, args, named)
            if result.dtype != out.dtype:
                self._note(name, UnknownOrder("written to out= of another dtype"))
            return out.resize_(result.shape).copy_(result)  # a GPU writes there what it would to a new one
        if name == "addmm_":
            return args[0].copy_(self.__torch_dispatch__(torch.ops.aten.addmm.default, types, args, kwargs))
        if kind == "random":
            return self._drawn(operator, func, args, kwargs)
        tensors = _tensors((*args, *kwargs.values()))
        if not operator.takes_integers and not any(x.is_floating_point() for x in tensors):
            result = func(*args, **kwargs)
            if kind == "same" or not torch.is_tensor(result) or not result.is_floating_point():
                return result
            if handler is None or result.dtype != torch.float32:
                self._note(name, UnknownOrder("numbers that it makes of integers"))
                return result
            args = tuple(x.float() if torch.is_tensor(x) else x for x in args)  # as a GPU converts them
        device = next((x.device for x in tensors if x.device.type != "cpu"), None)
        if device is not None and device.type == "meta" and _in_meta_kernel():
            return func(*args, **kwargs)
        if device is not None and name != "_to_copy":
            raise ArgumentError(
                f"{name}{_place()} has a tensor on {device}; simulate computes on the CPU: move model and batch there"
            )
        if not self.replays and _in_compiled_code(self._entered[-1][1]):
            raise ArgumentError(
                f"{name}{_place()} runs in compiled code, whose kernels on {self.target} are the compiler's own; "
                "simulate the model that was given to torch.compile (model._orig_mod), or what run.compile makes of it"
            )
        try:
            empty = bool(args) and torch.is_tensor(args[0]) and not args[0].numel()  # no sums, but of nothing
            if kind in ("same", "own") or empty:
                result = func(*args, **kwargs)
            elif any(x.layout != torch.strided or x.is_nested for x in tensors):
                raise UnknownOrder(f"{name} of sparse or nested tensors")
            elif handler is None:
                raise UnknownOrder(operator.unknown)
            else:
                first = (self,) if kind == "composed" else (self.target,) if kind == "product" else ()
                result = _called(handler, *first, *args, **kwargs)
        except DtypeError as error:  # of a TypeError behind x @ y torch makes one of its own, which says nothing
            raise ArgumentError(str(error)) from error
        except (UnknownOrder, Nondeterministic, Guess, BySource) as reason:
            self._note(name, reason)
            return reason.args[1] if len(reason.args) > 1 else func(*args, **kwargs)
        self.exact[operator.name] += 1
        searched = not operator.writes and (kind != "kernel" or empty)
        for x in _tensors((result,)) if searched else ():
            if x.is_cpu and x.layout == torch.strided and not x.is_nested:
                self._operators.canonical(x)
        return result

    def _drawn(self, operator: "_Operator", func: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operator that draws random numbers."""
        try:
            if draws_on_host():
                self.exact[operator.name] += 1
                return self._generator.on_host(lambda: func(*args, **kwargs))
            if isinstance(args[0] if args else None, nn.Parameter):
                raise UnknownOrder("a parameter that is filled: on the GPU, or before it is moved there")
            if operator.handler is None:
                raise UnknownOrder("random numbers, which a GPU draws otherwise")
            result = _called(operator.handler, self._generator, *args, **kwargs)
        except (UnknownOrder, Guess) as reason:
            self._note(operator.name, reason)
            if len(reason.args) > 1:
                return reason.args[1]
            return self._generator.on_host(lambda: func(*args, **kwargs))
        self.exact[operator.name] += 1
        return result

    def compile(self, function: Callable, **options: Any) -> Callable:
        """Return what ``torch.compile`` makes of a function or module on the GPU, to be called inside.

        Inductor's code is generated here for the GPU's description, as the installed torch generates it, in one graph;
        Triton compiles its kernels. ``options`` are those of ``torch.compile`` (``dynamic``, ``mode``). Where a GPU
        would time configurations of a reduction, the first is taken and its launches count as guesses.
        """
        from fmtsim.machine.ptx import inductor

        return inductor.compiled(function, self, options)

    def count(self, launch: "Launch") -> None:
        """Count a launch of a kernel; with ``strict`` refuse one whose bits are not certain."""
        name = f"{launch.kernel} (kernel)"
        if launch.exact:
            self.exact[name] += 1
        else:
            reason = "; ".join(launch.reasons)
            self._note(name, Nondeterministic(reason) if "atomic sums" in reason else Guess(reason))

    def _note(self, name: str, reason: Exception) -> None:
        """Count an operator that is not exact; with ``strict`` refuse it, unless its order was read in the source."""
        detail = f"{name}: {reason.args[0]}"
        kinds = {Nondeterministic: self.nondeterministic, Guess: self.guess, BySource: self.by_source}
        counts, place = kinds.get(type(reason), self.unknown), self._places.get(detail) or _place()
        if self.strict and counts is not self.by_source:
            next_step = "use what the target has a plan for (fmtsim.explain_mm)" if counts is self.guess else (
                "put another operator in its place")  # fmt: skip
            raise ArgumentError(
                f"{detail}{place}: its bits on {self.target} are not known; {next_step}, or leave strict=False to "
                f"compute it {'by the guess' if counts is self.guess else 'as the host does'}"
            ) from None
        counts[detail] += 1
        self._places[detail] = place


# torch.compile compiles nothing of what an operator runs
_frames: Any = torch._C._dynamo.eval_frame
_skip = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
_frames.set_code_exec_strategy(simulate.__torch_dispatch__.__code__, _skip)


class _Operator(NamedTuple):
    """What ``operators`` knows of one overload of an operator."""

    name: str
    kind: str  # a key of ``kinds`` below
    handler: Callable | None  # what computes it, None where nothing does: ``unknown`` is the reason
    unknown: str
    plain: Any  # the overload without out=, of one whose handler or product is known
    takes_integers: bool  # the handler is for tensors of integers, too
    writes: bool  # it returns tensors that it was given, or views of them


@cache
def _operator(func: Any) -> _Operator | None:
    """Return what is known of an overload, None for an operator that is not PyTorch's."""
    if isinstance(func, HigherOrderOperator) or func.namespace not in _NAMESPACES:
        return None
    from fmtsim.machine import operators

    packet, schema = func.overloadpacket, func._schema
    name = str(packet).removeprefix("aten.")
    tables = operators.PRODUCTS, operators.DRAWS, operators.KNOWN
    handler: Callable | None = next((table[packet] for table in tables if packet in table), None)
    kinds = {
        "composed": packet in operators.COMPOSED,  # which refuse dropout
        "random": torch.Tag.nondeterministic_seeded in func.tags,
        "same": packet in operators.SAME,  # as on the host
        "own": func.namespace == "fmtsim" and handler is None,  # fmtsim's have the same bits on all devices
        "product": packet in operators.PRODUCTS,
        "kernel": packet in operators.KERNELS,  # writes the GPU's NaN itself
        "other": True,
    }
    kind, unknown, plain = next(kind for kind, holds in kinds.items() if holds), name, None
    if handler is not None and schema.is_mutable is not name.endswith("_"):
        handler, unknown = None, f"written to {func._overloadname}="
        read = [(x.name, str(x.type)) for x in schema.arguments if not x.is_out]
        others = [getattr(packet, overload) for overload in packet.overloads()]
        plain = next((x for x in others if [(y.name, str(y.type)) for y in x._schema.arguments] == read), None)
    writes = any(returned.alias_info is not None for returned in schema.returns)
    return _Operator(name, kind, handler, unknown, plain, packet in operators.STABLE, writes)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments or results, and those in lists of them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


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


def _in_compiled_code(outermost: FrameType | None) -> bool:
    """Return True if a function that torch.compile returned is running, called from this frame or below it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not outermost:
        if frame.f_code.co_name == "compile_wrapper" and "_dynamo" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _in_meta_kernel() -> bool:
    """Return True if torch looks for a shape: forward-mode derivatives multiply zeros without numbers on meta."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(("torch._refs", "torch._prims")):
        frame = frame.f_back
    return frame is not None


def _place() -> str:
    """Return `` in MODULE``, the one that runs by its name in the outermost one; in a backward pass its node."""
    modules: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    if modules:
        name = next((name for name, module in modules[-1].named_modules() if module is modules[0]), "")
        return f" in {name or 'the model'} ({type(modules[0]).__name__})"
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    return "" if node is None else f" in {node.name()}"
