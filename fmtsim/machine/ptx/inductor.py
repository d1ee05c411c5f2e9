# SPDX-License-Identifier: Apache-2.0
"""What torch.compile made on a GPU, replayed launch by launch: a folder of ``TORCHINDUCTOR_CACHE_DIR``.

The folder holds graphs as Python ("output code"), the source of each kernel, and Triton's PTX of it. A graph runs here
as it does there: its kernels by their recorded PTX, other operators as ``simulate`` computes them.
"""

import ctypes
import json
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only
from torch.utils._triton import has_triton

from fmtsim.machine.ptx import launching, triton
from fmtsim.machine.ptx.forks import PROPERTIES
from fmtsim.machine.unknown import UnknownOrder
from fmtsim.support.errors import ArgumentError, DataError, shown

_lock = threading.Lock()
_C10 = str(Path(torch.__file__).parent / "lib/libc10.so")
# torch chooses the kernels of these as it traces, by what a GPU offers
_CHOSEN = {"scaled_dot_product_attention", "batch_norm", "lstm", "gru", "rnn_tanh", "rnn_relu", "ctc_loss"}
_FILE = re.compile(r'^\s*\.file\s+\d+\s+"(?:[^"]*/)?([^"/]+)"(?:\s+"([^"]+)")?', re.MULTILINE)
_NO_CODE = re.compile(
    r"^\s*(\.(loc|file|version)\b.*|\$L__tmp\d+:|.*\bassertFile_.*\[\d+\] = .*)$|\s*//.*$", re.MULTILINE
)


class _Here(TorchDispatchMode):
    """Compute on the CPU what is meant for a GPU: constants that Inductor folds."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute one operator."""
        return func(*args, **tree_map_only(torch.device, lambda _: torch.device("cpu"), kwargs or {}))


