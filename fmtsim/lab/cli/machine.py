# SPDX-License-Identifier: Apache-2.0
"""Runs of ``fmtsim info``, ``doctor``, ``warmup`` and ``completion``."""

import argparse
import os
import platform
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fmtsim
from fmtsim.casts.ops import load_engine
from fmtsim.gemm.model_layers import PASSES, parse_tokens
from fmtsim.lab.cli.main import COMMANDS, build_parser
from fmtsim.lab.cli.options import check_device, offered
from fmtsim.lab.cli.output import MISMATCH, answer, format_table, version_of, versions_of
from fmtsim.support import compilation
from fmtsim.support.errors import ArgumentError
from fmtsim.support.folder import kernel_folder
from fmtsim.support.progress import Progress, make_progress

CORE = ("torch", "numpy", "ml-dtypes", "numba", "llvmlite")
EXTRAS = ("safetensors", "rich", "matplotlib", "cuda-core")


def run_info(arguments: argparse.Namespace) -> int:
    """Print versions, devices, engines and threads."""
    record = collect_info()
    answer(arguments, record, lambda: _info_text(record))
    return 0


def _info_text(record: dict[str, Any]) -> str:
    devices = [(device["name"], device["description"]) for device in record["devices"]]
    served = [(device["name"], device["engine"], device["cost"]) for device in record["devices"]]
    engines = [(e["name"], "yes" if e["available"] else "no", e["reason"]) for e in record["engines"]]
    tables = (
        (("package", "version"), record["versions"].items()),
        (("device", "description"), devices),
        (("engine", "available", "what it runs on, or why it is missing"), engines),
        (("device", "engine", "what it costs"), served),
    )
    parts = [format_table(header, rows, left=(0, 1, 2)) + "\n" for header, rows in tables]
    folder = record["kernel_cache"] or "none: kernels are compiled anew in every process"
    parts += [f"threads of the cpu engine   {record['threads']}", f"folder of compiled kernels  {folder}"]
    return "\n".join(parts)


def collect_info() -> dict[str, Any]:
    """Return everything that ``fmtsim info`` shows, as plain JSON types."""
    from fmtsim import cuda

    reason = cuda.why_unavailable()
    engines = [
        {"name": "torch_engine", "available": True, "reason": "tensors on any device; the fallback of the others"},
        _cpu_engine(),
        {"name": "cuda", "available": reason is None, "reason": reason or "tensors on CUDA devices, by CUDA kernels"},
    ]
    folder = load_engine("cpu").cache_folder() if engines[1]["available"] else None
    return {
        "versions": {
            "fmtsim": version_of("fmtsim"), "python": platform.python_version(), **versions_of((*CORE, *EXTRAS)),
        },
        "platform": platform.platform(), "devices": _devices(), "engines": engines, "threads": fmtsim.get_num_threads(),
        "kernel_cache": str(folder) if folder else None,
    }  # fmt: skip


def _devices() -> list[dict[str, str]]:
    devices = [("cpu", f"{processor_name()}, {os.cpu_count()} logical cores")]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        kind = f"compute capability {properties.major}.{properties.minor}"
        kind = kind if torch.version.hip is None else f"ROCm {torch.version.hip}"
        memory = properties.total_memory / 2**30
        devices.append((f"cuda:{index}", f"{properties.name}, {memory:.0f} GiB, {kind}"))
    devices += [(f"xpu:{index}", torch.xpu.get_device_name(index)) for index in range(torch.xpu.device_count())]
    if torch.backends.mps.is_available():
        devices.append(("mps", f"{processor_name()}, Metal"))
    return [{"name": name, "description": about, **_service(torch.device(name), about)} for name, about in devices]


def _service(device: torch.device, about: str) -> dict[str, str]:
    """Return which engine serves a device and what that costs, as far as it was measured (docs/performance.md)."""
    from fmtsim.support.float64 import has_float64

    if device.type == "cpu" and _cpu_engine()["available"]:
        cost = "kernels: on one core of a Xeon, casts at 0.3 to 0.97 of a copy's speed, encoding at 0.1 to 0.5"
        return {"engine": "cpu", "cost": cost}
    if device.type == "cuda" and load_engine("cuda").why_unavailable(device) is None:
        cost = "kernels: on an H200, casts at 0.59 to 0.99 of a copy's speed, encoding at 0.39 to 1.02"
        return {"engine": "cuda", "cost": cost if "H200" in about else f"{cost}; not measured on this GPU"}
    cost = "one operation after another"
    if not has_float64(device):
        cost += ", no float64: most block formats, codebooks and products need the CPU"
    return {"engine": "torch_engine", "cost": f"torch operations: {cost}; not measured here"}


