# SPDX-License-Identifier: Apache-2.0
"""Products of random sizes against a GPU, whose place the emulation takes; and that a planted error is found."""

import warnings

import pytest
import torch

from fmtsim.support.errors import PlanUnknownWarning
from tools.fuzz import products

LARGEST = 1 << 22


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(products, "LARGEST", LARGEST)
    monkeypatch.setattr(products, "WHOLE", LARGEST >> 4)
    warnings.simplefilter("ignore", PlanUnknownWarning)


def emulated(verb, *operands, **options):
    return verb(*operands, native=False, **options)


def test_a_gpu_that_does_what_is_said_differs_nowhere():
    """All kinds of calls, whole and sampled: rows and columns have the bits that the whole product has there."""
    report = products.run("h200", 120, 1, 3, device="cpu", multiply=emulated)
    assert not report.different and {form for form, _ in report.ends} == set(products.FORMS)
    assert report.ends.total() == 120 and "different, known" in str(report)


@pytest.mark.parametrize("largest", [LARGEST, LARGEST >> 8], ids=["sampled", "whole"])
def test_a_last_bit_of_one_column_in_16_is_found(monkeypatch, largest):
    monkeypatch.setattr(products, "LARGEST", largest)

    def wrong(verb, *operands, **options):
        y = emulated(verb, *operands, **options)
        y.view(torch.int16 if y.itemsize == 2 else torch.int32)[:, ::16] ^= 1
        return y

    report = products.run("h200", 12, 1, 5, forms=["bfloat16", "float8"], device="cpu", multiply=wrong)
    found = report.ends.total() - sum(count for (_, end), count in report.ends.items() if end.startswith("equal"))
    assert found > 6 and any("first" in line and "seed" in line for line in report.different)


def test_a_call_that_the_gpu_refuses_is_told():
    def refuses(verb, *operands, **options):
        raise RuntimeError("out of order")

    report = products.run("h200", 3, 1, 0, device="cpu", multiply=refuses)
    assert len(report.different) == 3 and all("out of order" in line for line in report.different)
