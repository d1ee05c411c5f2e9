# SPDX-License-Identifier: Apache-2.0
"""The emulator itself: barriers, lanes, products of matrices and roundings, against plain Python."""

import math
import re
import shutil
import struct
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from fmtsim.cuda.runtime import program as runtime
from tests.cuda import emulator
from tests.cuda.emulator import EmulatorError, HostKernel, kernels

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs a C++ compiler (g++)")

KERNELS = runtime.KERNELS  # a test's fixture puts others there
SOURCE = Path(__file__).with_name("trial.cu")


@pytest.fixture(autouse=True, scope="module")
def sources(tmp_path_factory):
    """Put the kernels of this file where the engine's are looked for."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "common.cuh").write_text((runtime.KERNELS / "include" / "common.cuh").read_text())
    (folder / SOURCE.name).write_text(SOURCE.read_text())
    patch = pytest.MonkeyPatch()
    patch.setattr(runtime, "KERNELS", folder)
    yield
    patch.undo()


def kernel(name, **options):
    return HostKernel("trial.cu", name, (), **options)


def zeros(count, dtype=torch.int32):
    return torch.zeros(count, dtype=dtype)


@pytest.mark.parametrize("reversed_order", [False, True])
def test_barriers_shared_memory_and_threads_that_end(reversed_order):
    x, y = torch.arange(1000, dtype=torch.int32), zeros(1000)
    kernel("barriers", reversed_order=reversed_order)(4, 256, x, y, np.int64(1000), shared=1024)
    wanted = torch.cat([part.sum(dtype=torch.int32).expand(len(part)) for part in x.split(256)])
    assert torch.equal(y, wanted)


def test_a_missing_barrier_shows_where_the_order_is_reversed():
    forward, backward = zeros(32), zeros(32)
    kernel("race")(1, 32, forward)
    kernel("race", reversed_order=True)(1, 32, backward)
    assert forward[31] == 7 and backward[0] == 7 and not torch.equal(forward, backward)


def test_deadlocks_and_writes_behind_shared_memory_are_errors():
    with pytest.raises(EmulatorError, match="deadlock.*thread 3 at __syncwarp"):
        kernel("stuck")(1, 32, zeros(32))
    with pytest.raises(EmulatorError, match="wrote behind its 64 bytes"):
        kernel("behind")(1, 1, zeros(1), shared=64)
    kernel("behind")(1, 1, zeros(1), shared=65)


def test_arguments_are_held_to_the_signature():
    x = zeros(4)
    with pytest.raises(EmulatorError, match="argument 2 of barriers is an integer of 8 bytes"):
        kernel("barriers")(1, 4, x, x, np.int32(4), shared=64)
    with pytest.raises(EmulatorError, match="takes 3 arguments, not 2"):
        kernel("barriers")(1, 4, x, x)
    with pytest.raises(EmulatorError, match="argument 0 of race is a pointer"):
        kernel("race")(1, 4, np.int64(0))
    with pytest.raises(TypeError, match="wrap it in a numpy scalar"):
        kernel("barriers")(1, 4, x, x, 4)
    with pytest.raises(EmulatorError, match="cannot be launched"):
        kernel("race")(1, 2048, x)


def test_structures_are_passed_as_bytes():
    y, numbers = zeros(1, torch.float64), struct.pack("if3d", 1, 2.5, 3, 4, 5)
    kernel("structure")(1, 1, numbers, y)
    assert y.item() == 8.5
    with pytest.raises(EmulatorError, match="argument 0 of structure is a structure of 32 bytes"):
        kernel("structure")(1, 1, numbers[:8], y)


def test_lanes():
    x, y, votes = torch.arange(32) * 2 + 1, zeros(160, torch.int64), zeros(160, torch.int32)
    kernel("lanes")(1, 32, x, y, votes)
    t = torch.arange(32)
    up = torch.where(t % 8 >= 2, t - 2, t)
    down = torch.where(t % 16 + 3 < 16, t + 3, t)
    wanted = [x[5].expand(32), x[t ^ 3], x[up], x[down], x[t ^ 1] + x[t ^ 2]]
    assert torch.equal(y, torch.cat(wanted))
    ballot = sum(1 << int(lane) for lane in t if x[lane] % 3 == 0)
    low = [1] * 16 + [int(x[16]) + 1000] * 16
    wanted = [ballot] * 32 + [0b01] * 32 + [63] * 32 + [int(x.sum())] * 32 + low
    assert [value & 0xFFFFFFFF for value in votes.tolist()] == wanted


def test_three_dimensions():
    y = zeros(2 * 3 * 2 * 24)
    kernel("places")((2, 3, 2), (4, 3, 2), y)
    assert y.tolist() == [block * 1000 + thread for block in range(12) for thread in range(24)]


def test_copies_land_when_they_are_waited_for():
    x, y = torch.arange(128, dtype=torch.int32), zeros(128)
    kernel("copies")(1, 32, x, y, np.int32(1))
    assert torch.equal(y, x[torch.arange(128) ^ 64])
    kernel("copies")(1, 32, x, y, np.int32(0))  # a wait that is missing
    assert (y == -0x32323233).all()


def exact(value, mode, precision, lowest):
    """Round a fraction to a binary float; mode is "rn", "rz", "ru" or "rd"."""
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = math.floor(math.log2(size.numerator) - math.log2(size.denominator))
    exponent += (size >= Fraction(2) ** (exponent + 1)) - (size < Fraction(2) ** exponent)
    step = Fraction(2) ** (max(exponent, lowest) - precision + 1)
    down = size // step
    rest = size - down * step
    up = {
        "rn": rest * 2 > step or (rest * 2 == step and down % 2 == 1),
        "rz": False,
        "ru": value > 0 and rest > 0,
        "rd": value < 0 and rest > 0,
    }[mode]
    return math.copysign(float((down + up) * step), value)


MODES = ("rn", "rz", "ru", "rd")


def numbers(count, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(3, count, generator=generator, dtype=torch.float64)
    return (size * 2.0 ** torch.randint(-12, 12, (3, count), generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_roundings_are_exact(dtype):
    a, b, c = numbers(60, 7, dtype)
    c[:30] = -(a * b)[:30]  # cancellation: one rounding of a fused operation is not two
    narrow = dtype == torch.float32
    y = zeros((6 if narrow else 4) * 4 * 60, dtype)
    kernel("rounded" if narrow else "rounded64")(1, 1, a, b, c, y, np.int32(60))
    y = y.view(-1, 4, 60)
    for i, (p, q, r) in enumerate(zip(*(map(Fraction, part.tolist()) for part in (a, b, c)), strict=True)):
        values = [p + q, p * q, p / q, p * q + r]
        if narrow:
            values += [p * q, Fraction(int(float(p) * 1e9))]
        for kind, value in enumerate(values):
            for place, mode in enumerate(MODES):
                wanted = exact(value, mode, 24 if narrow else 53, -126 if narrow else -1022)
                assert y[kind, place, i].item() == wanted, (kind, mode, p, q, r)


def test_plain_operations_beside_directed_ones_are_rounded_to_nearest():
    a = numbers(60, 11, torch.float32)[0]
    y = zeros(120, torch.float32)
    kernel("beside")(1, 1, a, y, np.int32(60))
    assert torch.equal(y[:60], a.round()) and torch.equal(y[60:], a + torch.tensor(1.0) / 3.0)


def test_conversions_to_integers_saturate():
    a = torch.tensor([1.5, 2.5, -1.5, -0.25, 3e9, -3e9, math.inf, -math.inf, math.nan])
    y = zeros(36)
    kernel("whole")(1, 1, a, y, np.int32(9))
    high, low = 2**31 - 1, -(2**31)
    ends = [high, low, high, low, 0]
    wanted = [[2, 2, -2, 0, *ends], [1, 2, -1, 0, *ends], [2, 3, -1, 0, *ends], [1, 2, -2, -1, *ends]]
    assert y.view(4, 9).tolist() == wanted


def test_words():
    y = zeros(16)
    a = torch.tensor([0x12348687, 0x7FFF0001], dtype=torch.int32)
    kernel("words")(1, 1, a, y)
    p, q = 0x12348687, 0x7FFF0001
    both = q << 32 | p
    wanted = [
        0x7F000000 | 0x0000 << 16 | 0x8687, (both << 8 & (1 << 64) - 1) >> 32, both >> 8 & 0xFFFFFFFF, q,
        p * q >> 32, p * q >> 32, 0x7FFF0001, 0x7FFF8688, (0x1234 + 0x7FFF - 65536 > 1) << 16 | 1 | 1 << 16,
        (0x12 * 0x7F + 0x34 * -1 + 0 + (0x87 - 256) * 1 + 5) & 0xFFFFFFFF, int(f"{p:032b}"[::-1], 2),
        1 << 16 | p.bit_count() << 8, p * q >> 32, 1 << 31, 0x7FFFFFFF, 5,
    ]  # fmt: skip
    assert [value & 0xFFFFFFFF for value in y.tolist()] == wanted


def test_what_does_not_compile_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken.cu").write_text("KERNEL broken() { nothing(); }")
    monkeypatch.setattr(runtime, "KERNELS", tmp_path)
    with pytest.raises(EmulatorError, match="broken.cu does not compile for the host"):
        HostKernel("broken.cu", "broken")


def test_kernels_are_compiled_once_for_all_checkouts(tmp_path, monkeypatch):
    """The checks of a copy of the tree take what was compiled for the tree."""
    kernel("lanes")
    shutil.copytree(kernels.HERE, tmp_path / "emulator")
    monkeypatch.setattr(kernels, "HERE", tmp_path / "emulator")
    monkeypatch.setattr(kernels.subprocess, "run", lambda command, **how: pytest.fail(f"compiled again: {command}"))
    kernels._library.cache_clear()
    kernel("lanes")


def test_the_pretended_device(emulated):
    index = runtime.device_index(torch.zeros(1))
    assert runtime.available() and runtime.capability(index) == (9, 0) and runtime.architecture(index) == "sm_90"
    y = zeros(32)
    runtime.kernel("trial.cu", "race", index)(1, 32, y)
    assert y[31] == 7


def test_operands_of_assembler_are_all_there_and_registers_in_order():
    """The emulator replaces assembler: only its text shows here that no register stands twice or is left out."""
    counts = []
    for file in sorted(KERNELS.rglob("*.cu*")):
        for statement in re.findall(r"\basm(?: volatile)?\(\s*\"(.*?)\);", file.read_text(), re.DOTALL):
            operands = re.findall(r'"[=+]?[a-z]"\s*\(', statement)
            numbers = {int(number) for number in re.findall(r"%(\d+)", statement)}
            assert numbers in (set(range(len(operands))), set()), (file.name, statement)
            arrays = defaultdict(list)
            for array, place in re.findall(r'"\((\w+)\[(\d+)\]\)', statement):
                arrays[array].append(int(place))
            assert all(places == list(range(len(places))) for places in arrays.values()), (file.name, statement)
            counts.append((len(operands), [len(places) for places in arrays.values()]))
    assert (69, [64]) in counts and (16, [4, 8, 4]) in counts and len(counts) > 30
