# SPDX-License-Identifier: Apache-2.0
"""The engine's threads: how many, whose errors, and life after fork and among Python's own threads."""

import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fmtsim
from fmtsim.cpu.runtime import pool
from tests.support.bits import assert_same_bits
from tests.support.operands import normal

LARGE = 1 << 18  # four times what one thread takes


def run_script(source: str, timeout: int = 100, **environment: str) -> str:
    """Run a script in a new process and return what it prints; an error or a hang of it fails the test."""
    script = "import torch, fmtsim, os, sys\n" + textwrap.dedent(source)
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# How many.


def test_the_number_of_threads():
    torch.set_num_threads(1)
    assert fmtsim.get_num_threads() == 1
    torch.set_num_threads(2)
    assert fmtsim.get_num_threads() == 2
    fmtsim.set_num_threads(3)
    assert (fmtsim.get_num_threads(), torch.get_num_threads()) == (3, 2)
    fmtsim.set_num_threads(None)
    assert fmtsim.get_num_threads() == 2


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", [1]])
def test_numbers_of_threads_that_are_not_possible(count):
    fmtsim.set_num_threads(2)
    with pytest.raises(fmtsim.errors.ArgumentError) as caught:
        fmtsim.set_num_threads(count)
    expected = f"count={count!r} threads are not possible; choose 1 or more, or None for torch's setting"
    assert str(caught.value) == expected
    assert fmtsim.get_num_threads() == 2


@pytest.mark.parametrize(("count", "threads", "align", "weight"), [
    (0, 2, 1, 1), (1, 2, 1, 1), (LARGE, 1, 64, 1), (LARGE, 2, 64, 1), (LARGE + 1, 2, 64, 1), (LARGE + 63, 3, 64, 1),
    (5, 4, 1, 1 << 20), (100, 3, 7, 1 << 20), (3, 8, 1, 1 << 20),
])  # fmt: skip
def test_parts_cover_everything_once(count, threads, align, weight):
    pool.set_num_threads(threads)
    seen: list[tuple[int, int]] = []
    names = set()

    def part(start: int, stop: int) -> None:
        seen.append((start, stop))
        names.add(threading.current_thread().name)

    pool.run(part, count, align, weight)
    seen.sort()
    edges = [edge for piece in seen for edge in piece]
    assert edges[0::2] == [0, *edges[1:-1:2]][: len(seen)] and edges[-1:] == [count][: len(edges)]
    assert all(start % align == 0 and start < stop for start, stop in seen)
    assert len(seen) <= threads
    assert all(name == threading.current_thread().name or name.startswith("fmtsim") for name in names)


def test_small_work_stays_on_the_calling_thread():
    pool.set_num_threads(4)
    seen = []
    pool.run(lambda start, stop: seen.append(threading.current_thread()), 1000, align=1)
    assert seen == [threading.current_thread()]


@pytest.mark.parametrize("bad", [0, 1])
def test_errors_of_a_part_arrive_after_all_parts_have_ended(bad):
    """Whether the calling thread's part fails or another's; a part that still runs would write after the return."""
    pool.set_num_threads(2)
    ended = []

    def part(start: int, stop: int) -> None:
        if (start > 0) == bool(bad):
            raise ValueError(f"part at {start}")
        threading.Event().wait(0.05)
        ended.append(start)

    with pytest.raises(ValueError, match="part at"):
        pool.run(part, LARGE, align=64)
    assert len(ended) == 1
    assert_same_bits(fmtsim.quantize(normal(LARGE), "e4m3"), one_thread(normal(LARGE), "e4m3"), what="afterwards")


def one_thread(x: torch.Tensor, name: str, **options) -> torch.Tensor:
    before = fmtsim.get_num_threads()
    pool.set_num_threads(1)
    try:
        return fmtsim.quantize(x, name, **options)
    finally:
        pool.set_num_threads(before)


# The same bits.


