# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a GPU: an arithmetic and an accumulation order of the test's choice, computed by fmtsim itself."""

from collections.abc import Callable

import torch

from fmtsim.lab.explain.samples import Data
from fmtsim.spec.call import GemmCall
from fmtsim.spec.datapath import Arithmetic
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import DeviceError
from tools.calibrate.campaign import multiply
from tools.calibrate.gpu import NO_EXTRAS

CHAIN = GemmPlan()


class FakeGPU:
    """Answer calls with a unit and a plan; ``tiles`` many results claim to be summed in another order."""

    name = "fake"
    library = "no GPU, a test"
    device = torch.device("cpu")

    def __init__(
        self, arithmetic: Arithmetic | Callable, plan: GemmPlan | Callable = CHAIN, tiles: int = 0, memory: int = 0
    ) -> None:
        self.arithmetic, self.plan, self.tiles, self.memory, self.asked = arithmetic, plan, tiles, memory, 0

    def ask(self, call: GemmCall, a, b, extras=NO_EXTRAS):
        self.asked += 1
        assert a.shape[-1] == b.shape[-1] == call.k and len(a) <= call.m and len(b) <= call.n
        if self.memory and call.m * call.n > self.memory:
            raise DeviceError(f"{self.name} has no memory left for M={call.m}")
        arithmetic = self.arithmetic if isinstance(self.arithmetic, Arithmetic) else self.arithmetic(call)
        plan = self.plan if isinstance(self.plan, GemmPlan) else self.plan(call)
        return multiply(call, Data(a, b, extras), arithmetic, plan)

    def differing(self, call: GemmCall, a, b, extras=NO_EXTRAS) -> int:
        return self.tiles


def mm(m, n, k, fmt="bf16", out=None, **facts):
    out = out or {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}[fmt]
    return GemmCall(operation="mm", m=m, n=n, k=k, a=fmt, b=fmt, out=out, **facts)


def fp8(m, n, k, fast=True, out=torch.bfloat16, scaling="tensor"):
    return GemmCall(
        operation="scaled_mm", m=m, n=n, k=k, a="e4m3", b="e4m3", out=out, fast_accum=fast, scaling=scaling
    )  # fmt: skip
