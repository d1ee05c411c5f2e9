# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of a PTX text: the machine instructions that each PTX instruction became.

Each PTX instruction gets a ``.loc`` of its own (the file is the function, the line is the instruction's number from
1), ptxas assembles the text with ``-lineinfo`` as Triton does, and nvdisasm prints the machine instructions with these
lines. Lines do not change the code (tests/machine/ptx/test_contract.py compares it with and without them).
"""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fmtsim.machine.ptx.parse import Module, parse
from fmtsim.support.files import write_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The machine code of a module."""

    ptxas: str  # "12.8"
    is_same_release: bool  # of the ptxas that the PTX text was written for (its .version)
    # "FADD R0, R1, R2" by function and number of the PTX instruction; an FFMA has the number of its add
    instructions: dict[str, dict[int, tuple[str, ...]]]
    count: int  # machine instructions in all, those without a line among them


@functools.cache
def assemblers() -> dict[tuple[int, int], Path]:
    """Return the installed ptxas by release: Triton's, then CUDA's of CUDA_HOME and PATH."""
    found: dict[tuple[int, int], Path] = {}
    for folder in _folders():
        for name in ("ptxas", "ptxas-blackwell"):
            if (folder / name).is_file():
                said = subprocess.run([folder / name, "--version"], capture_output=True, text=True, check=False).stdout
                if release := re.search(r"release (\d+)\.(\d+)", said):
                    found.setdefault((int(release[1]), int(release[2])), folder / name)
    return found


def _folders() -> list[Path]:
    spec = importlib.util.find_spec("triton")
    roots = [Path(spec.origin).parent / "backends/nvidia/bin"] if spec and spec.origin else []
    roots += [Path(os.environ[key]) / "bin" for key in ("CUDA_HOME", "CUDA_PATH") if key in os.environ]
    return roots + [Path(tool).resolve().parent for tool in (shutil.which("ptxas"), shutil.which("nvdisasm")) if tool]


@functools.lru_cache(maxsize=256)
def disassembled(text: str, *, fuse: bool = True) -> Listing | None:
    """Return the machine code of a PTX text, None where ptxas or nvdisasm is not installed or refuses the text.

    Args:
        text: a module for sm_90a, as Triton, Inductor or NVRTC writes it.
        fuse: False passes ``--fmad=false``, as Triton does for ``enable_fp_fusion=False``.
    """
    disassembler = next((folder / "nvdisasm" for folder in _folders() if (folder / "nvdisasm").is_file()), None)
    version = re.search(r"^\s*\.version\s+(\d+)\.(\d+)", text, re.M)
    if not assemblers() or disassembler is None or version is None:
        return None
    # 1. the release whose PTX version the text has (12.8: 8.7, 13.0: 9.0), else the next newer, else the newest
    wanted = (int(version[1]), int(version[2]))
    by_version = {(r[0] - 4, r[1] if r[0] > 12 else r[1] - 1): r for r in assemblers()}  # noqa: PLR2004
    known = min((v for v in by_version if v >= wanted), default=max(by_version))
    release = by_version[known]
    marked = _marked(text, parse(text))
    if marked is None:
        return None
    if known < wanted:
        marked = re.sub(r"^(\s*\.version\s+)\S+", rf"\g<1>{known[0]}.{known[1]}", marked, count=1, flags=re.M)
    # 2. Triton's options
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        write_file(source, marked)
        target = "-arch=" + (re.search(r"^\s*\.target\s+(\w+)", text, re.M) or ["", "sm_90a"])[1]
        options = [target, "-lineinfo", *([] if fuse else ["--fmad=false"]), str(source), "-o", str(cubin)]
        if subprocess.run([assemblers()[release], *options], capture_output=True, check=False).returncode:
            return None
        printed = subprocess.run(
            [disassembler, "-c", "-g", str(cubin)], capture_output=True, text=True, check=False
        ).stdout
    # 3. '//## File "kernel", line 5' stands before the instructions of line 5
    lines: dict[str, dict[int, list[str]]] = {}
    place, count = ("", 0), 0
    for line in printed.split("\n"):
        if mark := re.search(r'//## File "([^"]*)", line (\d+)', line):
            place = (mark[1], int(mark[2]) - 1)
        elif line.lstrip().startswith(".section"):
            place = ("", 0)
        elif code := re.search(r"/\*[0-9a-f]{4,}\*/\s+(\S.*?)\s*;", line):
            count += 1
            lines.setdefault(place[0], {}).setdefault(place[1], []).append(re.sub(r"\.reuse|\s+(?=\s)", "", code[1]))
    instructions = {name: {i: tuple(codes) for i, codes in of.items()} for name, of in lines.items() if name}
    return Listing(
        ptxas=f"{release[0]}.{release[1]}", is_same_release=known == wanted, instructions=instructions, count=count
    )


def _marked(text: str, module: Module) -> str | None:
    """Return the text with a ``.loc`` before each instruction; None where its lines do not show where one begins."""
    bare = re.sub(r"//[^\n]*", "", text)
    bare = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), bare, flags=re.S)
    bare = re.sub(r"^[ \t]*\.(loc|file)\b[^\n]*", "", bare, flags=re.M)
    bare = re.sub(r"^[ \t]*\.section\s+\S+\s*\{.*?\}", lambda m: "\n" * m.group().count("\n"), bare, flags=re.M | re.S)
    lines = bare.split("\n")
    files = []
    for number, function in enumerate(module.functions.values(), 1):
        files.append(f'.file {number} "{function.name}"')
        begins: dict[int, list[int]] = {}
        for i, instruction in enumerate(function.body):
            begins.setdefault(instruction.line, []).append(i)
        for line, numbers in begins.items():
            pieces = re.findall(r"[^;]*;|[^;]+$", lines[line - 1])
            # a piece begins an instruction, after braces and labels, unless it is a directive
            starts = [k for k, p in enumerate(pieces) if re.match(r"(\s|[{}](?!\s*%)|[\w$]+:)*@?!?[%a-z]", p)]
            if len(starts) != len(numbers):
                return None
            for k, i in zip(starts, numbers, strict=True):
                head = re.match(r"(\s|[{}](?!\s*%)|[\w$]+:)*", pieces[k])
                end = head.end() if head else 0
                pieces[k] = f"{pieces[k][:end]}\n.loc {number} {i + 1} 0\n{pieces[k][end:]}"
            lines[line - 1] = "".join(pieces)
    return "\n".join([*lines, *files, ""])
