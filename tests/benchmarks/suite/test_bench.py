# SPDX-License-Identifier: Apache-2.0
"""What is measured, and what records and tables say of it."""

import itertools
import json
import subprocess
import sys

import pytest
import torch

from benchmarks.suite import cpu, gemm, overheads, simulated, timing, variants
from benchmarks.suite.__main__ import main, product_table
from benchmarks.suite.against import Figure, figures
from benchmarks.suite.gemm import CASES, Case, Result, case_named, measure, product_of
from benchmarks.suite.overheads import Overhead
from benchmarks.suite.timing import in_turns, processor
from fmtsim.cpu.runtime import pool
from fmtsim.formats.registry import get_format
from fmtsim.gemm.units.unit import get_unit
from fmtsim.lab.cli.main import BAD_INPUT


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


def test_a_device_is_timed_by_events_while_the_host_is_ahead(monkeypatch):
    order, clock = [], iter([99, 99, 2, 40, 6, 60, 4, 50])  # milliseconds of two actions in four rounds

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("event")

        def synchronize(self):
            order.append("wait")

        def elapsed_time(self, stop):
            return next(clock)

    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: order.append("idle"))
    monkeypatch.setattr(timing.torch.cuda, "_sleep", order.append)
    actions = (lambda: order.append("a"), lambda: order.append("b"))
    assert timing.in_turns_on_device(actions, 3, ahead=7) == (0.004, 0.05)
    assert order == [step for _ in range(4) for name in "ab" for step in ("idle", 7, "event", name, "event", "wait")]


def test_several_threads_take_an_untimed_turn_first():
    order, seconds = [], itertools.count()
    assert in_turns((lambda: order.append("a"),), 1, 2, lambda: order.append("t") or next(seconds)) == (1.0,)
    assert order == ["a", "t", "a", "t"] * 2


def test_figures_have_names_limits_and_processes_of_their_own(monkeypatch):
    asked = []

    def process(code, **environment):
        asked.append((code, *environment.values()))
        return float(len(asked))

    monkeypatch.setattr(overheads, "in_new_process", process)
    assert overheads.import_time(repeats=3) == Overhead(
        name="import fmtsim after torch", value=2.0, limit=0.15, unit="s"
    )
    for work, what, names in (("casts", "first call", overheads.FIRST_CASTS),
                              ("products", "first product", overheads.FIRST_PRODUCTS)):  # fmt: skip
        del asked[:]
        found = overheads.first_calls(work, repeats=3)
        labels = [f"{what}, new {where}: {name}" for name in names for where in ("machine", "process")]
        assert [f.name for f in found] == labels and [f.limit for f in found] == [3.0, 0.6] * len(names)
        assert [f.value for f in found[:4]] == [1.0, 3.0, 5.0, 7.0] and {f.unit for f in found} == {"s"}
        assert len(asked) == 4 * len(names) and len({folder for _, folder in asked}) == len(names)
        assert all(("fmtsim.quantize" in code) == (work == "casts") for code, _ in asked)
    for work, what, limit, names in (("casts", " with out=", 1.0, overheads.MEMORY_CASTS),
                                     ("products", ", side 64", 64.0, overheads.MEMORY_PRODUCTS)):  # fmt: skip
        del asked[:]
        found = overheads.extra_memory(work, side=64)
        assert [f.name for f in found] == [f"extra memory{what}: {name}" for name in names]
        assert {(f.limit, f.unit) for f in found} == {(limit, "MB")} and all("64" in code for code, *_ in asked)


@pytest.mark.slow
def test_first_calls_and_memory_are_measured():
    assert all(overhead.value > 0 for overhead in overheads.first_calls("casts", repeats=1))
    assert all(overhead.value is None or overhead.value >= 0 for overhead in overheads.extra_memory("casts", side=256))


SMALL = (16, 24, 128)
# One of each way to make operands; the others take long to compile.
QUICK = ("fp8 Hopper", "tf32 Hopper", "nvf4", "mxf8f6f4", "int8", "fp8 Hopper, 1x128 scales")


def result(case=CASES[0], seconds=None, sgemm=None, plain=None):
    return Result(
        case=case, shape=SMALL, seconds=seconds or {1: 4.0, 2: 2.0}, base_seconds=sgemm or {1: 2.0, 2: 1.0},
        plain_seconds=plain or {},
    )  # fmt: skip


def test_names_are_unique_and_targets_are_shares():
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        if isinstance(case.unit, str):
            get_unit(case.unit)
        assert case.stretch is None or 0 < case.target < case.stretch < 1
        assert case.plain is None or case_named(case.plain).plain is None