class Graph:
    """A graph of a compiled model: ``graph(*inputs)`` returns its results, as Inductor orders both."""

    def __init__(self, text: str, file: str, run: Any, folder: Path | None = None, constants: Any = ()) -> None:
        self.text, self.file = text, file
        self.name = (re.findall(r"# AOT ID: \['(\w+)'\]", text) or [Path(file).stem])[0]
        found = re.search(r"def call\(self, args\):\n\s+(.*?),? = args\n", text)
        self.inputs = tuple(found[1].split(", ")) if found else ()
        self._folder, self._run, self._constants = folder, run, dict(constants)
        self._call: Callable | None = None

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.inputs)} inputs, {Path(self.file).name})"

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        """Run the graph.

        Raises:
            ArgumentError: Inputs of another number, shape or stride than the graph was compiled for; what ``simulate``
                and ``launch`` raise.
            DataError: A kernel whose PTX is not in the folder.
        """
        if len(inputs) != len(self.inputs):
            raise ArgumentError(f"{self.name} takes {len(self.inputs)} inputs {self.inputs}, and got {len(inputs)}")
        if self._call is None:
            self._call = self._loaded()
        self._run.replays += 1
        try:
            return tuple(self._call(list(inputs)))
        except AssertionError as error:  # of assert_size_stride
            raise ArgumentError(f"{self.name} was compiled for other inputs: {error}") from None
        finally:
            self._run.replays -= 1

    def with_backward(self, backward: "Graph") -> Callable:
        """Return a function of this graph's inputs that autograd differentiates by the backward graph.

        ``run.graphs["0_forward"].with_backward(run.graphs["0_backward"])`` is a training step: it takes the parameters
        and tensors in the order in which Dynamo met them, and returns what the model did. A model that writes to its
        buffers has them among its results.

        Raises:
            ArgumentError: A graph that returns less than the other one reads.
        """
        tangents = sum(name.startswith("tangents_") for name in backward.inputs)
        saved = len(backward.inputs) - tangents

        class Step(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[Any, ...]:
                results = self(*inputs)
                if len(results) < saved + tangents:
                    raise ArgumentError(
                        f"{self.name} returns {len(results)} tensors, of which {backward.name} reads {saved}"
                    )
                results, ctx.kept = results[: len(results) - saved], results[len(results) - saved :]
                floats = [i for i, x in enumerate(results) if isinstance(x, torch.Tensor) and x.is_floating_point()]
                ctx.places = floats[:tangents]
                ctx.mark_non_differentiable(*(x for i, x in enumerate(results) if i not in ctx.places))
                return results

            @staticmethod
            def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
                return backward(*ctx.kept, *(grads[i].contiguous() for i in ctx.places))

        return Step.apply

    def _loaded(self) -> Callable:
        """Return the graph's function, with this machine's memory, and kernels that are launched here."""
        text = self.text.replace("async_compile = AsyncCompile()", "")
        text = text.replace("from torch._C import _cuda_getCurrentRawStream as get_raw_stream", "")
        scope: dict[str, Any] = {
            "__name__": f"fmtsim_{Path(self.file).stem}", "__file__": self.file, "get_raw_stream": lambda device: 0,
            "async_compile": SimpleNamespace(
                triton=lambda name, source, **_: Kernel(self._folder, name, source, self._run), wait=lambda scope: None
            ),
        }  # fmt: skip
        with _disable_current_modes():
            exec(compile(text, self.file, "exec"), scope)
        scope |= self._constants
        scope["extern_kernels"] = _Extern(scope.get("extern_kernels"))
        for name in ("empty_strided_cuda", "empty_strided_cpu_pinned"):
            scope[name] = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
        return scope["call"]  # type: ignore[no-any-return]


class _Extern:
    """Kernels of libraries that a graph calls: torch's operators, which write to ``out`` what they return."""

    def __init__(self, others: Any) -> None:
        self.others = others

    def __getattr__(self, name: str) -> Callable:
        """Return an operator by its name."""
        operator = getattr(torch, name, None) or getattr(self.others, name)

        def call(*args: Any, out: torch.Tensor | None = None, **named: Any) -> Any:
            result = operator(*args, **named)
            return result if out is None else out.copy_(result)

        return call


class Kernel:
    """A kernel of Inductor: recorded PTX, or without a folder Triton's of here, and the configuration of its blocks."""

    def __init__(self, folder: Path | None, name: str, source: str, run: Any) -> None:
        self.name, self.source, self._folder, self._run = name, source, folder, run
        self._ready: tuple[Any, dict[str, Any], str, dict[str, Any], tuple[str, ...]] | None = None

    def run(self, *args: Any, stream: Any = None, **named: Any) -> None:
        """Launch the kernel as the graph does."""
        from torch._inductor.runtime.triton_heuristics import GridExpr

        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if self._ready is None:
                self._ready = self._made() if self._folder is None else self._recorded(self._folder)
            tuner, config, ptx, facts, reasons = self._ready
            signature = tuner.triton_meta["signature"]
            # 1. arguments by name: blocks are the configuration's
            values = dict(zip((n for n in tuner.fn.arg_names if n not in config), args, strict=False)) | config | named
            grid = GridExpr.from_meta(tuner.inductor_meta, config).eval_slow(values)
            arguments = [values[name] for name, kind in signature.items() if kind != "constexpr"]
            # 2. the recorded PTX on them
            record = launching.run(
                triton.Program(
                    name=self.name, entry=facts["name"], ptx=ptx, grid=tuple(int(n) for n in grid),
                    block=(32 * facts["num_warps"], 1, 1), shared_bytes=facts["shared"], arguments=tuple(arguments),
                    scratch=(facts["global_scratch_size"], facts["profile_scratch_size"]), doubts=reasons,
                    fuses=facts["enable_fp_fusion"],
                ),
                self._run.target,
            )  # fmt: skip
        self._run.count(record)

    def _made(self) -> tuple[Any, dict[str, Any], str, dict[str, Any], tuple[str, ...]]:
        """Return Inductor's tuner of the kernel, its configuration, its PTX and facts, and what is not certain."""
        from torch._inductor.codecache import PyCodeCache

        tuner = _tuner(Path(PyCodeCache.write(self.source)[1]), self.name)
        made, kind = _compiled(tuner, tuner.configs[0]), tuner.heuristic_type.name
        reason = f"a GPU times {len(tuner.configs)} or more configurations; the first was taken"
        # elements are computed alike in blocks of any size, and rows that fit a block
        certain = kind == "POINTWISE" or (kind == "PERSISTENT_REDUCTION" and len(tuner.configs) == 1)
        facts = made.metadata._asdict()
        return tuner, dict(tuner.configs[0].kwargs), made.asm["ptx"], facts, () if certain else (reason,)

    def _recorded(self, folder: Path) -> tuple[Any, dict[str, Any], str, dict[str, Any], tuple[str, ...]]:
        """Return the same of what a GPU ran.

        Raises:
            DataError: The folder has no PTX of the kernel.
        """
        # 1. Triton names the source file in the PTX: a kernel's name stands in many graphs, its file once
        files = folder.rglob("*.py")
        file = next((f for f in files if f.read_text(encoding="utf-8").strip() == self.source.strip()), None)
        texts = {path: path.read_text(encoding="utf-8") for path in folder.rglob(f"{self.name}.ptx")}
        texts = {path: text for path, text in texts.items() if file and file.name in sum(_FILE.findall(text), ())}
        if file is None or not texts:
            raise DataError(f"{folder} has no PTX of {self.name}; copy the whole TORCHINDUCTOR_CACHE_DIR, triton/ too")
        facts = {path: json.loads(path.with_suffix(".json").read_text(encoding="utf-8")) for path in texts}
        # 2. the configurations that Inductor tries, by its own rules from the description of the GPU in the source
        tuner = _tuner(file, self.name)
        # 3. the one that won where several were timed
        for path in file.parent.glob("*.best_config"):
            best = json.loads(path.read_text(encoding="utf-8"))
            found = next((p for p in texts if p.parent.name == best.get("triton_cache_hash")), None)
            if found is not None:
                config = {name: best[name] for name in tuner.fn.arg_names if name in best}
                return tuner, config, texts[found], facts[found], ()
        # 4. else the one whose PTX Triton makes here, too
        pairs = [
            (path, config) for path in texts for config in tuner.configs if config.num_warps == facts[path]["num_warps"]
        ]
        same = [
            (path, config) for path, config in pairs if _code(_compiled(tuner, config).asm["ptx"]) == _code(texts[path])
        ]
        found, config = (same or pairs or [(next(iter(texts)), tuner.configs[0])])[0]
        reasons = () if same else ("its blocks are by this torch's heuristics, whose PTX is another",)
        if len(same) > 1:
            reasons = (f"{len(same)} configurations were compiled, and no .best_config says which ran",)
        return tuner, dict(config.kwargs), texts[found], facts[found], reasons


def _tuner(file: Path, name: str) -> Any:
    """Return what Inductor makes of a kernel's source: the function, the GPU's description, and configurations."""
    scope: dict[str, Any] = {"__name__": f"fmtsim_{file.stem}", "__file__": str(file)}
    helpers = "torch._inductor.runtime.triton_helpers.set_driver_to_gpu"
    with mock.patch(helpers, lambda: None), mock.patch.dict(os.environ):
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), scope)
    return scope[name]


