# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels without a card: which configuration runs, what Triton specialises, PTX, and the entry's arguments.

Triton's own binder, key and compiler do it (``triton.runtime.jit``, 3.6), for the description of a GPU instead of the
driver's: no card, no driver. What its launcher makes of arguments is that of ``triton.backends.nvidia.driver``.
"""

import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fmtsim.support.errors import ArgumentError, DeviceError, did_you_mean, shown

MULTIPROCESSORS = 132
SHARED_LIMIT = 232_448  # bytes that a block of an H100 or H200 may take (CUDA C++ Programming Guide, 9.0)
_DEVICE = "fmtsim"  # where Triton's functions keep what is compiled here, beside their devices' kernels
_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A kernel that is ready: its PTX, its shape, and the arguments of its entry."""

    name: str
    entry: str
    ptx: str
    grid: Any
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: tuple[Any, ...]
    names: tuple[str, ...] = ()  # of the arguments in the source, where PTX has others
    scratch: tuple[int, ...] = ()  # bytes a block of parameters behind the arguments, 0 of a null pointer
    config: str = ""
    compiled: Any = None  # Triton's record
    fuses: bool = True  # ptxas may fuse products into sums
    doubts: tuple[str, ...] = ()  # what of the program is not certain

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Tensors among the arguments, of descriptors too, with their names."""
        names = self.names or tuple(f"argument {i}" for i in range(len(self.arguments)))
        bases = (getattr(getattr(x, "descriptor", None), "base", x) for x in self.arguments)
        return [(name, x) for name, x in zip(names, bases, strict=True) if isinstance(x, torch.Tensor)]


class Driver:
    """What Triton and kernel libraries ask a driver, answered for an H100 or H200."""

    def __init__(self) -> None:
        self.utils, self.launcher_cls = self, None

    def get_current_target(self) -> Any:
        """Return Triton's name of the GPU."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return the only device's number."""
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        """Return the default stream."""
        return 0

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Return the compute capability."""
        return 9, 0

    def get_active_torch_device(self) -> torch.device:
        """Return the device of tensors."""
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        """Return torch's module of the device."""
        return torch.cuda

    def get_device_properties(self, device: Any = None) -> dict[str, int]:
        """Return the numbers by which kernels choose grids and blocks (an H100 SXM's, from its driver)."""
        return {
            "max_shared_mem": SHARED_LIMIT, "multiprocessor_count": MULTIPROCESSORS, "max_num_regs": 65_536,
            "warpSize": 32, "sm_clock_rate": 1_980_000, "mem_clock_rate": 2_619_000, "mem_bus_width": 5_120,
        }  # fmt: skip


@cache
def runtime() -> Any:
    """Return Triton's module of kernels.

    Raises:
        DeviceError: Triton is missing, or older than 3.6.
    """
    try:
        import triton
    except ImportError:
        raise DeviceError('a Triton kernel needs Triton (no GPU): pip install "fmtsim[triton]"') from None
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version != (3, 6):
        raise DeviceError(f'triton {triton.__version__} is installed; 3.6 is known here: pip install "fmtsim[triton]"')
    from triton.runtime import jit

    return jit


def is_triton(kernel: Any) -> bool:
    """Return True for what ``triton.jit``, ``autotune`` and ``heuristics`` return.

    Raises:
        ArgumentError: A function that Triton's interpreter runs.
    """
    kind = type(kernel)
    if kind.__module__ == "triton.runtime.interpreter":
        raise ArgumentError(
            f"{kernel} was decorated under TRITON_INTERPRET=1, whose arithmetic is NumPy's; unset it before the kernel "
            "is imported"
        )
    return any(base.__module__ == "triton.runtime.jit" for base in kind.__mro__)


