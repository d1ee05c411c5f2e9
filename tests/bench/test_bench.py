"""``fmtsim.bench``: what it measures, on sizes that take no time. Speed itself is not tested."""

import pytest
import torch

from fmtsim.bench import cpu, overheads
from fmtsim.bench.overheads import Overhead
from fmtsim.cpu.runtime import pool
from fmtsim.formats.registry import get_format


def test_every_case_names_a_format_and_a_target():
    assert len({case.name for case in cpu.CASES}) == len(cpu.CASES)
    for case in cpu.CASES:
        get_format(case.format)
        assert 0 < case.target < 1


@pytest.mark.parametrize("name", ["e4m3 nearest", "e4m3 stochastic", "nvfp4"])
def test_a_case_is_measured_for_each_thread_count(name):
    (case,) = [case for case in cpu.CASES if case.name == name]
    before = torch.get_num_threads(), pool.get_num_threads()
    result = cpu.measure(case, side=128, threads=(1, 2), repeats=2)
    assert (torch.get_num_threads(), pool.get_num_threads()) == before
    assert set(result.seconds) == set(result.base_seconds) == {1, 2}
    record = result.to_dict()
    assert record["elements"] == 128 * 128
    assert record["threads"]["1"]["speedup"] == 1.0
    assert record["threads"]["1"]["ratio_to_copy"] == result.base_seconds[1] / result.seconds[1]
    assert record["met"] == (result.ratio(1) >= case.target)


def test_the_ratio_is_the_share_of_a_copys_speed():
    result = cpu.Result(case=cpu.CASES[0], elements=1, seconds={1: 4.0, 2: 2.0}, base_seconds={1: 2.0, 2: 1.0})
    assert result.ratio(1) == result.ratio(2) == 0.5
    assert not result.met


def test_import_time_is_measured_in_a_new_process():
    overhead = overheads.import_time(repeats=1)
    assert overhead.unit == "s"
    assert 0 < overhead.value < 60


def test_limits_are_upper_limits():
    assert Overhead(name="x", value=1.0, limit=1.0, unit="s").met is True
    assert Overhead(name="x", value=1.1, limit=1.0, unit="s").met is False
    assert Overhead(name="x", value=None, limit=1.0, unit="s").met is None


@pytest.mark.slow
def test_first_calls_and_memory_are_measured():
    assert all(overhead.value > 0 for overhead in overheads.first_calls("casts", repeats=1))
    assert all(overhead.value is None or overhead.value >= 0 for overhead in overheads.extra_memory("casts", side=256))
