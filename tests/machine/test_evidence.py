# SPDX-License-Identifier: Apache-2.0
"""What stands behind the operators of ``simulate``: each that counts as recorded is called by a recorded case."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import fmtsim
from fmtsim.machine import operators
from tests.machine.cases import all_cases

DATA = Path(__file__).parent / "data"
RECORDED = json.loads((DATA / "h200.json").read_text("utf-8"))["cases"]
ROWS = (DATA / "h200_operators.csv").read_text("utf-8").splitlines()[1:]
CASES = dict(row.split(",", 1) for row in ROWS)  # operator to a recorded case that calls it
SAMPLE = 15  # operators that lie this many apart are looked for in their cases by default
KERNELS = {  # operators that launch the kernel of another one
    "selu": "elu", "selu_": "elu", "rand_like": "rand", "randn_like": "randn",
    "randint_like": "randint", "random_": "randint",
    "_scaled_dot_product_flash_attention": "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_backward": "_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip


def name_of(packet) -> str:  # type: ignore[no-untyped-def]
    return str(packet).removeprefix("aten.")


def kernel_of(name: str) -> str:
    """Return the operator that was recorded for one: itself, the one that it writes in place, or its kernel's."""
    return name if name in CASES else KERNELS.get(name) or name.removesuffix("_")


def without_case() -> list[str]:
    names = [name_of(packet) for packet, basis in operators.EVIDENCE.items() if basis == "recorded"]
    return [name for name in names if CASES.get(kernel_of(name)) not in RECORDED]


def test_every_operator_has_one_evidence():
    tables = operators.SAME, operators.PRODUCTS, operators.DRAWS, operators.KNOWN
    assert set(operators.EVIDENCE) == {packet for table in tables for packet in table}


def test_recorded_operators_have_recorded_cases(monkeypatch):
    assert without_case() == []
    monkeypatch.setitem(operators.EVIDENCE, torch.ops.aten.view, "recorded")
    assert without_case() == ["view"]


@pytest.mark.parametrize("step", [SAMPLE, pytest.param(1, marks=pytest.mark.slow)])
def test_the_cases_call_their_operators(step):
    wanted: dict[str, set[str]] = {}
    for name, case in list(CASES.items())[::step]:
        wanted.setdefault(case, set()).add(name)
    missing = set()
    for case in all_cases():
        if case.name in wanted:
            with fmtsim.simulate(strict=True) as run:
                case.call("cpu")
            missing |= wanted.pop(case.name) - set(run.exact)
    assert not wanted and not missing


def test_the_summary_and_strict_name_what_is_known_from_source_alone():
    x, target = torch.zeros(1, 2, 64, 64), torch.ones(1, 64, 64, dtype=torch.int64)
    q, k = (torch.ones(1, 1, n, 12).bfloat16() for n in (8, 9))
    with fmtsim.simulate(strict=True) as run:  # accepts it
        functional.nll_loss(x, target)
        functional.scaled_dot_product_attention(q, k, k)
        torch.ones(2).tanh().t()
    assert sorted(run.by_source) == [
        "_scaled_dot_product_flash_attention_for_cpu: FlashAttention-2 of more keys than queries",
        "nll_loss2d_forward: nll_loss2d of more than 1,024 pixels, or with class weights",
    ]
    assert "by source, not recorded (2)\n  1  " in run.summary and not run.guess
    assert run.summary.splitlines()[-1].startswith("exact: tanh 1, ") and "reasoned (views" in run.summary