def checked_tensor(what: str, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that a kernel may take.

    Raises:
        ArgumentError: A tensor on another device, a sparse or nested one, or one of a subclass.
    """
    if x.layout != torch.strided or x.is_nested or type(x) not in (torch.Tensor, torch.nn.Parameter):
        raise ArgumentError(f"{what} is a {type(x).__name__} of layout {x.layout}; give a plain strided tensor")
    if not x.is_cpu:
        raise ArgumentError(f"{what} is on {x.device}; kernels run on CPU tensors: move it with .cpu()")
    return x


def configured(
    kernel: Any, config: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, dict[str, Any], str]:
    """Return the function that ``triton.jit`` made, the keywords with what wraps it added, and the choice in words.

    Args:
        kernel: It, or a wrapper: of heuristics each is computed, of autotune one configuration is taken.
        config: A ``triton.Config``, its place among the kernel's, or a dict of keywords; None takes the first that the
            kernel's own pruning leaves.
        args: Positional arguments.
        named: Keyword arguments.

    Raises:
        ArgumentError: No such configuration, or a keyword that it gives, too.
    """
    words = ""
    while not isinstance(kernel, runtime().JITFunction):
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        if hasattr(kernel, "configs"):
            kernel.nargs = dict(zip(kernel.arg_names, args, strict=False))
            configs = kernel.configs
            if config is None:
                left = kernel.prune_configs(named) if len(configs) > 1 else configs
                chosen, how = left[0], f"the first of {len(left)}" if len(left) > 1 else "the only one"
            elif isinstance(config, int) and not isinstance(config, bool):
                if not -len(configs) <= config < len(configs):
                    raise ArgumentError(f"config={config}, but the kernel has {len(configs)}, from 0 on")
                chosen, how = configs[config], f"number {config % len(configs)}"
            else:
                chosen, how = config, "as given"
            kernel.nargs = None
            added = chosen if isinstance(chosen, Mapping) else getattr(chosen, "all_kwargs", dict)()
            if not added:
                raise ArgumentError(f"config={shown(config)}; give a triton.Config, its place, or a dict of keywords")
            if twice := sorted(added.keys() & named.keys()):
                raise ArgumentError(f"{', '.join(twice)} given, but the configuration gives it, too; leave it out, or "
                                    "pass config= with it")  # fmt: skip
            named = named | dict(added)
            if getattr(chosen, "pre_hook", None) is not None:
                chosen.pre_hook(given | dict(added))
            kernel.best_config = chosen
            words = f"{', '.join(f'{name}={value}' for name, value in added.items())} ({how})"
            config = None
        else:
            named = dict(named)
            for name, heuristic in kernel.values.items():
                given[name] = named[name] = heuristic(given)
        kernel = kernel.fn
    if config is not None:
        if not isinstance(config, Mapping):
            raise ArgumentError(f"config={shown(config)}, but {kernel.__name__} has no @triton.autotune; pass a dict")
        named = named | dict(config)
    return kernel, named, words


def compiled(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return what Triton compiles of a kernel for these arguments, and the arguments by name.

    Raises:
        ArgumentError: Arguments that the kernel does not take, a source that does not compile, more than one block a
            cluster, a changed global.
    """
    jit = runtime()
    from triton import knobs
    from triton.errors import TritonError
    from triton.runtime import driver

    for name, value in [*zip(kernel.arg_names, args, strict=False), *named.items()]:
        if isinstance(value, torch.Tensor):
            checked_tensor(name, value)
    named = dict(named)
    named["debug"] = named.get("debug", kernel.debug) or knobs.runtime.debug
    named["instrumentation_mode"] = knobs.compilation.instrumentation_mode
    for hook in kernel.pre_run_hooks:
        hook(*args, **named)
    # 1. Triton's binder asks the driver once for its target, and keeps its kernels by device: here by a name
    with _lock:
        if _DEVICE not in kernel.device_caches:
            before, driver._active = driver._active, Driver()
            try:
                kernel.device_caches[_DEVICE] = kernel.create_binder()
            finally:
                driver._active = before
    kernels, keys, _, backend, binder = kernel.device_caches[_DEVICE]
    # 2. arguments by name, what is specialised of each, and Triton's options
    try:
        bound, specialization, options = binder(*args, **named)
    except TypeError as error:
        raise ArgumentError(f"{kernel.__name__}: {str(error).replace('dynamic_func() ', '')}") from None
    except KeyError as error:  # of complex64
        raise ArgumentError(f"{kernel.__name__}: Triton has no type for tensors of {error}") from None
    key = jit.compute_cache_key(keys, specialization, options)
    if key not in kernels:
        known = {*backend.parse_options({}).__dict__, *kernel.arg_names}
        unknown = next((name for name in options if name not in known), None)
        if unknown is not None:
            raise ArgumentError(
                f"{kernel.__name__} has no argument {unknown!r}, Triton no such option{did_you_mean(unknown, known)}"
            )
        try:
            options, signature, constants, attributes = kernel._pack_args(
                backend, named, bound, specialization, options
            )
        except (AssertionError, TypeError, ValueError) as error:  # of num_warps=3
            raise ArgumentError(f"{kernel.__name__}: {error}") from None
        if options.num_ctas != 1:
            raise ArgumentError(f"num_ctas={options.num_ctas}; clusters of blocks are not simulated: num_ctas=1")
        try:
            kernel._do_compile(key, signature, _DEVICE, constants, options, attributes, True)
        except TritonError as error:
            raise ArgumentError(f"Triton cannot compile {kernel.__name__}: {error}") from error
    # 3. a kernel holds the globals that it was compiled with
    for (name, _), (value, variables) in kernel.used_global_vals.items():
        if variables.get(name, None) != value:
            raise ArgumentError(
                f"global {name} of {kernel.__name__} was {shown(value)} when it was compiled, and changed"
            )
    found = kernels[key]
    return found.result() if hasattr(found, "result") else found, bound


def program(kernel: Any, grid: Any, args: tuple[Any, ...], named: dict[str, Any], config: Any = None) -> Program:
    """Return a Triton kernel ready to run; ``grid`` may be a function of the arguments by name.

    Raises:
        ArgumentError: As ``configured`` and ``compiled``; more shared memory than a block has.
        DeviceError: Triton is missing.
    """
    function, named, words = configured(kernel, config, args, named)
    found, bound = compiled(function, args, named)
    return bound_program(found, grid(bound) if callable(grid) else grid, tuple(bound.values()), words)


def bound_program(found: Any, grid: Any, values: tuple[Any, ...], config: str = "") -> Program:
    """Return what Triton compiled, ready to run on all of its arguments in their order, constants among them.

    Raises:
        ArgumentError: More shared memory than a block has, or an argument that is no tensor where one is taken.
    """
    facts = found.metadata
    if facts.shared > SHARED_LIMIT:
        raise ArgumentError(
            f"{found.name} takes {facts.shared:,} bytes of shared memory, and a block has {SHARED_LIMIT:,}: smaller "
            "blocks, or fewer num_stages"
        )
    arguments: list[Any] = []
    names: list[str] = []
    descriptors = iter(facts.tensordesc_meta or ())
    for (name, kind), value in zip(found.src.signature.items(), values, strict=True):
        arguments += _flat(name, kind, value, descriptors)
        names += [name] * (len(arguments) - len(names))
    return Program(
        name=found.src.name, entry=found.name, ptx=found.asm["ptx"], grid=grid, block=(32 * facts.num_warps, 1, 1),
        shared_bytes=facts.shared, arguments=tuple(arguments), names=tuple(names), config=config, compiled=found,
        scratch=(facts.global_scratch_size, facts.profile_scratch_size), fuses=facts.enable_fp_fusion,
    )  # fmt: skip


def _flat(name: str, kind: Any, value: Any, descriptors: Any) -> list[Any]:
    """Return an argument's parameters in PTX: none of a constant, several of a tuple or a descriptor."""
    if isinstance(kind, tuple):
        return [
            x for i, item in enumerate(zip(kind, value, strict=True)) for x in _flat(f"{name}[{i}]", *item, descriptors)
        ]
    if kind == "constexpr":
        return []
    if kind[0] == "*":
        tensor = getattr(value, "base", value) if type(value).__name__ == "TensorWrapper" else value
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name}={shown(value)}, where the kernel takes a tensor")
        return [tensor]
    if kind.startswith("tensordesc"):
        facts = next(descriptors, None)
        shape, strides = [int(n) for n in value.shape], [int(n) for n in value.strides]
        if facts is None:  # the kernel reads through pointers
            return [value.base, *shape, *strides, int(value.padding == "nan"), *shape, *strides]
        return [TensorMap(value, facts), *shape, *strides]
    if kind in _FLOATS:
        # as the launcher packs, to a struct of 2 bytes: a bfloat16 is truncated
        code = struct.pack("<e", value) if kind == "fp16" else struct.pack("<f", value)[2:]
        return [float(value) if kind in ("fp32", "fp64") else code]
    return [int(value)]


_FLOATS = ("fp16", "bf16", "fp32", "fp64")


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor map of the host: the descriptor, and what Triton's compiler says of its tile."""

    descriptor: Any
    facts: Mapping[str, Any]  # swizzle, elem_size, elem_type, block_size, fp4_padded

    def encode(self, address: Callable[[torch.Tensor], int]) -> bytes:
        """Return the map as ``tensor_map`` lays it out; ``address`` tells where a tensor is."""
        from fmtsim.machine.ptx.tensor_map import encode  # with numba

        tensor, facts = self.descriptor, self.facts
        shape = [int(n) for n in tensor.shape]
        shape[-1] *= 2 if facts["fp4_padded"] else 1
        strides = [int(n) * facts["elem_size"] for n in tensor.strides]
        return encode(
            address(tensor.base), shape[::-1], strides[-2::-1], facts["block_size"][::-1], facts["elem_type"],
            facts["swizzle"], int(tensor.padding == "nan"),
        )  # fmt: skip
