# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every architecture, without a GPU."""

import functools

import pytest

import fmtsim.cuda
from fmtsim.cuda import runtime
from fmtsim.cuda.runtime.program import sources, variants, variants_of
from tests.cuda.nvrtc import needs_nvrtc

pytestmark = needs_nvrtc

FILES = sorted(path.name for path in runtime.KERNELS.rglob("*.cu"))
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_100a", "sm_103", "sm_120", "sm_120a")
ALWAYS = ("sm_80", "sm_90", "sm_100a", "sm_120a")
TOGETHER = 4  # programs compiled in one test


def capability(arch):
    number = int(arch.removeprefix("sm_").rstrip("a"))
    return number // 10, number % 10


@functools.cache
def files(module, arch):
    return {file for file, _, _ in variants_of(module, capability(arch))}


@functools.cache
def programs(module, arch):
    """Return the files and macros of a module with the kernels of each: those compiled by default, and the rest.

    By default the first program of each file is compiled, for one of the usual architectures that have it, in turn.
    """
    found = {}
    for file, name, defines in variants_of(module, capability(arch)):
        found.setdefault((file, defines), set()).add(name)
    usual, rest, seen = {}, {}, set()
    for (file, defines), names in found.items():
        having = [each for each in ALWAYS if file in files(module, each)]
        turn = bool(having) and having[FILES.index(file) % len(having)] == arch
        (usual if turn and file not in seen else rest)[file, defines] = names
        seen.add(file)
    return list(usual.items()), list(rest.items())


def cases():
    for arch in ARCHITECTURES:
        for module in sources():
            for which, marks in enumerate(((), (pytest.mark.slow,))):
                for first in range(0, len(programs(module, arch)[which]), TOGETHER):
                    name = f"{arch}-{module.removeprefix('fmtsim.cuda.')}-{('usual', 'rest')[which]}-{first}"
                    yield pytest.param(module, arch, which, first, marks=marks, id=name)


@pytest.mark.parametrize(("module", "arch", "which", "first"), list(cases()))
def test_kernels_compile(module, arch, which, first):
    for (file, defines), names in programs(module, arch)[which][first : first + TOGETHER]:
        code = runtime.compiled(file, arch, defines)
        for name in names:
            assert name.encode() in code.code, f"{file} has no kernel {name} on {arch} with {defines}"


def test_every_file_of_kernels_is_compiled():
    pairs = [(module, arch) for module in sources() for arch in ALWAYS]
    usual = {file for module, arch in pairs for (file, _), _ in programs(module, arch)[0]}
    assert usual == set(FILES)


@pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")
def test_warmup_loads_every_kernel():
    count = fmtsim.cuda.warmup()
    assert count == len(variants(runtime.capability(0)))
    loaded = runtime.kernel.cache_info().currsize
    assert loaded >= count
    assert fmtsim.cuda.warmup(0) == count and runtime.kernel.cache_info().currsize == loaded


def test_warmup_says_why_it_cannot():
    if not fmtsim.cuda.available():
        with pytest.raises(fmtsim.errors.DeviceError, match="torch .* was built without CUDA|sees no CUDA|cuda-core"):
            fmtsim.cuda.warmup()