@pytest.mark.parametrize(
    "case", [case if case.name in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    ids=lambda case: case.name,
)  # fmt: skip
def test_a_case_multiplies_operands_of_its_format(case):
    product = product_of(case, SMALL)
    out = product()
    assert (
        out.shape[-2:] == SMALL[:2]
        and out.shape[:-2] == ((256,) if case.side else ())
        and out.dtype == (case.out_dtype or torch.float32)
    )
    assert out.float().isfinite().all() and out.float().abs().max() > 1  # no zeros, which kernels may skip
    assert torch.equal(product().float(), out.float())  # a seed repeats its draws


def test_shrunk_shapes_keep_whole_blocks():
    case = Case(name="x", operands="bf16", unit="exact", shrink=4)
    assert case.shape((508, 520, 100)) == (64, 128, 64)
    assert CASES[0].shape((3, 5, 7)) == (3, 5, 7)


@pytest.mark.parametrize("name", ["fp8 Hopper", "fp8 Hopper, split K in 4"])
def test_a_product_is_measured_for_each_thread_count(name):
    before = torch.get_num_threads(), pool.get_num_threads()
    found = measure(case_named(name), shape=SMALL, threads=(1, 2), repeats=2)
    assert (torch.get_num_threads(), pool.get_num_threads()) == before
    record = found.to_dict()
    assert set(record["threads"]) == {"1", "2"}
    assert record["threads"]["1"]["ratio_to_sgemm"] == found.base_seconds[1] / found.seconds[1]
    assert record["threads"]["2"]["speedup"] == found.seconds[1] / found.seconds[2]
    assert (record["extra_cost"] is None) == (name == "fp8 Hopper")


def test_the_float32_product_is_repeated_but_counted_once(monkeypatch):
    calls = []

    def turns(actions, repeats, threads, clock=None):
        for action in actions:
            action()
        return (1.0, 3.0) if repeats == 1 else (6.0, 4.0)  # the case takes three times as long

    monkeypatch.setattr(gemm, "in_turns", turns)
    monkeypatch.setattr(gemm, "sgemm_of", lambda *shape: lambda: calls.append("sgemm"))
    found = measure(CASES[0], shape=SMALL, threads=(1,), repeats=5)
    assert len(calls) == 1 + 3
    assert found.base_seconds == {1: 2.0} and found.seconds == {1: 4.0}


def test_actions_take_turns_and_the_first_round_is_not_counted():
    order, clock = [], iter([0.0, 9.0, 0.0, 9.0, 0.0, 1.0, 0.0, 5.0, 0.0, 3.0, 0.0, 7.0])
    actions = (lambda: order.append("a"), lambda: order.append("b"))
    assert in_turns(actions, 2, 1, lambda: next(clock)) == (2.0, 6.0)
    assert order == ["a", "b"] * 3


@pytest.mark.parametrize(
    ("case", "plain", "met", "stretched"),
    [
        (Case(name="x", operands="bf16", unit="exact", target=0.5, stretch=0.6), None, True, False),
        (Case(name="x", operands="bf16", unit="exact", target=0.51, stretch=0.6), None, False, False),
        (Case(name="x", operands="bf16", unit="exact", target=0.1, stretch=0.5), None, True, True),
        (Case(name="x", operands="bf16", unit="exact"), None, None, None),
        (Case(name="x", operands="bf16", unit="exact", plain="y", extra=0.25), {1: 3.2}, True, None),
        (Case(name="x", operands="bf16", unit="exact", plain="y", extra=0.24), {1: 3.2}, False, None),
        (Case(name="x", operands="bf16", unit="exact", plain="y"), {1: 3.2}, None, None),
    ],
)
def test_targets_are_lower_limits_and_extra_cost_an_upper_one(case, plain, met, stretched):
    found = result(case, plain=plain)
    assert (found.met, found.stretched) == (met, stretched)
    assert found.extra is None if plain is None else found.extra == pytest.approx(0.25)


def test_overheads_name_cases():
    for name in (*overheads.FIRST_PRODUCTS, *overheads.MEMORY_PRODUCTS):
        assert case_named(name).shrink == 1


def test_memory_is_counted_in_a_new_process(monkeypatch):
    monkeypatch.setattr(overheads, "MEMORY_PRODUCTS", ("bf16 Hopper",))
    (found,) = overheads.extra_memory("products", side=64)
    assert found.unit == "MB" and found.limit == 64
    assert found.value is None or -1 < found.value < 64


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_memory_that_a_product_keeps_is_seen(monkeypatch):
    planted = overheads._PRODUCT_MEMORY.replace("out = product()", "held = torch.ones(32 << 20); out = product()")
    assert planted != overheads._PRODUCT_MEMORY
    monkeypatch.setattr(overheads, "_PRODUCT_MEMORY", planted)
    monkeypatch.setattr(overheads, "MEMORY_PRODUCTS", ("bf16 Hopper",))
    (found,) = overheads.extra_memory("products", side=64)
    assert found.value is None or (found.value > 120 and not found.met)


@pytest.mark.slow
def test_first_calls_are_measured():
    found = overheads.first_calls("products", repeats=1)
    assert len(found) == 2 * len(overheads.FIRST_PRODUCTS)
    assert all(overhead.value > 0 for overhead in found)


def test_a_process_that_fails_is_no_figure():
    with pytest.raises(subprocess.CalledProcessError):
        overheads.or_none(lambda: overheads.in_new_process("raise SystemExit(3)"))


WORDS = ("gemm", "--only", "fp8 Hopper*", "--shape", "16", "16", "128", "--repeats", "1", "--kernels-only")


def test_json(capsys):
    assert main([*WORDS, "--threads", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    names = [case.name for case in gemm.CASES if case.name.startswith("fp8 Hopper")]
    assert [product["case"] for product in record["products"]] == names
    assert record["products"][0]["shape"] == [16, 16, 128]
    assert record["overheads"] == []
    assert set(record["machine"]) == {
        "processor",
        "instructions",
        "caches",
        "torch",
        "numba",
        "command",
        "date",
        "commit",
    }


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux names instructions and caches")
def test_a_record_names_vector_instructions_and_caches():
    from numba.core.registry import cpu_target

    machine, features = processor(), cpu_target.target_context.codegen().magic_tuple()[2]
    assert ("avx512f" in machine["instructions"]) == ("+avx512f" in features)
    assert not {"smep", "sse2", "aes"} & set(machine["instructions"])
    assert all(size.rstrip("KM").isdecimal() for size in machine["caches"].values())


def test_text(capsys):
    assert main([*WORDS]) == 0
    text = capsys.readouterr().out
    for word in ("of sgemm", "target", "stretch", "extra cost", "2 threads", "16x16x128", "fp8 Hopper, split K in 4"):
        assert word in text


def measured(name, seconds, plain=None):
    return Result(
        case=case_named(name), shape=(512, 512, 2048), seconds={1: seconds}, base_seconds={1: 0.01},
        plain_seconds={} if plain is None else {1: plain},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("result", "cells"),
    [
        (measured("fp8 Hopper", 0.02), ["20.0", "26.84", "0.50", "0.35", "0.70", "-", "-", "pass"]),
        (measured("fp8 Hopper", 0.04), ["40.0", "13.42", "0.25", "0.35", "0.70", "-", "-", "MISS"]),
        (measured("fp8 Hopper", 0.0125), ["12.5", "42.95", "0.80", "0.35", "0.70", "-", "-", "stretch"]),
        (measured("fp8 Hopper, split K in 4", 0.04, 0.032), ["40.0", "13.42", "0.25", "-", "-", "+25", "%", "+10", "%",
                                                             "MISS"]),
        (measured("int8", 0.2), ["200.0", "2.68", "0.05", "-", "-", "-", "-", "-"]),
    ],
)  # fmt: skip
def test_a_row_shows_the_share_the_target_and_the_verdict(result, cells):
    row = product_table([result]).splitlines()[-1]
    assert row.split("512x512x2048")[1].split() == cells


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "nothing"), "--only 'nothing' matches no case; the cases are 'fp8 Hopper', 'fp8 Blackwell'"),
        (("--shape", "0", "1", "1"), "--shape 0 is not possible; choose 1 or more"),
        (("--threads", "2", "0"), "--threads 0 is not possible; choose 1 or more"),
        (("--repeats", "0"), "--repeats 0 is not possible; choose 1 or more"),
    ],
)
def test_what_is_refused(words, message, capsys):
    assert main(["gemm", *words]) == BAD_INPUT
    assert message in capsys.readouterr().err