def _compiled(tuner: Any, config: Any) -> Any:
    """Return what Triton makes of a kernel under a configuration, as Inductor calls it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    meta = tuner._create_compile_meta(config)
    source = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    return compile(source, target=GPUTarget("cuda", 90, 32), options=tuner._create_compile_options(config, meta))


def _code(text: str) -> list[str]:
    """Return the lines of a PTX text that say what is computed."""
    body = _NO_CODE.sub("", re.split(r"^\s*\.section", text, maxsplit=1, flags=re.MULTILINE)[0])
    return [line.strip() for line in body.splitlines() if line.strip()]


def graphs(folder: str | os.PathLike[str], run: Any) -> dict[str, Graph]:
    """Return the graphs in a cache folder by their name there: ``"0_forward"``, a second of that name with its file's.

    Raises:
        DataError: A folder without graphs.
    """
    root = Path(folder)
    found: dict[str, Graph] = {}
    for file in sorted(root.rglob("*.py"), key=lambda f: (f.stat().st_mtime, f.name)):
        if "async_compile = AsyncCompile()" in file.read_text(encoding="utf-8"):
            graph = Graph(file.read_text(encoding="utf-8"), str(file), run, root)
            found[graph.name if graph.name not in found else f"{graph.name} {file.stem}"] = graph
    if not found:
        raise DataError(f"compiled={shown(str(folder))} has no graphs of torch.compile; give a TORCHINDUCTOR_CACHE_DIR")
    return found


def compiled(function: Any, run: Any, options: dict[str, Any]) -> Callable:
    """Return what ``torch.compile`` makes of a function or module on a GPU: its code is generated for the description.

    Dynamo traces outside of the simulation, in one graph; what it made runs inside.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    from fmtsim.machine.patches import outside

    fast = torch.compile(function, backend=partial(_backend, run), fullgraph=True, **options)

    def call(*args: Any, **named: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            raise ArgumentError("a compiled function is called under torch.autocast; enter it in the function")
        with outside(), _disable_current_modes(), ExitStack() as stack:
            while torch._C._len_torch_function_stack():
                stack.enter_context(_pop_mode_temporarily())
            try:
                return fast(*args, **named)
            except BackendCompilerFailed as error:
                raise error.inner_exception from None

    return call


def _backend(run: Any, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
    """Compile a graph of Dynamo as for tensors on a GPU."""
    from torch._inductor.compile_fx import compile_fx

    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        raise ArgumentError(
            "a graph with gradients is not compiled for a described GPU: torch's autograd engine adds gradients on "
            "cuda only where it finds a GPU; call it under torch.no_grad(), or replay a GPU's graphs by compiled=FOLDER"
        )
    nodes = [node for part in module.modules() if isinstance(part, torch.fx.GraphModule) for node in part.graph.nodes]
    for name in sorted({getattr(node.target, "__name__", "") for node in nodes} & _CHOSEN):
        run._note(name, UnknownOrder("in compiled code, which is generated as for a GPU without its fused kernel"))
    # 1. the graph and its inputs on the GPU, which are the CPU's here
    gpu = torch.device("cuda", 0)
    for node in nodes:
        node.args, node.kwargs = tree_map_only(torch.device, lambda _: gpu, (node.args, dict(node.kwargs)))
    context = torch._guards.TracingContext.try_get()
    mode = context and context.fake_mode or FakeTensorMode()
    with described(), mode:
        placed = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=gpu) if isinstance(x, torch.Tensor) else x
            for x in inputs
        ]

    # 2. Inductor's own compiler, up to the text of its code
    def loaded(lowering: Any, code: Any) -> Any:
        graph = Graph(code.value, "graph.py", run, constants=lowering.constants)

        def call(values: list[Any]) -> Any:
            taken = list(values)
            values.clear()
            with nullcontext() if run in _get_current_dispatch_mode_stack() else run:
                return graph(*taken)

        run.graphs[graph.name] = graph
        return SimpleNamespace(call=call, __file__="graph.py")

    lowering = "torch._inductor.graph.GraphLowering._compile_to_module_lines"
    with _lock, described(), mock.patch(lowering, loaded):
        return compile_fx(module, placed)  # type: ignore[return-value]


