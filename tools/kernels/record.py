# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Run cases on a GPU and keep what they wrote; read such a record, which needs no GPU.

A record is a zip. Of each case it has NAME.json (launch, SASS opcodes, whether two runs agree; of every tensor that
changed the SHA-256, chunk digests of long ones and where its kept elements lie), NAME.ptx and NAME.out (the elements).
"""

import concurrent.futures
import ctypes
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path

import torch

from tools.kernels.cases import Case, digest, raw, tensors

KEPT = {"triton": 1 << 16, "cuda": 1 << 16, "ptx": 2048}  # bytes of a tensor that are kept
CHUNKED, CHUNKS = 2048, 40  # tensors of more bytes have digests of their parts, too


def outcome(before: list[torch.Tensor], after: list[torch.Tensor], kept: int) -> tuple[list[dict], bytes]:
    """Describe the tensors that a launch changed: (facts, kept bytes); a CPU that repeats the launch compares both."""
    facts, body = [], b""
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        whole = raw(new)
        if whole == raw(old):
            continue
        fact = dict(
            tensor=i, dtype=str(new.dtype)[6:], shape=list(new.shape), sha256=hashlib.sha256(whole).hexdigest()[:16]
        )
        if len(whole) > CHUNKED:
            width = -(-new.numel() // CHUNKS) * new.element_size()
            parts = [hashlib.sha256(whole[k : k + width]).hexdigest()[:8] for k in range(0, len(whole), width)]
            fact["chunks"] = "".join(parts)
        step = 1 if len(whole) <= kept else -(-len(whole) // kept) | 1  # odd: the elements come from every column
        picked = every(whole, new.element_size(), step)
        facts.append(fact | dict(step=step, offset=len(body), nbytes=len(picked)))
        body += picked
    return facts, body


def every(whole: bytes, size: int, step: int) -> bytes:
    """Return each ``step``-th element of ``size`` bytes."""
    return b"".join(whole[k * size : (k + 1) * size] for k in range(0, len(whole) // size, step)) if step > 1 else whole


class Records:
    """Read a record: ``names``, ``facts(name)``, ``ptx(name)`` and ``differences(name, before, after)``."""

    def __init__(self, path: str | Path) -> None:
        self._zip = zipfile.ZipFile(path)
        names = self._zip.namelist()
        self._packed = json.loads(self._zip.read("index.json")) if "index.json" in names else {}
        self.names = list(self._packed) or [
            name[:-5] for name in names if name.endswith(".json") and name != "machine.json"
        ]
        self._blobs = {end: self._zip.read(end) for end in ("ptx", "out") if self._packed}

    def facts(self, name: str) -> dict:
        return self._packed[name] if self._packed else json.loads(self._zip.read(f"{name}.json"))

    def _part(self, name: str, end: str) -> bytes:
        if self._packed:
            start, size = self._packed[name].get(end, (0, 0))
            return self._blobs[end][start : start + size]
        return self._zip.read(f"{name}.{end}") if f"{name}.{end}" in self._zip.namelist() else b""

    def ptx(self, name: str) -> str:
        return self._part(name, "ptx").decode()

    def kept(self, name: str) -> bytes:
        return self._part(name, "out")

    def pack(self, path: Path, kept: dict[str, int]) -> None:
        """Write the record anew as three entries, with at most ``kept`` bytes of a tensor of a case of each kind."""
        index, blobs = {}, {"ptx": b"", "out": b""}
        for name in self.names:
            facts, body = dict(self.facts(name)), self.kept(name)
            if facts["kind"] == "machine":
                continue
            if facts["kind"] != "range":
                shorter, changed = b"", []
                for fact in facts.get("changed", ()):
                    whole, size = (
                        body[fact["offset"] : fact["offset"] + fact["nbytes"]],
                        getattr(torch, fact["dtype"]).itemsize,
                    )
                    factor = 1 if len(whole) <= kept[facts["kind"]] else -(-len(whole) // kept[facts["kind"]]) | 1
                    picked = every(whole, size, factor)
                    changed.append(fact | dict(step=fact["step"] * factor, offset=len(shorter), nbytes=len(picked)))
                    shorter += picked
                facts, body = facts | dict(changed=changed), shorter
            for end, part in (("ptx", self._part(name, "ptx")), ("out", body)):
                facts[end] = (len(blobs[end]), len(part))
                blobs[end] += part
            index[name] = facts
        with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
            file.writestr("index.json", json.dumps(index, separators=(",", ":")))
            for end, blob in blobs.items():
                file.writestr(end, blob)

    def differences(self, name: str, before: list[object], after: list[object]) -> list[str]:
        """Return what differs from the record, one sentence each: operands, tensors, elements."""
        facts = self.facts(name)
        if "error" in facts:
            return [f"recorded: {facts['error']}"]
        if digest(before) != facts["operands"]:
            return ["the operands are not those of the record"]
        found, _ = outcome(tensors(before), tensors(after), 0x7FFFFFFF)
        theirs, kept = facts["changed"], self.kept(name)
        lines = []
        if [fact["tensor"] for fact in found] != [fact["tensor"] for fact in theirs]:
            lines.append(f"changed tensors: {[f['tensor'] for f in found]}, recorded {[f['tensor'] for f in theirs]}")
        for mine, other in ((a, b) for a in found for b in theirs if a["tensor"] == b["tensor"]):
            if mine["sha256"] == other["sha256"]:
                continue
            size, step = getattr(torch, mine["dtype"]).itemsize, other["step"]
            left = every(raw(tensors(after)[mine["tensor"]]), size, step)
            right = kept[other["offset"] : other["offset"] + other["nbytes"]]
            places = [k // size for k in range(0, len(right), size) if left[k : k + size] != right[k : k + size]]
            pairs = [(left[k * size :][:size][::-1].hex(), right[k * size :][:size][::-1].hex()) for k in places[:4]]
            ours, digests = mine.get("chunks", ""), other.get("chunks", "")
            chunks = [k // 8 for k in range(0, len(ours), 8) if ours[k : k + 8] != digests[k : k + 8]]
            lines.append(
                f"tensor {mine['tensor']}: {len(places)} of {len(right) // size} kept elements differ, at "
                f"{[k * step for k in places[:4]]} (here, recorded) {pairs}; chunks {chunks[:12]} of {len(ours) // 8}"
            )
        return lines


def disassembler() -> str:
    """Return the path of cuobjdump: the toolkit's, or that of Triton's wheel."""
    if found := shutil.which("cuobjdump"):
        return found
    import triton

    return str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")


def assembler() -> str:
    """Return the path of the ptxas of Triton's wheel."""
    import triton

    return str(Path(triton.__file__).parent / "backends/nvidia/bin/ptxas")