@pytest.mark.parametrize("name", ["e4m3", "nf4", "mxfp4", "nvfp4", "e4m3_128x128", "int8_channel", "int8_tensor",
                                  "uint4_g32_zp"])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_threads_give_the_bits_of_one(name, dtype):
    x = normal(512, 640).to(dtype)
    x[3, 7], x[300, 2], x[511, 639] = torch.nan, torch.inf, 1e30
    expected = one_thread(x, name)
    codes = [encode_with(threads, x, name) for threads in (1, 2)]
    pool.set_num_threads(2)
    assert_same_bits(fmtsim.quantize(x, name), expected, what=name)
    assert_same_bits(fmtsim.quantize_(x.clone(), name, dim=0), one_thread(x, name, dim=0, out_dtype=dtype), what=name)
    assert_same_bits(codes[1].decode(), codes[0].decode(), what=name)
    assert torch.equal(codes[0].codes, codes[1].codes)


def encode_with(threads: int, x: torch.Tensor, name: str) -> fmtsim.Encoded:
    pool.set_num_threads(threads)
    return fmtsim.encode(x, name)


def test_python_threads_may_quantise_at_once():
    """Eight threads, sixteen tensors, the engine's own threads below them: every result is its own."""
    pool.set_num_threads(2)
    names = ["e4m3", "mxfp4", "nvfp4", "e2m1"]
    tensors = [normal(64, 2048 + 32 * seed, seed=seed) for seed in range(16)]
    expected = [one_thread(x, names[i % 4]) for i, x in enumerate(tensors)]
    with ThreadPoolExecutor(8) as workers:
        for _ in range(3):
            results = workers.map(lambda i: fmtsim.quantize(tensors[i], names[i % 4]), range(16))
            for i, result in enumerate(results):
                assert_same_bits(result, expected[i], what=names[i % 4])


@pytest.mark.slow
def test_python_threads_may_make_the_first_call(tmp_path):
    """Four threads that all compile the same kernel, on a machine that has none yet."""
    printed = run_script(
        """
        from concurrent.futures import ThreadPoolExecutor
        x = torch.linspace(-3, 3, 100_000)
        with ThreadPoolExecutor(4) as workers:
            results = list(workers.map(lambda _: fmtsim.quantize(x, "e4m3", out_dtype=torch.float64), range(4)))
        print(all(torch.equal(results[0], other) for other in results), results[0].sum().item())
        """,
        FMTSIM_CACHE_DIR=str(tmp_path),
    )
    x = torch.linspace(-3, 3, 100_000)
    assert printed.split() == ["True", str(fmtsim.quantize(x, "e4m3", out_dtype=torch.float64).sum().item())]


# Life after fork.

FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


@FORK
def test_forked_children_and_workers_of_a_data_loader_quantise():
    """The parent's pool threads are not in the child; work given to them would wait for ever.

    The second child is the planted error: it puts the parent's pool back, and waits until its alarm ends it.
    """
    printed = run_script(
        """
        import signal, warnings
        from fmtsim.cpu.runtime import pool
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of every fork among threads
        fmtsim.set_num_threads(2)
        x = torch.randn(1 << 18)
        cases = [("e4m3", {}), ("e4m3", {"rounding": "stochastic", "generator": 1}), ("mxfp4", {}), ("nvfp4", {})]
        def results():
            return [fmtsim.quantize(x, name, **options) for name, options in cases]
        def same():  # nothing that torch runs on OpenMP's threads, which do not survive a fork either
            return all(torch.equal(*pair) for pair in zip(results(), expected, strict=True))
        def fork(alarm, kept):
            child = os.fork()
            if child == 0:
                signal.setitimer(signal.ITIMER_REAL, alarm)
                pool._pool = kept
                os._exit(0 if same() else 3)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        expected = results()
        print("child", fork(60, None), "planted", fork(0.5, pool._pool) == -signal.SIGALRM)
        print("parent", same())
        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 6
            def __getitem__(self, i):
                x = torch.randn(1 << 17, generator=torch.Generator().manual_seed(i))
                return fmtsim.quantize(x, "mxfp4"), fmtsim.quantize(x, "e4m3", rounding="stochastic", generator=i)
        rows = Rows()
        here = [rows[i] for i in range(6)]
        loader = torch.utils.data.DataLoader(rows, num_workers=2, batch_size=None, multiprocessing_context="fork")
        rows_of = zip(loader, here, strict=True)
        print("workers", all(torch.equal(a, b) for there, row in rows_of for a, b in zip(there, row)))
        """
    )
    assert printed.split() == ["child", "0", "planted", "True", "parent", "True", "workers", "True"]
