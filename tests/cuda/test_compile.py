"""Every kernel compiles for every architecture, without a GPU."""

import collections
import functools

import pytest

import fmtsim.cuda
from fmtsim.cuda import runtime, warm

REASON = runtime.why_not_compiling()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

ALWAYS = ("sm_80", "sm_90", "sm_100a", "sm_120a")
SAMPLES = 4  # programs of a file that are compiled by default
TOGETHER = 4  # programs compiled in one test


def capability(arch):
    number = int(arch.removeprefix("sm_").rstrip("a"))
    return number // 10, number % 10


@functools.cache
def programs(module, arch):
    """Return the files and macros of a module with the kernels of each: those compiled by default, and the rest.

    By default the first program of a file is compiled for all of the usual architectures, and a few others for one of
    them each, in turn.
    """
    found = {}
    for file, name, defines in warm.variants_of(module, capability(arch)):
        found.setdefault((file, defines), set()).add(name)
    counts = collections.Counter(file for file, _ in found)
    places = collections.Counter()
    usual, rest = {}, {}
    for (file, defines), names in found.items():
        sample, between = divmod(places[file], -(-counts[file] // SAMPLES))
        first, turn = places[file] == 0, between == 0 and ALWAYS[sample % len(ALWAYS)] == arch
        places[file] += 1
        (usual if arch in ALWAYS and (first or turn) else rest)[file, defines] = names
    return list(usual.items()), list(rest.items())


def cases():
    for arch in runtime.ARCHITECTURES:
        for module in warm.sources():
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
    files = {file for arch in ALWAYS for file, _, _ in warm.variants(capability(arch))}
    assert files == {path.name for path in runtime.KERNELS.glob("*.cu")}


@pytest.mark.skipif(not fmtsim.cuda.available(), reason="needs a GPU")
def test_warmup_loads_every_kernel():
    count = fmtsim.cuda.warmup()
    assert count == len(warm.variants(runtime.capability(0)))
    loaded = runtime.kernel.cache_info().currsize
    assert loaded >= count
    assert fmtsim.cuda.warmup(0) == count and runtime.kernel.cache_info().currsize == loaded


def test_warmup_says_why_it_cannot():
    if not fmtsim.cuda.available():
        with pytest.raises(fmtsim.DeviceError, match="torch .* was built without CUDA|sees no CUDA device|cuda-core"):
            fmtsim.cuda.warmup()
