# SPDX-License-Identifier: Apache-2.0
"""What torch.compile made on a GPU, replayed launch by launch: a folder of ``TORCHINDUCTOR_CACHE_DIR``.

The folder holds graphs as Python ("output code"), the source of each kernel, and Triton's PTX of it. A graph runs here
as it does there: its kernels by their recorded PTX, other operators as ``simulate`` computes them.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fmtsim.machine.ptx import launch, triton
from fmtsim.support.errors import ArgumentError, DataError, shown

_FILE = re.compile(r'^\s*\.file\s+\d+\s+"(?:[^"]*/)?([^"/]+)"(?:\s+"([^"]+)")?', re.MULTILINE)
_NO_CODE = re.compile(r"^\s*(\.(loc|file|version)\b.*|\$L__tmp\d+:|.*\bassertFile_.*\[\d+\] = .*)$|\s*//.*$", re.MULTILINE)


class Graph:
    """A graph of a compiled model: ``graph(*inputs)`` returns its results, as Inductor orders both."""

    def __init__(self, folder: Path, file: Path, run: Any) -> None:
        self.file, self.text = file, file.read_text(encoding="utf-8")
        self.name = (re.findall(r"# AOT ID: \['(\w+)'\]", self.text) or [file.stem])[0]
        found = re.search(r"def call\(self, args\):\n\s+(.*?),? = args\n", self.text)
        self.inputs = tuple(found[1].split(", ")) if found else ()
        self._folder, self._run, self._call = folder, run, None

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.inputs)} inputs, {self.file.name})"

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
        try:
            return tuple(self._call(list(inputs)))
        except AssertionError as error:  # of assert_size_stride
            raise ArgumentError(f"{self.name} was compiled for other inputs: {error}") from None

    def _loaded(self) -> Callable:
        """Return the graph's function, with this machine's memory, and kernels that are launched here."""
        made = SimpleNamespace(
            triton=lambda name, source, **_: Kernel(self._folder, name, source, self._run), wait=lambda scope: None
        )
        scope: dict[str, Any] = {"__name__": f"fmtsim_{self.file.stem}", "__file__": str(self.file)}
        with (
            _disable_current_modes(),
            mock.patch("torch._inductor.async_compile.AsyncCompile", lambda: made),
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True),
        ):
            exec(compile(self.text, str(self.file), "exec"), scope)
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
    """A kernel of Inductor: the recorded PTX, and the configuration that it was compiled with."""

    def __init__(self, folder: Path, name: str, source: str, run: Any) -> None:
        self.name, self.source, self._folder, self._run = name, source, folder, run
        self._ready: tuple[Any, dict[str, Any], str, dict[str, Any], tuple[str, ...]] | None = None

    def run(self, *args: Any, stream: Any = None, **named: Any) -> None:
        """Launch the kernel as the graph does."""
        from torch._inductor.runtime.triton_heuristics import GridExpr

        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if self._ready is None:
                self._ready = self._loaded()
            tuner, config, ptx, facts, reasons = self._ready
            signature = tuner.triton_meta["signature"]
            # 1. arguments by name: blocks are the configuration's
            values = dict(zip((n for n in tuner.fn.arg_names if n not in config), args, strict=False)) | config | named
            grid = GridExpr.from_meta(tuner.inductor_meta, config).eval_slow(values)
            arguments = [values[name] for name, kind in signature.items() if kind != "constexpr"]
            # 2. the recorded PTX on them
            record = launch.run(
                triton.Program(
                    name=self.name, entry=facts["name"], ptx=ptx, grid=tuple(int(n) for n in grid),
                    block=(32 * facts["num_warps"], 1, 1), shared_bytes=facts["shared"], arguments=tuple(arguments),
                    scratch=(facts["global_scratch_size"], facts["profile_scratch_size"]), fuses=facts["enable_fp_fusion"],
                    doubts=reasons,
                ),
                self._run.target,
            )  # fmt: skip
        self._run.count(record)

    def _loaded(self) -> tuple[Any, dict[str, Any], str, dict[str, Any], tuple[str, ...]]:
        """Return Inductor's tuner of the kernel, its configuration, its PTX and facts, and what is not certain of them.

        Raises:
            DataError: The folder has no PTX of the kernel.
        """
        # 1. Triton names the source file in the PTX: a kernel's name stands in many graphs, its file once
        files = self._folder.rglob("*.py")
        file = next((f for f in files if f.read_text(encoding="utf-8").strip() == self.source.strip()), None)
        texts = {path: path.read_text(encoding="utf-8") for path in self._folder.rglob(f"{self.name}.ptx")}
        texts = {path: text for path, text in texts.items() if file and file.name in sum(_FILE.findall(text), ())}
        if file is None or not texts:
            raise DataError(f"{self._folder} has no PTX of {self.name}; copy the whole TORCHINDUCTOR_CACHE_DIR, triton/ too")
        facts = {path: json.loads(path.with_suffix(".json").read_text(encoding="utf-8")) for path in texts}
        # 2. the configurations that Inductor tries, by its own rules from the description of the GPU in the source
        scope: dict[str, Any] = {"__name__": f"fmtsim_{file.stem}", "__file__": str(file)}
        with (
            mock.patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu", lambda: None),
            mock.patch.dict(os.environ),
        ):
            exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), scope)
        tuner = scope[self.name]
        # 3. the one that won where several were timed
        for path in file.parent.glob("*.best_config"):
            best = json.loads(path.read_text(encoding="utf-8"))
            found = next((p for p in texts if p.parent.name == best.get("triton_cache_hash")), None)
            if found is not None:
                config = {name: best[name] for name in tuner.fn.arg_names if name in best}
                return tuner, config, texts[found], facts[found], ()
        # 4. else the one whose PTX Triton makes here, too
        pairs = [(path, config) for path in texts for config in tuner.configs if config.num_warps == facts[path]["num_warps"]]
        same = [(path, config) for path, config in pairs if _same_code(texts[path], tuner, config, facts[path])]
        found, config = (same or pairs or [(next(iter(texts)), tuner.configs[0])])[0]
        reasons = () if same else (f"blocks of {self.name} by this torch's heuristics: its PTX is not Triton's of here",)
        if len(same) > 1:
            reasons = (f"{len(same)} configurations of {self.name} were compiled, and no .best_config says which ran",)
        return tuner, dict(config.kwargs), texts[found], facts[found], reasons


def _same_code(text: str, tuner: Any, config: Any, facts: Mapping[str, Any]) -> bool:
    """Return True if Triton makes the recorded PTX of a kernel under a configuration, comments and lines aside."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDAOptions
    from triton.compiler import ASTSource, compile

    meta = tuner.triton_meta
    constants = meta["constants"] | config.kwargs
    source = ASTSource(tuner.fn, meta["signature"], constants, meta["configs"][0])
    names = CUDAOptions.__dataclass_fields__.keys() - {"extern_libs", "arch"}
    options = {name: facts[name] for name in names if isinstance(facts.get(name), int | str)}
    options["num_stages"] = config.num_stages
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return _code(made) == _code(text)


def _code(text: str) -> list[str]:
    """Return the lines of a PTX text that say what is computed."""
    body = _NO_CODE.sub("", re.split(r"^\s*\.section", text, maxsplit=1, flags=re.MULTILINE)[0])
    return [line.strip() for line in body.splitlines() if line.strip()]


def graphs(folder: str | os.PathLike[str], run: Any) -> dict[str, Graph]:
    """Return the graphs in a cache folder by their name there (``"0_forward"``; a second of that name by its file, too).

    Raises:
        DataError: A folder without graphs.
    """
    root = Path(folder)
    found: dict[str, Graph] = {}
    for file in sorted(root.rglob("*.py"), key=lambda f: (f.stat().st_mtime, f.name)):
        if "async_compile = AsyncCompile()" in file.read_text(encoding="utf-8"):
            graph = Graph(root, file, run)
            found[graph.name if graph.name not in found else f"{graph.name} {file.stem}"] = graph
    if not found:
        raise DataError(f"compiled={shown(str(folder))} has no graphs of torch.compile; give a TORCHINDUCTOR_CACHE_DIR")
    return found