@contextmanager
def described() -> Iterator[None]:
    """Let torch's code generator see an H100 where there is none, or another GPU."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.fx_passes import misc_patterns
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder
    from triton.runtime import driver

    facts = SimpleNamespace(**PROPERTIES, name="NVIDIA H100 80GB HBM3", gcnArchName="")
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": facts,
        "get_device_capability": (9, 0), "_exchange_device": 0, "_maybe_exchange_device": 0, "set_device": None,
        "synchronize": None, "device": nullcontext(), "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
    }  # fmt: skip
    interface = answers | {"get_compute_capability": 90, "get_raw_stream": 0}
    host, deduced = torch.tensor, Folder._deduce_value

    def folded(folder: Any, node: Any) -> Any:
        with _Here():
            return deduced(folder, node)

    def scalar(data: Any, *, dtype: Any = None, device: Any = None, **named: Any) -> torch.Tensor:
        # a constant of a pattern, which torch would copy to the GPU
        if device is None or torch.device(device).type != "cuda":
            return host(data, dtype=dtype, device=device, **named)
        return torch.full((), data, dtype=dtype or host(data).dtype, device=device)

    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, _answer=answer, **__: _answer))
        for name, answer in interface.items():
            if hasattr(CudaInterface, name):
                function = staticmethod(lambda *_, _answer=answer, **__: _answer)
                stack.enter_context(mock.patch.object(CudaInterface, name, function))
        for name in ("current_device", "get_device_properties"):
            function = staticmethod(lambda *_, _answer=answers[name], **__: _answer)
            stack.enter_context(mock.patch.object(CudaInterface.Worker, name, function))
        stack.enter_context(mock.patch.object(driver, "_active", triton.Driver()))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(mock.patch.object(torch, "tensor", scalar))
        stack.enter_context(mock.patch.object(misc_patterns, "_misc_patterns_init", lambda *_: None))
        stack.enter_context(mock.patch.object(Folder, "_deduce_value", folded))
        stack.enter_context(config.patch(fx_graph_cache=False, compile_threads=1, shape_padding=False))
        stack.enter_context(mock.patch.object(torch._functorch.config, "enable_autograd_cache", False))
        if not torch.cuda.is_initialized():
            # x[0] asks c10's guard of CUDA, which is not there: a CPU's answers for it
            guards = (ctypes.c_void_p * 2).in_dll(ctypes.CDLL(_C10), "_ZN3c104impl26device_guard_impl_registryE")
            stack.callback(guards.__setitem__, 1, guards[1])
            guards[1] = guards[0]
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # advice for the GPU: TF32, multiprocessors
        has_triton.cache_clear()
        stack.callback(has_triton.cache_clear)
        yield