def processor_name() -> str:
    """Return the processor's model name, or the machine type where the system does not say."""
    return processor_facts().get("model name") or platform.processor() or platform.machine()


def processor_facts() -> dict[str, str]:
    """Return what Linux says of a processor."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _cpu_engine() -> dict[str, Any]:
    try:
        import numba  # noqa: F401  # the one way to know that it loads: its shared libraries may not
    except Exception as error:  # numba raises plain exceptions for a numpy it does not know
        return {"name": "cpu", "available": False, "reason": f"numba cannot be imported: {error}"}
    return {"name": "cpu", "available": True, "reason": "tensors on the CPU, by numba kernels"}


_WITH_GEMM: dict[str, Any] = {"models": [], "shapes": None, "target": None, "no_gradients": False}


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print what was found; with ``--gemm`` 1 where products are left out."""
    from fmtsim.lab.analysis.gemm_scan import scan_gemm
    from fmtsim.lab.cli.products import chosen_dtypes, chosen_model

    if not arguments.gemm:
        option = next((name for name, value in _WITH_GEMM.items() if getattr(arguments, name) != value), None)
        if option is not None:
            raise ArgumentError(f"--{option.replace('_', '-').replace('models', 'model')} goes with --gemm; add it")
        record = collect_info()
        answer(arguments, record, lambda: _doctor_text(record))
        return 0
    passes = PASSES[:1] if arguments.no_gradients else PASSES
    scan = scan_gemm(
        chosen_model(arguments), arguments.target, parse_tokens(arguments.tokens), dtypes=chosen_dtypes(arguments),
        passes=passes,
    )  # fmt: skip
    answer(arguments, scan.to_dict(), lambda: str(scan))
    return MISMATCH if scan.left_out else 0


def _doctor_text(record: dict[str, Any]) -> str:
    """Return the lines of ``fmtsim info`` that name what is missing."""
    versions = record["versions"]
    lines = [", ".join(f"{name} {versions[name]}" for name in ("fmtsim", "torch", "python"))]
    lines += [f"{device['name']}: {device['description']}, by {device['engine']}" for device in record["devices"]]
    lines += [f"no engine {x['name']}: {x['reason']}" for x in record["engines"] if not x["available"]]
    return "\n".join([*lines, "fmtsim info says more; fmtsim doctor --gemm looks through a model's products"])


def run_warmup(arguments: argparse.Namespace) -> int:
    """Compile, and print how many kernels were compiled in how many seconds, and where they are kept."""
    if arguments.device is None:
        devices = [torch.device("cpu"), *([torch.device("cuda")] if load_engine("cuda").available() else [])]
    else:
        check_device(arguments.device)
        device = torch.device(arguments.device)
        if device.type not in ("cpu", "cuda"):
            raise ArgumentError(f"--device {arguments.device} has no kernels to compile; choose cpu, cuda or cuda:1")
        devices = [device]
    compilation.expect_compiling()
    rows = []
    with make_progress(False if arguments.quiet else None, transient=True) as progress:
        for device in devices:
            before, start = len(compilation.compiled), time.perf_counter()
            ready = _on_cpu(progress) if device.type == "cpu" else _on_gpu(device, progress)
            compiled, seconds = len(compilation.compiled) - before, time.perf_counter() - start
            folder = kernel_folder(device.type)
            rows.append({"device": str(device), "ready": ready, "compiled": compiled, "seconds": seconds,
                          "folder": None if folder is None else str(folder)})  # fmt: skip
    answer(arguments, rows, lambda: _warmup_text(rows))
    return 0