def sass_opcodes(cubin: bytes) -> dict[str, int]:
    """Count the opcodes of a cubin; MUFU with its function."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([disassembler(), "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = Counter()
    for opcode in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", text):
        parts = opcode.split(".")
        found[".".join(parts[:2]) if parts[0] == "MUFU" else parts[0]] += 1
    return dict(sorted(found.items()))


def assemble(ptx: str) -> bytes:
    """Return the cubin of PTX text."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "a.ptx", Path(folder) / "a.cubin"
        source.write_text(ptx)
        done = subprocess.run(
            [assembler(), "-arch=sm_90a", str(source), "-o", str(cubin)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-600:])
        return cubin.read_bytes()


def compile_cuda(case: Case) -> tuple[str, bytes]:
    """Return (PTX, cubin) of CUDA C++: by NVRTC, or by nvcc where there is no NVRTC."""
    flags = list(case.options.get("flags", ()))
    include = next(
        (p for p in (Path("/usr/local/cuda/include"), Path("/usr/local/cuda-13.0/include")) if p.is_dir()),
        Path(assembler()).parents[1] / "include",
    )
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        return _compile_by_nvcc(case, flags)
    words = ["--gpu-architecture=sm_90a", f"-I{include}", "-default-device", "--std=c++17", *flags]
    error, program = nvrtc.nvrtcCreateProgram(case.kernel.encode(), f"{case.name}.cu".encode(), 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, len(words), [word.encode() for word in words])
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode()[:800])
    ptx = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, ptx)
    cubin = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return ptx.rstrip(b"\0").decode(), cubin


