# SPDX-License-Identifier: Apache-2.0
"""The cache of compiled kernels, and what a call costs in memory: each in processes of its own."""

import os
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from fmtsim.cpu.runtime.kernel_cache import cache_folder
from tests.support.casts import slow_but

CALLS = {  # and the three numbers that they print: the first compiles in a second, the others in ten and more
    "decode": ("fmtsim.decode(torch.tensor([29, 126, 197], dtype=torch.uint8), 'e4m3')", "[0.1015625, 448.0, -3.25]"),
    "e4m3": ("fmtsim.quantize(torch.tensor([0.1, 500.0, -3.3]), 'e4m3')", "[0.1015625, 448.0, -3.25]"),
    "mxfp4": ("fmtsim.quantize(torch.tensor([0.1, 500.0, -3.3]).repeat(11), 'mxfp4', pad=True)", "[0.0, 384.0, -0.0]"),
}


def run_script(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a new process with every warning shown, and return what it printed."""
    script = "import torch, fmtsim, sys\n" + textwrap.dedent(source)
    environment = {"FMTSIM_CACHE_DIR": "", **environment}
    command = [sys.executable, "-W", "always::UserWarning", "-c", script]
    result = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr
    return result


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the files below a folder with their time of change and size."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_size) for path in found}


@pytest.mark.parametrize("name", slow_but(1, *CALLS))
def test_kernels_are_compiled_once_for_all_processes(name, tmp_path):
    """The second process loads what the first one compiled, of code that keys go over; it compiles nothing."""
    compiled = """
    from numba.core import event
    from fmtsim.cpu.runtime import kernel_cache as keys
    recorder, codes, original = event.RecordingListener(), set(), keys._code
    event.register("numba:compile", recorder)
    keys._code = lambda code: (codes.add(code), original(code))[1]
    """
    call = f"print({CALLS[name][0]}.tolist()[:3])\n"
    count = """
    functions = [entry.data["dispatcher"].py_func for _, entry in recorder.buffer if entry.is_start]
    ours = [function for function in functions if function.__module__.startswith("fmtsim.")]
    print(len(ours), [function.__qualname__ for function in ours if function.__code__ not in codes])
    """
    script = "".join(map(textwrap.dedent, (compiled, call, count)))
    first = run_script(script, FMTSIM_CACHE_DIR=str(tmp_path))
    kept = files(tmp_path)
    second = run_script(script, FMTSIM_CACHE_DIR=str(tmp_path))
    assert kept and all(re.fullmatch(r"cpu/cast[a-z_.]+-[0-9a-f]{32}\.bin", name) for name in kept)
    assert files(tmp_path) == kept
    printed, compilations = zip(*(result.stdout.split("\n")[:2] for result in (first, second)), strict=True)
    assert printed == (CALLS[name][1],) * 2
    assert re.fullmatch(r"[1-9]\d* \[\]", compilations[0])  # a listener that sees nothing would prove nothing
    assert compilations[1] == "0 []"
    assert (first.stderr, second.stderr) == ("", "")


def test_the_cache_lies_where_the_environment_says(tmp_path, monkeypatch):
    """``FMTSIM_CACHE_DIR``, else ``XDG_CACHE_HOME``, else the home folder."""
    variables = {name: tmp_path / name for name in ("FMTSIM_CACHE_DIR", "XDG_CACHE_HOME", "HOME")}
    for name, folder in variables.items():
        monkeypatch.setenv(name, str(folder))
    for name, below in (("FMTSIM_CACHE_DIR", ""), ("XDG_CACHE_HOME", "fmtsim"), ("HOME", ".cache/fmtsim")):
        folder = cache_folder.__wrapped__()
        assert folder.parent == variables[name] / below and folder.is_dir()
        monkeypatch.setenv(name, "")


def test_the_cache_of_this_process_is_quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache_folder() is not None


# Memory.

MEASURE = """
def peak(call):
    call()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    call()
    return status("VmHWM") - before

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))

torch.set_num_threads(THREADS)
x = torch.randn(SIZE, generator=torch.Generator().manual_seed(1)).view(-1, 4096)
out = torch.empty_like(x)
noisy = {"rounding": "stochastic", "generator": 3}
calls = {
    "e4m3": lambda: fmtsim.quantize(x, "e4m3", out=out),
    "stochastic": lambda: fmtsim.quantize(x, "e4m3", out=out, **noisy),
    "mxfp4": lambda: fmtsim.quantize(x, "mxfp4", out=out),
    "nvfp4": lambda: fmtsim.quantize(x, "nvfp4", out=out),
    "mxfp4 stochastic": lambda: fmtsim.quantize(x, "mxfp4", out=out, **noisy),
    "int8_channel": lambda: fmtsim.quantize(x, "int8_channel", out=out),
    "e4m3 in place": lambda: fmtsim.quantize_(out, "e4m3"),
    "planted": lambda: out.copy_(x + 1),
}
for name, call in calls.items():
    print(name, peak(call), sep=":")
"""


def peaks(elements: int, threads: int) -> dict[str, int]:
    """Return how many kB the second call of each kind adds at its peak to what the process held."""
    source = MEASURE.replace("SIZE", str(elements)).replace("THREADS", str(threads))
    lines = run_script(source, FMTSIM_CACHE_DIR=os.environ.get("FMTSIM_CACHE_DIR", "")).stdout.split("\n")
    return {name: int(size) for name, size in (line.rsplit(":", 1) for line in lines if line)}


def check_peaks(elements: int, threads: int) -> None:
    found = peaks(elements, threads)
    assert found.pop("planted") >= elements * 4 // 1024 * 9 // 10  # a temporary of x's size is seen
    assert {name: size for name, size in found.items() if size >= 1000} == {}


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
def test_out_needs_less_than_a_megabyte():
    check_peaks(1 << 22, threads=2)


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
@pytest.mark.parametrize("threads", [1, 2])
def test_out_of_16_million_elements_needs_less_than_a_megabyte(threads):
    check_peaks(1 << 24, threads)