def _on_cpu(progress: Progress) -> str:
    """Run the usual calls, and return how many there were."""
    from fmtsim.lab.cli.usual_calls import usual_calls

    calls = list(usual_calls())
    progress.stage("cpu", len(calls))
    for done, (name, call) in enumerate(calls):
        progress.step(done, name)
        call()
    progress.step(len(calls))
    return f"{len(calls)} casts, products and steps"


def _on_gpu(device: torch.device, progress: Progress) -> str:
    """Compile and load the kernels of a GPU, and return how many there are."""

    def advance(done: int, total: int) -> None:
        if not done:
            progress.stage(str(device), total)
        progress.step(done)

    return f"{load_engine('cuda').warmup(device, advance=advance)} kernels"


def _warmup_text(found: list[dict[str, Any]]) -> str:
    rows = [(row["device"], row["ready"], f"{row['compiled']:,}", f"{row['seconds']:.1f}",
             row["folder"] or "nowhere: every process compiles anew") for row in found]  # fmt: skip
    table = format_table(("device", "ready", "compiled now", "seconds", "kept in"), rows, left=(0, 1, 4))
    return f"{table}\nkernels that rarer calls take are still compiled by the first of these"


class Argument(NamedTuple):
    """What a shell has to know of an argument: option strings, none of a positional one, and what may follow."""

    names: Sequence[str]
    takes_value: bool
    words: tuple[str, ...]
    help: str


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the script."""
    commands = {name: list(_arguments_of(name)) for name in COMMANDS}
    print(SHELLS[arguments.shell](commands))
    return 0


def _arguments_of(command: str) -> Iterator[Argument]:
    subparsers = next(a for a in build_parser(command)._actions if isinstance(a, argparse._SubParsersAction))
    for action in subparsers.choices[command]._actions:
        if action.help != argparse.SUPPRESS:
            yield Argument(action.option_strings, action.nargs != 0, offered(action), action.help or "")


def bash(commands: dict[str, list[Argument]]) -> str:
    """Return a script for bash."""
    values, first = [], []
    for command, arguments in commands.items():
        options = " ".join(name for argument in arguments for name in argument.names)
        words = " ".join(word for argument in arguments if not argument.names for word in argument.words)
        first.append(f"        {command}) options={shlex.quote(options)} words={shlex.quote(words)} ;;")
        for argument in arguments:
            if argument.names and argument.takes_value:
                pattern = "|".join(f"'{command} {name}'" for name in argument.names)
                values.append(f"        {pattern}) options='' words={shlex.quote(' '.join(argument.words))} ;;")
    return _BASH.format(commands=" ".join(commands), first="\n".join(first), values="\n".join(values))


def zsh(commands: dict[str, list[Argument]]) -> str:
    """Return a script for zsh, which takes those of bash."""
    return f"autoload -U +X bashcompinit && bashcompinit\n{bash(commands)}"


def fish(commands: dict[str, list[Argument]]) -> str:
    """Return a script for fish, which shows what each word means."""
    lines = ["complete -c fmtsim -n __fish_use_subcommand -l help -s h -d 'show help'"]
    for command, arguments in commands.items():
        lines.append(f"complete -c fmtsim -f -n __fish_use_subcommand -a {command} -d {_quoted(COMMANDS[command])}")
        for argument in arguments:
            line = f"complete -c fmtsim -n '__fish_seen_subcommand_from {command}'"
            for name in argument.names:
                line += f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}"
            if argument.takes_value and argument.names:
                line += " -x" if argument.words else " -r"
            if argument.words:
                line += f" -a {_quoted(' '.join(argument.words))}"
            if argument.names or argument.words:
                lines.append(f"{line} -d {_quoted(argument.help)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS: dict[str, Callable[[dict[str, list[Argument]]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}

# Bash takes --option=value for three words.
_BASH = """\
_fmtsim() {{
    local current=$2 before=${{COMP_WORDS[COMP_CWORD-1]}} options= words=
    if [[ $current == = ]]; then current=
    elif [[ $before == = ]]; then before=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    case ${{COMP_WORDS[1]}} in
{first}
    esac
    case "${{COMP_WORDS[1]}} $before" in
{values}
    esac
    if ((COMP_CWORD == 1)); then options='--help --version' words='{commands}'; fi
    if [[ $current == -* ]]; then words=$options; fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o bashdefault -o default -F _fmtsim fmtsim"""