def test_simulations_are_measured_against_plain_torch(monkeypatch, capsys):
    pytest.importorskip("transformers")
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 50}
    case = simulated.Case(
        name="small", config="GPT2", sizes=sizes | {"bos_token_id": 0, "eos_token_id": 0}, batch=(1, 8), target=1,
        backward=True,
    )  # fmt: skip
    monkeypatch.setattr(simulated, "CASES", (case,))
    assert main(["simulate", "--repeats", "1", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["case"] == "small"
    assert result["ratio"] == pytest.approx(result["seconds"] / result["plain_seconds"])
    (figure,) = figures({"results": [result]})
    assert figure == Figure("small", "", result["ratio"], True)
    assert main(["simulate", "--repeats", "1"]) == 0
    assert "plain_seconds" in capsys.readouterr().out


def test_variants_are_measured_beside_what_replaces_them(monkeypatch, capsys):
    used, engine = [], variants.torch_engine
    monkeypatch.setattr(engine, "encode", lambda *x, encode=engine.encode, **y: used.append(1) or encode(*x, **y))
    kernels, operations = variants._cast("encode", "q4_0")
    kernels()
    assert not used
    operations()
    assert used
    assert main(["variants", "--only", "step fp32", "--repeats", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    (result,) = record["results"]
    assert result["ratio"] == pytest.approx(result["seconds"] / result["plain_seconds"])
    assert {"date", "commit", "command"} <= record["machine"].keys()
