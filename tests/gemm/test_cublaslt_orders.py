# SPDX-License-Identifier: Apache-2.0
"""Orders of cuBLASLt's kernels without matrix units, against results that were computed from their description."""

import json

import pytest
import torch

import fmtsim
from fmtsim.spec.plan import GemmPlan
from tests.support.recorded import SHARED

CASES = SHARED / "spec" / "cublas_orders_cases.json"
SIMT = ("gemmsn", "gemv13", "gemv_cslice", "gemv14")


def value(k: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the operands' numbers: a hash of k, with a sign, 11 bits and one of eight exponents."""
    z = (k * 0x9E3779B9 + seed * 0x85EBCA6B) & 0xFFFFFFFF
    z = ((z ^ z >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    z = ((z ^ z >> 15) * 0x846CA68B) & 0xFFFFFFFF
    z = z ^ z >> 16
    return torch.ldexp(((z & 2047) - 1024).double(), (z >> 11) % 8 - 14)


def plan_of(case: dict) -> GemmPlan:
    """Return the plan of a kernel of threads: what each algorithm, option and number of parts does with K."""
    k, parts = case["K"], case["config"]["splitk_num"]
    if case["mode"] == "gemmsn":  # algorithms 11 and 16: S threads, whose sums begin anew every B products
        threads, block = case["S_B"]
        own = -(-k // threads)
        return GemmPlan(k_tile=own, part_k=own, split=-(-k // own), promote_every=block or None)
    if case["mode"] == "gemv_cslice":  # algorithm 13, option 5: neighbours of K in one lane
        lanes, block = case["W_C"]
        return GemmPlan(k_tile=lanes * -(-k // lanes), lanes=lanes, promote_every=block)
    if case["mode"] == "gemv14":  # a dot product: blocks take tiles in turn, and a second kernel adds them
        blocks, chains = case["blocks_V"]
        return GemmPlan(
            k_tile=128 * chains, split=blocks, owner="interleaved", lanes=128 * chains,
            lane_reduce="pair_tree" if chains == 2 else "tree", reduce="folded",
        )  # fmt: skip
    given, lanes, chunk, tree = case["V_W_CC_butterfly"]
    part = -(-k // parts)
    own = given if given > 0 else min(-given, -(-part // lanes))
    return GemmPlan(
        k_tile=own * lanes, part_k=part, split=-(-k // part), lanes=lanes,
        lane_reduce="tree" if tree and lanes > 1 else "serial", promote_every=chunk * own or None,
    )  # fmt: skip


@pytest.mark.skipif(not CASES.is_file(), reason="no calls of cuBLASLt beside the project")
def test_kernels_without_matrix_units():
    cases = [case for case in json.loads(CASES.read_text())["cases"] if case.get("mode") in SIMT]
    assert len(cases) == 35
    for case in cases:
        k = torch.arange(case["K"])
        a, b = (value(k, seed).half() for seed in (1, 2))
        for dtype, bits in ((torch.float32, case["fp32_bits"]), (torch.float16, case["fp16_bits"])):
            y = fmtsim.mm(a[None], b[:, None], target="fp32_fma", plan=plan_of(case), out_dtype=dtype)
            found = y.view(torch.int32 if dtype == torch.float32 else torch.int16).item()
            assert found & (2 ** (8 * dtype.itemsize) - 1) == int(bits, 16), (case["id"], case["note"], dtype)