def _compile_by_nvcc(case: Case, flags: list[str]) -> tuple[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "a.cu"
        source.write_text(case.kernel)
        for kind in ("ptx", "cubin"):
            subprocess.run(
                ["nvcc", f"-{kind}", "-arch=sm_90a", *flags, str(source), "-o", f"{folder}/a.{kind}"], check=True
            )
        return (Path(folder) / "a.ptx").read_text(), (Path(folder) / "a.cubin").read_bytes()


def _launch(cubin: bytes, case: Case, arguments: list[object]) -> None:
    """Launch a cubin's entry by the driver: pointers, 32-bit integers and floats; numpy scalars for other widths."""
    driver = ctypes.CDLL("libcuda.so.1")

    def check(code: int, what: str) -> None:
        if code:
            raise RuntimeError(f"{what}: CUDA error {code}")

    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver.cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
    check(driver.cuModuleGetFunction(ctypes.byref(function), module, case.entry.encode()), "cuModuleGetFunction")
    shared = int(case.options.get("shared", 0))
    if shared > 48 << 10:
        check(driver.cuFuncSetAttribute(function, 8, shared), "cuFuncSetAttribute")
    cells = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            cells.append(ctypes.c_uint64(argument.data_ptr()))
        elif isinstance(argument, float):
            cells.append(ctypes.c_float(argument))
        else:
            cells.append(ctypes.c_int64(argument))  # little-endian: a parameter of 32 bits reads the low half
    pointers = (ctypes.c_void_p * len(cells))(*[ctypes.addressof(cell) for cell in cells])
    grid = (*case.grid, 1, 1)[:3]
    block = (*case.options.get("block", (128,)), 1, 1)[:3]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    check(driver.cuLaunchKernel(function, *grid, *block, shared, stream, pointers, None), "cuLaunchKernel")
    torch.cuda.synchronize()
    check(driver.cuModuleUnload(module), "cuModuleUnload")


def _on_gpu(arguments: list[object]) -> list[object]:
    moved = {}

    def move(item):
        if isinstance(item, torch.Tensor):
            return moved.setdefault(id(item), item.cuda())
        if hasattr(item, "block_shape"):
            return type(item)(move(item.base), item.shape, item.strides, item.block_shape)
        return item

    return [move(item) for item in arguments]


def run(case: Case, compiled: tuple[str, bytes] | None) -> tuple[dict, str, bytes]:
    """Run a case twice on the GPU: (facts, PTX, kept bytes)."""
    before = list(case.make_arguments())
    results, ptx, more = [], "", {}
    for _ in range(2):
        arguments = _on_gpu(before)
        if case.kind == "triton":
            kernel = case.kernel[case.grid](*arguments, **case.constexprs, **case.options)
            ptx, cubin = kernel.asm["ptx"], kernel.asm["cubin"]
            meta = kernel.metadata
            more = dict(shared=meta.shared, warps=meta.num_warps, entry=meta.name, scratch=meta.global_scratch_size)
            more["descriptors"] = getattr(meta, "tensordesc_meta", None)
        else:
            ptx, cubin = compiled
            _launch(cubin, case, arguments)
            more = dict(
                shared=case.options.get("shared", 0), block=list(case.options.get("block", (128,))), entry=case.entry
            )
        torch.cuda.synchronize()
        results.append([tensor.cpu() for tensor in tensors(arguments)])
    same = all(raw(a) == raw(b) for a, b in zip(*results, strict=True))
    changed, body = outcome(tensors(before), results[0], KEPT[case.kind])
    facts = dict(kind=case.kind, grid=list(case.grid), twice=same, operands=digest(before), changed=changed, **more)
    facts["options"] = {name: str(value) for name, value in (case.options | case.constexprs).items()}
    if case.kind != "ptx":
        facts["sass"] = sass_opcodes(cubin)
    return facts, ptx, body


def write(path: Path, *entries: tuple[str, dict, str, bytes]) -> None:
    """Add cases, (name, facts, PTX, kept bytes) each, to a record, which is whole after every call."""
    with zipfile.ZipFile(path, "a", zipfile.ZIP_LZMA) as file:
        for name, facts, ptx, body in entries:
            file.writestr(f"{name}.json", json.dumps(facts, default=str))
            if ptx:
                file.writestr(f"{name}.ptx", re.split(r"\n\s*\.section", ptx)[0])
            file.writestr(f"{name}.out", body)


def record(path: Path, cases: list[Case], seconds: float) -> int:
    """Record cases until the time is over: the number of those that failed; a failure is recorded, too."""
    began = flushed = time.monotonic()
    failed, entries = 0, []
    build = {
        "cuda": compile_cuda,
        "ptx": lambda case: (case.kernel, assemble(case.kernel)),
        "triton": lambda case: None,
    }
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = [pool.submit(build[case.kind], case) for case in cases]
        for case, ready in zip(cases, compiled, strict=True):
            start = time.monotonic()
            if start - began > seconds:
                print(f"time is over before {case.name}", flush=True)
                failed += 1
                break
            try:
                facts, ptx, body = run(case, ready.result())
                entries.append((case.name, facts, ptx if case.kind != "ptx" else "", body))
                state = "" if facts["twice"] else "  TWO RUNS DIFFER"
                if state or case.kind != "ptx":
                    print(
                        f"{case.name}: {time.monotonic() - start:.2f} s, {len(facts['changed'])} changed{state}",
                        flush=True,
                    )
            except Exception as error:  # noqa: BLE001 - whatever it is, the other cases go on
                failed += 1
                entries.append(
                    (case.name, dict(kind=case.kind, error=f"{type(error).__name__}: {error}"[:500]), "", b"")
                )
                print(f"{case.name}: FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
                try:
                    torch.cuda.synchronize()
                except Exception:  # noqa: BLE001 - the context is lost: nothing more can run in this process
                    print("the context is lost", flush=True)
                    break
            if len(entries) >= 40 or time.monotonic() - flushed > 5:
                write(path, *entries)
                entries, flushed = [], time.monotonic()
        for ready in compiled:
            ready.cancel()
    write(path, *entries)
    return failed
